"""What every store must do, as one suite: a backend joins with one line in `BACKENDS`.

A backend is a name and a factory: a context manager that takes an empty directory and yields a fresh,
probed store. Every backend is run bare and below each stack of wrappers in `STACKS`.
"""

from __future__ import annotations

import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path

import lmcache_store_kit
import pytest
from redis_server import RedisServer
from s3_store_kit import fresh_url, open_s3

from vllm_hicache.errors import ConfigError, ObjectMissing, StoreError
from vllm_hicache.names import ObjectName
from vllm_hicache.secrets import Secrets
from vllm_hicache.storage.base import MAX_NAME_CHARS, ObjectInfo, Store, StoreOptions, StoreUsage, WatchedParts
from vllm_hicache.storage.breaker import Breaker
from vllm_hicache.storage.encrypted import Encrypted
from vllm_hicache.storage.file import FileStore
from vllm_hicache.storage.memory import MemoryStore
from vllm_hicache.storage.registry import open_store
from vllm_hicache.storage.retry import Retrying
from vllm_hicache.storage.stack import StoreStack
from vllm_hicache.storage.wrappers import Metered

Factory = Callable[[Path], AbstractContextManager[Store]]
POISON = 0xA5
CAPACITY_BYTES = 256 << 20


@contextmanager
def file_store(folder: Path) -> Iterator[Store]:
    store = FileStore(str(folder / "store"), CAPACITY_BYTES)
    store.probe()
    yield store
    store.close()


@contextmanager
def memory_store(folder: Path) -> Iterator[Store]:
    try:
        store = MemoryStore(f"test-{uuid.uuid4().hex}", 64 << 20)
    except ConfigError as error:
        pytest.skip(str(error))
    try:
        store.probe()
        yield store
        store.close()
    finally:
        shutil.rmtree(store.root, ignore_errors=True)


@contextmanager
def s3_store(folder: Path) -> Iterator[Store]:
    store = open_s3(fresh_url())
    store.probe()
    yield store
    store.close()


@contextmanager
def redis_store(folder: Path) -> Iterator[Store]:
    with RedisServer(folder / "redis") as server:
        store = open_store(server.url)
        store.probe()
        yield store
        store.close()


@contextmanager
def redis_socket_store(folder: Path) -> Iterator[Store]:
    with RedisServer(folder / "redis", unix=True) as server:
        store = open_store(server.unix_url)
        store.probe()
        yield store
        store.close()


BACKENDS: dict[str, Factory] = {
    "file": file_store,
    "memory": memory_store,
    "redis": redis_store,
    "redis by socket": redis_socket_store,
    "lmcache fs": lmcache_store_kit.fs_store,
    "lmcache resp": lmcache_store_kit.resp_store,
    "s3": s3_store,
}
STACKS: dict[str, Callable[[Store], Store]] = {
    "bare": lambda store: store,
    "metered": lambda store: Metered(store, lambda call: None),
    "breaker": Breaker,
    "retrying": lambda store: Retrying(store, 5.0),
    "encrypted": lambda store: Encrypted(store, bytes(range(32))),
    "whole stack": lambda store: (
        StoreStack(store, StoreOptions(), Secrets(encryption_key=bytes(range(32))), lambda call: None).store
    ),
}
AWKWARD_NAMES = [
    "a",
    "a/b",
    "a/b/c",
    "..",
    "../escape",
    "a/../b",
    ".hidden",
    ".tmp/x",
    ".usage",
    "a.hc",
    "a.hc/b",
    "a+/b",
    "a+b",
    "%41",
    "A",
    "a b",
    "q?x=1#f&g",
    "back\\slash",
    "*[a]{b}",
    "." * MAX_NAME_CHARS,
    "x" * MAX_NAME_CHARS,
    "x" * 200 + "/" + "y" * 311,
    "%" * MAX_NAME_CHARS,
]


def name(text: str) -> ObjectName:
    return ObjectName(text)


def poisoned(num_bytes: int) -> bytearray:
    return bytearray([POISON]) * num_bytes


def put(store: Store, text: str, data: bytes) -> bool:
    return store.write(name(text), [memoryview(data)])


def get(store: Store, text: str, num_bytes: int) -> bytes:
    buffer = poisoned(num_bytes)
    assert store.read(name(text), [memoryview(buffer)]) == num_bytes
    return bytes(buffer)


def listing(store: Store, prefix: str = "") -> list[ObjectInfo]:
    """All of `store.list`; the test ends here as skipped below a store that has no way to list."""
    try:
        return list(store.list(prefix))
    except StoreError as error:
        if not store.describe().startswith("lmcache://") or "cannot list" not in str(error):
            raise
        pytest.skip(str(error))


def usage(store: Store) -> StoreUsage:
    """As `listing`, of `store.usage`."""
    try:
        return store.usage()
    except StoreError as error:
        if not store.describe().startswith("lmcache://") or "cannot list" not in str(error):
            raise
        pytest.skip(str(error))


