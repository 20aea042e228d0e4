"""The breaker: a failing store costs a few calls, reading and writing apart, and hits come back in time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hicache.errors import ObjectMissing, StoreCorrupt, StoreDenied, StoreError, StoreTimeout, StoreUnavailable
from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import ObjectInfo, Rights, Store, StoreUsage
from vllm_hicache.storage.breaker import Breaker, CircuitState, Side, ThreadProber
from vllm_hicache.storage.retry import Retrying

NAME = ObjectName("o")
CONTENT = b"0123456789"
CLOSED, OPEN, HALF_OPEN = CircuitState.CLOSED, CircuitState.OPEN, CircuitState.HALF_OPEN
READING, WRITING = Side.READING, Side.WRITING
TIMEOUT_S = 5.0
LIMIT_S = 10.0
PATIENCE_S = 30.0

Trouble = Callable[[str], None]
"""Called with the operation before each call; what it raises is the store's failure."""


class Clock:
    """Time that passes only when somebody says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Shaky(Store):
    """One object, and trouble."""

    scheme: ClassVar[str] = "shaky"

    def __init__(self) -> None:
        self.trouble: Trouble = lambda operation: None
        self.calls: list[str] = []

    def fail(self, fault: BaseException | None, *operations: str) -> None:
        """Raise `fault` in `operations` from now on, by default in all of them; None ends it."""

        def trouble(operation: str) -> None:
            if fault is not None and operation in (operations or (operation,)):
                raise fault

        self.trouble = trouble

    def describe(self) -> str:
        return "shaky://"

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        self._begin("exists")
        return [name == NAME for name in names]

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        self._begin("read")
        if name != NAME:
            raise ObjectMissing(name)
        for part in parts:
            part[:] = CONTENT[: part.nbytes]
        return len(CONTENT)

    def write(self, name: ObjectName, parts: Sequence[memoryview]) -> bool:
        self._begin("write")
        return True

    def delete(self, name: ObjectName) -> bool:
        self._begin("delete")
        return False

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        yield ObjectInfo(NAME, len(CONTENT), 0.0)
        self._begin("list")

    def usage(self) -> StoreUsage:
        self._begin("usage")
        return StoreUsage(1, len(CONTENT), None)

    def probe(self) -> Rights:
        self._begin("probe")
        return Rights()

    def close(self) -> None:
        self._begin("close")

    def _begin(self, operation: str) -> None:
        self.calls.append(operation)
        self.trouble(operation)


class HandProber:
    """Attempts when the test says so, at the times that it was told."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._attempt: Callable[[], float | None] | None = None
        self.due_s: float | None = None
        self.closed = False

    def start(self, pause_s: float, attempt: Callable[[], float | None]) -> None:
        assert self.due_s is None, "two at a time"
        self._attempt, self.due_s = attempt, self._clock.now_s + pause_s

    def close(self) -> None:
        self.closed = True

    def run(self) -> None:
        """Do what is due by now."""
        while self._attempt is not None and self.due_s is not None and self.due_s <= self._clock.now_s:
            self.due_s = None
            pause_s = self._attempt()
            if pause_s is not None:
                self.due_s = self._clock.now_s + pause_s


def attempt(store: Store, operation: str) -> str:
    """Make a call; return `ok` or the name of what it raised."""
    try:
        CALLS[operation](store)
    except Exception as error:
        return type(error).__name__
    return "ok"


class Rig:
    """A breaker on a shaky store, with time and probes in the test's hands."""

    def __init__(self, retrying: bool = False, on_close: Callable[[], None] | None = None) -> None:
        self.clock = Clock()
        self.shaky = Shaky()
        self.prober = HandProber(self.clock)
        inner = Retrying(self.shaky, TIMEOUT_S, Random(0), self.clock, self.clock.sleep) if retrying else self.shaky
        self.breaker = Breaker(inner, on_close, clock=self.clock, prober=self.prober)

    def attempt(self, operation: str) -> str:
        return attempt(self.breaker, operation)

    def open(self, side: Side) -> None:
        self.shaky.fail(StoreUnavailable("down"))
        for _ in range(5):
            self.attempt("read" if side is READING else "write")
        assert self.breaker.state(side) is OPEN

    def half_open(self) -> None:
        """Bring the reading circuit from closed to half-open."""
        self.open(READING)
        self.shaky.fail(None)
        self.wait(0.25)
        assert self.breaker.state(READING) is HALF_OPEN

    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.prober.run()


