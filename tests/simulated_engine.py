"""A simulated engine: vLLM's own scheduler and both sides of the connector around a forward pass that is a formula.

The order of calls is that of vLLM's CPU and GPU runners. What a token's KV must be is a function of all tokens up
to it and of what else decides it, so that one wrong byte served from a cache is found in the step that uses
it. Free blocks and blocks that change hands are filled with poison.

Thread: everything on the test's thread, apart from the connector's own threads; a `Gate` holds those.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoadConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_hicache.connectors.hicache import HiCacheConnector
from vllm_hicache.grid import Grid
from vllm_hicache.index.host import HostTier
from vllm_hicache.keys import PageKeys, chain_root
from vllm_hicache.metrics import BY_NAME
from vllm_hicache.names import ObjectName, PageKey, Role, Slot
from vllm_hicache.plan import PageMove
from vllm_hicache.scheduler import SchedulerHalf
from vllm_hicache.storage import stack
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.envelope import ChunkId
from vllm_hicache.storage.registry import open_store
from vllm_hicache.storage.wrappers import StoreWrapper
from vllm_hicache.transfer.copier import CpuCopier

LAYERS, HEADS, HEAD_SIZE, BLOCK = 3, 2, 8, 16
WORDS = 2 * HEAD_SIZE * 2 // 8
"""64-bit words of one token's K and V in bfloat16, per layer and head."""
VOCABULARY = 1000
POISON = 0xDEAD_BEEF_DEAD_BEEF
PATIENCE_S = 20.0
"""A wait that lasts longer than this is a hang."""

Words = npt.NDArray[np.uint64]


def mixed(values: Words) -> Words:
    """Splitmix64 of each value."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_PLACES = mixed(np.arange(LAYERS * HEADS * WORDS, dtype=np.uint64)).reshape(LAYERS, HEADS, WORDS)


class Truth:
    """What the KV of one growing chain of tokens must be: words [tokens, layers, heads, WORDS]."""

    def __init__(self, *identity: object) -> None:
        self._hash = int.from_bytes(hashlib.sha256(repr(identity).encode()).digest()[:8], "little")
        self._hashes: list[int] = []
        self._words: Words = np.empty((0, LAYERS, HEADS, WORDS), np.uint64)

    def words(self, tokens: Sequence[int]) -> Words:
        """The words of `tokens`, which begin with those of every earlier call."""
        known = len(self._hashes)
        for token in tokens[known:]:
            self._hash = ((self._hash ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x632BE5AB) % 2**64
            self._hash ^= self._hash >> 29
            self._hashes.append(self._hash)
        if len(tokens) > known:
            new = np.array(self._hashes[known:], np.uint64)[:, None, None, None] ^ _PLACES
            self._words = np.concatenate([self._words, mixed(new)])
        return self._words[: len(tokens)]


def next_token(words: Words) -> int:
    """The token that follows: a function of every word of KV that attention sees."""
    return int(np.bitwise_xor.reduce(words, axis=None) % np.uint64(VOCABULARY))


class Gate:
    """A door that threads of the connector pass; closed, it holds them until a test opens it."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._waiting = 0

    @property
    def num_waiting(self) -> int:
        """Threads that stand before the closed door."""
        return self._waiting

    def close(self) -> None:
        """Hold whoever comes from now on."""
        self._open.clear()

    def open(self) -> None:
        """Let everybody through."""
        self._open.set()

    def passes(self) -> None:
        """Called by the thread that is to be held."""
        self._waiting += 1
        try:
            if not self._open.wait(PATIENCE_S):
                raise TimeoutError(f"a gate was closed for more than {PATIENCE_S} s")
        finally:
            self._waiting -= 1


