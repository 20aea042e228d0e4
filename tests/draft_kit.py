"""One rank whose pages hold a draft's state beside the target's, in any shape, packed or in a sidecar, over a store.

What must lie where, `content` says of device blocks and `halves` of slots; both are written from the documented order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd

import numpy as np
import torch
from transfer_fixtures import (
    DRAFT,
    NAMESPACE,
    PATIENCE_S,
    POISON,
    REQUEST,
    Layout,
    Tensors,
    device_tensors,
    move,
    page_bytes,
    slab,
)

from vllm_hicache.geometry import Holding, PageLayout, Range, RankGeometry, RoleShape
from vllm_hicache.grid import Grid
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import ObjectName, OpId, Phase, Role, Slot
from vllm_hicache.namespace import Spaces
from vllm_hicache.plan import FlushOp, LoadOp, OpReport, PageMove, SaveOp
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.chunks import ChunkStore, RoleChunks
from vllm_hicache.transfer.copier import Copier, CpuCopier
from vllm_hicache.transfer.device import DeviceCache
from vllm_hicache.transfer.engine import TransferEngine
from vllm_hicache.transfer.host import HostPool

DRAFT_NAMESPACE = b"d" * 32
SPACES = Spaces(NAMESPACE, DRAFT_NAMESPACE)
WITHOUT_DRAFT = Spaces(NAMESPACE)
TARGET = Layout(layers=3, heads=2, blocks=48)
Content = dict[tuple[Role, int, int], bytes]
"""Bytes by role, layer and head."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The shape of a draft's layers, by default that of the target's."""

    layers: int = 2
    heads: int = 2
    head_size: int = 8
    dtype: torch.dtype = torch.bfloat16

    def tensors(self, layout: Layout, seed: int) -> Tensors:
        """Seeded bytes in blocks of the target's tokens, in an allocation of their own."""
        size = 2 * self.head_size
        shape = (self.layers, layout.blocks, self.heads, layout.block_tokens, size * self.dtype.itemsize)
        raw = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        names = [f"{DRAFT}model.layers.{layer}.self_attn.attn" for layer in range(self.layers)]
        return dict(zip(names, torch.from_numpy(raw).view(self.dtype).unbind(0), strict=True))


DRAFTS = {
    "as the target": Draft(),
    "fewer and larger heads of four bytes": Draft(1, 1, 16, torch.float32),
    "more and smaller heads of one byte": Draft(3, 4, 3, torch.uint8),
}


def drafted(draft: Draft | None, layout: Layout = TARGET, seed: int = 0) -> Tensors:
    """All layers of an engine, with a draft's or without."""
    return device_tensors(layout, seed) | (draft.tensors(layout, seed + 1000) if draft is not None else {})


def role_of(name: str) -> Role:
    return Role.DRAFT if name.startswith(DRAFT) else Role.TARGET


def poison(tensors: Tensors) -> None:
    for tensor in tensors.values():
        tensor.view(torch.uint8).fill_(POISON)


def content(tensors: Tensors, block: int) -> Content:
    """All that a device block holds."""
    found: Content = {}
    for name, tensor in tensors.items():
        role, layer = role_of(name), int(name.split("layers.")[1].split(".")[0])
        found |= {(role, layer, head): slab(tensor, block, head) for head in range(tensor.shape[1])}
    return found


def of_role(found: Content, role: Role) -> Content:
    return {place: data for place, data in found.items() if place[0] is role}


def filled(found: Content, value: int) -> Content:
    """The same places full of one value."""
    return {place: bytes([value]) * len(data) for place, data in found.items()}


def objects(store: Store, role: Role | None = None) -> dict[ObjectName, bytes]:
    """What a store holds, of one role or of both."""
    found: dict[ObjectName, bytes] = {}
    for info in store.list(""):
        if role is None or f".{role.value}." in info.name:
            data = bytearray(info.size_bytes)
            assert store.read(info.name, [memoryview(data)]) == len(data)
            found[info.name] = bytes(data)
    return found


def moves(
    slots: Sequence[int], blocks: Sequence[Sequence[int]] = (), from_store: bool = False, **other: object
) -> tuple[PageMove, ...]:
    """Pages 0 and on, each in one of `slots`."""
    whole = blocks or [()] * len(slots)
    return tuple(
        replace(move(page, slot, whole[page], 0, from_store), **other)  # type: ignore[arg-type]
        for page, slot in enumerate(slots)
    )


