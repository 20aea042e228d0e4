"""Eviction policies: which leaf goes first, what a scan does to a hot set, how policies are chosen."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.errors import ConfigError, InvariantError
from vllm_hicache.index.eviction import LRU, SLRU, EvictionPolicy, LeafQueue, Node, make_policy
from vllm_hicache.index.tree import Evicted, RadixTree
from vllm_hicache.names import PageKey, Slot

ROOT = Node(None, [], array("i"), bytearray(), bytearray(), 0)


def a_leaf(stored: bool = False, rank: int = 0, num_pages: int = 1) -> Node:
    keys = [PageKey(b"page")] * num_pages
    flags = bytearray([stored]) * num_pages
    return Node(ROOT, keys, array("i", range(num_pages)), flags, bytearray(num_pages), 0, rank=rank)


def a_chain(name: int, num_pages: int) -> list[PageKey]:
    return [PageKey(b"%d/%d" % (name, page)) for page in range(num_pages)]


def a_tree(*chains: list[PageKey], stored: bool = False) -> RadixTree:
    """Every chain inserted in order; slot numbers count up from 0 over pages that were new."""
    tree = RadixTree(LRU())
    for keys in chains:
        start, first = tree.match(keys, touch=False).num_pages, tree.num_pages
        tree.insert(keys, [Slot(first + i) for i in range(len(keys) - start)], stored, start)
    return tree


LONG = a_chain(0, 10)
FORK = [*LONG[:3], *a_chain(90, 2)]
OTHER = a_chain(50, 2)


def use(tree: RadixTree, keys: list[PageKey], capacity: int) -> int:
    """One request: look up, then insert what is missing, evicting for it. Returns the pages found."""
    found = tree.match(keys).num_pages
    if (excess := tree.num_pages + len(keys) - found - capacity) > 0:
        tree.evict(excess)
    tree.insert(keys, [Slot(0)] * (len(keys) - found), stored=False, start=found)
    return found


def after_a_scan(policy: EvictionPolicy, times_hit: int) -> int:
    """Pages left of a hot set of 40 pages after a scan of 10 times the capacity of 100 pages."""
    tree = RadixTree(policy)
    for _ in range(1 + times_hit):
        use(tree, a_chain(0, 40), capacity=100)
    for name in range(1, 101):
        use(tree, a_chain(name, 10), capacity=100)
    return tree.match(a_chain(0, 40), touch=False).num_pages


def test_slru_keeps_a_hot_set_through_a_scan_of_ten_times_the_capacity() -> None:
    assert after_a_scan(SLRU(), times_hit=1) == 40


def test_lru_loses_a_hot_set_to_the_same_scan() -> None:
    assert after_a_scan(LRU(), times_hit=1) == 0


def test_slru_does_not_keep_a_set_that_was_seen_once() -> None:
    assert after_a_scan(SLRU(), times_hit=0) == 0


def test_slru_replaces_one_hot_set_by_the_next() -> None:
    tree = RadixTree(SLRU())
    for name in (1, 2, 3):
        for _ in range(3):
            use(tree, a_chain(name, 70), capacity=100)
    found = [tree.match(a_chain(name, 70), touch=False).num_pages for name in (1, 2, 3)]
    assert found == [0, 30, 70]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), max_size=60), st.floats(0.1, 0.9))
def test_slru_bounds_the_protected_segment_at_its_share(uses: list[tuple[int, int]], share: float) -> None:
    policy = SLRU(protected_share=share)
    tree, peak = RadixTree(policy), 0
    for name, num_pages in uses:
        use(tree, a_chain(name, num_pages), capacity=50)
        peak = max(peak, tree.num_pages)
        tree.lease(a_chain(name, num_pages), num_pages // 2).release()
        tree.evict(1)
        assert 0 <= policy.num_protected <= share * peak
    tree.evict(tree.num_pages)
    assert policy.num_protected == 0


def test_slru_lets_what_fell_out_of_the_protected_segment_go_after_older_single_hits() -> None:
    policy = SLRU(protected_share=0.5)
    nodes = [a_leaf() for _ in range(4)]
    for node in nodes:
        policy.added(node, 1)
        policy.leaves.offer(node)
    for i in (0, 1, 2, 0):
        policy.touched([nodes[i]])
    policy.settle()
    assert [nodes.index(policy.leaves.pop() or ROOT) for _ in nodes] == [3, 1, 2, 0]


def test_a_long_leaf_is_evicted_page_by_page_from_its_end() -> None:
    tree = a_tree(LONG)
    assert [page.slot for page in tree.evict(3)] == [9, 8, 7]
    assert [page.slot for page in tree.evict(2)] == [6, 5]
    assert tree.match(LONG).num_pages == 5


def test_eviction_takes_descendants_before_ancestors() -> None:
    tree = a_tree(LONG[:3], LONG, FORK)
    tree.match(FORK)
    assert [page.slot for page in tree.evict(100)] == [9, 8, 7, 6, 5, 4, 3, 11, 10, 2, 1, 0]


def test_a_hit_on_the_front_of_a_run_does_not_keep_its_end() -> None:
    tree = a_tree(LONG, OTHER)
    tree.match(LONG[:2])
    tree.lease(LONG, 2).release()
    assert [page.slot for page in tree.evict(10)] == [9, 8, 7, 6, 5, 4, 3, 2, 11, 10]


def test_the_front_of_a_run_whose_end_was_dropped_keeps_its_place_in_the_order() -> None:
    tree = a_tree(OTHER, LONG)
    tree.remove_from(LONG, 4)
    assert [page.slot for page in tree.evict(3)] == [1, 0, 5]


def test_a_hit_refreshes_the_whole_path() -> None:
    tree = a_tree(LONG, FORK, OTHER)
    tree.match(FORK)
    tree.remove_from(LONG, 3)
    tree.remove_from(FORK, 3)
    assert [page.slot for page in tree.evict(3)] == [13, 12, 2]


def test_eviction_of_stored_pages_stops_at_one_that_is_not() -> None:
    tree = a_tree(LONG, FORK, stored=True)
    tree.unmark_stored(LONG, 6, 7)
    tree.unmark_stored(FORK, 4, 5)
    assert tree.evict(100, must_be_stored=True) == [Evicted(LONG[i], Slot(i), True) for i in (9, 8, 7)]
    assert tree.evict(100, must_be_stored=True) == []
    tree.mark_stored(FORK, 4, 5)
    assert [page.slot for page in tree.evict(100, must_be_stored=True)] == [11, 10]
    assert [page.stored for page in tree.evict(100)] == [False] + [True] * 6


def test_victims_are_the_unstored_pages_next_in_line_and_stay() -> None:
    tree = a_tree(LONG, FORK, OTHER)
    tree.mark_stored(LONG, 7, 9)
    tree.mark_stored(FORK, 4, 5)
    assert tree.victims(3) == [(LONG, [5, 6, 9])]
    assert tree.victims(100) == [(LONG, [3, 4, 5, 6, 9]), (OTHER, [0, 1])]
    assert tree.victims(6, unstored_only=False) == [(LONG, [4, 5, 6, 7, 8, 9])]
    assert [page.slot for page in tree.evict(2)] == [9, 8]


def test_a_leaf_without_leases_grows_in_place() -> None:
    tree = a_tree(*(LONG[:end] for end in range(1, 11)))
    assert tree.num_nodes == 1


def test_pages_that_follow_a_leased_leaf_are_not_held_by_its_lease() -> None:
    tree = a_tree(LONG[:4])
    tree.lease(LONG, 4)
    tree.insert(LONG, [Slot(i) for i in range(4, 10)], stored=False, start=4)
    assert (tree.num_evictable, len(tree.evict(100))) == (6, 6)
    tree.check()


@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_a_chain_that_grows_under_leases_turn_by_turn_stays_a_few_runs(policy: str) -> None:
    tree, keys = RadixTree(make_policy(policy)), a_chain(0, 200)
    for start in range(0, 200, 4):
        lease = tree.lease(keys, tree.match(keys).num_pages)
        tree.insert(keys, [Slot(start + i) for i in range(4)], stored=False, start=start)
        lease.release()
    assert tree.num_nodes <= 3
    assert tree.match(keys).slots == tuple(range(200))


def test_a_chain_that_grows_page_by_page_under_a_lease_leaves_no_trace_in_the_queue() -> None:
    policy, keys = LRU(), a_chain(0, 1000)
    tree = RadixTree(policy)
    for start in range(1000):
        lease = tree.lease(keys, start)
        tree.insert(keys, [Slot(start)], stored=False, start=start)
        lease.release()
    assert (tree.num_nodes, policy.leaves.num_entries < 100) == (1, True)


def test_chains_that_come_and_are_dropped_leave_no_trace_in_the_queue() -> None:
    policy = LRU()
    tree = RadixTree(policy)
    for name in range(1000):
        tree.insert(a_chain(name, 3), [Slot(0)] * 3, stored=False, start=0)
        tree.remove_from(a_chain(name, 3), 0)
    assert (tree.num_nodes, policy.leaves.num_entries < 100) == (0, True)


def test_the_queue_gives_leaves_by_rank() -> None:
    queue, leaves = LeafQueue(), [a_leaf(rank=rank, stored=rank % 2 == 0) for rank in (3, 1, 2)]
    for leaf in leaves:
        queue.offer(leaf)
    assert [(queue.pop() or ROOT).rank for _ in leaves] == [1, 2, 3]
    assert queue.pop() is None


def test_the_queue_tells_stored_leaves_from_others() -> None:
    queue, stored, unstored = LeafQueue(), a_leaf(stored=True, rank=2), a_leaf(rank=1)
    queue.offer(stored)
    queue.offer(unstored)
    assert queue.pop(unstored=False) is stored
    assert queue.pop(unstored=False) is None
    assert queue.pop(stored=False) is unstored


def test_a_leaf_that_was_ranked_up_after_it_was_queued_waits_its_turn() -> None:
    queue, first, second = LeafQueue(), a_leaf(rank=1), a_leaf(rank=2)
    queue.offer(first)
    queue.offer(second)
    first.rank = 3
    assert [queue.pop(), queue.pop()] == [second, first]


def test_a_leaf_that_was_pinned_after_it_was_queued_is_passed_over_until_offered_again() -> None:
    queue, leaf = LeafQueue(), a_leaf()
    queue.offer(leaf)
    leaf.pins = 1
    assert queue.pop() is None
    leaf.pins = 0
    queue.offer(leaf)
    assert queue.pop() is leaf


def test_requeueing_a_leaf_for_ever_does_not_grow_the_queue() -> None:
    queue, leaf = LeafQueue(), a_leaf()
    for turn in range(10_000):
        leaf.stored[0] = turn % 2
        queue.requeue(leaf)
    assert queue.num_entries < 100
    assert queue.pop() is leaf
    assert queue.pop() is None


def test_check_sees_an_evictable_leaf_that_is_not_queued() -> None:
    with pytest.raises(InvariantError, match="leaf of 2 pages, rank 7"):
        LeafQueue().check([a_leaf(rank=7, num_pages=2)])


def test_check_sees_a_leaf_in_the_wrong_queue() -> None:
    queue, leaf = LeafQueue(), a_leaf(stored=True)
    queue.offer(leaf)
    queue.check([leaf])
    leaf.stored[0] = 0
    with pytest.raises(InvariantError, match="queued as stored=True"):
        queue.check([leaf])


@pytest.mark.parametrize(("name", "kind"), [("lru", LRU), ("slru", SLRU)])
def test_a_policy_is_made_fresh_by_name(name: str, kind: type[EvictionPolicy]) -> None:
    assert type(make_policy(name)) is kind
    assert make_policy(name) is not make_policy(name)


def test_an_unknown_policy_names_the_closest_and_all() -> None:
    with pytest.raises(ConfigError, match=r"unknown eviction policy 'SLRUU': did you mean 'slru'.*lru, slru"):
        make_policy("SLRUU")


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0])
def test_a_share_outside_its_range_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=f"{share} is outside"):
        SLRU(protected_share=share)
