"""Gives every rank of a group the pages that one of them keeps.

Where the ranks of a group hold the same KV, host memory keeps each page once, on its owner. For a load, owners put
their pages on the device and all-gather them there: each rank reads 1/N of the bytes from host memory. Used by one
thread of the transfer engine, in the order in which plans ask for it, which is the same on every rank; a rank whose
own pages are not wanted, or not there, takes part all the same.

What a rank is sent it checks: first a header of every rank says which pages come next and what their digests are, and
pages behind the first one that its owner does not have are not sent at all.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from xxhash import xxh3_128, xxh3_128_digest

from vllm_hicache.errors import CollectiveError, InvariantError
from vllm_hicache.names import MissReason, OpId
from vllm_hicache.ownership import Shard
from vllm_hicache.plan import PageMove
from vllm_hicache.transfer.collective import Collective, Pending
from vllm_hicache.transfer.copier import Copier, Fence, Staging
from vllm_hicache.transfer.host import HostPool

MAX_ROWS = 32
"""Rows of one exchange: as many pages of every owner."""

_DIGEST_BYTES = 16
_SUBJECT = struct.Struct("<QII")
_ROW = struct.Struct(f"<?{_DIGEST_BYTES}s")
_UNCHECKED = bytes(_DIGEST_BYTES)
"""In place of a digest, on a device whose bytes are not looked at on their way."""

_Row = tuple[int | None, ...]
"""Pages that are gathered together, by owner: numbers within the batch."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive pages of a load that are exchanged together, at most `MAX_ROWS` of each owner.

    Attributes:
        first: number of the first one among the load's pages.
        wanted: for each page, whether it is good here if this rank is its owner, else whether it is still of use.
    """

    op: OpId
    first: int
    pages: tuple[PageMove, ...]
    wanted: tuple[bool, ...]
    fence: Fence


@dataclass(frozen=True, slots=True)
class Header:
    """What an owner says of a batch before its pages are sent.

    Attributes:
        digests: of its page in each row, `None` where it has none to give; at most `MAX_ROWS`.
    """

    op: int
    first: int
    num_pages: int
    digests: tuple[bytes | None, ...]

    @property
    def subject(self) -> str:
        """What is exchanged, in words."""
        return f"{self.num_pages} pages from page {self.first} of operation {self.op}"

    def pack(self) -> bytes:
        """As bytes, equally many for every header, with a digest of their own at the end."""
        padded = self.digests + (None,) * (MAX_ROWS - len(self.digests))
        rows = b"".join(_ROW.pack(digest is not None, digest or _UNCHECKED) for digest in padded)
        content = _SUBJECT.pack(self.op, self.first, self.num_pages) + rows
        return content + xxh3_128_digest(content)

    @classmethod
    def unpack(cls, packed: bytes) -> Header:
        """What was packed, with rows of padding.

        Raises:
            CollectiveError: it is damaged.
        """
        content, digest = packed[:-_DIGEST_BYTES], packed[-_DIGEST_BYTES:]
        if xxh3_128_digest(content) != digest:
            raise CollectiveError(
                f"a header of {len(packed)} bytes was damaged between ranks: look for faults of memory or network, "
                "restart the engine"
            )
        rows = _ROW.iter_unpack(content[_SUBJECT.size :])
        op, first, num_pages = _SUBJECT.unpack_from(content)
        return cls(op, first, num_pages, tuple(digest if there else None for there, digest in rows))


class PageExchange:
    """See the module.

    Args:
        headers: gathers in host memory.
        pages: gathers on the device; the same one where that is host memory.
    """

    def __init__(
        self, headers: Collective, pages: Collective, pool: HostPool, copier: Copier, device: torch.device
    ) -> None:
        self._headers = headers
        self._pages = pages
        self._pool = pool
        # One is filled and sent while the other is copied to its blocks.
        num_bytes = self.shard.num_owners * pool.slot_bytes
        # Memory that ranks share is shared for as long as its own tensor lives, whatever views there are.
        self._buffers = [pages.allocate(num_bytes, device) for _ in range(2)]
        self._stagings = [copier.make_staging(buffer.view(self.shard.num_owners, -1)) for buffer in self._buffers]
        self._is_checked = device.type == "cpu"
        self.is_broken = False

    @property
    def shard(self) -> Shard:
        """This rank's share."""
        return self._pool.shard

    @property
    def batch_pages(self) -> int:
        """Pages that may be exchanged together."""
        return MAX_ROWS * self.shard.num_owners

    def run(self, batch: Batch) -> list[MissReason | None]:
        """Bring a batch's pages to their device blocks on every rank; what became of each here.

        Raises:
            CollectiveError: ranks did not come together, or not for the same pages. Nothing is exchanged afterwards.
        """
        if self.is_broken:
            raise CollectiveError("pages are no longer exchanged between ranks, because an earlier exchange failed")
        try:
            return self._run(batch)
        except BaseException:
            self.is_broken = True
            raise

    def close(self) -> None:
        """End the threads of the collectives."""
        self._headers.close()
        if self._pages is not self._headers:
            self._pages.close()

    def _run(self, batch: Batch) -> list[MissReason | None]:
        rows = self._rows(batch)
        headers = self._agree(batch, rows)
        num_sent = _num_there(rows, headers, len(batch.pages))
        reasons: list[MissReason | None] = [None] * num_sent
        reasons += [MissReason.ABSENT] * (len(batch.pages) - num_sent)
        sent = _leading(rows, num_sent)
        for number, (staging, arrived) in enumerate(self._gather(batch, sent)):
            digests = [header.digests[number] for header in headers]
            for index in self._place(batch, sent[number], staging, arrived, digests):
                reasons[index] = MissReason.CORRUPT
        return reasons

    def _rows(self, batch: Batch) -> list[_Row]:
        num_owners = self.shard.num_owners
        rows = []
        for start in range(0, len(batch.pages), num_owners):
            row: list[int | None] = [None] * num_owners
            for index, page in enumerate(batch.pages[start : start + num_owners], start):
                owner = page.slot % num_owners
                if row[owner] is not None:
                    raise InvariantError(f"operation {batch.op}: owner {owner} has two of {num_owners} pages in a row")
                row[owner] = index
            rows.append(tuple(row))
        return rows

    def _agree(self, batch: Batch, rows: Sequence[_Row]) -> list[Header]:
        """Tell which own pages are there, and hear it of the others, by owner."""
        shard = self.shard
        digests = tuple(self._digest(batch, row[shard.owner]) for row in rows)
        own = Header(batch.op, batch.first, len(batch.pages), digests)
        packed = torch.frombuffer(bytearray(own.pack()), dtype=torch.uint8).repeat(shard.num_owners, 1)
        self._headers.start(packed).wait()
        headers = [Header.unpack(row.numpy().tobytes()) for row in packed]
        for owner, header in enumerate(headers):
            if header.subject != own.subject:
                raise CollectiveError(
                    f"owner {owner} exchanges {header.subject}, owner {shard.owner} {own.subject}: ranks have lost "
                    "step, restart the engine"
                )
        return headers

    def _digest(self, batch: Batch, index: int | None) -> bytes | None:
        """Digest of an own page, `None` where it is not there to be given."""
        if index is None or not batch.wanted[index]:
            return None
        if not self._is_checked:
            return _UNCHECKED
        hasher = xxh3_128()
        for region in self._pool.content(batch.pages[index].slot):
            hasher.update(region.numpy().data)
        return hasher.digest()

    def _gather(self, batch: Batch, rows: Sequence[_Row]) -> Iterator[tuple[Staging, Pending]]:
        """Every row in turn; the next one is on its way while a row is made use of."""
        started: deque[tuple[Staging, Pending]] = deque()
        for row, staging in zip(rows, cycle(self._stagings), strict=False):
            own = row[self.shard.owner]
            fill = partial(staging.fill, slot=batch.pages[own].slot) if own is not None else None
            started.append((staging, self._pages.start(staging.rows, fill)))
            if len(started) == len(self._stagings):
                yield started.popleft()
        yield from started

    def _place(
        self, batch: Batch, row: _Row, staging: Staging, arrived: Pending, digests: Sequence[bytes | None]
    ) -> list[int]:
        """A row to blocks where it is of use here; pages that did not arrive as they were sent."""
        damaged = []
        if self._is_checked:
            arrived.wait()
            damaged = [
                index
                for index, content, digest in zip(row, staging.rows, digests, strict=True)
                if index is not None and xxh3_128_digest(content.numpy().data) != digest
            ]
        moves = [
            batch.pages[index] if index is not None and batch.wanted[index] and index not in damaged else None
            for index in row
        ]
        staging.place(arrived, moves, batch.fence)
        return damaged


def _num_there(rows: Sequence[_Row], headers: Sequence[Header], num_pages: int) -> int:
    """Leading pages that their owners have."""
    missing = [
        index
        for number, row in enumerate(rows)
        for index, header in zip(row, headers, strict=True)
        if index is not None and header.digests[number] is None
    ]
    return min(missing, default=num_pages)


def _leading(rows: Sequence[_Row], num_pages: int) -> list[_Row]:
    """Rows of the first `num_pages` pages."""
    num_rows = -(-num_pages // len(rows[0])) if rows else 0
    return [
        tuple(index if index is not None and index < num_pages else None for index in row) for row in rows[:num_rows]
    ]
