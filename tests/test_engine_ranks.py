"""Real engines of two tensor ranks and of two stages, of which rank 1 plays out faults: answers stay right, and the
rank checker names what was done.

Each drill has a prompt of its own, which is computed, saved, overwritten on the device and restored under the fault.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_kit import PAGE, Answer, Engine, alike, engine, prompt_of, wait_until
from matrix_cut import Cut
from random_model import VOCABULARY, random_model

from vllm_hicache.cli.main import main

pytestmark = pytest.mark.engine

NUM_PAGES = 6
LOOK_S = 0.3

CUTS = {"TP2": Cut(tensor=2), "PP2": Cut(pipeline=2)}
DRILLS: dict[str, dict[str, object]] = {
    "restore completion": {"fault": "fail", "operation": "load", "pages": 2},
    "ack consumption": {"fault": "short", "operation": "load", "pages": 2},
    "hit length": {"fault": "forget", "operation": "load", "pages": 3},
    "missing report": {"fault": "skip", "operation": "load"},
}


@dataclass
class Drilled:
    """An engine whose rank 1 has the faults in a file."""

    engine: Engine
    faults: Path
    logs: Path
    num_prompts: int = 0

    @contextmanager
    def drill(self, fault: dict[str, object]) -> Iterator[None]:
        """Have rank 1 play out a fault once, in the next operation that it strikes."""
        new = self.faults.with_suffix(".new")
        new.write_text(json.dumps([{"rank": 1, "times": 1, **fault}]))
        new.replace(self.faults)
        self.look()
        yield
        self.faults.unlink()
        self.look()

    def look(self) -> None:
        """Step until ranks, which look at the file ten times a second at most, have seen how it is now."""
        until_s = time.monotonic() + LOOK_S
        wait_until(lambda: self.engine.settle() or time.monotonic() > until_s, "ranks to look at their faults")

    def named(self, kind: str) -> float:
        """Differences of a kind that the checker has named while the engine ran."""
        return self.engine.metric("rank_differences", kind=kind)

    def prompt(self) -> list[int]:
        """A prompt that nobody has asked yet."""
        self.num_prompts += 1
        return prompt_of(NUM_PAGES * PAGE + 20, self.num_prompts, VOCABULARY)

    def known(self, prompt: list[int]) -> Answer:
        """Compute and save a prompt; what the engine says with all of it on the device, which is then overwritten."""
        self.engine.ask(prompt)
        self.engine.settle()
        answer = self.engine.ask(prompt)
        assert answer.cached == NUM_PAGES * PAGE
        self.engine.poison_device()
        return answer


@contextmanager
def drilled(folder: Path, cut: Cut, **settings: object) -> Iterator[Drilled]:
    faults, logs = folder / "faults.json", folder / "logs"
    faults.write_text(json.dumps([{"fault": "capacity", "rank": 1, "pages": 5}]))
    model = random_model(folder / "model")
    store = f"file://{folder}/store?capacity=1GiB"
    common = {"grid": "2x2", "rank_faults": str(faults), "consensus_dir": str(logs), "rank_timeout_s": 1.0}
    with engine(store, model, cut, **{**common, **settings}) as running:
        yield Drilled(running, faults, logs)


@pytest.fixture(scope="module", params=list(CUTS))
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drilled]:
    with drilled(tmp_path_factory.mktemp(request.param), CUTS[request.param]) as running:
        running.engine.settle()
        running.faults.unlink()
        running.look()
        yield running


def test_a_rank_that_believes_in_another_capacity_is_named(ranks: Drilled) -> None:
    assert ranks.named("capacity") == 1


def test_ranks_without_a_fault_differ_in_nothing(ranks: Drilled) -> None:
    before = ranks.engine.metric("rank_differences")
    prompt = ranks.prompt()
    hit = ranks.known(prompt)
    assert ranks.engine.ask(prompt) == hit
    ranks.engine.settle()
    assert ranks.engine.metric("rank_differences") == before


@pytest.mark.parametrize("kind", DRILLS)
def test_a_fault_in_a_load_is_named_and_its_answer_is_right(ranks: Drilled, kind: str) -> None:
    prompt = ranks.prompt()
    hit = ranks.known(prompt)
    before = ranks.named(kind)
    with ranks.drill(DRILLS[kind]):
        restored = ranks.engine.ask(prompt)
    assert alike(restored, hit)
    assert ranks.named(kind) == before + 1


def test_a_report_that_comes_late_is_named_and_nobody_waits_for_it(ranks: Drilled) -> None:
    prompt = ranks.prompt()
    hit = ranks.known(prompt)
    before = ranks.named("missing report")
    with ranks.drill({"fault": "delay", "operation": "load", "seconds": 30}):
        assert alike(ranks.engine.ask(prompt), hit)
    assert ranks.named("missing report") > before


def test_acknowledgements_that_are_consumed_in_another_order_are_named(ranks: Drilled) -> None:
    prompts = [ranks.prompt(), ranks.prompt()]
    before = ranks.named("lock order")
    with ranks.drill({"fault": "reorder", "operation": "save", "times": 2}):
        ranks.engine.ask_together(prompts)
    assert ranks.named("lock order") == before + 1
    for prompt in prompts:
        hit = ranks.engine.ask(prompt)
        ranks.engine.poison_device()
        assert alike(ranks.engine.ask(prompt), hit)


def test_a_slot_that_is_still_in_use_on_one_rank_is_named_and_left_alone(ranks: Drilled) -> None:
    prompt = ranks.prompt()
    before = ranks.named("eviction eligibility")
    with ranks.drill({"fault": "pin", "operation": "save"}):
        ranks.engine.ask(prompt)
    assert ranks.named("eviction eligibility") > before
    hit = ranks.engine.ask(prompt)
    ranks.engine.poison_device()
    assert alike(ranks.engine.ask(prompt), hit)


def test_the_logs_of_all_ranks_tell_the_same_afterwards(ranks: Drilled, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {"capacity", "lock order", "eviction eligibility", *DRILLS} - {"missing report"}

    def named() -> set[str]:
        assert main(["ranks", str(ranks.logs), "--json"]) == 1
        return {each["kind"] for each in json.loads(capsys.readouterr().out)["differences"]}

    wait_until(lambda: ranks.engine.settle() or kinds <= named(), "the logs to name every fault")


def test_an_engine_that_is_to_stop_at_a_difference_stops(tmp_path: Path) -> None:
    with drilled(tmp_path, CUTS["TP2"], consensus="enforce") as running, pytest.raises(Exception, match="EngineCore"):
        running.known(running.prompt())
