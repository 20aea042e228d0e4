"""The file store's capacity: held across threads and processes, beside readers, whatever cannot be removed."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from file_store_kit import OBJECT_BYTES, listed_bytes, names, opened, put, run_python, temps, touch

from vllm_hicache.errors import ObjectMissing, StoreUnavailable
from vllm_hicache.names import ObjectName
from vllm_hicache.storage.file_space import USAGE_FILE


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


# Capacity


def test_the_least_recently_read_objects_are_evicted(root: Path) -> None:
    store = opened(root, 10 * OBJECT_BYTES)
    for index in range(10):
        put(store, f"ns/{index}")
    touch(store, "ns/0")
    touch(store, "ns/2")
    put(store, "ns/new")
    assert {"ns/0", "ns/2", "ns/new"} <= names(store)
    assert not {"ns/1", "ns/3"} <= names(store)
    assert listed_bytes(store) <= 10 * OBJECT_BYTES


def test_every_read_counts_and_not_only_the_first(root: Path) -> None:
    store = opened(root, 10 * OBJECT_BYTES)
    for index in range(10):
        put(store, f"{index}")
    for index in range(10):
        touch(store, f"{index}")
    touch(store, "0")
    put(store, "new")
    assert "0" in names(store)
    assert "1" not in names(store)


def test_a_second_save_of_an_object_keeps_it_from_eviction(root: Path) -> None:
    store = opened(root, 10 * OBJECT_BYTES)
    for index in range(10):
        put(store, f"{index}")
    assert put(store, "0") is False
    put(store, "new")
    assert "0" in names(store)
    assert "1" not in names(store)


def test_manifests_are_evicted_last(root: Path) -> None:
    store = opened(root, 10 * OBJECT_BYTES)
    put(store, "ns/namespace.json", 100)
    for index in range(40):
        put(store, f"ns/{index}")
    assert "ns/namespace.json" in names(store)


def test_the_capacity_holds_after_every_write(root: Path) -> None:
    store = opened(root, 10 * OBJECT_BYTES)
    for index in range(60):
        assert put(store, f"{index % 7}/{index}", OBJECT_BYTES - index) is True
        assert listed_bytes(store) <= 10 * OBJECT_BYTES
        assert store.usage().used_bytes == listed_bytes(store)


def test_an_object_larger_than_the_capacity_is_refused_and_evicts_nothing(root: Path) -> None:
    store = opened(root, 10 * OBJECT_BYTES)
    put(store, "small")
    with pytest.raises(StoreUnavailable, match="the object alone is larger; raise `capacity`"):
        put(store, "large", 10 * OBJECT_BYTES + 1)
    assert names(store) == {"small"}


# The counter's lock stops reservations and evictions, so that a listing is one moment's truth.
WRITER = """
import fcntl, os, sys
from vllm_hicache.storage import file_tree
from vllm_hicache.storage.file import FileStore
root, label, capacity, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
store = FileStore(root, capacity)
print("ready", flush=True)
for index in range(150):
    assert store.write(f"{label}/{index}", [memoryview(bytes(size))])
    with open(os.path.join(root, ".usage")) as counter:
        fcntl.flock(counter, fcntl.LOCK_EX)
        assert sum(info.size_bytes for info in store.list("")) <= capacity
