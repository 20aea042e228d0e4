"""The two ends of a link, of which the test module's own `ends` makes a pair: name this module in `pytest_plugins`."""

from __future__ import annotations

import pytest
from transport_kit import Reading, Served


@pytest.fixture
def served(ends: tuple[Served, Reading]) -> Served:
    return ends[0]


@pytest.fixture
def reading(ends: tuple[Served, Reading]) -> Reading:
    return ends[1]
