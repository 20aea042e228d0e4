"""The scheduler half with ranks that come along at their own pace: progress, silence, and differences between them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import pytest
from scheduler_kit import BLOCK, PAGE, MakeRig, Op, OpenStore, Rig, loading, prompt

from vllm_hicache.entries import Entry, EntryKind, Mark
from vllm_hicache.errors import RanksDisagree
from vllm_hicache.events import PageStored
from vllm_hicache.names import MissReason, OpId, Phase, RequestId
from vllm_hicache.plan import Ack, LoadOp, OpReport
from vllm_hicache.scheduler import Offer

pytest_plugins = ["scheduler_fixtures"]

RUNNING, RECEIVED, SETTLED = Phase
RANKS = [(0,), (0, 1)]


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets so many seconds pass, of a clock that stands still otherwise."""
    clock = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def wait(seconds: float) -> None:
        clock[0] += seconds

    return wait


def fetching(make: MakeRig, open_store: OpenStore, pages: int = 4, **settings: object) -> tuple[Rig, LoadOp]:
    """A rig, and its load of so many pages that another engine has stored."""
    make(open_store).run("a", prompt(pages))
    rig = make(open_store, **settings)
    return rig, loading(rig, "b", pages + 0.5)


# Acknowledgements


def test_several_ranks_are_told_what_all_have_reached_in_the_order_it_was_reached(make: MakeRig) -> None:
    rig = make(ranks=(0, 1))
    for name in "ab":
        rig.begin(name, prompt(2, first=ord(name)))
        rig.compute(name)
    one, two = rig.plan().saves
    rig.report(two)
    rig.report(one, 1, reason=MissReason.ERROR)
    expected = (Ack(two.op, 2, 2), Ack(one.op, 1, 1, reason=MissReason.ERROR))
    assert [rig.plan().acks, rig.plan().acks] == [expected, ()]


def test_an_acknowledgement_that_was_not_sent_keeps_an_idle_engine_stepping(make: MakeRig) -> None:
    rig = make(ranks=(0, 1))
    rig.begin("a", prompt(1))
    rig.compute("a")
    rig.report(rig.plan().saves[0])
    assert rig.half.has_pending
    rig.plan()
    assert not rig.half.has_pending


def test_a_rank_that_is_alone_is_told_nothing(make: MakeRig) -> None:
    rig = make()
    rig.begin("a", prompt(2))
    rig.compute("a")
    rig.report(rig.plan().saves[0])
    assert not rig.half.has_pending
    assert rig.plan().acks == ()


def test_every_plan_says_how_many_slots_were_agreed(make: MakeRig) -> None:
    rig = make(num_slots=17, ranks=(0, 1))
    assert [rig.plan().num_slots, rig.plan().num_slots] == [17, 17]


# Progress


@pytest.mark.parametrize("ranks", RANKS)
def test_pages_of_a_long_load_enter_the_tree_as_they_are_acknowledged(
    make: MakeRig, open_store: OpenStore, ranks: tuple[int, ...]
) -> None:
    rig, load = fetching(make, open_store, ranks=ranks)
    rig.begin("c", prompt(2.5))
    assert rig.match("c") == Offer(pending=True)
    for rank in ranks:
        rig.report(load, 2 + rank, ranks=[rank], phase=RUNNING)
    assert rig.half.tier.num_reserved == 2
    assert rig.admit("c") == 2 * PAGE
    (other,) = rig.plan().loads
    assert [(page.slot, page.from_store) for page in other.pages] == [(page.slot, False) for page in load.pages[:2]]


def test_what_only_some_ranks_have_stays_out_of_the_tree(make: MakeRig, open_store: OpenStore) -> None:
    rig, load = fetching(make, open_store, ranks=(0, 1))
    rig.report(load, 4, ranks=[0], phase=RUNNING)
    rig.begin("c", prompt(2.5))
    assert (rig.match("c"), rig.half.tier.num_reserved) == (Offer(pending=True), 4)


@pytest.mark.parametrize("ranks", RANKS)
def test_pages_that_entered_early_are_leased_until_the_load_has_settled(
    make: MakeRig, open_store: OpenStore, ranks: tuple[int, ...]
) -> None:
    rig, load = fetching(make, open_store, ranks=ranks, num_slots=4)
    rig.report(load, 3, phase=RUNNING)
    rig.report(load, 3, reason=MissReason.ABSENT, phase=RECEIVED)
    rig.begin("c", prompt(4, first=1))
    rig.compute("c")
    assert not rig.plan().saves
    assert (rig.half.tier.num_leases, rig.half.tier.num_reserved) == (1, 1)
    rig.report(load, 3, reason=MissReason.ABSENT)
    assert (rig.half.tier.num_leases, rig.half.tier.num_free) == (0, 1)


