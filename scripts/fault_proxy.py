"""A TCP proxy on loopback that breaks what passes through it, as a network or a sick server would.

It knows requests and replies only as bytes that change direction: a reply is what the server sends between two
bursts of the client. Faults that wait for `after_bytes` of a reply leave shorter replies alone, so that look-ups
pass and large reads are hit in their payload, behind the protocol's own header.

Owner: scripts and tests. Thread: the proxy runs on one of its own; all public methods may be called from any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

PAYLOAD_OFFSET_BYTES = 4096
"""Further into a reply than any header of HTTP or RESP reaches."""

_CHUNK_BYTES = 256 << 10
_HTTP_HEAD = re.compile(rb"(GET|HEAD|PUT|POST|DELETE|OPTIONS) ")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Latency:
    """Holds each request back for `seconds`; with `marks`, only requests that have one in their first 64 bytes."""

    seconds: float
    marks: tuple[bytes, ...] = ()

    def applies(self, request: bytes) -> bool:
        """Whether a request that begins like this is held back."""
        return not self.marks or any(mark in request[:64] for mark in self.marks)


@dataclass(frozen=True, slots=True)
class Throttle:
    """Lets bytes through at `bytes_per_s`, on each connection and in each direction."""

    bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Ends the connection by RST after so many bytes of a reply."""

    after_bytes: int = PAYLOAD_OFFSET_BYTES


@dataclass(frozen=True, slots=True)
class Truncate:
    """Ends the connection in good order, by FIN, after so many bytes of a reply."""

    after_bytes: int = PAYLOAD_OFFSET_BYTES


@dataclass(frozen=True, slots=True)
class Overlong:
    """Puts `extra` into each reply after so many bytes."""

    after_bytes: int = PAYLOAD_OFFSET_BYTES
    extra: bytes = b"\x5a" * 64


@dataclass(frozen=True, slots=True)
class Flip:
    """Turns one bit of each reply, in the byte at this offset."""

    after_bytes: int = PAYLOAD_OFFSET_BYTES


@dataclass(frozen=True, slots=True)
class HttpError:
    """Answers HTTP requests itself, with an S3 error; with `methods`, only those. Others pass."""

    status: int = 503
    code: str = "SlowDown"
    methods: frozenset[str] = frozenset()

    def reply(self) -> bytes:
        """The whole answer."""
        body = f"<?xml version='1.0'?><Error><Code>{self.code}</Code><Message>fault</Message></Error>".encode()
        head = f"HTTP/1.1 {self.status} {self.code}\r\nContent-Type: application/xml\r\nConnection: close\r\n"
        return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


@dataclass(frozen=True, slots=True)
class Hang:
    """Accepts, swallows and never answers. Connections that lost bytes are reset when the fault ends."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Closes the listening socket and resets every connection."""


Fault = Latency | Throttle | Reset | Truncate | Overlong | Flip | HttpError | Hang | Refuse


@dataclass(frozen=True, slots=True)
class Counters:
    """What has happened so far. `num_struck` counts the times that a fault did something."""

    num_connections: int = 0
    num_struck: int = 0
    request_bytes: int = 0
    reply_bytes: int = 0


