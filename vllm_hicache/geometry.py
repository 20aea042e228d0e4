"""Geometry: how a page of the whole model is cut into cells, and which parts of them a rank holds where in a slot.

Pure: ints only. The page's layout is the same on all ranks of all engines that share a store; what a rank holds of
it follows from the engine's cut.

A *slab* is one (block, layer, kv head) of the device cache and contiguous there. A *unit* is one (layer, kv head) of
a page: `blocks_per_page` slabs. A *cell* is the (layer group, head group) of the grid that one stored object holds,
its units in the order [head][layer]. A *part* is what one rank holds of a cell. A host slot is the concatenation of
the rank's parts, each in the order [head][layer][block][slab], so that a part that is the whole cell is one
contiguous range of the slot and of its object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import lcm

from vllm_hicache.errors import ConfigError
from vllm_hicache.grid import Grid
from vllm_hicache.names import PageKey, Role
from vllm_hicache.ownership import Shard

Range = tuple[int, int]
"""Half-open range of numbers."""


@dataclass(frozen=True, slots=True)
class RoleShape:
    """The KV of one role's layers in the whole model; `slab_bytes` are those of one (block, layer, kv head)."""

    role: Role
    num_layers: int
    num_heads: int
    slab_bytes: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the grid, [num_heads][num_layers] units of `unit_bytes`; numbers count over the whole model."""

    role: Role
    layer_group: int
    head_group: int
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    unit_bytes: int

    @property
    def num_units(self) -> int:
        """Units of the object that holds this cell."""
        return self.num_heads * self.num_layers

    @property
    def num_bytes(self) -> int:
        """Payload bytes of the object that holds this cell."""
        return self.num_units * self.unit_bytes


@dataclass(frozen=True)
class PageLayout:
    """A page of the whole model.

    Attributes:
        roles: target, then draft where there is one.
        block_tokens: tokens of a device block.
        page_tokens: tokens of a page, a whole number of blocks.
        grid: how pages are cut into objects; a draft by `Grid.for_draft`.
    """

    roles: tuple[RoleShape, ...]
    block_tokens: int
    page_tokens: int
    grid: Grid

    def __post_init__(self) -> None:
        """Refuse what does not fit together.

        Raises:
            ConfigError: no layers, or a page that is no whole number of blocks.
        """
        if not any(shape.num_layers for shape in self.roles):
            raise ConfigError("the engine registered 0 attention layers: there is no KV to cache, remove the connector")
        if self.page_tokens % self.block_tokens:
            nearest = max(1, round(self.page_tokens / self.block_tokens)) * self.block_tokens
            raise ConfigError(
                f"page_tokens={self.page_tokens} is no whole number of blocks of {self.block_tokens} tokens: "
                f"set page_tokens to a multiple, such as {nearest}, or leave it out"
            )

    @classmethod
    def suited(cls, roles: tuple[RoleShape, ...], block_tokens: int, page_tokens: int, grid: Grid | None) -> PageLayout:
        """The layout of a model under the operator's grid, or the one that suits it where there is none.

        Raises:
            ConfigError: the page or the grid do not fit the model.
        """
        whole = cls(roles, block_tokens, page_tokens, Grid())
        first = roles[0]
        # A draft does not count: engines with and without one share the target's objects.
        num_bytes = first.num_layers * first.num_heads * whole.blocks_per_page * first.slab_bytes
        chosen = grid or Grid.suited(first.num_layers, first.num_heads, num_bytes)
        return replace(whole, grid=chosen.resolved(first.num_layers))

    @property
    def blocks_per_page(self) -> int:
        """Device blocks of a page."""
        return self.page_tokens // self.block_tokens

    def grid_of(self, shape: RoleShape) -> Grid:
        """How a role's part of a page is cut."""
        return self.grid if shape.role is Role.TARGET else self.grid.for_draft(shape.num_heads)

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """All cells, by role, layer group and head group: one object each."""
        return tuple(
            Cell(
                role=shape.role,
                layer_group=layer_group,
                head_group=head_group,
                first_layer=first_layer,
                num_layers=end_layer - first_layer,
                first_head=first_head,
                num_heads=end_head - first_head,
                unit_bytes=self.blocks_per_page * shape.slab_bytes,
            )
            for shape in self.roles
            for grid in [self.grid_of(shape)]
            for layer_group, (first_layer, end_layer) in enumerate(grid.layer_bounds(shape.num_layers))
            for head_group, (first_head, end_head) in enumerate(grid.head_bounds(shape.num_heads))
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of a page of the whole model."""
        return sum(cell.num_bytes for cell in self.cells)


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank holds of one role: layers and heads of the whole model, half-open.

    Where several ranks hold the same, each is a replica of it, numbered from 0.
    """

    role: Role
    layers: Range
    heads: Range
    replica: int = 0
    num_replicas: int = 1


def held_heads(num_heads: int, tp_size: int, tp_rank: int) -> tuple[Range, int, int]:
    """KV heads of a tensor rank, its replica and the number of replicas, as vLLM shards them.

    With more ranks than heads, `tp_size / num_heads` neighbouring ranks hold the same head.

    Raises:
        ConfigError: neither divides the other.
    """
    if num_heads % tp_size == 0:
        size = num_heads // tp_size
        return (tp_rank * size, (tp_rank + 1) * size), 0, 1
    if tp_size % num_heads:
        raise ConfigError(
            f"{num_heads} KV heads cannot be shared by tensor_parallel_size={tp_size}: one must divide the other"
        )
    copies = tp_size // num_heads
    head = tp_rank // copies
    return (head, head + 1), tp_rank % copies, copies


@dataclass(frozen=True, slots=True)
class UnitRun:
    """Consecutive units of a part that are consecutive in the cell's object too.

    Attributes:
        first_unit: place in the object.
        offset_units: place in the part.
    """

    first_unit: int
    offset_units: int
    num_units: int


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank holds of a cell, as it lies in a slot: [num_heads][num_layers][blocks_per_page][slab_bytes].

    Attributes:
        first_layer: first layer, counted among the rank's own layers of the role.
        first_head: first head, counted among the rank's own.
        skip_layers: layers of the cell before the part.
        skip_heads: heads of the cell before the part.
        offset: bytes from the beginning of the slot in its region.
        region: 0 where the target's layers lie, 1 in a sidecar of the draft's.
    """

    cell: Cell
    first_layer: int
    num_layers: int
    skip_layers: int
    first_head: int
    num_heads: int
    skip_heads: int
    offset: int
    region: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of this part in a slot."""
        return self.num_heads * self.num_layers * self.cell.unit_bytes

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the cell."""
        return (self.num_heads, self.num_layers) == (self.cell.num_heads, self.cell.num_layers)

    @property
    def runs(self) -> tuple[UnitRun, ...]:
        """The part as ranges of its object, in ascending order: one where it has all layers of the cell."""
        layers = self.cell.num_layers
        if self.num_layers == layers:
            return (UnitRun(self.skip_heads * layers, 0, self.num_heads * layers),)
        return tuple(
            UnitRun((self.skip_heads + head) * layers + self.skip_layers, head * self.num_layers, self.num_layers)
            for head in range(self.num_heads)
        )


@dataclass(frozen=True)
class RankGeometry:
    """What one rank holds of every page, and where it lies in a slot.

    Attributes:
        holdings: one a role, in the order of the layout's roles.
        shard: which of the group's pages this rank keeps.
        has_sidecar: whether draft layers lie in a region of their own, and not behind the target's.
    """

    layout: PageLayout
    holdings: tuple[Holding, ...]
    shard: Shard = Shard()
    has_sidecar: bool = False

    @property
    def blocks_per_page(self) -> int:
        """Device blocks of a page."""
        return self.layout.blocks_per_page

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Parts in slot order; offsets run without gaps in every region."""
        parts: list[Part] = []
        offsets = [0, 0]
        for cell in self.layout.cells:
            region = int(self.has_sidecar and cell.role is Role.DRAFT)
            for holding in self.holdings:
                part = _part(cell, holding, offsets[region], region) if holding.role == cell.role else None
                if part is not None:
                    parts.append(part)
                    offsets[region] += part.num_bytes
        return tuple(parts)

    @property
    def region_bytes(self) -> tuple[int, ...]:
        """Bytes of one page on this rank by region, none of which is empty."""
        regions = {part.region for part in self.parts}
        return tuple(sum(part.num_bytes for part in self.parts if part.region == region) for region in sorted(regions))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one page on this rank."""
        return sum(self.region_bytes)

    def writes(self, key: PageKey, part: Part) -> bool:
        """Whether this rank is the one of several that keep the same which writes this page's object.

        By rotation over pages, so that replicas share the work evenly. Asked of its own pages only.
        """
        holding = next(each for each in self.holdings if each.role == part.cell.role)
        num_alike = holding.num_replicas // self.shard.num_owners
        return turn_of(key, num_alike) == holding.replica // self.shard.num_owners


def turn_of(key: PageKey, num_alike: int) -> int:
    """Which of as many that are alike a page falls to, so that they share the work evenly."""
    return int.from_bytes(key[:4], "little") % num_alike


def _part(cell: Cell, holding: Holding, offset: int, region: int) -> Part | None:
    layers = _common(holding.layers, (cell.first_layer, cell.first_layer + cell.num_layers))
    heads = _common(holding.heads, (cell.first_head, cell.first_head + cell.num_heads))
    if layers is None or heads is None:
        return None
    return Part(
        cell=cell,
        first_layer=layers[0] - holding.layers[0],
        num_layers=layers[1] - layers[0],
        skip_layers=layers[0] - cell.first_layer,
        first_head=heads[0] - holding.heads[0],
        num_heads=heads[1] - heads[0],
        skip_heads=heads[0] - cell.first_head,
        offset=offset,
        region=region,
    )


def _common(one: Range, other: Range) -> Range | None:
    low, high = max(one[0], other[0]), min(one[1], other[1])
    return (low, high) if low < high else None


def cut_of(holdings: Sequence[Holding], layout: PageLayout) -> Grid | None:
    """The coarsest grid of which every one of these holdings has whole cells, or `None` where no grid does."""
    bounds = sorted({bound for each in holdings if each.role is Role.TARGET for bound in each.layers})
    counts = tuple(stop - start for start, stop in pairwise(bounds))
    head_groups = lcm(
        *(
            shape.num_heads // min(each.heads[1] - each.heads[0] for each in holdings if each.role is shape.role)
            for shape in layout.roles
        )
    )
    explicit = Grid(len(counts), head_groups, counts)
    try:
        plain = explicit.shape
        num_layers = next(shape.num_layers for shape in layout.roles if shape.role is Role.TARGET)
        grid = plain if plain.layer_bounds(num_layers) == explicit.layer_bounds(num_layers) else explicit
        cut = replace(layout, grid=grid)
        parts = RankGeometry(cut, tuple(holdings)).parts
    except ConfigError:  # the target's heads cannot be cut as finely as the draft's are
        return None
    return grid if all(part.is_whole for part in parts) else None
