"""Ranks agree: whatever their paces and faults, all of them consume the same, in the same order, and nobody waits
for ever. Without an engine; `test_lifecycle_ranks.py` has the same over vLLM's scheduler and real bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated_agreement import BLOCK, SILENCE_STEPS, Net
from simulated_transfers import Faults

from vllm_hicache.plan import FlushOp, LoadOp, SaveOp

TEXT = list(range(6 * BLOCK))
MakeNet = Callable[..., Net]


@pytest.fixture
def make_net(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeNet]:
    nets: list[Net] = []

    def make(paces: list[float], seed: int = 0, **arguments: object) -> Net:
        nets.append(Net(monkeypatch, paces, seed, **arguments))
        return nets[-1]

    yield make
    for net in nets:
        net.drain()
        net.check_at_rest()
        net.close()


def serve(net: Net, tokens: list[int] = TEXT) -> int:
    """Run one request, and what it leaves behind, to the end; how many steps it took."""
    start = net.step_number
    net.arrive(tokens, num_output=2)
    while net.clients or net.half.has_pending:
        net.step(arrivals=0.0, aborts=0.0)
        assert net.step_number - start < 2000
    return net.step_number - start


def num_cached(net: Net) -> int:
    """Pages of `TEXT` in host memory."""
    name = net.arrive(TEXT, num_output=0)
    pages = net.half.tier.match(net.half._tracked[name].extend_keys(), touch=False).num_pages
    net.finish(name)
    return pages


SOAKS = [
    (2, 15_000, {}),
    (2, 15_000, {"write": "back"}),
    (3, 15_000, {"prefetch": "best_effort"}),
    (4, 15_000, {"write": "selective", "num_slots": 12}),
    (4, 15_000, {"max_lag": 0}),
    (6, 12_000, {}),
    (16, 8_000, {"max_lag": 5}),
    (32, 5_000, {}),
]


class TestManyRanks:
    """A2: paces that differ by rank, 10^5 steps. Everything that must hold in each step is checked by `Net`."""

    @pytest.mark.parametrize(("num_ranks", "num_steps", "options"), SOAKS)
    def test_ranks_of_any_pace_and_fault_consume_the_same_and_nothing_grows(
        self, make_net: MakeNet, num_ranks: int, num_steps: int, options: dict[str, object]
    ) -> None:
        chance = random.Random(num_ranks)
        paces = [chance.uniform(0.15, 1.0) for _ in range(num_ranks)]
        net = make_net(paces, seed=num_steps + num_ranks, faults=Faults(), **options)
        net.run(num_steps)
        net.drain(most_steps=600)
        net.check_same()
        assert min(net.counts[kind] for kind in ("LoadOp", "SaveOp", "FlushOp")) > num_steps // 100 * num_ranks
        assert net.counts["lost"] > num_steps // 100
        assert max(net.most.open_operations, net.most.acks_in_a_plan) < 64
        assert net.most.waiting_entries < 256
        assert net.most.steps_of_a_load < 8 * SILENCE_STEPS

    def test_the_soaks_are_a_hundred_thousand_steps(self) -> None:
        assert sum(num_steps for _, num_steps, _ in SOAKS) == 100_000

    @given(
        paces=st.lists(st.floats(0.05, 1.0), min_size=2, max_size=6),
        chances=st.tuples(*[st.floats(0.0, 0.4)] * 3),
        max_lag=st.integers(0, 6),
        seed=st.integers(0, 10**6),
    )
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_any_mixture_of_faults_ends_with_nothing_left(
        self,
        monkeypatch: pytest.MonkeyPatch,
        paces: list[float],
        chances: tuple[float, float, float],
        max_lag: int,
        seed: int,
    ) -> None:
        fail, late, silent = chances
        net = Net(monkeypatch, paces, seed, Faults(fail, fail / 4, late, late, silent / 2, fail), max_lag=max_lag)
        net.run(60)
        net.drain()
        net.check_at_rest()
        net.check_same()
        net.close()


class TestARankWithoutWork:
    """A1."""

    @pytest.mark.parametrize("idle", [0, 2])
    def test_it_takes_part_and_the_others_are_as_fast_as_without_it(self, make_net: MakeNet, idle: int) -> None:
        num_steps = []
        for has_work in (True, False):
            net = make_net([1.0] * 3)
            net.ranks[idle]._engine.has_work = has_work
            num_steps.append([serve(net), serve(net)])
            assert net.counts["received", False] == 1
        assert num_steps[0] == num_steps[1]

    def test_it_logs_what_the_others_do(self, make_net: MakeNet) -> None:
        net = make_net([1.0, 0.3, 0.6])
        net.ranks[0]._engine.has_work = False
        for _ in range(300):
            net.step(aborts=0.0)
        net.drain()
        net.check_same()
        assert net.ranks[0]._log.num_entries > 100


class TestOneRankFails:
    """A3: all ranks commit, or none does."""

    @pytest.mark.parametrize("num_pages", [0, 1, 4, 6])
    @pytest.mark.parametrize("rank", [0, 2])
    def test_a_save_counts_as_far_as_it_came_on_the_worst_rank(
        self, make_net: MakeNet, rank: int, num_pages: int
    ) -> None:
        net = make_net([1.0] * 3)
        net.ranks[rank]._engine.most_pages[SaveOp] = num_pages
        serve(net)
        assert num_cached(net) == num_pages
        assert net.half.tier.num_free == net.half.tier.num_slots - num_pages

    @pytest.mark.parametrize("num_pages", [0, 1, 4])
    def test_a_load_counts_as_far_as_it_came_on_the_worst_rank(self, make_net: MakeNet, num_pages: int) -> None:
        net = make_net([1.0] * 3)
        serve(net)
        net.ranks[1]._engine.most_pages[LoadOp] = num_pages
        name = net.arrive(TEXT, num_output=50)
        while not net.counts["received", True]:
            net.step(arrivals=0.0, aborts=0.0)
        assert net.clients[name].computed == num_pages * BLOCK

    def test_a_flush_counts_as_far_as_it_came_on_the_worst_rank(self, make_net: MakeNet) -> None:
        net = make_net([1.0] * 3)
        net.ranks[2]._engine.most_pages[FlushOp] = 2
        serve(net)
        keys = sorted(net.stored[0] & net.stored[2])
        assert (len(net.stored[0]), len(keys)) == (6, 2)
        assert sum(net.half.tier.match(chain(net), touch=False).stored) == 2

    def test_a_rank_that_knows_its_slots_to_hold_something_else_fails_the_load_on_all_and_is_named(
        self, make_net: MakeNet
    ) -> None:
        net = make_net([1.0] * 3)
        serve(net)
        net.ranks[1]._engine.is_trusted = False
        net.ranks[1]._log.forget(net.half.tier.match(chain(net), touch=False).slots[2:])
        net.arrive(TEXT, num_output=1)
        while not net.counts["received", True]:
            net.step(arrivals=0.0, aborts=0.0)
        assert str(net.half._checker.first).endswith("ranks differ in hit length: ranks 0 and 2 have 6, rank 1 has 2")


def chain(net: Net) -> list[bytes]:
    """Keys of the pages of `TEXT`."""
    name = net.arrive(TEXT, num_output=0)
    keys = net.half._tracked[name].extend_keys()
    net.finish(name)
    return keys


class TestASilentRank:
    """A2: its reports are lost. It is asked, and nobody waits for it longer than `rank_timeout_s`."""

    @pytest.mark.parametrize("silent", [{0}, {2}, {0, 1, 2}], ids=str)
    def test_a_load_is_received_without_it_and_settles_when_it_has_answered(
        self, make_net: MakeNet, silent: set[int]
    ) -> None:
        net = make_net([1.0] * 3)
        serve(net)
        lose_reports(net, silent)
        assert SILENCE_STEPS < serve(net) < 3 * SILENCE_STEPS
        assert net.most.steps_of_a_load < SILENCE_STEPS + 20
        assert net.counts["lost"] > 0

    @pytest.mark.parametrize("rank", [0, 2])
    def test_a_load_is_received_although_a_rank_never_answers(self, make_net: MakeNet, rank: int) -> None:
        net = make_net([1.0] * 3)
        serve(net)
        net.mute.add(rank)
        net.arrive(TEXT, num_output=1)
        while not net.counts["received", True]:
            net.step(arrivals=0.0, aborts=0.0)
            assert net.step_number < 3 * SILENCE_STEPS
        assert net.half._operations.num_open == 1

    def test_a_rank_that_was_given_up_stops_working_on_what_nobody_waits_for(self, make_net: MakeNet) -> None:
        net = make_net([1.0] * 3)
        serve(net)
        net.ranks[1]._engine.pace = 0.0
        net.arrive(TEXT, num_output=1)
        while net.half._checker.first is None:
            net.step(arrivals=0.0, aborts=0.0)
        net.ranks[1]._engine.pace = 1.0
        for _ in range(3):
            net.step(arrivals=0.0, aborts=0.0)
        assert net.counts["received", True] == 1

    def test_the_checker_says_who_was_silent(self, make_net: MakeNet) -> None:
        net = make_net([1.0] * 3)
        lose_reports(net, {1})
        serve(net)
        assert "missing report: rank 1:" in str(net.half._checker.first)

    def test_its_slots_are_not_given_away_before_it_has_settled(self, make_net: MakeNet) -> None:
        net = make_net([1.0, 1.0], num_slots=6)
        net.ranks[1]._engine.pace = 0.0
        net.arrive(TEXT, num_output=1)
        net.run(3 * SILENCE_STEPS)
        assert net.half.tier.num_reserved == 6
        net.ranks[1]._engine.pace = 1.0


def lose_reports(net: Net, ranks: set[int]) -> None:
    """Every first word of these ranks is lost from now on."""

    class Silent(dict[int, set[int]]):
        def setdefault(self, op: int, default: object = None) -> set[int]:
            return super().setdefault(op, set(ranks))

    net.silent = Silent(net.silent)
    net.faults = Faults(0, 0, 0, 0, 1e-12, 0)


@pytest.mark.parametrize("seed", range(8))
def test_reports_that_come_late_twice_and_in_any_order_change_nothing(make_net: MakeNet, seed: int) -> None:
    net = make_net([1.0] * 3, seed, faults=Faults(0, 0, late=1.0, twice=1.0, silent=0, rot=0))
    serve(net)
    assert num_cached(net) == 6
    serve(net)
    net.check_same()
    assert (net.counts["received", False], net.counts["received", True], net.half._checker.first) == (1, 0, None)
