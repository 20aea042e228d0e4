"""A simulated engine: vLLM's own scheduler and both sides of the connector around a forward pass that is a formula.

What a token's KV must be is a function of all tokens up to it and of what else decides it, so that one wrong byte
served from a cache is found in the step that uses it, on the rank that holds it. Free blocks and blocks that change
hands are filled with poison. Several ranks have their results aggregated by vLLM; with pipeline stages, batches are in
flight and ranks run them in order, some steps after each other.

Thread: everything on the test's thread, apart from the connector's own threads.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from simulated_faults import PATIENCE_S
from simulated_model import (
    BLOCK,
    HEADS,
    LAYERS,
    WORDS,
    Cut,
    Job,
    Share,
    Truth,
    check_targets,
    engine_config,
    free_blocks,
    page_content,
    rank_config,
    stored_page,
    to_poison,
)
from simulated_rank import Batch, SimulatedRank, Span
from thread_collective import Groups
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_hicache.geometry import PageLayout, RoleShape
from vllm_hicache.grid import Grid
from vllm_hicache.index.host import HostTier
from vllm_hicache.keys import PageKeys, chain_root
from vllm_hicache.metrics import BY_NAME
from vllm_hicache.names import PageKey, Role, Slot
from vllm_hicache.scheduler import SchedulerHalf


class SimulatedEngine:
    """See the module.

    Args:
        model: directory for the model's config; the same one gives the same namespace.
        num_blocks: device blocks of each rank, of `BLOCK` tokens, one of which vLLM never uses.
        num_slots: pages of each rank's host pool, of the ranks with the largest part; others have room for more.
        page_blocks: blocks of a page.
        weights: whatever decides the KV besides the tokens; a test changes it to change the weights.
        connector: False runs the scheduler alone.
        role: the connector's, as vLLM calls it.
        skew: seed of how far ranks run behind each other.
        of_rank: by rank, what differs there of `extra`.
        extra: further keys of `kv_connector_extra_config`. Several ranks have the finest grid unless one is given.
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
        role: str = "kv_both",
        tp_size: int = 1,
        pp_size: int = 1,
        dcp_size: int = 1,
        num_heads: int = HEADS,
        skew: int = 0,
        of_rank: Mapping[int, Mapping[str, object]] | None = None,
        **extra: object,
    ) -> None:
        self.weights = 0
        self.page_tokens = page_blocks * BLOCK
        self.has_connector = connector
        self.jobs: dict[str, Job] = {}
        self.counters: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        self.before_forward: Callable[[], None] = lambda: None
        self.before_update: Callable[[], None] = lambda: None
        self.num_steps = 0
        self.cut = cut = Cut(tp_size, pp_size, dcp_size, num_heads)
        shares = [Share.of(rank, *cut) for rank in range(cut.num_ranks)]
        finest = {"grid": f"{LAYERS}x{num_heads}"} if len(shares) > 1 else {}
        settings: dict[str, object] = {
            "store": store,
            "host_memory": num_slots * max(share.page_bytes(self.page_tokens) for share in shares),
            "page_tokens": self.page_tokens,
            "load_threshold": 1,
            "model_id": "simulated",
            **finest,
            **extra,
        }
        self._grid = Grid.parse(str(settings.get("grid", "1x1")))
        config = engine_config(model, cut, step_tokens, max_requests, policy, settings if connector else None, role)
        self._configure(config, model)
        config.cache_config.num_gpu_blocks = num_blocks
        cache = shares[0].cache_config(num_blocks)
        self.scheduler = Scheduler(config, cache, StructuredOutputManager(config), BLOCK * dcp_size, log_stats=True)
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK * dcp_size, hash_function)
        self._chance = random.Random(skew)
        self._flights: deque[Batch] = deque()
        self._most_flights = config.max_concurrent_batches
        self._output_rank = len(shares) - tp_size
        self.ranks = self._start_ranks(config, shares, num_blocks, of_rank or {})
        self._behind: list[deque[Batch]] = [deque() for _ in shares]

    def _start_ranks(
        self, config: VllmConfig, shares: Sequence[Share], num_blocks: int, of_rank: Mapping[int, Mapping[str, object]]
    ) -> list[SimulatedRank]:
        ranks, groups = [], Groups()
        for rank, share in enumerate(shares):
            own = rank_config(config, rank, of_rank.get(rank, {})) if self.has_connector else None
            ranks.append(self._make_rank(rank, share, num_blocks, own, lambda: self.before_forward(), groups))
        if self.has_connector:
            connector = self.scheduler.get_kv_connector()
            handshakes = {divmod(rank.number, self.cut.tp_size): rank.handshake() for rank in ranks}
            connector.set_xfer_handshake_metadata_pp_aware(handshakes)
            self._aggregator = KVOutputAggregator.from_connector(connector, len(ranks))
        return ranks

    def _configure(self, config: VllmConfig, model: Path) -> None:
        """What an engine of another kind adds to vLLM's configuration."""

    _make_rank: type[SimulatedRank] = SimulatedRank

    @property
    def has_work(self) -> bool:
        """Whether requests or the connector want steps, or some are in flight."""
        return self.scheduler.has_requests() or bool(self._flights)

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
        handed: Mapping[str, object] | None = None,
    ) -> str:
        """Enqueue a request, with what a proxy says to the connector; its name."""
        name = f"r{len(self.jobs)}"
        request = Request(
            name,
            list(prompt),
            SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=_extra(handed)),
            None,
            arrival_time=float(len(self.jobs)),
            cache_salt=salt,
            lora_request=lora,
            priority=priority,
            block_hasher=self._hasher,
        )
        self.jobs[name] = Job(request, Truth(self.weights, salt, lora, num_heads=self.cut.num_heads), self.weights)
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        """The client has gone."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def preempt(self, name: str) -> None:
        """Take a running request's blocks away, as the scheduler does when it runs short of them."""
        request = self.jobs[name].request
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, time.monotonic(), drop_stale_output=bool(self._flights))

    def status(self, name: str) -> RequestStatus:
        """The scheduler's word for what the request does."""
        return self.jobs[name].request.status

    def step(self) -> int:
        """One step of the engine, in vLLM's order: a batch if there is room for one more in flight, else a result.

        Returns:
            How many tokens the batch computes.
        """
        self.num_steps += 1
        num_tokens = 0
        if self._most_flights == 1 or self.scheduler.has_requests():
            num_tokens = self._schedule()
            self._run_some()
            if len(self._flights) < self._most_flights and (num_tokens or self.scheduler.has_requests()):
                return num_tokens
        if self._flights:
            self._finish_oldest()
        return num_tokens

    def run(self, until: Callable[[], bool] | None = None, patience_s: float = PATIENCE_S) -> None:
        """Step until `until` holds, or else until the scheduler has nothing left to do."""
        deadline = time.monotonic() + patience_s
        while not until() if until is not None else self.has_work:
            if not self.step() or until is not None:
                time.sleep(0.0002)  # whoever waits for the connector's threads lets them run
            if time.monotonic() > deadline or (until is not None and not self.has_work and not until()):
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
        for rank in self.ranks:
            rank.close()
        self.scheduler.shutdown()

    def check_at_rest(self) -> None:
        """Conservation: run to the end; nothing is held, reserved, leased or forgotten, and every byte is right."""
        self.run()
        pool = self.scheduler.kv_cache_manager.block_pool
        assert not self.scheduler.requests
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        if not self.has_connector:
            return
        assert not self.has_push_work
        self.tier.check()
        assert (self.tier.num_leases, self.tier.num_reserved, self.num_held_blocks) == (0, 0, 0)
        for job in self.jobs.values():
            job.check_output()
            self.check_host(job)

    looks_ahead = False
    """Whether pages are known by the token that follows them too."""

    def page_keys(self, job: Job, num_tokens: int | None = None) -> PageKeys:
        """Page keys of a request without adapter, under the namespace in force."""
        root = chain_root(self.half.namespace.digest(), job.request.cache_salt)
        keys = PageKeys(root, self.page_tokens, with_next=self.looks_ahead)
        keys.extend(job.tokens[:num_tokens])
        return keys

    def keys(self, job: Job, num_tokens: int | None = None) -> list[PageKey]:
        """What those pages are known by."""
        return self.page_keys(job, num_tokens).keys

    def check_host(self, job: Job) -> int:
        """Every page of a request's chain in host memory is on its owners, as it must be; how many there are."""
        if job.request.lora_request is not None or job.weights != self.weights:
            return 0
        found, num_owners = self.tier.match(self.keys(job), touch=False), self.tier.ownership.num_owners
        for page, slot in enumerate(found.slots):
            assert slot % num_owners == (page + found.rotation) % num_owners, f"page {page} is in slot {slot}"
            keepers = [rank for rank in self.ranks if rank.keeps(slot)]
            assert len(keepers) == len(self.ranks) // num_owners
            for rank in keepers:
                is_right = self._is_right(job, page, rank, slot)
                assert is_right, f"page {page} of {job.request.request_id} on rank {rank.number}"
        return found.num_pages

    def _is_right(self, job: Job, page: int, rank: SimulatedRank, slot: Slot) -> bool:
        return rank.host_bytes(slot) == self.page_bytes(job, page, rank.share)

    def host_bytes(self, slot: Slot, rank: int = 0) -> bytes:
        """What a slot of a rank's host pool holds."""
        return self.ranks[rank].host_bytes(slot)

    def page_bytes(self, job: Job, page: int, share: Share | None = None) -> bytes:
        """What a page of a request is, or a rank's share of it, as it lies in a slot."""
        words = job.truth.words(job.tokens)[page * self.page_tokens : (page + 1) * self.page_tokens]
        return page_content(words, self._grid, share or Share.of(0, 1, 1, 1, self.cut.num_heads))

    def stored_pages(self, job: Job) -> Iterator[bytes | None]:
        """The payloads of a request's pages as the store has them, `None` where an object is missing or bad."""
        shape = RoleShape(Role.TARGET, LAYERS, self.cut.num_heads, BLOCK * WORDS * 8)
        cells = PageLayout((shape,), BLOCK, self.page_tokens, self._grid).cells
        return (stored_page(self.half._store, key, cells) for key in self.page_keys(job).plain)

    def _schedule(self) -> int:
        """Take down the next batch for all ranks; its number of tokens."""
        pool = self.scheduler.kv_cache_manager.block_pool
        free = free_blocks(pool)
        output = self.scheduler.schedule()
        if self.has_connector:
            check_targets(pool, output.kv_connector_metadata.plan.loads)
        guesses = output.scheduled_spec_decode_tokens
        spans = [self._span(name, count, guesses.get(name, ())) for name, count in output.num_scheduled_tokens.items()]
        batch = Batch(self.num_steps, output, spans, to_poison(pool, free))
        self._flights.append(batch)
        for waiting in self._behind:
            waiting.append(batch)
        return output.total_num_scheduled_tokens

    def _run_some(self) -> None:
        """Some ranks run some of the batches that they have not run yet, in their order."""
        for rank in self.ranks:
            for _ in range(self._chance.randint(0, len(self._behind[rank.number]))):
                rank.run(self._behind[rank.number].popleft())

    def _finish_oldest(self) -> None:
        """Give the scheduler the result of the oldest batch in flight, as soon as all ranks have run it."""
        batch = self._flights.popleft()
        late = [rank for rank in self.ranks if rank.number not in batch.results]
        for rank in self._chance.sample(late, len(late)):
            rank.run(self._behind[rank.number].popleft())
        self.before_update()
        for outputs in self.scheduler.update_from_output(batch.output, self._aggregated(batch)).values():
            self._take(outputs)

    def _aggregated(self, batch: Batch) -> ModelRunnerOutput:
        results = [batch.result(rank.number, rank.number >= self._output_rank) for rank in self.ranks]
        if not self.has_connector:
            return results[self._output_rank]
        return self._aggregator.aggregate(results, self._output_rank)

    def _span(self, name: str, num_tokens: int, guesses: Sequence[int]) -> Span:
        request = self.jobs[name].request
        end = request.num_computed_tokens
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        tokens = [*request.all_token_ids, *guesses]
        ends = range(request.num_tokens, end + 1)
        return Span(name, end - num_tokens, end, list(blocks), tokens, self.jobs[name].truth, ends, guesses)

    def _take(self, outputs: object) -> None:
        for each in outputs.outputs:
            job = self.jobs[each.request_id]
            job.output += each.new_token_ids
            job.finish_reason = str(each.finish_reason) if each.finish_reason is not None else None
            if each.kv_transfer_params is not None:
                job.told = each.kv_transfer_params
            if each.prefill_stats is not None:
                job.num_local = each.prefill_stats.num_local_cached_tokens
                job.num_external = each.prefill_stats.num_external_cached_tokens
        stats = outputs.scheduler_stats
        if stats is not None and stats.connector_prefix_cache_stats is not None:
            hits = stats.connector_prefix_cache_stats.hits_by_source.items()
            self.hits.update({source.value: n for source, n in hits})
        if stats is not None and stats.kv_connector_stats is not None:
            counts = stats.kv_connector_stats.items()
            self.counters.update({key: n for key, n in counts if BY_NAME[key.partition("|")[0]].kind == "counter"})


def _extra(handed: Mapping[str, object] | None) -> dict[str, object] | None:
    return {"kv_transfer_params": dict(handed)} if handed is not None else None


Start = Callable[..., SimulatedEngine]


@contextmanager
def engines_on(tmp_path: Path, make: Callable[..., SimulatedEngine] = SimulatedEngine) -> Iterator[Start]:
    """Starts engines on one store; at the end each is at rest and nothing is left over."""
    engines: list[SimulatedEngine] = []

    def begin(store: str = f"file://{tmp_path}/store?capacity=1GiB", **arguments: object) -> SimulatedEngine:
        engines.append(make(tmp_path / "model", store, **arguments))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.check_at_rest()
        engine.close()
