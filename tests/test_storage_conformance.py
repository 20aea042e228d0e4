"""Every backend, bare and below every stack of wrappers, keeps the contract of a store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from store_conformance import BACKENDS, STACKS, StoreConformance

from vllm_hicache.storage.base import Store

LOCAL = ("file", "memory")
COMBINATIONS = [
    (backend, stack) for backend in BACKENDS for stack in STACKS if backend in LOCAL or stack in ("bare", "whole stack")
]
"""A store across a network is slow: it is run bare and below the stack that an engine uses."""


class TestEveryStore(StoreConformance):
    @pytest.fixture(params=COMBINATIONS, ids=" ".join)
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
        backend, stack = request.param
        with BACKENDS[backend](tmp_path) as bare:
            yield STACKS[stack](bare)
