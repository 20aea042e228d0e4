"""Agreement between ranks: one acknowledged length for every operation.

Pure; the ledger is owned by the scheduler half, a `Consumption` by each worker half. Workers come along in any order
and report by rank. What every rank has reached is acknowledged, again and again while it grows: `ACK(4)`, then
`ACK(6)`. Each rank consumes exactly that; what it has beyond waits for the next acknowledgement. A rank that stays
silent holds nobody up for ever: after a time its operation is acknowledged as far as all had come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from vllm_hicache.errors import InvariantError
from vllm_hicache.names import BlockId, MissReason, OpId, Phase, RequestId
from vllm_hicache.plan import Ack, LoadOp, OpReport


@dataclass(frozen=True, slots=True)
class Silence:
    """An operation of which ranks have said nothing for long.

    Attributes:
        ranks: those that are behind the furthest; all of them where none has come to an end.
        waited_s: since the first rank's end, or else since anything was heard, seconds.
        is_late: whether another rank has come to its end, so that it is these that are waited for.
    """

    op: OpId
    ranks: tuple[int, ...]
    waited_s: float
    is_late: bool


@dataclass(slots=True)
class _Open:
    """An operation that has not settled on every rank.

    Attributes:
        heard_s: when it was opened, heard of or asked for last.
        ended_s: when the first rank said that it had received it.
    """

    agreed: Ack
    heard_s: float
    reports: dict[int, OpReport] = field(default_factory=dict)
    ended_s: float | None = None


class Ledger:
    """Open operations, and what ranks have reported of them.

    Args:
        ranks: every rank that must report.
        silence_s: how long ranks may say nothing of an open operation.
    """

    def __init__(self, ranks: Iterable[int], silence_s: float = float("inf")) -> None:
        self._ranks = frozenset(ranks)
        self._silence_s = silence_s
        self._open: dict[OpId, _Open] = {}
        self._last = 0
        self._look_at_s = float("inf")

    @property
    def num_open(self) -> int:
        """Operations that have not settled on every rank."""
        return len(self._open)

    @property
    def num_ranks(self) -> int:
        """Ranks that must report."""
        return len(self._ranks)

    def open(self, now_s: float = 0.0) -> OpId:
        """Number the next operation and expect reports of every rank for it."""
        self._last += 1
        op = OpId(self._last)
        self._open[op] = _Open(Ack(op, 0, 0, Phase.RUNNING), now_s)
        self._look_at_s = min(self._look_at_s, now_s + self._silence_s)
        return op

    def record(self, report: OpReport, now_s: float = 0.0) -> Ack | None:
        """Take one rank's report; the acknowledgement, if all ranks have come further by it.

        A rank that repeats itself, or whose reports overtake each other, changes nothing. After an acknowledgement of
        phase `RECEIVED` the pages done stay as they are, whatever comes.

        Raises:
            InvariantError: a report of an unknown rank, or for an operation that was never opened.
        """
        if report.rank not in self._ranks or not 0 < report.op <= self._last:
            raise InvariantError(
                f"report of rank {report.rank} for operation {report.op}, but ranks are {sorted(self._ranks)} and "
                f"{self._last} operations were opened"
            )
        state = self._open.get(report.op)
        if state is None:
            return None
        before = state.reports.get(report.rank)
        after = report if before is None else _later(before, report)
        if after == before:
            return None
        state.reports[report.rank] = after
        state.heard_s = now_s
        if after.phase >= Phase.RECEIVED and state.ended_s is None:
            state.ended_s = now_s
        return self._advance(state) if len(state.reports) == len(self._ranks) else None

    def silences(self, now_s: float) -> list[Silence]:
        """Operations of which nothing new was heard for too long; each again after as long a time."""
        if now_s < self._look_at_s:
            return []
        self._look_at_s = float("inf")
        found = []
        for op, state in self._open.items():
            if now_s - state.heard_s >= self._silence_s:
                since_s = state.heard_s if state.ended_s is None else state.ended_s
                silent = self._silent(state)
                found.append(Silence(op, silent, now_s - since_s, state.ended_s is not None and bool(silent)))
                state.heard_s = now_s
            self._look_at_s = min(self._look_at_s, state.heard_s + self._silence_s)
        return found

    def give_up(self, op: OpId) -> Ack | None:
        """Stop waiting for late ranks: the operation counts as received, as far as all ranks are known to have come.

        Its slots stay where they are until every rank has settled. `None` where there is nothing to do.
        """
        state = self._open.get(op)
        if state is None or state.agreed.phase >= Phase.RECEIVED:
            return None
        state.agreed = replace(state.agreed, phase=Phase.RECEIVED, reason=MissReason.TIMEOUT)
        return state.agreed

    def _advance(self, state: _Open) -> Ack | None:
        reports, old = state.reports.values(), state.agreed
        # Of equally short ones the one that has ended comes first: its reason is why there will be no more.
        shortest = min(reports, key=lambda each: (each.pages_done, each.phase < Phase.RECEIVED, each.rank))
        done, reason = shortest.pages_done, shortest.reason
        if old.phase >= Phase.RECEIVED:
            done, reason = old.pages_done, old.reason
        held = max(done, min(each.pages_held for each in reports))
        phase = max(old.phase, min(each.phase for each in reports))
        if (done, held, phase, reason) == (old.pages_done, old.pages_held, old.phase, old.reason):
            return None
        state.agreed = Ack(old.op, done, held, phase, reason)
        if phase == Phase.SETTLED:
            del self._open[old.op]
        return state.agreed

    def _silent(self, state: _Open) -> tuple[int, ...]:
        furthest = max((each.phase for each in state.reports.values()), default=Phase.SETTLED)
        told = {rank for rank, each in state.reports.items() if each.phase == furthest != Phase.RUNNING}
        return tuple(sorted(self._ranks - told))


def _later(one: OpReport, other: OpReport) -> OpReport:
    """What is known after both reports of one rank, whichever came first."""
    return OpReport(
        one.rank,
        one.op,
        max(one.pages_done, other.pages_done),
        max(one.pages_held, other.pages_held),
        max(one.phase, other.phase),
        other.reason if other.phase > one.phase else one.reason or other.reason,
    )


class Consumption:
    """What one rank makes of acknowledgements: its requests go on with exactly the acknowledged length.

    A load's blocks are given back when this rank no longer writes them *and* their length is acknowledged.
    """

    def __init__(self) -> None:
        self._own: dict[OpId, OpReport] = {}
        self._acks: dict[OpId, Ack] = {}
        self._loads: dict[OpId, LoadOp] = {}
        self._received: set[RequestId] = set()
        self._invalid: set[BlockId] = set()

    @property
    def num_open(self) -> int:
        """Operations that this rank has begun and not seen settled everywhere."""
        return len(self._own)

    def begin(self, op: OpId, rank: int, load: LoadOp | None = None) -> None:
        """This rank begins an operation; `load` where it is one that a request may wait for."""
        self._own[op] = OpReport(rank, op, 0, 0, Phase.RUNNING)
        if load is not None and load.request_id is not None:
            self._loads[op] = load

    def ready(self, report: OpReport) -> None:
        """This rank has come further by itself."""
        self._own[report.op] = report
        self._deliver(report.op)

    def consume(self, ack: Ack) -> Ack | None:
        """Take an acknowledgement; what of it was consumed, `None` for an operation that this rank knows nothing of.

        No more is consumed than this rank has: one that is acknowledged more than that has been taken for another,
        and the checker will say so.
        """
        own = self._own.get(ack.op)
        if own is None:
            return None
        taken = replace(ack, pages_done=min(ack.pages_done, own.pages_done))
        # One that was overtaken by a later one takes nothing back.
        if ack.phase >= self._acks.get(ack.op, ack).phase:
            self._acks[ack.op] = taken
        self._deliver(ack.op)
        if ack.phase == Phase.SETTLED:
            for known in (self._own, self._acks, self._loads):
                known.pop(ack.op, None)
        return taken

    def repeated(self, ops: Sequence[OpId]) -> list[OpReport]:
        """This rank's word on operations again, for a scheduler half that has missed it."""
        return [self._own[op] for op in ops if op in self._own]

    def take(self) -> tuple[frozenset[RequestId], frozenset[BlockId]]:
        """Requests whose loads have ended since the last call, and blocks of theirs that were not filled."""
        received, invalid = frozenset(self._received), frozenset(self._invalid)
        self._received.clear()
        self._invalid.clear()
        return received, invalid

    def _deliver(self, op: OpId) -> None:
        load, ack = self._loads.get(op), self._acks.get(op)
        if load is None or load.request_id is None or ack is None:
            return
        if min(ack.phase, self._own[op].phase) < Phase.RECEIVED:
            return
        del self._loads[op]
        self._received.add(load.request_id)
        self._invalid.update(block for page in load.pages[ack.pages_done :] for block in page.blocks)
        self._invalid.update(load.unserved)
