"""The reuse matrix without engines: random models, cuts, looks into workers, comparing pages, and verdicts.

The engines' part is `tests/test_engine_cuts.py` and the script itself.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matrix_engine
import matrix_report
import matrix_run
import matrix_worker
import numpy as np
import pytest
import torch
from engine_process import EngineError
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix_cut import PAGE_TOKENS, Cut
from matrix_engine import Answer, Job, Record, Settings, Take
from matrix_pages import assemble, compare
from matrix_report import Cell, PromptFigures
from matrix_worker import Bytes, Piece
from random_model import VOCABULARY, random_model, shapes
from redis import Redis
from redis_server import RedisServer
from safetensors.torch import load_file

from vllm_hicache.fingerprint import weights_fingerprint
from vllm_hicache.names import Role

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
NUM_PAGES, NUM_LAYERS, NUM_HEADS, SLAB_BYTES = 3, 4, 4, 2 * 2 * PAGE_TOKENS
NUM_TOKENS = NUM_PAGES * PAGE_TOKENS


# Models and cuts


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("model") / "m", num_layers=1, num_heads=2, num_kv_heads=1, head_size=16)


def test_a_random_model_is_the_same_every_time_and_another_seed_is_another_model(
    small_model: Path, tmp_path: Path
) -> None:
    same, other = (
        random_model(tmp_path / str(seed), num_layers=1, num_heads=2, num_kv_heads=1, head_size=16, seed=seed)
        for seed in (0, 1)
    )
    assert weights_fingerprint(same) == weights_fingerprint(small_model)
    assert weights_fingerprint(other) != weights_fingerprint(small_model)


def test_a_random_models_weights_have_the_shapes_and_spreads_that_its_config_promises(small_model: Path) -> None:
    config = json.loads((small_model / "config.json").read_text())
    weights = load_file(small_model / "model.safetensors")
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (2, 1, 16)
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == {
        name: shape for name, (shape, _) in shapes(1, 32, 16).items()
    }
    assert weights["model.layers.0.self_attn.k_proj.weight"].shape == (16, 32)
    assert all(weight.dtype == torch.bfloat16 for weight in weights.values())
    assert float(weights["lm_head.weight"].float().std()) == pytest.approx(3.0 / 32**0.5, rel=0.05)


def test_heads_that_cannot_be_shared_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_heads=8 is no multiple of num_kv_heads=3"):
        random_model(tmp_path / "m", num_kv_heads=3)


@pytest.mark.parametrize(
    ("cut", "name", "eager", "cores"),
    [
        (Cut(), "TP1", True, {}),
        (Cut(tensor=2), "TP2", True, {"VLLM_CPU_OMP_THREADS_BIND": "0,2|5,7"}),
        (Cut(pipeline=2), "PP2", False, {"VLLM_CPU_OMP_THREADS_BIND": "0,2|5,7"}),
        (Cut(tensor=2, pipeline=2), "TP2 PP2", False, {"VLLM_CPU_OMP_THREADS_BIND": "0|2|5|7"}),
    ],
)
def test_each_rank_has_cores_of_its_own_and_pipelines_are_compiled(
    cut: Cut, name: str, eager: bool, cores: dict[str, str]
) -> None:
    assert cut.name == name
    assert cut.environment([7, 0, 5, 2]) == cores
    assert cut.options == {
        "tensor_parallel_size": cut.tensor,
        "pipeline_parallel_size": cut.pipeline,
        "enforce_eager": eager,
    }


def test_ranks_that_share_pages_out_are_tensor_ranks_and_do_so_page_by_page() -> None:
    cut = Cut(tensor=2, pipeline=2, context=2)
    assert (cut.name, cut.num_ranks) == ("TP2 PP2 CP2", 4)
    assert cut.options.items() - Cut(tensor=2, pipeline=2).options.items() == {
        ("decode_context_parallel_size", 2),
        ("cp_kv_cache_interleave_size", PAGE_TOKENS),
    }


def test_fewer_cores_than_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="2 ranks for 1 cores"):
        Cut(tensor=2).environment([3])


# Looks into a worker


def a_worker(rank: int, cut: Cut, layers: range, num_heads: int, total_heads: int = NUM_HEADS) -> Any:
    """One rank of vLLM's, with five blocks; each byte of a slab is made of its block, layer and head."""
    context = {}
    for layer in reversed(layers):
        first = rank % cut.tensor * total_heads // cut.tensor
        caches = torch.zeros(5, num_heads, 1, SLAB_BYTES // 2, dtype=torch.bfloat16)
        for block in range(5):
            for head in range(num_heads):
                caches[block, head].view(torch.uint8).fill_(32 * block + 8 * layer + first + head)
        context[f"model.layers.{layer}.self_attn.attn"] = SimpleNamespace(kv_cache=caches)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context),
        model_config=a_model(total_heads),
        speculative_config=None,
        parallel_config=SimpleNamespace(tensor_parallel_size=cut.tensor, decode_context_parallel_size=cut.context),
    )
    runner = SimpleNamespace(execute_model=lambda scheduled, *more: (scheduled, more))
    return SimpleNamespace(rank=rank, vllm_config=config, model_runner=runner)


