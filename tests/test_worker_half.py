"""The worker half: what it tells of itself, what it refuses, and plans carried out byte for byte."""

from __future__ import annotations

import pytest
from transfer_fixtures import Gate, Layout, WatchedStore, device_tensors, move, write_block
from worker_kit import (
    LAYOUT,
    PAGE_BYTES,
    SOURCE,
    TARGET,
    MakeHalf,
    collected,
    done,
    ended,
    flushes,
    loads,
    pages,
    saves,
    step,
)

from vllm_hicache.config import Config
from vllm_hicache.errors import ConfigError
from vllm_hicache.geometry import Holding, PageLayout, RoleShape
from vllm_hicache.grid import Grid
from vllm_hicache.inventory import Inventory
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import BlockId, MissReason, OpId, Phase, Role
from vllm_hicache.place import Place
from vllm_hicache.plan import OpReport, Plan, SaveOp
from vllm_hicache.worker import WorkerHalf

pytest_plugins = ["worker_fixtures"]


def test_the_inventory_says_who_the_rank_is_and_how_many_whole_pages_it_keeps(make_half: MakeHalf) -> None:
    shapes = (RoleShape(Role.TARGET, 3, 2, LAYOUT.slab_bytes), RoleShape(Role.DRAFT, 2, 2, LAYOUT.slab_bytes))
    holdings = (Holding(Role.TARGET, (0, 3), (0, 2)), Holding(Role.DRAFT, (0, 2), (0, 2)))
    layout = PageLayout(shapes, 4, 8, Grid(1, 2))
    expected = Inventory(5, holdings, layout, PAGE_BYTES, 8, {Role.TARGET: "test"})
    assert make_half(device_tensors(LAYOUT)).hand_over() == expected


def test_a_grid_that_no_setting_names_is_the_one_that_suits_the_model(make_half: MakeHalf) -> None:
    assert make_half(device_tensors(LAYOUT), grid=None).hand_over().layout.grid == Grid(1, 1)
    large = Layout(layers=4, heads=2, blocks=2, head_size=1 << 15)
    inventory = make_half(device_tensors(large), grid=None, host_memory="2x").hand_over()
    assert (inventory.layout.num_bytes, inventory.layout.grid) == (8 << 20, Grid(4, 2))


def test_a_ratio_of_host_memory_is_one_of_this_ranks_device_cache(make_half: MakeHalf) -> None:
    inventory = make_half(device_tensors(LAYOUT), host_memory="2x").hand_over()
    assert inventory.num_rows == 2 * LAYOUT.blocks // 2


def test_more_host_memory_than_the_machine_has_is_refused_with_both_numbers(make_half: MakeHalf) -> None:
    with pytest.raises(
        ConfigError, match=r"4KiB on rank 5 \(it\), but the machine has 3KiB available: set host_memory"
    ):
        make_half(device_tensors(LAYOUT), available_bytes=3072, host_memory="4KiB")


def test_host_memory_below_one_page_is_refused_with_the_pages_size(make_half: MakeHalf) -> None:
    with pytest.raises(ConfigError, match=r"holds 0 pages: one page of this rank takes 2.5KiB"):
        make_half(device_tensors(LAYOUT), host_memory=PAGE_BYTES - 1)


def test_a_page_that_is_no_whole_number_of_blocks_is_refused_with_the_nearest_one(make_half: MakeHalf) -> None:
    with pytest.raises(ConfigError, match=r"page_tokens=10 .* blocks of 4 tokens.*such as 8"):
        make_half(device_tensors(LAYOUT), page_tokens=10)


def test_a_grid_that_does_not_divide_the_heads_is_refused_at_start(make_half: MakeHalf) -> None:
    with pytest.raises(ConfigError, match="grid 1x4 cannot cut 2 KV heads"):
        make_half(device_tensors(LAYOUT), grid="1x4")


def test_an_engine_without_attention_layers_is_refused(make_half: MakeHalf) -> None:
    with pytest.raises(ConfigError, match="0 attention layers"):
        make_half({})


def test_pages_come_back_from_host_memory_byte_for_byte_in_other_blocks(make_half: MakeHalf) -> None:
    tensors = device_tensors(LAYOUT)
    half, expected = make_half(tensors), pages(tensors, SOURCE)
    step(half, Plan(saves=saves()))
    assert collected(half, 1) == ended([done(1, 3)])
    for block in range(LAYOUT.blocks):
        write_block(tensors, block)
    step(half, Plan(loads=loads(2, False, 0)))
    assert collected(half, 1) == ended([done(2, 3)], "r")
    assert pages(tensors, TARGET) == expected


def test_a_lone_rank_sends_no_lines_for_others_to_be_compared_with(make_half: MakeHalf) -> None:
    half = make_half(device_tensors(LAYOUT))
    step(half, Plan(saves=saves()))
    result = half.collect(Plan())
    assert (result.entries, result.mark) == ((), None)


