"""The host tier as the scheduler half sees it: one radix tree and the slots its pages lie in.

Pure; scheduler thread only. A slot is free, reserved by an operation, or in the tree. After a reset, pages that
operations still hold stay behind in a retired tree until they are let go, and are never matched again.

A group of N ranks keeps every page once, on its owner: slot s lies on owner `s % N`, page q of a chain of rotation b
on owner `(q + b) % N`. All chains that begin with the same page have one rotation for as long as the tree holds that
page or an operation has slots reserved for one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from vllm_hicache.errors import InvariantError
from vllm_hicache.index.eviction import make_policy
from vllm_hicache.index.slots import SlotPool
from vllm_hicache.index.tree import Evicted, Lease, Match, RadixTree, Victims
from vllm_hicache.names import PageKey, Slot
from vllm_hicache.ownership import Ownership


class HostTier:
    """Pages in host memory, one logical index for all ranks.

    Args:
        num_slots: capacity in pages, over all owners: their number times the minimum over ranks.
        policy: name of the eviction policy.
        keep_unstored: whether pages that are not in the store must not be evicted (write policy `back`).
        ownership: how the ranks of a group share out pages.

    Raises:
        ValueError: `num_slots` is no multiple of the number of owners.
    """

    def __init__(
        self, num_slots: int, policy: str, keep_unstored: bool = False, ownership: Ownership = Ownership()
    ) -> None:
        self._policy = policy
        self._keep_unstored = keep_unstored
        self._ownership = ownership
        self._rotates = ownership.num_owners > 1 and not ownership.on_device
        self._pool = SlotPool(num_slots, ownership.num_owners)
        self._tree = RadixTree(make_policy(policy))
        self._retired: list[RadixTree] = []
        self._reserved = 0
        self._reservations = _Reservations()

    @property
    def num_slots(self) -> int:
        """Capacity in pages."""
        return self._pool.num_slots

    @property
    def ownership(self) -> Ownership:
        """How the ranks of a group share out pages."""
        return self._ownership

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return self._pool.num_free

    def num_free_of(self, owner: int) -> int:
        """Slots of one owner that hold nothing."""
        return self._pool.num_free_of(owner)

    @property
    def num_reserved(self) -> int:
        """Slots that belong to an operation and are not in the tree."""
        return self._reserved

    @property
    def num_leases(self) -> int:
        """Leases that are not released yet."""
        return self._tree.num_leases + sum(tree.num_leases for tree in self._retired)

    @property
    def num_available(self) -> int:
        """Pages that could be reserved now, by eviction where needed.

        An upper bound with `keep_unstored`, and with several owners: a run of pages ends where one owner is full.
        """
        return self._pool.num_free + self._tree.num_evictable

    def match(self, keys: Sequence[PageKey], touch: bool = True) -> Match:
        """Leading run of `keys` that is in host memory."""
        return self._tree.match(keys, touch=touch)

    def lease(self, keys: Sequence[PageKey], num_pages: int) -> Lease:
        """Pin the first `num_pages` pages of a chain that is in the tree."""
        return self._tree.lease(keys, num_pages)

    def reserve(self, keys: Sequence[PageKey], start: int, num_pages: int) -> tuple[list[Slot], list[Evicted]]:
        """Take slots for pages keys[start:start + num_pages] of a chain, evicting what is needed.

        Returns:
            Slots of the longest leading run that can be had, each on the owner of its page, and the pages that were
            evicted for them.

        Raises:
            ValueError: the pages are no range of `keys`.
        """
        if not 0 <= start <= start + num_pages <= len(keys):
            raise ValueError(
                f"cannot reserve {num_pages} pages from page {start} on of a chain of {len(keys)} keys: "
                "give a range of the chain"
            )
        if not num_pages:
            return [], []
        evicted: list[Evicted] = []
        rotation = self._known_rotation(keys)
        if rotation is None:
            # Room comes first: where all is full, the new chain begins on the owner that eviction made room on.
            evicted += self._evict(num_pages - self._pool.num_free)
            rotation = max(range(self._ownership.num_owners), key=self._pool.num_free_of)
        while gone := self._evict(self._num_lacking(start, num_pages, rotation)):
            evicted += gone
        first_owner = self._ownership.owner(start, rotation)
        slots = self._pool.take(self._pool.num_takeable(first_owner, num_pages), first_owner) or []
        self._reserved += len(slots)
        if slots and self._rotates:
            self._reservations.add(keys[0], rotation, slots)
        return slots, evicted

    def attach(self, keys: Sequence[PageKey], start: int, slots: Sequence[Slot], stored: bool) -> int:
        """Put reserved slots into the tree as pages keys[start:start + len(slots)].

        All of them leave the caller's hands: those of pages that are there already, and all of them where the
        pages before `start` have gone or lie in another rotation, become free.

        Returns:
            Pages that are new in the tree.
        """
        if not slots:
            return 0
        self._unreserve(slots)
        stop = start + len(slots)
        rotation = (slots[0] - start) % self._ownership.num_owners
        found = self._tree.match(keys[: start + 1], touch=False)
        if found.num_pages < start or (found.num_pages and found.rotation != rotation):
            self._pool.give_back(slots)
            return 0
        unused = self._tree.insert(keys[:stop], slots, bytes([stored]) * len(slots), start, rotation)
        self._pool.give_back(unused)
        if stored:
            self._tree.mark_stored(keys, start, stop)
        return len(slots) - len(unused)

    def abandon(self, slots: Sequence[Slot]) -> None:
        """Free reserved slots whose content nobody wants."""
        self._unreserve(slots)
        self._pool.give_back(slots)

    def mark_stored(self, keys: Sequence[PageKey], start: int, stop: int) -> None:
        """Note that pages keys[start:stop] are in the store."""
        self._tree.mark_stored(keys, start, stop)

    def unstored_victims(self, num_pages: int) -> list[Victims]:
        """Up to `num_pages` pages next in line for eviction that are not in the store."""
        return self._tree.victims(num_pages)

    def reset(self) -> list[Evicted]:
        """Forget every page. Pages under a lease are freed when it ends; they are never matched again."""
        gone = self._tree.evict(self._tree.num_pages)
        self._pool.give_back([page.slot for page in gone])
        if self._tree.num_pages or self._tree.num_leases:
            self._retired.append(self._tree)
        self._tree = RadixTree(make_policy(self._policy))
        return gone

    def drain_retired(self) -> list[Evicted]:
        """Free what has been let go in retired trees, and return it. Call it when a lease has ended."""
        gone = [page for tree in self._retired for page in tree.evict(tree.num_pages)]
        self._pool.give_back([page.slot for page in gone])
        self._retired = [tree for tree in self._retired if tree.num_pages or tree.num_leases]
        return gone

    def check(self) -> None:
        """Conservation: free + reserved + in trees == capacity, and every reservation's rotation is known.

        Raises:
            InvariantError: it does not hold.
        """
        in_trees = self._tree.num_pages + sum(tree.num_pages for tree in self._retired)
        total = self._pool.num_free + self._reserved + in_trees
        if total != self._pool.num_slots:
            raise InvariantError(
                f"host slots do not add up: free {self._pool.num_free} + reserved {self._reserved} + "
                f"in trees {in_trees} = {total}, capacity {self._pool.num_slots}"
            )
        self._reservations.check(self._reserved if self._rotates else 0)

    def _known_rotation(self, keys: Sequence[PageKey]) -> int | None:
        """The rotation that a chain has, or must have; None where it is free to have any."""
        if not self._rotates:
            return 0
        found = self._tree.match(keys[:1], touch=False)
        return found.rotation if found.num_pages else self._reservations.rotation_of(keys[0])

    def _num_lacking(self, start: int, num_pages: int, rotation: int) -> int:
        """Slots that owners have too few of for pages [start, start + num_pages) of a chain, summed up."""
        return sum(
            max(0, self._ownership.num_owned(owner, num_pages, rotation, start) - self._pool.num_free_of(owner))
            for owner in range(self._ownership.num_owners)
        )

    def _evict(self, num_pages: int) -> list[Evicted]:
        """Free the slots of up to `num_pages` pages of any owner; none where it is 0 or less."""
        if num_pages <= 0:
            return []
        gone = self._tree.evict(num_pages, must_be_stored=self._keep_unstored)
        self._pool.give_back([page.slot for page in gone])
        return gone

    def _unreserve(self, slots: Sequence[Slot]) -> None:
        if self._rotates:
            self._reservations.remove(slots)
        self._reserved -= len(slots)


class _Reservations:
    """Rotations of the chains that slots are reserved for, each kept until the last of its slots is let go.

    Two operations on one new chain, neither of them in the tree yet, find each other here.
    """

    def __init__(self) -> None:
        self._first_keys: dict[Slot, PageKey] = {}
        self._rotations: dict[PageKey, int] = {}
        self._num_slots: Counter[PageKey] = Counter()

    def rotation_of(self, first_key: PageKey) -> int | None:
        """Rotation of chains that begin with this page; None where no slot is reserved for any."""
        return self._rotations.get(first_key)

    def add(self, first_key: PageKey, rotation: int, slots: Sequence[Slot]) -> None:
        """Note slots of a chain. The caller gives the rotation of `rotation_of` where there is one."""
        self._first_keys.update(dict.fromkeys(slots, first_key))
        self._rotations[first_key] = rotation
        self._num_slots[first_key] += len(slots)

    def remove(self, slots: Sequence[Slot]) -> None:
        """Forget slots, and chains with their last one. InvariantError, and no change, where one is not reserved."""
        known = sum(slot in self._first_keys for slot in set(slots))
        if known != len(slots):
            raise InvariantError(
                f"{len(slots)} slots were let go, of which {known} are reserved, {len(self._first_keys)} are in all"
            )
        for first_key, num_slots in Counter(map(self._first_keys.pop, slots)).items():
            self._num_slots[first_key] -= num_slots
            if not self._num_slots[first_key]:
                del self._num_slots[first_key], self._rotations[first_key]

    def check(self, num_reserved: int) -> None:
        """Each of `num_reserved` slots is of one chain with one rotation. InvariantError with the numbers."""
        num_slots, by_chain = len(self._first_keys), Counter(self._first_keys.values())
        if num_slots != num_reserved or by_chain != self._num_slots or by_chain.keys() != self._rotations.keys():
            raise InvariantError(
                f"{num_reserved} slots are reserved; {num_slots} are known, of {len(by_chain)} chains, "
                f"{self._num_slots.total()} booked to {len(self._num_slots)} chains, {len(self._rotations)} rotations"
            )


def runs_of(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Half-open runs of consecutive numbers in ascending `positions`."""
    breaks = [at for at in range(1, len(positions)) if positions[at] != positions[at - 1] + 1]
    bounds = pairwise([0, *breaks, len(positions)]) if positions else ()
    return [(positions[first], positions[last - 1] + 1) for first, last in bounds]
