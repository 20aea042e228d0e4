"""Pages whose draft state is missing: they are of use to the target, and no page of a draft may be stored after them.

Owned by the scheduler half; scheduler thread only. What a draft computes on a prefix without its state is no state
either, so that pages saved behind a bare page are bare themselves. There are such pages under `draft_miss=serve` only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from vllm_hicache.names import PageKey, Slot
from vllm_hicache.plan import PageMove


class BarePages:
    """The bare pages that were met last.

    A page stays bare where it is: in host memory and on the device, which has its own order of eviction. What is
    forgotten after `capacity` others is taken for a whole page.

    Args:
        capacity: pages to remember, at least 1.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[PageKey, None] = OrderedDict()

    def __contains__(self, key: PageKey) -> bool:
        return key in self._keys

    def any_of(self, keys: Iterable[PageKey]) -> bool:
        """Whether one of `keys` is bare; those that are count as met."""
        if not self._keys:
            return False
        met = [key for key in keys if key in self._keys]
        for key in met:
            self._keys.move_to_end(key)
        return bool(met)

    def note(self, keys: Iterable[PageKey], is_bare: bool) -> None:
        """Pages come into being, with or without state of the draft."""
        if is_bare:
            for key in keys:
                self._keys[key] = None
                self._keys.move_to_end(key)
            while len(self._keys) > self._capacity:
                self._keys.popitem(last=False)
        elif self._keys:
            for key in keys:
                self._keys.pop(key, None)


class StorablePages:
    """Under which names pages of the tree are stored, and whether what they have of the draft may be.

    A page is doubtful whose last place of the draft may belong to a chain with another next token.

    Args:
        bare: pages without draft state.
    """

    def __init__(self, bare: BarePages) -> None:
        self._bare = bare
        # The name of the target's bytes, where it is not the page's key.
        self._plain: dict[PageKey, PageKey] = {}
        self._doubtful: set[PageKey] = set()

    def enter(self, key: PageKey, plain: PageKey, is_doubtful: bool) -> None:
        """A page is new in the tree."""
        if plain != key:
            self._plain[key] = plain
        if is_doubtful:
            self._doubtful.add(key)

    def leave(self, key: PageKey) -> None:
        """A page has left the tree."""
        self._plain.pop(key, None)
        self._doubtful.discard(key)

    def given(self, key: PageKey, slot: Slot) -> PageMove:
        """What a store, or another engine, is to have of a page that lies in `slot`."""
        has_draft = key not in self._bare and key not in self._doubtful
        return PageMove(key, slot, (), plain=self._plain.get(key), has_draft=has_draft)
