"""Transfers of a rank without bytes: a script says how fast pages come and which do not, and watches every slot.

Thread: the test's.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from vllm_hicache.names import MissReason, OpId, PageKey, Phase, RequestId, Slot
from vllm_hicache.plan import Ack, FlushOp, LoadOp, OpReport, PageMove, SaveOp

Op = LoadOp | SaveOp | FlushOp


class World(Protocol):
    """What transfers know of the rest: the faults in force, and what each rank has in the store."""

    faults: Faults
    stored: list[set[PageKey]]

    def settled(self, rank: int, task: Task) -> None:
        """A rank no longer touches what an operation uses."""


@dataclass
class Faults:
    """Chances, for each page or report; all zero when faults are over.

    Attributes:
        fail: a page of an operation does not come.
        cut: a rank gives up the rest of a load, as it does after the time limit.
        late: a report waits up to 12 steps, and others overtake it.
        twice: a report comes twice.
        silent: all reports of a rank on an operation are lost until it is asked.
        rot: an object leaves one rank's part of the store, in each step.
    """

    fail: float = 0.02
    cut: float = 0.002
    late: float = 0.3
    twice: float = 0.1
    silent: float = 0.01
    rot: float = 0.05


NO_FAULTS = Faults(0, 0, 0, 0, 0, 0)


@dataclass
class Task:
    """One operation on one rank: it comes to `goal` pages, one after the other."""

    op: Op
    goal: int
    done: int = 0
    held: int = 0
    phase: Phase = Phase.RUNNING
    reason: MissReason | None = None

    def is_writing_for(self, name: RequestId) -> bool:
        """Whether blocks of this request may still be written."""
        return isinstance(self.op, LoadOp) and self.op.request_id == name and self.phase == Phase.RUNNING

    def report(self, rank: int) -> OpReport:
        return OpReport(rank, self.op.op, self.done, max(self.held, self.done), self.phase, self.reason)


class ScriptedTransfers:
    """Stands for `TransferEngine`: pages come as fast as `pace`, and fail as `world.faults` has it.

    Attributes:
        has_work: False for a rank that holds nothing of any page: whatever it is asked to do is done at once.
        most_pages: pages of an operation that come at most, by its type.
        is_trusted: whether plans are taken to be right about every slot of this rank.
    """

    def __init__(self, rank: int, *_: object) -> None:
        self.rank = rank
        self.tasks: dict[OpId, Task] = {}
        self.content: dict[Slot, PageKey] = {}
        self.pace = 1.0
        self.has_work, self.is_trusted = True, True
        self.most_pages: dict[type, int] = {}
        self.world: World
        self.chance = random.Random(rank)

    def fence(self) -> None:
        return None

    def load(self, op: LoadOp, store: object, fence: None, vouched: int | None = None, peer: object = None) -> None:
        self._begin(op, vouched)

    def save(self, op: SaveOp, fence: None, vouched: int | None = None) -> None:
        self._begin(op, vouched)

    def flush(self, op: FlushOp, store: object, vouched: int | None = None) -> None:
        self._begin(op, vouched)

    def acknowledged(self, ack: Ack) -> None:
        """Its pages are not exchanged."""

    def cancel(self, op: OpId) -> None:
        task = self.tasks.get(op)
        if task is not None and isinstance(task.op, LoadOp) and task.phase == Phase.RUNNING:
            task.goal, task.reason = task.done, task.reason or MissReason.CANCELLED

    def collect(self, wait_s: float = 0.0) -> list[OpReport]:
        if not self.has_work:
            for task in self.tasks.values():
                task.done = task.held = task.goal
                task.phase = Phase.RECEIVED
        reports = [self._advance(task) for task in list(self.tasks.values()) if self.chance.random() < self.pace]
        for report in reports:
            if report is not None and report.phase == Phase.SETTLED:
                self.world.settled(self.rank, self.tasks.pop(report.op))
        return [report for report in reports if report is not None]

    def close(self, timeout_s: float) -> None:
        assert not self.tasks, f"rank {self.rank} still has {sorted(self.tasks)}"

    def _begin(self, op: Op, vouched: int | None) -> None:
        num_sure = len(op.pages) if vouched is None else vouched
        assert num_sure == len(op.pages) or not self.is_trusted, f"rank {self.rank} vouches for {vouched} of {op}"
        taken = {slot for task in self.tasks.values() for slot in slots_of(task.op)}
        assert not taken & set(destinations(op)), f"operation {op.op} takes slots that rank {self.rank} still uses"
        self.tasks[op.op] = Task(op, min(num_sure, self.most_pages.get(type(op), num_sure)))

    def _advance(self, task: Task) -> OpReport | None:
        """A page, or a phase, further; what there is to report."""
        before = task.report(self.rank)
        faults = self.world.faults
        if isinstance(task.op, LoadOp) and task.done < task.goal and self.chance.random() < faults.cut:
            task.goal, task.reason = task.done, MissReason.TIMEOUT
        if task.done < task.goal:
            self._page(task, task.op.pages[task.done])
        elif task.phase == Phase.RUNNING and isinstance(task.op, LoadOp):
            task.phase = Phase.RECEIVED
        else:
            task.phase = Phase.SETTLED
        after = task.report(self.rank)
        is_word = isinstance(task.op, LoadOp) or after.phase == Phase.SETTLED
        return after if after != before and is_word else None

    def _page(self, task: Task, page: PageMove) -> None:
        writes = isinstance(task.op, SaveOp) or page.from_store
        if not writes:
            found = self.content.get(page.slot)
            assert found == page.key, f"rank {self.rank}: operation {task.op.op} reads slot {page.slot} of another page"
        gone = page.from_store and page.key not in self.world.stored[self.rank]
        if gone or self.chance.random() < self.world.faults.fail:
            task.goal, task.reason = task.done, MissReason.ABSENT if gone else MissReason.ERROR
            return
        if writes:
            self.content[page.slot] = page.key
        if isinstance(task.op, FlushOp):
            self.world.stored[self.rank].add(page.key)
        task.done += 1
        task.held = max(task.held, task.done)


def slots_of(op: Op) -> list[Slot]:
    return [page.slot for page in op.pages]


def destinations(op: Op) -> list[Slot]:
    """Slots that change hands for an operation."""
    return [page.slot for page in op.pages if isinstance(op, SaveOp) or page.from_store]
