"""The worker halves of an engine whose ranks share out their pages, stepped by hand as the scheduler half would.

Two ways of sharing: the engine shards each request's KV over ranks (decode context parallelism), or ranks hold the
same KV and keep each page once in host memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from layout_kit import role_chunks
from thread_collective import Groups, ThreadCollective
from transfer_fixtures import (
    NAMESPACE,
    PATIENCE_S,
    POISON,
    Layout,
    Tensors,
    WatchedStore,
    block_bytes,
    device_tensors,
    move,
    share,
    write_block,
)

from vllm_hicache.config import Config
from vllm_hicache.consensus import Ledger
from vllm_hicache.inventory import Agreed, agree
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import BlockId, OpId, Phase, RequestId, Role
from vllm_hicache.namespace import Spaces
from vllm_hicache.ownership import Ownership
from vllm_hicache.place import Place
from vllm_hicache.plan import Ack, FlushOp, LoadOp, PageMove, Plan, SaveOp
from vllm_hicache.transfer.collective import Collective
from vllm_hicache.worker import WorkerHalf

LAYERS, BLOCK_TOKENS, NUM_PAGES, NUM_ROWS = 3, 4, 8, 5
NUM_BLOCKS = 40
REQUEST = RequestId("r")


class Engine:
    """All ranks of an engine that holds the model in `num_heads` KV heads; requests of theirs have `NUM_PAGES` pages.

    A page is one block of `source` on every rank that has it on the device at all. It is saved from one block and
    loaded to another; what blocks hold besides is poison.

    Attributes:
        opened: who asked to be connected with which tensor ranks, for which device.
        acked: every acknowledgement, in order; `settled` are the last ones, by operation.
        received: requests that each rank has given back; `invalid` are blocks of theirs that it has not filled.
    """

    def __init__(
        self,
        store: WatchedStore,
        tp_size: int,
        num_heads: int = 1,
        dcp_size: int = 1,
        connected: bool = True,
        timeout_s: float = PATIENCE_S,
        **settings: object,
    ) -> None:
        layout = Layout(LAYERS, num_heads, NUM_BLOCKS, BLOCK_TOKENS, 2)
        self.source = device_tensors(replace(layout, blocks=NUM_PAGES), seed=3)
        self.opened: list[tuple[int, list[int], str]] = []
        self.collectives: list[ThreadCollective] = []
        self.tensors: list[Tensors] = []
        self.halves: list[WorkerHalf] = []
        self._heads: list[tuple[int, int]] = []
        self._groups, self._timeout_s = Groups(), timeout_s
        self._ledger = Ledger(range(tp_size))
        self._acks: list[Ack] = []
        self.settled: dict[int, Ack] = {}
        self.acked: list[Ack] = []
        self.received: list[set[RequestId]] = [set() for _ in range(tp_size)]
        self.invalid: list[set[BlockId]] = [set() for _ in range(tp_size)]
        for rank in range(tp_size):
            place = Place(rank, tp_size, 1, num_heads, LAYERS, tp_size, dcp_size)
            self._make(store, place, layout, connected, settings)
        self.agreed: Agreed = agree([half.hand_over() for half in self.halves], tp_size)

    def _make(
        self, store: WatchedStore, place: Place, layout: Layout, connected: bool, settings: dict[str, object]
    ) -> None:
        each, copies = max(1, layout.heads // place.tp_size), max(1, place.tp_size // layout.heads)
        head = place.rank // copies * each
        self._heads.append((head, head + each))
        tensors = share(device_tensors(layout), (0, LAYERS), self._heads[-1])
        for block in range(NUM_BLOCKS):
            write_block(tensors, block)
        memory = NUM_ROWS * len(block_bytes(tensors, 0))
        raw = {"page_tokens": BLOCK_TOKENS, "grid": f"1x{layout.heads}", "host_memory": memory, "io_threads": 2}
        config = Config.parse(raw | settings)

        def open_collective(members: Sequence[int], device: torch.device) -> Collective:
            self.opened.append((place.rank, list(members), device.type))
            group, index = tuple(members), list(members).index(place.rank)
            self.collectives.append(self._groups.join(group, index, len(group), self._timeout_s))
            return self.collectives[-1]

        half = WorkerHalf(
            config,
            place,
            tensors,
            BLOCK_TOKENS,
            {Role.TARGET: "test"},
            Metrics(),
            1 << 30,
            lambda layout: lambda spaces: role_chunks(store, layout, spaces.target),
            open_collective if connected else None,
        )
        self.tensors.append(tensors)
        self.halves.append(half)

    # Steps

    def step(self, **plan: object) -> None:
        """One step on all ranks, and what all of them have come to by it."""
        acks, self._acks = tuple(self._acks), []
        whole = Plan(acks=acks, num_slots=self.agreed.num_slots, **plan)  # type: ignore[arg-type]
        for half in self.halves:
            half.start_loads(whole)
            half.commit_saves(whole)
        for rank, half in enumerate(self.halves):
            result = half.collect(whole)
            self.received[rank] |= result.received
            self.invalid[rank] |= result.invalid_blocks
            for report in result.reports:
                self.take(self._ledger.record(report))

    def take(self, ack: Ack | None) -> None:
        if ack is not None:
            self._acks.append(ack)
            self.acked.append(ack)
            if ack.phase == Phase.SETTLED:
                self.settled[ack.op] = ack

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, (self.acked, self.received)
            self.step()

    def finish(self, op: OpId) -> Ack:
        """Step until an operation has settled everywhere and every rank has heard so."""
        self.until(lambda: op in self.settled and not self._acks)
        return self.settled[op]

    def give_up(self, op: OpId) -> None:
        self.take(self._ledger.give_up(op))

    # Operations

    def save(self, pages: Sequence[PageMove]) -> OpId:
        op = self._ledger.open()
        self.step(saves=(SaveOp(op, tuple(pages)),))
        return op

    def flush(self, pages: Sequence[PageMove]) -> OpId:
        op = self._ledger.open()
        self.step(flushes=(FlushOp(op, Spaces(NAMESPACE), tuple(pages)),))
        return op

    def load(self, pages: Sequence[PageMove], request: RequestId | None = REQUEST) -> OpId:
        op = self._ledger.open()
        self.step(loads=(LoadOp(op, Spaces(NAMESPACE), request, tuple(pages)),))
        return op

    # Pages

    @property
    def ownership(self) -> Ownership:
        return self.agreed.ownership

    def block(self, page: int, first: int) -> int:
        """Device block of a page; where the engine shards requests, pages of one row share its number."""
        return first + (self.ownership.row(page) if self.ownership.on_device else page)

    @property
    def rotation(self) -> int:
        """Owner of the first page: another than the page's number says, where it may be."""
        return 0 if self.ownership.on_device else 1

    def moves(self, first_block: int, first_slot: int = 0, from_store: bool = False) -> list[PageMove]:
        """All pages for which there is room in blocks from `first_block` on and slots from `first_slot` on."""
        first_slot += self.rotation
        return [
            move(page, first_slot + page, [self.block(page, first_block)], 0, from_store)
            for page in range(min(NUM_PAGES, self.agreed.num_slots - first_slot))
        ]

    def has_on_device(self, rank: int, page: int) -> bool:
        ownership = self.ownership
        return not ownership.on_device or ownership.owner(page) == rank % ownership.num_owners

    def content(self, rank: int, page: int) -> bytes:
        return block_bytes(share(self.source, (0, LAYERS), self._heads[rank]), page)

    def compute(self) -> None:
        """The forward pass: blocks from 0 on get every page that a rank has on its device."""
        for rank, tensors in enumerate(self.tensors):
            own = share(self.source, (0, LAYERS), self._heads[rank])
            for page in range(NUM_PAGES):
                for name in tensors if self.has_on_device(rank, page) else ():
                    tensors[name][self.block(page, 0)] = own[name][page]

    def poison(self) -> None:
        for tensors in self.tensors:
            for block in range(NUM_BLOCKS):
                write_block(tensors, block)

    def check_blocks(self, first: int, num_pages: int) -> None:
        """The leading pages are where they belong, on every rank; all other blocks are poison."""
        for rank, tensors in enumerate(self.tensors):
            expected = {block: bytes([POISON]) * len(self.content(rank, 0)) for block in range(NUM_BLOCKS)}
            for page in range(num_pages):
                if self.has_on_device(rank, page):
                    expected[self.block(page, first)] = self.content(rank, page)
            assert {block: block_bytes(tensors, block) for block in range(NUM_BLOCKS)} == expected, f"rank {rank}"
