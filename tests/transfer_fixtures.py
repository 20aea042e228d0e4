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
from pathlib import Path

import numpy as np
import torch
from layout_kit import role_chunks

from vllm_hicache.consensus import Consumption
from vllm_hicache.geometry import Holding, PageLayout, Range, RankGeometry, RoleShape
from vllm_hicache.grid import Grid
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import BlockId, ObjectName, OpId, PageKey, Phase, RequestId, Role, Slot
from vllm_hicache.namespace import Spaces
from vllm_hicache.plan import Ack, FlushOp, LoadOp, OpReport, PageMove, SaveOp
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.chunks import RoleChunks
from vllm_hicache.storage.file import FileStore
from vllm_hicache.storage.wrappers import StoreWrapper
from vllm_hicache.transfer.copier import Copier, CpuCopier, Fence, Staging
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


def share(tensors: Tensors, layers: Range, heads: Range, draft: bool = True) -> Tensors:
    """What one rank of a cut engine holds of the whole model's `tensors`, in memory of its own."""
    names = [name for names in _by_role(tensors) for name in names]
    mine = [name for name in names if (draft if name.startswith(DRAFT) else _number(name) in range(*layers))]
    held = torch.stack([tensors[name][:, slice(*heads)] for name in mine])
    return dict(zip(mine, held.unbind(0), strict=True))


def page_bytes(tensors: Tensors, blocks: Sequence[int], grid: Grid = Grid()) -> bytes:
    """A slot that holds the page in `blocks`: target before draft, cell by cell, [head][layer][block][slab].

    A draft's layers are one group.
    """
    parts: list[bytes] = []
    for names in _by_role(tensors):
        layer_groups = 1 if names[0].startswith(DRAFT) else grid.layer_groups
        for cell_layers in _groups(names, layer_groups):
            for cell_heads in np.array_split(np.arange(tensors[names[0]].shape[1]), grid.head_groups):
                for head in cell_heads:
                    for name in cell_layers:
                        parts += [slab(tensors[name], block, head) for block in blocks]
    return b"".join(parts)


