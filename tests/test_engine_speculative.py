"""Speculative decoding on real engines: the draft's state comes back with the target's, and from nowhere else.

SmolLM2 is its own draft, so that nearly every drafted token is accepted as long as the draft knows the context: a
restore that forgot its state would show in what is accepted. The shapes of EAGLE, EAGLE3 and MTP have random weights
and are compared by bytes. Before each restore the device is overwritten.
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from draft_models import eagle3_draft, eagle_draft, mtp_model
from engine_kit import PAGE, Answer, Engine, engine, model_directory, prompt_of
from matrix_cut import Cut
from matrix_worker import Bytes, Worker
from random_model import VOCABULARY, random_model

from vllm_hicache.transfer.device import layer_number

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NUM_TOKENS = 700
NUM_PAGES = NUM_TOKENS // PAGE
OUTPUT_TOKENS = 48
ROUNDS = ("cold", "device", "host")
PROMPTS = [prompt_of(NUM_TOKENS, seed) for seed in (1, 2)]
BARE_PROMPT = prompt_of(NUM_TOKENS, 3)
SMALL = prompt_of(5 * PAGE + 60, 4, VOCABULARY)
OTHER_NEXT = SMALL[: 4 * PAGE] + prompt_of(200, 5, VOCABULARY)


@dataclass(frozen=True)
class Take:
    """A request: its answer, drafts accepted at each position, its blocks and digests of its pages.

    Attributes:
        drafts: times that tokens were drafted.
        pages: by rank and layer, a digest of each block of the request, as far as it is full.
    """

    answer: Answer
    drafts: float
    accepted: tuple[int, ...]
    blocks: list[int]
    pages: list[dict[str, list[str]]]

    @property
    def share(self) -> float:
        """Of the tokens that were drafted, those that were accepted."""
        return sum(self.accepted) / (self.drafts * len(self.accepted))


def take(running: Engine, prompt: Sequence[int], num_blocks: int = NUM_PAGES) -> Take:
    """Ask, and look at what the request left on the device in its first blocks."""
    drafts, accepted = counters(running)
    answer = running.ask(prompt, max_tokens=OUTPUT_TOKENS)
    drafts_after, accepted_after = counters(running)
    gained = tuple(after - before for before, after in zip(accepted, accepted_after, strict=True))
    pages = running.llm.collective_rpc(block_digests, args=(num_blocks,))
    blocks = running.llm.collective_rpc(watched_blocks, args=(num_blocks,))[0]
    return Take(answer, drafts_after - drafts, gained, blocks, pages)


def counters(running: Engine) -> tuple[float, list[int]]:
    """Drafts so far, and accepted tokens at each position."""
    metrics = {metric.name: metric for metric in running.llm.get_metrics()}
    accepted: Any = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]
    drafts: Any = metrics["vllm:spec_decode_num_drafts"]
    return drafts.value, list(accepted.values)


def rounds(running: Engine, prompt: Sequence[int], num_blocks: int = NUM_PAGES) -> dict[str, Take]:
    """A prompt cold, from the device, and from host memory into other blocks of an overwritten device."""
    found = {"cold": take(running, prompt, num_blocks)}
    running.settle()
    found["device"] = take(running, prompt, num_blocks)
    found["host"] = restored(running, prompt, num_blocks)
    return found


def restored(running: Engine, prompt: Sequence[int], num_blocks: int = NUM_PAGES) -> Take:
    """A prompt from host memory or the store, while another one is in the way of its old blocks."""
    running.settle()
    running.poison_device()
    running.ask(prompt_of(12 * PAGE, 99, VOCABULARY), max_tokens=1, salt=f"in the way {time.monotonic()}")
    return take(running, prompt, num_blocks)


@contextmanager
def speculating(
    store: Path, target: Path, cut: Cut | None = None, speculative: dict[str, object] | None = None, **settings: Any
) -> Iterator[Engine]:
    """An engine with a draft; without `speculative` one without."""
    options = {"speculative_config": speculative} if speculative is not None else {}
    gc.collect()
    with engine(f"file://{store}", target, cut, engine_options=options, **settings) as running:
        yield running


def own_draft() -> dict[str, object]:
    return {"method": "draft_model", "model": str(model_directory()), "num_speculative_tokens": 3}


@dataclass
class Shown:
    """What engines on one store have shown, one after the other.

    Attributes:
        packed: rounds of an engine with `draft=packed` that began with an empty store.
        plain: what an engine without a draft then restored, and `sidecar` one with a draft in a sidecar.
        recomputed, served: a prompt that the engine without a draft had stored, under either `draft_miss`.
        healed: that prompt's tail, computed on the bare prefix; whether it left objects of the draft.
    """

    packed: list[dict[str, Take]]
    plain: list[Answer]
    sidecar: list[Take]
    sidecar_host: list[Take]
    recomputed: Take
    served: Take
    without_draft: float
    new_draft_objects: set[str]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """Four engines on one store: packed, without a draft, sidecar, and one that serves without draft state."""
    path, model = tmp_path_factory.mktemp("speculative") / "store", model_directory()
    with speculating(path, model, speculative=own_draft(), draft="packed") as running:
        packed = [rounds(running, prompt) for prompt in PROMPTS]
    with speculating(path, model) as running:
        plain = [running.ask(prompt) for prompt in PROMPTS]
        running.ask(BARE_PROMPT)
        running.settle()
    with speculating(path, model, speculative=own_draft(), draft="sidecar", write="never") as running:
        sidecar = [restored(running, prompt) for prompt in PROMPTS]
        sidecar_host = [restored(running, prompt) for prompt in PROMPTS]
        recomputed = take(running, BARE_PROMPT)
    before = draft_objects(path)
    with speculating(path, model, speculative=own_draft(), draft_miss="serve") as running:
        served = take(running, BARE_PROMPT)
        running.ask(BARE_PROMPT + prompt_of(2 * PAGE, 6))
        running.settle()
        without_draft = running.metric("pages_without_draft")
    return Shown(packed, plain, sidecar, sidecar_host, recomputed, served, without_draft, draft_objects(path) - before)


@pytest.mark.parametrize("number", range(len(PROMPTS)))
class TestAcceptance:
    def test_a_draft_that_knows_the_context_is_accepted(self, shown: Shown, number: int) -> None:
        assert shown.packed[number]["device"].share > 0.9

    def test_as_much_is_accepted_after_a_host_restore_as_after_a_device_hit(self, shown: Shown, number: int) -> None:
        found = shown.packed[number]
        assert found["host"].answer.cached >= found["device"].answer.cached > 0
        assert found["host"].accepted == found["device"].accepted

    def test_as_much_is_accepted_after_a_store_restore_in_a_fresh_engine(self, shown: Shown, number: int) -> None:
        assert shown.sidecar[number].answer.cached == NUM_PAGES * PAGE
        assert shown.sidecar[number].accepted == shown.packed[number]["device"].accepted

    def test_as_much_is_accepted_after_a_host_restore_from_a_sidecar(self, shown: Shown, number: int) -> None:
        assert shown.sidecar_host[number].answer.cached == NUM_PAGES * PAGE
        assert shown.sidecar_host[number].accepted == shown.packed[number]["device"].accepted


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_target_and_draft_come_back_to_other_blocks_as_they_were(shown: Shown, number: int) -> None:
    before = shown.packed[number]["cold"]
    for after in (shown.packed[number]["host"], shown.sidecar[number], shown.sidecar_host[number]):
        assert after.pages == before.pages
        assert not set(after.blocks) & set(before.blocks)
    assert len(before.pages[0]) == 60


def test_an_engine_without_a_draft_reads_what_one_with_a_draft_wrote(shown: Shown) -> None:
    assert [answer.cached for answer in shown.plain] == [NUM_PAGES * PAGE] * len(PROMPTS)


class TestADraftThatIsMissing:
    def test_its_pages_are_computed_again_by_default(self, shown: Shown) -> None:
        assert shown.recomputed.answer.cached == 0
        assert shown.recomputed.share > 0.9

    def test_they_are_served_without_it_where_that_is_asked_for(self, shown: Shown) -> None:
        assert shown.served.answer.cached == NUM_PAGES * PAGE
        assert shown.without_draft == NUM_PAGES

    def test_less_is_then_accepted(self, shown: Shown) -> None:
        assert shown.served.share < 0.8 * shown.recomputed.share

    def test_what_is_computed_on_such_a_prefix_leaves_no_draft_objects(self, shown: Shown) -> None:
        assert shown.new_draft_objects == set()

    def test_the_answer_is_the_same(self, shown: Shown) -> None:
        assert shown.served.answer.tokens[:4] == shown.recomputed.answer.tokens[:4]


@dataclass
class Looked:
    """What engines with a draft that looks at the next token have shown."""

    rounds: dict[str, Take]
    stored: Take
    other_next: Take
    other_next_again: Take
    num_target_layers: int


@pytest.fixture(scope="module", params=["eagle", "eagle3", "mtp"])
def looked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Looked:
    """An engine with a random EAGLE, EAGLE3 or MTP draft, and a fresh one on its store."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "eagle":
        target = random_model(folder / "target", num_layers=4, num_heads=4, num_kv_heads=4)
        draft = eagle_draft(folder / "draft", target)
        speculative: dict[str, object] = {"method": "eagle", "model": str(draft), "num_speculative_tokens": 2}
    elif request.param == "eagle3":
        target = random_model(folder / "target", num_layers=8, num_heads=4, num_kv_heads=4)
        draft = eagle3_draft(folder / "draft", target)
        speculative = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 2}
    else:
        target, speculative = mtp_model(folder / "target"), {"method": "mtp", "num_speculative_tokens": 1}
    with speculating(folder / "store", target, speculative=speculative, draft="packed") as running:
        found = rounds(running, SMALL, 5)
        other_next = restored(running, OTHER_NEXT, 5)
        other_next_again = restored(running, OTHER_NEXT, 5)
    with speculating(folder / "store", target, speculative=speculative, draft="sidecar") as running:
        stored = restored(running, SMALL, 5)
    num_target_layers = json.loads((target / "config.json").read_text())["num_hidden_layers"]
    return Looked(found, stored, other_next, other_next_again, num_target_layers)


