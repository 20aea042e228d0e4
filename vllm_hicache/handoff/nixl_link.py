"""Memory that other processes read over NIXL (UCX), and reads of it that never write late.

NIXL cannot call back a transfer: after a handle is released, or the remote agent removed, its bytes still arrive. Only
the end of the reader's agent ends them. So a reader keeps links, each with an agent of its own that one call at a time
uses, and a link whose call failed or passed its deadline is torn down before the call returns. Agents have no progress
thread, which would spin on a core: a link makes progress while its call waits, and `NixlMemory` while it is attended.

Reads are one-sided or refused: by the kernel on one machine, by the devices of RDMA between machines. UCX can imitate
them over TCP, slower than a plain socket, and then ends the *serving* process when it answers a reader that has gone.

UCX listens on ports of its own, and whoever reaches them may read and write registered memory: trusted networks only.

Owner: the worker half. Threads: as each class says.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol
from uuid import uuid4

import numpy as np

from vllm_hicache.errors import ConfigError, InvariantError, StoreTimeout, StoreUnavailable

logger = logging.getLogger(__name__)

_BACKEND = "UCX"
_KIND = "DRAM"
_POLL_S = 0.0002
_BUFFER_BYTES = 1 << 20
_SETTINGS = "PROTO_EMULATION_ENABLE=n"
_MOST_REMOTES = 64
_STOP_LIMIT_S = 5.0
_NUM_LAST_STEPS = 400
"""So often an agent makes progress before its end: a step does half a MiB of what is queued, or finds it lost."""

_starting = threading.Lock()


class _Agent(Protocol):
    """What is used of `nixl_agent`. Descriptors, handles and `agent` are NIXL's own objects."""

    agent: object

    def create_backend(self, name: str, settings: dict[str, str]) -> None: ...
    def register_memory(self, ranges: Sequence[tuple[int, int, int, str]], kind: str) -> object: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> str: ...
    def get_new_notifs(self) -> object: ...
    def get_xfer_descs(self, ranges: Sequence[tuple[int, int, int]], kind: str) -> object: ...
    def initialize_xfer(self, verb: str, ours: object, theirs: object, remote: str) -> object: ...
    def transfer(self, handle: object) -> str: ...
    def check_xfer_state(self, handle: object) -> str: ...
    def release_xfer_handle(self, handle: object) -> None: ...


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """`num_bytes` bytes of this process from `address` on."""

    address: int
    num_bytes: int

    @classmethod
    def of(cls, view: memoryview) -> MemoryRange:
        """Where a contiguous, non-empty view lies."""
        return cls(np.frombuffer(view, np.uint8).ctypes.data, view.nbytes)

    def holds(self, other: MemoryRange) -> bool:
        """Whether all of `other` lies in this range."""
        return self.address <= other.address and other.address + other.num_bytes <= self.address + self.num_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """`local` (format `B`, writable) is to be filled from `remote_address` on."""

    remote_address: int
    local: memoryview


