"""Background lookups: how many pages of a chain the store holds.

Owned by the scheduler half. `begin` is called on the scheduler thread and never waits; one thread asks the store. A
page counts as present only when every object of it is. The store's failures are misses.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vllm_hicache.errors import StoreError
from vllm_hicache.geometry import Cell
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import PageKey, Role
from vllm_hicache.storage.chunks import RoleChunks
from vllm_hicache.storage.envelope import ChunkId

logger = logging.getLogger(__name__)

_BATCH_PAGES = 64


@dataclass(slots=True)
class Lookup:
    """One question: how many leading pages are in the store. Answered when `done` is set.

    Attributes:
        keys, plain: names of the pages as in `PageKeys`.
        num_pages: leading pages that are of use; `None` until it is answered.
        num_whole: leading pages that have everything, at most `num_pages`.
    """

    keys: Sequence[PageKey]
    plain: Sequence[PageKey]
    store: RoleChunks
    num_pages: int | None = None
    num_whole: int = 0
    abandoned: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class StoreLookups:
    """A thread that answers lookups in the order they were asked.

    Args:
        cells: the cells of the whole page.
        needs_draft: whether a page is of use only where the draft's are present too.
    """

    def __init__(self, cells: Sequence[Cell], metrics: Metrics, needs_draft: bool = True) -> None:
        self._needs_draft = needs_draft
        self._cells = tuple(cells)
        self._metrics = metrics
        self._queue: deque[Lookup] = deque()
        self._ready = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="hicache-lookup", daemon=True)
        self._thread.start()

    def begin(self, keys: Sequence[PageKey], store: RoleChunks, plain: Sequence[PageKey] | None = None) -> Lookup:
        """Ask for the leading run of `keys`, whose target's bytes have other names where `plain` is given.

        The answer appears in the returned record.
        """
        lookup = Lookup(keys, plain if plain is not None else keys, store)
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
                num_pages, lookup.num_whole = self._count(lookup)
                # Last: it is what others look at to see whether there is an answer.
                lookup.num_pages = num_pages
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

    def _count(self, lookup: Lookup) -> tuple[int, int]:
        """Leading pages that are of use, and that are whole."""
        found, whole, size = 0, 0, 1
        while found < len(lookup.keys) and not lookup.abandoned:
            batch = range(found, min(found + size, len(lookup.keys)))
            for has_target, has_draft in self._present(lookup, batch):
                if not has_target or (self._needs_draft and not has_draft):
                    return found, whole
                whole += has_draft and whole == found
                found += 1
            size = _BATCH_PAGES
        return found, whole

    def _present(self, lookup: Lookup, pages: Sequence[int]) -> Iterator[tuple[bool, bool]]:
        """Whether all of the target's objects of each page are there, and all of the draft's."""
        names = {Role.TARGET: lookup.plain, Role.DRAFT: lookup.keys}
        chunks = [ChunkId.of(names[cell.role][page], cell) for page in pages for cell in self._cells]
        present = iter(lookup.store.present(chunks))
        for _ in pages:
            missing = {cell.role for cell in self._cells if not next(present)}
            yield Role.TARGET not in missing, Role.DRAFT not in missing
