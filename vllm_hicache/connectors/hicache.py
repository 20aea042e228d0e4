"""The connector vLLM loads: picks a side by its role and forwards to it. Nothing is decided here."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from vllm_hicache.connectors import adapt
from vllm_hicache.connectors import compat as compat
from vllm_hicache.connectors.scheduler_side import (
    HiCacheHandshake,
    HiCacheMetadata,
    HiCacheWorkerMetadata,
    SchedulerSide,
    inventories,
)
from vllm_hicache.connectors.stats import HiCachePromMetrics, HiCacheStats
from vllm_hicache.connectors.worker_side import WorkerSide
from vllm_hicache.errors import ConfigError, InvariantError
from vllm_hicache.plan import Plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class HiCacheConnector(KVConnectorBase_V1, SupportsHMA):
    """Extends vLLM's prefix cache to host memory and an object store. Loads are always asynchronous."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        adapt.use_engine_log()
        on_scheduler = role == KVConnectorRole.SCHEDULER
        try:
            self._scheduler_side = SchedulerSide(vllm_config, kv_cache_config) if on_scheduler else None
            self._worker_side = None if on_scheduler else WorkerSide(vllm_config, kv_cache_config)
        except ConfigError as error:  # a stop; said in one line, because vLLM's own last line does not say why
            logger.error("vllm-hicache cannot serve this engine: %s", error)
            raise

    @property
    def _scheduler(self) -> SchedulerSide:
        return self._scheduler_side or self._wrong_side("scheduler")

    @property
    def _worker(self) -> WorkerSide:
        return self._worker_side or self._wrong_side("worker")

    def _wrong_side(self, wanted: str) -> NoReturn:
        raise InvariantError(f"a call for the {wanted} side came to the connector with role {self.role.name}")

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a dropped save is a later miss, never a reason to compute a request again."""
        return False

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See the base class."""
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """This rank's inventory."""
        return HiCacheHandshake(self._worker.hand_over())

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start the step's loads; without synchronous ones vLLM calls this after the forward pass."""
        self._worker.start_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs only after its load."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing to do by layer: pages are saved whole, in `wait_for_save`."""

    def wait_for_save(self) -> None:
        """Commit the step's saves; their blocks are held by the scheduler half until they are reported."""
        self._worker.commit_saves(self._plan())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose loads have ended."""
        return self._worker.collect(self._plan())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of those loads that do not hold what was promised."""
        return self._worker.take_invalid_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """This rank's reports and log lines."""
        news = self._worker.take_news()
        return HiCacheWorkerMetadata((news,)) if news is not None else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Nothing to do: blocks that a save still reads are held in vLLM's own pool."""

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Yes: sleep mode remaps the device cache at the same addresses, where our views point."""
        return True

    def unregister_kv_caches(self) -> None:
        """Nothing is registered outside this process."""

    def restore_kv_caches(self) -> None:
        """See `unregister_kv_caches`."""

    # Scheduler side

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """See the base class."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind(kv_cache_manager, kv_cache_manager.block_pool)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Inventories by tensor rank."""
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): each for rank, each in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Inventories by (pipeline, tensor) rank."""
        self._scheduler.start(inventories(metadata))

    def on_new_request(self, request: Request) -> None:
        """See the base class."""
        self._scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See the base class."""
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """See the base class."""
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """See the base class."""
        return self._scheduler.hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See the base class."""
        return self._scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See the base class."""
        self._scheduler.output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request's blocks may be freed at once: saves hold theirs."""
        return False, self._scheduler.finished(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See `request_finished`."""
        return self.request_finished(request, [])

    def take_events(self) -> Iterable[KVCacheEvent]:
        """See the base class."""
        return self._scheduler.take_events()

    def has_pending_block_frees(self) -> bool:
        """See the base class."""
        return self._scheduler.has_pending_frees

    def has_pending_push_work(self) -> bool:
        """Keeps an otherwise idle engine stepping until saves and flushes are acknowledged."""
        return self._scheduler.has_pending

    def reset_cache(self) -> bool | None:
        """See the base class."""
        return self._scheduler.reset()

    # Both sides

    def shutdown(self) -> None:
        """See the base class."""
        (self._scheduler_side or self._worker).close()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Counts since the last call."""
        data = (self._scheduler_side or self._worker).metrics.drain()
        return HiCacheStats(data=dict(data)) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """See the base class."""
        return HiCacheStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics | None:
        """See the base class."""
        return HiCachePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _plan(self) -> Plan:
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, HiCacheMetadata):
            raise InvariantError(
                f"the step carries metadata of {type(metadata).__name__}, not a plan of this connector"
            )
        return metadata.plan
