"""The order of gathers on CUDA streams, proved on simulated devices whose streams run in every order that events allow.

A simulated stream runs nothing when it is given work: `Machine.run` then takes the streams' heads in a random order, as
a device may. What is copied too early or overwritten too soon is seen in the bytes.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ProcessGroup

from vllm_hicache.errors import CollectiveError, UnsupportedEngineError
from vllm_hicache.transfer.collective import Pending
from vllm_hicache.transfer.collective_cuda import (
    CudaCollective,
    Event,
    NcclCollective,
    SharedMemory,
    Stream,
    SymmetricCollective,
    TorchCuda,
    make_cuda_collective,
)

POISON = 0xA5
NUM_LAYERS = 5
DEVICE = torch.device("cpu")

Work = Callable[[], object]


@dataclass
class FakeEvent:
    passed: bool = False

    def ready(self) -> bool:
        return self.passed


@dataclass
class Meeting:
    """What all ranks must come to before any goes on."""

    num_ranks: int
    arrived: int = 0
    offered: dict[int, torch.Tensor] = field(default_factory=dict)

    def ready(self) -> bool:
        return self.arrived == self.num_ranks


@dataclass
class FakeStream:
    """Work in its order: something to wait for, and what then happens."""

    queue: deque[tuple[FakeEvent | Meeting | None, Work]] = field(default_factory=deque)
    met: set[int] = field(default_factory=set)

    def work(self, work: Work, after: FakeEvent | Meeting | None = None) -> None:
        self.queue.append((after, work))

    def record_event(self) -> FakeEvent:
        event = FakeEvent()
        self.work(lambda: setattr(event, "passed", True))
        return event

    def wait_event(self, event: Event) -> None:
        self.work(lambda: None, after=cast(FakeEvent, event))

    def step(self) -> bool:
        """Do what is next, if it may be done."""
        if not self.queue:
            return False
        after, work = self.queue[0]
        if isinstance(after, Meeting) and id(after) not in self.met:
            self.met.add(id(after))
            after.arrived += 1
            return True
        if after is not None and not after.ready():
            return False
        self.queue.popleft()
        work()
        return True


class Machine:
    """Simulated devices, one a rank, that share memory and meetings."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.meetings: list[Meeting] = []
        self.memories: list[list[torch.Tensor]] = []
        self.ranks = [FakeCuda(self, rank) for rank in range(num_ranks)]

    def run(self, seed: int) -> None:
        """Run all streams to their end, in one of the orders that events allow."""
        choice = random.Random(seed)
        streams = [stream for rank in self.ranks for stream in rank.streams]
        while any(stream.queue for stream in streams):
            choice.shuffle(streams)
            assert any(stream.step() for stream in streams), "streams wait for each other"


