"""Geometry: the cells tile the page, the parts of a rank tile its slot, and what does not fit is refused."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_kit import Cut, cuts, held_places, layout_of, layouts, role_shapes

from vllm_hicache.errors import ConfigError
from vllm_hicache.geometry import Cell, Holding, PageLayout, Part, RankGeometry, RoleShape, UnitRun, cut_of, held_heads
from vllm_hicache.grid import Grid
from vllm_hicache.names import PageKey, Role
from vllm_hicache.ownership import Ownership

TARGET = RoleShape(Role.TARGET, 4, 8, 64)
DRAFT = RoleShape(Role.DRAFT, 1, 4, 32)
UNHURRIED = settings(deadline=None)
LAYOUTS = role_shapes().flatmap(layouts)
ENGINES = LAYOUTS.flatmap(lambda layout: st.tuples(st.just(layout), cuts(layout.roles)))


def places(cell: Cell) -> list[tuple[Role, int, int]]:
    """(role, layer, head) of a cell's units, in the object's order."""
    heads = range(cell.first_head, cell.first_head + cell.num_heads)
    layers = range(cell.first_layer, cell.first_layer + cell.num_layers)
    return [(cell.role, layer, head) for head in heads for layer in layers]


def part_places(rank: RankGeometry, part: Part) -> list[tuple[Role, int, int]]:
    """(role, layer, head) of a part's units, in the slot's order."""
    (holding,) = (each for each in rank.holdings if each.role == part.cell.role)
    heads = range(holding.heads[0] + part.first_head, holding.heads[0] + part.first_head + part.num_heads)
    layers = range(holding.layers[0] + part.first_layer, holding.layers[0] + part.first_layer + part.num_layers)
    return [(holding.role, layer, head) for head in heads for layer in layers]


def ranks_of(engine: tuple[PageLayout, Cut]) -> list[RankGeometry]:
    layout, cut = engine
    return cut.ranks(layout)


@UNHURRIED
@given(LAYOUTS)
def test_every_layer_and_head_lies_in_exactly_one_cell(layout: PageLayout) -> None:
    held = sorted(place for cell in layout.cells for place in places(cell))
    assert held == sorted(
        (shape.role, layer, head)
        for shape in layout.roles
        for layer in range(shape.num_layers)
        for head in range(shape.num_heads)
    )


@UNHURRIED
@given(LAYOUTS)
def test_a_page_has_the_bytes_of_all_its_slabs(layout: PageLayout) -> None:
    slabs = sum(shape.num_layers * shape.num_heads * shape.slab_bytes for shape in layout.roles)
    assert layout.num_bytes == slabs * layout.blocks_per_page


@UNHURRIED
@given(LAYOUTS)
def test_the_target_has_as_many_cells_as_the_grid_says(layout: PageLayout) -> None:
    groups = [(cell.layer_group, cell.head_group) for cell in layout.cells if cell.role is Role.TARGET]
    grid = layout.grid
    assert groups == [(layer, head) for layer in range(grid.layer_groups) for head in range(grid.head_groups)]


@UNHURRIED
@given(LAYOUTS)
def test_a_draft_is_one_layer_group_with_a_number_inside_the_grid(layout: PageLayout) -> None:
    drafts = [cell for cell in layout.cells if cell.role is Role.DRAFT]
    assert {cell.layer_group for cell in drafts} <= {0}
    assert [cell.head_group for cell in drafts] == list(range(len(drafts)))
    assert len(drafts) <= layout.grid.head_groups


@UNHURRIED
@given(ENGINES)
def test_parts_follow_each_other_in_the_slot_without_gap_or_overlap(engine: tuple[PageLayout, Cut]) -> None:
    for rank in ranks_of(engine):
        ends = [0]
        for part in rank.parts:
            assert part.offset == ends[-1]
            ends.append(part.offset + part.num_bytes)
        assert ends[-1] == rank.slot_bytes


@UNHURRIED
@given(ENGINES)
def test_the_parts_of_a_rank_are_what_it_holds(engine: tuple[PageLayout, Cut]) -> None:
    for rank in ranks_of(engine):
        assert sorted(place for part in rank.parts for place in part_places(rank, part)) == sorted(held_places(rank))


@UNHURRIED
@given(ENGINES)
def test_the_runs_of_a_part_name_its_units_in_the_slots_and_in_the_objects_order(
    engine: tuple[PageLayout, Cut],
) -> None:
    for rank in ranks_of(engine):
        for part in rank.parts:
            of_object, of_part = places(part.cell), part_places(rank, part)
            for run in part.runs:
                assert of_object[run.first_unit :][: run.num_units] == of_part[run.offset_units :][: run.num_units]
            assert [run.offset_units for run in part.runs] == [
                sum(run.num_units for run in part.runs[:before]) for before in range(len(part.runs))
            ]
            assert sum(run.num_units for run in part.runs) == len(of_part)


@UNHURRIED
@given(ENGINES)
def test_a_part_has_no_more_runs_than_it_needs(engine: tuple[PageLayout, Cut]) -> None:
    for rank in ranks_of(engine):
        for part in rank.parts:
            ends = [run.first_unit + run.num_units for run in part.runs]
            assert all(end < run.first_unit for end, run in zip(ends, part.runs[1:], strict=False))


@UNHURRIED
@given(ENGINES)
def test_a_part_is_whole_exactly_where_it_is_all_of_its_cell(engine: tuple[PageLayout, Cut]) -> None:
    for rank in ranks_of(engine):
        for part in rank.parts:
            assert part.is_whole == (part.num_bytes == part.cell.num_bytes)
            if part.is_whole:
                assert part.runs == (UnitRun(0, 0, part.cell.num_units),)


@UNHURRIED
@given(ENGINES)
def test_together_the_ranks_hold_every_layer_and_head_as_often_as_they_have_replicas(
    engine: tuple[PageLayout, Cut],
) -> None:
    ranks = ranks_of(engine)
    held = Counter(place for rank in ranks for place in held_places(rank))
    for rank in ranks:
        for holding in rank.holdings:
            of_rank = {held[place] for place in held_places(rank) if place[0] is holding.role}
            assert of_rank <= {holding.num_replicas}


def test_target_cells_lie_before_draft_cells_in_page_and_slot() -> None:
    layout = PageLayout((TARGET, DRAFT), 16, 64, Grid(2, 1))
    assert [(cell.role, cell.num_bytes) for cell in layout.cells] == [
        (Role.TARGET, 2 * 8 * 64 * 4),
        (Role.TARGET, 2 * 8 * 64 * 4),
        (Role.DRAFT, 1 * 4 * 32 * 4),
    ]
    (rank,) = Cut(1, (4,)).ranks(layout)
    assert [(part.cell, part.offset) for part in rank.parts] == list(zip(layout.cells, (0, 4096, 8192), strict=True))


def test_a_part_knows_its_place_in_the_rank_and_in_the_cell() -> None:
    layout = layout_of(6, 8, Grid(2, 2))
    rank = RankGeometry(layout, (Holding(Role.TARGET, (1, 5), (2, 6)),))
    assert [(part.cell.layer_group, part.cell.head_group) for part in rank.parts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    last = rank.parts[-1]
    assert (last.first_layer, last.num_layers, last.skip_layers) == (2, 2, 0)
    assert (last.first_head, last.num_heads, last.skip_heads) == (2, 2, 0)
    assert last.runs == (UnitRun(0, 0, 2), UnitRun(3, 2, 2))
    first = rank.parts[0]
    assert (first.skip_layers, first.skip_heads) == (1, 2)
    assert first.runs == (UnitRun(7, 0, 2), UnitRun(10, 2, 2))


@pytest.mark.parametrize(
    ("num_heads", "tp_size", "expected"),
    [
        (8, 2, [((0, 4), 0, 1), ((4, 8), 0, 1)]),
        (3, 3, [((0, 1), 0, 1), ((1, 2), 0, 1), ((2, 3), 0, 1)]),
        (2, 4, [((0, 1), 0, 2), ((0, 1), 1, 2), ((1, 2), 0, 2), ((1, 2), 1, 2)]),
        (1, 2, [((0, 1), 0, 2), ((0, 1), 1, 2)]),
    ],
)
def test_heads_are_held_as_vllm_shards_them(num_heads: int, tp_size: int, expected: list[object]) -> None:
    assert [held_heads(num_heads, tp_size, rank) for rank in range(tp_size)] == expected


@pytest.mark.parametrize(("num_heads", "tp_size"), [(3, 2), (4, 6), (6, 4)])
def test_heads_that_cannot_be_shared_are_refused(num_heads: int, tp_size: int) -> None:
    with pytest.raises(ConfigError, match=f"{num_heads} KV heads cannot be shared by tensor_parallel_size={tp_size}"):
        held_heads(num_heads, tp_size, 0)


@given(st.binary(min_size=32, max_size=32).map(PageKey), st.sampled_from([1, 2, 4, 8]))
def test_exactly_one_replica_writes_a_page(key: PageKey, num_replicas: int) -> None:
    ranks = Cut(2 * num_replicas, (4,)).ranks(layout_of(4, 2, Grid(1, 2)))
    writers = [part.cell.head_group for rank in ranks for part in rank.parts if rank.writes(key, part)]
    assert writers == [0, 1]


@given(st.binary(min_size=32, max_size=32).map(PageKey), st.data())
def test_exactly_one_of_the_replicas_that_keep_a_page_writes_it(key: PageKey, data: st.DataObject) -> None:
    num_owners, num_alike = data.draw(st.sampled_from([1, 2, 3, 4])), data.draw(st.sampled_from([1, 2, 4]))
    ranks = Cut(2 * num_owners * num_alike, (4,)).ranks(layout_of(4, 2, Grid(1, 2)), Ownership(num_owners))
    for owner in range(num_owners):
        keepers = [rank for rank in ranks if rank.shard.owner == owner]
        writers = [part.cell.head_group for rank in keepers for part in rank.parts if rank.writes(key, part)]
        assert writers == [0, 1]


def test_each_of_the_replicas_that_keep_a_page_writes_its_share() -> None:
    ranks = Cut(8, (4,)).ranks(layout_of(4, 1, Grid()), Ownership(2))
    keys = [PageKey(bytes([first]) + bytes(31)) for first in range(4)]
    writers = [[[key[0] for key in keys if rank.writes(key, part)] for part in rank.parts] for rank in ranks]
    assert writers == [[[rank // 2]] for rank in range(8)]


def test_replicas_write_equal_shares_of_ten_thousand_pages() -> None:
    ranks = Cut(8, (4,)).ranks(layout_of(4, 2, Grid(1, 2)))
    shares: Counter[int] = Counter()
    for page in range(10_000):
        key = PageKey(hashlib.sha256(page.to_bytes(4)).digest())
        shares.update(number for number, rank in enumerate(ranks) if rank.writes(key, rank.parts[0]))
    assert shares.total() == 2 * 10_000
    assert all(abs(shares[number] - 2_500) <= 0.05 * 2_500 for number in range(8))


def test_a_role_is_written_by_its_own_replicas() -> None:
    roles = (RoleShape(Role.TARGET, 2, 2, 8), RoleShape(Role.DRAFT, 1, 1, 8))
    ranks = Cut(2, (2,)).ranks(PageLayout(roles, 2, 2, Grid(1, 2)))
    for first_byte in (0, 1):
        key = PageKey(bytes([first_byte]) + bytes(31))
        written = [[part.cell.role for part in rank.parts if rank.writes(key, part)] for rank in ranks]
        assert sorted(written, key=len) == [[Role.TARGET], [Role.TARGET, Role.DRAFT]]
        assert len(written[first_byte]) == 2


@pytest.mark.parametrize(
    ("cut", "num_layers", "num_heads", "expected"),
    [
        (Cut(4, (30, 30)), 60, 8, "2x4"),
        (Cut(1, (31, 30)), 61, 8, "2x1"),
        (Cut(1, (30, 31)), 61, 8, "30+31x1"),
        (Cut(1, (16, 15, 15, 15)), 61, 8, "16+15+15+15x1"),
        (Cut(8, (4,)), 4, 2, "1x2"),
    ],
)
def test_the_coarsest_grid_of_a_cut_is_named_as_simply_as_it_can_be(
    cut: Cut, num_layers: int, num_heads: int, expected: str
) -> None:
    layout = layout_of(num_layers, num_heads, Grid())
    held = [holding for rank in cut.ranks(layout) for holding in rank.holdings]
    assert str(cut_of(held, layout)) == expected


def test_a_draft_with_more_heads_a_rank_than_the_target_can_be_cut_in_has_no_grid() -> None:
    layout = PageLayout((RoleShape(Role.TARGET, 2, 2, 8), RoleShape(Role.DRAFT, 1, 8, 8)), 2, 2, Grid())
    held = [holding for rank in Cut(4, (2,)).ranks(layout) for holding in rank.holdings]
    assert cut_of(held, layout) is None


def test_a_draft_that_lies_on_several_stages_has_no_grid() -> None:
    layout = PageLayout((RoleShape(Role.TARGET, 4, 2, 8), RoleShape(Role.DRAFT, 2, 2, 8)), 2, 2, Grid())
    held = [Holding(Role.TARGET, (0, 2), (0, 2)), Holding(Role.TARGET, (2, 4), (0, 2))]
    assert cut_of([*held, Holding(Role.DRAFT, (0, 2), (0, 2))], layout) == Grid(2, 1)
    assert cut_of([*held, Holding(Role.DRAFT, (0, 1), (0, 2)), Holding(Role.DRAFT, (1, 2), (0, 2))], layout) is None


@pytest.mark.parametrize("roles", [(), (RoleShape(Role.TARGET, 0, 2, 64),)], ids=["no role", "no layer"])
def test_a_model_without_layers_is_refused(roles: tuple[RoleShape, ...]) -> None:
    with pytest.raises(ConfigError, match="0 attention layers"):
        PageLayout(roles, 16, 64, Grid())


@pytest.mark.parametrize(
    ("page", "block", "nearest"), [(100, 32, 96), (120, 32, 128), (16, 128, 128), (1, 128, 128), (65, 16, 64)]
)
def test_a_page_of_no_whole_number_of_blocks_is_refused_with_the_nearest_that_is(
    page: int, block: int, nearest: int
) -> None:
    with pytest.raises(ConfigError, match=f"page_tokens={page} is no whole .* {block} tokens: .* such as {nearest},"):
        PageLayout((TARGET,), block, page, Grid())
    assert PageLayout((TARGET,), block, nearest, Grid()).blocks_per_page == nearest // block


@pytest.mark.parametrize(
    ("num_layers", "asked", "chosen"),
    [(61, None, "31+30x8"), (60, None, "2x8"), (61, Grid(2, 4), "31+30x4"), (60, Grid(2, 4), "2x4")],
)
def test_a_layout_takes_the_operators_grid_or_the_one_that_suits_the_model(
    num_layers: int, asked: Grid | None, chosen: str
) -> None:
    shape = RoleShape(Role.TARGET, num_layers, 8, 32 << 10)
    page = PageLayout.suited((shape, DRAFT), 128, 256, asked)
    assert (str(page.grid), page.blocks_per_page) == (chosen, 2)


def test_a_grid_that_does_not_fit_the_model_is_refused_when_cells_are_asked_for() -> None:
    with pytest.raises(ConfigError, match="grid 3x1 cuts 2 layers"):
        _ = layout_of(2, 2, Grid(3, 1)).cells


@UNHURRIED
@given(ENGINES)
def test_a_sidecar_holds_the_drafts_parts_and_packed_all_of_them(engine: tuple[PageLayout, Cut]) -> None:
    for rank in ranks_of(engine):
        aside = replace(rank, has_sidecar=True)
        assert [replace(part, offset=0, region=0) for part in aside.parts] == [
            replace(part, offset=0) for part in rank.parts
        ]
        for region in (0, 1):
            offset = 0
            for part in (each for each in aside.parts if each.region == region):
                assert (part.offset, part.cell.role is Role.DRAFT) == (offset, region == 1)
                offset += part.num_bytes
        assert sum(aside.region_bytes) == aside.slot_bytes == rank.slot_bytes == sum(rank.region_bytes)
        assert 0 not in aside.region_bytes


@UNHURRIED
@given(role_shapes(), st.integers(1, 4))
def test_a_draft_leaves_the_targets_objects_as_they_are(roles: tuple[RoleShape, ...], blocks: int) -> None:
    alone = PageLayout.suited(roles[:1], 4, 4 * blocks, None)
    beside = PageLayout.suited(roles, 4, 4 * blocks, None)
    assert [cell for cell in beside.cells if cell.role is Role.TARGET] == list(alone.cells)
    assert [beside.grid_of(shape) for shape in roles[:1]] == [alone.grid]


MODELS = {
    "two objects less a layer": (RoleShape(Role.TARGET, 31, 2, 32 << 10), "1x1"),
    "SmolLM2-135M": (RoleShape(Role.TARGET, 30, 3, 16 << 10), "1x1"),
    "Llama-3.1-8B": (RoleShape(Role.TARGET, 32, 8, 32 << 10), "1x8"),
    "Llama-3.1-70B": (RoleShape(Role.TARGET, 80, 8, 32 << 10), "2x8"),
    "DeepSeek-V3": (RoleShape(Role.TARGET, 61, 1, 72 << 10), "31+30x1"),
}
"""Layers with their slabs of 64 tokens in 16 bits, and the grid that suits them."""

DRAFTS: dict[str, Callable[[RoleShape], RoleShape]] = {
    "one layer": lambda shape: replace(shape, role=Role.DRAFT, num_layers=1),
    "itself": lambda shape: replace(shape, role=Role.DRAFT),
    "fewer heads": lambda shape: RoleShape(Role.DRAFT, 5, 1, shape.slab_bytes // 2),
    "more heads": lambda shape: RoleShape(Role.DRAFT, 5, 16, shape.slab_bytes),
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("model", MODELS)
def test_the_grid_that_suits_a_model_is_the_same_with_any_draft(model: str, draft: str) -> None:
    shape, chosen = MODELS[model]
    alone = PageLayout.suited((shape,), 64, 64, None)
    beside = PageLayout.suited((shape, DRAFTS[draft](shape)), 64, 64, None)
    assert str(alone.grid) == str(beside.grid) == chosen
    assert beside.cells[: len(alone.cells)] == alone.cells


@pytest.mark.parametrize(
    ("grid", "num_heads", "of_draft"),
    [
        ("1x1", 4, "1x1"),
        ("2x4", 4, "1x4"),
        ("2x4", 2, "1x2"),
        ("2x4", 6, "1x2"),
        ("31+30x8", 1, "1x1"),
        ("1x3", 8, "1x1"),
    ],
)
def test_a_draft_is_cut_in_as_many_head_groups_as_fit_both(grid: str, num_heads: int, of_draft: str) -> None:
    target, draft = RoleShape(Role.TARGET, 61, 24, 64), RoleShape(Role.DRAFT, 2, num_heads, 32)
    layout = PageLayout((target, draft), 16, 64, Grid.parse(grid))
    assert (str(layout.grid_of(target)), str(layout.grid_of(draft))) == (grid, of_draft)
    cells = [cell for cell in layout.cells if cell.role is Role.DRAFT]
    assert len(cells) == layout.grid_of(draft).head_groups
    assert {(cell.num_layers, cell.num_heads * len(cells)) for cell in cells} == {(2, num_heads)}


def test_a_draft_lies_behind_the_target_in_a_slot_or_at_the_beginning_of_its_own_region() -> None:
    layout = PageLayout((TARGET, DRAFT), 16, 64, Grid(2, 2))
    (packed,) = Cut(1, (4,)).ranks(layout)
    aside = replace(packed, has_sidecar=True)
    places = [[(part.region, part.offset) for part in rank.parts] for rank in (packed, aside)]
    assert places[0] == [(0, 0), (0, 2048), (0, 4096), (0, 6144), (0, 8192), (0, 8448)]
    assert places[1] == [(0, 0), (0, 2048), (0, 4096), (0, 6144), (1, 0), (1, 256)]
    assert (packed.region_bytes, aside.region_bytes) == ((8704,), (8192, 512))


def test_a_stage_without_draft_layers_has_one_region_with_a_sidecar_too() -> None:
    first, last = Cut(1, (2, 2)).ranks(PageLayout((TARGET, DRAFT), 16, 64, Grid(2, 1)))
    assert replace(first, has_sidecar=True).region_bytes == first.region_bytes == (4096,)
    assert replace(last, has_sidecar=True).region_bytes == (4096, 512)
