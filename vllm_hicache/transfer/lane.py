"""A lane: a few threads and one queue in which urgent work goes before other work.

Owned by the transfer engine. Any thread may submit. A task that raises is counted and logged, and the thread
lives on; a thread that died all the same is replaced when `revive` is called.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum

from vllm_hicache.machine import neighbouring_cpus, run_on

logger = logging.getLogger(__name__)

Task = Callable[[], None]


class Priority(IntEnum):
    """Loads are waited for by a request; saves and flushes by nobody."""

    LOAD = 0
    WRITE = 1


class Lane:
    """`num_threads` threads that take tasks by priority, then in order of submission."""

    def __init__(self, name: str, num_threads: int, on_error: Callable[[Exception], None]) -> None:
        self.name = name
        self._on_error = on_error
        self._queues: tuple[deque[Task], deque[Task]] = (deque(), deque())
        self._ready = threading.Condition()
        self._running = 0
        self._closing = False
        self._threads: list[threading.Thread] = []
        self._num_threads = num_threads
        self.revive()

    def submit(self, priority: Priority, task: Task) -> None:
        """Queue a task.

        Raises:
            RuntimeError: the lane is closed.
        """
        with self._ready:
            if self._closing:
                raise RuntimeError(f"lane {self.name} is closed")
            self._queues[priority].append(task)
            self._ready.notify()

    def depth(self, priority: Priority) -> int:
        """Tasks of this priority that wait."""
        return len(self._queues[priority])

    def revive(self) -> int:
        """Replace threads that died; how many that were (0 in all but a broken interpreter)."""
        if self._closing:
            return 0
        alive = [thread for thread in self._threads if thread.is_alive()]
        dead = len(self._threads) - len(alive)
        while len(alive) < self._num_threads:
            thread = threading.Thread(target=self._run, name=f"hicache-{self.name}-{len(alive)}", daemon=True)
            alive.append(thread)
            thread.start()
        self._threads = alive
        return dead

    def close(self, timeout_s: float) -> int:
        """Finish what is queued for at most `timeout_s` seconds, drop the rest and end the threads.

        Returns:
            Tasks that were dropped.
        """
        deadline = time.monotonic() + timeout_s
        with self._ready:
            self._closing = True
            self._ready.notify_all()
            self._ready.wait_for(self._idle, timeout=timeout_s)
            dropped = sum(len(queue) for queue in self._queues)
            for queue in self._queues:
                queue.clear()
            self._ready.notify_all()
        for thread in self._threads:
            thread.join(max(0.05, deadline - time.monotonic()))
        return dropped

    def _idle(self) -> bool:
        return not any(self._queues) and self._running == 0

    def _run(self) -> None:
        run_on(neighbouring_cpus())
        while (task := self._take()) is not None:
            try:
                task()
            except Exception as error:  # a miss, counted by the callback; the thread must live
                self._on_error(error)
                logger.exception("A task of lane %s failed; its operation counts as not done", self.name)
            finally:
                with self._ready:
                    self._running -= 1
                    self._ready.notify_all()

    def _take(self) -> Task | None:
        with self._ready:
            self._ready.wait_for(lambda: any(self._queues) or self._closing)
            for queue in self._queues:
                if queue:
                    self._running += 1
                    return queue.popleft()
            return None
