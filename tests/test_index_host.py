"""The host tier of a group of owners: where each chain lies, what is evicted for it, and what a naive model says."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_hicache.errors import InvariantError
from vllm_hicache.index.host import HostTier
from vllm_hicache.index.tree import Evicted, Lease
from vllm_hicache.names import PageKey, Slot
from vllm_hicache.ownership import Ownership

Chain = list[PageKey]


def chain(*pages: int) -> Chain:
    """A key per page that is equal exactly where the whole prefix is."""
    return [PageKey(bytes(pages[: i + 1])) for i in range(len(pages))]


def a_tier(num_slots: int, num_owners: int, on_device: bool = False) -> HostTier:
    return HostTier(num_slots, "lru", ownership=Ownership(num_owners, on_device))


def hold(tier: HostTier, keys: Chain, start: int = 0) -> list[Slot]:
    """Reserve all pages of a chain from `start` on, and put them into the tree."""
    slots, _ = tier.reserve(keys, start, len(keys) - start)
    assert tier.attach(keys, start, slots, stored=False) == len(slots) == len(keys) - start
    return slots


def owners_of(tier: HostTier, slots: list[Slot]) -> list[int]:
    return [slot % tier.ownership.num_owners for slot in slots]


LONG = chain(*range(7))


def test_a_new_chain_begins_on_the_owner_with_most_free_slots_and_goes_round() -> None:
    tier = a_tier(12, 3)
    assert owners_of(tier, hold(tier, chain(50))) == [0]
    assert owners_of(tier, hold(tier, LONG)) == [1, 2, 0, 1, 2, 0, 1]
    assert (tier.match(LONG).rotation, [tier.num_free_of(owner) for owner in range(3)]) == (1, [1, 1, 2])


def test_a_new_chain_whose_first_pages_are_elsewhere_lies_as_if_they_were_here() -> None:
    tier = a_tier(12, 3)
    hold(tier, chain(50))
    assert owners_of(tier, tier.reserve(LONG, 2, 3)[0]) == [0, 1, 2]
    assert owners_of(tier, tier.reserve(LONG, 0, 2)[0]) == [1, 2]


def test_what_joins_a_chain_later_goes_on_in_its_rotation() -> None:
    tier = a_tier(24, 3)
    hold(tier, chain(50))
    hold(tier, LONG[:3])
    hold(tier, chain(51))
    fork = chain(0, 1, 90, 91)
    assert owners_of(tier, hold(tier, LONG, 3)) == [1, 2, 0, 1]
    assert owners_of(tier, hold(tier, fork, 2)) == [0, 1]
    assert {tier.match(keys).rotation for keys in (LONG, fork)} == {1}


def test_two_operations_on_one_new_chain_get_one_rotation() -> None:
    tier = a_tier(24, 3)
    hold(tier, chain(50))
    first, _ = tier.reserve(LONG, 0, 4)
    second, _ = tier.reserve(chain(0, 90), 0, 2)
    assert (owners_of(tier, first), owners_of(tier, second)) == ([1, 2, 0, 1], [1, 2])
    assert tier.attach(chain(0, 90), 0, second, stored=False) == 2
    assert tier.attach(LONG, 0, first, stored=False) == 3
    assert (tier.num_reserved, tier.num_free) == (0, 24 - 6)
    tier.check()


def test_a_rotation_is_forgotten_with_the_last_reserved_slot_and_no_sooner() -> None:
    tier = a_tier(6, 2)
    slots, _ = tier.reserve(LONG, 0, 3)
    held = hold(tier, chain(50))
    tier.abandon(slots[1:])
    assert owners_of(tier, tier.reserve(LONG, 3, 1)[0]) == [1]
    tier.abandon([slots[0], Slot(1)])
    assert (owners_of(tier, held), tier.num_reserved) == ([1], 0)
    hold(tier, chain(51))
    hold(tier, chain(52))
    assert owners_of(tier, tier.reserve(LONG, 0, 1)[0]) == [1]


def test_reset_forgets_no_rotation_of_reserved_slots() -> None:
    tier = a_tier(12, 2)
    hold(tier, chain(50))
    slots, _ = tier.reserve(LONG, 0, 2)
    assert [page.key for page in tier.reset()] == chain(50)
    again, _ = tier.reserve(LONG, 0, 3)
    assert (owners_of(tier, slots), owners_of(tier, again)) == ([1, 0], [1, 0, 1])
    assert tier.attach(LONG, 0, again, stored=False) == 3
    assert tier.attach(LONG, 0, slots, stored=False) == 0
    tier.check()


def test_a_rotation_outlives_the_pages_in_the_tree_while_slots_are_reserved() -> None:
    tier = a_tier(8, 2)
    hold(tier, chain(50))
    hold(tier, LONG[:1])
    slots, _ = tier.reserve(LONG, 1, 1)
    tier.reset()
    assert owners_of(tier, slots + tier.reserve(LONG, 0, 2)[0]) == [0, 1, 0]


def test_where_the_engine_shards_its_memory_every_chain_begins_on_owner_0() -> None:
    tier = a_tier(6, 3, on_device=True)
    assert [owners_of(tier, hold(tier, chain(page))) for page in (50, 51)] == [[0], [0]]
    lease = tier.lease(chain(50), 1)
    other = tier.lease(chain(51), 1)
    assert tier.reserve(LONG, 0, 2) == ([], [])
    assert owners_of(tier, tier.reserve(LONG, 2, 3)[0]) == [2]
    lease.release()
    other.release()


def test_the_longest_leading_run_is_reserved_where_one_owner_is_full() -> None:
    tier = a_tier(6, 3)
    leases = []
    for page in (50, 51, 52, 53, 54):
        hold(tier, chain(page))
        leases.append(tier.lease(chain(page), 1))
    slots, evicted = tier.reserve(LONG, 0, 4)
    assert (owners_of(tier, slots), evicted, tier.num_free, tier.num_available) == ([2], [], 0, 0)


def test_eviction_goes_on_until_the_owner_that_lacks_has_a_slot_and_no_further() -> None:
    tier = a_tier(6, 2)
    for page in range(50, 56):
        hold(tier, chain(page))
    tier.match(chain(51))
    tier.match(chain(53))
    tier.abandon(tier.reserve(LONG, 0, 1)[0])
    lease = tier.lease(chain(51), 1)
    slots, evicted = tier.reserve(chain(51, 1), 1, 1)
    assert (owners_of(tier, slots), evicted) == ([0], [])
    slots, evicted = tier.reserve(chain(51, 1, 2), 2, 1)
    assert (owners_of(tier, slots), [page.key for page in evicted]) == ([1], [chain(page)[0] for page in (52, 54, 55)])
    lease.release()


@pytest.mark.parametrize("num_pages", [1, 2, 3])
def test_a_new_chain_in_a_full_tier_evicts_one_page_for_each_of_its_own(num_pages: int) -> None:
    tier = a_tier(6, 3)
    for page in (51, 50, 53, 52, 55, 54):
        hold(tier, chain(page))
    tier.match(chain(51))
    slots, evicted = tier.reserve(LONG, 0, num_pages)
    assert sorted(slots) == sorted(page.slot for page in evicted)
    assert owners_of(tier, slots)[0] == min(owners_of(tier, [page.slot for page in evicted]))


def test_owners_with_enough_are_not_evicted_for() -> None:
    tier = a_tier(4, 2)
    hold(tier, chain(50))
    hold(tier, chain(51))
    tier.reserve(LONG, 0, 1)
    slots, evicted = tier.reserve(LONG, 1, 1)
    assert (owners_of(tier, slots), evicted, tier.num_free) == ([1], [], 0)


def test_pages_that_are_there_already_free_their_slots_and_are_noted_as_stored() -> None:
    tier = a_tier(14, 2)
    late, _ = tier.reserve(LONG, 0, 5)
    hold(tier, LONG[:3])
    assert tier.attach(LONG, 0, late, stored=True) == 2
    assert tier.match(LONG).stored == bytes([1] * 5)
    assert (tier.num_reserved, tier.num_free) == (0, 9)


def test_slots_come_back_where_the_pages_before_have_gone() -> None:
    tier = a_tier(14, 2)
    hold(tier, LONG[:3])
    slots, _ = tier.reserve(LONG, 3, 2)
    tier.reset()
    assert (tier.attach(LONG, 3, slots, stored=False), tier.num_free, tier.num_reserved) == (0, 14, 0)


@pytest.mark.parametrize("start", [0, 1, 2])
def test_slots_of_another_rotation_never_join_a_chain_and_come_back(start: int) -> None:
    tier = a_tier(14, 2)
    hold(tier, LONG[:2])
    slots, _ = tier.reserve(LONG, start + 1, 3)
    assert tier.attach(LONG, start, slots, stored=True) == 0
    assert (tier.match(LONG).num_pages, tier.match(LONG).stored) == (2, bytes(2))
    assert (tier.num_free, tier.num_reserved) == (12, 0)
    tier.check()


def test_nothing_is_taken_or_evicted_for_no_pages() -> None:
    tier = a_tier(2, 2)
    hold(tier, LONG[:2])
    assert (tier.reserve([], 0, 0), tier.reserve(LONG, 2, 0)) == (([], []), ([], []))
    assert (tier.attach(LONG, 2, [], stored=True), tier.match(LONG).num_pages) == (0, 2)


@pytest.mark.parametrize(("start", "num_pages"), [(-1, 2), (0, -1), (0, 8), (7, 1)])
def test_pages_that_are_no_range_of_the_chain_are_refused(start: int, num_pages: int) -> None:
    with pytest.raises(ValueError, match=rf"{num_pages} pages from page {start} on of a chain of 7 keys"):
        a_tier(4, 2).reserve(LONG, start, num_pages)


def test_capacity_that_owners_cannot_share_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="10 slots cannot be shared out evenly to 4 owners"):
        a_tier(10, 4)


@pytest.mark.parametrize("slots", [[0, 3], [0, 0], [9]], ids=["free", "twice", "beyond"])
def test_slots_that_are_not_reserved_cannot_be_let_go(slots: list[int]) -> None:
    tier = a_tier(4, 2)
    mine, _ = tier.reserve(LONG, 0, 1)
    assert mine == [0]
    with pytest.raises(InvariantError, match=rf"{len(slots)} slots were let go, of which . are reserved, 1 are in all"):
        tier.abandon([Slot(slot) for slot in slots])
    tier.check()
    assert tier.num_reserved == 1


def test_check_sees_slots_that_do_not_add_up() -> None:
    tier = a_tier(4, 2)
    tier.reserve(LONG, 0, 2)
    tier._reserved -= 1
    with pytest.raises(InvariantError, match=r"free 2 \+ reserved 1 \+ in trees 0 = 3, capacity 4"):
        tier.check()


@pytest.mark.parametrize("book", ["_first_keys", "_rotations", "_num_slots"])
def test_check_sees_a_reservation_without_a_rotation(book: str) -> None:
    tier = a_tier(4, 2)
    tier.reserve(LONG, 0, 2)
    tier.check()
    getattr(tier._reservations, book).clear()
    with pytest.raises(InvariantError, match="2 slots are reserved; "):
        tier.check()


def test_check_sees_a_reserved_slot_of_no_chain() -> None:
    tier = a_tier(4, 2)
    slots, _ = tier.reserve(LONG, 0, 2)
    tier._reservations.remove(slots[1:])
    with pytest.raises(InvariantError, match="2 slots are reserved; 1 are known, of 1 chains"):
        tier.check()


@given(st.integers(1, 4), st.lists(st.booleans(), max_size=40))
def test_many_chains_of_one_page_fill_owners_evenly(num_owners: int, attached: list[bool]) -> None:
    tier = a_tier(10 * num_owners, num_owners)
    for page, enters in enumerate(attached[: tier.num_slots]):
        slots, evicted = tier.reserve(chain(page), 0, 1)
        assert (len(slots), evicted) == (1, [])
        if enters:
            tier.attach(chain(page), 0, slots, stored=False)
        loads = [10 - tier.num_free_of(owner) for owner in range(num_owners)]
        assert max(loads) - min(loads) <= 1
        assert sum(loads) == page + 1


@dataclass
class Open:
    """An operation: slots that it still has reserved, for pages from `start` on."""

    keys: Chain
    start: int
    slots: list[Slot]


@dataclass
class Model:
    """What must be where: pages in the tree, pages that a reset left under leases, operations and leases."""

    pages: dict[PageKey, Slot] = field(default_factory=dict)
    stored: set[PageKey] = field(default_factory=set)
    retired: dict[PageKey, list[Slot]] = field(default_factory=dict)
    operations: list[Open] = field(default_factory=list)
    leases: list[tuple[Lease, Chain]] = field(default_factory=list)
    old_leases: list[Lease] = field(default_factory=list)

    def present(self, keys: Chain) -> int:
        return sum(key in self.pages for key in keys)

    def leased(self) -> set[PageKey]:
        return {key for _, keys in self.leases for key in keys}

    def slots(self) -> list[Slot]:
        """Every slot that is not free."""
        reserved = [slot for each in self.operations for slot in each.slots]
        return [*self.pages.values(), *reserved, *(slot for slots in self.retired.values() for slot in slots)]

    def rotations(self, num_owners: int) -> dict[PageKey, set[int]]:
        """Rotations under which pages of each first key lie, or are to lie; none but one a key is right."""
        found: dict[PageKey, set[int]] = {}
        for key, slot in self.pages.items():
            found.setdefault(PageKey(key[:1]), set()).add((slot - len(key) + 1) % num_owners)
        for each in self.operations:
            for page, slot in enumerate(each.slots, each.start):
                found.setdefault(each.keys[0], set()).add((slot - page) % num_owners)
        return found


CHAINS = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(lambda pages: chain(*pages))


class HostMachine(RuleBasedStateMachine):
    """Operations, leases and resets in any order, on chains that share prefixes."""

    @initialize(
        num_owners=st.integers(1, 4),
        rows=st.integers(1, 6),
        on_device=st.booleans(),
        keep_unstored=st.booleans(),
        policy=st.sampled_from(["lru", "slru"]),
    )
    def begin(self, num_owners: int, rows: int, on_device: bool, keep_unstored: bool, policy: str) -> None:
        self.rows, self.keep_unstored, self.on_device = rows, keep_unstored, on_device
        self.tier = HostTier(rows * num_owners, policy, keep_unstored, Ownership(num_owners, on_device))
        self.model = Model()

    @rule(keys=CHAINS, follows=st.booleans(), data=st.data())
    def reserve(self, keys: Chain, follows: bool, data: st.DataObject) -> None:
        start = self.model.present(keys) if follows else data.draw(st.integers(0, len(keys)))
        num_pages = data.draw(st.integers(0, len(keys) - start))
        available, num_free = self.tier.num_available, self.tier.num_free
        assert available == num_free + len(self.model.pages.keys() - self.model.leased())
        slots, evicted = self.tier.reserve(keys, start, num_pages)
        self.leave(evicted)
        assert len(slots) <= min(num_pages, available)
        if len(slots) < num_pages:
            self.is_exhausted(slots, keys, start)
        if self.tier.ownership.num_owners == 1:
            assert len(evicted) <= max(0, num_pages - num_free)
        if slots:
            self.model.operations.append(Open(keys, start, slots))

    def is_exhausted(self, slots: list[Slot], keys: Chain, start: int) -> None:
        """A run ended early: its next owner has no slot, and nothing could be evicted for it."""
        if slots:
            assert self.tier.num_free_of((slots[-1] + 1) % self.tier.ownership.num_owners) == 0
        known = self.model.rotations(self.tier.ownership.num_owners).get(keys[0])
        if not slots and known:
            assert self.tier.num_free_of((start + min(known)) % self.tier.ownership.num_owners) == 0
        if not self.keep_unstored:
            assert self.tier.num_available == self.tier.num_free

    @precondition(lambda self: self.model.operations)
    @rule(stored=st.booleans(), data=st.data())
    def attach(self, stored: bool, data: st.DataObject) -> None:
        operation = data.draw(st.sampled_from(self.model.operations))
        count = data.draw(st.integers(0, len(operation.slots)))
        keys, start, slots = operation.keys, operation.start, self.let_go(operation, count)
        had, stop = self.model.present(keys[: start + count]), start + count
        is_whole = had >= start
        assert self.tier.attach(keys, start, slots, stored) == (max(0, stop - had) if is_whole else 0)
        if is_whole:
            self.model.pages.update(zip(keys[had:stop], slots[had - start :], strict=True))
            self.model.stored.update(keys[start:stop] if stored else [])

    @precondition(lambda self: self.model.operations)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        operation = data.draw(st.sampled_from(self.model.operations))
        self.tier.abandon(self.let_go(operation, data.draw(st.integers(0, len(operation.slots)))))

    def let_go(self, operation: Open, count: int) -> list[Slot]:
        """The operation's first `count` slots are its own no more."""
        slots, operation.slots = operation.slots[:count], operation.slots[count:]
        operation.start += count
        self.model.operations = [each for each in self.model.operations if each.slots]
        return slots

    @rule(keys=CHAINS, data=st.data())
    def lease(self, keys: Chain, data: st.DataObject) -> None:
        num_pages = data.draw(st.integers(0, self.model.present(keys)))
        self.model.leases.append((self.tier.lease(keys, num_pages), keys[:num_pages]))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.model.leases and (not self.model.old_leases or data.draw(st.booleans())):
            self.model.leases.pop(data.draw(st.integers(0, len(self.model.leases) - 1)))[0].release()
        elif self.model.old_leases:
            self.model.old_leases.pop().release()
        for page in self.tier.drain_retired():
            self.model.retired[page.key].remove(page.slot)
        assert self.model.old_leases or not any(self.model.retired.values())

    @rule()
    def reset(self) -> None:
        self.leave(self.tier.reset(), at_reset=True)
        for key, slot in self.model.pages.items():
            self.model.retired.setdefault(key, []).append(slot)
        assert self.model.pages.keys() == self.model.leased()
        self.model.old_leases += [lease for lease, _ in self.model.leases]
        self.model.leases, self.model.pages, self.model.stored = [], {}, set()

    def leave(self, gone: list[Evicted], at_reset: bool = False) -> None:
        """Book pages that left the tree: none of them leased, none the only copy, none with a page after it."""
        for page in gone:
            assert (page.slot, page.stored) == (self.model.pages.pop(page.key), page.key in self.model.stored)
            assert page.key not in self.model.leased()
            assert page.stored or at_reset or not self.keep_unstored
            assert not any(key.startswith(page.key) for key in self.model.pages)
            self.model.stored.discard(page.key)

    @invariant()
    def slots_of_every_owner_add_up(self) -> None:
        taken = self.model.slots()
        assert len(taken) == len(set(taken))
        by_owner = [
            sum(slot % self.tier.ownership.num_owners == owner for slot in taken)
            for owner in range(self.tier.ownership.num_owners)
        ]
        assert [self.rows - self.tier.num_free_of(owner) for owner in range(self.tier.ownership.num_owners)] == by_owner
        assert self.tier.num_free == self.tier.num_slots - len(taken)
        assert self.tier.num_reserved == sum(len(each.slots) for each in self.model.operations)
        assert self.tier.num_leases == len(self.model.leases) + len(self.model.old_leases)
        self.tier.check()
        self.tier._pool.check()

    @invariant()
    def every_chain_lies_in_one_rotation_where_the_tree_says(self) -> None:
        for first, rotations in self.model.rotations(self.tier.ownership.num_owners).items():
            assert len(rotations) == 1, f"chains from {first!r} lie in rotations {rotations}"
            assert rotations == {0} or not self.on_device
        for key, slot in self.model.pages.items():
            found = self.tier.match(chain(*key), touch=False)
            assert (found.num_pages, found.slots[-1]) == (len(key), slot)
            assert (slot - len(key) + 1) % self.tier.ownership.num_owners == found.rotation

    def teardown(self) -> None:
        """Whatever happened, all slots come back."""
        for lease in [*self.model.old_leases, *(lease for lease, _ in self.model.leases)]:
            lease.release()
        for operation in self.model.operations:
            self.tier.abandon(operation.slots)
        self.tier.reset()
        self.tier.drain_retired()
        self.tier.check()
        assert self.tier.num_free == self.tier.num_slots


TestHostTierAgainstTheModel = HostMachine.TestCase
TestHostTierAgainstTheModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
