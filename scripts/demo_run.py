"""A long agent conversation, answered from every tier of the cache, beside vLLM without it.

    scripts/demo [--json PATH] [--picture PATH] [--store redis|s3|lmcache|URL] [--rounds N]

Engines run in processes of their own: vLLM alone, vLLM with the connector, and the latter stopped and started again;
with files twice, for the second time they are in the operating system's page cache. `redis`, `s3` and `lmcache` (its
adapter for Redis) start a real server for the demo and stop it again. For two prompt lengths, a multiple of the page
and one that is not, the time to the first token is measured cold, from the device (vLLM's own prefix cache), from host
memory, and from the store after each restart. Every answer is compared with vLLM's own. Takes about 8 minutes on two
cores, 8 GB of memory and 1.2 GB of disk; with Redis 10 GB of memory and no disk.

Exits with 1 if an answer differs or nothing was restored. What it does not measure: the tokenizer and an HTTP server.
"""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from demo_conversation import Encode, conversation, next_turn
from demo_report import Comparison, LengthRecord, StoreNote, assemble, bars, draw, failures, store_line, table
from demo_stores import SERVERS, open_demo_store
from engine_process import Answer, Engine, Settings
from prepare_model import default_cache, model_path

from vllm_hicache.errors import HiCacheError

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out"
MAX_MODEL_LEN = 8192
LENGTHS = (7680, 7900)
NUM_SESSIONS = 3
NUM_TURNS = 3
PAGE_TOKENS = 128
OUTPUT_TOKENS = 16
WARM_UP_TOKENS = 512
WARM_UP_SESSION = 0xFFFFFFFF


@dataclass(slots=True)
class Talk:
    """The sessions of one prompt length.

    `alone` is what vLLM without the connector answers to session 0 from its prefix cache; `references` are what the
    prefix cache gives, session by session, in the engine with the connector, before anything was restored to it.
    """

    record: LengthRecord
    prompts: list[list[int]]
    references: list[Answer] = field(default_factory=list)
    alone: Answer | None = None

    def sample(self, kind: str, answer: Answer, reference: Answer | None = None) -> Answer:
        """Keep a sample, and compare what it says with a reference."""
        self.record.samples.setdefault(kind, []).append(answer)
        if reference is not None:
            self.record.comparisons.append(Comparison.of(kind, answer, reference))
        return answer


