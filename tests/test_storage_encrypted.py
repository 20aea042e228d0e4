"""Encrypted objects: unreadable in the store, and whatever was changed, moved or cut does not open."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_hicache.errors import ObjectMissing, StoreCorrupt, StoreError, StoreUnavailable
from vllm_hicache.geometry import UnitRun
from vllm_hicache.grid import Grid
from vllm_hicache.names import MissReason, ObjectName, PageKey, Role
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.storage.encrypted import MAX_OBJECT_BYTES, OVERHEAD_BYTES, Encrypted
from vllm_hicache.storage.envelope import ChunkId
from vllm_hicache.storage.file import FileStore
from vllm_hicache.storage.wrappers import StoreWrapper

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
NAME = ObjectName("ns/ab/cd")
PLAIN = bytes(index % 251 for index in range(10_000))
SEALED_BYTES = len(PLAIN) + 36
NAMESPACE = b"n" * 32
UNIT_BYTES = 1_000
CHUNK = ChunkId(PageKey(b"k" * 32), 0, Role.TARGET, 0, 0)


class Counting(StoreWrapper):
    """Counts reads."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.num_reads = 0

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        self.num_reads += 1
        return super().read(name, parts, offset)


@pytest.fixture
def raw(tmp_path: Path) -> Counting:
    store = FileStore(str(tmp_path / "store"), 1 << 30)
    store.probe()
    return Counting(store)


@pytest.fixture
def store(raw: Counting) -> Encrypted:
    store = Encrypted(raw, KEY)
    store.write(NAME, [memoryview(PLAIN)])
    return store


def content(raw: Store, name: ObjectName = NAME) -> bytearray:
    buffer = bytearray(raw.read(name, []))
    raw.read(name, [memoryview(buffer)])
    return buffer


def replace(raw: Store, data: bytes, name: ObjectName = NAME) -> None:
    raw.delete(name)
    raw.write(name, [memoryview(data)])


def read(store: Store, num_bytes: int = len(PLAIN), offset: int = 0) -> tuple[int, bytes]:
    buffer = bytearray(b"\xa5") * num_bytes
    return store.read(NAME, [memoryview(buffer)], offset), bytes(buffer)


def test_the_object_is_what_the_format_says(store: Encrypted, raw: Counting) -> None:
    sealed = bytes(content(raw))
    assert len(sealed) == SEALED_BYTES == len(PLAIN) + OVERHEAD_BYTES
    magic, nonce, rest = sealed[:8], sealed[8:20], sealed[20:]
    assert magic == b"VLLMHiE\x01"
    assert AESGCM(KEY).decrypt(nonce, rest, magic + NAME.encode()) == PLAIN


def test_nothing_of_the_plain_bytes_is_in_the_store(store: Encrypted, raw: Counting) -> None:
    sealed = bytes(content(raw))
    assert not any(PLAIN[at : at + 8] in sealed for at in range(0, len(PLAIN), 8))


def test_equal_objects_look_different_each_time(store: Encrypted, raw: Counting) -> None:
    seen = {bytes(content(raw))}
    for _ in range(20):
        store.delete(NAME)
        store.write(NAME, [memoryview(PLAIN)])
        seen.add(bytes(content(raw)))
    assert len({sealed[8:20] for sealed in seen}) == len({sealed[20:60] for sealed in seen}) == 21


def test_a_whole_read_is_one_call(store: Encrypted, raw: Counting) -> None:
    header, payload = bytearray(160), bytearray(len(PLAIN) - 160)
    assert store.read(NAME, [memoryview(header), memoryview(payload)]) == len(PLAIN)
    assert header + payload == PLAIN
    assert raw.num_reads == 1


def test_a_read_for_more_than_there_is_is_one_call(store: Encrypted, raw: Counting) -> None:
    total_bytes, found = read(store, len(PLAIN) + 500)
    assert (total_bytes, found[: len(PLAIN)]) == (len(PLAIN), PLAIN)
    assert raw.num_reads == 1


@pytest.mark.parametrize(("num_bytes", "offset"), [(100, 0), (100, 3_000), (len(PLAIN), 1)])
def test_a_read_for_a_part_is_two_calls(store: Encrypted, raw: Counting, num_bytes: int, offset: int) -> None:
    total_bytes, found = read(store, num_bytes, offset)
    expected = PLAIN[offset : offset + num_bytes]
    assert (total_bytes, found[: len(expected)]) == (len(PLAIN), expected)
    assert raw.num_reads == 2


def test_a_read_without_parts_fetches_nothing(store: Encrypted, raw: Counting) -> None:
    assert store.read(NAME, []) == len(PLAIN)
    assert raw.num_reads == 1


