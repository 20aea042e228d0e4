"""Small steps that the tests of the redis store share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import redis

from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import Store, StoreOptions
from vllm_hicache.storage.registry import open_store

OBJECT = ObjectName("a/b")
DATA = bytes(range(256)) * 8


@contextmanager
def opened(url: str, options: StoreOptions | None = None) -> Iterator[Store]:
    """A store, not probed, and closed in the end."""
    with closing(open_store(url, options)) as store:
        yield store


def put(store: Store, data: bytes = DATA, name: str = OBJECT) -> bool:
    return store.write(ObjectName(name), [memoryview(data)])


def get(store: Store, num_bytes: int = len(DATA), name: str = OBJECT) -> bytes:
    """The first bytes of an object, in a buffer that was poisoned before."""
    buffer = bytearray(b"\xa5") * num_bytes
    store.read(ObjectName(name), [memoryview(buffer)])
    return bytes(buffer)


def num_connections(client: redis.Redis) -> int:
    """How many the server has been asked for since `config_resetstat`."""
    return client.info("stats")["total_connections_received"]


def until(condition: Callable[[], bool]) -> None:
    """Return once the condition holds; pytest's timeout ends what never does."""
    while not condition():
        time.sleep(0.01)