class FakeCuda:
    """One rank's simulated device, in place of `TorchCuda`.

    Attributes:
        calls: what it was asked to queue, in order.
    """

    def __init__(self, machine: Machine, rank: int) -> None:
        self.calls: list[str] = []
        self.streams = [FakeStream()]
        self.others_agree = True
        self.can_allocate = True
        self.can_share = True
        self.shared: list[weakref.ref[object]] = []
        self._machine, self._rank = machine, rank
        self._current = self.streams[0]
        self._num_met = 0
        self._num_allocated = 0

    @property
    def group(self) -> ProcessGroup:
        machine, rank = self._machine, self._rank
        return cast(ProcessGroup, SimpleNamespace(rank=lambda: rank, size=lambda: machine.num_ranks))

    def new_stream(self) -> Stream:
        self.streams.append(FakeStream())
        return self.streams[-1]

    def current_stream(self) -> FakeStream:
        return self._current

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, cast(FakeStream, stream)
        yield
        self._current = before

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.calls.append("copy")
        self._current.work(lambda: target.copy_(source))

    def all_gather(self, rows: torch.Tensor, rank: int, group: ProcessGroup) -> None:
        """Rows are read when all ranks have come, and written before any goes on."""
        self.calls.append("all_gather")
        meeting = self._meeting()
        meeting.offered[rank] = rows[rank]
        self._current.work(
            lambda: rows.copy_(torch.stack([meeting.offered[one] for one in sorted(meeting.offered)])), after=meeting
        )
        self._current.work(lambda: None, after=self._meeting())

    def all_agree(self, mine: bool, group: ProcessGroup) -> bool:
        self.calls.append("vote")
        return mine and self.others_agree

    def zeros(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def shareable_zeros(self, num_bytes: int) -> torch.Tensor:
        """Rank n's k-th memory is made with the k-th of whichever rank asks first."""
        if not self.can_allocate:
            raise RuntimeError("SymmetricMemory does not support device type cuda")
        memories = self._machine.memories
        if self._num_allocated == len(memories):
            memories.append([self.zeros(num_bytes) for _ in range(self._machine.num_ranks)])
        self._num_allocated += 1
        return memories[self._num_allocated - 1][self._rank].view(-1)

    def share(self, memory: torch.Tensor, group: ProcessGroup) -> SharedMemory:
        self.calls.append("share")
        if not self.can_share:
            raise RuntimeError("rendezvous failed")
        ranks = self._machine.memories[self._num_allocated - 1]

        def barrier() -> None:
            self.calls.append("barrier")
            self._current.work(lambda: None, after=self._meeting())

        self.shared.append(weakref.ref(barrier))
        return SharedMemory({rank: ranks[rank] for rank in range(len(ranks)) if rank != self._rank}, barrier)

    def _meeting(self) -> Meeting:
        """This rank's next meeting with the others."""
        meetings = self._machine.meetings
        if self._num_met == len(meetings):
            meetings.append(Meeting(self._machine.num_ranks))
        self._num_met += 1
        return meetings[self._num_met - 1]


class Pass:
    """A forward pass of one rank over two buffers, as a gather a layer ahead of attention makes it."""

    def __init__(self, cuda: FakeCuda, kind: type[CudaCollective], row_bytes: int) -> None:
        self.collective = kind(cuda.group, cuda)  # type: ignore[call-arg, arg-type]
        self.seen: list[bytes] = []
        self._cuda = cuda
        self._restoring = cast(FakeStream, cuda.new_stream())
        self._num_bytes = self.collective.size * row_bytes
        lead = 3
        self.memory = [self.collective.allocate(lead + self._num_bytes, DEVICE) for _ in range(2)]
        self._rows = [memory[lead:].view(self.collective.size, row_bytes) for memory in self.memory]

    def run(self, fills: bool = True) -> None:
        """Queue all of it."""
        pending = self._start(0, fills)
        for layer in range(NUM_LAYERS):
            pending.wait()
            if layer + 1 < NUM_LAYERS:
                pending = self._start(layer + 1, fills)
            rows = self._rows[layer % 2]
            self._cuda.current_stream().work(lambda rows=rows: self.seen.append(rows.numpy().tobytes()))

    def _start(self, layer: int, fills: bool) -> Pending:
        """The layer is restored on a stream of its own, which the current stream waits for."""
        row_bytes = self._num_bytes // self.collective.size
        cache = torch.full((row_bytes,), POISON, dtype=torch.uint8)
        own = row_of(self.collective.rank, layer, row_bytes)
        self._restoring.work(lambda: cache.copy_(own))
        self._cuda.current_stream().wait_event(self._restoring.record_event())

        def fill(row: torch.Tensor) -> None:
            self._cuda.calls.append("fill")
            self._cuda.current_stream().work(lambda: row.copy_(cache))

        return self.collective.start(self._rows[layer % 2], fill if fills else None)


def row_of(rank: int, layer: int, row_bytes: int) -> torch.Tensor:
    return torch.full((row_bytes,), 16 * rank + layer, dtype=torch.uint8)


def expected(num_ranks: int, row_bytes: int) -> list[bytes]:
    """What attention must have seen, layer by layer."""
    layers = range(NUM_LAYERS)
    return [b"".join(bytes(row_of(rank, layer, row_bytes)) for rank in range(num_ranks)) for layer in layers]


KINDS = pytest.mark.parametrize("kind", [NcclCollective, SymmetricCollective])


@KINDS
@pytest.mark.parametrize("num_ranks", [2, 3])
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_attention_sees_each_layer_whole_in_whatever_order_streams_run(
    kind: type[CudaCollective], num_ranks: int, seed: int
) -> None:
    machine = Machine(num_ranks)
    passes = [Pass(cuda, kind, row_bytes=2) for cuda in machine.ranks]
    for one in passes:
        one.run()
    machine.run(seed)
    assert [one.seen for one in passes] == [expected(num_ranks, 2)] * num_ranks


@KINDS
def test_every_rank_queues_the_same_calls_whatever_its_row_holds(kind: type[CudaCollective]) -> None:
    machine = Machine(3)
    passes = [Pass(cuda, kind, row_bytes=4) for cuda in machine.ranks]
    for rank, one in enumerate(passes):
        one.run(fills=rank == 0)
    machine.run(0)
    calls = [[call for call in cuda.calls if call != "fill"] for cuda in machine.ranks]
    assert calls[1] == calls[2] == calls[0]
    assert machine.ranks[1].calls == calls[1]


@pytest.mark.parametrize(
    ("kind", "calls"),
    [(NcclCollective, ["fill", "all_gather"]), (SymmetricCollective, ["fill", "barrier", "copy", "copy", "barrier"])],
)
def test_a_row_of_no_bytes_is_gathered_with_the_same_calls(kind: type[CudaCollective], calls: list[str]) -> None:
    machine = Machine(3)
    passes = [Pass(cuda, kind, row_bytes=0) for cuda in machine.ranks]
    for one in passes:
        one.run()
    machine.run(0)
    assert [cuda.calls for cuda in machine.ranks] == [["share"] * 2 * (len(calls) > 2) + calls * NUM_LAYERS] * 3


def test_a_rank_alone_fills_behind_the_current_stream_and_meets_nobody() -> None:
    machine = Machine(1)
    one = Pass(machine.ranks[0], NcclCollective, row_bytes=3)
    one.collective = NcclCollective(None, machine.ranks[0])
    one.run()
    machine.run(0)
    assert one.seen == expected(1, 3)
    assert machine.meetings == []


@KINDS
def test_a_gather_goes_on_beside_what_the_current_stream_does_meanwhile(kind: type[CudaCollective]) -> None:
    machine = Machine(2)
    passes = [Pass(cuda, kind, row_bytes=2) for cuda in machine.ranks]
    for one in passes:
        one.run()
    current = [len(cuda.streams[0].queue) for cuda in machine.ranks]
    # For each layer: its restore to wait for, an event for its gather, the gather to wait for, attention.
    assert current == [4 * NUM_LAYERS] * 2


@KINDS
def test_bytes_outside_the_rows_are_left_as_they_were(kind: type[CudaCollective]) -> None:
    machine = Machine(2)
    passes = [Pass(cuda, kind, row_bytes=5) for cuda in machine.ranks]
    for one in passes:
        for memory in one.memory:
            memory.fill_(POISON)
        one.run()
    machine.run(1)
    assert [bytes(memory[:3]) for one in passes for memory in one.memory] == [bytes([POISON]) * 3] * 4


@KINDS
def test_a_fill_that_raises_breaks_the_collective_and_queues_nothing_more(kind: type[CudaCollective]) -> None:
    cuda = Machine(2).ranks[0]
    collective = kind(cuda.group, cuda)  # type: ignore[call-arg, arg-type]
    rows = collective.allocate(8, DEVICE).view(2, 4)
    before = list(cuda.calls)
    for fill in (refuse, None):
        pending = collective.start(rows, fill)
        with pytest.raises(CollectiveError, match=r"rank 0 of 2: a gather of 4 bytes a rank .*\(no such page\)"):
            pending.wait()
    assert cuda.calls == before


def refuse(row: torch.Tensor) -> None:
    raise ValueError("no such page")


def test_rows_that_ranks_do_not_share_are_refused() -> None:
    cuda = Machine(2).ranks[0]
    pending = SymmetricCollective(cuda.group, cuda).start(torch.zeros(2, 4))
    with pytest.raises(CollectiveError, match="32 bytes to gather lie outside the 0 buffers that ranks share"):
        pending.wait()


def test_memory_is_shared_until_it_is_freed() -> None:
    cuda = Machine(2).ranks[0]
    collective = SymmetricCollective(cuda.group, cuda)
    kept, freed = collective.allocate(8, DEVICE), collective.allocate(16, DEVICE)
    del freed
    gc.collect()
    assert [reference() is None for reference in cuda.shared] == [False, True]
    assert len(kept) == 8


def test_memory_that_cannot_be_shared_is_an_error_with_its_size() -> None:
    cuda = Machine(2).ranks[1]
    cuda.can_share = False
    with pytest.raises(CollectiveError, match=r"rank 1 of 2: 24 bytes could not be shared \(rendezvous failed\)"):
        SymmetricCollective(cuda.group, cuda).allocate(24, DEVICE)


@KINDS
def test_a_closed_collective_queues_nothing_and_says_so(kind: type[CudaCollective]) -> None:
    cuda = Machine(2).ranks[1]
    collective = kind(cuda.group, cuda)  # type: ignore[call-arg, arg-type]
    collective.close()
    with pytest.raises(CollectiveError, match="rank 1 of 2: the collective is closed"):
        collective.start(torch.zeros(2, 4)).wait()
    assert cuda.calls == []


@KINDS
def test_rows_of_another_shape_are_refused(kind: type[CudaCollective]) -> None:
    cuda = Machine(2).ranks[0]
    with pytest.raises(ValueError, match=r"contiguous, \[2, \.\.\.\]"):
        kind(cuda.group, cuda).start(torch.zeros(3, 4))  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize(
    ("can_allocate", "can_share", "others_agree", "kind", "calls"),
    [
        (True, True, True, SymmetricCollective, ["vote", "share", "vote"]),
        (False, True, True, NcclCollective, ["vote"]),
        (True, False, True, NcclCollective, ["vote", "share", "vote"]),
        (True, True, False, NcclCollective, ["vote"]),
    ],
)
def test_all_ranks_choose_the_same_way_to_gather(
    can_allocate: bool, can_share: bool, others_agree: bool, kind: type[CudaCollective], calls: list[str]
) -> None:
    cuda = Machine(2).ranks[0]
    cuda.can_allocate, cuda.can_share, cuda.others_agree = can_allocate, can_share, others_agree
    assert type(make_cuda_collective(cuda.group, cuda)) is kind
    assert cuda.calls == calls


@pytest.mark.parametrize("grouped", [False, True])
def test_a_rank_alone_asks_nobody_how_to_gather(grouped: bool) -> None:
    cuda = Machine(1).ranks[0]
    assert type(make_cuda_collective(cuda.group if grouped else None, cuda)) is NcclCollective
    assert cuda.calls == []


def test_torchs_own_calls_are_refused_on_a_cpu() -> None:
    with pytest.raises(UnsupportedEngineError, match=r"gathers on cpu .*: on a CPU use the gloo collective"):
        TorchCuda(DEVICE, 1.0)


def test_torchs_barrier_is_given_the_limit_and_its_memory_is_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    handle = SimpleNamespace(
        get_remote_tensor=lambda rank, sizes, dtype: torch.full(sizes, rank, dtype=dtype),
        barrier=lambda **limits: asked.append(limits),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("torch.distributed._symmetric_memory.rendezvous", lambda memory, group: handle)
    group = cast(ProcessGroup, SimpleNamespace(rank=lambda: 1, size=lambda: 3))
    shared = TorchCuda(torch.device("cuda:0"), 2.5).share(torch.zeros(4, dtype=torch.uint8), group)
    shared.barrier()
    assert asked == [{"timeout_ms": 2500}]
    assert {rank: bytes(memory) for rank, memory in shared.of_others.items()} == {0: bytes(4), 2: bytes([2] * 4)}
