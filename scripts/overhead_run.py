"""What the connector costs a workload that never hits: the same engine with and without it, in turns.

    scripts/bench_overhead [--json PATH] [--pairs N] [--store URL] [--host-memory SIZE]

Two engines live side by side and compute in turns, never at once; each prompt is random and asked once of either,
so everything is a miss. The connector has a file store and its defaults: it saves and flushes every full page, and
both are part of what is measured, in three ways. "at rest": one request, then a pause until the engine's background
work has ended. "back to back": runs of requests without a pause, so that flushes meet the next request of their own
engine (a pause follows each run, or they would slow the other engine down and hide the cost). "batch": requests at
once. Ratios are those of pairs that were taken one after the other, in alternating order; the interval is a 95 %
bootstrap interval of their median. The aim is a loss of 2 % at most. Takes about 7 minutes on two cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from demo_report import machine
from engine_process import Engine, EngineError, Settings
from prepare_model import default_cache, model_path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out"
COPY_BENCHMARK = ROOT / "scripts" / "bench_copy"
MAX_MODEL_LEN = 8192
PROMPT_TOKENS = 512
OUTPUT_TOKENS = 16
RUN_REQUESTS = 6
BATCH_REQUESTS = 8
TOKEN_RANGE = (1000, 40000)
AIM = 0.02
RESAMPLES = 2000
MIN_PAIRS = 6
COPY_PAGES = 64
COPY_ROUNDS = 9

Prompt = list[int]


@dataclass(frozen=True, slots=True)
class Series:
    """One quantity in pairs: without the connector and with it, measured one right after the other."""

    name: str
    unit: str
    higher_is_better: bool
    without: list[float]
    with_: list[float]

    @property
    def losses(self) -> list[float]:
        """What the connector loses in each pair: 0.02 is 2 % more time, or 2 % more time for the same tokens."""
        pairs = zip(self.without, self.with_, strict=True)
        return [(before / after if self.higher_is_better else after / before) - 1 for before, after in pairs]

    def summary(self) -> dict[str, Any]:
        """Medians, the pairwise loss with its spread, and whether that is within the aim."""
        losses = self.losses
        low, high = median_interval(losses)
        quartiles = statistics.quantiles(losses, n=4) if len(losses) > 1 else losses * 3
        without, with_ = statistics.median(self.without), statistics.median(self.with_)
        return {
            "name": self.name,
            "unit": self.unit,
            "pairs": len(losses),
            "without": without,
            "with": with_,
            "ratio": with_ / without,
            "loss": statistics.median(losses),
            "loss_interval": [low, high],
            "loss_quartiles": [quartiles[0], quartiles[2]],
            "verdict": verdict(low, high) if len(losses) >= MIN_PAIRS else "undecided",
            "samples": {"without": self.without, "with": self.with_},
        }


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % bootstrap interval of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return medians[RESAMPLES * 25 // 1000], medians[RESAMPLES * 975 // 1000]


def verdict(low: float, high: float) -> str:
    """Whether a loss somewhere in [low, high] is within the aim."""
    if high <= AIM:
        return "within"
    return "over" if low > AIM else "undecided"


class Prompts:
    """Random prompts, each made once."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def take(self, count: int) -> list[Prompt]:
        """New ones."""
        return [[self._rng.randrange(*TOKEN_RANGE) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Pair:
    """The two engines."""

    without: Engine
    with_: Engine

    def in_turns(self, number: int, work: Callable[[Engine], list[float]]) -> tuple[list[float], list[float]]:
        """Do `work` on both, odd numbers the other way round, with each engine at rest before the next."""
        done: dict[bool, list[float]] = {}
        for has_connector in (False, True) if number % 2 == 0 else (True, False):
            engine = self.with_ if has_connector else self.without
            done[has_connector] = work(engine)
            engine.settle()
        return done[False], done[True]


def at_rest(pair: Pair, prompts: Prompts, count: int) -> list[Series]:
    """Single requests to engines without background work."""
    first = Series("TTFT, at rest", "s", False, [], [])
    total = Series("request, at rest", "s", False, [], [])
    for number, prompt in enumerate(prompts.take(count)):

        def one(engine: Engine, prompt: Prompt = prompt) -> list[float]:
            answer = engine.ask(prompt, OUTPUT_TOKENS)
            return [answer.ttft_s, answer.total_s]

        without, with_ = pair.in_turns(number, one)
        for series, before, after in zip((first, total), without, with_, strict=True):
            series.without.append(before)
            series.with_.append(after)
    return [first, total]


def back_to_back(pair: Pair, prompts: Prompts, runs: int) -> list[Series]:
    """Runs of requests, one right after the other."""
    first = Series("TTFT, back to back", "s", False, [], [])
    throughput = Series("throughput, back to back", "tok/s", True, [], [])
    for number in range(runs):
        batch = prompts.take(RUN_REQUESTS)

        def one_run(engine: Engine, batch: list[Prompt] = batch) -> list[float]:
            start = time.perf_counter()
            ttfts = [engine.ask(prompt, OUTPUT_TOKENS).ttft_s for prompt in batch]
            num_tokens = RUN_REQUESTS * (PROMPT_TOKENS + OUTPUT_TOKENS)
            return [num_tokens / (time.perf_counter() - start), *ttfts]

        without, with_ = pair.in_turns(number, one_run)
        throughput.without.append(without[0])
        throughput.with_.append(with_[0])
        first.without.extend(without[1:])
        first.with_.extend(with_[1:])
    return [first, throughput]


def in_batches(pair: Pair, prompts: Prompts, batches: int) -> list[Series]:
    """Requests at once."""
    throughput = Series("throughput, batch", "tok/s", True, [], [])
    for number in range(batches):
        batch = prompts.take(BATCH_REQUESTS)

        def one_batch(engine: Engine, batch: list[Prompt] = batch) -> list[float]:
            answer = engine.ask_all(batch, OUTPUT_TOKENS)
            return [answer.num_tokens / answer.seconds]

        without, with_ = pair.in_turns(number, one_batch)
        throughput.without.extend(without)
        throughput.with_.extend(with_)
    return [throughput]


def measure(pair: Pair, pairs: int) -> list[Series]:
    """All three ways, after both engines have computed something."""
    prompts = Prompts(seed=pairs)
    rest = max(2, pairs // 3)
    for engine in (pair.without, pair.with_):
        engine.ask(prompts.take(1)[0], OUTPUT_TOKENS)
        engine.ask_all(prompts.take(BATCH_REQUESTS), OUTPUT_TOKENS)
        engine.settle()
    say(f"{pairs} pairs of single requests, with a pause after each (2 minutes)")
    series = at_rest(pair, prompts, pairs)
    say(f"{rest} pairs of {RUN_REQUESTS} requests back to back (1-2 minutes)")
    series += back_to_back(pair, prompts, rest)
    say(f"{rest} pairs of batches of {BATCH_REQUESTS} (2 minutes)")
    return series + in_batches(pair, prompts, rest)


def copy_bandwidth(source: Path = COPY_BENCHMARK) -> dict[str, Any]:
    """Copies between device blocks and host slots beside torch's own, by the functions of `scripts/bench_copy`."""
    if not source.exists():
        return {"note": f"left out: {source.name} is not there"}
    say("copies between device blocks and host memory, beside torch's own")
    try:
        bench = load_program(source)
        setup = bench.Setup(bench.MODELS[0], COPY_PAGES)
        threads = bench.torch.get_num_threads()
        rows = bench.measure_copies(setup, COPY_ROUNDS, threads)
        return {"torch_threads": threads, "rows": [row._asdict() for row in rows]}
    except (AttributeError, TypeError) as error:  # that script has changed; the rest of this result stands
        return {"note": f"left out: {source.name} is not what this script knows ({error})"}


def load_program(source: Path) -> ModuleType:
    """A program without `.py` in its name, as a module."""
    loader = SourceFileLoader(source.name, str(source))
    spec = importlib.util.spec_from_loader(source.name, loader)
    if spec is None:
        raise TypeError(f"{source} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[source.name] = module
    loader.exec_module(module)
    return module


def assemble(
    series: Sequence[Series], counters: Mapping[str, float], versions: Mapping[str, str], copy: Mapping[str, Any]
) -> dict[str, Any]:
    """The result as it is written."""
    return {
        "aim": AIM,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "series": [each.summary() for each in series],
        "hit_tokens": round(sum(value for name, value in counters.items() if "hit_tokens" in name)),
        "connector": dict(counters),
        "copy": dict(copy),
        "versions": dict(versions),
        "machine": machine(),
        "notes": {
            "loss": "median of pairwise losses; interval: 95 % bootstrap interval of that median",
            "back to back": "flushes run into the next request of their own engine, and drain before the other's turn",
            "store": "files; writes may end in the operating system's page cache",
        },
    }


def table(result: Mapping[str, Any]) -> str:
    """Medians, and the pairwise loss."""
    lines = [f"{'':<26}{'without':>9}{'with':>9} {'unit':<7}{'loss':>7}  {'95 % interval':<17}{'pairs':>6}  aim 2 %"]
    for each in result["series"]:
        low, high = each["loss_interval"]
        lines.append(
            f"{each['name']:<26}{each['without']:>9.4g}{each['with']:>9.4g} {each['unit']:<7}{each['loss']:>+7.1%}"
            f"  {f'{low:+.1%} to {high:+.1%}':<17}{each['pairs']:>6}  {each['verdict']}"
        )
    counters = result["connector"]
    saved, flushed = (counters.get(f"vllm:hicache_bytes|{way}", 0) / 1e6 for way in ("save", "flush"))
    lines.append(f"\nmeanwhile saved {saved:,.0f} MB, flushed {flushed:,.0f} MB, hit tokens {result['hit_tokens']}")
    copy = result["copy"]
    if "note" in copy:
        lines.append(f"copy bandwidth {copy['note']}")
    for row in copy.get("rows", ()):
        lines.append(
            f"{row['direction']} copies at {row['gib_per_s']:.2f} GiB/s: {row['ratio_one_thread']:.2f} of torch's copy "
            f"on one thread, {row['ratio']:.2f} on {copy['torch_threads']} ({row['model']})"
        )
    return "\n".join(lines)


def say(text: str) -> None:
    """Progress, apart from the result."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line: see the module."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench_overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=OUT / "overhead.json", help="default: out/overhead.json")
    parser.add_argument("--pairs", type=int, default=24, help="pairs of single requests (default: 24)")
    parser.add_argument("--store", help="store URL; the default is files in a directory that is removed afterwards")
    parser.add_argument("--host-memory", default="2x", help="of the connector (default: its own default, 2x)")
    args = parser.parse_args(arguments)
    if args.pairs < 2:
        parser.error(f"--pairs {args.pairs} has no spread: give at least 2, better 24")
    return args


def bench(args: argparse.Namespace, log: Path) -> dict[str, Any]:
    """Start both engines, measure, and put the result together. Raises EngineError."""
    model = str(model_path(default_cache()))
    with tempfile.TemporaryDirectory(dir=OUT, prefix="overhead-", ignore_cleanup_errors=True) as scratch:
        connector = {
            "store": args.store or f"file://{scratch}/store",
            "host_memory": args.host_memory,
            "generation": f"bench-{secrets.token_hex(4)}",
        }
        say("starting vLLM without and with the connector (a minute)")
        with (
            Engine(Settings(model, MAX_MODEL_LEN), log) as without,
            Engine(Settings(model, MAX_MODEL_LEN, connector), log) as with_,
        ):
            series = measure(Pair(without, with_), args.pairs)
            counters = with_.metrics()
        return assemble(series, counters, with_.versions, copy_bandwidth())


def main() -> int:
    """Measure and show; 1 if the workload was not what it claims, all misses and saved."""
    args = read_arguments()
    OUT.mkdir(exist_ok=True)
    log = OUT / "overhead.log"
    log.unlink(missing_ok=True)
    try:
        result = bench(args, log)
    except EngineError as error:
        print(f"scripts/bench_overhead: {error}", file=sys.stderr)
        return 1
    args.json.write_text(json.dumps(result, indent=2) + "\n")
    print(table(result), f"result in {args.json}", sep="\n\n")
    hits, flushed = result["hit_tokens"], result["connector"].get("vllm:hicache_bytes|flush", 0)
    if hits or not flushed:
        claim = f"{hits} hit tokens and {flushed:.0f} flushed bytes, expected none and many"
        print(f"scripts/bench_overhead: {claim}; the connector did not do the work that was measured", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
