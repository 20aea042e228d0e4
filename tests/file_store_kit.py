"""Short verbs for the tests of the file store and its kin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from vllm_hicache.names import ObjectName
from vllm_hicache.storage.file import FileStore
from vllm_hicache.storage.file_space import TEMP_FOLDER

OBJECT_BYTES = 10_000


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
