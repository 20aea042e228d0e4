"""Objects in whatever LMCache has an L2 adapter for: `lmcache://ADAPTER?setting=value&…`.

LMCache knows no sizes, no names and no listing, so each object is two of its values: a frame with the bytes, and
a record with the name and the size (`lmcache_frame`). The frame's key is a digest of the name *and the size*, the
record's of the name alone. So the usual read, which knows the size, is one load, and no load is ever made into a
buffer of another size: adapters hang, fall out of step with their server or overrun the buffer when that happens.
The record is written last and makes the object exist; a reader that guessed the size wrong learns it there.

Some adapters say "not there" when they fail, so each lookup asks as well for a value that is known to be there.
Some hang when a value that they found is gone when they load it: within a process that is excluded, across
processes it costs one call its deadline.

Write-once holds among the threads of one process. Of two processes that write one name at once both may be told
True: LMCache has no conditional store, and equal names mean equal bytes.

Owner: `storage/`. Thread: as every store; the adapter's threads are its own.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, NoReturn

from vllm_hicache.errors import (
    ConfigError,
    ObjectMissing,
    StoreCorrupt,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
)
from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import ObjectInfo, Rights, Store, StoreOptions, StoreUsage, check_name
from vllm_hicache.storage.lmcache_adapter import (
    REOPEN_S,
    Buffer,
    BufferPool,
    Session,
    Sessions,
)
from vllm_hicache.storage.lmcache_config import AdapterChoice, choose, quiet_import
from vllm_hicache.storage.lmcache_frame import (
    CANARY,
    CANARY_KEY,
    FRAME_BYTES,
    HEAD_BYTES,
    RECORD_BYTES,
    RECORDS,
    blank_frame,
    frame_ends,
    frame_key,
    is_frame,
    pack_record,
    parse_record,
    record_key,
)
from vllm_hicache.storage.url import StoreUrl

with quiet_import():
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.l2_adapters import L2AdapterInterface

_FAILURES_TO_REMOVE = 2
_MAX_SUSPECTS = 1024
_NUM_LOCKS = 1024
_Bools = list[bool]  # inside the class `list` is a method


class LmcacheStore(Store):
    """See the module. Opens no adapter before the first call.

    A read or write is two round trips: a lookup, and a load or store (a write has a second, small store).
    """

    scheme: ClassVar[str] = "lmcache"

    def __init__(self, choice: AdapterChoice, options: StoreOptions, reopen_s: float = REOPEN_S) -> None:
        self._choice = choice
        self._timeout_s = options.timeout_s
        self._pool = BufferPool(options.num_connections)
        self._sessions = Sessions(self._make, self._greet, options.timeout_s, reopen_s)
        self._locks = [threading.Lock() for _ in range(_NUM_LOCKS)]
        self._suspects: Counter[ObjectKey] = Counter()
        self._suspects_lock = threading.Lock()

    def describe(self) -> str:
        return self._choice.describe()

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        keys = [record_key(check_name(name)) for name in names]
        if not keys:
            return []
        with self._session() as (session, deadline):
            return self._lookup(session, keys, deadline)

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        with self._exclusive(name) as (session, deadline):
            total_bytes = self._find(session, name, sum(part.nbytes for part in parts), offset, deadline)
            buffer = self._load_frame(session, name, total_bytes, deadline)
            _scatter(buffer.view[HEAD_BYTES + offset : max(HEAD_BYTES + offset, HEAD_BYTES + total_bytes)], parts)
            self._pool.give(buffer)
            return total_bytes

    def write(self, name: ObjectName, parts: Sequence[memoryview]) -> bool:
        with self._exclusive(name) as (session, deadline):
            if self._lookup(session, [record_key(name)], deadline) == [True]:
                return False
            payload_bytes = sum(part.nbytes for part in parts)
            head, tail = frame_ends(name, payload_bytes)
            frame = [memoryview(head), *parts, memoryview(tail)]
            self._put(session, frame_key(name, payload_bytes), frame, deadline)
            self._put(session, record_key(name), [memoryview(pack_record(name, payload_bytes))], deadline)
            return True

    def delete(self, name: ObjectName) -> bool:
        with self._exclusive(name) as (session, deadline):
            if self._lookup(session, [record_key(name)], deadline) == [False]:
                return False
            try:
                payload_bytes = self._load_record(session, record_key(name), deadline).size_bytes
            except StoreCorrupt:
                return True
            self._remove(session, [record_key(name), frame_key(name, payload_bytes)], deadline)
            return True

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        cursor: str | None = None
        while True:
            with self._session() as (session, deadline):
                page = session.list_keys(RECORDS, cursor, deadline)
            if page is None:
                raise StoreError(
                    f"LMCache's adapter {self._choice.name!r} cannot list objects: look with the medium's own "
                    "tools, or use one of this package's own stores"
                )
            for entry in page.entries:
                info = self._info(entry.key.to_object_key()) if entry.size_bytes == RECORD_BYTES else None
                if info is not None and info.name.startswith(prefix):
                    yield info
            cursor = page.next_page_token
            if cursor is None:
                return

    def usage(self) -> StoreUsage:
        sizes = [info.size_bytes for info in self.list("")]
        return StoreUsage(len(sizes), sum(sizes), None)

    def probe(self) -> Rights:
        name, data = ObjectName(f"probe/{uuid.uuid4().hex}"), b"probe"
        try:
            self.write(name, [memoryview(data)])
        except _CannotMake as error:
            raise ConfigError(f"{self.describe()} cannot be opened: {error}") from error
        found = bytearray(len(data))
        if self.read(name, [memoryview(found)]) != len(data) or found != data:
            raise ConfigError(f"{self.describe()} gives back other bytes than it took: it is of no use as a store")
        try:
            return Rights(delete=self.delete(name))
        except (StoreTimeout, StoreUnavailable):
            raise
        except StoreError:
            return Rights(delete=False)

    def close(self) -> None:
        self._sessions.close()

    def _find(self, session: Session, name: ObjectName, wanted_bytes: int, offset: int, deadline: float) -> int:
        """Return the payload bytes of an object whose frame is there. Raises ObjectMissing."""
        guesses = [frame_key(name, wanted_bytes)] if offset == 0 else []
        found = self._lookup(session, [*guesses, record_key(name)], deadline)
        if any(found[:-1]):
            return wanted_bytes
        if not found[-1]:
            raise ObjectMissing(name)
        payload_bytes = self._load_record(session, record_key(name), deadline).size_bytes
        if self._lookup(session, [frame_key(name, payload_bytes)], deadline) == [True]:
            return payload_bytes
        # The medium evicted the frame alone: without its record a write makes it anew.
        self._remove(session, [record_key(name)], deadline)
        raise ObjectMissing(name)

    def _load_frame(self, session: Session, name: ObjectName, payload_bytes: int, deadline: float) -> Buffer:
        """Return a buffer, the caller's to give back, with a frame that is `name`'s own from head to end."""
        num_bytes, key = payload_bytes + FRAME_BYTES, frame_key(name, payload_bytes)
        buffer = self._pool.take(num_bytes)
        blank_frame(buffer.view, payload_bytes)
        loaded = self._load(session, key, buffer, num_bytes, [key, record_key(name)], deadline)
        if not (loaded and is_frame(buffer.view, name, payload_bytes)):
            self._pool.give(buffer)
            self._blame(session, key, deadline)
        self._acquit(key)
        return buffer

    def _load_record(self, session: Session, key: ObjectKey, deadline: float) -> ObjectInfo:
        """Return name, payload bytes and time of a record that is there."""
        buffer = self._pool.take(RECORD_BYTES)
        buffer.view[:RECORD_BYTES] = bytes(RECORD_BYTES)
        loaded = self._load(session, key, buffer, RECORD_BYTES, [key], deadline)
        info = parse_record(bytes(buffer.view[:RECORD_BYTES]), key) if loaded else None
        self._pool.give(buffer)
        if info is None:
            self._blame(session, key, deadline)
        self._acquit(key)
        return info

    def _load(
        self,
        session: Session,
        key: ObjectKey,
        buffer: Buffer,
        num_bytes: int,
        to_remove: Sequence[ObjectKey],
        deadline: float,
    ) -> bool:
        """Load a value that is there, unless it made sessions fail before: then it is removed.

        A damaged value is not told from an adapter that fails; one that fails with two sessions is the value's fault.
        """
        if self._suspects[key] >= _FAILURES_TO_REMOVE:
            self._pool.give(buffer)
            self._remove(session, to_remove, deadline)
            self._acquit(key)
            raise StoreCorrupt(f"a value of {num_bytes} bytes failed to load {_FAILURES_TO_REMOVE} times: removed")
        try:
            return session.load(key, buffer.as_object(num_bytes), deadline)
        except StoreTimeout:
            # The buffer is not given back: the adapter may write to it yet.
            self._note(key)
            raise

    def _blame(self, session: Session, key: ObjectKey, deadline: float) -> NoReturn:
        """Say why a value that was found did not load."""
        # Noted first: where the value put the adapter out of step, the lookup fails as well.
        self._note(key)
        if self._lookup(session, [key], deadline) == [False]:
            self._acquit(key)
            raise ObjectMissing("the value went while it was looked for")
        raise StoreUnavailable(
            f"LMCache's adapter {self._choice.name!r} found a value and did not load it whole: the value is "
            "damaged, or the adapter is; a new adapter is made"
        )

    def _note(self, key: ObjectKey) -> None:
        with self._suspects_lock:
            if len(self._suspects) >= _MAX_SUSPECTS:
                self._suspects.clear()
            self._suspects[key] += 1

    def _acquit(self, key: ObjectKey) -> None:
        if key in self._suspects:
            with self._suspects_lock:
                self._suspects.pop(key, None)

    def _put(self, session: Session, key: ObjectKey, parts: Sequence[memoryview], deadline: float) -> None:
        num_bytes = sum(part.nbytes for part in parts)
        buffer, at = self._pool.take(num_bytes), 0
        for part in parts:
            buffer.view[at : at + part.nbytes] = part
            at += part.nbytes
        stored = session.store(key, buffer.as_object(num_bytes), deadline)
        self._pool.give(buffer)
        if not stored:
            raise StoreUnavailable(
                f"LMCache's adapter {self._choice.name!r} did not store {num_bytes} bytes: the medium is full or "
                "gone, see LMCache's own lines on stderr"
            )

    def _lookup(self, session: Session, keys: Sequence[ObjectKey], deadline: float) -> _Bools:
        """Return what is there, once the adapter has shown that it would find what is there."""
        for _ in range(2):
            *found, alive = session.lookup([*keys, CANARY_KEY], deadline)
            if alive and session.is_healthy():
                return found
            # Evicted or flushed, perhaps.
            self._greet(session, deadline)
        raise StoreUnavailable(f"LMCache's adapter {self._choice.name!r} does not find what is there: it is replaced")

    def _greet(self, session: Session, deadline: float) -> None:
        """See that the adapter answers and stores, and that what every lookup asks for is there."""
        try:
            if session.lookup([CANARY_KEY], deadline)[0]:
                return
            self._put(session, CANARY_KEY, [memoryview(CANARY)], deadline)
            found = session.lookup([CANARY_KEY], deadline)[0]
        except StoreTimeout:
            raise StoreTimeout(
                f"{self.describe()} does not answer: check its address and password, LMCache's own lines on stderr "
                "say more"
            ) from None
        if not found:
            raise StoreUnavailable(f"{self.describe()} does not find what it just stored")

    def _remove(self, session: Session, keys: Sequence[ObjectKey], deadline: float) -> None:
        session.delete(keys, deadline)
        if any(self._lookup(session, keys, deadline)):
            raise StoreError(f"LMCache's adapter {self._choice.name!r} cannot delete: remove objects by other means")

    def _info(self, key: ObjectKey) -> ObjectInfo | None:
        """Read a listed record; None when it has gone, or is none of ours."""
        with self._session() as (session, deadline):
            if self._lookup(session, [key], deadline) == [False]:
                return None
            try:
                return self._load_record(session, key, deadline)
            except StoreCorrupt:
                return None

    def _make(self) -> L2AdapterInterface:
        try:
            return self._choice.make()
        except Exception as error:  # miss at a call, stop at the probe: the adapter's own errors, of any type
            reason = self._choice.without_secrets(f"{type(error).__name__}: {error}")
            raise _CannotMake(f"LMCache's adapter {self._choice.name!r} does not start: {reason}") from None

    @contextmanager
    def _session(self) -> Iterator[tuple[Session, float]]:
        """Give a session and the call's deadline; a session that fails in the block is replaced."""
        with self._session_until(time.monotonic() + self._timeout_s) as call:
            yield call

    @contextmanager
    def _session_until(self, deadline: float) -> Iterator[tuple[Session, float]]:
        session = self._sessions.current(deadline)
        try:
            yield session, deadline
        except (StoreTimeout, StoreUnavailable):
            self._sessions.drop(session)
            raise

    @contextmanager
    def _exclusive(self, name: ObjectName) -> Iterator[tuple[Session, float]]:
        """As `_session`, with no other thread at work on `name`: a value that goes between a lookup and its
        load makes some adapters hang."""
        deadline = time.monotonic() + self._timeout_s
        lock = self._locks[hash(check_name(name)) % _NUM_LOCKS]
        if not lock.acquire(timeout=self._timeout_s):
            raise StoreTimeout(f"another call for {name} did not end within {self._timeout_s:g} s")
        try:
            with self._session_until(deadline) as call:
                yield call
        finally:
            lock.release()


class _CannotMake(StoreUnavailable):
    """The adapter could not even be made."""


def _scatter(data: memoryview, parts: Sequence[memoryview]) -> None:
    """Fill `parts` in order as far as `data` goes."""
    at = 0
    for part in parts:
        piece = data[at : at + part.nbytes]
        part[: piece.nbytes] = piece
        at += piece.nbytes


def open_url(url: StoreUrl, options: StoreOptions) -> Store:
    """Open `lmcache://ADAPTER?setting=value&…`, with the settings of that adapter of LMCache's.

    A secret setting comes from the environment: `VLLM_HICACHE_LMCACHE_PASSWORD` is `password`. Raises ConfigError.
    """
    url.refuse_user()
    if url.path.strip("/"):
        raise ConfigError(f"lmcache:// URL has the path {url.path!r}: write lmcache://ADAPTER?setting=value")
    choice = choose(url.host, url.parameters, options.num_connections, os.environ)
    return LmcacheStore(choice, options)
