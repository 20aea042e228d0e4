"""The life of a request on engines of several ranks: vLLM's own scheduler and aggregation, real bytes on every rank.

Stages and heads are cut as vLLM does, pipeline stages run behind each other, and each rank checks its own part of all
KV that attention would read. `test_agreement.py` has more ranks, and faults of reports.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import pytest
from lifecycle_kit import (
    Gates,
    check_ranks_agreed,
    check_reset,
    check_stored,
    object_name,
    preempt_after_every_load,
    prompt,
)
from simulated_engine import SimulatedEngine, Start, engines_on
from simulated_faults import Gate, StoreFaults
from simulated_model import BLOCK, HEADS, LAYERS, Share
from simulated_traffic import Traffic
from vllm.v1.request import RequestStatus

from vllm_hicache.entries import Entry
from vllm_hicache.errors import StoreUnavailable
from vllm_hicache.names import MissReason, ObjectName, OpId, PageKey, Phase, Slot
from vllm_hicache.plan import OpReport
from vllm_hicache.storage.registry import open_store

pytest_plugins = ["lifecycle_fixtures"]
TEXT = random.Random(0).choices(range(1000), k=100)
NUM_PAGES = 6
FINEST = f"{LAYERS}x{HEADS}"
Cut = tuple[int, int]
"""Tensor and pipeline ranks. Three layers are cut 2 + 1, and four tensor ranks hold two heads twice."""
CUTS: list[Cut] = [(2, 1), (1, 2), (2, 2), (4, 1)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    engines: list[SimulatedEngine] = []
    with engines_on(tmp_path) as start:

        def begin(cut: Cut = (1, 1), **arguments: object) -> SimulatedEngine:
            engines.append(start(tp_size=cut[0], pp_size=cut[1], **({"grid": FINEST} | arguments)))
            return engines[-1]

        yield begin
    check_ranks_agreed(engines)


every_cut = pytest.mark.parametrize("cut", CUTS, ids=str)
every_tier = pytest.mark.parametrize(
    ("cut", "host_tier"), [*((cut, "sharded") for cut in CUTS), ((4, 1), "replicated")], ids=str
)
"""Replicas of a head keep its pages in turn, unless the host tier is replicated too."""


def slots_of(engine: SimulatedEngine, keys: Sequence[PageKey]) -> Sequence[Slot]:
    return engine.tier.match(keys, touch=False).slots


def gate_read(faults: StoreFaults, name: ObjectName) -> Gate:
    """A closed gate before reads of one object."""
    gate = faults.gates[name] = Gate()
    gate.close()
    faults.fault = lambda operation, of: gate.passes() if (operation, of) == ("read", name) else None
    return gate


class TestEveryCut:
    @every_tier
    def test_a_prompt_is_served_from_the_device_then_host_memory_then_the_store(
        self, start: Start, cut: Cut, host_tier: str
    ) -> None:
        engine = start(cut, host_tier=host_tier)
        cold = engine.serve(TEXT)
        assert (cold.num_local, cold.num_external) == (0, 0)
        assert engine.serve(TEXT).num_local == 96
        engine.drop_device()
        assert engine.serve(TEXT).num_external == 96
        assert engine.hits == {"host": 96}
        other = start(cut, host_tier=host_tier)
        assert other.serve(TEXT).num_external == 96
        assert other.hits == {"disk": 96}
        assert check_stored(other, cold) == NUM_PAGES

    @pytest.mark.parametrize("writer", [(1, 1), *CUTS], ids=str)
    def test_what_one_cut_has_written_every_other_reads(self, start: Start, writer: Cut) -> None:
        start(writer).serve(TEXT)
        assert [start(reader).serve(TEXT).num_external for reader in [(1, 1), (1, 3), *CUTS]] == [96] * 6

    @every_cut
    def test_ranks_read_their_parts_out_of_objects_that_hold_more(self, start: Start, cut: Cut) -> None:
        start(grid="1x1").serve(TEXT)
        engine = start(cut, grid="1x1", write="never")
        assert engine.serve(TEXT).num_external == 96

    @every_cut
    @pytest.mark.parametrize("num_local", [0, 1, 3, 5, 8])
    def test_a_device_prefix_may_end_anywhere_inside_a_page(self, start: Start, cut: Cut, num_local: int) -> None:
        engine, text = start(cut, page_blocks=4), prompt(12 * BLOCK)
        engine.serve(text)
        engine.drop_device()
        engine.serve(text[: num_local * BLOCK + 1], max_tokens=1)
        job = engine.serve(text)
        local = num_local * BLOCK
        assert (job.num_local, job.num_external) == (local, 12 * BLOCK - 1 - local)

    @every_cut
    def test_a_preempted_request_comes_back_after_every_load(self, start: Start, cut: Cut) -> None:
        assert len(preempt_after_every_load(start(cut), TEXT).output) == 8

    @every_cut
    def test_nothing_from_before_a_reset_is_served_afterwards(self, start: Start, cut: Cut) -> None:
        check_reset(start(cut), TEXT, 96)


class TestOneRankCannot:
    """A3: all ranks commit, or none does."""

    @every_cut
    def test_a_rank_that_cannot_take_the_slots_of_a_save_makes_it_fail_on_all(self, start: Start, cut: Cut) -> None:
        engine = start(cut, store="none", consensus="record")
        slots = range(engine.tier.num_slots)
        engine.ranks[1].worker._worker.half._log.pin(slots)
        engine.serve(TEXT)
        assert engine.tier.num_free == engine.tier.num_slots
        assert engine.counters.pop("rank_differences|eviction eligibility") > 0

    @every_cut
    @pytest.mark.parametrize("num_pages", [0, 2, 5])
    def test_a_rank_that_has_lost_pages_makes_all_load_the_pages_before_them(
        self, start: Start, cut: Cut, num_pages: int
    ) -> None:
        engine = start(cut, store="none")
        job = engine.serve(TEXT)
        slots = engine.tier.match(engine.keys(job), touch=False).slots
        engine.ranks[-1].worker._worker.half._log.forget(slots[num_pages:])
        engine.drop_device()
        engine.serve(TEXT)
        assert engine.counters["hit_tokens|host"] == num_pages * BLOCK
        assert engine.counters.pop("rank_differences|hit length") == 1


class TestCapacity:
    """A4."""

    def test_stages_with_other_layers_have_room_for_other_numbers_of_pages_and_the_least_counts(
        self, start: Start
    ) -> None:
        engine = start((1, 2), num_slots=10)
        assert [rank.share.num_layers for rank in engine.ranks] == [2, 1]
        assert [rank.worker._worker.half._pool.num_slots for rank in engine.ranks] == [10, 20]
        assert engine.tier.num_slots == 10

    @every_tier
    @pytest.mark.parametrize("rank", [0, -1])
    def test_a_rank_with_less_memory_is_the_measure_for_all(
        self, start: Start, cut: Cut, host_tier: str, rank: int
    ) -> None:
        number = rank % (cut[0] * cut[1])
        less = {"host_memory": 7 * Share.of(number, *cut).page_bytes(BLOCK)}
        engine = start(cut, of_rank={number: less}, num_blocks=40, host_tier=host_tier)
        num_owners = 2 if (cut, host_tier) == ((4, 1), "sharded") else 1
        assert engine.tier.num_slots == 7 * num_owners
        Traffic(engine, seed=3).run(150)
        engine.run()
        for seed in range(2):
            engine.serve(prompt(150, seed))
        assert engine.counters["evicted_pages|host"] > 0


class TestLateRanks:
    """A5. Stages end at other times: equal lengths are consumed, and all of them store and load."""

    @every_tier
    @pytest.mark.parametrize("late", [0, -1])
    def test_a_load_is_used_when_the_last_rank_has_it(
        self, start: Start, gates: Gates, cut: Cut, host_tier: str, late: int
    ) -> None:
        engine = start(cut, host_tier=host_tier)
        engine.serve(TEXT)
        engine.drop_device()
        gate = gates(engine, late).load
        gate.close()
        name = engine.add(TEXT)
        engine.run(lambda: gate.num_waiting > 0)
        for _ in range(20):
            engine.step()
        assert engine.status(name) == RequestStatus.WAITING_FOR_REMOTE_KVS
        gate.open()
        engine.run()
        assert engine.jobs[name].num_external == 96

    @every_cut
    @pytest.mark.parametrize("late", [0, -1])
    def test_a_save_is_in_host_memory_and_lets_its_blocks_go_when_the_last_rank_has_it(
        self, start: Start, gates: Gates, cut: Cut, late: int
    ) -> None:
        engine = start(cut, num_blocks=24)
        gate = gates(engine, late).save
        gate.close()
        name = engine.add(TEXT)
        engine.run_until_finished(name)
        for seed in range(1, 4):
            engine.run_until_finished(engine.add(prompt(30, seed)))
        assert (engine.num_held_blocks >= NUM_PAGES, engine.check_host(engine.jobs[name])) == (True, 0)
        gate.open()
        engine.run()
        assert engine.check_host(engine.jobs[name]) == check_stored(engine, engine.jobs[name]) == NUM_PAGES

    @every_cut
    def test_a_rank_whose_store_hangs_cuts_the_load_for_all_at_the_same_page(
        self, start: Start, faults: StoreFaults, cut: Cut
    ) -> None:
        job = start(cut).serve(TEXT)
        engine = start(cut, prefetch_timeout_s=0.2, io_threads=1)
        late = gate_read(faults, object_name(engine, job, 2, LAYERS - 1, HEADS - 1))
        name = engine.add(TEXT)
        engine.run_until_finished(name)
        assert engine.jobs[name].output == job.output
        late.open()
        engine.run()
        assert engine.counters["hit_tokens|store"] == 2 * BLOCK

    @every_cut
    def test_pages_enter_host_memory_while_a_late_rank_still_loads_the_rest(
        self, start: Start, faults: StoreFaults, cut: Cut
    ) -> None:
        job = start(cut).serve(TEXT)
        engine = start(cut, io_threads=1)
        late = gate_read(faults, object_name(engine, job, NUM_PAGES - 1, LAYERS - 1, HEADS - 1))
        name = engine.add(TEXT)
        engine.run(lambda: engine.check_host(engine.jobs[name]) == NUM_PAGES - 1)
        assert engine.status(name) == RequestStatus.WAITING_FOR_REMOTE_KVS
        late.open()
        engine.run()
        assert engine.jobs[name].num_external == 96

    @every_tier
    def test_a_rank_that_is_given_up_keeps_the_blocks_that_it_still_writes(
        self, start: Start, gates: Gates, cut: Cut, host_tier: str
    ) -> None:
        engine = start(cut, rank_timeout_s=0.1, host_tier=host_tier)
        engine.serve(TEXT)
        engine.drop_device()
        gate = gates(engine, -1).load
        gate.close()
        engine.counters.clear()
        name = engine.add(TEXT)
        engine.run(lambda: engine.counters["rank_differences|missing report"] > 0)
        for _ in range(20):
            engine.step()
        assert engine.status(name) == RequestStatus.WAITING_FOR_REMOTE_KVS
        gate.open()
        engine.run()
        assert engine.counters["hit_tokens|host"] < 96


class TestOneObject:
    """A7. Different bytes never come under one name."""

    def check_written(self, faults: StoreFaults) -> None:
        assert faults.written
        assert {len(set(digests)) for digests in faults.written.values()} == {1}

    @every_cut
    def test_the_ranks_of_an_engine_write_each_object_once(self, start: Start, faults: StoreFaults, cut: Cut) -> None:
        engine = start(cut)
        job = engine.serve(TEXT)
        places = product(range(NUM_PAGES), range(LAYERS), range(HEADS))
        names = [object_name(engine, job, *place) for place in places]
        written = {name: len(digests) for name, digests in faults.written.items() if ".target." in name}
        assert written == dict.fromkeys(names, 1)

    @pytest.mark.parametrize("host_tier", ["sharded", "replicated"])
    def test_replicas_of_a_head_share_the_writing(self, start: Start, faults: StoreFaults, host_tier: str) -> None:
        engine = start((4, 1), host_tier=host_tier)
        keys = [engine.keys(engine.serve(prompt(100, seed)))[:NUM_PAGES] for seed in range(4)]
        writers = defaultdict(int)
        for key, slot in ((key, slot) for each in keys for key, slot in zip(each, slots_of(engine, each), strict=True)):
            for rank in (rank for rank in engine.ranks if rank.keeps(slot)):
                geometry = rank.half._engine._geometry
                writers[rank.number] += any(geometry.writes(key, part) for part in geometry.parts)
        assert sum(writers.values()) == 2 * 4 * NUM_PAGES
        assert min(writers.values()) > 0

    def test_engines_of_all_cuts_that_write_at_the_same_time_write_equal_bytes(
        self, start: Start, faults: StoreFaults
    ) -> None:
        engines = [start(cut) for cut in [(1, 1), *CUTS]]
        faults.gates["write"].close()
        for engine in engines:
            engine.run_until_finished(engine.add(TEXT))
        faults.gates["write"].open()
        for engine in engines:
            engine.run()
        self.check_written(faults)
        assert max(len(digests) for digests in faults.written.values()) == len(engines)

    def test_engines_of_all_cuts_in_traffic_on_one_store_write_equal_bytes(
        self, start: Start, faults: StoreFaults
    ) -> None:
        engines = [start(cut, num_blocks=48, num_slots=20) for cut in [(1, 1), *CUTS]]
        traffic = [Traffic(engine, seed=1) for engine in engines]
        for _ in range(20):
            for each in traffic:
                each.run(8)
        self.check_written(faults)
        assert sum(engine.counters["hit_tokens|store"] for engine in engines) > 0

    def test_engines_with_other_weights_never_meet(self, start: Start, faults: StoreFaults) -> None:
        engines = [start((2, 1), model_id=name) for name in ("one", "other")]
        engines[1].weights = 1
        assert [engine.serve(TEXT).num_external for engine in engines] == [0, 0]
        self.check_written(faults)
        assert engines[0].half.namespace.digest() != engines[1].half.namespace.digest()


class TestALostPart:
    """A8. One rank's object goes between lookup and load."""

    @every_cut
    @pytest.mark.parametrize("page", [0, 3, 5])
    @pytest.mark.parametrize("cell", [(0, 0), (LAYERS - 1, HEADS - 1)], ids=str)
    def test_all_ranks_load_the_pages_before_it_and_the_output_is_right(
        self, start: Start, faults: StoreFaults, tmp_path: Path, cut: Cut, page: int, cell: tuple[int, int]
    ) -> None:
        job = start(cut).serve(TEXT)
        engine = start(cut)
        name = object_name(engine, job, page, *cell)
        store = open_store(f"file://{tmp_path}/store?capacity=1GiB")
        faults.fault = lambda operation, of: store.delete(name) if (operation, of) == ("read", name) else None
        assert engine.serve(TEXT).output == job.output
        assert engine.counters["hit_tokens|store"] == page * BLOCK
        assert engine.counters[f"misses|{MissReason.ABSENT.value}"] >= 1
        faults.open_all()
        assert start(cut).serve(TEXT).num_external == 96


