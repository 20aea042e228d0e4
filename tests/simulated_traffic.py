"""Random requests for the simulated engine, as many clients would send them."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from simulated_engine import SimulatedEngine
from simulated_model import VOCABULARY, Job


class Traffic:
    """A random mixture of requests: shared prefixes, further turns of finished ones, aborts and preemptions."""

    def __init__(
        self, engine: SimulatedEngine, seed: int, families: int = 4, salts: Sequence[str | None] = (None,)
    ) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self._families = [self._random.choices(range(VOCABULARY), k=160) for _ in range(families)]
        self._salts = salts

    def run(self, num_steps: int, arrivals: float = 0.2, aborts: float = 0.03, preemptions: float = 0.03) -> None:
        """Step `num_steps` times; the other numbers are chances in each step."""
        for _ in range(num_steps):
            if self._random.random() < arrivals and len(self._engine.scheduler.requests) < 12:
                self._arrive()
            if self._random.random() < aborts and self._engine.scheduler.requests:
                self._engine.abort(self._random.choice(list(self._engine.scheduler.requests)))
            if self._random.random() < preemptions and self._engine.scheduler.running:
                self._engine.preempt(self._random.choice(self._engine.scheduler.running).request_id)
            if not self._engine.step():
                time.sleep(0.0002)

    def _arrive(self) -> None:
        finished = [job for job in list(self._engine.jobs.values())[-20:] if job.finish_reason == "length"]
        if finished and self._random.random() < 0.4:
            prompt, salt = self._next_turn(self._random.choice(finished))
        else:
            family = self._random.choice(self._families)
            prompt = family[: self._random.randrange(1, 160)] + self._random.choices(
                range(9), k=self._random.randrange(9)
            )
            salt = self._random.choice(self._salts)
        self._engine.add(prompt, self._random.randrange(1, 24), salt=salt, priority=self._random.randrange(3))

    def _next_turn(self, job: Job) -> tuple[list[int], str | None]:
        return (job.tokens + self._random.choices(range(9), k=self._random.randrange(1, 20)))[
            :230
        ], job.request.cache_salt
