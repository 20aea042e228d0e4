"""The life of a request against vLLM's own scheduler: tiers, preemption, aborts, odd lengths, identities, resets.

Every step of the simulated engine compares all KV that attention would read with what it must be, and every test ends
with the conservation laws. Faults of the store are in `test_lifecycle_faults.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lifecycle_kit import check_reset, check_stored, new_weights, prompt
from simulated_engine import Start, engines_on
from simulated_faults import CopyGates, StoreFaults, gated_copies
from simulated_model import BLOCK
from simulated_traffic import Traffic
from vllm.lora.request import LoRARequest
from vllm.v1.request import RequestStatus

from vllm_hicache.storage.envelope import namespace_part

pytest_plugins = ["lifecycle_fixtures"]
LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with engines_on(tmp_path) as start:
        yield start


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyGates]:
    with gated_copies(monkeypatch) as gates:
        yield gates


class TestTiers:
    def test_a_prompt_is_served_from_the_device_then_host_memory_then_the_store(self, start: Start) -> None:
        engine, text = start(), prompt(100)
        cold = engine.serve(text)
        assert (cold.num_local, cold.num_external) == (0, 0)
        assert engine.serve(text).num_local == 96
        engine.drop_device()
        assert engine.serve(text).num_external == 96
        assert engine.hits == {"host": 96}
        other = start()
        assert other.serve(text).num_external == 96
        assert other.hits == {"disk": 96}
        assert check_stored(other, cold) == 6

    def test_one_load_takes_the_device_the_host_and_the_store_prefix_together(self, start: Start) -> None:
        text = prompt(165)
        start().serve(text)
        engine = start()
        engine.serve(text[:100])
        engine.drop_device()
        engine.serve(text[:40])
        whole = engine.serve(text)
        assert (whole.num_local, whole.num_external) == (32, 128)
        assert engine.hits == {"disk": 96 + 64, "host": 32 + 64}

    def test_output_tokens_are_saved_too_and_serve_the_next_turn(self, start: Start) -> None:
        engine = start()
        first = engine.serve(prompt(30), max_tokens=40)
        engine.drop_device()
        assert engine.serve([*first.tokens, *prompt(9, 1)]).num_external == 64

    def test_a_finer_grid_cuts_the_same_page_into_objects_and_puts_it_together(self, start: Start) -> None:
        text = prompt(100)
        start(grid="2x2").serve(text)
        assert start(grid="2x2").serve(text).num_external == 96
        assert start(grid="3x1").serve(text).num_external == 0

    def test_without_a_store_host_memory_alone_serves(self, start: Start) -> None:
        engine = start(store="none")
        engine.serve(prompt(100))
        engine.drop_device()
        engine.serve(prompt(100))
        assert engine.hits == {"host": 96}


class TestSaves:
    def test_a_save_reads_what_a_slow_forward_pass_of_its_step_has_written(self, start: Start) -> None:
        """B1."""
        engine = start()
        engine.before_forward = lambda: time.sleep(0.002)
        jobs = [engine.serve(prompt(70, seed), max_tokens=20) for seed in range(3)]
        assert [check_stored(engine, job) for job in jobs] == [5, 5, 5]

    def test_a_late_save_still_reads_its_own_blocks_after_others_have_used_all_the_rest(
        self, start: Start, copies: CopyGates
    ) -> None:
        engine = start(num_blocks=24, store="none")
        copies.save.close()
        name = engine.add(prompt(100))
        engine.run_until_finished(name)
        assert engine.num_held_blocks == 6
        for seed in range(1, 5):
            engine.run_until_finished(engine.add(prompt(30, seed)))
        copies.save.open()
        engine.run()
        assert engine.check_host(engine.jobs[name]) == 6

    def test_a_request_that_needs_held_blocks_waits_for_the_save_and_preempts_nobody(
        self, start: Start, copies: CopyGates
    ) -> None:
        engine = start(num_blocks=12)
        copies.save.close()
        engine.run_until_finished(engine.add(prompt(100)))
        waits = engine.add(prompt(100, 1))
        for _ in range(5):
            engine.step()
        assert not engine.jobs[waits].output
        copies.save.open()
        engine.run()
        assert engine.jobs[waits].request.num_preemptions == 0

    def test_the_engine_keeps_stepping_until_the_last_flush_is_acknowledged(
        self, start: Start, copies: CopyGates, faults: StoreFaults
    ) -> None:
        engine = start()
        copies.save.close()
        faults.gates["write"].close()
        engine.run_until_finished(engine.add(prompt(100)))
        assert engine.has_push_work
        copies.save.open()
        engine.run(lambda: faults.gates["write"].num_waiting > 0)
        assert engine.has_push_work
        assert engine.scheduler.has_requests()
        faults.gates["write"].open()
        engine.run()
        assert not engine.has_push_work

    def test_nothing_that_is_still_loading_is_saved(self, start: Start, copies: CopyGates) -> None:
        start().serve(prompt(100))
        engine = start()
        copies.load.close()
        name = engine.add(prompt(100))
        engine.run(lambda: engine.status(name) == LOADING)
        engine.add(prompt(100))
        for _ in range(20):
            engine.step()
        assert engine.counters["bytes|save"] == 0
        copies.load.open()


class TestLoads:
    def test_pages_are_pinned_while_they_load_although_saves_want_every_slot(
        self, start: Start, copies: CopyGates
    ) -> None:
        engine = start(num_slots=8, num_blocks=40, store="none")
        held = engine.serve(prompt(100))
        engine.drop_device()
        copies.load.close()
        engine.add(prompt(100))
        engine.run(lambda: copies.load.num_waiting > 0)
        for seed in range(1, 6):
            engine.run_until_finished(engine.add(prompt(60, seed)))
        assert engine.check_host(held) == 6
        copies.load.open()
        engine.run()
        assert engine.hits == {"host": 96}

    @pytest.mark.parametrize("num_slots", [6, 7, 10])
    def test_a_store_hit_is_served_as_far_as_host_memory_has_room(self, start: Start, num_slots: int) -> None:
        text = prompt(165)
        start().serve(text)
        engine = start(num_slots=num_slots)
        assert engine.serve(text).num_external == 16 * num_slots

    def test_blocks_that_load_are_not_given_to_others(self, start: Start, copies: CopyGates) -> None:
        engine = start(num_blocks=24)
        engine.serve(prompt(100))
        engine.drop_device()
        copies.load.close()
        waiting = engine.add(prompt(100))
        for seed in range(1, 4):
            engine.add(prompt(50, seed), max_tokens=30)
        engine.run(lambda: all(job.finish_reason for name, job in engine.jobs.items() if name != waiting))
        copies.load.open()
        engine.run()
        assert engine.jobs[waiting].num_external == 96

    def test_two_requests_for_one_prompt_load_it_side_by_side(self, start: Start, copies: CopyGates) -> None:
        engine = start()
        engine.serve(prompt(100))
        engine.drop_device()
        copies.load.close()
        names = [engine.add(prompt(100)), engine.add(prompt(100))]
        engine.run(lambda: all(engine.status(name) == LOADING for name in names))
        copies.load.open()
        engine.run()
        assert [engine.jobs[name].num_external for name in names] == [96, 96]


class TestPreemption:
    """B4. A preempted request starts again from its tokens; its output is that of a run without interruption."""

    @pytest.mark.parametrize("steps", [1, 2, 3, 4, 8, 17, 25])
    def test_a_running_request_can_be_preempted_at_any_step(self, start: Start, steps: int) -> None:
        engine = start(step_tokens=48)
        name = engine.add(prompt(130), max_tokens=24)
        for _ in range(steps):
            engine.step()
        engine.preempt(name)
        engine.run()
        assert len(engine.jobs[name].output) == 24

    @pytest.mark.parametrize("drop", [True, False], ids=["host", "device"])
    def test_with_its_save_done_it_comes_back_from_the_cache(self, start: Start, drop: bool) -> None:
        engine = start()
        name = engine.add(prompt(100), max_tokens=400)
        engine.run(lambda: engine.tier.num_free < engine.tier.num_slots and engine.tier.num_reserved == 0)
        engine.preempt(name)
        if drop:
            engine.run(lambda: engine.num_held_blocks == 0 and not engine.scheduler.running)
            engine.drop_device()
        engine.run()
        assert len(engine.jobs[name].output) == 400

    def test_with_its_save_under_way_it_is_preempted_and_saved(self, start: Start, copies: CopyGates) -> None:
        engine = start()
        copies.save.close()
        name = engine.add(prompt(100), max_tokens=400)
        engine.run(lambda: copies.save.num_waiting > 0)
        engine.preempt(name)
        engine.run_until_finished(name)
        copies.save.open()
        engine.run()
        assert check_stored(engine, engine.jobs[name]) == 31

    def test_with_its_flush_under_way_it_is_preempted_and_flushed(self, start: Start, faults: StoreFaults) -> None:
        engine = start()
        faults.gates["write"].close()
        name = engine.add(prompt(100), max_tokens=400)
        engine.run(lambda: faults.gates["write"].num_waiting > 0)
        engine.preempt(name)
        engine.run_until_finished(name)
        faults.gates["write"].open()
        engine.run()
        assert check_stored(engine, engine.jobs[name]) == 31

    def test_again_and_again_right_after_every_load(self, start: Start) -> None:
        engine = start()
        engine.serve(prompt(100))
        engine.drop_device()
        name = engine.add(prompt(100), max_tokens=12)
        for num_output in range(1, 12):
            engine.run(lambda wanted=num_output: len(engine.jobs[name].output) == wanted)
            engine.preempt(name)
        engine.run()
        assert engine.jobs[name].request.num_preemptions == 11

    def test_a_device_too_small_for_all_preempts_by_itself_and_nobody_notices(self, start: Start) -> None:
        engine = start(num_blocks=14, num_slots=12)
        names = [engine.add(prompt(40, seed), max_tokens=60) for seed in range(5)]
        engine.run()
        assert sum(engine.jobs[name].request.num_preemptions for name in names) > 0
        assert [len(engine.jobs[name].output) for name in names] == [60] * 5

    @pytest.mark.xfail(
        strict=True, raises=RuntimeError, reason="vLLM refuses while a save holds blocks, and there is no hook before"
    )
    def test_resetting_the_prefix_cache_with_running_requests_works_while_a_save_is_under_way(
        self, start: Start, copies: CopyGates
    ) -> None:
        engine = start()
        copies.save.close()
        engine.add(prompt(100), max_tokens=400)
        engine.run(lambda: copies.save.num_waiting > 0)
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)


class TestAborts:
    """B5. At each point of a request's life: what it held comes back, and nobody is served its leftovers."""

    def test_while_the_store_is_asked(self, start: Start, faults: StoreFaults) -> None:
        start().serve(prompt(100))
        engine = start()
        faults.gates["exists"].close()
        name = engine.add(prompt(100))
        engine.step()
        engine.abort(name)
        faults.gates["exists"].open()
        assert engine.serve(prompt(100)).num_external == 96

    @pytest.mark.parametrize("reuse", [True, False], ids=["its blocks reused at once", "alone"])
    def test_while_it_loads_from_host_memory(self, start: Start, copies: CopyGates, reuse: bool) -> None:
        engine = start(num_blocks=16)
        engine.serve(prompt(100))
        engine.drop_device()
        copies.load.close()
        name = engine.add(prompt(100))
        engine.run(lambda: copies.load.num_waiting > 0)
        engine.abort(name)
        if reuse:
            for seed in range(1, 5):
                engine.add(prompt(60, seed), max_tokens=20)
        for _ in range(10):
            engine.step()
        copies.load.open()
        engine.run()
        engine.drop_device()
        assert engine.serve(prompt(100)).num_external == 96

    def test_while_it_loads_from_the_store(self, start: Start, faults: StoreFaults) -> None:
        start().serve(prompt(100))
        engine = start(num_blocks=12)
        faults.gates["read"].close()
        name = engine.add(prompt(100))
        engine.run(lambda: faults.gates["read"].num_waiting > 0)
        engine.abort(name)
        others = [engine.add(prompt(60, seed), max_tokens=20) for seed in range(1, 5)]
        engine.run_until_finished(*others)
        faults.gates["read"].open()
        engine.run()
        assert engine.serve(prompt(100)).num_external > 0

    def test_while_its_save_is_under_way(self, start: Start, copies: CopyGates) -> None:
        engine = start(num_blocks=24, store="none")
        copies.save.close()
        name = engine.add(prompt(100), max_tokens=200)
        engine.run(lambda: copies.save.num_waiting > 0)
        engine.abort(name)
        for seed in range(1, 5):
            engine.run_until_finished(engine.add(prompt(60, seed)))
        copies.save.open()
        engine.run()
        assert engine.check_host(engine.jobs[name]) >= 6

    def test_while_its_flush_is_under_way(self, start: Start, faults: StoreFaults) -> None:
        engine = start(num_slots=8)
        faults.gates["write"].close()
        name = engine.add(prompt(100), max_tokens=200)
        engine.run(lambda: faults.gates["write"].num_waiting > 0)
        engine.abort(name)
        for seed in range(1, 5):
            engine.run_until_finished(engine.add(prompt(60, seed)))
        faults.gates["write"].open()
        engine.run()
        assert check_stored(engine, engine.jobs[name]) >= 6

    def test_during_the_step_that_saves(self, start: Start) -> None:
        engine = start()
        name = engine.add(prompt(100), max_tokens=50)
        engine.before_update = lambda: engine.abort(name)
        engine.run()
        assert engine.check_host(engine.jobs[name]) == 6

    def test_during_the_step_in_which_its_load_ends(self, start: Start) -> None:
        engine = start()
        engine.serve(prompt(100))
        engine.drop_device()
        name = engine.add(prompt(100))
        engine.before_update = lambda: engine.abort(name)
        engine.run()
        engine.before_update = lambda: None
        assert engine.serve(prompt(100)).num_external == 96


