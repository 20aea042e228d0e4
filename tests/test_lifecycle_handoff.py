"""Prompts that one simulated engine computes and another decodes: vLLM's own schedulers, real bytes on every rank.

Each engine has a cut of its own. What it is told of a prompt is what proxies carry; pages cross sockets. Ends that go
wrong are in `test_lifecycle_handoff_faults.py`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from handoff_kit import (
    ALL,
    LOADING,
    LONE,
    ONE_HEAD,
    REPLICAS,
    SHARDED,
    STAGES,
    TENSOR,
    ReadsOf,
    chain_of,
    check_poison_elsewhere,
    check_tail,
    name_of,
    num_owners,
    slots_of,
)
from lifecycle_kit import prompt
from simulated_faults import Gate, StoreFaults
from simulated_handoff import (
    TO_COMPUTE,
    Cuts,
    HandoffEngine,
    HandoffTraffic,
    Pair,
    StartPair,
    page_bytes,
)
from simulated_model import BLOCK, LAYERS, Cut
from vllm.v1.request import RequestStatus

from vllm_hicache.errors import ConfigError, ObjectMissing, StoreUnavailable
from vllm_hicache.names import ObjectName, PageKey
from vllm_hicache.storage.envelope import header_bytes

pytest_plugins = ["handoff_fixtures", "lifecycle_fixtures"]
CUTS = [
    (LONE, LONE),
    (TENSOR, LONE),
    (LONE, TENSOR),
    (STAGES, LONE),
    (LONE, STAGES),
    (ALL, LONE),
    (TENSOR, STAGES),
    (SHARDED, ONE_HEAD),
    (ONE_HEAD, SHARDED),
    (REPLICAS, ONE_HEAD),
    (ONE_HEAD, REPLICAS),
    (SHARDED, REPLICAS),
]
TEXT = prompt(100)


every_cut = pytest.mark.parametrize("cuts", CUTS, ids=name_of)
some_cuts = pytest.mark.parametrize("cuts", [CUTS[0], CUTS[5], CUTS[8], CUTS[9]], ids=name_of)


SMALL = {"num_blocks": 28, "num_slots": 40}
"""A device that has to fetch prefixes from host memory again."""
HASTY = {"prefetch": "timeout", "prefetch_timeout_s": 0.05}
"""A request does not wait long for pages that another one loads."""


def with_store(url: str, **others: object) -> dict[str, object]:
    """Settings of an engine with a store, which it waits for on a busy machine too."""
    return {"store": url, "lookup_timeout_s": 10.0, **others}


def pages_among(pages: Sequence[PageKey], names: Iterable[ObjectName]) -> list[ObjectName]:
    """Those of the objects that are of these pages."""
    return [name for name in names if any(page.hex() in name for page in pages)]


def exported(engine: HandoffEngine) -> list[ObjectName]:
    """Objects that an engine's ranks would send."""
    known = [each for server in engine.servers for each in server._known.items()]
    return [name for name, entries in known if any(entry.part is not None for entry in entries)]