class FaultyStore(StoreWrapper):
    """A store whose calls can be held, and made to fail: `fault` is asked before each, and may raise."""

    def __init__(self, inner: Store, faults: StoreFaults) -> None:
        super().__init__(inner)
        self._faults = faults

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        self._faults.before("exists", names[0])
        return super().exists(names)

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        self._faults.before("read", name)
        return super().read(name, parts, offset)

    def write(self, name: ObjectName, parts: Sequence[memoryview]) -> bool:
        self._faults.before("write", name)
        return super().write(name, parts)

    def delete(self, name: ObjectName) -> bool:
        self._faults.before("delete", name)
        return super().delete(name)


class CopyGates:
    """Gates before every copy of a page, by direction; from `pytest.MonkeyPatch`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.save, self.load = Gate(), Gate()
        for name, gate in (("save", self.save), ("load", self.load)):
            patch.setattr(CpuCopier, name, self._gated(getattr(CpuCopier, name), gate))

    @staticmethod
    def _gated(copy: Callable[..., None], gate: Gate) -> Callable[..., None]:
        def gated(copier: CpuCopier, moves: Sequence[PageMove], fence: None) -> None:
            gate.passes()
            copy(copier, moves, fence)

        return gated


@dataclass
class StoreFaults:
    """Shared by the stores of an engine's two halves."""

    fault: Callable[[str, ObjectName], None] = lambda operation, name: None
    gates: dict[str, Gate] = field(default_factory=lambda: {name: Gate() for name in ("exists", "read", "write")})
    calls: Counter[str] = field(default_factory=Counter)

    def install(self, patch: pytest.MonkeyPatch) -> StoreFaults:
        """Put these faults into every store that an engine opens from now on."""
        patch.setattr(stack, "open_store", lambda url, options: FaultyStore(open_store(url, options), self))
        return self

    def open_all(self) -> None:
        """End every fault."""
        self.fault = lambda operation, name: None
        for gate in self.gates.values():
            gate.open()

    def before(self, operation: str, name: ObjectName) -> None:
        """Hold and fail the call where a test wants that."""
        self.calls[operation] += 1
        if operation in self.gates:
            self.gates[operation].passes()
        self.fault(operation, name)


class _Layer:
    """Stands for an attention layer: all that is asked of it is its backend's name."""

    @staticmethod
    def get_attn_backend() -> type[_Layer]:
        return _Layer

    @staticmethod
    def get_name() -> str:
        return "SIMULATED"


@dataclass
class Job:
    """One request and what has come of it."""

    request: Request
    truth: Truth
    weights: int
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_local: int = 0
    num_external: int = 0

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return [*self.request.prompt_token_ids, *self.output]

    def check_output(self) -> None:
        """What it has said so far is what an engine without any cache says."""
        num_prompt = len(self.request.prompt_token_ids)
        for index, token in enumerate(self.output):
            assert token == next_token(self.truth.words(self.tokens[: num_prompt + index])), (
                self.request.request_id,
                index,
            )


