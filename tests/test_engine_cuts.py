"""Engines of other cuts share one store: what TP2 wrote PP2 restores, and the reverse, each slab byte for byte.

A model of eight layers and eight KV heads with random weights, a real Redis, and a grid that gives each rank of both
engines whole cells. The reader's device is overwritten before it reads. `scripts/matrix` does this for more cuts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_kit import PAGE, Answer, Engine, check_slabs, engine, prompt_of
from matrix_cut import Cut
from matrix_pages import Pages
from random_model import VOCABULARY, random_model
from redis_server import RedisServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NUM_PAGES = 7
NUM_LAYERS = NUM_HEADS = 8
TP2, PP2 = Cut(tensor=2), Cut(pipeline=2)


@dataclass(frozen=True)
class Carried:
    """What another engine restored, and what it then answered from its own prefix cache."""

    written: Pages
    read: Pages
    restored: Answer
    hit: Answer
    store_hits: float


@dataclass(frozen=True)
class Written:
    """A prompt that an engine computed and saved, and its pages on that engine's device."""

    prompt: list[int]
    pages: Pages


def write(running: Engine, seed: int, folder: Path) -> Written:
    prompt = prompt_of(NUM_PAGES * PAGE + 37, seed, VOCABULARY)
    running.ask(prompt)
    pages = running.pages(NUM_PAGES, folder)
    running.settle()
    return Written(prompt, pages)


def read(running: Engine, written: Written, folder: Path) -> Carried:
    running.poison_device()
    restored = running.ask(written.prompt, max_tokens=8)
    pages = running.pages(NUM_PAGES, folder)
    store_hits = running.metric("hit_tokens", tier="store")
    return Carried(written.pages, pages, restored, running.ask(written.prompt, max_tokens=8), store_hits)


@pytest.fixture(scope="module")
def both_ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Carried]:
    """Three engines, one after the other; the second one reads what the first one wrote, and writes for the third."""
    folder = tmp_path_factory.mktemp("cuts")
    model = random_model(folder / "model", num_layers=NUM_LAYERS, num_kv_heads=NUM_HEADS)
    with RedisServer(folder / "redis") as server:

        def started(cut: Cut) -> AbstractContextManager[Engine]:
            return engine(server.url, model, cut, grid="2x2", lookup_timeout_s=5.0)

        with started(TP2) as first:
            from_heads = write(first, 1, folder)
        with started(PP2) as second:
            to_stages = read(second, from_heads, folder)
            from_stages = write(second, 2, folder)
        with started(TP2) as third:
            return {"TP2 to PP2": to_stages, "PP2 to TP2": read(third, from_stages, folder)}


@pytest.fixture(params=["TP2 to PP2", "PP2 to TP2"])
def carried(request: pytest.FixtureRequest, both_ways: dict[str, Carried]) -> Carried:
    return both_ways[request.param]


def test_every_page_that_an_engine_of_another_cut_wrote_is_restored(carried: Carried) -> None:
    assert carried.restored.cached == NUM_PAGES * PAGE
    assert carried.store_hits == NUM_PAGES * PAGE


def test_each_slab_has_the_writers_bytes_by_page_layer_and_head(carried: Carried) -> None:
    check_slabs(carried.written, carried.read, NUM_PAGES * NUM_LAYERS * NUM_HEADS)


def test_the_answer_is_that_of_vllms_own_hit(carried: Carried) -> None:
    assert carried.restored == carried.hit
