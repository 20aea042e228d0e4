"""One rank of the gather benchmark: its caches, what is timed on them, and the processes that the ranks are."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, multiprocessing

from vllm_hicache.context_parallel.gather import LayerGather
from vllm_hicache.context_parallel.scratch import Scratch
from vllm_hicache.context_parallel.tables import ScratchTables, scratch_tables
from vllm_hicache.transfer.collective import GlooCollective, as_bytes, new_group

PAGE_TOKENS = 128
HEAD_SIZE = 128
NUM_QUERY_HEADS = 8
CHUNK_TOKENS = 32
LIMIT_S = 120.0
WORKS = ("gather", "bare", "attend", "in turn", "step", "chunk")
OVERLAPPED = ("step", "chunk")
"""Works in which a layer is gathered while the one before attends."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured; contexts in tokens."""

    num_ranks: int = 2
    num_layers: int = 30
    contexts: tuple[int, ...] = ()
    num_rounds: int = 1


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rank found for one context.

    Attributes:
        layer_bytes: one layer's scratch.
        received_bytes: a layer, from other ranks.
        scratch_bytes: the most that the scratch held.
        wall_s: of each work, seconds a round.
        busy_s: of each overlapped work, seconds that its gathers took, a round.
        exposed_s: of each overlapped work, seconds that attention waited for them, a round.
    """

    num_ranks: int
    context_tokens: int
    layer_bytes: int
    received_bytes: int
    scratch_bytes: int
    wall_s: dict[str, list[float]]
    busy_s: dict[str, list[float]]
    exposed_s: dict[str, list[float]]


def cache_of(layer: int, rank: int, blocks: torch.Tensor) -> torch.Tensor:
    """What a rank holds of these blocks, [blocks, 1, PAGE_TOKENS, 2 * HEAD_SIZE] bfloat16.

    Pages of neighbouring layers, ranks and blocks differ in every value.
    """
    inside = torch.arange(PAGE_TOKENS * 2 * HEAD_SIZE) * 5 % 127
    page = blocks * 31 + layer * 7 + rank * 3
    values = (page % 128).bfloat16().unsqueeze(1) + inside.bfloat16()
    return values.div_(256).view(-1, 1, PAGE_TOKENS, 2 * HEAD_SIZE)


class Rig:
    """A rank's caches for one context, in blocks of another order than the request's."""

    def __init__(self, settings: Settings, rank: int, context: int, collective: GlooCollective) -> None:
        self.settings, self.rank, self.context, self.collective = settings, rank, context, collective
        self.tables = tables_of(settings.num_ranks, rank, context)
        num_blocks = self.tables.num_history + self.tables.num_fresh
        self.caches = [cache_of(layer, rank, torch.arange(num_blocks)) for layer in range(settings.num_layers)]
        self.scratch = Scratch(torch.device("cpu"))
        self.gather = LayerGather(collective, self.scratch)
        self.token, self.chunk = (
            torch.ones(1, 1, num_tokens * NUM_QUERY_HEADS, HEAD_SIZE, dtype=torch.bfloat16)
            for num_tokens in (1, CHUNK_TOKENS)
        )
        self.num_gathered = settings.num_ranks * self.tables.num_history
        self.bare_rows = [torch.empty_like(self.pages(layer)[: self.num_gathered]) for layer in range(2)]

    def pages(self, layer: int) -> torch.Tensor:
        """A layer's scratch, with whatever is in it."""
        return self.scratch.take(layer, self.tables.num_pages, self.caches[0].shape[1:], torch.bfloat16)

    def layers(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Gather layer by layer, one ahead."""
        self.gather.begin(self.caches, self.tables)
        for layer in range(len(self.caches)):
            pages = self.gather.wait(layer)
            self.gather.ahead(layer)
            yield layer, pages

    def prove(self) -> None:
        """Every byte gathered is that of its rank and block, in every layer."""
        for layer, pages in self.layers():
            for owner, row in enumerate(pages[: self.num_gathered].unflatten(0, (self.settings.num_ranks, -1))):
                if not torch.equal(row, cache_of(layer, owner, self.tables.history)):
                    raise RuntimeError(f"layer {layer}: the pages of rank {owner} are not what that rank holds")

    def work(self, name: str) -> Callable[[], None]:
        """One of WORKS."""
        return {
            "gather": self._gather,
            "bare": self._bare,
            "attend": self._attend,
            "in turn": self._in_turn,
            "step": lambda: self._overlapped(self.token),
            "chunk": lambda: self._overlapped(self.chunk),
        }[name]

    def _gather(self) -> None:
        for _ in self.layers():
            pass

    def _bare(self) -> None:
        for layer, cache in enumerate(self.caches):
            row = as_bytes(cache[: self.tables.num_history]).flatten()
            distributed.all_gather_single(as_bytes(self.bare_rows[layer % 2]).flatten(), row)

    def _attend(self) -> None:
        for layer in range(len(self.caches)):
            self._attention(self.token, self.pages(layer))

    def _in_turn(self) -> None:
        self.gather.begin(self.caches, self.tables)
        for layer in range(len(self.caches)):
            self._attention(self.token, self.gather.wait(layer))
            self.gather.ahead(layer)

    def _overlapped(self, query: torch.Tensor) -> None:
        for _, pages in self.layers():
            self._attention(query, pages)

    def _attention(self, query: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        # The whole history comes before every query, in whatever order it lies. One KV head serves all query heads.
        keys, values = pages[: self.num_gathered].view(1, 1, -1, 2, HEAD_SIZE).unbind(3)
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values)


def tables_of(num_ranks: int, rank: int, context: int) -> ScratchTables:
    """One request with `context` tokens of history and one new, in blocks of random order, the same on all ranks."""
    num_blocks = context // (num_ranks * PAGE_TOKENS) + 1
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(context))
    starts = torch.tensor([0, 1])
    return scratch_tables(blocks.unsqueeze(0), torch.tensor([context + 1]), starts, num_ranks, rank, PAGE_TOKENS)


def measure_context(rig: Rig) -> Measured:
    """All works in rounds, every other one backwards, after one to warm up. All ranks begin a work together."""
    rig.prove()
    wall_s: dict[str, list[float]] = {name: [] for name in WORKS}
    busy_s: dict[str, list[float]] = {name: [] for name in OVERLAPPED}
    exposed_s: dict[str, list[float]] = {name: [] for name in OVERLAPPED}
    for number in range(rig.settings.num_rounds + 1):
        for name in WORKS[:: 1 if number % 2 else -1]:
            distributed.barrier()
            busy, exposed = rig.collective.gather_s, rig.gather.figures.exposed_s
            start = time.perf_counter()
            rig.work(name)()
            if number == 0:
                continue
            wall_s[name].append(time.perf_counter() - start)
            if name in OVERLAPPED:
                busy_s[name].append(rig.collective.gather_s - busy)
                exposed_s[name].append(rig.gather.figures.exposed_s - exposed)
    row_bytes = rig.tables.num_history * rig.caches[0][0].nbytes
    return Measured(
        num_ranks=rig.settings.num_ranks,
        context_tokens=rig.context,
        layer_bytes=rig.pages(0).nbytes,
        received_bytes=(rig.settings.num_ranks - 1) * row_bytes,
        scratch_bytes=rig.scratch.peak_bytes,
        wall_s=wall_s,
        busy_s=busy_s,
        exposed_s=exposed_s,
    )


def run_rank(rank: int, settings: Settings, folder: str) -> None:
    """Body of a rank's process: measure every context, and leave what was found in the folder."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = distributed.FileStore(str(Path(folder) / "meeting"), settings.num_ranks)
    limit = timedelta(seconds=LIMIT_S)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=settings.num_ranks, timeout=limit)
    found = []
    with closing(GlooCollective(new_group(range(settings.num_ranks), LIMIT_S), LIMIT_S)) as collective:
        for context in settings.contexts:
            if rank == 0:
                print(f"{settings.num_ranks} ranks, {context:,} tokens …", file=sys.stderr, flush=True)
            found.append(asdict(measure_context(Rig(settings, rank, context, collective))))
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def measure(settings: Settings, folder: Path) -> list[list[Measured]]:
    """What each rank found for each context: [contexts][ranks]. A rank that fails ends all of them."""
    multiprocessing.start_processes(run_rank, (settings, str(folder)), nprocs=settings.num_ranks, start_method="spawn")
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(settings.num_ranks)]
    return [[Measured(**one) for one in ranks] for ranks in zip(*found, strict=True)]
