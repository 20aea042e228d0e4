"""LMCache's adapters as a store: what they do wrong costs a miss, and never a byte."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
from lmcache_rig import eventually, make, redis_key, resp, s3, scripted
from lmcache_s3_server import Bucket
from lmcache_scripted import Medium
from redis_server import HOST, RedisServer
from store_conformance import StoreConformance, get, name, poisoned, put

from vllm_hicache.errors import ObjectMissing, StoreCorrupt, StoreError, StoreTimeout, StoreUnavailable
from vllm_hicache.storage.base import Rights, Store
from vllm_hicache.storage.lmcache_adapter import MAX_LINGERING
from vllm_hicache.storage.lmcache_frame import frame_key

pytest_plugins = ["lmcache_fixtures"]


class TestAnAdapterThatLists(StoreConformance):
    """LMCache's own `s3`, the one that does."""

    @pytest.fixture
    def store(self, bucket: Bucket) -> Iterator[Store]:
        store = s3(bucket)
        store.probe()
        yield store
        store.close()

    # Without the 32 MiB: they would be uploaded in parts, which this bucket does not know.
    @pytest.mark.parametrize("num_bytes", [0, 1, 4096, 1_000_003])
    def test_the_bytes_that_were_written_are_read(self, store: Store, num_bytes: int) -> None:
        super().test_the_bytes_that_were_written_are_read(store, num_bytes)


def test_a_frame_that_belongs_to_another_name_is_not_served(medium: Medium) -> None:
    store = scripted(medium)
    put(store, "a", b"A" * 100)
    put(store, "b", b"B" * 100)
    medium.values[frame_key(name("a"), 100)] = medium.values[frame_key(name("b"), 100)]
    with pytest.raises(StoreUnavailable, match="damaged"):
        get(store, "a", 100)
    store.close()


def test_a_value_that_fails_twice_is_removed_and_said_to_be_corrupt(medium: Medium) -> None:
    store = scripted(medium)
    put(store, "a", b"A" * 100)
    key = frame_key(name("a"), 100)
    medium.values[key] = bytes(len(medium.values[key]))
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="damaged"):
            get(store, "a", 100)
    assert key in medium.values
    with pytest.raises(StoreCorrupt, match="removed"):
        get(store, "a", 100)
    with pytest.raises(ObjectMissing):
        get(store, "a", 100)
    assert store.exists([name("a")]) == [False]
    store.close()


def test_a_short_value_reported_as_loaded_does_not_show_what_the_buffer_held_before(medium: Medium) -> None:
    store = scripted(medium)
    put(store, "a", b"A" * 100)
    assert get(store, "a", 100) == b"A" * 100
    medium.loads_short_by = 1
    with pytest.raises(StoreUnavailable, match="damaged"):
        get(store, "a", 100)
    store.close()


def test_the_usual_read_is_one_load(medium: Medium) -> None:
    store = scripted(medium)
    put(store, "a", b"A" * 100)
    before = medium.num_loads
    get(store, "a", 100)
    assert medium.num_loads - before == 1
    store.close()


def test_a_frame_that_the_medium_evicted_alone_is_missing_and_may_be_written_anew(
    server: RedisServer, client: redis.Redis
) -> None:
    store = resp(server)
    put(store, "a", b"A" * 100)
    client.delete(redis_key(frame_key(name("a"), 100)))
    with pytest.raises(ObjectMissing):
        get(store, "a", 100)
    assert store.exists([name("a")]) == [False]
    assert put(store, "a", b"A" * 100) is True
    assert get(store, "a", 100) == b"A" * 100
    store.close()


def test_a_medium_that_was_emptied_is_used_on(server: RedisServer, client: redis.Redis) -> None:
    store = resp(server)
    put(store, "a", b"A")
    client.flushall()
    assert store.exists([name("a")]) == [False]
    assert put(store, "a", b"A") is True
    store.close()


def test_a_store_that_finds_nothing_any_more_is_unavailable_and_not_empty(medium: Medium) -> None:
    store = scripted(medium)
    put(store, "a", b"A")
    medium.finds_nothing = True
    with pytest.raises(StoreUnavailable, match="does not find"):
        store.exists([name("a")])
    with pytest.raises(StoreUnavailable):
        get(store, "a", 1)
    medium.finds_nothing = False
    assert store.exists([name("a")]) == [True]
    store.close()


def test_a_write_that_is_not_taken_is_unavailable_and_leaves_nothing(medium: Medium) -> None:
    store = scripted(medium)
    store.probe()
    medium.stores_nothing = True
    with pytest.raises(StoreUnavailable, match="did not store 165 bytes"):
        put(store, "a", b"A" * 101)
    medium.stores_nothing = False
    assert store.exists([name("a")]) == [False]
    store.close()


def test_a_redis_that_is_full_is_unavailable_and_is_used_again_once_it_has_room(
    server: RedisServer, client: redis.Redis
) -> None:
    store = resp(server)
    store.probe()
    client.config_set("maxmemory", "1")
    with pytest.raises(StoreUnavailable):
        put(store, "a", b"A" * 100_000)
    client.config_set("maxmemory", "0")
    eventually(lambda: put(store, "a", b"A" * 100_000))
    assert get(store, "a", 100_000) == b"A" * 100_000
    store.close()


