"""Ranks give each other pages: each arrives whole on every rank that wants it, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from gloo_kit import World
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_kit import CPU, NUM_PAGES, SMALLEST, Group
from thread_collective import Meeting, ThreadCollective
from transfer_fixtures import PATIENCE_S, POISON, block_bytes

from vllm_hicache.errors import CollectiveError, InvariantError
from vllm_hicache.names import MissReason, OpId, Slot
from vllm_hicache.transfer.collective import Collective, Fill, GlooCollective, Pending, new_group
from vllm_hicache.transfer.exchange import MAX_ROWS, Batch, Header, PageExchange

Outcome = list[MissReason | None] | Exception
UNHURRIED = settings(deadline=None, max_examples=60)
HEADER_BYTES = len(Header(0, 0, 0, ()).pack())


def batch_of(group: Group, start: int, stop: int, unwanted: Sequence[int] = (), op: int = 5) -> Batch:
    """Pages [start, stop) of the chain, as one rank exchanges them."""
    wanted = tuple(page not in unwanted for page in range(start, stop))
    return Batch(OpId(op), start, group.moves(start, stop), wanted, None)


def outcome(exchange: PageExchange, batch: Batch) -> Outcome:
    try:
        return exchange.run(batch)
    except (CollectiveError, InvariantError) as error:
        return error


def run_all(exchanges: Sequence[PageExchange], batches: Sequence[Batch]) -> list[Outcome]:
    """What became of each rank's batch, by rank."""
    with ThreadPoolExecutor(len(exchanges)) as ranks:
        return list(ranks.map(outcome, exchanges, batches))


def messages(outcomes: Sequence[Outcome]) -> list[str]:
    assert all(isinstance(each, CollectiveError) for each in outcomes), outcomes
    return [str(each) for each in outcomes]


class Tampering(ThreadCollective):
    """Changes the first byte that `sender` sent here in gather number `number`."""

    def __init__(self, rank: int, meeting: Meeting, sender: int, number: int, change: int = 1) -> None:
        super().__init__(rank, meeting)
        self._sender, self._number, self._change = sender, number, change
        self._num_started = 0

    def start(self, rows: torch.Tensor, fill: Fill | None = None) -> Pending:
        pending = super().start(rows, fill)
        self._num_started += 1
        if self._num_started == self._number + 1:
            return _Tampered(pending, rows[self._sender, :1], self._change)
        return pending


class _Tampered(Pending):
    def __init__(self, inner: Pending, byte: torch.Tensor, change: int) -> None:
        self._inner, self._byte, self._change = inner, byte, change

    def wait(self) -> None:
        self._inner.wait()
        self._byte ^= self._change
        self._change = 0


def tampered(group: Group, rank: int, sender: int, number: int, timeout_s: float = 5.0) -> list[PageExchange]:
    """Exchanges whose gather `number` brings `rank` something else than `sender` sent."""
    meeting = Meeting(group.num_owners, timeout_s)
    return group.exchanges(
        [
            Tampering(each, meeting, sender, number) if each == rank else ThreadCollective(each, meeting)
            for each in range(group.num_owners)
        ]
    )


# Pages arrive


@UNHURRIED
@given(st.integers(2, 4), st.integers(0, 3), st.tuples(st.integers(0, NUM_PAGES), st.integers(0, NUM_PAGES)))
def test_every_rank_gets_every_page_of_any_range_whoever_owns_the_first(
    num_owners: int, rotation: int, bounds: tuple[int, int]
) -> None:
    group, (start, stop) = Group(num_owners, rotation % num_owners), sorted(bounds)
    host = [member.host for member in group.members]
    outcomes = run_all(group.exchanges(group.collectives()), [batch_of(group, start, stop)] * num_owners)
    assert outcomes == [[None] * (stop - start)] * num_owners
    assert [group.pages_on(member) for member in group.members] == [set(range(start, stop))] * num_owners
    assert [member.host for member in group.members] == host


