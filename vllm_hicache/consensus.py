"""Agreement between ranks: one acknowledged length for every operation.

Pure; owned by the scheduler half. Workers finish in any order and report by rank. An operation is acknowledged
when every rank has reported, with the minimum over ranks; a rank's second report of one operation counts once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_hicache.errors import InvariantError
from vllm_hicache.names import MissReason, OpId
from vllm_hicache.plan import OpReport


@dataclass(frozen=True, slots=True)
class Ack:
    """The agreed result of an operation: what every rank has done, and why not more."""

    op: OpId
    pages_done: int
    pages_held: int
    reason: MissReason | None


class Ledger:
    """Open operations, and the reports that came for them.

    Args:
        ranks: every rank that must report.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = frozenset(ranks)
        self._reports: dict[OpId, dict[int, OpReport]] = {}
        self._last = 0

    @property
    def num_open(self) -> int:
        """Operations that are not acknowledged yet."""
        return len(self._reports)

    def open(self) -> OpId:
        """Number the next operation and expect a report of every rank for it."""
        self._last += 1
        op = OpId(self._last)
        self._reports[op] = {}
        return op

    def record(self, report: OpReport) -> Ack | None:
        """Take one rank's report; the acknowledgement if it was the last one missing.

        Raises:
            InvariantError: a report of an unknown rank, or for an operation that was never opened.
        """
        if report.rank not in self._ranks or not 0 < report.op <= self._last:
            raise InvariantError(
                f"report of rank {report.rank} for operation {report.op}, but ranks are {sorted(self._ranks)} and "
                f"{self._last} operations were opened"
            )
        by_rank = self._reports.get(report.op)
        if by_rank is None:
            return None
        by_rank.setdefault(report.rank, report)
        if len(by_rank) < len(self._ranks):
            return None
        del self._reports[report.op]
        shortest = min(by_rank.values(), key=lambda each: (each.pages_done, each.rank))
        held = min(each.pages_held for each in by_rank.values())
        return Ack(report.op, shortest.pages_done, held, shortest.reason)
