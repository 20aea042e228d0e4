"""Fixtures of the tests of groups of ranks: name this module in `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from shard_kit import Group, MakeTeam, Team
from transfer_fixtures import WatchedStore


@pytest.fixture
def store(tmp_path: Path) -> WatchedStore:
    return WatchedStore.on_files(tmp_path)


@pytest.fixture
def make_team(store: WatchedStore) -> Iterator[MakeTeam]:
    teams: list[Team] = []

    def make(num_owners: int = 2, timeout_s: float = 30.0, **group: object) -> Team:
        teams.append(Team(Group(num_owners, **group), store, timeout_s))  # type: ignore[arg-type]
        return teams[-1]

    yield make
    for team in teams:
        for collective in team.collectives:
            collective.before_meeting = lambda row: None
        team.close()
