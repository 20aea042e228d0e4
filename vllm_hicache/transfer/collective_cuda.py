"""All-gathers of device memory, on a CUDA stream of their own. Not measured: no such device has run this yet.

Used on the engine's thread. A gather is queued on the gather stream behind an event of the current stream, recorded at
`start`: its fill comes after the restore that the current stream has waited for, and a buffer is not written before the
attention queued earlier has read it. `wait` lets the current stream, not the host, wait for the gather.

    current stream   restored | attend 0 | start 2 . . . wait 2 | attend 2
    gather stream                        `-> fill 2, gather 2 -'

So what reads a buffer must have been queued before the next `start` into it, and each gather be waited for before its
rows are freed. A rank that does not come ends the others: torch's watchdog after the NCCL group's limit, the barrier
of symmetric memory after its own. Nothing in this module touches CUDA when it is imported.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from vllm_hicache.errors import CollectiveError, InvariantError, UnsupportedEngineError
from vllm_hicache.transfer.collective import Collective, Fill, Pending, as_bytes, check_rows

Made = TypeVar("Made")


class Event(Protocol):
    """A point in a stream's work."""


class Stream(Protocol):
    """A queue of the device's work; `torch.cuda.Stream` is one."""

    def record_event(self) -> Event:
        """Mark the present end of the queue."""

    def wait_event(self, event: Event) -> None:
        """What is queued from now on comes after the event."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory of the same size on each rank of a group, which all of them can read.

    Attributes:
        of_others: each other rank's, [bytes] of uint8, by rank.
        barrier: queues on the current stream a wait for all ranks to come to the same barrier.
    """

    of_others: Mapping[int, torch.Tensor]
    barrier: Callable[[], None]


class Cuda(Protocol):
    """What a gather asks of CUDA and of its collectives. All but the streams' own calls use the current stream."""

    def new_stream(self) -> Stream:
        """A stream beside the current one."""

    def current_stream(self) -> Stream:
        """The stream of the forward pass."""

    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Inside, `stream` is the current one."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between devices."""

    def all_gather(self, rows: torch.Tensor, rank: int, group: ProcessGroup) -> None:
        """Queue the group's own all-gather of `rows` [ranks, bytes], in place."""

    def all_agree(self, mine: bool, group: ProcessGroup) -> bool:
        """Whether all ranks say so. Returns when they have."""

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """Ordinary memory, [bytes] of uint8."""

    def shareable_zeros(self, num_bytes: int) -> torch.Tensor:
        """Memory fit for `share`, [bytes] of uint8.

        Raises:
            RuntimeError: this device or this build of torch has none.
        """

    def share(self, memory: torch.Tensor, group: ProcessGroup) -> SharedMemory:
        """Show each other what `shareable_zeros` made; all ranks of the group come together.

        Raises:
            RuntimeError: the ranks' devices cannot read each other's memory.
        """


class CudaCollective(Collective):
    """What both ways to gather have in common: the streams' order."""

    def __init__(self, rank: int, size: int, cuda: Cuda) -> None:
        self.rank, self.size = rank, size
        self._cuda = cuda
        self._stream = cuda.new_stream()
        self._failure: CollectiveError | None = None

    @abstractmethod
    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Zeroed memory to cut `rows` from, [bytes] of uint8. All ranks call this with equal sizes, in the same order.

        Raises:
            CollectiveError: the ranks did not come together.
        """

    def start(self, rows: torch.Tensor, fill: Fill | None = None) -> Pending:
        """Queue the gather of `rows`, [size, ...] of device memory, behind all that the current stream has to do."""
        check_rows(rows, self.size)
        if self._failure is None:
            ready = self._cuda.current_stream().record_event()
            try:
                with self._cuda.on_stream(self._stream):
                    self._stream.wait_event(ready)
                    if fill is not None:
                        fill(rows[self.rank])
                    self._gather(rows)
            except Exception as error:  # the caller's to judge; the others' calls have no counterpart any more
                self._failure = self._failed(rows, error)
        return _Queued(self._cuda, self._stream.record_event(), self._failure)

    def close(self) -> None:
        """Has no thread to end; later gathers end with an error."""
        self._failure = self._failure or CollectiveError(f"rank {self.rank} of {self.size}: the collective is closed")

    @abstractmethod
    def _gather(self, rows: torch.Tensor) -> None:
        """Queue the gather on the current stream. Every rank queues the same calls, whatever its row holds."""

    def _failed(self, rows: torch.Tensor, error: Exception) -> CollectiveError:
        failure = CollectiveError(
            f"rank {self.rank} of {self.size}: a gather of {rows.nbytes // self.size} bytes a rank could not be queued "
            f"({error}): see the first error in the ranks' logs, and start the engine anew"
        )
        failure.__cause__ = error
        return failure


class NcclCollective(CudaCollective):
    """NCCL's all-gather, in place. Its kernels take some of the device's multiprocessors from attention.

    Args:
        group: of its own; None for a rank alone, which fills its row and sends nothing.
    """

    def __init__(self, group: ProcessGroup | None, cuda: Cuda) -> None:
        super().__init__(*((0, 1) if group is None else (group.rank(), group.size())), cuda)
        self._group = group

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Ordinary device memory."""
        return self._cuda.zeros(num_bytes)

    def _gather(self, rows: torch.Tensor) -> None:
        if self._group is not None:
            self._cuda.all_gather(as_bytes(rows), self.rank, self._group)


