"""Two buffers in rotation, in which layers are gathered: one is attended to while the other is filled.

Owned by a `LayerGather`, used on its thread. Pages are cut from plain bytes, so that layers of any shape share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

Allocate = Callable[[int, torch.device], torch.Tensor]
"""Makes zeroed memory: bytes, device -> [bytes] uint8."""

_NUM_BUFFERS = 2


def zeroed(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Ordinary memory of the device."""
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


class Scratch:
    """Memory for two layers' pages and no more: a buffer grows to what is asked for, and never shrinks.

    What is in a page that nobody has written is a finite number of its dtype: attention multiplies it by 0.

    Args:
        allocate: for a collective that needs memory of its own kind.

    Attributes:
        peak_bytes: the most that both buffers ever held.
    """

    def __init__(self, device: torch.device, allocate: Allocate = zeroed) -> None:
        self._device = device
        self._allocate = allocate
        self._buffers: list[torch.Tensor | None] = [None] * _NUM_BUFFERS
        self._dtypes: list[torch.dtype | None] = [None] * _NUM_BUFFERS
        self.peak_bytes = 0

    @property
    def num_bytes(self) -> int:
        """What both buffers hold."""
        return sum(buffer.nbytes for buffer in self._buffers if buffer is not None)

    def take(self, turn: int, num_pages: int, page_shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Pages in the buffer whose turn it is, [num_pages, *page_shape] of `dtype`, with what was left in them.

        The caller has let go of what it took at this turn before: a buffer that is too small is freed before the new
        one is made.
        """
        place = turn % _NUM_BUFFERS
        num_bytes = num_pages * math.prod(page_shape) * dtype.itemsize
        buffer = self._buffers[place]
        if buffer is None or buffer.nbytes < num_bytes:
            self._buffers[place] = buffer = None
            self._buffers[place] = buffer = self._allocate(num_bytes, self._device)
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        elif self._dtypes[place] != dtype:
            buffer.zero_()
        self._dtypes[place] = dtype
        return buffer[:num_bytes].view(dtype).view(num_pages, *page_shape)