class TestLengths:
    @pytest.mark.parametrize("num_local", range(12))
    def test_a_device_prefix_may_end_anywhere_inside_a_page(self, start: Start, num_local: int) -> None:
        """B7. Twelve blocks are three pages of four."""
        engine, text = start(page_blocks=4), prompt(12 * BLOCK)
        engine.serve(text)
        engine.drop_device()
        engine.serve(text[: num_local * BLOCK + 1], max_tokens=1)
        job = engine.serve(text)
        local = num_local * BLOCK
        assert (job.num_local, job.num_external) == (local, 12 * BLOCK - 1 - local)

    @pytest.mark.parametrize("page_blocks", [1, 4])
    @pytest.mark.parametrize("num_blocks", [1, 2, 3, 4, 5, 8, 12])
    @pytest.mark.parametrize("extra", [-1, 0, 1])
    @pytest.mark.parametrize("tier", ["host", "store"])
    def test_prompts_around_whole_blocks_and_pages_leave_one_token_to_compute(
        self, start: Start, page_blocks: int, num_blocks: int, extra: int, tier: str
    ) -> None:
        """B8."""
        engine, text = start(page_blocks=page_blocks), prompt(num_blocks * BLOCK + extra)
        engine.serve(text, max_tokens=1)
        engine.drop_device()
        again = engine if tier == "host" else start(page_blocks=page_blocks)
        page = page_blocks * BLOCK
        assert again.serve(text).num_external == min(len(text) // page * page, len(text) - 1)

    def test_a_whole_prompt_on_the_device_is_completed_by_its_last_block(self, start: Start) -> None:
        engine, text = start(), prompt(6 * BLOCK)
        engine.serve(text)
        job = engine.serve(text)
        assert (job.num_local, job.num_external) == (5 * BLOCK, BLOCK - 1)

    def test_a_prompt_shorter_than_the_threshold_is_computed(self, start: Start) -> None:
        engine = start(load_threshold=64)
        engine.serve(prompt(63))
        engine.drop_device()
        assert engine.serve(prompt(63)).num_external == 0
        engine.drop_device()
        assert engine.serve([*prompt(63), 1]).num_external == 0


class TestIdentity:
    def test_another_salt_never_hits_and_the_same_one_does(self, start: Start) -> None:
        """D1."""
        engine, text = start(), prompt(100)
        for salt in (None, "a", "b"):
            assert engine.serve(text, salt=salt).num_external == 0
        engine.drop_device()
        assert [engine.serve(text, salt=salt).num_external for salt in ("a", "b", None)] == [96, 96, 96]

    def test_the_same_adapter_name_with_other_weights_never_hits(self, start: Start, tmp_path: Path) -> None:
        """D1. vLLM's own prefix cache knows the name alone, so it is dropped between the two."""
        engine, text = start(), prompt(100)
        (tmp_path / "lora").mkdir()
        adapter = tmp_path / "lora" / "adapter_model.bin"
        adapter.write_bytes(b"one")
        lora = LoRARequest("tuned", 1, str(adapter.parent))
        assert engine.serve(text).num_external == 0
        assert engine.serve(text, lora=lora).num_external == 0
        engine.drop_device()
        assert engine.serve(text, lora=lora).num_external == 96
        engine.drop_device()
        adapter.write_bytes(b"other")
        engine.weights += 1
        assert engine.serve(text, lora=lora).num_external == 0

    def test_another_model_id_or_generation_never_hits(self, start: Start) -> None:
        start().serve(prompt(100))
        assert start(model_id="other").serve(prompt(100)).num_external == 0
        assert start(generation="1").serve(prompt(100)).num_external == 0


class TestReset:
    """D3. New weights: what was computed with the old ones is served to nobody."""

    def test_nothing_from_before_is_served_afterwards(self, start: Start) -> None:
        check_reset(start(), prompt(100), 96)

    def test_nothing_from_afterwards_is_served_to_a_new_engine(self, start: Start) -> None:
        engine, text = start(), prompt(100)
        new_weights(engine)
        engine.serve(text)
        other = start()
        assert other.serve(text).num_external == 0

    def test_a_load_under_way_is_thrown_away(self, start: Start, copies: CopyGates) -> None:
        engine = start()
        engine.serve(prompt(100))
        engine.drop_device()
        copies.load.close()
        engine.add(prompt(100))
        engine.run(lambda: copies.load.num_waiting > 0)
        engine.scheduler.reset_connector_cache()
        copies.load.open()
        engine.run()
        assert engine.tier.num_free == engine.tier.num_slots
        engine.drop_device()
        assert engine.serve(prompt(100)).num_external == 0

    @pytest.mark.parametrize("point", ["save", "write"])
    def test_saves_and_flushes_under_way_never_come_back(
        self, start: Start, copies: CopyGates, faults: StoreFaults, point: str
    ) -> None:
        engine = start()
        gate = copies.save if point == "save" else faults.gates["write"]
        gate.close()
        engine.run_until_finished(engine.add(prompt(100)))
        engine.run(lambda: gate.num_waiting > 0)
        engine.scheduler.reset_connector_cache()
        gate.open()
        engine.run()
        assert engine.tier.num_free == engine.tier.num_slots
        engine.drop_device()
        assert engine.serve(prompt(100)).num_external == 0

    def test_no_page_from_before_is_flushed_into_the_new_namespace(self, start: Start, tmp_path: Path) -> None:
        engine = start()
        engine.run_until_finished(engine.add(prompt(100)))
        engine.run(lambda: engine.tier.num_leases > 0 and engine.tier.num_reserved == 0)
        engine.scheduler.reset_connector_cache()
        engine.run()
        new = namespace_part(engine.half.namespace.digest())
        assert not [path for path in (tmp_path / "store").rglob("*.target.*") if new in path.parts]

    def test_a_request_that_runs_across_a_reset_saves_nothing(self, start: Start) -> None:
        engine = start()
        name = engine.add(prompt(100), max_tokens=40)
        engine.run(lambda: len(engine.jobs[name].output) == 3)
        engine.scheduler.reset_connector_cache()
        engine.run()
        assert engine.tier.num_free == engine.tier.num_slots


class TestTraffic:
    @pytest.mark.parametrize("prefetch", ["timeout", "wait_complete", "best_effort"])
    @pytest.mark.parametrize("write", ["through", "selective", "back"])
    def test_hundreds_of_random_requests_each_see_the_right_bytes(
        self, start: Start, write: str, prefetch: str
    ) -> None:
        engine = start(num_blocks=28, num_slots=40, step_tokens=64, policy="priority", write=write, prefetch=prefetch)
        Traffic(engine, seed=len(write + prefetch), salts=(None, "a")).run(800)
        engine.run()
        assert sum(job.request.num_preemptions for job in engine.jobs.values()) > 0
        assert engine.counters["hit_tokens|host"] > 0
        assert engine.counters["evicted_pages|host"] > 0

    @pytest.mark.parametrize("page_blocks", [1, 2, 4])
    def test_several_engines_share_one_store(self, start: Start, page_blocks: int) -> None:
        engines = [start(num_blocks=48, num_slots=20, page_blocks=page_blocks) for _ in range(3)]
        traffic = [Traffic(engine, seed=1) for engine in engines]
        for _ in range(30):
            for each in traffic:
                each.run(8)
        assert sum(engine.counters["hit_tokens|store"] for engine in engines) > 0
