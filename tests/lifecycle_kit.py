"""What the tests of lives of requests share, beside their fixtures."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from simulated_agreement import ORDERED_KINDS
from simulated_engine import SimulatedEngine
from simulated_faults import CopyGates
from simulated_model import Job
from vllm.v1.request import RequestStatus

from vllm_hicache.names import ObjectName, Role
from vllm_hicache.storage.envelope import ChunkId

Gates = Callable[[SimulatedEngine, int], CopyGates]


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=num_tokens)


def preempt_after_every_load(engine: SimulatedEngine, text: Sequence[int]) -> Job:
    """Serve a text that is in host memory alone, and preempt its request each time it has said one token more."""
    engine.serve(text)
    engine.drop_device()
    name = engine.add(text, max_tokens=8)
    for num_output in range(1, 8):
        engine.run(lambda wanted=num_output: len(engine.jobs[name].output) >= wanted)
        if engine.status(name) == RequestStatus.RUNNING:
            engine.preempt(name)
    engine.run()
    return engine.jobs[name]


def new_weights(engine: SimulatedEngine) -> None:
    """Change the weights, and reset the cache as one does then."""
    engine.weights += 1
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)


def check_reset(engine: SimulatedEngine, text: Sequence[int], num_tokens: int) -> None:
    """Nothing of a text from before a reset is served afterwards, and `num_tokens` of it from then on."""
    engine.serve(text)
    new_weights(engine)
    assert engine.serve(text).num_external == 0
    engine.drop_device()
    assert engine.serve(text).num_external == num_tokens


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
