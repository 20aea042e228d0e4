"""Plug point for eviction: a policy ranks the tree's nodes, a queue finds the evictable leaf of lowest rank.

The tree tells the policy what happens to nodes; the policy writes `Node.rank` and nothing else of a node.
Every notification costs O(1) or O(log nodes) a node, amortised; none scans.

Owner: the scheduler half. Thread: the scheduler thread only. Pure: no I/O, no bytes of pages.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

from vllm_hicache.errors import ConfigError, InvariantError
from vllm_hicache.names import PageKey


@dataclass(slots=True, eq=False)
class Node:
    """A run of consecutive pages of one chain: what the tree stores and a policy ranks.

    `keys`, `slots`, `stored` (0/1) and `hits` (saturates at 255) have one item a page. `leases` end at this
    node's last page; `pins` is `leases` plus the number of pinned children: 0 where no lease is on or below.
    """

    parent: Node | None
    keys: list[PageKey]
    slots: array[int]
    stored: bytearray
    hits: bytearray
    rotation: int
    children: dict[PageKey, Node] = field(default_factory=dict)
    leases: int = 0
    pins: int = 0
    rank: int = 0
    ticket: int = 0

    @property
    def num_pages(self) -> int:
        """Pages in this run."""
        return len(self.keys)

    @property
    def is_evictable(self) -> bool:
        """Whether the run's last page may go now: a leaf, held by no lease, not the root."""
        return not self.pins and not self.children and self.parent is not None

    @property
    def is_tail_stored(self) -> bool:
        """Whether the run's last page is known to be in the store."""
        return self.stored[-1] != 0

    def num_common(self, keys: Sequence[PageKey], pos: int, limit: int) -> int:
        """How many leading keys of this run are `keys[pos:limit]`; the first one is known to be.

        Chained digests agree up to one point and nowhere after it, so the point is found by bisection.
        """
        low, high = 1, min(len(self.keys), limit - pos)
        if self.keys[high - 1] == keys[pos + high - 1]:
            return high
        while low < high:
            middle = (low + high + 1) // 2
            if self.keys[middle - 1] == keys[pos + middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def last_pages(self, num_pages: int, unstored_only: bool) -> list[int]:
        """Offsets (ascending) of up to `num_pages` pages from the end of the run."""
        if not unstored_only:
            return list(range(max(self.num_pages - num_pages, 0), self.num_pages))
        offsets: list[int] = []
        offset = self.stored.rfind(0)
        while offset >= 0 and len(offsets) < num_pages:
            offsets.append(offset)
            offset = self.stored.rfind(0, 0, offset)
        return offsets[::-1]

    def pin(self) -> int:
        """One more lease or pinned child. Returns the pages, here and above, that became pinned."""
        node: Node | None = self
        num_pages = 0
        while node is not None:
            node.pins += 1
            if node.pins > 1:
                break
            num_pages += node.num_pages
            node = node.parent
        return num_pages

    def unpin(self) -> int:
        """One lease or pinned child less. Returns the pages, here and above, that stopped being pinned."""
        node: Node | None = self
        num_pages = 0
        while node is not None:
            node.pins -= 1
            if node.pins:
                break
            num_pages += node.num_pages
            node = node.parent
        return num_pages

    def path_up(self) -> list[Node]:
        """This node and its ancestors, without the root, which holds no pages."""
        path: list[Node] = []
        node = self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path

    def subtree(self) -> Iterator[Node]:
        """This node and everything below it, each node before its descendants."""
        todo = [self]
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.children.values())

    def check(self) -> None:
        """InvariantError unless links, lengths, rotation and pins agree with the children."""
        lengths = {len(self.keys), len(self.slots), len(self.stored), len(self.hits)}
        num_pinned = sum(1 for child in self.children.values() if child.pins)
        strays = [
            key
            for key, child in self.children.items()
            if child.parent is not self
            or child.keys[:1] != [key]
            or (self.parent is not None and child.rotation != self.rotation)
        ]
        if len(lengths) != 1 or strays or self.leases < 0 or self.pins != self.leases + num_pinned:
            raise InvariantError(
                f"node of {sorted(lengths)} pages: {len(strays)} of {len(self.children)} children do not "
                f"belong to it, {self.pins} pins, {self.leases} leases + {num_pinned} pinned children"
            )


_Heap = list[tuple[int, int, Node]]


