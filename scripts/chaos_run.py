"""Breaks real stores under a running vLLM engine, one fault after the other, and says what the engine made of it.

For each store one server (redis-server, SeaweedFS), a proxy in front of it and one vLLM engine behind that. Host
memory is small and vLLM's own prefix cache is emptied before each round, so that most prompts must come from the
store. Every answer is compared with that of the first, computed round. A row of the table is one fault: what requests
met while it lasted, and how long after its end the first hit came from the store. Takes about 20 minutes on two cores.

Exits with 1 if an answer is wrong, a request fails or hangs, something stays held, a fault was never met, or hits do
not come back within 10 s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from botocore.exceptions import ClientError
from chaos_engine import Reading, ServedEngine
from chaos_faults import CELLS, NOT_UP, Cell, Evidence, Scene, cells_of
from chaos_report import CellRecord, assemble, line, table
from chaos_stores import STORES, ChaosStore, NotPossible, opened
from engine_process import Answer, EngineError
from fault_proxy import FaultProxy
from redis import RedisError

OUT = Path(__file__).resolve().parent.parent / "out"
NUM_PROMPTS = 6
PAGE_TOKENS = 128
PROMPT_PAGES = 4
IN_FLIGHT = 2
LEASES_LIMIT_S = 10.0
RECOVERY_LIMIT_S = 60.0
FILL_LIMIT_S = 60.0
_POLL_S = 0.1
SETTINGS: dict[str, object] = {
    "host_memory": "32MiB",  # ten pages of SmolLM2: two requests and a half
    "eviction": "lru",
    "prefetch_timeout_s": 5,
    "load_threshold": 64,
    "model_id": "chaos",
}


@dataclass(frozen=True, slots=True)
class Load:
    """How hard a row is tried: at least so many requests, and the length of `stopped`, seconds."""

    num_requests: int
    stop_s: float


class Chaos:
    """The rows of one store, in order; see the module."""

    def __init__(self, scene: Scene, engine: ServedEngine, load: Load, say: Callable[[str], None]) -> None:
        self._scene = scene
        self._engine = engine
        self._load = load
        self._say = say
        draw = random.Random(scene.store.name)
        lengths = [PROMPT_PAGES * PAGE_TOKENS + 8 + 20 * index for index in range(NUM_PROMPTS)]
        self._prompts = [[draw.randrange(100, 40_000) for _ in range(length)] for length in lengths]
        self._poke = [draw.randrange(100, 40_000) for _ in range(PAGE_TOKENS // 3)]
        self._references: list[Answer] = []
        self._objects: Mapping[str, bytes] = {}
        # One cycle for all requests: the next prompt is always the one that has left host memory longest ago.
        self._turns = itertools.cycle(range(NUM_PROMPTS))

    def start(self) -> CellRecord:
        """The row of an engine whose store is not up yet, and the references, which are computed for want of it."""
        record = CellRecord(self._scene.store.name, NOT_UP, num_struck=1)
        self._engine.forget_device()
        self._references = [self._engine.ask(prompt) for prompt in self._prompts]
        record.num_requests = NUM_PROMPTS
        with self._measured(record):
            self._storm(record, 0.0)
            self._scene.store.server.start()
            record.recovery_s = self._recover(record, time.monotonic())
        record.recomputes = True
        self._fill()
        self._objects = self._scene.store.backup()
        return record

    def run(self, cell: Cell) -> CellRecord:
        """One row."""
        record = CellRecord(self._scene.store.name, cell.name)
        try:
            if cell.writes:
                self._scene.store.empty()
            before = self._scene.proxy.counters.num_struck
            with self._measured(record):
                with cell.fault(self._scene):
                    self._storm(record, self._scene.stop_s if cell.lasts else 0.0)
                record.num_struck = self._scene.proxy.counters.num_struck - before
                record.recovery_s = self._recover(record, self._put_back())
            if cell.evidence is not Evidence.PROXY:
                record.num_struck = evidence(cell, record)
        except NotPossible as error:
            record.skipped = str(error)
        except Exception as error:  # ends this row; the next one shows whether the engine is well
            record.error = f"{type(error).__name__}: {error}"
        record.is_alive = self._engine.is_alive
        return record

    @contextmanager
    def _measured(self, record: CellRecord) -> Iterator[None]:
        """Note what the metrics say about the block, and what is still held after it."""
        before = self._engine.metrics()
        yield
        record.leaked = self._leaks()
        after = self._engine.metrics()
        grown = {key: value - before.get(key, 0.0) for key, value in after.items()}
        record.misses = {label: int(by) for (name, label), by in grown.items() if name == "misses" and by > 0}
        record.store_hit_tokens = int(grown.get(("hit_tokens", "store"), 0))
        record.num_flush_errors = int(grown.get(("errors", "flush"), 0))

    def _storm(self, record: CellRecord, least_s: float) -> None:
        """Rounds of all prompts until there were requests enough and the time is over."""
        end = time.monotonic() + least_s
        enough = record.num_requests + self._load.num_requests
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            while record.num_requests < enough or time.monotonic() < end:
                self._engine.forget_device()
                turns = [next(self._turns) for _ in range(NUM_PROMPTS)]
                for turn, answer in zip(turns, pool.map(self._ask, turns), strict=True):
                    self._judge(record, turn, answer)

    def _ask(self, turn: int) -> Answer | OSError:
        try:
            return self._engine.ask(self._prompts[turn])
        except OSError as error:
            return error

    def _judge(self, record: CellRecord, turn: int, answer: Answer | OSError) -> None:
        if isinstance(answer, Answer):
            record.add(answer, self._references[turn])
            return
        record.num_requests += 1
        if isinstance(answer, TimeoutError):
            record.num_hung += 1
        else:
            record.num_failed += 1
            self._say(f"a request failed: {answer}")
        if not self._engine.is_alive:
            raise EngineError("the engine died")

    def _put_back(self) -> float:
        """Give the store what it has lost, or hits would wait for it to be computed; when the fault was over.

        A server whose disk was full goes on refusing for some seconds: the fault lasts until it takes objects.
        """
        deadline = time.monotonic() + FILL_LIMIT_S
        while True:
            now = time.monotonic()
            try:
                self._scene.store.restore(self._objects)
                return now
            except (RedisError, ClientError):
                if now > deadline:
                    raise
                time.sleep(_POLL_S)

    def _recover(self, record: CellRecord, ended_s: float) -> float | None:
        """Ask until a hit comes from the store; seconds since the fault ended."""
        before = self._store_hits()
        while (now := time.monotonic()) < ended_s + RECOVERY_LIMIT_S:
            self._engine.forget_device()
            turn = next(self._turns)
            self._judge(record, turn, self._ask(turn))
            answered_s = time.monotonic() - ended_s
            # The metrics of a step are shown a little later than its answers.
            if wait_until(lambda: self._store_hits() > before, 5 * _POLL_S):
                return answered_s
            self._say(f"no store hit yet, {now - ended_s:.1f} s after the fault")
        return None

    def _fill(self) -> None:
        """Ask until the store holds every page again. Raises EngineError when it does not come to that."""
        wanted = NUM_PROMPTS * PROMPT_PAGES
        deadline = time.monotonic() + FILL_LIMIT_S
        while not wait_until(lambda: self._scene.store.num_pages() >= wanted, 1.0):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"only {self._scene.store.num_pages()} of {wanted} pages were in the store after "
                    f"{FILL_LIMIT_S:.0f} s of asking for them without a fault"
                )
            self._engine.forget_device()
            for _ in range(NUM_PROMPTS):
                self._engine.ask(self._prompts[next(self._turns)])

    def _leaks(self) -> dict[str, int]:
        """What is held although nothing runs."""
        held: dict[str, int] = {}

        def is_free() -> bool:
            nonlocal held
            # Gauges are shown with the next count of anything: a prompt too short to be cached moves one.
            self._engine.ask(self._poke)
            held = held_by(self._engine.metrics())
            return not held

        wait_until(is_free, LEASES_LIMIT_S)
        return held

    def _store_hits(self) -> float:
        return self._engine.metrics().get(("hit_tokens", "store"), 0.0)


def held_by(reading: Reading) -> dict[str, int]:
    """Reserved pages and open operations, as far as there are any."""
    gauges = {"reserved pages": ("host_pages", "reserved"), "open operations": ("open_operations", "")}
    return {what: int(reading[key]) for what, key in gauges.items() if reading.get(key)}


def evidence(cell: Cell, record: CellRecord) -> int:
    """How often the fault was met, by what the engine counted."""
    if cell.evidence is Evidence.FLUSH_ERRORS:
        return record.num_flush_errors
    if cell.evidence is Evidence.ABSENT:
        return record.misses.get("absent", 0)
    return 1


def wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    """Whether it held within `seconds`."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
    return True