@UNHURRIED
@given(st.data())
def test_pages_behind_the_first_that_is_missing_are_absent_and_unwanted_ones_are_not_written(
    data: st.DataObject,
) -> None:
    group = Group(data.draw(st.integers(2, 4)), data.draw(st.integers(0, 1)))
    some = st.sets(st.integers(0, NUM_PAGES - 1), max_size=3)
    unwanted = [data.draw(some) for _ in group.members]
    num_sent = min((page for page in range(NUM_PAGES) if page in unwanted[group.owner(page)]), default=NUM_PAGES)
    collectives = group.collectives()
    outcomes = run_all(group.exchanges(collectives), [batch_of(group, 0, NUM_PAGES, pages) for pages in unwanted])
    reasons = [None] * num_sent + [MissReason.ABSENT] * (NUM_PAGES - num_sent)
    assert outcomes == [reasons] * group.num_owners
    assert [group.pages_on(each) for each in group.members] == [set(range(num_sent)) - pages for pages in unwanted]
    num_rows = -(-num_sent // group.num_owners)
    assert {each.num_gathers for each in collectives} == {1 + num_rows}


@pytest.mark.parametrize("num_owners", [2, 3, 4])
def test_a_rank_that_wants_nothing_takes_part_and_its_pages_are_absent(num_owners: int) -> None:
    group = Group(num_owners)
    last, whole = num_owners - 1, batch_of(group, 0, NUM_PAGES)
    batches = [*[whole] * last, batch_of(group, 0, NUM_PAGES, range(NUM_PAGES))]
    outcomes = run_all(group.exchanges(group.collectives()), batches)
    assert outcomes == [[None] * last + [MissReason.ABSENT] * (NUM_PAGES - last)] * num_owners
    assert [group.pages_on(member) for member in group.members] == [*[set(range(last))] * last, set()]


def test_a_rank_gets_what_others_own_though_it_owns_nothing_of_a_batch() -> None:
    group = Group(4)
    assert run_all(group.exchanges(group.collectives()), [batch_of(group, 5, 6)] * 4) == [[None]] * 4
    assert [group.pages_on(member) for member in group.members] == [{5}] * 4


def test_a_page_of_which_the_device_has_the_head_is_written_from_its_first_block_on() -> None:
    group, page = Group(2), Group(2).move(3)
    tail, (_, block) = replace(page, blocks=page.blocks[1:], first_block=1), group.targets(3)
    batch = Batch(OpId(1), 0, (tail,), (True,), None)
    assert run_all(group.exchanges(group.collectives()), [batch] * 2) == [[None]] * 2
    for member in group.members:
        assert member.block(block) == block_bytes(group.source, 7)
        assert set(member.blocks(besides=[block]).values()) == {bytes([POISON]) * len(member.block(0))}


def test_batches_follow_each_other_on_the_same_buffers() -> None:
    group = Group(3, rotation=1)
    exchanges = group.exchanges(group.collectives())
    for start, stop in [(0, 5), (5, 6), (6, 12)]:
        assert run_all(exchanges, [batch_of(group, start, stop)] * 3) == [[None] * (stop - start)] * 3
    assert [group.pages_on(member) for member in group.members] == [set(range(12))] * 3


@pytest.mark.parametrize("num_pages", [2 * MAX_ROWS, 2 * MAX_ROWS - 1])
def test_a_batch_may_have_as_many_rows_as_a_header_has_room_for(num_pages: int) -> None:
    group = Group(2, 0, num_pages, replace(SMALLEST, blocks=num_pages + 3), 1)
    exchanges = group.exchanges(group.collectives())
    assert {each.batch_pages for each in exchanges} == {2 * MAX_ROWS}
    assert run_all(exchanges, [batch_of(group, 0, num_pages)] * 2) == [[None] * num_pages] * 2
    assert [group.pages_on(member) for member in group.members] == [set(range(num_pages))] * 2


def test_two_pages_of_one_owner_in_a_row_are_a_bug_and_nothing_is_sent() -> None:
    group = Group(2)
    first, second = group.moves(0, 2)
    batch = Batch(OpId(9), 0, (first, replace(second, slot=Slot(first.slot + 2))), (True, True), None)
    collectives = group.collectives()
    (found, _) = run_all(group.exchanges(collectives), [batch] * 2)
    assert str(found) == f"operation 9: owner {first.slot % 2} has two of 2 pages in a row"
    assert [each.num_gathers for each in collectives] == [0, 0]


def test_pages_come_on_a_device_whose_bytes_are_not_looked_at() -> None:
    class OnHost(ThreadCollective):
        def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
            return torch.zeros(num_bytes, dtype=torch.uint8)

    group = Group(2)
    headers, meeting, device = group.collectives(), Meeting(2, 5.0), torch.device("cuda")
    pages = [OnHost(rank, meeting) for rank in range(2)]
    exchanges = [
        PageExchange(*ways, member.pool, member.copier, device)
        for *ways, member in zip(headers, pages, group.members, strict=True)
    ]
    outcomes = run_all(exchanges, [batch_of(group, 0, 6), batch_of(group, 0, 6, [3])])
    assert outcomes == [[None] * 3 + [MissReason.ABSENT] * 3] * 2
    assert [group.pages_on(member) for member in group.members] == [{0, 1, 2}] * 2
    assert [(one.num_gathers, other.num_gathers) for one, other in zip(headers, pages, strict=True)] == [(1, 2)] * 2


# Damage


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_page_that_is_damaged_on_its_way_is_corrupt_where_it_arrives_so_and_not_written(
    number: int, rank: int
) -> None:
    group = Group(3)
    sender = (rank + 1) % 3
    damaged = 3 * (number - 1) + sender
    outcomes = run_all(tampered(group, rank, sender, number), [batch_of(group, 0, NUM_PAGES)] * 3)
    for each, (member, found) in enumerate(zip(group.members, outcomes, strict=True)):
        lost = {damaged} if each == rank else set()
        assert found == [MissReason.CORRUPT if page in lost else None for page in range(NUM_PAGES)]
        assert group.pages_on(member) == set(range(NUM_PAGES)) - lost


def test_after_a_damaged_page_others_are_still_exchanged() -> None:
    group = Group(2)
    exchanges = tampered(group, 0, 1, 1)
    assert run_all(exchanges, [batch_of(group, 0, 2)] * 2) == [[None, MissReason.CORRUPT], [None, None]]
    assert run_all(exchanges, [batch_of(group, 2, 8)] * 2) == [[None] * 6] * 2
    assert group.pages_on(group.members[0]) == {0, 2, 3, 4, 5, 6, 7}


def test_a_header_that_is_damaged_ends_exchanges_and_nothing_is_written() -> None:
    group = Group(2)
    exchanges = tampered(group, 0, 1, 0, timeout_s=0.2)
    first, second = messages(run_all(exchanges, [batch_of(group, 0, 4)] * 2))
    assert first.startswith(f"a header of {HEADER_BYTES} bytes was damaged between ranks")
    assert "did not meet all others within 0.2 s" in second
    assert [group.pages_on(member) for member in group.members] == [set(), set()]
    assert all(each.is_broken for each in exchanges)


@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_no_byte_of_a_header_can_change_unnoticed(place: int, change: int) -> None:
    packed = bytearray(Header(7, 3, 2, (b"d" * 16, None)).pack())
    packed[place] ^= change
    with pytest.raises(CollectiveError, match="damaged between ranks"):
        Header.unpack(bytes(packed))


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.lists(st.none() | st.binary(min_size=16, max_size=16), max_size=MAX_ROWS),
)
def test_a_header_says_what_was_packed(op: int, first: int, digests: list[bytes | None]) -> None:
    found = Header.unpack(Header(op, first, len(digests), tuple(digests)).pack())
    assert (found.op, found.first, found.num_pages) == (op, first, len(digests))
    assert list(found.digests) == digests + [None] * (MAX_ROWS - len(digests))


