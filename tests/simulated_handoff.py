"""Two simulated engines of which one computes prompts for the other, and what a proxy does between them.

Pages cross sockets, between cuts of each engine's own. Thread: the test's; the connectors read and serve on theirs.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lifecycle_kit import check_ranks_agreed
from simulated_engine import SimulatedEngine, engines_on
from simulated_faults import PATIENCE_S, Gate
from simulated_model import LAYERS, VOCABULARY, WORDS, Cut, Job
from vllm.v1.request import RequestStatus

from vllm_hicache.handoff.server import PageServer

ALONE = Cut()
Cuts = tuple[Cut, Cut]
"""Of the engine that computes prompts, and of the one that decodes."""
TO_COMPUTE = {"do_remote_decode": True, "do_remote_prefill": False}
"""What proxies say of a request to the engine that computes its prompt."""


class HandoffEngine(SimulatedEngine):
    """An engine that hands prompts over or takes them; at rest nothing of a handoff is left on any rank."""

    @property
    def num_exports(self) -> int:
        """Prompts and operations whose pages others may still read."""
        return len(self.half._exports._open) + self.half._operations.num_exports

    @property
    def servers(self) -> list[PageServer]:
        """Where its ranks serve pages."""
        return [rank.half._server for rank in self.ranks if rank.half._server is not None]

    def step_often(self, num_steps: int) -> None:
        """Some steps."""
        for _ in range(num_steps):
            self.step()

    def step_until(self, holds: Callable[[], bool], what: str) -> None:
        """Step until something holds. An engine without work does not step: a request of one token is its work."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            if not self.has_work:
                self.add([0], max_tokens=1)
            if not self.step():
                time.sleep(0.0002)
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {self.num_steps}: {what} has not come in {PATIENCE_S} s")

    def end_leases(self) -> None:
        """Have it so late that no prompt which has ended waits for its readers any more."""
        self.half._exports.tend(time.monotonic() + 1000)

    def check_at_rest(self) -> None:
        """As for every engine, and no export is left in a book of either half."""
        self.step_until(lambda: self.num_exports == 0, "the end of all exports")
        super().check_at_rest()
        operations = self.half._operations
        assert (operations.num_open, len(operations._open), len(self.half._exports._open)) == (0, 0, 0)
        for rank in self.ranks:
            assert rank.half._consumption.num_open == 0
            assert not rank.half._exports
        for server in self.servers:
            assert (server._exports, server._known) == ({}, {})


@dataclass
class Pair:
    """A prefill and a decode engine, with what a proxy does between them."""

    prefill: HandoffEngine
    decode: HandoffEngine

    def compute(self, text: Sequence[int], **arguments: object) -> Job:
        """Have the prompt computed, up to the answer; other steps of the engine may still be due."""
        name = self.prefill.add(text, max_tokens=1, handed=TO_COMPUTE, **arguments)
        self.prefill.run_until_finished(name)
        return self.prefill.jobs[name]

    def ready(self, text: Sequence[int], **arguments: object) -> Mapping[str, object]:
        """Have the prompt computed and all its pages in host memory; what the engine has said of them."""
        job = self.compute(text, **arguments)
        self.prefill.run()
        assert job.told is not None
        return job.told

    def ask(
        self, text: Sequence[int], told: Mapping[str, object] | None, max_tokens: int = 4, **arguments: object
    ) -> str:
        """Send a request on to the engine that decodes; its name."""
        return self.decode.add(text, max_tokens, handed=told, **arguments)

    def serve(
        self, text: Sequence[int], told: Mapping[str, object] | None, max_tokens: int = 4, **arguments: object
    ) -> Job:
        """Send a request on, and decode it and what it leaves behind to the end."""
        name = self.ask(text, told, max_tokens, **arguments)
        self.decode.run()
        return self.decode.jobs[name]

    def hold_at(self, gate: Gate, text: Sequence[int], told: Mapping[str, object] | None) -> str:
        """Send a request on and have its load come to stand at a gate; its name."""
        gate.close()
        name = self.ask(text, told)
        self.decode.run(lambda: gate.num_waiting > 0)
        self.decode.step_often(10)
        assert self.decode.status(name) == RequestStatus.WAITING_FOR_REMOTE_KVS
        return name

    def hand_over(self, text: Sequence[int], max_tokens: int = 4) -> Job:
        """A request as proxies serve it: computed by one engine, decoded by the other, until neither has work."""
        job = self.serve(text, self.ready(text), max_tokens)
        self.settle()
        return job

    @property
    def crossed_pages(self) -> float:
        """Pages that the engine that decodes has from the other one."""
        return self.decode.counters["bytes|handoff"] / page_bytes(self.decode)

    def check_computed_here(self) -> None:
        """Nothing has crossed that was used."""
        assert (self.decode.counters["hit_tokens|peer"], self.crossed_pages) == (0, 0)

    def expire(self) -> None:
        """Have the engine that computes wait for nobody any more, and end what it has exported."""
        self.prefill.end_leases()
        self.settle()

    def settle(self) -> None:
        """Let the engine that computes hear of what has been read."""
        self.prefill.step_until(lambda: self.prefill.num_exports == 0, "the end of all exports")
        self.prefill.run()


