"""Pages as they enter and leave the tree of host memory: what is remembered of each, and what events tell of it.

Owned by the scheduler half; scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_hicache.drafts import StorablePages
from vllm_hicache.events import PageEvents
from vllm_hicache.index.host import HostTier
from vllm_hicache.index.tree import Evicted
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import PageKey, Slot, Tier
from vllm_hicache.tracking import OpenLoad, OpenSave


class TreePages:
    """See the module.

    Args:
        page_tokens: tokens of a page.
        storable: what stores and other engines are to have of pages in the tree.
    """

    def __init__(
        self, tier: HostTier, page_tokens: int, storable: StorablePages, metrics: Metrics, events: PageEvents
    ) -> None:
        self._tier = tier
        self._page = page_tokens
        self._storable = storable
        self._metrics = metrics
        self._events = events
        self._unfinished: set[PageKey] = set()

    def reserve(self, keys: Sequence[PageKey], start: int, stop: int) -> list[Slot]:
        """Slots for pages [start, stop) of a chain, as many as can be had; others may be evicted for them."""
        slots, evicted = self._tier.reserve(keys, start, stop - start)
        self.leave(evicted)
        return slots

    def enter(
        self,
        record: OpenLoad | OpenSave,
        first: int,
        slots: Sequence[Slot],
        first_event: int,
        stored: bool,
        doubtful_end: int = 0,
    ) -> None:
        """Slots with good bytes become pages from `first` on; `record.event_tokens` begin with page `first_event`."""
        full = slots[: max(0, record.num_full - first)]
        new = self._attach(record.keys, first, full, stored)
        # What has less than a page's tokens is of use to its two engines alone: it needs no store, and no event tells.
        unfinished = self._attach(record.keys, first + len(full), slots[len(full) :], stored=True)
        self._unfinished.update(record.keys[index] for index in unfinished)
        for index in (*new, *unfinished):
            self._storable.enter(record.keys[index], record.plain[index], index < doubtful_end)
        for index in new:
            token = (index - first_event) * self._page
            page = tuple(record.event_tokens[token : token + self._page])
            self._events.stored(Tier.HOST, record.keys[index], record.keys[index - 1] if index else None, page)

    def leave(self, evicted: Sequence[Evicted]) -> None:
        """Count pages that left host memory, and tell of them."""
        if evicted:
            self._metrics.count("evicted_pages", Tier.HOST.value, len(evicted))
        for page in evicted:
            self._storable.leave(page.key)
            if page.key in self._unfinished:
                self._unfinished.remove(page.key)
            else:
                self._events.removed(Tier.HOST, page.key)

    def _attach(self, keys: Sequence[PageKey], first: int, slots: Sequence[Slot], stored: bool) -> range:
        """Pages from `first` on that are new in the tree."""
        stop = first + len(slots)
        return range(stop - self._tier.attach(keys, first, slots, stored), stop)
