"""What chaos found: one record a row, the table, and what counts as a failure. No engine here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from demo_report import ROUNDING_LIMIT, Comparison, machine
from engine_process import Answer

RECOVERY_LIMIT_S = 10.0


@dataclass(slots=True)
class CellRecord:
    """One fault on one store. Times are seconds.

    Attributes:
        num_wrong: answers whose chosen tokens differ from the reference by more than rounding explains.
        num_failed: requests that were answered with an error.
        num_hung: requests without an answer within a minute.
        misses: pages not served, by reason.
        num_struck: how often the fault was met, as far as that can be counted.
        recovery_s: from the end of the fault to the first store hit; None when none came.
        recomputes: whether that hit was of a page that had to be computed and saved first, at the engine's own pace.
        leaked: what was still held ten seconds after the last answer.
        error: what ended the row early; `skipped` why it was not run.
    """

    store: str
    fault: str
    num_requests: int = 0
    num_wrong: int = 0
    num_failed: int = 0
    num_hung: int = 0
    longest_s: float = 0.0
    max_logprob_diff: float = 0.0
    misses: dict[str, int] = field(default_factory=dict)
    store_hit_tokens: int = 0
    num_flush_errors: int = 0
    num_struck: int = 0
    recovery_s: float | None = None
    recomputes: bool = False
    leaked: dict[str, int] = field(default_factory=dict)
    is_alive: bool = True
    error: str = ""
    skipped: str = ""

    def add(self, answer: Answer, reference: Answer) -> None:
        """Count an answer."""
        diff = Comparison.of(self.fault, answer, reference).max_logprob_diff
        self.num_requests += 1
        self.num_wrong += not diff <= ROUNDING_LIMIT
        self.max_logprob_diff = max(self.max_logprob_diff, diff)
        self.longest_s = max(self.longest_s, answer.total_s)

    def problems(self) -> list[str]:
        """What must not be, a phrase each."""
        if self.skipped:
            return []
        found = [
            f"{count} {what}"
            for what, count in (
                ("wrong answers", self.num_wrong),
                ("failed requests", self.num_failed),
                ("hung requests", self.num_hung),
            )
            if count
        ]
        found += [f"{count} {what} leaked" for what, count in self.leaked.items()]
        if self.error:
            found.append(self.error)
        if not self.is_alive:
            found.append("the engine died")
        if not self.num_struck:
            found.append("the fault was never met")
        if self.recovery_s is None:
            found.append("no store hit came back")
        elif self.recovery_s > RECOVERY_LIMIT_S and not self.recomputes:
            found.append(f"hits came back after {self.recovery_s:.1f} s: at most {RECOVERY_LIMIT_S:.0f} s allowed")
        return found


def table(records: Sequence[CellRecord]) -> str:
    """One line a row."""
    head = (
        f"{'store':<6} {'fault':<24}{'requests':>9}{'wrong':>6}{'failed':>7}{'hung':>5}{'longest s':>10}{'back s':>8}"
        f"{'leaked':>7}{'met':>6}{'hit tokens':>11}  misses"
    )
    return "\n".join([head, *(line(record) for record in records)])


def line(record: CellRecord) -> str:
    """One row of the table."""
    if record.skipped:
        return f"{record.store:<6} {record.fault:<24}skipped: {record.skipped}"
    back = "never" if record.recovery_s is None else f"{record.recovery_s:.1f}"
    misses = ", ".join(f"{reason} {count}" for reason, count in sorted(record.misses.items())) or "none"
    return (
        f"{record.store:<6} {record.fault:<24}{record.num_requests:>9}{record.num_wrong:>6}{record.num_failed:>7}"
        f"{record.num_hung:>5}{record.longest_s:>10.1f}{back:>8}{sum(record.leaked.values()):>7}"
        f"{record.num_struck:>6}{record.store_hit_tokens:>11}  {misses}"
    )


def assemble(records: Sequence[CellRecord]) -> dict[str, Any]:
    """The result as JSON has it."""
    return {
        "cells": [{**asdict(record), "problems": record.problems()} for record in records],
        "num_requests": sum(record.num_requests for record in records),
        "num_wrong": sum(record.num_wrong for record in records),
        "num_hung": sum(record.num_hung for record in records),
        "num_failed": sum(record.num_failed for record in records),
        "num_leaked": sum(sum(record.leaked.values()) for record in records),
        "max_logprob_diff": max((record.max_logprob_diff for record in records), default=0.0),
        "longest_recovery_s": max((record.recovery_s or 0.0 for record in records), default=0.0),
        "machine": machine(),
    }
