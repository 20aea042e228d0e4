"""Context parallelism on a real engine: two ranks that share out the pages of each request, beside two that do not.

A model with one KV head and random weights in float32, in which answers of the two engines can be compared: what their
batches are cut to makes no difference beyond rounding. Page q of a request is to lie on rank q mod 2 alone. The device
and the scratch are overwritten before each restore.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import matrix_worker
import numpy as np
import pytest
from engine_kit import PAGE, Answer, Engine, engine, prompt_of
from matrix_cut import Cut
from matrix_worker import Bytes, Worker
from random_model import VOCABULARY, random_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NUM_LAYERS = 4
NUM_PAGES = 9
NUM_BLOCKS = 30
OUTPUT_TOKENS = 16
LOGPROB_LIMIT = 1e-3
TP2, CP2 = Cut(tensor=2), Cut(tensor=2, context=2)
CHUNKED = {"dtype": "float32", "max_num_batched_tokens": 512}
SMALL = CHUNKED | {"num_gpu_blocks_override": NUM_BLOCKS}


def prompts(*num_tokens: int, head: Sequence[int] = (), seed: int) -> list[list[int]]:
    return [[*head, *prompt_of(number, 10 * seed + place, VOCABULARY)] for place, number in enumerate(num_tokens)]


BATCHES = {
    "single": prompts(2 * PAGE - 5, seed=1),
    "chunked prefill": prompts(2000, seed=2),
    "batched": prompts(100, 129, 257, seed=3),
    "prefill beside decode": prompts(300, 900, 150, seed=4),
    "one prefix in one step": prompts(40, 90, 20, head=prompt_of(2 * PAGE, 5, VOCABULARY), seed=5),
}
KEPT = prompt_of(NUM_PAGES * PAGE + 37, 6, VOCABULARY)
LONG = prompt_of(3900, 7, VOCABULARY)
ROUNDS = ("cold", "device", "host", "store")


@dataclass(frozen=True)
class Kept:
    """Pages of `KEPT` as they lie on the devices after a request for it: of each rank, and in which of its blocks."""

    by_rank: list[Bytes]
    blocks: list[int]
    cached: int

    @classmethod
    def of(cls, running: Engine, folder: Path) -> Kept:
        cached = running.ask(KEPT).cached
        found = [np.load(piece.file) for piece in running.pieces(NUM_PAGES, folder)]
        return cls(found, running.llm.collective_rpc(blocks)[0], cached)


@dataclass(frozen=True)
class Device:
    """Device bytes of a rank that the blocks of the last request take, and blocks that it has in all."""

    bytes_in_use: int
    num_blocks: int


@dataclass(frozen=True)
class Scratch:
    """Peak of a rank's scratch, pages of its largest batch, and bytes of a page in a layer."""

    peak_bytes: int
    most_pages: int
    page_bytes: int


@dataclass
class Shown:
    """What engines of a cut have shown.

    Attributes:
        answers: to the batches, by round and batch.
        kept: by round.
        holders: for each page of `KEPT`, which ranks had it anywhere on their device.
        devices, scratch: of each rank, the former right after `LONG`.
    """

    answers: dict[str, dict[str, list[Answer]]] = field(default_factory=dict)
    kept: dict[str, Kept] = field(default_factory=dict)
    hit_tokens: dict[str, float] = field(default_factory=dict)
    differences: float = 0
    holders: list[list[bool]] = field(default_factory=list)
    long: Answer | None = None
    devices: list[Device] = field(default_factory=list)
    scratch: list[Scratch] = field(default_factory=list)

    def ask(self, running: Engine, *rounds: str) -> None:
        """All batches, each in these rounds, one right after the other."""
        for batch, asked in BATCHES.items():
            for name in rounds:
                answers = running.ask_together(asked, max_tokens=OUTPUT_TOKENS)
                self.answers.setdefault(name, {})[batch] = answers

    def keep(self, running: Engine, name: str, folder: Path) -> None:
        """Pages of `KEPT`, and how the engine stands at the end of a round."""
        self.kept[name] = Kept.of(running, folder)
        running.settle()
        self.hit_tokens[name] = running.metric("hit_tokens", tier=name)
        self.differences += running.metric("rank_differences")

    def ask_long(self, running: Engine) -> None:
        """A request that is longer than what one rank of an engine with few blocks has room for."""
        self.long = running.ask(LONG)
        self.devices = running.llm.collective_rpc(device_of)


