"""The host pool: one rank's L2 memory, page-first.

Owned by the worker half. A slot holds one page of this rank as the concatenation of its parts of cells, so that
every object it writes is one contiguous range of it. Which slot holds which page is the scheduler half's business; here
are bytes only. Any thread may touch a slot that an operation it runs has been given.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from vllm_hicache.errors import ConfigError, InvariantError
from vllm_hicache.geometry import Part
from vllm_hicache.machine import neighbouring_cpus, run_on
from vllm_hicache.names import Slot
from vllm_hicache.ownership import Shard
from vllm_hicache.units import format_bytes

Bytes = npt.NDArray[np.uint8]

_COMMIT_BYTES = 32 * 2**20
_MADV_POPULATE_WRITE = 23


class HostPool:
    """`num_rows` rows in one mapping: the slots of which this rank is the owner.

    A row has `region_bytes` bytes, in regions of their own where they are several, as with a sidecar.
    Memory is committed when it is first written, or ahead of that by `commit_ahead`, in huge pages where the kernel
    has them; `pin` registers it with CUDA for asynchronous copies (not measured).

    Raises:
        ConfigError: the pool would hold no page, or more than the machine has.
    """

    def __init__(self, num_rows: int, *region_bytes: int, pin: bool = False, shard: Shard = Shard()) -> None:
        self.region_bytes = region_bytes
        if num_rows < 1:
            raise ConfigError(
                f"the host pool holds {num_rows} pages: one page of this rank takes "
                f"{format_bytes(self.slot_bytes)}, so set host_memory to several times that"
            )
        self.num_rows = num_rows
        self.shard = shard
        total = num_rows * self.slot_bytes
        try:
            self._map = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"host_memory of {format_bytes(total)} cannot be mapped ({error}): set a smaller host_memory"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel built without them
                self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        if pin:
            _register(whole)
        sizes = [num_rows * each for each in self.region_bytes]
        self.regions = tuple(region.view(num_rows, -1) for region in whole.split(sizes))
        self._bytes: Bytes = whole.numpy()
        self._views: list[Bytes] = [region.numpy() for region in self.regions]
        self._closing = threading.Event()
        self._committer: threading.Thread | None = None

    def commit_ahead(self) -> None:
        """Have the kernel provide the memory in the background, lowest slots first, without touching its content.

        The first touch of a page costs several times a copy into it, and would be paid by the first saves and
        fetches. A kernel that cannot (before Linux 5.14) leaves it to them.
        """
        self._committer = threading.Thread(target=self._commit, name="hicache-commit", daemon=True)
        self._committer.start()

    def close(self) -> None:
        """End `commit_ahead`."""
        self._closing.set()
        if self._committer is not None:
            self._committer.join(timeout=1.0)

    def _commit(self) -> None:
        run_on(neighbouring_cpus())
        libc = ctypes.CDLL(None, use_errno=True)
        start, stop = self._bytes.ctypes.data, self._bytes.ctypes.data + self._bytes.nbytes
        for address in range(start, stop, _COMMIT_BYTES):
            size = min(_COMMIT_BYTES, stop - address)
            failed = libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)
            if failed or self._closing.is_set():
                return

    @property
    def slot_bytes(self) -> int:
        """Bytes of one page in all regions."""
        return sum(self.region_bytes)

    @property
    def num_slots(self) -> int:
        """Slots of all owners, as far as this rank's rows go."""
        return self.num_rows * self.shard.num_owners

    @property
    def memory(self) -> memoryview:
        """All of it, writable, for links that must know it."""
        return self._bytes.data

    def row(self, slot: Slot) -> int:
        """Where one of this rank's slots lies.

        Raises:
            InvariantError: it is another owner's.
        """
        if not self.shard.owns(slot):
            raise InvariantError(
                f"slot {slot} is owner {slot % self.shard.num_owners}'s of {self.shard.num_owners}, this is "
                f"{self.shard.owner}"
            )
        return self.shard.row(slot)

    def part(self, slot: Slot, part: Part) -> memoryview:
        """Writable bytes of one part of a slot of this rank, contiguous, `part.num_bytes` long."""
        return self._views[part.region][self.row(slot), part.offset : part.offset + part.num_bytes].data

    def content(self, slot: Slot) -> tuple[torch.Tensor, ...]:
        """What a slot of this rank holds, uint8 [bytes] by region."""
        row = self.row(slot)
        return tuple(region[row] for region in self.regions)

    def by_region(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows [num_rows, slot_bytes], or one of them, whose regions lie one behind the other, by region."""
        return tuple(torch.split(rows, list(self.region_bytes), dim=-1))


def _register(tensor: torch.Tensor) -> None:
    """Page-lock memory that torch did not allocate. CUDA only; not measured."""
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
    if int(code) != 0:
        raise ConfigError(
            f"cudaHostRegister refused {format_bytes(tensor.numel())} of host memory with code {int(code)}: "
            "raise the locked-memory limit (ulimit -l) or set a smaller host_memory"
        )
