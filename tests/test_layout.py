"""The layout proof: what the ranks of one cut write, the ranks of any other cut read, byte for byte, on every store.

Each rank is real but for the engine: device blocks of its own, a host pool, the copier, and the objects of a store.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layout_kit import BLOCK_TOKENS, Cut, cuts, held_places, layout_of, layouts, role_shapes
from store_conformance import BACKENDS, POISON

from vllm_hicache.geometry import Cell, PageLayout, RankGeometry, UnitRun
from vllm_hicache.grid import Grid
from vllm_hicache.names import BlockId, MissReason, ObjectName, PageKey, Role, Slot
from vllm_hicache.plan import PageMove
from vllm_hicache.storage import chunks as chunks_module
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.storage.envelope import ChunkId
from vllm_hicache.storage.wrappers import StoreWrapper
from vllm_hicache.transfer.copier import CpuCopier
from vllm_hicache.transfer.device import DeviceCache
from vllm_hicache.transfer.host import HostPool

Page = dict[Role, npt.NDArray[np.uint8]]
"""The reference: by role, [layer][head][block of the page][slab bytes]."""

NUM_EXAMPLES = dict.fromkeys(BACKENDS, 15) | {"memory": 200, "file": 80}
NUM_SLOTS, NUM_BLOCKS = 3, 5
NAMESPACE, KEY = b"n" * 32, PageKey(b"k" * 32)


@dataclass(frozen=True)
class Recut:
    """A model, the cut that writes its page and the one that reads it."""

    layout: PageLayout
    writer: Cut
    reader: Cut
    key: PageKey
    seed: int
    reads_gaps: bool

    def page(self) -> Page:
        return made_up(self.layout, self.seed)


@st.composite
def recuts(draw: st.DrawFn) -> Recut:
    roles = draw(role_shapes())
    writer, key = draw(cuts(roles)), PageKey(draw(st.binary(min_size=32, max_size=32)))
    layout = draw(layouts(roles, writer))
    return Recut(layout, writer, draw(cuts(roles)), key, draw(st.integers(0, 1000)), draw(st.booleans()))


def made_up(layout: PageLayout, seed: int) -> Page:
    noise = np.random.default_rng(seed)
    return {
        shape.role: noise.integers(
            0, 256, (shape.num_layers, shape.num_heads, layout.blocks_per_page, shape.slab_bytes), np.uint8
        )
        for shape in layout.roles
    }


class Rank:
    """One rank's device cache and host pool, filled with poison."""

    def __init__(self, geometry: RankGeometry, slot: int, seed: int) -> None:
        self.geometry, self.slot = geometry, Slot(slot)
        self.layers = {holding.role: self._layers(holding.role) for holding in geometry.holdings}
        names = {Role.TARGET: "model.layers", Role.DRAFT: "draft_model.model.layers"}
        cache = DeviceCache.from_tensors(
            {
                f"{names[role]}.{number}.self_attn.attn": layer
                for role, layers in self.layers.items()
                for number, layer in enumerate(layers.unbind(0))
            },
            BLOCK_TOKENS,
        )
        self.pool = HostPool(NUM_SLOTS, geometry.slot_bytes)
        self.pool.regions[0].fill_(POISON)
        self.copier = CpuCopier(cache, self.pool, geometry)
        self.blocks = random.Random(seed).sample(range(NUM_BLOCKS), geometry.blocks_per_page)

    def _layers(self, role: Role) -> torch.Tensor:
        """[layers, blocks, heads, tokens, content], as the engine has it."""
        (holding,) = (each for each in self.geometry.holdings if each.role is role)
        (shape,) = (each for each in self.geometry.layout.roles if each.role is role)
        num_layers, num_heads = holding.layers[1] - holding.layers[0], holding.heads[1] - holding.heads[0]
        size = (num_layers, NUM_BLOCKS, num_heads, BLOCK_TOKENS, shape.slab_bytes // BLOCK_TOKENS)
        return torch.full(size, POISON, dtype=torch.uint8)

    @property
    def move(self) -> PageMove:
        return PageMove(KEY, self.slot, tuple(BlockId(block) for block in self.blocks))

    def compute(self, page: Page) -> None:
        """Write what a forward pass would: this rank's layers and heads, to its blocks."""
        for holding in self.geometry.holdings:
            own = page[holding.role][slice(*holding.layers), slice(*holding.heads)]
            for position, block in enumerate(self.blocks):
                layers = self.layers[holding.role][:, block]
                layers.copy_(torch.from_numpy(own[:, :, position].copy()).view_as(layers))

    def flush(self, chunks: ChunkStore, key: PageKey) -> list[ObjectName]:
        """Device to slot to store; the names of the objects it wrote."""
        self.copier.save((self.move,), None)
        written = []
        for part in self.geometry.parts:
            if self.geometry.writes(key, part):
                assert part.is_whole
                chunk = ChunkId.of(key, part.cell)
                assert chunks.save(chunk, self.pool.part(self.slot, part), part.cell.unit_bytes) is True
                written.append(chunk.object_name(NAMESPACE))
        return written

    def fetch(self, chunks: ChunkStore, key: PageKey) -> MissReason | None:
        """Store to slot, as far as the first miss."""
        for part in self.geometry.parts:
            payload, cell = self.pool.part(self.slot, part), part.cell
            if part.is_whole:
                reason = chunks.load(ChunkId.of(key, cell), payload, cell.unit_bytes)
            else:
                reason = chunks.load_part(ChunkId.of(key, cell), part.runs, payload, cell.unit_bytes, cell.num_units)
            if reason is not None:
                return reason
        return None

    def load(self) -> None:
        """Slot to device."""
        self.copier.load((self.move,), None)

    def check(self, page: Page) -> None:
        """Every byte of the page is in its place, and nothing else was touched."""
        for holding in self.geometry.holdings:
            expected = np.full(self.layers[holding.role].shape, POISON, np.uint8)
            own = page[holding.role][slice(*holding.layers), slice(*holding.heads)]
            for position, block in enumerate(self.blocks):
                expected[:, block] = own[:, :, position].reshape(expected[:, block].shape)
            np.testing.assert_array_equal(self.layers[holding.role].numpy(), expected)
        others = [slot for slot in range(NUM_SLOTS) if slot != self.slot]
        assert bool((self.pool.regions[0][others] == POISON).all())


def write(layout: PageLayout, writer: Cut, page: Page, chunks: ChunkStore, key: PageKey) -> list[list[ObjectName]]:
    """By rank of the writer, the names of the objects it wrote."""
    written = []
    for number, geometry in enumerate(writer.ranks(layout)):
        rank = Rank(geometry, slot=0, seed=number)
        rank.compute(page)
        written.append(rank.flush(chunks, key))
    return written


def read(layout: PageLayout, reader: Cut, page: Page, chunks: ChunkStore, key: PageKey) -> list[Rank]:
    """The reader's ranks, each with every byte of what it holds in other slots and blocks than the writer's."""
    ranks = [Rank(geometry, slot=2, seed=-1 - number) for number, geometry in enumerate(reader.ranks(layout))]
    for rank in ranks:
        assert rank.fetch(chunks, key) is None
        rank.load()
        rank.check(page)
    return ranks


def names_of(layout: PageLayout, key: PageKey) -> list[ObjectName]:
    return [ChunkId.of(key, cell).object_name(NAMESPACE) for cell in layout.cells]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_page_that_one_cut_wrote_is_read_under_any_other_byte_for_byte(tmp_path: Path, backend: str) -> None:
    with BACKENDS[backend](tmp_path) as store:

        @settings(
            max_examples=NUM_EXAMPLES[backend],
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
            database=None,
        )
        @given(recuts())
        def prove(recut: Recut) -> None:
            layout, page, names = recut.layout, recut.page(), names_of(recut.layout, recut.key)
            chunks = ChunkStore(store, NAMESPACE, layout.grid)
            for name in names:
                store.delete(name)
            written = write(layout, recut.writer, page, chunks, recut.key)
            assert sorted(chain(*written)) == sorted(names)
            assert store.exists(names) == [True] * len(names)
            with mock.patch.object(chunks_module, "MOST_GAP_BYTES", (1 << 20) * recut.reads_gaps):
                read(layout, recut.reader, page, chunks, recut.key)

        prove()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with BACKENDS["memory"](tmp_path) as store:
        yield store


def test_four_by_two_ranks_write_eight_objects_and_two_ranks_take_four_each(store: Store) -> None:
    layout = layout_of(60, 8, Grid(2, 4), blocks_per_page=2)
    page, chunks = made_up(layout, 1), ChunkStore(store, NAMESPACE, layout.grid)
    written = write(layout, Cut(4, (30, 30)), page, chunks, KEY)
    assert [len(of_rank) for of_rank in written] == [1] * 8
    assert {info.name for info in store.list("")} == set(names_of(layout, KEY))
    ranks = read(layout, Cut(2, (60,)), page, chunks, KEY)
    assert [[part.is_whole for part in rank.geometry.parts] for rank in ranks] == [[True] * 4] * 2


def test_heads_four_and_five_of_the_second_half_of_the_layers_are_one_range_of_object_and_slot(store: Store) -> None:
    layout = layout_of(60, 8, Grid(2, 4), blocks_per_page=2)
    page, chunks = made_up(layout, 2), ChunkStore(store, NAMESPACE, layout.grid)
    write(layout, Cut(4, (30, 30)), page, chunks, KEY)
    expected = page[Role.TARGET][30:60, 4:6].swapaxes(0, 1).tobytes()
    (cell,) = (cell for cell in layout.cells if (cell.first_layer, cell.first_head) == (30, 4))
    (part,) = (part for part in Cut(2, (60,)).ranks(layout)[1].parts if part.cell == cell)
    rank = read(layout, Cut(2, (60,)), page, chunks, KEY)[1]
    slot = rank.pool.regions[0][rank.slot].numpy().tobytes()
    assert slot[part.offset : part.offset + part.num_bytes] == expected
    assert content(store, ChunkId.of(KEY, cell)).endswith(expected)
    assert (part.runs, len(expected)) == ((UnitRun(0, 0, 60),), cell.num_bytes)


def test_stages_of_31_and_30_layers_write_an_object_each_that_stages_of_16_and_15_read(store: Store) -> None:
    layout = layout_of(61, 4, Grid(2, 1))
    assert [(cell.first_layer, cell.num_layers) for cell in layout.cells] == [(0, 31), (31, 30)]
    page, chunks = made_up(layout, 3), ChunkStore(store, NAMESPACE, layout.grid)
    assert [len(of_rank) for of_rank in write(layout, Cut(1, (31, 30)), page, chunks, KEY)] == [1, 1]
    ranks = read(layout, Cut(1, (15, 15, 16, 15)), page, chunks, KEY)
    assert [len(rank.geometry.parts) for rank in ranks] == [1, 1, 2, 1]
    read(layout, Cut(2, (61,)), page, chunks, KEY)


def test_of_replicas_exactly_one_writes_a_page_and_all_read_it(store: Store) -> None:
    layout = layout_of(3, 2, Grid(1, 2))
    page, chunks = made_up(layout, 4), ChunkStore(store, NAMESPACE, layout.grid)
    for replica in range(4):
        key = PageKey(bytes([replica]) + bytes(31))
        written = write(layout, Cut(8, (3,)), page, chunks, key)
        assert [number for number, of_rank in enumerate(written) if of_rank] == [replica, 4 + replica]
        read(layout, Cut(8, (3,)), page, chunks, key)
        read(layout, Cut(1, (2, 1)), page, chunks, key)


def test_one_latent_head_is_shared_by_every_tensor_rank(store: Store) -> None:
    layout = layout_of(5, 1, Grid(5, 1), slab_bytes=1152)
    page, chunks = made_up(layout, 5), ChunkStore(store, NAMESPACE, layout.grid)
    written = write(layout, Cut(16, (3, 2)), page, chunks, KEY)
    assert sorted(chain(*written)) == sorted(names_of(layout, KEY))
    read(layout, Cut(1, (1, 4)), page, chunks, KEY)


class Keeping(StoreWrapper):
    """Removes nothing, so that every rank meets the same damage."""

    def delete(self, name: ObjectName) -> bool:
        return False


def content(store: Store, chunk: ChunkId) -> bytes:
    name = chunk.object_name(NAMESPACE)
    data = bytearray(store.read(name, []))
    store.read(name, [memoryview(data)])
    return bytes(data)


def replace(store: Store, chunk: ChunkId, data: bytes) -> None:
    store.delete(chunk.object_name(NAMESPACE))
    store.write(chunk.object_name(NAMESPACE), [memoryview(data)])


def sees(rank: RankGeometry, cell: Cell, payload_byte: int) -> bool:
    """Whether this rank reads that byte of the cell's object; negative bytes are the header's. From holdings alone."""
    held = set(held_places(rank))
    heads = range(cell.first_head, cell.first_head + cell.num_heads)
    layers = range(cell.first_layer, cell.first_layer + cell.num_layers)
    units = [(cell.role, layer, head) for head in heads for layer in layers]
    if payload_byte < 0:
        return not held.isdisjoint(units)
    return units[payload_byte // cell.unit_bytes] in held


def test_a_flipped_byte_is_a_miss_of_exactly_the_ranks_that_read_it(store: Store) -> None:
    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
    @given(recuts(), st.data())
    def prove(recut: Recut, data: st.DataObject) -> None:
        layout, page = recut.layout, recut.page()
        for name in names_of(layout, recut.key):
            store.delete(name)
        chunks = ChunkStore(Keeping(store), NAMESPACE, layout.grid)
        write(layout, recut.writer, page, chunks, recut.key)
        cell = data.draw(st.sampled_from(layout.cells))
        chunk = ChunkId.of(recut.key, cell)
        stored = bytearray(content(store, chunk))
        at = data.draw(st.integers(0, len(stored) - 1))
        stored[at] ^= data.draw(st.integers(1, 255))
        replace(store, chunk, stored)
        with mock.patch.object(chunks_module, "MOST_GAP_BYTES", (1 << 20) * recut.reads_gaps):
            for geometry in recut.reader.ranks(layout):
                rank, is_seen = Rank(geometry, 2, 0), sees(geometry, cell, at - (len(stored) - cell.num_bytes))
                reason = rank.fetch(chunks, recut.key)
                assert (reason in (MissReason.CORRUPT, MissReason.VERSION)) == is_seen
                if reason is None:
                    rank.load()
                    rank.check(page)

    prove()


def test_a_damaged_object_is_removed_by_whoever_reads_a_part_of_it_and_written_anew(store: Store) -> None:
    layout = layout_of(4, 4, Grid(1, 2))
    page, chunks, chunk = (
        made_up(layout, 6),
        ChunkStore(store, NAMESPACE, layout.grid),
        ChunkId(KEY, 0, Role.TARGET, 0, 1),
    )
    write(layout, Cut(2, (4,)), page, chunks, KEY)
    replace(store, chunk, content(store, chunk)[:-1] + b"?")
    ranks = [Rank(geometry, 2, 0) for geometry in Cut(4, (4,)).ranks(layout)]
    assert [rank.fetch(chunks, KEY) for rank in ranks] == [None, None, None, MissReason.CORRUPT]
    assert [rank.fetch(chunks, KEY) for rank in ranks] == [None, None, MissReason.ABSENT, MissReason.ABSENT]
    for rank in (Rank(geometry, 0, 0) for geometry in Cut(2, (4,)).ranks(layout)[1:]):
        rank.compute(page)
        rank.flush(chunks, KEY)
    read(layout, Cut(4, (4,)), page, chunks, KEY)
