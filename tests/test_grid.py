"""The grid cuts layers and heads without gaps, is named as simply as it can be, and refuses what cannot be cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_kit import divisors, partitions

from vllm_hicache.errors import ConfigError
from vllm_hicache.grid import Grid

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "grid"),
    [
        ("1x1", Grid()),
        ("2x4", Grid(2, 4)),
        ("60x1", Grid(60, 1)),
        ("31+30x4", Grid(2, 4, (31, 30))),
        ("1+1+1x1", Grid(3, 1, (1, 1, 1))),
    ],
)
def test_a_grid_is_read_and_shown_in_the_same_form(text: str, grid: Grid) -> None:
    assert (Grid.parse(text), str(grid)) == (grid, text)


@pytest.mark.parametrize(
    "text", ["", "2", "x", "0x1", "1x0", "01x1", "2X2", "2x2x2", "-1x2", "1 x 1", "10000x1", "٣x1"]
)
@pytest.mark.parametrize("before", ["", "1+", "1++", "1,"])
def test_another_form_is_refused_with_an_example(text: str, before: str) -> None:
    with pytest.raises(ConfigError, match=r"is not of the form LAYERSxHEADS: write for example '1x1', '2x4'"):
        Grid.parse(before + text)


@given(st.integers(1, 200), st.data())
def test_layer_groups_are_contiguous_complete_and_nearly_equal(num_layers: int, data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, num_layers))
    bounds = Grid(groups, 1).layer_bounds(num_layers)
    assert [layer for start, stop in bounds for layer in range(start, stop)] == list(range(num_layers))
    sizes = [stop - start for start, stop in bounds]
    assert len(sizes) == groups
    assert max(sizes) - min(sizes) <= 1


def vllm_stage_layers(num_layers: int, num_stages: int) -> list[int]:
    """`get_pp_indices` of vLLM 0.32 without VLLM_PP_LAYER_PARTITION, its source retold."""
    sizes = [num_layers // num_stages] * num_stages
    for distance in range(2, num_layers % num_stages + 2):
        sizes[-distance] += 1
    return sizes


@given(st.integers(1, 200), st.data())
def test_layer_groups_are_as_long_as_vllms_pipeline_stages(num_layers: int, data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, num_layers))
    bounds = Grid(groups, 1).layer_bounds(num_layers)
    assert [stop - start for start, stop in bounds] == vllm_stage_layers(num_layers, groups)


@pytest.mark.parametrize(
    ("num_layers", "groups", "sizes"), [(61, 2, [31, 30]), (61, 4, [15, 15, 16, 15]), (5, 3, [2, 2, 1])]
)
def test_the_last_layer_group_is_never_the_longer_one(num_layers: int, groups: int, sizes: list[int]) -> None:
    assert [stop - start for start, stop in Grid(groups, 1).layer_bounds(num_layers)] == sizes


@given(st.integers(1, 61).flatmap(lambda total: partitions(total, 12)))
def test_explicit_layer_groups_are_as_long_as_they_say(counts: tuple[int, ...]) -> None:
    bounds = Grid(len(counts), 1, counts).layer_bounds(sum(counts))
    assert tuple(stop - start for start, stop in bounds) == counts
    assert [layer for start, stop in bounds for layer in range(start, stop)] == list(range(sum(counts)))


@given(st.integers(1, 64), st.integers(1, 64))
def test_head_groups_are_contiguous_complete_and_equal(groups: int, size: int) -> None:
    bounds = Grid(1, groups).head_bounds(groups * size)
    assert [head for start, stop in bounds for head in range(start, stop)] == list(range(groups * size))
    assert {stop - start for start, stop in bounds} == {size}


@given(st.integers(1, 61).flatmap(lambda total: partitions(total, 12)), st.sampled_from([1, 2, 4]))
def test_grids_of_equal_bounds_have_one_text_and_one_reading(counts: tuple[int, ...], heads: int) -> None:
    num_layers, explicit = sum(counts), Grid(len(counts), heads, counts)
    resolved = explicit.resolved(num_layers)
    assert resolved.layer_bounds(num_layers) == explicit.layer_bounds(num_layers)
    assert resolved == Grid.parse(str(resolved)).resolved(num_layers)
    if explicit.shape.layer_bounds(num_layers) == explicit.layer_bounds(num_layers):
        assert explicit.shape.resolved(num_layers) == resolved


def test_a_header_holds_the_numbers_of_groups_alone() -> None:
    assert Grid(2, 4, (31, 30)).shape == Grid(2, 4)


@pytest.mark.parametrize(
    ("target_heads", "draft_heads", "groups"), [(1, 3, 1), (4, 8, 4), (8, 4, 4), (8, 2, 2), (4, 6, 2), (3, 8, 1)]
)
def test_a_draft_is_cut_in_its_heads_as_far_as_the_target_is(target_heads: int, draft_heads: int, groups: int) -> None:
    assert Grid(5, target_heads, (1, 2, 3, 4, 5)).for_draft(draft_heads) == Grid(1, groups)


@given(st.integers(1, 128), st.integers(1, 128), st.integers(0, 1 << 32))
def test_the_suited_grid_fits_the_model_and_its_objects_are_not_small(layers: int, heads: int, page_bytes: int) -> None:
    grid = Grid.suited(layers, heads, page_bytes)
    assert len(grid.layer_bounds(layers)) == grid.layer_groups <= 8
    assert len(grid.head_bounds(heads)) == grid.head_groups
    assert page_bytes >= grid.layer_groups * grid.head_groups * MIB or grid == Grid()


@given(st.integers(1, 128), st.integers(1, 128), st.integers(0, 1 << 30))
def test_no_grid_with_more_head_groups_would_suit_the_model(layers: int, heads: int, page_bytes: int) -> None:
    chosen = Grid.suited(layers, heads, page_bytes).head_groups
    assert all(page_bytes < groups * MIB for groups in divisors(heads, heads) if groups > chosen)


@pytest.mark.parametrize(
    ("num_layers", "num_heads", "page_bytes", "grid"),
    [
        (30, 3, 2 * MIB - 1, "1x1"),
        (30, 3, 3 * MIB - 1, "2x1"),
        (30, 3, 3 * MIB, "1x3"),
        (30, 3, 6 * MIB, "2x3"),
        (30, 3, 600 * MIB, "2x3"),
        (60, 8, 600 * MIB, "4x8"),
        (80, 8, 600 * MIB, "8x8"),
        (80, 8, 20 * MIB, "2x8"),
        (61, 1, 61 * MIB, "2x1"),
        (1, 1, 61 * MIB, "1x1"),
        (32, 8, 4 * MIB, "1x4"),
    ],
)
def test_heads_are_cut_first_and_layers_where_stages_hold_whole_groups(
    num_layers: int, num_heads: int, page_bytes: int, grid: str
) -> None:
    assert str(Grid.suited(num_layers, num_heads, page_bytes)) == grid


def test_more_groups_than_layers_are_refused_with_the_most_that_fit() -> None:
    with pytest.raises(ConfigError, match="grid 4x1 cuts 3 layers in 4 groups: use at most 3"):
        Grid(4, 1).layer_bounds(3)


@pytest.mark.parametrize("num_layers", [60, 62])
def test_counts_of_another_model_are_refused_with_both_sums(num_layers: int) -> None:
    grid = Grid.parse("31+30x1")
    for asked in (grid.layer_bounds, grid.resolved):
        with pytest.raises(ConfigError, match=rf"grid 31\+30x1 has 61 layers .* the model has {num_layers}: make"):
            asked(num_layers)


@pytest.mark.parametrize("num_heads", [3, 1, 6])
def test_heads_that_cannot_be_cut_equally_are_refused(num_heads: int) -> None:
    with pytest.raises(ConfigError, match=f"grid 1x4 cannot cut {num_heads} KV heads in 4 equal groups"):
        Grid(1, 4).head_bounds(num_heads)
