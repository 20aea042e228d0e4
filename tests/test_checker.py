"""The rank checker: every kind of difference is named once, and equal ranks never differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hicache import checker
from vllm_hicache.checker import Difference, DifferenceKind, RankChecker, aligned, compare
from vllm_hicache.entries import Entry, EntryKind
from vllm_hicache.errors import InvariantError
from vllm_hicache.names import OpId, PageKey, Phase, Slot
from vllm_hicache.plan import Ack, FlushOp, LoadOp, OpReport, PageMove, SaveOp
from vllm_hicache.ranklog import RankLog

CAPACITY, HIT, EVICT, LOCK, ACK, UNLOCK, DONE = EntryKind
Row = tuple[int, EntryKind, int]
DEADLINE_S = 5.0


def entries(rows: Sequence[Row], start_s: float = 0.0) -> list[Entry]:
    """Entries a second apart."""
    return [Entry(OpId(op), kind, value, start_s + index) for index, (op, kind, value) in enumerate(rows)]


def life(op: int, done: int = 4) -> list[Row]:
    """A load of four pages from its beginning to its end."""
    return [(op, HIT, 4), (op, LOCK, 4), (op, DONE, done), (op, ACK, 4), (op, UNLOCK, 4)]


def lives(ops: Sequence[int]) -> list[Row]:
    return [row for op in ops for row in life(op)]


def told(*logs: Sequence[Row]) -> list[str]:
    """What an online checker says of whole logs, delivered rank by rank."""
    one = RankChecker(range(len(logs)))
    return [str(each) for rank, rows in enumerate(logs) for each in one.take(rank, entries(rows))]


def changed(rows: Sequence[Row], index: int, value: int) -> list[Row]:
    op, kind, _ = rows[index]
    return [*rows[:index], (op, kind, value), *rows[index + 1 :]]


def test_equal_ranks_do_not_differ() -> None:
    assert told(lives([1, 2]), lives([1, 2]), lives([1, 2])) == []


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ((0, CAPACITY, 100), "start: ranks differ in capacity: rank 0 has 100, rank 1 has 6"),
        ((7, HIT, 4), "operation 7: ranks differ in hit length: rank 0 has 4, rank 1 has 6"),
        ((7, EVICT, 4), "operation 7: ranks differ in eviction eligibility: rank 0 has 4, rank 1 has 6"),
        ((7, ACK, 4), "operation 7: ranks differ in ack consumption: rank 0 has 4, rank 1 has 6"),
        ((7, DONE, 4), "operation 7: ranks differ in restore completion: rank 0 has 4, rank 1 has 6"),
    ],
)
def test_each_kind_of_value_that_differs_is_named(row: Row, sentence: str) -> None:
    around = life(1), life(2)
    assert told([*around[0], row, *around[1]], [*around[0], (*row[:2], 6), *around[1]]) == [sentence]


@pytest.mark.parametrize("kind", [LOCK, UNLOCK])
def test_numbers_of_slots_that_differ_are_a_difference_of_locks(kind: EntryKind) -> None:
    [sentence] = told([(7, kind, 3)], [(7, kind, 2)])
    assert sentence == (
        f"operation 7: ranks differ in lock order: rank 0: {kind} of operation 7 with 3 slots, "
        f"rank 1: {kind} of operation 7 with 2 slots"
    )


def test_unlocks_in_another_order_are_named_once() -> None:
    begun = [*life(1), (5, LOCK, 1), (6, LOCK, 1)]
    one, two = (5, UNLOCK, 1), (6, UNLOCK, 1)
    assert told([*begun, one, two, *life(7)], [*begun, two, one, *life(7)]) == [
        "operation 5: ranks differ in lock order: rank 0: unlock of operation 5, rank 1: unlock of operation 6"
    ]


def test_an_entry_left_out_is_one_difference_and_later_ones_are_still_found() -> None:
    whole = [*life(1), *life(2), *life(3), *life(4)]
    other = changed([*whole[:8], *whole[9:]], 14, 2)
    assert told(whole, other) == [
        "operation 2: ranks differ in lock order: rank 0: ack of operation 2, rank 1: unlock of operation 2",
        "operation 4: ranks differ in hit length: rank 0 has 4, rank 1 has 2",
    ]


def test_an_operation_that_one_rank_has_alone_is_one_difference() -> None:
    assert told([*life(1), *life(2), *life(3)], [*life(1), *life(3)]) == [
        "operation 2: ranks differ in lock order: rank 0: hit of operation 2, rank 1: hit of operation 3"
    ]


def test_different_entries_in_the_same_place_are_one_difference() -> None:
    assert told([*life(1), (2, LOCK, 1), *life(4)], [*life(1), (3, LOCK, 1), *life(4)]) == [
        "operation 2: ranks differ in lock order: rank 0: lock of operation 2, rank 1: lock of operation 3"
    ]


def test_after_a_swap_the_counterpart_that_comes_late_is_no_difference() -> None:
    one = RankChecker([0, 1])
    assert one.take(0, entries([(5, UNLOCK, 1)])) == []
    assert len(one.take(1, entries([(6, UNLOCK, 1)]))) == 1
    assert one.take(0, entries([(6, UNLOCK, 1)])) == []
    assert one.take(0, entries(life(7))) == []
    assert one.take(1, entries([(5, UNLOCK, 1), *life(7)])) == []


def test_ranks_without_anything_in_common_differ_at_most_once_an_operation() -> None:
    sentences = told(lives(range(1, 100)), lives(range(100, 200)))
    assert 1 <= len(sentences) < 100
    assert len(sentences) == len(set(sentences))


def test_ranks_find_together_again_after_a_stretch_without_anything_in_common() -> None:
    tail = changed(life(500), 0, 1)
    sentences = told([*lives(range(1, 33)), *life(500)], [*lives(range(100, 132)), *tail])
    assert sentences[-1] == "operation 500: ranks differ in hit length: rank 0 has 4, rank 1 has 1"


def test_one_kind_of_difference_is_told_once_an_operation() -> None:
    assert len(told([(7, ACK, 1), (7, ACK, 2)], [(7, ACK, 2), (7, ACK, 3)])) == 1


def test_completions_are_compared_by_operation_in_whatever_order() -> None:
    one, two = [(1, DONE, 4), (2, DONE, 5), (3, DONE, 6)], [(3, DONE, 6), (2, DONE, 1), (1, DONE, 4)]
    assert told(one, two) == ["operation 2: ranks differ in restore completion: rank 0 has 5, rank 1 has 1"]


def test_nothing_is_said_before_all_ranks_have_delivered() -> None:
    one = RankChecker([0, 1, 2])
    assert one.take(0, entries([(1, HIT, 4), (1, DONE, 4)])) == []
    assert one.take(2, entries([(1, HIT, 3), (1, DONE, 3)])) == []
    assert [each.kind for each in one.take(1, entries([(1, HIT, 4), (1, DONE, 4)]))] == ["hit length", DONE.value]


def test_ranks_with_the_same_value_are_told_together() -> None:
    logs = [[(7, HIT, value)] for value in (4, 4, 4, 2, 4, 3)]
    assert told(*logs) == [
        "operation 7: ranks differ in hit length: ranks 0-2 and 4 have 4, rank 3 has 2, rank 5 has 3"
    ]


def test_the_first_difference_is_the_earliest_and_stays() -> None:
    one = RankChecker([0, 1])
    rows = [*life(1), *life(2)]
    one.take(0, entries(rows))
    found = one.take(1, entries(changed(changed(rows, 2, 1), 5, 1)))
    assert [each.op for each in found] == [1, 2]
    one.take(0, entries([(3, HIT, 1)], 100.0))
    one.take(1, entries([(3, HIT, 2)], 100.0))
    assert one.first is found[0]


def test_a_difference_has_the_time_of_the_last_rank() -> None:
    one = RankChecker([0, 1])
    one.take(0, [Entry(OpId(1), HIT, 1, 20.0)])
    assert [each.time_s for each in one.take(1, [Entry(OpId(1), HIT, 2, 10.0)])] == [20.0]


def test_a_rank_that_nobody_knows_is_refused() -> None:
    with pytest.raises(InvariantError, match=r"1 entries of rank 7, but ranks are \[0, 1\]"):
        RankChecker([0, 1]).take(7, entries([(1, HIT, 1)]))


def test_silence_is_a_missing_report() -> None:
    one = RankChecker([0, 1, 2])
    difference = one.silent(OpId(17), [1, 2], 5.0)
    assert str(difference) == "operation 17: missing report: ranks 1-2: silent for 5.0 s"
    assert difference.kind is DifferenceKind.MISSING
    assert one.first is difference


def test_what_a_silent_rank_keeps_waiting_is_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "MAX_WAITING", 10)
    one = RankChecker([0, 1])
    rows = [(op, HIT, 1) for op in range(1, 26)]
    for row in rows:
        one.take(0, entries([row]))
    assert one.num_unchecked == 15
    assert one.take(1, entries(changed(changed(rows, 14, 7), 15, 7))) == [
        Difference(OpId(16), DifferenceKind.HIT, {0: 1, 1: 7}, 15.0)
    ]


def test_completions_that_wait_are_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "MAX_WAITING", 10)
    one = RankChecker([0, 1])
    one.take(0, entries([(op, DONE, 1) for op in range(1, 26)]))
    assert one.num_unchecked == 15
    late = [one.take(1, entries([(op, DONE, 7)])) for op in range(1, 26)]
    assert [each.op for found in late for each in found] == list(range(16, 26))
    assert one.num_unchecked == 15


def sentences(logs: Mapping[int, Sequence[Entry]], deadline_s: float = DEADLINE_S) -> list[str]:
    return [str(each) for each in compare(logs, deadline_s)]


def test_whole_logs_are_compared_by_the_same_rules() -> None:
    rows = [(0, CAPACITY, 9), *lives(range(1, 3000))]
    logs = {0: entries(rows), 3: entries(changed(rows, 6001, 2))}
    assert sentences(logs) == ["operation 1201: ranks differ in hit length: rank 0 has 4, rank 3 has 2"]


def test_differences_of_whole_logs_come_by_time() -> None:
    rows = lives([1, 2, 3, 4])
    other = changed(changed(changed(rows, 2, 1), 5, 1), 15, 1)
    assert [each.op for each in compare({0: entries(rows), 1: entries(other)}, DEADLINE_S)] == [1, 2, 4]


def test_a_missing_report_comes_among_the_others_by_time() -> None:
    logs = {0: reports(1.0, 30.0), 1: reports(None, 30.0)}
    logs[1][-1] = Entry(OpId(2), LOCK, 7, 30.0)
    assert [each.kind for each in compare(logs, DEADLINE_S)] == ["missing report", "lock order"]


def test_a_log_that_ends_early_is_no_difference() -> None:
    rows = lives([1, 2])
    assert sentences({0: entries(rows), 1: entries(rows[:4])}) == []


def test_a_log_that_was_cut_is_compared_from_its_first_whole_operation_on() -> None:
    rows = [(0, CAPACITY, 9), *lives([1, 2, 3])]
    for num_lost in range(1, 11):
        cut = entries(changed(rows, 11, 2))[num_lost:]
        assert sentences({0: entries(rows), 1: cut}) == [
            "operation 3: ranks differ in hit length: rank 0 has 4, rank 1 has 2"
        ]


def test_nothing_is_left_of_logs_without_an_operation_in_common() -> None:
    left = aligned({0: entries([(0, CAPACITY, 9), *life(1)]), 1: entries(life(2))})
    assert [entry.kind for log in left.values() for entry in log] == [DONE, DONE]


def reports(done_s: float | None, end_s: float) -> list[Entry]:
    """A log that begins operation 1 at 0 s, ends it at `done_s`, and goes on to `end_s`."""
    done = [] if done_s is None else [Entry(OpId(1), DONE, 4, done_s)]
    tail = Entry(OpId(2), LOCK, 1, end_s)
    return [Entry(OpId(1), LOCK, 4, 0.0), *done, tail]


@pytest.mark.parametrize(("done_s", "waited"), [(None, "29.0"), (6.5, "5.5")])
def test_a_report_that_is_missing_or_late_is_named(done_s: float | None, waited: str) -> None:
    logs = {0: reports(1.0, 30.0), 1: reports(done_s, 30.0), 2: reports(2.0, 30.0)}
    assert sentences(logs) == [f"operation 1: missing report: rank 1: silent for {waited} s"]


def test_a_report_within_the_deadline_is_not_missing() -> None:
    assert sentences({0: reports(1.0, 30.0), 1: reports(6.0, 30.0)}) == []


def test_a_report_is_not_missed_of_a_log_that_ends_within_the_deadline() -> None:
    assert sentences({0: reports(1.0, 30.0), 1: reports(None, 6.0)}) == []


def test_a_report_is_not_missed_of_an_operation_whose_beginning_was_cut_off() -> None:
    assert sentences({0: reports(1.0, 30.0), 1: reports(None, 30.0)[1:]}) == []


def random_logs(num_ranks: int, rng: Random) -> dict[int, RankLog]:
    """Ranks that get the same random plans and acknowledgements; each ends its work when it likes."""
    logs = {rank: RankLog(rank, 6) for rank in range(num_ranks)}
    for log in logs.values():
        log.agreed(6)
    vouched: dict[OpId, dict[int, int]] = {}
    for number in range(1, 30):
        moves = tuple(
            PageMove(PageKey(bytes([rng.randrange(4)]) * 32), Slot(rng.randrange(6)), (), 0, rng.random() < 0.4)
            for _ in range(rng.randint(1, 4))
        )
        op = OpId(number)
        plan = rng.choice([LoadOp(op, b"", None, moves), SaveOp(op, moves), FlushOp(op, b"", moves)])
        vouched[op] = {rank: log.begin(plan) for rank, log in logs.items()}
        while vouched and rng.random() < 0.5:
            settled = rng.choice(sorted(vouched))
            finish(logs, settled, min(vouched.pop(settled).values()), rng)
    return logs


def finish(logs: Mapping[int, RankLog], op: OpId, num_pages: int, rng: Random) -> None:
    for phase in (Phase.RUNNING, Phase.SETTLED):
        for rank in rng.sample(sorted(logs), len(logs)):
            logs[rank].done(OpReport(rank, op, num_pages, num_pages, phase))
        for log in logs.values():
            log.consume(Ack(op, num_pages, num_pages, phase))


def deliver(logs: Mapping[int, RankLog], rng: Random) -> list[Difference]:
    """Hand all entries to a checker, completions shuffled among the others, in parts of random lengths."""
    one = RankChecker(logs)
    left = {rank: shuffled(log.take(), rng) for rank, log in logs.items()}
    found = list[Difference]()
    while any(left.values()):
        rank = rng.choice([rank for rank, rest in left.items() if rest])
        num = rng.randint(1, 9)
        found += one.take(rank, left[rank][:num])
        del left[rank][:num]
    return found


def shuffled(taken: Sequence[Entry], rng: Random) -> list[Entry]:
    log = [entry for entry in taken if entry.kind != DONE]
    for entry in (each for each in taken if each.kind == DONE):
        log.insert(rng.randint(0, len(log)), entry)
    return log


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(0, 2**32))
def test_ranks_with_the_same_plans_and_acknowledgements_never_differ(num_ranks: int, seed: int) -> None:
    rng = Random(seed)
    logs = random_logs(num_ranks, rng)
    assert len({log.digest for log in logs.values()}) == 1
    assert all(log.num_entries > 58 for log in logs.values())
    assert deliver(logs, rng) == []


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(0, 2**32))
def test_any_changed_value_is_found_and_is_the_only_difference(num_ranks: int, seed: int) -> None:
    rng = Random(seed)
    logs = {rank: list(log.take()) for rank, log in random_logs(num_ranks, rng).items()}
    rank = rng.randrange(num_ranks)
    index = rng.randrange(len(logs[rank]))
    old = logs[rank][index]
    logs[rank][index] = Entry(old.op, old.kind, old.value + 1, old.time_s)
    [found] = compare(logs, 1000.0)
    assert found.op == old.op
    assert len(set(found.values.values())) == 2


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(0, 2**32))
def test_any_ordered_entry_left_out_or_swapped_is_found_where_it_was(num_ranks: int, seed: int) -> None:
    rng = Random(seed)
    logs = {rank: list(log.take()) for rank, log in random_logs(num_ranks, rng).items()}
    rank = rng.randrange(num_ranks)
    log = logs[rank] = [entry for entry in logs[rank] if entry.kind != DONE]
    # Neither the first entry, without which a log counts as cut, nor one of two alike.
    places = [index for index, (a, b) in enumerate(pairwise(log)) if index and (a.op, a.kind) != (b.op, b.kind)]
    index = rng.choice(places)
    removed = log.pop(index)
    if rng.random() < 0.5:
        log.insert(index + 1, removed)
    [first, *_] = compare(logs, 1000.0)
    assert first.kind == DifferenceKind.LOCK_ORDER
    assert first.op == min(removed.op, log[index].op)


def test_ranks_with_equal_marks_are_not_compared_line_by_line() -> None:
    logs = [RankLog(rank, 8) for rank in range(3)]
    checker = RankChecker(range(3))
    for log in logs:
        log.agreed(8)
    same = logs[0].mark
    other = [replace(entry, value=7) for entry in logs[1].take()]
    assert not [each for rank in range(3) for each in checker.take(rank, logs[rank].take() or other, same)]


def test_a_difference_is_found_although_marks_are_given() -> None:
    logs = [RankLog(rank, 8) for rank in range(2)]
    checker = RankChecker(range(2))
    for log, num_slots in zip(logs, (8, 7), strict=True):
        log.agreed(num_slots)
    found = [each for rank, log in enumerate(logs) for each in checker.take(rank, log.take(), log.mark)]
    assert [each.kind for each in found] == [DifferenceKind.CAPACITY]


def test_a_rank_that_is_behind_is_compared_when_it_comes() -> None:
    logs = [RankLog(rank, 8) for rank in range(2)]
    checker = RankChecker(range(2))
    for log in logs:
        log.agreed(8)
    assert not checker.take(0, logs[0].take(), logs[0].mark)
    logs[0].begin(SaveOp(OpId(1), (PageMove(PageKey(bytes(32)), Slot(0), ()),)))
    assert not checker.take(0, logs[0].take(), logs[0].mark)
    assert not checker.take(1, logs[1].take(), logs[1].mark)
    logs[1].agreed(5)
    assert [each.kind for each in checker.take(1, logs[1].take(), logs[1].mark)] == [DifferenceKind.LOCK_ORDER]


def ended_logs(*values: int) -> list[RankLog]:
    """Logs of ranks that have ended operations 1, 2, …, with so many pages each on the last rank and one elsewhere."""
    logs = [RankLog(rank, 8) for rank in range(2)]
    for op in range(1, len(values) + 1):
        for log in logs:
            log.begin(SaveOp(OpId(op), (PageMove(PageKey(bytes([op]) * 32), Slot(op), ()),)))
    for log, ops in zip(logs, (range(1, len(values) + 1), range(len(values), 0, -1)), strict=True):
        for op in ops:
            done = values[op - 1] if log is logs[1] else 1
            log.done(OpReport(0, OpId(op), done, done))
    return logs


def test_the_order_of_ends_does_not_change_a_mark() -> None:
    first, last = ended_logs(1, 1, 1)
    assert first.mark == last.mark
    assert [entry.kind for entry in first.take()] == [entry.kind for entry in last.take()]


def test_an_end_with_another_length_is_found_although_marks_are_given() -> None:
    logs, checker = ended_logs(1, 0), RankChecker(range(2))
    found = [each for rank, log in enumerate(logs) for each in checker.take(rank, log.take(), log.mark)]
    assert [(each.op, each.kind) for each in found] == [(2, DifferenceKind.DONE)]


def test_once_a_rank_is_ahead_the_others_are_compared_without_delay() -> None:
    ahead, behind = (RankLog(rank, 8) for rank in range(2))
    checker = RankChecker(range(2))
    for num_slots in (8, 7):
        ahead.agreed(num_slots)
        assert not checker.take(0, ahead.take(), ahead.mark)
    behind.agreed(5)
    assert [each.kind for each in checker.take(1, behind.take(), behind.mark)] == [DifferenceKind.CAPACITY]


def test_ranks_that_meet_again_are_equal_from_there_on() -> None:
    logs, checker = [RankLog(rank, 8) for rank in range(2)], RankChecker(range(2))
    for rank, num_entries in ((0, 1), (0, 1), (1, 1), (0, 1), (1, 2)):
        for _ in range(num_entries):
            logs[rank].agreed(8)
        assert not checker.take(rank, logs[rank].take(), logs[rank].mark)
    for log, done in zip(logs, (1, 0), strict=True):
        log.begin(SaveOp(OpId(1), (PageMove(PageKey(bytes(32)), Slot(0), ()),)))
        log.consume(Ack(OpId(1), done, done))
    found = [each for rank, log in enumerate(logs) for each in checker.take(rank, log.take(), log.mark)]
    assert [each.kind for each in found] == [DifferenceKind.ACK]
