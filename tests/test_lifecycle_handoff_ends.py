"""Handoffs that end early on either side: leases that run out, aborts, resets and want of room.

In each, every byte that attention reads is checked on every rank, kept pages are kept and the rest is computed; at the
end neither engine has leases, operations, exports or held blocks.
"""

from __future__ import annotations

import pytest
from handoff_kit import (
    CUTS,
    PATIENT,
    TEXT,
    ReadsOf,
    every_cut,
    name_of,
    num_owners,
    slots_of,
)
from lifecycle_kit import Gates, new_weights, prompt
from simulated_faults import StoreFaults
from simulated_handoff import (
    TO_COMPUTE,
    Cuts,
    Pair,
    StartPair,
)
from simulated_model import BLOCK
from vllm.v1.request import RequestStatus

pytest_plugins = ["handoff_fixtures", "lifecycle_fixtures"]


two_cuts = pytest.mark.parametrize("cuts", [CUTS[0], CUTS[3]], ids=name_of)
"""For what waits for seconds."""


class TestLeases:
    @every_cut
    def test_pages_for_which_nobody_comes_are_let_go_when_their_time_is_over(
        self, start: StartPair, cuts: Cuts
    ) -> None:
        pair = start(*cuts, of_decode=PATIENT)
        told = pair.ready(TEXT)
        assert (pair.prefill.num_exports > 0, pair.prefill.tier.num_leases > 0) == (True, True)
        pair.expire()
        assert (pair.prefill.num_exports, pair.prefill.tier.num_leases) == (0, 0)
        pair.serve(TEXT, told)
        pair.check_computed_here()
        assert pair.prefill.counters["handoffs|expired"] == 1

    @every_cut
    def test_pages_that_wait_for_their_reader_are_not_evicted(self, start: StartPair, cuts: Cuts) -> None:
        pair = start(*cuts, num_slots=8, num_blocks=64)
        told = pair.ready(TEXT)
        for seed in range(1, 6):
            pair.prefill.serve(prompt(100, seed))
        assert pair.serve(TEXT, told).num_external == 99
        pair.settle()

    @two_cuts
    def test_a_page_that_is_being_read_when_its_time_is_over_stays_until_it_has_been_read(
        self, start: StartPair, reads_of: ReadsOf, cuts: Cuts
    ) -> None:
        pair = start(*cuts, num_slots=8, grid="1x1", of_decode={"peer_timeout_s": 5.0})
        told, reads = pair.ready(TEXT), reads_of(pair.prefill)
        pair.hold_at(reads.gate, TEXT, told)
        pair.prefill.end_leases()
        for seed in range(1, 6):
            pair.prefill.run_until_finished(pair.prefill.add(prompt(100, seed)))
        assert pair.prefill.num_exports == 0
        assert pair.prefill.tier.num_leases > 0
        reads.gate.open()
        pair.decode.run()
        pair.settle()
        assert (pair.decode.counters["misses|corrupt"], pair.crossed_pages > 0) == (0, True)

    def test_the_time_is_the_settings(self, start: StartPair) -> None:
        pair = start(of_prefill={"peer_lease_s": 0.01})
        pair.ready(TEXT)
        pair.settle()
        assert pair.prefill.counters["handoffs|expired"] == 1

    @every_cut
    def test_pages_of_two_prompts_are_served_until_both_have_been_read(self, start: StartPair, cuts: Cuts) -> None:
        pair, text = start(*cuts), [*TEXT[:96], *prompt(30, 1)]
        told, other = [pair.ready(TEXT), pair.ready(text)], Pair(pair.prefill, start(*cuts).decode)
        assert pair.serve(TEXT, told[0]).num_external == 99
        pair.prefill.step_until(lambda: len(pair.prefill.half._exports._open) == 1, "the first acknowledgement")
        assert other.serve(text, told[1]).num_external == 125
        pair.settle()
        assert pair.prefill.counters["handoffs|acknowledged"] == 2


