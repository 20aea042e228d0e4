"""Geometry: which layers and heads a rank holds, and where each cell of the grid lies in a host slot.

Pure: ints only. Built once on each rank from what the engine registered, and handed to the scheduler half as
part of the rank's inventory.

A *slab* is one (block, layer, kv head) of the device cache and contiguous there. A *unit* is one
(layer, kv head) of a page: `blocks_per_page` slabs. A *cell* is the (layer group, head group) of the grid that
one stored object holds. A host slot is the concatenation of the rank's cells, each in the order
[head][layer][block][slab], so that every object is one contiguous range of a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from vllm_hicache.errors import ConfigError
from vllm_hicache.grid import Grid
from vllm_hicache.names import Role


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One attention layer's cache on one rank.

    Attributes:
        name: vLLM's name of the layer.
        role: whose layer it is; draft layers are numbered from 0 again.
        index: position among the layers of its role, over the whole model.
        num_heads: KV heads this rank holds.
        slab_bytes: bytes of one (block, head).
    """

    name: str
    role: Role
    index: int
    num_heads: int
    slab_bytes: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the grid as it lies in a slot: [num_heads][num_layers][blocks_per_page][slab_bytes].

    `first_layer` and `first_head` count within the rank; `offset` and sizes are bytes.
    """

    role: Role
    layer_group: int
    head_group: int
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    offset: int
    unit_bytes: int

    @property
    def num_bytes(self) -> int:
        """Payload bytes of the object that holds this cell."""
        return self.num_heads * self.num_layers * self.unit_bytes


@dataclass(frozen=True)
class RankGeometry:
    """What one rank holds of every page.

    Attributes:
        layers: this rank's layers in order of (role, index); equal heads and slabs within a role.
        block_tokens: tokens of a device block on this rank.
        page_tokens: tokens of a page, a whole number of blocks.
        grid: how pages are cut into objects.
    """

    layers: tuple[LayerShape, ...]
    block_tokens: int
    page_tokens: int
    grid: Grid

    def __post_init__(self) -> None:
        """Refuse what does not fit together.

        Raises:
            ConfigError: no layers, a page that is no whole number of blocks, or layers of different shapes.
        """
        if not self.layers:
            raise ConfigError("the engine registered 0 attention layers: there is no KV to cache, remove the connector")
        if self.page_tokens % self.block_tokens:
            nearest = max(1, round(self.page_tokens / self.block_tokens)) * self.block_tokens
            raise ConfigError(
                f"page_tokens={self.page_tokens} is no whole number of blocks of {self.block_tokens} tokens: "
                f"set page_tokens to a multiple, such as {nearest}, or leave it out"
            )
        for role in {layer.role for layer in self.layers}:
            shapes = {(layer.num_heads, layer.slab_bytes): layer.name for layer in self.layers if layer.role == role}
            if len(shapes) > 1:
                listed = ", ".join(f"{shape} as in {name}" for shape, name in sorted(shapes.items()))
                raise ConfigError(
                    f"the {role} layers have {len(shapes)} different shapes (kv heads, slab bytes): {listed}; "
                    "models with several shapes of KV are not supported yet, run without the connector"
                )

    @property
    def blocks_per_page(self) -> int:
        """Device blocks of a page."""
        return self.page_tokens // self.block_tokens

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Cells in slot order; offsets run without gaps."""
        cells: list[Cell] = []
        offset = 0
        for role in sorted({layer.role for layer in self.layers}, reverse=True):
            shapes = [layer for layer in self.layers if layer.role == role]
            unit = self.blocks_per_page * shapes[0].slab_bytes
            for layer_group, (first_layer, end_layer) in enumerate(self.grid.layer_bounds(len(shapes))):
                for head_group, (first_head, end_head) in enumerate(self.grid.head_bounds(shapes[0].num_heads)):
                    cell = Cell(
                        role=role,
                        layer_group=layer_group,
                        head_group=head_group,
                        first_layer=first_layer,
                        num_layers=end_layer - first_layer,
                        first_head=first_head,
                        num_heads=end_head - first_head,
                        offset=offset,
                        unit_bytes=unit,
                    )
                    cells.append(cell)
                    offset += cell.num_bytes
        return tuple(cells)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one page on this rank."""
        return sum(cell.num_bytes for cell in self.cells)


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a rank hands to the scheduler half at start: who it is, what it holds, how many pages it can keep."""

    rank: int
    layers: tuple[LayerShape, ...]
    slot_bytes: int
    num_slots: int
    encoding: str
