"""Copies between device blocks and host slots: the documented order, exact bytes, and nothing else touched."""

from __future__ import annotations

from contextlib import nullcontext
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_fixtures import POISON, Layout, Rig, move, page_bytes, slab, whole_rank, write_block

from vllm_hicache.grid import Grid
from vllm_hicache.transfer.copier import CpuCopier, CudaCopier, Fence, make_copier
from vllm_hicache.transfer.device import DeviceCache
from vllm_hicache.transfer.host import HostPool


@st.composite
def rigs(draw: st.DrawFn) -> Rig:
    layers, draft, heads = draw(st.integers(1, 5)), draw(st.integers(0, 2)), draw(st.sampled_from([1, 2, 4]))
    layout = Layout(
        layers=layers,
        heads=heads,
        blocks=9,
        block_tokens=draw(st.sampled_from([1, 2, 4])),
        head_size=draw(st.sampled_from([1, 8])),
        draft_layers=draft,
        block_major=draw(st.booleans()),
        shared_draft=draw(st.booleans()),
    )
    groups = draw(st.integers(1, layers))
    grid = Grid(groups, draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0])))
    return Rig(layout, draw(st.integers(1, 3)), grid, num_slots=3, seed=draw(st.integers(0, 99)))


@st.composite
def part_rigs(draw: st.DrawFn) -> Rig:
    """A rank that holds some layers and heads of pages that are one object for the target, one for the draft."""
    layers = sorted(draw(st.sets(st.integers(0, 5), min_size=2, max_size=2)))
    heads = sorted(draw(st.sets(st.integers(0, 4), min_size=2, max_size=2)))
    layout = Layout(layers=5, heads=4, blocks=9, draft_layers=draw(st.integers(0, 2)))
    return Rig(layout, draw(st.integers(1, 3)), num_slots=3, layers=tuple(layers), heads=tuple(heads))


