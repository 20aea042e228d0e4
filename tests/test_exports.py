"""Prompts that are computed for other engines: which pages may be read when, and when that is over."""

from __future__ import annotations

import logging

import pytest
from scheduler_handoff_kit import LEASE_S, Clock, HandoffRig, MakeHandoff, full_keys, named, names_of
from scheduler_kit import PAGE, prompt

from vllm_hicache.names import Role, Slot
from vllm_hicache.namespace import DraftSpace
from vllm_hicache.plan import OpReport

pytest_plugins = ["scheduler_handoff_fixtures"]


def outcomes(rig: HandoffRig) -> dict[str, int]:
    """How many prompts have ended, by how."""
    return {name.split("|")[1]: int(count) for name, count in rig.counts.items() if name.startswith("handoffs")}


def held(rig: HandoffRig) -> tuple[int, int]:
    """Exports that wait for readers, and leases that keep their pages."""
    return rig.half._operations.num_exports, rig.half.tier.num_leases


def computing(rig: HandoffRig, name: str = "a", pages: float = 2.5, to: str = "cmpl-1") -> None:
    """A request whose prompt has been computed and saved, still running."""
    rig.hand(name, prompt(pages), to=to)
    rig.admit(name)
    rig.compute(name)
    rig.settle()


# What may be read


@pytest.mark.parametrize("pages", [0.5, 1, 2, 2.5])
def test_every_page_of_a_prompt_may_be_read_its_unfinished_one_included(pair: MakeHandoff, pages: float) -> None:
    rig, tokens = pair(), prompt(pages)
    exports = rig.prefilled("a", tokens, "cmpl-1")
    assert [key for export in exports for key in names_of(export.pages)] == named(rig, tokens)
    assert {export.spaces for export in exports} == {rig.half.spaces}
    assert not any(export.absent for export in exports)
    assert all(page.name(Role.TARGET) == page.key for export in exports for page in export.pages)


def test_a_page_without_the_drafts_state_is_read_without_it(pair: MakeHandoff) -> None:
    rig = pair(
        draft=DraftSpace("draft_model", "draft weights", "bf16", "none", "cpu", 1, 1, 16, "1x1", looks_ahead=False)
    )
    rig.hand("a", prompt(3), to="cmpl-1")
    rig.admit("a")
    for pages, is_drafted in ((1, True), (2, False), (3, True)):
        rig.compute("a", upto=pages * PAGE, is_drafted=is_drafted)
        rig.settle()
    rig.end("a")
    rig.settle()
    assert [page.has_draft for export in rig.told for page in export.pages] == [True, False, False]


def test_pages_may_be_read_as_they_come_while_the_rest_is_computed(pair: MakeHandoff) -> None:
    rig, tokens = pair(), prompt(3.5)
    rig.hand("a", tokens, to="cmpl-1")
    rig.admit("a")
    for upto in (PAGE, 2 * PAGE + 5, 3 * PAGE, len(tokens)):
        rig.compute("a", upto=upto)
        rig.settle()
    assert [names_of(export.pages) for export in rig.told] == [[key] for key in named(rig, tokens)]
    assert not any(export.absent for export in rig.told)


def test_a_page_may_not_be_read_before_its_save_is_acknowledged(pair: MakeHandoff) -> None:
    rig = pair()
    rig.hand("a", prompt(1), to="cmpl-1")
    rig.compute("a")
    (save,) = rig.plan().saves
    assert not rig.plan().exports
    rig.report(save)
    assert [names_of(export.pages) for export in rig.plan().exports] == [names_of(save.pages)]


def test_pages_that_lie_in_host_memory_already_may_be_read_too(pair: MakeHandoff) -> None:
    rig, tokens = pair(), prompt(2)
    rig.run("other", tokens)
    exports = rig.prefilled("a", tokens, "cmpl-1")
    assert [key for export in exports for key in names_of(export.pages)] == named(rig, tokens)


