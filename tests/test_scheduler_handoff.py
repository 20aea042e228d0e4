"""The scheduler half of engines that take prompts from others, and of those that compute them.

What is asked of whom, and what becomes of it. How it ends is in `test_scheduler_handoff_ends.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_handoff_kit import Clock, HandoffRig, MakeHandoff, full_keys, named, names_of, peer, taking
from scheduler_kit import BLOCK, PAGE, OpenStore, moved, prompt

from vllm_hicache.config import Config
from vllm_hicache.events import PageRemoved, PageStored
from vllm_hicache.names import BlockId, MissReason, Phase, RequestId, Tier
from vllm_hicache.namespace import DraftSpace
from vllm_hicache.plan import PageMove
from vllm_hicache.scheduler import Offer
from vllm_hicache.tracking import Answer

pytest_plugins = ["scheduler_fixtures", "scheduler_handoff_fixtures"]

PLAIN = DraftSpace("draft_model", "draft weights", "bf16", "none", "cpu", 1, 1, 16, "1x1", looks_ahead=False)
AHEAD = replace(PLAIN, method="eagle3", looks_ahead=True)


def sources(pages: Sequence[PageMove]) -> list[str]:
    """Where each page of a load is to come from."""
    return ["peer" if page.from_peer else "store" if page.from_store else "host" for page in pages]


def hits(rig: HandoffRig) -> dict[str, float]:
    return {name.split("|")[1]: count for name, count in rig.counts.items() if name.startswith("hit_tokens")}


# What is asked for, and of whom


@pytest.mark.parametrize("pages", [0.5, 1, 2, 2.5, 3])
def test_what_is_nowhere_else_comes_from_the_peer_up_to_the_last_token(pair: MakeHandoff, pages: float) -> None:
    rig, tokens = pair(), prompt(pages)
    load = taking(rig, pages=pages)
    assert set(sources(load.pages)) == {"peer"}
    assert names_of(load.pages) == named(rig, tokens)
    assert (load.peer, load.request_id, load.unserved) == (peer(), RequestId("a"), ())
    assert rig.half.hit_tokens(RequestId("a"), len(tokens) - 1) == {Tier.PEER: len(tokens) - 1}
    assert all(page.from_store for page in load.pages)


def test_the_blocks_of_an_unfinished_page_are_as_many_as_its_tokens_need(pair: MakeHandoff) -> None:
    rig = pair()
    load = taking(rig, pages=1.5)
    blocks = rig.blocks("a")
    assert moved(load.pages) == [tuple(blocks[:4]), tuple(blocks[4:6])]


def test_a_page_of_which_only_the_last_token_is_missing_is_not_asked_for(pair: MakeHandoff) -> None:
    rig, tokens = pair(), range(2 * PAGE + 1)
    rig.hand("a", tokens, source=peer())
    assert rig.admit("a") == 2 * PAGE
    (load,) = rig.plan().loads
    assert names_of(load.pages) == full_keys(rig, tokens)


def test_a_load_takes_pages_from_host_memory_then_the_store_and_then_the_peer(
    pair: MakeHandoff, open_store: OpenStore
) -> None:
    writer, rig = pair(open_store), pair(open_store)
    writer.run("w", prompt(2))
    rig.run("w", prompt(1))
    load = taking(rig, pages=3.5)
    assert sources(load.pages) == ["host", "store", "peer", "peer"]
    assert names_of(load.pages) == named(rig, prompt(3.5))
    by_tier = {Tier.HOST: PAGE, Tier.STORE: PAGE, Tier.PEER: PAGE + 31}
    assert rig.half.hit_tokens(RequestId("a"), 3 * PAGE + 31) == by_tier
    rig.report(load)
    of_first = PAGE - 1
    assert hits(rig) == {"host": PAGE, "store": of_first + PAGE, "peer": PAGE + 31}


def test_what_the_device_has_is_asked_of_nobody(pair: MakeHandoff) -> None:
    rig = pair()
    load = taking(rig, pages=3.5, local=PAGE + BLOCK)
    blocks = rig.blocks("a")
    assert [(page.blocks, page.first_block) for page in load.pages] == [
        (tuple(blocks[5:8]), 1),
        (tuple(blocks[8:12]), 0),
        (tuple(blocks[12:14]), 0),
    ]
    assert rig.half.hit_tokens(RequestId("a"), 999) == {Tier.PEER: 4 * PAGE - PAGE - BLOCK}


@pytest.mark.parametrize("local", [0, 1.5], ids=["peer alone", "store and peer"])
def test_a_load_from_a_peer_has_the_peers_time_limit(pair: MakeHandoff, open_store: OpenStore, local: float) -> None:
    pair(open_store).run("w", prompt(local))
    rig = pair(open_store, peer_timeout_s=7.0, prefetch="wait_complete")
    assert taking(rig).time_limit_s == 7.0


def test_a_load_that_needs_nothing_of_its_peer_has_the_usual_limit_and_names_the_peer_all_the_same(
    pair: MakeHandoff, open_store: OpenStore
) -> None:
    pair(open_store).run("w", prompt(2))
    rig = pair(open_store, peer_timeout_s=7.0, prefetch_timeout_s=3.0, prefetch="timeout")
    load = taking(rig, pages=2)
    assert (sources(load.pages), load.time_limit_s) == (["store", "store"], 3.0)
    assert load.peer == peer()


def test_pages_of_a_peer_have_the_drafts_state_and_those_of_the_store_what_it_has(
    pair: MakeHandoff, open_store: OpenStore
) -> None:
    pair(open_store).run("w", prompt(1))
    rig = pair(open_store, draft=PLAIN, draft_miss="serve")
    load = taking(rig, pages=2.5)
    assert sources(load.pages) == ["store", "peer", "peer"]
    assert [page.has_draft for page in load.pages] == [False, True, True]


def test_with_a_draft_that_looks_ahead_pages_whose_next_token_is_known_come_and_no_other(pair: MakeHandoff) -> None:
    for pages, expected in ((2.5, 2), (2, 1)):
        rig = pair(draft=AHEAD)
        load = taking(rig, pages=pages)
        assert len(load.pages) == expected
        assert [page.plain for page in load.pages] == full_keys(rig, prompt(pages))[:expected]
        assert not set(names_of(load.pages)) & set(full_keys(rig, prompt(pages)))


def test_fewer_tokens_than_the_threshold_are_computed_here(pair: MakeHandoff) -> None:
    rig = pair(load_threshold=2 * PAGE)
    rig.hand("a", prompt(2), source=peer())
    assert rig.admit("a") == 0
    assert rig.plan().releases == (peer(),)


def test_best_effort_asks_a_peer_at_once_for_what_host_memory_lacks(pair: MakeHandoff, open_store: OpenStore) -> None:
    pair(open_store).run("w", prompt(2))
    rig = pair(open_store, prefetch="best_effort")
    assert sources(taking(rig).pages) == ["peer"] * 3


# Room


@pytest.mark.parametrize(("num_slots", "offered"), [(1, PAGE), (2, 2 * PAGE), (3, 3 * PAGE), (4, 3 * PAGE + 31)])
def test_no_more_is_promised_of_a_peer_than_host_memory_has_room_for(
    pair: MakeHandoff, num_slots: int, offered: int
) -> None:
    rig = pair(num_slots=num_slots)
    rig.hand("a", prompt(3.5), source=peer())
    assert rig.match("a") == Offer(offered)


def test_room_is_left_for_the_pages_of_the_store_first(pair: MakeHandoff, open_store: OpenStore) -> None:
    pair(open_store).run("w", prompt(2))
    rig = pair(open_store, num_slots=3)
    assert sources(taking(rig, pages=3.5).pages) == ["store", "store", "peer"]


def test_pages_in_host_memory_are_not_taken_as_room_for_those_behind_them(pair: MakeHandoff) -> None:
    rig = pair(num_slots=3)
    rig.run("w", prompt(2))
    assert sources(taking(rig, pages=3.5).pages) == ["host", "host", "peer"]


def test_blocks_for_which_no_slot_is_left_when_the_load_begins_are_named(pair: MakeHandoff) -> None:
    rig = pair(num_slots=3)
    rig.hand("a", prompt(2.5), source=peer())
    assert rig.match("a") == Offer(2 * PAGE + 31)
    rig.hand("w", prompt(2, first=1))
    rig.compute("w")
    blocks = rig.blocks("a")
    rig.half.allocated(RequestId("a"), blocks, 2 * PAGE + 31)
    (load,) = rig.plan().loads
    assert (len(load.pages), load.unserved) == (1, tuple(blocks[4:]))
    assert rig.counts["misses|no_slot"] == 2


# The unfinished page


def test_an_unfinished_page_is_known_to_handoffs_alone(pair: MakeHandoff) -> None:
    rig = pair()
    rig.report(taking(rig))
    rig.begin("b", [*prompt(2.5), *prompt(1, first=1)])
    assert rig.match("b") == Offer(2 * PAGE)
    rig.begin("c", prompt(2.5))
    assert rig.match("c") == Offer(2 * PAGE)


def test_an_unfinished_page_that_is_in_host_memory_is_not_asked_for_again(pair: MakeHandoff) -> None:
    rig = pair()
    rig.report(taking(rig))
    load = taking(rig, "b", request="cmpl-2")
    assert sources(load.pages) == ["host"] * 3


def test_what_is_computed_behind_an_unfinished_page_is_saved_as_a_page_of_its_own(pair: MakeHandoff) -> None:
    rig, tokens = pair(), [*prompt(1.5), *prompt(1, first=1)]
    rig.report(taking(rig, pages=1.5))
    rig.sources["a"].all_token_ids[:] = tokens
    rig.compute("a")
    (save,) = rig.plan().saves
    assert names_of(save.pages) == full_keys(rig, tokens)[1:]
    assert moved(save.pages) == [tuple(rig.blocks("a")[4:8])]


@pytest.mark.parametrize("comes", ["computed", "taken"])
def test_an_unfinished_page_is_not_flushed(pair: MakeHandoff, open_store: OpenStore, comes: str) -> None:
    rig, tokens = pair(open_store, write="through"), prompt(2.5)
    for name in ("first", "second", "third"):  # what was taken is flushed at the next hit
        rig.hand(name, tokens, **({"to": name} if comes == "computed" else {"source": peer(name)}))
        rig.admit(name)
        rig.settle()
        rig.compute(name)
        rig.settle()
    assert {key for flush in rig.flushed for key in names_of(flush.pages)} == set(full_keys(rig, tokens))


def test_of_an_unfinished_page_that_is_computed_no_event_tells(pair: MakeHandoff) -> None:
    rig = pair(events=True, num_slots=3)
    rig.prefilled("a", prompt(2.5), "cmpl-1")
    assert [len(event.tokens) for event in rig.half.events.take() if isinstance(event, PageStored)] == [PAGE, PAGE]
    rig.acknowledge("cmpl-1")
    rig.settle()
    rig.run("b", prompt(3, first=1))
    removed = [event.key for event in rig.half.events.take() if isinstance(event, PageRemoved)]
    assert set(removed) == set(full_keys(rig, prompt(2.5)))


def test_of_an_unfinished_page_that_was_taken_no_event_tells(pair: MakeHandoff) -> None:
    rig, tokens = pair(events=True), prompt(2.5)
    rig.report(taking(rig))
    told = [event for event in rig.half.events.take() if isinstance(event, PageStored)]
    keys = full_keys(rig, tokens)
    assert [(event.key, event.parent) for event in told] == [(keys[0], None), (keys[1], keys[0])]
    assert [list(event.tokens) for event in told] == [list(tokens[:PAGE]), list(tokens[PAGE : 2 * PAGE])]


# What becomes of what came


def test_pages_of_a_peer_are_in_host_memory_and_not_in_the_store(pair: MakeHandoff, open_store: OpenStore) -> None:
    rig = pair(open_store, write="through")
    load = taking(rig, pages=2)
    rig.report(load)
    found = rig.half.tier.match(full_keys(rig, prompt(2)), touch=False)
    assert (found.num_pages, list(found.stored)) == (2, [0, 0])
    rig.begin("b", prompt(2.5))
    rig.admit("b")
    assert [names_of(flush.pages) for flush in rig.plan().flushes] == [full_keys(rig, prompt(2))]


def test_pages_of_the_store_and_of_a_peer_in_one_load_are_told_apart(pair: MakeHandoff, open_store: OpenStore) -> None:
    pair(open_store).run("w", prompt(1))
    rig = pair(open_store)
    rig.report(taking(rig, pages=3))
    assert list(rig.half.tier.match(full_keys(rig, prompt(3)), touch=False).stored) == [1, 0, 0]


def test_pages_enter_host_memory_as_they_come(pair: MakeHandoff) -> None:
    rig = pair()
    load = taking(rig, pages=3.5)
    rig.report(load, 2, phase=Phase.RUNNING)
    assert rig.half.tier.match(full_keys(rig, prompt(3)), touch=False).num_pages == 2
    rig.report(load)
    assert rig.half.tier.match(named(rig, prompt(3.5)), touch=False).num_pages == 4


@pytest.mark.parametrize(("done", "expected"), [(0, {}), (1, {"peer": PAGE}), (3, {"peer": 2 * PAGE + 31})])
def test_hit_tokens_of_a_peer_are_those_that_came(pair: MakeHandoff, done: int, expected: dict[str, int]) -> None:
    rig = pair()
    rig.report(taking(rig), done, reason=MissReason.TIMEOUT)
    assert hits(rig) == expected


def test_a_page_that_its_peer_failed_to_give_is_not_promised_again(pair: MakeHandoff) -> None:
    rig = pair()
    rig.report(taking(rig, pages=3.5), 1, reason=MissReason.ABSENT)
    assert rig.plan().releases == (peer(),)
    assert rig.match("a") == Offer(PAGE)
    assert rig.match("a", PAGE) == Offer()
    rig.hand("b", prompt(3.5), source=peer("b"))
    assert rig.match("b") == Offer(3 * PAGE + 31)


def test_a_request_that_is_preempted_finds_its_pages_in_host_memory_and_asks_nobody(pair: MakeHandoff) -> None:
    rig = pair()
    rig.report(taking(rig))
    rig.settle()
    rig.sources["a"].all_token_ids.append(7)
    assert rig.admit("a") == 2 * PAGE
    (load,) = rig.plan().loads
    assert (sources(load.pages), load.peer) == (["host", "host"], None)
    rig.report(load)
    rig.settle()
    assert rig.released == [peer()]


def test_a_request_whose_load_was_given_up_asks_its_peer_for_nothing_more(pair: MakeHandoff) -> None:
    rig = pair()
    load = taking(rig)
    rig.report(load, 0, phase=Phase.RECEIVED, reason=MissReason.TIMEOUT)
    assert rig.admit("a") == 0
    assert not rig.plan().loads
    rig.report(load, 0, reason=MissReason.TIMEOUT)
    rig.settle()
    assert rig.released == [peer()]


# Others that move the same pages


def test_pages_that_another_request_is_taking_are_waited_for(pair: MakeHandoff) -> None:
    rig = pair()
    load = taking(rig, pages=2.5)
    rig.hand("b", prompt(2.5), source=peer("b"))
    assert rig.half.match(RequestId("b"), 0) == Offer(pending=True)
    rig.report(load)
    assert rig.match("b") == Offer(2 * PAGE + 31)
    rig.half.allocated(RequestId("b"), rig.blocks("b"), 2 * PAGE + 31)
    assert sources(rig.plan().loads[0].pages) == ["host"] * 3


def test_two_answers_to_one_prompt_take_it_once_and_each_says_when_it_is_done(pair: MakeHandoff) -> None:
    rig = pair()
    load = taking(rig, "first")
    rig.hand("second", prompt(2.5), source=peer())
    assert rig.half.match(RequestId("second"), 0) == Offer(pending=True)
    rig.report(load)
    assert rig.admit("second") == 2 * PAGE + 31
    rig.settle()
    assert (rig.half.hit_tokens(RequestId("second"), 2 * PAGE + 31), rig.released) == (
        {Tier.HOST: 2 * PAGE + 31},
        [peer(), peer()],
    )


def test_pages_that_are_being_saved_are_waited_for_and_not_taken(pair: MakeHandoff) -> None:
    rig = pair()
    rig.begin("w", prompt(2))
    rig.compute("w")
    (save,) = rig.plan().saves
    rig.hand("a", prompt(2.5), source=peer())
    assert rig.half.match(RequestId("a"), 0) == Offer(pending=True)
    rig.report(save)
    rig.admit("a")
    assert sources(rig.plan().loads[0].pages) == ["host", "host", "peer"]


def test_nobody_waits_for_others_longer_than_a_load_may_take(pair: MakeHandoff, clock: Clock) -> None:
    rig = pair()
    load = taking(rig, pages=2)
    rig.hand("b", prompt(2), source=peer("b"))
    assert rig.half.match(RequestId("b"), 0) == Offer(pending=True)
    clock.now_s += Config().prefetch_timeout_s
    assert rig.half.match(RequestId("b"), 0) == Offer(2 * PAGE - 1)
    rig.half.allocated(RequestId("b"), rig.blocks("b"), 2 * PAGE - 1)
    (second,) = rig.plan().loads
    assert sources(second.pages) == ["peer", "peer"]
    rig.report(second)
    rig.report(load)
    assert rig.half.tier.num_free == rig.half.tier.num_slots - 2


def test_two_requests_that_take_the_same_unfinished_page_keep_one_of_it(pair: MakeHandoff) -> None:
    rig = pair()
    loads = [taking(rig, name, 0.5, request=name) for name in ("a", "b")]
    for load in loads:
        rig.report(load)
    assert rig.half.tier.num_free == rig.half.tier.num_slots - 1


# The engine that computes


def test_a_prompt_for_another_engine_takes_what_is_there_as_any_other(pair: MakeHandoff) -> None:
    rig = pair()
    rig.run("w", prompt(2))
    rig.hand("a", prompt(2.5), to="cmpl-1")
    assert rig.admit("a") == 2 * PAGE
    (load,) = rig.plan().loads
    assert (sources(load.pages), load.peer) == (["host", "host"], None)
    rig.report(load)


def test_the_unfinished_page_is_saved_when_the_prompt_is_computed_and_not_before(pair: MakeHandoff) -> None:
    rig, tokens = pair(), prompt(1.5)
    rig.hand("a", tokens, to="cmpl-1")
    rig.compute("a", upto=len(tokens) - 1)
    (first,) = rig.plan().saves
    rig.compute("a")
    (last,) = rig.plan().saves
    assert [names_of(save.pages) for save in (first, last)] == [[key] for key in named(rig, tokens)]
    assert moved(last.pages) == [tuple(rig.blocks("a")[4:6])]


def test_the_blocks_of_an_unfinished_page_are_held_until_it_is_saved(pair: MakeHandoff) -> None:
    rig = pair()
    rig.hand("a", prompt(0.5), to="cmpl-1")
    rig.compute("a")
    (save,) = rig.plan().saves
    blocks = rig.blocks("a")
    rig.end("a")
    assert set(rig.holds.held) == set(map(BlockId, blocks))
    rig.report(save)
    assert not rig.holds.held


def test_no_other_request_saves_an_unfinished_page(pair: MakeHandoff) -> None:
    rig = pair()
    rig.begin("a", prompt(1.5))
    rig.compute("a")
    (save,) = rig.plan().saves
    assert names_of(save.pages) == full_keys(rig, prompt(1.5))


def test_an_unfinished_page_that_found_no_slot_is_tried_again_as_long_as_the_request_runs(pair: MakeHandoff) -> None:
    rig = pair(num_slots=1)
    rig.prefilled("w", prompt(1, first=1), "w")
    rig.hand("a", prompt(0.5), to="cmpl-1")
    rig.compute("a")
    assert not rig.plan().saves
    rig.acknowledge("w")
    rig.settle()
    rig.compute("a")
    assert [names_of(save.pages) for save in rig.plan().saves] == [named(rig, prompt(0.5))]


def test_with_a_draft_that_looks_ahead_no_unfinished_page_is_handed_over(pair: MakeHandoff) -> None:
    rig = pair(draft=AHEAD)
    exports = rig.prefilled("a", prompt(2.5), "cmpl-1")
    assert [page.plain for export in exports for page in export.pages] == full_keys(rig, prompt(2.5))
    assert not any(export.absent for export in exports)


# Tokens by tier


@given(st.integers(0, 9), st.lists(st.integers(0, 4), min_size=3, max_size=3), st.integers(0, 200), st.integers(0, 14))
def test_tokens_are_split_by_the_tier_that_has_their_page(
    local: int, lengths: list[int], tokens: int, end_page: int
) -> None:
    first = local // 3
    host_end, store_end, end = [first + total for total in accumulate(lengths)]
    answer = Answer(local, first, host_end, store_end, store_end, end)
    expected: Counter[Tier] = Counter()
    for place in range(local, min(local + tokens, 3 * min(end, end_page))):
        page = place // 3
        expected[Tier.HOST if page < host_end else Tier.STORE if page < store_end else Tier.PEER] += 1
    assert answer.by_tier(tokens, min(end, end_page), 3) == dict(expected)
