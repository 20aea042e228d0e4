"""One all-gather among the ranks of a group, behind one interface for every platform.

A collective has a group, and where it runs in the background a thread, of its own, so that its calls are never mixed
with the engine's. Every rank makes the same calls in the same order. Several gathers may be pending, in buffers of
their own: they are carried out one at a time, in the order of `start`. Nothing hangs: a rank that does not come within
the time limit ends the call with an error on the others, and the collective is then broken.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from vllm_hicache.errors import CollectiveError
from vllm_hicache.machine import neighbouring_cpus, run_on

_GRACE_S = 1.0
"""How much longer than the transport a caller waits: it has the better message."""

_SHORTEST = timedelta(milliseconds=10)
"""The least limit of one call: torch takes one below a millisecond for none at all."""

_UNUSED_TAG, _NUM_TAGS = 0, 1 << 31

Fill = Callable[[torch.Tensor], None]
"""Writes this rank's row, which it is given, before it is sent.

Runs on the collective's thread; with CUDA on the caller's, and what it queues goes to the gather's stream.
"""


class Pending(ABC):
    """A gather that was started."""

    @abstractmethod
    def wait(self) -> None:
        """Return when every row is there: on the host for a CPU, in the current stream's order for CUDA.

        May be called again. Until it has returned `rows` belongs to the collective.

        Raises:
            CollectiveError: a rank did not come, `fill` raised, or the transport failed. What the rows then hold is
                not defined.
        """


class Collective(ABC):
    """All-gathers rows of equal size in place.

    Attributes:
        rank: this rank's row.
        size: ranks of the group.
    """

    rank: int
    size: int

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Zeroed memory to cut `rows` from, [bytes] of uint8; where ranks read each other's they make it together."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    @abstractmethod
    def start(self, rows: torch.Tensor, fill: Fill | None = None) -> Pending:
        """Begin to gather `rows` [size, ...], contiguous, whose row `rank` is this rank's or is written by `fill`.

        Of any dtype, and of any number of bytes, none included: those are sent as they are.

        Raises:
            ValueError: `rows` has another shape or is not contiguous.
        """

    @abstractmethod
    def close(self) -> None:
        """End its thread. What is pending all the same ends with an error. The group is left to torch."""


def new_group(ranks: Sequence[int], timeout_s: float, backend: str = "gloo") -> ProcessGroup:
    """Make a group for these global ranks alone. Its members call this, in the same order as for other groups.

    Torch tells groups of the same ranks apart by how many groups the process is in: that must be equal on all members.

    Raises:
        CollectiveError: a member did not come within `timeout_s` seconds.
        ValueError: this process is no member.
    """
    start = time.monotonic()
    try:
        # Gloo's own thread runs where its maker does, and a CPU worker's main thread is pinned to one core.
        with ThreadPoolExecutor(1, initializer=lambda: run_on(neighbouring_cpus())) as unpinned:
            group = unpinned.submit(_new_group, ranks, timeout_s, backend).result()
    except RuntimeError as error:
        raise CollectiveError(
            f"no group of ranks {list(ranks)} after {time.monotonic() - start:.1f} s ({_first_line(error)}): a rank "
            f"ended or is stuck, see its log; where it is merely slow, raise the limit of {timeout_s:g} s"
        ) from error
    if group is None:
        raise ValueError(
            f"rank {distributed.get_rank()} is none of {list(ranks)}: only a group's members may ask for it"
        )
    return group


def _new_group(ranks: Sequence[int], timeout_s: float, backend: str) -> ProcessGroup | None:
    group: ProcessGroup | None = distributed.new_group(
        list(ranks), timeout=timedelta(seconds=timeout_s), backend=backend, use_local_synchronization=True
    )
    return group


def check_rows(rows: torch.Tensor, size: int) -> None:
    """Refuse rows that a group of `size` ranks cannot gather in place.

    Raises:
        ValueError: another number of rows, or not contiguous.
    """
    if rows.ndim == 0 or rows.shape[0] != size or not rows.is_contiguous():
        raise ValueError(
            f"rows of shape {list(rows.shape)} and strides {list(rows.stride())} for {size} ranks: they must be "
            f"contiguous, [{size}, ...]"
        )


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """The same memory as [rows, bytes of a row] of uint8."""
    flat = rows.view(-1).view(torch.uint8)
    return flat.view(rows.shape[0], flat.numel() // rows.shape[0])


class GlooCollective(Collective):
    """Gathers on a thread of its own, over host memory; any thread may start and wait.

    Each rank sends its row to every other one and receives theirs, straight out of and into `rows`. Torch's own
    all-gather for gloo collects into a second buffer as large as `rows` and copies that.

    Args:
        group: of its own, see `new_group`; None for a rank alone, which fills its row and sends nothing.
        timeout_s: the most that one gather may take, its `fill` included, once those before it have ended.

    Attributes:
        num_bytes: received from other ranks.
        gather_s: seconds that gathers took on the thread, failed ones included.
        wait_s: seconds that callers spent in `wait`.
    """

    def __init__(self, group: ProcessGroup | None, timeout_s: float) -> None:
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.num_bytes = 0
        self.gather_s = 0.0
        self.wait_s = 0.0
        self._group = group
        self._timeout_s = timeout_s
        self._queue: SimpleQueue[_Gather | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_open = 0
        self._failure: CollectiveError | None = None
        self._thread = threading.Thread(target=self._run, name=f"hicache-gather-{self.rank}", daemon=True)
        self._thread.start()

    def start(self, rows: torch.Tensor, fill: Fill | None = None) -> Pending:
        """Queue the gather of `rows`, [size, ...] of host memory."""
        check_rows(rows, self.size)
        with self._lock:
            self._num_open += 1
            gather = _Gather(self, rows, fill, self._timeout_s * self._num_open + _GRACE_S)
            if self._failure is None:
                self._queue.put(gather)
                return gather
        self._finish(gather)
        return gather

    def close(self) -> None:
        """End the thread, for which a gather that runs has its time left. May be called twice."""
        with self._lock:
            if self._failure is None:
                self._failure = CollectiveError(
                    f"rank {self.rank} of {self.size}: closed with {self._num_open} gathers open: wait for each before"
                )
            self._queue.put(None)
        self._thread.join(self._timeout_s + _GRACE_S)

    def await_gather(self, gather: _Gather) -> None:
        """Return when it has ended, well or not, or break the collective when its time has passed."""
        start = time.monotonic()
        if not gather.ended.wait(gather.limit_s):
            gather.error = self._break(gather, gather.limit_s, "its thread does not come back")
        with self._lock:
            self.wait_s += time.monotonic() - start

    def _run(self) -> None:
        run_on(neighbouring_cpus())
        while self._serve_next():
            pass  # nothing of the last gather is kept while the thread waits: its rows may be a buffer's last

    def _serve_next(self) -> bool:
        """Wait for a gather and carry it out; whether there was one, and not the end."""
        gather = self._queue.get()
        if gather is None:
            return False
        if self._failure is None:
            start = time.monotonic()
            try:
                self._gather(gather, start + self._timeout_s)
            except Exception as error:  # the caller's to judge: a miss for a load, a stop in the forward pass
                self._break(gather, time.monotonic() - start, _first_line(error), error)
            self.gather_s += time.monotonic() - start
        self._finish(gather)
        return True

    def _finish(self, gather: _Gather) -> None:
        with self._lock:
            self._num_open -= 1
        gather.error = self._failure
        gather.ended.set()

    @torch.inference_mode()  # as the engine's own thread: rows may be cut from its tensors
    def _gather(self, gather: _Gather, deadline: float) -> None:
        if gather.fill is not None:
            gather.fill(gather.rows[self.rank])
        if self._group is None:
            return
        rows, group = as_bytes(gather.rows), self._group
        # A tag for each size: gloo ends the process that is sent more than it expects.
        tag = 1 + rows.shape[1] % (_NUM_TAGS - 1)
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        works = [group.recv([rows[other]], other, tag) for other in others]
        works += [group.send([rows[self.rank]], other, tag) for other in others]
        for work in works:
            work.wait(max(_SHORTEST, timedelta(seconds=deadline - time.monotonic())))
        self.num_bytes += len(others) * rows.shape[1]

    def _break(self, gather: _Gather, after_s: float, why: str, cause: Exception | None = None) -> CollectiveError:
        """Fail this gather and all later ones; the first failure is the one that is told."""
        failure = CollectiveError(
            f"rank {self.rank} of {self.size}: no gather of {gather.rows.nbytes // self.size} bytes a rank after "
            f"{after_s:.1f} s ({why}): a rank ended, is stuck or gathers rows of another size, see the others' "
            f"logs; where they are merely slow, raise the limit of {self._timeout_s:g} s"
        )
        failure.__cause__ = cause
        with self._lock:
            self._failure = self._failure or failure
        self._hang_up()
        return self._failure

    def _hang_up(self) -> None:
        """Close the connections, so that the others need not wait for their limit.

        Gloo closes all of a group's when a call passes its limit, and does nothing on `abort`.
        """
        if self._group is not None:
            with suppress(RuntimeError):  # that it passes its limit, or that they are closed already
                nothing = torch.empty(0, dtype=torch.uint8)
                self._group.recv([nothing], (self.rank + 1) % self.size, _UNUSED_TAG).wait(_SHORTEST)


class _Gather(Pending):
    """One gather in a `GlooCollective`'s queue. `error` is valid once `ended` is set or the limit has passed."""

    def __init__(self, collective: GlooCollective, rows: torch.Tensor, fill: Fill | None, limit_s: float) -> None:
        self.rows = rows
        self.fill = fill
        self.limit_s = limit_s
        self.ended = threading.Event()
        self.error: CollectiveError | None = None
        self._collective = collective

    def wait(self) -> None:
        """Return when every row is in host memory."""
        self._collective.await_gather(self)
        if self.error is not None:
            raise CollectiveError(*self.error.args) from self.error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
