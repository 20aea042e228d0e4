"""Fixtures of the tests of a scheduler half that hands prompts over: name this module in `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from scheduler_handoff_kit import LEASE_S, Clock, HandoffRig, MakeHandoff

from vllm_hicache import scheduler


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


@pytest.fixture
def pair(clock: Clock) -> Iterator[MakeHandoff]:
    """Makes rigs; at the end of every test each must hold nothing."""
    rigs: list[HandoffRig] = []

    def make(*arguments: object, **settings: object) -> HandoffRig:
        rigs.append(HandoffRig(*arguments, **{"peer_lease_s": LEASE_S, **settings}))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
