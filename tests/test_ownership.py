"""Ownership against a plain table: pages are dealt out like cards, and the formulas say where each one lies."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.errors import UnsupportedEngineError
from vllm_hicache.ownership import Ownership, Shard, check_interleave

OWNERS = st.integers(1, 6)
ROTATIONS = st.integers(0, 13)
PAGES = st.integers(0, 40)


@dataclass(frozen=True, slots=True)
class Deal:
    """A chain dealt out: tokens and pages of each owner, in the order in which the owner got them."""

    tokens: list[list[int]]
    pages: list[list[int]]


def deal(num_owners: int, num_pages: int, page_tokens: int, rotation: int) -> Deal:
    """Pages go round, the first one to owner `rotation`; every token of a page to the same owner."""
    table = Deal([[] for _ in range(num_owners)], [[] for _ in range(num_owners)])
    turn = rotation % num_owners
    for page in range(num_pages):
        table.pages[turn].append(page)
        for token in range(page_tokens):
            table.tokens[turn].append(page * page_tokens + token)
        turn = 0 if turn + 1 == num_owners else turn + 1
    return table


@given(OWNERS, PAGES, st.integers(1, 5), ROTATIONS)
def test_every_token_lies_where_the_deal_put_it(owners: int, pages: int, page_tokens: int, rotation: int) -> None:
    ownership = Ownership(owners)
    for owner, tokens in enumerate(deal(owners, pages, page_tokens, rotation).tokens):
        for place, position in enumerate(tokens):
            assert ownership.owner(position // page_tokens, rotation) == owner
            assert ownership.local_position(position, page_tokens) == place


@given(OWNERS, PAGES, ROTATIONS)
def test_every_page_lies_in_the_row_in_which_its_owner_got_it(owners: int, pages: int, rotation: int) -> None:
    ownership, dealt = Ownership(owners), deal(owners, pages, 1, rotation).pages
    rows = {page: row for held in dealt for row, page in enumerate(held)}
    assert {page: ownership.row(page) for page in range(pages)} == rows
    assert ownership.num_rows(pages) == max(map(len, dealt))


@given(OWNERS, PAGES, PAGES, ROTATIONS)
def test_the_pages_of_an_owner_in_a_range_are_counted(owners: int, first: int, count: int, rotation: int) -> None:
    ownership = Ownership(owners)
    for owner, held in enumerate(deal(owners, first + count, 1, rotation).pages):
        assert ownership.num_owned(owner, first + count, rotation) == len(held)
        assert ownership.num_owned(owner, count, rotation, first) == sum(page >= first for page in held)


@given(OWNERS, st.integers(0, 20))
def test_slots_and_rows_of_owners_are_the_same_thing_counted_twice(owners: int, rows: int) -> None:
    shards = [Shard(Ownership(owners), owner) for owner in range(owners)]
    slots = range(owners * rows)
    places = [(shard.owner, shard.row(slot)) for slot in slots for shard in shards if shard.owns(slot)]
    assert sorted(places) == [(owner, row) for owner in range(owners) for row in range(rows)]
    assert [row * owners + owner for owner, row in places] == list(slots)
    assert {shard.num_owners for shard in shards} == {owners}


def test_one_owner_keeps_every_page_where_its_number_says() -> None:
    ownership, shard = Ownership(), Shard()
    assert [ownership.owner(page, 5) for page in range(4)] == [0] * 4
    assert [(shard.owns(slot), shard.row(slot)) for slot in range(3)] == [(True, 0), (True, 1), (True, 2)]
    assert (shard.num_owners, ownership.local_position(37, 16), ownership.num_owned(0, 7, 3, 2)) == (1, 37, 7)


def test_three_owners_with_rotation_two_as_written_out_by_hand() -> None:
    ownership = Ownership(3)
    assert [ownership.owner(page, 2) for page in range(7)] == [2, 0, 1, 2, 0, 1, 2]
    assert [ownership.row(page) for page in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    assert [ownership.num_owned(owner, 7, 2) for owner in range(3)] == [2, 2, 3]
    assert (ownership.num_rows(7), ownership.local_position(4 * 16 + 5, 16)) == (3, 16 + 5)


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_an_interleave_of_one_block_is_served(tokens: int) -> None:
    check_interleave(tokens, tokens)


def test_another_interleave_is_refused_with_the_numbers_and_the_way_out() -> None:
    with pytest.raises(UnsupportedEngineError, match=r"size=1 with blocks of 64 .*--cp-kv-cache-interleave-size 64$"):
        check_interleave(1, 64)


def test_blocks_under_64_tokens_are_advised_against_where_the_interleave_is_refused() -> None:
    with pytest.raises(UnsupportedEngineError, match=r"interleave-size 16 and both it and --block-size to 64 or more$"):
        check_interleave(32, 16)
