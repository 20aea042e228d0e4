"""Layers gathered one ahead: every token is found with its exact bytes, in order, in two buffers, with equal calls.

The ranks of a group live in one process here, each with its own caches, and step one after the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from gloo_kit import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hicache.context_parallel.gather import LayerGather
from vllm_hicache.context_parallel.scratch import Scratch
from vllm_hicache.context_parallel.tables import ScratchTables, scratch_tables
from vllm_hicache.errors import CollectiveError, InvariantError
from vllm_hicache.transfer.collective import Collective, Fill, GlooCollective, Pending, new_group

PAGE_TOKENS = 2
POISON = -1
NUM_BLOCKS = 12

Token = tuple[int, int]
"""Block, and place in it over all ranks."""


class Group:
    """Collectives of ranks in one process: a gather happens when the first rank waits, or at once where it is eager."""

    def __init__(self, size: int, is_eager: bool = False) -> None:
        self.is_eager = is_eager
        self.events: list[str] = []
        self.calls: list[list[Call]] = [[] for _ in range(size)]
        self.num_complete = 0
        self.members = [Member(self, rank) for rank in range(size)]

    def complete(self, number: int) -> None:
        if number < self.num_complete:
            return
        for rank, calls in enumerate(self.calls):
            if len(calls) <= number:
                raise CollectiveError(f"rank {rank} did not come")
        rows = [calls[number].fill_own(rank) for rank, calls in enumerate(self.calls)]
        for calls in self.calls:
            for rank, row in enumerate(rows):
                calls[number].rows[rank].copy_(row)
        for calls in self.calls:
            calls[number].rows = torch.empty(0)
        self.num_complete = number + 1


@dataclass
class Call(Pending):
    group: Group
    number: int
    rows: torch.Tensor
    fill: Fill | None
    shape: torch.Size
    is_filled: bool = False
    num_waits: int = 0

    def fill_own(self, rank: int) -> torch.Tensor:
        if self.fill is not None and not self.is_filled:
            self.group.events.append(f"fill {self.number}")
            self.fill(self.rows[rank])
        self.is_filled = True
        return self.rows[rank]

    def wait(self) -> None:
        self.group.events.append(f"wait {self.number}")
        self.num_waits += 1
        self.group.complete(self.number)


@dataclass
class Member(Collective):
    group: Group
    rank: int
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.group.calls)

    def start(self, rows: torch.Tensor, fill: Fill | None = None) -> Pending:
        assert rows.is_contiguous()
        assert rows.shape[0] == self.size
        calls = self.group.calls[self.rank]
        self.group.events.append(f"start {len(calls)}")
        calls.append(Call(self.group, len(calls), rows, fill, rows.shape))
        if self.group.is_eager:
            calls[-1].fill_own(self.rank)
        return calls[-1]

    def close(self) -> None: ...


def token_value(layer: int, block: int, token: int) -> int:
    """What a token's key and value are: all of a block's tokens, over all ranks, are different."""
    return (layer * NUM_BLOCKS + block) * 1000 + token


class Rank:
    """One rank's caches, [NUM_BLOCKS, 1 head, PAGE_TOKENS, 1], int64, poisoned where it has not written."""

    def __init__(self, member: Member, num_layers: int) -> None:
        self.member = member
        self.caches = [torch.full((NUM_BLOCKS, 1, PAGE_TOKENS, 1), POISON) for _ in range(num_layers)]
        self.scratch = Scratch(torch.device("cpu"))
        self.gather = LayerGather(member, self.scratch)

    def remember(self, blocks: Sequence[int]) -> None:
        """All tokens of these blocks on this rank's pages, as earlier steps left them."""
        for layer, cache in enumerate(self.caches):
            for block in blocks:
                for offset in range(PAGE_TOKENS):
                    cache[block, 0, offset] = token_value(layer, block, self.member.rank * PAGE_TOKENS + offset)

    def write(
        self, layer: int, scratch: torch.Tensor, tables: ScratchTables, tokens: Sequence[tuple[int, int]]
    ) -> None:
        """This step's tokens, (block, place in it) each."""
        values = torch.tensor([token_value(layer, *token) for token in tokens], dtype=torch.int64).unsqueeze(-1)
        flat = scratch.permute(0, 2, 1, 3).reshape(-1, 1)
        assert flat.data_ptr() == scratch.data_ptr()
        flat[tables.scratch_slots] = values


