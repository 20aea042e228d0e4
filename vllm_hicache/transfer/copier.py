"""Copies of pages between host slots and device blocks, behind one interface for every platform.

Used by the transfer engine's load and save threads. `fence` is called on the engine's own thread at the moment from
which a copy may touch device blocks; those threads pass it back with the copy.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from vllm_hicache.geometry import Part, RankGeometry
from vllm_hicache.names import Slot
from vllm_hicache.plan import PageMove
from vllm_hicache.transfer.collective import Pending
from vllm_hicache.transfer.device import DeviceCache, LayerRun
from vllm_hicache.transfer.host import Bytes, HostPool

Fence = torch.cuda.Event | None
"""What a copy has to wait for before it touches the device; `None` where the engine's thread is enough."""


class Copier(ABC):
    """Moves pages. Each call returns when the bytes are where they belong.

    Caller guarantees: the slots and blocks of a move belong to this operation until the call returns.

    Attributes:
        num_load_threads: threads that should call `load` at the same time; another one calls `save`.
    """

    num_load_threads = 1

    @abstractmethod
    def fence(self) -> Fence:
        """Mark the present in the engine's work: copies given this fence come after it."""

    @abstractmethod
    def load(self, moves: Sequence[PageMove], fence: Fence) -> None:
        """Host slots to device blocks."""

    @abstractmethod
    def save(self, moves: Sequence[PageMove], fence: Fence) -> None:
        """Device blocks to host slots."""

    @abstractmethod
    def make_staging(self, rows: torch.Tensor) -> Staging:
        """Room for pages that ranks give each other, in `rows`, uint8 [num_rows, slot_bytes] of device memory."""


class Staging(ABC):
    """Pages on their way between ranks, laid out as slots, on the device. Used by one thread.

    Attributes:
        rows: uint8 [num_rows, slot_bytes].
    """

    rows: torch.Tensor

    @abstractmethod
    def fill(self, row: torch.Tensor, slot: Slot) -> None:
        """Host slot to a row, in the order of the collective that sends it."""

    @abstractmethod
    def place(self, pending: Pending, moves: Sequence[PageMove | None], fence: Fence) -> None:
        """Rows, once gathered, to device blocks: one move a row, `None` for a row that nobody wants here."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """What of a part lies in one run of device layers: [heads] x [layers low, high) of the rank."""

    part: Part
    run: LayerRun
    low: int
    high: int


def _pieces(cache: DeviceCache, geometry: RankGeometry) -> list[_Piece]:
    pieces: list[_Piece] = []
    for part in geometry.parts:
        for run in cache.runs:
            bounds = cache.run_bounds(run, part.cell.role, part.first_layer, part.first_layer + part.num_layers)
            if bounds is not None:
                pieces.append(_Piece(part, run, *bounds))
    return pieces


class CpuCopier(Copier):
    """Plain strided copies with the interpreter lock released. The device is memory of this process.

    One core does not fill the memory bus: two copy half as fast again.
    """

    num_load_threads = 2

    def __init__(self, cache: DeviceCache, pool: HostPool, geometry: RankGeometry) -> None:
        self._pool = pool
        self._blocks_per_page = geometry.blocks_per_page
        self._pieces = _pieces(cache, geometry)
        self._views = self._views_of(pool.regions)

    def fence(self) -> Fence:
        """Nothing to wait for: the forward pass has returned when the engine's thread comes here."""
        return None

    def load(self, moves: Sequence[PageMove], fence: Fence) -> None:
        """Host slots to device blocks."""
        for move in moves:
            for host, device in _pairs(self._views, self._pool.row(move.slot), move):
                np.copyto(device, host)

    def save(self, moves: Sequence[PageMove], fence: Fence) -> None:
        """Device blocks to host slots."""
        for move in moves:
            for host, device in _pairs(self._views, self._pool.row(move.slot), move):
                np.copyto(host, device)

    def make_staging(self, rows: torch.Tensor) -> Staging:
        """Room for pages that ranks give each other."""
        return _CpuStaging(self._pool, rows, self._views_of(self._pool.by_region(rows)))

    def _views_of(self, regions: Sequence[torch.Tensor]) -> _Views:
        return [_views(piece, regions[piece.part.region], self._blocks_per_page) for piece in self._pieces]


_Views = list[tuple[Bytes, Bytes]]


class _CpuStaging(Staging):
    def __init__(self, pool: HostPool, rows: torch.Tensor, views: _Views) -> None:
        self.rows = rows
        self._pool = pool
        self._views = views

    def fill(self, row: torch.Tensor, slot: Slot) -> None:
        for target, source in zip(self._pool.by_region(row), self._pool.content(slot), strict=True):
            target.copy_(source)

    def place(self, pending: Pending, moves: Sequence[PageMove | None], fence: Fence) -> None:
        pending.wait()
        for index, move in enumerate(moves):
            if move is not None:
                for staged, device in _pairs(self._views, index, move):
                    np.copyto(device, staged)


def _pairs(views: _Views, row: int, move: PageMove) -> Iterator[tuple[Bytes, Bytes]]:
    """A page in a row, and in its device blocks, slab for slab."""
    for position, block in enumerate(move.blocks, start=move.first_block):
        for rows, blocks in views:
            yield rows[row, :, :, position], blocks[block]


