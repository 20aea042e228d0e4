"""Plans and reports: what the two halves tell each other once a step.

Pure frozen records of ints, bytes and tuples. A plan carries numbered operations; a report answers them by
rank. vLLM carries both between its processes; nothing here is executable and nothing is trusted by type name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_hicache.entries import Entry, Mark
from vllm_hicache.geometry import Holding
from vllm_hicache.names import BlockId, MissReason, OpId, PageKey, Phase, RequestId, Role, Slot
from vllm_hicache.namespace import Spaces


@dataclass(frozen=True, slots=True)
class PageMove:
    """One page between a host slot and device blocks.

    Attributes:
        key: the page.
        plain: name of the target's bytes, where the page is known by the token that follows it as well.
        slot: its place in the host pool.
        blocks: device blocks in the page's order; fewer than a page's where the device holds its head
            already, none where only the host slot is to be filled.
        first_block: position within the page of `blocks[0]`.
        from_store: the slot must first be filled from the store.
        from_peer: it is filled from the load's peer, without asking the store first.
        has_draft: whether the page has draft state; where not, its part of a slot is cleared, and never stored.
    """

    key: PageKey
    slot: Slot
    blocks: tuple[BlockId, ...]
    first_block: int = 0
    from_store: bool = False
    plain: PageKey | None = None
    has_draft: bool = True
    from_peer: bool = False

    def name(self, role: Role) -> PageKey:
        """Under which a role's bytes of the page are stored: the target's know nothing of the token that follows."""
        return self.plain if role is Role.TARGET and self.plain is not None else self.key


@dataclass(frozen=True, slots=True)
class PeerRank:
    """A rank of another engine that serves pages, and what it holds of each."""

    host: str
    port: int
    holdings: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class Peer:
    """Another engine that has computed a prompt, or is about to.

    Attributes:
        request: by this name it is told that nothing more will be read.
    """

    request: str
    ranks: tuple[PeerRank, ...]


@dataclass(frozen=True, slots=True)
class LoadOp:
    """Towards the device: fill slots from the store where asked, then copy to the blocks, in page order.

    Attributes:
        spaces: under which it reads the store.
        request_id: whose blocks wait for it; `None` for a prefetch into host memory.
        time_limit_s: after this long, what has arrived counts and the rest is given up; `None` waits for
            every page or its failure.
        unserved: blocks that were promised, for which no slot could be had; they count as failed.
        peer: whom pages `from_peer` come from, and those of the store that it does not have after all.
    """

    op: OpId
    spaces: Spaces
    request_id: RequestId | None
    pages: tuple[PageMove, ...]
    time_limit_s: float | None = None
    unserved: tuple[BlockId, ...] = ()
    peer: Peer | None = None


@dataclass(frozen=True, slots=True)
class SaveOp:
    """Device blocks to host slots; committed after forward and draft pass of the step. At least one page."""

    op: OpId
    pages: tuple[PageMove, ...]

    def __post_init__(self) -> None:
        _require_pages(self.op, self.pages)


@dataclass(frozen=True, slots=True)
class FlushOp:
    """Host slots to the store, under the namespaces of the pages. At least one page."""

    op: OpId
    spaces: Spaces
    pages: tuple[PageMove, ...]

    def __post_init__(self) -> None:
        _require_pages(self.op, self.pages)


@dataclass(frozen=True, slots=True)
class ExportOp:
    """Host slots that other engines may read until the operation is cancelled.

    Attributes:
        absent: pages that will not come, so that nobody waits for them.
    """

    op: OpId
    spaces: Spaces
    pages: tuple[PageMove, ...]
    absent: tuple[PageMove, ...] = ()


def _require_pages(op: OpId, pages: tuple[PageMove, ...]) -> None:
    if not pages:
        raise ValueError(f"operation {op} writes 0 pages: it would never be reported")


@dataclass(frozen=True, slots=True)
class OpReport:
    """One rank's word on one operation, which replaces what it said before: nothing in it ever falls.

    Attributes:
        pages_done: leading pages that reached their destination.
        pages_held: leading pages whose slot holds checked bytes; at least `pages_done`.
        phase: how far the operation has come on this rank.
        reason: why it is not all pages.
    """

    rank: int
    op: OpId
    pages_done: int
    pages_held: int
    phase: Phase = Phase.SETTLED
    reason: MissReason | None = None


@dataclass(frozen=True, slots=True)
class Ack:
    """What all ranks have reached: the least of their reports. Numbers count from the operation's beginning.

    Every rank consumes exactly these lengths, although it may have more; what is left over waits for the next one.
    """

    op: OpId
    pages_done: int
    pages_held: int
    phase: Phase = Phase.SETTLED
    reason: MissReason | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Scheduler half to worker half, every step. Acknowledgements come first: operations build on them.

    Attributes:
        acks: what ranks are to consume, in this order.
        exports: pages that other engines may read from now on.
        releases: peers of which nothing more will be read.
        cancels: loads whose result nobody waits for any more, and exports that are over.
        asks: operations of which a rank has been silent: every rank reports them again.
        num_slots: pages of host memory that are used in every group of ranks, agreed at start.
        idle: the engine computes nothing in this step, so that workers may wait a moment for what is under way.
    """

    acks: tuple[Ack, ...] = ()
    loads: tuple[LoadOp, ...] = ()
    saves: tuple[SaveOp, ...] = ()
    flushes: tuple[FlushOp, ...] = ()
    exports: tuple[ExportOp, ...] = ()
    releases: tuple[Peer, ...] = ()
    cancels: tuple[OpId, ...] = ()
    asks: tuple[OpId, ...] = ()
    num_slots: int = 0
    idle: bool = False


@dataclass(slots=True)
class NextPlan:
    """What is decided for the step that comes, as it gathers; lists as in `Plan`."""

    acks: list[Ack] = field(default_factory=list)
    loads: list[LoadOp] = field(default_factory=list)
    saves: list[SaveOp] = field(default_factory=list)
    flushes: list[FlushOp] = field(default_factory=list)
    exports: list[ExportOp] = field(default_factory=list)
    releases: list[Peer] = field(default_factory=list)
    cancels: list[OpId] = field(default_factory=list)
    asks: list[OpId] = field(default_factory=list)

    def finished(self, num_slots: int, idle: bool) -> Plan:
        """The plan; the rest as there."""
        return Plan(
            tuple(self.acks),
            tuple(self.loads),
            tuple(self.saves),
            tuple(self.flushes),
            tuple(self.exports),
            tuple(self.releases),
            tuple(self.cancels),
            tuple(self.asks),
            num_slots,
            idle,
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one rank's worker half has to say since it was asked last.

    Attributes:
        reports: of operations that have come further.
        entries: what it consumed, for the rank checker; `mark` is how far its log has come with them.
        received: requests whose blocks are no longer written, successful or not, as acknowledged.
        invalid_blocks: blocks of those requests that do not hold what was promised.
        acknowledged: requests of which other engines have read what they need.
    """

    reports: tuple[OpReport, ...] = ()
    entries: tuple[Entry, ...] = ()
    mark: Mark | None = None
    received: frozenset[RequestId] = field(default_factory=frozenset)
    invalid_blocks: frozenset[BlockId] = field(default_factory=frozenset)
    acknowledged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankNews:
    """One rank's part of a step's result that goes to the scheduler half."""

    rank: int
    reports: tuple[OpReport, ...]
    entries: tuple[Entry, ...] = ()
    mark: Mark | None = None
    acknowledged: tuple[str, ...] = ()
