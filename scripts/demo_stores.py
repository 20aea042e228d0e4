"""The demo's store: files of its own, a real server of its own, or whatever a URL names."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from vllm_hicache.storage.registry import open_store

if TYPE_CHECKING:
    from s3_server import S3Server

SERVERS = ("redis", "s3", "lmcache")
REDIS_SCHEMES = ("redis", "rediss", "unix")
AIMS = {"file": 1.15, "redis": 1.25, "s3": 1.5}
"""What a store hit may take at most, in device hits."""

REDIS_CONFIG = ("maxmemory 4gb",)
"""The sessions of both lengths take 1.1 GB."""

Reads = dict[str, float]
"""Seconds by the way of reading."""


@dataclass(frozen=True, slots=True)
class DemoStore:
    """A store under the demo.

    Attributes:
        kind: `file`, `redis`, `s3` or `lmcache`; another URL's scheme.
        url: what the engine is given; may hold a password.
        shown: the URL without secrets; None for a store that the demo made itself and removes again.
        second_restart: whether a read leaves the store faster than before, as with files in the page cache.
        plain_reads: given a number, reads as many of the largest objects without the engine, one after the other.
    """

    kind: str
    url: str
    shown: str | None
    second_restart: bool
    plain_reads: Callable[[int], Reads]

    @property
    def aim(self) -> float | None:
        """See AIMS."""
        return AIMS.get(self.kind)


@contextmanager
def open_demo_store(argument: str | None, folder: Path) -> Iterator[DemoStore]:
    """The store that `--store` names, which starts what it needs below `folder` and stops it again.

    With `s3`, the server's credentials are put in this process's environment, where engines inherit them.
    Raises ConfigError for a URL that is none, RuntimeError when a server does not start.
    """
    if argument in SERVERS:
        with {"redis": redis_store, "s3": s3_store, "lmcache": lmcache_store}[argument](folder) as store:
            yield store
    elif argument is None:
        root = folder / "store"
        yield DemoStore("file", f"file://{root}", None, True, lambda number: plain_files(root, number))
    else:
        yield named_store(argument)


def named_store(url: str) -> DemoStore:
    """A store of the user's: what else is in it is not ours to read, so there is no ceiling."""
    store = open_store(url)
    shown = store.describe()
    store.close()
    scheme = urlsplit(url).scheme
    kind = "redis" if scheme in REDIS_SCHEMES else scheme
    return DemoStore(kind, url, shown, kind == "file", lambda _: {})


@contextmanager
def redis_store(folder: Path) -> Iterator[DemoStore]:
    """A Redis of the demo's own, over TCP."""
    from redis_server import RedisServer

    with RedisServer(folder / "redis", config=REDIS_CONFIG) as server:
        yield DemoStore("redis", server.url, None, False, lambda number: plain_redis(server.url, number))


@contextmanager
def lmcache_store(folder: Path) -> Iterator[DemoStore]:
    """LMCache's adapter for Redis, on a Redis of the demo's own."""
    from redis_server import HOST, RedisServer

    with RedisServer(folder / "redis", config=REDIS_CONFIG) as server:
        url = f"lmcache://resp?host={HOST}&port={server.port}"
        yield DemoStore("lmcache", url, None, False, lambda number: plain_redis(server.url, number))


@contextmanager
def s3_store(folder: Path) -> Iterator[DemoStore]:
    """A SeaweedFS of the demo's own."""
    from s3_server import S3Server

    with S3Server(folder / "s3") as server:
        os.environ.update(server.environment)
        yield DemoStore("s3", server.url, None, False, lambda number: plain_s3(server, number))


def plain_files(root: Path, number: int) -> Reads:
    """`disk` after the operating system was asked to forget the files, `page_cache` right after that."""
    files = sorted((path for path in root.rglob("*") if path.is_file()), key=lambda path: -path.stat().st_size)
    files = files[:number]
    os.sync()
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return {state: seconds(path.read_bytes for path in files) for state in ("disk", "page_cache")}


def plain_redis(url: str, number: int) -> Reads:
    """GET by redis-py."""
    import redis

    with redis.Redis.from_url(url) as client:
        keys: Sequence[bytes] = list(client.scan_iter(count=1000))
        sizes = dict(zip(keys, (client.strlen(key) for key in keys), strict=True))
        largest = sorted(keys, key=lambda key: -sizes[key])[:number]
        return {"redis-py": seconds(partial(client.get, key) for key in largest)}


def plain_s3(server: S3Server, number: int) -> Reads:
    """`get_object().read()` by boto3."""
    client = server.client()
    try:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=server.bucket)
        objects = [each for page in pages for each in page.get("Contents", [])]
        largest = sorted(objects, key=lambda each: -each["Size"])[:number]

        def read(key: str) -> None:
            client.get_object(Bucket=server.bucket, Key=key)["Body"].read()

        return {"boto3": seconds(partial(read, each["Key"]) for each in largest)}
    finally:
        client.close()


def seconds(reads: Iterable[Callable[[], object]]) -> float:
    """How long all of them take, one after the other."""
    start = time.perf_counter()
    for read in reads:
        read()
    return time.perf_counter() - start