"""


def test_two_processes_that_share_a_directory_hold_the_capacity_together(root: Path) -> None:
    capacity_bytes = 20 * OBJECT_BYTES
    store = opened(root, capacity_bytes)
    writers = [run_python(WRITER, str(root), label, str(capacity_bytes), str(OBJECT_BYTES)) for label in "ab"]
    assert [writer.communicate(timeout=120)[0] for writer in writers] == ["ready\n", "ready\n"]
    assert [writer.returncode for writer in writers] == [0, 0]
    assert 15 * OBJECT_BYTES <= listed_bytes(store) <= capacity_bytes
    assert store.usage().used_bytes == listed_bytes(store)
    assert temps(root) == []


def test_threads_hold_the_capacity_together(root: Path) -> None:
    store = opened(root, 20 * OBJECT_BYTES)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda index: put(store, f"{index % 5}/{index}"), range(300)))
    assert store.usage().used_bytes == listed_bytes(store) <= 20 * OBJECT_BYTES


def test_a_full_rescan_is_rare(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scans: list[str] = []
    scandir = os.scandir

    def counting(folder: str) -> object:
        scans.append(folder)
        return scandir(folder)

    store = opened(root, 100 * OBJECT_BYTES)
    monkeypatch.setattr(os, "scandir", counting)
    for index in range(300):
        put(store, f"{index}")
    assert 1 <= scans.count(f"{root}/") <= 25


def test_an_undeletable_object_is_passed_over_and_counted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(root, 10 * OBJECT_BYTES)
    put(store, "stuck")
    unlink = os.unlink

    def refusing(path: str) -> None:
        if "stuck" in path:
            raise PermissionError(1, "Operation not permitted")
        unlink(path)

    monkeypatch.setattr(os, "unlink", refusing)
    for index in range(50):
        assert put(store, f"{index}") is True
    assert "stuck" in names(store)
    assert listed_bytes(store) <= 10 * OBJECT_BYTES
    assert store.num_undeletable > 0
    with pytest.raises(StoreUnavailable, match="cannot delete stuck"):
        store.delete(ObjectName("stuck"))


def test_a_store_full_of_undeletable_objects_refuses_writes_and_stays_readable(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(root, 2 * OBJECT_BYTES)
    put(store, "a")
    put(store, "b")

    def refusing(path: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refusing)
        with pytest.raises(StoreUnavailable, match="2 evictions were refused"):
            put(store, "c")
        assert touch(store, "a") == OBJECT_BYTES
    assert put(store, "c") is True


def test_files_removed_behind_our_back_are_noticed_when_the_store_seems_full(root: Path) -> None:
    store = opened(root, 10 * OBJECT_BYTES)
    for index in range(10):
        put(store, f"gone/{index}")
    shutil.rmtree(root / "gone")
    put(store, "new")
    assert names(store) == {"new"}
    assert store.usage().used_bytes == OBJECT_BYTES


@pytest.mark.parametrize("content", [b"", b"junk", b"x" * 500, None])
def test_a_damaged_or_missing_counter_is_counted_anew(root: Path, content: bytes | None) -> None:
    store = opened(root)
    put(store, "a")
    put(store, "b")
    if content is None:
        (root / USAGE_FILE).unlink()
    else:
        (root / USAGE_FILE).write_bytes(content)
    assert (store.usage().num_objects, store.usage().used_bytes) == (2, 2 * OBJECT_BYTES)


def test_a_directory_removed_while_in_use_is_made_anew(root: Path) -> None:
    store = opened(root)
    put(store, "a")
    shutil.rmtree(root)
    with pytest.raises(ObjectMissing):
        touch(store, "a")
    assert store.exists([ObjectName("a")]) == [False]
    assert put(store, "a") is True
    assert touch(store, "a") == OBJECT_BYTES


# Readers beside evictions


def test_an_object_evicted_by_another_process_is_missing_and_stays_so(root: Path) -> None:
    one, other = opened(root), opened(root)
    put(one, "a")
    other.delete(ObjectName("a"))
    with pytest.raises(ObjectMissing):
        touch(one, "a")
    assert names(one) == set()


def test_readers_see_whole_objects_or_none_while_another_store_evicts(root: Path) -> None:
    writer, reader = opened(root, 5 * OBJECT_BYTES), opened(root)
    contents = {f"{index}": bytes([index]) * OBJECT_BYTES for index in range(20)}

    def write(_: int) -> None:
        for text, content in contents.items():
            writer.write(ObjectName(text), [memoryview(content)])

    def read(text: str) -> None:
        for _ in range(50):
            buffer = bytearray(OBJECT_BYTES)
            try:
                assert reader.read(ObjectName(text), [memoryview(buffer)]) == OBJECT_BYTES
                assert buffer == contents[text]
            except ObjectMissing:
                continue

    with ThreadPoolExecutor(4) as pool:
        written, done = pool.map(write, range(6)), pool.map(read, contents)
        assert list(written) == [None] * 6
        assert list(done) == [None] * 20
    assert listed_bytes(writer) <= 5 * OBJECT_BYTES
