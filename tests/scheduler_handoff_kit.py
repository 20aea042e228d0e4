"""A scheduler half whose prompts go to other engines or come from them, with ranks and readers that a test plays.

Fixtures are in `scheduler_handoff_fixtures`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from scheduler_kit import PAGE, Op, Rig, Tokens, prompt

from vllm_hicache.geometry import Holding
from vllm_hicache.keys import PageKeys, chain_root
from vllm_hicache.names import OpId, PageKey, RequestId, Role
from vllm_hicache.plan import ExportOp, FlushOp, LoadOp, OpReport, PageMove, Peer, PeerRank, Plan

LEASE_S = 60.0
RANKS = (PeerRank("127.0.0.1", 7001, (Holding(Role.TARGET, (0, 1), (0, 1)),)),)


def peer(request: str = "cmpl-1") -> Peer:
    """Another engine that has computed a prompt."""
    return Peer(request, RANKS)


class Clock:
    """The scheduler half's clock."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class HandoffRig(Rig):
    """As `Rig`; exported slots may not be written either, until all ranks have reported that nobody reads them.

    Attributes:
        exports: those that ranks have been told of and that are still read.
        told: all of them, in order.
        released: peers that were told of the end.
        flushed, cancelled: what ranks were told to flush and to cancel.
        answers: whether ranks report cancelled exports at once.
    """

    def __init__(self, *arguments: object, **settings: object) -> None:
        self.exports: dict[OpId, ExportOp] = {}
        self.told: list[ExportOp] = []
        self.released: list[Peer] = []
        self.flushed: list[FlushOp] = []
        self.cancelled: list[OpId] = []
        self.answers = True
        super().__init__(*arguments, **settings)  # type: ignore[arg-type]

    def hand(self, name: str, tokens: Iterable[int], *, to: str | None = None, source: Peer | None = None) -> None:
        """Begin a request whose prompt goes `to` another engine that reads it by this name, or comes from one."""
        self.sources[name] = Tokens(list(tokens))
        self.num_blocks.setdefault(name, 1000 * len(self.num_blocks))
        self.half.begin(RequestId(name), self.sources[name], peer=source, export=to)

    def prefilled(self, name: str, tokens: Iterable[int], to: str) -> list[ExportOp]:
        """Compute and end a request that goes to another engine; the exports that tell of its pages."""
        first = len(self.told)
        self.hand(name, tokens, to=to)
        self.admit(name)
        self.compute(name)
        self.end(name)
        self.settle()
        return self.told[first:]

    def end(self, name: str, is_computed: bool = True) -> str | None:
        self.sources.pop(name, None)
        return self.half.finished(RequestId(name), is_computed)

    def settle(self) -> None:
        """As for every rig, and one step more, which tells of what has come to host memory by the last report."""
        super().settle()
        self.plan()

    def acknowledge(self, *names: str) -> None:
        self.half.report([], acknowledged=names)

    def plan(self) -> Plan:
        plan = super().plan()
        self.released += plan.releases
        self.flushed += plan.flushes
        self.cancelled += plan.cancels
        ended = [op for op in plan.cancels if op in self.exports]
        for export in plan.exports:
            self._check_exported(export)
            self.exports[export.op] = export
            self.told.append(export)
        for op in ended if self.answers else ():
            self.read(op)
        return plan

    def read(self, op: OpId) -> None:
        """No rank has a read of this export open any more."""
        export = self.exports.pop(op)
        self._check_exported(export)
        num_pages = len(export.pages)
        self.half.report([OpReport(rank, op, num_pages, num_pages) for rank in self.ranks])

    def _check_exported(self, export: ExportOp) -> None:
        for page in export.pages:
            assert {self.content[rank, page.slot] for rank in self.ranks} == {page.key}, "the slot holds another page"

    def _check_slots(self, op: Op) -> None:
        super()._check_slots(op)
        read = {page.slot for export in self.exports.values() for page in export.pages}
        assert not read & {page.slot for page in op.pages if page.from_store}, "others read the slot"

    def close(self) -> None:
        for name in list(self.sources):
            self.end(name)
        self.settle()
        self.acknowledge(*(export for export in list(self.half._exports._open)))
        super().close()
        assert (self.exports, self.half._operations.num_exports, self.half._exports._open) == ({}, 0, {})


def full_keys(rig: Rig, tokens: Sequence[int]) -> list[PageKey]:
    """Names of the full pages of a prompt."""
    return named(rig, tokens)[: len(tokens) // PAGE]


def named(rig: Rig, tokens: Sequence[int]) -> list[PageKey]:
    """Names of all pages of a prompt, that of an unfinished one last."""
    keys = PageKeys(chain_root(rig.half.namespace.digest()), PAGE)
    keys.extend(tokens)
    tail = keys.tail()
    return keys.keys if tail is None else [*keys.keys, tail]


def names_of(pages: Sequence[PageMove]) -> list[PageKey]:
    return [page.key for page in pages]


def taking(rig: HandoffRig, name: str = "a", pages: float = 2.5, local: int = 0, request: str = "cmpl-1") -> LoadOp:
    """A request whose prompt another engine has computed, and the load that it begins with."""
    rig.hand(name, prompt(pages), source=peer(request))
    assert rig.admit(name, local) > 0
    (load,) = rig.plan().loads
    return load


MakeHandoff = Callable[..., HandoffRig]