# These run inside the workers.


def blocks(worker: Worker) -> list[int]:
    return worker.watched_blocks[: -(-NUM_PAGES // matrix_worker.share(worker)[1])]


def device_of(worker: Worker) -> Device:
    layers = [layer for _, layer in matrix_worker.held_layers(worker)]
    return Device(sum(layer[0].nbytes for layer in layers) * len(worker.watched_blocks), len(layers[0]))


def note_batches(worker: Any) -> None:
    from vllm_hicache.context_parallel.backend import _steps

    gather = _steps().gather
    begin = gather.begin
    worker.most_pages = 0

    def noted(caches: Any, tables: Any) -> None:
        worker.most_pages = max(worker.most_pages, tables.num_pages)
        begin(caches, tables)

    gather.begin = noted  # type: ignore[method-assign]


def scratch_of(worker: Any) -> Scratch:
    page_bytes = matrix_worker.held_layers(worker)[0][1][0].nbytes
    return Scratch(matrix_worker.scratch().peak_bytes, worker.most_pages, page_bytes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cp")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return random_model(folder / "model", num_layers=NUM_LAYERS, num_kv_heads=1)


@pytest.fixture(scope="module")
def whole(model: Path, folder: Path) -> Shown:
    """Two ranks of which each has all pages, and room for them."""
    shown = Shown()
    with engine("none", model, TP2, engine_options=CHUNKED, consensus="enforce") as running:
        shown.ask(running, "cold", "device")
        shown.keep(running, "cold", folder)
        shown.ask_long(running)
    return shown


@pytest.fixture(scope="module")
def shared(model: Path, folder: Path) -> Shown:
    """Two ranks that share pages out, with few blocks; and the same engine again, with nothing but its store."""
    shown = Shown()
    store = f"file://{folder}/store?capacity=1GiB"
    settings: dict[str, Any] = {"consensus": "enforce", "lookup_timeout_s": 5.0, "prefetch": "wait_complete"}
    with engine(store, model, CP2, engine_options=SMALL, **settings) as running:
        running.llm.collective_rpc(note_batches)
        running.poison_device()
        shown.ask(running, "cold", "device")
        shown.keep(running, "cold", folder)
        shown.holders = holders(running, folder)
        running.poison_device()
        shown.ask(running, "host")
        shown.keep(running, "host", folder)
        shown.ask_long(running)
        shown.scratch = running.llm.collective_rpc(scratch_of)
        running.settle()
    with engine(store, model, CP2, engine_options=SMALL, **settings) as running:
        running.poison_device()
        shown.ask(running, "store")
        shown.keep(running, "store", folder)
    return shown


# vLLM leaves an open context behind where an engine does not start.
refuses = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def holders(running: Engine, folder: Path) -> list[list[bool]]:
    running.ask(KEPT)
    slabs = running.pages(NUM_PAGES, folder).slabs
    devices = running.device_pages_by_rank()
    return [[hashlib.sha256(page.tobytes()).hexdigest() in device for device in devices] for page in slabs]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ROUNDS)
def test_answers_are_those_of_ranks_that_hold_every_page(whole: Shown, shared: Shown, name: str, batch: str) -> None:
    reference = whole.answers["cold" if name == "cold" else "device"][batch]
    for answer, other in zip(shared.answers[name][batch], reference, strict=True):
        assert answer.tokens == other.tokens
        assert answer.logprobs == pytest.approx(other.logprobs, abs=LOGPROB_LIMIT)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["host", "store"])
def test_every_full_page_is_restored(shared: Shown, name: str, batch: str) -> None:
    cached = [answer.cached for answer in shared.answers[name][batch]]
    assert cached == [len(prompt) // PAGE * PAGE for prompt in BATCHES[batch]]


def test_pages_come_from_the_tier_that_was_left(shared: Shown) -> None:
    restored = sum(len(prompt) // PAGE * PAGE for prompt in [KEPT, *chain(*BATCHES.values())])
    assert shared.hit_tokens["store"] == restored - 2 * 2 * PAGE
    assert shared.hit_tokens["host"] >= shared.hit_tokens["store"]


def test_ranks_never_differ(whole: Shown, shared: Shown) -> None:
    assert whole.differences == shared.differences == 0


@pytest.mark.parametrize("name", ["host", "store"])
def test_a_restored_page_has_the_same_bytes_on_the_same_rank_in_another_block(shared: Shown, name: str) -> None:
    before, after = shared.kept["cold"], shared.kept[name]
    assert after.cached == NUM_PAGES * PAGE
    assert [len(pages) for pages in after.by_rank] == [5, 4]
    for pages, its_pages in zip(before.by_rank, after.by_rank, strict=True):
        assert np.array_equal(pages, its_pages)
    assert all(one != other for one, other in zip(before.blocks, after.blocks, strict=True))


def test_page_q_lies_on_rank_q_mod_2_alone(shared: Shown) -> None:
    assert shared.holders == [[page % 2 == 0, page % 2 == 1] for page in range(NUM_PAGES)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_ranks_pages_are_every_other_one_of_the_request(whole: Shown, shared: Shown, rank: int) -> None:
    # What lies in the first layer follows from tokens and positions alone.
    reference, pages = whole.kept["cold"].by_rank[rank], shared.kept["cold"].by_rank[rank]
    assert np.array_equal(pages[:, 0], reference[rank::2, 0])
    assert len(np.unique(pages[:, 0], axis=0)) == len(pages)


def test_a_long_request_takes_half_of_the_blocks_on_each_rank(whole: Shown, shared: Shown) -> None:
    num_pages = -(-(len(LONG) + 4) // PAGE)
    (page_bytes,) = {each.bytes_in_use // num_pages for each in whole.devices}
    assert [each.bytes_in_use for each in whole.devices] == [num_pages * page_bytes] * 2
    assert [each.bytes_in_use for each in shared.devices] == [-(-num_pages // 2) * page_bytes] * 2


def test_a_request_that_one_rank_has_no_room_for_runs(whole: Shown, shared: Shown) -> None:
    assert all(each.num_blocks * PAGE < len(LONG) for each in shared.devices)
    assert shared.long is not None
    assert whole.long is not None
    assert shared.long.tokens == whole.long.tokens
    assert shared.long.logprobs == pytest.approx(whole.long.logprobs, abs=LOGPROB_LIMIT)


@refuses
def test_ranks_that_hold_every_page_have_no_room_for_it(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="failed"), engine("none", model, TP2, engine_options=SMALL):
        pass
    gc.collect()
    assert "serve at least one request with the model's max seq len (4096)" in "".join(capfd.readouterr())


@pytest.mark.parametrize("rank", [0, 1])
def test_the_scratch_never_exceeds_two_layers_of_the_largest_batch(shared: Shown, rank: int) -> None:
    scratch = shared.scratch[rank]
    assert scratch.most_pages >= len(LONG) // PAGE
    assert 0 < scratch.peak_bytes <= 2 * scratch.most_pages * scratch.page_bytes


@refuses
def test_an_interleave_that_is_not_the_block_is_refused_with_the_way_out(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = SMALL | {"cp_kv_cache_interleave_size": PAGE // 2}
    with pytest.raises(RuntimeError, match="failed"), engine("none", model, CP2, engine_options=wrong):
        pass
    gc.collect()
    assert "a page would lie on several ranks, set --cp-kv-cache-interleave-size 128" in "".join(capfd.readouterr())