def test_a_load_that_adds_to_host_memory_enters_page_by_page_behind_what_was_there(
    make: MakeRig, open_store: OpenStore
) -> None:
    make(open_store).run("a", prompt(5))
    rig = make(open_store, ranks=(0, 1))
    rig.run("b", prompt(2))
    load = loading(rig, "c", 5.5)
    reserved = []
    for done in range(6):
        rig.report(load, done, phase=RUNNING)
        reserved.append(rig.half.tier.num_reserved)
    assert reserved == [3, 3, 3, 2, 1, 0]
    rig.report(load)
    assert rig.half.tier.num_free == 59


def test_pages_beyond_what_the_device_alone_has_are_given_back_at_the_end(make: MakeRig, open_store: OpenStore) -> None:
    make(open_store).run("a", prompt(4))
    rig = make(open_store, ranks=(0, 1))
    rig.begin("b", prompt(4.5))
    assert rig.admit("b", 2 * PAGE + BLOCK) == 2 * PAGE - BLOCK
    (load,) = rig.plan().loads
    rig.report(load, 1, phase=RUNNING)
    assert rig.half.tier.num_reserved == 2
    rig.report(load)
    assert rig.half.tier.num_free == 64


def test_slots_of_pages_that_another_load_has_brought_meanwhile_stay_with_their_operation(
    make: MakeRig, open_store: OpenStore
) -> None:
    rig, load = fetching(make, open_store, ranks=(0, 1))
    rig.finish("b")
    rig.report(loading(rig, "c", 4.5))
    rig.report(load, 2, phase=RUNNING)
    assert rig.half.tier.num_reserved == 4
    rig.report(load)
    assert (rig.half.tier.num_reserved, rig.half.tier.num_free) == (0, 60)


def test_each_page_of_a_load_is_told_of_once_with_its_own_tokens(make: MakeRig, open_store: OpenStore) -> None:
    rig, load = fetching(make, open_store, ranks=(0, 1), events=True)
    told = []
    for done in (1, 1, 3):
        rig.report(load, done, phase=RUNNING)
        told.append([event for event in rig.half.events.take() if isinstance(event, PageStored)])
    rig.report(load)
    told.append(rig.half.events.take())
    assert [len(events) for events in told] == [1, 0, 2, 1]
    events = [event for each in told for event in each]
    assert [event.key for event in events] == [page.key for page in load.pages]
    assert [event.tokens for event in events] == [tuple(prompt(4)[at * PAGE : (at + 1) * PAGE]) for at in range(4)]


def test_a_prefetch_is_of_use_before_its_end(make: MakeRig, open_store: OpenStore) -> None:
    make(open_store).run("a", prompt(3))
    rig = make(open_store, prefetch="best_effort", ranks=(0, 1))
    rig.begin("b", prompt(3.5))
    assert rig.lookups is not None
    rig.lookups.wait()
    (load,) = rig.plan().loads
    rig.report(load, 2, phase=RUNNING)
    assert rig.match("b") == Offer(2 * PAGE)


def test_a_reset_during_a_load_gives_back_what_had_entered_and_what_had_not(
    make: MakeRig, open_store: OpenStore
) -> None:
    rig, load = fetching(make, open_store, ranks=(0, 1))
    rig.report(load, 2, phase=RUNNING)
    rig.half.reset("nonce")
    rig.report(load, 3, phase=RUNNING)
    rig.begin("c", prompt(4.5))
    assert (rig.match("c"), rig.half.tier.num_reserved) == (Offer(), 2)
    rig.report(load)
    assert rig.half.tier.num_free == 64


@pytest.mark.parametrize("phase", [RUNNING, RECEIVED, SETTLED])
def test_nothing_of_a_load_from_before_a_reset_enters_the_tree_after_it(
    make: MakeRig, open_store: OpenStore, phase: Phase
) -> None:
    rig, load = fetching(make, open_store, ranks=(0, 1), events=True)
    rig.half.reset("nonce")
    rig.report(load, phase=phase)
    tier = rig.half.tier
    assert (rig.half.events.take(), tier.num_slots - tier.num_free - tier.num_reserved) == ([], 0)
    if phase != SETTLED:
        rig.report(load)
    assert (tier.num_free, rig.half.events.take()) == (64, [])


def test_what_has_come_counts_from_the_first_page_that_the_device_lacks(make: MakeRig, open_store: OpenStore) -> None:
    make(open_store).run("a", prompt(5))
    rig = make(open_store, ranks=(0, 1))
    rig.run("b", prompt(3))
    rig.begin("c", prompt(5.5))
    rig.admit("c", 2 * PAGE)
    (load,) = rig.plan().loads
    rig.report(load, 2, phase=RUNNING)
    assert rig.half.tier.num_reserved == 1
    rig.report(load, 2, reason=MissReason.ABSENT)
    assert rig.half.tier.num_free == 60


