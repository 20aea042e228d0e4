"""Gathers a batch's history layer by layer, one layer ahead of attention.

Owned by the rank's attention and used on its engine thread; pages are picked on the collective's thread. On a rank the
order is always: restore own pages, gather the layer, attend. A gather reads the caches no sooner than it is started;
with CUDA that order is the streams', kept by the collective.

    layer of attention      0          1          2
    buffer 0            gather 0 | attend  0 | gather 2 | attend 2
    buffer 1                     | gather  1 | attend 1 | gather 3
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_hicache.context_parallel.scratch import Scratch
from vllm_hicache.context_parallel.tables import ScratchTables
from vllm_hicache.errors import InvariantError
from vllm_hicache.transfer.collective import Collective, Pending


@dataclass(slots=True)
class GatherFigures:
    """What gathers have cost so far.

    Attributes:
        num_gathers: layers gathered; those of a batch without history are not counted.
        num_bytes: received from other ranks.
        exposed_s: seconds that attention waited.
    """

    num_gathers: int = 0
    num_bytes: int = 0
    exposed_s: float = 0.0


@dataclass(slots=True)
class _Layer:
    index: int
    pages: torch.Tensor
    pending: Pending | None


class LayerGather:
    """A batch's layers in scratch: `begin`, then for each layer `wait`, write this step's tokens, `ahead`, attend.

    All ranks make the same calls with equal tables, so that their collective calls match. A batch without history
    makes none.

    Attributes:
        scratch: its two buffers.
        figures: sums over all batches.
    """

    def __init__(self, collective: Collective, scratch: Scratch) -> None:
        self._collective = collective
        self.scratch = scratch
        self._caches: Sequence[torch.Tensor] = ()
        self._tables: ScratchTables | None = None
        self._layers: list[_Layer | None] = [None, None]
        self.figures = GatherFigures()

    def begin(self, caches: Sequence[torch.Tensor], tables: ScratchTables) -> None:
        """Start the first layer of a batch. What an aborted batch has left pending ends first.

        Args:
            caches: this rank's cache of each layer, [num_blocks, *page], in the order in which layers attend.

        Raises:
            CollectiveError: what was left pending failed.
        """
        for layer in self._layers:
            if layer is not None:
                self._finish(layer)
        self._caches, self._tables = caches, tables
        self._layers = [None, None]
        if caches:
            self._start(0, tables)

    def wait(self, index: int) -> torch.Tensor:
        """A layer's scratch with the history in it, [num_pages, *page]; valid until the next but one layer starts.

        May be called again for the same layer.

        Raises:
            CollectiveError: a rank did not come.
            InvariantError: the layer was not started, or its buffer is another layer's by now.
        """
        layer = self._begun(index)
        self._finish(layer)
        return layer.pages

    def ahead(self, index: int) -> None:
        """Start the layer after this one, into the buffer of the one before, whose attention has ended.

        A second call for the same layer does nothing, nor does one for the last layer.

        Raises:
            InvariantError: this layer was not waited for.
        """
        after, tables = index + 1, self._tables
        if self._begun(index).pending is not None:
            raise InvariantError(f"layer {after} was to be gathered before layer {index} was waited for")
        if tables is not None and after < len(self._caches) and self._find(after) is None:
            self._start(after, tables)

    def _find(self, index: int) -> _Layer | None:
        layer = self._layers[index % 2]
        return layer if layer is not None and layer.index == index else None

    def _begun(self, index: int) -> _Layer:
        layer = self._find(index)
        if layer is None:
            begun = [layer.index for layer in self._layers if layer is not None]
            raise InvariantError(
                f"layer {index} of {len(self._caches)} is not in the scratch, layers {begun} are: begin, wait and "
                "ahead must follow the order of the layers"
            )
        return layer

    def _start(self, index: int, tables: ScratchTables) -> None:
        cache, history = self._caches[index], tables.history
        self._layers[index % 2] = None  # lets go of the buffer, which may have to grow
        pages = self.scratch.take(index, tables.num_pages, cache.shape[1:], cache.dtype)
        pending = None
        if tables.num_history:
            rows = pages[: tables.num_owners * tables.num_history].unflatten(0, (tables.num_owners, -1))
            pending = self._collective.start(rows, lambda row: _pick(cache, history, row))
            self.figures.num_gathers += 1
            self.figures.num_bytes += rows.nbytes - rows[0].nbytes
        self._layers[index % 2] = _Layer(index, pages, pending)

    def _finish(self, layer: _Layer) -> None:
        pending, layer.pending = layer.pending, None
        if pending is None:
            return
        start = time.perf_counter()
        try:
            pending.wait()
        finally:
            self.figures.exposed_s += time.perf_counter() - start


def _pick(cache: torch.Tensor, blocks: torch.Tensor, row: torch.Tensor) -> None:
    torch.index_select(cache, 0, blocks, out=row)
