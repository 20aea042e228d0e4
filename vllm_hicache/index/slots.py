"""The free list of the host pools of a group: which slots hold a page and which do not, owner by owner.

Owner: the scheduler half. Thread: the scheduler thread only. Pure: numbers of slots, never their bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import cast

from vllm_hicache.errors import InvariantError
from vllm_hicache.names import Slot


class SlotPool:
    """Hands out slots 0 … `num_slots` - 1, each to one holder at a time; given back last, out first.

    Slot s is of the class of owner `s % num_owners`; each class has a free list of its own.
    """

    def __init__(self, num_slots: int, num_owners: int = 1) -> None:
        """Start with all `num_slots` slots free. They are those of all owners.

        ValueError when negative or no multiple of `num_owners`, and when there is no owner.
        """
        if num_slots < 0:
            raise ValueError(f"a pool of {num_slots} slots cannot exist: give 0 or more")
        if num_owners < 1:
            raise ValueError(f"a pool of {num_slots} slots cannot be shared out to {num_owners} owners: give 1 or more")
        if num_slots % num_owners:
            raise ValueError(
                f"a pool of {num_slots} slots cannot be shared out evenly to {num_owners} owners: "
                f"give a multiple of {num_owners}"
            )
        last = num_slots - num_owners
        self._free = [array("i", range(last + owner, -1, -num_owners)) for owner in range(num_owners)]
        self._taken = bytearray(num_slots)

    @property
    def num_slots(self) -> int:
        """All slots, free and taken."""
        return len(self._taken)

    @property
    def num_owners(self) -> int:
        """Classes of slots."""
        return len(self._free)

    @property
    def num_free(self) -> int:
        """Slots that nobody holds, of all owners."""
        return sum(map(len, self._free))

    def num_free_of(self, owner: int) -> int:
        """Slots of one owner that nobody holds."""
        return len(self._free[owner])

    def num_takeable(self, first_owner: int, limit: int) -> int:
        """The most slots, up to `limit`, that `take` can hand out now beginning with `first_owner`."""
        num_owners = self.num_owners
        if num_owners == 1:
            return min(limit, len(self._free[0]))
        # A class with f free slots serves every num_owners-th place; the place after its last is where a run ends.
        ends = (i + num_owners * len(self._free[(first_owner + i) % num_owners]) for i in range(num_owners))
        return min(limit, *ends)

    def is_free(self, slot: Slot) -> bool:
        """Whether nobody holds `slot`. A slot outside the pool is not free."""
        return 0 <= slot < self.num_slots and not self._taken[slot]

    def take(self, n: int, first_owner: int = 0) -> list[Slot] | None:
        """All-or-nothing: `n` distinct free slots of owners first_owner, first_owner + 1, … in turn.

        None, and no change, when a class has too few. ValueError when `n` is negative.
        """
        if n < 0:
            raise ValueError(f"cannot take {n} slots: ask for 0 or more")
        if self.num_takeable(first_owner, n) < n:
            return None
        num_owners = self.num_owners
        if num_owners == 1:
            return self._take_of(0, n)
        slots = [Slot(0)] * n
        for i in range(min(n, num_owners)):
            slots[i::num_owners] = self._take_of((first_owner + i) % num_owners, len(range(i, n, num_owners)))
        return slots

    def give_back(self, slots: Sequence[Slot]) -> None:
        """All-or-nothing: free `slots`, each in its class.

        InvariantError, and no change, when one of them is free already, named twice or outside the pool.
        """
        num_slots = self.num_slots
        for i, slot in enumerate(slots):
            if not 0 <= slot < num_slots or not self._taken[slot]:
                self._undo(slots[:i])
                raise InvariantError(
                    f"slot {slot} (number {i} of {len(slots)}) was given back but nobody holds it: "
                    f"{self.num_free} of {num_slots} slots are free"
                )
            self._taken[slot] = 0
        num_owners = self.num_owners
        if num_owners == 1:
            self._free[0].extend(slots)
            return
        for slot in slots:
            self._free[slot % num_owners].append(slot)

    def check(self) -> None:
        """Conservation: free + taken == all, no slot is free twice or in another owner's class.

        InvariantError with the numbers.
        """
        num_taken = sum(self._taken)
        distinct = len(set(chain.from_iterable(self._free)))
        wrong = sum(self._taken[slot] for free in self._free for slot in free)
        if distinct != self.num_free or wrong or self.num_free + num_taken != self.num_slots:
            raise InvariantError(
                f"slot pool: {self.num_free} free ({distinct} distinct, {wrong} also taken) + {num_taken} "
                f"taken != {self.num_slots} slots"
            )
        for owner, free in enumerate(self._free):
            num_foreign = sum(slot % self.num_owners != owner for slot in free)
            if num_foreign:
                raise InvariantError(
                    f"slot pool: {num_foreign} of the {len(free)} free slots of owner {owner} are another's, "
                    f"of {self.num_owners} owners"
                )

    def _take_of(self, owner: int, n: int) -> list[Slot]:
        free = self._free[owner]
        keep = len(free) - n
        # From the end: no shifting, and the memory that was touched last.
        slots = cast("list[Slot]", free[keep:].tolist())
        del free[keep:]
        for slot in slots:
            self._taken[slot] = 1
        return slots

    def _undo(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._taken[slot] = 1
