"""Fixtures of the tests of the scheduler half: name this module in `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from scheduler_kit import Gate, MakeRig, OpenStore, Rig

from vllm_hicache.grid import Grid
from vllm_hicache.names import Role
from vllm_hicache.namespace import Spaces
from vllm_hicache.storage.chunks import ChunkStore, RoleChunks
from vllm_hicache.storage.file import FileStore


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    gate = Gate(FileStore(str(tmp_path), 1 << 26))
    gate.probe()
    return gate


@pytest.fixture
def open_store(gate: Gate) -> OpenStore:
    def opened(spaces: Spaces) -> RoleChunks:
        digests = {Role.TARGET: spaces.target, Role.DRAFT: spaces.draft}
        return RoleChunks({role: ChunkStore(gate, each, Grid(1, 1)) for role, each in digests.items() if each})

    return opened


@pytest.fixture
def make(gate: Gate) -> Iterator[MakeRig]:
    """Makes rigs; at the end of every test each must hold nothing."""
    rigs: list[Rig] = []

    def make(*args: object, **kwargs: object) -> Rig:
        rigs.append(Rig(*args, **kwargs))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    gate.open.set()
    for rig in rigs:
        rig.close()
