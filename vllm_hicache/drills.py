"""Drills: faults that an operator asks one rank to have, so that what follows from them can be watched.

Owned by the worker half, which has a `Drill` only where `rank_faults` is set; used on the engine thread. A drill
changes what a rank says and what its slot table knows; it never touches a page's bytes. The file may come, change
and go while the engine serves: a drill begins with the next operation, and ends at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_hicache.errors import ConfigError
from vllm_hicache.names import MissReason, OpId, Phase
from vllm_hicache.plan import Ack, OpReport
from vllm_hicache.rank_faults import FaultKind, Operation, RankFault, parse_faults
from vllm_hicache.ranklog import RankLog

_LOOK_EVERY_S = 0.1
_BATCH_WAIT_S = 0.5
_AT_ONCE = float("-inf")
logger = logging.getLogger(__name__)


class Drill:
    """The faults in force on one rank, and the operations they have struck.

    A change of the file, be it only of its time, ends the faults before it and begins those in it anew, counts
    included. What waits is then sent, and what was lost or reported as failed stays so.

    Args:
        path: the file; faults are in force while it is there.
        rank: only entries of this rank count.
        clock: seconds, never falling.

    Raises:
        ConfigError: the file is there and cannot be read.
    """

    def __init__(self, path: Path, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._rank = rank
        self._clock = clock
        self._seen = self._signature()
        self._next_look_s = clock() + _LOOK_EVERY_S
        self._struck: dict[OpId, dict[FaultKind, RankFault]] = {}
        # Pages to which a report was cut, by operation. What was said cannot be taken back, so this outlasts the drill.
        self._cuts: dict[OpId, int] = {}
        self._withheld: list[_Waiting] = []
        self._batch: list[_Waiting] = []
        self._begin(self._read())

    def look(self) -> None:
        """Take up a change of the file. Looks at most every 0.1 s; call it once a step.

        A file that can no longer be read is logged once a change, and no fault is in force.
        """
        now = self._clock()
        if now < self._next_look_s:
            return
        self._next_look_s = now + _LOOK_EVERY_S
        seen = self._signature()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            faults = self._read()
        except ConfigError as error:
            logger.warning("rank %d: no fault is in force: %s", self._rank, error)
            faults = ()  # not those before: a drill must never go on by accident
        self._begin(faults)

    def began(self, op: Operation, log: RankLog | None) -> None:
        """Choose the faults that strike `op`; call it in the plan's order, before the rank begins the operation.

        Of two faults of one kind the first in the file strikes.

        Args:
            log: the rank's slot table, on which `forget` and `pin` act; without one they strike nothing.
        """
        chosen: dict[FaultKind, RankFault] = {}
        for count in self._counts:
            fault = count.fault
            if fault.fault in chosen or not fault.strikes(op):
                continue
            slots = fault.slots(op)
            if slots and log is None:
                self._tell_no_log(fault)
            elif count.next():
                chosen[fault.fault] = fault
                if log is not None and fault.fault is FaultKind.FORGET:
                    log.forget(slots)
                elif log is not None and fault.fault is FaultKind.PIN:
                    log.pin(slots)
        if chosen:
            self._struck[op.op] = chosen

    def reports(self, reports: Sequence[OpReport], asked: Collection[OpId]) -> list[OpReport]:
        """What this rank really sends now of `reports` and of what waits; call it once a step.

        Args:
            asked: operations the scheduler half asks for: all but `fail` is over for them.
        """
        now = self._clock()
        if asked:
            self._let_go(asked)
        for report in reports:
            if self._fault(FaultKind.SKIP, report.op) is None:
                delay = self._fault(FaultKind.DELAY, report.op)
                self._withheld.append(_Waiting(now + delay.seconds if delay else _AT_ONCE, self._failed(report)))
        due = [each.report for each in self._withheld if each.until_s <= now]
        self._withheld = [each for each in self._withheld if each.until_s > now]
        return self._reordered(due, now)

    def acks(self, acks: Sequence[Ack]) -> list[Ack]:
        """One plan's acknowledgements as this rank consumes them: in which order, and how much of each."""
        places = [place for place, ack in enumerate(acks) if self._fault(FaultKind.REORDER, ack.op)]
        ordered = list(acks)
        for place, source in zip(places, reversed(places), strict=True):
            ordered[place] = acks[source]
        ordered = [self._shortened(ack) for ack in ordered]
        for ack in acks:
            if ack.phase >= Phase.SETTLED:
                self._struck.pop(ack.op, None)
                self._cuts.pop(ack.op, None)
        return ordered

    def capacity(self, num_slots: int) -> int:
        """The number of host pages that this rank believes was agreed, where it was `num_slots`."""
        missing = next((each.fault.pages for each in self._counts if each.fault.fault is FaultKind.CAPACITY), 0)
        return max(0, num_slots - missing)

    def _begin(self, faults: Sequence[RankFault]) -> None:
        """End the faults before and begin these."""
        self._let_go({each.report.op for each in (*self._batch, *self._withheld)})
        self._struck.clear()
        self._counts = [_Count(fault) for fault in faults if fault.rank == self._rank]
        self._told_no_log = False
        in_force = "; ".join(str(each.fault) for each in self._counts) or "none"
        logger.warning("rank %d: faults in force by rank_faults=%r: %s", self._rank, str(self._path), in_force)

    def _fault(self, kind: FaultKind, op: OpId) -> RankFault | None:
        return self._struck[op].get(kind) if op in self._struck else None

    def _failed(self, report: OpReport) -> OpReport:
        """The report, cut to what a `fail` lets through; what was cut once is cut at the same page ever after."""
        fault = self._fault(FaultKind.FAIL, report.op)
        most = self._cuts.get(report.op, fault.pages if fault else report.pages_held)
        if report.pages_held <= most:
            return report
        self._cuts[report.op] = most
        return replace(report, pages_done=min(report.pages_done, most), pages_held=most, reason=MissReason.ERROR)

    def _shortened(self, ack: Ack) -> Ack:
        fault = self._fault(FaultKind.SHORT, ack.op)
        return ack if fault is None else replace(ack, pages_done=min(ack.pages_done, fault.pages))

    def _reordered(self, reports: Sequence[OpReport], now: float) -> list[OpReport]:
        """Hold back what is to be reordered; return the rest, and the batch latest first once two are in it."""
        sent = []
        for report in reports:
            if self._fault(FaultKind.REORDER, report.op) is None:
                sent.append(report)
            else:
                self._batch.append(_Waiting(now + _BATCH_WAIT_S, report))
        if len(self._batch) > 1 or any(each.until_s <= now for each in self._batch):
            sent.extend(each.report for each in reversed(self._batch))
            self._batch.clear()
        return sent

    def _let_go(self, ops: Collection[OpId]) -> None:
        """End all but `fail` and `short` for these operations: what waits of them is sent with the next reports."""
        lasting = (FaultKind.FAIL, FaultKind.SHORT)
        for op in self._struck.keys() & set(ops):
            self._struck[op] = {kind: fault for kind, fault in self._struck[op].items() if kind in lasting}
        free = [each.report for each in (*self._batch, *self._withheld) if each.report.op in ops]
        self._batch = [each for each in self._batch if each.report.op not in ops]
        held = [each for each in self._withheld if each.report.op not in ops]
        self._withheld = [*(_Waiting(_AT_ONCE, report) for report in free), *held]

    def _tell_no_log(self, fault: RankFault) -> None:
        if not self._told_no_log:
            logger.warning("rank %d: without a slot table (consensus='off') nothing comes of: %s", self._rank, fault)
        self._told_no_log = True

    def _read(self) -> tuple[RankFault, ...]:
        try:
            return parse_faults(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return ()
        except (OSError, ValueError) as error:
            raise ConfigError(f"rank_faults={str(self._path)!r}: {error}; mend the file or remove it") from None

    def _signature(self) -> tuple[int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A report that may be sent from `until_s` of the clock on."""

    until_s: float
    report: OpReport


@dataclass(slots=True)
class _Count:
    """A fault in force, with the operations it could strike and those it struck."""

    fault: RankFault
    num_seen: int = 0
    num_struck: int = 0

    def next(self) -> bool:
        """Count one more operation; return whether it is struck."""
        self.num_seen += 1
        if self.num_seen % self.fault.every or self.num_struck == self.fault.times:
            return False
        self.num_struck += 1
        return True
