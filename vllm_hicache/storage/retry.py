"""One second try for calls that read, where the first one failed early: a dropped connection costs no page.

Owner: `storage/`. Thread: as thread-safe as the store inside; no state between calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from vllm_hicache.errors import StoreDenied, StoreUnavailable
from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.wrappers import StoreWrapper

MIN_PAUSE_S = 0.005
MAX_PAUSE_S = 0.05
"""Jitter keeps the threads that one server threw off from coming back all at once."""
_EARLY_SHARE = 0.25

_Result = TypeVar("_Result")


class Retrying(StoreWrapper):
    """Tries `exists` and `read` once more after StoreUnavailable; all else is tried once.

    Not after StoreDenied or ObjectMissing, which another try would find again, nor after StoreTimeout, nor
    when the first try took a quarter of `timeout_s` or more: then its time is spent. A try ends within
    `timeout_s`, a first one that is followed by a second within a quarter of it, and the pause takes at most
    50 ms; so a call ends within 1.25 x timeout_s + 50 ms.

    Args:
        timeout_s: the limit that the store inside keeps for one try, seconds.
        random: draws the pause.
    """

    def __init__(
        self,
        inner: Store,
        timeout_s: float,
        random: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._early_s = timeout_s * _EARLY_SHARE
        self._random = random or Random()
        self._clock = clock
        self._sleep = sleep

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        return self._tried(lambda: self._inner.exists(names))

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        return self._tried(lambda: self._inner.read(name, parts, offset))

    def _tried(self, call: Callable[[], _Result]) -> _Result:
        start = self._clock()
        try:
            return call()
        except StoreDenied:
            raise
        except StoreUnavailable:
            if self._clock() - start >= self._early_s:
                raise
        self._sleep(self._random.uniform(MIN_PAUSE_S, MAX_PAUSE_S))
        return call()