class SimulatedEngine:
    """See the module.

    Args:
        model: directory for the model's config; the same one gives the same namespace.
        num_blocks: device blocks of `BLOCK` tokens, one of which vLLM never uses.
        num_slots: pages of the host pool.
        page_blocks: blocks of a page.
        weights: whatever decides the KV besides the tokens; a test changes it to change the weights.
        connector: False runs the scheduler alone.
        extra: further keys of `kv_connector_extra_config`.
    """

    def __init__(
        self,
        model: Path,
        store: str = "none",
        num_blocks: int = 64,
        num_slots: int = 64,
        page_blocks: int = 1,
        step_tokens: int = 128,
        max_requests: int = 8,
        policy: str = "fcfs",
        connector: bool = True,
        **extra: object,
    ) -> None:
        self.weights = 0
        self.page_tokens = page_blocks * BLOCK
        self._grid = Grid.parse(str(extra.get("grid", "1x1")))
        self.jobs: dict[str, Job] = {}
        self.counters: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        self.before_forward: Callable[[], None] = lambda: None
        self.before_update: Callable[[], None] = lambda: None
        self.num_steps = 0
        settings: dict[str, object] = {
            "store": store,
            "host_memory": num_slots * self.page_tokens * LAYERS * HEADS * WORDS * 8,
            "page_tokens": self.page_tokens,
            "load_threshold": 1,
            "model_id": "simulated",
            **extra,
        }
        config = _engine_config(model, step_tokens, max_requests, policy, settings if connector else None)
        self._names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
        config.compilation_config.static_forward_context.update({name: _Layer() for name in self._names})
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16)
        cache = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(self._names, spec)])
        # [layers, blocks, heads, WORDS, tokens]: as on the CPU, the interior of a slab is not token-major.
        self.device: Words = np.full((LAYERS, num_blocks, HEADS, WORDS, BLOCK), POISON, np.uint64)
        self.scheduler = Scheduler(config, cache, StructuredOutputManager(config), BLOCK, log_stats=True)
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK, hash_function)
        self.worker = self._start_worker(config, cache) if connector else None

    def _start_worker(self, config: VllmConfig, cache: KVCacheConfig) -> HiCacheConnector:
        worker = HiCacheConnector(config, KVConnectorRole.WORKER, cache)
        shape = (LAYERS, self.device.shape[1], HEADS, BLOCK, 2 * HEAD_SIZE)
        tensors = torch.from_numpy(self.device.view(np.int64)).view(torch.bfloat16).reshape(shape)
        worker.register_kv_caches({name: tensors[layer] for layer, name in enumerate(self._names)})
        metadata = worker.get_handshake_metadata()
        self.scheduler.get_kv_connector().set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})
        return worker

    @property
    def half(self) -> SchedulerHalf:
        """The connector's scheduler half."""
        return self.scheduler.get_kv_connector()._scheduler.half

    @property
    def tier(self) -> HostTier:
        """The connector's index of host memory."""
        return self.half.tier

    @property
    def num_held_blocks(self) -> int:
        """Device blocks that the connector keeps from reuse."""
        return self.scheduler.get_kv_connector()._scheduler._holds.num_held

    @property
    def has_push_work(self) -> bool:
        """Whether the connector wants further steps."""
        return self.scheduler.get_kv_connector().has_pending_push_work()

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 2,
        salt: str | None = None,
        lora: LoRARequest | None = None,
        priority: int = 0,
    ) -> str:
        """Enqueue a request; its name."""
        name = f"r{len(self.jobs)}"
        request = Request(
            name,
            list(prompt),
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            None,
            arrival_time=float(len(self.jobs)),
            cache_salt=salt,
            lora_request=lora,
            priority=priority,
            block_hasher=self._hasher,
        )
        self.jobs[name] = Job(request, Truth(self.weights, salt, lora), self.weights)
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        """The client has gone."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def preempt(self, name: str) -> None:
        """Take a running request's blocks away, as the scheduler does when it runs short of them."""
        request = self.jobs[name].request
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, time.monotonic())

    def status(self, name: str) -> RequestStatus:
        """The scheduler's word for what the request does."""
        return self.jobs[name].request.status

    def step(self) -> int:
        """One step of the engine; how many tokens it computed."""
        self.num_steps += 1
        free = self._poison_free_blocks()
        output = self.scheduler.schedule()
        self._poison_reallocated(free)
        result = self._execute(output)
        self.before_update()
        for outputs in self.scheduler.update_from_output(output, result).values():
            self._take(outputs)
        return output.total_num_scheduled_tokens

    def run(self, until: Callable[[], bool] | None = None, patience_s: float = PATIENCE_S) -> None:
        """Step until `until` holds, or else until the scheduler has nothing left to do."""
        deadline = time.monotonic() + patience_s
        while not until() if until is not None else self.scheduler.has_requests():
            if not self.step() or until is not None:
                time.sleep(0.0002)  # whoever waits for the connector's threads lets them run
            if time.monotonic() > deadline or (until is not None and not self.scheduler.has_requests() and not until()):
                states = {name: str(self.status(name)) for name in self.scheduler.requests}
                raise TimeoutError(f"step {self.num_steps}: what was waited for has not come; requests are {states}")

    def run_until_finished(self, *names: str, patience_s: float = PATIENCE_S) -> None:
        """Step until these requests have ended, whatever the connector still does for them."""
        self.run(lambda: all(self.jobs[name].request.is_finished() for name in names), patience_s)

    def serve(self, prompt: Sequence[int], **arguments: object) -> Job:
        """Run one request, and what it leaves behind, to the end."""
        name = self.add(prompt, **arguments)
        self.run()
        return self.jobs[name]

    def drop_device(self) -> None:
        """Empty vLLM's own prefix cache."""
        assert self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Stop both sides."""
        if self.worker is not None:
            self.worker.shutdown()
        self.scheduler.shutdown()

    def check_at_rest(self) -> None:
        """Conservation: run to the end; nothing is held, reserved, leased or forgotten, and every byte is right."""
        self.run()
        pool = self.scheduler.kv_cache_manager.block_pool
        assert not self.scheduler.requests
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        if self.worker is None:
            return
        assert not self.has_push_work
        self.tier.check()
        assert (self.tier.num_leases, self.tier.num_reserved, self.num_held_blocks) == (0, 0, 0)
        for job in self.jobs.values():
            job.check_output()
            self.check_host(job)

    def keys(self, job: Job, num_tokens: int | None = None) -> list[PageKey]:
        """Page keys of a request without adapter, under the namespace in force."""
        keys = PageKeys(chain_root(self.half.namespace.digest(), job.request.cache_salt), self.page_tokens)
        keys.extend(job.tokens[:num_tokens])
        return keys.keys

    def check_host(self, job: Job) -> int:
        """Every page of a request's chain in host memory holds what it must; how many there are."""
        if job.request.lora_request is not None or job.weights != self.weights:
            return 0
        found = self.tier.match(self.keys(job), touch=False)
        for page, slot in enumerate(found.slots):
            assert self.host_bytes(slot) == self.page_bytes(job, page), f"page {page} of {job.request.request_id}"
        return found.num_pages

    def host_bytes(self, slot: Slot) -> bytes:
        """What a slot of the host pool holds."""
        return self.worker._worker.half._pool.tensor[slot].numpy().tobytes()

    def page_bytes(self, job: Job, page: int) -> bytes:
        """What page `page` of a request is: for each cell of the grid [head][layer][block][word][token]."""
        words = job.truth.words(job.tokens)[page * self.page_tokens : (page + 1) * self.page_tokens]
        whole = words.reshape(-1, BLOCK, LAYERS, HEADS, WORDS).transpose(3, 2, 0, 4, 1)
        layers, heads = self._grid.layer_bounds(LAYERS), self._grid.head_bounds(HEADS)
        return b"".join(whole[slice(*head), slice(*layer)].tobytes() for layer in layers for head in heads)

    def stored_pages(self, job: Job) -> Iterator[bytes | None]:
        """The payloads of a request's pages as the store has them, `None` where it has none."""
        store = self.half._store
        for key in self.keys(job):
            payload = bytearray(self.page_tokens * LAYERS * HEADS * WORDS * 8)
            unit = self.page_tokens * WORDS * 8
            reason = store.load(ChunkId(key, 0, Role.TARGET, 0, 0), memoryview(payload), unit)
            yield None if reason is not None else bytes(payload)

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        if self.worker is None:
            return self._forward(output)
        assert not output.has_sync_kv_loads
        self.worker.handle_preemptions(output.kv_connector_metadata)
        self.worker.bind_connector_metadata(output.kv_connector_metadata)
        self._check_targets(output.kv_connector_metadata)
        result = self._forward(output)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        transfers = self.worker.get_transfer_results(output.finished_req_ids)
        connector_output = KVConnectorOutput(
            finished_sending=transfers.finished_sending,
            finished_recving=transfers.finished_recving,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            kv_connector_stats=self.worker.get_kv_connector_stats(),
            kv_cache_events=self.worker.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        if not output.total_num_scheduled_tokens:
            return ModelRunnerOutput.with_kv_conn_output_only(connector_output)
        result.kv_connector_output = connector_output
        return result

    def _check_targets(self, metadata: KVConnectorMetadata) -> None:
        """A load writes only to blocks that its request alone has, and that nobody is served from."""
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        for load in metadata.plan.loads:
            for block in (blocks[index] for page in load.pages for index in page.blocks):
                assert (block.ref_cnt, block.block_hash) == (1, None), f"a load for {load.request_id} writes {block}"

    def _forward(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.before_forward()
        names = list(output.num_scheduled_tokens)
        spans = [(name, self._span(name, output.num_scheduled_tokens[name])) for name in names]
        for name, (start, end) in spans:
            self._compute(name, start, end)
        sampled = [self._attend(name, end) for name, (_, end) in spans]
        return ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, sampled)

    def _span(self, name: str, num_tokens: int) -> tuple[int, int]:
        end = self.jobs[name].request.num_computed_tokens
        return end - num_tokens, end

    def _blocks(self, name: str) -> list[int]:
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        return list(blocks)

    def _compute(self, name: str, start: int, end: int) -> None:
        job = self.jobs[name]
        words = job.truth.words(job.request.all_token_ids[:end])[start:]
        positions = np.arange(start, end)
        blocks = np.array(self._blocks(name))[positions // BLOCK]
        self.device.transpose(1, 4, 0, 2, 3)[blocks, positions % BLOCK] = words

    def _attend(self, name: str, end: int) -> list[int]:
        """Read all that attention would read, and compare it; the sampled token, none in the middle of a prompt."""
        job = self.jobs[name]
        blocks = self._blocks(name)[: -(-end // BLOCK)]
        seen = self.device[:, blocks].transpose(1, 4, 0, 2, 3).reshape(-1, LAYERS, HEADS, WORDS)[:end]
        wrong = np.argwhere(seen != job.truth.words(job.request.all_token_ids[:end]))
        if len(wrong):
            position, layer, head, _ = wrong[0]
            raise AssertionError(
                f"step {self.num_steps}: request {name} (cached {job.num_local} + {job.num_external}) sees wrong KV at "
                f"position {position} of {end}, layer {layer}, head {head}; {len(set(wrong[:, 0]))} positions are wrong"
            )
        return [next_token(seen)] if end == job.request.num_tokens else []

    def _take(self, outputs: object) -> None:
        for each in outputs.outputs:
            job = self.jobs[each.request_id]
            job.output += each.new_token_ids
            job.finish_reason = str(each.finish_reason) if each.finish_reason is not None else None
            if each.prefill_stats is not None:
                job.num_local = each.prefill_stats.num_local_cached_tokens
                job.num_external = each.prefill_stats.num_external_cached_tokens
        stats = outputs.scheduler_stats
        if stats is not None and stats.connector_prefix_cache_stats is not None:
            self.hits.update(
                {source.value: n for source, n in stats.connector_prefix_cache_stats.hits_by_source.items()}
            )
        if stats is not None and stats.kv_connector_stats is not None:
            self.counters.update({key: n for key, n in stats.kv_connector_stats.items() if _is_counter(key)})

    def _poison_free_blocks(self) -> dict[int, object]:
        """Fill free blocks that vLLM will not serve; what each free block is known as."""
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        free = {block.block_id: block.block_hash for block in blocks if not block.ref_cnt and not block.is_null}
        self.device[:, [block for block, known in free.items() if known is None]] = POISON
        return free

    def _poison_reallocated(self, free: dict[int, object]) -> None:
        """Fill blocks that were free, and are now used as something else."""
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        new = [index for index, known in free.items() if blocks[index].ref_cnt and blocks[index].block_hash != known]
        self.device[:, new] = POISON


class Traffic:
    """A random mixture of requests: shared prefixes, further turns of finished ones, aborts and preemptions."""

    def __init__(
        self, engine: SimulatedEngine, seed: int, families: int = 4, salts: Sequence[str | None] = (None,)
    ) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self._families = [self._random.choices(range(VOCABULARY), k=160) for _ in range(families)]
        self._salts = salts

    def run(self, num_steps: int, arrivals: float = 0.2, aborts: float = 0.03, preemptions: float = 0.03) -> None:
        """Step `num_steps` times; the other numbers are chances in each step."""
        for _ in range(num_steps):
            if self._random.random() < arrivals and len(self._engine.scheduler.requests) < 12:
                self._arrive()
            if self._random.random() < aborts and self._engine.scheduler.requests:
                self._engine.abort(self._random.choice(list(self._engine.scheduler.requests)))
            if self._random.random() < preemptions and self._engine.scheduler.running:
                self._engine.preempt(self._random.choice(self._engine.scheduler.running).request_id)
            if not self._engine.step():
                time.sleep(0.0002)

    def _arrive(self) -> None:
        finished = [job for job in list(self._engine.jobs.values())[-20:] if job.finish_reason == "length"]
        if finished and self._random.random() < 0.4:
            prompt, salt = self._next_turn(self._random.choice(finished))
        else:
            family = self._random.choice(self._families)
            prompt = family[: self._random.randrange(1, 160)] + self._random.choices(
                range(9), k=self._random.randrange(9)
            )
            salt = self._random.choice(self._salts)
        self._engine.add(prompt, self._random.randrange(1, 24), salt=salt, priority=self._random.randrange(3))

    def _next_turn(self, job: Job) -> tuple[list[int], str | None]:
        return (job.tokens + self._random.choices(range(9), k=self._random.randrange(1, 20)))[
            :230
        ], job.request.cache_salt


Start = Callable[..., SimulatedEngine]


@contextmanager
def engines_on(tmp_path: Path) -> Iterator[Start]:
    """Starts engines on one store; at the end each is at rest and nothing is left over."""
    engines: list[SimulatedEngine] = []

    def begin(store: str = f"file://{tmp_path}/store?capacity=1GiB", **arguments: object) -> SimulatedEngine:
        engines.append(SimulatedEngine(tmp_path / "model", store, **arguments))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.check_at_rest()
        engine.close()


@contextmanager
def gated_copies(patch: pytest.MonkeyPatch) -> Iterator[CopyGates]:
    """Gates of the copies between host and device; open in the end."""
    gates = CopyGates(patch)
    yield gates
    gates.save.open()
    gates.load.open()


@contextmanager
def faulty_stores(patch: pytest.MonkeyPatch) -> Iterator[StoreFaults]:
    """Gates and faults of every store that is opened; ended in the end."""
    faults = StoreFaults().install(patch)
    yield faults
    faults.open_all()


def _is_counter(key: str) -> bool:
    return BY_NAME[key.split("|", 1)[0]].kind == "counter"


def _engine_config(
    model: Path, step_tokens: int, max_requests: int, policy: str, settings: dict[str, object] | None
) -> VllmConfig:
    model.mkdir(parents=True, exist_ok=True)
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4 * HEAD_SIZE,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    (model / "config.json").write_text(json.dumps(shape))
    transfer = KVTransferConfig(
        kv_connector="HiCacheConnector",
        kv_connector_module_path="vllm_hicache.connectors",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=settings or {},
    )
    return VllmConfig(
        model_config=ModelConfig(model=str(model), skip_tokenizer_init=True, dtype="bfloat16"),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_requests,
            max_num_batched_tokens=step_tokens,
            max_model_len=4096,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
            policy=policy,
        ),
        kv_transfer_config=transfer if settings is not None else None,
        load_config=LoadConfig(load_format="dummy"),
        device_config=DeviceConfig("cpu"),
    )
