"""A worker half among others: it consumes what is acknowledged and holds, reads and writes its own part only."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from transfer_fixtures import PATIENCE_S, Gate, Layout, Tensors, WatchedStore, device_tensors, share, write_block
from worker_kit import (
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

from vllm_hicache.entries import EntryKind
from vllm_hicache.errors import ConfigError
from vllm_hicache.geometry import Holding
from vllm_hicache.grid import Grid
from vllm_hicache.names import MissReason, OpId, Phase, Role
from vllm_hicache.place import Place
from vllm_hicache.plan import Ack, OpReport, Plan, StepResult
from vllm_hicache.worker import WorkerHalf

pytest_plugins = ["worker_fixtures"]

WHOLE = Layout(layers=3, heads=2)
SHARE_BYTES = 2 * 3 * WHOLE.slab_bytes
"""Bytes of a page on one of two tensor ranks."""


def tensor_place(rank: int, tp_size: int = 2, num_heads: int = 2) -> Place:
    return Place(rank, tp_size, 1, num_heads, 3, tp_size)


def stage_place(rank: int) -> Place:
    return Place(rank, 1, 2, 2, 3, 2)


def acknowledged(*acks: Ack) -> Plan:
    return Plan(acks=acks, num_slots=8)


def holding_pages(make_half: MakeHalf, rank: int = 0, **settings: object) -> tuple[WorkerHalf, Tensors, list[bytes]]:
    """A tensor rank with three acknowledged pages in slots 0 to 2, its device poisoned, and what the pages hold."""
    tensors = share(device_tensors(WHOLE), (0, 3), (rank, rank + 1))
    half, expected = make_half(tensors, place=tensor_place(rank), **settings), pages(tensors, SOURCE)
    step(half, Plan(saves=saves(), num_slots=8))
    assert collected(half, 1) == ended([done(1, 3, rank)])
    step(half, acknowledged(Ack(OpId(1), 3, 3)))
    half.collect(Plan())
    for block in range(WHOLE.blocks):
        write_block(tensors, block)
    return half, tensors, expected


def blocks_from(page: int) -> set[int]:
    return {block for blocks in TARGET[page:] for block in blocks}


# Consumption


def test_a_rank_among_several_delivers_nothing_before_the_acknowledgement(make_half: MakeHalf) -> None:
    half, tensors, expected = holding_pages(make_half)
    step(half, Plan(loads=loads(2, False, 0)))
    assert collected(half, 1) == ended([done(2, 3, rank=0)])
    before = half.collect(Plan())
    assert before == StepResult(mark=before.mark)
    step(half, acknowledged(Ack(OpId(2), 3, 3)))
    result = half.collect(Plan())
    assert (result.received, result.invalid_blocks, result.reports) == ({"r"}, frozenset(), ())
    assert pages(tensors, TARGET) == expected


def test_a_lone_rank_delivers_at_once(make_half: MakeHalf) -> None:
    tensors = device_tensors(WHOLE)
    half, expected = make_half(tensors), pages(tensors, SOURCE)
    step(half, Plan(saves=saves()))
    assert collected(half, 1) == ended([done(1, 3)])
    step(half, Plan(loads=loads(2, False, 0)))
    assert collected(half, 1) == ended([done(2, 3)], "r")
    assert pages(tensors, TARGET) == expected


@pytest.mark.parametrize("phase", [Phase.RECEIVED, Phase.SETTLED])
@pytest.mark.parametrize("length", [0, 1, 2])
def test_a_rank_delivers_exactly_the_acknowledged_length_although_it_has_more(
    make_half: MakeHalf, length: int, phase: Phase
) -> None:
    half, _, _ = holding_pages(make_half)
    step(half, Plan(loads=loads(2, False, 0)))
    assert collected(half, 1).reports == (done(2, 3, rank=0),)
    step(half, acknowledged(Ack(OpId(2), length, 3, phase, MissReason.ABSENT)))
    result = half.collect(Plan())
    assert (result.received, result.invalid_blocks) == ({"r"}, blocks_from(length))
    assert (half.collect(Plan()).received, half.collect(Plan()).invalid_blocks) == (frozenset(), frozenset())


def test_an_acknowledgement_on_the_way_delivers_nothing(make_half: MakeHalf) -> None:
    half, _, _ = holding_pages(make_half)
    step(half, Plan(loads=loads(2, False, 0)))
    assert collected(half, 1).reports == (done(2, 3, rank=0),)
    step(half, acknowledged(Ack(OpId(2), 3, 3, Phase.RUNNING)))
    assert not half.collect(Plan()).received


def test_a_rank_that_is_given_up_stops_and_delivers_what_was_acknowledged(
    make_half: MakeHalf, store: WatchedStore
) -> None:
    half, tensors, _ = holding_pages(make_half)
    poison, gate = pages(tensors, TARGET), Gate()
    store.before["read", 0] = gate
    step(half, Plan(loads=loads(2, True, 4)))
    gate.await_entry()
    step(half, acknowledged(Ack(OpId(2), 0, 0, Phase.RECEIVED, MissReason.TIMEOUT)))
    result = half.collect(Plan())
    gate.open()
    assert (result.received, result.invalid_blocks) == ({"r"}, blocks_from(0))
    assert collected(half, 1) == ended([OpReport(0, OpId(2), 0, 0, reason=MissReason.CANCELLED)])
    assert pages(tensors, TARGET) == poison


def test_a_rank_says_again_what_it_is_asked_about(make_half: MakeHalf) -> None:
    half, _, _ = holding_pages(make_half)
    step(half, Plan(loads=loads(2, False, 0)))
    assert collected(half, 1).reports == (done(2, 3, rank=0),)
    for _ in range(2):
        step(half, Plan(asks=(OpId(1), OpId(2), OpId(99))))
        assert half.collect(Plan()).reports == (done(2, 3, rank=0),)
    assert half.collect(Plan()).reports == ()


def test_a_rank_that_has_nothing_yet_says_so_when_it_is_asked(make_half: MakeHalf, store: WatchedStore) -> None:
    half, _, _ = holding_pages(make_half)
    store.before["read", 0] = gate = Gate()
    step(half, Plan(loads=loads(2, True, 4)))
    gate.await_entry()
    step(half, Plan(asks=(OpId(2),)))
    result = half.collect(Plan())
    gate.open()
    assert result.reports == (OpReport(0, OpId(2), 0, 0, Phase.RUNNING),)
    assert collected(half, 1).reports[0].reason is MissReason.ABSENT


# The slot table


@pytest.mark.parametrize(("consensus", "served"), [("record", 0), ("enforce", 0), ("off", 3)])
def test_slots_that_were_not_acknowledged_to_hold_the_pages_are_not_served(
    make_half: MakeHalf, consensus: str, served: int
) -> None:
    tensors = share(device_tensors(WHOLE), (0, 3), (0, 1))
    half, expected = make_half(tensors, place=tensor_place(0), consensus=consensus), pages(tensors, SOURCE)
    step(half, Plan(saves=saves(), num_slots=8))
    assert collected(half, 1) == ended([done(1, 3, rank=0)])
    for block in range(WHOLE.blocks):
        write_block(tensors, block)
    poison = pages(tensors, TARGET)
    step(half, Plan(loads=loads(2, False, 0)))
    (report,) = collected(half, 1).reports
    assert (report.pages_done, report.reason) == (served, None if served else MissReason.DISAGREED)
    assert pages(tensors, TARGET) == (expected if served else poison)


def test_slots_that_were_not_acknowledged_to_hold_the_pages_are_not_flushed(
    make_half: MakeHalf, store: WatchedStore
) -> None:
    half = make_half(share(device_tensors(WHOLE), (0, 3), (0, 1)), place=tensor_place(0))
    step(half, Plan(saves=saves(), num_slots=8))
    assert collected(half, 1).reports == (done(1, 3, rank=0),)
    step(half, Plan(acks=(Ack(OpId(1), 2, 2),), flushes=flushes(2)))
    assert collected(half, 1).reports == (OpReport(0, OpId(2), 2, 2, reason=MissReason.DISAGREED),)
    assert {number for operation, number in store.calls if operation == "write"} == {0, 1}


def test_pages_that_a_load_brought_are_known_when_they_are_acknowledged(make_half: MakeHalf) -> None:
    half, tensors, expected = holding_pages(make_half, grid="1x2")
    step(half, Plan(flushes=flushes(2)))
    assert collected(half, 1).reports == (done(2, 3, rank=0),)
    step(half, Plan(acks=(Ack(OpId(2), 3, 3),), loads=loads(3, True, 4)))
    assert collected(half, 1).reports == (done(3, 3, rank=0),)
    again = loads(4, False, 4)
    step(half, Plan(acks=(Ack(OpId(3), 2, 2, Phase.RUNNING),), loads=again))
    (report,) = collected(half, 1).reports
    assert (report.pages_done, report.reason) == (2, MissReason.DISAGREED)
    assert pages(tensors, TARGET) == expected


def test_what_a_rank_consumed_goes_to_the_scheduler_half_and_to_disk(make_half: MakeHalf, tmp_path: Path) -> None:
    half = make_half(
        share(device_tensors(WHOLE), (0, 3), (1, 2)), place=tensor_place(1), consensus_dir=str(tmp_path / "log")
    )
    step(half, Plan(saves=saves(), num_slots=7))
    kinds = [(entry.op, entry.kind, entry.value) for entry in half.collect(Plan()).entries]
    assert kinds[:3] == [(0, EntryKind.CAPACITY, 7), (1, EntryKind.EVICT, 3), (1, EntryKind.LOCK, 3)]
    step(half, Plan(acks=(Ack(OpId(1), 2, 2),), num_slots=7))
    later = [(entry.kind, entry.value) for entry in half.collect(Plan()).entries if entry.kind != EntryKind.DONE]
    assert EntryKind.CAPACITY not in [kind for kind, _ in later]
    half.close()
    lines = [json.loads(line) for line in (tmp_path / "log" / "rank-1.jsonl").read_text().splitlines()]
    assert [line.get("kind") for line in lines[:4]] == [None, "capacity", "eviction eligibility", "lock"]


def test_the_log_says_what_was_done_and_no_more_consumed_than_this_rank_has(make_half: MakeHalf) -> None:
    half = make_half(share(device_tensors(WHOLE), (0, 3), (0, 1)), place=tensor_place(0))
    step(half, Plan(saves=saves(), num_slots=8))
    assert collected(half, 1).reports == (done(1, 3, rank=0),)
    step(half, Plan(acks=(Ack(OpId(1), 2, 2),), loads=loads(2, False, 0)))
    entries = entries_until(half, EntryKind.DONE)
    assert entries[-1] == (2, EntryKind.DONE, 2)
    step(half, acknowledged(Ack(OpId(2), 3, 3)))
    assert entries_until(half, EntryKind.UNLOCK) == [(2, EntryKind.ACK, 2), (2, EntryKind.UNLOCK, 3)]


def entries_until(half: WorkerHalf, kind: EntryKind) -> list[tuple[int, EntryKind, int]]:
    """Operation, kind and value of a rank's entries up to the first of this kind."""
    deadline, entries = time.monotonic() + PATIENCE_S, list[tuple[int, EntryKind, int]]()
    while kind not in [each[1] for each in entries]:
        assert time.monotonic() < deadline, entries
        entries += [(entry.op, entry.kind, entry.value) for entry in half.collect(Plan()).entries]
    return entries


