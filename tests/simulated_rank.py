"""One rank of the simulated engine: a device of its own, one connector with the worker's role, and steps in order.

A step is taken down when it is scheduled, because a rank may run it when the scheduler is further already. The order
of calls is that of vLLM's CPU and GPU runners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import xor

import numpy as np
import pytest
import torch
from simulated_faults import CopyGates
from simulated_model import BLOCK, HEAD_SIZE, POISON, WORDS, Share, Truth, Words, folded, next_token
from thread_collective import Groups, ThreadCollective
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from vllm_hicache.connectors.hicache import HiCacheConnector
from vllm_hicache.names import Slot
from vllm_hicache.place import Place
from vllm_hicache.worker import WorkerHalf


@dataclass(frozen=True)
class Span:
    """What a step computes of one request: tokens [start, end); attention sees all before `end`.

    `ends`: after how many tokens one is sampled: nowhere in the middle of a prompt, after each guess where there are
    some. `tokens` end with those guesses, and `guesses` are what is taken if it is sampled.
    """

    name: str
    start: int
    end: int
    blocks: Sequence[int]
    tokens: Sequence[int]
    truth: Truth
    ends: Sequence[int]
    guesses: Sequence[int] = ()


@dataclass
class Batch:
    """A scheduled step, and what the ranks that have run it have to say.

    `poisoned` are blocks that hold nothing, or something else than before. `folds` are of each rank's part, by rank:
    for each span one for each of its ends.
    """

    number: int
    output: SchedulerOutput
    spans: Sequence[Span]
    poisoned: Sequence[int]
    results: dict[int, KVConnectorOutput | None] = field(default_factory=dict)
    folds: dict[int, list[list[int]]] = field(default_factory=dict)

    def result(self, rank: int, is_last_stage: bool) -> ModelRunnerOutput:
        """A rank's answer to the executor, in a copy of its own as between processes."""
        connector = self.results[rank]
        if not is_last_stage or not self.spans:
            return copy(ModelRunnerOutput.with_kv_conn_output_only(connector))
        output = self._sampled()
        output.kv_connector_output = connector
        return output

    def _sampled(self) -> ModelRunnerOutput:
        names = [span.name for span in self.spans]
        tokens = [
            sampled(span.guesses, [reduce(xor, parts) for parts in zip(*folds, strict=True)])
            for span, *folds in zip(self.spans, *self.folds.values(), strict=True)
        ]
        return ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, tokens)


def sampled(guesses: Sequence[int], folds: Sequence[int]) -> list[int]:
    """Tokens that are sampled after each of the guesses, as far as those are right."""
    tokens = [next_token(fold) for fold in folds]
    num_right = next(
        (at for at, pair in enumerate(zip(guesses, tokens, strict=False)) if len({*pair}) > 1), len(guesses)
    )
    return tokens[: num_right + 1]