class LeafQueue:
    """Evictable leaves by rank: one lazy heap for leaves whose last page is stored, one for the others.

    A node has at most one live entry, the one that carries its ticket. Entries go stale without being
    searched for: when they surface, those of a node that was ranked up are moved and those of a node that
    stopped being evictable are dropped. Both heaps are rebuilt once more than half of their entries are dead.
    """

    _SLACK = 64

    def __init__(self) -> None:
        self._stored: _Heap = []
        self._unstored: _Heap = []
        self._last_ticket = 0
        self._num_live = 0

    @property
    def num_entries(self) -> int:
        """Entries held, stale ones included: at most about twice the evictable leaves."""
        return len(self._stored) + len(self._unstored)

    def offer(self, node: Node) -> None:
        """Queue `node` if it is evictable and not queued yet."""
        if node.ticket or not node.is_evictable:
            return
        # What a rebuild costs was paid by as many pushes since the one before.
        if self.num_entries > self._SLACK + 2 * self._num_live:
            self._rebuild()
        self._last_ticket += 1
        node.ticket = self._last_ticket
        self._num_live += 1
        heap = self._stored if node.is_tail_stored else self._unstored
        heappush(heap, (node.rank, node.ticket, node))

    def forget(self, node: Node) -> None:
        """Take `node` out, if it is queued."""
        if node.ticket:
            node.ticket = 0
            self._num_live -= 1

    def requeue(self, node: Node) -> None:
        """Queue `node` anew: its rank fell or its last page changed."""
        self.forget(node)
        self.offer(node)

    def pop(self, stored: bool = True, unstored: bool = True) -> Node | None:
        """Take out the evictable leaf of lowest rank whose last page is `stored`, `unstored` or either."""
        heaps = [heap for heap, wanted in ((self._stored, stored), (self._unstored, unstored)) if wanted]
        heaps = [heap for heap in heaps if self._settle(heap)]
        if not heaps:
            return None
        node = heappop(min(heaps, key=lambda heap: heap[0][:2]))[2]
        self.forget(node)
        return node

    def check(self, nodes: Iterable[Node]) -> None:
        """InvariantError unless each evictable leaf of `nodes` has a live entry that will surface in time."""
        live = [(heap is self._stored, entry) for heap in (self._stored, self._unstored) for entry in heap]
        found = {e[2].ticket: (kind, e[0]) for kind, e in live if e[1] == e[2].ticket}
        for node in nodes:
            kind, rank = found.get(node.ticket, (None, 0))
            if node.is_evictable and (kind != node.is_tail_stored or rank > node.rank):
                raise InvariantError(
                    f"leaf of {node.num_pages} pages, rank {node.rank}, ticket {node.ticket} is queued as "
                    f"stored={kind} with rank {rank} among {len(found)} live entries"
                )

    def _settle(self, heap: _Heap) -> bool:
        """Bring a valid entry to the top of `heap`; False when it holds none."""
        while heap:
            rank, ticket, node = heap[0]
            if ticket != node.ticket:
                heappop(heap)
            elif not node.is_evictable:
                heappop(heap)
                self.forget(node)
            elif rank != node.rank:  # ranked up since: it waits where it belongs now
                heapreplace(heap, (node.rank, ticket, node))
            else:
                return True
        return False

    def _rebuild(self) -> None:
        for heap in (self._stored, self._unstored):
            heap[:] = [entry for entry in heap if entry[1] == entry[2].ticket]
            heapify(heap)


