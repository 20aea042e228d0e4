"""Drills: what the file may say, when a fault strikes, and what a rank says then; with a clock of the test's own."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.consensus import Ledger
from vllm_hicache.drills import Drill
from vllm_hicache.entries import EntryKind
from vllm_hicache.errors import ConfigError
from vllm_hicache.names import KEY_BYTES, MissReason, OpId, PageKey, Phase, RequestId, Slot
from vllm_hicache.plan import Ack, FlushOp, LoadOp, OpReport, PageMove, SaveOp
from vllm_hicache.rank_faults import FaultKind, Operation, OperationKind, RankFault, parse_faults
from vllm_hicache.ranklog import RankLog

RANK = 1
Start = Callable[..., "Rig"]


class SlotTable:
    """What a drill does to a rank's slot table."""

    def __init__(self) -> None:
        self.forgotten: list[list[int]] = []
        self.pinned: list[list[int]] = []

    def forget(self, slots: Iterable[Slot]) -> None:
        self.forgotten.append(list(slots))

    def pin(self, slots: Iterable[Slot]) -> None:
        self.pinned.append(list(slots))


class Rig:
    """One rank's drill, its file, its clock and its slot table."""

    def __init__(self, path: Path, faults: Sequence[dict[str, object]] | None) -> None:
        self.path, self.now, self.log, self._num_writes = path, 100.0, SlotTable(), 0
        if faults is not None:
            self.write(json.dumps([{"rank": RANK} | fault for fault in faults]))
        self.drill = Drill(path, RANK, lambda: self.now)

    def write(self, text: str) -> None:
        """Write the file, with a time that differs from the last one's however fast the test is."""
        self._num_writes += 1
        self.path.write_text(text, encoding="utf-8")
        os.utime(self.path, ns=(0, self._num_writes))

    def change(self, *faults: dict[str, object]) -> None:
        self.write(json.dumps([{"rank": RANK} | fault for fault in faults]))
        self.look()

    def end(self) -> None:
        self.path.unlink()
        self.look()

    def look(self) -> None:
        self.now += 0.125
        self.drill.look()

    def began(self, *ops: Operation, log: bool = True) -> None:
        for op in ops:
            self.drill.began(op, self.log if log else None)  # type: ignore[arg-type]

    def sent(self, *reports: OpReport, asked: Sequence[int] = (), after_s: float = 0.0) -> list[OpReport]:
        self.now += after_s
        return self.drill.reports(reports, [OpId(op) for op in asked])


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Start a drill of rank 1 with these faults, or with no file."""
    return lambda *faults, file=True: Rig(tmp_path / "faults.json", faults if file else None)


def pages(num_pages: int, num_from_store: int = 0, first_slot: int = 10) -> tuple[PageMove, ...]:
    """Pages in slots 10, 11, …; the last `num_from_store` come from the store."""
    return tuple(
        PageMove(PageKey(bytes([n]) * KEY_BYTES), Slot(first_slot + n), (), 0, n >= num_pages - num_from_store)
        for n in range(num_pages)
    )


def load(op: int, num_pages: int = 4, num_from_store: int = 0) -> LoadOp:
    return LoadOp(OpId(op), bytes(32), RequestId("r"), pages(num_pages, num_from_store))


def save(op: int, num_pages: int = 4) -> SaveOp:
    return SaveOp(OpId(op), pages(num_pages))


def flush(op: int, num_pages: int = 4) -> FlushOp:
    return FlushOp(OpId(op), bytes(32), pages(num_pages))


def report(op: int, done: int = 4, held: int | None = None, phase: Phase = Phase.SETTLED) -> OpReport:
    return OpReport(RANK, OpId(op), done, done if held is None else held, phase)


def ack(op: int, phase: Phase = Phase.SETTLED) -> Ack:
    return Ack(OpId(op), 4, 4, phase)


def parsed(**values: object) -> RankFault:
    return parse_faults(json.dumps([values]))[0]


def struck(rig: Rig, ops: Sequence[Operation]) -> list[int]:
    """Operations of which a `skip` loses the report."""
    rig.began(*ops)
    said = {each.op for op in ops for each in rig.sent(report(op.op))}
    return [op.op for op in ops if op.op not in said]


# What the file may say


def test_an_entry_has_the_values_that_are_written_and_defaults_for_the_rest() -> None:
    assert parsed(fault="delay", rank=3, operation="save", seconds=0.2, every=3, times=1) == RankFault(
        FaultKind.DELAY, 3, OperationKind.SAVE, seconds=0.2, every=3, times=1
    )
    assert parsed(fault="fail", rank=0) == RankFault(
        FaultKind.FAIL, 0, OperationKind.ANY, seconds=0.0, pages=0, every=1, times=None
    )
    assert parsed(fault="capacity", rank=0).pages == 1
    assert parsed(fault="forget", rank=0, pages=2).pages == 2


def test_entries_keep_the_order_of_the_file_and_an_empty_list_is_no_fault() -> None:
    text = '[{"fault": "skip", "rank": 1}, {"fault": "pin", "rank": 0}]'
    assert [each.fault for each in parse_faults(text)] == [FaultKind.SKIP, FaultKind.PIN]
    assert parse_faults("[]") == ()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"fault": "dealy", "rank": 1}, "fault='dealy' is not known here: did you mean 'delay'?"),
        ({"rank": 1}, "fault=None is not known here: choose one of delay, fail"),
        ({"fault": ["skip"], "rank": 1}, r"fault=\['skip'\] is not known"),
        ({"fault": "skip", "rank": 1, "evry": 2}, "unknown key 'evry' of fault='skip': did you mean 'every'?"),
        ({"fault": "skip", "rank": 1, "q": 2}, "unknown key 'q' of fault='skip': remove it. Known keys: fault, rank,"),
        ({"fault": "skip", "rank": 1, "operation": "lode"}, "operation='lode' is not known here: did you mean 'load'?"),
        ({"fault": "forget", "rank": 1, "operation": "flush"}, "operation='flush' .* choose one of load, any"),
        ({"fault": "pin", "rank": 1, "operation": "flush"}, "operation='flush' .* choose one of load, save, any"),
        ({"fault": "skip"}, "rank=None must be a whole number from 0 on"),
        ({"fault": "skip", "rank": -1}, "rank=-1 must be"),
        ({"fault": "skip", "rank": True}, "rank=True must be"),
        ({"fault": "skip", "rank": "1"}, "rank='1' must be"),
        ({"fault": "skip", "rank": 1, "every": 0}, "every=0 must be a whole number from 1 on"),
        ({"fault": "skip", "rank": 1, "times": 0}, "times=0 must be a whole number from 1 on"),
        ({"fault": "skip", "rank": 1, "times": None}, "times=None must be"),
        ({"fault": "fail", "rank": 1, "pages": -1}, "pages=-1 must be a whole number from 0 on"),
        ({"fault": "fail", "rank": 1, "pages": 1.0}, "pages=1.0 must be"),
        ({"fault": "capacity", "rank": 1, "pages": 0}, "pages=0 must be a whole number from 1 on"),
        ({"fault": "delay", "rank": 1}, "seconds=None must be seconds between 0 and 86400"),
        ({"fault": "delay", "rank": 1, "seconds": 0}, "seconds=0 must be"),
        ({"fault": "delay", "rank": 1, "seconds": float("nan")}, "seconds=nan must be"),
        ({"fault": "delay", "rank": 1, "seconds": 86400}, "seconds=86400 must be"),
        ({"fault": "delay", "rank": 1, "seconds": True}, "seconds=True must be"),
    ],
)
def test_what_an_entry_may_not_say_is_refused_with_its_place(values: dict[str, object], said: str) -> None:
    good = {"fault": "skip", "rank": 1}
    with pytest.raises(ConfigError, match=f"^entry 2: {said}"):
        parse_faults(json.dumps([good, values]))


@pytest.mark.parametrize(
    ("fault", "useless"),
    [
        ("delay", {"pages": 1}),
        ("fail", {"seconds": 1}),
        ("skip", {"seconds": 1, "pages": 1}),
        ("reorder", {"seconds": 1, "pages": 1}),
        ("forget", {"seconds": 1}),
        ("pin", {"seconds": 1, "pages": 1}),
        ("capacity", {"seconds": 1, "operation": "load", "every": 1, "times": 1}),
    ],
)
def test_a_key_that_means_nothing_to_its_fault_is_refused(fault: str, useless: dict[str, object]) -> None:
    needed = {"seconds": 1} if fault == "delay" else {}
    for key, value in useless.items():
        with pytest.raises(ConfigError, match=f"unknown key '{key}' of fault='{fault}'"):
            parsed(**({"fault": fault, "rank": 1, key: value} | needed))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("[{]", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("{}", "JSON but not a list of faults"),
        ("[7]", "entry 1 is 7, not an object"),
    ],
)
def test_a_text_that_is_no_list_of_objects_is_refused_with_an_example(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f'{said}.*write .*"fault": "delay"'):
        parse_faults(text)


# When faults are in force


def test_without_a_file_nothing_changes(start: Start) -> None:
    rig = start(file=False)
    rig.began(load(1), save(2), flush(3))
    said = [report(3), report(1), report(2)]
    assert rig.sent(*said) == said
    assert rig.drill.acks([ack(2), ack(1)]) == [ack(2), ack(1)]
    assert rig.drill.capacity(8) == 8
    assert not rig.log.forgotten
    assert not rig.log.pinned


def test_faults_of_other_ranks_are_not_in_force(start: Start) -> None:
    rig = start({"fault": "skip", "rank": 0}, {"fault": "capacity", "rank": 2})
    assert struck(rig, [load(1)]) == []
    assert rig.drill.capacity(8) == 8


@pytest.mark.parametrize("text", ["[{]", '[{"fault": "skip", "rank": 1, "evry": 2}]'])
def test_a_file_that_cannot_be_parsed_is_refused_at_start_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "faults.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^rank_faults='.*faults.json': .*; mend the file or remove it$"):
        Drill(path, RANK)


def test_a_file_that_is_no_text_or_no_file_is_refused_at_start(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_bytes(b"\xff\xfe[")
    for place in (path, tmp_path):
        with pytest.raises(ConfigError, match="mend the file"):
            Drill(place, RANK)


def test_a_drill_begins_and_ends_while_the_engine_serves(start: Start) -> None:
    rig = start(file=False)
    assert struck(rig, [load(1)]) == []
    rig.change({"fault": "skip"})
    assert struck(rig, [load(2)]) == [2]
    rig.end()
    assert struck(rig, [load(3)]) == []


def test_the_file_is_looked_at_at_most_every_tenth_of_a_second(start: Start) -> None:
    rig = start(file=False)
    rig.write('[{"fault": "capacity", "rank": 1}]')
    believed = []
    for _ in range(3):
        rig.drill.look()
        believed.append(rig.drill.capacity(8))
        rig.now += 0.0625
    assert believed == [8, 8, 7]


def test_after_a_look_without_a_change_the_next_one_is_a_tenth_of_a_second_away(start: Start) -> None:
    rig = start(file=False)
    rig.look()
    rig.write('[{"fault": "capacity", "rank": 1}]')
    rig.now += 0.0625
    rig.drill.look()
    assert rig.drill.capacity(8) == 8


def test_a_file_damaged_at_run_time_ends_the_drill_and_is_logged_once_a_change(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    rig = start({"fault": "skip"})
    for text in ("[{]", '[{"fault": "skip", "rank": 1, "evry": 2}]'):
        caplog.clear()
        rig.write(text)
        for _ in range(3):
            rig.look()
        assert [each.getMessage().count("rank 1: no fault is in force: rank_faults=") for each in caplog.records] == [
            1,
            0,
        ]
        assert struck(rig, [load(1)]) == []


def test_a_repaired_file_is_in_force_again(start: Start) -> None:
    rig = start({"fault": "skip"})
    rig.write("[{]")
    rig.look()
    rig.change({"fault": "skip"})
    assert struck(rig, [load(1)]) == [1]


def test_a_file_of_the_same_time_and_another_size_is_a_change(start: Start) -> None:
    rig = start({"fault": "capacity"})
    rig.path.write_text('[{"fault": "capacity", "rank": 1, "pages": 3}]', encoding="utf-8")
    os.utime(rig.path, ns=(0, 1))
    rig.look()
    assert rig.drill.capacity(8) == 5


def test_the_faults_in_force_on_this_rank_are_said_at_start_and_at_each_change(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    other = {"fault": "skip", "rank": 0}
    rig = start({"fault": "delay", "operation": "load", "seconds": 0.2, "times": 3}, other, {"fault": "skip"})
    rig.look()
    rig.end()
    assert {each.levelno for each in caplog.records} == {logging.WARNING}
    said = [each.getMessage().partition("faults.json': ")[2] for each in caplog.records]
    assert said == ["delay operation=load seconds=0.2 every=1 times=3; skip operation=any every=1", "none"]


def test_a_changed_file_counts_anew(start: Start) -> None:
    rig = start({"fault": "skip", "times": 1})
    assert struck(rig, [load(1), load(2)]) == [1]
    rig.change({"fault": "skip", "times": 1})
    assert struck(rig, [load(3), load(4)]) == [3]


# Which operations are struck


@pytest.mark.parametrize(
    ("operation", "expected"), [("load", [1, 4]), ("save", [2, 5]), ("flush", [3, 6]), ("any", [1, 2, 3, 4, 5, 6])]
)
def test_a_fault_strikes_operations_of_its_kind(start: Start, operation: str, expected: list[int]) -> None:
    rig = start({"fault": "skip", "operation": operation})
    assert struck(rig, [load(1), save(2), flush(3), load(4), save(5), flush(6)]) == expected


def test_every_and_times_count_operations_in_the_plans_order(start: Start) -> None:
    rig = start({"fault": "skip", "operation": "load", "every": 3, "times": 2})
    ops = [op for n in range(1, 24, 2) for op in (load(n), save(n + 1))]
    assert struck(rig, ops) == [5, 11]


def test_operations_on_which_a_fault_has_no_effect_are_not_counted(start: Start) -> None:
    rig = start(
        {"fault": "fail", "pages": 2, "times": 1},
        {"fault": "forget", "pages": 3, "times": 1},
        {"fault": "pin", "times": 1},
    )
    rig.began(load(1, 2), flush(2, 2), load(3, 3, 1), load(4, 4, 1), load(5, 4))
    assert [rig.sent(report(op))[0].pages_done for op in (1, 2, 3, 4, 5)] == [4, 4, 2, 4, 4]
    assert (rig.log.forgotten, rig.log.pinned) == ([[13]], [[12]])


def test_of_two_faults_of_one_kind_the_first_strikes_and_only_it_is_counted(start: Start) -> None:
    rig = start({"fault": "fail", "pages": 1, "times": 1}, {"fault": "fail", "pages": 3, "times": 1})
    rig.began(load(1), load(2), load(3))
    assert [each.pages_done for each in rig.sent(report(1), report(2), report(3))] == [1, 3, 4]


def test_an_operation_begun_before_the_drill_is_not_struck(start: Start) -> None:
    rig = start(file=False)
    rig.began(load(1))
    rig.change({"fault": "skip"}, {"fault": "fail"})
    assert rig.sent(report(1)) == [report(1)]


# delay


def test_a_delayed_report_comes_when_its_time_is_over_and_others_overtake_it(start: Start) -> None:
    rig = start({"fault": "delay", "operation": "load", "seconds": 0.25})
    rig.began(load(1), save(2))
    assert rig.sent(report(1), report(2)) == [report(2)]
    assert rig.sent(after_s=0.125) == []
    assert rig.sent(after_s=0.125) == [report(1)]
    assert rig.sent(after_s=1.0) == []


def test_each_report_of_an_operation_is_withheld_as_long(start: Start) -> None:
    rig = start({"fault": "delay", "seconds": 0.25})
    rig.began(load(1))
    first, second = report(1, 2, phase=Phase.RUNNING), report(1)
    assert rig.sent(first) == []
    assert rig.sent(second, after_s=0.125) == []
    assert rig.sent(after_s=0.125) == [first]
    assert rig.sent(after_s=0.125) == [second]


def test_the_delay_of_an_operation_that_is_asked_for_is_over(start: Start) -> None:
    rig = start({"fault": "delay", "seconds": 60})
    rig.began(load(1), load(2))
    running = report(1, 2, phase=Phase.RUNNING)
    assert rig.sent(running, report(2)) == []
    assert rig.sent(asked=[1]) == [running]
    assert rig.sent(report(1)) == [report(1)]
    assert rig.sent(after_s=60) == [report(2)]


# fail


def test_a_failed_operation_says_no_more_than_its_pages_and_that_it_was_an_error(start: Start) -> None:
    rig = start({"fault": "fail", "pages": 2})
    rig.began(load(1))
    assert rig.sent(report(1, 3, 4)) == [OpReport(RANK, OpId(1), 2, 2, Phase.SETTLED, MissReason.ERROR)]


def test_pages_done_below_the_failed_one_stay_and_only_what_is_held_is_cut(start: Start) -> None:
    rig = start({"fault": "fail", "pages": 2})
    rig.began(load(1))
    assert rig.sent(report(1, 1, 4)) == [OpReport(RANK, OpId(1), 1, 2, Phase.SETTLED, MissReason.ERROR)]


def test_an_operation_that_came_less_far_keeps_its_own_word(start: Start) -> None:
    rig = start({"fault": "fail", "pages": 2})
    rig.began(load(1))
    own = replace(report(1, 1, 2), reason=MissReason.CORRUPT)
    assert rig.sent(own) == [own]


def test_without_pages_nothing_of_a_failed_operation_is_done(start: Start) -> None:
    rig = start({"fault": "fail"})
    rig.began(save(1))
    assert [(each.pages_done, each.pages_held) for each in rig.sent(report(1))] == [(0, 0)]


def test_a_failed_operation_stays_failed_when_asked_for_and_when_the_drill_ends(start: Start) -> None:
    rig = start({"fault": "fail", "pages": 1})
    rig.began(load(1))
    rig.sent(report(1, 2, phase=Phase.RECEIVED))
    failed = OpReport(RANK, OpId(1), 1, 1, Phase.SETTLED, MissReason.ERROR)
    assert rig.sent(report(1), asked=[1]) == [failed]
    rig.end()
    assert rig.sent(report(1)) == [failed]


def test_an_operation_asked_for_before_its_first_report_fails_all_the_same(start: Start) -> None:
    rig = start({"fault": "fail", "pages": 1})
    rig.began(load(1))
    assert rig.sent(asked=[1]) == []
    assert [each.pages_done for each in rig.sent(report(1))] == [1]


def test_an_operation_of_which_nothing_was_cut_is_free_when_the_drill_ends(start: Start) -> None:
    rig = start({"fault": "fail", "pages": 1})
    rig.began(load(1))
    rig.sent(report(1, 1, phase=Phase.RUNNING))
    rig.end()
    assert rig.sent(report(1)) == [report(1)]


@given(
    steps=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.booleans(), st.booleans()), max_size=20),
    pages_left=st.integers(0, 5),
)
def test_reports_of_a_failed_operation_never_fall(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, bool, bool]], pages_left: int
) -> None:
    rig = Rig(tmp_path_factory.mktemp("drill") / "faults.json", [{"fault": "fail", "pages": pages_left}])
    rig.began(load(1, 20))
    said, done, held = [], 0, 0
    for more_done, more_held, asked, ends in steps:
        held += more_done + more_held
        done += more_done
        if ends:
            rig.change()
        said += rig.sent(report(1, done, held, Phase.RUNNING), asked=[1] if asked else [])
    assert len(said) == len(steps)
    for values in ([each.pages_done for each in said], [each.pages_held for each in said]):
        assert values == sorted(values)
    assert all(each.pages_done <= each.pages_held for each in said)


# skip


def test_a_skipped_report_is_lost_until_the_scheduler_half_asks(start: Start) -> None:
    rig = start({"fault": "skip"})
    rig.began(load(1))
    assert rig.sent(report(1)) == []
    assert rig.sent(after_s=60) == []
    assert rig.sent(report(1), asked=[1]) == [report(1)]


def test_once_asked_for_no_report_of_an_operation_is_lost_any_more(start: Start) -> None:
    rig = start({"fault": "skip"})
    rig.began(load(1))
    assert rig.sent(asked=[1]) == []
    assert rig.sent(report(1)) == [report(1)]


def test_asking_for_one_operation_leaves_the_others_lost(start: Start) -> None:
    rig = start({"fault": "skip"})
    rig.began(load(1), load(2))
    assert rig.sent(report(1), report(2), asked=[2]) == [report(2)]


def test_what_is_reported_after_the_drill_is_not_lost(start: Start) -> None:
    rig = start({"fault": "skip"})
    rig.began(load(1))
    rig.end()
    assert rig.sent(report(1)) == [report(1)]


# reorder


def test_reports_of_one_step_come_latest_first(start: Start) -> None:
    rig = start({"fault": "reorder"})
    rig.began(load(1), load(2), load(3))
    assert rig.sent(report(1), report(2), report(3)) == [report(3), report(2), report(1)]
    assert rig.sent(after_s=1.0) == []


def test_a_single_report_waits_for_a_second_one(start: Start) -> None:
    rig = start({"fault": "reorder"})
    rig.began(load(1), load(2))
    assert rig.sent(report(1)) == []
    assert rig.sent(report(2), after_s=0.25) == [report(2), report(1)]


def test_a_single_report_waits_for_half_a_second_and_no_longer(start: Start) -> None:
    rig = start({"fault": "reorder"})
    rig.began(load(1))
    assert rig.sent(report(1)) == []
    assert rig.sent(after_s=0.4375) == []
    assert rig.sent(after_s=0.0625) == [report(1)]


def test_reports_that_are_not_struck_do_not_wait(start: Start) -> None:
    rig = start({"fault": "reorder", "operation": "load"})
    rig.began(load(1), save(2), load(3))
    assert rig.sent(report(1), report(2)) == [report(2)]
    assert rig.sent(report(3)) == [report(3), report(1)]


def test_a_report_that_waits_for_another_comes_when_it_is_asked_for(start: Start) -> None:
    rig = start({"fault": "reorder"})
    rig.began(load(1), load(2))
    running = report(1, 2, phase=Phase.RUNNING)
    assert rig.sent(running) == []
    assert rig.sent(report(1), asked=[1]) == [running, report(1)]
    assert rig.sent(report(2)) == []


def test_acknowledgements_of_struck_operations_are_consumed_latest_first(start: Start) -> None:
    rig = start({"fault": "reorder", "operation": "load"})
    rig.began(load(1), save(2), load(3), load(4))
    assert [each.op for each in rig.drill.acks([ack(1), ack(2), ack(3), ack(4)])] == [4, 2, 3, 1]


def test_acknowledgements_come_in_order_once_the_drill_is_over(start: Start) -> None:
    rig = start({"fault": "reorder"})
    rig.began(load(1), load(2))
    rig.end()
    assert rig.drill.acks([ack(1), ack(2)]) == [ack(1), ack(2)]


def test_a_short_rank_consumes_no_more_than_its_pages_of_struck_operations(start: Start) -> None:
    rig = start({"fault": "short", "operation": "load", "pages": 3})
    rig.began(load(1), save(2), load(3, num_pages=3))
    assert [each.pages_done for each in rig.drill.acks([ack(1), ack(2), ack(3)])] == [3, 4, 4]


def test_a_short_rank_stays_short_when_it_is_asked(start: Start) -> None:
    rig = start({"fault": "short", "pages": 1})
    rig.began(load(1))
    rig.sent(report(1), asked=[1])
    assert rig.drill.acks([ack(1)]) == [replace(ack(1), pages_done=1)]


def test_an_operation_is_struck_until_it_is_acknowledged_as_settled(start: Start) -> None:
    rig = start({"fault": "reorder"})
    rig.began(load(1), load(2))
    for phase in (Phase.RECEIVED, Phase.SETTLED):
        assert rig.drill.acks([ack(1, phase), ack(2, phase)]) == [ack(2, phase), ack(1, phase)]
    assert rig.sent(report(1)) == [report(1)]


def test_a_failed_operation_is_forgotten_when_it_is_acknowledged_as_settled(start: Start) -> None:
    rig = start({"fault": "fail"})
    rig.began(load(1))
    rig.sent(report(1))
    rig.drill.acks([ack(1)])
    assert rig.sent(report(1)) == [report(1)]


# What waits when the drill ends


def test_what_waits_is_sent_at_once_when_the_drill_ends(start: Start) -> None:
    rig = start({"fault": "delay", "operation": "load", "seconds": 60}, {"fault": "reorder", "operation": "save"})
    rig.began(load(1), save(2))
    assert rig.sent(report(1), report(2)) == []
    rig.end()
    assert sorted(each.op for each in rig.sent()) == [1, 2]
    assert rig.sent(after_s=60) == []


def test_a_delayed_report_joins_the_batch_when_its_delay_is_over(start: Start) -> None:
    rig = start({"fault": "delay", "times": 1, "seconds": 0.25}, {"fault": "reorder"})
    rig.began(load(1), load(2))
    assert rig.sent(report(1), report(2)) == []
    assert rig.sent(after_s=0.25) == [report(1), report(2)]


@given(steps=st.lists(st.tuples(st.sampled_from(["report", "ask", "wait", "change"]), st.integers(1, 5)), max_size=30))
def test_every_report_is_sent_exactly_once_whatever_delays_and_reorders_it(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    faults: list[dict[str, Any]] = [{"fault": "delay", "seconds": 0.3, "every": 2}, {"fault": "reorder", "every": 3}]
    rig = Rig(tmp_path_factory.mktemp("drill") / "faults.json", faults)
    rig.began(*(load(op, 100) for op in range(1, 6)))
    given_, sent = [], []
    for number, (what, op) in enumerate(steps):
        if what == "change":
            rig.change(*faults)
        new = [report(op, number, phase=Phase.RUNNING)] if what == "report" else []
        given_ += new
        sent += rig.sent(*new, asked=[op] if what == "ask" else [], after_s=0.1 * op if what == "wait" else 0.0)
    rig.end()
    sent += rig.sent()
    assert sorted(sent, key=repr) == sorted(given_, key=repr)


@given(
    kinds=st.lists(st.sampled_from(["delay", "fail", "skip", "reorder"]), max_size=4, unique=True),
    ends=st.booleans(),
)
def test_the_ledger_settles_every_operation_with_the_least_whatever_a_rank_does(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[str], ends: bool
) -> None:
    needed = {"delay": {"seconds": 0.3}, "fail": {"pages": 1}}
    rig = Rig(
        tmp_path_factory.mktemp("drill") / "faults.json", [{"fault": kind} | needed.get(kind, {}) for kind in kinds]
    )
    ledger, acks = Ledger([0, RANK], silence_s=1.0), []
    ops = [ledger.open() for _ in range(3)]
    rig.began(*(load(op) for op in ops))
    own: list[OpReport] = [report(op) for op in ops]
    said = [replace(each, rank=0) for each in own] + rig.sent(*own)
    if ends:
        rig.end()
    for _ in range(8):
        acks += [made for each in said if (made := ledger.record(each, rig.now))]
        asked = [silence.op for silence in ledger.silences(rig.now)]
        said = rig.sent(*(report(op) for op in asked), asked=asked, after_s=0.3)
    assert ledger.num_open == 0
    assert sorted((each.op, each.pages_done) for each in acks) == [
        (op, 1 if "fail" in kinds and not ("skip" in kinds and ends) else 4) for op in ops
    ]


# forget, pin, capacity


def test_a_rank_forgets_the_host_slots_of_a_loads_pages_from_a_number_on(start: Start) -> None:
    rig = start({"fault": "forget", "pages": 1})
    rig.began(load(1, 4, 1), save(2), flush(3), load(4, 2))
    assert rig.log.forgotten == [[11, 12], [11]]
    assert not rig.log.pinned


def test_a_rank_holds_the_first_slot_that_is_to_be_filled(start: Start) -> None:
    rig = start({"fault": "pin"})
    rig.began(load(1, 4, 2), flush(2), save(3), load(4, 4, 0))
    assert rig.log.pinned == [[12], [10]]
    assert not rig.log.forgotten


def test_a_rank_vouches_only_for_what_it_has_not_forgotten(start: Start) -> None:
    rig, log = start({"fault": "forget", "pages": 3, "operation": "load"}), RankLog(RANK, 100)
    log.begin(save(1))
    log.consume(ack(1))
    rig.drill.began(load(2), log)
    assert log.begin(load(2)) == 3


def test_a_rank_vouches_for_nothing_from_a_slot_on_that_it_holds_in_use(start: Start) -> None:
    rig, log = start({"fault": "pin", "times": 1}), RankLog(RANK, 100)
    rig.drill.began(save(1), log)
    assert log.begin(save(1)) == 0
    evictions = [each.value for each in log.take() if each.kind is EntryKind.EVICT]
    assert evictions == [3]


def test_reports_of_operations_that_forget_and_pin_strike_pass(start: Start) -> None:
    rig = start({"fault": "forget"}, {"fault": "pin"})
    rig.began(load(1), save(2))
    assert rig.sent(report(1), report(2)) == [report(1), report(2)]


def test_without_a_slot_table_forget_and_pin_say_once_that_nothing_comes_of_them(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    rig = start({"fault": "forget", "times": 1}, {"fault": "pin"})
    caplog.clear()
    rig.began(load(1), save(2), save(3), log=False)
    assert [each.getMessage().count("consensus='off'") for each in caplog.records] == [1]
    rig.began(load(4))
    assert rig.log.forgotten == [[10, 11, 12, 13]]


def test_that_nothing_comes_of_forget_and_pin_is_said_again_after_a_change(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    rig = start({"fault": "pin"})
    for op in (1, 2):
        rig.change({"fault": "pin"})
        rig.began(save(op), log=False)
    assert sum("consensus='off'" in each.getMessage() for each in caplog.records) == 2


@pytest.mark.parametrize(("fault", "believed"), [({}, 7), ({"pages": 3}, 5), ({"pages": 9}, 0)])
def test_a_rank_believes_in_fewer_host_pages(start: Start, fault: dict[str, object], believed: int) -> None:
    other = {"fault": "fail", "pages": 4}
    assert start(other, {"fault": "capacity"} | fault).drill.capacity(8) == believed


def test_a_fault_of_capacity_strikes_no_operation(start: Start) -> None:
    rig = start({"fault": "capacity"})
    rig.began(load(1))
    assert rig.sent(report(1)) == [report(1)]
    assert not parsed(fault="capacity", rank=RANK).strikes(load(1))