CALLS: dict[str, Callable[[Store], object]] = {
    "exists": lambda store: store.exists([NAME]),
    "read": lambda store: store.read(NAME, [memoryview(bytearray(4))]),
    "list": lambda store: list(store.list("")),
    "usage": lambda store: store.usage(),
    "write": lambda store: store.write(NAME, []),
    "delete": lambda store: store.delete(NAME),
}
SIDES = {name: WRITING if name in ("write", "delete") else READING for name in CALLS}
FAULTS = [StoreUnavailable("x"), StoreDenied("x"), RuntimeError("a bug")]


@pytest.mark.parametrize("operation", CALLS)
@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_five_failures_in_a_row_open_the_circuit_of_their_side(operation: str, fault: Exception) -> None:
    rig = Rig()
    rig.shaky.fail(fault)
    assert [rig.attempt(operation) for _ in range(5)] == [type(fault).__name__] * 5
    other = READING if SIDES[operation] is WRITING else WRITING
    assert (rig.breaker.state(SIDES[operation]), rig.breaker.state(other)) == (OPEN, CLOSED)
    num_calls = len(rig.shaky.calls)
    assert rig.attempt(operation) == "StoreUnavailable"
    assert len(rig.shaky.calls) == num_calls


@pytest.mark.parametrize("operation", CALLS)
def test_two_timeouts_in_a_row_open_the_circuit(operation: str) -> None:
    rig = Rig()
    rig.shaky.fail(StoreTimeout("x"))
    rig.attempt(operation)
    assert rig.breaker.state(SIDES[operation]) is CLOSED
    rig.attempt(operation)
    assert rig.breaker.state(SIDES[operation]) is OPEN


def test_an_answer_in_between_starts_the_count_anew() -> None:
    rig = Rig()
    for fault in [StoreUnavailable("x")] * 4 + [None, StoreTimeout("x"), None] + [StoreUnavailable("x")] * 4:
        rig.shaky.fail(fault)
        rig.attempt("read")
    assert rig.breaker.state(READING) is CLOSED


def test_other_failures_between_timeouts_do_not_make_them_consecutive() -> None:
    rig = Rig()
    for fault in (StoreTimeout("x"), StoreUnavailable("x"), StoreTimeout("x")):
        rig.shaky.fail(fault)
        rig.attempt("read")
    assert rig.breaker.state(READING) is CLOSED


def test_a_store_that_answers_lookups_and_hangs_on_reads_is_found_out() -> None:
    rig = Rig()
    rig.shaky.fail(StoreTimeout("x"), "read")
    assert [rig.attempt(operation) for operation in ("exists", "read", "exists", "read")] == [
        "ok",
        "StoreTimeout",
        "ok",
        "StoreTimeout",
    ]
    assert rig.breaker.state(READING) is OPEN


@pytest.mark.parametrize("answer", [ObjectMissing("x"), StoreCorrupt("x"), StoreError("a bad name")], ids=repr)
def test_answers_that_are_errors_open_nothing(answer: Exception) -> None:
    rig = Rig()
    rig.shaky.fail(answer)
    for operation in CALLS:
        for _ in range(20):
            assert rig.attempt(operation) == type(answer).__name__
    assert (rig.breaker.state(READING), rig.breaker.state(WRITING)) == (CLOSED, CLOSED)