class TestEveryCut:
    @every_cut
    @pytest.mark.parametrize("num_tokens", [96, 97, 100, 5])
    def test_a_prompt_arrives_to_the_last_token_on_every_rank(
        self, start: StartPair, cuts: Cuts, num_tokens: int
    ) -> None:
        """L2540: also one of n pages and one token."""
        pair, text = start(*cuts), prompt(num_tokens)
        job = pair.hand_over(text)
        assert (job.num_local, job.num_external, len(job.output)) == (0, num_tokens - 1, 4)
        assert pair.decode.counters["hit_tokens|peer"] == num_tokens - 1
        assert pair.decode.counters["misses"] == 0
        assert pair.decode.check_host(job) >= (num_tokens - 1) // BLOCK
        assert pair.prefill.counters["handoffs|acknowledged"] == 1

    @every_cut
    @pytest.mark.parametrize("num_tokens", [5, 100])
    def test_an_unfinished_page_is_in_the_host_memory_of_both_as_far_as_it_goes(
        self, start: StartPair, cuts: Cuts, num_tokens: int
    ) -> None:
        pair = start(*cuts)
        job = pair.hand_over(prompt(num_tokens), max_tokens=1)
        for engine in (pair.prefill, pair.decode):
            check_tail(engine, job)

    @every_cut
    def test_nothing_is_written_to_other_blocks_of_the_device(self, start: StartPair, cuts: Cuts) -> None:
        pair = start(*cuts)
        name = pair.ask(TEXT, pair.ready(TEXT))
        pair.decode.run(lambda: bool(pair.decode.jobs[name].output))
        check_poison_elsewhere(pair.decode, name)
        pair.decode.run()
        assert pair.decode.jobs[name].num_external == 99

    @pytest.mark.parametrize(
        "cuts", [each for each in CUTS if max(each[0].dcp_size, each[1].dcp_size) == 1], ids=name_of
    )
    @pytest.mark.parametrize("num_tokens", [96, 97, 101, 120, 5])
    def test_a_page_of_two_blocks_may_be_unfinished_in_either(
        self, start: StartPair, cuts: Cuts, num_tokens: int
    ) -> None:
        pair = start(*cuts, page_blocks=2)
        job = pair.hand_over(prompt(num_tokens))
        assert (job.num_local, job.num_external) == (0, num_tokens - 1)
        assert pair.decode.counters["hit_tokens|peer"] == num_tokens - 1

    @every_cut
    def test_as_many_bytes_cross_as_the_prompt_has_pages(self, start: StartPair, cuts: Cuts) -> None:
        pair = start(*cuts)
        pair.hand_over(TEXT)
        cell_bytes = page_bytes(pair.decode) // (LAYERS * cuts[0].num_heads)
        object_bytes = header_bytes(cell_bytes, cell_bytes) + cell_bytes
        num_objects = 7 * LAYERS * cuts[0].num_heads
        assert pair.crossed_pages == 7
        received = pair.decode.counters["peer_bytes|received"]
        assert received == num_objects * object_bytes
        assert received < pair.prefill.counters["peer_bytes|sent"] < 1.04 * received

    @pytest.mark.parametrize("decode", [LONE, TENSOR, STAGES, ALL], ids=str)
    def test_ranks_read_their_parts_out_of_objects_that_hold_more(self, start: StartPair, decode: Cut) -> None:
        pair = start(LONE, decode, grid="1x1")
        assert pair.hand_over(TEXT).num_external == 99

    @pytest.mark.parametrize("prefill", [TENSOR, STAGES], ids=str)
    def test_an_engine_whose_ranks_hold_parts_of_objects_does_not_serve(self, tmp_path: Path, prefill: Cut) -> None:
        with pytest.raises(ConfigError, match="cannot write or serve"):
            HandoffEngine(tmp_path, grid="1x1", role="kv_producer", peer_host="127.0.0.1", **prefill._asdict())

    @some_cuts
    def test_a_request_goes_on_after_its_prompt_as_if_it_had_been_computed_here(
        self, start: StartPair, cuts: Cuts
    ) -> None:
        pair = start(*cuts)
        job = pair.hand_over(TEXT, max_tokens=60)
        pair.decode.drop_device()
        again = pair.decode.serve([*job.tokens, *prompt(20, 1)])
        assert (again.num_local, again.num_external) == (0, 159 // BLOCK * BLOCK)

    @some_cuts
    def test_a_prompt_is_read_under_its_own_salt_alone(self, start: StartPair, cuts: Cuts) -> None:
        pair = start(*cuts, of_decode={"peer_timeout_s": 0.5})
        assert pair.serve(TEXT, pair.ready(TEXT, salt="a"), salt="a").num_external == 99
        told = pair.ready(TEXT, salt="a")
        pair.decode.counters.clear()
        pair.serve(TEXT, told, salt="b")
        pair.check_computed_here()
        pair.settle()

    @some_cuts
    def test_many_prompts_cross_at_once(self, start: StartPair, cuts: Cuts) -> None:
        pair, texts = start(*cuts), [prompt(30 + 17 * seed, seed) for seed in range(6)]
        names = [pair.prefill.add(text, max_tokens=1, handed=TO_COMPUTE) for text in texts]
        pair.prefill.run()
        asked = [pair.ask(text, pair.prefill.jobs[name].told) for text, name in zip(texts, names, strict=True)]
        pair.decode.run()
        assert [pair.decode.jobs[name].num_external for name in asked] == [len(text) - 1 for text in texts]


class TestOwnPrefixFirst:
    """What decode has on its device, in host memory or in the store does not cross."""

    @every_cut
    def test_what_the_device_has_does_not_cross(self, start: StartPair, cuts: Cuts) -> None:
        pair = start(*cuts)
        pair.decode.serve(TEXT[:64], max_tokens=1)
        job = pair.hand_over(TEXT)
        assert (job.num_local, job.num_external, pair.crossed_pages) == (64, 35, 3)
        assert pair.decode.counters["hit_tokens|peer"] == 35

    @pytest.mark.parametrize("cuts", [cuts for cuts in CUTS if SHARDED not in cuts], ids=name_of)
    @pytest.mark.parametrize("num_blocks", [1, 2, 3, 5])
    def test_the_device_prefix_may_end_inside_a_page(self, start: StartPair, cuts: Cuts, num_blocks: int) -> None:
        pair = start(*cuts, page_blocks=2)
        pair.decode.serve(TEXT[: num_blocks * BLOCK + 1], max_tokens=1)
        job = pair.hand_over(TEXT)
        assert (job.num_local, job.num_external) == (num_blocks * BLOCK, 99 - num_blocks * BLOCK)
        assert pair.crossed_pages >= 4 - (num_blocks + 1) // 2

    @every_cut
    def test_what_host_memory_has_does_not_cross(self, start: StartPair, cuts: Cuts) -> None:
        pair = start(*cuts)
        pair.decode.serve(TEXT[:64], max_tokens=1)
        pair.decode.drop_device()
        assert (pair.hand_over(TEXT).num_external, pair.crossed_pages) == (99, 3)
        assert (pair.decode.counters["hit_tokens|host"], pair.decode.counters["hit_tokens|peer"]) == (64, 35)

    @every_cut
    def test_device_then_host_then_store_then_the_missing_rest(
        self, start: StartPair, cuts: Cuts, store_url: str
    ) -> None:
        pair, text = start(*cuts, of_decode=with_store(store_url)), prompt(165)
        start(*cuts, of_decode=with_store(store_url)).decode.serve(text[:128], max_tokens=1)
        pair.decode.serve(text[:96], max_tokens=1)
        pair.decode.drop_device()
        pair.decode.serve(text[:32], max_tokens=1)
        pair.decode.counters.clear()
        job = pair.hand_over(text)
        assert (job.num_local, job.num_external, pair.crossed_pages) == (32, 132, 3)
        assert [pair.decode.counters[f"hit_tokens|{tier}"] for tier in ("host", "store", "peer")] == [64, 32, 36]

    @some_cuts
    def test_what_the_store_has_does_not_cross(self, start: StartPair, cuts: Cuts, store_url: str) -> None:
        start(*cuts, of_decode=with_store(store_url)).decode.serve(TEXT[:64], max_tokens=1)
        pair = start(*cuts, of_decode=with_store(store_url))
        assert (pair.hand_over(TEXT).num_external, pair.crossed_pages) == (99, 3)
        assert (pair.decode.counters["hit_tokens|store"], pair.decode.counters["hit_tokens|peer"]) == (64, 35)

    @every_cut
    @pytest.mark.parametrize("where", ["device", "host", "store"])
    def test_where_all_is_here_nothing_crosses_and_the_prompt_is_acknowledged(
        self, start: StartPair, cuts: Cuts, store_url: str, where: str
    ) -> None:
        pair = start(*cuts, of_decode=with_store(store_url))
        (start(*cuts, of_decode=with_store(store_url)) if where == "store" else pair).decode.serve(TEXT[:97])
        if where == "host":
            pair.decode.drop_device()
        job = pair.hand_over(TEXT[:97])
        assert job.num_local + job.num_external == 96
        assert (pair.crossed_pages, pair.decode.counters["peer_bytes|received"]) == (0, 0)
        assert pair.prefill.counters["handoffs|acknowledged"] == 1

    @some_cuts
    def test_an_unfinished_page_that_is_here_does_not_cross_again(self, start: StartPair, cuts: Cuts) -> None:
        pair = start(*cuts)
        pair.hand_over(TEXT)
        pair.decode.drop_device()
        assert (pair.hand_over(TEXT).num_external, pair.crossed_pages) == (99, 7)

    @some_cuts
    def test_pages_that_another_request_pulls_do_not_cross_twice(
        self, start: StartPair, reads_of: ReadsOf, cuts: Cuts
    ) -> None:
        pair = start(*cuts)
        reads, texts = reads_of(pair.prefill), [TEXT, [*TEXT[:96], *prompt(40, 1)]]
        told = [pair.ready(text) for text in texts]
        reads.gate.close()
        first = pair.ask(texts[0], told[0])
        pair.decode.run(lambda: reads.gate.num_waiting > 0)
        second = pair.ask(texts[1], told[1])
        for _ in range(10):
            pair.decode.step()
        assert (pair.decode.status(first), pair.decode.status(second)) == (LOADING, RequestStatus.WAITING)
        reads.gate.open()
        pair.decode.run()
        assert pair.crossed_pages == 7 + 3


class TestAStorePageThatVanishes:
    """It was there when it was looked up: the peer has it too."""

    @some_cuts
    @pytest.mark.parametrize("error", [ObjectMissing("gone"), StoreUnavailable("down")], ids=repr)
    @pytest.mark.parametrize("num_gone", [1, 4])
    def test_is_pulled_from_the_peer(
        self, start: StartPair, faults: StoreFaults, cuts: Cuts, store_url: str, error: Exception, num_gone: int
    ) -> None:
        writer = start(*cuts, of_decode=with_store(store_url)).decode
        gone = writer.keys(writer.serve(TEXT[:64], max_tokens=1))[4 - num_gone :]
        pair = start(*cuts, of_decode=with_store(store_url, write="never"))

        def fault(operation: str, name: ObjectName) -> None:
            if operation == "read" and any(key.hex() in name for key in gone):
                raise error

        faults.fault = fault
        assert (pair.hand_over(TEXT).num_external, pair.crossed_pages) == (99, 3 + num_gone)
        assert pair.decode.counters["misses"] == 0


class TestEarlyStart:
    """Decode is asked at the same time as prefill, by a name that the proxy gives."""

    def told(self, pair: Pair, name: str) -> dict[str, object]:
        """What the prefill engine would say of a prompt of this name, from its answer to another one."""
        answer = pair.ready(prompt(3, seed=99))
        pair.decode.serve(prompt(3, seed=99), handed=answer)
        pair.settle()
        return {**answer, "remote_request_id": name}

    @some_cuts
    def test_pages_are_pulled_while_later_ones_are_computed(
        self, start: StartPair, reads_of: ReadsOf, cuts: Cuts
    ) -> None:
        pair, text = start(*cuts, of_prefill={"step_tokens": 16}), prompt(900)
        told, reads, was_finished = self.told(pair, "named"), reads_of(pair.prefill), []
        asked = pair.ask(text, told)
        pair.decode.run(lambda: pair.decode.status(asked) == LOADING)
        name = pair.prefill.add(text, max_tokens=1, handed={**TO_COMPUTE, "remote_request_id": "named"})
        has_read = threading.Event()
        reads.before = lambda page: (was_finished.append(pair.prefill.jobs[name].request.is_finished()), has_read.set())
        pair.prefill.before_forward = lambda: has_read.wait(0.1)
        pair.prefill.run()
        pair.decode.run()
        assert (pair.decode.jobs[asked].num_external, was_finished[0]) == (899, False)
        pair.settle()

    @some_cuts
    def test_pages_that_will_not_come_are_not_waited_for(self, start: StartPair, cuts: Cuts) -> None:
        slots = 4 // num_owners(cuts[0])
        pair = start(*cuts, of_prefill={"num_slots": slots}, peer_timeout_s=60.0)
        told = self.told(pair, "named")
        pair.decode.counters.clear()
        asked = pair.ask(TEXT, told)
        pair.decode.run(lambda: pair.decode.status(asked) == LOADING)
        pair.prefill.serve(TEXT, max_tokens=1, handed={**TO_COMPUTE, "remote_request_id": "named"})
        pair.decode.run()
        pair.settle()
        assert pair.decode.counters["hit_tokens|peer"] == 4 * BLOCK
        assert pair.decode.counters["misses|timeout"] == 0


class TestReceivingPages:
    """B6: what has not been received is neither saved nor stored nor exported."""

    @every_cut
    @pytest.mark.parametrize("num_pages", [0, 3])
    @pytest.mark.parametrize("ends", ["arrives", "fails"])
    def test_a_page_that_is_still_being_received_is_neither_saved_nor_stored_nor_exported(
        self,
        start: StartPair,
        faults: StoreFaults,
        reads_of: ReadsOf,
        cuts: Cuts,
        store_url: str,
        num_pages: int,
        ends: str,
    ) -> None:
        """B6, on an engine that computes the same prompt for others meanwhile, and writes to a store."""
        role = {"role": "kv_both", "peer_host": "127.0.0.1", "io_threads": 1, "store": store_url, **HASTY}
        pair = start(*cuts, of_decode=role)
        told, reads, chain = pair.ready(TEXT), reads_of(pair.prefill), chain_of(pair.decode, TEXT)
        gate, late = Gate(), chain[num_pages:]
        gate.close()

        def hold(page: PageKey) -> None:
            if page in late:
                gate.passes()
                if ends == "fails":
                    raise ConnectionResetError

        reads.before = hold
        first = pair.ask(TEXT, told)
        pair.decode.run(lambda: gate.num_waiting > 0)
        second = pair.decode.add(TEXT, max_tokens=1, handed=TO_COMPUTE)
        pair.decode.run_until_finished(second)
        for _ in range(10):
            pair.decode.step()
        assert pair.decode.status(first) == LOADING
        assert (pair.decode.num_held_blocks, len(slots_of(pair.decode, TEXT)) <= num_pages) == (0, True)
        assert not pages_among(late, faults.written)
        assert not pages_among(late, exported(pair.decode))
        gate.open()
        pair.decode.run()
        assert slots_of(pair.decode, TEXT)
        usable = num_pages - num_pages % cuts[1].dcp_size
        onwards = Pair(pair.decode, start(*cuts).decode)
        onwards.ask(TEXT, pair.decode.jobs[second].told)
        onwards.decode.run()
        assert onwards.decode.counters["hit_tokens|peer"] >= (99 if ends == "arrives" else usable * BLOCK)
        onwards.settle()
        pair.settle()


class TestTraffic:
    @every_cut
    def test_hundreds_of_random_requests_through_a_pair_each_see_the_right_bytes_on_every_rank(
        self, start: StartPair, cuts: Cuts
    ) -> None:
        pair = start(*cuts, of_prefill={"num_slots": 60, "skew": 1}, of_decode={**SMALL, "skew": 2})
        traffic = HandoffTraffic(pair, seed=CUTS.index(cuts))
        traffic.run(250)
        traffic.finish()
        pair.decode.run()
        pair.expire()
        assert pair.decode.counters["hit_tokens|peer"] > 0
        assert pair.decode.counters["hit_tokens|host"] > 0
        assert pair.prefill.counters["handoffs|acknowledged"] > 0

    @some_cuts
    def test_with_little_room_on_either_side(self, start: StartPair, cuts: Cuts) -> None:
        less = {"num_slots": 16, "num_blocks": 40, "step_tokens": 48}
        pair = start(*cuts, of_prefill=less, of_decode={**less, "peer_timeout_s": 2.0})
        traffic = HandoffTraffic(pair, seed=7)
        traffic.run(300)
        traffic.finish()
        pair.decode.run()
        pair.expire()
        assert pair.decode.counters["evicted_pages|host"] > 0

    @some_cuts
    def test_over_a_store_that_fails_at_random(
        self, start: StartPair, faults: StoreFaults, cuts: Cuts, store_url: str
    ) -> None:
        chance = random.Random(5)

        def fault(operation: str, name: ObjectName) -> None:
            if operation != "exists" and chance.random() < 0.1:
                raise StoreUnavailable("down")

        pairs = [start(*cuts, of_decode=with_store(store_url, **SMALL)) for _ in range(2)]
        faults.fault = fault
        for pair in pairs:
            traffic = HandoffTraffic(pair, seed=3)
            traffic.run(200)
            traffic.finish()
        faults.open_all()
        for pair in pairs:
            pair.decode.run()
            pair.expire()
        assert pairs[1].decode.counters["hit_tokens|store"] > 0
