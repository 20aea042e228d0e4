"""Pack and unpack of one rank's pages through the transfer engine's copier, beside memcpy of as many bytes."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from vllm_hicache.geometry import Holding, PageLayout, RankGeometry, RoleShape
from vllm_hicache.grid import Grid
from vllm_hicache.names import BlockId, PageKey, Role, Slot
from vllm_hicache.plan import PageMove
from vllm_hicache.transfer.copier import CpuCopier
from vllm_hicache.transfer.device import DeviceCache
from vllm_hicache.transfer.host import HostPool

GIB = 1 << 30
BLOCK_TOKENS = 128
SAME_CUT_AIM = 0.85
RECUT_AIM = 0.5


@dataclass(frozen=True, slots=True)
class Case:
    """What one rank holds of a model whose pages are one block, and the grid of the store."""

    name: str
    shape: RoleShape
    holding: Holding
    grid: Grid
    aim: float

    @property
    def geometry(self) -> RankGeometry:
        """Of the rank."""
        return RankGeometry(PageLayout((self.shape,), BLOCK_TOKENS, BLOCK_TOKENS, self.grid), (self.holding,))


def _cases(model: str, shape: RoleShape, same: tuple[Holding, Grid], reader: tuple[Holding, Grid]) -> list[Case]:
    widest = Grid(shape.num_layers, shape.num_heads)
    return [
        Case(f"{model}, same cut", shape, *same, SAME_CUT_AIM),
        Case(f"{model}, widest grid", shape, same[0], widest, RECUT_AIM),
        Case(f"{model}, interleaved parts", shape, *reader, RECUT_AIM),
    ]


def cases() -> list[Case]:
    """Both models: written as they are held, cut as finely as can be, and read by a rank that holds parts of cells."""
    small = RoleShape(Role.TARGET, 30, 3, 32 << 10)
    large = RoleShape(Role.TARGET, 80, 8, 64 << 10)
    return [
        *_cases(
            "30 layers, 3 heads",
            small,
            (Holding(Role.TARGET, (0, 30), (0, 3)), Grid()),
            (Holding(Role.TARGET, (9, 21), (0, 3)), Grid(8, 1)),
        ),
        *_cases(
            "80 layers, 8 heads, 1/8 of it",
            large,
            (Holding(Role.TARGET, (0, 80), (3, 4)), Grid(1, 8)),
            (Holding(Role.TARGET, (38, 58), (2, 6)), Grid(16, 2)),
        ),
    ]


class Rig:
    """Device blocks and host slots of `num_pages` pages, all touched, and blocks in random order."""

    def __init__(self, case: Case, num_pages: int) -> None:
        self.geometry, self.num_pages = case.geometry, num_pages
        (first, stop), (low, high) = case.holding.layers, case.holding.heads
        # One range a layer in one storage, as vLLM's CPU backend has it.
        size = (stop - first, num_pages, high - low, BLOCK_TOKENS, case.shape.slab_bytes // BLOCK_TOKENS)
        self.device = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        layers = {f"model.layers.{first + number}.attn": layer for number, layer in enumerate(self.device.unbind(0))}
        self.pool = HostPool(num_pages, self.geometry.slot_bytes)
        self.pool.regions[0].fill_(1)
        self.copier = CpuCopier(DeviceCache.from_tensors(layers, BLOCK_TOKENS), self.pool, self.geometry)
        order = random.Random(0).sample(range(num_pages), num_pages)
        self.moves = [
            PageMove(PageKey(page.to_bytes(32, "little")), Slot(page), (BlockId(block),))
            for page, block in enumerate(order)
        ]

    @property
    def num_bytes(self) -> int:
        """Of all pages."""
        return self.num_pages * self.geometry.slot_bytes

    def pack(self) -> None:
        """Device blocks to slots, page by page as the engine does."""
        for move in self.moves:
            self.copier.save((move,), None)

    def unpack(self) -> None:
        """Slots to device blocks."""
        for move in self.moves:
            self.copier.load((move,), None)

    def prove(self) -> None:
        """Raise RuntimeError unless a page comes back from its slot as it went in."""
        before = self.device.clone()
        self.pack()
        self.device.zero_()
        self.unpack()
        if not torch.equal(self.device, before):
            raise RuntimeError(f"{self.num_pages} pages do not come back as they went in: the copier is broken")


@dataclass(frozen=True, slots=True)
class Row:
    """One direction of one case; rates are medians, the ratio is the median over rounds of memcpy's time by ours."""

    case: str
    grid: str
    direction: str
    num_parts: int
    page_bytes: int
    num_pages: int
    gib_per_s: float
    memcpy_gib_per_s: float
    ratio: float
    aim: float

    @property
    def verdict(self) -> str:
        """Whether the ratio reaches the aim."""
        return "ok" if self.ratio >= self.aim else "UNDER"

    def to_json(self) -> dict[str, object]:
        """All fields and the verdict."""
        return asdict(self) | {"verdict": self.verdict}


def measure(case: Case, num_pages: int, num_rounds: int) -> list[Row]:
    """Pack and unpack of one case, after a proof that they are right."""
    rig = Rig(case, num_pages)
    rig.prove()
    host, device = rig.pool.regions[0].view(-1).numpy(), rig.device.view(-1).numpy()
    works = {
        "pack": rig.pack,
        "copy away": lambda: np.copyto(host, device),
        "unpack": rig.unpack,
        "copy back": lambda: np.copyto(device, host),
    }
    taken = rounds(works, num_rounds)
    return [
        Row(
            case=case.name,
            grid=str(case.grid),
            direction=ours,
            num_parts=len(rig.geometry.parts),
            page_bytes=rig.geometry.slot_bytes,
            num_pages=num_pages,
            gib_per_s=rig.num_bytes / statistics.median(taken[ours]) / GIB,
            memcpy_gib_per_s=rig.num_bytes / statistics.median(taken[plain]) / GIB,
            ratio=statistics.median(theirs / own for theirs, own in zip(taken[plain], taken[ours], strict=True)),
            aim=case.aim,
        )
        for ours, plain in (("pack", "copy away"), ("unpack", "copy back"))
    ]


def rounds(works: dict[str, Callable[[], object]], num_rounds: int) -> dict[str, list[float]]:
    """Seconds of each work in rounds that run every one once, after a round to warm up; every other one backwards."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for number in range(num_rounds + 1):
        for name in list(works)[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            works[name]()
            if number:
                taken[name].append(time.perf_counter() - start)
    return taken


def table(rows: Sequence[Row]) -> str:
    """One line a row."""
    lines = [
        f"{'case':<50}{'way':<8}{'grid':<8}{'parts':>5}{'page KiB':>10}{'GiB/s':>8}{'memcpy':>8}{'ratio':>7}{'aim':>6}"
    ]
    for row in rows:
        lines.append(
            f"{row.case:<50}{row.direction:<8}{row.grid:<8}{row.num_parts:>5}{row.page_bytes >> 10:>10,}"
            f"{row.gib_per_s:>8.2f}{row.memcpy_gib_per_s:>8.2f}{row.ratio:>7.2f}{row.aim:>6.2f} {row.verdict}"
        )
    return "\n".join(lines)
