"""Faults in the life of a request: bad objects, a store that raises, hangs or is full, and aborts by the thousand.

A fault costs time, never a byte: outputs are those of a clean run, checked in every step by the simulated engine.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from lifecycle_kit import prompt
from simulated_engine import SimulatedEngine, Start, engines_on
from simulated_faults import Gate, StoreFaults
from simulated_model import BLOCK, Job
from simulated_traffic import Traffic

from vllm_hicache.errors import ObjectMissing, StoreError, StoreTimeout, StoreUnavailable
from vllm_hicache.names import ObjectName, Role
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.envelope import ChunkId
from vllm_hicache.storage.registry import open_store
from vllm_hicache.transfer.copier import CpuCopier

pytest_plugins = ["lifecycle_fixtures"]
TEXT = random.Random(0).choices(range(1000), k=100)
NUM_PAGES = 6
RECOVERY_S = 10.0
"""How long a circuit may take to find out that the store is back."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with engines_on(tmp_path) as start:
        yield start


def object_names(engine: SimulatedEngine, job: Job) -> list[ObjectName]:
    namespace = engine.half.namespace.digest()
    return [ChunkId(key, 0, Role.TARGET, 0, 0).object_name(namespace) for key in engine.keys(job)[:NUM_PAGES]]


class Objects:
    """The stored objects of `TEXT`, to be damaged."""

    def __init__(self, tmp_path: Path, start: Start) -> None:
        engine = start()
        self.job = engine.serve(TEXT)
        self.names = object_names(engine, self.job)
        self.store: Store = open_store(f"file://{tmp_path}/store?capacity=1GiB")

    def read(self, page: int) -> bytearray:
        size = next(info.size_bytes for info in self.store.list(self.names[page]))
        content = bytearray(size)
        self.store.read(self.names[page], [memoryview(content)])
        return content

    def write(self, page: int, content: bytes | bytearray) -> None:
        self.store.delete(self.names[page])
        self.store.write(self.names[page], [memoryview(content)])

    def damage(self, page: int, kind: str) -> None:
        content = self.read(page)
        if kind == "short":
            content = content[:-100]
        elif kind == "empty":
            content = content[:0]
        elif kind == "headless":
            content = content[:20]
        elif kind == "long":
            content += bytes(64)
        elif kind == "payload bit":
            content[-1] ^= 1
        elif kind == "header bit":
            content[50] ^= 1
        elif kind == "another page's":
            content = self.read((page + 1) % NUM_PAGES)
        self.write(page, content)


@pytest.fixture
def objects(tmp_path: Path, start: Start) -> Objects:
    return Objects(tmp_path, start)


KINDS = ["short", "empty", "headless", "long", "payload bit", "header bit", "another page's"]


