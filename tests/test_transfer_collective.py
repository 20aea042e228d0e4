"""All-gathers over gloo, between real processes: exact bytes in place, order, and an end to every failure."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from gloo_kit import RankFailure, World, run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed

from vllm_hicache.errors import CollectiveError
from vllm_hicache.transfer.collective import GlooCollective, Pending, new_group

PATIENCE_S = 30.0
POISON = 0xA5
GUARD_BYTES = 24


@pytest.fixture(scope="module")
def worlds() -> Iterator[Callable[[int], World]]:
    """Worlds of so many ranks, kept for the whole module; not for functions that break a rank."""
    made: dict[int, World] = {}

    def world(num_ranks: int) -> World:
        if num_ranks not in made:
            made[num_ranks] = World(num_ranks)
        return made[num_ranks]

    yield world
    for one in made.values():
        one.close()


@pytest.fixture
def alone() -> Iterator[GlooCollective]:
    """A rank without others, with a short limit."""
    collective = GlooCollective(None, 0.05)
    yield collective
    collective.close()


def row_bytes(rank: int, seed: int, num_bytes: int) -> bytes:
    """What a rank sends."""
    return np.random.default_rng([rank, seed]).bytes(num_bytes)


def all_rows(num_ranks: int, seed: int, num_bytes: int) -> bytes:
    return b"".join(row_bytes(rank, seed, num_bytes) for rank in range(num_ranks))


def poisoned(num_ranks: int, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned memory, and rows cut from its middle."""
    num_bytes = num_ranks * int(np.prod(shape)) * dtype.itemsize
    memory = torch.full((num_bytes + 2 * GUARD_BYTES,), POISON, dtype=torch.uint8)
    return memory, memory[GUARD_BYTES : GUARD_BYTES + num_bytes].view(dtype).view(num_ranks, *shape)


def write(row: torch.Tensor, content: bytes) -> None:
    row.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(content or b"-"), dtype=torch.uint8)[: row.nbytes])


def content(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def collective(limit_s: float = PATIENCE_S) -> GlooCollective:
    """Of all ranks; the group itself has more patience."""
    return GlooCollective(new_group(range(distributed.get_world_size()), limit_s + PATIENCE_S), limit_s)


def outcome(pending: Pending) -> str | None:
    """The sentence of a gather's failure; None if it did not fail."""
    try:
        pending.wait()
    except CollectiveError as error:
        return str(error)
    return None


def gather(rank: int, shape: Sequence[int], dtype: torch.dtype, by_fill: bool) -> bytes:
    """The memory after one gather, guards included."""
    gloo = collective()
    memory, rows = poisoned(gloo.size, shape, dtype)
    own = row_bytes(rank, 0, rows[0].nbytes)
    if not by_fill:
        write(rows[rank], own)
    gloo.start(rows, (lambda row: write(row, own)) if by_fill else None).wait()
    gloo.close()
    return content(memory)


@pytest.mark.parametrize("by_fill", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((), torch.uint8),
        ((7, 11), torch.uint8),
        ((3, 1, 5), torch.bfloat16),
        ((129,), torch.float8_e4m3fn),
        ((33,), torch.bool),
        ((0,), torch.uint8),
        ((4, 0), torch.bfloat16),
        ((3_000_001,), torch.uint8),
    ],
)
def test_every_rank_has_every_row_and_nothing_beside_the_rows_is_touched(
    worlds: Callable[[int], World], num_ranks: int, shape: Sequence[int], dtype: torch.dtype, by_fill: bool
) -> None:
    guard = bytes([POISON]) * GUARD_BYTES
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    expected = guard + all_rows(num_ranks, 0, num_bytes) + guard
    assert worlds(num_ranks).run(gather, shape, dtype, by_fill) == [expected] * num_ranks


def gather_all(rank: int, sizes: Sequence[int], waits: Sequence[int]) -> list[bytes]:
    """Start all, wait in another order."""
    gloo = collective()
    buffers = [poisoned(gloo.size, (size,), torch.uint8)[1] for size in sizes]
    pending = [
        gloo.start(rows, lambda row, seed=seed: write(row, row_bytes(rank, seed, len(row))))
        for seed, rows in enumerate(buffers)
    ]
    for index in waits:
        pending[index].wait()
    gloo.close()
    return [content(rows) for rows in buffers]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 63, 4096, 100_003]), min_size=1, max_size=5), st.randoms())