# Ranks that do not come together


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"op": 6}, "8 pages from page 0 of operation 6"),
        ({"start": 1, "stop": 9}, "8 pages from page 1 of operation 5"),
        ({"stop": 7}, "7 pages from page 0 of operation 5"),
    ],
    ids=["other operation", "other beginning", "other length"],
)
def test_ranks_out_of_step_are_told_so_once_and_for_all_and_nothing_is_written(
    other: dict[str, int], said: str
) -> None:
    group = Group(3)
    exchanges = group.exchanges(group.collectives(5.0))
    usual = batch_of(group, 0, 8)
    found = messages(run_all(exchanges, [usual, usual, batch_of(group, **{"start": 0, "stop": 8} | other)]))
    assert found[0].startswith(f"owner 2 exchanges {said}, owner 0 8 pages from page 0 of operation 5: ranks have lost")
    assert found[2].startswith(f"owner 0 exchanges 8 pages from page 0 of operation 5, owner 2 {said}: ranks have lost")
    again = messages(run_all(exchanges, [usual] * 3))
    assert set(again) == {"pages are no longer exchanged between ranks, because an earlier exchange failed"}
    assert all(each.is_broken for each in exchanges)
    assert [group.pages_on(member) for member in group.members] == [set()] * 3


def test_a_rank_that_never_comes_ends_exchanges_within_the_limit() -> None:
    group = Group(3)
    exchanges = group.exchanges(group.collectives(0.2))
    found = messages(run_all(exchanges[:2], [batch_of(group, 0, 8)] * 2))
    assert all("did not meet all others within 0.2 s" in each for each in found)
    assert [each.is_broken for each in exchanges] == [True, True, False]
    assert "earlier exchange failed" in messages(run_all(exchanges[:1], [batch_of(group, 0, 8)]))[0]
    assert [group.pages_on(member) for member in group.members] == [set()] * 3