def test_the_unfinished_page_is_waited_for_though_the_request_has_ended(pair: MakeHandoff) -> None:
    rig, tokens = pair(), prompt(1.5)
    rig.hand("a", tokens, to="cmpl-1")
    rig.compute("a", upto=PAGE)
    rig.settle()
    rig.compute("a")
    (save,) = rig.plan().saves
    assert rig.end("a")
    assert rig.half.has_pending
    assert not rig.plan().exports
    rig.report(save)
    (export,) = rig.plan().exports
    assert (names_of(export.pages), export.absent) == (named(rig, tokens)[1:], ())
    assert not rig.half.has_pending


@pytest.mark.parametrize("tokens", [[*prompt(1.5), 7], prompt(2)], ids=["part of it", "all of it"])
def test_what_is_computed_behind_a_prompt_is_no_part_of_it(pair: MakeHandoff, tokens: list[int]) -> None:
    rig = pair()
    rig.hand("a", prompt(1.5), to="cmpl-1")
    rig.compute("a")
    rig.sources["a"].all_token_ids[:] = list(tokens)
    rig.compute("a")
    rig.settle()
    rig.end("a")
    rig.settle()
    assert [key for export in rig.told for key in names_of(export.pages)] == named(rig, prompt(1.5))


# Pages that will not come


def test_pages_that_got_no_slot_are_named_as_absent_when_the_prompt_has_ended(pair: MakeHandoff) -> None:
    rig, tokens = pair(num_slots=2), prompt(3.5)
    computing(rig, pages=3.5)
    rig.end("a")
    rig.settle()
    first, last = rig.told
    keys = named(rig, tokens)
    assert (names_of(first.pages), first.absent) == (keys[:2], ())
    assert (last.pages, names_of(last.absent)) == ((), keys[2:])
    assert {page.slot for page in last.absent} == {Slot(-1)}


def test_pages_whose_save_failed_are_named_as_absent(pair: MakeHandoff) -> None:
    rig, tokens = pair(), prompt(2.5)
    rig.hand("a", tokens, to="cmpl-1")
    rig.compute("a")
    (save,) = rig.plan().saves
    rig.end("a")
    rig.report(save, done=1)
    (export,) = rig.plan().exports
    assert (names_of(export.pages), names_of(export.absent)) == (named(rig, tokens)[:1], named(rig, tokens)[1:])
    assert not rig.half.has_pending


def test_while_a_prompt_is_computed_no_page_of_it_is_absent(pair: MakeHandoff) -> None:
    rig = pair(num_slots=2)
    computing(rig, pages=3.5)
    assert [len(export.pages) for export in rig.told] == [2]
    assert not any(export.absent for export in rig.told)


def test_a_prompt_is_told_of_once_though_steps_go_on(pair: MakeHandoff) -> None:
    rig = pair()
    rig.prefilled("a", prompt(2.5), "cmpl-1")
    assert not any(rig.plan().exports for _ in range(3))
    rig.run("b", prompt(1.5, first=1))
    assert sum(len(export.pages) for export in rig.told) == 3


# Who waits for whom


def test_an_export_without_readers_keeps_no_idle_engine_stepping(pair: MakeHandoff) -> None:
    rig = pair()
    rig.prefilled("a", prompt(2), "cmpl-1")
    assert held(rig) == (1, 1)
    assert not rig.half.has_pending
    counts = rig.counts
    assert (counts["open_operations"], counts["open_exports"]) == (0, 1)


def test_an_export_that_is_over_keeps_the_engine_stepping_until_no_rank_has_a_read_open(pair: MakeHandoff) -> None:
    rig = pair()
    (export,) = rig.prefilled("a", prompt(2), "cmpl-1")
    rig.answers = False
    rig.acknowledge("cmpl-1")
    assert rig.half.has_pending
    assert rig.plan().cancels == (export.op,)
    assert rig.half.has_pending
    assert (rig.counts["open_operations"], held(rig)) == (1, (0, 1))
    rig.read(export.op)
    assert not rig.half.has_pending
    rig.conserved()


