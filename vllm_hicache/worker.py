"""The worker half: carries out plans on one rank.

One per rank, used on that rank's engine thread. It owns the host pool and the transfer engine and decides
nothing: what to move comes with the plan, what came of it goes back with the report, and what all ranks have agreed
on is consumed when the plan acknowledges it. A rank that is alone agrees with itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import gcd
from pathlib import Path

import torch

from vllm_hicache.config import Config, Consensus, DraftTier, HostTier, PeerTransport
from vllm_hicache.consensus import Consumption
from vllm_hicache.drills import Drill
from vllm_hicache.errors import ConfigError
from vllm_hicache.geometry import Holding, PageLayout, RankGeometry, RoleShape, held_heads
from vllm_hicache.handoff.nixl_link import MemoryRange, NixlMemory, NixlReader
from vllm_hicache.handoff.peers import PeerAccess, Peers
from vllm_hicache.handoff.server import PageServer
from vllm_hicache.inventory import Inventory
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import OpId, Phase, Role
from vllm_hicache.namespace import Spaces
from vllm_hicache.ownership import Ownership, Shard
from vllm_hicache.place import Place
from vllm_hicache.plan import Ack, ExportOp, FlushOp, LoadOp, OpReport, Plan, SaveOp, StepResult
from vllm_hicache.ranklog import RankLog
from vllm_hicache.storage.chunks import RoleChunks
from vllm_hicache.stores import StoreFactory
from vllm_hicache.transfer.collective import Collective
from vllm_hicache.transfer.copier import Copier, make_copier
from vllm_hicache.transfer.device import DeviceCache, RoleLayers
from vllm_hicache.transfer.engine import TransferEngine
from vllm_hicache.transfer.exchange import PageExchange
from vllm_hicache.transfer.host import HostPool
from vllm_hicache.units import format_bytes

_SERVER_SHARE = 0.8
"""Of a reader's time limit: it hears that a page does not come before it gives up."""

_IDLE_WAIT_S = 0.002
"""An engine with nothing to compute would else ask a thousand times a second, on cores that copies need."""


OpenCollective = Callable[[Sequence[int], torch.device], Collective]
"""Makes a collective of tensor ranks, for memory of a device; each of them calls it, in the same order."""