class TestADraftThatLooksAhead:
    def test_target_and_draft_come_back_to_other_blocks_as_they_were(self, looked: Looked) -> None:
        before = looked.rounds["cold"]
        for after in (looked.rounds["host"], looked.stored):
            assert after.pages == before.pages
            assert not set(after.blocks) & set(before.blocks)

    def test_the_whole_prefix_comes_back(self, looked: Looked) -> None:
        assert [looked.rounds["host"].answer.cached, looked.stored.answer.cached] == [5 * PAGE] * 2

    def test_another_next_token_costs_the_last_common_page_alone(self, looked: Looked) -> None:
        assert looked.other_next.answer.cached == 3 * PAGE
        assert looked.other_next_again.answer.cached == 5 * PAGE

    def test_the_page_before_another_token_is_the_drafts_own(self, looked: Looked) -> None:
        ours, theirs = looked.rounds["cold"].pages[0], looked.other_next_again.pages[0]
        for name in ours:
            if layer_number(name) < looked.num_target_layers:
                assert ours[name][:4] == theirs[name][:4]
            else:
                assert ours[name][:3] == theirs[name][:3]
                assert ours[name][3] != theirs[name][3]
        assert len(ours) > looked.num_target_layers


CUTS = {"tensor": Cut(tensor=2), "context": Cut(tensor=2, context=2)}


