"""A page's two halves, the target's and the draft's: where they lie, what is stored of them, and who can read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from draft_kit import (
    DRAFTS,
    TARGET,
    Content,
    Draft,
    DraftRank,
    content,
    drafted,
    filled,
    moves,
    objects,
    of_role,
    poison,
)
from shard_kit import NUM_PAGES, Group
from thread_collective import Meeting, ThreadCollective
from transfer_fixtures import POISON, WatchedStore, key

from vllm_hicache.grid import Grid
from vllm_hicache.names import MissReason, OpId, Role
from vllm_hicache.plan import PageMove
from vllm_hicache.storage.file import FileStore
from vllm_hicache.transfer.collective import Fill, Pending
from vllm_hicache.transfer.copier import CudaCopier
from vllm_hicache.transfer.exchange import Batch, PageExchange

SLOTS, OTHER_SLOTS = (7, 12, 19), (3, 21, 0)
SOURCE, TO = ([30], [5], [11]), ([42], [8], [27])
PAIRS, TO_PAIRS = ([30, 1], [5, 44], [11, 2]), ([42, 7], [8, 41], [27, 26])
GRIDS = [Grid(1, 1), Grid(3, 2), Grid(2, 1)]
Tier = bool | None
"""Where a draft's state lies: True in a sidecar, False behind the target's; `None` without a draft."""

every_draft = pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
every_tier = pytest.mark.parametrize("has_sidecar", [False, True], ids=["packed", "sidecar"])
every_grid = pytest.mark.parametrize("grid", GRIDS, ids=str)
MakeRank = Callable[..., DraftRank]


@pytest.fixture
def store(tmp_path: Path) -> WatchedStore:
    return WatchedStore.on_files(tmp_path)


@pytest.fixture
def make(store: WatchedStore) -> Iterator[MakeRank]:
    """Makes ranks over one store, or over another."""
    ranks: list[DraftRank] = []

    def make(draft: Draft | None = None, tier: Tier = False, **how: object) -> DraftRank:
        arguments = {"store": store, "draft": draft if tier is not None else None, "has_sidecar": bool(tier)} | how
        ranks.append(DraftRank(**arguments))  # type: ignore[arg-type]
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.close()


def write(rank: DraftRank, **how: object) -> list[Content]:
    """Save and flush three pages; what their blocks hold."""
    assert rank.save(moves(SLOTS, SOURCE)).pages_done == 3
    assert rank.flush(moves(SLOTS, **how)).pages_done == 3
    return [content(rank.tensors, block) for (block,) in SOURCE]


def check_blocks(rank: DraftRank, expected: dict[int, Content]) -> None:
    """These blocks hold this, all others poison."""
    untouched = filled(content(rank.tensors, 0), POISON)
    assert rank.blocks() == {block: expected.get(block, untouched) for block in range(TARGET.blocks)}


# Host memory


@every_draft
@every_tier
def test_a_page_comes_back_to_other_blocks_with_every_layer_and_head_of_both_models(
    make: MakeRank, draft: Draft, has_sidecar: bool
) -> None:
    rank = make(draft, has_sidecar)
    pages = [content(rank.tensors, block) for (block,) in SOURCE]
    assert rank.save(moves(SLOTS, SOURCE)).pages_done == 3
    poison(rank.tensors)
    assert rank.load(moves(SLOTS, TO)).pages_done == 3
    check_blocks(rank, {block: page for (block,), page in zip(TO, pages, strict=True)})


@every_draft
@every_tier
@every_grid
def test_a_slot_holds_the_target_as_without_a_draft_and_the_draft_in_cells_of_its_own(
    make: MakeRank, draft: Draft, has_sidecar: bool, grid: Grid
) -> None:
    rank, alone = (make(draft, tier, grid=grid, blocks_per_page=2) for tier in (has_sidecar, None))
    pages = [rank.page(blocks) for blocks in PAIRS]
    for each in (rank, alone):
        for region in each.pool.regions:
            region.fill_(POISON)
        each.save(moves(SLOTS, PAIRS))
    untouched = {role: bytes([POISON]) * len(half) for role, half in pages[0].items()}
    assert rank.all_slots() == dict.fromkeys(range(24), untouched) | dict(zip(SLOTS, pages, strict=True))
    assert [rank.halves(slot)[Role.TARGET] for slot in range(24)] == [
        alone.halves(slot)[Role.TARGET] for slot in range(24)
    ]


@every_draft
def test_packed_and_sidecar_take_the_same_memory_in_one_region_or_in_two(make: MakeRank, draft: Draft) -> None:
    packed, sidecar = make(draft, False), make(draft, True)
    halves = packed.page([0])
    assert packed.pool.region_bytes == (len(halves[Role.TARGET]) + len(halves[Role.DRAFT]),)
    assert sidecar.pool.region_bytes == (len(halves[Role.TARGET]), len(halves[Role.DRAFT]))
    assert (packed.pool.slot_bytes, packed.geometry.slot_bytes) == (
        sidecar.pool.slot_bytes,
        sidecar.geometry.slot_bytes,
    )


@every_draft
@every_tier
@pytest.mark.parametrize("first", [0, 1])
def test_a_part_of_a_page_moves_the_named_block_of_both_models_alone(
    make: MakeRank, draft: Draft, has_sidecar: bool, first: int
) -> None:
    rank = make(draft, has_sidecar, blocks_per_page=2)
    expected = content(rank.tensors, PAIRS[1][first])
    rank.save(moves(SLOTS, PAIRS))
    poison(rank.tensors)
    page = moves(SLOTS, TO_PAIRS)[1]
    assert rank.load([replace(page, blocks=page.blocks[first : first + 1], first_block=first)]).pages_done == 1
    check_blocks(rank, {TO_PAIRS[1][first]: expected})


# The store


@every_draft
@every_tier
@every_grid
def test_a_page_comes_back_from_the_store_in_another_engine(
    make: MakeRank, draft: Draft, has_sidecar: bool, grid: Grid
) -> None:
    pages = write(make(draft, has_sidecar, grid=grid))
    reader = make(draft, has_sidecar, grid=grid, seed=5)
    reader.poison()
    assert reader.load(moves(OTHER_SLOTS, TO, from_store=True)).pages_done == 3
    check_blocks(reader, {block: page for (block,), page in zip(TO, pages, strict=True)})


@every_draft
@every_grid
def test_all_kinds_of_engines_write_the_same_objects_but_for_the_drafts(
    make: MakeRank, tmp_path: Path, draft: Draft, grid: Grid
) -> None:
    stores = [FileStore(str(tmp_path / name), 1 << 26) for name in ("packed", "sidecar", "alone")]
    for tier, store in zip((False, True, None), stores, strict=True):
        store.probe()
        write(make(draft, tier, grid=grid, store=store))
    packed, sidecar, alone = (objects(store) for store in stores)
    assert packed == sidecar
    assert {name: packed[name] for name in alone} == alone == objects(stores[0], Role.TARGET)
    assert len(packed) > len(alone) == 3 * grid.layer_groups * grid.head_groups


@every_draft
def test_the_two_models_objects_lie_under_their_own_namespaces(
    make: MakeRank, store: WatchedStore, draft: Draft
) -> None:
    write(make(draft))
    assert {name.split("/")[0] for name in objects(store, Role.TARGET)} == {b"n".hex() * 8}
    assert {name.split("/")[0] for name in objects(store, Role.DRAFT)} == {b"d".hex() * 8}


@every_draft
@pytest.mark.parametrize("writer", [False, True, None], ids=["by packed", "by sidecar", "by none"])
@pytest.mark.parametrize("reader", [False, True, None], ids=["to packed", "to sidecar", "to none"])
def test_what_one_kind_of_engine_writes_every_other_reads(
    make: MakeRank, draft: Draft, writer: Tier, reader: Tier
) -> None:
    pages = write(make(draft, writer, grid=Grid(3, 2)))
    rank = make(draft, reader, seed=5, grid=Grid(3, 2))
    rank.poison()
    assert rank.load(moves(OTHER_SLOTS, TO, True, has_draft=writer is not None)).pages_done == 3
    cleared = of_role(filled(content(rank.tensors, 0), 0), Role.DRAFT)
    held = {block: {**cleared, **of_role(page, Role.TARGET)} for (block,), page in zip(TO, pages, strict=True)}
    if reader is not None:
        held = {block: held[block] | of_role(page, Role.DRAFT) for (block,), page in zip(TO, pages, strict=True)}
    check_blocks(rank, held)


# Pages without a draft's state


@every_draft
@every_tier
def test_a_page_without_draft_state_has_zeros_in_its_place_and_never_what_a_slot_held_before(
    make: MakeRank, store: WatchedStore, draft: Draft, has_sidecar: bool
) -> None:
    pages = write(make(draft, has_sidecar))
    rank = make(draft, has_sidecar, seed=5)
    rank.poison()
    store.calls.clear()
    assert rank.load(moves(OTHER_SLOTS, TO, True, has_draft=False)).pages_done == 3
    zeros = filled(of_role(pages[0], Role.DRAFT), 0)
    check_blocks(rank, {block: page | zeros for (block,), page in zip(TO, pages, strict=True)})
    assert {slot: not any(halves[Role.DRAFT]) for slot, halves in rank.all_slots().items()} == {
        slot: slot in OTHER_SLOTS for slot in range(24)
    }
    # One for each of the target's objects.
    assert sorted(store.calls) == [("read", 0), ("read", 1), ("read", 2)]


@every_draft
@every_tier
@every_grid
def test_a_page_without_draft_state_is_flushed_as_an_engine_without_a_draft_would(
    make: MakeRank, tmp_path: Path, store: WatchedStore, draft: Draft, has_sidecar: bool, grid: Grid
) -> None:
    other = FileStore(str(tmp_path / "other"), 1 << 26)
    other.probe()
    write(make(draft, has_sidecar, grid=grid), has_draft=False)
    write(make(draft, None, grid=grid, store=other))
    assert objects(store) == objects(other)
    assert objects(store, Role.DRAFT) == {}


@every_tier
def test_each_page_of_a_flush_or_load_has_draft_state_or_not_by_itself(
    make: MakeRank, store: WatchedStore, has_sidecar: bool
) -> None:
    def halved(pages: tuple[PageMove, ...]) -> list[PageMove]:
        return [replace(page, has_draft=number != 1) for number, page in enumerate(pages)]

    rank = make(Draft(), has_sidecar)
    pages = [content(rank.tensors, block) for (block,) in SOURCE]
    rank.save(moves(SLOTS, SOURCE))
    assert rank.flush(halved(moves(SLOTS))).pages_done == 3
    assert len(objects(store, Role.DRAFT)) == 2
    rank.poison()
    assert rank.load(halved(moves(SLOTS, TO, True))).pages_done == 3
    pages[1] |= filled(of_role(pages[1], Role.DRAFT), 0)
    check_blocks(rank, {block: page for (block,), page in zip(TO, pages, strict=True)})


@every_tier
@pytest.mark.parametrize("missing", range(3))
@pytest.mark.parametrize("role", list(Role))
def test_a_page_of_which_one_models_object_is_gone_ends_the_load_there(
    make: MakeRank, store: WatchedStore, has_sidecar: bool, missing: int, role: Role
) -> None:
    write(make(Draft(), has_sidecar))
    (name,) = [name for name in objects(store, role) if key(missing).hex() in name]
    store.delete(name)
    report = make(Draft(), has_sidecar, seed=5).load(moves(SLOTS, TO, from_store=True))
    assert (report.pages_done, report.reason) == (missing, MissReason.ABSENT)


# Names


@every_tier
def test_the_targets_bytes_have_the_plain_name_and_the_drafts_the_key(
    make: MakeRank, store: WatchedStore, has_sidecar: bool
) -> None:
    def named(pages: tuple[PageMove, ...]) -> list[PageMove]:
        return [replace(page, plain=key(100 + number)) for number, page in enumerate(pages)]

    rank = make(Draft(), has_sidecar)
    pages = [content(rank.tensors, block) for (block,) in SOURCE]
    rank.save(moves(SLOTS, SOURCE))
    assert rank.flush(named(moves(SLOTS))).pages_done == 3
    names = {role: {name.split("/")[2].split(".")[0] for name in objects(store, role)} for role in Role}
    assert names[Role.TARGET] == {key(number).hex() for number in (100, 101, 102)}
    assert names[Role.DRAFT] == {key(number).hex() for number in (0, 1, 2)}
    rank.poison()
    assert rank.load(named(moves(OTHER_SLOTS, TO, True))).pages_done == 3
    check_blocks(rank, {block: page for (block,), page in zip(TO, pages, strict=True)})


# Ranks that hold a part


@every_tier
@pytest.mark.parametrize("grid", [Grid(1, 1), Grid(3, 2)], ids=str)
@pytest.mark.parametrize("is_replicated", [False, True], ids=["draft cut", "draft replicated"])
def test_two_ranks_read_their_heads_of_both_models_out_of_what_one_has_written(
    make: MakeRank, has_sidecar: bool, grid: Grid, is_replicated: bool
) -> None:
    draft = Draft(heads=4)
    pages = write(make(draft, has_sidecar, grid=grid))
    for rank in range(2):
        target, mine = (rank, rank + 1), (0, 4) if is_replicated else (2 * rank, 2 * rank + 2)
        part = make(draft, has_sidecar, seed=5, grid=grid, heads={Role.TARGET: target, Role.DRAFT: mine})
        part.poison()
        assert part.load(moves(OTHER_SLOTS, TO, from_store=True)).pages_done == 3
        firsts = {Role.TARGET: target[0], Role.DRAFT: mine[0]}
        held = content(part.tensors, 0)
        expected = [
            {(role, layer, head): page[role, layer, firsts[role] + head] for role, layer, head in held}
            for page in pages
        ]
        check_blocks(part, {block: page for (block,), page in zip(TO, expected, strict=True)})


# Ranks that give each other their pages


class Damaging(ThreadCollective):
    """Changes one byte of what rank 1 sent here with its first page."""

    def __init__(self, rank: int, meeting: Meeting, place: int) -> None:
        super().__init__(rank, meeting)
        self._place, self._num_started = place, 0

    def start(self, rows: torch.Tensor, fill: Fill | None = None) -> Pending:
        pending = super().start(rows, fill)
        self._num_started += 1
        if self._num_started == 2:  # the first one is the header's
            pending.wait()
            rows[1, self._place] ^= 1
        return pending


def exchanged(group: Group, exchanges: Sequence[PageExchange]) -> list[list[MissReason | None]]:
    batch = Batch(OpId(5), 0, group.moves(0, NUM_PAGES), (True,) * NUM_PAGES, None)
    with ThreadPoolExecutor(len(exchanges)) as ranks:
        return list(ranks.map(lambda exchange: exchange.run(batch), exchanges))


@every_tier
@pytest.mark.parametrize("num_owners", [2, 3])
def test_ranks_give_each_other_both_halves_of_every_page(num_owners: int, has_sidecar: bool) -> None:
    group = Group(num_owners, 1, has_sidecar=has_sidecar)
    host = [member.host for member in group.members]
    assert [len(member.pool.regions) for member in group.members] == [1 + has_sidecar] * num_owners
    assert exchanged(group, group.exchanges(group.collectives())) == [[None] * NUM_PAGES] * num_owners
    assert [group.pages_on(member) for member in group.members] == [set(range(NUM_PAGES))] * num_owners
    assert [member.host for member in group.members] == host


@every_tier
@pytest.mark.parametrize("of_row", [0.0, 0.49, 0.76, 1.0])
def test_a_byte_that_is_damaged_on_its_way_in_either_half_is_noticed(has_sidecar: bool, of_row: float) -> None:
    """Two thirds of a row are the target's."""
    group, meeting = Group(2, has_sidecar=has_sidecar), Meeting(2, 5.0)
    place = int(of_row * (group.members[0].pool.slot_bytes - 1))
    exchanges = group.exchanges([Damaging(0, meeting, place), ThreadCollective(1, meeting)])
    damaged, whole = exchanged(group, exchanges)
    assert (damaged, whole) == (
        [None, MissReason.CORRUPT, *[None] * (NUM_PAGES - 2)],
        [None] * NUM_PAGES,
    )
    assert group.pages_on(group.members[0]) == set(range(NUM_PAGES)) - {1}


