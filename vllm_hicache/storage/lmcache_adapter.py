"""One of LMCache's L2 adapters with deadlines, and the place where it is replaced once it failed.

An adapter takes tasks and tells of their end; it has no cancel and no time limit. So nothing of a caller's is
ever lent to it: tasks work on buffers of ours, and one whose task was given up is kept until the adapter says
that the task ended, or has been closed in a way that ends it. An adapter that failed once may fail or lie for
ever after (a connection out of step, a breaker that never closes): it is closed and a new one made.

Owner: `storage/lmcache.py`. Thread: any; each `Session` has a thread of its own that collects what ended and
closes the adapter.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from vllm_hicache.errors import StoreTimeout, StoreUnavailable
from vllm_hicache.storage.lmcache_config import quiet_import

with quiet_import():
    from lmcache.v1.distributed.api import KeyListPage, ObjectKey
    from lmcache.v1.distributed.l2_adapters import L2AdapterInterface
    from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import NativeConnectorL2Adapter
    from lmcache.v1.memory_management import BytesBufferMemoryObj, MemoryObj
    from lmcache.v1.platform import consume_fd

REOPEN_S = 1.0
"""At most one new adapter in this time."""
MAX_LINGERING = 8
"""Replaced adapters that may still work on buffers of ours; with more, nothing new is begun."""

# Some adapters write an object that is longer than asked for past the buffer. Pages never touched cost nothing.
_GUARD_BYTES = 256 << 20
_SMALLEST_BYTES = 64 << 10
_LINGER_POLL_MS = 20
_log = logging.getLogger(__name__)


class Buffer:
    """Memory that an adapter may read, fill, and overrun by `_GUARD_BYTES` without harm."""

    def __init__(self, capacity_bytes: int) -> None:
        memory = mmap.mmap(-1, capacity_bytes + _GUARD_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.capacity_bytes = capacity_bytes
        self.view = memoryview(memory)[:capacity_bytes]

    def as_object(self, num_bytes: int) -> MemoryObj:
        """Return the first `num_bytes` as LMCache takes them; the object keeps the memory alive."""
        return BytesBufferMemoryObj(self.view[:num_bytes])


class BufferPool:
    """Buffers to use again: the kernel clears fresh memory page by page, which costs as much as copying."""

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._lock = threading.Lock()
        self._free: list[Buffer] = []

    def take(self, num_bytes: int) -> Buffer:
        """Return a buffer for `num_bytes`, of undefined content. Raises StoreUnavailable without memory."""
        capacity_bytes = max(_SMALLEST_BYTES, 1 << max(0, num_bytes - 1).bit_length())
        with self._lock:
            for index, buffer in enumerate(self._free):
                if buffer.capacity_bytes == capacity_bytes:
                    return self._free.pop(index)
        try:
            return Buffer(capacity_bytes)
        except (OSError, ValueError) as error:
            raise StoreUnavailable(f"no memory for a buffer of {capacity_bytes} bytes: {error}") from error

    def give(self, buffer: Buffer) -> None:
        """Take back a buffer that no task works on."""
        with self._lock:
            self._free.append(buffer)
            del self._free[: -self._num_kept]


class _Kind(Enum):
    STORE = "store"
    LOOKUP = "lookup"
    LOAD = "load"
    APART = "call"
    """A blocking call of the adapter's, on a thread of its own."""


@dataclass(slots=True)
class _Task:
    """What was submitted. `result` stays None where the adapter was closed before it ended."""

    num_keys: int
    objects: Sequence[MemoryObj]
    """Here to be kept alive."""
    done: threading.Event = field(default_factory=threading.Event)
    result: Sequence[bool] | None = None
    given_up: bool = False

    def end(self, result: Sequence[bool] | None) -> None:
        self.result = result
        self.done.set()


