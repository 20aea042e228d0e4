"""Agreement: one acknowledgement an operation, with the minimum over ranks, whatever order reports come in."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.consensus import Ack, Ledger
from vllm_hicache.errors import InvariantError
from vllm_hicache.names import MissReason, OpId
from vllm_hicache.plan import OpReport


def report(rank: int, op: int, done: int, held: int | None = None, reason: MissReason | None = None) -> OpReport:
    return OpReport(rank, OpId(op), done, done if held is None else held, reason)


def opened(num_ops: int, ranks: Iterable[int] = (0, 1)) -> Ledger:
    ledger = Ledger(ranks)
    assert [ledger.open() for _ in range(num_ops)] == list(range(1, num_ops + 1))
    return ledger


def test_operations_are_numbered_from_one_and_numbers_are_not_used_again() -> None:
    ledger = opened(1, [0])
    ledger.record(report(0, 1, 0))
    assert (ledger.open(), ledger.open()) == (2, 3)


def test_an_operation_is_acknowledged_when_the_last_rank_has_reported() -> None:
    ledger = opened(1, [0, 1, 7])
    assert [ledger.record(report(rank, 1, 3)) for rank in (7, 0)] == [None, None]
    assert ledger.num_open == 1
    assert ledger.record(report(1, 1, 3)) == Ack(OpId(1), 3, 3, None)
    assert ledger.num_open == 0


def test_the_slowest_rank_decides_and_says_why() -> None:
    ledger = opened(1, [0, 1, 2])
    ledger.record(report(0, 1, 6))
    ledger.record(report(1, 1, 4, 5, MissReason.CORRUPT))
    assert ledger.record(report(2, 1, 5, 5, MissReason.TIMEOUT)) == Ack(OpId(1), 4, 5, MissReason.CORRUPT)


def test_pages_done_and_pages_held_are_least_on_their_own() -> None:
    ledger = opened(1)
    ledger.record(report(0, 1, 2, 9, MissReason.CANCELLED))
    assert ledger.record(report(1, 1, 5, 5, MissReason.ABSENT)) == Ack(OpId(1), 2, 5, MissReason.CANCELLED)


def test_a_rank_that_failed_altogether_still_leads_to_an_acknowledgement() -> None:
    ledger = opened(1)
    ledger.record(report(0, 1, 0, reason=MissReason.ERROR))
    assert ledger.record(report(1, 1, 8)) == Ack(OpId(1), 0, 0, MissReason.ERROR)


def test_a_rank_counts_once_and_its_first_report_holds() -> None:
    ledger = opened(1)
    assert [ledger.record(report(0, 1, done)) for done in (3, 1, 9)] == [None] * 3
    assert ledger.record(report(1, 1, 5)) == Ack(OpId(1), 3, 3, None)


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
    assert ledger.record(report(1, 2, 6)) == Ack(OpId(2), 6, 6, None)
    assert ledger.num_open == 1
    ledger.record(report(1, 1, 4))
    assert ledger.record(report(0, 1, 9)) == Ack(OpId(1), 4, 4, None)


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