def test_a_store_that_refuses_writes_serves_hits() -> None:
    rig = Rig()
    rig.shaky.fail(StoreDenied("read-only"), "write", "delete")
    assert [rig.attempt("write") for _ in range(7)] == ["StoreDenied"] * 5 + ["StoreUnavailable"] * 2
    assert rig.attempt("read") == "ok"
    assert rig.breaker.state(WRITING) is OPEN


def test_a_refusal_says_since_when_and_why() -> None:
    rig = Rig()
    rig.open(READING)
    rig.clock.now_s += 2.5
    with pytest.raises(
        StoreUnavailable, match=r"reading is open, since 2\.5 s, after 5 failures, the last StoreUnavailable: down"
    ):
        rig.breaker.exists([NAME])


def test_listing_counts_when_it_fails_and_not_when_it_begins() -> None:
    rig = Rig()
    rig.shaky.fail(StoreUnavailable("x"), "list")
    for _ in range(4):
        rig.attempt("list")
    listing = rig.breaker.list("")
    assert next(listing).name == NAME
    assert rig.breaker.state(READING) is CLOSED
    with pytest.raises(StoreUnavailable):
        next(listing)
    assert rig.breaker.state(READING) is OPEN


def test_a_listing_that_is_given_up_counts_for_nothing() -> None:
    rig = Rig()
    for _ in range(20):
        listing = rig.breaker.list("")
        next(listing)
        listing.close()
    assert rig.breaker.state(READING) is CLOSED


def test_probes_come_soon_and_then_every_second() -> None:
    rig = Rig()
    rig.open(READING)
    num_before = len(rig.shaky.calls)
    for expected in (0, 1, 1, 1, 1, 2, 2, 2, 2, 3):
        assert len(rig.shaky.calls) == num_before + expected
        rig.wait(0.25)
    rig.shaky.fail(None)
    rig.wait(1.0)
    assert rig.breaker.state(READING) is HALF_OPEN
    assert rig.prober.due_s is None


def test_a_probe_may_raise_anything() -> None:
    rig = Rig()
    rig.open(READING)
    rig.shaky.fail(RuntimeError("a bug"))
    rig.wait(0.25)
    rig.shaky.fail(None)
    rig.wait(1.0)
    assert rig.breaker.state(READING) is HALF_OPEN


@pytest.mark.parametrize("answer", [None, ObjectMissing("x"), StoreCorrupt("x")], ids=repr)
def test_a_read_that_is_answered_closes_and_a_lookup_does_not(answer: Exception | None) -> None:
    rig = Rig()
    rig.half_open()
    assert [rig.attempt(operation) for operation in ("exists", "usage", "list")] == ["ok"] * 3
    assert rig.breaker.state(READING) is HALF_OPEN
    rig.shaky.fail(answer)
    rig.attempt("read")
    assert rig.breaker.state(READING) is CLOSED


def test_a_circuit_that_closed_has_forgotten_its_failures() -> None:
    rig = Rig()
    rig.half_open()
    rig.attempt("read")
    rig.shaky.fail(StoreUnavailable("x"))
    assert [rig.attempt("read") for _ in range(4)] == ["StoreUnavailable"] * 4
    assert rig.breaker.state(READING) is CLOSED


@pytest.mark.parametrize("operation", ["read", "exists"])
def test_a_failure_while_half_open_opens_again_with_twice_the_pause(operation: str) -> None:
    rig = Rig()
    rig.half_open()
    pauses = []
    for _ in range(6):
        rig.shaky.fail(StoreUnavailable("x"))
        rig.attempt(operation)
        assert rig.breaker.state(READING) is OPEN
        assert rig.prober.due_s is not None
        pauses.append(rig.prober.due_s - rig.clock.now_s)
        rig.shaky.fail(None)
        rig.wait(pauses[-1])
        assert rig.breaker.state(READING) is HALF_OPEN
    assert pauses == pytest.approx([0.5, 1, 2, 4, 4, 4])
    rig.attempt("read")
    rig.open(READING)
    assert rig.prober.due_s == pytest.approx(rig.clock.now_s + 0.25)


