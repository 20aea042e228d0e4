"""Real processes that form a gloo world over the loopback device and run functions of the tests.

A function is one of a module, called as `function(rank, *args)`; what it takes and returns must be picklable.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import distributed

HOST = "127.0.0.1"

Function = Callable[..., Any]


class RankFailure(AssertionError):
    """A rank raised, died or did not answer in time. The message holds its traceback."""


class World:
    """`num_ranks` processes in one gloo world, which run one function after the other.

    A world is of no use after a failure: its processes are then killed.
    """

    def __init__(self, num_ranks: int, timeout_s: float = 60) -> None:
        limit = timedelta(seconds=timeout_s)
        self._store = distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=limit)
        self._timeout_s = timeout_s
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        context = multiprocessing.get_context("spawn")
        for rank in range(num_ranks):
            here, there = context.Pipe()
            arguments = (there, rank, num_ranks, self._store.port, timeout_s)
            self._processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self._connections.append(here)
            self._processes[-1].start()
            there.close()

    def run(self, function: Function, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """What the function returned on each rank.

        Raises:
            RankFailure: a rank raised, died, or was not done within the time.
        """
        try:
            for connection in self._connections:
                connection.send((function, args))
            return self._answers(time.monotonic() + (timeout_s or self._timeout_s))
        except BaseException:
            self.close()
            raise

    def _answers(self, deadline: float) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < len(self._connections):
            waiting = [self._connections[rank] for rank in range(len(self._connections)) if rank not in answers]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailure(f"ranks {[self._connections.index(one) for one in waiting]} were not done in time")
            for connection in ready:
                rank = self._connections.index(connection)
                answers[rank] = self._answer(rank)
        return [answers[rank] for rank in range(len(answers))]

    def _answer(self, rank: int) -> Any:
        try:
            is_error, answer = self._connections[rank].recv()
        except (EOFError, OSError):
            self._processes[rank].join(5)
            raise RankFailure(f"rank {rank} died, exit code {self._processes[rank].exitcode}") from None
        if is_error:
            raise RankFailure(f"rank {rank} raised\n{answer}")
        return answer

    def close(self) -> None:
        """Kill the processes. May be called twice."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_ranks(num_ranks: int, function: Function, *args: Any, timeout_s: float = 60) -> list[Any]:
    """What `function(rank, *args)` returned on each rank of a gloo world of its own.

    Raises:
        RankFailure: a rank raised, died, or was not done within the time.
    """
    with World(num_ranks, timeout_s) as world:
        return world.run(function, *args)


def _serve(connection: Connection, rank: int, num_ranks: int, port: int, timeout_s: float) -> None:
    """Body of a process: join the world, then answer calls until the connection closes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout_s)
    store = distributed.TCPStore(HOST, port, is_master=False, timeout=limit)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((False, function(rank, *args)))
        except Exception:  # every failure is the caller's to see, as text
            connection.send((True, traceback.format_exc()))
