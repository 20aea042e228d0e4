"""The memory store: shared by name, outliving its process, closed to other users."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_store_kit import OBJECT_BYTES, names, put, touch

from vllm_hicache.errors import ConfigError, StoreUnavailable
from vllm_hicache.storage.memory import SHARED_MEMORY, MemoryStore


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
