"""The scheduler half: what is promised, loaded, saved and let go, driven by hand as engine and workers do."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from scheduler_kit import (
    BLOCK,
    PAGE,
    SPACE,
    Gate,
    MakeRig,
    NotedLookups,
    Op,
    OpenStore,
    Rig,
    Tokens,
    loading,
    moved,
    prompt,
)

from vllm_hicache.errors import InvariantError
from vllm_hicache.events import PageRemoved, PageStored
from vllm_hicache.index.host import runs_of
from vllm_hicache.keys import ExtraKey
from vllm_hicache.lookup import Lookup
from vllm_hicache.names import MissReason, OpId, PageKey, Phase, RequestId, Tier
from vllm_hicache.namespace import Spaces
from vllm_hicache.plan import FlushOp, LoadOp, OpReport, Plan, SaveOp
from vllm_hicache.scheduler import Offer
from vllm_hicache.storage.chunks import RoleChunks

pytest_plugins = ["scheduler_fixtures"]

# Save, match, load


def test_saved_pages_are_loaded_into_the_blocks_of_the_next_request(make: MakeRig) -> None:
    rig = make()
    rig.begin("a", prompt(2.5))
    rig.compute("a")
    (save,) = rig.plan().saves
    assert moved(save.pages) == [tuple(rig.blocks("a")[:4]), tuple(rig.blocks("a")[4:8])]
    rig.report(save)
    rig.begin("b", prompt(2.5))
    assert rig.admit("b") == 2 * PAGE
    (load,) = rig.plan().loads
    assert (load.request_id, moved(load.pages)) == ("b", [tuple(rig.blocks("b")[:4]), tuple(rig.blocks("b")[4:8])])
    assert [(page.key, page.slot, page.first_block, page.from_store) for page in load.pages] == [
        (page.key, page.slot, 0, False) for page in save.pages
    ]


def test_nothing_is_offered_before_the_acknowledgement(make: MakeRig) -> None:
    rig = make()
    rig.begin("a", prompt(2))
    rig.compute("a")
    rig.plan()
    rig.begin("b", prompt(2.5))
    assert rig.match("b") == Offer()


def test_a_request_nobody_announced_is_left_alone(make: MakeRig) -> None:
    rig = make()
    rig.num_blocks["ghost"], rig.sources["ghost"] = 0, Tokens(list(prompt(2)))
    assert rig.match("ghost") == Offer()
    rig.half.allocated(RequestId("ghost"), rig.blocks("ghost"), 64)
    rig.compute("ghost")
    assert rig.plan() == Plan(num_slots=64)


@pytest.mark.parametrize("other", [{"salt": "tenant"}, {"extras": [ExtraKey(0, 9, "image", b"cat")]}])
def test_what_is_in_the_key_keeps_requests_apart(other: dict[str, object], make: MakeRig) -> None:
    rig = make()
    rig.run("a", prompt(2))
    rig.begin("b", prompt(2.5), **other)  # type: ignore[arg-type]
    assert rig.match("b") == Offer()


@pytest.mark.parametrize("inside", [1, 2, 3])
def test_where_the_device_ends_inside_a_page_only_its_missing_blocks_are_loaded(inside: int, make: MakeRig) -> None:
    rig = make()
    rig.run("a", prompt(3))
    rig.begin("b", prompt(3.5))
    local = PAGE + inside * BLOCK
    assert rig.admit("b", local) == 3 * PAGE - local
    (load,) = rig.plan().loads
    blocks = rig.blocks("b")
    assert moved(load.pages) == [tuple(blocks[4 + inside : 8]), tuple(blocks[8:12])]
    assert [page.first_block for page in load.pages] == [inside, 0]


@pytest.mark.parametrize("local_blocks", range(12))
@pytest.mark.parametrize("pages", [1, 3])
def test_a_prompt_of_whole_pages_leaves_exactly_one_token(pages: int, local_blocks: int, make: MakeRig) -> None:
    rig = make()
    rig.run("a", prompt(pages))
    rig.begin("b", prompt(pages))
    local = min(local_blocks, pages * 4 - 1) * BLOCK
    assert rig.admit("b", local) == pages * PAGE - 1 - local
    (load,) = rig.plan().loads
    assert [block for page in load.pages for block in page.blocks] == rig.blocks("b")[local // BLOCK :]


def test_a_prompt_that_the_device_has_to_its_last_page_asks_for_nothing(make: MakeRig) -> None:
    rig = make()
    rig.run("a", prompt(2))
    rig.begin("b", prompt(2.5))
    assert rig.match("b", 2 * PAGE) == Offer()


@pytest.mark.parametrize(("threshold", "offered"), [(0, 64), (64, 64), (65, 0)])
def test_fewer_tokens_than_the_threshold_are_recomputed(threshold: int, offered: int, make: MakeRig) -> None:
    rig = make(load_threshold=threshold)
    rig.run("a", prompt(2))
    rig.begin("b", prompt(2.5))
    assert rig.admit("b", PAGE) == offered
    assert len(rig.plan().loads) == (offered > 0)


def test_without_a_threshold_nothing_is_still_not_loaded(make: MakeRig) -> None:
    rig = make(load_threshold=0)
    rig.run("a", prompt(1))
    rig.begin("b", prompt(1))
    assert rig.admit("b", PAGE - 1) == 0
    assert not rig.plan().loads


def test_only_known_tokens_are_saved(make: MakeRig) -> None:
    rig = make()
    rig.begin("a", prompt(1.9))
    rig.compute("a", upto=3 * PAGE)  # with tokens a draft may lose
    (save,) = rig.plan().saves
    assert len(save.pages) == 1


def test_pages_are_saved_as_the_request_grows_and_each_once(make: MakeRig) -> None:
    rig, sizes = make(), []
    rig.begin("a", prompt(1.5))
    for tokens in (PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE, 3 * PAGE):
        rig.sources["a"].all_token_ids[:] = prompt(3)[: max(tokens, rig.sources["a"].num_tokens)]
        rig.compute("a", tokens)
        sizes.append([len(save.pages) for save in rig.plan().saves])
    assert sizes == [[], [1], [], [1], [], [1]]
    rig.settle()
    rig.begin("b", prompt(3.5))
    assert rig.match("b") == Offer(3 * PAGE)


def test_two_requests_that_compute_the_same_pages_save_them_once(make: MakeRig) -> None:
    rig = make()
    rig.begin("a", prompt(2))
    rig.begin("b", prompt(3))
    rig.compute("a")
    rig.compute("b")
    one, two = rig.plan().saves
    assert [len(one.pages), len(two.pages)] == [2, 1]
    assert moved(two.pages) == [tuple(rig.blocks("b")[8:12])]


def test_blocks_are_held_until_every_rank_has_saved_them(make: MakeRig) -> None:
    rig = make(ranks=(0, 1))
    rig.begin("a", prompt(1))
    blocks = rig.blocks("a")
    rig.compute("a")
    (save,) = rig.plan().saves
    rig.finish("a")
    rig.report(save, ranks=[1])
    assert rig.holds.held == Counter(blocks)
    rig.report(save, ranks=[0])
    assert not rig.holds.held


def test_what_the_slowest_rank_saved_is_what_is_offered(make: MakeRig) -> None:
    rig = make(ranks=(0, 1))
    rig.begin("a", prompt(3))
    rig.compute("a")
    (save,) = rig.plan().saves
    rig.report(save, ranks=[0])
    rig.report(save, 1, ranks=[1], reason=MissReason.ERROR)
    rig.begin("b", prompt(3))
    assert rig.match("b") == Offer(PAGE)
    assert rig.half.tier.num_free == 63


def test_pages_that_could_not_be_saved_are_saved_when_the_request_goes_on(make: MakeRig) -> None:
    rig = make()
    rig.begin("a", prompt(3))
    rig.compute("a")
    (save,) = rig.plan().saves
    rig.report(save, 1, reason=MissReason.ERROR)
    rig.compute("a")
    (again,) = rig.plan().saves
    assert [page.key for page in again.pages] == [page.key for page in save.pages[1:]]


def test_reports_that_come_twice_or_late_change_nothing(make: MakeRig) -> None:
    rig = make(ranks=(0, 1))
    rig.begin("a", prompt(1))
    rig.compute("a")
    (save,) = rig.plan().saves
    twice = [OpReport(0, save.op, 1, 1)] * 2
    rig.half.report(twice)
    assert rig.half.has_pending
    rig.report(save)
    rig.half.report(twice)
    assert [len(rig.plan().acks), rig.half.has_pending] == [1, False]


def test_a_report_of_a_rank_that_does_not_exist_is_a_stop(make: MakeRig) -> None:
    with pytest.raises(InvariantError, match="rank 7"):
        make().half.report([OpReport(7, OpId(1), 0, 0)])


def test_saves_acknowledged_out_of_order_are_not_lost(make: MakeRig) -> None:
    rig = make()
    rig.begin("a", prompt(2))
    saves = []
    for tokens in (PAGE, 2 * PAGE):
        rig.compute("a", tokens)
        saves += rig.plan().saves
    for save in reversed(saves):
        rig.report(save)
    rig.compute("a")
    rig.settle()
    assert rig.half.tier.num_free == 62


def test_pages_that_another_request_failed_to_save_are_saved_by_who_has_them(make: MakeRig) -> None:
    rig = make()
    for name in ("a", "b"):
        rig.begin(name, prompt(2))
        rig.compute(name)
    (save,) = rig.plan().saves
    rig.finish("a")
    rig.report(save, 0, reason=MissReason.ERROR)
    rig.compute("b")
    assert len(rig.plan().saves) == 1


# Failed loads


def test_a_page_that_failed_is_not_promised_to_this_request_again(make: MakeRig) -> None:
    rig = make()
    rig.run("a", prompt(3))
    rig.report(loading(rig, "b", 3.5), 1, reason=MissReason.CORRUPT)
    assert (rig.match("b"), rig.match("b", PAGE)) == (Offer(PAGE), Offer())
    rig.begin("c", prompt(3.5))
    assert rig.match("c") == Offer(3 * PAGE)


def test_a_load_that_failed_inside_a_page_is_banned_from_that_page_on(make: MakeRig) -> None:
    rig = make()
    rig.run("a", prompt(3))
    rig.begin("b", prompt(3.5))
    rig.admit("b", PAGE + BLOCK)
    (load,) = rig.plan().loads
    rig.report(load, 0, reason=MissReason.ERROR)
    assert (rig.match("b"), rig.match("b", PAGE + BLOCK)) == (Offer(PAGE), Offer())


def test_a_cancelled_load_bans_nothing(make: MakeRig) -> None:
    rig = make()
    rig.run("a", prompt(2))
    rig.report(loading(rig, "b"), 0, reason=MissReason.CANCELLED)
    assert rig.match("b") == Offer(2 * PAGE)


def test_the_worst_rank_decides_how_much_was_loaded(make: MakeRig) -> None:
    rig = make(ranks=(0, 1, 2))
    rig.run("a", prompt(3))
    load = loading(rig, "b", 3.5)
    rig.report(load, ranks=[0])
    rig.report(load, 1, 3, ranks=[2], reason=MissReason.ERROR)
    rig.report(load, 2, 3, ranks=[1], reason=MissReason.TIMEOUT)
    assert rig.match("b") == Offer(PAGE)
    assert rig.counts["hit_tokens|host"] == PAGE


@pytest.mark.parametrize(("done", "hits"), [(2, 2 * PAGE - BLOCK), (1, PAGE - BLOCK), (0, None)])
def test_hit_tokens_are_those_that_arrived(done: int, hits: int | None, make: MakeRig) -> None:
    rig = make()
    rig.run("a", prompt(2))
    rig.begin("b", prompt(2.5))
    tokens = rig.admit("b", BLOCK)
    assert rig.half.hit_tokens(RequestId("b"), tokens) == {Tier.HOST: 2 * PAGE - BLOCK}
    (load,) = rig.plan().loads
    rig.report(load, done, reason=None if done == 2 else MissReason.ERROR)
    assert rig.counts.get("hit_tokens|host") == hits


def test_a_page_is_pinned_until_every_rank_has_loaded_it(make: MakeRig) -> None:
    rig = make(num_slots=2, ranks=(0, 1))
    rig.run("a", prompt(2))
    load = loading(rig, "b")
    rig.report(load, ranks=[0])
    rig.begin("c", prompt(2, first=1))
    rig.compute("c")
    assert not rig.plan().saves
    rig.report(load, ranks=[1])
    assert rig.match("b") == Offer(2 * PAGE)


def test_a_page_is_pinned_until_it_is_flushed(make: MakeRig, open_store: OpenStore) -> None:
    rig = make(open_store, num_slots=2)
    rig.begin("a", prompt(2))
    rig.compute("a")
    rig.report(rig.plan().saves[0])
    (flush,) = rig.plan().flushes
    rig.begin("b", prompt(2, first=1))
    rig.compute("b")
    assert not rig.plan().saves
    rig.report(flush)
    assert rig.match("a") == Offer(2 * PAGE - 1)


# Room


def test_pages_without_room_are_declined_and_offered_again_later(make: MakeRig) -> None:
    rig = make(num_slots=2)
    rig.run("a", prompt(2))
    load = loading(rig, "b")  # pins both pages
    rig.begin("c", prompt(2, first=1))
    rig.compute("c")
    assert not rig.plan().saves
    assert rig.counts["declined_pages|save"] == 2
    rig.report(load)
    saves: list[SaveOp] = []
    for _ in range(20):
        rig.compute("c")
        saves += rig.plan().saves
    assert [len(save.pages) for save in saves] == [2]


def test_what_fits_is_saved_and_the_rest_declined(make: MakeRig) -> None:
    rig = make(num_slots=2)
    rig.begin("a", prompt(3))
    rig.compute("a")
    (save,) = rig.plan().saves
    assert len(save.pages) == 2
    assert rig.counts["declined_pages|save"] == 1


def test_a_request_is_not_evicted_to_make_room_for_itself(make: MakeRig) -> None:
    rig = make(num_slots=2)
    rig.run("a", prompt(5))
    rig.begin("b", prompt(5))
    assert rig.match("b") == Offer(2 * PAGE)


def test_old_pages_make_room_for_new_ones_and_are_told_of(make: MakeRig) -> None:
    rig = make(num_slots=2, events=True)
    rig.run("a", prompt(2))
    gone = [event.key for event in rig.half.events.take()]
    rig.run("b", prompt(2, first=1))
    rig.begin("c", prompt(2.5))
    assert rig.match("c") == Offer()
    assert [event for event in rig.half.events.take() if isinstance(event, PageRemoved)] == [
        PageRemoved(Tier.HOST, key) for key in reversed(gone)
    ]
    assert rig.counts["evicted_pages|host"] == 2


# The store


def test_saved_pages_are_flushed_through_and_found_by_another_engine(make: MakeRig, open_store: OpenStore) -> None:
    make(open_store).run("a", prompt(3))
    other = make(open_store)
    other.begin("b", prompt(3.5))
    assert other.admit("b") == 3 * PAGE
    (load,) = other.plan().loads
    assert [page.from_store for page in load.pages] == [True] * 3
    other.report(load)
    assert other.counts["hit_tokens|store"] == 3 * PAGE
    other.begin("c", prompt(3.5))
    other.admit("c")
    (again,) = other.plan().loads
    assert [(page.slot, page.from_store) for page in again.pages] == [(page.slot, False) for page in load.pages]


def test_one_load_takes_pages_from_host_memory_and_then_from_the_store(make: MakeRig, open_store: OpenStore) -> None:
    make(open_store).run("a", prompt(4))
    rig = make(open_store)
    rig.run("b", prompt(2))
    rig.begin("c", prompt(4))
    assert rig.admit("c", BLOCK) == 4 * PAGE - 1 - BLOCK
    hits = rig.half.hit_tokens(RequestId("c"), 4 * PAGE - 1 - BLOCK)
    assert hits == {Tier.HOST: 2 * PAGE - BLOCK, Tier.STORE: 2 * PAGE - 1}
    (load,) = rig.plan().loads
    assert [(page.first_block, page.from_store) for page in load.pages] == [
        (1, False),
        (0, False),
        (0, True),
        (0, True),
    ]


def test_pages_that_arrived_in_their_slots_stay_though_the_load_failed(make: MakeRig, open_store: OpenStore) -> None:
    make(open_store).run("a", prompt(3))
    rig = make(open_store)
    rig.report(loading(rig, "b", 3.5), 1, 2, reason=MissReason.CANCELLED)
    assert rig.half.tier.num_free == 62
    rig.begin("c", prompt(3.5))
    rig.admit("c")
    (load,) = rig.plan().loads
    assert [page.from_store for page in load.pages] == [False, False, True]


@pytest.mark.parametrize(("settings", "limit"), [({}, 10.0), ({"prefetch": "wait_complete"}, None)])
def test_a_load_carries_the_time_limit_of_its_policy(
    settings: dict[str, str], limit: float | None, make: MakeRig, open_store: OpenStore
) -> None:
    rig = make(open_store, **settings)
    rig.run("a", prompt(2))
    assert loading(rig, "b").time_limit_s == limit


def test_pages_on_their_way_make_another_request_wait_and_then_hit(make: MakeRig, open_store: OpenStore) -> None:
    rig = make(open_store)
    rig.begin("a", prompt(2))
    rig.compute("a")
    (save,) = rig.plan().saves
    rig.begin("b", prompt(2.5))
    assert rig.match("b") == Offer(pending=True)
    rig.report(save)
    assert rig.match("b") == Offer(2 * PAGE)


def test_pages_that_one_request_fetches_are_not_fetched_twice(make: MakeRig, open_store: OpenStore) -> None:
    make(open_store).run("a", prompt(2))
    rig = make(open_store)
    load = loading(rig, "b")
    rig.begin("c", prompt(2.5))
    assert rig.match("c") == Offer(pending=True)
    rig.report(load)
    assert rig.admit("c") == 2 * PAGE
    assert not rig.plan().loads[0].pages[0].from_store


@pytest.mark.parametrize("ended", [False, True])
def test_nobody_waits_for_a_load_that_its_own_request_waits_for_no_more(
    make: MakeRig, open_store: OpenStore, ended: bool
) -> None:
    make(open_store).run("a", prompt(2))
    rig = make(open_store)
    load = loading(rig, "b")
    rig.begin("c", prompt(2.5))
    assert rig.match("c") == Offer(pending=True)
    rig.finish("b") if ended else rig.report(load, 0, reason=MissReason.TIMEOUT, phase=Phase.RECEIVED)
    assert rig.match("c") == Offer(2 * PAGE)
    rig.report(load, 0, reason=MissReason.TIMEOUT)


def test_a_request_that_waited_for_a_fetch_that_failed_goes_on(make: MakeRig, open_store: OpenStore) -> None:
    rig = make(open_store)
    rig.begin("a", prompt(2))
    rig.compute("a")
    (save,) = rig.plan().saves
    rig.begin("b", prompt(2.5))
    rig.match("b")
    rig.report(save, 0, reason=MissReason.ERROR)
    assert rig.match("b") == Offer()


def test_a_lookup_under_way_asks_the_engine_to_come_again(make: MakeRig, open_store: OpenStore, gate: Gate) -> None:
    make(open_store).run("a", prompt(2))
    rig = make(open_store, lookup_timeout_s=3600)
    gate.open.clear()
    rig.begin("b", prompt(2.5))
    assert rig.half.match(RequestId("b"), 0) == Offer(pending=True)
    gate.open.set()
    assert rig.match("b") == Offer(2 * PAGE)


def test_a_lookup_that_takes_too_long_is_one_miss(make: MakeRig, open_store: OpenStore, gate: Gate) -> None:
    make(open_store).run("a", prompt(2))
    rig = make(open_store, lookup_timeout_s=1e-9)
    gate.open.clear()
    rig.begin("b", prompt(2.5))
    assert [rig.half.match(RequestId("b"), 0) for _ in range(3)] == [Offer()] * 3
    assert rig.counts["misses|timeout"] == 2


def test_a_lookup_that_is_late_does_not_hide_what_host_memory_has(
    make: MakeRig, open_store: OpenStore, gate: Gate
) -> None:
    rig = make(open_store, lookup_timeout_s=1e-9)
    rig.run("a", prompt(2))
    gate.open.clear()
    rig.begin("b", prompt(4.5))
    assert rig.half.match(RequestId("b"), 0) == Offer(2 * PAGE)


def test_short_requests_do_not_bother_the_store(make: MakeRig, open_store: OpenStore) -> None:
    rig = make(open_store, load_threshold=2 * PAGE)
    rig.begin("a", prompt(2))
    assert rig.lookups is not None
    assert rig.lookups.asked == []


def test_no_more_is_promised_from_the_store_than_host_memory_has_room_for(make: MakeRig, open_store: OpenStore) -> None:
    make(open_store).run("a", prompt(5))
    rig = make(open_store, num_slots=3)
    rig.run("c", prompt(1))
    rig.begin("b", prompt(5.5))
    assert rig.admit("b") == 3 * PAGE


def flushed(rig: Rig) -> int:
    """Pages flushed until nothing is open."""
    total = 0
    for _ in range(100):
        total += sum(len(flush.pages) for flush in rig.plan().flushes)
        if not rig.open:
            return total
        for op, _, _ in list(rig.open.values()):
            rig.report(op)
    raise AssertionError("operations stay open")


def test_selective_flushes_at_the_second_hit(make: MakeRig, open_store: OpenStore) -> None:
    rig, sizes = make(open_store, write="selective"), []
    for name in "abcd":
        rig.begin(name, prompt(2))
        rig.admit(name)
        rig.compute(name)
        sizes.append(flushed(rig))
    assert sizes == [0, 0, 2, 0]


def test_through_offers_a_failed_flush_again_at_the_next_hit(make: MakeRig, open_store: OpenStore) -> None:
    rig = make(open_store)
    rig.begin("a", prompt(2))
    rig.compute("a")
    (save,) = rig.plan().saves
    rig.report(save)
    (flush,) = rig.plan().flushes
    rig.report(flush, 1, reason=MissReason.UNAVAILABLE)
    rig.begin("b", prompt(2.5))
    rig.admit("b")
    (again,) = rig.plan().flushes
    assert [page.key for page in again.pages] == [flush.pages[1].key]


def test_back_flushes_nothing_while_there_is_room(make: MakeRig, open_store: OpenStore) -> None:
    rig = make(open_store, write="back", num_slots=256)
    for name in "abc":
        rig.begin(name, prompt(2))
        rig.admit(name)
        rig.compute(name)
        assert flushed(rig) == 0


def test_back_never_evicts_a_page_that_the_store_has_not_got(make: MakeRig, open_store: OpenStore) -> None:
    rig = make(open_store, write="back", num_slots=2)
    rig.begin("a", prompt(2))
    rig.compute("a")
    (save,) = rig.plan().saves
    rig.report(save)
    (flush,) = rig.plan().flushes
    rig.report(flush, 1, reason=MissReason.UNAVAILABLE)
    rig.begin("b", prompt(2, first=1))
    rig.compute("b")
    assert not rig.plan().saves
    assert rig.match("a") == Offer(2 * PAGE - 1)


def test_back_makes_room_by_flushing_what_would_be_evicted_next(make: MakeRig, open_store: OpenStore) -> None:
    rig = make(open_store, write="back", num_slots=4)
    for first in range(6):
        rig.run(f"r{first}", prompt(2, first=first))
    assert rig.counts.get("declined_pages|save", 0) == 0
    other = make(open_store)
    for first in range(4):
        other.begin(f"r{first}", prompt(2.5, first=first))
        assert other.match(f"r{first}") == Offer(2 * PAGE)


def test_blocks_that_were_promised_and_for_which_no_slot_is_left_are_named(
    make: MakeRig, open_store: OpenStore
) -> None:
    make(open_store).run("a", prompt(3))
    rig = make(open_store, write="back", num_slots=3)
    rig.begin("b", prompt(2, first=1))
    rig.compute("b")
    (save,) = rig.plan().saves
    rig.report(save)  # two pages that must not be evicted
    load = loading(rig, "c", 3.5)
    assert moved(load.pages) == [tuple(rig.blocks("c")[:4])]
    assert load.unserved == tuple(rig.blocks("c")[4:12])
    rig.report(load, reason=MissReason.NO_SLOT)
    assert rig.match("c") == Offer(PAGE)


def test_a_store_that_is_down_does_not_keep_an_idle_engine_stepping(make: MakeRig, open_store: OpenStore) -> None:
    rig = make(open_store, write="back", num_slots=2)
    rig.begin("a", prompt(2))
    rig.compute("a")
    for _ in range(8):
        rig.plan()
        for op, _, _ in list(rig.open.values()):
            rig.report(op, 0 if isinstance(op, FlushOp) else None, reason=MissReason.UNAVAILABLE)
    rig.plan()
    assert not rig.half.has_pending


# Prefetch: best effort


def test_best_effort_fetches_in_the_background_for_whoever_comes_next(make: MakeRig, open_store: OpenStore) -> None:
    make(open_store).run("a", prompt(2))
    rig = make(open_store, prefetch="best_effort")
    rig.begin("b", prompt(2.5))
    assert rig.half.match(RequestId("b"), 0) == Offer()
    assert rig.lookups is not None
    rig.lookups.wait()
    (load,) = rig.plan().loads
    assert (load.request_id, moved(load.pages), load.time_limit_s) == (None, [(), ()], None)
    rig.report(load)
    rig.begin("c", prompt(2.5))
    assert rig.admit("c") == 2 * PAGE
    rig.settle()
    assert rig.counts["hit_tokens|host"] == 2 * PAGE


def test_best_effort_never_waits_for_a_slow_lookup(make: MakeRig, open_store: OpenStore, gate: Gate) -> None:
    rig = make(open_store, prefetch="best_effort")
    gate.open.clear()
    rig.begin("a", prompt(2.5))
    assert rig.match("a") == Offer()
    assert not rig.plan().loads


def test_best_effort_never_waits_for_pages_on_their_way(make: MakeRig, open_store: OpenStore) -> None:
    make(open_store).run("a", prompt(2))
    rig = make(open_store, prefetch="best_effort")
    rig.begin("b", prompt(2.5))
    assert rig.lookups is not None
    rig.lookups.wait()
    assert len(rig.plan().loads) == 1
    assert rig.match("b") == Offer()


def test_best_effort_drops_the_prefetch_of_a_request_that_has_ended(make: MakeRig, open_store: OpenStore) -> None:
    make(open_store).run("a", prompt(2))
    rig = make(open_store, prefetch="best_effort")
    rig.begin("b", prompt(2.5))
    rig.finish("b")
    assert rig.lookups is not None
    rig.lookups.wait()
    assert not rig.plan().loads


@pytest.mark.parametrize("held", [0, 1])
def test_a_prefetch_that_fails_keeps_what_arrived(held: int, make: MakeRig, open_store: OpenStore) -> None:
    make(open_store).run("a", prompt(2))
    rig = make(open_store, prefetch="best_effort")
    rig.begin("b", prompt(2.5))
    assert rig.lookups is not None
    rig.lookups.wait()
    (load,) = rig.plan().loads
    rig.report(load, held, reason=MissReason.CORRUPT)
    assert rig.match("b") == Offer(held * PAGE)


# Reset


def test_after_a_reset_nothing_is_found_in_host_memory_or_store(make: MakeRig, open_store: OpenStore) -> None:
    rig = make(open_store)
    rig.run("a", prompt(2))
    rig.half.reset("nonce")
    assert rig.half.namespace == SPACE.bumped("nonce")
    rig.begin("b", prompt(2.5))
    assert rig.match("b") == Offer()
    assert rig.half.tier.num_free == 64


def test_a_request_that_runs_across_a_reset_is_neither_loaded_nor_saved(make: MakeRig) -> None:
    rig = make()
    rig.run("a", prompt(2))
    rig.begin("b", prompt(2.5))
    rig.half.reset("nonce")
    assert rig.admit("b") == 0
    rig.compute("b")
    assert rig.plan() == Plan(num_slots=64)


def test_a_promise_made_before_a_reset_is_not_kept(make: MakeRig) -> None:
    rig = make()
    rig.run("a", prompt(2))
    rig.begin("b", prompt(2.5))
    tokens = rig.match("b").tokens
    rig.half.reset("nonce")
    rig.half.allocated(RequestId("b"), rig.blocks("b"), tokens)
    assert not rig.plan().loads


def test_a_save_that_ends_after_a_reset_enters_nothing_and_gives_its_slots_back(make: MakeRig) -> None:
    rig = make()
    rig.begin("a", prompt(2))
    rig.compute("a")
    (save,) = rig.plan().saves
    rig.half.reset("nonce")
    assert rig.half.tier.num_reserved == 2
    rig.report(save)
    rig.begin("b", prompt(2.5))
    assert rig.match("b") == Offer()
    assert rig.half.tier.num_free == 64


def test_a_load_that_ends_after_a_reset_keeps_its_pages_till_then(make: MakeRig, open_store: OpenStore) -> None:
    make(open_store).run("a", prompt(3))
    rig = make(open_store)
    rig.run("b", prompt(1))
    load = loading(rig, "c", 3.5)
    rig.half.reset("nonce")
    tier = rig.half.tier
    assert (tier.num_free, tier.num_reserved, tier.num_leases) == (61, 2, 1)
    rig.report(load)
    assert (tier.num_free, tier.num_reserved, tier.num_leases) == (64, 0, 0)


def test_a_flush_that_ends_after_a_reset_marks_nothing(make: MakeRig, open_store: OpenStore) -> None:
    rig = make(open_store, events=True)
    rig.begin("a", prompt(2))
    rig.compute("a")
    (save,) = rig.plan().saves
    rig.report(save)
    (flush,) = rig.plan().flushes
    rig.half.reset("nonce")
    rig.report(flush)
    assert all(isinstance(event, PageRemoved) for event in rig.half.events.take()[2:])
    assert rig.half.tier.num_free == 64


def test_a_save_that_ends_after_a_reset_is_not_flushed(make: MakeRig, open_store: OpenStore) -> None:
    rig = make(open_store)
    rig.begin("a", prompt(2))
    rig.compute("a")
    (save,) = rig.plan().saves
    rig.half.reset("nonce")
    rig.report(save)
    assert not rig.plan().flushes


def test_pages_from_before_a_reset_are_never_written_under_the_new_namespace(
    make: MakeRig, open_store: OpenStore
) -> None:
    rig = make(open_store)
    rig.begin("a", prompt(2))
    rig.compute("a")
    (save,) = rig.plan().saves
    rig.report(save)
    rig.half.reset("nonce")
    (flush,) = rig.plan().flushes
    assert flush.spaces == Spaces(SPACE.digest())
    rig.report(flush)


@pytest.mark.parametrize("pinned", [False, True])
def test_every_page_that_a_reset_removes_is_told_of(pinned: bool, make: MakeRig) -> None:
    rig = make(events=True)
    rig.run("a", prompt(2))
    keys = {event.key for event in rig.half.events.take()}
    load = loading(rig, "b") if pinned else None
    rig.half.reset("nonce")
    if load is not None:
        rig.report(load)
    assert set(rig.half.events.take()) == {PageRemoved(Tier.HOST, key) for key in keys}


# Events


def test_events_tell_tier_parent_and_tokens(make: MakeRig, open_store: OpenStore) -> None:
    rig = make(open_store, events=True)
    rig.run("a", prompt(2))
    tokens = [tuple(prompt(2)[:PAGE]), tuple(prompt(2)[PAGE:])]
    host, store = rig.half.events.take()[:2], rig.half.events.take()
    assert store == []
    one, two = (event.key for event in host)
    assert host == [PageStored(Tier.HOST, one, None, tokens[0]), PageStored(Tier.HOST, two, one, tokens[1])]


def test_a_page_in_the_store_is_told_when_it_was_written(make: MakeRig, open_store: OpenStore) -> None:
    rig = make(open_store, events=True)
    rig.begin("a", prompt(2))
    rig.compute("a")
    (save,) = rig.plan().saves
    rig.report(save)
    rig.half.events.take()
    (flush,) = rig.plan().flushes
    rig.report(flush, 1, reason=MissReason.UNAVAILABLE)
    assert rig.half.events.take() == [PageStored(Tier.STORE, flush.pages[0].key, None, ())]


# Ends


STATES = ["begun", "matched", "allocated", "loading", "loaded", "computed", "saving", "saved", "flushing"]


@pytest.mark.parametrize("hit", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_a_request_may_end_in_any_state(state: str, hit: bool, make: MakeRig, open_store: OpenStore) -> None:
    rig = make(open_store, ranks=(0, 1))
    if hit:
        rig.run("a", prompt(2))
    steps: list[Callable[[], object]] = [
        lambda: rig.begin("b", prompt(4)),
        lambda: rig.match("b"),
        lambda: rig.admit("b"),
        rig.plan,
        rig.settle,
        lambda: rig.compute("b"),
        rig.plan,
        lambda: [rig.report(op) for op, _, _ in list(rig.open.values())],
        rig.plan,
    ]
    for step in steps[: STATES.index(state) + 1]:
        step()
    rig.finish("b")
    rig.finish("b")
    rig.settle()
    rig.conserved()
    rig.begin("c", prompt(4))
    assert rig.match("c").tokens == (4 * PAGE - 1 if STATES.index(state) > 4 else 2 * PAGE * hit)


def test_the_load_of_a_request_that_has_ended_is_cancelled_once(make: MakeRig) -> None:
    rig = make()
    rig.run("a", prompt(2))
    load = loading(rig, "b")
    rig.finish("b")
    assert [rig.plan().cancels, rig.plan().cancels] == [(load.op,), ()]
    rig.report(load, 0, reason=MissReason.CANCELLED)
    assert not rig.half.has_pending


def test_a_name_can_be_used_again_after_its_request_has_ended(make: MakeRig) -> None:
    rig = make()
    rig.run("a", prompt(2))
    load = loading(rig, "b")
    rig.finish("b")
    second = loading(rig, "b")
    assert second.op == load.op + 1
    rig.report(load, 0, reason=MissReason.ERROR)
    rig.report(second)
    assert rig.match("b") == Offer(2 * PAGE)


def test_gauges_add_up_to_the_pool(make: MakeRig) -> None:
    rig = make(num_slots=8)
    rig.run("a", prompt(2))
    rig.begin("b", prompt(3, first=1))
    rig.compute("b")
    rig.plan()
    pages = {key.split("|")[1]: value for key, value in rig.counts.items() if key.startswith("host_pages")}
    assert pages == {"free": 3, "reserved": 3, "used": 2}


# Ten thousand aborts


class ToldLookups(NotedLookups):
    """Answers from `stored` when it is told to, on the asking thread: no test run differs from the next."""

    def __init__(self, rng: random.Random) -> None:
        self.asked: list[Lookup] = []
        self.stored: set[PageKey] = set()
        self._rng = rng

    def begin(self, keys: Sequence[PageKey], store: RoleChunks, plain: Sequence[PageKey] | None = None) -> Lookup:
        lookup = Lookup(keys, keys, store)
        self.asked.append(lookup)
        if self._rng.random() < 0.7:
            self.wait()
        return lookup

    def wait(self) -> None:
        for lookup in self.asked:
            run = [key in self.stored for key in lookup.keys]
            lookup.num_pages = lookup.num_whole = run.index(False) if False in run else len(run)
            lookup.done.set()
        self.asked.clear()

    def close(self) -> None:
        pass


class Chaos(Rig):
    """Random requests from a small family of prompts, random reports, and ends at random moments."""

    def __init__(self, open_store: OpenStore, seed: int, **settings: object) -> None:
        self.rng = random.Random(seed)
        self.told = ToldLookups(self.rng)
        super().__init__(open_store, 12, (0, 1), self.told, lookup_timeout_s=1e-9, **settings)
        self.said: dict[tuple[OpId, int], tuple[int, int, Phase]] = {}
        self.acked: dict[OpId, Phase] = {}
        self.num_begun = self.num_ended = self.num_loads = self.num_saves = self.num_cut = 0

    def arrive(self) -> None:
        self.num_begun += 1
        name = f"r{self.num_begun}"
        self.num_blocks[name] = self.num_begun % 64 * 1000
        self.begin(name, prompt(self.rng.choice([0.5, 1, 2, 2.5, 4, 6]), first=self.rng.randrange(8)))

    def loads(self, name: str) -> bool:
        """Whether a load of this request is not received on every rank, as the acknowledgements have it."""
        mine = [op.op for op, _, _ in self.open.values() if isinstance(op, LoadOp) and op.request_id == name]
        told = [self._progress(op, rank)[2] for op in mine for rank in self.ranks]
        return min([*told, *(self.acked.get(op, Phase.RUNNING) for op in mine)], default=Phase.SETTLED) < Phase.RECEIVED

    def _progress(self, op: OpId, rank: int) -> tuple[int, int, Phase]:
        return self.said.get((op, rank), (0, 0, Phase.RUNNING))

    def advance(self, name: str) -> None:
        """One move of a request, as the engine would make it: nothing is computed while its load is open."""
        if self.loads(name):
            return
        tokens = self.sources[name]
        match self.rng.randrange(4):
            case 0:
                local = self.rng.choice([0, 0, BLOCK, 2 * BLOCK, PAGE])
                offer = self.half.match(RequestId(name), min(local, (tokens.num_tokens - 1) // BLOCK * BLOCK))
                if not offer.pending and self.rng.random() < 0.9:
                    self.half.allocated(RequestId(name), self.blocks(name), offer.tokens)
                    self.num_loads += offer.tokens > 0
                    self.step()
            case 1 | 2:
                self.compute(name, self.rng.randint(1, tokens.num_tokens + 8))
            case 3:
                tokens.all_token_ids += range(self.rng.randrange(40))

    def step(self) -> None:
        plan = self.plan()
        self.num_saves += len(plan.saves)
        self.acked.update({ack.op: ack.phase for ack in plan.acks})

    def answer_one(self) -> None:
        """One rank's report of a random open operation: all, part, or nothing of it; sometimes twice."""
        op, _, waiting = self.rng.choice(list(self.open.values()))
        size, rank = len(op.pages), self.rng.choice(sorted(waiting))
        done, held, phase = self._progress(op.op, rank)
        if phase == Phase.RUNNING:
            done = size if self.rng.random() < 0.7 else self.rng.randint(done, size)
        phase = self.rng.choice([Phase.SETTLED, *(each for each in Phase if each >= phase)])
        if isinstance(op, LoadOp):
            held = self.rng.randint(max(done, held), size)
        else:
            held, phase = done, Phase.SETTLED
        short = done < size or (isinstance(op, LoadOp) and bool(op.unserved))
        reason = self.rng.choice([MissReason.CANCELLED, MissReason.CORRUPT, MissReason.TIMEOUT]) if short else None
        self.said[op.op, rank] = done, held, phase
        self.report(op, done, held, reason=reason if phase else None, ranks=[rank], phase=phase)
        if self.rng.random() < 0.1:
            self.half.report([OpReport(rank, op.op, 0, 0, Phase.RUNNING, MissReason.ERROR)])

    def _do(self, op: Op, spaces: Spaces, ranks: Sequence[int], done: int, held: int) -> None:
        super()._do(op, spaces, ranks, 0, held)
        if isinstance(op, FlushOp):
            self.told.stored.update(page.key for page in op.pages[:done])

    def abort(self, num: int) -> None:
        while self.num_ended < num:
            self.step()
            if len(self.sources) < 6:
                self.arrive()
            for name in list(self.sources):
                self.advance(name)
                if self.rng.random() < 0.3:
                    self.num_cut += self.loads(name)
                    self.finish(name)
                    self.num_ended += 1
            while self.open and self.rng.random() < 0.85:
                self.answer_one()
            if self.rng.random() < 0.3:
                self.told.wait()
            if self.rng.random() < 0.003:
                self.half.reset(str(self.num_ended))
            self.half.tier.check()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"write": "back"},
        {"write": "selective", "eviction": "slru"},
        {"prefetch": "best_effort"},
        {"rank_timeout_s": 1e-9, "consensus": "off"},
    ],
    ids=["through", "back", "selective", "best_effort", "all given up"],
)
def test_ten_thousand_aborts_at_random_moments_leave_nothing_behind(
    settings: dict[str, str], open_store: OpenStore
) -> None:
    rig = Chaos(open_store, 7, **settings)
    rig.abort(10_000)
    assert min(rig.num_loads, rig.num_saves, rig.num_cut) > 1000
    rig.told.wait()
    rig.close()


@pytest.mark.parametrize(
    ("positions", "runs"),
    [([], []), ([3], [(3, 4)]), (range(2, 5), [(2, 5)]), ([1, 2, 3, 7, 8, 10], [(1, 4), (7, 9), (10, 11)])],
)
def test_flushed_pages_are_marked_run_by_run(positions: Sequence[int], runs: list[tuple[int, int]]) -> None:
    assert runs_of(positions) == runs
