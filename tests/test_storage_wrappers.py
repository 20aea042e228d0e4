"""Checked and measured stores: every fault of a store is one miss, and no thread dies of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vllm_hicache.errors import ObjectMissing, StoreCorrupt, StoreError, StoreTimeout, StoreUnavailable
from vllm_hicache.names import MissReason, ObjectName, PageKey, Role
from vllm_hicache.storage.base import ObjectInfo, Store
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.storage.envelope import ChunkId, Grid, HmacSealer, Identity, header_bytes, seal
from vllm_hicache.storage.file import FileStore
from vllm_hicache.storage.wrappers import Metered, Outcome, StoreCall, StoreWrapper

NAMESPACE = b"n" * 32
GRID = Grid(1, 1)
UNIT_BYTES = 1024
PAYLOAD = bytes(index % 251 for index in range(8 * UNIT_BYTES))
CHUNK = ChunkId(PageKey(b"k" * 32), 0, Role.TARGET, 0, 0)
OTHER = ChunkId(PageKey(b"j" * 32), 0, Role.TARGET, 0, 0)
NAME = CHUNK.object_name(NAMESPACE)
HEADER_BYTES = header_bytes(len(PAYLOAD), UNIT_BYTES)


class Faulty(StoreWrapper):
    """Raises `fault` in every call that `broken` names."""

    def __init__(self, inner: Store, fault: Exception, *broken: str) -> None:
        super().__init__(inner)
        self.fault = fault
        self.broken = set(broken)
        self.num_reads = 0

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        self._fail("exists")
        return super().exists(names)

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        self.num_reads += 1
        self._fail("read")
        return super().read(name, parts, offset)

    def write(self, name: ObjectName, parts: Sequence[memoryview]) -> bool:
        self._fail("write")
        return super().write(name, parts)

    def delete(self, name: ObjectName) -> bool:
        self._fail("delete")
        return super().delete(name)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._fail("list")
        return super().list(prefix)

    def _fail(self, operation: str) -> None:
        if operation in self.broken:
            raise self.fault


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    store = FileStore(str(tmp_path / "store"), 1 << 30)
    store.probe()
    return store


def chunks(store: Store) -> ChunkStore:
    return ChunkStore(store, NAMESPACE, GRID)


def sealed(chunk: ChunkId = CHUNK, namespace: bytes = NAMESPACE) -> bytes:
    return seal(Identity(chunk, namespace, GRID), memoryview(PAYLOAD), UNIT_BYTES) + PAYLOAD


def load(store: ChunkStore, chunk: ChunkId = CHUNK) -> bytes | MissReason:
    buffer = bytearray(b"\xa5") * len(PAYLOAD)
    reason = store.load(chunk, memoryview(buffer), UNIT_BYTES)
    return bytes(buffer) if reason is None else reason


BAD = {
    "short": (sealed()[:-1], MissReason.SHORT),
    "empty": (b"", MissReason.SHORT),
    "long": (sealed() + b"x", MissReason.LONG),
    "flipped payload": (sealed()[:-1] + b"\xff", MissReason.CORRUPT),
    "flipped header": (sealed()[:50] + b"\xff" + sealed()[51:], MissReason.CORRUPT),
    "other key": (sealed(OTHER), MissReason.FOREIGN),
    "other namespace": (sealed(namespace=b"m" * 32), MissReason.FOREIGN),
    "other version": (sealed()[:8] + b"\x09" + sealed()[9:], MissReason.VERSION),
}
FAULTS = [ValueError("x"), KeyError(1), OSError(5, "io"), RuntimeError(), StoreError("s"), RecursionError()]


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


@pytest.mark.parametrize(("first", "count"), [(0, 8), (0, 1), (3, 2), (7, 1), (8, 0)])
def test_a_range_of_units_is_loaded_alone(store: FileStore, first: int, count: int) -> None:
    chunks(store).save(CHUNK, memoryview(PAYLOAD), UNIT_BYTES)
    buffer = bytearray(b"\xa5") * (count * UNIT_BYTES)
    assert chunks(store).load_units(CHUNK, first, memoryview(buffer), UNIT_BYTES, 8) is None
    assert buffer == PAYLOAD[first * UNIT_BYTES : (first + count) * UNIT_BYTES]


def test_a_flip_inside_the_range_is_corrupt_and_outside_it_is_not_seen(store: FileStore) -> None:
    content = bytearray(sealed())
    content[HEADER_BYTES + 5 * UNIT_BYTES] ^= 1
    store.write(NAME, [memoryview(content)])
    buffer = memoryview(bytearray(2 * UNIT_BYTES))
    assert chunks(store).load_units(CHUNK, 3, buffer, UNIT_BYTES, 8) is None
    assert chunks(store).load_units(CHUNK, 4, buffer, UNIT_BYTES, 8) is MissReason.CORRUPT
    assert store.exists([NAME]) == [False]


@pytest.mark.parametrize("kind", BAD)
def test_a_range_of_a_bad_object_is_a_miss_unless_the_flip_lies_elsewhere(store: FileStore, kind: str) -> None:
    content, reason = BAD[kind]
    store.write(NAME, [memoryview(content)])
    buffer = memoryview(bytearray(UNIT_BYTES))
    expected = None if kind == "flipped payload" else reason
    assert chunks(store).load_units(CHUNK, 0, buffer, UNIT_BYTES, 8) is expected


class Shrinking(StoreWrapper):
    """Lets the object lose its last byte after the first read."""

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        total_bytes = super().read(name, parts, offset)
        self.delete(name)
        self.write(name, [memoryview(sealed()[:-1])])
        return total_bytes


def test_an_object_that_changes_between_the_two_reads_of_a_range_is_a_miss(store: FileStore) -> None:
    store.write(NAME, [memoryview(sealed())])
    buffer = memoryview(bytearray(UNIT_BYTES))
    assert chunks(Shrinking(store)).load_units(CHUNK, 0, buffer, UNIT_BYTES, 8) is MissReason.SHORT


@pytest.mark.parametrize(("first", "num_bytes"), [(-1, 1024), (8, 1024), (0, 9 * 1024), (0, 1000)])
def test_a_range_outside_the_chunk_is_refused(store: FileStore, first: int, num_bytes: int) -> None:
    with pytest.raises(ValueError, match="whole units inside the chunk"):
        chunks(store).load_units(CHUNK, first, memoryview(bytearray(num_bytes)), UNIT_BYTES, 8)


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
    buffer = bytearray(b"\xa5") * (2 * UNIT_BYTES)
    assert view.load_units(CHUNK, 3, memoryview(buffer), UNIT_BYTES, 8) is None
    assert buffer == PAYLOAD[3 * UNIT_BYTES : 5 * UNIT_BYTES]


def test_an_object_without_the_key_is_refused_and_healed_by_the_next_save(store: FileStore) -> None:
    for writer, reason in ((chunks(store), MissReason.VERSION), (keyed(store, b"o" * 32), MissReason.CORRUPT)):
        writer.save(CHUNK, memoryview(PAYLOAD), UNIT_BYTES)
        view = keyed(store)
        buffer = memoryview(bytearray(UNIT_BYTES))
        assert view.load_units(CHUNK, 0, buffer, UNIT_BYTES, 8) is reason
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
