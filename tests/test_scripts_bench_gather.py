"""The gather benchmark's parts: it proves what it times, judges by its aims, and its result is JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import bench_gather_run
import pytest
import torch
from bench_gather_rank import OVERLAPPED, WORKS, Measured, Rig, Settings, cache_of, measure_context, tables_of
from bench_gather_report import Row, draw, row_of, table
from torch import distributed

from vllm_hicache.context_parallel.tables import ScratchTables
from vllm_hicache.transfer.collective import GlooCollective

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
GIB = 1 << 30


def a_rank(**changed: dict[str, list[float]]) -> Measured:
    walls = {"gather": [2.0, 4.0], "bare": [1.0, 6.0], "attend": [1.0, 1.0], "step": [3.0, 5.0]}
    waits = {"step": [1.0, 1.0], "chunk": [0.0, 0.0]}
    busy = {"step": [4.0, 4.0], "chunk": [4.0, 4.0]}
    found = Measured(
        2, 4096, GIB, GIB // 2, 2 * GIB, {**walls, "in turn": [4.0, 10.0], "chunk": [9.0, 9.0]}, busy, waits
    )
    return replace(found, **changed)


def a_row(ratio: float = 1.0, scratch_layers: float = 2.0) -> Row:
    return replace(row_of(2, [a_rank()]), ratio=ratio, scratch_bytes=round(scratch_layers * GIB))


def alone(num_layers: int = 3, num_rounds: int = 1) -> Rig:
    """A rank without others."""
    settings = Settings(1, num_layers, (1024,), num_rounds)
    return Rig(settings, 0, 1024, GlooCollective(None, 30.0))


def test_a_row_is_of_medians_and_of_the_slowest_rank_in_each_round() -> None:
    row = row_of(2, [a_rank(), a_rank(wall_s={name: [1.0, 1.0] for name in WORKS})])
    assert (row.gib_per_s, row.bare_gib_per_s) == (1 / 3.0, 1 / 3.5)
    assert (row.gather_s, row.attend_s, row.step_s, row.in_turn_s) == (1.5, 0.5, 4.0, 7.0)
    assert row.ratio == pytest.approx((1 / 2 + 6 / 4) / 2)
    assert row.saved == pytest.approx((1 / 4 + 5 / 10) / 2)


def test_what_is_hidden_is_what_attention_did_not_wait_for_on_average_over_ranks() -> None:
    row = row_of(2, [a_rank(), a_rank(exposed_s={"step": [5.0, 5.0], "chunk": [2.0, 2.0]})])
    assert (row.hidden, row.chunk_hidden) == (0.375, 0.75)


@pytest.mark.parametrize(
    ("ratio", "scratch_layers", "verdict"), [(0.9, 2.0, "ok"), (0.89, 2.0, "UNDER"), (1.5, 2.01, "OVER")]
)
def test_a_row_is_judged_by_both_aims(ratio: float, scratch_layers: float, verdict: str) -> None:
    assert a_row(ratio, scratch_layers).to_json()["verdict"] == verdict
    assert table([a_row(ratio, scratch_layers)]).endswith(verdict)


def test_pages_of_neighbouring_layers_ranks_and_blocks_differ_in_every_value() -> None:
    here = cache_of(1, 1, torch.arange(4))
    for layer, rank, blocks in ((2, 1, [0, 1, 2, 3]), (1, 2, [0, 1, 2, 3]), (1, 1, [1, 2, 3, 4])):
        assert here.ne(cache_of(layer, rank, torch.tensor(blocks))).all()


def test_the_request_has_its_whole_context_as_history_and_its_blocks_in_another_order() -> None:
    tables: ScratchTables = tables_of(2, 1, 4096)
    assert (tables.num_history, tables.num_fresh, tables.num_pages) == (16, 1, 34)
    assert tables.block_table[0, ::2].tolist() != sorted(tables.block_table[0, ::2].tolist())


def test_a_page_that_is_not_its_ranks_is_found_before_anything_is_timed() -> None:
    rig = alone()
    rig.caches[2][int(rig.tables.history[3])] = 0
    with pytest.raises(RuntimeError, match="layer 2: the pages of rank 0 are not what that rank holds"):
        measure_context(rig)


def test_every_work_is_timed_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "barrier", lambda: None)
    monkeypatch.setattr(distributed, "all_gather_single", lambda into, own: into.copy_(own))
    found = measure_context(alone(num_rounds=3))
    assert {name: len(times) for name, times in found.wall_s.items()} == dict.fromkeys(WORKS, 3)
    assert {name: len(times) for name, times in found.busy_s.items()} == dict.fromkeys(OVERLAPPED, 3)
    assert (found.scratch_bytes, found.received_bytes) == (2 * found.layer_bytes, 0)


@pytest.mark.parametrize(("num_cores", "is_said"), [(2, True), (3, True), (4, False)])
def test_it_says_when_ranks_share_cores(monkeypatch: pytest.MonkeyPatch, num_cores: int, is_said: bool) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(num_cores)))
    assert bool(bench_gather_run.crowding(2)) is is_said


def test_the_picture_is_the_same_each_time(tmp_path: Path) -> None:
    one, other = tmp_path / "one.svg", tmp_path / "other.svg"
    for path in (one, other):
        draw([a_row()], path)
    assert one.read_bytes() == other.read_bytes()


def test_a_quick_run_shows_a_table_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "gather.json"
    command = [sys.executable, str(SCRIPTS / "bench_gather_run.py"), "--quick", "--ranks", "2", "--json", str(path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout
    rows = json.loads(path.read_text())["rows"]
    assert [(row["num_ranks"], row["context_tokens"]) for row in rows] == [(2, 1024), (2, 4096)]
    assert all(row["scratch_layers"] == 2 and row["gib_per_s"] > 0 for row in rows)
    assert all(f"{row['context_tokens']:,}" in shown for row in rows)
