"""Ownership: which rank of a group keeps which page, and where in its shard.

Pure: ints only. With N owners, pages of p tokens and a chain of rotation b, position x of a request lies on
page `q = x // p`, on owner `r = (q + b) mod N`, in row `l = (q // N) * p + x mod p` of that owner's shard. There is no
table. A host slot is numbered the same way over all owners: slot s lies on owner `s mod N`, in row `s // N` of its
pool.

Where the engine itself shards a request's KV (decode context parallelism), a page lies on the same owner in device
and host memory, and b is 0. Where the ranks of a group hold the same KV, host memory alone is shared out, and b is
chosen for each new chain, so that owners fill evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_hicache.errors import UnsupportedEngineError
from vllm_hicache.names import BlockId


@dataclass(frozen=True, slots=True)
class Ownership:
    """How a group of ranks shares out its pages.

    Attributes:
        num_owners: ranks among which pages are shared out; 1 where each rank keeps all.
        on_device: whether the engine shards device memory in the same way.
    """

    num_owners: int = 1
    on_device: bool = False

    def owner(self, page: int, rotation: int = 0) -> int:
        """Owner of a chain's page."""
        return (page + rotation) % self.num_owners

    def row(self, page: int) -> int:
        """Place of a page in its owner's shard of the chain, in pages."""
        return page // self.num_owners

    def local_position(self, position: int, page_tokens: int) -> int:
        """Place of a token in the shard of its page's owner, in tokens."""
        return self.row(position // page_tokens) * page_tokens + position % page_tokens

    def num_rows(self, num_pages: int) -> int:
        """Rows that every owner needs for a chain, padding included."""
        return -(-num_pages // self.num_owners)

    def num_owned(self, owner: int, num_pages: int, rotation: int = 0, first: int = 0) -> int:
        """How many of a chain's pages [first, first + num_pages) are one owner's."""
        skip = (owner - rotation - first) % self.num_owners
        return max(0, -(-(num_pages - skip) // self.num_owners))


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share of its group's pages.

    Attributes:
        owner: which owner this rank is, from 0.
    """

    ownership: Ownership = Ownership()
    owner: int = 0

    @property
    def num_owners(self) -> int:
        """Ranks among which pages are shared out."""
        return self.ownership.num_owners

    def owns(self, slot: int) -> bool:
        """Whether a host slot lies on this rank."""
        return slot % self.ownership.num_owners == self.owner

    def row(self, slot: int) -> int:
        """Row of one of this rank's slots in its pool."""
        return slot // self.ownership.num_owners


@dataclass(frozen=True, slots=True)
class PageBlocks:
    """Which device blocks of a request a page lies in."""

    ownership: Ownership
    page_tokens: int
    block_tokens: int

    def of(self, page: int, blocks: Sequence[BlockId], local: int = 0) -> tuple[tuple[BlockId, ...], int]:
        """Blocks of a page without those that hold the `local` leading tokens, and the first one's position.

        Where the engine shards requests, a block's number stands for a row of it on every owner.
        """
        if self.ownership.on_device:
            return (blocks[self.ownership.row(page)],), 0
        num_blocks = self.page_tokens // self.block_tokens
        start = page * num_blocks
        skip = max(0, local // self.block_tokens - start)
        return tuple(blocks[start + skip : start + num_blocks]), skip


def check_interleave(interleave_tokens: int, block_tokens: int) -> None:
    """Refuse an engine that shards its KV otherwise than block by block.

    Raises:
        UnsupportedEngineError: the interleave is not the block size; how to make it so.
    """
    if interleave_tokens != block_tokens:
        raise UnsupportedEngineError(
            f"cp_kv_cache_interleave_size={interleave_tokens} with blocks of {block_tokens} tokens: a page would lie "
            f"on several ranks, set --cp-kv-cache-interleave-size {block_tokens}"
            + (" and both it and --block-size to 64 or more" if block_tokens < 64 else "")
        )
