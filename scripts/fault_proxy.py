"""A TCP proxy on loopback that breaks what passes through it, as a network or a sick server would.

It knows requests and replies only as bytes that change direction: a reply is what the server sends between two
bursts of the client. The faults are `fault_kinds.py`'s.

Owner: scripts and tests. Thread: the proxy runs on one of its own; all public methods may be called from any other.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from fault_kinds import Fault, Refuse
from fault_link import CHUNK_BYTES, Counters, Link, State

_T = TypeVar("_T")


class FaultProxy:
    """Forwards `port` on 127.0.0.1 to a target, through the fault that is set. Use as a context manager.

    A target that refuses is passed on as a reset. Raises OSError when no port can be had.
    """

    def __init__(self, target_host: str, target_port: int) -> None:
        self._target = (target_host, target_port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._state = State()
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
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=CHUNK_BYTES)
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
            await Link(self._state, reader, writer).run(*self._target)
        except asyncio.CancelledError:
            pass  # asyncio would log the end that we asked for
        finally:
            self._links.discard(task)