def test_exported_pages_are_not_evicted_until_they_are_read(pair: MakeHandoff) -> None:
    rig, tokens = pair(num_slots=3), prompt(2)
    rig.prefilled("a", tokens, "cmpl-1")
    rig.run("b", prompt(3, first=1))  # gets the one slot that is left; the rig refuses a write to those that are read
    assert rig.half.tier.match(full_keys(rig, tokens), touch=False).num_pages == 2
    rig.acknowledge("cmpl-1")
    rig.settle()
    rig.run("c", prompt(3, first=2))
    assert rig.half.tier.match(full_keys(rig, tokens), touch=False).num_pages == 0


def test_the_pages_of_two_prompts_that_share_a_prefix_stay_until_both_are_read(pair: MakeHandoff) -> None:
    rig = pair(num_slots=3)
    rig.prefilled("a", prompt(2), "one")
    rig.prefilled("b", prompt(3), "other")
    shared = full_keys(rig, prompt(3))
    rig.acknowledge("one")
    rig.settle()
    assert {key for export in rig.exports.values() for key in names_of(export.pages)} == set(shared)
    rig.run("c", prompt(3, first=1))
    assert rig.half.tier.match(shared, touch=False).num_pages == 3
    rig.acknowledge("other")
    rig.settle()
    rig.run("d", prompt(3, first=1))
    assert rig.half.tier.match(shared, touch=False).num_pages == 0


def test_two_prompts_that_are_one_are_read_and_ended_apart(pair: MakeHandoff) -> None:
    rig = pair()
    first, second = (rig.prefilled(name, prompt(2.5), name) for name in ("one", "other"))
    assert [key for export in first for key in names_of(export.pages)] == named(rig, prompt(2.5))
    assert [key for export in second for key in names_of(export.pages)] == named(rig, prompt(2.5))
    rig.acknowledge("other")
    rig.settle()
    assert list(rig.exports) == [export.op for export in first]


# The end


def test_an_acknowledged_prompt_is_over_and_its_leases_are_given_back(pair: MakeHandoff) -> None:
    rig = pair()
    exports = rig.prefilled("a", prompt(2.5), "cmpl-1")
    rig.acknowledge("cmpl-1", "cmpl-1", "nobody's")
    rig.settle()
    assert rig.cancelled == [export.op for export in exports]
    assert held(rig) == (0, 0)
    assert outcomes(rig) == {"acknowledged": 1}
    rig.acknowledge("cmpl-1")
    assert not rig.plan().cancels


def test_a_prompt_may_be_acknowledged_while_it_is_computed(pair: MakeHandoff) -> None:
    rig = pair()
    rig.hand("a", prompt(2.5), to="cmpl-1")
    rig.compute("a", upto=PAGE)
    rig.settle()
    rig.acknowledge("cmpl-1")
    rig.compute("a")
    rig.settle()
    rig.end("a")
    rig.settle()
    assert [len(export.pages) for export in rig.told] == [1]
    assert (held(rig), outcomes(rig)) == ((0, 0), {"acknowledged": 1})


def test_a_prompt_that_was_acknowledged_between_its_end_and_its_last_page_is_over(pair: MakeHandoff) -> None:
    rig = pair()
    rig.hand("a", prompt(1.5), to="cmpl-1")
    rig.compute("a")
    (save,) = rig.plan().saves
    rig.end("a")
    rig.acknowledge("cmpl-1")
    rig.report(save)
    rig.settle()
    assert (rig.told, held(rig), outcomes(rig)) == ([], (0, 0), {"acknowledged": 1})