class NixlMemory:
    """Memory of this process that others may read; see the module.

    Caller guarantees: the ranges stay mapped until `close` has returned, for a late read of what is gone ends the
    process. A reader does not learn that memory is closed, or has other content now: that is said elsewhere.
    Thread: any; one thread of its own.

    Raises:
        ConfigError: NIXL cannot be used here.
    """

    def __init__(self, ranges: Sequence[MemoryRange]) -> None:
        self._agent = _new_agent(ranges)
        self.metadata: bytes = self._agent.get_agent_metadata()
        self._changed = threading.Condition()
        self._num_readers = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="hicache-nixl-memory", daemon=True)
        self._thread.start()

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Answer to readers meanwhile. Outside of it their reads may wait without an end."""
        self.attend()
        try:
            yield
        finally:
            self.leave()

    def attend(self) -> None:
        """As `attended`, until `leave` has been called as often."""
        with self._changed:
            self._num_readers += 1
            self._changed.notify_all()

    def leave(self) -> None:
        """A reader is through. Raises InvariantError: there is none."""
        with self._changed:
            if not self._num_readers:
                raise InvariantError("a reader of this memory leaves, and there is none: call attend first")
            self._num_readers -= 1

    def close(self) -> None:
        """Answer nobody any more. A second call does nothing."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_STOP_LIMIT_S)
        del self._agent

    def _run(self) -> None:
        while self._has_readers():
            try:
                self._agent.get_new_notifs()
            except Exception as error:  # miss: a reader that has gone is none of the others' business
                logger.warning("NIXL failed to answer a reader: %r", error)
            time.sleep(_POLL_S)

    def _has_readers(self) -> bool:
        """Wait for a reader; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_readers or self._is_closed)
            return not self._is_closed


class NixlReader:
    """Reads memory of others into this process's; see the module.

    What lies in `ranges` is filled without a copy, and anything else by way of a link's buffer of 1 MiB. As many links
    are kept as calls have run at once (with `ranges` of DRAM over TCP or one machine's kernel 11 file descriptors and
    6 MiB each). Thread: any.

    Raises:
        ConfigError: NIXL cannot be used here.
    """

    def __init__(self, ranges: Sequence[MemoryRange]) -> None:
        self._ranges = tuple(ranges)
        self._changed = threading.Condition()
        self._num_reading = 0
        self._is_closed = False
        # The first takes seconds: it imports NIXL and looks for devices.
        self._idle = [_Link(self._ranges)]

    def read(self, metadata: bytes, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Fill the pieces from the `NixlMemory` with this metadata, which is attended.

        When it returns or raises, nobody writes into the pieces any more. It returns in time whatever the other side
        does; on one machine the kernel copies, and that is not interrupted.

        Raises:
            StoreTimeout: the bytes have not come in time.
            StoreUnavailable: the other side is gone, or its memory does not lie there.
        """
        end_s = time.monotonic() + timeout_s
        link = self._take()
        try:
            link.read(metadata, pieces, end_s)
        except BaseException as error:
            _clear_frames(error)
            self._end(link)
            raise
        if link.is_worn:
            self._end(link)
        else:
            self._give(link)

    def close(self) -> None:
        """Wait for reads under way, and end all links. A second call does nothing; no `read` may follow."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._num_reading)
            links, self._idle = self._idle, []
        for link in links:
            link.close()

    def _take(self) -> _Link:
        with self._changed:
            if self._is_closed:
                raise StoreUnavailable("this reader of other engines' memory is closed: read before the engine stops")
            self._num_reading += 1
            if self._idle:
                return self._idle.pop()
        try:
            return _Link(self._ranges)
        except ConfigError as error:
            self._give(None)
            raise StoreUnavailable(f"another link cannot be opened: {error}") from error

    def _end(self, link: _Link) -> None:
        try:
            link.close()
        finally:
            self._give(None)

    def _give(self, link: _Link | None) -> None:
        with self._changed:
            self._num_reading -= 1
            if link is not None:
                self._idle.append(link)
            self._changed.notify_all()


@dataclass(slots=True)
class _Batch:
    """One transfer: (remote address, local address, bytes), and what is then filled from the buffer's start on."""

    pairs: list[tuple[int, int, int]] = field(default_factory=list)
    copies: list[memoryview] = field(default_factory=list)
    buffer_bytes: int = 0


