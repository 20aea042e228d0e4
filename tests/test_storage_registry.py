"""From URLs to stores: strict, lazy, and with advice that never repeats a secret."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_hicache.errors import ConfigError
from vllm_hicache.storage.file import FileStore
from vllm_hicache.storage.memory import MemoryStore
from vllm_hicache.storage.registry import open_store


def test_a_file_url_opens_its_directory_with_its_capacity(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/a%20b?capacity=50GiB")
    assert isinstance(store, FileStore)
    assert store.root == f"{tmp_path}/a b"
    assert store.describe() == f"file://{tmp_path}/a%20b?capacity=50GiB"
    assert not Path(store.root).exists()


def test_a_description_opens_the_same_store(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/x%3Fy?capacity=1GiB")
    assert open_store(store.describe()).describe() == store.describe()


def test_a_tilde_is_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store = open_store("file://~/cache?capacity=1GiB")
    assert isinstance(store, FileStore)
    assert store.root == str(tmp_path / "cache")


def test_a_file_store_without_a_capacity_is_bounded_by_half_of_its_disk(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/deep/below")
    store.probe()
    capacity_bytes = store.usage().capacity_bytes
    assert capacity_bytes is not None
    assert capacity_bytes > 1 << 20


def test_a_memory_url_opens_shared_memory() -> None:
    try:
        store = open_store("memory://Name_1?capacity=1MiB")
    except ConfigError as error:
        pytest.skip(str(error))
    assert isinstance(store, MemoryStore)
    assert store.describe() == "memory://Name_1?capacity=1MiB"


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("flie:///d", "did you mean 'file'"),
        ("http://h/", "known: file, lmcache, memory, redis, rediss, s3, unix"),
        ("file:///d?capcity=1GiB", "'capcity' is unknown: did you mean 'capacity'"),
        ("memory://n?size=1", "known: capacity"),
        ("file:///d?capacity", "malformed"),
        ("file:///d?capacity=", "'capacity': size ''"),
        ("file:///d?capacity=8G", "write 8GiB"),
        ("file:///d?capacity=0", "is 0"),
        ("file:///d?capacity=1GiB&capacity=2GiB", "twice"),
        ("file:///d#x", "fragment"),
        ("file://host/d", "three slashes"),
        ("file://", "no directory"),
        ("file:///", "no directory"),
        ("file:/d", "no URL"),
        ("/d", "no URL"),
        ("", "no URL"),
        ("http://[", "malformed"),
        ("memory://a/b", "without one"),
        ("memory://..", "letters"),
        ("memory://.x", "letters"),
    ],
)
def test_a_url_that_cannot_be_honoured_is_refused_with_advice(url: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redsi://user:hunter2@host/0",
        "s3://b?secret_key=hunter2",
        "file://hunter2@",
    ],
)
def test_no_message_repeats_a_secret(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert "hunter2" not in str(caught.value)


def test_a_backend_is_imported_when_its_scheme_is_asked_for() -> None:
    code = "import sys, vllm_hicache.storage.registry; print('vllm_hicache.storage.memory' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
