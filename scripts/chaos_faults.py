"""The rows of the chaos table: each fault as a context manager around the requests that meet it.

Owner: `chaos_run.py`, from one thread; a fault that waits for its moment has a thread of its own inside the block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum

from chaos_stores import ChaosStore
from fault_kinds import Fault, Flip, Hang, HttpError, Latency, Overlong, Refuse, Reset, Throttle, Truncate
from fault_proxy import FaultProxy

MIB = 1 << 20
MID_TRANSFER_BYTES = 256 << 10
"""So far into a page's bytes a server is killed."""

MOMENT_LIMIT_S = 20.0
_POLL_S = 0.005


class Evidence(StrEnum):
    """What shows that the fault was met at all."""

    PROXY = "proxy"
    """The proxy counted it."""
    FLUSH_ERRORS = "flush errors"
    """The engine counted writes that failed."""
    ABSENT = "absent"
    """The engine counted pages that were promised and gone."""
    GIVEN = "given"
    """Made by hand: it is there, or an error was raised."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A store, the proxy in front of it, and how long the `stop` row lasts, seconds."""

    store: ChaosStore
    proxy: FaultProxy
    stop_s: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One row.

    Attributes:
        fault: makes it on entry and takes it away on exit.
        writes: whether it is saves that must meet it: the store is emptied first, so that there are some.
        store: the only store that has it, where it is not all.
        lasts: whether requests go on for `Scene.stop_s`.
    """

    name: str
    fault: Callable[[Scene], AbstractContextManager[None]]
    evidence: Evidence = Evidence.PROXY
    writes: bool = False
    store: str | None = None
    lasts: bool = False


class Missed(RuntimeError):
    """The moment for a fault did not come."""


def on_the_wire(fault: Fault) -> Callable[[Scene], AbstractContextManager[None]]:
    """A fault of the proxy."""

    @contextmanager
    def broken(scene: Scene) -> Iterator[None]:
        scene.proxy.set_fault(fault)
        try:
            yield
        finally:
            scene.proxy.clear()

    return broken


@contextmanager
def at_the_moment(came: Callable[[], bool], strike: Callable[[], None]) -> Iterator[None]:
    """Strikes each time that the moment has come, until the block ends. Raises Missed when it never came."""
    ended, struck = threading.Event(), threading.Event()

    def watch() -> None:
        while not ended.wait(_POLL_S):
            if came():
                strike()
                struck.set()

    watcher = threading.Thread(target=watch, name="chaos-moment")
    watcher.start()
    try:
        yield
        in_time = struck.wait(MOMENT_LIMIT_S)
    finally:
        ended.set()
        watcher.join()
    if not in_time:
        raise Missed(f"its moment did not come within {MOMENT_LIMIT_S:.0f} s of the last request")


def killed_while(moved_bytes: Callable[[FaultProxy], int]) -> Callable[[Scene], AbstractContextManager[None]]:
    """SIGKILL in the middle of a transfer, which the proxy slows down so that it has a middle.

    Its connections are cut as well, as when its host dies: else the kernel delivers what it has buffered, a page.
    """

    @contextmanager
    def broken(scene: Scene) -> Iterator[None]:
        proxy, server = scene.proxy, scene.store.server
        proxy.set_fault(Throttle(MIB))
        start_bytes = moved_bytes(proxy)
        is_dead = False

        def came() -> bool:
            return not is_dead and moved_bytes(proxy) - start_bytes > MID_TRANSFER_BYTES

        def strike() -> None:
            nonlocal is_dead
            is_dead = True
            server.kill()
            proxy.set_fault(Refuse())

        try:
            with at_the_moment(came, strike):
                yield
        finally:
            if is_dead:
                server.start()
            proxy.clear()

    return broken


@contextmanager
def stopped(scene: Scene) -> Iterator[None]:
    """SIGSTOP: connections are taken, nothing is answered."""
    scene.store.pause()
    try:
        yield
    finally:
        scene.store.server.resume()


@contextmanager
def restarted_empty(scene: Scene) -> Iterator[None]:
    """Killed, and back at once with nothing in it."""
    scene.store.restart_empty()
    yield


@contextmanager
def full(scene: Scene) -> Iterator[None]:
    """No room for another page."""
    with scene.store.full():
        yield


@contextmanager
def read_only(scene: Scene) -> Iterator[None]:
    """Credentials that may no longer write."""
    with scene.store.read_only(scene.proxy):
        yield


@contextmanager
def evicted_before_the_read(scene: Scene) -> Iterator[None]:
    """Look-ups find pages; while the reads that follow are held back, everything is removed."""
    proxy = scene.proxy
    proxy.set_fault(Latency(0.5, scene.store.read_marks))
    num_seen = proxy.counters.num_struck

    def came() -> bool:
        return proxy.counters.num_struck > num_seen

    def strike() -> None:
        nonlocal num_seen
        num_seen = proxy.counters.num_struck
        scene.store.empty()

    try:
        with at_the_moment(came, strike):
            yield
    finally:
        proxy.clear()


CELLS = (
    Cell("flip", on_the_wire(Flip())),
    Cell("truncate", on_the_wire(Truncate())),
    Cell("overlong", on_the_wire(Overlong())),
    Cell("reset", on_the_wire(Reset())),
    Cell("503", on_the_wire(HttpError()), store="s3"),
    Cell("latency", on_the_wire(Latency(0.1))),
    Cell("throttle", on_the_wire(Throttle(MIB))),
    Cell("hang", on_the_wire(Hang())),
    Cell("refuse", on_the_wire(Refuse())),
    Cell("killed in a read", killed_while(lambda proxy: proxy.counters.reply_bytes), Evidence.GIVEN),
    Cell("killed in a write", killed_while(lambda proxy: proxy.counters.request_bytes), Evidence.GIVEN, writes=True),
    Cell("stopped", stopped, Evidence.GIVEN, lasts=True),
    Cell("restarted empty", restarted_empty, Evidence.GIVEN),
    Cell("full", full, Evidence.FLUSH_ERRORS, writes=True),
    Cell("read-only", read_only, Evidence.FLUSH_ERRORS, writes=True),
    Cell("evicted before the read", evicted_before_the_read, Evidence.ABSENT),
)
"""All rows but the first one of each store, `not up at start`, which is the engine's own start."""

NOT_UP = "not up at start"


def cells_of(store: str, names: frozenset[str]) -> list[Cell]:
    """The rows of a store; `names` are those that were asked for, all of them when it is empty."""
    return [cell for cell in CELLS if cell.store in (None, store) and (not names or cell.name in names)]
