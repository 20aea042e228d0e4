"""What chaos reads and concludes, without an engine."""

from __future__ import annotations

import pytest
from chaos_engine import sample
from chaos_faults import CELLS, Missed, at_the_moment, cells_of
from chaos_report import CellRecord, assemble, table
from chaos_run import evidence, held_by
from chaos_stores import STORES
from engine_process import Answer

REFERENCE = Answer(1.0, 1.0, [5, 6, 7], [-0.5, -0.25, -1.0], {})


def sound() -> CellRecord:
    return CellRecord("redis", "flip", num_requests=20, num_struck=3, recovery_s=1.5, misses={"corrupt": 3})


def answered(tokens: list[int], logprobs: list[float]) -> CellRecord:
    record = sound()
    record.add(Answer(2.0, 2.0, tokens, logprobs, {}), REFERENCE)
    return record


def test_a_row_in_which_all_held_has_no_problem() -> None:
    assert sound().problems() == []
    assert answered([5, 6, 7], [-0.5, -0.25, -1.0]).problems() == []


def test_answers_that_differ_by_rounding_are_right() -> None:
    record = answered([5, 9, 1], [-0.5, -0.5, -30.0])
    assert (record.num_wrong, record.problems()) == (0, [])


@pytest.mark.parametrize("logprobs", [[-0.5, -3.0, -1.0], [float("nan"), -0.25, -1.0]], ids=str)
def test_answers_that_differ_by_more_are_wrong(logprobs: list[float]) -> None:
    record = answered([5, 9, 7], logprobs)
    assert record.problems() == ["1 wrong answers"]


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("num_failed", 2, "2 failed requests"),
        ("num_hung", 1, "1 hung requests"),
        ("leaked", {"open operations": 3}, "3 open operations leaked"),
        ("is_alive", False, "the engine died"),
        ("num_struck", 0, "the fault was never met"),
        ("recovery_s", None, "no store hit came back"),
        ("recovery_s", 10.5, "hits came back after 10.5 s: at most 10 s allowed"),
        ("error", "EngineError: x", "EngineError: x"),
    ],
)
def test_everything_that_must_not_be_is_a_problem(field: str, value: object, problem: str) -> None:
    record = sound()
    setattr(record, field, value)
    assert record.problems() == [problem]
    assert assemble([record])["cells"][0]["problems"] == [problem]


def test_hits_on_pages_that_are_computed_first_may_take_their_time() -> None:
    record = sound()
    record.recovery_s, record.recomputes = 30.0, True
    assert record.problems() == []


def test_a_row_that_this_machine_cannot_have_is_skipped_and_says_why() -> None:
    record = CellRecord("s3", "full", skipped="be root")
    assert record.problems() == []
    assert "skipped: be root" in table([record])


def test_the_table_has_a_line_for_each_row() -> None:
    lines = table([sound(), CellRecord("s3", "hang")]).splitlines()
    assert len(lines) == 3
    assert "corrupt 3" in lines[1]
    assert "never" in lines[2]


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ('vllm:hicache_misses_total{engine="0",model_name="chaos",reason="corrupt"} 4.0', ("misses", "corrupt"), 4.0),
        ('vllm:hicache_bytes_total{direction="load",engine="0",model_name="chaos"} 1e+06', ("bytes", "load"), 1e6),
        ('vllm:hicache_open_operations{engine="0",model_name="chaos"} 0.0', ("open_operations", ""), 0.0),
    ],
)
def test_a_line_of_metrics_is_read_wherever_its_own_label_stands(line: str, key: tuple[str, str], value: float) -> None:
    assert sample(line) == (key, value)


def test_only_what_is_held_is_a_leak() -> None:
    reading = {("host_pages", "reserved"): 2.0, ("host_pages", "used"): 9.0, ("open_operations", ""): 0.0}
    assert held_by(reading) == {"reserved pages": 2}
    assert held_by({}) == {}


def test_every_store_has_a_row_for_every_fault_that_it_can_have() -> None:
    names = {store: [cell.name for cell in cells_of(store, frozenset())] for store in STORES}
    assert names["s3"] == [cell.name for cell in CELLS]
    assert names["redis"] == [name for name in names["s3"] if name != "503"]
    assert [cell.name for cell in cells_of("s3", frozenset({"hang"}))] == ["hang"]


@pytest.mark.parametrize(("name", "met"), [("full", 7), ("evicted before the read", 4), ("stopped", 1)])
def test_the_evidence_that_a_fault_was_met_is_what_the_engine_counted(name: str, met: int) -> None:
    (cell,) = [each for each in CELLS if each.name == name]
    assert evidence(cell, CellRecord("s3", name, misses={"absent": 4}, num_flush_errors=7)) == met


def test_a_fault_strikes_at_its_moment() -> None:
    struck: list[int] = []
    with at_the_moment(lambda: not struck, lambda: struck.append(1)):
        pass
    assert struck == [1]


def test_a_fault_whose_moment_never_comes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaos_faults.MOMENT_LIMIT_S", 0.0)
    with pytest.raises(Missed), at_the_moment(lambda: False, lambda: None):
        pass
