"""The slot pool hands each slot to one holder at a time, on the owners asked for, and is full after aborts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.errors import InvariantError
from vllm_hicache.index.eviction import make_policy
from vllm_hicache.index.slots import SlotPool
from vllm_hicache.index.tree import Lease, RadixTree
from vllm_hicache.names import PageKey, Slot


def test_take_gives_distinct_slots_inside_the_pool() -> None:
    pool = SlotPool(5)
    assert sorted((pool.take(2) or []) + (pool.take(3) or [])) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0


def test_take_is_all_or_nothing() -> None:
    pool = SlotPool(5)
    assert pool.take(6) is None
    assert pool.num_free == 5
    assert pool.take(0) == []


def test_slots_given_back_last_go_out_first() -> None:
    pool = SlotPool(5)
    pool.take(5)
    pool.give_back([Slot(3), Slot(1)])
    assert pool.take(1) == [1]


def test_a_slot_is_free_until_taken_and_after_it_came_back() -> None:
    pool = SlotPool(1)
    seen = [pool.is_free(Slot(0))]
    pool.take(1)
    seen.append(pool.is_free(Slot(0)))
    pool.give_back([Slot(0)])
    assert [*seen, pool.is_free(Slot(0)), pool.is_free(Slot(1))] == [True, False, True, False]


@pytest.mark.parametrize("slots", [[0, 0], [0, 2], [0, 9], [0, -1]], ids=["twice", "free", "beyond", "negative"])
def test_a_wrong_give_back_is_refused_with_numbers_and_changes_nothing(slots: list[int]) -> None:
    pool = SlotPool(3)
    pool.take(2)
    with pytest.raises(InvariantError, match=rf"slot {slots[1]} \(number 1 of 2\).*1 of 3 slots are free"):
        pool.give_back([Slot(slot) for slot in slots])
    pool.check()
    assert pool.num_free == 1
    pool.give_back([Slot(0), Slot(1)])


@pytest.mark.parametrize("bad", [lambda: SlotPool(-1), lambda: SlotPool(1).take(-1)])
def test_negative_numbers_are_refused(bad: object) -> None:
    assert callable(bad)
    with pytest.raises(ValueError, match="-1 slots"):
        bad()


@pytest.mark.parametrize(
    ("num_owners", "sentence"), [(0, "shared out to 0 owners"), (3, "evenly to 3 owners: give a multiple of 3")]
)
def test_slots_that_cannot_be_shared_out_evenly_are_refused(num_owners: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"a pool of 10 slots cannot be .*{sentence}"):
        SlotPool(10, num_owners)


def test_slots_are_taken_from_owners_in_turn() -> None:
    pool = SlotPool(12, num_owners=3)
    owners = [slot % 3 for slot in pool.take(7, first_owner=2) or []]
    assert owners == [2, 0, 1, 2, 0, 1, 2]
    assert [pool.num_free_of(owner) for owner in range(3)] == [2, 2, 1]
    assert (pool.num_free, pool.num_slots, pool.num_owners) == (5, 12, 3)


def test_take_is_all_or_nothing_where_one_owner_has_too_few() -> None:
    pool = SlotPool(6, num_owners=3)
    pool.take(1, first_owner=1)
    assert pool.take(5) is None
    assert [pool.num_free_of(owner) for owner in range(3)] == [2, 1, 2]
    pool.check()
    assert [pool.num_takeable(first, 9) for first in range(3)] == [4, 3, 5]


def test_slots_of_each_owner_that_came_back_last_go_out_first() -> None:
    pool = SlotPool(6, num_owners=2)
    pool.take(6)
    pool.give_back([Slot(slot) for slot in (4, 1, 0, 3)])
    assert pool.take(3, first_owner=1) == [1, 0, 3]
    assert pool.take(1) == [4]


def test_the_slots_of_one_owner_are_handed_out_as_they_lie() -> None:
    pool = SlotPool(5)
    assert pool.take(3, first_owner=2) == [2, 1, 0]
    pool.give_back([Slot(2), Slot(0)])
    assert (pool.take(3), pool.num_free_of(0)) == ([3, 2, 0], 1)


@given(st.integers(1, 4), st.data())
def test_a_run_of_owners_is_as_long_as_their_free_slots_allow(num_owners: int, data: st.DataObject) -> None:
    pool = SlotPool(5 * num_owners, num_owners)
    for owner in range(num_owners):
        for _ in range(data.draw(st.integers(0, 5))):
            pool.take(1, first_owner=owner)
    first, limit = data.draw(st.integers(0, num_owners - 1)), data.draw(st.integers(0, 24))
    left, expected = [pool.num_free_of(owner) for owner in range(num_owners)], 0
    while expected < limit and left[(first + expected) % num_owners]:
        left[(first + expected) % num_owners] -= 1
        expected += 1
    assert pool.num_takeable(first, limit) == expected
    assert expected == limit or pool.take(expected + 1, first) is None
    assert [slot % num_owners for slot in pool.take(expected, first) or []] == [
        (first + i) % num_owners for i in range(expected)
    ]
    assert [pool.num_free_of(owner) for owner in range(num_owners)] == left


@given(st.lists(st.integers(-4, 4), max_size=40), st.sampled_from([1, 2, 5]))
def test_free_and_taken_add_up_after_any_sequence(steps: list[int], num_owners: int) -> None:
    pool, held = SlotPool(10, num_owners), list[Slot]()
    for step in steps:
        if step >= 0:
            held += pool.take(step, first_owner=len(held) % num_owners) or []
        else:
            pool.give_back([held.pop(0) for _ in range(min(-step, len(held)))])
        pool.check()
        assert pool.num_free == 10 - len(held) == 10 - len(set(held))


def test_check_sees_a_slot_that_is_free_and_taken() -> None:
    pool = SlotPool(3)
    pool._free[0].append(1)
    with pytest.raises(InvariantError, match=r"4 free \(3 distinct, 0 also taken\) \+ 0 taken != 3 slots"):
        pool.check()


def test_check_sees_a_slot_that_is_free_twice_in_place_of_another() -> None:
    pool = SlotPool(3)
    pool._free[0][0] = pool._free[0][1]
    with pytest.raises(InvariantError, match=r"3 free \(2 distinct, 0 also taken\) \+ 0 taken != 3 slots"):
        pool.check()


def test_check_sees_a_slot_in_another_owners_class() -> None:
    pool = SlotPool(6, num_owners=2)
    pool._free[0].append(pool._free[1].pop())
    with pytest.raises(InvariantError, match="1 of the 4 free slots of owner 0 are another's, of 2 owners"):
        pool.check()


def a_tree_of_ten_pages(slots: list[Slot]) -> RadixTree:
    tree = RadixTree(make_policy("lru"))
    tree.insert([PageKey(bytes(i)) for i in range(10)], slots, stored=False, start=0)
    return tree


def test_check_sees_slots_that_are_neither_free_nor_in_the_tree() -> None:
    pool = SlotPool(12)
    tree = a_tree_of_ten_pages(pool.take(10) or [])
    pool.take(1)
    tree.check(pool, num_reserved=1)
    with pytest.raises(InvariantError, match=r"10 slots in the tree .0 of .* 0 reserved \+ 1 free != 12"):
        tree.check(pool)


def test_check_sees_a_slot_that_is_in_the_tree_and_free() -> None:
    pool = SlotPool(12)
    tree = a_tree_of_ten_pages(pool.take(10) or [])
    pool.give_back([Slot(4)])
    with pytest.raises(InvariantError, match="1 of them also free"):
        tree.check(pool)


@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_ten_thousand_aborts_in_any_order_leave_no_lease_and_a_full_pool(policy: str) -> None:
    rng, pool, tree = random.Random(1), SlotPool(60), RadixTree(make_policy(policy))
    running: list[tuple[Lease, list[Slot]]] = []
    for num_aborted in range(12_000):
        path = bytes(rng.choices(range(3), k=rng.randrange(1, 9)))
        keys = [PageKey(path[: i + 1]) for i in range(len(path))]
        start = tree.match(keys).num_pages
        lease = tree.lease(keys, rng.randint(0, start))
        pool.give_back([page.slot for page in tree.evict(len(keys) - pool.num_free)])
        slots = pool.take(min(len(keys) - lease.num_pages, pool.num_free)) or []
        if rng.random() < 0.5:
            pool.give_back(tree.insert(keys, slots, stored=False, start=lease.num_pages))
            slots = []
        running.append((lease, slots))
        while len(running) > 4 or (running and rng.random() < 0.5):
            lease, slots = running.pop(rng.randrange(len(running)))
            lease.release()
            pool.give_back(slots)
        if num_aborted % 500 == 0:
            tree.check(pool, num_reserved=sum(len(slots) for _, slots in running))
    for lease, slots in running:
        lease.release()
        pool.give_back(slots)
    tree.check(pool)
    pool.give_back(tree.clear())
    assert (tree.num_leases, tree.num_pages, pool.num_free) == (0, 0, 60)