def pages(rig: Rig, seed: int, count: int) -> list[list[int]]:
    """Distinct blocks of `count` pages, in no order."""
    order = torch.randperm(rig.layout.blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    size = rig.geometry.blocks_per_page
    return [order[at * size : (at + 1) * size] for at in range(count)]


@settings(max_examples=90, deadline=None)
@given(st.one_of(rigs(), part_rigs()), st.integers(0, 99))
def test_a_page_comes_back_byte_for_byte_in_other_blocks_and_touches_nothing_else(rig: Rig, seed: int) -> None:
    source, target = pages(rig, seed, 2)
    rig.poison_slots()
    rig.copier.save([move(0, 1, source)], None)
    expected, poison = rig.page(source), bytes([POISON]) * rig.pool.slot_bytes
    assert [rig.slot(slot) for slot in range(3)] == [poison, expected, poison]
    rig.poison_device()
    others = rig.blocks(besides=target)
    rig.copier.load([move(0, 1, target)], None)
    assert rig.page(target) == expected
    assert rig.blocks(besides=target) == others


@settings(max_examples=40, deadline=None)
@given(rigs(), st.data())
def test_a_part_of_a_page_moves_the_blocks_that_are_named_and_no_others(rig: Rig, data: st.DataObject) -> None:
    source, target = pages(rig, 1, 2)
    first = data.draw(st.integers(0, len(source)))
    stop = data.draw(st.integers(first, len(source)))
    rig.copier.save([move(0, 2, source)], None)
    expected = {target[at]: rig.block(source[at]) for at in range(first, stop)}
    rig.poison_device()
    expected |= rig.blocks(besides=list(expected))
    rig.copier.load([move(0, 2, target[first:stop], first)], None)
    assert rig.blocks() == expected


def test_a_partial_save_leaves_the_rest_of_the_slot_as_it_was() -> None:
    rig = Rig(blocks_per_page=3)
    rig.copier.save([move(0, 0, [0, 1, 2])], None)
    rig.copier.save([move(0, 0, [7], 1)], None)
    assert rig.slot(0) == rig.page([0, 7, 2])


def test_a_slot_holds_heads_then_layers_then_blocks() -> None:
    rig = Rig(Layout(layers=2, heads=2))
    rig.copier.save([move(0, 0, [5, 3])], None)
    names = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
    order = [(head, name, block) for head in (0, 1) for name in names for block in (5, 3)]
    assert rig.slot(0) == b"".join(slab(rig.tensors[name], block, head) for head, name, block in order)


def test_each_cell_of_the_grid_is_one_range_with_target_before_draft() -> None:
    rig = Rig(Layout(layers=3, heads=4, draft_layers=2), grid=Grid(2, 2))
    rig.copier.save([move(0, 0, [4, 9])], None)
    part = rig.geometry.parts[2]
    cells = [each.cell for each in rig.geometry.parts]
    assert [(cell.role.value, cell.layer_group, cell.head_group) for cell in cells] == [
        *(("target", layers, heads) for layers in (0, 1) for heads in (0, 1)),
        *(("draft", 0, heads) for heads in (0, 1)),
    ]
    last = {"model.layers.2.self_attn.attn": rig.tensors["model.layers.2.self_attn.attn"][:, :2]}
    assert bytes(rig.pool.part(move(0, 0).slot, part)) == page_bytes(last, [4, 9])


def test_several_moves_of_one_call_are_all_made() -> None:
    rig = Rig()
    rig.copier.save([move(0, 0, [0, 1]), move(1, 1, [2, 3])], None)
    rig.poison_device()
    rig.copier.load([move(1, 1, [10, 11]), move(0, 0, [12, 13])], None)
    assert (rig.page([12, 13]), rig.page([10, 11])) == (rig.slot(0), rig.slot(1))


def test_layers_in_several_runs_make_one_page() -> None:
    rig = Rig(Layout(layers=3))
    other = Rig(Layout(layers=2), seed=5)
    rig.tensors |= {f"model.layers.{3 + at}.attn": each for at, each in enumerate(other.tensors.values())}
    cache = DeviceCache.from_tensors(rig.tensors, rig.layout.block_tokens)
    geometry = whole_rank(cache, 2, Grid(2, 1))
    pool = HostPool(1, geometry.slot_bytes)
    make_copier(cache, pool, geometry).save([move(0, 0, [6, 2])], None)
    assert len(cache.runs) == 3
    assert pool.regions[0][0].numpy().tobytes() == page_bytes(rig.tensors, [6, 2], Grid(2, 1))


def test_memory_of_this_process_is_copied_by_the_cpu_copier() -> None:
    rig = Rig()
    assert isinstance(make_copier(rig.cache, rig.pool, rig.geometry), CpuCopier)
    assert rig.copier.fence() is None


class FakeStream:
    """A stream that does all at once, and remembers what one block held when it was waited for."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.calls: list[tuple[str, object, bytes]] = []

    def wait_event(self, event: object) -> None:
        self.calls.append(("wait", event, self.rig.block(8)))

    def synchronize(self) -> None:
        self.calls.append(("synchronize", None, self.rig.block(8)))


def on_fake_stream(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> tuple[CudaCopier, FakeStream]:
    stream = FakeStream(rig)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda entered: nullcontext())
    return CudaCopier(rig.cache, rig.pool, rig.geometry, torch.device("cpu")), stream


@pytest.mark.parametrize("layout", [Layout(), Layout(draft_layers=2, shared_draft=True, block_major=True)])
def test_the_cuda_copier_moves_the_same_bytes_as_the_cpu_copier(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(layout, grid=Grid(2, 2))
    copier, _ = on_fake_stream(rig, monkeypatch)
    copier.save([move(0, 0, [0, 5]), move(1, 1, [2, 3])], None)
    assert (rig.slot(0), rig.slot(1)) == (rig.page([0, 5]), rig.page([2, 3]))
    rig.poison_device()
    copier.load([move(0, 0, [8, 9]), move(1, 1, [11], 1)], None)
    rig.copier.load([move(0, 0, [20, 21]), move(1, 1, [22, 23])], None)
    assert (rig.block(8), rig.block(9), rig.block(11)) == (rig.block(20), rig.block(21), rig.block(23))


def test_the_cuda_copier_copies_after_its_fence_and_returns_after_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, fence = Rig(), cast("Fence", object())
    copier, stream = on_fake_stream(rig, monkeypatch)
    copier.save([move(0, 0, [0, 1])], None)
    expected = rig.block(0)
    write_block(rig.tensors, 8)
    poison = rig.block(8)
    copier.load([move(0, 0, [8, 9])], fence)
    assert [call[0] for call in stream.calls] == ["synchronize", "wait", "synchronize"]
    assert stream.calls[1:] == [("wait", fence, poison), ("synchronize", None, expected)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_page_comes_back_byte_for_byte_on_a_cuda_device() -> None:
    rig = Rig(Layout(draft_layers=2), grid=Grid(2, 2))
    storage = {name: tensor.cuda() for name, tensor in rig.tensors.items()}
    cache = DeviceCache.from_tensors(storage, rig.layout.block_tokens)
    pool = HostPool(2, rig.geometry.slot_bytes, pin=True)
    copier = make_copier(cache, pool, rig.geometry)
    copier.save([move(0, 1, [0, 1])], copier.fence())
    copier.load([move(0, 1, [8, 9])], copier.fence())
    assert pool.regions[0][1].numpy().tobytes() == rig.page([0, 1])
    assert page_bytes({name: tensor.cpu() for name, tensor in storage.items()}, [8, 9], rig.grid) == rig.page([0, 1])