def test_without_a_checker_there_is_no_log(make_half: MakeHalf) -> None:
    half, _, _ = holding_pages(make_half, consensus="off")
    step(half, Plan(loads=loads(2, False, 0)))
    result = half.collect(Plan())
    assert (result.entries, result.mark) == ((), None)


def test_ranks_that_consumed_the_same_stand_at_the_same_mark_and_others_elsewhere(make_half: MakeHalf) -> None:
    halves = [holding_pages(make_half, rank)[0] for rank in range(2)]
    same = [half.collect(Plan()).mark for half in halves]
    for half, pages_done in zip(halves, (3, 2), strict=True):
        step(half, Plan(saves=saves(5)))
        assert len(collected(half, 1).reports) == 1
        step(half, acknowledged(Ack(OpId(5), pages_done, 3)))
    one, other = (half.collect(Plan()).mark for half in halves)
    assert same[0] == same[1] != one
    assert one != other


def test_a_drill_changes_what_a_rank_says_and_no_bytes(make_half: MakeHalf, tmp_path: Path) -> None:
    faults = [{"fault": "fail", "rank": 0, "operation": "load", "pages": 1}]
    (tmp_path / "faults.json").write_text(json.dumps(faults))
    half, tensors, expected = holding_pages(make_half, rank_faults=str(tmp_path / "faults.json"))
    step(half, Plan(loads=loads(2, False, 0)))
    (report,) = collected(half, 1).reports
    assert (report.pages_done, report.reason) == (1, MissReason.ERROR)
    assert pages(tensors, TARGET) == expected


