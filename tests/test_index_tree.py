"""The radix tree against a naive model, and the promises of its interface one by one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_hicache.errors import InvariantError
from vllm_hicache.index.eviction import LRU, make_policy
from vllm_hicache.index.slots import SlotPool
from vllm_hicache.index.tree import Evicted, Lease, Match, RadixTree
from vllm_hicache.names import PageKey, Slot

Chain = list[PageKey]


def chain(*pages: int) -> Chain:
    """A key per page that is equal exactly where the whole prefix is."""
    return [PageKey(bytes(pages[: i + 1])) for i in range(len(pages))]


def a_tree(*chains: Chain, stored: bool = False) -> RadixTree:
    """Every chain inserted in order; slot numbers count up from 0 over pages that were new."""
    tree = RadixTree(LRU())
    for keys in chains:
        start = tree.match(keys, touch=False).num_pages
        first = tree.num_pages
        tree.insert(keys, [Slot(first + i) for i in range(len(keys) - start)], stored, start)
    return tree


LONG = chain(*range(10))
FORK = chain(0, 1, 2, 90, 91)


def test_match_gives_the_leading_run_with_slots_and_flags() -> None:
    tree = a_tree(LONG)
    tree.mark_stored(LONG, 1, 3)
    found = tree.match(FORK)
    assert found == Match(3, (Slot(0), Slot(1), Slot(2)), b"\0\1\1", hits=1, rotation=0)


def test_match_of_an_absent_chain_is_empty() -> None:
    assert a_tree(LONG).match(chain(5, 1)) == Match(0, (), b"", hits=0, rotation=0)


def test_hits_are_counted_a_page_and_the_least_is_given() -> None:
    tree = a_tree(LONG)
    counts = [tree.match(keys).hits for keys in (LONG[:4], LONG, LONG[:4], LONG[:6])]
    assert counts == [1, 1, 3, 2]


def test_pages_that_join_a_run_later_start_without_hits() -> None:
    tree = a_tree(LONG[:4])
    tree.match(LONG)
    tree.insert(LONG, [Slot(4)], stored=False, start=4)
    hits = [tree.match(LONG[:4], touch=False).hits, tree.match(LONG).hits, tree.match(LONG[:4]).hits]
    assert hits == [1, 1, 3]


def test_a_match_that_does_not_touch_counts_no_hit_and_refreshes_nothing() -> None:
    tree = a_tree(chain(1), chain(2))
    assert tree.match(chain(1), touch=False).hits == 0
    assert tree.evict(1)[0].key == chain(1)[0]


def test_hits_stop_at_255() -> None:
    tree = a_tree(LONG)
    assert [tree.match(LONG).hits for _ in range(300)][-1] == 255


def test_insert_returns_the_slots_of_pages_that_were_present_and_keeps_the_old_ones() -> None:
    tree = a_tree(LONG[:4])
    unused = tree.insert(LONG, [Slot(slot) for slot in range(12, 20)], stored=True, start=2)
    assert unused == [12, 13]
    assert tree.match(LONG).slots == (0, 1, 2, 3, 14, 15, 16, 17, 18, 19)
    assert tree.match(LONG).stored == bytes([0] * 4 + [1] * 6)


def test_insert_after_an_absent_prefix_is_refused_and_changes_nothing() -> None:
    tree = a_tree(LONG[:4])
    with pytest.raises(ValueError, match="at page 5, 4 are present"):
        tree.insert(LONG, [Slot(7)], stored=False, start=5)
    assert tree.num_pages == 4


@pytest.mark.parametrize(
    ("num_slots", "flags", "start"), [(3, [True] * 2, 0), (3, b"", 0), (3, True, 8), (1, True, -1)]
)
def test_insert_of_impossible_numbers_is_refused(num_slots: int, flags: bool | list[bool], start: int) -> None:
    with pytest.raises(ValueError, match=r"slots came with|are no range of a chain of 10 keys"):
        a_tree().insert(LONG, [Slot(i) for i in range(num_slots)], flags, start)


def test_a_chain_of_another_rotation_never_joins_a_prefix() -> None:
    tree = a_tree()
    tree.insert(LONG, [Slot(0), Slot(1)], stored=False, start=0, rotation=3)
    with pytest.raises(ValueError, match="rotation 2 cannot join 2 pages of rotation 3"):
        tree.insert(LONG, [Slot(2)], stored=False, start=2, rotation=2)
    with pytest.raises(ValueError, match="rotation 2 cannot join"):
        tree.insert(LONG, [Slot(2), Slot(3), Slot(4)], stored=False, start=0, rotation=2)
    assert tree.num_pages == 2


def test_rotation_is_inherited_by_what_joins_later_and_survives_a_split() -> None:
    tree = a_tree()
    tree.insert(LONG, [Slot(i) for i in range(5)], stored=False, start=0, rotation=3)
    tree.insert(FORK, [Slot(5)], stored=False, start=3)
    tree.insert(FORK, [Slot(6)], stored=False, start=4, rotation=3)
    assert [tree.match(keys).rotation for keys in (LONG[:2], LONG, FORK, chain(7))] == [3, 3, 3, 0]


def test_leased_pages_and_their_ancestors_stay_while_the_rest_goes() -> None:
    tree = a_tree(LONG, FORK)
    lease = tree.lease(LONG, 5)
    assert tree.num_evictable == 7
    assert len(tree.evict(100)) == 7
    assert tree.match(LONG).num_pages == 5
    lease.release()
    assert len(tree.evict(100)) == 5


def test_a_lease_taken_before_a_split_holds_and_releases_after_it() -> None:
    tree = a_tree(LONG)
    leases = [tree.lease(LONG, 8), tree.lease(LONG, 8)]
    tree.insert(FORK, [Slot(20), Slot(21)], stored=False, start=3)
    tree.match(LONG[:1])
    tree.check()
    assert (len(tree.evict(100)), tree.num_pages, tree.num_evictable) == (4, 8, 0)
    for lease in leases:
        lease.release()
    tree.check()
    assert (tree.num_leases, tree.num_evictable) == (0, 8)


def test_pages_are_held_until_the_last_of_several_leases_ends() -> None:
    tree = a_tree(LONG)
    leases = [tree.lease(LONG, num_pages) for num_pages in (4, 4, 7)]
    left = []
    for lease in leases:
        lease.release()
        left.append(tree.num_pages - len(tree.evict(100)))
    assert left == [7, 7, 0]


def test_a_lease_is_finished_exactly_once() -> None:
    tree = a_tree(LONG)
    lease, _other = tree.lease(LONG, 4), tree.lease(LONG, 4)
    lease.release()
    with pytest.raises(InvariantError, match="lease on 4 pages released twice; 1 leases are open"):
        lease.release()
    assert tree.num_leases == 1


def test_a_lease_on_more_than_is_present_is_refused_and_pins_nothing() -> None:
    tree = a_tree(LONG[:4])
    with pytest.raises(ValueError, match="cannot lease 5 pages, 4 are present"):
        tree.lease(LONG, 5)
    assert (tree.num_leases, tree.num_evictable) == (0, 4)


def test_a_lease_on_no_pages_counts_but_holds_nothing() -> None:
    tree = a_tree(LONG)
    lease = tree.lease(LONG, 0)
    assert (tree.num_leases, tree.num_evictable) == (1, 10)
    lease.release()
    assert tree.num_leases == 0


def test_marks_outside_what_is_present_are_ignored() -> None:
    tree = a_tree(LONG[:4])
    tree.mark_stored(LONG, 2, 9)
    tree.mark_stored(FORK, 4, 5)
    assert tree.match(LONG).stored == b"\0\0\1\1"
    tree.unmark_stored(LONG, 0, 3)
    assert tree.match(LONG).stored == b"\0\0\0\1"


def test_remove_from_drops_the_page_and_all_below_it() -> None:
    tree = a_tree(LONG, FORK)
    assert sorted(page.slot for page in tree.remove_from(LONG, 2)) == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert (tree.match(LONG).num_pages, tree.match(FORK).num_pages) == (2, 2)
    assert [page.slot for page in tree.evict(5)] == [1, 0]


def test_remove_from_leaves_everything_where_a_page_below_is_leased() -> None:
    tree = a_tree(LONG, FORK)
    tree.lease(FORK, 5)
    assert tree.remove_from(LONG, 1) == []
    assert [page.slot for page in tree.remove_from(LONG, 8)] == [9, 8]
    assert tree.remove_from(LONG, 8) == []
    tree.check()


def test_clear_returns_every_slot_once_and_leaves_an_empty_tree() -> None:
    tree = a_tree(LONG, FORK)
    assert sorted(tree.clear()) == list(range(12))
    tree.check()
    assert (tree.num_pages, tree.num_nodes, tree.evict(1)) == (0, 0, [])


def test_clear_is_refused_while_leases_exist() -> None:
    tree = a_tree(LONG)
    tree.lease(LONG, 1)
    with pytest.raises(InvariantError, match="cannot clear 10 pages under 1 leases"):
        tree.clear()
    assert tree.match(LONG).num_pages == 10


def test_check_sees_a_slot_that_is_in_the_tree_twice() -> None:
    tree = a_tree(LONG)
    tree.insert(chain(50), [Slot(3)], stored=False, start=0)
    with pytest.raises(InvariantError, match="11 pages in 10 distinct slots"):
        tree.check()


CHAINS = st.lists(st.integers(0, 1), min_size=1, max_size=8).map(lambda pages: chain(*pages))


@dataclass
class Page:
    slot: Slot
    stored: bool
    used: int
    hits: int = 0


class LruModel:
    """LRU page by page: no runs, no heap, every question answered by looking at all pages."""

    def __init__(self) -> None:
        self.pages: dict[PageKey, Page] = {}
        self.leases: list[tuple[Lease, Chain]] = []
        self.now = 0

    def present(self, keys: Chain) -> int:
        return sum(key in self.pages for key in keys)

    def below(self, key: PageKey) -> list[PageKey]:
        return [other for other in self.pages if other.startswith(key)]

    def is_leased(self, key: PageKey) -> bool:
        return any(key in keys for _, keys in self.leases)

    def evictable(self, must_be_stored: bool = False) -> set[PageKey]:
        def may_go(key: PageKey) -> bool:
            return not self.is_leased(key) and (self.pages[key].stored or not must_be_stored)

        return {key for key in self.pages if all(may_go(other) for other in self.below(key))}

    def touch(self, keys: Chain) -> None:
        self.now += 1
        for key in keys:
            self.pages[key].used = self.now
            self.pages[key].hits += 1

    def add(self, keys: Chain, slots: list[Slot], stored: list[bool]) -> None:
        self.now += 1
        for key, slot, flag in zip(keys, slots, stored, strict=True):
            self.pages[key] = Page(slot, flag, self.now)

    def evict_one(self) -> PageKey:
        leaves = [key for key in self.pages if len(self.below(key)) == 1]
        oldest = min(leaves, key=lambda key: self.pages[key].used)
        del self.pages[oldest]
        return oldest


class TreeMachine(RuleBasedStateMachine):
    """Every operation on tree and model; pages, flags, hits, counts and conservation agree after each."""

    @initialize(policy=st.sampled_from(["lru", "slru"]))
    def start(self, policy: str) -> None:
        self.pool = SlotPool(40)
        self.tree = RadixTree(make_policy(policy))
        self.model = LruModel()

    @rule(keys=CHAINS, data=st.data())
    def insert(self, keys: Chain, data: st.DataObject) -> None:
        have = self.model.present(keys)
        start = data.draw(st.integers(0, have))
        slots = self.pool.take(min(len(keys) - start, self.pool.num_free)) or []
        stored = data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
        unused = self.tree.insert(keys, slots, stored, start)
        assert unused == slots[: have - start]
        self.pool.give_back(unused)
        num_unused = len(unused)
        self.model.add(keys[have : start + len(slots)], slots[num_unused:], stored[num_unused:])

    @rule(keys=CHAINS, touch=st.booleans())
    def match(self, keys: Chain, touch: bool) -> None:
        keys_found = keys[: self.model.present(keys)]
        if touch:
            self.model.touch(keys_found)
        found = self.tree.match(keys, touch)
        pages = [self.model.pages[key] for key in keys_found]
        assert found.num_pages == len(pages)
        assert found.slots == tuple(page.slot for page in pages)
        assert found.stored == bytes(page.stored for page in pages)
        assert found.hits == min((page.hits for page in pages), default=0)

    @rule(keys=CHAINS, data=st.data())
    def lease(self, keys: Chain, data: st.DataObject) -> None:
        num_pages = data.draw(st.integers(0, self.model.present(keys)))
        self.model.leases.append((self.tree.lease(keys, num_pages), keys[:num_pages]))

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.model.leases) - 1))
        self.model.leases.pop(index)[0].release()

    @rule(num_pages=st.integers(0, 12), must_be_stored=st.booleans())
    def evict(self, num_pages: int, must_be_stored: bool) -> None:
        allowed = self.model.evictable(must_be_stored)
        gone = self.tree.evict(num_pages, must_be_stored)
        assert len(gone) == min(num_pages, len(allowed))
        for page in gone:
            assert self.model.below(page.key) == [page.key]
            self.leave(page, allowed)

    @rule(keys=CHAINS, data=st.data())
    def remove_from(self, keys: Chain, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(keys) - 1))
        below = set(self.model.below(keys[index]))
        allowed = below if keys[index] in self.model.evictable() else set()
        gone = self.tree.remove_from(keys, index)
        assert {page.key for page in gone} == allowed
        for page in gone:
            self.leave(page, allowed)

    @rule(keys=CHAINS, stored=st.booleans(), data=st.data())
    def mark(self, keys: Chain, stored: bool, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, len(keys)))
        stop = data.draw(st.integers(start, len(keys)))
        (self.tree.mark_stored if stored else self.tree.unmark_stored)(keys, start, stop)
        for key in keys[start:stop]:
            if key in self.model.pages:
                self.model.pages[key].stored = stored

    @rule(num_pages=st.integers(0, 12))
    def victims(self, num_pages: int) -> None:
        found = [(keys, position) for keys, positions in self.tree.victims(num_pages) for position in positions]
        assert len(found) <= num_pages
        for keys, position in found:
            assert self.model.present(keys) == len(keys)
            assert not self.model.pages[keys[position]].stored
            assert keys[position] in self.model.evictable()

    @invariant()
    def everything_adds_up(self) -> None:
        self.tree.check(self.pool)
        assert self.tree.num_pages == len(self.model.pages)
        assert self.tree.num_evictable == len(self.model.evictable())
        assert self.tree.num_leases == len(self.model.leases)

    def leave(self, page: Evicted, allowed: set[PageKey]) -> None:
        """Book a page that the tree gave up."""
        known = self.model.pages.pop(page.key)
        assert page.key in allowed
        assert (page.slot, page.stored) == (known.slot, known.stored)
        self.pool.give_back([page.slot])

    def teardown(self) -> None:
        """Whatever happened, releasing and clearing fills the pool again."""
        for lease, _ in self.model.leases:
            lease.release()
        self.pool.give_back(self.tree.clear())
        assert self.pool.num_free == self.pool.num_slots


TestTreeAgainstTheModel = TreeMachine.TestCase
TestTreeAgainstTheModel.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["insert", "match", "evict"]), CHAINS), min_size=5, max_size=40))
def test_the_tree_evicts_exactly_as_lru_page_by_page_would(steps: list[tuple[str, Chain]]) -> None:
    tree, model = RadixTree(LRU()), LruModel()
    for verb, keys in steps:
        have = model.present(keys)
        if verb == "insert" and have < len(keys):
            slots = [Slot(0)] * (len(keys) - have)
            tree.insert(keys, slots, False, have)
            model.add(keys[have:], slots, [False] * len(slots))
        elif verb == "match":
            tree.match(keys)
            model.touch(keys[:have])
        elif verb == "evict":
            gone = [page.key for page in tree.evict(len(keys))]
            assert gone == [model.evict_one() for _ in gone]
    assert [page.key for page in tree.evict(1000)] == [model.evict_one() for _ in range(len(model.pages))]
