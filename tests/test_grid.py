"""The grid cuts layers and heads without gaps, and refuses what cannot be cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.errors import ConfigError
from vllm_hicache.grid import Grid


@pytest.mark.parametrize(("text", "grid"), [("1x1", Grid()), ("2x4", Grid(2, 4)), ("60x1", Grid(60, 1))])
def test_a_grid_is_read_and_shown_in_the_same_form(text: str, grid: Grid) -> None:
    assert (Grid.parse(text), str(grid)) == (grid, text)


@pytest.mark.parametrize(
    "text", ["", "2", "x", "0x1", "1x0", "01x1", "2X2", "2x2x2", "-1x2", "1 x 1", "10000x1", "٣x1"]
)
def test_another_form_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not of the form LAYERSxHEADS: write for example '1x1'"):
        Grid.parse(text)


@given(st.integers(1, 200), st.data())
def test_layer_groups_are_contiguous_complete_and_nearly_equal(num_layers: int, data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, num_layers))
    bounds = Grid(groups, 1).layer_bounds(num_layers)
    assert [layer for start, stop in bounds for layer in range(start, stop)] == list(range(num_layers))
    sizes = [stop - start for start, stop in bounds]
    assert len(sizes) == groups
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(1, 64), st.integers(1, 64))
def test_head_groups_are_contiguous_complete_and_equal(groups: int, size: int) -> None:
    bounds = Grid(1, groups).head_bounds(groups * size)
    assert [head for start, stop in bounds for head in range(start, stop)] == list(range(groups * size))
    assert {stop - start for start, stop in bounds} == {size}


def test_more_groups_than_layers_are_refused_with_the_most_that_fit() -> None:
    with pytest.raises(ConfigError, match="grid 4x1 cuts 3 layers in 4 groups: use at most 3"):
        Grid(4, 1).layer_bounds(3)


@pytest.mark.parametrize("num_heads", [3, 1, 6])
def test_heads_that_cannot_be_cut_equally_are_refused(num_heads: int) -> None:
    with pytest.raises(ConfigError, match=f"grid 1x4 cannot cut {num_heads} KV heads in 4 equal groups"):
        Grid(1, 4).head_bounds(num_heads)
