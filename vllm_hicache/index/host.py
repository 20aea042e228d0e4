"""The host tier as the scheduler half sees it: one radix tree and the slots its pages lie in.

Pure; scheduler thread only. A slot is free, reserved by an operation, or in the tree. After a reset, pages that
operations still hold stay behind in a retired tree until they are let go, and are never matched again.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_hicache.errors import InvariantError
from vllm_hicache.index.eviction import make_policy
from vllm_hicache.index.slots import SlotPool
from vllm_hicache.index.tree import Evicted, Lease, Match, RadixTree, Victims
from vllm_hicache.names import PageKey, Slot


class HostTier:
    """Pages in host memory, one logical index for all ranks.

    Args:
        num_slots: capacity in pages, the minimum over ranks.
        policy: name of the eviction policy.
        keep_unstored: whether pages that are not in the store must not be evicted (write policy `back`).
    """

    def __init__(self, num_slots: int, policy: str, keep_unstored: bool = False) -> None:
        self._policy = policy
        self._keep_unstored = keep_unstored
        self._pool = SlotPool(num_slots)
        self._tree = RadixTree(make_policy(policy))
        self._retired: list[RadixTree] = []
        self._reserved = 0

    @property
    def num_slots(self) -> int:
        """Capacity in pages."""
        return self._pool.num_slots

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return self._pool.num_free

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
        """Pages that could be reserved now, by eviction where needed. An upper bound with `keep_unstored`."""
        return self._pool.num_free + self._tree.num_evictable

    def match(self, keys: Sequence[PageKey], touch: bool = True) -> Match:
        """Leading run of `keys` that is in host memory."""
        return self._tree.match(keys, touch=touch)

    def lease(self, keys: Sequence[PageKey], num_pages: int) -> Lease:
        """Pin the first `num_pages` pages of a chain that is in the tree."""
        return self._tree.lease(keys, num_pages)

    def reserve(self, num_pages: int) -> tuple[list[Slot], list[Evicted]]:
        """Take up to `num_pages` slots for an operation, evicting what is needed.

        Returns:
            The slots, fewer than asked when no more can be had, and the pages that were evicted for them.
        """
        evicted: list[Evicted] = []
        missing = num_pages - self._pool.num_free
        if missing > 0:
            evicted = self._tree.evict(missing, must_be_stored=self._keep_unstored)
            self._pool.give_back([page.slot for page in evicted])
        slots = self._pool.take(min(num_pages, self._pool.num_free)) or []
        self._reserved += len(slots)
        return slots, evicted

    def attach(self, keys: Sequence[PageKey], start: int, slots: Sequence[Slot], stored: bool) -> int:
        """Put reserved slots into the tree as pages keys[start:start + len(slots)].

        All of them leave the caller's hands: those of pages that are there already, and all of them where the
        pages before `start` have gone, become free.

        Returns:
            Pages that are new in the tree.
        """
        self._reserved -= len(slots)
        if self._tree.match(keys[:start], touch=False).num_pages < start:
            self._pool.give_back(slots)
            return 0
        unused = self._tree.insert(keys[: start + len(slots)], slots, bytes([stored]) * len(slots), start)
        self._pool.give_back(unused)
        if stored:
            self._tree.mark_stored(keys, start, start + len(slots))
        return len(slots) - len(unused)

    def abandon(self, slots: Sequence[Slot]) -> None:
        """Free reserved slots whose content nobody wants."""
        self._reserved -= len(slots)
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
        if self._tree.num_pages:
            self._retired.append(self._tree)
        self._tree = RadixTree(make_policy(self._policy))
        return gone

    def drain_retired(self) -> list[Evicted]:
        """Free what has been let go in retired trees, and return it. Call it when a lease has ended."""
        gone = [page for tree in self._retired for page in tree.evict(tree.num_pages)]
        self._pool.give_back([page.slot for page in gone])
        self._retired = [tree for tree in self._retired if tree.num_pages]
        return gone

    def check(self) -> None:
        """Conservation: free + reserved + in trees == capacity.

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
