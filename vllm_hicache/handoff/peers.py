"""Other engines whose ranks serve pages: who has which cell, and how to read it.

Each rank of an engine keeps one. Thread: any.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from vllm_hicache.errors import StoreError
from vllm_hicache.geometry import Holding, PageLayout, RankGeometry, UnitRun, turn_of
from vllm_hicache.handoff.nixl_link import NixlReader
from vllm_hicache.handoff.nixl_store import NixlStore
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import MissReason, ObjectName, Role
from vllm_hicache.namespace import Spaces
from vllm_hicache.plan import Peer, PeerRank
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.storage.envelope import ChunkId, Sealer
from vllm_hicache.storage.redis import Layout, RedisStore
from vllm_hicache.storage.redis_nodes import FixedNode
from vllm_hicache.storage.redis_pool import Address, Login, WirePool
from vllm_hicache.storage.wrappers import Metered, StoreCall

logger = logging.getLogger(__name__)

ACKNOWLEDGEMENT = "request/"
"""Removing the object of this name and a prompt's, quoted as in a URL, says that nothing more of it will be read."""

_MOST_RANKS = 256
_Cell = tuple[Role, int, int]


@dataclass(frozen=True, slots=True)
class PeerAccess:
    """How other engines are read.

    Attributes:
        password: what a reader says first; `None` where there is none.
        sealer: that of all engines.
        timeout_s: limit of every call, seconds. A page that its engine is still computing is waited for.
        num_connections: to each rank.
        reads: whether prompts of others are taken over; else this engine's are served alone.
    """

    password: str | None
    sealer: Sealer
    timeout_s: float
    num_connections: int
    reads: bool = True


class PeerChunks:
    """The chunks that a peer's ranks serve, as `ChunkStore` has those of a store.

    Of ranks that hold the same cell one that has the page is read, for they may have shared out their pages; each page
    begins with another one.
    """

    def __init__(self, by_cell: dict[_Cell, list[ChunkStore]]) -> None:
        self._by_cell = by_cell

    def load(self, chunk: ChunkId, payload: memoryview, unit_bytes: int) -> MissReason | None:
        """See `ChunkStore.load`."""
        return self._first(chunk, lambda store: store.load(chunk, payload, unit_bytes))

    def load_part(
        self, chunk: ChunkId, runs: Sequence[UnitRun], payload: memoryview, unit_bytes: int, num_units: int
    ) -> MissReason | None:
        """See `ChunkStore.load_part`."""
        return self._first(chunk, lambda store: store.load_part(chunk, runs, payload, unit_bytes, num_units))

    def _first(self, chunk: ChunkId, load: Callable[[ChunkStore], MissReason | None]) -> MissReason | None:
        reason: MissReason | None = MissReason.ABSENT
        stores = self._by_cell.get((chunk.role, chunk.layer_group, chunk.head_group), [])
        first = turn_of(chunk.page_key, len(stores)) if stores else 0
        for store in stores[first:] + stores[:first]:
            reason = load(store)
            if reason is not MissReason.ABSENT:
                break
        return reason


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank that has been read: its store, and what was worked out of it for holdings and namespaces."""

    store: Store
    chunks: dict[tuple[tuple[Holding, ...], Spaces], list[tuple[_Cell, ChunkStore]]] = field(default_factory=dict)


class Peers:
    """Opens peers; their connections are kept.

    Args:
        layout: the whole model's page, which peers cut alike: the namespace says so.
        reader: reads payloads over NIXL where it is given; closed by its owner, after `close`.
    """

    def __init__(
        self, layout: PageLayout, access: PeerAccess, metrics: Metrics, reader: NixlReader | None = None
    ) -> None:
        self._layout = layout
        self._access = access
        self._metrics = metrics
        self._reader = reader
        self._lock = threading.Lock()
        self._ranks: OrderedDict[tuple[str, int], _Rank] = OrderedDict()

    def chunks(self, peer: Peer, spaces: Spaces) -> PeerChunks:
        """What a peer serves under these namespaces. Nothing is connected yet."""
        by_cell: dict[_Cell, list[ChunkStore]] = {}
        for rank in peer.ranks:
            opened = self._open(rank)
            about = (rank.holdings, spaces)
            if about not in opened.chunks:
                opened.chunks[about] = list(self._held(opened.store, *about))
            for cell, chunks in opened.chunks[about]:
                by_cell.setdefault(cell, []).append(chunks)
        return PeerChunks(by_cell)

    def acknowledge(self, peer: Peer) -> None:
        """Tell a peer that nobody reads a prompt's pages any more; its first rank tells the others."""
        try:
            self._open(peer.ranks[0]).store.delete(ObjectName(ACKNOWLEDGEMENT + quote(peer.request, safe="")))
        except StoreError as error:  # the lease on the pages runs out instead
            logger.warning("A peer was not told that its pages have been read: %s", error)

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            ranks, self._ranks = list(self._ranks.values()), OrderedDict()
        for rank in ranks:
            rank.store.close()

    def _held(self, store: Store, holdings: tuple[Holding, ...], spaces: Spaces) -> Iterator[tuple[_Cell, ChunkStore]]:
        """The whole cells among a rank's holdings, and where to read them."""
        digests = {Role.TARGET: spaces.target, Role.DRAFT: spaces.draft}
        by_role = {
            shape.role: ChunkStore(store, digest, self._layout.grid_of(shape), self._access.sealer)
            for shape in self._layout.roles
            if (digest := digests[shape.role]) is not None
        }
        for part in RankGeometry(self._layout, holdings).parts:
            cell = part.cell
            if part.is_whole and cell.role in by_role:
                yield (cell.role, cell.layer_group, cell.head_group), by_role[cell.role]

    def _open(self, rank: PeerRank) -> _Rank:
        place = (rank.host, rank.port)
        with self._lock:
            if place not in self._ranks:
                self._ranks[place] = _Rank(self._new(rank))
            self._ranks.move_to_end(place)
            surplus = self._ranks.popitem(last=False)[1] if len(self._ranks) > _MOST_RANKS else None
            opened = self._ranks[place]
        if surplus is not None:
            surplus.store.close()
        return opened

    def _new(self, rank: PeerRank) -> Store:
        layout = Layout(f"the engine at {rank.host}:{rank.port}", "")
        wires = WirePool(Login(password=self._access.password), self._access.num_connections)
        address, timeout_s = Address(rank.host, rank.port), self._access.timeout_s
        if self._reader is not None:
            return Metered(NixlStore(layout, address, wires, self._reader, timeout_s), self._count)
        store = RedisStore(layout, FixedNode(address), wires, timeout_s)
        return Metered(store, self._count)

    def _count(self, call: StoreCall) -> None:
        if call.num_bytes:
            self._metrics.count("peer_bytes", "received", call.num_bytes)
