"""The transfer engine over a real pool, a real copier and a file store, whole and broken."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace as changed
from pathlib import Path

import pytest
from layout_kit import role_chunks
from transfer_fixtures import (
    NAMESPACE,
    PATIENCE_S,
    REQUEST,
    Gate,
    Layout,
    Machine,
    Rig,
    WatchedStore,
    key,
    move,
    page_bytes,
    share,
    write_block,
)

from vllm_hicache.errors import StoreError, StoreTimeout, StoreUnavailable
from vllm_hicache.grid import Grid
from vllm_hicache.names import BlockId, MissReason, ObjectName, OpId, Phase, Role
from vllm_hicache.namespace import Spaces
from vllm_hicache.plan import LoadOp, OpReport, PageMove
from vllm_hicache.storage.envelope import ChunkId

NUM_PAGES = 4
SOURCE = [[0, 1], [2, 3], [4, 5], [6, 7]]
TARGET = [[8, 9], [10, 11], [12, 13], [14, 15]]
"""Blocks of the four pages when they are saved, and when they are loaded; blocks 16 to 23 are nobody's."""

MakeMachine = Callable[..., Machine]


@pytest.fixture
def store(tmp_path: Path) -> WatchedStore:
    return WatchedStore.on_files(tmp_path)


@pytest.fixture
def make_machine(store: WatchedStore) -> Iterator[MakeMachine]:
    machines: list[Machine] = []

    def make(grid: Grid = Grid(), io_threads: int = 2, flush_queue_pages: int = 64, **held: object) -> Machine:
        rig = Rig(Layout(draft_layers=2), grid=grid, num_slots=2 * NUM_PAGES, **held)  # type: ignore[arg-type]
        machines.append(Machine(store, rig, io_threads, flush_queue_pages))
        return machines[-1]

    yield make
    for machine in machines:
        machine.engine.close(PATIENCE_S)


def saves() -> list[PageMove]:
    return [move(number, number, blocks) for number, blocks in enumerate(SOURCE)]


def fetches(numbers: Sequence[int] = range(NUM_PAGES)) -> list[PageMove]:
    """Loads from the store into other slots and other blocks."""
    return [move(number, NUM_PAGES + number, TARGET[number], from_store=True) for number in numbers]


def held(machine: Machine) -> list[bytes]:
    """Save the four pages, then poison the device. What each page must hold."""
    expected = [machine.rig.page(blocks) for blocks in SOURCE]
    machine.save(101, saves())
    assert machine.report(101) == OpReport(3, OpId(101), NUM_PAGES, NUM_PAGES)
    machine.rig.poison_device()
    return expected


def stored(machine: Machine) -> list[bytes]:
    """Bring the four pages to the store, then poison slots and device. What each page must hold."""
    expected = held(machine)
    machine.flush(102, *range(NUM_PAGES))
    assert machine.report(102) == OpReport(3, OpId(102), NUM_PAGES, NUM_PAGES)
    machine.rig.poison_slots()
    machine.counted.clear()
    return expected


def name_of(number: int, role: Role = Role.TARGET, layers: int = 0, heads: int = 0) -> ObjectName:
    return ChunkId(key(number), 0, role, layers, heads).object_name(NAMESPACE)


def loaded(machine: Machine, numbers: Sequence[int] = range(NUM_PAGES)) -> list[bytes]:
    return [machine.rig.page(TARGET[number]) for number in numbers]


def blocks_of(numbers: Sequence[int]) -> set[BlockId]:
    return {BlockId(block) for number in numbers for block in TARGET[number]}