def a_group(num_ranks: int = 2, num_layers: int = 3, is_eager: bool = False) -> list[Rank]:
    group = Group(num_ranks, is_eager)
    return [Rank(member, num_layers) for member in group.members]


def tables_of(
    table: Sequence[Sequence[int]], seq_lens: Sequence[int], queries: Sequence[int], size: int, rank: int
) -> ScratchTables:
    starts = torch.tensor([0, *queries]).cumsum(0)
    return scratch_tables(torch.tensor(table), torch.tensor(seq_lens), starts, size, rank, PAGE_TOKENS)


def history_tables(rank: Rank, blocks: Sequence[int] = (1, 4)) -> ScratchTables:
    """One request that has these whole blocks as history, and one new token in block 0."""
    size = rank.member.size
    num_tokens = len(blocks) * size * PAGE_TOKENS + 1
    return tables_of([[*blocks, 0]], [num_tokens], [1], size, rank.member.rank)


def fresh_tables(rank: Rank) -> ScratchTables:
    return tables_of([[1]], [2], [2], rank.member.size, rank.member.rank)


def begin(ranks: Sequence[Rank], tables_for: Callable[[Rank], ScratchTables] = history_tables) -> None:
    for rank in ranks:
        rank.gather.begin(rank.caches, tables_for(rank))


def pass_layer(ranks: Sequence[Rank], layer: int) -> list[torch.Tensor]:
    """The layer's scratch on each rank; the next layer is started."""
    scratch = [rank.gather.wait(layer) for rank in ranks]
    for rank in ranks:
        rank.gather.ahead(layer)
    return scratch


def step(ranks: Sequence[Rank]) -> None:
    """A whole batch of which nothing is looked at."""
    begin(ranks)
    for layer in range(len(ranks[0].caches)):
        pass_layer(ranks, layer)


@settings(deadline=None, max_examples=50)
@given(size=st.integers(1, 4), num_layers=st.integers(1, 4), is_eager=st.booleans(), data=st.data())
def test_attention_finds_every_token_of_every_request_in_every_layer(
    size: int, num_layers: int, is_eager: bool, data: st.DataObject
) -> None:
    ranks = a_group(size, num_layers, is_eager)
    block_tokens = size * PAGE_TOKENS
    for _ in range(data.draw(st.integers(1, 3), "batches")):
        names = data.draw(st.permutations(range(NUM_BLOCKS)))
        table = [names[:4], [*names[:2], *names[4:6]], names[6:10]]
        seq_lens = data.draw(st.lists(st.integers(2 * block_tokens + 1, 4 * block_tokens), min_size=3, max_size=3))
        queries = [data.draw(st.integers(1, length - 2 * block_tokens)) for length in seq_lens]
        for rank in ranks:
            rank.remember(names)
        check_batch(ranks, table, seq_lens, queries)


