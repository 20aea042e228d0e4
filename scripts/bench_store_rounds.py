"""How contenders are measured against each other: batches of jobs, in rounds that each run every contender once."""

from __future__ import annotations

import itertools
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from vllm_hicache.names import PageKey

POISON = 0xA5
Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Job:
    """One object to move: its key, and the host slot where its bytes are or shall be."""

    key: PageKey
    slot: memoryview


@dataclass(frozen=True, slots=True)
class Sample:
    """What one batch took: wall seconds, and CPU seconds of this process, all threads."""

    wall_s: float
    cpu_s: float


class Contender(ABC):
    """One way to write and read objects.

    `worker` counts the threads of a batch from 0, so that each may keep a connection of its own. `prepare`, `delete`
    and `close` are not timed.
    """

    name: str

    @abstractmethod
    def write(self, worker: int, job: Job) -> None:
        """Write the slot under the key."""

    @abstractmethod
    def read(self, worker: int, job: Job) -> Buffer | None:
        """Read what was written; return where it is now, which is the slot or a copy, or None where nothing is kept."""

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Do what is no part of the transfer, such as signing requests."""
        del jobs

    @abstractmethod
    def delete(self, jobs: Sequence[Job]) -> None:
        """Remove the objects."""

    @abstractmethod
    def close(self) -> None:
        """Give back connections."""


Action = Callable[[int, Job], object]
Taken = dict[str, list[Sample]]


class Crew:
    """As many threads as jobs are to be in flight; with one, the caller's own. Use as a context manager."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._pool = ThreadPoolExecutor(num_workers)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def run(self, act: Action, jobs: Sequence[Job]) -> Sample:
        """Do all jobs, each taken by the next free thread. Raises what a job raises."""
        pending = iter(jobs)

        def work(worker: int) -> None:
            for job in pending:
                act(worker, job)

        before, start = cpu_s(), time.perf_counter()
        if self.num_workers == 1:
            work(0)
        else:
            list(self._pool.map(work, range(self.num_workers)))
        return Sample(time.perf_counter() - start, cpu_s() - before)


def cpu_s() -> float:
    """CPU seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def write_rounds(
    contenders: Sequence[Contender],
    crew: Crew,
    rounds: Sequence[Sequence[Job]],
    written: Callable[[Sequence[Job]], None],
) -> Taken:
    """Write each round's jobs by every contender. `written` is called after each round, to make room."""
    taken: Taken = {contender.name: [] for contender in contenders}
    for jobs, order in zip(rounds, orders(contenders), strict=False):
        for contender in order:
            contender.prepare(jobs)
            taken[contender.name].append(crew.run(contender.write, jobs))
        written(jobs)
    return taken


def read_rounds(
    contenders: Sequence[Contender], crew: Crew, jobs: Sequence[Job], written: Sequence[memoryview], num_rounds: int
) -> Taken:
    """Read the jobs `num_rounds` times by each contender, after a round that is not timed but compared."""
    taken: Taken = {contender.name: [] for contender in contenders}
    for contender in contenders:
        contender.prepare(jobs)
        compare(contender, crew, jobs, written)
    for _, order in zip(range(num_rounds), orders(contenders), strict=False):
        for contender in order:
            taken[contender.name].append(crew.run(contender.read, jobs))
    return taken


def orders(contenders: Sequence[Contender]) -> itertools.cycle[Sequence[Contender]]:
    """The order of each round: forwards and backwards in turns, so that none always follows the same neighbour."""
    return itertools.cycle((contenders, contenders[::-1]))


def compare(contender: Contender, crew: Crew, jobs: Sequence[Job], written: Sequence[memoryview]) -> None:
    """Read into poisoned slots. Raises RuntimeError unless what came back is what was written, byte by byte."""
    poison = bytes([POISON])
    for job in jobs:
        job.slot[:] = poison * job.slot.nbytes
    wanted = dict(zip((id(job) for job in jobs), written, strict=True))

    def read(worker: int, job: Job) -> None:
        found = contender.read(worker, job)
        # memoryview's own comparison goes element by element and takes a second for 32 MiB.
        if found is not None and bytes(found) != bytes(wanted[id(job)]):
            raise RuntimeError(f"{contender.name} gave other bytes for {job.key.hex()} than were written")

    crew.run(read, jobs)
