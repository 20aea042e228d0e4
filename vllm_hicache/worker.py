"""The worker half: carries out plans on one rank.

One per rank, used on that rank's engine thread. It owns the host pool and the transfer engine and decides
nothing: what to move comes with the plan, what came of it goes back with the report.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vllm_hicache.config import Config
from vllm_hicache.errors import ConfigError
from vllm_hicache.geometry import Inventory, RankGeometry
from vllm_hicache.metrics import Metrics
from vllm_hicache.plan import Plan, StepResult
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.stores import StoreFactory
from vllm_hicache.transfer.copier import make_copier
from vllm_hicache.transfer.device import DeviceCache
from vllm_hicache.transfer.engine import TransferEngine
from vllm_hicache.transfer.host import HostPool
from vllm_hicache.units import format_bytes

_IDLE_WAIT_S = 0.002
"""An engine with nothing to compute would else ask a thousand times a second, on cores that copies need."""


class WorkerHalf:
    """See the module.

    Args:
        caches: the engine's device tensors by layer name, [blocks, kv heads, tokens, content] each.
        block_tokens: tokens of a device block.
        encoding: how a slab's interior is laid out.
        available_bytes: host memory the machine has to spare; `None` where it does not say.
        open_store: opens the store under a namespace; `None` without an L3 store.

    Raises:
        ConfigError: the caches, the page and the pool do not fit together.
    """

    def __init__(
        self,
        config: Config,
        rank: int,
        caches: Mapping[str, torch.Tensor],
        block_tokens: int,
        encoding: str,
        metrics: Metrics,
        available_bytes: int | None,
        open_store: StoreFactory | None = None,
    ) -> None:
        self._config = config
        self._open_store = open_store
        self._stores: dict[bytes, ChunkStore] = {}
        cache = DeviceCache.from_tensors(caches, block_tokens)
        geometry = RankGeometry(cache.layers, block_tokens, config.page_tokens_for(block_tokens), config.grid)
        wanted = config.host_memory.resolve(cache.num_bytes)
        if available_bytes is not None and wanted > available_bytes:
            raise ConfigError(
                f"host_memory asks for {format_bytes(wanted)} on rank {rank}, but the machine has "
                f"{format_bytes(available_bytes)} available: set host_memory in kv_connector_extra_config"
            )
        self._pool = HostPool(
            wanted // geometry.slot_bytes, geometry.slot_bytes, pin=cache.runs[0].view.device.type == "cuda"
        )
        self._pool.commit_ahead()
        self.inventory = Inventory(rank, cache.layers, geometry.slot_bytes, self._pool.num_slots, encoding)
        copier = make_copier(cache, self._pool, geometry)
        self._engine = TransferEngine(
            rank,
            self._pool,
            geometry,
            copier,
            metrics,
            config.fetch_threads,
            config.flush_threads,
            config.flush_queue_pages,
        )

    def start_loads(self, plan: Plan) -> None:
        """Start the plan's loads, flushes and cancels. Blocks of loads may be written from now on."""
        for op in plan.cancels:
            self._engine.cancel(op)
        if plan.loads:
            fence = self._engine.fence()
            for load in plan.loads:
                self._engine.load(load, self._store(load.namespace), fence)
        for flush in plan.flushes:
            self._engine.flush(flush, self._store(flush.namespace))

    def commit_saves(self, plan: Plan) -> None:
        """Start the plan's saves: forward and draft passes of the step have been submitted."""
        if plan.saves:
            fence = self._engine.fence()
            for save in plan.saves:
                self._engine.save(save, fence)

    def collect(self, plan: Plan) -> StepResult:
        """What has finished since the last call. In an idle step, waits a moment for something to."""
        return self._engine.collect(_IDLE_WAIT_S if plan.idle else 0.0)

    def close(self) -> None:
        """Finish what is queued, within `shutdown_timeout_s`."""
        self._engine.close(self._config.shutdown_timeout_s)
        self._pool.close()

    def _store(self, namespace: bytes) -> ChunkStore | None:
        if self._open_store is None:
            return None
        if namespace not in self._stores:
            self._stores[namespace] = self._open_store(namespace)
        return self._stores[namespace]