class TestReports:
    """A9."""

    @pytest.mark.parametrize("cut", [*CUTS, (1, 3)], ids=str)
    def test_every_rank_reports_the_end_of_every_operation(
        self, start: Start, cut: Cut, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = start(cut)
        heard = Heard(engine.half.report)
        monkeypatch.setattr(engine.half, "report", heard.report)
        engine.serve(TEXT)
        engine.drop_device()
        engine.serve(TEXT)
        everybody = set(range(cut[0] * cut[1]))
        assert len(heard.settled) >= 3
        assert all(ranks == everybody for ranks in heard.settled.values())
        assert heard.logged == everybody


class Heard:
    """What comes to the scheduler half: of each operation the ranks whose part has settled, and ranks that logged."""

    def __init__(self, take: Callable[..., None]) -> None:
        self._take = take
        self.settled: dict[OpId, set[int]] = defaultdict(set)
        self.logged: set[int] = set()

    def report(self, reports: Sequence[OpReport], entries: Mapping[int, Sequence[Entry]], *rest: object) -> None:
        for each in reports:
            if each.phase == Phase.SETTLED:
                self.settled[each.op].add(each.rank)
        self.logged.update(rank for rank, lines in entries.items() if lines)
        self._take(reports, entries, *rest)


class TestTraffic:
    @every_tier
    @pytest.mark.parametrize("write", ["through", "back"])
    def test_hundreds_of_random_requests_each_see_the_right_bytes_on_every_rank(
        self, start: Start, cut: Cut, host_tier: str, write: str
    ) -> None:
        sizes = {"num_blocks": 28, "num_slots": 40, "step_tokens": 64}
        engine = start(cut, policy="priority", write=write, skew=5, host_tier=host_tier, **sizes)
        Traffic(engine, seed=len(write), salts=(None, "a")).run(400)
        engine.run()
        assert sum(job.request.num_preemptions for job in engine.jobs.values()) > 0
        assert engine.counters["hit_tokens|host"] > 0
        assert engine.counters["evicted_pages|host"] > 0

    @every_cut
    def test_random_requests_over_a_store_that_fails_at_random_on_each_rank_see_the_right_bytes(
        self, start: Start, faults: StoreFaults, cut: Cut
    ) -> None:
        chance = random.Random(str(cut))

        def fault(operation: str, name: ObjectName) -> None:
            if chance.random() < 0.1:
                raise StoreUnavailable("down")

        engine = start(cut, num_blocks=28, num_slots=20, policy="priority", prefetch="wait_complete")
        faults.fault = fault
        engine.before_forward = lambda: time.sleep(chance.random() * 0.001)
        Traffic(engine, seed=7).run(250)
        engine.run()
        assert all(job.finish_reason or job.request.is_finished() for job in engine.jobs.values())

    @pytest.mark.parametrize("cut", [(2, 1), (2, 2)], ids=str)
    def test_hundreds_of_aborts_at_random_states_leave_nothing_on_any_rank(self, start: Start, cut: Cut) -> None:
        engine, chance = start(cut, num_blocks=40, num_slots=16), random.Random(1)
        texts = [prompt(chance.randrange(20, 150), seed) for seed in range(8)]
        for _ in range(300):
            engine.add(chance.choice(texts), max_tokens=8)
            for _ in range(chance.randrange(3)):
                engine.step()
            engine.abort(chance.choice(list(engine.scheduler.requests)))
            while len(engine.scheduler.requests) > 10:
                engine.abort(chance.choice(list(engine.scheduler.requests)))
                engine.step()
        engine.run()
        assert {rank.worker._worker.half._consumption.num_open for rank in engine.ranks} <= {0}
