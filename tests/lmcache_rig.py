"""LMCache stores over real and over scripted media for tests: how to open them, and how to reach behind them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from lmcache_s3_server import Bucket
from lmcache_scripted import Medium, settings
from redis_server import HOST, RedisServer

from vllm_hicache.errors import StoreError
from vllm_hicache.storage.base import StoreOptions
from vllm_hicache.storage.lmcache import LmcacheStore
from vllm_hicache.storage.lmcache_config import choose
from vllm_hicache.storage.lmcache_frame import ObjectKey

BACK_WITHIN_S = 20.0


def make(adapter: str, timeout_s: float = 20.0, reopen_s: float = 0.05, **settings: str) -> LmcacheStore:
    choice = choose(adapter, settings, 4, {})
    return LmcacheStore(choice, StoreOptions(timeout_s, 4), reopen_s)


def resp(server: RedisServer, timeout_s: float = 20.0) -> LmcacheStore:
    return make("resp", timeout_s, host=HOST, port=str(server.port))


def scripted(medium: Medium, timeout_s: float = 20.0, reopen_s: float = 0.0) -> LmcacheStore:
    return make("plugin", timeout_s, reopen_s, **settings(medium.label))


def s3(bucket: Bucket) -> LmcacheStore:
    choice = choose("s3", bucket.settings, 4, {"VLLM_HICACHE_LMCACHE_AWS_SECRET_ACCESS_KEY": "secret"})
    return LmcacheStore(choice, StoreOptions(20.0, 4), 0.05)


def eventually(attempt: Callable[[], bool]) -> None:
    """Try until it is true; store errors count as not yet."""
    deadline = time.monotonic() + BACK_WITHIN_S
    while True:
        try:
            if attempt():
                return
        except StoreError:
            pass
        assert time.monotonic() < deadline, "not back in time"
        time.sleep(0.02)


def redis_key(key: ObjectKey) -> str:
    return f"{key.model_name}@{key.kv_rank:08x}@{key.object_group_id:x}@{key.chunk_hash.hex()}"


def file_of(folder: Path, key: ObjectKey) -> Path:
    return folder / f"{key.model_name}@{key.kv_rank:#010x}@{key.object_group_id:x}@{key.chunk_hash.hex()}.data"
