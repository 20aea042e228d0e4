"""The keys of an engine, and the stack that is built with them around a store."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from vllm_hicache.errors import ConfigError, StoreUnavailable
from vllm_hicache.grid import Grid
from vllm_hicache.names import MissReason, ObjectName, PageKey, Role
from vllm_hicache.secrets import ENCRYPTION_KEY_VARIABLE, PEER_KEY_VARIABLE, SEAL_KEY_VARIABLE, Secrets, key_id
from vllm_hicache.storage.base import Rights, Store, StoreOptions
from vllm_hicache.storage.breaker import CircuitState, Side
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.storage.envelope import ChunkId
from vllm_hicache.storage.file import FileStore
from vllm_hicache.storage.stack import StoreStack, open_stack
from vllm_hicache.storage.wrappers import Outcome, StoreCall, StoreWrapper

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
NAME = ObjectName("o")
GRID = Grid(1, 1)
NAMESPACE = b"n" * 32
CHUNK = ChunkId(PageKey(b"k" * 32), 0, Role.TARGET, 0, 0)
PAYLOAD = bytes(index % 251 for index in range(8192))
CLOSED = {Side.READING: CircuitState.CLOSED, Side.WRITING: CircuitState.CLOSED}


class Remote(StoreWrapper):
    """A store across a network, as far as the stack can see, which drops what it is told to drop."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.num_to_drop = 0
        self.was_looked_for = threading.Event()

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        self.was_looked_for.set()
        return super().exists(names)

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        if self.num_to_drop:
            self.num_to_drop -= 1
            raise StoreUnavailable("connection reset")
        return super().read(name, parts, offset)


@pytest.fixture
def files(tmp_path: Path) -> FileStore:
    store = FileStore(str(tmp_path / "store"), 1 << 30)
    store.probe()
    return store


@pytest.fixture
def remote(files: FileStore) -> Remote:
    return Remote(files)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store?capacity=1GiB"


def get(store: Store, name: ObjectName = NAME) -> bytes:
    buffer = bytearray(store.read(name, []))
    store.read(name, [memoryview(buffer)])
    return bytes(buffer)


def test_a_url_becomes_a_store_that_works(tmp_path: Path) -> None:
    stack = open_stack(url(tmp_path))
    assert stack.store.probe() == Rights()
    assert stack.store.write(NAME, [memoryview(b"12345")]) is True
    assert get(stack.store) == b"12345"
    assert stack.store.describe() == url(tmp_path)
    assert stack.circuits() == CLOSED
    stack.store.close()
    stack.store.close()


def test_a_wrong_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="scheme 'fiel' is unknown"):
        open_stack("fiel:///x")


def test_a_dropped_connection_costs_nothing_across_a_network(remote: Remote) -> None:
    calls: list[StoreCall] = []
    stack = StoreStack(remote, StoreOptions(), Secrets(), calls.append)
    stack.store.write(NAME, [memoryview(b"12345")])
    remote.num_to_drop = 1
    assert stack.store.read(NAME, []) == 5
    assert [(call.operation, call.outcome) for call in calls] == [("write", Outcome.OK), ("read", Outcome.OK)]


def test_late_failures_are_not_retried_beyond_the_options_limit(remote: Remote) -> None:
    stack = StoreStack(remote, StoreOptions(timeout_s=0.0), Secrets())
    stack.store.write(NAME, [memoryview(b"12345")])
    remote.num_to_drop = 1
    with pytest.raises(StoreUnavailable, match="reset"):
        stack.store.read(NAME, [])


class BadDisk(FileStore):
    """A directory whose reads fail."""

    num_reads = 0

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        self.num_reads += 1
        raise StoreUnavailable("input/output error")


def test_a_disk_that_fails_is_asked_once_each_time_until_its_circuit_opens(tmp_path: Path) -> None:
    calls: list[StoreCall] = []
    bad = BadDisk(str(tmp_path), 1 << 20)
    stack = StoreStack(bad, StoreOptions(), Secrets(), calls.append)
    for _ in range(8):
        with pytest.raises(StoreUnavailable):
            stack.store.read(NAME, [])
    assert bad.num_reads == 5
    assert stack.circuits() == {Side.READING: CircuitState.OPEN, Side.WRITING: CircuitState.CLOSED}
    assert [call.outcome for call in calls] == [Outcome.UNAVAILABLE] * 8
    stack.store.close()


def test_recovery_is_told_to_whoever_asked_last(remote: Remote) -> None:
    told: list[str] = []
    stack = StoreStack(remote, StoreOptions(), Secrets(), on_recovery=lambda: told.append("first"))
    stack.on_recovery = lambda: told.append("last")
    stack.store.write(NAME, [memoryview(b"12345")])
    remote.num_to_drop = 10
    while stack.circuits()[Side.READING] is not CircuitState.OPEN:
        with pytest.raises(StoreUnavailable):
            stack.store.read(NAME, [])
    assert (remote.num_to_drop, told) == (0, [])
    assert remote.was_looked_for.wait(30)
    wait_for(lambda: stack.circuits()[Side.READING] is CircuitState.HALF_OPEN)
    stack.store.read(NAME, [])
    assert told == ["last"]
    stack.store.close()