class SimulatedRank:
    """See the module.

    Args:
        config: this rank's, `None` without a connector.
        before_forward: called before each forward pass.
        groups: where it meets the others of its stage.

    Attributes:
        collectives: what the connector gathers by.
        is_healthy: what its metrics have said last.
    """

    def __init__(
        self,
        number: int,
        share: Share,
        num_blocks: int,
        config: VllmConfig | None,
        before_forward: Callable[[], None],
        groups: Groups,
    ) -> None:
        self.number = number
        self.share = share
        self.collectives: list[ThreadCollective] = []
        self.is_healthy = True
        self._before_forward = before_forward
        self._groups = groups
        # [layers, blocks, heads, WORDS, tokens]: as on the CPU, the interior of a slab is not token-major.
        shape = (share.num_layers, num_blocks, share.num_heads, WORDS, BLOCK)
        self.device: Words = np.full(shape, POISON, np.uint64)
        self.worker = self._start(config) if config is not None else None

    def _start(self, config: VllmConfig) -> HiCacheConnector:
        worker = HiCacheConnector(config, KVConnectorRole.WORKER, self._cache_config())
        side = worker._worker
        side._open_collective = partial(self._join, side._place, side._config.rank_timeout_s)
        worker.register_kv_caches(self._tensors())
        return worker

    def _cache_config(self) -> KVCacheConfig:
        return self.share.cache_config(self.device.shape[1])

    def _tensors(self) -> dict[str, torch.Tensor]:
        """What it registers, by layer."""
        num_layers, num_blocks, num_heads = self.device.shape[:3]
        shape = (num_layers, num_blocks, num_heads, BLOCK, 2 * HEAD_SIZE)
        tensors = torch.from_numpy(self.device.view(np.int64)).view(torch.bfloat16).reshape(shape)
        return dict(zip(self.share.layer_names, tensors, strict=True))

    def handshake(self) -> KVConnectorHandshakeMetadata | None:
        """This rank's inventory."""
        return self.worker.get_handshake_metadata()

    @property
    def half(self) -> WorkerHalf:
        """The connector's worker half."""
        return self.worker._worker.half

    def keeps(self, slot: Slot) -> bool:
        """Whether a slot lies on this rank."""
        return self.half._pool.shard.owns(slot)

    def host_bytes(self, slot: Slot) -> bytes:
        """What one of its slots holds."""
        return b"".join(region.numpy().tobytes() for region in self.half._pool.content(slot))

    def gate_copies(self, patch: pytest.MonkeyPatch) -> CopyGates:
        """Gates before this rank's copies; where pages are exchanged, before what came is copied to the device."""
        gates, exchange = CopyGates(patch, self.half._engine._copier), self.half._engine._exchange
        for staging in exchange._stagings if exchange is not None else ():
            patch.setattr(staging, "place", CopyGates._gated(staging.place, gates.load))
        return gates

    def run(self, batch: Batch) -> None:
        """Run a step; the connector's part of the answer stays in the batch."""
        self._poison(batch.poisoned)
        if self.worker is None:
            batch.folds[self.number] = self._forward(batch)
            batch.results[self.number] = None
            return
        metadata = batch.output.kv_connector_metadata
        assert not batch.output.has_sync_kv_loads
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        batch.folds[self.number] = self._forward(batch)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        transfers = self.worker.get_transfer_results(batch.output.finished_req_ids)
        invalid = self.worker.get_block_ids_with_load_errors()
        stats = self.worker.get_kv_connector_stats()
        self.is_healthy = self.is_healthy if stats is None else stats.data["healthy"] == 1
        batch.results[self.number] = KVConnectorOutput(
            finished_sending=transfers.finished_sending,
            finished_recving=transfers.finished_recving,
            invalid_block_ids=invalid,
            kv_connector_stats=stats,
            kv_cache_events=self.worker.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()

    def close(self) -> None:
        """Stop the connector."""
        if self.worker is not None:
            self.worker.shutdown()

    def _join(self, place: Place, timeout_s: float, members: Sequence[int], device: torch.device) -> ThreadCollective:
        stage = place.rank // place.tp_size
        rank = members.index(place.tp_rank)
        self.collectives.append(self._groups.join((stage, *members), rank, len(members), timeout_s))
        return self.collectives[-1]

    def _poison(self, blocks: Sequence[int]) -> None:
        self.device[:, blocks] = POISON

    def _forward(self, batch: Batch) -> list[list[int]]:
        self._before_forward()
        for span in batch.spans:
            self._compute(span)
        return [self._attend(batch, span) for span in batch.spans]

    def _words(self, span: Span) -> Words:
        """What this rank's part must be, up to the span's end."""
        return span.truth.words(span.tokens[: span.end])[:, self.share.layers, self.share.heads]

    def _compute(self, span: Span) -> None:
        positions = self.share.owned(np.arange(span.start, span.end))
        blocks = np.array(span.blocks)[positions // (BLOCK * self.share.num_owners)]
        self.device.transpose(1, 4, 0, 2, 3)[blocks, positions % BLOCK] = self._words(span)[positions]

    def _attend(self, batch: Batch, span: Span) -> list[int]:
        """Read all that attention would read here, and compare it; it folded up to each end, nothing from a replica."""
        positions = self.share.owned(np.arange(span.end))
        blocks = list(span.blocks[: -(-len(positions) // BLOCK)])
        wanted = self._words(span)[positions]
        seen = self.device[:, blocks].transpose(1, 4, 0, 2, 3).reshape(-1, *wanted.shape[1:])[: len(positions)]
        wrong = np.argwhere(seen != wanted)
        if len(wrong):
            index, layer, head, _ = wrong[0]
            raise AssertionError(
                f"step {batch.number}, rank {self.number}: request {span.name} sees wrong KV at position "
                f"{positions[index]} of {span.end}, its layer {layer}, its head {head}; {len(set(wrong[:, 0]))} "
                "positions are wrong"
            )
        lengths = np.searchsorted(positions, span.ends)
        return [folded(seen[:length]) if self.share.replica == 0 else 0 for length in lengths]