@given(
    cuts=st.lists(st.integers(0, 12_000), min_size=1, max_size=6),
    offset=st.one_of(st.just(0), st.integers(0, 12_000)),
)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_range_comes_out_of_any_parts(store: Encrypted, cuts: list[int], offset: int) -> None:
    edges = sorted({0, *cuts})
    buffers = [bytearray(b"\xa5") * (high - low) for low, high in pairwise(edges)]
    assert store.read(NAME, [memoryview(buffer) for buffer in buffers], offset) == len(PLAIN)
    found, expected = b"".join(buffers), PLAIN[offset : offset + edges[-1]]
    assert found[: len(expected)] == expected
    assert found[len(expected) :] == b"\xa5" * (edges[-1] - len(expected))


class Serving(StoreWrapper):
    """Serves `data` whatever is asked for."""

    def __init__(self, inner: Store, data: bytes) -> None:
        super().__init__(inner)
        self.data = data

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        assert offset == 0
        at = 0
        for part in parts:
            piece = self.data[at : at + part.nbytes]
            part[: len(piece)] = piece
            at += len(piece)
        return len(self.data)


@given(at=st.integers(0, SEALED_BYTES - 1), bit=st.integers(0, 7))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flip_of_any_bit_does_not_open(store: Encrypted, raw: Counting, at: int, bit: int) -> None:
    data = content(raw)
    serving = Encrypted(Serving(raw, data), KEY)
    assert read(serving) == (len(PLAIN), PLAIN)
    data[at] ^= 1 << bit
    for num_bytes, offset in ((len(PLAIN), 0), (10, 0), (10, 9_000)):
        with pytest.raises(StoreCorrupt):
            read(serving, num_bytes, offset)


@pytest.mark.parametrize("at", [*range(20), SEALED_BYTES - 16, SEALED_BYTES - 1])
def test_a_flip_of_magic_nonce_or_tag_does_not_open(store: Encrypted, raw: Counting, at: int) -> None:
    data = content(raw)
    data[at] ^= 1
    with pytest.raises(StoreCorrupt):
        read(Encrypted(Serving(raw, data), KEY))


@pytest.mark.parametrize("num_bytes", [0, 1, 8, 20, 35, 36, 37, SEALED_BYTES - 16, SEALED_BYTES - 1])
def test_a_cut_object_does_not_open(store: Encrypted, raw: Counting, num_bytes: int) -> None:
    replace(raw, content(raw)[:num_bytes])
    with pytest.raises(StoreCorrupt):
        read(store)


def test_an_object_with_bytes_added_does_not_open(store: Encrypted, raw: Counting) -> None:
    replace(raw, content(raw) + b"x" * 40)
    with pytest.raises(StoreCorrupt):
        read(store)


def test_an_object_under_another_name_does_not_open(store: Encrypted, raw: Counting) -> None:
    moved = ObjectName("ns/ab/ce")
    replace(raw, content(raw), moved)
    with pytest.raises(StoreCorrupt, match="moved"):
        store.read(moved, [memoryview(bytearray(len(PLAIN)))])


def test_an_object_of_another_key_does_not_open(store: Encrypted, raw: Counting) -> None:
    with pytest.raises(StoreCorrupt, match="another key"):
        read(Encrypted(raw, OTHER_KEY))


def test_a_plain_object_does_not_open(store: Encrypted, raw: Counting) -> None:
    replace(raw, PLAIN)
    with pytest.raises(StoreCorrupt, match="was not encrypted"):
        read(store)


def test_what_is_too_short_to_be_ours_is_not_listed(store: Encrypted, raw: Counting) -> None:
    raw.write(ObjectName("ns/x"), [memoryview(b"x" * 35)])
    store.write(ObjectName("ns/empty"), [])
    assert sorted((info.name, info.size_bytes) for info in store.list("")) == [(NAME, len(PLAIN)), ("ns/empty", 0)]


def test_usage_is_that_of_the_plain_objects(store: Encrypted, raw: Counting) -> None:
    store.write(ObjectName("p"), [memoryview(b"12345")])
    usage = store.usage()
    assert (usage.num_objects, usage.used_bytes, usage.capacity_bytes) == (2, len(PLAIN) + 5, 1 << 30)


class Long:
    """Stands for a part of 2 GiB, which nobody has to allocate."""

    nbytes = MAX_OBJECT_BYTES + 1


def test_an_object_that_is_too_long_is_refused_with_its_size(store: Encrypted) -> None:
    with pytest.raises(StoreError, match=f"of {MAX_OBJECT_BYTES + 1} bytes is too long"):
        store.write(NAME, [Long()])  # type: ignore[list-item]


class Claiming(StoreWrapper):
    """Tells totals of its own, one after the other."""

    def __init__(self, inner: Store, *totals: int) -> None:
        super().__init__(inner)
        self.totals = list(totals)

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        super().read(name, parts, offset)
        return self.totals.pop(0)


