"""How a store's failure is told: to the log at most once a minute, and to the counters as a reason.

Owner: `storage/`. Thread: any.
"""

from __future__ import annotations

import logging
import threading
import time

from vllm_hicache.errors import ObjectMissing, StoreCorrupt, StoreTimeout, StoreUnavailable
from vllm_hicache.names import MissReason

_LOG_EVERY_S = 60.0
_log = logging.getLogger(__name__)


class RareWarning:
    """Logs at most one warning a minute, with the number that it held back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_s = 0.0
        self._num_held = 0

    def warn(self, what: str, error: Exception) -> bool:
        """Log `what` and the error, unless something was logged within a minute; return whether it was."""
        with self._lock:
            now = time.monotonic()
            if now < self._next_s:
                self._num_held += 1
                return False
            num_held, self._num_held, self._next_s = self._num_held, 0, now + _LOG_EVERY_S
        kind = type(error).__name__
        _log.warning("%s: %s: %s (%d more warnings since the last one)", what, kind, error, num_held)
        return True


def miss_reason(error: Exception) -> MissReason:
    """Return as what a failed read counts."""
    if isinstance(error, ObjectMissing):
        return MissReason.ABSENT
    if isinstance(error, StoreCorrupt):
        return MissReason.CORRUPT
    if isinstance(error, StoreTimeout):
        return MissReason.TIMEOUT
    return MissReason.UNAVAILABLE if isinstance(error, StoreUnavailable) else MissReason.ERROR