class Progress:
    """Lines on stderr with the time since the start."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def say(self, text: str) -> None:
        """Progress, apart from the result."""
        minutes, seconds = divmod(int(time.monotonic() - self._began_s), 60)
        print(f"[{minutes}:{seconds:02}] {text}", file=sys.stderr, flush=True)


def run_store(store: ChaosStore, cells: Sequence[Cell], load: Load, log: Path, progress: Progress) -> list[CellRecord]:
    """All rows of one store. Raises EngineError when its engine does not start."""
    with FaultProxy("127.0.0.1", store.server.port) as proxy:
        store.server.kill()
        progress.say(f"{store.name}: starting vLLM while the store is down (half a minute)")
        settings = {**SETTINGS, "store": store.engine_url(proxy.port)}
        with ServedEngine(settings, store.environment, log) as engine:
            chaos = Chaos(Scene(store, proxy, load.stop_s), engine, load, progress.say)
            records = [chaos.start()]
            progress.say(line(records[-1]))
            for cell in cells:
                records.append(chaos.run(cell))
                progress.say(line(records[-1]))
                if not engine.is_alive:
                    break
            return records


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line: see the module."""
    parser = argparse.ArgumentParser(
        prog="scripts/chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [cell.name for cell in CELLS]
    parser.add_argument("--json", type=Path, default=OUT / "chaos.json", help="result (default: out/chaos.json)")
    parser.add_argument("--store", choices=[*STORES, "all"], default="all")
    parser.add_argument("--faults", default="", help=f"only these, with commas between, of: {', '.join(names)}")
    parser.add_argument("--requests", type=int, default=20, help="requests of a row, at least (default: 20)")
    parser.add_argument("--stop-seconds", type=float, default=60.0, help="how long `stopped` lasts (default: 60)")
    args = parser.parse_args(arguments)
    args.faults = frozenset(name for name in args.faults.split(",") if name)
    if unknown := args.faults - set(names):
        parser.error(f"--faults {', '.join(sorted(unknown))} is not known: choose from {', '.join(names)}")
    return args


def stop(signum: int, frame: FrameType | None) -> NoReturn:
    """Ends as after Ctrl-C: engines and servers are stopped."""
    raise KeyboardInterrupt


def main() -> int:
    """Run, show, and say whether everything held."""
    args = read_arguments()
    OUT.mkdir(exist_ok=True)
    log = OUT / "chaos.log"
    log.unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, stop)
    load, progress = Load(args.requests, args.stop_seconds), Progress()
    records: list[CellRecord] = []
    try:
        with tempfile.TemporaryDirectory(prefix="hicache-chaos-", ignore_cleanup_errors=True) as scratch:
            for name in STORES:
                if args.store in (name, "all"):
                    with opened(name, Path(scratch) / name) as store:
                        records += run_store(store, cells_of(name, args.faults), load, log, progress)
    except (EngineError, OSError) as error:
        print(f"scripts/chaos: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("scripts/chaos: stopped", file=sys.stderr)
        return 130
    args.json.write_text(json.dumps(assemble(records), indent=2) + "\n")
    print(table(records), f"result in {args.json}", sep="\n\n")
    problems = [(record, problem) for record in records for problem in record.problems()]
    for record, problem in problems:
        print(f"scripts/chaos: {record.store}, {record.fault}: {problem} (the engines' log: {log})", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
