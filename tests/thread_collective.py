"""A collective of ranks that are threads of one process.

A gather is filled when it is started. Whoever waits for it meets the others, copies their rows, and meets them again,
so that no row changes while it is read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable

import torch

from vllm_hicache.errors import CollectiveError
from vllm_hicache.transfer.collective import Collective, Fill, Pending, as_bytes, check_rows


class Meeting:
    """What the ranks of one group share. Once a rank has not come, none meets here any more."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self._barrier = threading.Barrier(size)
        self._rows: list[torch.Tensor | None] = [None] * size

    def exchange(self, rank: int, rows: torch.Tensor) -> None:
        """Fill in the others' rows [size, bytes]."""
        self._rows[rank] = rows[rank]
        self._come_together(rank)
        for other, row in enumerate(self._rows):
            if row is None or row.shape != rows[rank].shape:
                self.leave()
                raise CollectiveError(f"rank {other} gathers other rows than rank {rank} of {self.size}")
            if other != rank:
                rows[other].copy_(row)
        self._come_together(rank)

    def leave(self) -> None:
        """Let the others wait no longer, now or ever."""
        self._barrier.abort()

    def _come_together(self, rank: int) -> None:
        try:
            self._barrier.wait(self._timeout_s)
        except threading.BrokenBarrierError as error:
            raise CollectiveError(
                f"rank {rank} of {self.size} did not meet all others within {self._timeout_s:g} s"
            ) from error


class ThreadCollective(Collective):
    """One rank of a `Meeting`.

    Attributes:
        before_meeting: called with this rank's row, as bytes, before each exchange; it may wait, change it or raise.
        num_gathers: exchanges that have ended well.
    """

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size = rank, meeting.size
        self.before_meeting: Callable[[torch.Tensor], None] = lambda row: None
        self.num_gathers = 0
        self._meeting = meeting
        self._open: deque[_Gather] = deque()
        self._failure: CollectiveError | None = None

    def start(self, rows: torch.Tensor, fill: Fill | None = None) -> Pending:
        """Fill this rank's row; the gather is carried out by `wait`."""
        check_rows(rows, self.size)
        gather = _Gather(self, as_bytes(rows))
        if fill is not None:
            try:
                fill(rows[self.rank])
            except Exception as error:
                self._break(error)
        self._open.append(gather)
        return gather

    def close(self) -> None:
        """Others wait for this rank no longer."""
        self._break(CollectiveError(f"rank {self.rank} has closed"))

    def end(self, gather: _Gather) -> None:
        """Carry out the gathers up to this one, in the order of `start`."""
        while gather in self._open:
            each = self._open.popleft()
            try:
                if self._failure is None:
                    self.before_meeting(each.rows[self.rank])
                    self._meeting.exchange(self.rank, each.rows)
                    self.num_gathers += 1
            except Exception as error:
                self._break(error)
            each.failure = self._failure

    def _break(self, error: Exception) -> None:
        self._meeting.leave()
        if self._failure is None:
            self._failure = CollectiveError(f"rank {self.rank} of {self.size}: {error}")


class _Gather(Pending):
    def __init__(self, collective: ThreadCollective, rows: torch.Tensor) -> None:
        self.rows = rows
        self.failure: CollectiveError | None = None
        self._collective = collective

    def wait(self) -> None:
        self._collective.end(self)
        if self.failure is not None:
            raise CollectiveError(*self.failure.args)


class Groups:
    """The groups of one engine's ranks, each made by the first rank that joins it."""

    def __init__(self) -> None:
        self._meetings: dict[Hashable, Meeting] = {}

    def join(self, group: Hashable, rank: int, size: int, timeout_s: float) -> ThreadCollective:
        """Rank `rank` of `size` of a group."""
        return ThreadCollective(rank, self._meetings.setdefault(group, Meeting(size, timeout_s)))
