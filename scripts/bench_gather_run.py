"""What it costs to gather a context whose pages lie on several ranks, layer by layer, and what attention hides of it.

    scripts/bench_gather [--json PATH] [--svg PATH] [--ranks N,...] [--contexts TOKENS,...] [--rounds N] [--quick]

Ranks are processes of one torch thread each, in a gloo group over the loopback device. The model has 30 layers and one
KV head of 128 with bfloat16 keys and values: 512 bytes a token and layer, in blocks of 128 tokens on one rank. One
request with the whole context as history decodes one token. In the same rounds, after one to warm up:

- gather: every layer through `LayerGather` with nothing to attend, its picking of scattered blocks included;
- bare: torch's own all-gather into one tensor, of as many contiguous bytes out of the same caches;
- attend: torch's attention of 8 query heads over the gathered pages, nothing gathered;
- in turn: both, each layer's gather after the attention of the one before;
- step: both, one layer ahead; chunk: the same where 32 tokens attend, as in a prefill.

A rate is what one rank receives; a time is the slowest rank's; a ratio is the median over rounds of bare time by ours.
Hidden is the share of the gathers' time for which attention did not wait, in a step and in a chunk. That every byte of
every layer comes from the right rank and block is proved before anything is timed. What an aim misses is shown as UNDER
or OVER; the exit status says only whether it ran.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench_gather_rank import Settings, measure
from bench_gather_report import Row, draw, row_of, table
from demo_report import machine
from versions import versions

PACKAGES = ("vllm-hicache", "torch")


def numbers(text: str) -> tuple[int, ...]:
    """Of a list with commas."""
    return tuple(int(number) for number in text.split(","))


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line: see the module."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench_gather", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write all medians here")
    parser.add_argument("--svg", type=Path, help="picture of rates and of what is hidden")
    parser.add_argument("--ranks", type=numbers, default=(2, 4), help="sizes of the group")
    parser.add_argument("--contexts", type=numbers, default=(8192, 16384, 32768, 65536, 131072), help="tokens")
    parser.add_argument("--rounds", type=int, default=5, help="rounds a median is taken of")
    parser.add_argument("--quick", action="store_true", help="short contexts, few rounds: does it work?")
    return parser.parse_args(arguments)


def settings_of(args: argparse.Namespace) -> Settings:
    """What is measured, the size of the group apart."""
    if args.quick:
        return Settings(num_layers=3, contexts=(1024, 4096), num_rounds=2)
    return Settings(contexts=args.contexts, num_rounds=args.rounds)


def crowding(num_ranks: int) -> str:
    """How many ranks have to share a core; empty where none does."""
    cores = len(os.sched_getaffinity(0))
    if cores >= 2 * num_ranks:
        return ""
    return (
        f"{num_ranks} ranks on {cores} cores: attention, gather and gloo's thread of all ranks share them, so that "
        "work beside attention slows attention"
    )


def main() -> None:
    """Measure and show."""
    args = read_arguments()
    settings = settings_of(args)
    rows: list[Row] = []
    for num_ranks in args.ranks:
        with tempfile.TemporaryDirectory(prefix="bench-gather-") as folder:
            found = measure(replace(settings, num_ranks=num_ranks), Path(folder))
        rows += [row_of(settings.num_layers, ranks) for ranks in found]
    notes = [note for num_ranks in args.ranks if (note := crowding(num_ranks))]
    print(table(rows), *notes, sep="\n")
    if args.svg:
        draw(rows, args.svg)
    if args.json:
        result = {
            "versions": versions(PACKAGES),
            "machine": machine(),
            "quick": args.quick,
            "notes": notes,
            "rows": [row.to_json() for row in rows],
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