def a_model(num_heads: int) -> SimpleNamespace:
    return SimpleNamespace(
        use_mla=False, get_total_num_kv_heads=lambda: num_heads, get_total_num_hidden_layers=lambda: NUM_LAYERS
    )


DRAFT_NAMES = {
    "a model": [f"draft_model.model.layers.{number}.self_attn.attn" for number in (1, 0)],
    "a model with more layers": [f"draft_model.model.layers.{number}.self_attn.attn" for number in range(5, -1, -1)],
    "EAGLE": ["model.layers.5.self_attn.attn", "model.layers.4.self_attn.attn"],
}


def with_a_draft(rank: int, names: list[str], draft_tensor: int, num_heads: int = 2, total_heads: int = 4) -> Any:
    """A rank of two with draft layers of 12 bytes a head, in another dtype; a byte is made of block and name."""
    worker = a_worker(rank, Cut(tensor=2), range(4), 2)
    config = worker.vllm_config
    for name in names:
        number = int(name.split("layers.")[1].split(".")[0])
        caches = torch.zeros(5, num_heads, 1, 3, dtype=torch.float32)
        for block in range(5):
            caches[block].view(torch.uint8).fill_(128 + 16 * block + number)
        config.compilation_config.static_forward_context[name] = SimpleNamespace(kv_cache=caches)
    config.speculative_config = SimpleNamespace(
        draft_model_config=a_model(total_heads),
        draft_parallel_config=SimpleNamespace(tensor_parallel_size=draft_tensor),
    )
    return worker


def schedule(worker: Any, *new: list[int], **more: list[int]) -> None:
    """A step with new requests, named by their first block, and blocks that earlier ones are given beside theirs."""
    step = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=f"r{blocks[0]}", block_ids=(blocks,)) for blocks in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(more),
            new_block_ids=[(blocks,) if blocks else None for blocks in more.values()],
            resumed_req_ids=set(),
        ),
    )
    assert worker.model_runner.execute_model(step, "more") == (step, ("more",))


@pytest.mark.parametrize(
    ("cut", "layers", "heads"),
    [
        (Cut(), [range(4)], 4),
        (Cut(tensor=2), [range(4), range(4)], 2),
        (Cut(pipeline=2), [range(2), range(2, 4)], 4),
        (Cut(tensor=2, pipeline=2), [range(2), range(2), range(2, 4), range(2, 4)], 2),
    ],
)
def test_pages_of_every_cut_are_put_together_by_layer_and_head_of_the_whole_model(
    tmp_path: Path, cut: Cut, layers: list[range], heads: int
) -> None:
    workers = [a_worker(rank, cut, held, heads) for rank, held in enumerate(layers)]
    for worker in workers:
        matrix_worker.watch(worker)
        schedule(worker, [0, 1])
        schedule(worker, [3, 1, 2])
        schedule(worker)
    found = assemble([matrix_worker.dump(worker, 2, str(tmp_path / "take")) for worker in workers])
    assert found.slabs.shape == (2, 4, 4, SLAB_BYTES)
    blocks, all_layers, all_heads = np.array([3, 1]), np.arange(4), np.arange(4)
    expected = 32 * blocks[:, None, None] + 8 * all_layers[:, None] + all_heads
    assert (found.slabs == expected.astype(np.uint8)[..., None]).all()
    assert found.num_torn == 0


def test_a_head_that_two_ranks_hold_is_compared_between_them(tmp_path: Path) -> None:
    cut = Cut(tensor=2)
    workers = [a_worker(rank, cut, range(4), 1, total_heads=1) for rank in range(2)]
    workers[1].vllm_config.compilation_config.static_forward_context["model.layers.2.self_attn.attn"].kv_cache[1] = 7.0
    for worker in workers:
        matrix_worker.watch(worker)
        schedule(worker, [0, 1])
    pieces = [matrix_worker.dump(worker, 2, str(tmp_path / "take")) for worker in workers]
    assert [piece.first_head for piece in pieces] == [0, 0]
    assert assemble(pieces).num_torn == 1


