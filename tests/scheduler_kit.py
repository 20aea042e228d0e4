"""A scheduler half with an engine and ranks that do what a test tells them.

`Rig` stands for both. It keeps what every slot of every rank would hold and refuses a plan that reads a slot
that holds something else, or writes one that another open operation uses. Fixtures are in `scheduler_fixtures`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from vllm_hicache.config import Config, DraftMiss
from vllm_hicache.geometry import Cell, PageLayout, RoleShape
from vllm_hicache.grid import Grid
from vllm_hicache.keys import ExtraKey
from vllm_hicache.lookup import Lookup, StoreLookups
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import BlockId, MissReason, ObjectName, OpId, PageKey, Phase, RequestId, Role, Slot
from vllm_hicache.namespace import DraftSpace, Namespace, Spaces
from vllm_hicache.plan import FlushOp, LoadOp, OpReport, PageMove, Plan, SaveOp
from vllm_hicache.scheduler import Offer, SchedulerHalf
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.chunks import RoleChunks
from vllm_hicache.storage.envelope import ChunkId
from vllm_hicache.storage.wrappers import StoreWrapper
from vllm_hicache.stores import StoreFactory

BLOCK, PAGE = 16, 64
SPACE = Namespace("weights", "0", "bf16", "none", "cpu", 1, 1, 16, BLOCK, PAGE, "1x1")
CELLS = PageLayout((RoleShape(Role.TARGET, 1, 1, 16),), BLOCK, PAGE, Grid()).cells
DRAFT = RoleShape(Role.DRAFT, 1, 1, 16)
BOTH_CELLS = PageLayout((RoleShape(Role.TARGET, 1, 1, 16), DRAFT), BLOCK, PAGE, Grid()).cells
PAYLOAD = memoryview(bytes(CELLS[0].num_bytes))
UNKNOWN = PageKey(b"")

Op = LoadOp | SaveOp | FlushOp


@dataclass
class Tokens:
    """A request of the engine, as far as it is read."""

    all_token_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass
class Holds:
    """Counts holds of device blocks."""

    held: Counter[BlockId] = field(default_factory=Counter)

    def hold(self, blocks: Sequence[BlockId]) -> None:
        self.held.update(blocks)

    def release(self, blocks: Sequence[BlockId]) -> None:
        self.held.subtract(blocks)
        assert min(self.held.values(), default=0) >= 0
        self.held = +self.held


class NotedLookups(StoreLookups):
    """Keeps the questions, so that a test can wait for the answers."""

    def __init__(self, metrics: Metrics, cells: Sequence[Cell] = CELLS, needs_draft: bool = True) -> None:
        self.asked: list[Lookup] = []
        super().__init__(cells, metrics, needs_draft)

    def begin(self, keys: Sequence[PageKey], store: RoleChunks, plain: Sequence[PageKey] | None = None) -> Lookup:
        self.asked.append(super().begin(keys, store, plain))
        return self.asked[-1]

    def wait(self) -> None:
        assert all(lookup.done.wait(30) for lookup in self.asked)


class Rig:
    """One half with an engine and workers that do what a test tells them."""

    def __init__(
        self,
        open_store: StoreFactory | None = None,
        num_slots: int = 64,
        ranks: Sequence[int] = (0,),
        lookups: NotedLookups | None = None,
        events: bool = False,
        draft: DraftSpace | None = None,
        **settings: object,
    ) -> None:
        self.ranks, self.holds, self.metrics = tuple(ranks), Holds(), Metrics()
        self.open_store, self.cells = open_store, CELLS if draft is None else BOTH_CELLS
        needs_draft = settings.get("draft_miss") != DraftMiss.SERVE
        self.lookups = (
            NotedLookups(self.metrics, self.cells, needs_draft) if open_store and lookups is None else lookups
        )
        raw = {"load_threshold": 1, "eviction": "lru", **({} if open_store else {"store": "none"}), **settings}
        self.half = SchedulerHalf(
            Config.parse(raw),
            SPACE,
            BLOCK,
            num_slots,
            ranks,
            self.holds,
            self.metrics,
            open_store,
            self.lookups,
            events,
            draft=draft,
        )
        self.sources: dict[str, Tokens] = {}
        self.open: dict[OpId, tuple[Op, Spaces, set[int]]] = {}
        self.content: dict[tuple[int, Slot], PageKey] = {}
        self.num_blocks: dict[str, int] = {}

    # The engine

    def begin(self, name: str, tokens: Iterable[int], salt: str | None = None, extras: Iterable[ExtraKey] = ()) -> None:
        self.sources[name] = Tokens(list(tokens))
        self.num_blocks.setdefault(name, 1000 * len(self.num_blocks))
        self.half.begin(RequestId(name), self.sources[name], salt, None, extras)

    def blocks(self, name: str) -> list[BlockId]:
        first = self.num_blocks[name]
        return [BlockId(first + index) for index in range(-(-self.sources[name].num_tokens // BLOCK))]

    def match(self, name: str, local: int = 0) -> Offer:
        """The half's offer, given again where it waited for the store."""
        offer = self.half.match(RequestId(name), local)
        if offer.pending and self.lookups is not None:
            self.lookups.wait()
            return self.half.match(RequestId(name), local)
        return offer

    def admit(self, name: str, local: int = 0) -> int:
        """Match and allocate; the tokens that will be loaded."""
        tokens = self.match(name, local).tokens
        self.half.allocated(RequestId(name), self.blocks(name), tokens)
        return tokens

    def compute(self, name: str, upto: int | None = None, is_drafted: bool = True) -> None:
        tokens = self.sources[name].num_tokens if upto is None else upto
        self.half.scheduled(RequestId(name), tokens, lambda: self.blocks(name), is_drafted)

    def finish(self, name: str) -> None:
        self.half.finished(RequestId(name))
        self.sources.pop(name, None)

    def run(self, name: str, tokens: Iterable[int], salt: str | None = None) -> int:
        """A request's whole life, everything going well; the tokens that were loaded."""
        self.begin(name, tokens, salt)
        loaded = self.admit(name)
        self.settle()
        self.compute(name)
        self.settle()
        self.finish(name)
        return loaded

    # The workers

    def plan(self) -> Plan:
        plan = self.half.plan()
        for op in (*plan.loads, *plan.saves, *plan.flushes):
            self._check_slots(op)
            self.open[op.op] = (op, getattr(op, "spaces", Spaces(b"")), set(self.ranks))
            self._do(op, Spaces(b""), self.ranks, 0, 0)
        return plan

    def report(
        self,
        op: Op,
        done: int | None = None,
        held: int | None = None,
        *,
        reason: MissReason | None = None,
        ranks: Sequence[int] | None = None,
        phase: Phase = Phase.SETTLED,
    ) -> None:
        """Let `ranks`, or all that have not settled, report `op`: all pages, or `done` of them, `held` in slots."""
        done = len(op.pages) if done is None else done
        held = done if held is None else held
        _, spaces, waiting = self.open[op.op]
        for rank in sorted(waiting) if ranks is None else ranks:
            self._do(op, spaces, [rank], done, held)
            if phase == Phase.SETTLED:
                waiting.discard(rank)
            if not waiting:
                self.open.pop(op.op, None)
            self.half.report([OpReport(rank, op.op, done, held, phase, reason)])

    def settle(self) -> None:
        """Plan and report, everything going well, until nothing is open."""
        for _ in range(1000):
            self.plan()
            for op, _, _ in list(self.open.values()):
                self.report(op)
            if not self.half.has_pending:
                return
        raise AssertionError(f"{len(self.open)} operations stay open")

    def _do(self, op: Op, spaces: Spaces, ranks: Sequence[int], done: int, held: int) -> None:
        for index, page in enumerate(op.pages):
            for rank in ranks:
                if isinstance(op, SaveOp) or page.from_store:
                    self.content[rank, page.slot] = page.key if index < held else UNKNOWN
                else:
                    assert self.content[rank, page.slot] == page.key, "the slot changed while it was read"
            if isinstance(op, FlushOp) and index < done and self.open_store is not None:
                for cell in self.cells:
                    if page.has_draft or cell.role is Role.TARGET:
                        self.open_store(spaces).save(ChunkId.of(page.name(cell.role), cell), PAYLOAD, cell.unit_bytes)

    def _check_slots(self, op: Op) -> None:
        others = [page for other, _, _ in self.open.values() for page in other.pages]
        written = {page.slot for page in op.pages if isinstance(op, SaveOp) or page.from_store}
        assert not written & {page.slot for page in others}, "an open operation uses the slot"
        for page in op.pages:
            if page.slot not in written:
                assert {self.content[rank, page.slot] for rank in self.ranks} == {page.key}

    # The end

    def close(self) -> None:
        """End everything, and find that nothing was kept."""
        for name in list(self.sources):
            self.finish(name)
        self.settle()
        self.conserved()
        self.half.reset("the end")
        assert self.half.tier.num_free == self.half.tier.num_slots
        self.half.close()

    def conserved(self) -> None:
        tier = self.half.tier
        tier.check()
        assert (tier.num_leases, tier.num_reserved, self.holds.held, self.open) == (0, 0, Counter(), {})

    @property
    def counts(self) -> dict[str, float]:
        return self.metrics.drain()


def chunk(key: PageKey) -> ChunkId:
    return ChunkId(key, 0, Role.TARGET, 0, 0)


def prompt(pages: float, first: int = 0) -> range:
    """Token ids of a prompt of that many pages; prompts of one `first` are prefixes of each other."""
    return range(first * 10_000, first * 10_000 + int(pages * PAGE))


def moved(pages: Sequence[PageMove]) -> list[tuple[int, ...]]:
    return [page.blocks for page in pages]


class Gate(StoreWrapper):
    """Answers `exists` only while it is open."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.open = threading.Event()
        self.open.set()

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        assert self.open.wait(30)
        return super().exists(names)


def loading(rig: Rig, name: str, pages: float = 2.5) -> LoadOp:
    rig.begin(name, prompt(pages))
    assert rig.admit(name)
    (load,) = rig.plan().loads
    return load


MakeRig = Callable[..., Rig]
OpenStore = StoreFactory