class TestDecodeAborts:
    @every_cut
    def test_before_its_load_the_prompt_is_acknowledged(self, start: StartPair, cuts: Cuts) -> None:
        pair = start(*cuts)
        name = pair.ask(TEXT, pair.ready(TEXT))
        pair.decode.abort(name)
        pair.decode.run()
        pair.settle()
        assert pair.prefill.counters["handoffs|acknowledged"] == 1
        pair.check_computed_here()

    @every_cut
    def test_while_it_waits_for_the_store(
        self, start: StartPair, faults: StoreFaults, cuts: Cuts, store_url: str
    ) -> None:
        pair = start(*cuts, of_decode={"store": store_url})
        told = pair.ready(TEXT)
        faults.gates["exists"].close()
        name = pair.ask(TEXT, told)
        pair.decode.step_often(5)
        pair.decode.abort(name)
        faults.gates["exists"].open()
        pair.decode.run()
        pair.settle()
        assert pair.prefill.counters["handoffs|acknowledged"] == 1

    @every_cut
    def test_in_mid_load_the_pages_that_have_come_are_kept(
        self, start: StartPair, reads_of: ReadsOf, cuts: Cuts
    ) -> None:
        pair = start(*cuts)
        told, reads = pair.ready(TEXT), reads_of(pair.prefill)
        name = pair.hold_at(reads.gate, TEXT, told)
        pair.decode.abort(name)
        others = [pair.decode.add(prompt(60, seed), max_tokens=8) for seed in range(1, 4)]
        pair.decode.run_until_finished(*others)
        assert pair.decode.tier.num_leases > 0
        reads.gate.open()
        pair.decode.run()
        pair.settle()
        assert pair.prefill.counters["handoffs|acknowledged"] == 1
        pair.decode.drop_device()
        assert pair.decode.serve(TEXT).finish_reason == "length"

    @every_cut
    def test_while_pages_are_copied_to_its_device(self, start: StartPair, gates: Gates, cuts: Cuts) -> None:
        pair = start(*cuts)
        told, gate = pair.ready(TEXT), gates(pair.decode, -1).load
        pair.decode.abort(pair.hold_at(gate, TEXT, told))
        others = [pair.decode.add(prompt(60, seed), max_tokens=8) for seed in range(1, 4)]
        pair.decode.run_until_finished(*others)
        gate.open()
        pair.decode.run()
        pair.settle()
        assert pair.prefill.counters["handoffs|acknowledged"] == 1