def test_a_request_goes_on_when_its_load_is_received_and_is_offered_more_when_it_has_settled(
    make: MakeRig, open_store: OpenStore
) -> None:
    rig, load = fetching(make, open_store, ranks=(0, 1))
    rig.report(load, 1, reason=MissReason.TIMEOUT, phase=RECEIVED)
    assert rig.match("b") == Offer()
    rig.report(load, 1, 3, reason=MissReason.TIMEOUT)
    assert rig.match("b") == Offer(PAGE)
    rig.begin("c", prompt(3.5))
    assert (rig.match("c"), rig.half.tier.num_free) == (Offer(3 * PAGE), 61)


# Silence


def test_a_forced_acknowledgement_frees_the_request_but_no_slots(
    make: MakeRig, open_store: OpenStore, wait: Callable[[float], None]
) -> None:
    rig, load = fetching(make, open_store, ranks=(0, 1), rank_timeout_s=30)
    rig.report(load, 2, ranks=[1], phase=RUNNING)
    rig.report(load, ranks=[0])
    wait(30)
    rig.half.report([])
    plan = rig.plan()
    expected = (Ack(load.op, 2, 2, RUNNING), Ack(load.op, 2, 2, RECEIVED, MissReason.TIMEOUT))
    assert (plan.acks, plan.asks) == (expected, (load.op,))
    assert (rig.half.tier.num_reserved, rig.half.tier.num_leases, rig.half.has_pending) == (2, 1, True)
    rig.begin("c", prompt(4.5))
    assert rig.match("c") == Offer(4 * PAGE)
    rig.report(load, ranks=[1])
    assert (rig.half.tier.num_free, rig.match("b")) == (60, Offer(2 * PAGE))


def test_a_silent_save_keeps_its_blocks_and_slots_until_the_rank_answers(
    make: MakeRig, wait: Callable[[float], None]
) -> None:
    rig = make(ranks=(0, 1), rank_timeout_s=30)
    rig.begin("a", prompt(2))
    blocks = rig.blocks("a")
    rig.compute("a")
    (save,) = rig.plan().saves
    rig.report(save, ranks=[0])
    wait(100)
    rig.half.report([])
    assert rig.plan().asks == (save.op,)
    assert (sorted(rig.holds.held), rig.half.tier.num_reserved) == (blocks, 2)
    rig.report(save, ranks=[1])
    assert (rig.holds.held, rig.half.tier.num_free) == ({}, 64)


def test_a_silent_rank_is_asked_again_as_late_as_before_and_each_time_once(
    make: MakeRig, wait: Callable[[float], None]
) -> None:
    rig = make(ranks=(0, 1), rank_timeout_s=30)
    rig.begin("a", prompt(2))
    rig.compute("a")
    (save,) = rig.plan().saves
    rig.report(save, ranks=[0])
    asked = []
    for _ in range(7):
        rig.half.report([])
        asked.append(rig.plan().asks)
        wait(15)
    assert asked == [(), (), (save.op,), (), (save.op,), (), (save.op,)]


def test_ranks_that_were_not_heard_of_at_all_are_asked_and_not_given_up(
    make: MakeRig, open_store: OpenStore, wait: Callable[[float], None]
) -> None:
    rig, load = fetching(make, open_store, ranks=(0, 1), rank_timeout_s=30)
    rig.report(load, 2, phase=RUNNING)
    wait(30)
    rig.half.report([])
    plan = rig.plan()
    assert (plan.acks, plan.asks) == ((Ack(load.op, 2, 2, RUNNING),), (load.op,))
    assert not [name for name in rig.counts if name.startswith("rank_differences")]
    rig.report(load)
    assert rig.plan().acks == (Ack(load.op, 4, 4),)


def began(rig: Rig, kind: str) -> Op:
    """An operation that has just been sent to the ranks; two pages of `prompt(2)` are in the store."""
    rig.begin("b", prompt(2.5, first=1 if kind in ("save", "flush") else 0))
    assert rig.lookups is not None
    rig.lookups.wait()
    rig.admit("b")
    plan = rig.plan()
    if kind in ("save", "flush"):
        rig.compute("b")
        plan = rig.plan()
    if kind == "flush":
        rig.report(plan.saves[0])
        plan = rig.plan()
    (op,) = (*plan.loads, *plan.saves, *plan.flushes)
    return op


@pytest.mark.parametrize("kind", ["load", "prefetch", "save", "flush"])
def test_ranks_are_asked_about_an_operation_no_earlier_than_the_time_after_it_began(
    make: MakeRig, open_store: OpenStore, wait: Callable[[float], None], kind: str
) -> None:
    make(open_store).run("a", prompt(2))
    settings = {"prefetch": "best_effort"} if kind == "prefetch" else {}
    rig = make(open_store, ranks=(0, 1), rank_timeout_s=30, **settings)
    op, asked = began(rig, kind), []
    for seconds in (29, 1):
        wait(seconds)
        rig.half.report([])
        asked.append(rig.plan().asks)
    assert asked == [(), (op.op,)]


