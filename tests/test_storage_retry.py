"""The second try: only where it may help, only once, and only while there is time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest

from vllm_hicache.errors import ObjectMissing, StoreDenied, StoreError, StoreTimeout, StoreUnavailable
from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.file import FileStore
from vllm_hicache.storage.retry import Retrying
from vllm_hicache.storage.wrappers import StoreWrapper

NAME = ObjectName("o")
TIMEOUT_S = 4.0


class Clock:
    """Time that passes only when somebody says so."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds


class Failing(StoreWrapper):
    """Each call takes the next fault's time and raises it; without one it succeeds."""

    def __init__(self, inner: Store, clock: Clock, *faults: Exception, takes_s: float = 0.0) -> None:
        super().__init__(inner)
        self.clock, self.faults, self.takes_s, self.num_calls = clock, list(faults), takes_s, 0

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        self._fail()
        return super().exists(names)

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        self._fail(parts)
        return super().read(name, parts, offset)

    def write(self, name: ObjectName, parts: Sequence[memoryview]) -> bool:
        self._fail()
        return super().write(name, parts)

    def delete(self, name: ObjectName) -> bool:
        self._fail()
        return super().delete(name)

    def _fail(self, parts: Sequence[memoryview] = ()) -> None:
        self.num_calls += 1
        if self.faults:
            self.clock.now_s += self.takes_s
            for part in parts:
                part[:] = b"\xee" * part.nbytes
            raise self.faults.pop(0)


@pytest.fixture
def inner(tmp_path: object) -> FileStore:
    store = FileStore(str(tmp_path), 1 << 20)
    store.probe()
    store.write(NAME, [memoryview(b"0123456789")])
    return store


def retrying(failing: Failing) -> Retrying:
    return Retrying(failing, TIMEOUT_S, Random(1), failing.clock, failing.clock.sleep)


def test_a_read_that_failed_early_is_tried_again_and_its_bytes_are_right(inner: FileStore) -> None:
    failing = Failing(inner, Clock(), StoreUnavailable("reset"))
    first, second = bytearray(b"\xa5" * 3), bytearray(b"\xa5" * 4)
    assert retrying(failing).read(NAME, [memoryview(first), memoryview(second)], 2) == 10
    assert (first, second) == (b"234", b"5678")


def test_exists_is_tried_again(inner: FileStore) -> None:
    failing = Failing(inner, Clock(), StoreUnavailable("reset"))
    assert retrying(failing).exists([NAME, ObjectName("p")]) == [True, False]
    assert failing.num_calls == 2


def test_the_second_failure_is_the_callers(inner: FileStore) -> None:
    failing = Failing(inner, Clock(), StoreUnavailable("first"), StoreUnavailable("second"))
    with pytest.raises(StoreUnavailable, match="second"):
        retrying(failing).read(NAME, [])
    assert failing.num_calls == 2


@pytest.mark.parametrize(
    "fault",
    [StoreDenied("x"), StoreTimeout("x"), ObjectMissing("x"), StoreError("x"), ValueError("x")],
    ids=lambda fault: type(fault).__name__,
)
def test_what_another_try_would_find_again_is_tried_once(inner: FileStore, fault: Exception) -> None:
    failing = Failing(inner, Clock(), fault)
    with pytest.raises(type(fault)):
        retrying(failing).exists([NAME])
    assert (failing.num_calls, failing.clock.pauses) == (1, [])


CALLS: dict[str, Callable[[Store], object]] = {
    "write": lambda store: store.write(NAME, []),
    "delete": lambda store: store.delete(NAME),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_changes_the_store_is_tried_once(inner: FileStore, call: str) -> None:
    failing = Failing(inner, Clock(), StoreUnavailable("x"))
    with pytest.raises(StoreUnavailable):
        CALLS[call](retrying(failing))
    assert failing.num_calls == 1


@pytest.mark.parametrize(("takes_s", "num_calls"), [(0.99, 2), (1.0, 1), (3.9, 1)])
def test_a_late_failure_leaves_no_time_for_a_second_try(inner: FileStore, takes_s: float, num_calls: int) -> None:
    failing = Failing(inner, Clock(), StoreUnavailable("x"), StoreUnavailable("x"), takes_s=takes_s)
    with pytest.raises(StoreUnavailable):
        retrying(failing).read(NAME, [])
    assert failing.num_calls == num_calls


def test_the_pause_is_short_and_never_the_same(inner: FileStore) -> None:
    clock, pauses = Clock(), set()
    for seed in range(200):
        failing = Failing(inner, clock, StoreUnavailable("x"))
        Retrying(failing, TIMEOUT_S, Random(seed), clock, clock.sleep).exists([NAME])
    pauses = set(clock.pauses)
    assert len(pauses) == 200
    assert 0.005 <= min(pauses) < 0.01
    assert 0.045 < max(pauses) <= 0.05


def test_a_call_ends_within_a_quarter_more_than_its_limit(inner: FileStore) -> None:
    clock = Clock()

    class Worst(Failing):
        def _fail(self, parts: Sequence[memoryview] = ()) -> None:
            self.num_calls += 1
            self.clock.now_s += 0.9999 if self.num_calls == 1 else TIMEOUT_S
            raise StoreUnavailable("reset") if self.num_calls == 1 else StoreTimeout("hung")

    start_s = clock.now_s
    with pytest.raises(StoreTimeout):
        retrying(Worst(inner, clock)).read(NAME, [])
    assert clock.now_s - start_s <= 1.25 * TIMEOUT_S + 0.05