def _views(piece: _Piece, rows: torch.Tensor, blocks_per_page: int) -> tuple[Bytes, Bytes]:
    """A piece in all rows [rows, heads, layers, blocks of a page, slab] and in all blocks of the device.

    Made once: with many small objects a page, cutting views out of the pool would take as long as the copies.
    """
    part, run = piece.part, piece.run
    flat = rows.numpy()[:, part.offset : part.offset + part.num_bytes]
    units = flat.reshape(len(flat), part.num_heads, part.num_layers, blocks_per_page, -1)
    device = run.view.numpy()[:, part.first_head : part.first_head + part.num_heads]
    return (
        units[:, :, piece.low - part.first_layer : piece.high - part.first_layer],
        device[:, :, piece.low - run.first_layer : piece.high - run.first_layer],
    )


class CudaCopier(Copier):
    """Copies on a stream of their own, ordered against the forward pass by events. Not measured.

    Slots are pinned. A load brings the slot to the device in one contiguous copy and scatters it there, a
    save gathers on the device first, because many small copies over the bus would each pay its latency.
    """

    def __init__(self, cache: DeviceCache, pool: HostPool, geometry: RankGeometry, device: torch.device) -> None:
        self._pool = pool
        self._blocks_per_page = geometry.blocks_per_page
        self._pieces = _pieces(cache, geometry)
        self._device = device
        self._slot_bytes = geometry.slot_bytes
        self._of_thread = threading.local()

    def fence(self) -> Fence:
        """An event on the stream of the forward pass."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def load(self, moves: Sequence[PageMove], fence: Fence) -> None:
        """Host slots to device blocks."""
        with self._on_stream(fence):
            for move in moves:
                self.bring(self._staging, move.slot)
                for staged, device in self._pairs(self._staging, move):
                    device.copy_(staged)

    def save(self, moves: Sequence[PageMove], fence: Fence) -> None:
        """Device blocks to host slots."""
        with self._on_stream(fence):
            for move in moves:
                for staged, device in self._pairs(self._staging, move):
                    staged.copy_(device)
                for target, source in self._regions(self._staging, move.slot):
                    target.copy_(source, non_blocking=True)

    def make_staging(self, rows: torch.Tensor) -> Staging:
        """Room for pages that ranks give each other."""
        return _CudaStaging(self, rows)

    def bring(self, row: torch.Tensor, slot: Slot) -> None:
        """Host slot to a row on the device, in the order of the current stream."""
        for source, target in self._regions(row, slot):
            target.copy_(source, non_blocking=True)

    def _regions(self, row: torch.Tensor, slot: Slot) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A slot and a row on the device, region for region."""
        return zip(self._pool.content(slot), self._pool.by_region(row), strict=True)

    def scatter(self, pending: Pending, rows: torch.Tensor, moves: Sequence[PageMove | None], fence: Fence) -> None:
        """Gathered rows to device blocks."""
        with self._on_stream(fence):
            pending.wait()
            for row, move in zip(rows, moves, strict=True):
                for staged, device in self._pairs(row, move) if move is not None else ():
                    device.copy_(staged)

    @property
    def _stream(self) -> torch.cuda.Stream:
        """The calling thread's stream: loads and saves must not wait for each other."""
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = torch.cuda.Stream(device=self._device)
        stream: torch.cuda.Stream = self._of_thread.stream
        return stream

    @property
    def _staging(self) -> torch.Tensor:
        """The calling thread's room for one page on the device."""
        if not hasattr(self._of_thread, "staging"):
            self._of_thread.staging = torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._device)
        staging: torch.Tensor = self._of_thread.staging
        return staging

    @contextmanager
    def _on_stream(self, fence: Fence) -> Iterator[None]:
        """Copies queued inside come after the fence, and have ended when the block is left, by an error too."""
        try:
            with torch.cuda.stream(self._stream):
                if fence is not None:
                    self._stream.wait_event(fence)
                yield
        finally:
            self._stream.synchronize()

    def _pairs(self, row: torch.Tensor, move: PageMove) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        regions = self._pool.by_region(row)
        for piece in self._pieces:
            part = piece.part
            flat = regions[part.region][part.offset : part.offset + part.num_bytes]
            units = flat.view(part.num_heads, part.num_layers, self._blocks_per_page, -1)
            heads = slice(part.first_head, part.first_head + part.num_heads)
            low = piece.low - piece.run.first_layer
            for position, block in enumerate(move.blocks, start=move.first_block):
                host = units[:, piece.low - part.first_layer : piece.high - part.first_layer, position]
                pairs.append((host, piece.run.view[block, heads, low : low + piece.high - piece.low]))
        return pairs


class _CudaStaging(Staging):
    def __init__(self, copier: CudaCopier, rows: torch.Tensor) -> None:
        self.rows = rows
        self._copier = copier

    def fill(self, row: torch.Tensor, slot: Slot) -> None:
        self._copier.bring(row, slot)

    def place(self, pending: Pending, moves: Sequence[PageMove | None], fence: Fence) -> None:
        self._copier.scatter(pending, self.rows, moves, fence)


def make_copier(cache: DeviceCache, pool: HostPool, geometry: RankGeometry) -> Copier:
    """The copier for the device the cache lies on."""
    device = cache.runs[0].view.device
    if device.type == "cuda":
        return CudaCopier(cache, pool, geometry, device)
    return CpuCopier(cache, pool, geometry)
