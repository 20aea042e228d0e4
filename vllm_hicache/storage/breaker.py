"""A store that fails is left alone for a while, instead of costing every request a time limit.

Two circuits, since a store that refuses writes (read-only credentials, a full disk) still serves hits:

    circuit   calls                           decided by      leaves OPEN
    reading   exists, read, list, usage       read            when the probe thread's `exists` is answered
    writing   write, delete                   either          when its pause has passed

CLOSED opens after 5 failures in a row, or 2 timeouts in a row, as each of those costs a whole limit. OPEN
refuses at once. HALF_OPEN lets deciding calls pass one at a time and refuses the others: one that is answered
closes the circuit, one that fails opens it again, with a pause twice as long. Reads decide for reading
because a store may answer `exists` and hang on bytes; so `exists` neither closes a circuit nor forgives a read.
A process that only looks up never reads: where no read had failed, the probe's answer closes the circuit.

Hits are back within 10 s of the store's return: the worst that can be under way then is one call that hangs
for its limit (`timeout_s`, 5 s), followed by one pause (at most 4 s) and a probe that is answered.

Owner: `storage/`. Thread: any; no lock is held while the store inside is called. One daemon thread of its own
while the reading circuit is open, none otherwise.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from vllm_hicache.errors import ObjectMissing, StoreCorrupt, StoreError, StoreTimeout, StoreUnavailable
from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import ObjectInfo, Store, StoreUsage
from vllm_hicache.storage.warning import RareWarning
from vllm_hicache.storage.wrappers import StoreWrapper

NUM_FAILURES = 5
NUM_TIMEOUTS = 2
PROBE_S = 1.0
FIRST_PROBE_S = 0.25
FIRST_WRITE_PAUSE_S = 1.0
MAX_PAUSE_S = 4.0
PROBE_NAME = ObjectName("hicache-breaker-probe")
"""Asked for while the circuit is open; nobody writes it."""

_JOIN_S = 0.5
_log = logging.getLogger(__name__)


class Side(StrEnum):
    """Which calls a circuit is for."""

    READING = "reading"
    WRITING = "writing"


_MEANINGS = {
    Side.READING: "its pages count as misses until it answers again",
    Side.WRITING: "nothing is saved to it until a write succeeds again",
}


class CircuitState(StrEnum):
    """Whether calls pass: all, none, or one at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Change(StrEnum):
    """What a call's end did to its circuit."""

    NONE = "none"
    OPENED = "opened"
    REOPENED = "reopened"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Pass:
    """Leave for one call. `epoch` tells its end from those of calls that began before the last change."""

    epoch: int
    decides: bool


