"""Device tensors as vLLM's CPU backend lays them out, the bytes that a page must have, and an engine to watch.

`page_bytes` is written from the documented order alone and shares no code with `transfer/`.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_hicache.geometry import RankGeometry
from vllm_hicache.grid import Grid
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import BlockId, ObjectName, OpId, PageKey, RequestId, Slot
from vllm_hicache.plan import FlushOp, LoadOp, OpReport, PageMove, SaveOp
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.storage.wrappers import StoreWrapper
from vllm_hicache.transfer.copier import Copier, CpuCopier, Fence
from vllm_hicache.transfer.device import DeviceCache
from vllm_hicache.transfer.engine import TransferEngine
from vllm_hicache.transfer.host import HostPool

PATIENCE_S = 30.0
NAMESPACE = b"n" * 32
POISON = 0xA5
REQUEST = RequestId("r")
DRAFT = "draft_model."
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape of one engine's device cache.

    Attributes:
        block_major: layers interleaved inside each block, instead of one contiguous range a layer.
        shared_draft: draft layers in the target's allocation, as vLLM does, instead of one of their own.
    """

    layers: int = 3
    heads: int = 2
    blocks: int = 24
    block_tokens: int = 4
    head_size: int = 8
    draft_layers: int = 0
    block_major: bool = False
    shared_draft: bool = False

    @property
    def slab_bytes(self) -> int:
        return self.block_tokens * 2 * self.head_size * 2


def device_tensors(layout: Layout, seed: int = 0) -> Tensors:
    """Registered tensors [blocks, heads, tokens, 2 * head size] of bfloat16, seeded bytes, last layer first."""
    names = [f"model.layers.{index}.self_attn.attn" for index in range(layout.layers)]
    draft = [f"{DRAFT}model.layers.{index}.self_attn.attn" for index in range(layout.draft_layers)]
    if layout.shared_draft:
        return _allocation(layout, names + draft, seed)
    return _allocation(layout, draft, seed + 1) | _allocation(layout, names, seed)


def _allocation(layout: Layout, names: Sequence[str], seed: int) -> Tensors:
    if not names:
        return {}
    block = (layout.heads, layout.block_tokens, 2 * layout.head_size)
    num_bytes = len(names) * layout.blocks * layout.heads * layout.slab_bytes
    raw = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    flat = torch.from_numpy(raw).view(torch.bfloat16)
    if layout.block_major:
        views = flat.view(layout.blocks, len(names), *block).unbind(1)
    else:
        views = flat.view(len(names), layout.blocks, *block).unbind(0)
    return dict(reversed(list(zip(names, views, strict=True))))


def slab(tensor: torch.Tensor, block: int, head: int) -> bytes:
    """Bytes of one (block, layer, head)."""
    return tensor[block, head].contiguous().view(torch.uint8).numpy().tobytes()


def page_bytes(tensors: Tensors, blocks: Sequence[int], grid: Grid = Grid()) -> bytes:
    """A slot that holds the page in `blocks`: target before draft, cell by cell, [head][layer][block][slab]."""
    parts: list[bytes] = []
    for names in _by_role(tensors):
        for cell_layers in np.array_split(np.array(names), grid.layer_groups):
            for cell_heads in np.array_split(np.arange(tensors[names[0]].shape[1]), grid.head_groups):
                for head in cell_heads:
                    for name in cell_layers:
                        parts += [slab(tensors[name], block, head) for block in blocks]
    return b"".join(parts)


def _by_role(tensors: Tensors) -> list[list[str]]:
    def number(name: str) -> int:
        found = re.search(r"layers\.(\d+)\.", name)
        assert found is not None
        return int(found[1])

    target = sorted((name for name in tensors if not name.startswith(DRAFT)), key=number)
    draft = sorted((name for name in tensors if name.startswith(DRAFT)), key=number)
    return [names for names in (target, draft) if names]


def block_bytes(tensors: Tensors, block: int) -> bytes:
    """All that one device block holds."""
    return page_bytes(tensors, [block])


def write_block(tensors: Tensors, block: int, value: int = POISON) -> None:
    """Somebody else writes `value` to every byte of a block."""
    for tensor in tensors.values():
        tensor[block] = torch.full_like(tensor[block], value, dtype=torch.uint8).repeat(1, 1, 2).view(tensor.dtype)


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(32, "little"))


def move(
    number: int, slot: int, blocks: Sequence[int] = (), first_block: int = 0, from_store: bool = False
) -> PageMove:
    return PageMove(key(number), Slot(slot), tuple(BlockId(block) for block in blocks), first_block, from_store)


