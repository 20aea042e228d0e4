"""What a rank did, line by line: the records of the rank checker.

Pure. Ranks that consume the same plans and acknowledgements write the same lines in the same order, apart from
`DONE`, whose lines come in the order in which work ended and are compared operation by operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vllm_hicache.names import OpId


class EntryKind(StrEnum):
    """What a rank did: the words of the rank checker."""

    CAPACITY = "capacity"
    """Host pages it uses. Value: that number."""
    HIT = "hit length"
    """A load began. Value: leading pages of it that this rank's host memory confirms, of those that are to be there."""
    EVICT = "eviction eligibility"
    """Slots change hands for an operation. Value: how many of them nobody on this rank uses any more."""
    LOCK = "lock"
    """An operation's slots are in use. Value: how many."""
    ACK = "ack consumption"
    """An acknowledgement was consumed. Value: pages."""
    UNLOCK = "unlock"
    """An operation's slots are no longer in use. Value: how many."""
    DONE = "restore completion"
    """A load, save or flush ended on this rank, in whatever order. Value: pages done."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a rank's log has come: the number of its entries, and a digest over them, without their times.

    The order of `DONE` entries does not count. Ranks with equal marks have consumed the same.
    """

    num_entries: int
    digest: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a rank's log: equal on all ranks but for the time.

    Attributes:
        op: the operation's number, 0 for what belongs to none.
        value: see the kind.
        time_s: Unix time.
    """

    op: OpId
    kind: EntryKind
    value: int
    time_s: float
