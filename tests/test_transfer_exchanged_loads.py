"""Loads for which ranks give each other pages: what is exchanged when, and how such a load ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from shard_kit import NUM_PAGES, SMALLEST, MakeTeam, RankEngine, Team, forget, load, stored
from transfer_fixtures import Gate, WatchedStore, write_block

from vllm_hicache.names import MissReason, OpId, Phase, Slot
from vllm_hicache.plan import OpReport
from vllm_hicache.transfer import engine as engine_module
from vllm_hicache.transfer.exchange import MAX_ROWS

pytest_plugins = ["shard_fixtures"]
ALL = set(range(NUM_PAGES))
EVERY_PAGE = (NUM_PAGES, None)


def gated(team: Team, rank: int = 0) -> Gate:
    """A rank comes to no gather before the gate is open."""
    gate = Gate()
    team.collectives[rank].before_meeting = lambda row: gate()
    return gate


# Loads with an exchange


@pytest.mark.parametrize("num_owners", [2, 3, 4])
def test_host_pages_are_exchanged_at_once(make_team: MakeTeam, num_owners: int) -> None:
    team = make_team(num_owners, rotation=1)
    load(team, 1, 1, NUM_PAGES)
    assert team.lengths(1) == [(NUM_PAGES - 1, None)] * num_owners
    assert team.pages() == [ALL - {0}] * num_owners
    slot_bytes = team.ranks[0].member.geometry.slot_bytes
    for rank in team.ranks:
        own = len(set(team.group.owned_by(rank.member)) - {0})
        others = NUM_PAGES - 1 - own
        assert rank.bytes_moved() == {"load": own * slot_bytes, "exchange": others * slot_bytes}


def test_store_pages_are_exchanged_as_far_as_they_are_acknowledged(make_team: MakeTeam, store: WatchedStore) -> None:
    stored(team := make_team(), store)
    load(team, 1, 0, NUM_PAGES, from_store=True)
    team.until_held(1, NUM_PAGES)
    assert [rank.told[1].phase for rank in team.ranks] == [Phase.RUNNING] * 2
    assert (team.num_gathers(), team.pages()) == ([0, 0], [set(), set()])
    for num_held in (5, 5, 3, 6):
        team.acknowledge(1, num_held)
        team.until(lambda so_far=num_held: all(rank.told[1].pages_done >= so_far for rank in team.ranks))
    assert team.pages() == [set(range(6))] * 2
    assert team.num_gathers() == [1 + 3 + 1 + 1] * 2
    team.acknowledge(1, NUM_PAGES)
    assert team.lengths(1) == [EVERY_PAGE] * 2
    assert team.pages() == [ALL] * 2
    share = NUM_PAGES // 2 * team.ranks[0].member.geometry.slot_bytes
    assert [rank.bytes_moved() for rank in team.ranks] == [{"fetch": share, "load": share, "exchange": share}] * 2


def test_host_pages_of_a_load_do_not_wait_for_its_store_pages(make_team: MakeTeam, store: WatchedStore) -> None:
    stored(team := make_team(), store)
    for rank in team.ranks:
        for page in set(team.group.owned_by(rank.member)) & set(range(4)):
            rank.member.put(team.group.slot(page), team.group.content(page))
    for rank in team.ranks:
        rank.load(1, team.group.moves(0, 4) + team.group.moves(4, 8, from_store=True))
    team.until(lambda: all(1 in rank.told and rank.told[1].pages_done == 4 for rank in team.ranks))
    assert team.pages() == [{0, 1, 2, 3}] * 2
    team.until_held(1, 8)
    team.acknowledge(1, 8)
    assert team.lengths(1) == [(8, None)] * 2
    assert team.pages() == [set(range(8))] * 2


def test_where_a_rank_has_ended_the_others_get_what_it_holds_and_end_too(
    make_team: MakeTeam, store: WatchedStore
) -> None:
    stored(team := make_team(), store)
    forget(store, 5)
    load(team, 1, 0, NUM_PAGES, from_store=True)
    team.until_held(1, 5)
    team.acknowledge(1, 5, reason=MissReason.ABSENT)
    assert team.lengths(1) == [(5, MissReason.ABSENT)] * 2
    assert team.pages() == [set(range(5))] * 2


@pytest.mark.parametrize("phase", [Phase.RECEIVED, Phase.SETTLED])
def test_nothing_is_exchanged_once_a_load_is_acknowledged_as_received(
    make_team: MakeTeam, store: WatchedStore, phase: Phase
) -> None:
    stored(team := make_team(), store)
    load(team, 1, 0, NUM_PAGES, from_store=True)
    team.until_held(1, NUM_PAGES)
    team.acknowledge(1, 4)
    team.until(lambda: all(rank.told[1].pages_done == 4 for rank in team.ranks))
    team.acknowledge(1, NUM_PAGES, phase, 4)
    team.acknowledge(1, NUM_PAGES)
    for rank in team.ranks:
        rank.engine.cancel(OpId(1))
    assert team.lengths(1) == [(4, MissReason.CANCELLED)] * 2
    load(team, 2, 0, 2)  # what was asked for before is exchanged before it
    assert team.lengths(2) == [(2, None)] * 2
    assert (team.num_gathers(), team.pages()) == ([(1 + 2) + (1 + 1)] * 2, [set(range(4))] * 2)


def test_a_load_of_more_pages_than_a_batch_is_exchanged_in_several(make_team: MakeTeam) -> None:
    num_pages = 2 * MAX_ROWS + 3
    team = make_team(num_pages=num_pages, layout=replace(SMALLEST, blocks=num_pages + 2), blocks_per_page=1)
    load(team, 1, 0, num_pages)
    assert team.lengths(1) == [(num_pages, None)] * 2
    assert team.pages() == [set(range(num_pages))] * 2
    assert team.num_gathers() == [(1 + MAX_ROWS) + (1 + 2)] * 2


def test_a_prefetch_exchanges_nothing(make_team: MakeTeam, store: WatchedStore) -> None:
    stored(team := make_team(), store)
    pages = [replace(page, blocks=()) for page in team.group.moves(0, NUM_PAGES, from_store=True)]
    for rank in team.ranks:
        rank.load(1, pages, request=None)
    assert team.lengths(1) == [EVERY_PAGE] * 2
    team.acknowledge(1, NUM_PAGES)
    assert team.pages() == [set(), set()]
    load(team, 2, 0, 2)  # what was asked for before is exchanged before it
    assert team.lengths(2) == [(2, None)] * 2
    assert team.num_gathers() == [1 + 1] * 2
    for rank in team.ranks:
        own = team.group.owned_by(rank.member)
        assert [rank.member.slot(team.group.slot(page)) for page in own] == [team.group.content(page) for page in own]


@pytest.mark.parametrize("page", [0, 1], ids=["of this rank", "of the other rank"])
def test_a_rank_tells_of_all_that_it_holds_without_waiting(
    make_team: MakeTeam, store: WatchedStore, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    monkeypatch.setattr(engine_module, "_PROGRESS_S", 1e9)
    stored(team := make_team(), store)
    rank = team.ranks[0]
    rank.load(1, team.group.moves(page, page + 1, from_store=True))
    team.until(lambda: 1 in rank.told)
    assert rank.told[1] == OpReport(0, OpId(1), 0, 1, Phase.RUNNING)


def test_a_page_that_is_not_vouched_for_at_its_owner_reaches_nobody(make_team: MakeTeam) -> None:
    team = make_team()
    for rank, vouched in zip(team.ranks, (2, None), strict=True):
        rank.load(1, team.group.moves(0, 6), vouched=vouched)
    assert team.lengths(1) == [(2, MissReason.DISAGREED), (2, MissReason.ABSENT)]
    assert team.pages() == [{0, 1}, {0, 1}]


def test_a_page_that_is_not_vouched_for_at_one_rank_reaches_the_others(make_team: MakeTeam) -> None:
    team = make_team()
    for rank, vouched in zip(team.ranks, (1, None), strict=True):
        rank.load(1, team.group.moves(0, 2), vouched=vouched)
    assert team.lengths(1) == [(1, MissReason.DISAGREED), (2, None)]
    assert team.pages() == [{0}, {0, 1}]


def test_a_page_that_its_owner_sends_damaged_ends_the_load_on_all_ranks_and_is_counted(make_team: MakeTeam) -> None:
    team, gathers = make_team(), iter(range(5))

    def damage(row: torch.Tensor) -> None:
        if next(gathers) == 2:
            row[0] ^= 1

    team.collectives[1].before_meeting = damage
    load(team, 1, 0, 8)
    assert team.lengths(1) == [(3, MissReason.CORRUPT)] * 2
    assert team.pages() == [set(range(8)) - {3}] * 2
    assert [each.counted["misses|corrupt"] for each in team.ranks] == [1, 1]


# Loads that end while pages are exchanged


def being_exchanged(team: Team, time_limit_s: float | None = None) -> list[Gate]:
    """Load 1, of pages 0 to 3, has come to its exchange on both ranks, and no further."""
    gates = [gated(team, rank) for rank in range(2)]
    load(team, 1, 0, 4, time_limit_s=time_limit_s)
    for gate in gates:
        gate.await_entry()
    return gates


def still_running(team: Team) -> set[tuple[int, Phase]]:
    """Lengths and phases of load 1 over all ranks and some steps."""
    found = set()
    for _ in range(5):
        for rank in team.ranks:
            rank.collect()
        found |= {(rank.told[1].pages_done, rank.told[1].phase) for rank in team.ranks if 1 in rank.told}
    return found


def test_a_load_that_is_cancelled_while_its_pages_are_exchanged_is_received_after_them(make_team: MakeTeam) -> None:
    team = make_team()
    gates = being_exchanged(team)
    for rank in team.ranks:
        rank.engine.cancel(OpId(1))
    assert still_running(team) == {(0, Phase.RUNNING)}
    for gate in gates:
        gate.open()
    assert team.lengths(1) == [(0, MissReason.CANCELLED)] * 2
    assert team.pages() == [{0, 1, 2, 3}] * 2


def test_a_load_that_is_late_while_its_pages_are_exchanged_is_received_after_them(make_team: MakeTeam) -> None:
    team = make_team()
    gates = being_exchanged(team, time_limit_s=0.0)
    assert still_running(team) == {(0, Phase.RUNNING)}
    for gate in gates:
        gate.open()
    assert team.lengths(1) == [(0, MissReason.TIMEOUT)] * 2


def queued_behind(team: Team, gate: Gate, time_limit_s: float | None = None) -> RankEngine:
    """A load of pages 2 and 3 behind one that is being exchanged, limited on rank 0, which is to give it up."""
    load(team, 1, 0, 2)
    gate.await_entry()
    for rank, limit_s in zip(team.ranks, (time_limit_s, None), strict=True):
        rank.load(2, team.group.moves(2, 4), limit_s)
    return team.ranks[0]


@pytest.mark.parametrize("rotation", [0, 1], ids=["owner of its first page", "owner of its second page"])
@pytest.mark.parametrize("cause", ["cancelled", "late"])
def test_blocks_of_a_load_that_was_received_are_not_written_though_its_exchange_is_still_to_come(
    make_team: MakeTeam, rotation: int, cause: str
) -> None:
    team = make_team(rotation=rotation)
    gate = gated(team, 1)
    rank = queued_behind(team, gate, time_limit_s=0.0 if cause == "late" else None)
    if cause == "cancelled":
        rank.engine.cancel(OpId(2))
    rank.collect()
    reason = MissReason.TIMEOUT if cause == "late" else MissReason.CANCELLED
    assert rank.told[2] == OpReport(0, OpId(2), 0, 2, reason=reason)
    blocks = [block for page in (2, 3) for block in team.group.targets(page)]
    for block in blocks:
        write_block(rank.member.tensors, block, 0x11)
    gate.open()
    num_given = rotation
    assert team.lengths(2) == [(0, reason), (num_given, MissReason.ABSENT)]
    assert team.group.pages_on(team.ranks[1].member) == {0, 1, *range(2, 2 + num_given)}
    assert {rank.member.block(block) for block in blocks} == {bytes([0x11]) * len(rank.member.block(0))}


def test_slots_of_a_load_that_was_settled_may_change_hands_though_its_exchange_is_still_to_come(
    make_team: MakeTeam,
) -> None:
    team = make_team()
    gate = gated(team, 1)
    rank = queued_behind(team, gate)
    rank.engine.cancel(OpId(2))
    rank.collect()
    assert rank.told[2].phase is Phase.SETTLED
    rank.member.put(team.group.slot(2), team.group.content(9))
    gate.open()
    assert team.lengths(2) == [(0, MissReason.CANCELLED), (0, MissReason.ABSENT)]
    assert team.pages() == [{0, 1}] * 2


# Exchanges that have failed


def test_ranks_that_have_lost_each_other_miss_pages_and_say_that_they_are_not_well(
    make_team: MakeTeam, caplog: pytest.LogCaptureFixture
) -> None:
    team = make_team(timeout_s=0.2)
    rank = team.ranks[0]
    for op in (1, 2):
        rank.load(op, team.group.moves(0, 4))
        team.until(lambda op=op: op in rank.told and rank.told[op].phase == Phase.SETTLED)
        assert (rank.told[op].pages_done, rank.told[op].reason) == (0, MissReason.ERROR)
    rank.collect()
    assert rank.health == 0
    assert rank.counted["errors|exchange"] == 2
    told = "Pages of host memory cannot be given to other ranks, they are computed again: "
    assert caplog.messages[0].startswith(f"{told}rank 0 of 2: rank 0 of 2 did not meet all others within 0.2 s")
    assert all(message.startswith(told) for message in caplog.messages)
    assert team.pages() == [set(), set()]


def test_an_exchange_that_is_a_bug_ends_its_load_and_all_later_ones(make_team: MakeTeam) -> None:
    team = make_team()
    first, second = team.group.moves(0, 2)
    for rank in team.ranks:
        rank.load(1, (first, replace(second, slot=Slot(second.slot + 1))))
        rank.load(2, team.group.moves(2, 4))
    assert [team.lengths(op) for op in (1, 2)] == [[(0, MissReason.ERROR)] * 2] * 2
    assert team.pages() == [set(), set()]