def test_writing_is_tried_again_after_pauses_that_double() -> None:
    rig = Rig()
    rig.open(WRITING)
    for pause_s in (1, 2, 4, 4):
        rig.clock.now_s += pause_s - 0.01
        num_calls = len(rig.shaky.calls)
        rig.attempt("write")
        assert len(rig.shaky.calls) == num_calls
        rig.clock.now_s += 0.01
        rig.attempt("write")
        assert len(rig.shaky.calls) == num_calls + 1
    rig.shaky.fail(None)
    rig.clock.now_s += 4
    assert rig.attempt("write") == "ok"
    assert rig.breaker.state(WRITING) is CLOSED
    assert "exists" not in rig.shaky.calls


class Held(Shaky):
    """A store whose calls of one kind wait until they are released."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        self.entered, self.release = threading.Semaphore(0), threading.Event()
        self.held = operation
        self.late_fault: Exception | None = None

    def hold(self) -> None:
        def trouble(operation: str) -> None:
            if operation == self.held:
                self.entered.release()
                assert self.release.wait(PATIENCE_S)
                if self.late_fault is not None:
                    raise self.late_fault

        self.trouble = trouble


@pytest.mark.parametrize("operation", ["read", "write"])
def test_while_half_open_calls_that_decide_pass_one_at_a_time(operation: str) -> None:
    rig = Rig()
    held = rig.shaky = Held(operation)
    rig.breaker = Breaker(held, clock=rig.clock, prober=rig.prober)
    rig.open(SIDES[operation])
    held.hold()
    rig.wait(1.0)
    with ThreadPoolExecutor(1) as pool:
        trial = pool.submit(rig.attempt, operation)
        held.entered.acquire()
        assert [rig.attempt(operation) for _ in range(3)] == ["StoreUnavailable"] * 3
        assert rig.attempt("exists") == "ok"
        held.release.set()
        assert trial.result() == "ok"
    assert rig.breaker.state(SIDES[operation]) is CLOSED
    assert rig.shaky.calls.count(operation) == 6


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), StoreError("a bad name")], ids=repr)
def test_a_trial_that_tells_nothing_gives_its_place_to_the_next_one(fault: BaseException) -> None:
    rig = Rig()
    rig.half_open()
    rig.shaky.fail(fault)
    with pytest.raises(type(fault)):
        rig.breaker.read(NAME, [])
    assert rig.breaker.state(READING) is HALF_OPEN
    rig.shaky.fail(None)
    assert rig.attempt("read") == "ok"
    assert rig.breaker.state(READING) is CLOSED


@pytest.mark.parametrize("late_fault", [None, StoreTimeout("late")], ids=repr)
def test_a_call_from_before_the_last_change_changes_nothing(late_fault: Exception | None) -> None:
    rig = Rig()
    held = rig.shaky = Held("read")
    rig.breaker = Breaker(held, clock=rig.clock, prober=rig.prober)
    held.late_fault = late_fault
    held.hold()
    with ThreadPoolExecutor(1) as pool:
        old = pool.submit(rig.attempt, "read")
        held.entered.acquire()
        held.fail(StoreUnavailable("down"))
        for _ in range(5):
            rig.attempt("exists")
        held.fail(None)
        if late_fault is not None:
            rig.wait(0.25)
        before = rig.breaker.state(READING)
        held.release.set()
        assert old.result() == ("ok" if late_fault is None else "StoreTimeout")
    assert rig.breaker.state(READING) is before
    assert before is (OPEN if late_fault is None else CLOSED)
    # One timeout from before the change and one from now are not two in a row.
    held.late_fault = None
    held.fail(StoreTimeout("now"))
    rig.attempt("exists")
    assert rig.breaker.state(READING) is before


def test_no_lock_is_held_while_the_store_is_called() -> None:
    held = Held("read")
    breaker = Breaker(held)
    held.hold()
    with ThreadPoolExecutor(2) as pool:
        reads = [pool.submit(breaker.read, NAME, []) for _ in range(2)]
        for _ in reads:
            held.entered.acquire()
        assert breaker.exists([NAME]) == [True]
        assert breaker.state(READING) is CLOSED
        held.release.set()
        assert [read.result() for read in reads] == [len(CONTENT)] * 2


def test_each_recovery_is_told_once_it_is_over() -> None:
    told: list[CircuitState] = []
    rig = Rig(on_close=lambda: told.append(rig.breaker.state(READING)))
    rig.open(WRITING)
    rig.shaky.fail(None)
    rig.wait(1.0)
    rig.attempt("write")
    assert told == [CLOSED]
    rig.half_open()
    rig.attempt("exists")
    assert told == [CLOSED]
    rig.attempt("read")
    rig.attempt("read")
    assert told == [CLOSED, CLOSED]


def test_a_process_that_only_looks_up_is_told_by_the_probe_alone() -> None:
    told: list[CircuitState] = []
    rig = Rig(on_close=lambda: told.append(rig.breaker.state(READING)))
    rig.shaky.fail(StoreUnavailable("down"))
    for _ in range(5):
        rig.attempt("exists")
    assert rig.breaker.state(READING) is OPEN
    rig.shaky.fail(None)
    rig.wait(0.25)
    assert told == [CLOSED]


def test_what_follows_a_recovery_may_call_the_store_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    def on_close() -> None:
        rig.breaker.write(NAME, [])
        raise RuntimeError("no manifest")

    rig = Rig(on_close=on_close)
    rig.half_open()
    with caplog.at_level(logging.WARNING):
        assert rig.attempt("read") == "ok"
    assert "write" in rig.shaky.calls
    assert "no manifest" in caplog.text


def test_an_outage_is_one_warning_and_its_end_one_line(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            rig.half_open()
            for _ in range(3):
                rig.shaky.fail(StoreUnavailable("again"))
                rig.attempt("read")
                rig.shaky.fail(None)
                rig.wait(4.0)
            rig.attempt("read")
            assert rig.breaker.state(READING) is CLOSED
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "shaky://: circuit for reading opened" in caplog.text
    assert "StoreUnavailable: down" in caplog.text


def test_probe_and_close_pass_an_open_circuit() -> None:
    rig = Rig()
    rig.open(READING)
    rig.open(WRITING)
    rig.shaky.fail(None)
    assert rig.breaker.probe() == Rights()
    rig.breaker.close()
    assert rig.prober.closed
    assert rig.shaky.calls[-1] == "close"


class SignallingProber(ThreadProber):
    """The real one, with an event for its last attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.done = threading.Event()
        self.num_started = 0

    def start(self, pause_s: float, attempt: Callable[[], float | None]) -> None:
        def told() -> float | None:
            pause_s = attempt()
            if pause_s is None:
                self.done.set()
            return pause_s

        self.num_started += 1
        super().start(pause_s, told)