def test_with_a_key_the_bytes_in_the_store_are_unreadable_and_come_back(files: FileStore) -> None:
    stack = StoreStack(files, StoreOptions(), Secrets(encryption_key=KEY))
    stack.store.write(NAME, [memoryview(PAYLOAD)])
    assert PAYLOAD[:64] not in get(files)
    assert get(stack.store) == PAYLOAD


def test_an_object_that_does_not_open_is_a_corrupt_miss_and_no_failure_of_the_store(files: FileStore) -> None:
    stack = StoreStack(files, StoreOptions(), Secrets(encryption_key=KEY), lambda call: None)
    view = ChunkStore(stack.store, NAMESPACE, GRID)
    buffer = memoryview(bytearray(len(PAYLOAD)))
    for _ in range(6):
        view.save(CHUNK, memoryview(PAYLOAD), 1024)
        bad = bytearray(get(files, CHUNK.object_name(NAMESPACE)))
        bad[-1] ^= 1
        files.delete(CHUNK.object_name(NAMESPACE))
        files.write(CHUNK.object_name(NAMESPACE), [memoryview(bad)])
        assert view.load(CHUNK, buffer, 1024) is MissReason.CORRUPT
    assert view.misses() == {MissReason.CORRUPT: 6}
    assert list(files.list("")) == []
    assert stack.circuits() == CLOSED


def test_without_its_package_encryption_is_refused_with_the_way_out(
    files: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_module(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name}", name="cryptography")

    monkeypatch.setattr("vllm_hicache.storage.stack.import_module", import_module)
    with pytest.raises(ConfigError, match=r"pip install 'vllm-hicache\[encryption\]'"):
        StoreStack(files, StoreOptions(), Secrets(encryption_key=KEY))
    StoreStack(files, StoreOptions(), Secrets(seal_key=KEY))


VARIABLES = [SEAL_KEY_VARIABLE, ENCRYPTION_KEY_VARIABLE, PEER_KEY_VARIABLE]
SPELLINGS = {
    "hex": KEY.hex(),
    "upper case": KEY.hex().upper(),
    "base64": base64.b64encode(KEY).decode(),
    "base64 without padding": base64.b64encode(KEY).decode().rstrip("="),
    "blanks around": f"  {KEY.hex()}\n",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("variable", VARIABLES)
def test_a_key_is_read_however_it_is_spelt(spelling: str, variable: str) -> None:
    found = Secrets.from_environment({variable: SPELLINGS[spelling]})
    keys = [found.seal_key, found.encryption_key, found.peer_key]
    assert keys == [KEY if each == variable else None for each in VARIABLES]


def test_both_alphabets_of_base64_are_taken() -> None:
    key = b"\xfb\xff\xbe" * 10 + b"\xfb\xff"
    for spell in (base64.b64encode, base64.urlsafe_b64encode):
        assert Secrets.from_environment({SEAL_KEY_VARIABLE: spell(key).decode()}).seal_key == key


def test_no_variables_are_no_keys() -> None:
    assert Secrets.from_environment({"HOME": "x"}) == Secrets(None, None, None)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "   ",
        "correct horse battery staple",
        KEY.hex()[:-1],
        KEY.hex()[:-2] + "zz",
        KEY.hex()[:-2] + "  " + "a",
        " ".join([KEY.hex()[:31], KEY.hex()[:32]]),
        base64.b64encode(KEY[:31]).decode(),
        base64.b64encode(KEY + b"x").decode(),
        "!!!!" + base64.b64encode(KEY).decode(),
        "é" * 64,
    ],
)
@pytest.mark.parametrize("variable", [SEAL_KEY_VARIABLE, PEER_KEY_VARIABLE])
def test_what_is_no_key_is_refused_and_never_quoted(value: str, variable: str) -> None:
    with pytest.raises(ConfigError, match=variable) as caught:
        Secrets.from_environment({variable: value})
    error: BaseException | None = caught.value
    assert "64 hex characters" in str(error)
    assert f"of {len(value)} characters" in str(error)
    while error is not None:
        assert not value.strip() or value.strip() not in str(error)
        error = error.__cause__ or error.__context__


def test_no_repr_shows_a_key() -> None:
    shown = repr(Secrets(KEY, OTHER_KEY, KEY)) + str(Secrets(KEY, OTHER_KEY, OTHER_KEY))
    for key in (KEY, OTHER_KEY):
        assert key.hex() not in shown
        assert repr(key) not in shown


def test_a_key_is_named_by_a_digest_that_stays() -> None:
    assert key_id(KEY) == "1e6fbff4"
    assert key_id(KEY) != key_id(OTHER_KEY)


def test_the_protection_names_what_is_done_and_with_which_keys() -> None:
    one, other = key_id(KEY), key_id(OTHER_KEY)
    assert Secrets().protection == "none"
    assert Secrets(seal_key=KEY).protection == f"hmac-sha256:{one}"
    assert Secrets(encryption_key=KEY).protection == f"aes-256-gcm:{one}"
    assert Secrets(KEY, OTHER_KEY).protection == f"hmac-sha256:{one}+aes-256-gcm:{other}"


def test_the_key_between_engines_parts_nobody_from_a_store() -> None:
    assert Secrets(peer_key=KEY).protection == "none"
    assert Secrets(KEY, peer_key=OTHER_KEY).protection == Secrets(KEY).protection