class Demo:
    """The steps, in order; see the module. `encode` counts tokens, `model` is the model's directory."""

    def __init__(self, model: Path, encode: Encode, rounds: int) -> None:
        self._model = str(model)
        self._encode = encode
        self._rounds = rounds
        self._began_s = time.monotonic()
        self._warm_up = conversation(WARM_UP_SESSION, WARM_UP_TOKENS, encode)
        self._talks = [
            Talk(LengthRecord(length), [conversation(length + each, length, encode) for each in range(NUM_SESSIONS)])
            for length in LENGTHS
        ]
        self.versions: dict[str, str] = {}

    def run(self, connector: dict[str, str], log: Path, *, second_restart: bool) -> list[LengthRecord]:
        """Measure everything; with `second_restart` what a store read shortly before gives. Raises EngineError."""
        self.say("starting vLLM without the connector (half a minute)")
        with self._start(None, log) as plain:
            self.say(f"{len(LENGTHS)} prompts from scratch, then from vLLM's own prefix cache (a minute)")
            self._start_alone(plain)
            self.say("starting vLLM with the connector (half a minute)")
            with self._start(connector, log) as cached:
                self.say(f"{NUM_SESSIONS * len(LENGTHS)} prompts from scratch, which are saved (2-3 minutes)")
                self._fill(cached)
                self.say(f"{self._rounds} rounds: host memory, device, device without the connector (a minute)")
                self._measure_host(cached, plain)
                self.say("a following turn of each conversation (a few seconds)")
                self._measure_next_turns(cached, plain)
                self.say("stopping the engine with the connector, and starting it again (half a minute)")
            for kind in ("store", "store_cached") if second_restart else ("store",):
                state = ", just read" if kind == "store_cached" else ""
                with self._start(connector, log) as again:
                    self.say(f"{NUM_SESSIONS * len(LENGTHS)} prompts from the store{state} (half a minute)")
                    self._measure_store(again, plain, kind)
                    self.say("stopping the engine with the connector (a few seconds)")
        self.say("done")
        return [talk.record for talk in self._talks]

    def say(self, text: str) -> None:
        """Progress, apart from the result."""
        minutes, seconds = divmod(int(time.monotonic() - self._began_s), 60)
        print(f"[{minutes}:{seconds:02}] {text}", file=sys.stderr, flush=True)

    @contextmanager
    def _start(self, connector: dict[str, str] | None, log: Path) -> Iterator[Engine]:
        """An engine that has computed, and read from its caches, a short prompt of another session."""
        with Engine(Settings(self._model, MAX_MODEL_LEN, connector), log) as engine:
            self.versions |= engine.versions
            for _ in range(3):
                self._ask(engine, self._warm_up)
            yield engine

    def _ask(self, engine: Engine, prompt: Sequence[int]) -> Answer:
        """One request, after which the engine comes to rest, so that it does not disturb the next one."""
        answer = engine.ask(prompt, OUTPUT_TOKENS)
        engine.settle()
        return answer

    def _start_alone(self, plain: Engine) -> None:
        for talk in self._talks:
            talk.sample("cold", self._ask(plain, talk.prompts[0]))
            talk.alone = self._ask(plain, talk.prompts[0])

    def _fill(self, cached: Engine) -> None:
        """Compute all sessions, and ask again while they are on the device, for a reference."""
        for talk in self._talks:
            for prompt in talk.prompts:
                talk.sample("cold_connector", self._ask(cached, prompt))
                talk.references.append(self._ask(cached, prompt))
            if talk.alone is not None:
                talk.record.comparisons.append(Comparison.of("alone", talk.references[0], talk.alone))

    def _measure_host(self, cached: Engine, plain: Engine) -> None:
        for _ in range(self._rounds):
            for talk in self._talks:
                cached.forget_device()
                talk.sample("host", self._ask(cached, talk.prompts[0]), talk.references[0])
                talk.sample("device_connector", self._ask(cached, talk.prompts[0]), talk.references[0])
                talk.sample("device", self._ask(plain, talk.prompts[0]), talk.alone)

    def _measure_next_turns(self, cached: Engine, plain: Engine) -> None:
        for talk in self._talks:
            for number in range(NUM_TURNS):
                prompt = next_turn(talk.prompts[0], talk.references[0].tokens, number, self._encode)
                talk.record.turn_tokens.append(len(prompt))
                cached.forget_device()
                own = talk.sample("turn_device", self._ask(plain, prompt))
                talk.sample("turn_host", self._ask(cached, prompt), own)

    def _measure_store(self, again: Engine, plain: Engine, kind: str) -> None:
        """Each session once, for a store hit leaves its pages in host memory."""
        for session in range(NUM_SESSIONS):
            for talk in self._talks:
                talk.sample(kind, self._ask(again, talk.prompts[session]), talk.references[session])
                talk.sample(f"device_beside_{kind}", self._ask(plain, talk.prompts[0]), talk.alone)


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line: see the module."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=OUT / "demo.json", help="result (default: out/demo.json)")
    parser.add_argument("--picture", type=Path, default=OUT / "demo.png", help="chart (default: out/demo.png)")
    parser.add_argument(
        "--store",
        metavar="|".join((*SERVERS, "URL")),
        help="a server of the demo's own, or a store's URL; the default is files in a directory that is removed "
        "afterwards",
    )
    parser.add_argument("--rounds", type=int, default=7, help="samples of each hit (default: 7)")
    args = parser.parse_args(arguments)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} measures nothing: give at least 1, better 5")
    return args


def load_encoder(model: Path) -> Encode:
    """The model's tokenizer, without `transformers`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode


def stop(signum: int, frame: FrameType | None) -> NoReturn:
    """Ends as after Ctrl-C: engines are stopped and the temporary store is removed."""
    raise KeyboardInterrupt


def measure(args: argparse.Namespace, log: Path) -> dict[str, object]:
    """Run the demo against a store that holds nothing of it yet, and put the result together."""
    model = model_path(default_cache())
    demo = Demo(model, load_encoder(model), args.rounds)
    scratch = tempfile.TemporaryDirectory(dir=OUT, prefix="demo-", ignore_cleanup_errors=True)
    with scratch as folder, open_demo_store(args.store, Path(folder)) as store:
        connector = {"store": store.url, "generation": f"demo-{secrets.token_hex(4)}"}
        records = demo.run(connector, log, second_restart=store.second_restart)
        reads = store.plain_reads(max(LENGTHS) // PAGE_TOKENS)
        return assemble(records, demo.versions, reads, StoreNote(store.kind, store.shown, store.aim))


def main() -> int:
    """Run, show, and say whether it did what it promises."""
    args = read_arguments()
    OUT.mkdir(exist_ok=True)
    log = OUT / "demo.log"
    log.unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, stop)
    try:
        result = measure(args, log)
    except (HiCacheError, RuntimeError) as error:  # an EngineError, a store that is none, a server that did not start
        print(f"scripts/demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("scripts/demo: stopped", file=sys.stderr)
        return 130
    args.json.write_text(json.dumps(result, indent=2) + "\n")
    draw(result, args.picture)
    print(
        table(result), store_line(result), bars(result), f"result in {args.json}, chart in {args.picture}", sep="\n\n"
    )
    problems = failures(result)
    for problem in problems:
        print(f"scripts/demo: {problem} (the engines' log: {log})", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