class FaultProxy:
    """Forwards `port` on 127.0.0.1 to a target, through the fault that is set. Use as a context manager.

    A target that refuses is passed on as a reset. Raises OSError when no port can be had.
    """

    def __init__(self, target_host: str, target_port: int) -> None:
        self._target = (target_host, target_port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._state = _State()
        self._links: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self.port = 0
        """Port on 127.0.0.1; stays the same while the proxy lives."""

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def counters(self) -> Counters:
        """A snapshot of the counters."""
        return self._state.counters

    def set_fault(self, fault: Fault) -> None:
        """From the return of this call on every connection, old or new, has this fault and no other."""
        self._call(self._change(fault))

    def clear(self) -> None:
        """From the return of this call on everything passes again."""
        self._call(self._change(None))

    def _call(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _change(self, fault: Fault | None) -> None:
        if isinstance(fault, Refuse):
            await self._stop_listening()
            # Before the change: the end of a throttle or a hang would let out what it has held back.
            await self._end_links()
            self._state.count(num_struck=1)
        elif self._listener is None:
            await self._listen()
        self._state.change(fault)

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=_CHUNK_BYTES)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _close(self) -> None:
        await self._stop_listening()
        await self._end_links()

    async def _end_links(self) -> None:
        links = list(self._links)
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Taken from the task that `start_server` made for this connection, so that it can be ended from outside.
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a connection was accepted outside of any task: asyncio.start_server makes one")
        self._links.add(task)
        self._state.count(num_connections=1)
        try:
            await _Link(self._state, reader, writer).run(*self._target)
        except asyncio.CancelledError:
            pass  # asyncio would log the end that we asked for
        finally:
            self._links.discard(task)


class _State:
    """The fault in force, the counters, and an event that ends every wait when the fault changes."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.counters = Counters()
        self._changed = asyncio.Event()

    def change(self, fault: Fault | None) -> None:
        self.fault = fault
        self._changed.set()
        self._changed = asyncio.Event()

    def count(self, **more: int) -> None:
        old = self.counters
        self.counters = replace(old, **{name: getattr(old, name) + by for name, by in more.items()})

    async def pause(self, seconds: float | None) -> None:
        """Wait this long, without limit for None, or until the fault changes."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)


class _Link:
    """One client connection and its twin to the target."""

    def __init__(self, state: _State, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._state = state
        self._from_client = reader
        self._to_client = writer
        self._from_server: asyncio.StreamReader
        self._to_server: asyncio.StreamWriter
        self._reply_at = 0
        """Bytes of the reply under way that the server has sent."""
        self._in_request = False
        self._reply_struck = False
        self._lost = False
        """Whether bytes were swallowed, after which the two sides no longer agree where a reply begins."""

    async def run(self, host: str, port: int) -> None:
        """Forward until one side ends, an error strikes or the task is cancelled; both connections end with it."""
        in_order = False
        try:
            self._from_server, self._to_server = await asyncio.open_connection(host, port, limit=_CHUNK_BYTES)
            try:
                in_order = await self._pump()
            finally:
                await _end(self._to_server, in_order)
        except OSError:
            if isinstance(self._state.fault, Hang):
                await self._state.pause(None)
        finally:
            await _end(self._to_client, in_order)

    async def _pump(self) -> bool:
        """Return whether the end is one in good order."""
        pumps = [asyncio.ensure_future(pump) for pump in (self._pump_requests(), self._pump_replies())]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            outcomes = await asyncio.gather(*pumps, return_exceptions=True)
        return not self._lost and not any(isinstance(outcome, OSError) for outcome in outcomes)

    async def _pump_requests(self) -> None:
        while data := await self._from_client.read(_CHUNK_BYTES):
            begins = not self._in_request
            self._in_request, self._reply_at, self._reply_struck = True, 0, False
            fault = self._state.fault
            if begins and isinstance(fault, Latency) and fault.applies(data):
                self._state.count(num_struck=1)
                await self._state.pause(fault.seconds)
            elif isinstance(fault, HttpError) and await self._answer(fault, data):
                return
            if await self._swallowed():
                return
            async for piece in self._paced(data):
                self._state.count(request_bytes=len(piece))
                self._to_server.write(piece)
                await self._to_server.drain()

    async def _pump_replies(self) -> None:
        while data := await self._from_server.read(_CHUNK_BYTES):
            self._in_request = False
            if await self._swallowed():
                return
            fault, position = self._state.fault, self._reply_at
            self._reply_at += len(data)
            if isinstance(fault, Reset | Truncate | Overlong | Flip) and not self._reply_struck:
                cut = max(0, fault.after_bytes - position)
                if cut < len(data):
                    self._reply_struck = True
                    self._state.count(num_struck=1)
                    if isinstance(fault, Reset | Truncate):
                        await self._deliver(data[:cut])
                        if isinstance(fault, Reset):
                            raise ConnectionResetError("the fault")
                        return
                    data = _spoiled(fault, data, cut)
            await self._deliver(data)

    async def _deliver(self, data: bytes) -> None:
        async for piece in self._paced(data):
            self._state.count(reply_bytes=len(piece))
            self._to_client.write(piece)
            await self._to_client.drain()

    async def _paced(self, data: bytes) -> AsyncIterator[bytes]:
        """`data` in pieces at the throttle's pace, and as soon as there is none all that is left."""
        while data and isinstance(fault := self._state.fault, Throttle):
            size = min(len(data), max(1, fault.bytes_per_s // 20))
            self._state.count(num_struck=1)
            await self._state.pause(size / fault.bytes_per_s)
            yield data[:size]
            data = data[size:]
        if data:
            yield data

    async def _swallowed(self) -> bool:
        """Under a hang: lose what has been read and read no more; True when the hang is over and bytes were lost."""
        while isinstance(self._state.fault, Hang):
            if not self._lost:
                self._state.count(num_struck=1)
            self._lost = True
            await self._state.pause(None)
        return self._lost

    async def _answer(self, fault: HttpError, head: bytes) -> bool:
        """Answer the request that begins here, if the fault means it; the connection ends after it."""
        method = _HTTP_HEAD.match(head)
        if method is None or (fault.methods and method[1].decode() not in fault.methods):
            return False
        while b"\r\n\r\n" not in head and (more := await self._from_client.read(_CHUNK_BYTES)):
            head += more
        fields, _, body = head.partition(b"\r\n\r\n")
        length = re.search(rb"\r\ncontent-length: *(\d+)", fields, re.IGNORECASE)
        left = int(length[1]) - len(body) if length and b"100-continue" not in fields.lower() else 0
        # A body that is left unread would turn our FIN into a reset, which may overtake the answer.
        while left > 0 and (more := await self._from_client.read(_CHUNK_BYTES)):
            left -= len(more)
        self._state.count(num_struck=1)
        await self._deliver(fault.reply())
        return True


def _spoiled(fault: Overlong | Flip, data: bytes, cut: int) -> bytes:
    if isinstance(fault, Overlong):
        return data[:cut] + fault.extra + data[cut:]
    return data[:cut] + bytes([data[cut] ^ 0x10]) + data[cut + 1 :]


async def _end(writer: asyncio.StreamWriter, in_order: bool) -> None:
    """Close by FIN, after what is still to be sent, or at once by RST."""
    with contextlib.suppress(OSError):
        if not in_order:
            raw: socket.socket = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        writer.close()
        await writer.wait_closed()