def probing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hicache-store-probe"]


def join_probing_threads() -> None:
    for thread in probing_threads():
        thread.join(PATIENCE_S)
    assert probing_threads() == []


def test_a_store_that_came_back_is_found_without_traffic_by_one_thread_that_ends() -> None:
    shaky, prober = Shaky(), SignallingProber()
    breaker = Breaker(shaky, probe_s=0.01, prober=prober)
    assert probing_threads() == []
    shaky.fail(StoreUnavailable("down"))
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: attempt(breaker, "read"), range(50))) == {"StoreUnavailable"}
    assert (len(probing_threads()), prober.num_started) == (1, 1)
    shaky.fail(None)
    assert prober.done.wait(PATIENCE_S)
    join_probing_threads()
    assert breaker.state(READING) is HALF_OPEN
    assert breaker.read(NAME, []) == len(CONTENT)
    assert breaker.state(READING) is CLOSED
    breaker.close()


def test_no_thread_is_left_after_close() -> None:
    shaky = Shaky()
    breaker = Breaker(shaky, probe_s=3600.0)
    shaky.fail(StoreTimeout("down"), "exists")
    assert [attempt(breaker, "exists") for _ in range(2)] == ["StoreTimeout"] * 2
    assert len(probing_threads()) == 1
    breaker.close()
    assert probing_threads() == []