def check_batch(ranks: Sequence[Rank], table: Sequence[Sequence[int]], seq_lens: list[int], queries: list[int]) -> None:
    """Poison in every cache what the step is to write, step, and read every token through the scratch's tables."""
    size = len(ranks)
    places = [
        [(row[x // PAGE_TOKENS // size], x % (PAGE_TOKENS * size)) for x in range(length)]
        for row, length in zip(table, seq_lens, strict=True)
    ]
    new = [token for row, count in zip(places, queries, strict=True) for token in row[len(row) - count :]]
    for block, token in new:
        owner, offset = divmod(token, PAGE_TOKENS)
        for cache in ranks[owner].caches:
            cache[block, 0, offset] = POISON
    tables = [tables_of(table, seq_lens, queries, size, rank.member.rank) for rank in ranks]
    for rank, own in zip(ranks, tables, strict=True):
        rank.gather.begin(rank.caches, own)
    for layer in range(len(ranks[0].caches)):
        for rank, own in zip(ranks, tables, strict=True):
            scratch = rank.gather.wait(layer)
            rank.write(layer, scratch, own, new)
        for rank, own in zip(ranks, tables, strict=True):
            rank.gather.ahead(layer)
            check_pages(layer, rank.gather.wait(layer), own, places)


def check_pages(layer: int, scratch: torch.Tensor, tables: ScratchTables, places: Sequence[Sequence[Token]]) -> None:
    for row, tokens in zip(tables.block_table.tolist(), places, strict=True):
        found = [int(scratch[row[x // PAGE_TOKENS], 0, x % PAGE_TOKENS, 0]) for x in range(len(tokens))]
        assert found == [token_value(layer, *token) for token in tokens]


def test_the_order_is_restore_gather_attention_and_a_layer_is_gathered_while_the_one_before_attends() -> None:
    (rank,) = a_group(1, 3)
    events = rank.member.group.events
    events.append("restore")
    begin([rank])
    for layer in range(3):
        rank.gather.wait(layer)
        rank.gather.ahead(layer)
        events.append(f"attend {layer}")
    assert " ".join(events) == (
        "restore start 0 wait 0 fill 0 start 1 attend 0 wait 1 fill 1 start 2 attend 1 wait 2 fill 2 attend 2"
    )


def test_what_is_restored_before_the_batch_begins_is_gathered() -> None:
    ranks = a_group(is_eager=True)
    for rank in ranks:
        rank.remember([1, 4])
    begin(ranks)
    pages = [rank.gather.wait(0)[:4].flatten().tolist() for rank in ranks]
    owner_0, owner_1 = (
        [token_value(0, block, first + offset) for block in (1, 4) for offset in (0, 1)] for first in (0, 2)
    )
    assert pages == [owner_0 + owner_1] * 2


def test_a_batch_without_history_makes_no_call_and_still_has_its_pages() -> None:
    ranks = a_group()
    begin(ranks, fresh_tables)
    assert [tuple(rank.gather.wait(0).shape) for rank in ranks] == [(2, 1, PAGE_TOKENS, 1)] * 2
    assert ranks[0].member.group.events == []


def test_all_ranks_make_the_same_calls_with_rows_of_the_same_size() -> None:
    ranks = a_group(4)
    step(ranks)
    begin(ranks, fresh_tables)
    step(ranks)
    shapes = [[call.shape for call in calls] for calls in ranks[0].member.group.calls]
    assert shapes == [[(4, 2, 1, PAGE_TOKENS, 1)] * 6] * 4


def test_neighbouring_layers_lie_in_different_memory_and_every_other_layer_in_the_same() -> None:
    (rank,) = a_group(1, 4)
    begin([rank])
    places = []
    for layer in range(4):
        places.append(rank.gather.wait(layer).data_ptr())
        rank.gather.ahead(layer)
    assert places[0] == places[2] != places[1] == places[3]


def test_the_scratch_holds_two_layers_whatever_their_number() -> None:
    (rank,) = a_group(1, 5)
    step([rank])
    page_bytes = rank.caches[0][0].nbytes
    assert rank.scratch.peak_bytes == 2 * history_tables(rank).num_pages * page_bytes


def test_a_buffer_that_must_grow_is_let_go_first_in_a_larger_batch_and_in_a_larger_layer() -> None:
    (rank,) = a_group(1, 3)
    rank.caches[2] = torch.zeros(NUM_BLOCKS, 5, PAGE_TOKENS, 1)
    made: list[weakref.ref[np.ndarray]] = []
    alive = []

    def allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
        alive.append(sum(memory() is not None for memory in made))
        memory = np.zeros(num_bytes, dtype=np.uint8)
        made.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    rank.gather = LayerGather(rank.member, Scratch(torch.device("cpu"), allocate))
    for blocks in ((1,), (1, 2, 3)):
        rank.gather.begin(rank.caches, history_tables(rank, blocks))
        for layer in range(3):
            pass_layer([rank], layer)
    assert alive == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_layers_may_differ_in_shape_and_dtype(dtype: torch.dtype) -> None:
    (rank,) = a_group(1, 1)
    rank.caches += [torch.ones((NUM_BLOCKS, 3, PAGE_TOKENS, 5), dtype=dtype)]
    begin([rank])
    rank.gather.wait(0)
    rank.gather.ahead(0)
    pages = rank.gather.wait(1)
    assert (pages.dtype, pages.shape) == (dtype, (3, 3, PAGE_TOKENS, 5))
    assert pages[:2].eq(1).all()


def test_a_layer_that_was_not_started_is_named() -> None:
    (rank,) = a_group(1, 3)
    begin([rank])
    with pytest.raises(InvariantError, match=r"layer 1 of 3 is not in the scratch, layers \[0\] are"):
        rank.gather.wait(1)


def test_a_layer_whose_buffer_is_anothers_is_refused() -> None:
    (rank,) = a_group(1, 3)
    step([rank])
    with pytest.raises(InvariantError, match=r"layer 0 of 3 is not in the scratch, layers \[2, 1\] are"):
        rank.gather.wait(0)


def test_no_buffer_is_filled_before_the_layer_in_it_was_waited_for() -> None:
    (rank,) = a_group(1, 3)
    begin([rank])
    with pytest.raises(InvariantError, match="layer 1 was to be gathered before layer 0 was waited for"):
        rank.gather.ahead(0)


def test_asking_twice_for_a_layer_or_the_next_changes_nothing() -> None:
    (rank,) = a_group(1, 3)
    begin([rank])
    assert rank.gather.wait(0).data_ptr() == rank.gather.wait(0).data_ptr()
    rank.gather.ahead(0)
    rank.gather.ahead(0)
    assert rank.member.group.events == ["start 0", "wait 0", "fill 0", "start 1"]


def test_a_batch_ends_what_an_aborted_one_left_pending() -> None:
    ranks = a_group()
    begin(ranks)
    pass_layer(ranks, 0)
    aborted = [calls[1] for calls in ranks[0].member.group.calls]
    step(ranks)
    assert [call.num_waits for call in aborted] == [1, 1]
    assert {call.num_waits for calls in ranks[0].member.group.calls for call in calls} == {1}


def test_a_batch_begun_twice_starts_over() -> None:
    ranks = a_group()
    begin(ranks)
    for rank in ranks:
        rank.remember([1, 4])
    begin(ranks)
    (first, _), (second, _) = ([int(page) for page in rank.gather.wait(0)[:2, 0, 0, 0]] for rank in ranks)
    assert first == second == token_value(0, 1, 0)


def test_a_rank_that_does_not_come_is_an_error_and_its_layer_is_not_waited_for_again() -> None:
    rank, _ = a_group()
    begin([rank])
    with pytest.raises(CollectiveError, match="rank 1 did not come"):
        rank.gather.wait(0)
    assert rank.member.group.calls[0][0].num_waits == 1


def test_figures_count_what_other_ranks_sent() -> None:
    ranks = a_group(4)
    step(ranks)
    begin(ranks, fresh_tables)
    row_bytes = 2 * ranks[0].caches[0][0].nbytes
    for rank in ranks:
        assert (rank.gather.figures.num_gathers, rank.gather.figures.num_bytes) == (3, 3 * 3 * row_bytes)


def test_figures_hold_the_time_that_attention_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    (rank,) = a_group(1)
    clock = iter([1.0, 3.5, 10.0, 10.25])
    monkeypatch.setattr("vllm_hicache.context_parallel.gather.time.perf_counter", lambda: next(clock))
    begin([rank])
    rank.gather.wait(0)
    rank.gather.ahead(0)
    rank.gather.wait(1)
    assert rank.gather.figures.exposed_s == 2.75


def gathered_for_real(number: int) -> list[list[float]]:
    """In a process of its own: a value of each gathered page, layer by layer."""
    with closing(GlooCollective(new_group(range(2), 30), 30)) as collective:
        gather = LayerGather(collective, Scratch(torch.device("cpu")))
        blocks = torch.arange(NUM_BLOCKS).view(-1, 1, 1, 1).expand(-1, 1, PAGE_TOKENS, 1)
        gather.begin([(32 * layer + 16 * number + blocks).bfloat16() for layer in range(4)], REAL_TABLES[number])
        found = []
        for layer in range(4):
            pages = gather.wait(layer).clone()
            gather.ahead(layer)
            found.append(pages[:4, 0, 1, 0].tolist())
    return found


REAL_TABLES = [tables_of([[1, 4, 0]], [9], [1], 2, rank) for rank in range(2)]


def test_ranks_in_processes_of_their_own_find_each_others_pages() -> None:
    wanted = [[32 * layer + 16 * rank + block for rank in range(2) for block in (1, 4)] for layer in range(4)]
    assert run_ranks(2, gathered_for_real) == [wanted, wanted]


def test_a_model_without_layers_begins_nothing() -> None:
    (rank,) = a_group(1, 0)
    begin([rank])
    assert rank.member.group.events == []
