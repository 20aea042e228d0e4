"""Background lookups: how many pages of a chain the store holds.

Owned by the scheduler half. `begin` is called on the scheduler thread and never waits; one thread asks the store. A
page counts as present only when every object of it is. The store's failures are misses.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_hicache.errors import StoreError
from vllm_hicache.geometry import Cell
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import PageKey
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.storage.envelope import ChunkId

logger = logging.getLogger(__name__)

_BATCH_PAGES = 64


@dataclass(slots=True)
class Lookup:
    """One question: how many leading pages of `keys` are in the store. Answered when `num_pages` is set."""

    keys: Sequence[PageKey]
    store: ChunkStore
    num_pages: int | None = None
    abandoned: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class StoreLookups:
    """A thread that answers lookups in the order they were asked.

    Args:
        cells: the grid's cells of the whole page; every one must be present.
    """

    def __init__(self, cells: Sequence[Cell], metrics: Metrics) -> None:
        self._cells = tuple(cells)
        self._metrics = metrics
        self._queue: deque[Lookup] = deque()
        self._ready = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="hicache-lookup", daemon=True)
        self._thread.start()

    def begin(self, keys: Sequence[PageKey], store: ChunkStore) -> Lookup:
        """Ask for the leading run of `keys`; the answer appears in the returned record."""
        lookup = Lookup(keys, store)
        with self._ready:
            self._queue.append(lookup)
            self._ready.notify()
        return lookup

    def close(self) -> None:
        """End the thread; open questions stay unanswered."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while (lookup := self._take()) is not None:
            try:
                lookup.num_pages = self._count(lookup)
            except Exception as error:  # a miss: the store's failure must not end the thread
                if not isinstance(error, StoreError):
                    logger.exception("A store lookup failed; its pages count as absent")
                self._metrics.count("errors", "lookup")
                lookup.num_pages = 0
            lookup.done.set()

    def _take(self) -> Lookup | None:
        with self._ready:
            self._ready.wait_for(lambda: self._queue or self._closing)
            return None if self._closing else self._queue.popleft()

    def _count(self, lookup: Lookup) -> int:
        found, size = 0, 1
        while found < len(lookup.keys) and not lookup.abandoned:
            batch = lookup.keys[found : found + size]
            present = lookup.store.present([ChunkId.of(key, cell) for key in batch for cell in self._cells])
            per_page = len(self._cells)
            for index in range(len(batch)):
                if not all(present[index * per_page : (index + 1) * per_page]):
                    return found
                found += 1
            size = _BATCH_PAGES
        return found
