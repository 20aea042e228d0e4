"""Where pages have owners, each rank moves its own, and is given the others' where it has use for them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shard_kit import NUM_PAGES, Group, MakeTeam, forget, load, stored
from transfer_fixtures import Gate, WatchedStore, move

from vllm_hicache.errors import ConfigError, InvariantError
from vllm_hicache.grid import Grid
from vllm_hicache.names import MissReason, OpId, Phase, Slot
from vllm_hicache.ownership import Ownership, Shard
from vllm_hicache.plan import LoadOp, OpReport
from vllm_hicache.transfer.host import HostPool
from vllm_hicache.transfer.tasks import LoadTask

pytest_plugins = ["shard_fixtures"]
ALL = set(range(NUM_PAGES))
EVERY_PAGE = (NUM_PAGES, None)


# Rows of a host pool


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_every_slot_lies_in_one_row_of_one_owner(num_owners: int, num_rows: int, data: st.DataObject) -> None:
    pools = [HostPool(num_rows, 8, shard=Shard(Ownership(num_owners), owner)) for owner in range(num_owners)]
    assert {pool.num_slots for pool in pools} == {num_rows * num_owners}
    slots = [Slot(slot) for slot in range(num_rows * num_owners)]
    rows = [[pool.row(slot) for slot in slots if pool.shard.owns(slot)] for pool in pools]
    assert rows == [list(range(num_rows))] * num_owners
    slot = data.draw(st.sampled_from(slots))
    for pool in pools:
        if not pool.shard.owns(slot):
            with pytest.raises(InvariantError, match=f"slot {slot} is owner {slot % num_owners}'s of {num_owners}, "):
                pool.row(slot)


def test_a_part_of_a_slot_is_written_in_its_row_alone() -> None:
    pool, rank = Group(3).members[1].pool, Group(3).members[1]
    rank.poison_slots()
    (part, *_) = rank.geometry.parts
    rank.pool.part(Slot(7), part)[:] = bytes(part.num_bytes)
    zeroed = [row for row in range(pool.num_rows) if not rank.pool.regions[0][row, : part.num_bytes].any()]
    assert zeroed == [2]
    assert rank.pool.regions[0][2, part.num_bytes :].eq(0xA5).all()


def test_a_pool_without_a_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="the host pool holds 0 pages"):
        HostPool(0, 8, shard=Shard(Ownership(2), 1))


# Tasks


def task_of(num_pages: int, is_exchanged: bool, from_store: bool = True) -> LoadTask:
    """A load on owner 0 of 2: pages 0, 2, ... are its own."""
    pages = tuple(move(page, page, [page], from_store=from_store) for page in range(num_pages))
    op = LoadOp(OpId(1), bytes(32), None, pages)
    task = LoadTask(op, lambda task: None, lambda task: None, Shard(Ownership(2), 0), is_exchanged)
    task.start()
    return task


def progress(task: LoadTask) -> tuple[int, int, Phase]:
    report = task.report(0)
    return report.pages_done, report.pages_held, report.phase


def test_pages_of_other_owners_are_held_from_the_beginning_and_done_where_nobody_gives_them() -> None:
    for is_exchanged, done in ((False, 2), (True, 0)):
        task = task_of(4, is_exchanged)
        assert [task.owns(page) for page in range(4)] == [True, False, True, False]
        assert progress(task) == (0, 0, Phase.RUNNING)
        assert task.begin_fetch(0)
        task.end_fetch(0, None)
        assert task.begin_copy(0)
        task.end_copy(0, None)
        assert progress(task) == (1 if is_exchanged else done, 2, Phase.RUNNING)


def test_a_load_of_other_owners_pages_alone_ends_at_once_where_nobody_gives_them() -> None:
    pages = (move(1, 1, [1], from_store=True), move(3, 3, [3]))
    for is_exchanged, expected in ((False, (2, 2, Phase.SETTLED)), (True, (0, 2, Phase.RUNNING))):
        op = LoadOp(OpId(1), bytes(32), None, pages)
        task = LoadTask(op, lambda task: None, lambda task: None, Shard(Ownership(2), 0), is_exchanged)
        task.start()
        assert progress(task) == expected


def test_all_is_held_once_own_pages_are_or_the_first_of_them_has_failed() -> None:
    whole, failed = task_of(4, True), task_of(4, True)
    for task in (whole, failed):
        assert task.begin_fetch(0)
        assert task.begin_fetch(2)
        task.end_fetch(0, None)
        assert not task.is_held
    whole.end_fetch(2, None)
    failed.end_fetch(2, MissReason.ABSENT)
    assert whole.is_held
    assert failed.is_held
    assert (progress(whole), progress(failed)) == ((0, 4, Phase.RUNNING), (0, 2, Phase.RUNNING))


# Saves and flushes


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("num_owners", [2, 3])
def test_a_save_brings_every_page_to_its_owner_alone(make_team: MakeTeam, num_owners: int, on_device: bool) -> None:
    team = make_team(num_owners, rotation=1, on_device=on_device, is_held=False)
    group = team.group
    group.compute()
    for rank in team.ranks:
        rank.save(1, group.sources(0, NUM_PAGES - 1))
    assert team.reports(1) == [OpReport(rank, OpId(1), NUM_PAGES - 1, NUM_PAGES - 1) for rank in range(num_owners)]
    for rank in team.ranks:
        own = [page for page in group.owned_by(rank.member) if page != NUM_PAGES - 1]
        assert [rank.member.slot(group.slot(page)) for page in own] == [group.content(page) for page in own]
        others = set(range(group.num_rows)) - {rank.member.pool.row(Slot(group.slot(page))) for page in own}
        assert all(rank.member.pool.regions[0][row].eq(0xA5).all() for row in others)
        assert rank.bytes_moved() == {"save": len(own) * rank.member.geometry.slot_bytes}


def test_flushes_of_other_owners_pages_end_at_once_and_saves_in_their_turn_and_move_nothing(
    make_team: MakeTeam, store: WatchedStore
) -> None:
    team = make_team()
    rank, others = team.ranks[0], team.group.sources(1, 2)
    rank.copier.before["save", team.group.slot(0)] = gate = Gate()
    rank.save(1, team.group.sources(0, 1))
    gate.await_entry()
    rank.save(2, others)
    rank.flush(3, others)
    assert rank.collect() == [OpReport(0, OpId(3), 1, 1)]
    gate.open()
    team.until(lambda: 2 in rank.told)
    assert list(rank.told.values()) == [OpReport(0, OpId(op), 1, 1) for op in (3, 1, 2)]
    assert rank.bytes_moved() == {"save": rank.member.geometry.slot_bytes}
    assert store.calls == []


def test_a_page_that_is_not_vouched_for_ends_a_write_there_whoever_owns_it(make_team: MakeTeam) -> None:
    team = make_team()
    for op, vouched in ((1, 0), (2, 1), (3, 2)):
        for rank in team.ranks:
            rank.flush(op, team.group.moves(0, 3), vouched=vouched)
        assert team.lengths(op) == [(vouched, MissReason.DISAGREED)] * 2


@pytest.mark.parametrize(("num_owners", "num_ranks"), [(2, 2), (3, 3), (2, 4), (1, 4), (2, 6)])
def test_each_object_is_flushed_exactly_once_over_all_ranks_and_comes_back_on_all(
    make_team: MakeTeam, store: WatchedStore, num_owners: int, num_ranks: int
) -> None:
    grid = Grid(2, 2)
    team = make_team(num_owners, num_ranks=num_ranks, on_device=True, grid=grid)
    for rank in team.ranks:
        rank.flush(1, team.group.moves(0, NUM_PAGES))
    assert team.lengths(1) == [EVERY_PAGE] * num_ranks
    num_objects = len(team.ranks[0].member.geometry.layout.cells)
    assert Counter(store.calls) == {("write", page): num_objects for page in range(NUM_PAGES)}
    assert sum(rank.bytes_moved().get("flush", 0) for rank in team.ranks) == sum(
        len(team.group.content(page)) for page in range(NUM_PAGES)
    )
    for rank in team.ranks:
        rank.member.poison_slots()
    load(team, 2, 0, NUM_PAGES, from_store=True)
    assert team.lengths(2) == [EVERY_PAGE] * num_ranks
    for rank in team.ranks:
        assert team.group.pages_on(rank.member) == set(team.group.owned_by(rank.member))


def test_a_declined_flush_declines_own_pages_alone(make_team: MakeTeam) -> None:
    team = make_team()
    for rank in team.ranks:
        rank.chunks = None
        rank.flush(1, team.group.moves(0, 3))
    assert team.lengths(1) == [(0, MissReason.NO_SLOT), (1, MissReason.NO_SLOT)]
    assert [rank.counted["declined_pages|flush"] for rank in team.ranks] == [2, 1]


# Loads where the engine shards requests


@pytest.mark.parametrize("from_store", [False, True])
@pytest.mark.parametrize("num_owners", [2, 4])
def test_a_rank_fetches_and_copies_its_own_pages_alone(
    make_team: MakeTeam, store: WatchedStore, num_owners: int, from_store: bool
) -> None:
    team = make_team(num_owners, on_device=True)
    if from_store:
        stored(team, store)
    load(team, 1, 0, NUM_PAGES, from_store)
    assert team.lengths(1) == [EVERY_PAGE] * num_owners
    assert team.pages() == [set(team.group.owned_by(rank.member)) for rank in team.ranks]
    share = NUM_PAGES // num_owners * team.ranks[0].member.geometry.slot_bytes
    moved = {"load": share, "fetch": share} if from_store else {"load": share}
    assert [rank.bytes_moved() for rank in team.ranks] == [moved] * num_owners
    reads = Counter(page for operation, page in store.calls if operation == "read")
    assert reads == (dict.fromkeys(range(NUM_PAGES), 2) if from_store else {})
    for rank in team.ranks:
        for page in team.group.owned_by(rank.member):
            assert rank.member.slot(team.group.slot(page)) == team.group.content(page)


def test_a_page_that_its_owner_misses_ends_the_load_there_and_is_not_the_others_affair(
    make_team: MakeTeam, store: WatchedStore
) -> None:
    team = make_team(3, on_device=True)
    stored(team, store)
    forget(store, 4)
    load(team, 1, 0, NUM_PAGES, from_store=True)
    assert team.lengths(1) == [EVERY_PAGE, (4, MissReason.ABSENT), EVERY_PAGE]
    one, other, third = team.pages()
    assert (one, third) == ({0, 3, 6, 9}, {2, 5, 8, 11})
    assert 1 in other <= {1, 7, 10}


def test_without_a_store_a_load_ends_at_a_ranks_own_first_page(make_team: MakeTeam) -> None:
    team = make_team(2, on_device=True)
    for rank in team.ranks:
        rank.chunks = None
    load(team, 1, 0, 4, from_store=True)
    assert team.lengths(1) == [(0, MissReason.ABSENT), (1, MissReason.ABSENT)]
    assert team.pages() == [set(), set()]
