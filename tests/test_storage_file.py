"""The file store where the medium hurts: kills, full disks, strangers' files, bad roots, odd names."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_store_kit import OBJECT_BYTES, listed_bytes, names, opened, put, run_python, temps, touch
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.errors import ConfigError, ObjectMissing, StoreError, StoreUnavailable
from vllm_hicache.names import ObjectName
from vllm_hicache.storage import file_tree
from vllm_hicache.storage.file import FileStore
from vllm_hicache.storage.file_space import STALE_S, TEMP_FOLDER, USAGE_FILE


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


# Crashes and full disks

HALF_WRITER = """
import os, signal, sys
from vllm_hicache.storage import file_tree
from vllm_hicache.storage.file import FileStore
write = os.pwritev
def half(fd, parts, offset):
    write(fd, [parts[0][: len(parts[0]) // 2]], offset)
    print("half", flush=True)
    signal.pause()
os.pwritev = half
FileStore(sys.argv[1], 1 << 30).write("victim", [memoryview(b"x" * 1000000)])
"""


EVICTION_KILLED = """
import os, signal, sys
from vllm_hicache.storage import file_tree
from vllm_hicache.storage.file import FileStore
unlink = os.unlink
def last(path):
    unlink(path)
    os.kill(os.getpid(), signal.SIGKILL)
os.unlink = last
FileStore(sys.argv[1], int(sys.argv[2])).write("new", [memoryview(bytes(100))])
"""


def test_a_process_killed_while_it_evicts_leaves_a_counter_that_is_counted_anew(root: Path) -> None:
    store = opened(root, 10 * OBJECT_BYTES)
    for index in range(10):
        put(store, f"{index}")
    evictor = run_python(EVICTION_KILLED, str(root), str(10 * OBJECT_BYTES))
    evictor.communicate(timeout=60)
    assert evictor.returncode == -signal.SIGKILL
    assert store.usage().used_bytes == listed_bytes(store) == 9 * OBJECT_BYTES


def killed_in_mid_write(root: Path) -> None:
    writer = run_python(HALF_WRITER, str(root))
    assert writer.stdout is not None
    assert writer.stdout.readline() == "half\n"
    writer.send_signal(signal.SIGKILL)
    writer.communicate()


def test_a_killed_writer_leaves_no_visible_object(root: Path) -> None:
    store = opened(root)
    killed_in_mid_write(root)
    assert store.exists([ObjectName("victim")]) == [False]
    assert names(store) == set()
    with pytest.raises(ObjectMissing):
        touch(store, "victim")
    assert put(store, "victim") is True


def test_what_a_killed_writer_left_counts_until_it_is_swept(root: Path) -> None:
    store = opened(root)
    killed_in_mid_write(root)
    assert store.usage().used_bytes == 1_000_000
    (left,) = temps(root)
    put(FileStore(str(root), 1 << 30), "early")
    assert temps(root) == [left]
    old_s = left.stat().st_mtime - STALE_S - 1
    os.utime(left, (old_s, old_s))
    put(FileStore(str(root), 1 << 30), "late")
    assert temps(root) == []
    assert store.usage().used_bytes == 2 * OBJECT_BYTES


FULL = """
import resource, sys
from vllm_hicache.errors import StoreUnavailable
from vllm_hicache.storage import file_tree
from vllm_hicache.storage.file import FileStore
store = FileStore(sys.argv[1], 1 << 30)
store.probe()
resource.setrlimit(resource.RLIMIT_FSIZE, (100000, resource.RLIM_INFINITY))
try:
    store.write("large", [memoryview(bytes(200000))])
except StoreUnavailable as error:
    print(error)
assert store.write("small", [memoryview(bytes(50000))])
"""


def test_a_write_that_the_system_refuses_is_unavailable_and_leaves_nothing(root: Path) -> None:
    output, _ = run_python(FULL, str(root)).communicate(timeout=60)
    store = opened(root)
    assert output == f"cannot write large in {root}: File too large\n"
    assert names(store) == {"small"}
    assert temps(root) == []
    assert store.usage().used_bytes == 50_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small disk needs root and the right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_unavailable_and_leaves_nothing(small_disk: Path) -> None:
    store = opened(small_disk)
    put(store, "fits", 600_000)
    with pytest.raises(StoreUnavailable, match="No space left"):
        put(store, "does not", 600_000)
    assert names(store) == {"fits"}
    assert temps(small_disk) == []
    assert store.usage().used_bytes == 600_000
    store.delete(ObjectName("fits"))
    assert put(store, "does not", 600_000) is True


def test_a_process_without_descriptors_is_unavailable_and_recovers(root: Path) -> None:
    store = opened(root)
    put(store, "a")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(StoreUnavailable, match="Too many open files"):
            touch(store, "a")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert touch(store, "a") == OBJECT_BYTES


# Strangers' files and bad roots


def test_entries_that_are_not_ours_are_ignored_and_never_deleted(root: Path) -> None:
    store = opened(root, 3 * OBJECT_BYTES)
    put(store, "ns/1")
    strangers = [root / "README", root / "ns" / "x.txt", root / "%61.hc", root / "lost+found" / "1.hc"]
    for path in strangers:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"theirs")
    (root / "link.hc").symlink_to(strangers[0])
    (root / "folder.hc").mkdir()
    assert names(store) == {"ns/1"}
    for index in range(20):
        put(store, f"ns/{index}")
    assert [path.read_bytes() for path in strangers] == [b"theirs"] * 4
    assert (root / "link.hc").is_symlink()
    assert store.exists([ObjectName("link"), ObjectName("folder")]) == [False, False]
    with pytest.raises((ObjectMissing, StoreUnavailable)):
        touch(store, "link")
    assert store.delete(ObjectName("folder")) is False


def test_directories_that_become_empty_are_removed(root: Path) -> None:
    store = opened(root)
    put(store, "ns/aa/1")
    store.delete(ObjectName("ns/aa/1"))
    assert sorted(path.name for path in root.iterdir()) == sorted([TEMP_FOLDER, USAGE_FILE])


def test_files_and_directories_are_for_this_user_alone(root: Path) -> None:
    put(opened(root), "ns/aa/1")
    modes = {path.stat().st_mode & 0o077 for path in [root, *root.rglob("*")]}
    assert modes == {0}


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"cannot be used: .* give a directory"):
            FileStore(str(root), 1).probe()


def test_a_relative_root_is_refused() -> None:
    with pytest.raises(ConfigError, match="relative: give it as file:///absolute/path"):
        FileStore("some/dir", 1).probe()


def test_a_root_that_this_user_may_not_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(ConfigError, match="Permission denied"):
            FileStore(str(folder), 1).probe()
    finally:
        os.seteuid(was)


def test_a_capacity_of_nothing_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="0 bytes"):
        FileStore(str(root), 0)


def test_a_store_that_was_never_made_says_so_instead_of_being_empty(root: Path) -> None:
    store = FileStore(str(root), 1)
    with pytest.raises(StoreUnavailable, match="does not exist"):
        list(store.list(""))
    with pytest.raises(StoreUnavailable, match="does not exist"):
        store.usage()
    assert not root.exists()


# Names as paths

NAMES = st.lists(st.text(st.sampled_from("ab.+%hc- _/~"), min_size=1), min_size=1, max_size=4).map("/".join)


@given(NAMES)
def test_a_name_and_its_path_are_one_to_one(text: str) -> None:
    try:
        path = file_tree.encode(ObjectName(text))
    except StoreError:
        return
    assert file_tree.decode(path) == text
    assert not any(part.startswith(".") or len(part) > 255 for part in path.split("/"))


@given(st.text(st.sampled_from("ab.+%2Ehc/"), max_size=20))
def test_a_path_is_decoded_only_when_it_is_the_names_own(path: str) -> None:
    found = file_tree.decode(path)
    assert found is None or file_tree.encode(found) == path
