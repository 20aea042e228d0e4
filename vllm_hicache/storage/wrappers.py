"""What is put around a store: measuring it, and the checked, chunk-level view that transfers use.

    ChunkStore(Metered(FileStore(…), observer), namespace, grid)

A wrapper of the bytes level (`Metered`; later deadlines and a breaker) is a `Store` around a `Store` and
may be stacked in any order. `ChunkStore` ends the stack: it turns errors and bad bytes into misses.

Owner: `storage/`. Thread: as thread-safe as the store inside.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from vllm_hicache.errors import ObjectMissing, StoreError, StoreTimeout, StoreUnavailable
from vllm_hicache.grid import Grid
from vllm_hicache.names import MissReason, ObjectName
from vllm_hicache.storage.base import ObjectInfo, Store, StoreUsage
from vllm_hicache.storage.envelope import (
    ChunkId,
    Header,
    Identity,
    header_bytes,
    read_header,
    seal,
)

_LOG_EVERY_S = 60.0
# For these the object may be sound, so it stays.
_NOT_A_FAULT_OF_THE_OBJECT = frozenset(
    {MissReason.ABSENT, MissReason.TIMEOUT, MissReason.UNAVAILABLE, MissReason.ERROR}
)
_log = logging.getLogger(__name__)


class Outcome(StrEnum):
    """How a store call ended. Also the label of its counter."""

    OK = "ok"
    PRESENT = "present"
    """A write that found the object there already."""
    ABSENT = "absent"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class StoreCall:
    """One finished call: `num_bytes` are the bytes moved, 0 where none were."""

    operation: str
    seconds: float
    num_bytes: int
    outcome: Outcome


Observer = Callable[[StoreCall], None]
"""Called on the calling thread after each store call. What it raises is logged, and the call goes on."""


class StoreWrapper(Store):
    """Forwards everything to `inner`; a wrapper overrides what it changes."""

    scheme: ClassVar[str] = "wrapper"

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def describe(self) -> str:
        return self._inner.describe()

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        return self._inner.exists(names)

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        return self._inner.read(name, parts, offset)

    def write(self, name: ObjectName, parts: Sequence[memoryview]) -> bool:
        return self._inner.write(name, parts)

    def delete(self, name: ObjectName) -> bool:
        return self._inner.delete(name)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._inner.list(prefix)

    def usage(self) -> StoreUsage:
        return self._inner.usage()

    def probe(self) -> None:
        self._inner.probe()

    def close(self) -> None:
        self._inner.close()


class Metered(StoreWrapper):
    """Reports every call but `close` and `describe` to an observer; changes nothing else."""

    def __init__(self, inner: Store, observer: Observer) -> None:
        super().__init__(inner)
        self._observer = observer
        self._warnings = _RareWarning()

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        with self._measured("exists"):
            return self._inner.exists(names)

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        with self._measured("read") as call:
            total_bytes = self._inner.read(name, parts, offset)
            call.num_bytes = max(0, min(total_bytes - offset, _num_bytes(parts)))
            return total_bytes

    def write(self, name: ObjectName, parts: Sequence[memoryview]) -> bool:
        with self._measured("write") as call:
            written = self._inner.write(name, parts)
            call.num_bytes = _num_bytes(parts) if written else 0
            call.outcome = Outcome.OK if written else Outcome.PRESENT
            return written

    def delete(self, name: ObjectName) -> bool:
        with self._measured("delete") as call:
            deleted = self._inner.delete(name)
            call.outcome = Outcome.OK if deleted else Outcome.ABSENT
            return deleted

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._measured("list"):
            yield from self._inner.list(prefix)

    def usage(self) -> StoreUsage:
        with self._measured("usage"):
            return self._inner.usage()

    def probe(self) -> None:
        with self._measured("probe"):
            self._inner.probe()

    @contextmanager
    def _measured(self, operation: str) -> Iterator[_Running]:
        call, start = _Running(), time.perf_counter()
        try:
            yield call
        except Exception as error:
            call.outcome = _outcome(error)
            raise
        finally:
            seconds = time.perf_counter() - start
            self._report(StoreCall(operation, seconds, call.num_bytes, call.outcome))

    def _report(self, call: StoreCall) -> None:
        try:
            self._observer(call)
        except Exception as error:  # neither miss nor stop: a broken meter must not cost a page
            self._warnings.warn("the observer of store calls failed", error)


class ChunkStore:
    """The chunks of one namespace in a store: bytes come out as they went in, or not at all.

    Caller guarantees: payloads are contiguous memoryviews of whole units; units and sizes are the
    namespace's own. Thread: all methods are thread-safe and blocking.
    Failure: `load` and `load_units` never raise for what a store does; `save` and `present` raise only
    StoreError. Arguments that make no sense (a payload of part of a unit) raise ValueError.
    """

    def __init__(self, store: Store, namespace: bytes, grid: Grid) -> None:
        self._store = store
        self._namespace = namespace
        self._grid = grid
        self._lock = threading.Lock()
        self._misses: Counter[MissReason] = Counter()
        self._warnings = _RareWarning()

    def load(self, chunk: ChunkId, payload: memoryview, unit_bytes: int) -> MissReason | None:
        """Read a whole chunk into `payload` by one scatter read; None is a hit.

        On a miss the content of `payload` is undefined. A bad object is removed, so that the next save
        heals it; nothing is retried.
        """
        identity, payload = self._identity(chunk), payload.cast("B")
        header = memoryview(bytearray(header_bytes(payload.nbytes, unit_bytes)))

        def attempt() -> MissReason | None:
            total_bytes = self._store.read(identity.object_name(), [header, payload])
            found = read_header(header, total_bytes, identity, payload.nbytes, unit_bytes)
            return found.check_units(0, payload) if isinstance(found, Header) else found

        return self._judged(identity.object_name(), attempt)

    def load_units(
        self, chunk: ChunkId, first_unit: int, payload: memoryview, unit_bytes: int, num_units: int
    ) -> MissReason | None:
        """Read the units from `first_unit` on, as many as fill `payload`, of a chunk of `num_units`.

        Two reads: the header, then the range. Else as `load`.
        """
        identity, payload = self._identity(chunk), payload.cast("B")
        skip_bytes, chunk_bytes = first_unit * unit_bytes, num_units * unit_bytes
        header = memoryview(bytearray(header_bytes(chunk_bytes, unit_bytes)))
        if payload.nbytes % unit_bytes or not 0 <= skip_bytes <= chunk_bytes - payload.nbytes:
            raise ValueError(
                f"{payload.nbytes} bytes from unit {first_unit} on are no range of {num_units} units of "
                f"{unit_bytes} bytes: give whole units inside the chunk"
            )

        def attempt() -> MissReason | None:
            total_bytes = self._store.read(identity.object_name(), [header])
            found = read_header(header, total_bytes, identity, chunk_bytes, unit_bytes)
            if isinstance(found, MissReason):
                return found
            # The object may have been replaced between the reads: the total and the digests tell.
            total_bytes = self._store.read(identity.object_name(), [payload], header.nbytes + skip_bytes)
            if total_bytes != header.nbytes + chunk_bytes:
                return MissReason.SHORT if total_bytes < header.nbytes + chunk_bytes else MissReason.LONG
            return found.check_units(first_unit, payload)

        return self._judged(identity.object_name(), attempt)

    def save(self, chunk: ChunkId, payload: memoryview, unit_bytes: int) -> bool:
        """Write a chunk; True when it was not there. On return any process may load it. Raises StoreError."""
        identity, payload = self._identity(chunk), payload.cast("B")
        header = memoryview(seal(identity, payload, unit_bytes))
        try:
            return self._store.write(identity.object_name(), [header, payload])
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"{self._store.describe()} failed to write with {error!r}") from error

    def present(self, chunks: Sequence[ChunkId]) -> list[bool]:
        """Return for each chunk whether a load is worth trying. Raises StoreError while the store cannot tell."""
        names = [chunk.object_name(self._namespace) for chunk in chunks]
        try:
            found = self._store.exists(names)
            if len(found) != len(names):
                raise StoreError(f"{len(found)} answers to {len(names)} names")
        except Exception as error:
            self._count(_miss(error), error)
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{self._store.describe()} failed to look up with {error!r}") from error
        return found

    def misses(self) -> dict[MissReason, int]:
        """Return how many loads missed so far, and how many `present` calls failed, by reason."""
        with self._lock:
            return dict(self._misses)

    def _identity(self, chunk: ChunkId) -> Identity:
        return Identity(chunk, self._namespace, self._grid)

    def _judged(self, name: ObjectName, attempt: Callable[[], MissReason | None]) -> MissReason | None:
        """Run one load: an error is a miss, and a bad object is removed."""
        fault: Exception | None = None
        try:
            reason = attempt()
        except Exception as error:  # miss: whatever a store raises, the thread that loads must live
            reason, fault = _miss(error), error
        if reason is None:
            return None
        self._count(reason, fault)
        if reason not in _NOT_A_FAULT_OF_THE_OBJECT:
            self._remove(name)
        return reason

    def _remove(self, name: ObjectName) -> None:
        try:
            self._store.delete(name)
        except Exception as error:  # miss: it has been counted; a bad object that stays is found bad again
            self._warnings.warn(f"{self._store.describe()} cannot remove the bad object {name}", error)

    def _count(self, reason: MissReason, fault: Exception | None) -> None:
        with self._lock:
            self._misses[reason] += 1
        if fault is not None and reason is not MissReason.ABSENT:
            self._warnings.warn(f"{self._store.describe()} failed: counted as a miss ({reason})", fault)


@dataclass(slots=True)
class _Running:
    """What a call under way finds out about itself."""

    num_bytes: int = 0
    outcome: Outcome = Outcome.OK


class _RareWarning:
    """Logs at most one warning a minute, with the number that it held back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_s = 0.0
        self._num_held = 0

    def warn(self, what: str, error: Exception) -> None:
        with self._lock:
            now = time.monotonic()
            if now < self._next_s:
                self._num_held += 1
                return
            num_held, self._num_held, self._next_s = self._num_held, 0, now + _LOG_EVERY_S
        kind = type(error).__name__
        _log.warning("%s: %s: %s (%d more warnings since the last one)", what, kind, error, num_held)


def _miss(error: Exception) -> MissReason:
    if isinstance(error, ObjectMissing):
        return MissReason.ABSENT
    if isinstance(error, StoreTimeout):
        return MissReason.TIMEOUT
    return MissReason.UNAVAILABLE if isinstance(error, StoreUnavailable) else MissReason.ERROR


def _outcome(error: Exception) -> Outcome:
    return Outcome(_miss(error).value)


def _num_bytes(parts: Sequence[memoryview]) -> int:
    return sum(part.nbytes for part in parts)
