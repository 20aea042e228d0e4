"""One rank's log: what it vouches for, which entries it leaves in which order, and what reaches its file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hicache import ranklog
from vllm_hicache.entries import Entry, EntryKind
from vllm_hicache.errors import InvariantError
from vllm_hicache.names import OpId, PageKey, Phase, Slot
from vllm_hicache.namespace import Spaces
from vllm_hicache.plan import Ack, ExportOp, FlushOp, LoadOp, OpReport, PageMove, SaveOp
from vllm_hicache.ranklog import RankLog, digest_of

CAPACITY, HIT, EVICT, LOCK, ACK, UNLOCK, DONE = EntryKind
NUM_SLOTS = 8


def page(number: int, slot: int, from_store: bool = False) -> PageMove:
    return PageMove(PageKey(bytes([number]) * 32), Slot(slot), (), from_store=from_store)


def pages(slots: Iterable[int], from_store: bool = False) -> tuple[PageMove, ...]:
    """Pages whose numbers are those of their slots."""
    return tuple(page(slot, slot, from_store) for slot in slots)


def load(op: int, moves: Sequence[PageMove]) -> LoadOp:
    return LoadOp(OpId(op), b"", None, tuple(moves))


def save(op: int, moves: Sequence[PageMove]) -> SaveOp:
    return SaveOp(OpId(op), tuple(moves))


def flush(op: int, moves: Sequence[PageMove]) -> FlushOp:
    return FlushOp(OpId(op), b"", tuple(moves))


def export(op: int, moves: Sequence[PageMove], absent: Sequence[PageMove] = ()) -> ExportOp:
    return ExportOp(OpId(op), Spaces(b""), tuple(moves), tuple(absent))


def ack(op: int, done: int, held: int | None = None, phase: Phase = Phase.SETTLED) -> Ack:
    return Ack(OpId(op), done, done if held is None else held, phase)


def report(op: int, done: int, phase: Phase = Phase.SETTLED) -> OpReport:
    return OpReport(0, OpId(op), done, done, phase)


def rows(log: RankLog) -> list[tuple[int, EntryKind, int]]:
    return [(entry.op, entry.kind, entry.value) for entry in log.take()]


def holding(*slots: int) -> RankLog:
    """A log whose slots hold the pages of their numbers, by operation 1."""
    log = RankLog(0, NUM_SLOTS)
    log.begin(save(1, pages(slots)))
    log.consume(ack(1, len(slots)))
    log.take()
    return log


def test_the_agreed_capacity_is_an_entry_of_no_operation() -> None:
    log = RankLog(0, NUM_SLOTS)
    log.agreed(7)
    assert rows(log) == [(0, CAPACITY, 7)]


def test_a_save_evicts_then_locks_and_is_unlocked_after_its_ack() -> None:
    log = RankLog(0, NUM_SLOTS)
    assert log.begin(save(1, pages([0, 1, 2]))) == 3
    log.consume(ack(1, 2))
    assert rows(log) == [(1, EVICT, 3), (1, LOCK, 3), (1, ACK, 2), (1, UNLOCK, 3)]


def test_a_load_hits_then_evicts_then_locks() -> None:
    log = holding(0, 1)
    assert log.begin(load(2, [*pages([0, 1]), *pages([2], from_store=True)])) == 3
    assert rows(log) == [(2, HIT, 2), (2, EVICT, 1), (2, LOCK, 3)]


def test_a_load_from_host_alone_evicts_nothing() -> None:
    log = holding(0)
    log.begin(load(2, pages([0])))
    assert rows(log) == [(2, HIT, 1), (2, LOCK, 1)]


def test_a_flush_only_locks() -> None:
    log = holding(0)
    assert log.begin(flush(2, pages([0]))) == 1
    assert rows(log) == [(2, LOCK, 1)]


def test_an_export_only_locks_and_is_unlocked_after_its_ack() -> None:
    log = holding(0, 1)
    assert log.begin(export(2, pages([0, 1]))) == 2
    log.consume(ack(2, 2))
    assert rows(log) == [(2, LOCK, 2), (2, ACK, 2), (2, UNLOCK, 2)]


def test_absent_pages_of_an_export_are_no_pages_of_it() -> None:
    log = holding(0)
    assert log.begin(export(2, pages([0]), [page(1, -1), page(2, -1)])) == 1
    assert log.begin(export(3, [], [page(1, -1)])) == 0
    assert rows(log) == [(2, LOCK, 1), (3, LOCK, 0)]


@pytest.mark.parametrize("wrong", [page(7, 1), page(1, 5), page(1, -1)], ids=["other page", "other slot", "no slot"])
def test_an_export_is_vouched_for_up_to_the_first_slot_that_holds_something_else(wrong: PageMove) -> None:
    log = holding(0, 1, 2)
    assert log.begin(export(2, [page(0, 0), wrong, page(2, 2)])) == 1


def test_a_slot_that_others_read_does_not_change_hands() -> None:
    log = holding(0)
    log.begin(export(2, pages([0])))
    assert log.begin(save(3, [page(9, 0)])) == 0
    for op in (2, 3):
        log.consume(ack(op, 0))
    assert log.begin(save(4, [page(9, 0)])) == 1


def test_the_end_of_an_export_leaves_its_pages_where_they_are() -> None:
    log = holding(0)
    log.begin(export(2, pages([0])))
    log.consume(ack(2, 0))
    assert log.begin(load(3, pages([0]))) == 1


def test_a_load_without_pages_is_begun_and_unlocked() -> None:
    log = RankLog(0, NUM_SLOTS)
    assert log.begin(load(1, [])) == 0
    log.consume(ack(1, 0))
    assert rows(log) == [(1, HIT, 0), (1, LOCK, 0), (1, ACK, 0), (1, UNLOCK, 0)]


def test_a_saved_page_is_not_vouched_for_before_its_ack() -> None:
    log = RankLog(0, NUM_SLOTS)
    log.begin(save(1, pages([0])))
    assert log.begin(load(2, pages([0]))) == 0


def test_a_save_that_runs_has_saved_nothing_yet() -> None:
    log = RankLog(0, NUM_SLOTS)
    log.begin(save(1, pages([0])))
    log.consume(ack(1, 1, phase=Phase.RUNNING))
    assert log.begin(load(2, pages([0]))) == 0


def test_pages_beyond_the_acknowledged_length_of_a_save_hold_nothing() -> None:
    log = RankLog(0, NUM_SLOTS)
    log.begin(save(1, pages([0, 1])))
    log.consume(ack(1, 1))
    assert log.begin(load(2, pages([0, 1]))) == 1


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.RECEIVED])
def test_a_running_load_gives_what_reached_its_blocks(phase: Phase) -> None:
    log = RankLog(0, NUM_SLOTS)
    log.begin(load(1, pages([0, 1, 2], from_store=True)))
    log.consume(ack(1, 1, held=2, phase=phase))
    assert log.begin(flush(2, pages([0, 1]))) == 1


def test_a_settled_load_gives_what_its_slots_hold() -> None:
    log = RankLog(0, NUM_SLOTS)
    log.begin(load(1, pages([0, 1, 2], from_store=True)))
    log.consume(ack(1, 0, phase=Phase.RECEIVED))
    log.consume(ack(1, 0, held=2))
    assert rows(log)[-2:] == [(1, ACK, 0), (1, UNLOCK, 3)]
    assert log.begin(flush(2, pages([0, 1, 2]))) == 2


def test_no_more_becomes_known_than_this_rank_vouched_for() -> None:
    log = RankLog(0, NUM_SLOTS)
    log.pin([Slot(1)])
    assert log.begin(save(1, pages([0, 1]))) == 1
    log.consume(ack(1, 2))
    assert log.begin(load(2, pages([0, 1]))) == 1


def test_hits_are_counted_over_the_pages_that_are_to_be_there() -> None:
    log = holding(0, 1, 3)
    moves = [*pages([0]), *pages([4], from_store=True), *pages([1, 2, 3])]
    assert log.begin(load(2, moves)) == 3
    assert rows(log) == [(2, HIT, 2), (2, EVICT, 1), (2, LOCK, 5)]


def test_a_slot_with_another_page_is_no_hit() -> None:
    assert holding(0).begin(load(2, [page(9, 0)])) == 0


def test_a_slot_loses_its_page_when_it_changes_hands() -> None:
    log = holding(0)
    log.begin(save(2, [page(9, 0)]))
    log.consume(ack(2, 0))
    assert log.begin(load(3, pages([0]))) == 0


def test_a_slot_in_use_does_not_change_hands_until_all_of_its_users_have_gone() -> None:
    log = holding(0, 1)
    log.begin(load(2, pages([0])))
    log.begin(flush(3, pages([0])))
    log.consume(ack(2, 1))
    log.take()
    assert log.begin(save(4, [page(8, 1), page(9, 0)])) == 1
    assert rows(log)[0] == (4, EVICT, 1)
    log.consume(ack(4, 1))
    log.consume(ack(3, 1))
    assert log.begin(save(5, [page(9, 0)])) == 1


def test_an_operation_cannot_fill_one_slot_twice() -> None:
    assert RankLog(0, NUM_SLOTS).begin(save(1, [page(1, 0), page(2, 0)])) == 1


@pytest.mark.parametrize("slot", [-1, NUM_SLOTS])
def test_a_slot_outside_the_pool_is_not_eligible(slot: int) -> None:
    log = RankLog(0, NUM_SLOTS)
    assert log.begin(save(1, [page(1, slot)])) == 0
    assert rows(log)[0] == (1, EVICT, 0)


def test_an_ack_of_an_operation_that_is_not_open_leaves_no_entry() -> None:
    log = holding(0)
    log.consume(ack(1, 1))
    log.consume(ack(99, 1))
    assert rows(log) == []


def test_an_operation_cannot_begin_while_it_is_open() -> None:
    log = RankLog(0, NUM_SLOTS)
    log.begin(save(1, pages([0, 1])))
    with pytest.raises(InvariantError, match="operation 1 with 2 pages begins again"):
        log.begin(save(1, pages([0, 1])))


def test_the_own_end_of_an_operation_is_noted_once() -> None:
    log = RankLog(0, NUM_SLOTS)
    log.begin(save(1, pages([0, 1])))
    log.take()
    log.done(report(1, 1, Phase.RUNNING))
    log.done(report(1, 2))
    log.done(report(1, 2))
    assert rows(log) == [(1, DONE, 2)]


def test_a_forgotten_slot_is_no_hit_on_this_rank() -> None:
    log = holding(0, 1)
    log.forget([Slot(1), Slot(5)])
    assert log.begin(load(2, pages([0, 1]))) == 1
    assert rows(log)[0] == (2, HIT, 1)


def test_a_slot_that_was_forgotten_while_it_was_read_stays_so() -> None:
    log = holding(0)
    log.begin(load(2, pages([0])))
    log.forget([Slot(0)])
    log.consume(ack(2, 1))
    assert log.begin(load(3, pages([0]))) == 0


def test_a_pinned_slot_never_changes_hands() -> None:
    log = holding(0)
    log.pin([Slot(0)])
    log.begin(load(2, pages([0])))
    log.consume(ack(2, 1))
    assert log.begin(save(3, [page(9, 0)])) == 0


def test_entries_are_taken_once() -> None:
    log = RankLog(0, NUM_SLOTS)
    log.agreed(1)
    assert len(log.take()) == 1
    assert log.take() == ()


def test_the_digest_knows_neither_times_nor_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = RankLog(0, NUM_SLOTS), RankLog(1, NUM_SLOTS)
    for log, time_s in ((one, 1.0), (two, 2.0)):
        monkeypatch.setattr(ranklog.time, "time", lambda now_s=time_s: now_s)
        log.begin(save(1, pages([0])))
    two.done(report(1, 1))
    assert one.digest == two.digest
    assert one.num_entries == two.num_entries == 2


@pytest.mark.parametrize("other", [ack(1, 0), ack(2, 1)])
def test_the_digest_knows_values_and_operations(other: Ack) -> None:
    logs = RankLog(0, NUM_SLOTS), RankLog(1, NUM_SLOTS)
    for log in logs:
        log.begin(save(1, pages([0])))
        log.begin(save(2, pages([1])))
    assert logs[0].digest == logs[1].digest
    logs[0].consume(ack(1, 1))
    logs[1].consume(other)
    assert logs[0].digest != logs[1].digest


def test_the_digest_of_entries_is_that_of_the_log() -> None:
    log = RankLog(0, NUM_SLOTS)
    log.begin(save(1, pages([0])))
    log.done(report(1, 1))
    assert digest_of(log.take()) == log.digest
    assert len(log.digest) == 32


class Memory:
    """Bytes of one rank's slots, as keys, beside its log: `None` is poison. What is open writes when it ends."""

    def __init__(self) -> None:
        self.log = RankLog(0, 4)
        self.cells: list[PageKey | None] = [None] * 4
        self.open: dict[OpId, tuple[LoadOp | SaveOp | FlushOp, int]] = {}

    def begin(self, op: LoadOp | SaveOp | FlushOp) -> None:
        vouched = self.log.begin(op)
        self.open[op.op] = (op, vouched)
        for move in op.pages[:vouched]:
            if writes(op, move):
                self.cells[move.slot] = None

    def settle(self, op: OpId, rng: Random) -> None:
        """Fill leading pages, and let all ranks agree on at most as many."""
        begun, vouched = self.open.pop(op)
        num_held = rng.randint(0, vouched)
        for move in begun.pages[:num_held]:
            if writes(begun, move):
                self.cells[move.slot] = move.key
        agreed_held = rng.randint(0, num_held)
        self.log.consume(Ack(op, rng.randint(0, agreed_held), agreed_held))

    def check(self) -> None:
        """What is being read holds what was vouched for."""
        for op, vouched in self.open.values():
            for move in op.pages[:vouched]:
                assert writes(op, move) or self.cells[move.slot] == move.key