def _groups(names: Sequence[str], num_groups: int) -> list[Sequence[str]]:
    """Nearly equal groups; layers left over go to the groups before the last, from the back."""
    size, rest = divmod(len(names), num_groups)
    longer = range(num_groups - 1 - rest, num_groups - 1)
    stops = np.cumsum([size + (group in longer) for group in range(num_groups)]).tolist()
    return [names[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


def _number(name: str) -> int:
    found = re.search(r"layers\.(\d+)\.", name)
    assert found is not None
    return int(found[1])


def _by_role(tensors: Tensors) -> list[list[str]]:
    target = sorted((name for name in tensors if not name.startswith(DRAFT)), key=_number)
    draft = sorted((name for name in tensors if name.startswith(DRAFT)), key=_number)
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


def whole_rank(cache: DeviceCache, blocks_per_page: int, grid: Grid) -> RankGeometry:
    """The geometry of a rank that holds the whole model."""
    shapes = tuple(RoleShape(each.role, len(each.numbers), each.num_heads, each.slab_bytes) for each in cache.roles)
    layout = PageLayout(shapes, cache.block_tokens, blocks_per_page * cache.block_tokens, grid)
    return RankGeometry(layout, tuple(Holding(it.role, (0, it.num_layers), (0, it.num_heads)) for it in shapes))


class Rig:
    """One rank without its threads: device tensors, host pool, and the copier between them.

    `layers` and `heads` are those of the whole model that it holds, all of them where they are not given. A draft is
    held by the last layers' rank.
    """

    def __init__(
        self,
        layout: Layout = Layout(),
        blocks_per_page: int = 2,
        grid: Grid = Grid(),
        num_slots: int = 8,
        seed: int = 0,
        layers: Range | None = None,
        heads: Range | None = None,
        replica: tuple[int, int] = (0, 1),
    ) -> None:
        self.layout = layout
        self.grid = grid
        self.tensors = device_tensors(layout, seed)
        self.cache = DeviceCache.from_tensors(self.tensors, layout.block_tokens)
        self.geometry = whole_rank(self.cache, blocks_per_page, grid)
        if layers is not None or heads is not None:
            self._hold(layers or (0, layout.layers), heads or (0, layout.heads), replica)
        self.pool = HostPool(num_slots, self.geometry.slot_bytes)
        self.copier = CpuCopier(self.cache, self.pool, self.geometry)

    def _hold(self, layers: Range, heads: Range, replica: tuple[int, int]) -> None:
        last = layers[1] == self.layout.layers
        self.tensors = share(self.tensors, layers, heads, last)
        self.cache = DeviceCache.from_tensors(self.tensors, self.layout.block_tokens)
        held = {Role.TARGET: layers, Role.DRAFT: (0, self.layout.draft_layers)}
        holdings = tuple(Holding(each.role, held[each.role], heads, *replica) for each in self.cache.roles)
        self.geometry = RankGeometry(self.geometry.layout, holdings)

    def page(self, blocks: Sequence[int]) -> bytes:
        """What a slot must hold after a save of `blocks` now, on a rank that holds the whole model."""
        return page_bytes(self.tensors, blocks, self.grid)

    def slot(self, slot: int) -> bytes:
        return self.pool.regions[0][slot].numpy().tobytes()

    def block(self, block: int) -> bytes:
        return block_bytes(self.tensors, block)

    def blocks(self, besides: Sequence[int] = ()) -> dict[int, bytes]:
        """Every device block but `besides`."""
        return {block: self.block(block) for block in range(self.layout.blocks) if block not in besides}

    def poison_device(self) -> None:
        for block in range(self.layout.blocks):
            write_block(self.tensors, block)

    def poison_slots(self) -> None:
        self.pool.regions[0].fill_(POISON)


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

    @classmethod
    def on_files(cls, folder: Path) -> WatchedStore:
        """A file store of its own in a test's folder."""
        inner = FileStore(str(folder / "store"), 1 << 30)
        inner.probe()
        return cls(inner)

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

    def make_staging(self, rows: torch.Tensor) -> Staging:
        return self._inner.make_staging(rows)


class Machine:
    """An engine, and all that it has told so far. Its rank is alone: what it has is agreed at once.

    Attributes:
        reports: of operations that have settled.
        told: every report, in order.
    """

    def __init__(self, store: Store, rig: Rig, io_threads: int, flush_queue_pages: int) -> None:
        self.rig = rig
        self.chunks: RoleChunks | None = role_chunks(store, rig.geometry.layout, NAMESPACE)
        self.copier = WatchedCopier(rig.copier)
        self.metrics = Metrics()
        self.engine = TransferEngine(
            3, rig.pool, rig.geometry, self.copier, self.metrics, io_threads, max(1, io_threads // 2), flush_queue_pages
        )
        self.consumption = Consumption()
        self.reports: dict[int, OpReport] = {}
        self.told: list[OpReport] = []
        self.received: list[RequestId] = []
        self.invalid: set[BlockId] = set()
        self.counted: Counter[str] = Counter()
        self.health: list[float] = []

    def collect(self) -> None:
        for report in self.engine.collect():
            assert report.op not in self.reports, "an operation was reported after it had settled"
            self.told.append(report)
            if report.phase == Phase.SETTLED:
                self.reports[report.op] = report
            self.consumption.ready(report)
            self.consumption.consume(Ack(report.op, report.pages_done, report.pages_held, report.phase, report.reason))
        received, invalid = self.consumption.take()
        self.received += received
        self.invalid |= invalid
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
        vouched: int | None = None,
    ) -> None:
        whole = LoadOp(OpId(op), Spaces(NAMESPACE), request, tuple(pages), time_limit_s, unserved)
        self.consumption.begin(whole.op, 3, whole)
        self.engine.load(whole, self.chunks, self.engine.fence(), vouched)

    def save(self, op: int, pages: Sequence[PageMove], vouched: int | None = None) -> None:
        self.consumption.begin(OpId(op), 3)
        self.engine.save(SaveOp(OpId(op), tuple(pages)), self.engine.fence(), vouched)

    def flush(self, op: int, *numbers: int, vouched: int | None = None) -> None:
        self.consumption.begin(OpId(op), 3)
        pages = tuple(move(number, number) for number in numbers)
        self.engine.flush(FlushOp(OpId(op), Spaces(NAMESPACE), pages), self.chunks, vouched)

    def misses(self) -> dict[str, int]:
        return {name.split("|")[1]: count for name, count in self.counted.items() if name.startswith("misses|")}