def test_after_redis_was_killed_and_started_again_the_same_store_works(server: RedisServer) -> None:
    store = resp(server, timeout_s=1.0)
    put(store, "a", b"A")
    server.kill()
    with pytest.raises((StoreUnavailable, StoreTimeout)):
        get(store, "a", 1)
    with pytest.raises((StoreUnavailable, StoreTimeout)):
        store.exists([name("a")])
    server.start()
    eventually(lambda: put(store, "b", b"B"))
    assert get(store, "b", 1) == b"B"
    assert store.exists([name("a"), name("b")]) == [False, True]
    store.close()


def test_a_stopped_redis_is_a_timeout_and_its_late_answer_reaches_no_caller(server: RedisServer) -> None:
    store = resp(server, timeout_s=0.3)
    data = os.urandom(4 << 20)
    eventually(lambda: put(store, "a", data) or store.exists([name("a")]) == [True])
    server.pause()
    buffer = poisoned(len(data))
    with pytest.raises(StoreTimeout):
        store.read(name("a"), [memoryview(buffer)])
    server.resume()
    eventually(lambda: store.exists([name("a")]) == [True])
    assert buffer == poisoned(len(data))
    eventually(lambda: get(store, "a", len(data)) == data)
    store.close()


def test_a_load_that_ends_after_its_deadline_writes_into_no_memory_in_use(medium: Medium) -> None:
    store = scripted(medium, timeout_s=1.0)
    data = {text: os.urandom(70_000) for text in "ab"}
    for text, content in data.items():
        put(store, text, content)
    medium.holds_loads = True
    late = poisoned(70_000)
    with pytest.raises(StoreTimeout):
        store.read(name("a"), [memoryview(late)])
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(get, store, "b", 70_000)
        eventually(lambda: len(medium.held) == 2)
        medium.release()
        assert reading.result() == data["b"]
    assert late == poisoned(70_000)
    eventually(lambda: medium.num_open == 1)
    assert medium.num_adapters == 2
    store.close()


def test_an_adapter_with_a_load_that_hangs_is_not_closed_under_it(medium: Medium) -> None:
    store = scripted(medium, timeout_s=0.1)
    put(store, "a", b"A" * 100)
    medium.holds_loads = True
    with pytest.raises(StoreTimeout):
        get(store, "a", 100)
    store.close()
    assert medium.num_open == 1
    medium.release()
    eventually(lambda: medium.num_open == 0)


def test_when_too_many_adapters_hang_nothing_new_is_begun(medium: Medium) -> None:
    store = scripted(medium, timeout_s=0.1)
    names = [f"o{index}" for index in range(MAX_LINGERING + 1)]
    for text in names:
        put(store, text, b"A" * 100)
    medium.holds_loads = True
    for text in names[:-1]:
        with pytest.raises(StoreTimeout):
            get(store, text, 100)
    with pytest.raises(StoreUnavailable, match="restart"):
        get(store, names[-1], 100)
    medium.holds_loads = False
    medium.release()
    eventually(lambda: get(store, names[-1], 100) == b"A" * 100)
    store.close()


TRESPASS = """
import gc
from lmcache_scripted import MEDIA, Medium, settings
from vllm_hicache.errors import StoreTimeout
from vllm_hicache.storage.base import StoreOptions
from vllm_hicache.storage.lmcache import LmcacheStore
from vllm_hicache.storage.lmcache_config import choose

MEDIA["m"] = medium = Medium("m")
store = LmcacheStore(choose("plugin", settings("m"), 4, {}), StoreOptions(1.0, 4), 0.0)
data, buffer = b"A" * (4 << 20), bytearray(4 << 20)
assert store.write("a", [memoryview(data)])
medium.overrun_bytes = 8 << 20
assert store.read("a", [memoryview(buffer)]) == len(data) and buffer == data
medium.holds_loads = True
try:
    store.read("a", [memoryview(buffer)])
except StoreTimeout as error:
    error.__traceback__ = None
gc.collect()
medium.release()
store.close()
"""


def test_an_adapter_may_write_late_and_past_the_end_of_a_buffer_without_harm() -> None:
    """In a process of its own, which dies of it where the buffer is gone or has no guard."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", TRESPASS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_new_adapters_are_made_at_a_limited_rate(medium: Medium) -> None:
    store = scripted(medium, reopen_s=3600.0)
    put(store, "a", b"A" * 100)
    medium.loads_short_by = 1
    with pytest.raises(StoreUnavailable, match="damaged"):
        get(store, "a", 100)
    with pytest.raises(StoreUnavailable, match="at most every 3600 s"):
        get(store, "a", 100)
    assert medium.num_adapters == 1
    store.close()


def test_an_adapter_that_cannot_delete_says_so(medium: Medium) -> None:
    medium.cannot_delete = True
    store = scripted(medium)
    assert store.probe() == Rights(write=True, delete=False)
    put(store, "a", b"A")
    with pytest.raises(StoreError, match="cannot delete"):
        store.delete(name("a"))
    assert get(store, "a", 1) == b"A"
    store.close()


@pytest.mark.parametrize("adapter", ["fs", "resp"])
def test_a_closed_store_leaves_no_thread_behind(adapter: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    given = {"base_path": str(tmp_path)}
    if adapter == "resp":
        given = {"host": HOST, "port": str(request.getfixturevalue("server").port)}
    before = set(threading.enumerate())
    store = make(adapter, **given)
    put(store, "a", b"A")
    assert set(threading.enumerate()) > before
    store.close()
    # The pool in which `fs` reads its files ends by itself.
    eventually(lambda: {thread for thread in threading.enumerate() if "asyncio" not in thread.name} <= before)
    with pytest.raises(StoreUnavailable, match="closed"):
        get(store, "a", 1)