class SymmetricCollective(CudaCollective):
    """Each rank copies the others' rows out of their memory, with copy engines: attention keeps its multiprocessors.

    A barrier before the copies says that all rows are filled, one after them that nobody reads them any more. Rows must
    lie in memory from `allocate`, at the same place on every rank.
    """

    def __init__(self, group: ProcessGroup, cuda: Cuda) -> None:
        super().__init__(group.rank(), group.size(), cuda)
        self._group = group
        self._shared: dict[int, SharedMemory] = {}

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Memory that the other ranks can read, shared until it is freed."""
        memory = self._cuda.shareable_zeros(num_bytes)
        try:
            self._shared[_address(memory)] = self._cuda.share(memory, self._group)
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank} of {self.size}: {num_bytes} bytes could not be shared ({error}): see the first "
                "error in the ranks' logs, and start the engine anew"
            ) from error
        weakref.finalize(memory, self._shared.pop, _address(memory), None)
        return memory

    def _gather(self, rows: torch.Tensor) -> None:
        shared = self._shared.get(_address(rows))
        if shared is None:
            raise InvariantError(
                f"{rows.nbytes} bytes to gather lie outside the {len(self._shared)} buffers that ranks share: cut rows "
                "from what `allocate` returned"
            )
        own, first = as_bytes(rows), rows.storage_offset() * rows.itemsize
        row_bytes = own.shape[1]
        shared.barrier()
        # Each rank begins with its neighbour: no two read from the same one at a time.
        for other in [(self.rank + step) % self.size for step in range(1, self.size)]:
            start = first + other * row_bytes
            self._cuda.copy(own[other], shared.of_others[other][start : start + row_bytes])
        shared.barrier()


class _Queued(Pending):
    """A gather on the gather stream, which has ended at an event."""

    def __init__(self, cuda: Cuda, gathered: Event, failure: CollectiveError | None) -> None:
        self._cuda = cuda
        self._gathered = gathered
        self._failure = failure

    def wait(self) -> None:
        """Let the current stream wait until every row is there; the host goes on."""
        if self._failure is not None:
            raise CollectiveError(*self._failure.args) from self._failure
        self._cuda.current_stream().wait_event(self._gathered)


class TorchCuda:
    """Torch's streams, NCCL and symmetric memory on one device.

    Args:
        timeout_s: how long a barrier of symmetric memory waits before it ends the process.

    Raises:
        UnsupportedEngineError: torch sees no such device.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        if device.type != "cuda" or not torch.cuda.is_available():
            raise UnsupportedEngineError(
                f"gathers on {device} with {torch.cuda.device_count()} CUDA devices in sight: on a CPU use the gloo "
                "collective"
            )
        self._device = device
        self._timeout_ms = round(timeout_s * 1000)

    def new_stream(self) -> Stream:
        """A stream of this device."""
        return cast(Stream, torch.cuda.Stream(device=self._device))

    def current_stream(self) -> Stream:
        """The current stream of this device."""
        return cast(Stream, torch.cuda.current_stream(self._device))

    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Torch's own context."""
        return torch.cuda.stream(cast(torch.cuda.Stream, stream))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Contiguous bytes, which torch gives to a copy engine."""
        target.copy_(source, non_blocking=True)

    def all_gather(self, rows: torch.Tensor, rank: int, group: ProcessGroup) -> None:
        """NCCL gathers in place where the input is the rank's part of the output."""
        distributed.all_gather_single(rows.view(-1), rows[rank], group=group)

    def all_agree(self, mine: bool, group: ProcessGroup) -> bool:
        """The least of all ranks' answers."""
        answer = torch.tensor([int(mine)], dtype=torch.int32, device=self._device)
        distributed.all_reduce(answer, op=distributed.ReduceOp.MIN, group=group)
        return bool(answer.item())

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """Memory of torch's caching allocator."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def shareable_zeros(self, num_bytes: int) -> torch.Tensor:
        """Its own allocation each, so that it lies at the same place of it on every rank."""
        from torch._C._distributed_c10d import _SymmetricMemory

        return _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, self._device).zero_()

    def share(self, memory: torch.Tensor, group: ProcessGroup) -> SharedMemory:
        """Map each other's allocation."""
        from torch.distributed import _symmetric_memory

        handle = _symmetric_memory.rendezvous(memory, group)
        others = [rank for rank in range(group.size()) if rank != group.rank()]
        return SharedMemory(
            {rank: handle.get_remote_tensor(rank, memory.shape, memory.dtype) for rank in others},
            lambda: handle.barrier(timeout_ms=self._timeout_ms),
        )


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def make_cuda_collective(group: ProcessGroup | None, cuda: Cuda) -> CudaCollective:
    """The collective for a group of NCCL: by symmetric memory where all of its ranks can, else by NCCL.

    All ranks of the group call this together.
    """
    if group is None or group.size() == 1:
        return NcclCollective(group, cuda)
    # Two votes: `share` needs all ranks, so none may come to it alone, and it may fail on some of them.
    probe = _tried(lambda: cuda.shareable_zeros(1))
    if not cuda.all_agree(probe is not None, group) or probe is None:
        return NcclCollective(group, cuda)
    if not cuda.all_agree(_tried(lambda: cuda.share(probe, group)) is not None, group):
        return NcclCollective(group, cuda)
    return SymmetricCollective(group, cuda)


def _tried(make: Callable[[], Made]) -> Made | None:
    try:
        return make()
    except RuntimeError:  # not on this machine: NCCL is used
        return None
