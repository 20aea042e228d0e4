"""The device cache as strided views: which layers join a run, which layouts are refused, whose layer it is."""

from __future__ import annotations

import pytest
import torch
from transfer_fixtures import DRAFT, Layout, Tensors, device_tensors, share, slab

from vllm_hicache.errors import ConfigError
from vllm_hicache.names import Role
from vllm_hicache.transfer.device import DeviceCache, RoleLayers

LAYOUTS = {
    "layer-major": Layout(),
    "block-major": Layout(block_major=True),
    "one layer": Layout(layers=1),
    "eleven layers": Layout(layers=11, blocks=3),
    "draft of its own": Layout(draft_layers=2),
    "draft, same storage": Layout(draft_layers=2, shared_draft=True),
    "draft, block-major": Layout(draft_layers=2, shared_draft=True, block_major=True),
}


def found(tensors: Tensors, block_tokens: int = 4) -> DeviceCache:
    return DeviceCache.from_tensors(tensors, block_tokens)


def runs(cache: DeviceCache) -> list[tuple[Role, int, int]]:
    return [(run.role, run.first_layer, run.num_layers) for run in cache.runs]


def spaced(starts: list[int]) -> Tensors:
    """Layers of one storage that begin at these elements."""
    flat = torch.arange(20_000, dtype=torch.int16)
    tensors = [flat[start : start + 1024].view(4, 2, 8, 16) for start in starts]
    return {f"model.layers.{index}.attn": tensor for index, tensor in enumerate(tensors)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_slab_is_seen_at_its_block_head_and_layer(name: str) -> None:
    cache = found(tensors := device_tensors(LAYOUTS[name]))
    for run in cache.runs:
        prefix = DRAFT if run.role == Role.DRAFT else ""
        for at in range(run.num_layers):
            tensor = tensors[f"{prefix}model.layers.{run.first_layer + at}.self_attn.attn"]
            for block in range(tensor.shape[0]):
                for head in range(tensor.shape[1]):
                    assert run.view[block, head, at].numpy().tobytes() == slab(tensor, block, head)


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_role_of_an_evenly_laid_out_cache_is_one_run(name: str) -> None:
    layout = LAYOUTS[name]
    draft = [(Role.DRAFT, 0, layout.draft_layers)] if layout.draft_layers else []
    assert runs(found(device_tensors(layout))) == [(Role.TARGET, 0, layout.layers), *draft]


@pytest.mark.parametrize("name", LAYOUTS)
def test_views_share_the_memory_of_the_engine(name: str) -> None:
    cache = found(tensors := device_tensors(LAYOUTS[name]))
    for tensor in tensors.values():
        tensor.zero_()
    assert all(run.view.count_nonzero() == 0 for run in cache.runs)


def test_shapes_of_all_layers_and_the_size_of_the_cache_are_found() -> None:
    cache = found(device_tensors(Layout(layers=2, heads=3, blocks=5, draft_layers=1)))
    assert cache.roles == (RoleLayers(Role.TARGET, (0, 1), 3, 128), RoleLayers(Role.DRAFT, (0,), 3, 128))
    assert (cache.num_blocks, cache.block_tokens, cache.num_bytes) == (5, 4, 5 * 3 * 3 * 128)


def test_layers_are_ordered_by_number_and_not_by_name() -> None:
    cache = found(tensors := device_tensors(LAYOUTS["eleven layers"]))
    assert [layers.numbers for layers in cache.roles] == [tuple(range(11))]
    last = tensors["model.layers.10.self_attn.attn"]
    assert cache.runs[0].view[2, 1, 10].numpy().tobytes() == slab(last, 2, 1)


def test_draft_layers_are_numbered_from_zero_again() -> None:
    cache = found(device_tensors(LAYOUTS["draft, same storage"]))
    assert [(layers.role, layers.numbers) for layers in cache.roles] == [
        (Role.TARGET, (0, 1, 2)),
        (Role.DRAFT, (0, 1)),
    ]


def test_the_layers_of_a_later_stage_keep_the_numbers_of_the_whole_model() -> None:
    cache = found(share(device_tensors(LAYOUTS["eleven layers"]), (4, 11), (1, 2)))
    assert cache.roles == (RoleLayers(Role.TARGET, tuple(range(4, 11)), 1, 128),)
    assert runs(cache) == [(Role.TARGET, 0, 7)]


def test_layers_of_one_role_with_different_shapes_are_refused_each_with_an_example() -> None:
    tensors = {f"model.layers.{heads}.attn": torch.zeros(4, heads, 8, 16) for heads in (2, 3)}
    with pytest.raises(ConfigError, match=r"target layers have 2 different shapes.*\(2, 512\) as in model\.layers\.2"):
        found(tensors)


def test_layers_at_unequal_distances_make_several_runs() -> None:
    cache = found(tensors := spaced([0, 1024, 4096, 8192, 12288]))
    assert runs(cache) == [(Role.TARGET, 0, 2), (Role.TARGET, 2, 3)]
    seen = [run.view[3, 1, at].numpy().tobytes() for run in cache.runs for at in range(run.num_layers)]
    assert seen == [slab(tensor, 3, 1) for tensor in tensors.values()]


def test_layers_that_run_backwards_in_memory_are_not_joined() -> None:
    cache = found(tensors := spaced([4096, 2048, 0]))
    assert [run.view[1, 0, 0].numpy().tobytes() for run in cache.runs] == [
        slab(tensor, 1, 0) for tensor in tensors.values()
    ]


def test_layers_of_one_storage_with_other_strides_are_separate_runs() -> None:
    flat = torch.arange(8192, dtype=torch.int16)
    dense, sparse = flat[:1024].view(4, 2, 8, 16), flat[4096:].view(4, 4, 2, 8, 16)[:, 0]
    cache = found({"model.layers.0.attn": dense, "model.layers.1.attn": sparse})
    assert runs(cache) == [(Role.TARGET, 0, 1), (Role.TARGET, 1, 1)]
    assert cache.runs[1].view[3, 1, 0].numpy().tobytes() == slab(sparse, 3, 1)


def test_layers_of_separate_allocations_are_separate_runs() -> None:
    layout = Layout(layers=1)
    tensors = {f"model.layers.{seed}.attn": next(iter(device_tensors(layout, seed).values())) for seed in (0, 1)}
    assert runs(found(tensors)) == [(Role.TARGET, 0, 1), (Role.TARGET, 1, 1)]


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(4, 8, 2, 16).transpose(1, 2),
        torch.zeros(4, 2, 8, 32)[..., :16],
        torch.zeros(4, 2, 16, 8).transpose(2, 3),
        torch.zeros(2, 4, 2, 8, 16),
        torch.zeros(4, 2, 128),
    ],
    ids=["tokens before heads", "cut content", "transposed", "five dimensions", "three dimensions"],
)
def test_slabs_that_are_not_contiguous_are_refused_by_name(bad: torch.Tensor) -> None:
    tensors = {"model.layers.0.attn": torch.zeros(4, 2, 8, 16), "model.layers.1.attn": bad}
    with pytest.raises(ConfigError, match=r"'model\.layers\.1\.attn'.*VLLM_KV_CACHE_LAYOUT=HND") as refusal:
        found(tensors)
    assert str(tuple(bad.shape)) in str(refusal.value)


def test_layers_with_different_numbers_of_blocks_are_refused_with_both_numbers() -> None:
    tensors = {f"model.layers.{blocks}.attn": torch.zeros(blocks, 2, 8, 16) for blocks in (4, 6)}
    with pytest.raises(ConfigError, match=r"\[4, 6\]"):
        found(tensors)


def test_a_part_of_the_layers_is_found_in_the_runs_that_hold_it() -> None:
    cache = found(spaced([0, 1024, 4096, 8192, 12288]))
    first, second = cache.runs
    assert cache.run_bounds(first, Role.TARGET, 1, 4) == (1, 2)
    assert cache.run_bounds(second, Role.TARGET, 1, 4) == (2, 4)
    assert cache.run_bounds(second, Role.TARGET, 0, 2) is None
    assert cache.run_bounds(first, Role.DRAFT, 0, 2) is None
