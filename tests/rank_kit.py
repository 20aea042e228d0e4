"""What the tests that run simulated engines of several ranks share, beside their fixtures."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from simulated_agreement import ORDERED_KINDS
from simulated_engine import SimulatedEngine
from simulated_faults import CopyGates
from simulated_model import Job

from vllm_hicache.names import ObjectName, Role
from vllm_hicache.storage.envelope import ChunkId

Gates = Callable[[SimulatedEngine, int], CopyGates]


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=num_tokens)


def check_ranks_agreed(engines: Iterable[SimulatedEngine]) -> None:
    """Ranks may have come to other lengths, but did the same in the same order."""
    for engine in engines:
        kinds = {key.partition("|")[2] for key in engine.counters if key.startswith("rank_differences")}
        assert not ORDERED_KINDS & kinds


def check_stored(engine: SimulatedEngine, job: Job) -> int:
    """All of a request's pages that the store has are right; how many it has."""
    pages = [page for page in engine.stored_pages(job) if page is not None]
    assert pages == [engine.page_bytes(job, index) for index in range(len(pages))]
    return len(pages)


def object_name(engine: SimulatedEngine, job: Job, page: int, layer_group: int, head_group: int) -> ObjectName:
    key = engine.keys(job)[page]
    return ChunkId(key, 0, Role.TARGET, layer_group, head_group).object_name(engine.half.namespace.digest())
