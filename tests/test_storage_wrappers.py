"""Checked and measured stores: every fault of a store is one miss, and no thread dies of it."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from chunk_kit import (
    BAD,
    CHUNK,
    GRID,
    NAME,
    NAMESPACE,
    OTHER,
    PAYLOAD,
    UNIT_BYTES,
    Faulty,
    chunks,
    load,
    load_part,
    sealed,
    units,
)

from vllm_hicache.errors import ObjectMissing, StoreCorrupt, StoreError, StoreTimeout, StoreUnavailable
from vllm_hicache.grid import Grid
from vllm_hicache.names import MissReason, ObjectName
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.storage.envelope import HmacSealer
from vllm_hicache.storage.file import FileStore
from vllm_hicache.storage.wrappers import Metered, Outcome, StoreCall

FAULTS = [ValueError("x"), KeyError(1), OSError(5, "io"), RuntimeError(), StoreError("s"), RecursionError()]


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    store = FileStore(str(tmp_path / "store"), 1 << 30)
    store.probe()
    return store


def test_a_saved_chunk_is_loaded_byte_for_byte(store: FileStore) -> None:
    assert chunks(store).save(CHUNK, memoryview(PAYLOAD), UNIT_BYTES) is True
    assert chunks(store).save(CHUNK, memoryview(PAYLOAD), UNIT_BYTES) is False
    assert load(chunks(store)) == PAYLOAD
    assert chunks(store).present([OTHER, CHUNK]) == [False, True]


def test_a_chunk_is_saved_and_loaded_through_views_of_other_formats(store: FileStore) -> None:
    chunks(store).save(CHUNK, memoryview(PAYLOAD).cast("I"), UNIT_BYTES)
    buffer = bytearray(len(PAYLOAD))
    assert chunks(store).load(CHUNK, memoryview(buffer).cast("H"), UNIT_BYTES) is None
    assert buffer == PAYLOAD


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_object_is_one_miss_and_the_next_save_heals_it(store: FileStore, kind: str) -> None:
    content, reason = BAD[kind]
    store.write(NAME, [memoryview(content)])
    view = chunks(store)
    assert load(view) is reason
    assert load(view) is MissReason.ABSENT
    assert view.save(CHUNK, memoryview(PAYLOAD), UNIT_BYTES) is True
    assert load(view) == PAYLOAD
    assert view.misses() == {reason: 1, MissReason.ABSENT: 1}


def test_two_objects_swapped_under_each_others_names_are_both_foreign(store: FileStore) -> None:
    store.write(NAME, [memoryview(sealed(OTHER))])
    store.write(OTHER.object_name(NAMESPACE), [memoryview(sealed(CHUNK))])
    assert load(chunks(store)) is MissReason.FOREIGN
    assert load(chunks(store), OTHER) is MissReason.FOREIGN
    assert list(store.list("")) == []


def test_a_bad_object_that_cannot_be_removed_is_one_miss_and_one_read_each_time(store: FileStore) -> None:
    store.write(NAME, [memoryview(sealed()[:-1])])
    faulty = Faulty(store, RuntimeError("no"), "delete")
    view = chunks(faulty)
    assert [load(view), load(view)] == [MissReason.SHORT, MissReason.SHORT]
    assert faulty.num_reads == 2


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (ObjectMissing("x"), MissReason.ABSENT),
        (StoreTimeout("x"), MissReason.TIMEOUT),
        (StoreUnavailable("x"), MissReason.UNAVAILABLE),
        *[(fault, MissReason.ERROR) for fault in FAULTS],
    ],
    ids=repr,
)
def test_a_fault_while_reading_is_a_miss_that_leaves_the_object(
    store: FileStore, fault: Exception, reason: MissReason
) -> None:
    chunks(store).save(CHUNK, memoryview(PAYLOAD), UNIT_BYTES)
    faulty = Faulty(store, fault, "read")
    view = chunks(faulty)
    assert load(view) is reason
    assert view.misses() == {reason: 1}
    faulty.broken.clear()
    assert load(view) == PAYLOAD


def test_a_thread_that_loads_outlives_every_fault(store: FileStore) -> None:
    chunks(store).save(CHUNK, memoryview(PAYLOAD), UNIT_BYTES)
    faulty = Faulty(store, RuntimeError("boom"), "read", "exists", "delete")
    view = chunks(faulty)
    with ThreadPoolExecutor(1) as pool:
        assert set(pool.map(lambda _: load(view), range(20))) == {MissReason.ERROR}
        faulty.broken.clear()
        assert pool.submit(load, view).result() == PAYLOAD
    assert view.misses() == {MissReason.ERROR: 20}


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_a_fault_while_saving_is_a_store_error_with_its_cause(store: FileStore, fault: Exception) -> None:
    view = chunks(Faulty(store, fault, "write"))
    with pytest.raises(StoreError) as caught:
        view.save(CHUNK, memoryview(PAYLOAD), UNIT_BYTES)
    assert fault in (caught.value, caught.value.__cause__)


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_a_store_that_cannot_tell_what_is_there_says_so(store: FileStore, fault: Exception) -> None:
    view = chunks(Faulty(store, fault, "exists"))
    with pytest.raises(StoreError):
        view.present([CHUNK, OTHER])
    assert view.misses() == {MissReason.ERROR: 1}


def test_faults_are_logged_once_and_not_once_each(store: FileStore, caplog: pytest.LogCaptureFixture) -> None:
    view = chunks(Faulty(store, RuntimeError("boom"), "read"))
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            load(view)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "boom" in caplog.text


def test_headers_hold_the_numbers_of_a_grid_alone(store: FileStore) -> None:
    counted = ChunkStore(store, NAMESPACE, Grid(2, 1, (3, 5)))
    assert counted.save(CHUNK, memoryview(PAYLOAD), UNIT_BYTES) is True
    assert load(counted) == PAYLOAD
    assert load(ChunkStore(store, NAMESPACE, Grid(2, 1))) == PAYLOAD


def test_what_cannot_be_what_was_written_is_corrupt_and_removed(store: FileStore) -> None:
    chunks(store).save(CHUNK, memoryview(PAYLOAD), UNIT_BYTES)
    view = chunks(Faulty(store, StoreCorrupt("x"), "read"))
    assert load(view) is MissReason.CORRUPT
    assert store.exists([NAME]) == [False]
    assert view.misses() == {MissReason.CORRUPT: 1}


def keyed(store: Store, key: bytes = b"k" * 32) -> ChunkStore:
    return ChunkStore(store, NAMESPACE, GRID, HmacSealer(key))


def test_chunks_under_a_key_come_back_whole_and_in_parts(store: FileStore) -> None:
    view = keyed(store)
    assert view.save(CHUNK, memoryview(PAYLOAD), UNIT_BYTES) is True
    assert load(view) == PAYLOAD
    assert load_part(view, (0, 1), (3, 2)) == units((0, 1), (3, 2))


def test_an_object_without_the_key_is_refused_and_healed_by_the_next_save(store: FileStore) -> None:
    for writer, reason in ((chunks(store), MissReason.VERSION), (keyed(store, b"o" * 32), MissReason.CORRUPT)):
        writer.save(CHUNK, memoryview(PAYLOAD), UNIT_BYTES)
        view = keyed(store)
        assert load_part(view, (0, 1)) is reason
        writer.save(CHUNK, memoryview(PAYLOAD), UNIT_BYTES)
        assert load(view) is reason
        assert view.save(CHUNK, memoryview(PAYLOAD), UNIT_BYTES) is True
        assert load(view) == PAYLOAD
        store.delete(NAME)


def test_a_reader_without_a_key_refuses_what_was_sealed_with_one(store: FileStore) -> None:
    keyed(store).save(CHUNK, memoryview(PAYLOAD), UNIT_BYTES)
    assert load(chunks(store)) is MissReason.VERSION


def outcomes(calls: list[StoreCall]) -> list[tuple[str, int, Outcome]]:
    return [(call.operation, call.num_bytes, call.outcome) for call in calls]


def test_every_call_is_measured_with_its_bytes_and_its_outcome(store: FileStore) -> None:
    calls: list[StoreCall] = []
    metered = Metered(store, calls.append)
    name = ObjectName("o")
    metered.write(name, [memoryview(b"12345")])
    metered.write(name, [memoryview(b"12345")])
    metered.exists([name])
    metered.read(name, [memoryview(bytearray(3))], 1)
    metered.read(name, [memoryview(bytearray(9))], 1)
    list(metered.list(""))
    metered.usage()
    metered.delete(name)
    metered.delete(name)
    assert outcomes(calls) == [
        ("write", 5, Outcome.OK),
        ("write", 0, Outcome.PRESENT),
        ("exists", 0, Outcome.OK),
        ("read", 3, Outcome.OK),
        ("read", 4, Outcome.OK),
        ("list", 0, Outcome.OK),
        ("usage", 0, Outcome.OK),
        ("delete", 0, Outcome.OK),
        ("delete", 0, Outcome.ABSENT),
    ]
    assert all(call.seconds >= 0 for call in calls)


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (ObjectMissing("x"), Outcome.ABSENT),
        (StoreTimeout("x"), Outcome.TIMEOUT),
        (StoreUnavailable("x"), Outcome.UNAVAILABLE),
        (ValueError("x"), Outcome.ERROR),
    ],
    ids=repr,
)
def test_a_fault_is_measured_and_passed_on(store: FileStore, fault: Exception, outcome: Outcome) -> None:
    calls: list[StoreCall] = []
    metered = Metered(Faulty(store, fault, "read"), calls.append)
    with pytest.raises(type(fault)) as caught:
        metered.read(NAME, [])
    assert caught.value is fault
    assert outcomes(calls) == [("read", 0, outcome)]


def test_a_broken_observer_costs_nothing(store: FileStore) -> None:
    def observer(call: StoreCall) -> None:
        raise RuntimeError(call.operation)

    view = chunks(Metered(store, observer))
    assert view.save(CHUNK, memoryview(PAYLOAD), UNIT_BYTES) is True
    assert load(view) == PAYLOAD
