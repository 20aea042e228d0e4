"""Host memory of two ranks that hold the same KV: sharded it keeps twice as many pages as replicated, on a real engine.

A model with one KV head and random weights. The working set is one and a half times what one rank has room for, and is
asked for in turn, which is the worst that can happen to a least-recently-used order: what is asked next has just gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matrix_worker
import numpy as np
import pytest
from engine_kit import PAGE, Answer, Engine, alike, engine, prompt_of
from matrix_cut import Cut
from matrix_pages import Pages
from matrix_worker import Bytes, Worker
from random_model import VOCABULARY, random_model

from vllm_hicache.config import HostTier
from vllm_hicache.transfer.collective import Pending

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NUM_LAYERS = 4
PAGE_BYTES = NUM_LAYERS * PAGE * 2 * 64 * 2
ROOM_PAGES = 20
PROMPT_PAGES = 5
NUM_PROMPTS = 6
NUM_PAGES = NUM_PROMPTS * PROMPT_PAGES
PROMPTS = [prompt_of(PROMPT_PAGES * PAGE + 20, seed, VOCABULARY) for seed in range(NUM_PROMPTS)]


@dataclass(frozen=True)
class Turn:
    """A prompt that is asked for the second time round, beside vLLM's own hit right after the first time."""

    hit: Answer
    restored: Answer
    before: Pages
    after: Pages


@dataclass(frozen=True)
class Shown:
    """What an engine has shown.

    Attributes:
        rows: of each rank's host memory that have been written to.
        damaged: the first prompt once more, of which a page was damaged on its way to rank 0.
        corrupt, damaged_hit_tokens: pages counted as damaged then, and tokens as restored.
    """

    turns: list[Turn]
    moved_bytes: dict[str, float]
    hit_tokens: float
    rows: list[int]
    differences: float
    damaged: Answer
    corrupt: float
    damaged_hit_tokens: float


# These run inside the workers.


def half() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    return connector._worker.half


def written_rows(worker: Worker) -> int:
    return int(half()._pool.regions[0].any(dim=1).sum())


def damage_next_page(worker: Worker) -> None:
    """Flip a bit of what rank 0 is sent next, once it is there; headers are sent without a filler."""
    exchange = half()._engine._exchange
    if exchange is None or worker.rank:
        return
    collective = exchange._pages
    start = collective.start

    def damaging(rows: Any, *fill: Any) -> Pending:
        pending: Pending = start(rows, *fill)
        if not fill:
            return pending
        del collective.start
        return Damaged(pending, rows[1].numpy())

    collective.start = damaging


class Damaged(Pending):
    def __init__(self, pending: Pending, row: Bytes) -> None:
        self._pending = pending
        self._row = row

    def wait(self) -> None:
        self._pending.wait()
        self._row[-1] ^= 1


def twice_round(running: Engine, folder: Path) -> Shown:
    firsts = []
    for prompt in PROMPTS:
        running.ask(prompt)
        firsts.append((running.ask(prompt), running.pages(PROMPT_PAGES, folder)))
        running.settle()
    turns = []
    for prompt, (hit, before) in zip(PROMPTS, firsts, strict=True):
        running.poison_device()
        turns.append(Turn(hit, running.ask(prompt), before, running.pages(PROMPT_PAGES, folder)))
        running.settle()
    moved = {direction: running.metric("bytes", direction=direction) for direction in ("save", "load", "exchange")}
    hit_tokens, rows = running.metric("hit_tokens", tier="host"), running.llm.collective_rpc(written_rows)
    differences = running.metric("rank_differences")
    running.poison_device()
    running.llm.collective_rpc(damage_next_page)
    damaged = running.ask(PROMPTS[0])
    running.settle()
    corrupt = running.metric("misses", reason="corrupt")
    restored = running.metric("hit_tokens", tier="host") - hit_tokens
    return Shown(turns, moved, hit_tokens, rows, differences, damaged, corrupt, restored)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("host") / "model", num_layers=NUM_LAYERS, num_kv_heads=1)


def shown_by(model: Path, tier: HostTier) -> Shown:
    settings: dict[str, Any] = {"host_tier": tier.value, "host_memory": ROOM_PAGES * PAGE_BYTES, "eviction": "lru"}
    with engine("none", model, Cut(tensor=2), consensus="enforce", **settings) as running:
        return twice_round(running, model.parent)


@pytest.fixture(scope="module")
def sharded(model: Path) -> Shown:
    return shown_by(model, HostTier.SHARDED)


@pytest.fixture(scope="module")
def replicated(model: Path) -> Shown:
    return shown_by(model, HostTier.REPLICATED)


def test_replicated_memory_has_lost_every_page_when_its_turn_comes(replicated: Shown) -> None:
    assert [turn.restored.cached for turn in replicated.turns] == [0] * NUM_PROMPTS
    assert replicated.hit_tokens == 0
    assert replicated.rows == [ROOM_PAGES] * 2


def test_sharded_memory_has_kept_every_page(sharded: Shown) -> None:
    assert [turn.restored.cached for turn in sharded.turns] == [PROMPT_PAGES * PAGE] * NUM_PROMPTS
    assert sharded.hit_tokens == NUM_PAGES * PAGE


def test_sharded_pages_are_shared_out_evenly(sharded: Shown) -> None:
    assert sharded.rows == [NUM_PAGES // 2] * 2


def test_each_rank_copies_half_of_what_is_restored_and_is_sent_the_rest(sharded: Shown) -> None:
    assert sharded.moved_bytes == dict.fromkeys(("save", "load", "exchange"), NUM_PAGES * PAGE_BYTES)


def test_both_ranks_hold_the_bytes_that_were_computed(sharded: Shown) -> None:
    for turn in sharded.turns:
        assert (turn.before.num_torn, turn.after.num_torn) == (0, 0)
        assert np.array_equal(turn.before.slabs, turn.after.slabs)
        assert not (turn.after.slabs == matrix_worker.POISON).all(axis=-1).any()


def test_the_answer_is_that_of_vllms_own_hit(sharded: Shown) -> None:
    assert [turn.restored for turn in sharded.turns] == [turn.hit for turn in sharded.turns]


def test_a_page_that_is_damaged_on_its_way_between_ranks_is_computed_again(sharded: Shown) -> None:
    assert sharded.corrupt == 1
    assert sharded.damaged_hit_tokens <= PAGE
    assert alike(sharded.damaged, sharded.turns[0].hit)


def test_ranks_never_differ(sharded: Shown, replicated: Shown) -> None:
    assert sharded.differences == replicated.differences == 0
