"""The free list of one rank's host pool: which slots hold a page and which do not.

Owner: the scheduler half. Thread: the scheduler thread only. Pure: numbers of slots, never their bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import cast

from vllm_hicache.errors import InvariantError
from vllm_hicache.names import Slot


class SlotPool:
    """Hands out slots 0 … `num_slots` - 1, each to one holder at a time; given back last, out first."""

    def __init__(self, num_slots: int) -> None:
        """Start with all `num_slots` slots free. ValueError when negative."""
        if num_slots < 0:
            raise ValueError(f"a pool of {num_slots} slots cannot exist: give 0 or more")
        self._free = array("i", range(num_slots - 1, -1, -1))
        self._taken = bytearray(num_slots)

    @property
    def num_slots(self) -> int:
        """All slots, free and taken."""
        return len(self._taken)

    @property
    def num_free(self) -> int:
        """Slots that `take` can still hand out."""
        return len(self._free)

    def is_free(self, slot: Slot) -> bool:
        """Whether nobody holds `slot`. A slot outside the pool is not free."""
        return 0 <= slot < self.num_slots and not self._taken[slot]

    def take(self, n: int) -> list[Slot] | None:
        """All-or-nothing: `n` distinct free slots, or None and no change when fewer are free.

        ValueError when `n` is negative.
        """
        if n < 0:
            raise ValueError(f"cannot take {n} slots: ask for 0 or more")
        keep = self.num_free - n
        if keep < 0:
            return None
        # From the end: no shifting, and the memory that was touched last.
        slots = cast("list[Slot]", self._free[keep:].tolist())
        del self._free[keep:]
        for slot in slots:
            self._taken[slot] = 1
        return slots

    def give_back(self, slots: Sequence[Slot]) -> None:
        """All-or-nothing: free `slots`.

        InvariantError, and no change, when one of them is free already, named twice or outside the pool.
        """
        for i, slot in enumerate(slots):
            if not 0 <= slot < self.num_slots or not self._taken[slot]:
                self._undo(slots[:i])
                raise InvariantError(
                    f"slot {slot} (number {i} of {len(slots)}) was given back but nobody holds it: "
                    f"{self.num_free} of {self.num_slots} slots are free"
                )
            self._taken[slot] = 0
        self._free.extend(slots)

    def check(self) -> None:
        """Conservation: free + taken == all, and no slot is free twice. InvariantError with the numbers."""
        num_taken = sum(self._taken)
        distinct = len(set(self._free))
        wrong = sum(self._taken[slot] for slot in self._free)
        if distinct != self.num_free or wrong or self.num_free + num_taken != self.num_slots:
            raise InvariantError(
                f"slot pool: {self.num_free} free ({distinct} distinct, {wrong} also taken) + {num_taken} "
                f"taken != {self.num_slots} slots"
            )

    def _undo(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._taken[slot] = 1
