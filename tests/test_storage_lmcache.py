"""LMCache's adapters as a store: what they do wrong costs a miss, and never a byte."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import redis
from lmcache_scripted import MEDIA, Medium, settings
from redis_server import HOST, RedisServer
from store_conformance import StoreConformance, get, name, poisoned, put

from vllm_hicache.errors import (
    ConfigError,
    ObjectMissing,
    StoreCorrupt,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
)
from vllm_hicache.grid import Grid
from vllm_hicache.names import MissReason, PageKey, Role
from vllm_hicache.storage.base import Rights, Store, StoreOptions
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.storage.envelope import ChunkId, header_bytes
from vllm_hicache.storage.lmcache import LmcacheStore
from vllm_hicache.storage.lmcache_adapter import MAX_LINGERING
from vllm_hicache.storage.lmcache_config import choose
from vllm_hicache.storage.lmcache_frame import FRAME_BYTES, RECORD_BYTES, ObjectKey, frame_key, record_key
from vllm_hicache.storage.registry import open_store

UNIT_BYTES, NUM_UNITS = 512, 8
PAYLOAD_BYTES = UNIT_BYTES * NUM_UNITS
NAMESPACE = bytes(range(32))
CHUNK = ChunkId(PageKey(bytes(32)), 0, Role.TARGET, 0, 0)
CHUNK_NAME = CHUNK.object_name(NAMESPACE)
OBJECT_BYTES = header_bytes(PAYLOAD_BYTES, UNIT_BYTES) + PAYLOAD_BYTES
BACK_WITHIN_S = 20.0


def make(adapter: str, timeout_s: float = 20.0, reopen_s: float = 0.05, **settings: str) -> LmcacheStore:
    choice = choose(adapter, settings, 4, {})
    return LmcacheStore(choice, StoreOptions(timeout_s, 4), reopen_s)


def resp(server: RedisServer, timeout_s: float = 20.0) -> LmcacheStore:
    return make("resp", timeout_s, host=HOST, port=str(server.port))


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


def scripted(medium: Medium, timeout_s: float = 20.0, reopen_s: float = 0.0) -> LmcacheStore:
    return make("plugin", timeout_s, reopen_s, **settings(medium.label))


def redis_key(key: ObjectKey) -> str:
    return f"{key.model_name}@{key.kv_rank:08x}@{key.object_group_id:x}@{key.chunk_hash.hex()}"


def file_of(folder: Path, key: ObjectKey) -> Path:
    return folder / f"{key.model_name}@{key.kv_rank:#010x}@{key.object_group_id:x}@{key.chunk_hash.hex()}.data"


class TestAnAdapterThatLists(StoreConformance):
    @pytest.fixture
    def store(self, medium: Medium) -> Iterator[Store]:
        store = scripted(medium)
        store.probe()
        yield store
        store.close()


class Target:
    """A store with one saved chunk, and a way to replace a value behind its back."""

    def __init__(self, store: Store, replace: Callable[[ObjectKey, bytes], None], fetch: Callable[[ObjectKey], bytes]):
        self.replace, self.fetch, self.store = replace, fetch, store
        self.chunks = ChunkStore(store, NAMESPACE, Grid(1, 1))
        self.payload = os.urandom(PAYLOAD_BYTES)
        self.save()

    def save(self) -> None:
        eventually(lambda: self.chunks.save(CHUNK, memoryview(self.payload), UNIT_BYTES) in (True, False))

    def load(self) -> MissReason | None:
        buffer = poisoned(PAYLOAD_BYTES)
        reason = self.chunks.load(CHUNK, memoryview(buffer), UNIT_BYTES)
        assert reason is not None or buffer == self.payload, "wrong bytes were served"
        return reason


@pytest.fixture(params=["fs", "resp"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Target]:
    if request.param == "fs":
        store: Store = make("fs", base_path=str(tmp_path))
        yield Target(
            store,
            lambda key, value: (file_of(tmp_path, key).write_bytes(value), None)[1],
            lambda key: file_of(tmp_path, key).read_bytes(),
        )
    else:
        client = request.getfixturevalue("client")
        store = resp(request.getfixturevalue("server"), timeout_s=0.5)
        yield Target(
            store,
            lambda key, value: (client.set(redis_key(key), value), None)[1],
            lambda key: client.get(redis_key(key)),
        )
    store.close()


@pytest.mark.parametrize("of", ["frame", "record"])
@pytest.mark.parametrize("damage", ["empty", "short", "long", "longer", "foreign"])
def test_a_damaged_value_is_a_miss_is_removed_and_heals(target: Target, damage: str, of: str) -> None:
    key, size = (frame_key(CHUNK_NAME, OBJECT_BYTES), OBJECT_BYTES + FRAME_BYTES)
    if of == "record":
        key, size = record_key(CHUNK_NAME), RECORD_BYTES
    value = target.fetch(key)
    assert len(value) == size
    damaged = {
        "empty": b"",
        "short": value[:-1],
        "long": value + b"x",
        "longer": value * 20,
        "foreign": os.urandom(len(value)),
    }[damage]
    target.replace(key, damaged)

    def heals() -> bool:
        if of == "record":
            target.chunks.load_units(CHUNK, 1, memoryview(poisoned(UNIT_BYTES)), UNIT_BYTES, NUM_UNITS)
        target.load()
        target.chunks.save(CHUNK, memoryview(target.payload), UNIT_BYTES)
        return target.load() is None and target.fetch(key)[:8] == value[:8]

    eventually(heals)


def test_a_value_that_puts_every_connection_out_of_step_is_removed_too(
    server: RedisServer, client: redis.Redis
) -> None:
    store = make("resp", 0.5, host=HOST, port=str(server.port), num_workers="1")
    put(store, "a", b"A" * 100)
    key = redis_key(frame_key(name("a"), 100))
    client.set(key, b"x" * 999)
    with pytest.raises(StoreUnavailable):
        get(store, "a", 100)

    def is_removed() -> bool:
        try:
            get(store, "a", 100)
        except ObjectMissing:
            return True
        return False

    eventually(is_removed)
    assert client.exists(key) == 0
    store.close()


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
medium.overrun_bytes = 64 << 20
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


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("lmcache://resq?host=h&port=1", "no adapter 'resq'.*did you mean 'resp'"),
        ("lmcache://?host=h", "no adapter ''"),
        ("lmcache://resp?hosst=h&port=1", "no setting 'hosst'.*did you mean 'host'"),
        ("lmcache://resp?port=1", "refuses its settings: host must be a non-empty string"),
        ("lmcache://resp?host=h&port=x", "port='x' is no int"),
        ("lmcache://resp?host=h&port=-1", "refuses its settings: port must be a positive integer"),
        ("lmcache://resp?host=h&port=1&password=hunter2", "VLLM_HICACHE_LMCACHE_PASSWORD"),
        ("lmcache://fs?base_path=/d&use_odirect=maybe", "use_odirect='maybe' is no bool"),
        ("lmcache://u:hunter2@resp?host=h&port=1", "takes no user or password"),
        ("lmcache://resp/6379?host=h&port=1", "has the path '/6379'"),
    ],
)
def test_a_url_that_names_no_adapter_is_refused_with_the_way_out(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        open_store(url)
    assert "hunter2" not in str(caught.value)


def test_settings_become_what_lmcache_expects(tmp_path: Path) -> None:
    choice = choose("fs", {"base_path": "123", "read_ahead_size": "4096", "use_odirect": "false"}, 4, {})
    config = choice.config
    assert (config.base_path, config.read_ahead_size, config.use_odirect) == ("123", 4096, False)
    assert choose("resp", {"host": "h", "port": "1"}, 7, {}).config.num_workers == 7
    assert choose("resp", {"host": "h", "port": "1", "num_workers": "3"}, 7, {}).config.num_workers == 3


def test_a_directory_that_cannot_be_made_is_a_config_error_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = make("fs", base_path=str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="does not start: NotADirectoryError"):
        store.probe()
    store.close()


def test_a_password_comes_from_the_environment_and_is_never_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisServer(tmp_path / "redis", password="hunter2") as server:
        url = f"lmcache://resp?host={HOST}&port={server.port}"
        monkeypatch.setenv("VLLM_HICACHE_LMCACHE_PASSWORD", "hunter2")
        store = open_store(url)
        assert store.probe() == Rights()
        assert store.describe() == url
        assert "hunter2" not in repr(choose("resp", {"host": HOST, "port": "1"}, 4, os.environ))
        store.close()
        monkeypatch.setenv("VLLM_HICACHE_LMCACHE_PASSWORD", "wrong-one")
        store = open_store(url, StoreOptions(0.5, 4))
        with pytest.raises(StoreTimeout, match="check its address and password") as caught:
            store.probe()
        assert "wrong-one" not in str(caught.value)
        store.close()


def test_a_secret_in_lmcaches_own_message_is_struck_out() -> None:
    choice = choose("resp", {"host": "h", "port": "1"}, 4, {"VLLM_HICACHE_LMCACHE_PASSWORD": "hunter2"})
    assert choice.config.password == "hunter2"
    assert choice.without_secrets("no such user hunter2") == "no such user ***"


def test_nested_settings_are_not_told(medium: Medium) -> None:
    store = scripted(medium)
    assert medium.label not in store.describe()
    assert "class_name=ScriptedAdapter" in store.describe()
    store.close()
