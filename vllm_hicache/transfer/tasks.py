"""The state of one operation while threads work on its pages.

A task is shared by the copy thread, the store threads and the engine's thread; every change happens under its
lock. It knows nothing of queues or stores: the transfer engine moves bytes and tells the task.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import IntEnum

from vllm_hicache.names import MissReason, OpId, Phase
from vllm_hicache.ownership import Shard
from vllm_hicache.plan import LoadOp, OpReport, PageMove


class PageState(IntEnum):
    """How far a page of a load has come; each state includes the ones before."""

    WAITING = 0
    HELD = 1
    DONE = 2


class LoadTask:
    """Progress of one load.

    `limit` is the number of leading pages that are still wanted. It only falls: to the first page that failed,
    or, when the load is cut short, to the pages that are done. The load is *received* when every wanted page is
    done and no copy runs, so that the engine may use or recompute the blocks; it is *settled* when no store
    thread can write to one of its slots any more, so that slots may change hands. Between the two lies a store
    call that has not come back.

    Pages of other owners are held from the beginning: that they are there is for their owner to say. They are done
    with it, unless owners give each other their pages.

    Args:
        on_received: called once, with the lock held, from whichever thread got there.
        on_settled: likewise.
        shard: which of the pages are this rank's.
        is_exchanged: whether pages of other owners go to this rank's device blocks too.
    """

    def __init__(
        self,
        op: LoadOp,
        on_received: Callable[[LoadTask], None],
        on_settled: Callable[[LoadTask], None],
        shard: Shard = Shard(),
        is_exchanged: bool = False,
    ) -> None:
        self.op = op
        self.is_exchanged = is_exchanged
        self._owned = [shard.owns(page.slot) for page in op.pages]
        self.reason: MissReason | None = None
        self.pages_done = 0
        self.was_cut = False
        self._lock = threading.Lock()
        self._states = [PageState.WAITING] * len(op.pages)
        self._limit = len(op.pages)
        self._leading = 0
        self._held = 0
        self._fetching = 0
        self._copying = 0
        self._received = False
        self._settled = False
        self._on_received = on_received
        self._on_settled = on_settled
        self._deadline = None if op.time_limit_s is None else time.monotonic() + op.time_limit_s

    def owns(self, index: int) -> bool:
        """Whether page `index` is this rank's."""
        return self._owned[index]

    @property
    def is_held(self) -> bool:
        """Whether every page that is still wanted is in its slot."""
        return self._held >= self._limit

    def begin_fetch(self, index: int) -> bool:
        """Whether page `index` is still wanted; if so a store thread now writes to its slot."""
        with self._lock:
            if index >= self._limit:
                return False
            self._fetching += 1
            return True

    def end_fetch(self, index: int, reason: MissReason | None) -> bool:
        """Take the outcome of a fetch; whether the page is now to be copied to the device."""
        with self._lock:
            self._fetching -= 1
            if reason is not None:
                self._fall_to(index, reason)
                wanted = False
            else:
                self._states[index] = PageState.HELD if self.op.pages[index].blocks else PageState.DONE
                wanted = index < self._limit and self._states[index] == PageState.HELD
            self._advance()
            return wanted

    def begin_copy(self, index: int) -> bool:
        """Whether page `index` is still wanted on the device; if so its slot is read and its blocks are written now."""
        with self._lock:
            if index >= self._limit:
                return False
            self._copying += 1
            return True

    def end_copy(self, index: int, reason: MissReason | None) -> None:
        """Take the outcome of a copy."""
        with self._lock:
            self._copying -= 1
            if reason is not None:
                self._fall_to(index, reason)
            else:
                self._states[index] = PageState.DONE
            self._advance()

    def start(self) -> None:
        """Count host pages as held, and settle at once where there is nothing to do."""
        with self._lock:
            for index, page in enumerate(self.op.pages):
                copied = page.blocks and (self._owned[index] or self.is_exchanged)
                if not page.from_store or not self._owned[index]:
                    self._states[index] = PageState.HELD if copied else PageState.DONE
            self._advance()

    def fail(self, index: int, reason: MissReason) -> None:
        """Give up page `index` and what follows it, without having tried."""
        with self._lock:
            self._fall_to(index, reason)
            self._advance()

    def cut(self, reason: MissReason) -> None:
        """Give up everything that is not done yet."""
        with self._lock:
            self._skip_done()
            self.was_cut = self.was_cut or self._leading < self._limit
            self._fall_to(self._leading, reason)
            self._advance()

    def cut_if_late(self, now: float) -> None:
        """Cut the load when its time limit has passed. `now` is `time.monotonic()`."""
        if self._deadline is not None and now >= self._deadline and not self._received:
            self.cut(MissReason.TIMEOUT)

    def report(self, rank: int) -> OpReport:
        """How far the load has come. Nothing in it is less than in an earlier one."""
        with self._lock:
            done = self.pages_done if self._received else self._leading
            held = max(done, self._held)
            phase = Phase.SETTLED if self._settled else Phase.RECEIVED if self._received else Phase.RUNNING
            return OpReport(rank, self.op.op, done, held, phase, self.reason if self._received else None)

    def _fall_to(self, limit: int, reason: MissReason) -> None:
        if limit < self._limit:
            self._limit = limit
            self.reason = reason

    def _skip_done(self) -> None:
        while self._leading < self._limit and self._states[self._leading] == PageState.DONE:
            self._leading += 1

    def _advance(self) -> None:
        self._skip_done()
        while self._held < len(self._states) and self._states[self._held] >= PageState.HELD:
            self._held += 1
        if not self._received and self._leading >= self._limit and self._copying == 0:
            self._received = True
            self.pages_done = self._limit
            self._on_received(self)
        if self._received and not self._settled and self._fetching == 0:
            self._settled = True
            self._on_settled(self)


class WriteTask:
    """Progress of a save or a flush: pages succeed or fail in any order, the leading run counts."""

    def __init__(self, op: OpId, pages: tuple[PageMove, ...]) -> None:
        self.op = op
        self.pages = pages
        self._lock = threading.Lock()
        self._done = [False] * len(pages)
        self._open = len(pages)
        self._limit = len(pages)
        self._reason: MissReason | None = None

    def end(self, index: int, reason: MissReason | None) -> bool:
        """Take the outcome of one page; whether it was the last one."""
        with self._lock:
            self._open -= 1
            self._done[index] = reason is None
            if reason is not None:
                self._limit = min(self._limit, index)
            self._reason = self._reason or reason
            return self._open == 0

    def is_wanted(self, index: int) -> bool:
        """Whether no page before this one has failed yet, so that it is worth trying."""
        return index < self._limit

    def report(self, rank: int) -> OpReport:
        """The report of a finished task."""
        done = next((index for index, done in enumerate(self._done) if not done), len(self._done))
        return OpReport(rank, self.op, done, done, Phase.SETTLED, self._reason)
