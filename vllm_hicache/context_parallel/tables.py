"""Where the pages of a batch lie in the scratch, and its tokens in the scratch and in this rank's cache.

Pure, any thread; integer tensors on the host. A block B of the engine stands for N * p tokens: row B of a layer's
cache on rank r holds page q of a request, where q mod N = r and q // N is B's place in the request's block table.

The scratch holds every page of every block that the batch needs, each block once. Blocks with tokens of earlier steps
are the history, and are gathered: the page of owner r of the block at place j is scratch page r * H + j, with H blocks
of history. The others are fresh, and written by each rank itself: behind the gathered N * H pages, the page of owner r
of the block at place j is N * H + j * N + r.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class ScratchTables:
    """One batch's pages and tokens.

    Attributes:
        num_owners: N, the ranks that share out the pages.
        history: blocks to gather, ascending, [H] int64: rows of this rank's cache. Equal on all ranks.
        num_fresh: blocks in the scratch that are not gathered.
        block_table: scratch page of each page of a request, [num_requests, max_pages] int32; 0 behind its last.
        scratch_slots: slot in the scratch of each token of the step, [num_tokens] int64.
        owned_tokens: which tokens of the step lie on this rank's pages, ascending, [num_owned] int64.
        owned_slots: their slots in this rank's cache, [num_owned] int64.
    """

    num_owners: int
    history: torch.Tensor
    num_fresh: int
    block_table: torch.Tensor
    scratch_slots: torch.Tensor
    owned_tokens: torch.Tensor
    owned_slots: torch.Tensor

    @property
    def num_history(self) -> int:
        """H: blocks to gather, which is rows that each rank sends."""
        return len(self.history)

    @property
    def num_pages(self) -> int:
        """Pages of the scratch."""
        return self.num_owners * (self.num_history + self.num_fresh)


def scratch_tables(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_owners: int,
    rank: int,
    page_tokens: int,
) -> ScratchTables:
    """Lay out the scratch of a batch.

    Args:
        block_table: [num_requests or more, max_blocks] int32; anything behind a request's last block.
        seq_lens: tokens of each request, those of this step included, [num_requests].
        query_start_loc: first token of each request in the step, and their number, [num_requests + 1].
        page_tokens: tokens of a page, which is a block on one rank.
    """
    seq_lens, starts = seq_lens.long(), query_start_loc.long()
    earlier = seq_lens - starts.diff()
    num_pages = _ceil_div(seq_lens, page_tokens)
    num_blocks = _ceil_div(num_pages, num_owners)
    blocks = block_table[: len(seq_lens), : _greatest(num_blocks)].long()
    is_used = _before(num_blocks, blocks.shape[1])
    is_earlier = _before(_ceil_div(earlier, page_tokens * num_owners), blocks.shape[1])
    used, place_of, is_history = _distinct(blocks[is_used], is_earlier[is_used])
    pages = _pages(is_history, num_owners)

    scratch_pages = torch.zeros((*blocks.shape, num_owners), dtype=torch.int64)
    scratch_pages[is_used] = pages[place_of]
    scratch_pages = scratch_pages.flatten(1)[:, : _greatest(num_pages)]
    scratch_pages.masked_fill_(~_before(num_pages, scratch_pages.shape[1]), 0)

    request, positions = _tokens(starts, earlier)
    page, offsets = positions // page_tokens, positions % page_tokens
    owned = (page % num_owners == rank).nonzero().squeeze(1)
    owned_blocks = blocks[request[owned], page[owned] // num_owners]
    history = used[is_history]
    return ScratchTables(
        num_owners,
        history,
        len(used) - len(history),
        scratch_pages.int(),
        scratch_pages[request, page] * page_tokens + offsets,
        owned,
        owned_blocks * page_tokens + offsets[owned],
    )


def local_slots(
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    num_owners: int,
    rank: int,
    page_tokens: int,
    pad: int = -1,
) -> torch.Tensor:
    """Slot in this rank's cache of each token, [num_tokens] int64; `pad` where its page is another rank's.

    Equal to vLLM's slot mapping where the interleave is the block size. Tokens behind the last request's get `pad`.

    Args:
        positions: place of each token in its request, [num_tokens].
        query_start_loc: first token of each request, and the end of the last, [num_requests + 1].
        block_table: [num_requests or more, max_blocks] int32.
    """
    slots = torch.full((len(positions),), pad, dtype=torch.int64)
    starts = query_start_loc.long()
    num_tokens = min(int(starts[-1]), len(positions))
    pages = positions[:num_tokens].long() // page_tokens
    owned = (pages % num_owners == rank).nonzero().squeeze(1)
    request = torch.searchsorted(starts[1:], owned, right=True)
    blocks = block_table[request, pages[owned] // num_owners].long()
    slots[owned] = blocks * page_tokens + positions[owned].long() % page_tokens
    return slots


def _distinct(blocks: torch.Tensor, is_earlier: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks, ascending and each once; the place of every given one among them; which are history for any request."""
    used, place_of = torch.unique(blocks, return_inverse=True)
    is_history = torch.zeros(len(used), dtype=torch.bool)
    is_history[place_of[is_earlier]] = True
    return used, place_of, is_history


def _pages(is_history: torch.Tensor, num_owners: int) -> torch.Tensor:
    """Scratch page of each owner's page of each block, [num_used, num_owners] int64: the rule in the module's words."""
    owners = torch.arange(num_owners)
    num_history = is_history.sum()
    gathered = (is_history.cumsum(0) - 1).unsqueeze(1) + owners * num_history
    fresh = (num_history + (~is_history).cumsum(0) - 1).unsqueeze(1) * num_owners + owners
    return torch.where(is_history.unsqueeze(1), gathered, fresh)


def _tokens(starts: torch.Tensor, earlier: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Request and position of each token of the step."""
    num_tokens = int(starts[-1])
    request = torch.repeat_interleave(torch.arange(len(earlier)), starts.diff(), output_size=num_tokens)
    return request, torch.arange(num_tokens) + (earlier - starts[:-1])[request]


def _before(counts: torch.Tensor, width: int) -> torch.Tensor:
    """Mask of the first `counts[i]` columns of each row, [num_rows, width]."""
    return torch.arange(width) < counts.unsqueeze(1)


def _ceil_div(numbers: torch.Tensor, divisor: int) -> torch.Tensor:
    return (numbers + divisor - 1) // divisor


def _greatest(numbers: torch.Tensor) -> int:
    return int(numbers.max()) if len(numbers) else 0
