"""vLLM's worker process: builds the worker half and translates the engine's calls for it.

The rank's engine thread only. Saves are committed in `wait_for_save`, after forward and draft passes; with
speculation vLLM collects results before that, so that a step's saves are reported with the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_tp_group

from vllm_hicache.connectors import adapt
from vllm_hicache.entries import Entry, Mark
from vllm_hicache.errors import InvariantError
from vllm_hicache.handoff.roles import peer_access
from vllm_hicache.inventory import Inventory
from vllm_hicache.machine import look_at_host
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import BlockId
from vllm_hicache.plan import OpReport, Plan, RankNews
from vllm_hicache.stores import StoreOpener
from vllm_hicache.transfer.collective import Collective, GlooCollective, new_group
from vllm_hicache.transfer.collective_cuda import TorchCuda, make_cuda_collective
from vllm_hicache.worker import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class WorkerSide:
    """See the module."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = adapt.parse_config(vllm_config)
        adapt.check_engine(vllm_config, kv_cache_config)
        self._place = adapt.place(vllm_config)
        self.metrics = Metrics()
        self._stores = StoreOpener.for_config(self._config, self.metrics)
        self._half: WorkerHalf | None = None
        self._invalid: frozenset[BlockId] = frozenset()
        self._reports: tuple[OpReport, ...] = ()
        self._entries: tuple[Entry, ...] = ()
        self._mark: Mark | None = None
        self._acknowledged: tuple[str, ...] = ()

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Build the half over the engine's tensors.

        Raises:
            ConfigError: they, the page and the host pool do not fit together.
        """
        self._half = WorkerHalf(
            self._config,
            self._place,
            caches,
            adapt.block_tokens(self._kv_cache_config),
            adapt.slab_encodings(self._vllm_config, self._kv_cache_config),
            self.metrics,
            look_at_host().spare_bytes,
            self._stores.on if self._stores else None,
            self._open_collective if self._place.num_ranks > 1 else None,
            peer_access(self._vllm_config.kv_transfer_config.kv_role, self._config),
        )

    def _open_collective(self, members: Sequence[int], device: torch.device) -> Collective:
        """Connect tensor ranks of this stage, for gathers of their own."""
        limit_s = self._config.rank_timeout_s
        ranks = [get_tp_group().ranks[member] for member in members]
        if device.type == "cpu":
            return GlooCollective(new_group(ranks, limit_s), limit_s)
        return make_cuda_collective(new_group(ranks, limit_s, "nccl"), TorchCuda(device, limit_s))

    @property
    def half(self) -> WorkerHalf:
        """The worker half.

        Raises:
            InvariantError: the engine has not registered its caches.
        """
        if self._half is None:
            raise InvariantError("the engine used the cache before it registered its KV tensors")
        return self._half

    def hand_over(self) -> Inventory:
        """What this rank holds, once every rank has registered its caches."""
        return self.half.hand_over()

    def start_loads(self, plan: Plan) -> None:
        """The step's forward pass has been submitted: loads may write to their blocks."""
        self.half.start_loads(plan)

    def commit_saves(self, plan: Plan) -> None:
        """The step's forward and draft passes have been submitted: their pages may be saved."""
        self.half.commit_saves(plan)

    def collect(self, plan: Plan) -> KVConnectorTransferResults:
        """What has finished; failed blocks and reports are kept for the calls that follow in the same step."""
        result = self.half.collect(plan)
        self._invalid |= result.invalid_blocks
        self._reports += result.reports
        self._entries += result.entries
        self._mark = result.mark
        self._acknowledged += result.acknowledged
        return KVConnectorTransferResults(finished_recving=set(result.received))

    def take_invalid_blocks(self) -> set[int]:
        """Blocks of finished loads that do not hold what was promised."""
        taken, self._invalid = self._invalid, frozenset()
        return set(taken)

    def take_news(self) -> RankNews | None:
        """What the scheduler half has to know of this rank; `None` where there is nothing new."""
        reports, self._reports = self._reports, ()
        entries, self._entries = self._entries, ()
        acknowledged, self._acknowledged = self._acknowledged, ()
        if not reports and not entries and not acknowledged:
            return None
        return RankNews(self._place.rank, reports, entries, self._mark, acknowledged)

    def close(self) -> None:
        """Finish what is queued and close the store."""
        if self._half is not None:
            self._half.close()
        if self._stores:
            self._stores.close()