def test_a_drill_changes_what_a_rank_consumes(make_half: MakeHalf, tmp_path: Path) -> None:
    faults = [{"fault": "short", "rank": 0, "operation": "load", "pages": 1}]
    (tmp_path / "faults.json").write_text(json.dumps(faults))
    half, _, _ = holding_pages(make_half, rank_faults=str(tmp_path / "faults.json"))
    step(half, Plan(loads=loads(2, False, 0)))
    collected(half, 1)
    step(half, acknowledged(Ack(OpId(2), 3, 3)))
    assert half.collect(Plan()).invalid_blocks == blocks_from(1)


# Parts of the model


def test_tensor_ranks_say_which_heads_they_hold_of_the_whole_model(make_half: MakeHalf) -> None:
    whole, inventories = device_tensors(WHOLE), []
    for rank in range(2):
        half = make_half(share(whole, (0, 3), (rank, rank + 1)), place=tensor_place(rank))
        inventories.append(half.hand_over())
    assert [each.holdings for each in inventories] == [
        (Holding(Role.TARGET, (0, 3), (rank, rank + 1)),) for rank in range(2)
    ]
    assert [(each.rank, each.slot_bytes) for each in inventories] == [(0, SHARE_BYTES), (1, SHARE_BYTES)]
    assert inventories[0].layout == inventories[1].layout
    assert inventories[0].layout.num_bytes == 2 * SHARE_BYTES