def test_a_length_that_no_object_has_asks_for_no_memory(store: Encrypted, raw: Counting) -> None:
    with pytest.raises(StoreCorrupt, match="2 GiB"):
        read(Encrypted(Claiming(raw, 1 << 50), KEY))


def test_an_object_that_keeps_growing_is_given_up(store: Encrypted, raw: Counting) -> None:
    with pytest.raises(StoreUnavailable, match="changed 3 times"):
        read(Encrypted(Claiming(raw, 20_000, 30_000, 40_000), KEY))


class Replacing(StoreWrapper):
    """Replaces the object by a longer one after the first read of its length."""

    def __init__(self, inner: Store, longer: bytes) -> None:
        super().__init__(inner)
        self.longer: bytes | None = longer

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        total_bytes = super().read(name, parts, offset)
        if self.longer is not None:
            replace(self._inner, self.longer)
            self.longer = None
        return total_bytes


def test_an_object_that_is_replaced_between_two_calls_is_read_as_it_is_then(store: Encrypted, raw: Counting) -> None:
    store.delete(NAME)
    store.write(NAME, [memoryview(PLAIN + PLAIN)])
    longer = bytes(content(raw))
    store.delete(NAME)
    store.write(NAME, [memoryview(PLAIN)])
    total_bytes, found = read(Encrypted(Replacing(raw, longer), KEY), 10, offset=9_999)
    assert (total_bytes, found) == (len(PLAIN) * 2, (PLAIN + PLAIN)[9_999:10_009])


def test_a_missing_object_is_missing(store: Encrypted) -> None:
    with pytest.raises(ObjectMissing):
        store.read(ObjectName("no/such"), [memoryview(bytearray(3))])


def test_no_message_tells_the_key(store: Encrypted, raw: Counting) -> None:
    with pytest.raises(StoreCorrupt) as caught:
        read(Encrypted(raw, OTHER_KEY))
    assert OTHER_KEY.hex() not in str(caught.value) + repr(caught.value) + repr(vars(store))


def test_a_chunk_is_loaded_whole_and_in_parts(raw: Counting) -> None:
    view = ChunkStore(Encrypted(raw, KEY), NAMESPACE, Grid(1, 1))
    assert view.save(CHUNK, memoryview(PLAIN), UNIT_BYTES) is True
    whole, part = bytearray(b"\xa5") * len(PLAIN), bytearray(b"\xa5") * 3 * UNIT_BYTES
    assert view.load(CHUNK, memoryview(whole), UNIT_BYTES) is None
    assert view.load_part(CHUNK, [UnitRun(1, 0, 1), UnitRun(4, 1, 2)], memoryview(part), UNIT_BYTES, 10) is None
    assert (whole, part) == (PLAIN, PLAIN[1_000:2_000] + PLAIN[4_000:6_000])


def test_a_chunk_that_does_not_open_is_corrupt_and_the_next_save_heals_it(raw: Counting) -> None:
    view = ChunkStore(Encrypted(raw, KEY), NAMESPACE, Grid(1, 1))
    name = CHUNK.object_name(NAMESPACE)
    view.save(CHUNK, memoryview(PLAIN), UNIT_BYTES)
    bad = content(raw, name)
    bad[5_000] ^= 1
    replace(raw, bad, name)
    buffer = bytearray(len(PLAIN))
    assert view.load(CHUNK, memoryview(buffer), UNIT_BYTES) is MissReason.CORRUPT
    assert raw.exists([name]) == [False]
    assert view.save(CHUNK, memoryview(PLAIN), UNIT_BYTES) is True
    assert view.load(CHUNK, memoryview(buffer), UNIT_BYTES) is None
    assert buffer == PLAIN


def test_objects_of_changing_sizes_do_not_see_each_others_bytes(raw: Counting) -> None:
    store = Encrypted(raw, KEY)
    contents = {ObjectName(f"s/{size}"): os.urandom(size) for size in (50_000, 3, 0, 20_000, 49_999, 1)}
    for name, data in contents.items():
        store.write(name, [memoryview(data)])
    for name, data in [*contents.items(), *reversed(contents.items())]:
        buffer = bytearray(b"\xa5") * 60_000
        assert store.read(name, [memoryview(buffer)]) == len(data)
        assert buffer == data + b"\xa5" * (60_000 - len(data))


def test_threads_share_one_store(raw: Counting) -> None:
    store = Encrypted(raw, KEY)
    contents = {ObjectName(f"t/{index}"): os.urandom(50_000) for index in range(16)}

    def turn(name: ObjectName) -> bool:
        store.write(name, [memoryview(contents[name])])
        buffer = bytearray(50_000)
        return store.read(name, [memoryview(buffer)]) == 50_000 and buffer == contents[name]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(turn, list(contents) * 4))