@dataclass
class CutOver:
    """What two ranks have shown, and then one rank of a fresh engine on their store."""

    cut: Cut
    rounds: dict[str, Take]
    stored: Take


@pytest.fixture(scope="module", params=list(CUTS))
def cut_over(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CutOver:
    """Under tensor parallelism with a draft of other heads, under context parallelism with the target as its draft."""
    folder, cut = tmp_path_factory.mktemp(request.param), CUTS[request.param]
    num_heads = 4 if request.param == "tensor" else 1
    target = random_model(folder / "target", num_layers=4, num_heads=4, num_kv_heads=num_heads)
    draft = random_model(folder / "draft", num_layers=2, num_heads=4, num_kv_heads=2, seed=5)
    if request.param == "context":
        draft = target
    speculative: dict[str, object] = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    shared: dict[str, Any] = {"grid": f"1x{min(num_heads, 2)}", "consensus": "enforce"}
    options = {"dtype": "float32", "speculative_config": speculative}
    gc.collect()
    with engine(f"file://{folder}/store", target, cut, engine_options=options, **shared) as running:
        found = rounds(running, SMALL, 5 // cut.context)
    with engine(f"file://{folder}/store", target, engine_options=options, **shared) as running:
        stored = restored(running, SMALL, 5)
    return CutOver(cut, found, stored)


class TestTwoRanks:
    def test_each_ones_target_and_draft_come_back_as_they_were(self, cut_over: CutOver) -> None:
        before, after = cut_over.rounds["cold"], cut_over.rounds["host"]
        assert after.pages == before.pages
        assert not set(after.blocks) & set(before.blocks)
        assert len(before.pages) == 2

    def test_as_much_is_accepted_after_a_restore(self, cut_over: CutOver) -> None:
        assert cut_over.rounds["host"].accepted == cut_over.rounds["device"].accepted
        assert cut_over.stored.accepted == cut_over.rounds["device"].accepted

    def test_a_draft_whose_pages_are_shared_out_knows_the_context(self, cut_over: CutOver) -> None:
        if cut_over.cut.context == 1:
            pytest.skip("this draft has other weights than the target")
        assert cut_over.rounds["cold"].share > 0.9

    def test_one_rank_restores_what_two_wrote(self, cut_over: CutOver) -> None:
        assert cut_over.stored.answer.cached == 5 * PAGE


def draft_objects(path: Path) -> set[str]:
    """Names of stored objects of a draft."""
    return {str(file) for file in path.rglob("*.draft.*")}


def watched_blocks(worker: Worker, num_blocks: int) -> list[int]:
    """Runs inside the worker."""
    return list(worker.watched_blocks[:num_blocks])


def block_digests(worker: Worker, num_blocks: int) -> dict[str, list[str]]:
    """Digests of a request's first blocks by layer; runs inside the worker."""
    import torch

    blocks = worker.watched_blocks[:num_blocks]
    caches: dict[str, Bytes] = {
        name: layer.kv_cache.view(torch.uint8).numpy()
        for name, layer in worker.vllm_config.compilation_config.static_forward_context.items()
    }
    return {
        name: [hashlib.sha256(cache[block].tobytes()).hexdigest() for block in blocks] for name, cache in caches.items()
    }