# CUDA


class StreamAtOnce:
    """A stream that does all at once."""

    def wait_event(self, event: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


@every_draft
@every_tier
def test_the_cuda_copier_moves_every_region(
    make: MakeRank, monkeypatch: pytest.MonkeyPatch, draft: Draft, has_sidecar: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: StreamAtOnce())
    monkeypatch.setattr(torch.cuda, "stream", lambda entered: nullcontext())
    copier = partial(CudaCopier, device=torch.device("cpu"))
    rank = make(draft, has_sidecar, make_copier=copier, grid=Grid(3, 2), blocks_per_page=2)
    expected = [rank.page(blocks) for blocks in PAIRS]
    pages = [content(rank.tensors, block) for blocks in PAIRS for block in blocks]
    rank.copier.save(moves(SLOTS, PAIRS), None)
    assert [rank.halves(slot) for slot in SLOTS] == expected
    poison(rank.tensors)
    rank.copier.load(moves(SLOTS, TO_PAIRS), None)
    check_blocks(rank, dict(zip([block for blocks in TO_PAIRS for block in blocks], pages, strict=True)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_draft
@every_tier
def test_a_page_comes_back_on_a_cuda_device(make: MakeRank, draft: Draft, has_sidecar: bool) -> None:
    rank, device = make(draft, has_sidecar), torch.device("cuda")
    tensors = {name: tensor.to(device) for name, tensor in drafted(draft).items()}
    cache = type(rank.cache).from_tensors(tensors, TARGET.block_tokens)
    copier = CudaCopier(cache, rank.pool, rank.geometry, device)
    copier.save(moves(SLOTS, SOURCE), copier.fence())
    assert [rank.halves(slot) for slot in SLOTS] == [rank.page(blocks) for blocks in SOURCE]
    pages = [content(rank.tensors, block) for (block,) in SOURCE]
    copier.load(moves(SLOTS, TO), copier.fence())
    on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
    assert [content(on_host, block) for (block,) in TO] == pages
