"""The file store where the medium hurts: capacity, other processes, kills, full disks, strangers' files."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vllm_hicache.errors import ConfigError, ObjectMissing, StoreUnavailable
from vllm_hicache.names import ObjectName
from vllm_hicache.storage.file import FileStore
from vllm_hicache.storage.file_space import STALE_S, TEMP_FOLDER, USAGE_FILE
from vllm_hicache.storage.memory import SHARED_MEMORY, MemoryStore

OBJECT_BYTES = 10_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def opened(root: Path, capacity_bytes: int = 1 << 30) -> FileStore:
    store = FileStore(str(root), capacity_bytes)
    store.probe()
    return store


def put(store: FileStore, text: str, num_bytes: int = OBJECT_BYTES) -> bool:
    return store.write(ObjectName(text), [memoryview(bytes(num_bytes))])


def touch(store: FileStore, text: str) -> int:
    return store.read(ObjectName(text), [memoryview(bytearray(1))])


def names(store: FileStore) -> set[str]:
    return {info.name for info in store.list("")}


def listed_bytes(store: FileStore) -> int:
    return sum(info.size_bytes for info in store.list(""))


def temps(root: Path) -> list[Path]:
    return list((root / TEMP_FOLDER).iterdir())


def run_python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)


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


def test_an_undeletable_object_is_passed_over_and_counted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# Crashes and full disks

HALF_WRITER = """
import os, signal, sys
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


# Shared memory


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[str]:
    """An empty directory on the host's tmpfs that stands for all of it."""
    folder = f"{SHARED_MEMORY}/test-{uuid.uuid4().hex}"
    try:
        os.mkdir(folder)
    except OSError as error:
        pytest.skip(str(error))
    yield folder
    shutil.rmtree(folder)


def private_folder(tmpfs: str) -> str:
    return f"{tmpfs}/vllm-hicache-{os.geteuid()}"


def test_memory_outlives_the_store_and_is_shared_by_name(tmpfs: str) -> None:
    one = MemoryStore("shared", 1 << 20, tmpfs)
    one.probe()
    put(one, "a")
    one.close()
    assert touch(MemoryStore("shared", 1 << 20, tmpfs), "a") == OBJECT_BYTES
    other = MemoryStore("other", 1 << 20, tmpfs)
    other.probe()
    assert names(other) == set()


def test_memory_without_a_tmpfs_is_refused(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"no tmpfs at .*none: mount one .* or use file:///dir"):
        MemoryStore("n", 1, missing)


def test_memory_larger_than_its_tmpfs_is_refused(tmpfs: str) -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        MemoryStore("n", 1 << 60, tmpfs)


def test_memory_takes_half_of_its_tmpfs_by_default(tmpfs: str) -> None:
    store = MemoryStore("n", None, tmpfs)
    store.probe()
    status = os.statvfs(tmpfs)
    assert store.usage().capacity_bytes == status.f_blocks * status.f_frsize // 2


def test_a_directory_that_others_may_enter_is_refused_before_and_after_opening(tmpfs: str) -> None:
    store = MemoryStore("n", 1 << 20, tmpfs)
    os.mkdir(private_folder(tmpfs))
    os.chmod(private_folder(tmpfs), 0o755)
    with pytest.raises(ConfigError, match="mode 0700"):
        store.probe()
    with pytest.raises(StoreUnavailable, match="mode 0700"):
        put(store, "a")
    with pytest.raises(ConfigError, match="mode 0700"):
        MemoryStore("n", 1 << 20, tmpfs)


def test_a_directory_of_another_user_is_refused(tmpfs: str) -> None:
    os.mkdir(private_folder(tmpfs), mode=0o700)
    try:
        os.chown(private_folder(tmpfs), 65534, 65534)
    except PermissionError:
        pytest.skip("giving a directory away needs root")
    with pytest.raises(ConfigError, match="of user 65534"):
        MemoryStore("n", 1 << 20, tmpfs)


def test_a_link_in_place_of_the_directory_is_refused(tmpfs: str, tmp_path: Path) -> None:
    os.symlink(tmp_path, private_folder(tmpfs))
    with pytest.raises(ConfigError, match="mode 0700"):
        MemoryStore("n", 1 << 20, tmpfs)