class Watch(WatchedParts):
    """Compares what is said to be in place with what should be."""

    def __init__(self, buffers: Sequence[bytearray], expected: bytes) -> None:
        super().__init__([memoryview(buffer) for buffer in buffers])
        self.buffers = buffers
        self.expected = expected
        self.told: list[int] = []

    def filled(self, num_bytes: int) -> None:
        self.told.append(num_bytes)
        assert b"".join(self.buffers)[:num_bytes] == self.expected[:num_bytes]


class StoreConformance:
    """Mixed into a test class whose fixture `store` yields a fresh, probed store."""

    @pytest.mark.parametrize("num_bytes", [0, 1, 4096, 1_000_003, 32 << 20])
    def test_the_bytes_that_were_written_are_read(self, store: Store, num_bytes: int) -> None:
        data = os.urandom(num_bytes)
        assert put(store, "some/object", data) is True
        assert get(store, "some/object", num_bytes) == data

    def test_an_object_is_gathered_from_parts_and_scattered_into_others(self, store: Store) -> None:
        data = os.urandom(10_000)
        cuts = [0, 1, 1, 17, 4096, 9_999, 10_000]
        parts = [memoryview(data)[low:high] for low, high in pairwise(cuts)]
        store.write(name("o"), parts)
        buffers = [poisoned(size) for size in (3, 0, 6_000, 3_997)]
        assert store.read(name("o"), [memoryview(buffer) for buffer in buffers]) == 10_000
        assert b"".join(buffers) == data

    def test_thousands_of_parts_are_one_object(self, store: Store) -> None:
        data = os.urandom(5_000)
        store.write(name("o"), [memoryview(data)[at : at + 1] for at in range(5_000)])
        buffer = poisoned(5_000)
        view = memoryview(buffer)
        assert store.read(name("o"), [view[at : at + 2] for at in range(0, 5_000, 2)]) == 5_000
        assert buffer == data

    @pytest.mark.parametrize("offset", [0, 1, 99, 4_096, 9_000])
    def test_a_read_from_an_offset_gives_that_range_and_the_total(self, store: Store, offset: int) -> None:
        data = os.urandom(10_000)
        put(store, "o", data)
        first, second = poisoned(400), poisoned(600)
        assert store.read(name("o"), [memoryview(first), memoryview(second)], offset) == 10_000
        assert first + second == data[offset : offset + 1_000]

    def test_an_offset_past_the_end_gives_the_total(self, store: Store) -> None:
        put(store, "o", b"12345")
        assert store.read(name("o"), [memoryview(bytearray(3))], 5) == 5
        assert store.read(name("o"), [memoryview(bytearray(3))], 500) == 5

    def test_a_read_without_parts_gives_the_total(self, store: Store) -> None:
        put(store, "o", b"12345")
        assert store.read(name("o"), []) == 5

    def test_a_short_object_fills_what_it_has_and_tells_its_total(self, store: Store) -> None:
        put(store, "o", b"12345")
        buffer = poisoned(8)
        assert store.read(name("o"), [memoryview(buffer)]) == 5
        assert buffer[:5] == b"12345"

    def test_nothing_is_written_beyond_the_parts_of_a_long_object(self, store: Store) -> None:
        data = os.urandom(100_000)
        put(store, "o", data)
        buffer = poisoned(3_000)
        view = memoryview(buffer)
        assert store.read(name("o"), [view[1_000:1_500], view[2_000:2_100]]) == 100_000
        expected = poisoned(3_000)
        expected[1_000:1_500], expected[2_000:2_100] = data[:500], data[500:600]
        assert buffer == expected

    @pytest.mark.parametrize("num_bytes", [0, 70_000, 199_999, 200_001, 3_000_001])
    def test_large_parts_take_what_there_is_and_never_more(self, store: Store, num_bytes: int) -> None:
        data, other = os.urandom(num_bytes), os.urandom(90_000)
        put(store, "o", data)
        put(store, "other", other)
        buffer = poisoned(200_100)
        assert store.read(name("o"), [memoryview(buffer)[:200_000]]) == num_bytes
        size = min(num_bytes, 200_000)
        assert buffer[:size] == data[:size]
        assert buffer[200_000:] == poisoned(100)
        assert get(store, "other", 90_000) == other

    def test_whoever_watches_a_read_is_told_only_of_bytes_that_are_in_place(self, store: Store) -> None:
        data = os.urandom(3_000_000)
        put(store, "o", data)
        for offset in (0, 1_000):
            buffers = [poisoned(size) for size in (3, 0, 1_500_000, 1_000_000)]
            watch = Watch(buffers, data[offset:])
            assert store.read(name("o"), watch, offset) == len(data)
            assert watch.told == sorted(watch.told)
            assert watch.told[:1] in ([], [0])
            assert b"".join(buffers) == data[offset : offset + 2_500_003]

    def test_a_second_write_is_refused_and_the_first_bytes_stay(self, store: Store) -> None:
        assert put(store, "o", b"first") is True
        assert put(store, "o", b"other") is False
        assert get(store, "o", 5) == b"first"

    def test_of_many_writers_of_one_name_one_wins_and_its_bytes_are_whole(self, store: Store) -> None:
        contents = [bytes([index]) * 300_000 for index in range(8)]
        start = threading.Barrier(len(contents))

        def write(content: bytes) -> bool:
            start.wait()
            return put(store, "contended", content)

        with ThreadPoolExecutor(len(contents)) as pool:
            won = list(pool.map(write, contents))
        assert won.count(True) == 1
        assert get(store, "contended", 300_000) == contents[won.index(True)]
        assert [info.size_bytes for info in listing(store)] == [300_000]

    def test_a_missing_object_is_missing_to_every_call(self, store: Store) -> None:
        with pytest.raises(ObjectMissing):
            store.read(name("no/such"), [memoryview(bytearray(1))])
        assert store.delete(name("no/such")) is False
        assert store.exists([name("no/such")]) == [False]

    def test_a_deleted_object_is_gone_and_may_be_written_anew(self, store: Store) -> None:
        put(store, "a/o", b"old")
        assert store.delete(name("a/o")) is True
        assert store.delete(name("a/o")) is False
        with pytest.raises(ObjectMissing):
            store.read(name("a/o"), [memoryview(bytearray(3))])
        assert put(store, "a/o", b"new") is True
        assert get(store, "a/o", 3) == b"new"

    def test_exists_answers_in_order(self, store: Store) -> None:
        put(store, "b", b"")
        put(store, "d/e", b"1")
        asked = [name(text) for text in ("a", "b", "c", "d", "d/e", "b")]
        assert store.exists(asked) == [False, True, False, False, True, True]
        assert store.exists([]) == []

    def test_list_gives_each_object_with_the_prefix_once(self, store: Store) -> None:
        for text in ("ns1/aa/1", "ns1/ab/22", "ns1/ab", "ns2/aa/1", "ns"):
            put(store, text, text.encode())
        sizes = {info.name: info.size_bytes for info in listing(store, "ns1/a")}
        assert sizes == {"ns1/aa/1": 8, "ns1/ab/22": 9, "ns1/ab": 6}
        assert len(listing(store)) == 5
        assert listing(store, "ns3") == []
        assert [info.name for info in listing(store, "ns2/")] == ["ns2/aa/1"]

    def test_list_tells_a_time_of_the_write_that_reading_does_not_change(self, store: Store) -> None:
        put(store, "o", b"1")
        (before,) = listing(store, "o")
        get(store, "o", 1)
        (after,) = listing(store, "o")
        assert before.modified_s == after.modified_s > 1.6e9

    def test_awkward_names_are_kept_apart_and_listed_as_given(self, store: Store) -> None:
        for index, text in enumerate(AWKWARD_NAMES):
            assert put(store, text, b"%d" % index) is True
        for index, text in enumerate(AWKWARD_NAMES):
            assert get(store, text, len(str(index))) == b"%d" % index
        assert sorted(info.name for info in listing(store)) == sorted(AWKWARD_NAMES)

    @pytest.mark.parametrize("bad", ["", "/", "a//b", "/a", "a/", "tab\t", "é", "\0", "x" * 513, "a\n", " a"])
    def test_an_invalid_name_is_a_store_error(self, store: Store, bad: str) -> None:
        with pytest.raises(StoreError, match="not valid"):
            put(store, bad, b"1")

    def test_usage_counts_what_is_there(self, store: Store) -> None:
        empty = usage(store)
        put(store, "a", b"12345")
        put(store, "b", b"123")
        put(store, "b", b"123")
        store.delete(name("a"))
        used = usage(store)
        assert (empty.num_objects, empty.used_bytes) == (0, 0)
        assert (used.num_objects, used.used_bytes) == (1, 3)

    def test_the_probe_leaves_nothing_behind(self, store: Store) -> None:
        store.probe()
        store.probe()
        assert listing(store) == []
        assert usage(store).num_objects == 0

    def test_threads_that_write_read_and_delete_see_whole_objects_or_none(self, store: Store) -> None:
        contents = {f"k/{index}": bytes([index]) * 50_000 for index in range(4)}

        def churn(seed: int) -> None:
            for step in range(60):
                text = f"k/{(seed + step) % 4}"
                put(store, text, contents[text])
                buffer = poisoned(50_000)
                try:
                    assert store.read(name(text), [memoryview(buffer)]) == 50_000
                    assert buffer == contents[text]
                except ObjectMissing:
                    pass
                if (seed + step) % 3 == 0:
                    store.delete(name(text))

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(churn, range(6)))
        listed = listing(store)
        assert usage(store).num_objects == len(listed)
        assert usage(store).used_bytes == 50_000 * len(listed)

    def test_a_description_names_the_scheme(self, store: Store) -> None:
        assert "://" in store.describe()

    def test_a_store_may_be_closed_twice(self, store: Store) -> None:
        store.close()
        store.close()