@pytest.mark.parametrize("block_major", [False, True])
def test_pages_come_back_through_the_store_in_another_engine(make_half: MakeHalf, block_major: bool) -> None:
    tensors = device_tensors(LAYOUT)
    writer, expected = make_half(tensors), pages(tensors, SOURCE)
    step(writer, Plan(saves=saves()))
    assert collected(writer, 1).reports == (done(1, 3),)
    step(writer, Plan(flushes=flushes(2)))
    assert collected(writer, 1).reports == (done(2, 3),)
    other = device_tensors(Layout(layers=3, draft_layers=2, block_major=block_major), seed=9)
    reader = make_half(other)
    step(reader, Plan(loads=loads(1, True, 4)))
    assert collected(reader, 1) == ended([done(1, 3)], "r")
    assert pages(other, TARGET) == expected


def test_nothing_is_found_under_another_namespace(make_half: MakeHalf) -> None:
    half = make_half(device_tensors(LAYOUT))
    step(half, Plan(saves=saves(), flushes=()))
    assert collected(half, 1).reports == (done(1, 3),)
    step(half, Plan(flushes=flushes(2)))
    assert collected(half, 1).reports == (done(2, 3),)
    step(half, Plan(loads=loads(3, True, 4, b"m" * 32)))
    result = collected(half, 1)
    assert result.reports == (OpReport(5, OpId(3), 0, 0, reason=MissReason.ABSENT),)
    assert result.invalid_blocks == {BlockId(block) for page in TARGET for block in page}


def test_a_save_takes_the_bytes_at_its_commit_and_not_those_before_the_forward_pass(make_half: MakeHalf) -> None:
    tensors = device_tensors(LAYOUT)
    half, plan = make_half(tensors), Plan(saves=saves())
    half.start_loads(plan)
    for block in range(6):
        write_block(tensors, block, 0x11 + block)
    expected = pages(tensors, SOURCE)
    half.commit_saves(plan)
    assert collected(half, 1).reports == (done(1, 3),)
    step(half, Plan(loads=loads(2, False, 0)))
    assert collected(half, 1).reports == (done(2, 3),)
    assert pages(tensors, TARGET) == expected


def test_one_plan_carries_loads_saves_and_flushes_together(make_half: MakeHalf) -> None:
    tensors = device_tensors(LAYOUT)
    half, expected = make_half(tensors), pages(tensors, SOURCE)
    step(half, Plan(saves=saves()))
    assert collected(half, 1).reports == (done(1, 3),)
    more = (SaveOp(OpId(4), (move(9, 7, [20, 21]),)),)
    step(half, Plan(loads=loads(2, False, 0), saves=more, flushes=flushes(3)))
    assert collected(half, 3).reports == (done(2, 3), done(3, 3), done(4, 1))
    assert pages(tensors, TARGET) == expected


def test_a_cancelled_load_is_received_before_the_store_answers(make_half: MakeHalf, store: WatchedStore) -> None:
    half, gate = make_half(device_tensors(LAYOUT)), Gate()
    store.before["read", 0] = gate
    half.start_loads(Plan(loads=loads(1, True, 0)))
    gate.await_entry()
    half.start_loads(Plan(cancels=(OpId(1),)))
    received = half.collect(Plan())
    gate.open()
    assert received.reports == (OpReport(5, OpId(1), 0, 0, Phase.RECEIVED, MissReason.CANCELLED),)
    assert (received.received, received.invalid_blocks) == ({"r"}, {block for page in TARGET for block in page})
    assert collected(half, 1) == ended([OpReport(5, OpId(1), 0, 0, reason=MissReason.CANCELLED)])


def test_without_a_store_loads_from_it_fail_and_flushes_are_declined(make_half: MakeHalf) -> None:
    config = Config.parse({"store": "none", "page_tokens": 8, "host_memory": 8 * PAGE_BYTES})
    half = WorkerHalf(config, Place(), device_tensors(LAYOUT), 4, {Role.TARGET: "test"}, Metrics(), 1 << 30)
    step(half, Plan(loads=loads(1, True, 0), flushes=flushes(2)))
    assert [report.pages_done for report in collected(half, 2).reports] == [0, 0]
    half.close()


def test_close_writes_what_was_planned_to_the_store(make_half: MakeHalf) -> None:
    tensors = device_tensors(LAYOUT)
    half, expected = make_half(tensors), pages(tensors, SOURCE)
    step(half, Plan(saves=saves()))
    assert collected(half, 1).reports == (done(1, 3),)
    step(half, Plan(flushes=flushes(2)))
    half.close()
    reader = make_half(other := device_tensors(LAYOUT, seed=4))
    step(reader, Plan(loads=loads(1, True, 0)))
    assert collected(reader, 1).reports == (done(1, 3),)
    assert pages(other, TARGET) == expected
