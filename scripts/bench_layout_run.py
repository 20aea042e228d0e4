"""What cutting pages in objects costs: pack and unpack beside memcpy, and agreement by the number of ranks.

    scripts/bench_layout [--json PATH] [--pages N] [--rounds N] [--quick]

Pack and unpack go through the copier of the transfer engine, page by page, between device blocks as vLLM's CPU backend
lays them out and host slots, all touched before. Memcpy is `np.copyto` of as many contiguous bytes in the same rounds;
a ratio is the median over rounds of its time by ours. Three cases a model: the grid fits the rank, so that its slot is
one object; the grid has as many cells as it can; and the rank holds parts of cells. That pages come back as they went
in is proved before anything is timed. What an aim misses is shown as UNDER; the exit status says only whether it ran.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import bench_layout_copies
import bench_layout_steps
import torch
from demo_report import machine
from versions import versions

PACKAGES = ("vllm-hicache", "numpy", "torch")


def say(text: str) -> None:
    """Progress, apart from the result."""
    print(text, file=sys.stderr, flush=True)


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line: see the module."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench_layout", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write all medians here")
    parser.add_argument("--pages", type=int, default=32, help="pages copied a round")
    parser.add_argument("--rounds", type=int, default=15, help="rounds a median is taken of")
    parser.add_argument("--quick", action="store_true", help="few pages and rounds: does it work?")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure and show."""
    args = read_arguments()
    torch.set_num_threads(1)
    num_pages, num_rounds, num_steps = (2, 2, 20) if args.quick else (args.pages, args.rounds, 2000)
    rows: list[bench_layout_copies.Row] = []
    for case in bench_layout_copies.cases():
        say(f"{case.name}, grid {case.grid} …")
        rows += bench_layout_copies.measure(case, num_pages, num_rounds)
    steps = bench_layout_steps.scheduler_step_times(num_steps)
    print(bench_layout_copies.table(rows), bench_layout_steps.table(steps), sep="\n\n")
    if args.json:
        result = {
            "versions": versions(PACKAGES),
            "machine": machine(),
            "quick": args.quick,
            "copies": [row.to_json() for row in rows],
            "steps": [step.to_json() for step in steps],
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
