"""How prompts that two engines share come to their end: everything is given back and the other is told once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from scheduler_handoff_kit import LEASE_S, Clock, HandoffRig, MakeHandoff, peer, taking
from scheduler_kit import BLOCK, PAGE, prompt

from vllm_hicache.names import MissReason, OpId, Phase, RequestId
from vllm_hicache.plan import LoadOp, OpReport, Plan

pytest_plugins = ["scheduler_handoff_fixtures"]

# One request


def begun(rig: HandoffRig) -> None:
    rig.hand("a", prompt(2.5), source=peer())


def settled(rig: HandoffRig) -> None:
    rig.report(taking(rig))


def failed(rig: HandoffRig) -> None:
    rig.report(taking(rig), 1, reason=MissReason.UNAVAILABLE)


def on_the_device(rig: HandoffRig) -> None:
    rig.hand("a", prompt(2.5), source=peer())
    assert rig.admit("a", 2 * PAGE + 2 * BLOCK - 1) == 0


def in_host_memory(rig: HandoffRig) -> None:
    rig.run("w", prompt(2))
    rig.report(taking(rig, pages=2))


def without_room(rig: HandoffRig) -> None:
    rig.hand("w", prompt(64, first=1))
    rig.compute("w")
    rig.plan()
    begun(rig)
    assert rig.admit("a") == 0


def matched(rig: HandoffRig) -> None:
    begun(rig)
    assert rig.match("a").tokens


def allocated(rig: HandoffRig) -> None:
    begun(rig)
    rig.admit("a")


def in_mid_load(rig: HandoffRig) -> None:
    rig.report(taking(rig), 1, phase=Phase.RUNNING)


def given_up(rig: HandoffRig) -> None:
    rig.report(taking(rig), 1, phase=Phase.RECEIVED, reason=MissReason.TIMEOUT)


def reset_before(rig: HandoffRig) -> None:
    begun(rig)
    rig.half.reset("new weights")
    rig.half.allocated(RequestId("a"), rig.blocks("a"), 0)


def reset_in_mid_load(rig: HandoffRig) -> None:
    taking(rig)
    rig.half.reset("new weights")


WAYS = (begun, settled, failed, on_the_device, in_host_memory, without_room, matched, allocated, in_mid_load, given_up)


@pytest.mark.parametrize("way", [*WAYS, reset_before, reset_in_mid_load], ids=lambda way: way.__name__)
def test_a_peer_is_told_once_that_nothing_more_is_read(pair: MakeHandoff, way: Callable[[HandoffRig], None]) -> None:
    rig = pair()
    way(rig)
    assert not rig.end("a")
    rig.settle()
    assert rig.released == [peer()]


@pytest.mark.parametrize("way", [settled, failed, on_the_device, in_host_memory], ids=lambda way: way.__name__)
def test_a_peer_is_told_before_the_request_ends(pair: MakeHandoff, way: Callable[[HandoffRig], None]) -> None:
    rig = pair()
    way(rig)
    assert rig.half.has_pending
    assert rig.plan().releases == (peer(),)
    rig.compute("a")
    rig.settle()
    assert rig.released == [peer()]


@pytest.mark.parametrize("way", [in_mid_load, given_up], ids=lambda way: way.__name__)
def test_a_peer_is_told_nothing_while_a_page_of_it_may_still_be_read(
    pair: MakeHandoff, way: Callable[[HandoffRig], None]
) -> None:
    rig = pair()
    way(rig)
    rig.end("a")
    plan = rig.plan()
    assert (len(plan.cancels), plan.releases) == (1, ())


def test_a_prompt_from_a_peer_is_for_nobody_else_to_read(pair: MakeHandoff) -> None:
    rig = pair()
    settled(rig)
    rig.compute("a")
    rig.settle()
    assert not rig.end("a")
    rig.settle()
    assert not rig.told


def test_a_request_without_a_peer_releases_nobody(pair: MakeHandoff) -> None:
    rig = pair()
    rig.run("a", prompt(2))
    rig.prefilled("b", prompt(2.5), "cmpl-1")
    assert not rig.released


# Many requests


class Walk(HandoffRig):
    """Requests for others, from others and of neither, over few prompts, with random reports, ends and readers.

    Attributes:
        asked: prompts that were taken from others, each of a name of its own.
    """

    def __init__(self, seed: int, clock: Clock) -> None:
        self.rng, self.clock = random.Random(seed), clock
        super().__init__(None, 14, (0, 1), peer_lease_s=LEASE_S)
        self.answers = False
        self.said: dict[tuple[OpId, int], tuple[int, Phase]] = {}
        self.acked: dict[OpId, Phase] = {}
        self.over: dict[OpId, set[int]] = {}
        self.asked: Counter[str] = Counter()
        self.num_begun = self.num_cut = self.num_taken = 0

    def arrive(self) -> None:
        self.num_begun += 1
        name = f"r{self.num_begun}"
        self.num_blocks[name] = self.num_begun % 64 * 1000
        tokens = prompt(self.rng.choice([0.5, 1, 1.5, 2.5, 4, 6]), first=self.rng.randrange(6))
        match self.rng.randrange(3):
            case 0:
                self.hand(name, tokens)
            case 1:
                self.hand(name, tokens, to=self.rng.choice([name, "the same"]))
            case 2:
                self.asked[name] += 1
                self.hand(name, tokens, source=peer(name))

    def _progress(self, op: OpId, rank: int) -> tuple[int, Phase]:
        return self.said.get((op, rank), (0, Phase.RUNNING))

    def loads(self, name: str) -> bool:
        """Whether a load of this request is not received on every rank, as the acknowledgements have it."""
        mine = [op.op for op, _, _ in self.open.values() if isinstance(op, LoadOp) and op.request_id == name]
        told = [self._progress(op, rank)[1] for op in mine for rank in self.ranks]
        return min([*told, *(self.acked.get(op, Phase.RUNNING) for op in mine)], default=Phase.SETTLED) < Phase.RECEIVED

    def advance(self, name: str) -> None:
        """One move of a request, as the engine would make it: nothing is computed while its load is open."""
        if self.loads(name):
            return
        tokens = self.sources[name]
        if self.rng.random() < 0.4:
            local = min(self.rng.choice([0, 0, BLOCK, PAGE]), (tokens.num_tokens - 1) // BLOCK * BLOCK)
            offer = self.half.match(RequestId(name), local)
            if not offer.pending and self.rng.random() < 0.9:
                self.half.allocated(RequestId(name), self.blocks(name), offer.tokens)
                self.plan()
        else:
            self.compute(name, self.rng.choice([tokens.num_tokens, self.rng.randint(1, tokens.num_tokens)]))

    def plan(self) -> Plan:
        plan = super().plan()
        self.acked.update({ack.op: ack.phase for ack in plan.acks})
        self.over.update({op: set(self.ranks) for op in plan.cancels if op in self.exports})
        self.num_taken += sum(page.from_peer for load in plan.loads for page in load.pages)
        return plan

    def answer_one(self) -> None:
        """One rank's report of a random open operation: all, part, or nothing of it."""
        op, _, waiting = self.rng.choice(list(self.open.values()))
        size, rank = len(op.pages), self.rng.choice(sorted(waiting))
        done, phase = self._progress(op.op, rank)
        if phase == Phase.RUNNING:
            done = size if self.rng.random() < 0.7 else self.rng.randint(done, size)
        is_load = isinstance(op, LoadOp)
        phase = self.rng.choice([Phase.SETTLED, *(each for each in Phase if is_load and each >= phase)])
        self.said[op.op, rank] = done, phase
        is_short = done < size or (isinstance(op, LoadOp) and bool(op.unserved))
        reason = self.rng.choice([MissReason.CANCELLED, MissReason.TIMEOUT]) if is_short and phase else None
        self.report(op, done, reason=reason, ranks=[rank], phase=phase)

    def end_one_read(self) -> None:
        """One rank has no read of an export open any more that is over."""
        op = self.rng.choice(list(self.over))
        rank = self.rng.choice(sorted(self.over[op]))
        self.over[op].discard(rank)
        self._check_exported(self.exports[op])
        if not self.over[op]:
            del self.over[op], self.exports[op]
        self.half.report([OpReport(rank, op, 0, 0)])

    def others(self) -> None:
        """What readers do, and the time."""
        waiting = list(self.half._exports._open)
        if waiting and self.rng.random() < 0.3:
            self.acknowledge(self.rng.choice(waiting))
        while self.over and self.rng.random() < 0.6:
            self.end_one_read()
        if self.rng.random() < 0.02:
            self.clock.now_s += LEASE_S + 1

    def run_for(self, num_requests: int) -> None:
        while self.num_begun < num_requests:
            self.plan()
            if len(self.sources) < 6:
                self.arrive()
            for name in list(self.sources):
                self.advance(name)
                if self.rng.random() < 0.15:
                    self.num_cut += self.loads(name)
                    self.end(name, is_computed=self.rng.random() < 0.7)
            while self.open and self.rng.random() < 0.85:
                self.answer_one()
            self.others()
            if self.rng.random() < 0.003:
                self.half.reset(str(self.num_begun))
            self.half.tier.check()

    def finish_all(self) -> None:
        for name in list(self.sources):
            self.end(name)
        self.answers = True
        while self.over:
            self.end_one_read()
        self.close()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_nothing_is_left_and_every_peer_is_told_once(clock: Clock, seed: int) -> None:
    walk = Walk(seed, clock)
    walk.run_for(1500)
    walk.finish_all()
    assert Counter(each.request for each in walk.released) == walk.asked
    counts = walk.counts
    ends = [counts[f"handoffs|{outcome}"] for outcome in ("acknowledged", "expired", "aborted")]
    assert min(walk.num_cut, walk.num_taken, len(walk.told), *ends) > 20
    assert (counts["open_operations"], counts["open_exports"], walk.half.has_pending) == (0, 0, False)
