"""Ranks that agree, without an engine and without bytes: one real scheduler half, and real worker halves whose
transfers are a script.

`Net` stands for vLLM: it carries plans to ranks, which run them in order but each at its own pace, and reports back,
late, twice, overtaking each other or not at all. It knows what every slot of every rank holds and who uses it, and
checks in each step what must hold. Time is counted in steps. Thread: the test's.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from simulated_transfers import NO_FAULTS, Faults, ScriptedTransfers, Task, destinations, slots_of

from vllm_hicache import operations, scheduler, worker
from vllm_hicache.config import Config
from vllm_hicache.entries import Entry, Mark
from vllm_hicache.grid import Grid
from vllm_hicache.lookup import Lookup
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import BlockId, MissReason, OpId, PageKey, Phase, RequestId, Role, Slot
from vllm_hicache.namespace import Namespace, Spaces
from vllm_hicache.place import Place
from vllm_hicache.plan import Ack, FlushOp, OpReport, Plan, SaveOp
from vllm_hicache.scheduler import SchedulerHalf
from vllm_hicache.storage.chunks import ChunkStore, RoleChunks
from vllm_hicache.worker import WorkerHalf

BLOCK = 16
SILENCE_STEPS = 40
ORDERED_KINDS = {"capacity", "hit length", "eviction eligibility", "lock order", "ack consumption"}
"""What ranks may never differ in. That one fails where another does not is what they agree about."""


class InstantLookups:
    """Stands for `StoreLookups`: a page is in the store when every rank's part of it is."""

    def __init__(self, net: Net) -> None:
        self._net = net

    def begin(self, keys: Sequence[PageKey], store: RoleChunks, plain: Sequence[PageKey] | None = None) -> Lookup:
        lookup = Lookup(keys, keys, store)
        present = [all(key in stored for stored in self._net.stored) for key in keys]
        lookup.num_pages = next((index for index, there in enumerate(present) if not there), len(keys))
        lookup.num_whole = lookup.num_pages
        lookup.done.set()
        return lookup

    def close(self) -> None:
        pass


