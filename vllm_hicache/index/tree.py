"""Which pages the host pool holds: a path-compressed radix tree over page keys.

A page key is a chained digest, so equal keys mean equal whole prefixes. Children are found by the first key
of their run, and how far a run agrees with a request is a bisection: the caller guarantees that every `keys`
is one chain from its first page on.

Owner: the scheduler half. Thread: the scheduler thread only. Pure: no I/O, slots are numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from vllm_hicache.errors import InvariantError
from vllm_hicache.index.eviction import EvictionPolicy, Node
from vllm_hicache.index.slots import SlotPool
from vllm_hicache.names import PageKey, Slot

_ONE_MORE_HIT = bytes(min(hits + 1, 255) for hits in range(256))


@dataclass(frozen=True, slots=True)
class Match:
    """The leading pages of a chain that are present.

    `slots` and `stored` (0/1) have one item a page. `hits` is the least number of hits of a matched page,
    this one included if it touched, at most 255. `hits` and `rotation` are 0 when nothing matched.
    """

    num_pages: int
    slots: tuple[Slot, ...]
    stored: bytes
    hits: int
    rotation: int


class Evicted(NamedTuple):
    """A page that left the tree: its slot belongs to the caller now."""

    key: PageKey
    slot: Slot
    stored: bool


class Victims(NamedTuple):
    """Pages next in line: `positions` (ascending) in the chain `keys`, which ends with the last of them."""

    keys: list[PageKey]
    positions: list[int]


class _Place(NamedTuple):
    """Where a walk ended: `offset` pages into `node`, `num_pages` from the chain's start."""

    node: Node
    offset: int
    num_pages: int


class Lease:
    """A hold on the first `num_pages` pages of a chain, from `RadixTree.lease`; finished exactly once."""

    __slots__ = ("_node", "_tree", "num_pages")

    def __init__(self, tree: RadixTree, node: Node, num_pages: int) -> None:
        self._tree = tree
        self._node: Node | None = node
        self.num_pages = num_pages

    def release(self) -> None:
        """Let the pages go. InvariantError when called again."""
        if self._node is None:
            raise InvariantError(
                f"lease on {self.num_pages} pages released twice; {self._tree.num_leases} leases are open"
            )
        node, self._node = self._node, None
        self._tree._release(node)