class TestDecodeIsFull:
    @every_cut
    def test_no_more_crosses_than_it_has_room_for(self, start: StartPair, cuts: Cuts) -> None:
        rows = 4 // num_owners(cuts[1])
        pair = start(*cuts, of_decode={"num_slots": rows})
        assert pair.hand_over(TEXT).num_external == 64
        assert pair.crossed_pages == 4

    @every_cut
    def test_without_any_slot_all_is_computed_here_and_the_prompt_is_acknowledged(
        self, start: StartPair, reads_of: ReadsOf, cuts: Cuts
    ) -> None:
        pair = start(*cuts, of_decode={"num_slots": 6 // num_owners(cuts[1])})
        told, reads = [pair.ready(text) for text in (TEXT, prompt(90, 1))], reads_of(pair.prefill)
        pair.hold_at(reads.gate, TEXT, told[0])
        name = pair.ask(prompt(90, 1), told[1])
        pair.decode.run_until_finished(name)
        assert pair.decode.jobs[name].num_external == 0
        reads.gate.open()
        pair.decode.run()
        pair.settle()
        assert pair.prefill.counters["handoffs|acknowledged"] == 2

    @every_cut
    def test_requests_that_find_no_blocks_wait_and_are_served(self, start: StartPair, cuts: Cuts) -> None:
        pair = start(*cuts, of_decode={"num_blocks": 12})
        texts = [prompt(100, seed) for seed in range(4)]
        told = [pair.ready(text) for text in texts]
        names = [pair.ask(*each) for each in zip(texts, told, strict=True)]
        pair.decode.run()
        pair.settle()
        assert [pair.decode.jobs[name].num_external for name in names] == [99] * 4
        assert pair.prefill.counters["handoffs|acknowledged"] == 4

    @every_cut
    def test_a_preempted_request_that_has_said_something_already_is_served(self, start: StartPair, cuts: Cuts) -> None:
        pair = start(*cuts)
        name = pair.ask(TEXT, pair.ready(TEXT), max_tokens=8)
        for num_output in range(1, 6):
            pair.decode.run(lambda wanted=num_output: len(pair.decode.jobs[name].output) >= wanted)
            if pair.decode.status(name) == RequestStatus.RUNNING:
                pair.decode.preempt(name)
        pair.decode.run()
        pair.settle()
        assert len(pair.decode.jobs[name].output) == 8


class TestPrefillCannot:
    @every_cut
    def test_a_request_that_is_aborted_before_it_runs_exports_nothing(self, start: StartPair, cuts: Cuts) -> None:
        pair = start(*cuts)
        pair.prefill.abort(pair.prefill.add(TEXT, max_tokens=1, handed=TO_COMPUTE))
        pair.settle()
        assert pair.prefill.counters["handoffs|aborted"] == 1

    @every_cut
    def test_a_request_that_is_aborted_in_the_middle_of_its_prompt_exports_nothing(
        self, start: StartPair, cuts: Cuts
    ) -> None:
        pair = start(*cuts, step_tokens=32)
        name = pair.prefill.add(TEXT, max_tokens=1, handed=TO_COMPUTE)
        pair.prefill.run(lambda: pair.prefill.jobs[name].request.num_computed_tokens >= 64)
        pair.prefill.abort(name)
        pair.settle()
        assert pair.prefill.counters["handoffs|aborted"] == 1

    @every_cut
    def test_decode_that_waits_for_a_prompt_which_is_aborted_computes_it(self, start: StartPair, cuts: Cuts) -> None:
        pair = start(*cuts, of_prefill={"step_tokens": 16}, of_decode=PATIENT)
        told = {**pair.ready(prompt(3, 9)), "remote_request_id": "named"}
        pair.serve(prompt(3, 9), {**told, "remote_request_id": "r0"})
        pair.settle()
        pair.decode.counters.clear()
        asked = pair.ask(TEXT, told)
        name = pair.prefill.add(TEXT, max_tokens=1, handed={**TO_COMPUTE, "remote_request_id": "named"})
        pair.prefill.run(lambda: pair.prefill.jobs[name].request.num_computed_tokens >= 48)
        pair.prefill.abort(name)
        pair.decode.run()
        assert pair.decode.jobs[asked].finish_reason == "length"
        assert pair.decode.counters["hit_tokens|peer"] <= 48
        pair.settle()

    @every_cut
    def test_pages_for_which_it_had_no_room_are_computed_by_decode_without_waiting_for_them(
        self, start: StartPair, cuts: Cuts
    ) -> None:
        rows = 4 // num_owners(cuts[0])
        pair = start(*cuts, of_prefill={"num_slots": rows}, peer_timeout_s=60.0)
        pair.hand_over(TEXT)
        assert pair.decode.counters["hit_tokens|peer"] == 4 * BLOCK
        assert pair.decode.counters["misses|timeout"] == 0
        assert pair.prefill.counters["declined_pages|save"] > 0

    @every_cut
    def test_with_all_room_taken_by_others_nothing_crosses(self, start: StartPair, cuts: Cuts) -> None:
        pair = start(*cuts, of_prefill={"num_slots": 6 // num_owners(cuts[0])}, peer_timeout_s=60.0)
        texts = [TEXT[:96], prompt(90, 1)]
        told = [pair.ready(text) for text in texts]
        assert pair.prefill.tier.num_available == 0
        pair.serve(texts[1], told[1])
        assert pair.decode.counters["hit_tokens|peer"] == 0
        pair.serve(texts[0], told[0])
        assert pair.decode.counters["hit_tokens|peer"] == 95
        pair.settle()

    @every_cut
    def test_a_reset_in_between_withdraws_what_was_computed(self, start: StartPair, cuts: Cuts) -> None:
        pair = start(*cuts, of_decode=PATIENT)
        told = pair.ready(TEXT)
        assert pair.prefill.scheduler.reset_prefix_cache(reset_connector=True)
        pair.settle()
        pair.serve(TEXT, told)
        pair.check_computed_here()
        assert pair.prefill.counters["handoffs|aborted"] == 1

    @every_cut
    def test_what_is_computed_after_a_reset_is_not_taken_by_an_engine_without_it(
        self, start: StartPair, cuts: Cuts
    ) -> None:
        pair = start(*cuts)
        new_weights(pair.prefill)
        pair.serve(TEXT, pair.ready(TEXT))
        pair.check_computed_here()
        assert pair.decode.counters["handoffs|refused"] == 1
        pair.expire()

    @two_cuts
    def test_a_reset_while_its_pages_are_read_gives_decode_no_wrong_byte(
        self, start: StartPair, reads_of: ReadsOf, cuts: Cuts
    ) -> None:
        pair = start(*cuts, of_decode={"peer_timeout_s": 5.0})
        told, reads = pair.ready(TEXT), reads_of(pair.prefill)
        name = pair.hold_at(reads.gate, TEXT, told)
        new_weights(pair.prefill)
        for seed in range(1, 4):
            pair.prefill.run_until_finished(pair.prefill.add(prompt(100, seed)))
        reads.gate.open()
        pair.decode.run()
        pair.settle()
        assert pair.decode.jobs[name].finish_reason == "length"

    @every_cut
    def test_a_reset_of_decode_in_mid_load_keeps_nothing_of_it(
        self, start: StartPair, reads_of: ReadsOf, cuts: Cuts
    ) -> None:
        pair = start(*cuts)
        told, reads = pair.ready(TEXT), reads_of(pair.prefill)
        name = pair.hold_at(reads.gate, TEXT, told)
        pair.decode.half.reset("other")
        reads.gate.open()
        pair.decode.run()
        pair.settle()
        assert pair.decode.jobs[name].finish_reason == "length"
        assert slots_of(pair.decode, TEXT) == []