def test_a_rank_that_leaves_in_the_middle_ends_exchanges_and_what_had_arrived_is_whole() -> None:
    group = Group(2)
    collectives = group.collectives(5.0)
    gathers = iter([None, None, None, OSError("link down")])

    def leave(row: torch.Tensor) -> None:
        if (error := next(gathers)) is not None:
            raise error

    collectives[1].before_meeting = leave
    found = messages(run_all(group.exchanges(collectives), [batch_of(group, 0, 8)] * 2))
    assert "link down" in found[1]
    assert group.pages_on(group.members[0]) <= {0, 1, 2, 3} == group.pages_on(group.members[1])


@pytest.mark.parametrize("ways", [1, 2])
def test_closing_ends_each_collective_once(ways: int) -> None:
    class Counted(ThreadCollective):
        num_closed = 0

        def close(self) -> None:
            self.num_closed += 1
            super().close()

    group, meeting = Group(2), Meeting(2, 5.0)
    headers: Collective = Counted(0, meeting)
    pages = Counted(0, meeting) if ways == 2 else headers
    PageExchange(headers, pages, group.members[0].pool, group.members[0].copier, CPU).close()
    assert [each.num_closed for each in (headers, pages)] == [1, 1]  # type: ignore[attr-defined]


# Real processes


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(3) as ranks:
        yield ranks


def exchange_of(group: Group, rank: int) -> PageExchange:
    """By gloo, in a process of the world."""
    collective = GlooCollective(new_group(range(group.num_owners), PATIENCE_S), PATIENCE_S)
    return PageExchange(collective, collective, group.members[rank].pool, group.members[rank].copier, CPU)


def exchanged(rank: int) -> tuple[list[Outcome], set[int]]:
    """Two batches, of the second of which one page is missing."""
    group = Group(3, rotation=1)
    exchange = exchange_of(group, rank)
    unwanted = [8] if group.owner(8) == rank else []
    found = [outcome(exchange, batch_of(group, *each)) for each in ((0, 6), (6, NUM_PAGES, unwanted))]
    exchange.close()
    return found, group.pages_on(group.members[rank])


def test_processes_give_each_other_pages_byte_for_byte(world: World) -> None:
    absent = [MissReason.ABSENT] * 4
    assert world.run(exchanged) == [([[None] * 6, [None, None, *absent]], set(range(8)))] * 3


def out_of_step(rank: int) -> tuple[str, set[int]]:
    group = Group(3)
    exchange = exchange_of(group, rank)
    found = outcome(exchange, batch_of(group, 0, 4, op=rank))
    exchange.close()
    return str(found), group.pages_on(group.members[rank])


def test_processes_out_of_step_are_told_so(world: World) -> None:
    for rank, (message, pages) in enumerate(world.run(out_of_step)):
        other = 0 if rank else 1
        assert message.startswith(f"owner {other} exchanges 4 pages from page 0 of operation {other}, owner {rank} ")
        assert pages == set()
