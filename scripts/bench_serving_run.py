"""Serving with and without the cache: one engine, and a prefill and a decode engine behind a router.

    scripts/bench_serving [--json PATH] [--picture PATH] [--quick]

vLLM's own `bench serve` sends equal loads to four set-ups, one after the other: vLLM alone and with the connector, and
the same of a pair behind `vllm-router`, where the one without is joined by vLLM's NixlConnector. SmolLM2, bfloat16,
answers of 64 tokens. Device caches and host pools are smaller than what the loads come back to, so that device, host
memory and store all matter; a pair's engines share the store. The four loads are in the table's head, with the sizes.

An engine alone has all cores, of a pair each has one. Each set-up begins with empty caches and keeps them from load to
load, which have nothing in common. `bench serve` counts the times, as its requests see them, and the engines' metrics
the hits. Takes about 12 minutes on two cores, 6 GB of memory and 2 GB of disk; `--quick` about 4 minutes, with loads
that are smaller than the device caches, and only shows that all runs.

Exits with 1 if a request failed. Medians over few requests on few cores differ by some percent from run to run.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench_serving_client import Sender
from bench_serving_load import OUTPUT_TOKENS, Load, loads
from bench_serving_report import Counts, Row, draw, table
from demo_report import machine
from engine_job import stop
from engine_process import EngineError
from prepare_model import default_cache, model_path
from serving_process import HttpProcess
from serving_servers import ONE_THREAD, Role, Router, Server, hicache, nixl

OUT = Path(__file__).resolve().parent.parent / "out"
PAGE_TOKENS = 128
TOKEN_BYTES = 23_040
DEVICE_BLOCKS = 48
MAX_TOKENS = 5_120
HOST_MEMORY = "192MiB"
STORE_CAPACITY = "2GiB"
WARM_UP = range(1000, 1300)


@dataclass(frozen=True, slots=True)
class Setup:
    """Engines that answer together.

    Attributes:
        is_pair: a prefill and a decode engine behind a router, else one engine.
        has_cache: whether they have the connector of this package.
    """

    name: str
    is_pair: bool
    has_cache: bool


SETUPS = (
    Setup("one engine", is_pair=False, has_cache=False),
    Setup("one, cache", is_pair=False, has_cache=True),
    Setup("pair, NIXL", is_pair=True, has_cache=False),
    Setup("pair, cache", is_pair=True, has_cache=True),
)


@dataclass(frozen=True, slots=True)
class Started:
    """A set-up that answers: where requests go, and the engines behind it."""

    front: HttpProcess
    engines: tuple[Server, ...]

    def counts(self) -> dict[str, Counts]:
        """What each engine has counted so far, by its name."""
        return {engine.name: Counts.of(engine.metrics()) for engine in self.engines}


@contextmanager
def started(setup: Setup, model: Path, folder: Path) -> Iterator[Started]:
    """Its engines, healthy, and the router before a pair; ended afterwards."""
    with ExitStack() as stack:
        roles: tuple[Role, ...] = ("kv_producer", "kv_consumer") if setup.is_pair else ("kv_both",)
        engines = tuple(stack.enter_context(_engine(setup, role, model, folder)) for role in roles)
        for engine in engines:
            engine.wait_healthy()
        front: HttpProcess = engines[0]
        if setup.is_pair:
            prefill, decode = engines
            front = stack.enter_context(Router(folder, prefill=[prefill.url], decode=[decode.url]))
            front.wait_healthy()
        front.post("/v1/completions", {"model": model.name, "prompt": list(WARM_UP), "max_tokens": 2})
        yield Started(front, engines)


def _engine(setup: Setup, role: Role, model: Path, folder: Path) -> Server:
    name = {"kv_both": "engine", "kv_producer": "prefill", "kv_consumer": "decode"}[role]
    sizes = ["--max-model-len", str(MAX_TOKENS), "--num-gpu-blocks-override", str(DEVICE_BLOCKS)]
    transfer = None
    if setup.has_cache:
        store = f"file://{folder / 'store'}?capacity={STORE_CAPACITY}"
        transfer = hicache(role, store=store, host_memory=HOST_MEMORY)
    elif setup.is_pair:
        transfer = nixl()
    threads = ONE_THREAD if setup.is_pair else {}
    return Server(model, folder, name, transfer=transfer, options=sizes, environment=threads)


def run(setup: Setup, model: Path, each: Sequence[Load], sender: Sender, folder: Path) -> list[Row]:
    """All loads on one set-up, one after the other."""
    rows = []
    with started(setup, model, folder) as engines:
        for load in each:
            before = engines.counts()
            sent = sender.send(load, engines.front.url, model)
            counts = {name: after.since(before[name]) for name, after in engines.counts().items()}
            rows.append(Row.of(setup.name, load.name, load.num_requests, sent, counts))
            _tell(f"{setup.name}, {load.name}: {sent.seconds:.1f} s, {rows[-1].num_failed} failed")
    return rows


def head(each: Sequence[Load]) -> str:
    """What was sent, and how large the caches were."""
    device, host = DEVICE_BLOCKS * PAGE_TOKENS, int(HOST_MEMORY.removesuffix("MiB")) * (1 << 20) // TOKEN_BYTES
    sizes = (
        f"Of each engine: device cache {device:,} tokens, host pool {HOST_MEMORY} = {host:,} tokens, "
        f"store file:// of {STORE_CAPACITY}; answers of {OUTPUT_TOKENS} tokens"
    )
    here = machine()
    where = f"{here['cpus']} CPUs, {here['cpu']}, load {here['load_average']:.1f}"
    return "\n".join([where, sizes, *(f"{load.name}: {load.text}" for load in each)])


def result(each: Sequence[Load], rows: Sequence[Row], seconds: float) -> dict[str, object]:
    """All of it, for the JSON file."""
    return {
        "machine": machine(),
        "device_tokens": DEVICE_BLOCKS * PAGE_TOKENS,
        "host_memory": HOST_MEMORY,
        "output_tokens": OUTPUT_TOKENS,
        "loads": {load.name: load.text for load in each},
        "rows": [row.to_json() for row in rows],
        "seconds": seconds,
    }


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serving with and without the cache, by vLLM's own bench serve.")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--picture", type=Path, default=OUT / "bench_serving.svg", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all; 1 if a request failed or a set-up did not start."""
    options = _arguments(arguments)
    signal.signal(signal.SIGTERM, stop)
    model, began_s = model_path(default_cache()), time.monotonic()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-serving-") as name, Sender(Path(name)) as sender:
        each = loads(Path(name), options.quick)
        for setup in SETUPS:
            folder = Path(name) / setup.name.replace(", ", "-").replace(" ", "-")
            folder.mkdir()
            try:
                rows += run(setup, model, each, sender, folder)
            except EngineError as error:
                _tell(f"{setup.name}: {error}")
    rows.sort(key=lambda row: [load.name for load in each].index(row.load))
    print(head(each), table(rows), sep="\n\n")
    if options.json:
        options.json.write_text(json.dumps(result(each, rows, time.monotonic() - began_s), indent=1) + "\n")
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    draw(rows, options.picture)
    return _status(rows, len(SETUPS) * len(each))


def _status(rows: Sequence[Row], num_expected: int) -> int:
    return 0 if len(rows) == num_expected and not any(row.num_failed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