def test_pages_that_nobody_comes_for_are_given_back_when_their_time_is_over(
    pair: MakeHandoff, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    rig = pair()
    exports = rig.prefilled("a", prompt(2.5), "cmpl-1")
    clock.now_s += LEASE_S
    assert not rig.plan().cancels
    clock.now_s += 0.001
    with caplog.at_level(logging.WARNING):
        rig.settle()
    assert rig.cancelled == [export.op for export in exports]
    assert (held(rig), outcomes(rig)) == ((0, 0), {"expired": 1})
    assert "Nobody came for the pages of request cmpl-1 within 60 s" in caplog.text


def test_the_time_of_a_prompt_begins_when_it_ends(pair: MakeHandoff, clock: Clock) -> None:
    rig = pair()
    computing(rig)
    clock.now_s += 10 * LEASE_S
    rig.end("a")
    rig.settle()
    assert (held(rig)[0], rig.cancelled) == (1, [])


def test_each_prompt_has_a_time_of_its_own(pair: MakeHandoff, clock: Clock) -> None:
    rig = pair()
    first = rig.prefilled("a", prompt(1.5), "one")
    clock.now_s += LEASE_S / 2
    rig.prefilled("b", prompt(1.5, first=1), "other")
    clock.now_s += LEASE_S / 2 + 1
    rig.settle()
    assert rig.cancelled == [export.op for export in first]


def test_a_prompt_that_was_not_computed_to_its_end_is_read_by_nobody(pair: MakeHandoff) -> None:
    rig = pair()
    rig.hand("a", prompt(2.5), to="cmpl-1")
    rig.compute("a", upto=PAGE)
    rig.settle()
    assert held(rig)[0] == 1
    assert not rig.end("a", is_computed=False)
    rig.settle()
    assert (held(rig), outcomes(rig)) == ((0, 0), {"aborted": 1})


def test_a_second_prompt_of_the_same_name_ends_the_first(pair: MakeHandoff) -> None:
    rig = pair()
    first = rig.prefilled("a", prompt(2.5), "cmpl-1")
    second = rig.prefilled("b", prompt(1.5, first=1), "cmpl-1")
    assert rig.cancelled == [export.op for export in first]
    assert list(rig.exports) == [export.op for export in second]
    rig.acknowledge("cmpl-1")
    rig.settle()
    assert outcomes(rig) == {"expired": 1, "acknowledged": 1}


def test_a_reset_ends_what_may_be_read(pair: MakeHandoff) -> None:
    rig = pair()
    rig.prefilled("a", prompt(1.5), "one")
    computing(rig, "b", to="other")
    rig.half.reset("new weights")
    assert not rig.end("b")
    rig.settle()
    assert (held(rig), outcomes(rig)) == ((0, 0), {"aborted": 2})


def test_the_slots_of_exported_pages_are_given_back_after_a_reset_when_nobody_reads_them(pair: MakeHandoff) -> None:
    rig = pair()
    (export,) = rig.prefilled("a", prompt(2), "cmpl-1")
    rig.answers = False
    rig.half.reset("new weights")
    rig.plan()
    assert rig.half.tier.num_free == rig.half.tier.num_slots - 2
    rig.read(export.op)
    assert rig.half.tier.num_free == rig.half.tier.num_slots


def test_a_prompt_that_begins_after_a_reset_is_exported_under_the_new_namespace(pair: MakeHandoff) -> None:
    rig = pair()
    rig.half.reset("new weights")
    (export,) = rig.prefilled("a", prompt(2), "cmpl-1")
    assert export.spaces == rig.half.spaces
    assert names_of(export.pages) == named(rig, prompt(2))


def test_an_export_settles_when_the_last_rank_has_no_read_open(pair: MakeHandoff) -> None:
    rig = pair(ranks=(0, 1), consensus="off")
    (export,) = rig.prefilled("a", prompt(2), "cmpl-1")
    rig.answers = False
    rig.acknowledge("cmpl-1")
    rig.plan()
    rig.half.report([OpReport(0, export.op, 2, 2)])
    assert (rig.half.has_pending, held(rig)) == (True, (0, 1))
    rig.half.report([OpReport(1, export.op, 2, 2)])
    assert held(rig) == (0, 0)
    rig.exports.clear()
    rig.settle()