def test_stages_say_which_layers_they_hold_of_the_whole_model(make_half: MakeHalf) -> None:
    whole, inventories = device_tensors(WHOLE), []
    for rank, layers in enumerate([(0, 2), (2, 3)]):
        half = make_half(share(whole, layers, (0, 2)), place=stage_place(rank), grid="2x1")
        inventories.append(half.hand_over())
    assert [each.holdings for each in inventories] == [
        (Holding(Role.TARGET, layers, (0, 2)),) for layers in ((0, 2), (2, 3))
    ]
    assert inventories[0].layout == inventories[1].layout
    assert inventories[0].layout.grid == Grid(2, 1, (2, 1))


def test_of_more_ranks_than_heads_neighbours_hold_the_same_and_are_replicas(make_half: MakeHalf) -> None:
    whole, holdings = device_tensors(WHOLE), []
    for rank in range(4):
        half = make_half(share(whole, (0, 3), (rank // 2, rank // 2 + 1)), place=tensor_place(rank, 4))
        holdings += half.hand_over().holdings
    assert [(each.heads, each.replica, each.num_replicas) for each in holdings] == [
        ((0, 1), 0, 2),
        ((0, 1), 1, 2),
        ((1, 2), 0, 2),
        ((1, 2), 1, 2),
    ]


def test_a_rank_with_other_heads_than_its_share_is_refused_with_both_numbers(make_half: MakeHalf) -> None:
    with pytest.raises(ConfigError, match=r"rank 1 registered 2 KV heads of target layers, but its share of 8 is 4"):
        make_half(device_tensors(WHOLE), place=tensor_place(1, num_heads=8), grid="1x1")


def test_a_stage_whose_layers_are_not_consecutive_is_refused(make_half: MakeHalf) -> None:
    tensors = device_tensors(Layout(layers=4))
    del tensors["model.layers.1.self_attn.attn"]
    with pytest.raises(ConfigError, match=r"rank 0 registered target layers \[0, 2, 3\], which are not consecutive"):
        make_half(tensors, place=Place(0, 1, 2, 2, 6, 2), grid="1x1")


@pytest.mark.parametrize(("available_bytes", "fits"), [(4096, True), (4095, False)])
def test_memory_is_counted_for_all_ranks_of_the_machine(make_half: MakeHalf, available_bytes: int, fits: bool) -> None:
    tensors = share(device_tensors(WHOLE), (0, 3), (0, 1))
    arguments = {"available_bytes": available_bytes, "place": tensor_place(0), "host_memory": "2KiB"}
    if fits:
        assert make_half(tensors, **arguments).hand_over().num_rows == 2048 // SHARE_BYTES
        return
    with pytest.raises(ConfigError, match=r"asks for 2KiB on rank 0 \(2 ranks, 4KiB together\)"):
        make_half(tensors, **arguments)


def saved_and_flushed(half: WorkerHalf, rank: int) -> None:
    step(half, Plan(saves=saves(), num_slots=8))
    assert collected(half, 1) == ended([done(1, 3, rank)])
    step(half, Plan(acks=(Ack(OpId(1), 3, 3),), flushes=flushes(2), num_slots=8))
    assert collected(half, 1) == ended([done(2, 3, rank)])


CUTS = {
    "two tensor ranks": [((0, 3), (0, 1), tensor_place(0)), ((0, 3), (1, 2), tensor_place(1))],
    "two stages": [((0, 2), (0, 2), stage_place(0)), ((2, 3), (0, 2), stage_place(1))],
    "one rank": [((0, 3), (0, 2), Place())],
}


@pytest.mark.parametrize("reader", CUTS)
@pytest.mark.parametrize("writer", CUTS)
def test_what_ranks_of_one_cut_wrote_ranks_of_another_read_byte_for_byte(
    make_half: MakeHalf, writer: str, reader: str
) -> None:
    whole, other = device_tensors(WHOLE), device_tensors(WHOLE, seed=3)
    for layers, heads, place in CUTS[writer]:
        saved_and_flushed(make_half(share(whole, layers, heads), place=place, grid="2x2"), place.rank)
    for layers, heads, place in CUTS[reader]:
        tensors = share(other, layers, heads)
        half = make_half(tensors, place=place, grid="2x2")
        step(half, Plan(loads=loads(1, True, 4), num_slots=8))
        assert collected(half, 1).reports == (done(1, 3, place.rank),)
        assert pages(tensors, TARGET) == pages(share(whole, layers, heads), SOURCE)


@pytest.mark.parametrize("cut", ["two tensor ranks", "two stages"])
def test_ranks_that_hold_a_part_of_a_cell_fetch_it_by_ranges_and_never_flush(
    make_half: MakeHalf, store: WatchedStore, cut: str
) -> None:
    whole = device_tensors(WHOLE)
    saved_and_flushed(make_half(dict(whole), place=Place(), grid="1x1"), 0)
    store.calls.clear()
    for layers, heads, place in CUTS[cut]:
        tensors = share(device_tensors(WHOLE, seed=3), layers, heads)
        half = make_half(tensors, place=place, grid="1x1")
        step(half, Plan(loads=loads(1, True, 4), num_slots=8))
        assert collected(half, 1).reports == (done(1, 3, place.rank),)
        assert pages(tensors, TARGET) == pages(share(whole, layers, heads), SOURCE)
        step(half, Plan(saves=saves(2), num_slots=8))
        assert collected(half, 1).reports == (done(2, 3, place.rank),)
        step(half, Plan(acks=(Ack(OpId(2), 3, 3),), flushes=flushes(3)))
        assert collected(half, 1).reports == (done(3, 3, place.rank),)
    assert {operation for operation, _ in store.calls} == {"read"}


def test_replicated_heads_are_flushed_by_one_rank_each_page(make_half: MakeHalf, store: WatchedStore) -> None:
    whole, written = device_tensors(Layout(layers=3, heads=1)), []
    for rank in range(2):
        half = make_half(share(whole, (0, 3), (0, 1)), place=tensor_place(rank, num_heads=1), grid="1x1")
        saved_and_flushed(half, rank)
        written += [number for operation, number in store.calls if operation == "write"]
        store.calls.clear()
    assert sorted(written) == [0, 1, 2]