def raiser(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize("grid", [Grid(), Grid(2, 2)], ids=str)
@pytest.mark.parametrize("io_threads", [1, 3])
def test_pages_come_back_from_the_store_byte_for_byte_in_other_slots_and_blocks(
    make_machine: MakeMachine, grid: Grid, io_threads: int
) -> None:
    expected = stored(machine := make_machine(grid, io_threads))
    targets = list(blocks_of(range(NUM_PAGES)))
    others = machine.rig.blocks(besides=targets)
    machine.load(1, fetches())
    assert machine.report(1) == OpReport(3, OpId(1), NUM_PAGES, NUM_PAGES)
    assert loaded(machine) == expected
    assert [machine.rig.slot(NUM_PAGES + number) for number in range(NUM_PAGES)] == expected
    assert machine.rig.blocks(besides=targets) == others
    assert (machine.received, machine.invalid, machine.misses()) == (["r"], set(), {})


def test_moved_bytes_are_counted_by_direction(make_machine: MakeMachine) -> None:
    held(machine := make_machine())
    machine.flush(1, 0, 1)
    assert machine.report(1).pages_done == 2
    machine.load(2, fetches([0]))
    assert machine.report(2).pages_done == 1
    moved = {way: machine.counted[f"bytes|{way}"] for way in ("save", "flush", "fetch", "load")}
    page = machine.rig.pool.slot_bytes
    assert moved == {"save": 4 * page, "flush": 2 * page, "fetch": page, "load": page}


def test_pages_in_host_memory_are_not_read_from_the_store(make_machine: MakeMachine, store: WatchedStore) -> None:
    expected = held(machine := make_machine())
    machine.flush(1, 2, 3)
    assert machine.report(1).pages_done == 2
    machine.load(2, [move(0, 0, TARGET[0]), move(1, 1, TARGET[1]), *fetches([2, 3])])
    assert machine.report(2).pages_done == NUM_PAGES
    assert loaded(machine) == expected
    assert {number for operation, number in store.calls if operation == "read"} == {2, 3}


def test_the_next_page_is_fetched_while_one_is_copied(make_machine: MakeMachine, store: WatchedStore) -> None:
    expected = stored(machine := make_machine(io_threads=1))
    second_read = Gate()
    store.before["read", 1] = second_read.open
    machine.copier.before["load", NUM_PAGES] = second_read
    machine.load(1, fetches())
    assert machine.report(1).pages_done == NUM_PAGES
    assert loaded(machine) == expected


def test_a_prefetch_fills_slots_and_leaves_device_and_requests_alone(make_machine: MakeMachine) -> None:
    expected = stored(machine := make_machine())
    device = machine.rig.blocks()
    machine.load(1, [move(n, 4 + n, from_store=True) for n in range(NUM_PAGES)], request=None)
    assert machine.report(1) == OpReport(3, OpId(1), NUM_PAGES, NUM_PAGES)
    assert [machine.rig.slot(NUM_PAGES + number) for number in range(NUM_PAGES)] == expected
    assert machine.rig.blocks() == device
    assert (machine.received, machine.invalid) == ([], set())


def test_blocks_that_got_no_slot_are_invalid_though_all_pages_arrive(make_machine: MakeMachine) -> None:
    held(machine := make_machine())
    machine.load(1, [move(0, 0, TARGET[0])], unserved=(BlockId(20), BlockId(21)))
    assert machine.report(1).pages_done == 1
    assert (machine.received, machine.invalid) == (["r"], {20, 21})


def test_without_a_store_a_load_ends_where_host_memory_does(make_machine: MakeMachine) -> None:
    expected = held(machine := make_machine())
    pages = (move(0, 0, TARGET[0]), *fetches([1]), move(2, 2, TARGET[2]))
    machine.engine.load(LoadOp(OpId(1), NAMESPACE, None, pages), None, machine.engine.fence())
    report = machine.report(1)
    assert (report.pages_done, report.reason) == (1, MissReason.ABSENT)
    assert loaded(machine, [0]) == expected[:1]


# Reports on the way, and pages that are not vouched for


def test_a_load_tells_of_pages_that_have_come_while_others_are_on_their_way(
    make_machine: MakeMachine, store: WatchedStore
) -> None:
    expected = stored(machine := make_machine(io_threads=1))
    store.before["read", 2] = gate = Gate()
    machine.load(1, fetches())
    gate.await_entry()
    halfway = OpReport(3, OpId(1), 2, 2, Phase.RUNNING)
    machine.until(lambda: halfway in machine.told)
    assert loaded(machine, [0, 1]) == expected[:2]
    assert (machine.received, machine.reports.keys()) == ([], {101, 102})
    gate.open()
    assert machine.report(1) == OpReport(3, OpId(1), NUM_PAGES, NUM_PAGES)


def test_a_load_is_not_told_of_twice_in_the_same_state_nor_before_its_first_page(
    make_machine: MakeMachine, store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(machine := make_machine(io_threads=1))
    clock = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    before, after = Gate(), Gate()
    store.before |= {("read", 0): before, ("read", 1): after}
    machine.load(1, fetches())
    before.await_entry()
    clock += 3600
    assert machine.engine.collect() == []
    before.open()
    after.await_entry()
    machine.metrics.drain()
    told = []
    while not told:
        clock += 3600
        told += machine.engine.collect()
    clock += 3600
    assert (told, machine.engine.collect()) == ([OpReport(3, OpId(1), 1, 1, Phase.RUNNING)], [])
    after.open()


def test_pages_of_a_load_that_are_not_vouched_for_are_neither_read_nor_copied(
    make_machine: MakeMachine, store: WatchedStore
) -> None:
    expected = stored(machine := make_machine())
    rest = machine.rig.blocks(besides=list(blocks_of([0, 1])))
    machine.load(1, fetches(), vouched=2)
    assert machine.report(1) == OpReport(3, OpId(1), 2, 2, reason=MissReason.DISAGREED)
    assert loaded(machine, [0, 1]) == expected[:2]
    assert (machine.invalid, machine.rig.blocks(besides=list(blocks_of([0, 1])))) == (blocks_of([2, 3]), rest)
    assert {number for operation, number in store.calls if operation == "read"} == {0, 1}


def test_pages_in_host_memory_that_are_not_vouched_for_are_not_copied(make_machine: MakeMachine) -> None:
    expected = held(machine := make_machine())
    machine.load(1, [move(number, number, TARGET[number]) for number in range(NUM_PAGES)], vouched=1)
    report = machine.report(1)
    assert (report.pages_done, report.reason) == (1, MissReason.DISAGREED)
    assert loaded(machine) == [expected[0], *[machine.rig.page([16, 17])] * 3]


@pytest.mark.parametrize("vouched", [0, 3])
def test_pages_of_a_save_that_are_not_vouched_for_leave_their_slots_alone(
    make_machine: MakeMachine, vouched: int
) -> None:
    machine = make_machine()
    machine.rig.poison_slots()
    poison = machine.rig.slot(0)
    machine.save(1, saves(), vouched)
    assert machine.report(1) == OpReport(3, OpId(1), vouched, vouched, reason=MissReason.DISAGREED)
    expected = [machine.rig.page(blocks) for blocks in SOURCE[:vouched]] + [poison] * (NUM_PAGES - vouched)
    assert [machine.rig.slot(number) for number in range(NUM_PAGES)] == expected


@pytest.mark.parametrize("vouched", [0, 3])
def test_pages_of_a_flush_that_are_not_vouched_for_are_not_written(
    make_machine: MakeMachine, store: WatchedStore, vouched: int
) -> None:
    held(machine := make_machine())
    machine.flush(1, *range(NUM_PAGES), vouched=vouched)
    assert machine.report(1) == OpReport(3, OpId(1), vouched, vouched, reason=MissReason.DISAGREED)
    present = [number < vouched for number in range(NUM_PAGES)]
    assert store.exists([name_of(number) for number in range(NUM_PAGES)]) == present


# Ranks that hold a part


@pytest.mark.parametrize(("layers", "heads"), [((0, 3), (1, 2)), ((1, 3), (1, 2)), ((1, 2), (0, 2))])
def test_a_rank_that_holds_a_part_of_a_cell_reads_its_own_ranges_of_it(
    make_machine: MakeMachine, layers: tuple[int, int], heads: tuple[int, int]
) -> None:
    writer = make_machine()
    mine = share(writer.rig.tensors, layers, heads, draft=layers[1] == 3)
    expected = [page_bytes(mine, blocks) for blocks in SOURCE]
    stored(writer)
    reader = make_machine(layers=layers, heads=heads)
    reader.rig.poison_device()
    reader.load(1, fetches())
    assert reader.report(1) == OpReport(3, OpId(1), NUM_PAGES, NUM_PAGES)
    assert [page_bytes(reader.rig.tensors, blocks) for blocks in TARGET] == expected


def test_a_rank_that_holds_a_part_of_a_cell_writes_nothing_of_it(
    make_machine: MakeMachine, store: WatchedStore
) -> None:
    machine = make_machine(heads=(0, 1))
    machine.save(1, saves())
    machine.flush(2, *range(NUM_PAGES))
    assert machine.report(2).pages_done == NUM_PAGES
    assert store.calls == []


def test_of_ranks_that_hold_the_same_each_writes_its_own_share_of_the_pages(
    make_machine: MakeMachine, store: WatchedStore
) -> None:
    written = []
    for replica in range(2):
        machine = make_machine(heads=(0, 2), replica=(replica, 2))
        machine.save(1, saves())
        machine.flush(2, *range(NUM_PAGES))
        assert machine.report(2).pages_done == NUM_PAGES
        written.append(sorted({number for _, number in store.calls}))
        store.calls.clear()
    assert written == [[0, 2], [1, 3]]


def short(content: bytes) -> bytes:
    return content[:-100]


def flipped(content: bytes) -> bytes:
    middle = len(content) - 300
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


BAD = {
    MissReason.SHORT: short,
    MissReason.LONG: lambda content: content + b"x",
    MissReason.CORRUPT: flipped,
    MissReason.VERSION: lambda content: content[:8] + b"\x09" + content[9:],
}


def replace(store: WatchedStore, name: ObjectName, content: bytes | None) -> None:
    store.delete(name)
    if content is not None:
        store.write(name, [memoryview(content)])
    store.calls.clear()


def content_of(store: WatchedStore, name: ObjectName) -> bytes:
    buffer = bytearray(store.read(name, []))
    store.read(name, [memoryview(buffer)])
    return bytes(buffer)


def check_third_page_missed(machine: Machine, store: WatchedStore, expected: list[bytes], reason: MissReason) -> None:
    """Two pages arrive; the third is one miss and gone; nothing outside the invalid blocks has changed."""
    rest = machine.rig.blocks(besides=list(blocks_of(range(NUM_PAGES))))
    machine.load(1, fetches())
    assert machine.report(1) == OpReport(3, OpId(1), 2, 2, reason=reason)
    assert loaded(machine, [0, 1]) == expected[:2]
    assert machine.invalid == blocks_of([2, 3])
    assert machine.rig.blocks(besides=list(blocks_of(range(NUM_PAGES)))) == rest
    assert store.exists([name_of(2), name_of(3)]) == [False, True]
    assert (machine.misses(), store.calls.count(("read", 2))) == ({reason: 1}, 1)


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_object_in_the_middle_ends_the_load_before_it_and_is_removed(
    make_machine: MakeMachine, store: WatchedStore, reason: MissReason
) -> None:
    expected = stored(machine := make_machine())
    replace(store, name_of(2), BAD[reason](content_of(store, name_of(2))))
    check_third_page_missed(machine, store, expected, reason)


def test_an_object_of_another_page_in_the_middle_is_foreign_and_removed(
    make_machine: MakeMachine, store: WatchedStore
) -> None:
    expected = stored(machine := make_machine())
    replace(store, name_of(2), content_of(store, name_of(3)))
    check_third_page_missed(machine, store, expected, MissReason.FOREIGN)


def test_an_object_that_vanished_in_the_middle_is_one_miss(make_machine: MakeMachine, store: WatchedStore) -> None:
    expected = stored(machine := make_machine())
    replace(store, name_of(2), None)
    check_third_page_missed(machine, store, expected, MissReason.ABSENT)


@pytest.mark.parametrize("role", Role)
def test_a_page_that_lacks_one_of_its_objects_is_missed_as_a_whole(
    make_machine: MakeMachine, store: WatchedStore, role: Role
) -> None:
    stored(machine := make_machine(Grid(2, 2)))
    replace(store, name_of(1, role, int(role is Role.TARGET), 1), None)
    machine.load(1, fetches())
    assert machine.report(1) == OpReport(3, OpId(1), 1, 1, reason=MissReason.ABSENT)
    assert machine.invalid == blocks_of([1, 2, 3])


def test_a_flush_after_a_bad_object_was_found_heals_it(make_machine: MakeMachine, store: WatchedStore) -> None:
    expected = held(machine := make_machine())
    machine.flush(1, *range(NUM_PAGES))
    assert machine.report(1).pages_done == NUM_PAGES
    replace(store, name_of(0), b"")
    machine.load(2, fetches([0]))
    assert machine.report(2).reason == MissReason.SHORT
    machine.flush(3, 0)
    assert machine.report(3).pages_done == 1
    machine.load(4, fetches([0]))
    assert machine.report(4).pages_done == 1
    assert loaded(machine, [0]) == expected[:1]


def blocked_load(machine: Machine, store: WatchedStore, time_limit_s: float | None = None) -> Gate:
    """A load whose first page is done and whose second one's read does not come back."""
    store.before["read", 1] = gate = Gate()
    machine.load(1, fetches(), time_limit_s)
    gate.await_entry()
    machine.until(lambda: machine.counted["bytes|load"] == machine.rig.pool.slot_bytes)
    assert machine.received == []
    return gate


def check_cut(machine: Machine, gate: Gate, expected: list[bytes], reason: MissReason) -> None:
    """Received before the read comes back, settled after it, and the engine's new bytes stay in the blocks."""
    assert (machine.received, machine.invalid) == (["r"], blocks_of([1, 2, 3]))
    for block in blocks_of([0, 1, 2, 3]):
        write_block(machine.rig.tensors, block, 0x11)
    machine.collect()
    assert machine.told[-1] == OpReport(3, OpId(1), 1, 1, Phase.RECEIVED, reason)
    gate.open()
    assert machine.report(1) == OpReport(3, OpId(1), 1, 2, reason=reason)
    machine.engine.close(PATIENCE_S)
    assert {machine.rig.block(block) for block in blocks_of([0, 1, 2, 3])} == {b"\x11" * len(machine.rig.block(0))}
    assert machine.rig.slot(NUM_PAGES + 1) == expected[1]
    assert machine.received == ["r"]


def test_a_load_past_its_time_limit_gives_its_blocks_back_before_the_store_answers(
    make_machine: MakeMachine, store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = stored(machine := make_machine(io_threads=1))
    gate = blocked_load(machine, store, time_limit_s=3600)
    now = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now + 3600)
        machine.collect()
    check_cut(machine, gate, expected, MissReason.TIMEOUT)


def test_a_cancelled_load_gives_its_blocks_back_before_the_store_answers(
    make_machine: MakeMachine, store: WatchedStore
) -> None:
    expected = stored(machine := make_machine(io_threads=1))
    gate = blocked_load(machine, store)
    machine.engine.cancel(OpId(1))
    machine.collect()
    check_cut(machine, gate, expected, MissReason.CANCELLED)


def test_a_load_that_is_cancelled_during_a_copy_keeps_its_blocks_until_the_copy_ends(
    make_machine: MakeMachine,
) -> None:
    held(machine := make_machine())
    machine.copier.before["load", 1] = gate = Gate()
    machine.load(1, [move(number, number, TARGET[number]) for number in range(NUM_PAGES)])
    gate.await_entry()
    machine.engine.cancel(OpId(1))
    machine.collect()
    assert (machine.received, machine.reports.keys()) == ([], {101})
    gate.open()
    assert machine.report(1) == OpReport(3, OpId(1), 1, 4, reason=MissReason.CANCELLED)
    assert (machine.received, machine.invalid) == (["r"], blocks_of([1, 2, 3]))


def test_cancelling_what_has_ended_or_never_was_does_nothing(make_machine: MakeMachine) -> None:
    held(machine := make_machine())
    machine.load(1, [move(0, 0, TARGET[0])])
    assert machine.report(1).pages_done == 1
    for op in (1, 77):
        machine.engine.cancel(OpId(op))
    machine.collect()
    assert (machine.reports.keys(), machine.received, machine.invalid) == ({101, 1}, ["r"], set())


FAULTS = {
    "a bug": (ValueError("x"), MissReason.ERROR),
    "no memory": (MemoryError(), MissReason.ERROR),
    "a foreign error": (OSError(5, "io"), MissReason.ERROR),
    "a store error": (StoreError("s"), MissReason.ERROR),
    "a deadline": (StoreTimeout("t"), MissReason.TIMEOUT),
    "a store that is down": (StoreUnavailable("u"), MissReason.UNAVAILABLE),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_read_that_raises_fails_its_load_alone(make_machine: MakeMachine, store: WatchedStore, fault: str) -> None:
    error, reason = FAULTS[fault]
    expected = stored(machine := make_machine(io_threads=1))
    store.before["read", 0] = raiser(error)
    machine.load(1, fetches())
    assert machine.report(1) == OpReport(3, OpId(1), 0, 0, reason=reason)
    assert (machine.invalid, machine.misses()) == (blocks_of(range(NUM_PAGES)), {reason: 1})
    store.before.clear()
    machine.load(2, fetches())
    assert machine.report(2).pages_done == NUM_PAGES
    assert loaded(machine) == expected
    assert set(machine.health) == {1}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_write_that_raises_fails_its_flush_alone_and_is_counted(
    make_machine: MakeMachine, store: WatchedStore, fault: str
) -> None:
    held(machine := make_machine(io_threads=1))
    store.before["write", 1] = raiser(FAULTS[fault][0])
    machine.flush(1, *range(NUM_PAGES))
    assert machine.report(1) == OpReport(3, OpId(1), 1, 1, reason=MissReason.UNAVAILABLE)
    assert machine.counted["errors|flush"] == 1
    assert store.exists([name_of(number) for number in range(NUM_PAGES)]) == [True, False, False, False]
    store.before.clear()
    machine.flush(2, *range(NUM_PAGES))
    assert machine.report(2).pages_done == NUM_PAGES


@pytest.mark.parametrize("operation", ["load", "save"])
def test_a_copy_that_raises_fails_its_operation_alone_and_is_counted(make_machine: MakeMachine, operation: str) -> None:
    expected = held(machine := make_machine())
    pages = [move(number, number, TARGET[number]) for number in range(NUM_PAGES)]
    start = {"load": machine.load, "save": machine.save}[operation]
    machine.copier.before[operation, 2] = raiser(RuntimeError("bug"))
    start(1, pages)
    assert (machine.report(1).pages_done, machine.reports[1].reason) == (2, MissReason.ERROR)
    machine.until(lambda: machine.counted[f"errors|{operation}"] == 1)
    machine.copier.before.clear()
    start(2, pages)
    assert machine.report(2).pages_done == NUM_PAGES
    assert operation == "save" or loaded(machine) == expected


def test_pages_whose_copy_failed_are_still_held_for_the_next_load(make_machine: MakeMachine) -> None:
    stored(machine := make_machine(io_threads=1))
    machine.copier.before["load", NUM_PAGES] = raiser(RuntimeError("bug"))
    machine.load(1, fetches([0]))
    assert machine.report(1) == OpReport(3, OpId(1), 0, 1, reason=MissReason.ERROR)
    assert machine.invalid == blocks_of([0])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_fails_its_load_alone_is_seen_and_replaced(
    make_machine: MakeMachine, store: WatchedStore
) -> None:
    expected = stored(machine := make_machine(io_threads=1))
    store.before["read", 0] = raiser(SystemExit())
    machine.load(1, fetches())
    assert machine.report(1) == OpReport(3, OpId(1), 0, 0, reason=MissReason.ERROR)
    machine.until(lambda: 0 in machine.health)
    store.before.clear()
    machine.load(2, fetches())
    assert machine.report(2).pages_done == NUM_PAGES
    assert loaded(machine) == expected
    assert machine.health[-1] == 1


def test_a_store_that_is_removed_during_a_load_ends_it_with_what_had_arrived(
    make_machine: MakeMachine, store: WatchedStore, tmp_path: Path
) -> None:
    expected = stored(machine := make_machine(io_threads=1))
    store.before["read", 2] = lambda: shutil.rmtree(tmp_path / "store")
    machine.load(1, fetches())
    assert machine.report(1) == OpReport(3, OpId(1), 2, 2, reason=MissReason.ABSENT)
    assert loaded(machine, [0, 1]) == expected[:2]
    assert (machine.received, machine.invalid) == (["r"], blocks_of([2, 3]))


def test_a_flush_beyond_the_queue_is_declined_at_once_and_can_be_offered_again(
    make_machine: MakeMachine, store: WatchedStore
) -> None:
    held(machine := make_machine(io_threads=1, flush_queue_pages=2))
    store.before["write", 0] = gate = Gate()
    machine.flush(1, 0)
    gate.await_entry()
    machine.flush(2, 1, 2)
    machine.flush(3, 3)
    machine.collect()
    assert machine.reports[3] == OpReport(3, OpId(3), 0, 0, reason=MissReason.NO_SLOT)
    assert machine.counted["declined_pages|flush"] == 1
    gate.open()
    assert (machine.report(1).pages_done, machine.report(2).pages_done) == (1, 2)
    machine.flush(4, 3)
    assert machine.report(4).pages_done == 1


def test_without_a_store_a_flush_is_declined(make_machine: MakeMachine) -> None:
    held(machine := make_machine())
    machine.chunks = None
    machine.flush(1, 0, 1)
    assert machine.report(1).pages_done == 0
    assert machine.counted["declined_pages|flush"] == 2


def test_a_flush_that_hangs_is_not_in_the_way_of_a_load(make_machine: MakeMachine, store: WatchedStore) -> None:
    held(machine := make_machine(io_threads=1))
    machine.flush(1, 3)
    assert machine.report(1).pages_done == 1
    store.before["write", 0] = gate = Gate()
    machine.flush(2, 0, 1, 2)
    gate.await_entry()
    machine.load(3, fetches([3]))
    assert machine.report(3).pages_done == 1
    gate.open()
    assert machine.report(2).pages_done == 3
    assert list(dict.fromkeys(store.calls))[:3] == [("write", 3), ("write", 0), ("read", 3)]


def test_waiting_tasks_are_shown_by_queue(make_machine: MakeMachine, store: WatchedStore) -> None:
    held(machine := make_machine(io_threads=1))
    store.before["write", 0] = gate = Gate()
    machine.flush(1, 0, 1, 2)
    gate.await_entry()
    machine.engine.collect()
    assert machine.metrics.drain()["queue_depth|flush"] == 2
    gate.open()
    assert machine.report(1).pages_done == 3


def test_close_saves_and_flushes_what_is_queued(make_machine: MakeMachine, store: WatchedStore) -> None:
    held(machine := make_machine(io_threads=1))
    store.before["write", 0] = gate = Gate()
    machine.flush(1, *range(NUM_PAGES))
    gate.await_entry()
    closer = threading.Thread(target=machine.engine.close, args=(PATIENCE_S,))
    closer.start()
    gate.open()
    closer.join(PATIENCE_S)
    assert store.exists([name_of(number) for number in range(NUM_PAGES)]) == [True] * NUM_PAGES
    machine.collect()
    assert machine.reports[1].pages_done == NUM_PAGES


def test_close_says_how_many_pages_it_left_behind(
    make_machine: MakeMachine, store: WatchedStore, caplog: pytest.LogCaptureFixture
) -> None:
    held(machine := make_machine(io_threads=1))
    store.before["write", 0] = gate = Gate()
    machine.flush(1, *range(NUM_PAGES))
    gate.await_entry()
    with caplog.at_level(logging.WARNING):
        machine.engine.close(0.0)
    gate.open()
    assert "3 pages not yet saved or flushed after 0.0 s" in caplog.text
    assert "shutdown_timeout_s" in caplog.text


# Pages from another engine


@pytest.fixture
def peer(tmp_path: Path) -> WatchedStore:
    """What another engine has."""
    return WatchedStore.on_files(tmp_path / "peer")


def handed(
    machine: Machine, store: WatchedStore, peer: WatchedStore, of_peer: Sequence[int], of_store: Sequence[int] = ()
) -> list[bytes]:
    """The four pages, of which the other engine has some and the store has some. What each page must hold."""
    expected = stored(machine)
    layout = machine.rig.geometry.layout
    for number in range(NUM_PAGES):
        for cell in layout.cells:
            name = name_of(number, cell.role, cell.layer_group, cell.head_group)
            content = content_of(store, name)
            if number in of_peer:
                replace(peer, name, content)
            if number not in of_store:
                store.delete(name)
    store.calls.clear()
    peer.calls.clear()
    return expected


def take(machine: Machine, peer: WatchedStore | None, moves: Sequence[PageMove], limit_s: float | None = None) -> None:
    """Begin to load pages of another engine as operation 1."""
    op = LoadOp(OpId(1), Spaces(NAMESPACE), REQUEST, tuple(moves), limit_s)
    machine.consumption.begin(op.op, 3, op)
    source = role_chunks(peer, machine.rig.geometry.layout, NAMESPACE) if peer is not None else None
    machine.engine.load(op, machine.chunks, machine.engine.fence(), None, source)


def of_peer(numbers: Sequence[int] = range(NUM_PAGES)) -> list[PageMove]:
    return [changed(each, from_peer=True) for each in fetches(numbers)]


def pages_read(store: WatchedStore) -> list[int]:
    return sorted({number for operation, number in store.calls if operation == "read"})


@pytest.mark.parametrize("grid", [Grid(), Grid(2, 2)], ids=str)
def test_the_store_is_asked_first_and_the_other_engine_for_what_it_lacks(
    make_machine: MakeMachine, store: WatchedStore, peer: WatchedStore, grid: Grid
) -> None:
    expected = handed(machine := make_machine(grid), store, peer, range(NUM_PAGES), [0, 2])
    take(machine, peer, fetches())
    assert machine.report(1) == OpReport(3, OpId(1), NUM_PAGES, NUM_PAGES)
    assert loaded(machine) == expected
    assert (pages_read(peer), machine.misses()) == ([1, 3], {})
    moved = {way: machine.counted[f"bytes|{way}"] for way in ("fetch", "handoff")}
    assert moved == dict.fromkeys(moved, 2 * machine.rig.geometry.slot_bytes)


def test_pages_that_are_the_other_engines_are_not_asked_of_the_store(
    make_machine: MakeMachine, store: WatchedStore, peer: WatchedStore
) -> None:
    expected = handed(machine := make_machine(), store, peer, range(NUM_PAGES), range(NUM_PAGES))
    take(machine, peer, [*fetches([0]), *of_peer([1, 2, 3])])
    assert machine.report(1) == OpReport(3, OpId(1), NUM_PAGES, NUM_PAGES)
    assert (pages_read(store), pages_read(peer), loaded(machine)) == ([0], [1, 2, 3], expected)


def test_a_page_that_neither_has_is_one_miss(
    make_machine: MakeMachine, store: WatchedStore, peer: WatchedStore
) -> None:
    expected = handed(machine := make_machine(), store, peer, [0, 1, 3])
    take(machine, peer, fetches())
    assert machine.report(1) == OpReport(3, OpId(1), 2, 2, reason=MissReason.ABSENT)
    assert (loaded(machine, [0, 1]), machine.misses()) == (expected[:2], {MissReason.ABSENT: 1})
    assert machine.invalid == blocks_of([2, 3])


def test_a_bad_object_of_the_store_is_taken_from_the_other_engine(
    make_machine: MakeMachine, store: WatchedStore, peer: WatchedStore
) -> None:
    expected = handed(machine := make_machine(), store, peer, range(NUM_PAGES), range(NUM_PAGES))
    replace(store, name_of(2), flipped(content_of(store, name_of(2))))
    take(machine, peer, fetches())
    assert machine.report(1).pages_done == NUM_PAGES
    assert (loaded(machine), pages_read(peer)) == (expected, [2])


def test_half_a_page_of_the_store_is_overwritten_by_all_of_the_other_engines(
    make_machine: MakeMachine, store: WatchedStore, peer: WatchedStore
) -> None:
    expected = handed(machine := make_machine(Grid(2, 2)), store, peer, [1], range(NUM_PAGES))
    replace(store, name_of(1, Role.TARGET, 1, 1), None)
    take(machine, peer, fetches())
    assert machine.report(1).pages_done == NUM_PAGES
    assert loaded(machine) == expected


def test_a_bad_object_of_the_other_engine_is_a_miss_and_its_page_stays_poison(
    make_machine: MakeMachine, store: WatchedStore, peer: WatchedStore
) -> None:
    handed(machine := make_machine(), store, peer, range(NUM_PAGES))
    replace(peer, name_of(0), flipped(content_of(peer, name_of(0))))
    before = machine.rig.blocks()
    take(machine, peer, of_peer())
    assert machine.report(1) == OpReport(3, OpId(1), 0, 0, reason=MissReason.CORRUPT)
    assert machine.invalid == blocks_of(range(NUM_PAGES))
    assert {block: machine.rig.block(block) for block in TARGET[0]} == {block: before[block] for block in TARGET[0]}


def test_pages_of_nobody_are_missed_though_the_store_has_them(
    make_machine: MakeMachine, store: WatchedStore, peer: WatchedStore
) -> None:
    handed(machine := make_machine(), store, peer, [], range(NUM_PAGES))
    take(machine, None, of_peer())
    assert machine.report(1) == OpReport(3, OpId(1), 0, 0, reason=MissReason.ABSENT)
    assert not store.calls


def test_without_a_store_the_other_engine_is_asked_for_everything(
    make_machine: MakeMachine, store: WatchedStore, peer: WatchedStore
) -> None:
    expected = handed(machine := make_machine(), store, peer, range(NUM_PAGES))
    machine.chunks = None
    take(machine, peer, [*fetches([0, 1]), *of_peer([2, 3])])
    assert machine.report(1).pages_done == NUM_PAGES
    assert loaded(machine) == expected


def test_a_rank_that_holds_a_part_of_a_cell_takes_its_own_ranges_of_it_from_another_engine(
    make_machine: MakeMachine, store: WatchedStore, peer: WatchedStore
) -> None:
    handed(whole := make_machine(), store, peer, range(NUM_PAGES))
    part = make_machine(heads=(1, 2))
    expected = [page_bytes(share(Rig(Layout(draft_layers=2)).tensors, (0, 3), (1, 2)), blocks) for blocks in SOURCE]
    part.rig.poison_device()
    take(part, peer, of_peer())
    assert part.report(1).pages_done == NUM_PAGES
    assert [page_bytes(part.rig.tensors, blocks) for blocks in TARGET] == expected
    assert whole.rig.geometry.slot_bytes == 2 * part.rig.geometry.slot_bytes


def test_a_slow_engine_costs_a_load_no_more_than_its_time_limit(
    make_machine: MakeMachine, store: WatchedStore, peer: WatchedStore
) -> None:
    expected = handed(machine := make_machine(), store, peer, range(NUM_PAGES))
    gate = peer.before["read", 1] = Gate()
    take(machine, peer, of_peer(), limit_s=0.1)
    gate.await_entry()
    machine.until(lambda: bool(machine.received))
    assert (loaded(machine, [0]), machine.invalid) == (expected[:1], blocks_of([1, 2, 3]))
    assert 1 not in machine.reports
    gate.open()
    assert machine.report(1).reason == MissReason.TIMEOUT
    assert loaded(machine, [1]) != expected[1:2]
