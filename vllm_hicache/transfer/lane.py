"""A lane: a few threads and the queue they take their work from.

Owned by the transfer engine. Any thread may submit. A task that raises is counted and logged, and the thread
lives on; a thread that died all the same is replaced when `revive` is called.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from vllm_hicache.machine import neighbouring_cpus, run_on, yield_to_others

logger = logging.getLogger(__name__)

Task = Callable[[], None]


class Lane:
    """`num_threads` threads that take tasks in order of submission.

    Args:
        nice: how much the threads yield to others, 0 to 19.
    """

    def __init__(self, name: str, num_threads: int, on_error: Callable[[Exception], None], nice: int = 0) -> None:
        self.name = name
        self._nice = nice
        self._on_error = on_error
        self._queue: deque[Task] = deque()
        self._ready = threading.Condition()
        self._running = 0
        self._closing = False
        self._threads: list[threading.Thread] = []
        self._num_threads = num_threads
        self.revive()

    def submit(self, task: Task) -> None:
        """Queue a task.

        Raises:
            RuntimeError: the lane is closed.
        """
        with self._ready:
            if self._closing:
                raise RuntimeError(f"lane {self.name} is closed")
            self._queue.append(task)
            self._ready.notify()

    @property
    def depth(self) -> int:
        """Tasks that wait."""
        return len(self._queue)

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
            dropped = len(self._queue)
            self._queue.clear()
            self._ready.notify_all()
        for thread in self._threads:
            thread.join(max(0.05, deadline - time.monotonic()))
        return dropped

    def _idle(self) -> bool:
        return not self._queue and self._running == 0

    def _run(self) -> None:
        run_on(neighbouring_cpus())
        yield_to_others(self._nice)
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
            self._ready.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                return None
            self._running += 1
            return self._queue.popleft()
