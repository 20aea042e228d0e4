"""Fixtures of the tests of the worker half: name this module in `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from layout_kit import role_chunks
from transfer_fixtures import Tensors, WatchedStore
from worker_kit import PAGE_BYTES, MakeHalf

from vllm_hicache.config import Config
from vllm_hicache.geometry import PageLayout
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import Role
from vllm_hicache.place import Place
from vllm_hicache.storage.file import FileStore
from vllm_hicache.stores import StoreFactory
from vllm_hicache.worker import WorkerHalf

ALONE = Place(rank=5)


@pytest.fixture
def store(tmp_path: Path) -> WatchedStore:
    return WatchedStore(FileStore(str(tmp_path / "store"), 1 << 30))


@pytest.fixture
def make_half(store: WatchedStore) -> Iterator[MakeHalf]:
    """Makes halves over one store: of rank 5, alone, where no place is given."""
    halves: list[WorkerHalf] = []

    def open_store(layout: PageLayout) -> StoreFactory:
        return lambda spaces: role_chunks(store, layout, spaces.target)

    def make(tensors: Tensors, available_bytes: int = 1 << 30, place: Place = ALONE, **settings: object) -> WorkerHalf:
        raw = {"page_tokens": 8, "grid": "1x2", "host_memory": 8 * PAGE_BYTES + 1, "io_threads": 2} | settings
        half = WorkerHalf(
            Config.parse(raw), place, tensors, 4, {Role.TARGET: "test"}, Metrics(), available_bytes, open_store
        )
        halves.append(half)
        return half

    yield make
    for half in halves:
        half.close()