def test_silence_is_counted_and_said_with_the_rank(
    make: MakeRig, wait: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(ranks=(0, 1), rank_timeout_s=30)
    rig.begin("a", prompt(2))
    rig.compute("a")
    rig.report(rig.plan().saves[0], ranks=[0])
    wait(30)
    with caplog.at_level(logging.WARNING, "vllm_hicache"):
        rig.half.report([])
    assert rig.counts["rank_differences|missing report"] == 1
    assert "rank 1" in caplog.text


# Differences between ranks


def entry(value: int, kind: EntryKind = EntryKind.HIT) -> Entry:
    return Entry(OpId(1), kind, value, 0.0)


def test_a_difference_between_ranks_is_counted_by_kind_and_said(
    make: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(ranks=(0, 1))
    with caplog.at_level(logging.WARNING, "vllm_hicache"):
        rig.half.report([], {0: [entry(4)]})
        rig.half.report([], {1: [entry(6)]})
    assert rig.counts["rank_differences|hit length"] == 1
    assert "rank 0" in caplog.text
    assert "rank 1" in caplog.text


def test_a_difference_stops_the_engine_where_the_operator_asked_for_it(make: MakeRig) -> None:
    rig = make(ranks=(0, 1), consensus="enforce")
    with pytest.raises(RanksDisagree, match=r"consensus is 'enforce': .*rank 0"):
        rig.half.report([], {0: [entry(4)], 1: [entry(6)]})


def test_lengths_that_ranks_have_come_to_are_counted_and_stop_nothing(make: MakeRig) -> None:
    rig = make(ranks=(0, 1), consensus="enforce")
    rig.half.report([], {0: [entry(4, EntryKind.DONE)], 1: [entry(6, EntryKind.DONE)]})
    assert rig.counts["rank_differences|restore completion"] == 1


@pytest.mark.parametrize("settings", [{"ranks": (0, 1), "consensus": "off"}, {"ranks": (0,)}])
def test_nothing_is_compared_where_it_is_off_or_there_is_one_rank(make: MakeRig, settings: dict[str, object]) -> None:
    rig = make(**settings)
    rig.half.report([], {0: [entry(4)], 1: [entry(6)]})
    assert not [name for name in rig.counts if name.startswith("rank_differences")]


def test_entries_of_ranks_at_the_same_mark_need_no_comparison_and_what_follows_is_compared(make: MakeRig) -> None:
    rig, mark = make(ranks=(0, 1)), Mark(1, "00")
    rig.half.report([], {rank: [entry(4)] for rank in (0, 1)}, dict.fromkeys((0, 1), mark))
    rig.half.report([], {0: [entry(2, EntryKind.LOCK)]}, {0: Mark(2, "aa")})
    rig.half.report([], {1: [entry(3, EntryKind.LOCK)]}, {1: Mark(2, "bb")})
    assert rig.counts["rank_differences|lock order"] == 1


def test_equal_entries_are_no_difference(make: MakeRig) -> None:
    rig = make(ranks=(0, 1), consensus="enforce")
    for rank in (0, 1):
        rig.half.report([], {rank: [entry(4), entry(2, EntryKind.LOCK)]})
    assert not [name for name in rig.counts if name.startswith("rank_differences")]


# An engine that only reads


def test_an_engine_that_never_writes_saves_and_loads_and_flushes_nothing(make: MakeRig, open_store: OpenStore) -> None:
    make(open_store).run("a", prompt(2))
    rig, flushes = make(open_store, write="never"), 0
    for name, pages in (("b", 3), ("c", 3), ("d", 3.5)):
        rig.begin(name, prompt(pages))
        rig.admit(name)
        rig.compute(name)
        while rig.half.has_pending:
            flushes += len(rig.plan().flushes)
            for op, _, _ in list(rig.open.values()):
                rig.report(op)
    assert (flushes, rig.match("d")) == (0, Offer(3 * PAGE))
    assert rig.half.hit_tokens(RequestId("d"), 3 * PAGE)


def test_reports_of_one_step_may_be_of_any_rank_in_any_order(make: MakeRig) -> None:
    rig = make(ranks=(0, 1, 2))
    rig.begin("a", prompt(2))
    rig.compute("a")
    (save,) = rig.plan().saves
    del rig.open[save.op]
    rig.half.report([OpReport(rank, save.op, 2, 2) for rank in (2, 0, 2, 1)])
    assert rig.plan().acks == (Ack(save.op, 2, 2),)
