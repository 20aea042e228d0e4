"""What agreement between ranks, and the rank checker, cost in a step, by the number of ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from vllm_hicache.checker import RankChecker
from vllm_hicache.consensus import Ledger
from vllm_hicache.entries import Entry, Mark
from vllm_hicache.names import OpId, PageKey, Slot
from vllm_hicache.plan import Ack, OpReport, PageMove, SaveOp
from vllm_hicache.ranklog import RankLog

NUM_RANKS = (1, 2, 8, 32)
OPERATIONS_A_STEP = 4
"""Of one page each, as 128 decoding requests with pages of 64 tokens complete: two saves and their flushes."""
PAGES = 1
STEP_S = 0.010
"""A short step of a decoding engine, which the costs are shown against."""


@dataclass(frozen=True, slots=True)
class Step:
    """Median seconds of one step's work.

    Attributes:
        agree_s: the ledger's part, in the scheduler half: operations opened, reported by every rank, acknowledged.
        compare_s: the checker's part there, of every rank's entries.
        books_s: one rank's own log and table of slots.
    """

    num_ranks: int
    num_operations: int
    agree_s: float
    compare_s: float
    books_s: float

    def to_json(self) -> dict[str, object]:
        """All fields, and what `consensus=record` adds to a step of `STEP_S`, as a share."""
        added_s = self.books_s + (self.compare_s if self.num_ranks > 1 else 0.0)
        return {**asdict(self), "record_share_of_step": added_s / STEP_S, "step_s": STEP_S}


def scheduler_step_times(num_steps: int, num_ranks: Sequence[int] = NUM_RANKS) -> list[Step]:
    """A step of `OPERATIONS_A_STEP` operations of `PAGES` pages, by the number of ranks.

    What else the scheduler half does in a step does not depend on the number of ranks.
    """
    return [_step_times(count, num_steps) for count in num_ranks]


def _step_times(num_ranks: int, num_steps: int) -> Step:
    ledger, checker, log = Ledger(range(num_ranks)), RankChecker(range(num_ranks)), RankLog(0, PAGES)
    agree, compare, books = [], [], []
    for _ in range(num_steps):
        ops: list[OpId] = []
        agree.append(_timed(lambda ops=ops: _agree(ledger, num_ranks, ops)))
        entries: list[Entry] = []
        saves = [SaveOp(op, tuple(PageMove(PageKey(bytes(32)), Slot(slot), ()) for slot in range(PAGES))) for op in ops]
        books.append(_timed(lambda saves=saves, entries=entries: entries.extend(_keep_books(log, saves))))
        compare.append(_timed(lambda entries=entries: _compare(checker, num_ranks, entries, log.mark)))
    if ledger.num_open or checker.first:
        raise RuntimeError(f"{ledger.num_open} operations of {num_ranks} ranks stay open; first: {checker.first}")
    return Step(num_ranks, OPERATIONS_A_STEP, *map(statistics.median, (agree, compare, books)))


def _timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _agree(ledger: Ledger, num_ranks: int, ops: list[OpId]) -> None:
    ops += [ledger.open() for _ in range(OPERATIONS_A_STEP)]
    for rank in range(num_ranks):
        for op in ops:
            ledger.record(OpReport(rank, op, PAGES, PAGES))


def _keep_books(log: RankLog, saves: Sequence[SaveOp]) -> tuple[Entry, ...]:
    for save in saves:
        log.begin(save)
        log.done(OpReport(0, save.op, PAGES, PAGES))
        log.consume(Ack(save.op, PAGES, PAGES))
    return log.take()


def _compare(checker: RankChecker, num_ranks: int, entries: Sequence[Entry], mark: Mark) -> None:
    for rank in range(num_ranks):
        checker.take(rank, entries, mark)


def table(steps: Sequence[Step]) -> str:
    """One line a number of ranks."""
    lines = [
        f"a step with {OPERATIONS_A_STEP} operations of {PAGES} page, us; share of a step of {STEP_S * 1e3:.0f} ms",
        f"{'ranks':>5}{'agree':>8}{'compare':>9}{'a rank':>8}{'record adds':>13}",
    ]
    for step in steps:
        times = (step.agree_s, step.compare_s, step.books_s)
        shown = "".join(f"{seconds * 1e6:>{width}.0f}" for seconds, width in zip(times, (8, 9, 8), strict=True))
        lines.append(f"{step.num_ranks:>5}{shown}{step.to_json()['record_share_of_step']:>12.1%}")
    return "\n".join(lines)
