"""Bare pages: those without draft state are known as long as they may be met, and no longer once they have it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.drafts import BarePages
from vllm_hicache.names import PageKey

KEYS = [PageKey(bytes([number]) * 32) for number in range(6)]


def known(pages: BarePages) -> list[int]:
    return [number for number, key in enumerate(KEYS) if key in pages]


def test_a_page_is_bare_until_it_comes_into_being_with_its_state() -> None:
    pages = BarePages(9)
    pages.note(KEYS[:3], is_bare=True)
    pages.note(KEYS[1:5], is_bare=False)
    assert known(pages) == [0]


def test_a_prefix_is_bare_where_one_of_its_pages_is() -> None:
    pages = BarePages(9)
    assert not pages.any_of(KEYS)
    pages.note([KEYS[2]], is_bare=True)
    assert (pages.any_of(KEYS[:2]), pages.any_of(KEYS[:3])) == (False, True)


def test_the_pages_that_were_met_longest_ago_are_forgotten_first() -> None:
    pages = BarePages(3)
    pages.note(KEYS[:3], is_bare=True)
    pages.any_of(KEYS[:1])
    pages.note([KEYS[1]], is_bare=True)
    pages.note(KEYS[3:5], is_bare=True)
    assert known(pages) == [1, 3, 4]


@given(st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from(KEYS), max_size=4))), st.integers(1, 4))
def test_no_more_are_remembered_than_there_is_room_for(steps: list[tuple[bool, list[PageKey]]], room: int) -> None:
    pages = BarePages(room)
    for is_bare, keys in steps:
        pages.note(keys, is_bare)
        assert len(known(pages)) <= room
        assert not is_bare or not keys or keys[-1] in pages