def writes(op: LoadOp | SaveOp | FlushOp, move: PageMove) -> bool:
    return isinstance(op, SaveOp) or (isinstance(op, LoadOp) and move.from_store)


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_is_planned_nothing_is_vouched_for_that_its_slot_does_not_hold(seed: int) -> None:
    rng = Random(seed)
    memory = Memory()
    for number in range(1, 40):
        moves = [page(rng.randrange(3), rng.randrange(4), rng.random() < 0.5) for _ in range(rng.randint(1, 3))]
        memory.begin(rng.choice([load, save, flush])(number, moves))
        memory.check()
        while memory.open and rng.random() < 0.6:
            memory.settle(rng.choice(sorted(memory.open)), rng)
            memory.check()


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def entries_of(path: Path) -> list[Entry]:
    return [
        Entry(row["op"], EntryKind(row["kind"]), row["value"], row["time_s"])  # type: ignore[arg-type]
        for row in lines_of(path)[1:]
    ]


def test_a_file_holds_a_header_and_every_entry(tmp_path: Path) -> None:
    log = RankLog(3, NUM_SLOTS, tmp_path / "new")
    log.begin(save(1, pages([0])))
    taken = log.take()
    log.done(report(1, 1))
    log.close()
    path = tmp_path / "new" / "rank-3.jsonl"
    header = lines_of(path)[0]
    assert (header["rank"], header["format"]) == (3, 1)
    written = entries_of(path)
    assert [(each.op, each.kind, each.value) for each in written] == [(1, EVICT, 1), (1, LOCK, 1), (1, DONE, 1)]
    assert [each.time_s for each in written[:2]] == pytest.approx([each.time_s for each in taken], abs=1e-6)


