"""A filled store and the `vllm-hicache store` command upon it, for the tests of its verbs."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from vllm_hicache.cli import store as cli
from vllm_hicache.errors import StoreTimeout
from vllm_hicache.names import ObjectName, PageKey, Role
from vllm_hicache.namespace import DraftSpace
from vllm_hicache.storage import file_tree
from vllm_hicache.storage.base import Store, StoreOptions
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.storage.envelope import ChunkId, Grid, namespace_part
from vllm_hicache.storage.file import FileStore
from vllm_hicache.storage.manifest import write_manifest
from vllm_hicache.storage.registry import open_store
from vllm_hicache.storage.wrappers import StoreWrapper

UNIT_BYTES = 64
PAYLOAD = bytes(range(256))
GRID = Grid(1, 2)
ONE, TWO = b"\x01" * 32, b"\x02" * 32
ONE_PART, TWO_PART = "01" * 8, "02" * 8
FIELDS: dict[str, str | int] = {"model": "m/x", "dtype": "bfloat16", "page_tokens": 256}
DAY_S = 86400
SPACE = DraftSpace("eagle3", "m/draft", "bfloat16", "none", "made-up", 1, 2, 64, "1x2", True)
DRAFT = SPACE.digest_for(ONE)
DRAFT_PART = namespace_part(DRAFT)

Run = Callable[..., int]


def chunk(page: int, head_group: int = 0, role: Role = Role.TARGET) -> ChunkId:
    return ChunkId(PageKey(bytes([page]) * 32), 0, role, 0, head_group)


def filled(folder: Path) -> FileStore:
    """A store with what `fill` puts in."""
    store = FileStore(str(folder), 1 << 20)
    store.probe()
    fill(store)
    return store


def fill(store: Store) -> None:
    """Three pages of two chunks in namespace one, one page of one chunk in namespace two."""
    write_manifest(store, ONE, FIELDS)
    for page in range(3):
        for head_group in range(2):
            ChunkStore(store, ONE, GRID).save(chunk(page, head_group), memoryview(PAYLOAD), UNIT_BYTES)
    ChunkStore(store, TWO, GRID).save(chunk(9), memoryview(PAYLOAD), UNIT_BYTES)


def fill_draft(store: Store) -> set[ObjectName]:
    """The draft's two chunks of two of the pages in namespace one, as engines leave them; names of the chunks."""
    write_manifest(store, DRAFT, SPACE.fields_for(ONE))
    chunks = [chunk(page, head_group, Role.DRAFT) for page in range(2) for head_group in range(2)]
    for each in chunks:
        ChunkStore(store, DRAFT, GRID).save(each, memoryview(PAYLOAD), UNIT_BYTES)
    return {each.object_name(DRAFT) for each in chunks}


def url_of(store: FileStore) -> str:
    return f"file://{store.root}?capacity=1MiB"


def run_on(default_url: str, verb: str, *options: str, url: str = "") -> int:
    """Run `vllm-hicache store VERB URL OPTIONS` in this process; its exit code."""
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    args = parser.parse_args(["store", verb, url or default_url, *options])
    code: int = args.run(args)
    return code


def names(store: Store) -> set[str]:
    return {info.name for info in store.list("")}


def path_of(store: FileStore, name: ObjectName) -> Path:
    return Path(store.root, file_tree.encode(name))


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def age(store: FileStore, name: ObjectName, days: float) -> None:
    path = path_of(store, name)
    written_s = path.stat().st_mtime - days * DAY_S
    os.utime(path, (written_s, written_s))


def empty(store: Store) -> None:
    for info in list(store.list("")):
        store.delete(info.name)


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return result


class Failing(StoreWrapper):
    """Cannot read the objects whose names hold `part`."""

    def __init__(self, inner: Store, part: str) -> None:
        super().__init__(inner)
        self._part = part

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        if self._part in name:
            raise StoreTimeout("took more than 5 s")
        return super().read(name, parts, offset)


def put_in_front(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    def opened(url: str, options: StoreOptions) -> Store:
        return Failing(open_store(url, options), part)

    monkeypatch.setattr(cli, "open_store", opened)