@dataclass
class Client:
    """A request of the engine; `loading_from` is the step from which it waits for ranks to have received its load."""

    all_token_ids: list[int]
    num_left: int
    computed: int = 0
    is_running: bool = False
    blocks: list[BlockId] = field(default_factory=list)
    loading_from: int | None = None
    asked: int = 0
    received: dict[int, frozenset[BlockId]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass
class Most:
    """The largest numbers seen: nothing may grow with the number of steps."""

    open_operations: int = 0
    waiting_entries: int = 0
    acks_in_a_plan: int = 0
    steps_of_a_load: int = 0


class Net:
    """See the module.

    Args:
        paces: for each rank the chance that it runs a plan, and that an operation comes further, in a step.
        max_lag: plans that a rank may be behind.

    Attributes:
        mute: ranks whose reports are all lost, also those that they are asked for.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        paces: Sequence[float],
        seed: int = 0,
        faults: Faults = NO_FAULTS,
        num_slots: int = 24,
        max_lag: int = 3,
        **settings: object,
    ) -> None:
        self.faults, self.max_lag, self.paces = faults, max_lag, paces
        self.chance, self.step_number, self.metrics = random.Random(seed), 0, Metrics()
        self.counts: Counter[str] = Counter()
        self.most = Most()
        numbers = range(len(paces))
        self.stored: list[set[PageKey]] = [set() for _ in numbers]
        self.users: Counter[Slot] = Counter()
        self.saving: Counter[BlockId] = Counter()
        self.held: Counter[BlockId] = Counter()
        self.final: dict[tuple[int, OpId], Task] = {}
        patch.setattr(worker, "TransferEngine", ScriptedTransfers)
        for module in (scheduler, operations):
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(self.step_number)))
        raw = {"load_threshold": 1, "host_memory": num_slots * BLOCK, "page_tokens": BLOCK}
        config = Config.parse(raw | {"rank_timeout_s": SILENCE_STEPS, "flush_queue_pages": 64} | settings)
        self.ranks = [self._rank(config, rank) for rank in numbers]
        space = Namespace("weights", "0", "u8", "none", "cpu", 1, len(paces), BLOCK, BLOCK, BLOCK, f"1x{len(paces)}")
        self.half = SchedulerHalf(
            config, space, BLOCK, num_slots, numbers, self, self.metrics, self._open_store, InstantLookups(self)
        )
        self.inboxes: list[deque[Plan]] = [deque() for _ in numbers]
        self.mail: list[tuple[int, OpReport]] = []
        self.silent: dict[OpId, set[int]] = {}
        self.mute: set[int] = set()
        self.clients: dict[RequestId, Client] = {}
        self.gone: dict[RequestId, Client] = {}
        self.entries: dict[int, list[Entry]] = {number: [] for number in numbers}
        self.marks: dict[int, Mark | None] = {}
        self._num_requests = self._num_blocks = 0
        self._families = [self.chance.choices(range(100), k=10 * BLOCK) for _ in range(4)]

    def _rank(self, config: Config, number: int) -> WorkerHalf:
        cache = torch.zeros((2, 1, BLOCK, 1), dtype=torch.uint8)
        place = Place(number, len(self.paces), 1, len(self.paces), 1)
        half = WorkerHalf(config, place, {"layers.0": cache}, BLOCK, "cpu", Metrics(), None)
        half._engine.world, half._engine.pace = self, self.paces[number]
        return half

    def _open_store(self, spaces: Spaces) -> RoleChunks:
        return RoleChunks({Role.TARGET: ChunkStore(SimpleNamespace(), spaces.target, Grid(1, len(self.paces)))})

    # Device blocks, as the scheduler half holds them

    def hold(self, blocks: Sequence[BlockId]) -> None:
        self.held.update(blocks)

    def release(self, blocks: Sequence[BlockId]) -> None:
        self.held.subtract(blocks)
        self.held = +self.held
        lost = [block for block in blocks if self.saving[block] and not self.held[block]]
        assert not lost, f"step {self.step_number}: blocks {lost} are let go that a rank still saves from"

    # Steps

    def step(self, arrivals: float = 0.3, aborts: float = 0.01) -> None:
        """One step of the engine, and what ranks come to meanwhile."""
        self.step_number += 1
        self._deliver()
        self._rot()
        if self.chance.random() < arrivals and len(self.clients) < 6:
            self.arrive()
        for name in list(self.clients):
            if self.chance.random() < aborts:
                self.finish(name)
            else:
                self._serve(name, self.clients[name])
        self._send(self.half.plan())
        for number in range(len(self.ranks)):
            self._run(number)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def drain(self, most_steps: int = 3000) -> None:
        """End the faults and what is under way; fails where something never ends."""
        self.faults = NO_FAULTS
        self.mute.clear()
        end = self.step_number + most_steps
        while self.clients or self.gone or self.half.has_pending or self.mail:
            self.step(arrivals=0.0, aborts=0.0)
            assert self.step_number < end, f"open: {self.half._operations.num_open}, requests: {self.clients}"
        self.max_lag = 0
        self.step(arrivals=0.0)

    def arrive(self, tokens: Sequence[int] | None = None, num_output: int | None = None) -> RequestId:
        """A new request, of a family with a common beginning unless its tokens are given."""
        self._num_requests += 1
        name = RequestId(f"r{self._num_requests}")
        if tokens is None:
            family = self.chance.choice(self._families)
            tokens = [*family[: self.chance.randrange(1, 10 * BLOCK)], self._num_requests]
        client = Client(list(tokens), self.chance.randrange(1, 30) if num_output is None else num_output)
        self.clients[name] = client
        self.half.begin(name, client)
        return name

    def finish(self, name: RequestId) -> None:
        """A request ends, or is aborted; one that loads is kept until all ranks have received it."""
        client = self.clients.pop(name)
        self.half.finished(name)
        if client.loading_from is not None:
            self.gone[name] = client

    def _serve(self, name: RequestId, client: Client) -> None:
        if client.loading_from is not None:
            return
        if not client.is_running:
            offer = self.half.match(name, client.computed)
            if offer.pending:
                return
            self._grow(client, client.num_tokens)
            self.half.allocated(name, client.blocks, offer.tokens)
            if offer.tokens:
                client.loading_from, client.asked = self.step_number, offer.tokens
                return
            client.is_running = True
        self._grow(client, client.num_tokens)
        self.half.scheduled(name, client.num_tokens, lambda: client.blocks)
        client.computed = client.num_tokens
        client.all_token_ids.append(client.num_tokens % 7)
        client.num_left -= 1
        if client.num_left < 0:
            self.finish(name)

    def _grow(self, client: Client, num_tokens: int) -> None:
        while len(client.blocks) * BLOCK < num_tokens:
            self._num_blocks += 1
            client.blocks.append(BlockId(self._num_blocks))

    def _send(self, plan: Plan) -> None:
        """Check a plan against what every rank really has and uses, and put it into all inboxes."""
        for ack in plan.acks:
            self._check_ack(ack)
        for op in (*plan.loads, *plan.flushes, *plan.saves):
            busy = [slot for slot in destinations(op) if self.users[slot]]
            assert not busy, f"step {self.step_number}: operation {op.op} gets slots {busy} that ranks still use"
            self.users.update(slots_of(op) * len(self.ranks))
            if isinstance(op, SaveOp):
                self.saving.update([block for page in op.pages for block in page.blocks] * len(self.ranks))
        for inbox in self.inboxes:
            inbox.append(plan)
        self.half.tier.check()
        self.most.acks_in_a_plan = max(self.most.acks_in_a_plan, len(plan.acks))
        self.most.open_operations = max(self.most.open_operations, self.half._operations.num_open)
        if self.half._checker is not None:
            waiting = max(map(len, self.half._checker._waiting.values()))
            self.most.waiting_entries = max(self.most.waiting_entries, waiting)

    def _check_ack(self, ack: Ack) -> None:
        """No rank is asked to consume more than any of them has."""
        for number, rank in enumerate(self.ranks):
            task = rank._engine.tasks.get(ack.op) or self.final.get((number, ack.op)) or Task(FlushOp, 0)
            assert ack.pages_done <= task.done, f"{ack}, but rank {number} has {task.done} pages"
            assert ack.phase <= task.phase or ack.reason == MissReason.TIMEOUT, f"{ack}, but rank {number} is {task}"
            if ack.phase == Phase.SETTLED:
                self.counts[type(task.op).__name__] += 1
                self.final.pop((number, ack.op))

    def _run(self, number: int) -> None:
        inbox = self.inboxes[number]
        while inbox and (len(inbox) > self.max_lag or self.chance.random() < self.paces[number]):
            plan, rank = inbox.popleft(), self.ranks[number]
            rank.start_loads(plan)
            rank.commit_saves(plan)
            result = rank.collect(plan)
            for name in result.received:
                self._received(name, number, result.invalid_blocks)
            for report in result.reports:
                self._post(report, asked=report.op in plan.asks)
            self.entries[number] += result.entries
            self.marks[number] = result.mark

    def _post(self, report: OpReport, asked: bool) -> None:
        """Put a report on its way, unless it is lost."""
        faults, chance = self.faults, self.chance
        silent = self.silent.setdefault(report.op, set())
        if asked or faults.silent == 0:
            silent.discard(report.rank)
        elif chance.random() < faults.silent:
            silent.add(report.rank)
        if report.rank in silent | self.mute:
            self.counts["lost"] += 1
            return
        for _ in range(1 + (chance.random() < faults.twice)):
            wait = chance.randrange(12) if chance.random() < faults.late else 0
            self.mail.append((self.step_number + wait, report))

    def _deliver(self) -> None:
        due = [report for when, report in self.mail if when < self.step_number]
        self.mail = [each for each in self.mail if each[0] >= self.step_number]
        self.chance.shuffle(due)
        self.half.report(due, self.entries, self.marks)
        self.entries = {number: [] for number in self.entries}

    def settled(self, rank: int, task: Task) -> None:
        """A rank no longer touches what an operation uses."""
        self.final[rank, task.op.op] = replace(task)
        self.users.subtract(slots_of(task.op))
        if isinstance(task.op, SaveOp):
            self.saving.subtract([block for page in task.op.pages for block in page.blocks])

    def _received(self, name: RequestId, rank: int, invalid: frozenset[BlockId]) -> None:
        """A rank gives a load's blocks back; when all have, the request goes on with what all say is good."""
        client = self.clients.get(name) or self.gone[name]
        assert rank not in client.received, f"rank {rank} received {name} twice"
        writing = [task for task in self.ranks[rank]._engine.tasks.values() if task.is_writing_for(name)]
        assert not writing, f"rank {rank} gives back blocks that it still writes: {writing}"
        client.received[rank] = invalid & set(client.blocks)
        if len(client.received) < len(self.ranks):
            return
        views = set(client.received.values())
        assert len(views) == 1, f"ranks consumed different lengths for {name}: {client.received}"
        self.most.steps_of_a_load = max(self.most.steps_of_a_load, self.step_number - client.loading_from)
        bad = views.pop()
        good = next((index for index, block in enumerate(client.blocks) if block in bad), len(client.blocks))
        client.computed = min(client.computed + client.asked, good * BLOCK)
        client.received, client.loading_from = {}, None
        self.counts["received", bool(bad)] += 1
        self.gone.pop(name, None)

    def _rot(self) -> None:
        if self.chance.random() < self.faults.rot:
            stored = self.chance.choice(self.stored)
            if stored:
                stored.remove(self.chance.choice(sorted(stored)))

    # What must hold in the end

    def check_at_rest(self) -> None:
        """Nothing is held, leased, reserved or open anywhere."""
        tier = self.half.tier
        tier.check()
        assert (tier.num_leases, tier.num_reserved, self.half._operations.num_open) == (0, 0, 0)
        assert (self.held, +self.users, +self.saving, self.final) == ({}, {}, {}, {})
        assert {rank._consumption.num_open for rank in self.ranks} == {0}

    def check_same(self) -> None:
        """All ranks consumed the same in the same order."""
        assert len({(rank._log.num_entries, rank._log.digest) for rank in self.ranks}) == 1
        assert not ORDERED_KINDS & set(differences(self))

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def differences(net: Net) -> Iterator[str]:
    """Kinds of differences that the rank checker has told of."""
    for key in net.metrics.drain():
        name, _, kind = key.partition("|")
        if name == "rank_differences":
            yield kind