def test_entries_reach_the_file_a_second_after_the_last_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(ranklog.time, "monotonic", lambda: now_s)
    log = RankLog(0, NUM_SLOTS, tmp_path)
    path = tmp_path / "rank-0.jsonl"
    log.agreed(1)
    log.take()
    assert len(lines_of(path)) == 1
    now_s += 1.0
    log.take()
    assert len(lines_of(path)) == 2
    log.agreed(1)
    log.take()
    assert len(lines_of(path)) == 2
    log.close()


def test_a_full_file_becomes_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranklog, "MAX_FILE_BYTES", 1000)
    log = RankLog(0, NUM_SLOTS, tmp_path)
    for number in range(50):
        log.agreed(number)
    log.close()
    old, new = tmp_path / "rank-0.old.jsonl", tmp_path / "rank-0.jsonl"
    kept = [entry.value for path in (old, new) for entry in entries_of(path)]
    assert kept == list(range(50 - len(kept), 50))
    assert 900 < old.stat().st_size <= 1000
    assert new.stat().st_size <= 1000
    assert lines_of(old)[0] == lines_of(new)[0]


def test_the_file_of_an_earlier_run_is_kept_as_the_old_one(tmp_path: Path) -> None:
    for number in (1, 2):
        log = RankLog(0, NUM_SLOTS, tmp_path)
        log.agreed(number)
        log.close()
    assert [entry.value for entry in entries_of(tmp_path / "rank-0.old.jsonl")] == [1]
    assert [entry.value for entry in entries_of(tmp_path / "rank-0.jsonl")] == [2]


def test_a_directory_that_cannot_be_made_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    log = RankLog(0, NUM_SLOTS, tmp_path / "file")
    log.agreed(1)
    assert len(log.take()) == 1
    log.close()
    assert len(caplog.records) == 1


def test_a_disk_that_fails_later_is_one_warning_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ranklog, "MAX_FILE_BYTES", 200)
    (tmp_path / "rank-0.old.jsonl" / "in the way").mkdir(parents=True)
    log = RankLog(0, NUM_SLOTS, tmp_path)
    for number in range(20):
        log.agreed(number)
        assert [entry.value for entry in log.take()] == [number]
    log.close()
    assert len(caplog.records) == 1
    assert "rank-0.jsonl cannot be written" in caplog.text