class DraftRank:
    """One rank, alone, with a transfer engine over a store. Each operation is awaited.

    Args:
        draft: `None` for an engine without one.
        heads: those of the target that it holds of the whole model, and those of the draft.
    """

    def __init__(
        self,
        store: Store,
        draft: Draft | None = None,
        has_sidecar: bool = False,
        seed: int = 0,
        grid: Grid = Grid(),
        blocks_per_page: int = 1,
        num_slots: int = 24,
        heads: dict[Role, Range] | None = None,
        make_copier: Callable[[DeviceCache, HostPool, RankGeometry], Copier] = CpuCopier,
    ) -> None:
        self.draft, self.grid = draft, grid
        self.tensors = drafted(draft, seed=seed)
        whole = DeviceCache.from_tensors(self.tensors, TARGET.block_tokens)
        shapes = tuple(RoleShape(it.role, len(it.numbers), it.num_heads, it.slab_bytes) for it in whole.roles)
        layout = PageLayout(shapes, TARGET.block_tokens, blocks_per_page * TARGET.block_tokens, grid)
        held = {it.role: (0, it.num_heads) for it in shapes} | (heads or {})
        self.tensors = {name: tensor[:, slice(*held[role_of(name)])].clone() for name, tensor in self.tensors.items()}
        self.cache = DeviceCache.from_tensors(self.tensors, TARGET.block_tokens)
        holdings = tuple(Holding(it.role, (0, it.num_layers), held[it.role]) for it in shapes)
        self.geometry = RankGeometry(layout, holdings, has_sidecar=has_sidecar)
        self.pool = HostPool(num_slots, *self.geometry.region_bytes)
        self.copier = make_copier(self.cache, self.pool, self.geometry)
        self.metrics = Metrics()
        self.engine = TransferEngine(0, self.pool, self.geometry, self.copier, self.metrics, 2, 1, 64)
        digests = {Role.TARGET: NAMESPACE, Role.DRAFT: DRAFT_NAMESPACE}
        self._chunks = RoleChunks(
            {it.role: ChunkStore(store, digests[it.role], layout.grid_of(it)) for it in layout.roles}
        )
        self._num_ops = 0

    def save(self, pages: Sequence[PageMove]) -> OpReport:
        self.engine.save(SaveOp(self._next(), tuple(pages)), self.engine.fence())
        return self._settled()

    def flush(self, pages: Sequence[PageMove]) -> OpReport:
        self.engine.flush(FlushOp(self._next(), SPACES, tuple(pages)), self._chunks)
        return self._settled()

    def load(self, pages: Sequence[PageMove]) -> OpReport:
        self.engine.load(LoadOp(self._next(), SPACES, REQUEST, tuple(pages)), self._chunks, self.engine.fence())
        return self._settled()

    def close(self) -> None:
        self.engine.close(PATIENCE_S)

    def poison(self) -> None:
        """All of the device and of host memory."""
        poison(self.tensors)
        for region in self.pool.regions:
            region.fill_(POISON)

    def halves(self, slot: int) -> dict[Role, bytes]:
        """What a slot holds of each role."""
        regions = [region.numpy().tobytes() for region in self.pool.content(Slot(slot))]
        num_bytes = sum(part.num_bytes for part in self.geometry.parts if part.cell.role is Role.TARGET)
        whole = b"".join(regions)
        assert len(regions) == 1 or len(regions[0]) == num_bytes
        return {Role.TARGET: whole[:num_bytes]} | ({Role.DRAFT: whole[num_bytes:]} if self.draft is not None else {})

    def page(self, blocks: Sequence[int]) -> dict[Role, bytes]:
        """What a slot must hold of a page that lies in `blocks` now, on a rank that holds the whole model."""
        grids = {Role.TARGET: self.grid}
        if self.draft is not None:
            grids[Role.DRAFT] = Grid(1, gcd(self.grid.head_groups, self.draft.heads))
        return {
            role: page_bytes({name: each for name, each in self.tensors.items() if role_of(name) is role}, blocks, grid)
            for role, grid in grids.items()
        }

    def blocks(self) -> dict[int, Content]:
        """Every block of the device."""
        return {block: content(self.tensors, block) for block in range(TARGET.blocks)}

    def all_slots(self) -> dict[int, dict[Role, bytes]]:
        return {slot: self.halves(slot) for slot in range(self.pool.num_slots)}

    def _next(self) -> OpId:
        self._num_ops += 1
        return OpId(self._num_ops)

    def _settled(self) -> OpReport:
        """The last word on the operation that was begun last."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            for report in self.engine.collect(0.01):
                if report.op == self._num_ops and report.phase == Phase.SETTLED:
                    return report
            assert time.monotonic() < deadline, f"operation {self._num_ops} does not settle"
