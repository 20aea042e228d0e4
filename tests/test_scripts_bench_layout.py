"""The layout benchmark's parts: its cases are what they say, it proves what it times, and its result is JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import bench_layout_copies
import pytest
from bench_layout_copies import Case, Rig, Row, cases, measure, rounds
from bench_layout_steps import scheduler_step_times

from vllm_hicache.plan import PageMove

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def a_row(ratio: float) -> Row:
    return Row("a case", "1x1", "pack", 1, 1 << 20, 2, 9.0, 10.0, ratio, 0.5)


def test_of_each_model_one_rank_holds_one_cell_one_holds_the_most_and_one_holds_parts() -> None:
    for same, widest, reader in zip(cases()[::3], cases()[1::3], cases()[2::3], strict=True):
        assert [part.is_whole for part in same.geometry.parts] == [True]
        assert len(widest.geometry.parts) == same.geometry.parts[0].cell.num_units
        assert sum(not part.is_whole for part in reader.geometry.parts) >= 2


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_every_case_comes_back_as_it_went_in_and_is_measured_both_ways(case: Case) -> None:
    rows = measure(case, num_pages=2, num_rounds=1)
    assert [row.direction for row in rows] == ["pack", "unpack"]
    assert all(row.gib_per_s > 0 and row.memcpy_gib_per_s > 0 and row.ratio > 0 for row in rows)
    assert {row.page_bytes for row in rows} == {case.geometry.slot_bytes}


def test_a_copier_that_leaves_a_page_out_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(cases()[0], 2)
    monkeypatch.setattr(rig.copier, "save", lambda moves, fence: None)
    with pytest.raises(RuntimeError, match="2 pages do not come back as they went in"):
        rig.prove()


def test_pages_lie_in_blocks_of_another_order_than_slots() -> None:
    moves: list[PageMove] = Rig(cases()[0], 8).moves
    assert sorted(move.blocks[0] for move in moves) == sorted(move.slot for move in moves) == list(range(8))
    assert [int(move.blocks[0]) for move in moves] != [int(move.slot) for move in moves]


def test_rounds_run_every_work_once_and_every_other_round_backwards() -> None:
    ran: list[str] = []
    taken = rounds({"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}, 3)
    assert "".join(ran) == "ba" + "ab" + "ba" + "ab"
    assert {name: len(times) for name, times in taken.items()} == {"a": 3, "b": 3}


@pytest.mark.parametrize(("ratio", "verdict"), [(0.5, "ok"), (0.49, "UNDER")])
def test_a_ratio_is_judged_by_its_aim(ratio: float, verdict: str) -> None:
    assert a_row(ratio).to_json()["verdict"] == verdict
    assert bench_layout_copies.table([a_row(ratio)]).endswith(verdict)


def test_steps_are_timed_for_every_number_of_ranks() -> None:
    steps = scheduler_step_times(3, (1, 4))
    assert [step.num_ranks for step in steps] == [1, 4]
    assert all(min(step.agree_s, step.compare_s, step.books_s) > 0 for step in steps)


def test_a_quick_run_shows_a_table_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    command = [sys.executable, str(SCRIPTS / "bench_layout_run.py"), "--quick", "--json", str(path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    result = json.loads(path.read_text())
    assert len(result["copies"]) == 2 * len(cases())
    assert [step["num_ranks"] for step in result["steps"]] == [1, 2, 8, 32]
    assert all(row["case"] in shown for row in result["copies"])
