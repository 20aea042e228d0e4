"""Geometry: the cells of a rank tile its slot, and shapes that do not fit are refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.errors import ConfigError
from vllm_hicache.geometry import Cell, LayerShape, RankGeometry
from vllm_hicache.grid import Grid
from vllm_hicache.names import Role


def layers(num: int, heads: int = 2, slab_bytes: int = 64, role: Role = Role.TARGET) -> tuple[LayerShape, ...]:
    return tuple(LayerShape(f"{role.value}.{index}", role, index, heads, slab_bytes) for index in range(num))


@st.composite
def geometries(draw: st.DrawFn) -> RankGeometry:
    head_groups, blocks, block = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.sampled_from([16, 32]))
    layer_groups = draw(st.integers(1, 5))
    shapes: tuple[LayerShape, ...] = ()
    for role in draw(st.sampled_from([(Role.DRAFT,), (Role.TARGET,), (Role.TARGET, Role.DRAFT)])):
        heads, slab = head_groups * draw(st.integers(1, 3)), draw(st.sampled_from([8, 64, 96]))
        shapes += layers(draw(st.integers(layer_groups, 9)), heads, slab, role)
    return RankGeometry(shapes, block, blocks * block, Grid(layer_groups, head_groups))


@given(geometries())
def test_cells_follow_each_other_in_the_slot_without_gap_or_overlap(geometry: RankGeometry) -> None:
    ends = [0]
    for cell in geometry.cells:
        assert cell.offset == ends[-1]
        ends.append(cell.offset + cell.num_bytes)
    assert ends[-1] == geometry.slot_bytes
    slabs = sum(layer.num_heads * layer.slab_bytes for layer in geometry.layers)
    assert geometry.slot_bytes == slabs * geometry.blocks_per_page


def units(cell: Cell) -> list[tuple[Role, int, int]]:
    heads = range(cell.first_head, cell.first_head + cell.num_heads)
    return [(cell.role, cell.first_layer + layer, head) for layer in range(cell.num_layers) for head in heads]


@given(geometries())
def test_every_layer_and_head_lies_in_exactly_one_cell(geometry: RankGeometry) -> None:
    held = [unit for cell in geometry.cells for unit in units(cell)]
    wanted = [(layer.role, layer.index, head) for layer in geometry.layers for head in range(layer.num_heads)]
    assert sorted(held) == sorted(wanted)


@given(geometries())
def test_every_cell_of_the_grid_is_there_once_a_role(geometry: RankGeometry) -> None:
    seen = [(cell.role, cell.layer_group, cell.head_group) for cell in geometry.cells]
    roles = {layer.role for layer in geometry.layers}
    assert len(seen) == len(set(seen)) == len(roles) * geometry.grid.layer_groups * geometry.grid.head_groups


def test_target_layers_lie_before_draft_layers() -> None:
    geometry = RankGeometry(layers(2) + layers(1, 4, 32, Role.DRAFT), 16, 64, Grid())
    assert [(cell.role, cell.offset, cell.num_bytes) for cell in geometry.cells] == [
        (Role.TARGET, 0, 2 * 2 * 64 * 4),
        (Role.DRAFT, 1024, 4 * 32 * 4),
    ]


def test_a_rank_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 attention layers"):
        RankGeometry((), 16, 64, Grid())


@pytest.mark.parametrize(
    ("page", "block", "nearest"), [(100, 32, 96), (120, 32, 128), (16, 128, 128), (1, 128, 128), (65, 16, 64)]
)
def test_a_page_of_no_whole_number_of_blocks_is_refused_with_the_nearest_that_is(
    page: int, block: int, nearest: int
) -> None:
    with pytest.raises(ConfigError, match=f"page_tokens={page} is no whole .* {block} tokens: .* such as {nearest},"):
        RankGeometry(layers(1), block, page, Grid())
    assert RankGeometry(layers(1), block, nearest, Grid()).blocks_per_page == nearest // block


@pytest.mark.parametrize("odd", [(4, 64), (2, 128)], ids=["heads", "slab"])
def test_layers_of_one_role_and_two_shapes_are_refused_with_both(odd: tuple[int, int]) -> None:
    shapes = (*layers(2), LayerShape("odd", Role.TARGET, 2, *odd))
    with pytest.raises(ConfigError, match=r"the target layers have 2 different shapes .*\(2, 64\)") as refusal:
        RankGeometry(shapes, 16, 64, Grid())
    assert str(odd) in str(refusal.value)


def test_a_layer_of_another_shape_is_refused_by_its_name() -> None:
    shapes = (*layers(2), LayerShape("model.layers.2.odd", Role.TARGET, 2, 4, 64))
    with pytest.raises(ConfigError, match=r"model\.layers\.2\.odd"):
        RankGeometry(shapes, 16, 64, Grid())


def test_a_grid_that_does_not_fit_the_rank_is_refused_when_cells_are_asked_for() -> None:
    with pytest.raises(ConfigError, match="grid 3x1 cuts 2 layers"):
        _ = RankGeometry(layers(2), 16, 64, Grid(3, 1)).cells