def page_bytes(engine: SimulatedEngine) -> int:
    """Bytes of a page of the whole model."""
    return engine.page_tokens * LAYERS * engine.cut.num_heads * WORDS * 8


def close_servers(engine: HandoffEngine) -> None:
    """Its ranks serve nothing any more, and end what they send."""
    for server in engine.servers:
        server.close()


def cut_connections(engine: HandoffEngine) -> None:
    """Whoever reads from its ranks is cut off; new connections are taken."""
    for server in engine.servers:
        for connection in list(server._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class HandoffTraffic:
    """Random requests with shared prefixes through a pair: aborts on either side, preemptions, lost connections."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self._pair = pair
        self._random = random.Random(seed)
        self._families = [self._random.choices(range(VOCABULARY), k=160) for _ in range(4)]
        self._computing: dict[str, tuple[list[int], str | None]] = {}

    def run(self, num_steps: int, arrivals: float = 0.2, mishaps: float = 0.02) -> None:
        """Step both engines; `mishaps` is the chance of each of them in a step."""
        for _ in range(num_steps):
            if self._random.random() < arrivals and len(self._computing) < 6:
                self._arrive()
            self._pass_on()
            for mishap in (self._abort, self._preempt, lambda: cut_connections(self._pair.prefill)):
                if self._random.random() < mishaps:
                    mishap()
            self._step()

    def finish(self) -> None:
        """No more requests come, and nothing goes wrong any more."""
        deadline = time.monotonic() + PATIENCE_S
        while self._computing or any(engine.scheduler.requests for engine in self._engines):
            self.run(1, arrivals=0.0, mishaps=0.0)
            if time.monotonic() > deadline:
                raise TimeoutError(f"requests are left: {self._computing}, {self._pair.decode.scheduler.requests}")

    @property
    def _engines(self) -> list[HandoffEngine]:
        return [self._pair.prefill, self._pair.decode]

    def _arrive(self) -> None:
        family = self._random.choice(self._families)
        text = family[: self._random.randrange(1, 160)] + self._random.choices(range(9), k=self._random.randrange(9))
        salt = self._random.choice((None, "a"))
        name = self._pair.prefill.add(text, max_tokens=1, salt=salt, handed=TO_COMPUTE)
        self._computing[name] = (text, salt)

    def _pass_on(self) -> None:
        """As proxies do: what has been computed goes on, what was aborted does not."""
        jobs = self._pair.prefill.jobs
        for name in [name for name in self._computing if jobs[name].request.is_finished()]:
            text, salt = self._computing.pop(name)
            if jobs[name].finish_reason == "length":
                self._pair.ask(text, jobs[name].told, self._random.randrange(1, 24), salt=salt)

    def _abort(self) -> None:
        engine = self._random.choice(self._engines)
        if engine.scheduler.requests:
            engine.abort(self._random.choice(list(engine.scheduler.requests)))

    def _preempt(self) -> None:
        engine = self._random.choice(self._engines)
        if engine.scheduler.running:
            engine.preempt(self._random.choice(engine.scheduler.running).request_id)

    def _step(self) -> None:
        if not sum(engine.step() for engine in self._engines):
            time.sleep(0.0002)


StartPair = Callable[..., Pair]


@contextmanager
def pairs_on(tmp_path: Path) -> Iterator[StartPair]:
    """Starts pairs of engines; at the end each engine is at rest and nothing is left over."""
    engines: list[SimulatedEngine] = []
    with engines_on(tmp_path, HandoffEngine) as start:

        def begin(
            prefill: Cut = ALONE,
            decode: Cut = ALONE,
            of_prefill: Mapping[str, object] | None = None,
            of_decode: Mapping[str, object] | None = None,
            **both: object,
        ) -> Pair:
            usual = {"grid": f"{LAYERS}x{prefill.num_heads}", "consensus": "enforce", "store": "none"} | both
            producer = {"role": "kv_producer", "peer_host": "127.0.0.1"} | (of_prefill or {})
            consumer = {"role": "kv_consumer"} | (of_decode or {})
            pair = Pair(
                start(**prefill._asdict(), **(usual | producer)), start(**decode._asdict(), **(usual | consumer))
            )
            engines.extend([pair.prefill, pair.decode])
            return pair

        yield begin
    check_ranks_agreed(engines)
