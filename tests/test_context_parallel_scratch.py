"""The scratch: two buffers that do not touch each other, as large as they must be, never a third."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from vllm_hicache.context_parallel.scratch import Scratch

CPU = torch.device("cpu")
PAGE = torch.Size([2, 3])
PAGE_BYTES = 2 * 3 * 4


@pytest.fixture
def scratch() -> Scratch:
    return Scratch(CPU)


def take(scratch: Scratch, turn: int, num_pages: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return scratch.take(turn, num_pages, PAGE, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn])
def test_pages_have_the_shape_and_dtype_that_were_asked_for(scratch: Scratch, dtype: torch.dtype) -> None:
    pages = take(scratch, 0, 5, dtype)
    assert (pages.shape, pages.dtype, pages.is_contiguous()) == ((5, 2, 3), dtype, True)


def test_turns_alternate_between_two_buffers(scratch: Scratch) -> None:
    for turn in range(4):
        take(scratch, turn, 5).fill_(turn)
    assert take(scratch, 0, 5).eq(2).all()
    assert take(scratch, 1, 5).eq(3).all()


def test_a_smaller_batch_keeps_the_memory(scratch: Scratch) -> None:
    take(scratch, 0, 5).fill_(7)
    assert take(scratch, 0, 2).eq(7).all()
    assert scratch.num_bytes == 5 * PAGE_BYTES


def test_memory_is_that_of_the_two_largest_layers_exactly(scratch: Scratch) -> None:
    for num_pages in (3, 8, 5):
        for turn in range(5):
            take(scratch, turn, num_pages)
    assert scratch.num_bytes == scratch.peak_bytes == 2 * 8 * PAGE_BYTES


class Watched:
    """Memory of which it is known whether it was freed."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[np.ndarray]] = []
        self.alive: list[int] = []

    def __call__(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        self.alive.append(sum(memory() is not None for memory in self.made))
        memory = np.zeros(num_bytes, dtype=np.uint8)
        self.made.append(weakref.ref(memory))
        return torch.from_numpy(memory)


def test_a_buffer_that_grows_is_freed_before_the_new_one_is_made() -> None:
    watched = Watched()
    scratch = Scratch(CPU, watched)
    for num_pages in (1, 4, 9):
        take(scratch, 0, num_pages)
    assert watched.alive == [0, 0, 0]


def test_peak_bytes_do_not_count_a_buffer_that_was_replaced(scratch: Scratch) -> None:
    for num_pages in (4, 9):
        take(scratch, 0, num_pages)
    assert scratch.peak_bytes == 9 * PAGE_BYTES


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """What torch allocates without a value is filled with ones."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned_memory")
def test_a_page_that_was_never_written_is_zero(scratch: Scratch) -> None:
    assert torch.empty(3, dtype=torch.uint8).all()
    assert not take(scratch, 0, 20).any()


def test_bytes_of_another_dtype_are_not_read_as_numbers(scratch: Scratch) -> None:
    take(scratch, 0, 3).view(torch.int32).fill_(-1)
    assert not take(scratch, 0, 6, torch.bfloat16).isnan().any()


def test_no_pages_take_no_memory(scratch: Scratch) -> None:
    assert take(scratch, 0, 0).shape == (0, 2, 3)
    assert scratch.num_bytes == 0
