"""Page events: what entered and left a tier, for routers that send a request to where its prefix is.

Pure; filled by the scheduler half, drained by the connector, which turns them into vLLM's KV events.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_hicache.names import PageKey, Tier


@dataclass(frozen=True, slots=True)
class PageStored:
    """A page is in `tier` now. `parent` is `None` for the first page of a chain."""

    tier: Tier
    key: PageKey
    parent: PageKey | None
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PageRemoved:
    """A page has left `tier`."""

    tier: Tier
    key: PageKey


PageEvent = PageStored | PageRemoved


class PageEvents:
    """Events since they were taken last. Records nothing unless `enabled`."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._events: list[PageEvent] = []

    def stored(self, tier: Tier, key: PageKey, parent: PageKey | None, tokens: tuple[int, ...]) -> None:
        """Note that a page entered a tier."""
        if self.enabled:
            self._events.append(PageStored(tier, key, parent, tokens))

    def removed(self, tier: Tier, key: PageKey) -> None:
        """Note that a page left a tier."""
        if self.enabled:
            self._events.append(PageRemoved(tier, key))

    def take(self) -> list[PageEvent]:
        """Everything new, oldest first."""
        events, self._events = self._events, []
        return events