class TestBadObjects:
    """E3, E4. One miss of the page and what follows, the object is removed, and the next save heals it."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("page", range(NUM_PAGES))
    def test_a_bad_object_costs_one_miss_and_is_healed(
        self, start: Start, objects: Objects, kind: str, page: int
    ) -> None:
        objects.damage(page, kind)
        engine = start()
        job = engine.serve(TEXT, max_tokens=100)
        assert engine.counters["hit_tokens|store"] == page * BLOCK
        healed = list(engine.stored_pages(job))[:NUM_PAGES]
        assert healed == [engine.page_bytes(job, index) for index in range(NUM_PAGES)]

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("pages", [[0, 1], [1, 3], [2, 5], list(range(NUM_PAGES))], ids=str)
    def test_several_bad_objects_are_found_and_healed_one_engine_after_the_other(
        self, start: Start, objects: Objects, kind: str, pages: Sequence[int]
    ) -> None:
        for page in pages:
            objects.damage(page, kind)
        first = start()
        first.serve(TEXT, max_tokens=100)
        assert first.counters["hit_tokens|store"] == pages[0] * BLOCK
        for _ in pages[1:]:
            start().serve(TEXT, max_tokens=100)
        last = start()
        last.serve(TEXT)
        assert last.counters["hit_tokens|store"] == NUM_PAGES * BLOCK

    @pytest.mark.parametrize("page", [0, 3, 5])
    def test_a_truncated_file_is_read_once_and_never_again_by_its_request(
        self, start: Start, objects: Objects, faults: StoreFaults, page: int
    ) -> None:
        objects.damage(page, "short")
        reads: list[ObjectName] = []
        faults.fault = lambda operation, name: reads.append(name) if operation == "read" else None
        start().serve(TEXT, max_tokens=40)
        assert reads.count(objects.names[page]) == 1

    @pytest.mark.parametrize("page", [0, 3, 5])
    def test_an_object_that_goes_between_lookup_and_read_is_a_miss(
        self, start: Start, objects: Objects, faults: StoreFaults, page: int
    ) -> None:
        def vanish(operation: str, name: ObjectName) -> None:
            if operation == "read" and name == objects.names[page]:
                objects.store.delete(name)

        faults.fault = vanish
        engine = start()
        engine.serve(TEXT)
        assert engine.counters["hit_tokens|store"] == page * BLOCK
        assert engine.counters["misses|absent"] >= 1

    def test_a_hole_in_the_chain_ends_the_hit(self, start: Start, objects: Objects) -> None:
        objects.store.delete(objects.names[2])
        assert start().serve(TEXT).num_external == 2 * BLOCK

    @pytest.mark.parametrize("page_blocks", [2, 3])
    def test_a_bad_page_behind_a_device_prefix_that_ends_inside_a_page(
        self, start: Start, tmp_path: Path, page_blocks: int
    ) -> None:
        first = start(page_blocks=page_blocks)
        names = object_names(first, first.serve(TEXT))
        engine = start(page_blocks=page_blocks)
        engine.serve(TEXT[:17], max_tokens=1)
        store = open_store(f"file://{tmp_path}/store?capacity=1GiB")
        store.delete(names[0])
        store.write(names[0], [memoryview(b"not an object")])
        assert engine.serve(TEXT).num_local == BLOCK
        assert start(page_blocks=page_blocks).serve(TEXT).num_external == 96


ERRORS = [StoreUnavailable("down"), StoreTimeout("late"), ObjectMissing("gone"), StoreError("odd"), OSError(5, "I/O")]
ERRORS += [RuntimeError("bug"), MemoryError(), KeyError("x")]


class TestRaisingStore:
    """E1, E4, E12. Every call may raise anything: a miss, the threads live, and later requests hit."""

    @pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
    @pytest.mark.parametrize("page", [0, 3])
    def test_a_read_that_raises_is_a_miss(
        self, start: Start, objects: Objects, faults: StoreFaults, error: Exception, page: int
    ) -> None:
        faults.fault = raising(error, "read", objects.names[page])
        engine = start()
        engine.serve(TEXT)
        assert engine.counters["hit_tokens|store"] == page * BLOCK
        faults.open_all()
        assert start().serve(TEXT).num_external == 96

    @pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
    def test_a_lookup_that_raises_is_a_miss(
        self, start: Start, objects: Objects, faults: StoreFaults, error: Exception
    ) -> None:
        faults.fault = raising(error, "exists")
        engine = start()
        assert engine.serve(TEXT).num_external == 0
        faults.open_all()
        assert start().serve(TEXT).num_external == 96

    @pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
    def test_a_flush_that_raises_leaves_the_page_in_host_memory_and_is_made_up_by_the_next_hit(
        self, start: Start, faults: StoreFaults, error: Exception
    ) -> None:
        engine = start()
        faults.fault = raising(error, "write")
        job = engine.serve(TEXT)
        assert set(engine.stored_pages(job)) == {None}
        faults.open_all()
        engine.drop_device()
        assert engine.serve(TEXT).num_external == 96
        assert None not in set(engine.stored_pages(job))

    @pytest.mark.parametrize("operation", ["exists", "read", "write"])
    def test_an_outage_costs_no_request_and_leaves_nothing_behind(
        self, start: Start, faults: StoreFaults, operation: str
    ) -> None:
        engine = start(num_slots=10)
        faults.fault = raising(StoreUnavailable("down"), operation)
        Traffic(engine, seed=3).run(200)
        faults.open_all()
        Traffic(engine, seed=3).run(200)
        deadline = time.monotonic() + RECOVERY_S
        while None in engine.stored_pages(job := engine.serve(prompt(100, 5))):
            assert time.monotonic() < deadline, "the circuit did not close"
            engine.drop_device()
        assert start().serve(job.tokens).num_external == 96


def raising(error: Exception, operation: str, name: ObjectName | None = None) -> Callable[[str, ObjectName], None]:
    def fault(called: str, of: ObjectName) -> None:
        if called == operation and name in (None, of):
            raise error

    return fault


class TestHangingStore:
    """E6, E7. A store that does not answer costs at most the time limits."""

    def test_a_lookup_that_hangs_is_given_up(self, start: Start, objects: Objects, faults: StoreFaults) -> None:
        engine = start(lookup_timeout_s=0.02)
        faults.gates["exists"].close()
        name = engine.add(TEXT)
        engine.run_until_finished(name)
        assert engine.jobs[name].num_external == 0
        assert engine.counters["misses|timeout"] == NUM_PAGES

    def test_reads_that_hang_are_given_up_and_what_has_arrived_is_kept(
        self, start: Start, objects: Objects, faults: StoreFaults
    ) -> None:
        engine = start(prefetch_timeout_s=0.05, io_threads=1)
        gate = faults.gates["read"]
        faults.fault = lambda operation, name: gate.close() if name == objects.names[2] else None
        name = engine.add(TEXT)
        engine.run_until_finished(name)
        gate.open()
        engine.run()
        assert engine.counters["hit_tokens|store"] == 3 * BLOCK

    def test_a_first_read_that_hangs_does_not_hold_its_request(
        self, start: Start, objects: Objects, faults: StoreFaults
    ) -> None:
        engine = start(prefetch_timeout_s=0.05)
        faults.gates["read"].close()
        name = engine.add(TEXT)
        engine.run_until_finished(name, patience_s=2.0)
        assert faults.gates["read"].num_waiting > 0

    def test_reads_that_hang_do_not_hold_other_requests_for_the_same_prompt(
        self, start: Start, objects: Objects, faults: StoreFaults
    ) -> None:
        engine = start(prefetch_timeout_s=0.05)
        faults.gates["read"].close()
        names = [engine.add([*TEXT, extra]) for extra in range(3)]
        engine.run_until_finished(*names, patience_s=2.0)
        assert faults.gates["read"].num_waiting > 0

    def test_a_bad_first_page_is_computed_while_a_later_one_is_still_being_read(
        self, start: Start, objects: Objects, faults: StoreFaults
    ) -> None:
        objects.damage(0, "short")
        engine = start()
        gate = faults.gates["second page"] = Gate()
        gate.close()
        second = ("read", objects.names[1])
        faults.fault = lambda operation, name: gate.passes() if (operation, name) == second else None
        name = engine.add(TEXT)
        engine.run_until_finished(name, patience_s=2.0)
        assert gate.num_waiting == 1

    def test_a_page_that_failed_is_saved_once_the_load_it_belonged_to_has_ended(
        self, start: Start, objects: Objects, faults: StoreFaults
    ) -> None:
        objects.damage(0, "short")
        engine = start()
        gate = faults.gates["second page"] = Gate()
        gate.close()
        second = ("read", objects.names[1])
        faults.fault = lambda operation, name: gate.passes() if (operation, name) == second else None
        name = engine.add(TEXT, max_tokens=400)
        engine.run(lambda: len(engine.jobs[name].output) > 10)
        gate.open()
        engine.run()
        assert engine.check_host(engine.jobs[name]) == 31

    def test_a_read_that_hangs_for_an_aborted_request_holds_nobody_else(
        self, start: Start, objects: Objects, faults: StoreFaults
    ) -> None:
        engine = start(prefetch_timeout_s=0.05)
        faults.gates["read"].close()
        gone = engine.add(TEXT)
        engine.run(lambda: faults.gates["read"].num_waiting > 0)
        engine.abort(gone)
        engine.run_until_finished(engine.add(TEXT), patience_s=2.0)
        assert faults.gates["read"].num_waiting > 0

    def test_an_abort_ends_the_reads_that_have_not_begun(
        self, start: Start, objects: Objects, faults: StoreFaults
    ) -> None:
        engine = start(io_threads=1)
        faults.gates["read"].close()
        name = engine.add(TEXT)
        engine.run(lambda: faults.gates["read"].num_waiting > 0)
        num_reads = faults.calls["read"]
        engine.abort(name)
        engine.step()
        faults.gates["read"].open()
        engine.run()
        assert faults.calls["read"] == num_reads

    def test_flushes_that_hang_hold_no_request_and_no_device_block(self, start: Start, faults: StoreFaults) -> None:
        engine = start(num_slots=12)
        faults.gates["write"].close()
        for seed in range(8):
            engine.run_until_finished(engine.add(prompt(100, seed)))
        engine.run(lambda: engine.num_held_blocks == 0)
        faults.gates["write"].open()

    def test_a_full_flush_queue_declines_and_the_next_hit_offers_again(self, start: Start, faults: StoreFaults) -> None:
        engine = start(flush_queue_pages=2)
        faults.gates["write"].close()
        engine.run_until_finished(engine.add(prompt(100, 9)))
        name = engine.add(TEXT)
        engine.run_until_finished(name)
        engine.run(lambda: engine.counters["declined_pages|flush"] == NUM_PAGES)
        faults.gates["write"].open()
        engine.run()
        assert None in engine.stored_pages(engine.jobs[name])
        engine.drop_device()
        assert engine.serve(TEXT).num_external == 96
        assert None not in set(engine.stored_pages(engine.jobs[name]))


class TestCopies:
    """A copy between host and device that raises is a miss as well."""

    def test_a_load_that_raises_is_recomputed(self, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = start()
        engine.serve(TEXT)
        engine.drop_device()
        monkeypatch.setattr(CpuCopier, "load", broken_copy)
        engine.serve(TEXT)
        assert engine.counters["hit_tokens|host"] == 0
        monkeypatch.undo()
        engine.drop_device()
        assert engine.serve(TEXT).num_external == 96

    def test_a_save_that_raises_is_offered_again(self, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = start()
        monkeypatch.setattr(CpuCopier, "save", broken_copy)
        name = engine.add(TEXT, max_tokens=60)
        engine.run(lambda: len(engine.jobs[name].output) > 5)
        monkeypatch.undo()
        engine.run()
        assert engine.check_host(engine.jobs[name]) == 9


def broken_copy(copier: CpuCopier, moves: object, fence: None) -> None:
    raise RuntimeError("the copy engine is gone")


class TestAbortsByTheThousand:
    """E2. Whatever an aborted request had reached, all of it comes back."""

    @pytest.mark.parametrize("write", ["through", "back"])
    def test_two_thousand_aborts_at_random_states_leave_nothing(
        self, start: Start, faults: StoreFaults, write: str
    ) -> None:
        engine, chance = start(num_blocks=40, num_slots=16, write=write), random.Random(write)
        texts = [prompt(chance.randrange(20, 150), seed) for seed in range(8)]
        for _ in range(2000):
            engine.add(chance.choice(texts), max_tokens=8)
            for _ in range(chance.randrange(3)):
                engine.step()
            if chance.random() < 0.1:
                faults.fault = chance.choice([lambda operation, name: None, raising(OSError(5, "I/O"), "read")])
            engine.abort(chance.choice(list(engine.scheduler.requests)))
            while len(engine.scheduler.requests) > 10:
                engine.abort(chance.choice(list(engine.scheduler.requests)))
                engine.step()
        engine.run()
        engine.tier.check()

    def test_an_abort_in_each_step_of_a_load_from_a_bad_store(self, start: Start, objects: Objects) -> None:
        for num_steps in range(8):
            objects.damage(num_steps % NUM_PAGES, "payload bit")
            engine = start()
            name = engine.add(TEXT)
            for _ in range(num_steps):
                engine.step()
            engine.abort(name)
            engine.check_at_rest()
            engine.serve(TEXT)


class TestTrafficWithFaults:
    @pytest.mark.parametrize("prefetch", ["timeout", "wait_complete", "best_effort"])
    @pytest.mark.parametrize("write", ["through", "selective", "back"])
    def test_random_requests_over_a_store_that_fails_at_random_see_the_right_bytes(
        self, start: Start, faults: StoreFaults, write: str, prefetch: str
    ) -> None:
        chance = random.Random(write + prefetch)

        def fault(operation: str, name: ObjectName) -> None:
            if chance.random() < 0.1:
                raise chance.choice(ERRORS)

        engine = start(num_blocks=28, num_slots=30, policy="priority", write=write, prefetch=prefetch)
        faults.fault = fault
        Traffic(engine, seed=7).run(500)
        engine.run()
        assert all(job.finish_reason or job.request.is_finished() for job in engine.jobs.values())

    def test_random_requests_over_files_that_rot_see_the_right_bytes(self, start: Start, tmp_path: Path) -> None:
        chance = random.Random(5)
        engine = start(num_blocks=24, num_slots=12)
        traffic = Traffic(engine, seed=9)
        for _ in range(60):
            traffic.run(10)
            rot(tmp_path / "store", chance)
        engine.run()
        assert sum(engine.counters[f"misses|{kind}"] for kind in ("short", "corrupt")) > 0

    def test_random_requests_across_resets_see_the_right_bytes(self, start: Start) -> None:
        engine = start(num_blocks=40, num_slots=14)
        traffic = Traffic(engine, seed=11)
        for _ in range(20):
            traffic.run(20)
            engine.scheduler.reset_connector_cache()
            engine.tier.check()
        engine.run()


def rot(folder: Path, chance: random.Random) -> None:
    """Damage three stored files."""
    files = sorted(Path(place, name) for place, _, names in os.walk(folder) for name in names if ".target." in name)
    for path in chance.sample(files, min(3, len(files))):
        with suppress(FileNotFoundError):
            content = bytearray(path.read_bytes())
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            path.write_bytes(content[: chance.choice([len(content), len(content) // 2])])
