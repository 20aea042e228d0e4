"""Fixtures of the tests of `lmcache://` stores: name this module in `pytest_plugins`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis
from lmcache_s3_server import Bucket, running_bucket
from lmcache_scripted import MEDIA, Medium
from redis_server import HOST, RedisServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as running:
        yield running


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with closing(redis.Redis(HOST, server.port)) as connected:
        yield connected


@pytest.fixture
def medium() -> Iterator[Medium]:
    fresh = Medium(uuid.uuid4().hex)
    MEDIA[fresh.label] = fresh
    yield fresh
    del MEDIA[fresh.label]


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with running_bucket() as running:
        yield running