class Rig:
    """One rank without its threads: device tensors, host pool, and the copier between them."""

    def __init__(
        self,
        layout: Layout = Layout(),
        blocks_per_page: int = 2,
        grid: Grid = Grid(),
        num_slots: int = 8,
        seed: int = 0,
    ) -> None:
        self.layout = layout
        self.grid = grid
        self.tensors = device_tensors(layout, seed)
        self.cache = DeviceCache.from_tensors(self.tensors, layout.block_tokens)
        page_tokens = blocks_per_page * layout.block_tokens
        self.geometry = RankGeometry(self.cache.layers, layout.block_tokens, page_tokens, grid)
        self.pool = HostPool(num_slots, self.geometry.slot_bytes)
        self.copier = CpuCopier(self.cache, self.pool, self.geometry)

    def page(self, blocks: Sequence[int]) -> bytes:
        """What a slot must hold after a save of `blocks` now."""
        return page_bytes(self.tensors, blocks, self.grid)

    def slot(self, slot: int) -> bytes:
        return self.pool.tensor[slot].numpy().tobytes()

    def block(self, block: int) -> bytes:
        return block_bytes(self.tensors, block)

    def blocks(self, besides: Sequence[int] = ()) -> dict[int, bytes]:
        """Every device block but `besides`."""
        return {block: self.block(block) for block in range(self.layout.blocks) if block not in besides}

    def poison_device(self) -> None:
        for block in range(self.layout.blocks):
            write_block(self.tensors, block)

    def poison_slots(self) -> None:
        self.pool.tensor.fill_(POISON)


class Gate:
    """A thread that calls this waits until the gate is opened."""

    def __init__(self) -> None:
        self._entered = threading.Event()
        self._opened = threading.Event()

    def __call__(self) -> None:
        self._entered.set()
        assert self._opened.wait(PATIENCE_S)

    def await_entry(self) -> None:
        assert self._entered.wait(PATIENCE_S)

    def open(self) -> None:
        self._opened.set()


def nothing() -> None:
    """What happens before a call that no test interferes with."""


class WatchedStore(StoreWrapper):
    """Notes every read and write by page number; runs what `before` has for it first, such as a fault or a gate."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, int]] = []
        self.before: dict[tuple[str, int], Callable[[], None]] = {}

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        self._note("read", name)
        return super().read(name, parts, offset)

    def write(self, name: ObjectName, parts: Sequence[memoryview]) -> bool:
        self._note("write", name)
        return super().write(name, parts)

    def _note(self, operation: str, name: ObjectName) -> None:
        number = int.from_bytes(bytes.fromhex(name.split("/")[-1].split(".")[0]), "little")
        self.calls.append((operation, number))
        self.before.get((operation, number), nothing)()


class WatchedCopier(Copier):
    """Runs what `before` has for an operation and a slot first."""

    def __init__(self, inner: Copier) -> None:
        self._inner = inner
        self.before: dict[tuple[str, int], Callable[[], None]] = {}

    def fence(self) -> Fence:
        return self._inner.fence()

    def load(self, moves: Sequence[PageMove], fence: Fence) -> None:
        self.before.get(("load", moves[0].slot), nothing)()
        self._inner.load(moves, fence)

    def save(self, moves: Sequence[PageMove], fence: Fence) -> None:
        self.before.get(("save", moves[0].slot), nothing)()
        self._inner.save(moves, fence)


class Machine:
    """An engine, and all that it has told so far."""

    def __init__(self, store: Store, rig: Rig, io_threads: int, flush_queue_pages: int) -> None:
        self.rig = rig
        self.chunks: ChunkStore | None = ChunkStore(store, NAMESPACE, rig.grid)
        self.copier = WatchedCopier(rig.copier)
        self.metrics = Metrics()
        self.engine = TransferEngine(
            3, rig.pool, rig.geometry, self.copier, self.metrics, io_threads, max(1, io_threads // 2), flush_queue_pages
        )
        self.reports: dict[int, OpReport] = {}
        self.received: list[RequestId] = []
        self.invalid: set[BlockId] = set()
        self.counted: Counter[str] = Counter()
        self.health: list[float] = []

    def collect(self) -> None:
        result = self.engine.collect()
        for report in result.reports:
            assert report.op not in self.reports, "an operation was reported twice"
            self.reports[report.op] = report
        self.received += result.received
        self.invalid |= result.invalid_blocks
        drained = self.metrics.drain()
        if "healthy" in drained:
            self.health.append(drained["healthy"])
        self.counted.update({name: int(value) for name, value in drained.items() if "seconds" not in name})

    def until(self, condition: Callable[[], bool]) -> None:
        """Collect, as the engine does once a step, until it holds."""
        deadline = time.monotonic() + PATIENCE_S
        while self.collect() or not condition():
            assert time.monotonic() < deadline, (self.reports, self.counted)

    def report(self, op: int) -> OpReport:
        self.until(lambda: op in self.reports)
        return self.reports[op]

    def load(
        self,
        op: int,
        pages: Sequence[PageMove],
        time_limit_s: float | None = None,
        unserved: tuple[BlockId, ...] = (),
        request: RequestId | None = REQUEST,
    ) -> None:
        whole = LoadOp(OpId(op), NAMESPACE, request, tuple(pages), time_limit_s, unserved)
        self.engine.load(whole, self.chunks, self.engine.fence())

    def save(self, op: int, pages: Sequence[PageMove]) -> None:
        self.engine.save(SaveOp(OpId(op), tuple(pages)), self.engine.fence())

    def flush(self, op: int, *numbers: int) -> None:
        self.engine.flush(FlushOp(OpId(op), NAMESPACE, tuple(move(number, number) for number in numbers)), self.chunks)

    def misses(self) -> dict[str, int]:
        return {name.split("|")[1]: count for name, count in self.counted.items() if name.startswith("misses|")}