class WorkerHalf:
    """See the module.

    Args:
        place: which of the engine's ranks this is.
        caches: the engine's device tensors by layer name, [blocks, kv heads, tokens, content] each.
        block_tokens: tokens of a device block.
        encodings: how a slab's interior is laid out, by role.
        available_bytes: host memory the machine has to spare; `None` where it does not say.
        open_store: opens the store for pages of a layout; `None` without an L3 store.
        access: how other engines' pages are read and this one's are served; `None` where neither is to be.
        open_collective: connects ranks of a stage; `None` where they cannot be, so that each keeps all of its pages.

    Raises:
        ConfigError: the caches, the page and the pool do not fit together.
    """

    def __init__(
        self,
        config: Config,
        place: Place,
        caches: Mapping[str, torch.Tensor],
        block_tokens: int,
        encodings: Mapping[Role, str],
        metrics: Metrics,
        available_bytes: int | None,
        open_store: Callable[[PageLayout], StoreFactory] | None = None,
        open_collective: OpenCollective | None = None,
        access: PeerAccess | None = None,
    ) -> None:
        self._config = config
        self._place = place
        self._stores: dict[Spaces, RoleChunks] = {}
        cache = DeviceCache.from_tensors(caches, block_tokens, place.num_target_layers)
        holdings = _holdings(place, cache)
        shard = _shard(place, config.host_tier == HostTier.SHARDED and open_collective is not None)
        geometry = RankGeometry(
            _layout(config, place, cache), holdings, shard, has_sidecar=config.draft == DraftTier.SIDECAR
        )
        self._open_store = open_store(geometry.layout) if open_store is not None else None
        wanted = config.host_memory.resolve(cache.num_bytes)
        _check_memory(wanted, place, available_bytes)
        num_rows = wanted // geometry.slot_bytes
        device = cache.runs[0].view.device
        self._pool = HostPool(num_rows, *geometry.region_bytes, pin=device.type == "cuda", shard=shard)
        self._exports: dict[OpId, int] = {}
        self._ended_exports: deque[OpId] = deque()
        self._acknowledged: deque[str] = deque()
        linked = [MemoryRange.of(self._pool.memory)] if config.peer_transport == PeerTransport.NIXL else []
        reads = access is not None and access.reads
        self._nixl_reader = NixlReader(linked) if reads and linked else None
        self._nixl_memory = NixlMemory(linked) if config.peer_host is not None and linked else None
        self._peers = Peers(geometry.layout, access, metrics, self._nixl_reader) if access and reads else None
        self._server = self._open_server(geometry, access, metrics) if access is not None else None
        port = self._server.port if self._server is not None else None
        self._inventory = Inventory(
            place.rank, geometry.holdings, geometry.layout, geometry.slot_bytes, num_rows, encodings, shard, port
        )
        self._consumption = Consumption()
        self._drill = (
            Drill(Path(config.rank_faults).expanduser(), place.rank) if config.rank_faults is not None else None
        )
        self._log = self._make_log()
        self._asked: set[OpId] = set()
        self._reports: list[OpReport] = []
        self._agreed = False
        copier = make_copier(cache, self._pool, geometry)
        self._engine = TransferEngine(
            place.rank,
            self._pool,
            geometry,
            copier,
            metrics,
            config.fetch_threads,
            config.flush_threads,
            config.flush_queue_pages,
            _exchange(place, self._pool, copier, device, open_collective),
        )

    def hand_over(self) -> Inventory:
        """What this rank holds. All ranks have looked at the free memory by now, so that it may be taken."""
        self._pool.commit_ahead()
        return self._inventory

    def start_loads(self, plan: Plan) -> None:
        """Consume what is acknowledged, then start the plan's loads and flushes. Blocks of loads may now be written."""
        if self._drill is not None:
            self._drill.look()
        self._agree(plan.num_slots)
        for ack in plan.acks:
            self._engine.acknowledged(ack)
        self._consume_all(plan.acks)
        for op in plan.cancels:
            self._engine.cancel(op)
            if self._server is not None:
                self._server.withdraw(op)
        repeated = self._consumption.repeated(plan.asks)
        self._asked.update(report.op for report in repeated)
        self._reports += repeated
        fence = self._engine.fence() if plan.loads else None
        for load in plan.loads:
            peer = None
            if load.peer is not None and self._peers is not None:
                peer = self._peers.chunks(load.peer, load.spaces)
            self._engine.load(load, self._store(load.spaces), fence, self._begin(load), peer)
        for export in plan.exports:
            self._export(export)
        if self._peers is not None and self._place.rank == 0:
            for released in plan.releases:
                self._engine.submit(partial(self._peers.acknowledge, released))
        for flush in plan.flushes:
            self._engine.flush(flush, self._store(flush.spaces), self._begin(flush))

    def commit_saves(self, plan: Plan) -> None:
        """Start the plan's saves: forward and draft passes of the step have been submitted."""
        fence = self._engine.fence() if plan.saves else None
        for save in plan.saves:
            self._engine.save(save, fence, self._begin(save))

    def collect(self, plan: Plan) -> StepResult:
        """What has come further since the last call. In an idle step, waits a moment for something to."""
        for report in self._engine.collect(_IDLE_WAIT_S if plan.idle else 0.0):
            self._consumption.ready(report)
            self._reports.append(report)
        while self._ended_exports:
            op = self._ended_exports.popleft()
            num_pages = self._exports.pop(op)
            report = OpReport(self._place.rank, op, num_pages, num_pages)
            self._consumption.ready(report)
            self._reports.append(report)
        acknowledged = tuple(self._acknowledged.popleft() for _ in range(len(self._acknowledged)))
        reports = self._take_reports()
        if self._log is not None:
            for report in reports:
                if report.phase == Phase.SETTLED:
                    self._log.done(report)
        if self._place.is_alone:
            self._consume_all([Ack(r.op, r.pages_done, r.pages_held, r.phase, r.reason) for r in reports])
        received, invalid = self._consumption.take()
        entries, mark = (self._log.take(), self._log.mark) if self._log is not None else ((), None)
        if self._place.is_alone:
            # There is nobody to be compared with: its lines go to disk at most.
            entries, mark = (), None
        return StepResult(tuple(reports), entries, mark, received, invalid, acknowledged)

    def close(self) -> None:
        """Finish what is queued, within `shutdown_timeout_s`."""
        self._engine.close(self._config.shutdown_timeout_s)
        # What others read first, then what is read of them.
        for link in (self._server, self._nixl_memory, self._peers, self._nixl_reader):
            if link is not None:
                link.close()
        self._pool.close()
        if self._log is not None:
            self._log.close()

    def _make_log(self) -> RankLog | None:
        if self._config.consensus == Consensus.OFF:
            return None
        directory = Path(self._config.consensus_dir).expanduser() if self._config.consensus_dir is not None else None
        return RankLog(self._place.rank, self._pool.num_slots, directory)

    def _agree(self, num_slots: int) -> None:
        if not self._agreed and self._log is not None:
            self._log.agreed(num_slots if self._drill is None else self._drill.capacity(num_slots))
        self._agreed = True

    def _open_server(self, geometry: RankGeometry, access: PeerAccess, metrics: Metrics) -> PageServer | None:
        config = self._config
        if config.peer_host is None:
            return None
        return PageServer(
            self._pool,
            geometry,
            access.sealer,
            access.password,
            _SERVER_SHARE * config.peer_timeout_s,
            metrics,
            self._ended_exports.append,
            self._acknowledged.append,
            config.peer_host,
            config.peer_port + self._place.rank if config.peer_port else 0,
            self._nixl_memory,
        )

    def _export(self, export: ExportOp) -> None:
        vouched = self._begin(export)
        self._exports[export.op] = len(export.pages) if vouched is None else vouched
        if self._server is None:
            self._ended_exports.append(export.op)
        else:
            self._server.export(export, self._exports[export.op])

    def _begin(self, op: LoadOp | SaveOp | FlushOp | ExportOp) -> int | None:
        """Begin an operation in this rank's books; leading pages whose slots are what the plan says, `None` for all."""
        self._consumption.begin(op.op, self._place.rank, op if isinstance(op, LoadOp) else None)
        if self._drill is not None and not isinstance(op, ExportOp):
            self._drill.began(op, self._log)
        return self._log.begin(op) if self._log is not None else None

    def _consume_all(self, acks: Sequence[Ack]) -> None:
        for ack in acks if self._drill is None else self._drill.acks(acks):
            taken = self._consumption.consume(ack)
            if taken is None:
                continue
            if ack.phase == Phase.RECEIVED:
                # Where others gave up waiting for this rank, it stops working on what nobody waits for.
                self._engine.cancel(ack.op)
            if self._log is not None:
                self._log.consume(taken)

    def _take_reports(self) -> Sequence[OpReport]:
        reports, self._reports = self._reports, []
        if self._drill is not None:
            reports = self._drill.reports(reports, self._asked)
        self._asked.difference_update(report.op for report in reports)
        return reports

    def _store(self, spaces: Spaces) -> RoleChunks | None:
        if self._open_store is None:
            return None
        if spaces not in self._stores:
            self._stores[spaces] = self._open_store(spaces)
        return self._stores[spaces]