class _Link:
    """An agent that one call at a time uses. After a call that raised it must be closed."""

    def __init__(self, ranges: Sequence[MemoryRange]) -> None:
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._buffer_address = MemoryRange.of(self._buffer).address
        self._ranges = ranges
        self._agent = _new_agent([*ranges, MemoryRange.of(self._buffer)])
        self._names: dict[bytes, str] = {}

    @property
    def is_worn(self) -> bool:
        """Whether it has met so many others that it is better ended: NIXL remembers them all."""
        return len(self._names) >= _MOST_REMOTES

    def read(self, metadata: bytes, pieces: Sequence[Piece], end_s: float) -> None:
        """See `NixlReader.read`; `end_s` of the monotonic clock. Raises StoreTimeout or StoreUnavailable."""
        try:
            remote = self._remote(metadata)
            for batch in self._batches(pieces):
                self._transfer(remote, batch.pairs, end_s)
                at = 0
                for copy in batch.copies:
                    copy[:] = self._buffer[at : at + copy.nbytes]
                    at += copy.nbytes
        except (StoreTimeout, StoreUnavailable):
            raise
        except Exception as error:  # miss: NIXL's errors have no common root, and none of them is ours
            raise StoreUnavailable(
                f"{len(pieces)} pieces cannot be read over NIXL ({error!r}): is the other engine still there?"
            ) from error

    def close(self) -> None:
        """Tear the agent down: nothing that it has asked for is written afterwards.

        Raises:
            InvariantError: it lives on, because something refers to it.
        """
        # UCX ends the process where an agent goes with a copy still queued, as after its remote was killed.
        for _ in range(_NUM_LAST_STEPS):
            with suppress(Exception):  # miss: what has failed has been said
                self._agent.get_new_notifs()
        remains = weakref.ref(self._agent.agent)
        with _starting:
            del self._agent
            if remains() is not None:
                gc.collect()
        if remains() is not None:
            raise InvariantError(
                f"a NIXL agent with {len(self._names)} remotes outlives its link, and may write into the host pool: "
                "set peer_transport to tcp"
            )

    def _remote(self, metadata: bytes) -> str:
        """NIXL's name of an agent."""
        if metadata not in self._names:
            self._names[metadata] = self._agent.add_remote_agent(metadata)
        return self._names[metadata]

    def _batches(self, pieces: Sequence[Piece]) -> Iterator[_Batch]:
        """The pieces as transfers: one, unless more than the buffer holds lies outside registered memory."""
        batch = _Batch()
        for piece in pieces:
            address, local = piece.remote_address, piece.local
            if local.nbytes and any(known.holds(MemoryRange.of(local)) for known in self._ranges):
                batch.pairs.append((address, MemoryRange.of(local).address, local.nbytes))
                continue
            while local.nbytes:
                if batch.buffer_bytes == _BUFFER_BYTES:
                    yield batch
                    batch = _Batch()
                part = local[: _BUFFER_BYTES - batch.buffer_bytes]
                batch.pairs.append((address, self._buffer_address + batch.buffer_bytes, part.nbytes))
                batch.copies.append(part)
                batch.buffer_bytes += part.nbytes
                address, local = address + part.nbytes, local[part.nbytes :]
        if batch.pairs:
            yield batch

    def _transfer(self, remote: str, pairs: Sequence[tuple[int, int, int]], end_s: float) -> None:
        ours = self._agent.get_xfer_descs([(local, size, 0) for _, local, size in pairs], _KIND)
        theirs = self._agent.get_xfer_descs([(address, size, 0) for address, _, size in pairs], _KIND)
        handle = self._agent.initialize_xfer("READ", ours, theirs, remote)
        state = self._agent.transfer(handle)
        while state == "PROC":
            if time.monotonic() >= end_s:
                num_bytes = sum(size for _, _, size in pairs)
                raise StoreTimeout(f"{num_bytes} bytes did not come over NIXL in time: is the other engine stopped?")
            time.sleep(_POLL_S)
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise StoreUnavailable(f"a read over NIXL ended as {state}: is the other engine still there?")
        self._agent.release_xfer_handle(handle)


def _new_agent(ranges: Sequence[MemoryRange]) -> _Agent:
    """An agent without a thread that knows these ranges. Raises ConfigError."""
    try:
        with _starting:
            api = import_module("nixl._api")
            setup = api.nixl_agent_config(
                enable_prog_thread=False, backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            )
            agent: _Agent = api.nixl_agent(f"hicache-{uuid4().hex}", setup)
            agent.create_backend(_BACKEND, {"engine_config": _SETTINGS})
        agent.register_memory([(known.address, known.num_bytes, 0, "") for known in ranges], _KIND)
    except Exception as error:  # stop: at start nothing is lost, and only a person can repair it
        num_bytes = sum(known.num_bytes for known in ranges)
        raise ConfigError(
            f"NIXL cannot serve {num_bytes} bytes of host memory here ({error!r}): install the package nixl, or set "
            "peer_transport to tcp"
        ) from error
    return agent


def _clear_frames(error: BaseException | None) -> None:
    """Drop what the frames of an error refer to: an agent among it would live as long as the error does."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
