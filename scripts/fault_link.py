"""One connection through `fault_proxy.py`, and what all of them share.

Owner: `FaultProxy`. Thread: that of its event loop alone; only `State.counters` may be read from others.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from fault_kinds import Fault, Flip, Hang, HttpError, Latency, Overlong, Reset, Throttle, Truncate

CHUNK_BYTES = 256 << 10
_HTTP_HEAD = re.compile(rb"(GET|HEAD|PUT|POST|DELETE|OPTIONS) ")


@dataclass(frozen=True, slots=True)
class Counters:
    """What has happened so far. `num_struck` counts the times that a fault did something."""

    num_connections: int = 0
    num_struck: int = 0
    request_bytes: int = 0
    reply_bytes: int = 0


class State:
    """The fault in force, the counters, and an event that ends every wait when the fault changes."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.counters = Counters()
        self._struck_before = 0
        self._changed = asyncio.Event()

    @property
    def num_struck(self) -> int:
        """Times that the fault in force has struck."""
        return self.counters.num_struck - self._struck_before

    def change(self, fault: Fault | None) -> None:
        self.fault = fault
        self._struck_before = self.counters.num_struck
        self._changed.set()
        self._changed = asyncio.Event()

    def count(self, **more: int) -> None:
        old = self.counters
        self.counters = replace(old, **{name: getattr(old, name) + by for name, by in more.items()})

    async def pause(self, seconds: float | None) -> None:
        """Wait this long, without limit for None, or until the fault changes."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)


class Link:
    """One client connection and its twin to the target."""

    def __init__(self, state: State, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
            self._from_server, self._to_server = await asyncio.open_connection(host, port, limit=CHUNK_BYTES)
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
        while data := await self._from_client.read(CHUNK_BYTES):
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
        while data := await self._from_server.read(CHUNK_BYTES):
            self._in_request = False
            if await self._swallowed():
                return
            fault, position = self._state.fault, self._reply_at
            self._reply_at += len(data)
            if not isinstance(fault, Reset | Truncate | Overlong | Flip) or not self._strikes(fault):
                await self._deliver(data)
                continue
            cut = max(0, fault.after_bytes - position)
            await self._deliver(_spoiled(fault, data, cut))
            if isinstance(fault, Reset):
                raise ConnectionResetError("the fault")
            if isinstance(fault, Truncate):
                return

    def _strikes(self, fault: Reset | Truncate | Overlong | Flip) -> bool:
        """Whether the reply has come to where the fault strikes it, for the first time."""
        is_spent = isinstance(fault, Reset) and self._state.num_struck == fault.num_times
        if is_spent or self._reply_struck or self._reply_at <= fault.after_bytes:
            return False
        self._reply_struck = True
        self._state.count(num_struck=1)
        return True

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
        while b"\r\n\r\n" not in head and (more := await self._from_client.read(CHUNK_BYTES)):
            head += more
        fields, _, body = head.partition(b"\r\n\r\n")
        length = re.search(rb"\r\ncontent-length: *(\d+)", fields, re.IGNORECASE)
        left = int(length[1]) - len(body) if length and b"100-continue" not in fields.lower() else 0
        # A body that is left unread would turn our FIN into a reset, which may overtake the answer.
        while left > 0 and (more := await self._from_client.read(CHUNK_BYTES)):
            left -= len(more)
        self._state.count(num_struck=1)
        await self._deliver(fault.reply())
        return True


def _spoiled(fault: Reset | Truncate | Overlong | Flip, data: bytes, cut: int) -> bytes:
    """What is left of `data`, the part of a reply in which the fault strikes at `cut`."""
    if isinstance(fault, Reset | Truncate):
        return data[:cut]
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