def _shard(place: Place, can_exchange: bool) -> Shard:
    """Which pages this rank keeps among those that hold the same heads: its own on the device, or else in host memory.

    vLLM numbers such ranks one after the other, so that the tensor rank says which owner this is. Every stage shares
    out pages in the same way, so that the draft's heads count on stages without draft layers too.
    """
    if place.dcp_size > 1:
        return Shard(Ownership(place.dcp_size, on_device=True), place.tp_rank % place.dcp_size)
    roles = [Role.TARGET, Role.DRAFT] if place.draft_heads else [Role.TARGET]
    num_owners = gcd(*(_held(place, role)[2] for role in roles)) if can_exchange and place.tp_size > 1 else 1
    return Shard(Ownership(num_owners), place.tp_rank % num_owners)


def _exchange(
    place: Place, pool: HostPool, copier: Copier, device: torch.device, open_collective: OpenCollective | None
) -> PageExchange | None:
    num_owners = pool.shard.num_owners
    if num_owners == 1 or pool.shard.ownership.on_device or open_collective is None:
        return None
    first = place.tp_rank - pool.shard.owner
    members = range(first, first + num_owners)
    headers = open_collective(members, torch.device("cpu"))
    pages = headers if device.type == "cpu" else open_collective(members, device)
    return PageExchange(headers, pages, pool, copier, device)


