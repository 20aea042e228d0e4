"""Fixtures of the tests of handoffs: name this module in `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from handoff_kit import Reads, ReadsOf
from simulated_handoff import HandoffEngine, StartPair, pairs_on


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartPair]:
    with pairs_on(tmp_path) as start:
        yield start


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/shared?capacity=1GiB"


@pytest.fixture
def reads_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReadsOf]:
    """Watches the pages that an engine serves."""
    watched: list[Reads] = []

    def watch(engine: HandoffEngine) -> Reads:
        watched.append(Reads(monkeypatch, engine))
        return watched[-1]

    yield watch
    for each in watched:
        each.gate.open()
