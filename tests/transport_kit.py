"""A rank whose pages are served, and one that reads them into a pool of its own, over either transport.

Thread: the test's; pages are served on the server's own threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from transfer_fixtures import NAMESPACE, POISON, move

from vllm_hicache.config import PeerTransport
from vllm_hicache.geometry import Holding, PageLayout, Part, RankGeometry, RoleShape
from vllm_hicache.grid import Grid
from vllm_hicache.handoff.nixl_link import MemoryRange, NixlMemory, NixlReader
from vllm_hicache.handoff.nixl_store import NixlStore
from vllm_hicache.handoff.server import PageServer
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import MissReason, OpId, Role, Slot
from vllm_hicache.namespace import Spaces
from vllm_hicache.plan import ExportOp
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.storage.envelope import XXH3, ChunkId
from vllm_hicache.storage.redis import Layout, RedisStore
from vllm_hicache.storage.redis_nodes import FixedNode
from vllm_hicache.storage.redis_pool import Address, Login, WirePool
from vllm_hicache.transfer.host import HostPool

HOST = "127.0.0.1"
SECRET = "secret"
PATIENCE_S = 30.0
NUM_SLOTS = 6
SPACES = Spaces(NAMESPACE)
CUT = Grid(1, 2)
SHAPE = RoleShape(Role.TARGET, num_layers=5, num_heads=4, slab_bytes=4096)
GEOMETRY = RankGeometry(PageLayout((SHAPE,), 4, 8, CUT), (Holding(Role.TARGET, (0, 5), (0, 4)),))
"""Two cells of [2 heads][5 layers] units of 8 KiB."""
UNIT_BYTES = 2 * 4096
NUM_UNITS = 10
PAGES = tuple(move(page, slot) for page, slot in enumerate((4, 0, 3)))
PART = GEOMETRY.parts[0]
BOTH = [None, None]
"""What loading both cells of a page says where they are there."""


def ranges(pool: HostPool) -> list[MemoryRange]:
    """Where all slots of a pool lie."""
    return [MemoryRange.of(memoryview(region.numpy())) for region in pool.regions]


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"{what} has not come in {PATIENCE_S} s"
        time.sleep(0.002)


class Served:
    """A pool of random bytes of which three pages are served, as operation 1. `ended` is what the server has told."""

    def __init__(self, memory: bool, wait_s: float = 0.05, seed: int = 0) -> None:
        self.pool = HostPool(NUM_SLOTS, *GEOMETRY.region_bytes)
        rng = np.random.default_rng(seed)
        for region in self.pool.regions:
            region.numpy()[:] = rng.integers(0, 256, region.shape, dtype=np.uint8)
        self.memory = NixlMemory(ranges(self.pool)) if memory else None
        self.ended: list[OpId] = []
        self.metrics = Metrics()
        self.server = PageServer(
            self.pool,
            GEOMETRY,
            XXH3,
            SECRET,
            wait_s,
            self.metrics,
            self.ended.append,
            lambda request: None,
            HOST,
            memory=self.memory,
        )
        self.server.export(ExportOp(OpId(1), SPACES, PAGES), len(PAGES))

    def content(self, page: int, part: Part) -> memoryview:
        """What a page holds of a cell, in place."""
        return self.pool.part(PAGES[page].slot, part)

    @property
    def num_open(self) -> int:
        """Reads that are begun and not ended."""
        return sum(export.num_reading for export in self.server._exports.values())

    def close(self) -> None:
        self.server.close()
        if self.memory is not None:
            self.memory.close()


class Reading:
    """A poisoned pool, and stores that read into it."""

    def __init__(self, transport: PeerTransport) -> None:
        self.pool = HostPool(NUM_SLOTS, *GEOMETRY.region_bytes)
        self.poison()
        self.reader = NixlReader(ranges(self.pool)) if transport is PeerTransport.NIXL else None
        self._stores: list[Store] = []

    def store(self, served: Served, timeout_s: float = PATIENCE_S, secret: str = SECRET) -> Store:
        address, wires = Address(HOST, served.server.port), WirePool(Login(password=secret), 8)
        layout = Layout(f"the engine at {address}", "")
        if self.reader is None:
            store: Store = RedisStore(layout, FixedNode(address), wires, timeout_s)
        else:
            store = NixlStore(layout, address, wires, self.reader, timeout_s)
        self._stores.append(store)
        return store

    def chunks(self, store: Store) -> ChunkStore:
        return ChunkStore(store, NAMESPACE, CUT)

    def part(self, slot: int, part: Part) -> memoryview:
        return self.pool.part(Slot(slot), part)

    def poison(self) -> None:
        for region in self.pool.regions:
            region.fill_(POISON)

    def touched(self) -> set[int]:
        """Slots that hold anything but poison."""
        return {
            slot
            for slot in range(NUM_SLOTS)
            if any((each != POISON).any().item() for each in self.pool.content(Slot(slot)))
        }

    def close(self) -> None:
        for store in self._stores:
            store.close()
        if self.reader is not None:
            self.reader.close()


@contextmanager
def link(transport: PeerTransport, wait_s: float = 0.05) -> Iterator[tuple[Served, Reading]]:
    """Both ends. Skips where NIXL is not installed."""
    if transport is PeerTransport.NIXL:
        pytest.importorskip("nixl._api", exc_type=ImportError)
    with ExitStack() as closing:
        served = Served(transport is PeerTransport.NIXL, wait_s)
        closing.callback(served.close)
        reading = Reading(transport)
        closing.callback(reading.close)
        yield served, reading


def load(reading: Reading, chunks: ChunkStore, page: int, slot: int) -> list[MissReason | None]:
    """Load every cell of a page into a slot; why not."""
    return [
        chunks.load(ChunkId.of(PAGES[page].key, part.cell), reading.part(slot, part), UNIT_BYTES)
        for part in GEOMETRY.parts
    ]


def same(served: Served, reading: Reading, page: int, slot: int) -> bool:
    return all(served.content(page, part) == reading.part(slot, part) for part in GEOMETRY.parts)


def names() -> Sequence[str]:
    """Those of all objects, by page and cell."""
    return [ChunkId.of(page.key, part.cell).object_name(NAMESPACE) for page in PAGES for part in GEOMETRY.parts]
