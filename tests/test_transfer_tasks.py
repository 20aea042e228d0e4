"""Loads and writes in every order that threads can bring about, against a model of what must hold."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_fixtures import move

from vllm_hicache.names import BlockId, MissReason, OpId, Phase, RequestId
from vllm_hicache.plan import LoadOp, OpReport
from vllm_hicache.transfer.tasks import LoadTask, WriteTask

Step = tuple[str, int]
KINDS = {"store": (True, True), "host": (False, True), "prefetch": (True, False), "nothing": (False, False)}
"""Kind of a page: whether it comes from the store, and whether it goes to the device."""


def load_op(kinds: Sequence[str], time_limit_s: float | None = None) -> LoadOp:
    pages = []
    for index, kind in enumerate(kinds):
        from_store, to_device = KINDS[kind]
        pages.append(move(index, index, [10 + index] if to_device else [], from_store=from_store))
    return LoadOp(OpId(7), b"", RequestId("r"), tuple(pages), time_limit_s, (BlockId(99),))


class Driver:
    """Plays copy and store threads on one load, one step at a time, and checks every step against a model.

    The model: `held` and `done` pages, and `limit`, the leading pages that are wanted. A load is received as
    soon as all wanted pages are done and no copy runs, and settled as soon as also no fetch is open.
    """

    def __init__(self, kinds: Sequence[str], faults: int = 1, cuts: int = 1) -> None:
        self.received: list[int] = []
        self.told = OpReport(3, OpId(7), 0, 0, Phase.RUNNING)
        self.settled: list[LoadTask] = []
        self.kinds, self.faults, self.cuts = kinds, faults, cuts
        self.held = {index for index, kind in enumerate(kinds) if not KINDS[kind][0]}
        self.done = {index for index in self.held if not KINDS[kinds[index]][1]}
        self.limit, self.reason = len(kinds), None
        self.to_fetch = [index for index in range(len(kinds)) if index not in self.held]
        self.to_copy = sorted(self.held - self.done)
        self.fetching: set[int] = set()
        self.copying: set[int] = set()
        self.task = LoadTask(load_op(kinds), self._receive, self._settle)
        self.task.start()
        self.check()

    def steps(self) -> list[Step]:
        """What could happen next. Begun first: threads take pages in order, but finish in any."""
        steps = [("fetch", index) for index in self.to_fetch[:1]] + [("copy", index) for index in self.to_copy]
        steps += [("fetched", index) for index in sorted(self.fetching)]
        steps += [("copied", index) for index in sorted(self.copying)]
        if self.faults:
            steps += [("missed", index) for index in sorted(self.fetching)]
            steps += [("not copied", index) for index in sorted(self.copying)]
            steps += [("given up", index) for index in self.to_fetch[:1]]
        return steps + [("cut", -1)] * bool(self.cuts)

    def do(self, step: Step) -> None:
        what, index = step
        match what:
            case "fetch":
                self.to_fetch.remove(index)
                self._begin(self.task.begin_fetch(index), index, self.fetching)
            case "copy":
                self.to_copy.remove(index)
                self._begin(self.task.begin_copy(index), index, self.copying)
            case "fetched" | "missed":
                self._end_fetch(index, MissReason.SHORT if what == "missed" else None)
            case "copied" | "not copied":
                self._end_copy(index, MissReason.ERROR if what == "not copied" else None)
            case "given up":
                self.to_fetch.remove(index)
                self._fall(index, MissReason.ABSENT)
                self.faults -= 1
                self.task.fail(index, MissReason.ABSENT)
            case "cut":
                self.cuts -= 1
                self._fall(self.leading(), MissReason.CANCELLED)
                self.task.cut(MissReason.CANCELLED)
        self.check()

    def leading(self) -> int:
        """Wanted leading pages that are done."""
        return next((index for index in range(self.limit) if index not in self.done), self.limit)

    def check(self) -> None:
        is_received = (self.leading() == self.limit and not self.copying) or bool(self.received)
        assert len(self.received) == is_received
        assert len(self.settled) == (is_received and not self.fetching)
        self.check_report(self.task.report(rank=3))

    def check_report(self, report: OpReport) -> None:
        """At every moment a report is true, and nothing in it is less than in the one before."""
        phase = Phase.SETTLED if self.settled else Phase.RECEIVED if self.received else Phase.RUNNING
        held = next((at for at in range(report.pages_done, len(self.kinds)) if at not in self.held), len(self.kinds))
        done = self.received[0] if self.received else self.leading()
        assert report == OpReport(3, OpId(7), done, held, phase, self.reason if self.received else None)
        assert report.pages_done >= self.told.pages_done
        assert report.pages_held >= self.told.pages_held
        self.told = report

    def check_end(self) -> None:
        """Nothing is left to do: the load has ended, once, and says what is true."""
        assert not self.steps() or {what for what, _ in self.steps()} == {"cut"}
        report = self.told
        assert (self.received, report.phase) == ([report.pages_done], Phase.SETTLED)
        assert self.settled == [self.task]
        assert report.reason == self.reason
        assert (report.reason is None) == (report.pages_done == len(self.kinds))

    def _begin(self, begun: bool, index: int, running: set[int]) -> None:
        assert begun == (index < self.limit), f"page {index} of {self.limit} wanted ones"
        assert not (begun and self.received), "a page was begun after the engine got its blocks back"
        if begun:
            running.add(index)

    def _end_fetch(self, index: int, reason: MissReason | None) -> None:
        self.fetching.remove(index)
        to_device = KINDS[self.kinds[index]][1]
        if reason is None:
            self.held.add(index)
            self.done |= set() if to_device else {index}
        else:
            self._fall(index, reason)
            self.faults -= 1
        wanted = self.task.end_fetch(index, reason)
        assert wanted == (reason is None and to_device and index < self.limit)
        if wanted:
            self.to_copy.append(index)

    def _end_copy(self, index: int, reason: MissReason | None) -> None:
        self.copying.remove(index)
        if reason is None:
            self.done.add(index)
        else:
            self._fall(index, reason)
            self.faults -= 1
        self.task.end_copy(index, reason)

    def _fall(self, limit: int, reason: MissReason) -> None:
        if limit < self.limit:
            self.limit, self.reason = limit, reason

    def _receive(self, task: LoadTask) -> None:
        assert not self.copying
        assert task.pages_done == self.limit
        assert self.done.issuperset(range(task.pages_done))
        self.received.append(task.pages_done)

    def _settle(self, task: LoadTask) -> None:
        assert not self.fetching
        self.settled.append(task)


def every_order(kinds: Sequence[str]) -> Iterator[Driver]:
    """A finished driver for each order in which these pages can end, with at most one fault and one cut."""
    paths: list[list[Step]] = [[]]
    while paths:
        path = paths.pop()
        driver = Driver(kinds)
        for step in path:
            driver.do(step)
        nexts = driver.steps()
        paths += [[*path, step] for step in nexts]
        if not [step for step in nexts if step[0] != "cut"]:
            yield driver


PAIRS = [("store", "store"), ("store", "host"), ("host", "store"), ("prefetch", "store"), ("host", "host")]


@pytest.mark.parametrize("kinds", PAIRS)
def test_two_pages_end_once_and_truly_in_every_order(kinds: tuple[str, str]) -> None:
    ended = [driver.check_end() for driver in every_order(kinds)]
    assert len(ended) > 50


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(sorted(KINDS)), max_size=6), st.integers(0, 3), st.integers(0, 2), st.data())
def test_many_pages_end_once_and_truly_in_random_orders(
    kinds: list[str], faults: int, cuts: int, data: st.DataObject
) -> None:
    driver = Driver(kinds, faults, cuts)
    while steps := driver.steps():
        driver.do(data.draw(st.sampled_from(steps)))
    driver.check_end()


def quiet(op: LoadOp) -> tuple[LoadTask, list[str]]:
    told: list[str] = []
    task = LoadTask(op, lambda _: told.append("received"), lambda _: told.append("settled"))
    task.start()
    return task, told


def test_a_load_of_no_pages_ends_at_once() -> None:
    task, told = quiet(load_op([]))
    assert told == ["received", "settled"]
    assert task.report(0) == OpReport(0, OpId(7), 0, 0)


def test_between_received_and_settled_lies_the_fetch_that_has_not_come_back() -> None:
    task, told = quiet(load_op(["store"]))
    assert task.begin_fetch(0)
    task.cut(MissReason.CANCELLED)
    assert told == ["received"]
    assert task.report(0) == OpReport(0, OpId(7), 0, 0, Phase.RECEIVED, MissReason.CANCELLED)
    assert task.end_fetch(0, None) is False
    assert told == ["received", "settled"]
    assert task.report(0) == OpReport(0, OpId(7), 0, 1, reason=MissReason.CANCELLED)


def test_a_load_says_how_far_it_has_come_and_why_it_ends_only_at_its_end() -> None:
    task, _ = quiet(load_op(["host", "host", "host"]))
    for index in (0, 2):
        assert task.begin_copy(index)
    task.end_copy(0, None)
    task.fail(1, MissReason.ABSENT)
    assert task.report(0) == OpReport(0, OpId(7), 1, 3, Phase.RUNNING)
    task.end_copy(2, None)
    assert task.report(0) == OpReport(0, OpId(7), 1, 3, Phase.SETTLED, MissReason.ABSENT)


def test_a_page_whose_copy_failed_is_held_but_not_done() -> None:
    task, _ = quiet(load_op(["host", "host"]))
    assert task.begin_copy(0)
    task.end_copy(0, MissReason.ERROR)
    assert task.report(0) == OpReport(0, OpId(7), 0, 2, reason=MissReason.ERROR)


def test_a_load_is_cut_at_its_time_limit_and_not_before() -> None:
    start = time.monotonic()
    task, told = quiet(load_op(["host", "host"], time_limit_s=100))
    task.cut_if_late(start + 99)
    assert told == []
    task.cut_if_late(time.monotonic() + 100)
    assert told == ["received", "settled"]
    assert task.report(0).reason is MissReason.TIMEOUT


def test_a_load_without_a_time_limit_is_never_cut() -> None:
    task, told = quiet(load_op(["host"]))
    task.cut_if_late(time.monotonic() + 1e9)
    assert told == []


@settings(deadline=None)
@given(st.permutations(range(5)), st.sets(st.integers(0, 4)))
def test_a_write_reports_its_leading_run_after_its_last_page(order: list[int], failed: set[int]) -> None:
    task = WriteTask(OpId(4), tuple(move(index, index) for index in range(5)))
    for number, index in enumerate(order, start=1):
        last = task.end(index, MissReason.ERROR if index in failed else None)
        assert last == (number == 5)
        limit = min((at for at in order[:number] if at in failed), default=5)
        assert [task.is_wanted(at) for at in range(5)] == [at < limit for at in range(5)]
    leading = min(failed, default=5)
    reason = MissReason.ERROR if failed else None
    assert task.report(2) == OpReport(2, OpId(4), leading, leading, Phase.SETTLED, reason)


def test_a_write_reports_the_first_reason_that_came() -> None:
    task = WriteTask(OpId(4), (move(0, 0), move(1, 1)))
    task.end(1, MissReason.UNAVAILABLE)
    task.end(0, MissReason.ERROR)
    assert task.report(0).reason is MissReason.UNAVAILABLE
