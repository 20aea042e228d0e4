"""vLLM's scheduler process: builds the scheduler half and translates the engine's calls for it.

Scheduler thread only. The half comes to life when the ranks have handed over their inventories, before the
first request.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_hicache.config import Config, DraftMiss, WritePolicy
from vllm_hicache.connectors import adapt
from vllm_hicache.errors import ConfigError, HiCacheError, InvariantError
from vllm_hicache.events import PageStored
from vllm_hicache.geometry import PageLayout
from vllm_hicache.handoff.protocol import Serving, peer_of
from vllm_hicache.handoff.roles import peer_key, takes_over
from vllm_hicache.inventory import Inventory, agree, check_writers
from vllm_hicache.lookup import StoreLookups
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import BlockId, PageKey, RequestId, Tier
from vllm_hicache.plan import Peer, Plan, RankNews
from vllm_hicache.scheduler import SchedulerHalf
from vllm_hicache.stores import StoreOpener

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_MEDIUMS = {Tier.HOST: MEDIUM_CPU, Tier.STORE: "STORAGE"}
_DISK_SCHEMES = ("file",)


@dataclass(frozen=True)
class HiCacheMetadata(KVConnectorMetadata):
    """A step's plan, on vLLM's road to the workers."""

    plan: Plan


@dataclass(frozen=True)
class HiCacheHandshake(KVConnectorHandshakeMetadata):
    """A rank's inventory, on vLLM's road to the scheduler."""

    inventory: Inventory


@dataclass(frozen=True)
class HiCacheWorkerMetadata(KVConnectorWorkerMetadata):
    """News of one or more ranks, on vLLM's road to the scheduler."""

    news: tuple[RankNews, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """News of both; they name their rank, so none is lost and none counts twice."""
        return HiCacheWorkerMetadata(self.news + getattr(other, "news", ()))


class SchedulerSide:
    """See the module."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config: Config = adapt.parse_config(vllm_config)
        adapt.check_engine(vllm_config, kv_cache_config)
        self.metrics = Metrics()
        self._draft_limit = adapt.draft_limit(vllm_config)
        self._stores = StoreOpener.for_config(self._config, self.metrics)
        self._adapters = adapt.AdapterVersions()
        self._requests: dict[str, Request] = {}
        self._takes_over = takes_over(vllm_config.kv_transfer_config.kv_role, self._config)
        self._peer_key = peer_key()
        self._serving: Serving | None = None
        self._block_tokens = 0
        self._manager: KVCacheManager | None = None
        self._holds: adapt.DeviceHolds | None = None
        self._half: SchedulerHalf | None = None
        self._disk = self._config.store.split(":", 1)[0] in _DISK_SCHEMES
        events = vllm_config.kv_events_config
        self._record_events = events is not None and events.enable_kv_cache_events

    @property
    def half(self) -> SchedulerHalf:
        """The scheduler half.

        Raises:
            InvariantError: the ranks have not handed over their inventories.
        """
        if self._half is None:
            raise InvariantError("the engine asked for the cache before its ranks handed over their inventories")
        return self._half

    def bind(self, manager: KVCacheManager, pool: BlockPool) -> None:
        """Take the engine's block tables and block pool."""
        self._manager = manager
        self._holds = adapt.DeviceHolds(pool)

    def start(self, inventories: Iterable[Inventory]) -> None:
        """Build the half from what the ranks hold.

        Raises:
            ConfigError: ranks that do not fit together.
        """
        if self._holds is None:
            raise InvariantError("ranks handed over their inventories before the engine bound its cache manager")
        ranks = sorted(inventories, key=lambda inventory: inventory.rank)
        if self._config.peer_host is not None:
            tp_size = self._vllm_config.parallel_config.tensor_parallel_size
            engine = self._vllm_config.kv_transfer_config.engine_id
            self._serving = Serving(engine, self._config.peer_host, ranks, tp_size)
        agreed = agree(ranks, adapt.place(self._vllm_config, rank=0).num_ranks)
        layout = agreed.layout
        self._block_tokens = layout.block_tokens
        writes = self._stores and self._config.write != WritePolicy.NEVER
        if writes or self._config.peer_host is not None:
            check_writers(ranks, layout)
        namespace = adapt.namespace(self._vllm_config, self._kv_cache_config, self._config, agreed)
        draft = adapt.draft_space(self._vllm_config, agreed)
        self._half = SchedulerHalf(
            self._config,
            namespace,
            layout.block_tokens,
            agreed.num_slots,
            [rank.rank for rank in ranks],
            self._holds,
            self.metrics,
            self._stores.on(layout) if self._stores else None,
            self._lookups(layout) if self._stores else None,
            self._record_events,
            agreed.ownership,
            draft,
        )
        if self._stores:
            digest = namespace.digest()
            self._stores.announce(digest, namespace.fields())
            if draft is not None:
                self._stores.announce(draft.digest_for(digest), draft.fields_for(digest))
        self._say_hello(ranks)
        if draft is not None:
            logger.info(
                "The state of the draft (%s, %d layers) is kept with its pages (draft=%s, draft_miss=%s)",
                draft.method,
                draft.layers,
                self._config.draft,
                self._config.draft_miss,
            )

    def _lookups(self, layout: PageLayout) -> StoreLookups:
        return StoreLookups(layout.cells, self.metrics, self._config.draft_miss == DraftMiss.RECOMPUTE)

    def new_request(self, request: Request) -> None:
        """Track a request. One whose tokens may change afterwards (a resumable session) is left alone."""
        # A resumable session may drop its last token and go on with others: its keys would be wrong.
        if request.resumable:
            return
        try:
            adapter = self._adapters.adapter(request.lora_request)
        except (HiCacheError, OSError) as error:  # a miss: an adapter that cannot be told apart is not cached
            self.metrics.count("errors", "adapter")
            logger.warning("A request is not cached: %s", error)
            return
        self._requests[request.request_id] = request
        extras = adapt.extra_keys(request, self.half.namespace.page_tokens)
        self.half.begin(
            RequestId(request.request_id),
            request,
            request.cache_salt,
            adapter,
            extras,
            self._peer(request),
            self._export_name(request),
        )

    def match(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """vLLM's answer: tokens beyond its own prefix, `None` to be asked again; always asynchronous."""
        offer = self.half.match(RequestId(request.request_id), local_tokens)
        return (None, False) if offer.pending else (offer.tokens, offer.tokens > 0)

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """Blocks were allocated for a request."""
        (ids,) = blocks.get_block_ids()
        self.half.allocated(RequestId(request.request_id), [BlockId(block) for block in ids], tokens)

    def plan(self, output: SchedulerOutput) -> HiCacheMetadata:
        """The step's plan; saves cover what the step computes."""
        after = {
            request_id: self._requests[request_id].num_computed_tokens + num_tokens
            for request_id, num_tokens in output.num_scheduled_tokens.items()
            if request_id in self._requests
        }
        is_drafted = self._draft_limit is None or max(after.values(), default=0) <= self._draft_limit
        for request_id, computed in after.items():
            self.half.scheduled(RequestId(request_id), computed, partial(self._blocks, request_id), is_drafted)
        return HiCacheMetadata(self.half.plan(idle=output.total_num_scheduled_tokens == 0))

    def output(self, output: KVConnectorOutput) -> None:
        """Take the ranks' reports."""
        metadata = output.kv_connector_worker_meta
        news = metadata.news if isinstance(metadata, HiCacheWorkerMetadata) else ()
        reports = [report for each in news for report in each.reports]
        entries, marks = {each.rank: each.entries for each in news}, {each.rank: each.mark for each in news}
        self.half.report(reports, entries, marks, [name for each in news for name in each.acknowledged])

    def finished(self, request: Request) -> dict[str, Any] | None:
        """A request has ended; what is to be said to the engine that goes on with it."""
        self._requests.pop(request.request_id, None)
        is_computed = request.num_computed_tokens >= request.num_prompt_tokens
        name = self.half.finished(RequestId(request.request_id), is_computed)
        if name is None or self._serving is None:
            return None
        return self._serving.told(name, self.half.spaces, self._peer_key)

    def _export_name(self, request: Request) -> str | None:
        """By which name another engine will acknowledge what this one computes; `None` where none is to.

        A proxy that asks both engines at once names it itself.
        """
        parameters = request.kv_transfer_params or {}
        if self._serving is None or not parameters.get("do_remote_decode"):
            return None
        return str(parameters.get("remote_request_id") or request.request_id)

    def _peer(self, request: Request) -> Peer | None:
        """The engine that has computed a request's prompt."""
        if not self._takes_over:
            return None
        try:
            return peer_of(request.kv_transfer_params or {}, self.half.spaces, self._peer_key)
        except ConfigError as error:  # a miss: the prompt is computed here
            self.metrics.count("handoffs", "refused")
            logger.warning("A request's prompt is computed again: %s", error)
            return None

    def hit_sources(self, request: Request, tokens: int) -> dict[CacheHitSource, int]:
        """Tokens of a planned load by vLLM's names of tiers."""
        store = CacheHitSource.DISK if self._disk else CacheHitSource.EXTERNAL_UNSPECIFIED
        sources = {Tier.HOST: CacheHitSource.HOST, Tier.STORE: store, Tier.PEER: CacheHitSource.EXTERNAL_UNSPECIFIED}
        hits = self.half.hit_tokens(RequestId(request.request_id), tokens)
        split: dict[CacheHitSource, int] = {}
        for tier, count in hits.items():
            split[sources[tier]] = split.get(sources[tier], 0) + count
        return split

    def take_events(self) -> Iterator[KVCacheEvent]:
        """vLLM's KV events for what entered and left host memory and the store, block by block as its own are.

        The last block of a page is known by the page's key.
        """
        for event in self.half.events.take():
            medium = _MEDIUMS[event.tier]
            if isinstance(event, PageStored):
                yield BlockStored(
                    block_hashes=self._hashes(event.key),
                    parent_block_hash=event.parent,
                    token_ids=list(event.tokens),
                    block_size=self._block_tokens,
                    lora_id=None,
                    medium=medium,
                    lora_name=None,
                )
            else:
                yield BlockRemoved(block_hashes=self._hashes(event.key), medium=medium)

    def _hashes(self, key: PageKey) -> list[bytes]:
        num_before = self.half.namespace.page_tokens // self._block_tokens - 1
        return [*(key + number.to_bytes(2, "little") for number in range(num_before)), key]

    @property
    def has_pending(self) -> bool:
        """Whether the engine should keep stepping for our sake."""
        return self._half is not None and self._half.has_pending

    @property
    def has_pending_frees(self) -> bool:
        """Whether saves keep blocks from their pool, which come back by themselves."""
        return self._holds is not None and self._holds.would_free

    def reset(self) -> bool:
        """Forget everything; what is computed from now on is shared with nobody."""
        self.half.reset(secrets.token_hex(16))
        logger.info("Cache reset; the namespace is now %s", self.half.namespace.digest().hex()[:16])
        return True

    def close(self) -> None:
        """End lookups and close the store."""
        if self._half is not None:
            self._half.close()
        if self._stores:
            self._stores.close()

    def _blocks(self, request_id: str) -> list[BlockId]:
        if self._manager is None:
            raise InvariantError("the engine scheduled a request before it bound its cache manager")
        (ids,) = self._manager.get_block_ids(request_id)
        return [BlockId(block) for block in ids]

    def _say_hello(self, ranks: Sequence[Inventory]) -> None:
        namespace, tier = self.half.namespace, self.half.tier
        num_owners = tier.ownership.num_owners
        logger.info(
            "vllm-hicache is on: %d pages of %d tokens in host memory (%.2f GiB over %d ranks%s), store %s, grid %s, "
            "namespace %s",
            tier.num_slots,
            namespace.page_tokens,
            tier.num_slots // num_owners * sum(rank.slot_bytes for rank in ranks) / 2**30,
            len(ranks),
            f", each page on one of {num_owners}" if num_owners > 1 else "",
            self._stores.describe() if self._stores else "none",
            namespace.grid,
            namespace.digest().hex()[:16],
        )
        if len({rank.num_rows for rank in ranks}) > 1:
            logger.info(
                "Ranks have room for different numbers of pages, the least counts: %s",
                ", ".join(f"rank {rank.rank} {rank.num_rows}" for rank in ranks),
            )
        if self._vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
            logger.warning(
                "kv_load_failure_policy is 'fail': a page that cannot be read fails its request. "
                'Set "kv_load_failure_policy": "recompute" in --kv-transfer-config to have it computed instead'
            )


def inventories(metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]) -> list[Inventory]:
    """Inventories of all ranks from vLLM's handshake, keyed there by (pipeline, tensor) rank."""
    return [each.inventory for each in metadata.values() if isinstance(each, HiCacheHandshake)]
