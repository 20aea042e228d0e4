"""Ranks that hold the same KV and share out its pages: devices of their own, and host memory that is kept once.

What a page is, `source` says: it lies there in blocks that no rank's device has, and every slot and block that is to
hold it is compared with them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from layout_kit import role_chunks
from thread_collective import Meeting, ThreadCollective
from transfer_fixtures import (
    NAMESPACE,
    PATIENCE_S,
    POISON,
    REQUEST,
    Layout,
    Rig,
    Tensors,
    WatchedCopier,
    WatchedStore,
    block_bytes,
    device_tensors,
    key,
    move,
    page_bytes,
)

from vllm_hicache.geometry import RankGeometry
from vllm_hicache.grid import Grid
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import MissReason, OpId, Phase, RequestId, Role, Slot
from vllm_hicache.namespace import Spaces
from vllm_hicache.ownership import Ownership, Shard
from vllm_hicache.plan import Ack, FlushOp, LoadOp, OpReport, PageMove, SaveOp
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.chunks import RoleChunks
from vllm_hicache.storage.envelope import ChunkId
from vllm_hicache.transfer.copier import CpuCopier
from vllm_hicache.transfer.engine import TransferEngine
from vllm_hicache.transfer.exchange import PageExchange
from vllm_hicache.transfer.host import HostPool

NUM_PAGES = 12
LAYOUT = Layout(layers=2, heads=2, blocks=2 * NUM_PAGES + 6, block_tokens=2, head_size=2, draft_layers=1)
SMALLEST = Layout(layers=1, heads=1, blocks=2, block_tokens=1, head_size=1)
CPU = torch.device("cpu")


class Member(Rig):
    """One rank of a group, all of whose bytes are poison; it holds the whole model, as the others do."""

    def __init__(
        self,
        shard: Shard,
        num_rows: int,
        layout: Layout,
        blocks_per_page: int,
        grid: Grid,
        replica: tuple[int, int],
        has_sidecar: bool = False,
    ) -> None:
        super().__init__(layout, blocks_per_page, grid, 1, 1, (0, layout.layers), (0, layout.heads), replica)
        self.geometry: RankGeometry = replace(self.geometry, shard=shard, has_sidecar=has_sidecar)
        self.pool = HostPool(num_rows, *self.geometry.region_bytes, shard=shard)
        self.copier = CpuCopier(self.cache, self.pool, self.geometry)
        self.poison_device()
        self.poison_slots()

    def slot(self, slot: int) -> bytes:
        return b"".join(region.numpy().tobytes() for region in self.pool.content(Slot(slot)))

    def put(self, slot: int, content: bytes) -> None:
        whole = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
        for region, part in zip(self.pool.content(Slot(slot)), self.pool.by_region(whole), strict=True):
            region.copy_(part)

    def poison_slots(self) -> None:
        for region in self.pool.regions:
            region.fill_(POISON)

    @property
    def host(self) -> bytes:
        """All of its host memory."""
        return b"".join(region.numpy().tobytes() for region in self.pool.regions)


class Group:
    """Ranks that hold the same, with a chain of pages.

    Args:
        rotation: owner of the chain's first page.
        num_ranks: a multiple of the owners; as many where it is not given.
        is_held: whether the pages are in host memory, each on its owner.
        has_sidecar: whether the draft's half of them has a region of its own there.
    """

    def __init__(
        self,
        num_owners: int = 2,
        rotation: int = 0,
        num_pages: int = NUM_PAGES,
        layout: Layout = LAYOUT,
        blocks_per_page: int = 2,
        grid: Grid = Grid(),
        on_device: bool = False,
        num_ranks: int | None = None,
        is_held: bool = True,
        has_sidecar: bool = False,
    ) -> None:
        self.num_owners, self.rotation, self.num_pages = num_owners, rotation, num_pages
        self.blocks_per_page, self.grid = blocks_per_page, grid
        self.source: Tensors = device_tensors(replace(layout, blocks=blocks_per_page * num_pages), seed=7)
        self.num_rows = -(-num_pages // num_owners) + 1
        ownership, num_ranks = Ownership(num_owners, on_device), num_ranks or num_owners
        self.members = [
            Member(
                Shard(ownership, n % num_owners),
                self.num_rows,
                layout,
                blocks_per_page,
                grid,
                (n, num_ranks),
                has_sidecar,
            )
            for n in range(num_ranks)
        ]
        for member in self.members if is_held else ():
            for page in self.owned_by(member):
                member.put(self.slot(page), self.content(page))

    def owner(self, page: int) -> int:
        return (page + self.rotation) % self.num_owners

    def owned_by(self, member: Member) -> list[int]:
        return [page for page in range(self.num_pages) if self.owner(page) == member.pool.shard.owner]

    def slot(self, page: int) -> int:
        """Some slot of the page's owner."""
        owner = self.owner(page)
        return (page // self.num_owners + owner) % self.num_rows * self.num_owners + owner

    def content(self, page: int) -> bytes:
        """What a slot with this page holds."""
        first = page * self.blocks_per_page
        return page_bytes(self.source, range(first, first + self.blocks_per_page), self.grid)

    def targets(self, page: int) -> list[int]:
        """Device blocks to which a load brings a page: the last page to the first ones."""
        first = (self.num_pages - 1 - page) * self.blocks_per_page
        return list(range(first, first + self.blocks_per_page))

    def compute(self) -> None:
        """Every rank's device gets every page, in the blocks from which `sources` saves them."""
        for member in self.members:
            for name, tensor in self.source.items():
                member.tensors[name][: len(tensor)] = tensor

    def sources(self, start: int, stop: int) -> tuple[PageMove, ...]:
        each = self.blocks_per_page
        return tuple(move(page, self.slot(page), range(page * each, (page + 1) * each)) for page in range(start, stop))

    def move(self, page: int, from_store: bool = False) -> PageMove:
        return move(page, self.slot(page), self.targets(page), 0, from_store)

    def moves(self, start: int, stop: int, from_store: bool = False) -> tuple[PageMove, ...]:
        return tuple(self.move(page, from_store) for page in range(start, stop))

    def pages_on(self, member: Member) -> set[int]:
        """Pages that are whole in their target blocks; every other block must be poison."""
        found, touched = set(), set[int]()
        for page in range(self.num_pages):
            first = page * self.blocks_per_page
            wanted = [block_bytes(self.source, first + position) for position in range(self.blocks_per_page)]
            if [member.block(block) for block in self.targets(page)] == wanted:
                found.add(page)
                touched.update(self.targets(page))
        poison = bytes([POISON]) * len(member.block(0))
        assert set(member.blocks(besides=list(touched)).values()) <= {poison}, "a block is neither a page nor poison"
        return found

    def collectives(self, timeout_s: float = PATIENCE_S) -> list[ThreadCollective]:
        meeting = Meeting(self.num_owners, timeout_s)
        return [ThreadCollective(rank, meeting) for rank in range(self.num_owners)]

    def exchanges(self, collectives: Sequence[ThreadCollective]) -> list[PageExchange]:
        """One for each rank, whose headers and pages go the same way."""
        return [
            PageExchange(collective, collective, member.pool, member.copier, CPU)
            for collective, member in zip(collectives, self.members, strict=True)
        ]


class RankEngine:
    """The transfer engine of one member, and the latest that it has told of each operation."""

    def __init__(self, rank: int, member: Member, store: Store, exchange: PageExchange | None) -> None:
        self.member = member
        self.chunks: RoleChunks | None = role_chunks(store, member.geometry.layout, NAMESPACE)
        self.copier = WatchedCopier(member.copier)
        self.metrics = Metrics()
        self.engine = TransferEngine(rank, member.pool, member.geometry, self.copier, self.metrics, 2, 1, 64, exchange)
        self.told: dict[int, OpReport] = {}
        self.counted: Counter[str] = Counter()
        self.health: float | None = None

    def collect(self) -> list[OpReport]:
        reports = self.engine.collect()
        for report in reports:
            before = self.told.get(report.op)
            assert before is None or before.phase < Phase.SETTLED, "an operation was reported after it had settled"
            self.told[report.op] = report
        drained = self.metrics.drain()
        self.health = drained.get("healthy", self.health)
        self.counted.update({name: int(value) for name, value in drained.items() if "seconds" not in name})
        return reports

    def load(
        self,
        op: int,
        pages: Sequence[PageMove],
        time_limit_s: float | None = None,
        request: RequestId | None = REQUEST,
        vouched: int | None = None,
    ) -> None:
        whole = LoadOp(OpId(op), Spaces(NAMESPACE), request, tuple(pages), time_limit_s)
        self.engine.load(whole, self.chunks, self.engine.fence(), vouched)

    def save(self, op: int, pages: Sequence[PageMove], vouched: int | None = None) -> None:
        self.engine.save(SaveOp(OpId(op), tuple(pages)), self.engine.fence(), vouched)

    def flush(self, op: int, pages: Sequence[PageMove], vouched: int | None = None) -> None:
        self.engine.flush(FlushOp(OpId(op), Spaces(NAMESPACE), tuple(pages)), self.chunks, vouched)

    def bytes_moved(self) -> dict[str, int]:
        """By direction."""
        return {name.split("|")[1]: count for name, count in self.counted.items() if name.startswith("bytes|")}


class Team:
    """The engines of a group; nothing is acknowledged unless a test does it."""

    def __init__(self, group: Group, store: Store, timeout_s: float = PATIENCE_S) -> None:
        self.group = group
        self.collectives = group.collectives(timeout_s)
        on_device = group.members[0].pool.shard.ownership.on_device
        exchanges = [None] * len(group.members) if on_device else group.exchanges(self.collectives)
        self.ranks = [RankEngine(n, each, store, exchanges[n]) for n, each in enumerate(group.members)]

    def until(self, condition: Callable[[], bool]) -> None:
        """Collect on every rank, as an engine does once a step, until it holds."""
        deadline = time.monotonic() + PATIENCE_S
        while [rank.collect() for rank in self.ranks] and not condition():
            assert time.monotonic() < deadline, [(rank.told, rank.counted) for rank in self.ranks]

    def reports(self, op: int, phase: Phase = Phase.SETTLED) -> list[OpReport]:
        """What every rank says of an operation once it has come so far."""
        self.until(lambda: all(op in rank.told and rank.told[op].phase >= phase for rank in self.ranks))
        return [rank.told[op] for rank in self.ranks]

    def lengths(self, op: int) -> list[tuple[int, MissReason | None]]:
        """Pages done, and why they are not all, of every rank once an operation has settled."""
        return [(report.pages_done, report.reason) for report in self.reports(op)]

    def until_held(self, op: int, num_pages: int) -> None:
        """Wait for as many pages to be in host memory on every rank."""
        self.until(lambda: all(op in rank.told and rank.told[op].pages_held >= num_pages for rank in self.ranks))

    def acknowledge(
        self,
        op: int,
        num_held: int,
        phase: Phase = Phase.RUNNING,
        num_done: int = 0,
        reason: MissReason | None = None,
    ) -> None:
        for rank in self.ranks:
            rank.engine.acknowledged(Ack(OpId(op), num_done, num_held, phase, reason))

    def num_gathers(self) -> list[int]:
        return [collective.num_gathers for collective in self.collectives]

    def pages(self) -> list[set[int]]:
        """Pages on every rank's device."""
        return [self.group.pages_on(rank.member) for rank in self.ranks]

    def close(self) -> None:
        for collective in self.collectives:
            collective.close()
        for rank in self.ranks:
            rank.engine.close(PATIENCE_S)


MakeTeam = Callable[..., Team]


def stored(team: Team, store: WatchedStore) -> None:
    """Bring every page to the store, then poison host memory."""
    for rank in team.ranks:
        rank.flush(100, team.group.moves(0, NUM_PAGES))
    assert team.lengths(100) == [(NUM_PAGES, None)] * len(team.ranks)
    for rank in team.ranks:
        rank.member.poison_slots()
        rank.counted.clear()
    store.calls.clear()


def load(team: Team, op: int, start: int, stop: int, from_store: bool = False, **how: object) -> None:
    """The same load on every rank."""
    for rank in team.ranks:
        rank.load(op, team.group.moves(start, stop, from_store), **how)  # type: ignore[arg-type]


def forget(store: WatchedStore, page: int) -> None:
    """Remove a page from the store."""
    store.delete(ChunkId(key(page), 0, Role.TARGET, 0, 0).object_name(NAMESPACE))
