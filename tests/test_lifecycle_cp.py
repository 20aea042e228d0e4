"""The life of a request where ranks share out its pages: context parallelism, and a host tier that is sharded.

Under decode context parallelism a page lies on one owner, in device and host memory. Ranks that hold the same heads
without it have all pages on the device, keep each in host memory once and give each other what they load.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from lifecycle_kit import (
    Gates,
    check_ranks_agreed,
    check_stored,
    object_name,
    preempt_after_every_load,
    prompt,
)
from simulated_engine import SimulatedEngine, Start, engines_on
from simulated_faults import Gate, StoreFaults
from simulated_model import BLOCK, LAYERS, Cut, Job
from simulated_traffic import Traffic
from vllm.v1.request import RequestStatus

from vllm_hicache.errors import StoreUnavailable
from vllm_hicache.names import MissReason, ObjectName, Slot
from vllm_hicache.transfer.exchange import Header

pytest_plugins = ["lifecycle_fixtures"]
LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS
NUM_PAGES = 6
ON_DEVICE = [Cut(2, 1, 2, 1), Cut(4, 1, 2, 2), Cut(2, 2, 2, 1), Cut(4, 1, 4, 1), Cut(4, 1, 2, 1)]
"""Cuts with context parallelism. In the last one each owner has a replica."""
IN_HOST_MEMORY = [Cut(2, 1, 1, 1), Cut(4, 1, 1, 2), Cut(2, 2, 1, 1)]
"""Cuts whose ranks hold the same heads."""
CUTS = [*ON_DEVICE, *IN_HOST_MEMORY]
LONE, STAGES, FOUR = Cut(num_heads=1), Cut(1, 2, 1, 1), Cut(4, 1, 1, 1)


def name_of(cut: object) -> str | None:
    if not isinstance(cut, Cut):
        return None
    return f"tp{cut.tp_size}-pp{cut.pp_size}-dcp{cut.dcp_size}-{cut.num_heads}heads"


every_cut = pytest.mark.parametrize("cut", CUTS, ids=name_of)
on_device = pytest.mark.parametrize("cut", ON_DEVICE, ids=name_of)
in_host_memory = pytest.mark.parametrize("cut", IN_HOST_MEMORY, ids=name_of)
two_of_each = pytest.mark.parametrize("cut", [*ON_DEVICE[2:4], *IN_HOST_MEMORY[1:]], ids=name_of)


TEXT = prompt(100)


def num_owners(cut: Cut) -> int:
    return cut.dcp_size if cut.dcp_size > 1 else max(1, cut.tp_size // cut.num_heads)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    engines: list[SimulatedEngine] = []
    with engines_on(tmp_path) as start:

        def begin(cut: Cut, **arguments: object) -> SimulatedEngine:
            usual = {"grid": f"{LAYERS}x{cut.num_heads}", "consensus": "enforce"}
            engines.append(start(**cut._asdict(), **(usual | arguments)))
            return engines[-1]

        yield begin
    check_ranks_agreed(engines)


def slots_of(engine: SimulatedEngine, job: Job) -> Sequence[Slot]:
    return engine.tier.match(engine.keys(job), touch=False).slots


def blocks_of(engine: SimulatedEngine, name: str) -> list[int]:
    (blocks,) = engine.scheduler.kv_cache_manager.get_block_ids(name)
    return list(blocks)


def held_on(engine: SimulatedEngine) -> list[int]:
    """Pages in host memory, by owner."""
    pools = range(engine.tier.ownership.num_owners)
    return [engine.tier.num_slots // len(pools) - engine.tier.num_free_of(owner) for owner in pools]


def served(engine: SimulatedEngine) -> int:
    """Tokens that loads brought and the engine went on with."""
    return engine.counters["hit_tokens|host"] + engine.counters["hit_tokens|store"]


def usable(cut: Cut, num_pages: int) -> int:
    """Pages of a load that the engine goes on with where the first `num_pages` have come.

    It drops a block of which a page on any owner is missing; where that leaves none it asks again, for those pages.
    """
    return num_pages - num_pages % cut.dcp_size or num_pages


def step(engine: SimulatedEngine, num_steps: int) -> None:
    for _ in range(num_steps):
        engine.step()


class TestEveryCut:
    @every_cut
    def test_a_prompt_is_served_from_the_device_then_host_memory_then_the_store(self, start: Start, cut: Cut) -> None:
        engine = start(cut)
        cold, again = engine.serve(TEXT), engine.serve(TEXT)
        local = 96 - 96 % (BLOCK * cut.dcp_size)
        assert [(job.num_local, job.num_external) for job in (cold, again)] == [(0, 0), (local, 96 - local)]
        engine.drop_device()
        assert engine.serve(TEXT).num_external == 96
        assert engine.hits == {"host": 96 + 96 - local}
        other = start(cut)
        assert other.serve(TEXT).num_external == 96
        assert other.hits == {"disk": 96}
        assert check_stored(other, cold) == NUM_PAGES

    @every_cut
    def test_host_memory_holds_as_many_pages_as_all_owners_have_rows(self, start: Start, cut: Cut) -> None:
        engine = start(cut, num_slots=5)
        assert engine.tier.ownership.num_owners == num_owners(cut)
        assert engine.tier.num_slots == 5 * num_owners(cut)

    @pytest.mark.parametrize("writer", [LONE, Cut(), *CUTS], ids=name_of)
    def test_what_one_cut_has_written_every_other_reads(self, start: Start, writer: Cut) -> None:
        start(writer).serve(TEXT)
        readers = [each for each in [LONE, Cut(), STAGES, *CUTS] if each.num_heads == writer.num_heads]
        assert [start(reader, write="never").serve(TEXT).num_external for reader in readers] == [96] * len(readers)

    @every_cut
    def test_one_load_takes_the_device_the_host_and_the_store_prefix_together(self, start: Start, cut: Cut) -> None:
        text = prompt(165)
        start(cut).serve(text)
        engine = start(cut)
        engine.serve(text[:100])
        engine.drop_device()
        engine.serve(text[:70])
        whole, local = engine.serve(text), 64
        assert (whole.num_local, whole.num_external) == (local, 160 - local)
        assert engine.counters["hit_tokens|store"] == 96 + 64

    @every_cut
    def test_a_long_prompt_is_whole_on_every_rank_after_a_restart(
        self, start: Start, faults: StoreFaults, cut: Cut
    ) -> None:
        """A6."""
        sizes, text = {"num_blocks": 150, "num_slots": 140, "step_tokens": 1024}, prompt(130 * BLOCK + 5)
        job = start(cut, **sizes).serve(text)
        engine = start(cut, **sizes)
        assert engine.serve(text).num_external == 130 * BLOCK
        assert engine.check_host(job) == 130
        names = [object_name(engine, job, *each) for each in product(range(130), range(LAYERS), range(cut.num_heads))]
        assert {name: len(faults.written[name]) for name in names} == dict.fromkeys(names, 1)

    @pytest.mark.parametrize("num_heads", [1, 2])
    def test_engines_of_all_cuts_that_write_at_the_same_time_write_the_bytes_of_a_lone_rank(
        self, start: Start, faults: StoreFaults, num_heads: int
    ) -> None:
        """A7."""
        engines = [start(cut) for cut in [Cut(num_heads=num_heads), *CUTS] if cut.num_heads == num_heads]
        faults.gates["write"].close()
        for engine in engines:
            engine.run_until_finished(engine.add(TEXT))
        faults.gates["write"].open()
        for engine in engines:
            engine.run()
        digests = [each for name, each in faults.written.items() if ".target." in name]
        assert len(digests) == NUM_PAGES * LAYERS * num_heads
        assert [(len(each), len(set(each))) for each in digests] == [(len(engines), 1)] * len(digests)


class TestOwners:
    @every_cut
    def test_a_page_is_in_host_memory_on_its_owners_alone(self, start: Start, cut: Cut) -> None:
        engine = start(cut)
        jobs = [engine.serve(prompt(100, seed)) for seed in range(3)]
        for slot in (slot for job in jobs for slot in slots_of(engine, job)):
            keepers = [rank.number for rank in engine.ranks if rank.keeps(slot)]
            owner = slot % num_owners(cut)
            assert keepers == [n for n in range(cut.num_ranks) if n % cut.tp_size % num_owners(cut) == owner]
        assert sum(held_on(engine)) == 3 * NUM_PAGES

    @every_cut
    def test_a_restored_chain_lies_in_other_blocks_and_every_page_on_its_owner(self, start: Start, cut: Cut) -> None:
        engine, blocks = start(cut), []
        for _ in range(2):
            name = engine.add(TEXT, max_tokens=4)
            engine.run(lambda name=name: bool(engine.jobs[name].output))
            blocks.append(blocks_of(engine, name))
            engine.run()
            engine.drop_device()
            engine.serve(prompt(50, 1))
        assert blocks[0] != blocks[1]
        assert engine.jobs[name].num_external == 96
        rotation = engine.tier.match(engine.keys(engine.jobs[name])).rotation
        owners = [slot % num_owners(cut) for slot in slots_of(engine, engine.jobs[name])]
        assert owners == [(page + rotation) % num_owners(cut) for page in range(NUM_PAGES)]
        assert rotation == 0 or cut.dcp_size == 1

    @in_host_memory
    def test_new_chains_fill_all_owners_evenly(self, start: Start, cut: Cut) -> None:
        engine = start(cut, store="none")
        for seed in range(3 * num_owners(cut)):
            engine.serve(prompt(20, seed), max_tokens=1)
        assert held_on(engine) == [3] * num_owners(cut)

    @in_host_memory
    def test_chains_with_one_beginning_have_one_rotation(self, start: Start, cut: Cut) -> None:
        engine = start(cut, store="none")
        engine.serve(prompt(20, seed=9))
        first = engine.serve(prompt(40))
        engine.serve(prompt(20, seed=8))
        assert held_on(engine) == [2, 2]
        branches = [engine.serve([*first.tokens[:20], *prompt(60, seed)]) for seed in range(1, 4)]
        branches.append(engine.serve([*first.tokens, *prompt(60)]))
        assert {engine.tier.match(engine.keys(job)).rotation for job in branches} == {1}
        assert [engine.check_host(job) for job in branches] == [5, 5, 5, 6]


class TestLengths:
    @every_cut
    def test_a_chain_that_ends_on_any_page_is_saved_restored_and_continued(self, start: Start, cut: Cut) -> None:
        engine, other = start(cut), start(cut, write="never")
        for num_pages in range(1, 2 * num_owners(cut) + 2):
            text = prompt(num_pages * BLOCK + 1, num_pages)
            engine.serve(text, max_tokens=1)
            engine.drop_device()
            job = engine.serve(text, max_tokens=20)
            assert job.num_external == num_pages * BLOCK
            engine.drop_device()
            longer = [*job.tokens, *prompt(9, 1)]
            assert [each.serve(longer).num_external for each in (engine, other)] == [(num_pages + 1) * BLOCK] * 2
            engine.drop_device()

    @every_cut
    def test_prompts_around_whole_pages_leave_one_token_to_compute(self, start: Start, cut: Cut) -> None:
        """B8."""
        engine = start(cut)
        for num_pages, extra in product(range(1, 2 * num_owners(cut) + 2), [-1, 0, 1]):
            text = prompt(num_pages * BLOCK + extra, seed=3 * num_pages + extra)
            engine.serve(text, max_tokens=1)
            engine.drop_device()
            assert engine.serve(text).num_external == min(len(text) // BLOCK * BLOCK, len(text) - 1)
            engine.drop_device()

    @in_host_memory
    @pytest.mark.parametrize("num_local", [0, 3, 5, 8])
    def test_a_device_prefix_may_end_anywhere_inside_an_exchanged_page(
        self, start: Start, cut: Cut, num_local: int
    ) -> None:
        """B7."""
        engine, text, local = start(cut, page_blocks=4), prompt(12 * BLOCK), num_local * BLOCK
        engine.serve(text)
        engine.drop_device()
        engine.serve(text[: local + 1], max_tokens=1)
        job = engine.serve(text)
        assert (job.num_local, job.num_external) == (local, 12 * BLOCK - 1 - local)


class TestAnOwnerFails:
    @every_cut
    @pytest.mark.parametrize("page", [0, 1, 4])
    def test_all_ranks_load_the_pages_before_the_one_that_its_owner_cannot_read(
        self, start: Start, faults: StoreFaults, cut: Cut, page: int
    ) -> None:
        job = start(cut).serve(TEXT)
        engine = start(cut, prefetch="wait_complete")
        lost = object_name(engine, job, page, LAYERS - 1, cut.num_heads - 1)

        def fault(operation: str, name: ObjectName) -> None:
            if (operation, name) == ("read", lost):
                raise StoreUnavailable("down")

        faults.fault = fault
        assert engine.serve(TEXT).output == job.output
        assert served(engine) == usable(cut, page) * BLOCK
        num_readers = max(1, cut.tp_size // cut.num_heads // num_owners(cut))
        assert engine.counters[f"misses|{MissReason.UNAVAILABLE.value}"] == num_readers

    @every_cut
    @pytest.mark.parametrize("num_pages", [0, 1, 5])
    def test_an_owner_that_has_lost_pages_makes_all_load_the_pages_before_them(
        self, start: Start, cut: Cut, num_pages: int
    ) -> None:
        engine = start(cut, store="none", consensus="record")
        slots = slots_of(engine, engine.serve(TEXT))
        owner = next(rank for rank in engine.ranks if rank.keeps(slots[num_pages]))
        owner.half._log.forget(slots[num_pages:])
        engine.drop_device()
        engine.serve(TEXT)
        assert served(engine) == usable(cut, num_pages) * BLOCK
        assert engine.counters.pop("rank_differences|hit length") == 1

    @two_of_each
    @pytest.mark.parametrize("late", [0, -1])
    def test_a_load_is_used_when_the_last_owner_has_it(self, start: Start, gates: Gates, cut: Cut, late: int) -> None:
        """A5."""
        engine = start(cut)
        engine.serve(TEXT)
        engine.drop_device()
        gate = gates(engine, late).load
        gate.close()
        name = engine.add(TEXT)
        engine.run(lambda: gate.num_waiting > 0)
        step(engine, 20)
        assert engine.status(name) == LOADING
        gate.open()
        engine.run()
        assert engine.jobs[name].num_external == 96

    @in_host_memory
    def test_a_load_is_used_when_a_rank_that_keeps_none_of_it_has_it(
        self, start: Start, gates: Gates, cut: Cut
    ) -> None:
        """A5."""
        engine = start(cut)
        slots = slots_of(engine, engine.serve(TEXT[:20]))
        assert [engine.ranks[-1].keeps(slot) for slot in slots] == [False]
        engine.drop_device()
        gate = gates(engine, -1).load
        gate.close()
        name = engine.add(TEXT[:20])
        engine.run(lambda: gate.num_waiting > 0)
        step(engine, 20)
        assert engine.status(name) == LOADING
        gate.open()
        engine.run()
        assert engine.jobs[name].num_external == BLOCK

    @two_of_each
    @pytest.mark.parametrize("late", [0, -1])
    def test_a_save_is_in_host_memory_when_the_last_owner_has_it(
        self, start: Start, gates: Gates, cut: Cut, late: int
    ) -> None:
        """A5."""
        engine = start(cut)
        gate = gates(engine, late).save
        gate.close()
        name = engine.add(TEXT)
        engine.run_until_finished(name)
        step(engine, 20)
        assert (engine.num_held_blocks > 0, engine.check_host(engine.jobs[name])) == (True, 0)
        gate.open()
        engine.run()
        assert engine.check_host(engine.jobs[name]) == check_stored(engine, engine.jobs[name]) == NUM_PAGES


class TestABrokenExchange:
    """Ranks that hold the same heads cannot give each other their pages any more: those are misses, nothing hangs."""

    def holding(self, start: Start, cut: Cut, **settings: object) -> tuple[SimulatedEngine, Job]:
        """An engine that has the pages of `TEXT` in host memory alone."""
        engine = start(cut, store="none", **settings)
        job = engine.serve(TEXT)
        engine.drop_device()
        return engine, job

    def at_gather(self, engine: SimulatedEngine, number: int, change: Callable[[torch.Tensor], None]) -> None:
        """Change what the last rank gives to one gather: to headers in the first one, to pages in those that follow."""
        collective = engine.ranks[-1].collectives[0]
        collective.before_meeting = lambda row: change(row) if collective.num_gathers == number else None

    def check_served_without(self, engine: SimulatedEngine, output: Sequence[int]) -> None:
        """The load that broke it, and one more, are misses; saves go on."""
        engine.run()
        engine.drop_device()
        assert engine.serve(TEXT).output == output
        assert engine.counters["hit_tokens|host"] == 0
        assert engine.counters["errors|exchange"] >= num_owners(engine.cut)
        stage = engine.ranks[-engine.cut.tp_size :]
        assert not any(rank.is_healthy for rank in stage[-num_owners(engine.cut) :])
        assert engine.check_host(engine.serve(prompt(100, 1))) == NUM_PAGES

    @in_host_memory
    def test_by_a_rank_that_does_not_come_in_time(self, start: Start, cut: Cut) -> None:
        engine, job = self.holding(start, cut, rank_timeout_s=0.3, consensus="record")
        gate = Gate()
        engine.ranks[-1].collectives[0].before_meeting = lambda row: gate.passes()
        gate.close()
        engine.add(TEXT)
        engine.run(lambda: engine.counters["errors|exchange"] >= num_owners(cut) - 1)
        gate.open()
        self.check_served_without(engine, job.output)

    @in_host_memory
    @pytest.mark.parametrize("change", [{"op": 1}, {"first": 1}, {"num_pages": 1}], ids=str)
    def test_by_a_rank_that_speaks_of_other_pages(self, start: Start, cut: Cut, change: dict[str, int]) -> None:
        engine, job = self.holding(start, cut)

        def speak(row: torch.Tensor) -> None:
            other = replace(Header.unpack(row.numpy().tobytes()), **change).pack()
            row.copy_(torch.frombuffer(bytearray(other), dtype=torch.uint8))

        self.at_gather(engine, 0, speak)
        engine.add(TEXT)
        self.check_served_without(engine, job.output)

    @in_host_memory
    def test_by_a_header_that_is_damaged(self, start: Start, cut: Cut) -> None:
        engine, job = self.holding(start, cut)
        self.at_gather(engine, 0, lambda row: row[30].add_(1))
        engine.add(TEXT)
        self.check_served_without(engine, job.output)

    @in_host_memory
    @pytest.mark.parametrize("number", [0, 1, 2])
    def test_by_a_transport_that_fails(self, start: Start, cut: Cut, number: int) -> None:
        engine, job = self.holding(start, cut)

        def fail(row: torch.Tensor) -> None:
            raise ConnectionError("reset by peer")

        self.at_gather(engine, number, fail)
        engine.add(TEXT)
        self.check_served_without(engine, job.output)

    @in_host_memory
    @pytest.mark.parametrize("number", [1, 2])
    def test_a_page_that_does_not_arrive_as_it_was_sent_is_computed_again(
        self, start: Start, cut: Cut, number: int
    ) -> None:
        engine, job = self.holding(start, cut)
        self.at_gather(engine, number, lambda row: row[7].add_(1))
        assert engine.serve(TEXT).output == job.output
        first = next(page for page, slot in enumerate(slots_of(engine, job)) if engine.ranks[-1].keeps(slot))
        assert engine.counters["hit_tokens|host"] == (first + (number - 1) * num_owners(cut)) * BLOCK
        assert all(rank.is_healthy for rank in engine.ranks)


class TestLives:
    """Aborts and preemption in every state: nothing is left, and the next one is served right."""

    POINTS = ("exists", "read", "load", "save", "write")

    def gate(self, engine: SimulatedEngine, faults: StoreFaults, gates: Gates, point: str) -> Gate:
        """A closed gate at which the next request of `TEXT` comes to stand; its last owner where ranks differ."""
        if point == "load":
            engine.serve(TEXT)
            engine.drop_device()
        of_rank = gates(engine, -1)
        gate = {"load": of_rank.load, "save": of_rank.save}.get(point) or faults.gates[point]
        gate.close()
        return gate

    @two_of_each
    @pytest.mark.parametrize("point", POINTS)
    def test_a_request_is_aborted_anywhere(
        self, start: Start, faults: StoreFaults, gates: Gates, cut: Cut, point: str
    ) -> None:
        """B5."""
        if point in ("exists", "read"):
            start(cut).serve(TEXT)
        engine = start(cut, num_blocks=24)
        gate = self.gate(engine, faults, gates, point)
        name = engine.add(TEXT, max_tokens=200)
        engine.run(lambda: gate.num_waiting > 0)
        engine.abort(name)
        others = [engine.add(prompt(60, seed), max_tokens=20) for seed in range(1, 3)]
        step(engine, 10)
        gate.open()
        engine.run_until_finished(*others)
        engine.run()
        engine.drop_device()
        assert engine.serve(TEXT).num_external == 96

    @two_of_each
    @pytest.mark.parametrize("point", ["save", "write"])
    def test_a_request_is_preempted_while_its_pages_are_on_their_way(
        self, start: Start, faults: StoreFaults, gates: Gates, cut: Cut, point: str
    ) -> None:
        """B4."""
        engine = start(cut, prefetch_timeout_s=0.2)
        gate = self.gate(engine, faults, gates, point)
        name = engine.add(TEXT, max_tokens=100)
        engine.run(lambda: gate.num_waiting > 0)
        engine.preempt(name)
        engine.run_until_finished(name)
        gate.open()
        engine.run()
        assert check_stored(engine, engine.jobs[name]) == 199 // BLOCK

    @every_cut
    def test_a_request_is_preempted_right_after_every_load(self, start: Start, cut: Cut) -> None:
        """B4."""
        assert len(preempt_after_every_load(start(cut), TEXT).output) == 8

    @pytest.mark.parametrize("cut", [Cut(2, 2, 2, 1), Cut(2, 2, 1, 1)], ids=name_of)
    def test_a_load_waits_for_the_steps_that_still_use_its_blocks(self, start: Start, cut: Cut) -> None:
        """B2. Batches are in flight, and one rank after the other runs them."""
        engine = start(cut, num_blocks=2 + -(-110 // (BLOCK * cut.dcp_size)), skew=2)
        engine.serve(TEXT)
        for seed in range(1, 9):
            engine.drop_device()
            name = engine.add(prompt(80, seed), max_tokens=30)
            engine.run(lambda name=name: len(engine.jobs[name].output) == 3)
            engine.step()
            used = blocks_of(engine, name)
            engine.abort(name)
            loads = engine.add(TEXT)
            engine.run(lambda loads=loads: engine.status(loads) == LOADING)
            assert set(used) & set(blocks_of(engine, loads))
            engine.run()
            assert engine.jobs[loads].num_external == 96


class TestEviction:
    @two_of_each
    def test_pages_are_pinned_while_they_load_although_saves_want_every_slot(
        self, start: Start, gates: Gates, cut: Cut
    ) -> None:
        """B3."""
        engine = start(cut, num_slots=-(-8 // num_owners(cut)), num_blocks=40, store="none")
        held = engine.serve(TEXT)
        engine.drop_device()
        gate = gates(engine, -1).load
        gate.close()
        engine.add(TEXT)
        engine.run(lambda: gate.num_waiting > 0)
        for seed in range(1, 6):
            engine.run_until_finished(engine.add(prompt(60, seed)))
        assert engine.check_host(held) == NUM_PAGES
        gate.open()
        engine.run()
        assert engine.hits == {"host": 96}

    @on_device
    def test_chains_that_all_lie_on_one_owner_leave_room_on_the_others(self, start: Start, cut: Cut) -> None:
        engine = start(cut, num_slots=4, store="none", eviction="lru")
        jobs = [engine.serve(prompt(20, seed), max_tokens=1) for seed in range(10)]
        assert held_on(engine) == [4] + [0] * (cut.dcp_size - 1)
        assert [engine.check_host(job) for job in jobs] == [0] * 6 + [1] * 4
        num_pages = 3 * cut.dcp_size
        assert engine.check_host(engine.serve(prompt(num_pages * BLOCK + 1), max_tokens=1)) == num_pages
        assert held_on(engine) == [4] + [3] * (cut.dcp_size - 1)
        assert engine.counters["evicted_pages|host"] == 6 + 3

    @every_cut
    @pytest.mark.parametrize("num_rows", [1, 2])
    def test_a_store_hit_is_served_as_far_as_all_owners_have_room(self, start: Start, cut: Cut, num_rows: int) -> None:
        text = prompt(10 * BLOCK + 1)
        start(cut).serve(text)
        engine = start(cut, num_slots=num_rows)
        assert engine.serve(text).num_external == num_rows * num_owners(cut) * BLOCK
        assert engine.counters["hit_tokens|store"] == num_rows * num_owners(cut) * BLOCK

    @pytest.mark.parametrize("cut", [FOUR, *(each for each in CUTS if each.pp_size == 1)], ids=name_of)
    def test_the_same_memory_of_each_rank_holds_as_many_times_the_pages_as_there_are_owners(
        self, start: Start, cut: Cut
    ) -> None:
        num_rows = 48 // num_owners(cut)
        sizes = {"num_slots": num_rows, "store": "none", "eviction": "lru"}
        alike = start(LONE, **sizes) if cut.dcp_size > 1 else start(cut, host_tier="replicated", **sizes)
        engines, hits = [start(cut, **sizes), alike], []
        for engine in engines:
            for seed in [*range(6)] * 2:
                engine.serve(prompt(8 * BLOCK + 1, seed), max_tokens=1)
                engine.drop_device()
            hits.append(engine.counters["hit_tokens|host"] // BLOCK)
        assert [engine.tier.num_slots for engine in engines] == [48, num_rows]
        assert hits == [48, 0]


class TestTraffic:
    @every_cut
    def test_hundreds_of_random_requests_each_see_the_right_bytes_on_every_rank(self, start: Start, cut: Cut) -> None:
        sizes = {"num_blocks": 2 + 26 // cut.dcp_size, "num_slots": 40 // num_owners(cut), "step_tokens": 64}
        engine = start(cut, policy="priority", skew=5, **sizes)
        Traffic(engine, seed=sum(cut), salts=(None, "a")).run(300)
        engine.run()
        assert sum(job.request.num_preemptions for job in engine.jobs.values()) > 0
        assert engine.counters["hit_tokens|host"] > 0
        assert engine.counters["evicted_pages|host"] > 0

    @two_of_each
    def test_random_requests_with_write_back_see_the_right_bytes(self, start: Start, cut: Cut) -> None:
        engine = start(
            cut, num_blocks=28, num_slots=40 // num_owners(cut), write="back", prefetch="best_effort", skew=1
        )
        Traffic(engine, seed=7, salts=(None, "a")).run(300)
        engine.run()
        assert engine.counters["evicted_pages|host"] > 0

    @every_cut
    def test_random_requests_over_a_store_that_fails_at_random_on_each_rank_see_the_right_bytes(
        self, start: Start, faults: StoreFaults, cut: Cut
    ) -> None:
        chance = random.Random(str(cut))

        def fault(operation: str, name: ObjectName) -> None:
            if operation != "exists" and chance.random() < 0.1:
                raise StoreUnavailable("down")

        sizes = {"num_blocks": 2 + 26 // cut.dcp_size, "num_slots": -(-20 // num_owners(cut))}
        engine = start(cut, policy="priority", prefetch="wait_complete", **sizes)
        faults.fault = fault
        engine.before_forward = lambda: time.sleep(chance.random() * 0.001)
        Traffic(engine, seed=7).run(200)
        engine.run()
        assert all(job.finish_reason or job.request.is_finished() for job in engine.jobs.values())

    def test_engines_of_all_cuts_in_traffic_on_one_store_write_equal_bytes(
        self, start: Start, faults: StoreFaults
    ) -> None:
        """A7."""
        cuts = [LONE, STAGES, *(each for each in CUTS if each.num_heads == 1)]
        engines = [start(cut, num_blocks=48, num_slots=-(-20 // num_owners(cut))) for cut in cuts]
        traffic = [Traffic(engine, seed=1) for engine in engines]
        for _ in range(15):
            for each in traffic:
                each.run(8)
        assert {len(set(digests)) for digests in faults.written.values()} == {1}
        assert all(engine.counters["hit_tokens|store"] for engine in engines)

    @two_of_each
    def test_hundreds_of_aborts_at_random_states_leave_nothing_on_any_rank(self, start: Start, cut: Cut) -> None:
        engine, chance = start(cut, num_blocks=40, num_slots=-(-16 // num_owners(cut))), random.Random(1)
        texts = [prompt(chance.randrange(20, 150), seed) for seed in range(8)]
        for _ in range(200):
            engine.add(chance.choice(texts), max_tokens=8)
            step(engine, chance.randrange(3))
            engine.abort(chance.choice(list(engine.scheduler.requests)))
            while len(engine.scheduler.requests) > 10:
                engine.abort(chance.choice(list(engine.scheduler.requests)))
                engine.step()
        engine.run()
        assert {rank.half._consumption.num_open for rank in engine.ranks} == {0}
        assert Counter(held_on(engine))