# Why leases, splits and joins change neither what is held nor what leaves next:
#
#     root ── A[0..9] ─┬─ B[10..99]      a lease on 30 pages      root ── A ─┬─ b[10..29] ── B[30..99]
#                      └─ C[10..13]      splits B                            └─ C
#
#   split   A new object takes the front, the old one keeps the end. A lease ends at a node's last page, so an
#           earlier lease on all of B stays on the old object and covers the same pages.
#   pins    Leases here + pinned children. Pages leave from the end of leaves, so an ancestor of a present
#           page cannot go, whatever its pins are; they say which leaves may go and how many pages can.
#   join    upper and its only child become one node if no lease ends at upper and rank(upper) <= rank(child).
#           The child goes only when it is the lowest leaf, and then upper would be the next lowest. A hit on
#           the front alone splits them again.
#   growth  Appending to a leaf is the same join, done before the child exists.
class RadixTree:
    """Pages by prefix. The tree owns the slots it holds; slots that a call returns are the caller's again."""

    def __init__(self, policy: EvictionPolicy) -> None:
        """An empty tree; `policy` must be fresh and serve this tree only."""
        self._policy = policy
        self._leaves = policy.leaves
        self._root = Node(None, [], array("i"), bytearray(), bytearray(), 0)
        self._num_pages = 0
        self._num_pinned = 0
        self._num_leases = 0

    @property
    def num_pages(self) -> int:
        """Pages held."""
        return self._num_pages

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could give up now, stored or not."""
        return self._num_pages - self._num_pinned

    @property
    def num_leases(self) -> int:
        """Leases that are not released."""
        return self._num_leases

    @property
    def num_nodes(self) -> int:
        """Runs that hold the pages. Walks the whole tree: for tests and diagnosis."""
        return sum(1 for _ in self._root.subtree()) - 1

    def match(self, keys: Sequence[PageKey], touch: bool = True) -> Match:
        """The longest leading run of `keys` that is present.

        `touch` counts a hit of each matched page and refreshes them for the policy: once a request.
        """
        place = self._find(keys, len(keys))
        path = place.node.path_up()
        if touch and path:
            path[0] = self._cut(place.node, place.offset)
            for node in path:
                node.hits = node.hits.translate(_ONE_MORE_HIT)
            self._policy.touched(path)
        slots, stored, hits = array("i"), bytearray(), bytearray()
        for node in reversed(path):
            slots += node.slots
            stored += node.stored
            hits += node.hits
        n = place.num_pages
        found = cast("tuple[Slot, ...]", tuple(slots[:n]))
        return Match(n, found, bytes(stored[:n]), min(hits[:n], default=0), place.node.rotation)

    def lease(self, keys: Sequence[PageKey], num_pages: int) -> Lease:
        """Pin the first `num_pages` pages of `keys` until the lease is released.

        All-or-nothing: ValueError, and no change, when fewer are present.
        """
        _check_range(0, num_pages, len(keys))
        place = self._find(keys, num_pages)
        if place.num_pages < num_pages:
            raise ValueError(f"cannot lease {num_pages} pages, {place.num_pages} are present: match first")
        node = self._cut(place.node, place.offset)
        self._num_leases += 1
        node.leases += 1
        self._num_pinned += node.pin()
        return Lease(self, node, num_pages)

    def insert(
        self,
        keys: Sequence[PageKey],
        slots: Sequence[Slot],
        stored: bool | bytes | Sequence[bool],
        start: int,
        rotation: int | None = None,
    ) -> list[Slot]:
        """Attach pages `keys[start : start + len(slots)]`; `stored` is one flag a page, or one for all.

        All-or-nothing: ValueError, and no change, when a page of `keys[:start]` is absent or belongs to
        another rotation. `rotation` None is the prefix's, 0 for a new chain. Pages that are present stay as
        they are, flags included; the slots for them come back and are the caller's to give back.
        """
        stop = start + len(slots)
        _check_range(start, stop, len(keys))
        flags = bytearray([stored]) * len(slots) if isinstance(stored, bool) else bytearray(map(bool, stored))
        if len(flags) != len(slots):
            raise ValueError(f"{len(slots)} slots came with {len(flags)} stored flags: give one a slot")
        place = self._find(keys, stop)
        if place.num_pages < start:
            raise ValueError(f"cannot attach at page {start}, {place.num_pages} are present: match first")
        if rotation is None:
            rotation = place.node.rotation
        elif place.num_pages and rotation != place.node.rotation:
            raise ValueError(
                f"a chain of rotation {rotation} cannot join {place.num_pages} pages of rotation "
                f"{place.node.rotation}: take the prefix's rotation or None"
            )
        num_unused = place.num_pages - start
        added = array("i", slots[num_unused:])
        if added:
            node = self._cut(place.node, place.offset)
            self._attach(node, list(keys[place.num_pages : stop]), added, flags[num_unused:], rotation)
        return list(slots[:num_unused])

    def mark_stored(self, keys: Sequence[PageKey], start: int, stop: int) -> None:
        """Pages `keys[start:stop]` are in the store now. Pages that have gone are ignored."""
        self._set_stored(keys, start, stop, 1)

    def unmark_stored(self, keys: Sequence[PageKey], start: int, stop: int) -> None:
        """Pages `keys[start:stop]` are not in the store. Pages that have gone are ignored."""
        self._set_stored(keys, start, stop, 0)

    def remove_from(self, keys: Sequence[PageKey], index: int) -> list[Evicted]:
        """Drop page `keys[index]` and every page below it, on any chain; descendants come first.

        All-or-nothing: an empty list, and no change, when one of them is leased or the page is absent.
        """
        _check_range(index, index + 1, len(keys))
        place = self._find(keys, index + 1)
        if place.num_pages <= index or place.node.pins:
            return []
        if place.offset > 1:
            self._cut(place.node, place.offset - 1)
        parent = place.node.parent
        gone: list[Evicted] = []
        for node in reversed(list(place.node.subtree())):
            gone += self._shorten(node, node.num_pages)
        if parent is not None:
            self._leaves.offer(parent)
        return gone

    def evict(self, num_pages: int, must_be_stored: bool = False) -> list[Evicted]:
        """Drop up to `num_pages` unleased pages, descendants before ancestors, in the policy's order.

        Fewer come back when no more is evictable. `must_be_stored` keeps pages whose only copy this is, and
        so their ancestors.
        """
        gone: list[Evicted] = []
        self._policy.settle()
        while len(gone) < num_pages:
            leaf = self._leaves.pop(unstored=not must_be_stored)
            if leaf is None:
                break
            parent, num_allowed = leaf.parent, leaf.num_pages
            if must_be_stored:
                num_allowed -= leaf.stored.rfind(0) + 1
            gone += self._shorten(leaf, min(num_allowed, num_pages - len(gone)))
            self._leaves.offer(leaf if leaf.keys or parent is None else parent)
        return gone

    def victims(self, num_pages: int, unstored_only: bool = True) -> list[Victims]:
        """Up to `num_pages` pages next in line for eviction, leaf by leaf; changes nothing.

        `unstored_only` gives the unstored pages of leaves whose last page is unstored: what eviction of
        stored pages waits for. Ancestors of a leaf are not looked at until it is gone.
        """
        found: list[Victims] = []
        leaves: list[Node] = []
        while num_pages > 0:
            leaf = self._leaves.pop(stored=not unstored_only)
            if leaf is None:
                break
            leaves.append(leaf)
            keys = [key for node in reversed(leaf.path_up()) for key in node.keys]
            first = len(keys) - leaf.num_pages
            positions = [first + offset for offset in leaf.last_pages(num_pages, unstored_only)]
            num_pages -= len(positions)
            found.append(Victims(keys, positions))
        for leaf in leaves:
            self._leaves.offer(leaf)
        return found

    def clear(self) -> list[Slot]:
        """Drop everything and return all slots. InvariantError, and no change, while leases exist."""
        if self._num_leases:
            raise InvariantError(f"cannot clear {self._num_pages} pages under {self._num_leases} leases")
        nodes = list(self._root.subtree())[1:]
        return [page.slot for node in reversed(nodes) for page in self._shorten(node, node.num_pages)]

    def check(self, pool: SlotPool | None = None, num_reserved: int = 0) -> None:
        """Conservation: tree + reserved + free == all slots; every slot once; links, pins, leases consistent.

        `num_reserved` slots are taken from `pool` but not in the tree. InvariantError with the numbers.
        """
        nodes = list(self._root.subtree())
        for node in nodes:
            node.check()
        slots = cast("list[Slot]", [slot for node in nodes for slot in node.slots])
        num_pinned = sum(node.num_pages for node in nodes if node.pins)
        num_leases = sum(node.leases for node in nodes)
        booked = (self._num_pages, self._num_pages, self._num_pinned, self._num_leases)
        if (len(slots), len(set(slots)), num_pinned, num_leases) != booked:
            raise InvariantError(
                f"tree holds {len(slots)} pages in {len(set(slots))} distinct slots, {num_pinned} pinned by "
                f"{num_leases} leases; booked are {booked}"
            )
        self._leaves.check(nodes)
        if pool is None:
            return
        pool.check()
        num_both = sum(map(pool.is_free, slots))
        if num_both or len(slots) + num_reserved + pool.num_free != pool.num_slots:
            raise InvariantError(
                f"{len(slots)} slots in the tree ({num_both} of them also free) + {num_reserved} reserved + "
                f"{pool.num_free} free != {pool.num_slots}"
            )

    def _find(self, keys: Sequence[PageKey], limit: int) -> _Place:
        node, offset, pos = self._root, 0, 0
        while pos < limit and offset == node.num_pages:
            child = node.children.get(keys[pos])
            if child is None:
                break
            node = child
            offset = node.num_common(keys, pos, limit)
            pos += offset
        return _Place(node, offset, pos)

    def _cut(self, node: Node, end: int) -> Node:
        """The node that ends `end` pages into `node`: itself, or a new parent that takes over its front."""
        parent = node.parent
        if end == node.num_pages or parent is None:
            return node
        columns = node.keys[:end], node.slots[:end], node.stored[:end], node.hits[:end]
        upper = Node(parent, *columns, node.rotation)
        del node.keys[:end], node.slots[:end], node.stored[:end], node.hits[:end]
        upper.children[node.keys[0]] = node
        upper.pins = 1 if node.pins else 0
        node.parent = upper
        parent.children[upper.keys[0]] = upper
        self._policy.split(upper, node)
        return upper

    def _join(self, upper: Node) -> None:
        """Let the only child of `upper` take over its pages, where that changes no lease and no order."""
        if upper.parent is None or upper.leases or len(upper.children) != 1:
            return
        (lower,) = upper.children.values()
        if not self._policy.may_join(upper, lower):
            return
        self._policy.joining(upper, lower)
        upper.parent.children[upper.keys[0]] = lower
        lower.parent = upper.parent
        upper.keys += lower.keys
        upper.slots += lower.slots
        upper.stored += lower.stored
        upper.hits += lower.hits
        lower.keys, lower.slots, lower.stored, lower.hits = upper.keys, upper.slots, upper.stored, upper.hits

    def _attach(self, node: Node, keys: list[PageKey], slots: array[int], stored: bytearray, rotation: int) -> None:
        self._num_pages += len(keys)
        if node.is_evictable and self._policy.may_grow(node):
            node.keys += keys
            node.slots += slots
            node.stored += stored
            node.hits += bytes(len(keys))
        else:
            parent, node = node, Node(node, keys, slots, stored, bytearray(len(keys)), rotation)
            parent.children[keys[0]] = node
        self._policy.added(node, len(keys))
        self._leaves.requeue(node)

    def _shorten(self, node: Node, num_pages: int) -> list[Evicted]:
        """Take `num_pages` pages off the end of `node`, last one first; an empty node leaves its parent."""
        self._policy.leaving(node, num_pages)
        keep = node.num_pages - num_pages
        slots = cast("list[Slot]", node.slots[keep:])
        pages = list(map(Evicted, node.keys[keep:], slots, map(bool, node.stored[keep:])))
        if keep == 0 and node.parent is not None:
            del node.parent.children[node.keys[0]]
            node.parent = None
        del node.keys[keep:], node.slots[keep:], node.stored[keep:], node.hits[keep:]
        self._num_pages -= num_pages
        return pages[::-1]

    def _release(self, node: Node) -> None:
        self._num_leases -= 1
        node.leases -= 1
        self._num_pinned -= node.unpin()
        self._leaves.offer(node)
        parent = node.parent
        self._join(node)
        if parent is not None:
            self._join(parent)

    def _set_stored(self, keys: Sequence[PageKey], start: int, stop: int, flag: int) -> None:
        _check_range(start, stop, len(keys))
        place = self._find(keys, stop)
        node, first, stop = place.node, place.num_pages - place.offset, place.num_pages
        while node.parent is not None and first + node.num_pages > start:
            low, high = max(start - first, 0), min(stop - first, node.num_pages)
            was_stored = node.is_tail_stored
            node.stored[low:high] = bytes([flag]) * (high - low)
            if node.is_tail_stored != was_stored:
                self._leaves.requeue(node)
            node = node.parent
            first -= node.num_pages


def _check_range(start: int, stop: int, num_keys: int) -> None:
    if not 0 <= start <= stop <= num_keys:
        raise ValueError(f"pages {start}..{stop} are no range of a chain of {num_keys} keys")