def test_blocks_that_a_request_is_given_in_a_later_step_are_its_next_ones() -> None:
    worker = a_worker(0, Cut(), range(4), 4)
    matrix_worker.watch(worker)
    schedule(worker, [0, 1], [3])
    schedule(worker, r3=[], r0=[2])
    schedule(worker, r3=[4, 2], r0=[1])
    assert worker.watched_blocks == [3, 4, 2]


def test_a_request_that_was_preempted_is_refused() -> None:
    worker = a_worker(0, Cut(), range(4), 4)
    matrix_worker.watch(worker)
    later = SimpleNamespace(req_ids=["r0"], new_block_ids=[([1],)], resumed_req_ids={"r0"})
    with pytest.raises(RuntimeError, match="r0 was preempted"):
        worker.model_runner.execute_model(SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=later))


@pytest.mark.parametrize(("num_pages", "num_owned"), [(5, [3, 2]), (4, [2, 2]), (1, [1, 0])])
def test_pages_that_ranks_share_out_are_put_together_in_the_order_of_the_request(
    tmp_path: Path, num_pages: int, num_owned: list[int]
) -> None:
    workers = [a_worker(rank, Cut(tensor=2, context=2), range(4), 1, total_heads=1) for rank in range(2)]
    for worker, blocks in zip(workers, ([0, 2, 4], [1, 3, 0]), strict=True):
        matrix_worker.watch(worker)
        schedule(worker, blocks)
    pieces = [matrix_worker.dump(worker, num_pages, str(tmp_path / "take")) for worker in workers]
    assert [len(np.load(piece.file)) for piece in pieces] == num_owned
    found = assemble(pieces)
    assert (found.slabs[:, 0, 0, 0] // 32).tolist() == [0, 1, 2, 3, 4][:num_pages]
    assert (found.slabs.shape[0], found.num_torn) == (num_pages, 0)


def test_owners_are_counted_within_each_stage_and_each_head() -> None:
    cut = Cut(tensor=4, pipeline=2, context=2)
    workers = [a_worker(rank, cut, range(4), 1, total_heads=2) for rank in range(8)]
    assert [matrix_worker.share(worker) for worker in workers] == [(0, 2), (1, 2)] * 4


def test_a_page_whose_owner_has_no_piece_is_an_error(tmp_path: Path) -> None:
    np.save(tmp_path / "own.npy", some_pages(1))
    pieces = [Piece(str(tmp_path / "own.npy"), 0, NUM_LAYERS, 0, NUM_HEADS, 1, 2)]
    with pytest.raises(ValueError, match="of 96 units of pages, 48 are held by no rank"):
        assemble(pieces)


def test_ranks_that_share_pages_out_differently_are_an_error(tmp_path: Path) -> None:
    pieces = pieces_of(some_pages(1), tmp_path, "any")
    with pytest.raises(ValueError, match=r"among \[1, 2\]"):
        assemble([pieces[0], replace(pieces[1], num_owners=2)])


def test_a_request_with_fewer_blocks_than_pages_is_refused(tmp_path: Path) -> None:
    worker = a_worker(0, Cut(), range(4), 4)
    matrix_worker.watch(worker)
    schedule(worker, [1])
    with pytest.raises(RuntimeError, match="1 blocks, 2 were asked for"):
        matrix_worker.dump(worker, 2, str(tmp_path / "take"))


@pytest.mark.parametrize("cut", [Cut(), Cut(tensor=2, context=2)])
def test_poison_overwrites_every_block_and_what_pages_are_gathered_in(
    monkeypatch: pytest.MonkeyPatch, cut: Cut
) -> None:
    scratch = SimpleNamespace(_buffers=[torch.zeros(8, dtype=torch.uint8), None])
    monkeypatch.setattr(matrix_worker, "scratch", lambda: scratch)
    worker = a_worker(0, cut, range(4), 4)
    matrix_worker.poison(worker)
    assert all((caches == matrix_worker.POISON).all() for _, caches in matrix_worker.held_layers(worker))
    assert bool((scratch._buffers[0] == matrix_worker.POISON).all()) is (cut.context > 1)


@pytest.mark.parametrize("names", DRAFT_NAMES.values(), ids=list(DRAFT_NAMES))
class TestADraft:
    def test_poison_overwrites_its_layers_too(self, names: list[str]) -> None:
        worker = with_a_draft(0, names, 2)
        matrix_worker.poison(worker)
        layers = worker.vllm_config.compilation_config.static_forward_context
        assert len(layers) == NUM_LAYERS + len(names)
        assert all((layer.kv_cache.view(torch.uint8) == matrix_worker.POISON).all() for layer in layers.values())

    def test_its_layers_count_from_0_and_are_not_the_targets(self, names: list[str]) -> None:
        worker = with_a_draft(0, names, 2)
        held = [matrix_worker.held_layers(worker, role) for role in (Role.TARGET, Role.DRAFT)]
        assert [[number for number, _ in layers] for layers in held] == [[0, 1, 2, 3], list(range(len(names)))]
        assert [int(caches[0].flat[0]) for _, caches in held[1]] == sorted(
            128 + int(name.split("layers.")[1].split(".")[0]) for name in names
        )

    @pytest.mark.parametrize(("draft_tensor", "num_heads", "first"), [(2, 2, 2), (1, 4, 0)])
    def test_its_pages_lie_in_files_of_their_own(
        self, names: list[str], draft_tensor: int, num_heads: int, first: int, tmp_path: Path
    ) -> None:
        worker = with_a_draft(1, names, draft_tensor, num_heads)
        matrix_worker.watch(worker)
        schedule(worker, [3, 1])
        target, draft = (matrix_worker.dump(worker, 2, str(tmp_path / "take"), role) for role in Role)
        assert np.load(target.file).shape == (2, NUM_LAYERS, 2, SLAB_BYTES)
        assert replace(draft, file="") == Piece("", 0, len(names), first, num_heads)
        slabs = np.load(draft.file)
        assert slabs.shape == (2, len(names), num_heads, 12)
        assert (slabs[:, :, 0, 0] // 16 - 8).tolist() == [[3] * len(names), [1] * len(names)]


def test_a_rank_without_draft_layers_has_none_to_look_at(tmp_path: Path) -> None:
    worker = a_worker(0, Cut(), range(4), 4)
    matrix_worker.watch(worker)
    schedule(worker, [1])
    with pytest.raises(RuntimeError, match="rank 0 has no draft layers"):
        matrix_worker.dump(worker, 1, str(tmp_path / "take"), Role.DRAFT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_poison_is_a_number_which_attention_may_multiply_by_nothing(dtype: torch.dtype) -> None:
    assert torch.full((4,), matrix_worker.POISON, dtype=torch.uint8).view(dtype).isfinite().all()


# Pages


def some_pages(seed: int, num_pages: int = NUM_PAGES) -> Bytes:
    shape = (num_pages, NUM_LAYERS, NUM_HEADS, SLAB_BYTES)
    return np.random.default_rng(seed).integers(0, 64, shape, dtype=np.uint8)


def pieces_of(slabs: Bytes, folder: Path, name: str) -> list[Piece]:
    """Two ranks' files, each with half of the heads."""
    found = []
    for rank, first in enumerate((0, NUM_HEADS // 2)):
        file = folder / f"{name}-{rank}.npy"
        np.save(file, slabs[:, :, first : first + NUM_HEADS // 2])
        found.append(Piece(str(file), 0, NUM_LAYERS, first, NUM_HEADS // 2))
    return found


def test_missing_heads_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="of 48 units of pages, 24 are held by no rank"):
        assemble(pieces_of(some_pages(1), tmp_path, "half")[1:])


def test_a_piece_that_is_not_what_it_claims_is_an_error(tmp_path: Path) -> None:
    first, second = pieces_of(some_pages(1), tmp_path, "short")
    np.save(second.file, some_pages(1)[:2, :, :2])
    with pytest.raises(ValueError, match=r"\(3, 4, 2, 512\) was expected"):
        assemble([first, second])


@settings(deadline=None)
@given(
    page=st.integers(0, NUM_PAGES - 1),
    layer=st.integers(0, NUM_LAYERS - 1),
    head=st.integers(0, NUM_HEADS - 1),
    place=st.integers(0, SLAB_BYTES - 1),
    bit=st.integers(0, 7),
)
def test_one_flipped_bit_is_found_at_its_page_layer_and_head(
    page: int, layer: int, head: int, place: int, bit: int
) -> None:
    one, other = some_pages(1), some_pages(1)
    other[page, layer, head, place] ^= 1 << bit
    found = compare(one, other)
    assert (found.num_unequal, found.first_unequal, found.most_values) == (1, (page, layer, head), 1)
    assert found.share_equal == 1 - 1 / one.size
    assert found.largest > 0


def test_equal_pages_differ_in_nothing() -> None:
    found = compare(some_pages(1), some_pages(1))
    assert (found.num_slabs, found.num_unequal, found.first_unequal) == (NUM_PAGES * NUM_LAYERS * NUM_HEADS, 0, None)
    assert (found.share_equal, found.largest, found.most_values) == (1.0, 0.0, 0)


@pytest.mark.parametrize(("mine", "theirs", "largest"), [(1.5, 1.25, 0.25), (-2.0, 2.0, 4.0), (1.0, np.nan, np.inf)])
def test_differences_are_those_of_bfloat16_values(mine: float, theirs: float, largest: float) -> None:
    one, other = (
        torch.tensor([[[[1.0, value]]]], dtype=torch.bfloat16).view(torch.uint8).numpy() for value in (mine, theirs)
    )
    assert compare(one, other).largest == largest


def test_other_numbers_of_pages_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        compare(some_pages(1), some_pages(1, num_pages=2))


# Verdicts


def figures(folder: Path, num_tokens: int = NUM_TOKENS, plant: Callable[[Bytes], None] | None = None) -> PromptFigures:
    """A good cell's prompt; `plant` changes the restored pages first."""
    folder.mkdir(exist_ok=True)
    restored = some_pages(1)
    if plant is not None:
        plant(restored)
    expected = matrix_report.expected_tokens(num_tokens)
    answer = Answer([5, 6, 7], [-0.1, -0.2, -0.3], expected, expected)
    cold = replace(answer, cached=0, stored=0)
    written = {"cold": Take(cold, pieces_of(some_pages(1), folder, "written"))}
    read = {
        "restored": Take(answer, pieces_of(restored, folder, "restored")),
        "hit": Take(replace(answer, stored=0), []),
        "cold": Take(cold, pieces_of(some_pages(2), folder, "cold")),
        "cold_again": Take(cold, pieces_of(some_pages(2), folder, "again")),
    }
    return PromptFigures.of(num_tokens, written, read)


def a_cell(prompts: list[PromptFigures], error: str | None = None, reader: str = "PP2") -> Cell:
    return Cell("8 KV heads", "TP2", reader, 41.5, prompts, error)


@pytest.mark.parametrize(("num_tokens", "expected"), [(640, 639), (639, 512), (641, 640), (385, 384), (127, 0)])
def test_one_token_at_least_is_left_to_compute(num_tokens: int, expected: int) -> None:
    assert matrix_report.expected_tokens(num_tokens) == expected


def test_a_cell_that_did_all_has_no_problems(tmp_path: Path) -> None:
    found = figures(tmp_path, NUM_TOKENS + 37)
    assert found.problems == []
    assert (found.pages.num_slabs, found.recomputed) == (NUM_PAGES * NUM_LAYERS * NUM_HEADS, None)
    assert found.own.num_unequal == 0
    assert found.cold.share_equal < 0.5
    assert a_cell([found]).problems == []


def test_a_planted_difference_is_named_by_page_layer_and_head(tmp_path: Path) -> None:
    def plant(pages: Bytes) -> None:
        pages[1, 2, 3, 0] ^= 1

    (problem,) = figures(tmp_path, NUM_TOKENS + 37, plant).problems
    assert "1 of 48 slabs are not the writer's, first (page, layer, head) (1, 2, 3)" in problem


@pytest.mark.parametrize(("num_values", "holds"), [(2, True), (3, False)])
def test_only_the_last_token_of_a_whole_prompt_may_be_computed_again(
    tmp_path: Path, num_values: int, holds: bool
) -> None:
    def plant(pages: Bytes) -> None:
        pages[-1, :, :, : 2 * num_values] ^= 1

    found = figures(tmp_path, NUM_TOKENS, plant)
    assert found.pages.num_slabs == (NUM_PAGES - 1) * NUM_LAYERS * NUM_HEADS
    assert found.token_values == 2
    assert (found.problems == []) is holds


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"restored": 256}, "restored 256 tokens, 384 were expected"),
        ({"stored": 0}, "counts 0 tokens from the store"),
        ({"num_torn": 2}, "2 slabs differ between ranks"),
        ({"same_work": False}, "another number of tokens"),
        ({"tokens_equal": False}, "tokens are not those of vLLM's own hit"),
        ({"logprob_diff": 0.002}, "log-probabilities differ by 0.002"),
    ],
)
def test_each_broken_promise_is_one_problem(tmp_path: Path, changed: dict[str, Any], sentence: str) -> None:
    (problem,) = replace(figures(tmp_path, NUM_TOKENS + 37), **changed).problems
    assert sentence in problem
    assert problem.startswith("421 tokens: ")


def test_figures_come_from_the_restored_answer_and_vllms_own_hit(tmp_path: Path) -> None:
    pieces = pieces_of(some_pages(1), tmp_path, "any")
    restored, hit = Answer([1, 2], [-0.5, -0.25], 256, 128), Answer([1, 3], [-0.5, -1.0], 300, 0)
    read = {"restored": Take(restored, pieces), "hit": Take(hit, []), "cold": Take(hit, pieces)}
    found = PromptFigures.of(NUM_TOKENS, read, read | {"cold_again": Take(hit, pieces)})
    assert (found.restored, found.stored, found.expected) == (256, 128, NUM_TOKENS - 1)
    assert (found.same_work, found.tokens_equal, found.logprob_diff) == (False, False, 0.75)


def test_slabs_that_ranks_do_not_share_count_for_the_writer_and_the_reader(tmp_path: Path) -> None:
    whole = pieces_of(some_pages(1), tmp_path, "whole")
    np.save(tmp_path / "torn.npy", some_pages(9)[:, :, :1])
    torn = [*whole, Piece(str(tmp_path / "torn.npy"), 0, NUM_LAYERS, 0, 1)]
    answer = Answer([1], [-1.0], 0, 0)
    read = {name: Take(answer, torn if name == "restored" else whole) for name in ("restored", "cold", "cold_again")}
    found = PromptFigures.of(NUM_TOKENS, {"cold": Take(answer, torn)}, read | {"hit": Take(answer, [])})
    assert found.num_torn == 2 * NUM_PAGES * NUM_LAYERS


def test_answers_are_compared_up_to_the_first_other_token() -> None:
    one = Answer([1, 2, 3], [-0.1, -0.2, -0.3], 0, 0)
    assert matrix_report.logprob_difference(one, one) == 0
    assert matrix_report.logprob_difference(one, replace(one, tokens=[1, 9, 3], logprobs=[-0.1, -0.3, -5.0])) < 0.2


@pytest.mark.parametrize(("difference", "digits"), [(0.4, 0), (0.04, 1), (4e-5, 4), (6e-5, 3), (2.0, 0)])
def test_numbers_are_equal_to_so_many_decimals(difference: float, digits: int) -> None:
    assert matrix_report.decimals(difference) == digits


def test_the_table_has_writers_by_readers_and_a_line_for_each_cell(tmp_path: Path) -> None:
    good = figures(tmp_path, NUM_TOKENS + 37)
    cells = [a_cell([good, good], reader="TP2"), a_cell([], "reader: it did not start\nmore"), a_cell([good, good])]
    cells[2] = replace(cells[2], model="SmolLM2")
    shown = matrix_report.table(cells).splitlines()
    assert shown[1].split() == ["writes", "/", "reads", "TP2", "PP2"]
    assert shown[2].split() == ["TP2", "ok", "FAILS"]
    assert shown[5].split()[:6] == ["TP2", "->", "TP2", "ok", "768/768", "96/96"]
    assert shown[6].endswith("reader: it did not start")
    assert "SmolLM2" in shown


def test_the_result_is_json_with_every_figure_and_what_it_was_measured_with(tmp_path: Path) -> None:
    cells = [a_cell([figures(tmp_path)])]
    result = json.loads(json.dumps(matrix_report.assemble_result(cells, {"vllm": "0.32"}, 12.0)))
    assert result["ok"] is True
    assert result["cells"][0]["prompts"][0]["pages"]["num_unequal"] == 0
    assert result["versions"] == {"vllm": "0.32"}
    assert not matrix_report.assemble_result([*cells, a_cell([])], {}, 1.0)["ok"]


def test_the_picture_shows_cells_that_hold_and_cells_that_do_not(tmp_path: Path) -> None:
    good = figures(tmp_path)
    cells = [a_cell([good], reader="TP1"), a_cell([good], reader="TP2"), a_cell([], "it did not start")]
    matrix_report.draw(cells, tmp_path / "matrix.svg")
    drawn = (tmp_path / "matrix.svg").read_text()
    assert "<svg" in drawn
    assert (drawn.count("#bfe3c0"), drawn.count("#f3b0a8")) == (2, 1)


# The runs


class Jobs:
    """Stands for engines: keeps what was asked for and how much the store held, and gives records or fails."""

    def __init__(self, folder: Path, failing: set[tuple[Job, str]]) -> None:
        self.asked: list[tuple[Job, str, str]] = []
        self.found: list[int] = []
        self._folder = folder
        self._failing = failing

    def __call__(self, job: Job, settings: Settings, folder: Path, log: Path) -> Record:
        cut = settings.cut.name
        self.asked.append((job, cut, str(settings.connector["generation"])))
        with Redis.from_url(str(settings.connector["store"])) as client:
            self.found.append(client.dbsize())
            client.set(str(folder), "pages")
        if (job, cut) in self._failing:
            raise EngineError("it ended with status 1")
        found = []
        for number, prompt in enumerate(settings.prompts):
            expected = matrix_report.expected_tokens(len(prompt))
            slabs = some_pages(number, len(prompt) // PAGE_TOKENS)
            take = Take(Answer([1], [-1.0], expected, expected), pieces_of(slabs, self._folder, f"p{number}"))
            found.append(dict.fromkeys(("cold", "restored", "hit", "cold_again"), take))
        return Record(found, 20.0, {"vllm": "0.32"})


def found_by(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> matrix_run.Found:
    model = matrix_run.Model("m", "2x2", (matrix_run.TP2, matrix_run.PP2), lambda directory: directory)
    monkeypatch.setattr(matrix_run, "run_job", jobs)
    with RedisServer(tmp_path / "redis") as server:
        found = matrix_run.Found()
        matrix_run.Matrix(server, tmp_path, tmp_path / "log", found).measure(model)
    return found


def test_every_reader_is_an_engine_of_its_own_beside_one_writer_a_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = Jobs(tmp_path, set())
    found = found_by(jobs, tmp_path, monkeypatch)
    assert found.versions == {"vllm": "0.32"}
    assert [(cell.writer, cell.reader, cell.verdict) for cell in found.cells] == [
        (writer, reader, "ok") for writer in ("TP2", "PP2") for reader in ("TP2", "PP2")
    ]
    assert jobs.asked == [
        (job, cut, f"matrix-{writer}")
        for writer in ("TP2", "PP2")
        for job, cut in [(Job.WRITE, writer), (Job.READ, "TP2"), (Job.READ, "PP2")]
    ]
    assert jobs.found == [0, 1, 2] * 2


@pytest.mark.parametrize(
    ("failing", "errors"),
    [
        ({(Job.READ, "TP2")}, ["reader: it ended with status 1", None] * 2),
        ({(Job.WRITE, "TP2")}, ["writer: it ended with status 1"] * 2 + [None] * 2),
    ],
)
def test_an_engine_that_fails_costs_its_own_cells_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: set[tuple[Job, str]], errors: list[str | None]
) -> None:
    found = found_by(Jobs(tmp_path, failing), tmp_path, monkeypatch)
    assert [cell.error for cell in found.cells] == errors


def test_context_parallelism_is_measured_against_every_cut_and_every_cut_against_it() -> None:
    (model,) = matrix_run.read_arguments(["--cp"]).models
    assert {(writer.name, reader.name) for writer in model.writers for reader in model.readers(writer)} == {
        ("TP1", "TP2 CP2"),
        ("TP2", "TP2 CP2"),
        ("PP2", "TP2 CP2"),
        ("TP2 CP2", "TP1"),
        ("TP2 CP2", "TP2"),
        ("TP2 CP2", "PP2"),
        ("TP2 CP2", "TP2 CP2"),
    }


@pytest.mark.parametrize("arguments", [[], ["--quick"]])
def test_other_runs_are_without_context_parallelism(arguments: list[str]) -> None:
    models = matrix_run.read_arguments(arguments).models
    assert all(cut.context == 1 and set(model.readers(cut)) for model in models for cut in model.cuts)


def test_ranks_are_checked_in_every_engine() -> None:
    assert matrix_run.connector_of("redis://h", "2x1", "g")["consensus"] == "enforce"


class Steps:
    """Stands for a started engine: keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.salts: set[str] = set()

    def poison(self) -> None:
        self.told.append("poison")

    def settle(self) -> None:
        self.told.append("settle")

    def take(self, prompt: list[int], salt: str | None = None) -> Take:
        self.told.append("take" if salt is None else "take salted")
        self.salts |= {salt} if salt else set()
        return Take(Answer([len(self.told)], [], 0, 0), [])


def test_a_reader_restores_into_an_overwritten_device_and_computes_under_salts_that_nobody_wrote() -> None:
    steps: Any = Steps()
    found = matrix_engine.read(steps, [[1], [2]])
    assert steps.told == ["poison", "take", "take", "poison", "take salted", "poison", "take salted"] * 2
    assert len(steps.salts) == 4
    assert list(found[1]) == ["restored", "hit", "cold", "cold_again"]
    assert [take.answer.tokens for take in found[1].values()] == [[9], [10], [12], [14]]


def test_a_writer_ends_when_its_saves_have_ended() -> None:
    steps: Any = Steps()
    assert [list(takes) for takes in matrix_engine.write(steps, [[1], [2]])] == [["cold"], ["cold"]]
    assert steps.told == ["take", "take", "settle"]


@pytest.mark.engine
def test_a_job_that_fails_names_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    settings = Settings(str(tmp_path / "no-such-model"), Cut(), {"store": "none"}, [[1]])
    with pytest.raises(EngineError, match=re.escape(f"status 1 (its log: {log})")):
        matrix_engine.run_job(Job.WRITE, settings, tmp_path / "job", log)
    assert "no-such-model" in log.read_text()


def test_a_record_is_the_same_after_its_way_through_json(tmp_path: Path) -> None:
    take = Take(Answer([1, 2], [-0.5, -0.25], 128, 128), [Piece("a.npy", 0, 4, 2, 2)])
    assert Take.of(json.loads(json.dumps(asdict(take)))) == take


def test_models_and_cuts_can_be_chosen() -> None:
    found = matrix_run.chosen(matrix_run.MODELS, "1 KV head,SmolLM2", "TP1")
    assert [(model.name, [cut.name for cut in model.cuts]) for model in found] == [
        ("1 KV head", ["TP1"]),
        ("SmolLM2", ["TP1"]),
    ]
    assert matrix_run.chosen(matrix_run.MODELS, None, None) == list(matrix_run.MODELS)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--cuts", "TP3"], "unknown ['TP3']"),
        (["--models", "GPT"], "unknown ['GPT']"),
        (["--models", "SmolLM2", "--cuts", "TP2"], "a model has none of the cuts TP2"),
        (["--cp", "--cuts", "TP1,PP2"], "a model has none of the cuts TP1,PP2"),
        (["--cp", "--quick"], "not allowed with argument"),
    ],
)
def test_unknown_choices_are_refused(arguments: list[str], sentence: str) -> None:
    ended = subprocess.run(
        [sys.executable, SCRIPTS / "matrix_run.py", *arguments], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert sentence in ended.stderr


@pytest.mark.parametrize(("error", "status"), [(None, 0), ("reader: it did not start", 1)])
def test_the_exit_status_says_whether_every_cell_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: str | None, status: int
) -> None:
    cell = a_cell([figures(tmp_path / "pages")], error)
    monkeypatch.setattr(matrix_run, "measure", lambda models, found: found.cells.append(cell))
    monkeypatch.setattr(sys, "argv", ["matrix", "--json", str(tmp_path / "m.json"), "--svg", str(tmp_path / "m.svg")])
    assert matrix_run.main() == status
    assert json.loads((tmp_path / "m.json").read_text())["ok"] is (status == 0)
    assert ("did not start" in capsys.readouterr().err) is (status == 1)
    assert (tmp_path / "m.svg").exists()


def test_a_run_that_is_stopped_shows_what_it_has_and_overwrites_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(models: object, found: matrix_run.Found) -> None:
        found.cells.append(a_cell([figures(tmp_path / "pages")]))
        raise KeyboardInterrupt

    monkeypatch.setattr(matrix_run, "measure", stopped)
    monkeypatch.setattr(sys, "argv", ["matrix", "--json", str(tmp_path / "m.json")])
    assert matrix_run.main() == 130
    assert not (tmp_path / "m.json").exists()
    shown = capsys.readouterr()
    assert "TP2 -> PP2" in shown.out
    assert "stopped after 1 cells" in shown.err


def test_prompts_are_the_same_every_time_and_fit_the_random_models() -> None:
    prompt = matrix_run.prompt_of(300, 1)
    assert prompt == matrix_run.prompt_of(300, 1) != matrix_run.prompt_of(300, 2)
    assert max(prompt) < VOCABULARY
    assert len(prompt) == 300


def test_the_script_can_be_run() -> None:
    assert os.access(SCRIPTS / "matrix", os.X_OK)