def _check_memory(wanted: int, place: Place, available_bytes: int | None) -> None:
    """Refuse a pool that this machine cannot give to each of its ranks."""
    total = wanted * place.num_neighbours
    if available_bytes is not None and total > available_bytes:
        ranks = f"{place.num_neighbours} ranks, {format_bytes(total)} together" if place.num_neighbours > 1 else "it"
        raise ConfigError(
            f"host_memory asks for {format_bytes(wanted)} on rank {place.rank} ({ranks}), but the machine has "
            f"{format_bytes(available_bytes)} available: set host_memory in kv_connector_extra_config"
        )


def _layout(config: Config, place: Place, cache: DeviceCache) -> PageLayout:
    """The whole model's page, from what this rank holds and how the engine is cut."""
    shapes = tuple(
        RoleShape(
            each.role,
            place.layers_of(each.role, len(each.numbers)),
            place.heads_of(each.role, each.num_heads),
            each.slab_bytes,
        )
        for each in cache.roles
    )
    page_tokens = config.page_tokens_for(cache.block_tokens, place.dcp_size > 1)
    return PageLayout.suited(shapes, cache.block_tokens, page_tokens, config.grid)


def _holdings(place: Place, cache: DeviceCache) -> tuple[Holding, ...]:
    return tuple(_holding(place, each) for each in cache.roles)


def _held(place: Place, role: Role, num_held: int = 0) -> tuple[tuple[int, int], int, int]:
    """KV heads of a role on this rank, its replica and the number of replicas; a lone rank holds `num_held`."""
    num_heads = place.heads_of(role, num_held)
    if role is Role.DRAFT and place.draft_tp_size == 1:
        return (0, num_heads), place.tp_rank, place.tp_size
    return held_heads(num_heads, place.tp_size, place.tp_rank)


def _holding(place: Place, layers: RoleLayers) -> Holding:
    num_heads = place.heads_of(layers.role, layers.num_heads)
    heads, replica, num_replicas = _held(place, layers.role, layers.num_heads)
    if heads[1] - heads[0] != layers.num_heads:
        raise ConfigError(
            f"rank {place.rank} registered {layers.num_heads} KV heads of {layers.role} layers, but its share of "
            f"{num_heads} is {heads[1] - heads[0]}: this model is not supported, run without the connector"
        )
    first = layers.numbers[0] if place.pp_size > 1 and layers.role is Role.TARGET else 0
    numbers = tuple(range(first, first + len(layers.numbers)))
    if place.pp_size > 1 and layers.role is Role.TARGET and layers.numbers != numbers:
        raise ConfigError(
            f"rank {place.rank} registered {layers.role} layers {list(layers.numbers)}, which are not consecutive: "
            "this model is supported with pipeline_parallel_size=1 only"
        )
    return Holding(layers.role, (first, first + len(numbers)), heads, replica, num_replicas)
