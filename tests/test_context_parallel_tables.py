"""Tables of the scratch: beside plain loops over tokens, and beside vLLM's own formula of slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hicache.context_parallel.tables import ScratchTables, local_slots, scratch_tables

STALE = 10_000
"""Behind a request's last block the engine's table holds anything."""


@dataclass(frozen=True)
class Request:
    blocks: Sequence[int]
    seq_len: int
    query_len: int

    @property
    def earlier(self) -> int:
        return self.seq_len - self.query_len


@dataclass(frozen=True)
class Batch:
    requests: Sequence[Request]
    num_owners: int
    page_tokens: int

    @property
    def block_table(self) -> torch.Tensor:
        width = max((len(request.blocks) for request in self.requests), default=0) + 2
        rows = [[*request.blocks, *[STALE] * (width - len(request.blocks))] for request in self.requests]
        return torch.tensor([*rows, [STALE] * width], dtype=torch.int32)

    @property
    def query_start_loc(self) -> torch.Tensor:
        lengths = torch.tensor([0, *(request.query_len for request in self.requests)])
        return lengths.cumsum(0).int()

    @property
    def tokens(self) -> list[tuple[Request, int]]:
        """Request and position of each token of the step."""
        return [(request, x) for request in self.requests for x in range(request.earlier, request.seq_len)]

    def block(self, request: Request, position: int) -> int:
        return request.blocks[position // self.page_tokens // self.num_owners]

    def tables(self, rank: int = 0) -> ScratchTables:
        seq_lens = torch.tensor([request.seq_len for request in self.requests], dtype=torch.int32)
        return scratch_tables(self.block_table, seq_lens, self.query_start_loc, self.num_owners, rank, self.page_tokens)

    def slots(self, rank: int, num_padding: int = 0) -> list[int]:
        positions = torch.tensor([x for _, x in self.tokens] + [7] * num_padding, dtype=torch.int64)
        return local_slots(
            positions, self.query_start_loc, self.block_table, self.num_owners, rank, self.page_tokens, -7
        ).tolist()


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Requests that share blocks at their beginnings, some of which another request computes in the same step."""
    num_owners, page_tokens = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    names = draw(st.permutations(range(40)))
    requests = []
    for number in range(draw(st.integers(0, 5))):
        seq_len = draw(st.integers(0, 6 * num_owners * page_tokens))
        num_blocks = -(-seq_len // (num_owners * page_tokens))
        num_shared = draw(st.integers(0, num_blocks))
        blocks = [*names[:num_shared], *names[6 + 6 * number :][: num_blocks - num_shared]]
        requests.append(Request(blocks, seq_len, draw(st.integers(0, seq_len))))
    return Batch(requests, num_owners, page_tokens)


def expected_pages(batch: Batch) -> dict[tuple[int, int], int]:
    """(block, owner) to scratch page, token by token."""
    used = {batch.block(request, x) for request in batch.requests for x in range(request.seq_len)}
    history = sorted({batch.block(request, x) for request in batch.requests for x in range(request.earlier)})
    pages = {}
    for owner in range(batch.num_owners):
        for place, block in enumerate(history):
            pages[block, owner] = owner * len(history) + place
        for place, block in enumerate(sorted(used - set(history))):
            pages[block, owner] = batch.num_owners * (len(history) + place) + owner
    return pages


@settings(deadline=None)
@given(batches())
def test_blocks_are_gathered_where_any_request_has_earlier_tokens_and_fresh_elsewhere(batch: Batch) -> None:
    tables = batch.tables()
    history = {batch.block(request, x) for request in batch.requests for x in range(request.earlier)}
    assert tables.history.tolist() == sorted(history)
    assert tables.num_pages == len(expected_pages(batch))
    assert (tables.num_history, tables.num_pages) == (
        len(history),
        batch.num_owners * (tables.num_history + tables.num_fresh),
    )


@settings(deadline=None)
@given(batches())
def test_every_page_of_a_request_is_where_the_rule_puts_it_and_the_rest_of_the_table_is_0(batch: Batch) -> None:
    found, pages = batch.tables().block_table, expected_pages(batch)
    assert found.dtype == torch.int32
    for request, row in zip(batch.requests, found.tolist(), strict=True):
        num_pages = -(-request.seq_len // batch.page_tokens)
        wanted = [pages[batch.block(request, q * batch.page_tokens), q % batch.num_owners] for q in range(num_pages)]
        assert row == wanted + [0] * (len(row) - num_pages)


@settings(deadline=None)
@given(batches())
def test_every_token_of_the_step_has_the_slot_of_its_page(batch: Batch) -> None:
    pages, p = expected_pages(batch), batch.page_tokens
    wanted = [pages[batch.block(request, x), x // p % batch.num_owners] * p + x % p for request, x in batch.tokens]
    assert batch.tables().scratch_slots.tolist() == wanted


@settings(deadline=None)
@given(batches(), st.data())
def test_a_rank_owns_the_tokens_of_its_pages_and_no_others(batch: Batch, data: st.DataObject) -> None:
    rank, p = data.draw(st.integers(0, batch.num_owners - 1)), batch.page_tokens
    owned = [number for number, (_, x) in enumerate(batch.tokens) if x // p % batch.num_owners == rank]
    tables = batch.tables(rank)
    assert tables.owned_tokens.tolist() == owned
    slots = [batch.block(*batch.tokens[number]) * p + batch.tokens[number][1] % p for number in owned]
    assert tables.owned_slots.tolist() == slots


@settings(deadline=None)
@given(batches())
def test_only_what_a_rank_owns_differs_between_ranks(batch: Batch) -> None:
    one, *others = (batch.tables(rank) for rank in range(batch.num_owners))
    for other in others:
        for name in ("history", "block_table", "scratch_slots"):
            assert torch.equal(getattr(one, name), getattr(other, name))
    owned = torch.cat([one.owned_tokens, *(other.owned_tokens for other in others)])
    assert owned.sort().values.tolist() == list(range(len(batch.tokens)))


def vllms_slot(batch: Batch, rank: int, request: Request, position: int) -> int:
    """The formula of vLLM's ComputeSlotMappingKernel, interleave = block size; -7 is its PAD_ID."""
    interleave, size = batch.page_tokens, batch.num_owners
    virtual_block, offset = divmod(position, batch.page_tokens * size)
    if offset // interleave % size != rank:
        return -7
    local_offset = offset // (size * interleave) * interleave + offset % interleave
    return request.blocks[virtual_block] * batch.page_tokens + local_offset


@settings(deadline=None)
@given(batches(), st.integers(0, 3))
def test_local_slots_are_vllms_and_padding_gets_the_pad(batch: Batch, num_padding: int) -> None:
    for rank in range(batch.num_owners):
        wanted = [vllms_slot(batch, rank, request, x) for request, x in batch.tokens]
        assert batch.slots(rank, num_padding) == wanted + [-7] * num_padding


@settings(deadline=None)
@given(batches())
def test_owned_slots_are_the_slot_mapping_without_its_pads(batch: Batch) -> None:
    for rank in range(batch.num_owners):
        assert batch.tables(rank).owned_slots.tolist() == [slot for slot in batch.slots(rank) if slot != -7]


def test_a_block_that_one_request_computes_and_another_has_read_is_gathered_once() -> None:
    writer, reader = Request([5], 4, 4), Request([5, 9], 6, 2)
    tables = Batch([writer, reader], num_owners=2, page_tokens=2).tables()
    assert tables.history.tolist() == [5]
    assert tables.block_table.tolist() == [[0, 1, 0], [0, 1, 2]]
    assert tables.scratch_slots.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_page_that_earlier_tokens_fill_in_part_is_gathered_and_written_in_the_same_place() -> None:
    tables = Batch([Request([3], 4, 1)], num_owners=2, page_tokens=2).tables(rank=1)
    assert tables.history.tolist() == [3]
    assert tables.scratch_slots.tolist() == [3]
    assert (tables.owned_tokens.tolist(), tables.owned_slots.tolist()) == ([0], [7])


@pytest.mark.parametrize("num_requests", [0, 2], ids=["no request", "requests without a token"])
def test_an_empty_batch_needs_no_scratch(num_requests: int) -> None:
    tables = Batch([Request([], 0, 0)] * num_requests, num_owners=2, page_tokens=4).tables()
    assert (tables.num_pages, tables.num_history, tables.num_fresh) == (0, 0, 0)
    assert tables.block_table.shape == (num_requests, 0)
    assert len(tables.scratch_slots) == len(tables.owned_tokens) == len(tables.owned_slots) == 0