class Circuit:
    """One side's state. Thread-safe; calls nobody.

    Args:
        first_pause_s: from the first opening on; doubled by each reopening up to `MAX_PAUSE_S`, seconds.
        reopens_by_time: the first call after the pause is a trial; else `let_try` ends the pause.
    """

    def __init__(
        self, side: Side, first_pause_s: float, reopens_by_time: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.side = side
        self._first_pause_s = first_pause_s
        self._by_time = reopens_by_time
        self._clock = clock
        self._lock = threading.Lock()
        self._state = CircuitState.CLOSED
        self._epoch = 0
        self._is_trying = False
        self._pause_s = first_pause_s
        self._opened_s = self._changed_s = 0.0
        self._reason = ""
        self._num_failures = self._num_timeouts = 0
        self._read_failed = False

    @property
    def state(self) -> CircuitState:
        """The state now."""
        return self._state

    @property
    def pause_s(self) -> float:
        """Seconds from the last opening to the next trial."""
        return self._pause_s

    def enter(self, decides: bool) -> Pass:
        """Let a call pass, which must end with `answered`, `failed` or `dropped`. Raises StoreUnavailable."""
        with self._lock:
            now_s = self._clock()
            if self._state is CircuitState.OPEN and self._by_time and now_s - self._changed_s >= self._pause_s:
                self._change(CircuitState.HALF_OPEN)
            refused = self._state is CircuitState.HALF_OPEN and decides and self._is_trying
            if self._state is CircuitState.OPEN or refused:
                what = "is being tried by another call" if refused else "is open"
                raise StoreUnavailable(
                    f"circuit for {self.side} {what}, since {now_s - self._opened_s:.1f} s, after {self._reason}; "
                    "it closes by itself when the store answers"
                )
            self._is_trying = self._is_trying or (decides and self._state is CircuitState.HALF_OPEN)
            return Pass(self._epoch, decides)

    def answered(self, call: Pass) -> Change:
        """The store did its part."""
        with self._lock:
            if call.epoch != self._epoch:
                return Change.NONE
            if self._state is CircuitState.HALF_OPEN and call.decides:
                self._close()
                return Change.CLOSED
            if self._state is CircuitState.CLOSED and (call.decides or not self._read_failed):
                self._forget()
            return Change.NONE

    def failed(self, call: Pass, error: Exception) -> Change:
        """The store, or its code, failed."""
        with self._lock:
            if call.epoch != self._epoch:
                return Change.NONE
            self._num_failures += 1
            self._num_timeouts = self._num_timeouts + 1 if isinstance(error, StoreTimeout) else 0
            self._read_failed = self._read_failed or call.decides
            is_closed = self._state is CircuitState.CLOSED
            if is_closed and self._num_failures < NUM_FAILURES and self._num_timeouts < NUM_TIMEOUTS:
                return Change.NONE
            plural = "" if self._num_failures == 1 else "s"
            self._reason = f"{self._num_failures} failure{plural}, the last {type(error).__name__}: {error}"
            self._change(CircuitState.OPEN)
            if is_closed:
                self._opened_s = self._changed_s
                return Change.OPENED
            self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
            return Change.REOPENED

    def dropped(self, call: Pass) -> None:
        """The call ended without telling anything about the store."""
        with self._lock:
            if call.epoch == self._epoch and call.decides:
                self._is_trying = False

    def let_try(self) -> Change:
        """End the pause: the store answers again. Where no deciding call had failed, that is proof enough."""
        with self._lock:
            if self._state is not CircuitState.OPEN:
                return Change.NONE
            if self._read_failed:
                self._change(CircuitState.HALF_OPEN)
                return Change.NONE
            self._close()
            return Change.CLOSED

    def _close(self) -> None:
        self._change(CircuitState.CLOSED)
        self._pause_s = self._first_pause_s
        self._forget()

    def _change(self, state: CircuitState) -> None:
        self._state, self._changed_s = state, self._clock()
        self._epoch += 1
        self._is_trying = False

    def _forget(self) -> None:
        self._num_failures = self._num_timeouts = 0
        self._read_failed = False


class Prober(Protocol):
    """Tries again on its own account: `attempt` returns the seconds to the next attempt, or None when done."""

    def start(self, pause_s: float, attempt: Callable[[], float | None]) -> None: ...

    def close(self) -> None: ...


class ThreadProber:
    """Attempts on a daemon thread, which lives from `start` until an attempt is the last or until `close`."""

    def __init__(self) -> None:
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, pause_s: float, attempt: Callable[[], float | None]) -> None:
        """Caller guarantees: earlier attempts are done. Raises RuntimeError where no thread can be had."""
        if not self._closing.is_set():
            self._thread = threading.Thread(
                target=self._run, args=(pause_s, attempt), name="hicache-store-probe", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """End the thread; one that is inside the store is waited for half a second, and ends by itself."""
        self._closing.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join(_JOIN_S)

    def _run(self, pause_s: float | None, attempt: Callable[[], float | None]) -> None:
        while pause_s is not None and not self._closing.wait(pause_s):
            pause_s = attempt()


class Breaker(StoreWrapper):
    """See the module. Raises StoreUnavailable for a refused call; else what the store inside raises.

    StoreTimeout, StoreUnavailable and whatever is no StoreError are failures, ObjectMissing and StoreCorrupt
    are answers; other StoreErrors (a bad name) tell nothing. `probe` and `close` always pass.

    Args:
        on_close: called on the thread that closed a circuit, before its call returns. What it raises is logged.
        probe_s: between the probe thread's attempts, seconds.
    """

    def __init__(
        self,
        inner: Store,
        on_close: Callable[[], None] | None = None,
        probe_s: float = PROBE_S,
        clock: Callable[[], float] = time.monotonic,
        prober: Prober | None = None,
    ) -> None:
        super().__init__(inner)
        self._on_close = on_close
        self._probe_s = probe_s
        self._prober = prober or ThreadProber()
        self._circuits = {
            Side.READING: Circuit(Side.READING, min(FIRST_PROBE_S, probe_s), False, clock),
            Side.WRITING: Circuit(Side.WRITING, FIRST_WRITE_PAUSE_S, True, clock),
        }
        self._warnings = {side: RareWarning() for side in Side}
        self._recovery_warnings = RareWarning()
        self._was_told = dict.fromkeys(Side, False)

    def state(self, side: Side) -> CircuitState:
        """Return how the circuit of `side` stands."""
        return self._circuits[side].state

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        with self._guarded(Side.READING):
            return self._inner.exists(names)

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        with self._guarded(Side.READING, decides=True):
            return self._inner.read(name, parts, offset)

    def write(self, name: ObjectName, parts: Sequence[memoryview]) -> bool:
        with self._guarded(Side.WRITING, decides=True):
            return self._inner.write(name, parts)

    def delete(self, name: ObjectName) -> bool:
        with self._guarded(Side.WRITING, decides=True):
            return self._inner.delete(name)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._guarded(Side.READING):
            yield from self._inner.list(prefix)

    def usage(self) -> StoreUsage:
        with self._guarded(Side.READING):
            return self._inner.usage()

    def close(self) -> None:
        self._prober.close()
        self._inner.close()

    @contextmanager
    def _guarded(self, side: Side, decides: bool = False) -> Iterator[None]:
        circuit = self._circuits[side]
        call = circuit.enter(decides)
        try:
            yield
        except (ObjectMissing, StoreCorrupt):
            self._react(circuit, circuit.answered(call))
            raise
        except Exception as error:  # a miss, which the caller counts; bugs of a store's code open circuits too
            if isinstance(error, StoreError) and not isinstance(error, StoreTimeout | StoreUnavailable):
                circuit.dropped(call)
            else:
                self._react(circuit, circuit.failed(call, error), error)
            raise
        except BaseException:
            circuit.dropped(call)
            raise
        self._react(circuit, circuit.answered(call))

    def _react(self, circuit: Circuit, change: Change, error: Exception | None = None) -> None:
        """Do what a change of state asks for, without a lock."""
        side = circuit.side
        if change is Change.OPENED and error is not None:
            what = f"{self.describe()}: circuit for {side} opened after failures, {_MEANINGS[side]}; the last"
            self._was_told[side] = self._warnings[side].warn(what, error)
        if change in (Change.OPENED, Change.REOPENED) and side is Side.READING:
            self._begin_probing(circuit)
        if change is Change.CLOSED:
            if self._was_told[side]:
                _log.info("%s: circuit for %s closed, all is well again", self.describe(), side)
            if self._on_close is not None:
                self._tell(self._on_close)

    def _begin_probing(self, circuit: Circuit) -> None:
        try:
            self._prober.start(circuit.pause_s, self._attempt)
        except RuntimeError:  # a miss less: without a thread to probe with, the next reads must try
            self._react(circuit, circuit.let_try())

    def _attempt(self) -> float | None:
        try:
            self._inner.exists([PROBE_NAME])
        except Exception:  # a miss: the store is still away, and the thread that probes must live
            return self._probe_s
        circuit = self._circuits[Side.READING]
        self._react(circuit, circuit.let_try())
        return None

    def _tell(self, on_close: Callable[[], None]) -> None:
        try:
            on_close()
        except Exception as error:  # a miss: the store works, whatever was to be done on that occasion
            self._recovery_warnings.warn(f"{self.describe()} is back, and what was to follow failed", error)