def test_gathers_may_be_pending_together_and_be_waited_for_in_any_order(
    worlds: Callable[[int], World], sizes: list[int], random: Any
) -> None:
    waits = list(range(len(sizes)))
    random.shuffle(waits)
    expected = [all_rows(2, seed, size) for seed, size in enumerate(sizes)]
    assert worlds(2).run(gather_all, sizes, waits) == [expected, expected]


def gather_again(rank: int) -> list[bytes]:
    gloo = collective()
    _, rows = poisoned(gloo.size, (1000,), torch.uint8)
    seen = []
    for seed in range(20):
        gloo.start(rows, lambda row, seed=seed: write(row, row_bytes(rank, seed, len(row)))).wait()
        seen.append(content(rows))
    gloo.close()
    return seen


def test_a_buffer_can_be_gathered_into_again_and_again(worlds: Callable[[int], World]) -> None:
    expected = [all_rows(4, seed, 1000) for seed in range(20)]
    assert worlds(4).run(gather_again) == [expected] * 4


def gather_beside(rank: int) -> tuple[bytes, bytes]:
    """Gathers in groups of two while the engine's own world sums numbers."""
    pairs = [(0, 1), (2, 3)]
    mine = pairs[rank // 2]
    gloo = GlooCollective(new_group(mine, PATIENCE_S), PATIENCE_S)
    _, rows = poisoned(2, (200_000,), torch.uint8)
    sums = torch.zeros(50, dtype=torch.int64)
    for step in range(len(sums)):
        pending = gloo.start(rows, lambda row: write(row, row_bytes(rank, 0, len(row))))
        sums[step] = rank
        distributed.all_reduce(sums[step])
        pending.wait()
    gloo.close()
    return content(rows), content(sums)


def test_groups_of_some_ranks_gather_beside_the_worlds_own_calls(worlds: Callable[[int], World]) -> None:
    answers = worlds(4).run(gather_beside)
    for rank, (rows, sums) in enumerate(answers):
        pair = (rank // 2) * 2
        assert rows == row_bytes(pair, 0, 200_000) + row_bytes(pair + 1, 0, 200_000)
        assert sums == content(torch.full((50,), 6, dtype=torch.int64))


def count(rank: int) -> tuple[int, bool]:
    gloo = collective()
    rows = torch.zeros(gloo.size, 10, dtype=torch.bfloat16)
    for _ in range(3):
        gloo.start(rows).wait()
    gloo.close()
    return gloo.num_bytes, gloo.gather_s > 0 and gloo.wait_s > 0


def test_bytes_from_others_are_counted_and_seconds_add_up(worlds: Callable[[int], World]) -> None:
    assert worlds(4).run(count) == [(3 * 3 * 20, True)] * 4


def stay_away(rank: int, absent: int, limit_s: float) -> tuple[list[str | None], list[str]]:
    """Sentences of one gather and of two started after it; which rows were filled."""
    gloo = collective(limit_s)
    if rank == absent:
        return [], []
    filled: list[str] = []
    sentences = []
    for name in ("first", "second", "third"):
        rows = torch.zeros(gloo.size, 100, dtype=torch.bfloat16)
        sentences.append(outcome(gloo.start(rows, lambda _, name=name: filled.append(name))))
    gloo.close()
    return sentences, filled


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_that_does_not_come_ends_the_gather_on_the_others_and_breaks_it_for_good(num_ranks: int) -> None:
    answers = run_ranks(num_ranks, stay_away, 1, 0.5)
    for rank in {*range(num_ranks)} - {1}:
        (first, *later), filled = answers[rank]
        assert later == [first, first]
        assert filled == ["first"]
        assert "its thread does not come back" not in first
        for part in (f"rank {rank} of {num_ranks}", "200 bytes a rank after ", "raise the limit of 0.5 s"):
            assert part in first


def gather_longer_rows(rank: int) -> str | None:
    gloo = collective(limit_s=0.5)
    return outcome(gloo.start(torch.zeros(2, 10 + rank)))


def test_rows_of_different_sizes_are_an_error_on_both_ranks_and_the_end_of_neither() -> None:
    first, second = run_ranks(2, gather_longer_rows)
    assert "rank 0 of 2: no gather of 40 bytes a rank" in first
    assert "rank 1 of 2: no gather of 44 bytes a rank" in second


def fail_to_fill(rank: int) -> list[str | None]:
    gloo = collective(limit_s=10 * PATIENCE_S)
    pending = gloo.start(torch.zeros(gloo.size, 8), refuse if rank == 2 else None)
    return [outcome(pending), outcome(gloo.start(torch.zeros(gloo.size, 8)))]


def refuse(row: torch.Tensor) -> None:
    raise KeyError("no such page")


def test_a_fill_that_raises_ends_the_gather_everywhere_long_before_the_limit() -> None:
    answers = run_ranks(4, fail_to_fill, timeout_s=PATIENCE_S)
    assert "KeyError: 'no such page'" in answers[2][0]
    assert all(first is not None and first == later for first, later in answers)


def fail_in_a_group_of_one(rank: int) -> list[str | None]:
    gloo = collective()
    return [outcome(gloo.start(torch.zeros(1, 8), fill)) for fill in (None, refuse, None)]


def test_a_group_of_one_gathers_and_fails_as_a_rank_alone() -> None:
    ((good, bad, later),) = run_ranks(1, fail_in_a_group_of_one)
    assert good is None
    assert "KeyError: 'no such page'" in bad
    assert later == bad


def ask_for_group(rank: int, ranks: Sequence[int], comes: bool) -> str:
    if not comes and rank == 1:
        return "away"
    try:
        group = new_group(ranks, 0.5)
    except (CollectiveError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return f"rank {group.rank()} of {group.size()}"


def test_a_group_without_one_of_its_members_is_an_error_within_the_limit() -> None:
    first, second = run_ranks(2, ask_for_group, [0, 1], False)
    assert first.startswith("CollectiveError: no group of ranks [0, 1] after ")
    assert first.endswith("raise the limit of 0.5 s")
    assert second == "away"


def test_a_group_counts_its_own_ranks_and_refuses_others() -> None:
    answers = run_ranks(3, ask_for_group, [0, 2], True)
    assert answers[0::2] == ["rank 0 of 2", "rank 1 of 2"]
    assert answers[1].startswith("ValueError: rank 1 is none of [0, 2]")


def pin_and_gather(rank: int) -> list[set[int]]:
    """CPUs of the threads that a collective brings with it, made by a thread that is pinned to one."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    before = set(os.listdir("/proc/self/task"))
    gloo = collective()
    gloo.start(torch.zeros(gloo.size, 8)).wait()
    new = set(os.listdir("/proc/self/task")) - before
    names = {task: Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in new}
    cpus = [os.sched_getaffinity(int(task)) for task in new if names[task] == "gloo_tcp_loop"]
    return [*cpus, os.sched_getaffinity(gloo._thread.native_id or 0)]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: there is nowhere else to run")
def test_threads_of_a_pinned_worker_run_beside_it() -> None:
    everywhere = os.sched_getaffinity(0)
    assert run_ranks(2, pin_and_gather) == [[everywhere] * 2] * 2


def test_fills_run_in_the_order_of_start_on_one_thread_that_is_not_the_callers(alone: GlooCollective) -> None:
    order: list[tuple[int, int]] = []
    pending = [
        alone.start(torch.zeros(1, 4), lambda _, number=number: order.append((number, threading.get_ident())))
        for number in range(20)
    ]
    for one in reversed(pending):
        one.wait()
    assert [number for number, _ in order] == list(range(20))
    assert len({thread for _, thread in order} | {threading.get_ident()}) == 2


def test_a_rank_alone_fills_its_row_and_receives_nothing(alone: GlooCollective) -> None:
    _, rows = poisoned(1, (3, 5), torch.bfloat16)
    alone.start(rows, lambda row: write(row, row_bytes(0, 0, 30))).wait()
    assert content(rows) == row_bytes(0, 0, 30)
    assert alone.num_bytes == 0


def test_a_fill_gets_this_ranks_row_as_it_is(alone: GlooCollective) -> None:
    seen: list[torch.Tensor] = []
    rows = torch.zeros(1, 3, 5, dtype=torch.bfloat16)
    alone.start(rows, seen.append).wait()
    assert (seen[0].shape, seen[0].dtype, seen[0].data_ptr()) == ((3, 5), torch.bfloat16, rows.data_ptr())


def test_waiting_again_tells_the_same(alone: GlooCollective) -> None:
    good, bad = alone.start(torch.zeros(1, 4)), alone.start(torch.zeros(1, 4), refuse)
    sentences = [outcome(bad), outcome(bad)]
    assert sentences[0] is not None
    assert sentences[0] == sentences[1]
    assert [outcome(good), outcome(good)] == [None, None]


class Gate:
    """A fill that waits until it is opened, and then fails if it is told to."""

    error: Exception | None = None

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, row: torch.Tensor) -> None:
        self.entered.set()
        assert self.opened.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error


def blocked(collective: GlooCollective) -> tuple[Gate, Pending]:
    """A collective whose thread is in a fill."""
    gate = Gate()
    pending = collective.start(torch.zeros(1, 4), gate)
    assert gate.entered.wait(PATIENCE_S)
    return gate, pending


def test_a_fill_that_does_not_return_ends_with_an_error_for_the_caller(alone: GlooCollective) -> None:
    gate, pending = blocked(alone)
    sentence = outcome(pending)
    assert sentence is not None
    assert "16 bytes a rank after 1.1 s (its thread does not come back)" in sentence
    gate.opened.set()


def test_a_broken_collective_ends_gathers_at_once_with_its_first_failure(alone: GlooCollective) -> None:
    gate, pending = blocked(alone)
    first = outcome(pending)
    later = cast(Any, alone.start(torch.zeros(1, 4)))
    assert later.ended.is_set()
    gate.error = ValueError("another failure")
    gate.opened.set()
    alone.close()
    assert {outcome(later), outcome(pending), outcome(alone.start(torch.zeros(1, 4)))} == {first}


def test_a_gathers_time_begins_when_those_before_it_have_ended() -> None:
    alone = GlooCollective(None, 100.0)
    gate, first = blocked(alone)
    limits = [cast(Any, one).limit_s for one in (first, *(alone.start(torch.zeros(1, 4)) for _ in range(2)))]
    gate.opened.set()
    assert [after - before for before, after in pairwise(limits)] == [100.0, 100.0]
    alone.close()


def test_a_gather_that_has_ended_takes_no_time_from_later_ones() -> None:
    alone = GlooCollective(None, 100.0)
    limits = []
    for _ in range(3):
        pending = alone.start(torch.zeros(1, 4))
        pending.wait()
        limits.append(cast(Any, pending).limit_s)
    assert len(set(limits)) == 1
    alone.close()


def test_close_ends_the_thread_and_may_be_called_twice(alone: GlooCollective) -> None:
    alone.start(torch.zeros(1, 4)).wait()
    alone.close()
    alone.close()
    assert not alone._thread.is_alive()


def test_a_closed_collective_fills_nothing_and_says_so(alone: GlooCollective) -> None:
    filled: list[torch.Tensor] = []
    alone.close()
    sentence = outcome(alone.start(torch.zeros(1, 4), filled.append))
    assert sentence is not None
    assert "rank 0 of 1: closed with 0 gathers open" in sentence
    assert filled == []


def test_what_is_pending_at_close_ends_with_an_error() -> None:
    alone = GlooCollective(None, PATIENCE_S)
    filled: list[torch.Tensor] = []
    gate, _ = blocked(alone)
    later = alone.start(torch.zeros(1, 4), filled.append)
    closer = threading.Thread(target=alone.close)
    closer.start()
    deadline = time.monotonic() + PATIENCE_S
    while alone._failure is None and time.monotonic() < deadline:
        closer.join(0.01)
    gate.opened.set()
    closer.join(PATIENCE_S)
    assert "closed with 2 gathers open" in (outcome(later) or "")
    assert filled == []


@pytest.mark.parametrize(
    "rows", [torch.zeros(2, 4), torch.zeros(()), torch.zeros(0, 4), torch.zeros(1, 8, 2).transpose(1, 2)]
)
def test_rows_that_cannot_be_gathered_in_place_are_refused(alone: GlooCollective, rows: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"rows of shape .* for 1 ranks: they must be contiguous, \[1, \.\.\.\]"):
        alone.start(rows)


def misbehave(rank: int, how: str) -> int:
    if rank == 1 and how == "raises":
        raise LookupError("found nothing")
    if rank == 1 and how == "dies":
        os._exit(3)
    if rank == 1 and how == "hangs":
        threading.Event().wait(PATIENCE_S)
    return rank


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raises", "rank 1 raised\n(?s:.*)LookupError: found nothing"),
        ("dies", "rank 1 died, exit code 3"),
        ("hangs", r"ranks \[.*1\] were not done in time"),
    ],
)
def test_a_world_tells_which_rank_failed_and_leaves_no_process(how: str, told: str) -> None:
    world = World(2)
    assert world.run(misbehave, "nothing") == [0, 1]
    with pytest.raises(RankFailure, match=told):
        world.run(misbehave, how, timeout_s=1 if how == "hangs" else PATIENCE_S)
    assert not any(process.is_alive() for process in world._processes)
