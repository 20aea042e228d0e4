"""Agreement: what all ranks have reached is acknowledged, and consumed exactly, whatever order reports come in."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import ge

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hicache.consensus import Consumption, Ledger, Silence
from vllm_hicache.errors import InvariantError
from vllm_hicache.names import BlockId, MissReason, OpId, PageKey, Phase, RequestId, Slot
from vllm_hicache.plan import Ack, LoadOp, OpReport, PageMove

RUNNING, RECEIVED, SETTLED = Phase
OP = OpId(1)


def report(
    rank: int,
    op: int,
    done: int,
    held: int | None = None,
    reason: MissReason | None = None,
    phase: Phase = SETTLED,
) -> OpReport:
    return OpReport(rank, OpId(op), done, done if held is None else held, phase, reason)


def so_far(rank: int, done: int, phase: Phase = RUNNING, held: int | None = None) -> OpReport:
    """A report of operation 1 on its way."""
    return report(rank, 1, done, held, phase=phase)


def opened(num_ops: int, ranks: Iterable[int] = (0, 1), silence_s: float = float("inf")) -> Ledger:
    ledger = Ledger(ranks, silence_s)
    assert [ledger.open() for _ in range(num_ops)] == list(range(1, num_ops + 1))
    return ledger


# The last word of every rank


def test_operations_are_numbered_from_one_and_numbers_are_not_used_again() -> None:
    ledger = opened(1, [0])
    ledger.record(report(0, 1, 0))
    assert (ledger.open(), ledger.open()) == (2, 3)


def test_an_operation_is_acknowledged_when_the_last_rank_has_reported() -> None:
    ledger = opened(1, [0, 1, 7])
    assert [ledger.record(report(rank, 1, 3)) for rank in (7, 0)] == [None, None]
    assert (ledger.num_open, ledger.num_ranks) == (1, 3)
    assert ledger.record(report(1, 1, 3)) == Ack(OP, 3, 3)
    assert ledger.num_open == 0


def test_the_slowest_rank_decides_and_says_why() -> None:
    ledger = opened(1, [0, 1, 2])
    ledger.record(report(0, 1, 6))
    ledger.record(report(1, 1, 4, 5, MissReason.CORRUPT))
    expected = Ack(OP, 4, 5, reason=MissReason.CORRUPT)
    assert ledger.record(report(2, 1, 5, 5, MissReason.TIMEOUT)) == expected


def test_pages_done_and_pages_held_are_least_on_their_own() -> None:
    ledger = opened(1)
    ledger.record(report(0, 1, 2, 9, MissReason.CANCELLED))
    expected = Ack(OP, 2, 5, reason=MissReason.CANCELLED)
    assert ledger.record(report(1, 1, 5, 5, MissReason.ABSENT)) == expected


def test_a_rank_that_failed_altogether_still_leads_to_an_acknowledgement() -> None:
    ledger = opened(1)
    ledger.record(report(0, 1, 0, reason=MissReason.ERROR))
    assert ledger.record(report(1, 1, 8)) == Ack(OP, 0, 0, reason=MissReason.ERROR)


def test_a_report_that_comes_after_the_acknowledgement_is_ignored() -> None:
    ledger = opened(2)
    for rank in (0, 1):
        ledger.record(report(rank, 1, 4))
    assert [ledger.record(report(rank, 1, 0)) for rank in (0, 1)] == [None, None]
    assert ledger.num_open == 1


@pytest.mark.parametrize(("rank", "op"), [(2, 1), (-1, 1), (0, 2), (0, 99)])
def test_an_unknown_rank_or_an_operation_never_opened_is_a_bug_with_numbers(rank: int, op: int) -> None:
    ledger = opened(1)
    with pytest.raises(InvariantError, match=rf"rank {rank} for operation {op}, but ranks are \[0, 1\] and 1 "):
        ledger.record(report(rank, op, 0))
    assert ledger.num_open == 1


@pytest.mark.parametrize("op", [0, -1])
def test_a_number_below_the_first_is_an_operation_never_opened(op: int) -> None:
    with pytest.raises(InvariantError, match=f"operation {op}"):
        opened(1).record(report(0, op, 0))


def test_ranks_that_are_ahead_consume_the_acknowledged_length_operation_by_operation() -> None:
    ledger = opened(3)
    ahead = [ledger.record(report(0, op, 6)) for op in (1, 2, 3)]
    behind = [ledger.record(report(1, op, done)) for op, done in ((1, 4), (2, 6), (3, 0))]
    assert ahead == [None] * 3
    assert [(ack.op, ack.pages_done) for ack in behind if ack] == [(1, 4), (2, 6), (3, 0)]


def test_a_later_operation_may_be_acknowledged_first() -> None:
    ledger = opened(2)
    ledger.record(report(0, 2, 6))
    assert ledger.record(report(1, 2, 6)) == Ack(OpId(2), 6, 6)
    assert ledger.num_open == 1
    ledger.record(report(1, 1, 4))
    assert ledger.record(report(0, 1, 9)) == Ack(OP, 4, 4)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=6), st.randoms())
def test_any_order_with_duplicates_gives_each_minimum_once(lengths: list[list[int]], rng: random.Random) -> None:
    ledger = opened(len(lengths), [0, 1, 2])
    reports = [report(rank, op + 1, done) for op, dones in enumerate(lengths) for rank, done in enumerate(dones)] * 2
    rng.shuffle(reports)
    acks = [ack for each in reports if (ack := ledger.record(each))]
    assert sorted((ack.op, ack.pages_done) for ack in acks) == [
        (op + 1, min(dones)) for op, dones in enumerate(lengths)
    ]
    assert ledger.num_open == 0


# On the way


def test_what_has_come_to_all_ranks_is_acknowledged_again_and_again_while_it_grows() -> None:
    ledger = opened(1)
    assert ledger.record(so_far(1, 6)) is None
    assert ledger.record(so_far(0, 4)) == Ack(OP, 4, 4, RUNNING)
    assert ledger.record(so_far(0, 6)) == Ack(OP, 6, 6, RUNNING)
    assert ledger.num_open == 1


def test_a_rank_that_repeats_itself_or_is_overtaken_by_its_own_report_counts_once() -> None:
    ledger = opened(1)
    ledger.record(so_far(1, 6))
    assert ledger.record(so_far(0, 4)) == Ack(OP, 4, 4, RUNNING)
    assert [ledger.record(each) for each in (so_far(0, 4), so_far(0, 2), so_far(1, 6), so_far(1, 0))] == [None] * 4
    assert ledger.record(so_far(0, 5)) == Ack(OP, 5, 5, RUNNING)


def test_pages_held_never_fall_when_reports_overtake_each_other() -> None:
    ledger = opened(1)
    ledger.record(so_far(1, 9))
    assert ledger.record(so_far(0, 2, held=6)) == Ack(OP, 2, 6, RUNNING)
    assert ledger.record(so_far(0, 3, held=4)) == Ack(OP, 3, 6, RUNNING)


def test_why_a_rank_has_ended_is_told_while_others_that_are_as_short_are_still_on_their_way() -> None:
    ledger = opened(1)
    ledger.record(so_far(0, 2, held=6))
    assert ledger.record(report(1, 1, 2, 4, MissReason.ABSENT)) == Ack(OP, 2, 4, RUNNING, MissReason.ABSENT)
    assert ledger.record(so_far(0, 2, held=7)) is None


def test_a_reason_alone_is_acknowledged_too() -> None:
    ledger = opened(1)
    ledger.record(so_far(0, 2, held=4))
    assert ledger.record(so_far(1, 2, held=4)) == Ack(OP, 2, 4, RUNNING)
    assert ledger.record(report(1, 1, 2, 4, MissReason.ABSENT)) == Ack(OP, 2, 4, RUNNING, MissReason.ABSENT)


def test_an_end_that_overtakes_what_came_before_it_keeps_its_phase_and_reason() -> None:
    ledger = opened(1)
    ledger.record(report(0, 1, 3, 3, MissReason.ABSENT))
    ledger.record(so_far(0, 2))
    assert ledger.record(report(1, 1, 8)) == Ack(OP, 3, 3, SETTLED, MissReason.ABSENT)


def test_pages_done_are_fixed_when_all_have_received_and_pages_held_still_grow() -> None:
    ledger = opened(1)
    ledger.record(report(0, 1, 2, 2, MissReason.TIMEOUT, RECEIVED))
    assert ledger.record(so_far(1, 8)) == Ack(OP, 2, 2, RUNNING, MissReason.TIMEOUT)
    assert ledger.record(so_far(1, 8, RECEIVED)) == Ack(OP, 2, 2, RECEIVED, MissReason.TIMEOUT)
    assert ledger.record(report(0, 1, 3, 6, None, RECEIVED)) == Ack(OP, 2, 6, RECEIVED, MissReason.TIMEOUT)
    ledger.record(report(0, 1, 4, 7))
    assert ledger.record(report(1, 1, 8)) == Ack(OP, 2, 7, SETTLED, MissReason.TIMEOUT)
    assert ledger.num_open == 0


def test_an_operation_is_open_until_the_last_rank_has_settled() -> None:
    ledger = opened(1)
    ledger.record(report(0, 1, 4))
    assert ledger.record(so_far(1, 4, RECEIVED)) == Ack(OP, 4, 4, RECEIVED)
    assert ledger.num_open == 1
    assert ledger.record(so_far(1, 4, SETTLED)) == Ack(OP, 4, 4, SETTLED)
    assert ledger.num_open == 0


@st.composite
def histories(draw: st.DrawFn) -> list[list[OpReport]]:
    """For each of some ranks, growing reports of operation 1, whose last says that it has settled."""
    told = []
    for rank in range(draw(st.integers(1, 4))):
        dones = sorted(draw(st.lists(st.integers(0, 9), min_size=1, max_size=5)))
        ended = draw(st.integers(0, len(dones) - 1))
        dones[ended:] = dones[ended : ended + 1] * (len(dones) - ended)
        phases = [RUNNING] * ended + [RECEIVED] * (len(dones) - ended - 1) + [SETTLED]
        told.append([so_far(rank, *each) for each in zip(dones, phases, strict=True)])
    return told


@settings(deadline=None)
@given(histories(), st.randoms())
def test_in_any_order_acknowledgements_only_grow_and_end_with_the_minimum(
    told: list[list[OpReport]], rng: random.Random
) -> None:
    ledger = opened(1, range(len(told)))
    reports = [each for of_rank in told for each in of_rank] * 2
    rng.shuffle(reports)
    acks = [ack for each in reports if (ack := ledger.record(each))]
    least = min(of_rank[-1].pages_done for of_rank in told)
    assert (acks[-1].pages_done, acks[-1].phase, ledger.num_open) == (least, SETTLED, 0)
    growth = [(ack.pages_done, ack.pages_held, ack.phase) for ack in acks]
    assert all(now != before and all(map(ge, now, before)) for before, now in pairwise(growth))
    assert len({ack.pages_done for ack in acks if ack.phase >= RECEIVED}) == 1


# Silence


def test_a_rank_is_silent_after_the_time_and_not_before_and_asked_again_as_late() -> None:
    ledger = opened(1, [0, 1, 2], silence_s=30)
    ledger.record(so_far(0, 4, RECEIVED), 100)
    assert ledger.silences(129.9) == []
    assert ledger.silences(130) == [Silence(OP, (1, 2), 30, is_late=True)]
    assert [ledger.silences(now_s) for now_s in (130, 159.9)] == [[], []]
    assert ledger.silences(160) == [Silence(OP, (1, 2), 60, is_late=True)]


def test_who_speaks_is_not_silent_and_who_repeats_itself_says_nothing() -> None:
    ledger = opened(1, [0, 1, 2], silence_s=30)
    ledger.record(so_far(0, 4, SETTLED), 100)
    ledger.record(so_far(1, 3), 120)
    ledger.record(so_far(1, 3), 140)
    assert ledger.silences(149.9) == []
    assert ledger.silences(150) == [Silence(OP, (1, 2), 50, is_late=True)]
    ledger.record(so_far(1, 4, SETTLED), 160)
    assert ledger.silences(189.9) == []
    assert ledger.silences(190) == [Silence(OP, (2,), 90, is_late=True)]


def test_of_several_operations_each_is_silent_on_its_own() -> None:
    ledger = opened(2, silence_s=10)
    ledger.record(report(0, 2, 4), 5)
    ledger.record(report(0, 1, 4), 8)
    assert ledger.silences(14.9) == []
    assert ledger.silences(15) == [Silence(OpId(2), (1,), 10, is_late=True)]
    assert ledger.silences(18) == [Silence(OP, (1,), 10, is_late=True)]
    ledger.record(report(1, 2, 4), 19)
    assert ledger.silences(28) == [Silence(OP, (1,), 20, is_late=True)]


def test_ranks_of_which_none_has_ended_are_asked_but_none_is_late() -> None:
    ledger = opened(1, silence_s=10)
    assert ledger.silences(9.9) == []
    assert ledger.silences(10) == [Silence(OP, (0, 1), 10, is_late=False)]
    ledger.record(so_far(0, 9), 12)
    assert ledger.silences(22) == [Silence(OP, (0, 1), 10, is_late=False)]


def test_ranks_that_all_wait_for_the_same_end_are_not_late() -> None:
    ledger = opened(1, silence_s=1)
    for rank in (0, 1):
        ledger.record(so_far(rank, 2, RECEIVED), 0)
    assert ledger.silences(100) == [Silence(OP, (), 100, is_late=False)]
    ledger.record(so_far(1, 2, SETTLED), 101)
    assert ledger.silences(102) == [Silence(OP, (0,), 102, is_late=True)]


def test_an_operation_that_has_settled_is_silent_no_more() -> None:
    ledger = opened(1, silence_s=1)
    for rank in (0, 1):
        ledger.record(report(rank, 1, 2), 0)
    assert ledger.silences(100) == []


def test_a_rank_that_never_spoke_is_given_up_with_nothing_done() -> None:
    ledger = opened(1)
    ledger.record(report(0, 1, 6))
    assert ledger.give_up(OP) == Ack(OP, 0, 0, RECEIVED, MissReason.TIMEOUT)


def test_what_is_given_up_counts_as_far_as_all_had_come_and_stays_open_until_all_have_settled() -> None:
    ledger = opened(1)
    ledger.record(so_far(0, 4))
    ledger.record(report(1, 1, 9))
    assert ledger.give_up(OP) == Ack(OP, 4, 4, RECEIVED, MissReason.TIMEOUT)
    assert (ledger.give_up(OP), ledger.num_open) == (None, 1)
    assert ledger.record(so_far(0, 5)) == Ack(OP, 4, 5, RECEIVED, MissReason.TIMEOUT)
    assert ledger.record(so_far(0, 7, RECEIVED)) == Ack(OP, 4, 7, RECEIVED, MissReason.TIMEOUT)
    assert ledger.record(so_far(0, 7, SETTLED)) == Ack(OP, 4, 7, SETTLED, MissReason.TIMEOUT)
    assert (ledger.give_up(OP), ledger.num_open) == (None, 0)


# Consumption


def load(num_pages: int = 6, request: str | None = "r", unserved: Sequence[int] = ()) -> LoadOp:
    """Page n lies in blocks 2n and 2n + 1."""
    pages = tuple(PageMove(PageKey(bytes(32)), Slot(n), (BlockId(2 * n), BlockId(2 * n + 1))) for n in range(num_pages))
    request_id = RequestId(request) if request is not None else None
    return LoadOp(OP, b"", request_id, pages, None, tuple(map(BlockId, unserved)))


def begun(rank: int = 0, of: LoadOp | None = None) -> Consumption:
    consumption = Consumption()
    consumption.begin(OP, rank, of or load())
    return consumption


def blocks(pages: Iterable[int]) -> set[int]:
    return {block for page in pages for block in (2 * page, 2 * page + 1)}


NOTHING: tuple[frozenset[RequestId], frozenset[BlockId]] = (frozenset(), frozenset())


def test_stage_0_has_4_ready_and_stage_1_has_6_both_consume_4_and_then_6() -> None:
    ledger, stages = opened(1), [begun(0), begun(1)]
    acks = []
    for ready in (so_far(1, 6, SETTLED), so_far(0, 4), so_far(0, 6, SETTLED)):
        stages[ready.rank].ready(ready)
        ack = ledger.record(ready)
        if ack is not None:
            acks.append([stage.consume(ack) for stage in stages])
    assert acks == [[Ack(OP, 4, 4, RUNNING)] * 2, [Ack(OP, 6, 6, SETTLED)] * 2]
    assert [stage.take() for stage in stages] == [({"r"}, frozenset())] * 2
    assert [stage.num_open for stage in stages] == [0, 0]


def test_a_load_is_received_only_when_this_rank_no_longer_writes_and_its_length_is_acknowledged() -> None:
    own, acked = so_far(0, 6, RECEIVED), Ack(OP, 6, 6, RECEIVED)
    first, second = begun(), begun()
    first.ready(own)
    assert first.take() == NOTHING
    first.consume(acked)
    second.ready(so_far(0, 6))
    second.consume(acked)
    assert second.take() == NOTHING
    second.ready(own)
    assert [first.take(), second.take()] == [({"r"}, frozenset())] * 2
    assert [first.take(), second.take()] == [NOTHING] * 2


def test_an_acknowledgement_on_the_way_gives_no_blocks_back() -> None:
    consumption = begun()
    consumption.ready(so_far(0, 6, RECEIVED))
    consumption.consume(Ack(OP, 6, 6, RUNNING))
    assert consumption.take() == NOTHING


def test_blocks_beyond_the_acknowledged_length_are_invalid_although_this_rank_has_more() -> None:
    consumption = begun(of=load(unserved=[90, 91]))
    consumption.ready(so_far(0, 6, SETTLED))
    consumption.consume(Ack(OP, 4, 6, RECEIVED, MissReason.ABSENT))
    assert consumption.take() == ({"r"}, blocks([4, 5]) | {90, 91})
    consumption.consume(Ack(OP, 4, 6, SETTLED, MissReason.ABSENT))
    assert (consumption.take(), consumption.num_open) == (NOTHING, 0)


def test_no_more_is_consumed_than_this_rank_has() -> None:
    consumption = begun()
    consumption.ready(so_far(0, 3, RECEIVED))
    assert consumption.consume(Ack(OP, 5, 6, RECEIVED)) == Ack(OP, 3, 6, RECEIVED)
    assert consumption.take() == ({"r"}, blocks([3, 4, 5]))


def test_what_this_rank_still_gets_after_others_gave_up_does_not_change_the_length() -> None:
    consumption = begun()
    consumption.ready(so_far(0, 2))
    consumption.consume(Ack(OP, 2, 2, RECEIVED, MissReason.TIMEOUT))
    consumption.ready(so_far(0, 5, RECEIVED))
    assert consumption.take() == ({"r"}, blocks([2, 3, 4, 5]))


def test_an_acknowledgement_of_an_operation_that_this_rank_knows_nothing_of_is_not_consumed() -> None:
    consumption = begun()
    consumption.ready(so_far(0, 6, SETTLED))
    consumption.consume(Ack(OP, 6, 6))
    assert [consumption.consume(Ack(op, 6, 6)) for op in (OP, OpId(2))] == [None, None]


@pytest.mark.parametrize("of", [None, load(request=None)], ids=["save or flush", "prefetch"])
def test_what_no_request_waits_for_is_consumed_and_gives_nothing_back(of: LoadOp | None) -> None:
    consumption = Consumption()
    consumption.begin(OP, 0, of)
    consumption.ready(so_far(0, 2, SETTLED))
    assert consumption.consume(Ack(OP, 1, 1)) == Ack(OP, 1, 1)
    assert (consumption.take(), consumption.num_open) == (NOTHING, 0)


def test_a_rank_repeats_its_last_word_on_what_it_is_asked_about() -> None:
    consumption = begun(rank=3)
    consumption.begin(OpId(2), 3)
    assert consumption.repeated([OP, OpId(9)]) == [OpReport(3, OP, 0, 0, RUNNING)]
    consumption.ready(so_far(3, 4, RECEIVED))
    assert consumption.repeated([OpId(9), OP]) == [so_far(3, 4, RECEIVED)]
    consumption.consume(Ack(OP, 4, 4, SETTLED))
    assert consumption.repeated([OP]) == []


@settings(deadline=None)
@given(histories(), st.randoms())
def test_all_ranks_give_back_the_same_blocks_whatever_order_reports_and_acknowledgements_take(
    told: list[list[OpReport]], rng: random.Random
) -> None:
    ledger = opened(1, range(len(told)))
    ranks, waiting = [begun(rank, load(9)) for rank in range(len(told))], [list(of_rank) for of_rank in told]
    unread: list[list[Ack]] = [[] for _ in told]
    while any(waiting) or any(unread):
        rank = rng.choice([at for at in range(len(told)) if waiting[at] or unread[at]])
        if waiting[rank] and (not unread[rank] or rng.random() < 0.5):
            ready = waiting[rank].pop(0)
            ranks[rank].ready(ready)
            ack = ledger.record(ready)
            for queue in unread:
                queue += [ack] * (ack is not None)
        else:
            ack = unread[rank].pop(0)
            assert ranks[rank].consume(ack) == ack
    least = min(of_rank[-1].pages_done for of_rank in told)
    assert [rank.take() for rank in ranks] == [({"r"}, blocks(range(least, 9)))] * len(told)
    assert [rank.num_open for rank in ranks] == [0] * len(told)