class EvictionPolicy(ABC):
    """Ranks nodes by integers; the evictable leaf of lowest rank goes first.

    A policy may raise a rank silently; after lowering one it must call `leaves.requeue`. A rank at or below
    `now` says that pages seen for the first time may share the node.
    """

    def __init__(self) -> None:
        self.leaves = LeafQueue()
        self.now = 0

    @abstractmethod
    def added(self, node: Node, num_pages: int) -> None:
        """`num_pages` pages came: `node` is new, or they were appended to it (see `may_grow`)."""

    @abstractmethod
    def touched(self, nodes: Sequence[Node]) -> None:
        """One request hit all pages of `nodes`, a path from its deepest node upwards."""

    @abstractmethod
    def settle(self) -> None:
        """Pages are about to be chosen for eviction: the last call to change ranks."""

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` was cut from the front of `lower` and shares its rank; pages are already divided."""
        upper.rank = lower.rank

    def joining(self, upper: Node, lower: Node) -> None:
        """`lower` is about to take over the pages of `upper`, its parent, and keeps its own rank."""
        self.leaves.forget(upper)

    def leaving(self, node: Node, num_pages: int) -> None:
        """`num_pages` pages are about to leave from the end of `node`; with the last one goes the node."""
        if num_pages == node.num_pages:
            self.leaves.forget(node)

    def may_grow(self, leaf: Node) -> bool:
        """Whether pages seen for the first time may join `leaf` instead of becoming its child."""
        return leaf.rank <= self.now

    def may_join(self, upper: Node, lower: Node) -> bool:
        """Whether `upper`, whose only child is `lower`, would leave directly after it anyway."""
        return upper.rank <= lower.rank

    def _tick(self) -> int:
        self.now += 1
        return self.now


class LRU(EvictionPolicy):
    """Least recently used first. Ranks are times, one tick an operation."""

    def added(self, node: Node, num_pages: int) -> None:
        """See base."""
        node.rank = self._tick()

    def touched(self, nodes: Sequence[Node]) -> None:
        """See base."""
        now = self._tick()
        for node in nodes:
            node.rank = now

    def settle(self) -> None:
        """See base: nothing is pending."""


class SLRU(EvictionPolicy):
    """Segmented LRU, resistant to scans: pages seen once leave before pages that were hit again.

    When pages have to leave, the protected segment is cut to `protected_share` of the most pages the tree
    ever held: its least recently used nodes fall back among the pages seen once, as the newest of them.
    Ancestors are hit with their descendants and fall back after them, so joining nodes are of one segment.
    """

    _PROTECTED = 1 << 62

    def __init__(self, protected_share: float = 0.8) -> None:
        """ConfigError unless 0 < `protected_share` < 1."""
        super().__init__()
        if not 0 < protected_share < 1:
            raise ConfigError(f"protected share {protected_share} is outside (0, 1): the default is 0.8")
        self._share = protected_share
        self._protected: OrderedDict[Node, None] = OrderedDict()
        self._num_protected = 0
        self._num_pages = 0
        self._peak_pages = 0

    @property
    def num_protected(self) -> int:
        """Pages in the protected segment."""
        return self._num_protected

    def added(self, node: Node, num_pages: int) -> None:
        """See base."""
        node.rank = self._tick()
        self._num_pages += num_pages
        self._peak_pages = max(self._peak_pages, self._num_pages)

    def touched(self, nodes: Sequence[Node]) -> None:
        """See base."""
        # `nodes` come deepest first, so descendants fall back before their ancestors.
        rank = self._PROTECTED + self._tick()
        for node in nodes:
            node.rank = rank
            if node in self._protected:
                self._protected.move_to_end(node)
            else:
                self._protected[node] = None
                self._num_protected += node.num_pages

    def settle(self) -> None:
        """See base: what exceeds the protected share falls back."""
        while self._num_protected > self._share * self._peak_pages:
            node, _ = self._protected.popitem(last=False)
            self._num_protected -= node.num_pages
            node.rank = self._tick()
            self.leaves.requeue(node)

    def split(self, upper: Node, lower: Node) -> None:
        """See base."""
        super().split(upper, lower)
        # As the newest of its segment: the hit or the lease that cuts a run is about its front.
        if lower in self._protected:
            self._protected[upper] = None

    def joining(self, upper: Node, lower: Node) -> None:
        """See base."""
        super().joining(upper, lower)
        self._protected.pop(upper, None)

    def leaving(self, node: Node, num_pages: int) -> None:
        """See base."""
        super().leaving(node, num_pages)
        self._num_pages -= num_pages
        if node in self._protected:
            self._num_protected -= num_pages
            if num_pages == node.num_pages:
                del self._protected[node]


_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LRU, "slru": SLRU}


def make_policy(name: str) -> EvictionPolicy:
    """A fresh policy by name. ConfigError names the closest known policy and all of them."""
    maker = _POLICIES.get(name)
    if maker is None:
        closest = difflib.get_close_matches(name.lower(), _POLICIES, n=1, cutoff=0.0)[0]
        known = ", ".join(sorted(_POLICIES))
        raise ConfigError(f"unknown eviction policy {name!r}: did you mean {closest!r}? Known policies: {known}")
    return maker()
