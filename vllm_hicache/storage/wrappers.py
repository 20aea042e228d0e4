"""A store around a store: what every wrapper starts from, and the one that measures.

Wrappers may be stacked in any order; `stack.open_stack` says which one an engine uses.

Owner: `storage/`. Thread: as thread-safe as the store inside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import ObjectInfo, Rights, Store, StoreUsage
from vllm_hicache.storage.warning import RareWarning, miss_reason


class Outcome(StrEnum):
    """How a store call ended. Also the label of its counter."""

    OK = "ok"
    PRESENT = "present"
    """A write that found the object there already."""
    ABSENT = "absent"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    CORRUPT = "corrupt"
    """What came back cannot be what was written."""
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

    def probe(self) -> Rights:
        return self._inner.probe()

    def close(self) -> None:
        self._inner.close()


class Metered(StoreWrapper):
    """Reports every call but `close` and `describe` to an observer; changes nothing else."""

    def __init__(self, inner: Store, observer: Observer) -> None:
        super().__init__(inner)
        self._observer = observer
        self._warnings = RareWarning()

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

    def probe(self) -> Rights:
        with self._measured("probe"):
            return self._inner.probe()

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


@dataclass(slots=True)
class _Running:
    """What a call under way finds out about itself."""

    num_bytes: int = 0
    outcome: Outcome = Outcome.OK


def _outcome(error: Exception) -> Outcome:
    return Outcome(miss_reason(error).value)


def _num_bytes(parts: Sequence[memoryview]) -> int:
    return sum(part.nbytes for part in parts)