class Session:
    """An adapter in use. Deadlines are of `time.monotonic`, in seconds; each call ends with StoreTimeout then.

    Failure: StoreUnavailable when the adapter raises, or was retired. A timed out task stays with the adapter.
    """

    def __init__(self, adapter: L2AdapterInterface) -> None:
        self._adapter = adapter
        self._lock = threading.Lock()
        self._tasks: dict[tuple[_Kind, int], _Task] = {}
        self._num_apart = 0
        self._retired = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._events = {
            adapter.get_store_event_fd(): _Kind.STORE,
            adapter.get_lookup_and_lock_event_fd(): _Kind.LOOKUP,
            adapter.get_load_event_fd(): _Kind.LOAD,
        }
        self._thread = threading.Thread(target=self._collect_until_retired, name="lmcache-session", daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """The adapter is closed, and works on no buffer any more."""
        return not self._thread.is_alive()

    def store(self, key: ObjectKey, value: MemoryObj, deadline: float) -> bool:
        """Write one object; False when the adapter says that it could not."""
        submit = self._adapter.submit_store_task
        return self._run(_Kind.STORE, [value], 1, lambda: int(submit([key], [value])), deadline)[0]

    def load(self, key: ObjectKey, value: MemoryObj, deadline: float) -> bool:
        """Fill `value` with an object of just its size; False when the adapter says that it could not."""
        submit = self._adapter.submit_load_task
        return self._run(_Kind.LOAD, [value], 1, lambda: int(submit([key], [value])), deadline)[0]

    def lookup(self, keys: Sequence[ObjectKey], deadline: float) -> Sequence[bool]:
        """Return for each key whether the adapter finds it: all False also when it fails."""
        keys, submit = list(keys), self._adapter.submit_lookup_and_lock_task
        found = self._run(_Kind.LOOKUP, [], len(keys), lambda: int(submit(keys, {})), deadline)
        try:
            # LMCache locks against evictions of its own, which are not in use here; the medium knows no locks.
            self._adapter.submit_unlock([key for key, is_found in zip(keys, found, strict=True) if is_found])
        except Exception as error:  # miss: the adapter's own errors, of any type
            raise StoreUnavailable(f"LMCache's adapter takes no unlock: {type(error).__name__}") from error
        return found

    def delete(self, keys: Sequence[ObjectKey], deadline: float) -> None:
        """Ask for the objects to be removed. An adapter that cannot delete does nothing, and does not say so."""
        self._apart(lambda: self._adapter.delete(list(keys)), deadline)

    def list_keys(self, model_name: str, cursor: str | None, deadline: float) -> KeyListPage | None:
        """Return a page of keys with their sizes; None from an adapter that cannot list."""
        pages: list[KeyListPage | None] = []

        def fetch() -> None:
            try:
                pages.append(self._adapter.list_l2_keys(model_name, cursor=cursor))
            except NotImplementedError:
                pages.append(None)

        self._apart(fetch, deadline)
        return pages[0]

    def is_healthy(self) -> bool:
        """Return whether the adapter thinks well of itself: no breaker open, no connection failed lately."""
        try:
            status = self._adapter.report_status()
        except Exception:  # miss: the adapter's own errors, of any type
            return False
        return bool(status.get("is_healthy", True)) and not status.get("connection_failures")

    def retire(self) -> None:
        """Begin nothing more; close the adapter, on the session's thread, as soon as that harms nobody."""
        with self._lock:
            if not self._retired:
                self._retired = True
                os.eventfd_write(self._wake, 1)

    def join(self, timeout_s: float) -> None:
        """Wait for the adapter to be closed after `retire`."""
        self._thread.join(timeout_s)

    def _run(
        self,
        kind: _Kind,
        objects: Sequence[MemoryObj],
        num_keys: int,
        submit: Callable[[], int],
        deadline: float,
    ) -> Sequence[bool]:
        task = _Task(num_keys, objects)
        # Held while submitting, so that a task that ends at once is known when its end is collected.
        with self._lock:
            if self._retired:
                raise StoreUnavailable("LMCache's adapter failed and is being replaced")
            try:
                self._tasks[kind, submit()] = task
            except Exception as error:  # miss: the adapter's own errors, of any type
                raise StoreUnavailable(f"LMCache's adapter takes no {kind.value}: {type(error).__name__}") from error
        if not task.done.wait(max(0.0, deadline - time.monotonic())):
            task.given_up = True
            raise StoreTimeout(f"LMCache's adapter did not end a {kind.value} of {num_keys} keys in time")
        if task.result is None:
            raise StoreUnavailable(f"LMCache's adapter was closed, or failed, in a {kind.value}")
        return task.result

    def _apart(self, call: Callable[[], None], deadline: float) -> None:
        """Run a blocking call of the adapter's on a thread of its own: the call has a limit of 30 s at best."""

        def start() -> int:
            self._num_apart += 1
            number = self._num_apart
            threading.Thread(target=finish, args=[number], name="lmcache-call", daemon=True).start()
            return number

        def finish(number: int) -> None:
            result: Sequence[bool] | None
            try:
                call()
                result = [True]
            except Exception:  # miss: the adapter's own errors, of any type
                result = None
            with self._lock:
                task = self._tasks.pop((_Kind.APART, number), None)
            if task is not None:
                task.end(result)

        self._run(_Kind.APART, [], 1, start, deadline)

    def _collect_until_retired(self) -> None:
        poller = select.poll()
        for event_fd in (self._wake, *self._events):
            poller.register(event_fd, select.POLLIN)
        while not self._is_closable():
            ready = poller.poll(_LINGER_POLL_MS if self._retired else None)
            for event_fd, _ in ready:
                consume_fd(event_fd)
            with suppress(Exception):  # miss: waiters run into their deadlines, and the session is replaced
                self._collect({self._events[event_fd] for event_fd, _ in ready if event_fd in self._events})
        try:
            self._adapter.close()
        except Exception as error:
            _log.warning("LMCache's adapter did not close: %s", type(error).__name__)
        with self._lock:
            os.close(self._wake)
            left, self._tasks = list(self._tasks.values()), {}
        for task in left:
            task.end(None)

    def _is_closable(self) -> bool:
        """Return whether closing cuts off nobody who waits, and leaves nobody who still writes."""
        with self._lock:
            if not self._retired:
                return False
            # The native connectors cut their connections and join their threads; the others merely stop asking.
            cuts_off = isinstance(self._adapter, NativeConnectorL2Adapter)
            return all(task.given_up and (cuts_off or not task.objects) for task in self._tasks.values())

    def _collect(self, kinds: set[_Kind]) -> None:
        """End the tasks of these kinds that the adapter has a result of."""
        ended: list[tuple[_Task, Sequence[bool]]] = []
        with self._lock:
            if _Kind.STORE in kinds:
                for task_id, stored in self._adapter.pop_completed_store_tasks().items():
                    if task := self._tasks.pop((_Kind.STORE, task_id), None):
                        ended.append((task, [bool(stored.is_successful())]))
            queries = {
                _Kind.LOOKUP: self._adapter.query_lookup_and_lock_result,
                _Kind.LOAD: self._adapter.query_load_result,
            }
            for kind, task_id in list(self._tasks):
                bitmap = queries[kind](task_id) if kind in kinds and kind in queries else None
                if bitmap is not None:
                    task = self._tasks.pop((kind, task_id))
                    ended.append((task, [bool(bitmap.test(index)) for index in range(task.num_keys)]))
        for task, result in ended:
            task.end(result)


class Sessions:
    """The session in use: opened when it is first needed, and anew after it was dropped.

    Caller guarantees: `make` may raise anything; `greet` raises StoreError unless the session works.
    """

    def __init__(
        self,
        make: Callable[[], L2AdapterInterface],
        greet: Callable[[Session, float], None],
        timeout_s: float,
        reopen_s: float = REOPEN_S,
    ) -> None:
        self._make = make
        self._greet = greet
        self._timeout_s = timeout_s
        self._reopen_s = reopen_s
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._lingering: list[Session] = []
        self._next_open_s = 0.0
        self._closed = False

    def current(self, deadline: float) -> Session:
        """Return a session that works, as far as is known. Raises StoreUnavailable or StoreTimeout."""
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise StoreTimeout("another thread waits for LMCache's adapter to answer for the first time")
        try:
            if self._session is None:
                self._session = self._open(deadline)
            return self._session
        finally:
            self._lock.release()

    def drop(self, session: Session) -> None:
        """Have `session` replaced: it failed. Does nothing when it was replaced already."""
        with self._lock:
            if session is self._session:
                self._session = None
                self._retire(session)

    def close(self) -> None:
        """Close the session in use and wait, up to the timeout, for those replaced."""
        deadline = time.monotonic() + self._timeout_s
        with self._lock:
            self._closed = True
            if self._session is not None:
                self._retire(self._session)
            self._session, lingering = None, list(self._lingering)
        for session in lingering:
            session.join(max(0.0, deadline - time.monotonic()))

    def _open(self, deadline: float) -> Session:
        self._lingering = [session for session in self._lingering if not session.is_closed]
        if self._closed:
            raise StoreUnavailable("the store is closed")
        if len(self._lingering) >= MAX_LINGERING:
            raise StoreUnavailable(
                f"{MAX_LINGERING} replaced LMCache adapters have calls that do not end: restart the process "
                "if this stays"
            )
        if time.monotonic() < self._next_open_s:
            raise StoreUnavailable(f"LMCache's adapter failed; a new one is made at most every {self._reopen_s:g} s")
        self._next_open_s = time.monotonic() + self._reopen_s
        session = Session(self._make())
        try:
            self._greet(session, deadline)
        except BaseException:  # miss or stop as it came; nobody else would close the adapter
            self._next_open_s = time.monotonic() + self._reopen_s
            self._retire(session)
            raise
        return session

    def _retire(self, session: Session) -> None:
        session.retire()
        self._lingering.append(session)