def test_close_does_not_wait_for_a_probe_that_hangs() -> None:
    held = Held("exists")
    breaker = Breaker(held, probe_s=0.01)
    held.fail(StoreTimeout("down"))
    assert [attempt(breaker, "read") for _ in range(2)] == ["StoreTimeout"] * 2
    held.hold()
    held.entered.acquire()
    breaker.close()
    assert len(probing_threads()) == 1
    held.release.set()
    join_probing_threads()


class Threadless(ThreadProber):
    def start(self, pause_s: float, attempt: Callable[[], float | None]) -> None:
        raise RuntimeError("can't start new thread")


def test_without_a_thread_to_be_had_reads_try_by_themselves() -> None:
    shaky = Shaky()
    breaker = Breaker(shaky, prober=Threadless())
    shaky.fail(StoreTimeout("down"))
    assert [attempt(breaker, "read") for _ in range(3)] == ["StoreTimeout"] * 3
    shaky.fail(None)
    assert breaker.read(NAME, []) == len(CONTENT)
    assert breaker.state(READING) is CLOSED


MODES = ("well", "refuses", "hangs", "hangs on reads", "fails late", "denies", "hangs at times")


def in_mode(mode: str, clock: Clock, operation: str, number: int) -> None:
    """Fail as a store in `mode` does, in fake time."""
    hangs = mode == "hangs" or (mode == "hangs on reads" and operation == "read")
    if hangs or (mode == "hangs at times" and number % 3 == 0):
        clock.now_s += TIMEOUT_S
        raise StoreTimeout("hung")
    if mode in ("refuses", "hangs at times"):
        raise StoreUnavailable("refused")
    if mode == "fails late":
        clock.now_s += 1.2
        raise StoreUnavailable("reset")
    if mode == "denies":
        raise StoreDenied("no")
    clock.now_s += 0.001


def seconds_to_a_hit(history: Sequence[tuple[str, float]], step_s: float, retrying: bool) -> float:
    """Live through `history` (modes and seconds) under traffic every `step_s`, then let the store be well."""
    rig = Rig(retrying)
    ends, end_s = list[tuple[float, str]](), rig.clock.now_s
    for mode, seconds in history:
        end_s += seconds
        ends.append((end_s, mode))

    def trouble(operation: str) -> None:
        mode = next((mode for until_s, mode in ends if rig.clock.now_s < until_s), "well")
        in_mode(mode, rig.clock, operation, len(rig.shaky.calls))

    rig.shaky.trouble = trouble
    while True:
        rig.prober.run()
        found = rig.attempt("exists") == "ok"
        if found and rig.attempt("read") == "ok" and rig.clock.now_s >= end_s:
            return rig.clock.now_s - end_s
        # What is due before the next request happens before it.
        due_s = rig.prober.due_s
        rig.clock.now_s = min(rig.clock.now_s + step_s, due_s if due_s is not None else float("inf"))


HISTORIES = st.lists(st.tuples(st.sampled_from(MODES), st.floats(0.01, 40.0)), min_size=1, max_size=6)


@given(HISTORIES, st.floats(0.05, 0.5), st.booleans())
@settings(max_examples=300, deadline=None)
def test_hits_are_back_in_time_after_any_history(
    history: list[tuple[str, float]], step_s: float, retrying: bool
) -> None:
    assert seconds_to_a_hit(history, step_s, retrying) <= LIMIT_S


@pytest.mark.parametrize("retrying", [False, True])
@pytest.mark.parametrize("mode", MODES[1:])
def test_hits_are_back_in_time_at_whatever_moment_the_store_returns(mode: str, retrying: bool) -> None:
    waits = [seconds_to_a_hit([(mode, 20 + moment / 8)], 0.05, retrying) for moment in range(160)]
    assert max(waits) <= LIMIT_S
