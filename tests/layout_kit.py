"""Models, cuts and grids for the tests of the layout, and the strategies that draw them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hypothesis import strategies as st

from vllm_hicache.geometry import Holding, PageLayout, RankGeometry, RoleShape, held_heads
from vllm_hicache.grid import Grid
from vllm_hicache.inventory import Inventory
from vllm_hicache.names import Role
from vllm_hicache.ownership import Ownership, Shard
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.chunks import ChunkStore, RoleChunks

BLOCK_TOKENS = 2
ONE_OWNER = Ownership()


@dataclass(frozen=True)
class Cut:
    """An engine's cut: tensor ranks, and the layers of each pipeline stage. Drafts lie on the last stage."""

    tp_size: int
    stages: tuple[int, ...]

    def ranks(self, layout: PageLayout, ownership: Ownership = ONE_OWNER) -> list[RankGeometry]:
        """By rank number."""
        return [
            RankGeometry(
                layout,
                tuple(self._holding(shape, layers, rank) for shape, layers in held.items()),
                Shard(ownership, rank % ownership.num_owners),
            )
            for held in self._stages(layout)
            for rank in range(self.tp_size)
        ]

    def _stages(self, layout: PageLayout) -> Iterator[dict[RoleShape, tuple[int, int]]]:
        last = len(self.stages) - 1
        for stage, layers in enumerate(pairwise(accumulate(self.stages, initial=0))):
            yield {
                shape: layers if shape.role is Role.TARGET else (0, shape.num_layers)
                for shape in layout.roles
                if shape.role is Role.TARGET or stage == last
            }

    def _holding(self, shape: RoleShape, layers: tuple[int, int], rank: int) -> Holding:
        heads, replica, num_replicas = held_heads(shape.num_heads, self.tp_size, rank)
        return Holding(shape.role, layers, heads, replica, num_replicas)


def layout_of(num_layers: int, num_heads: int, grid: Grid, slab_bytes: int = 8, blocks_per_page: int = 1) -> PageLayout:
    """A model without a draft."""
    shape = RoleShape(Role.TARGET, num_layers, num_heads, slab_bytes)
    return PageLayout((shape,), BLOCK_TOKENS, BLOCK_TOKENS * blocks_per_page, grid)


def inventories(ranks: list[RankGeometry], num_rows: int = 10, encoding: str = "made-up") -> list[Inventory]:
    return [
        Inventory(number, rank.holdings, rank.layout, rank.slot_bytes, num_rows, {Role.TARGET: encoding}, rank.shard)
        for number, rank in enumerate(ranks)
    ]


def divisors(number: int, most: int = 64) -> list[int]:
    return [each for each in range(1, min(number, most) + 1) if number % each == 0]


def tensor_sizes(roles: tuple[RoleShape, ...]) -> list[int]:
    """Of 1 to 16 tensor ranks, those that vLLM can share the heads among."""
    heads = [shape.num_heads for shape in roles]
    return [size for size in range(1, 17) if all(count % size == 0 or size % count == 0 for count in heads)]


@st.composite
def partitions(draw: st.DrawFn, total: int, most_parts: int) -> tuple[int, ...]:
    """Lengths of 1 to `most_parts` contiguous parts of `total`, equal or not."""
    num_borders = draw(st.integers(0, min(most_parts, total) - 1))
    borders = draw(st.sets(st.integers(1, total - 1), min_size=num_borders, max_size=num_borders)) if total > 1 else ()
    return tuple(stop - start for start, stop in pairwise([0, *sorted(borders), total]))


@st.composite
def role_shapes(draw: st.DrawFn) -> tuple[RoleShape, ...]:
    """The target's layers, one head as MLA has it among them, and sometimes a draft's."""
    heads = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
    shapes = [RoleShape(Role.TARGET, draw(st.integers(1, 12)), draw(heads), draw(st.sampled_from([8, 24, 96])))]
    if draw(st.booleans()):
        draft_heads = draw(st.sampled_from(divisors(shapes[0].num_heads)))
        shapes.append(RoleShape(Role.DRAFT, draw(st.integers(1, 3)), draft_heads, draw(st.sampled_from([8, 40]))))
    return tuple(shapes)


@st.composite
def cuts(draw: st.DrawFn, roles: tuple[RoleShape, ...]) -> Cut:
    """Any cut of these layers that vLLM could run."""
    return Cut(draw(st.sampled_from(tensor_sizes(roles))), draw(partitions(roles[0].num_layers, 8)))


@st.composite
def layouts(draw: st.DrawFn, roles: tuple[RoleShape, ...], cut: Cut | None = None) -> PageLayout:
    """Any layout of these layers; with a cut, one of which every rank of the cut has whole cells."""
    target = roles[0]
    counts = draw(partitions(target.num_layers, 8))
    groups = draw(st.sampled_from(divisors(target.num_heads)))
    if cut is not None:
        borders = {*accumulate(cut.stages), *draw(st.sets(st.sampled_from([*accumulate(counts)])))}
        counts = tuple(stop - start for start, stop in pairwise([0, *sorted(borders)]))
        least = min(cut.tp_size, target.num_heads)
        groups = draw(st.sampled_from([each for each in divisors(target.num_heads) if each % least == 0]))
    grid = Grid(len(counts), groups, counts)
    if draw(st.booleans()) and grid.shape.layer_bounds(target.num_layers) == grid.layer_bounds(target.num_layers):
        grid = grid.shape
    return PageLayout(roles, BLOCK_TOKENS, BLOCK_TOKENS * draw(st.integers(1, 3)), grid)


def held_places(rank: RankGeometry) -> Iterator[tuple[Role, int, int]]:
    """(role, layer, head) of all that a rank holds, from its holdings alone."""
    for holding in rank.holdings:
        for layer in range(*holding.layers):
            for head in range(*holding.heads):
                yield holding.role, layer, head


def role_chunks(store: Store, layout: PageLayout, namespace: bytes) -> RoleChunks:
    """All roles of a layout in one namespace: their objects are told apart by name."""
    return RoleChunks({shape.role: ChunkStore(store, namespace, layout.grid_of(shape)) for shape in layout.roles})
