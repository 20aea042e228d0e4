"""Fixtures of the tests of lives of requests: name this module in `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lifecycle_kit import Gates
from simulated_engine import SimulatedEngine
from simulated_faults import CopyGates, StoreFaults, faulty_stores


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreFaults]:
    with faulty_stores(monkeypatch) as faults:
        yield faults


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gates]:
    """Gates before the copies of one rank."""
    opened: list[CopyGates] = []

    def before(engine: SimulatedEngine, rank: int) -> CopyGates:
        opened.append(engine.ranks[rank].gate_copies(monkeypatch))
        return opened[-1]

    yield before
    for each in opened:
        each.open_all()
