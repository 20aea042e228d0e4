"""LMCache stores for tests: on a directory, and on one real redis-server for all tests of a run."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import redis
from redis_server import HOST, RedisServer

from vllm_hicache.storage.base import Store, StoreOptions
from vllm_hicache.storage.registry import open_store

# LMCache's connector takes half a second to close, which tests in hundreds need not wait for.
_closers = ThreadPoolExecutor(4)


@functools.cache
def shared_server() -> RedisServer:
    """The server of this run, started by the first test that wants it."""
    folder = Path(tempfile.mkdtemp(prefix="hicache-lmcache-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    server = RedisServer(folder)
    server.__enter__()
    atexit.register(server.stop)
    return server


def resp_url(server: RedisServer) -> str:
    return f"lmcache://resp?host={HOST}&port={server.port}"


@contextmanager
def resp_store(folder: Path) -> Iterator[Store]:
    server = shared_server()
    with closing(redis.Redis(HOST, server.port)) as client:
        client.flushall()
    store = open_store(resp_url(server), StoreOptions(timeout_s=20.0))
    store.probe()
    yield store
    _closers.submit(store.close)


@contextmanager
def fs_store(folder: Path) -> Iterator[Store]:
    store = open_store(f"lmcache://fs?base_path={folder}", StoreOptions(timeout_s=20.0))
    store.probe()
    yield store
    store.close()
