"""Page events: recorded in order, taken once, and not at all unless somebody listens."""

from __future__ import annotations

from vllm_hicache.events import PageEvents, PageRemoved, PageStored
from vllm_hicache.names import PageKey, Tier

ONE, TWO = PageKey(b"1" * 32), PageKey(b"2" * 32)


def test_events_come_out_in_the_order_they_happened() -> None:
    events = PageEvents(enabled=True)
    events.stored(Tier.HOST, ONE, None, (1, 2))
    events.stored(Tier.STORE, TWO, ONE, ())
    events.removed(Tier.HOST, ONE)
    assert events.take() == [
        PageStored(Tier.HOST, ONE, None, (1, 2)),
        PageStored(Tier.STORE, TWO, ONE, ()),
        PageRemoved(Tier.HOST, ONE),
    ]


def test_an_event_is_taken_once() -> None:
    events = PageEvents(enabled=True)
    events.removed(Tier.HOST, ONE)
    taken = events.take()
    events.removed(Tier.HOST, TWO)
    assert (taken, events.take(), events.take()) == (
        [PageRemoved(Tier.HOST, ONE)],
        [PageRemoved(Tier.HOST, TWO)],
        [],
    )


def test_nothing_is_recorded_unless_enabled() -> None:
    events = PageEvents(enabled=False)
    events.stored(Tier.HOST, ONE, None, (1, 2))
    events.removed(Tier.HOST, ONE)
    assert events.take() == []
