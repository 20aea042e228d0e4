"""Whether speculative decoding has of a restored draft what it has of one that stayed on the device.

    scripts/bench_speculative [--json PATH] [--prompts N] [--lengths A-B] [--few N] [--output N] [--quick]

SmolLM2 drafts three tokens for itself (bfloat16, greedy), so that nearly all are accepted as long as the draft knows
the context. Prompts are pieces of this repository's docs, asked one at a time. For `draft=packed` and `draft=sidecar`
one engine takes each prompt cold, at once again from the device, and from host memory; a fresh one takes them from the
store that the former wrote. Before every restore vLLM's own prefix cache is emptied and every block is overwritten.

Two controls read the store of an engine without a draft: `draft_miss=serve` restores a target without its draft, which
has to show in what is accepted, and `draft_miss=recompute` restores nothing. The latter, and vLLM without the connector
beside all, have a few of the prompts. Takes 25 minutes and 4 GB of disk on two cores, `--quick` about 7 minutes.

Acceptance by position, the hits and the times come from the engine's own metrics and from its outputs as they arrive.
The exit status says only whether all engines ran; aims are said in words.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench_speculative_engine import MAX_MODEL_LEN, NUM_DRAFTED, Job, Sample, Take, run_job
from bench_speculative_prompts import digest_of, docs_text, few_of, lengths_between, prompts_of
from bench_speculative_report import LOSS_LIMIT, Aim, Draft, Row, aims_of, rows_of, table
from demo_report import machine
from demo_run import load_encoder, stop
from engine_process import EngineError
from matrix_cut import PAGE_TOKENS
from prepare_model import default_cache, prepare_model

OUT = Path(__file__).resolve().parent.parent / "out"
SHORTEST = PAGE_TOKENS + 1
QUICK = {"prompts": 4, "lengths": (1000, 2000), "few": 2, "output": 32}
WHOLE = {"prompts": 20, "lengths": (1000, 6000), "few": 5, "output": 64}


@dataclass(frozen=True, slots=True)
class Step:
    """One engine of the run.

    Attributes:
        store: a name; engines with the same share it, and it is removed behind the last of them.
        draft_miss: the setting of that name.
    """

    text: str
    draft: Draft
    takes: tuple[Take, ...]
    store: str | None
    is_few: bool = False
    reads_only: bool = False
    draft_miss: str = "recompute"


_FILL = (Take.COLD, Take.DEVICE, Take.HOST)

STEPS = (
    Step("vLLM without the connector", Draft.ALONE, (Take.COLD, Take.DEVICE), None, is_few=True),
    Step("draft=packed: cold, device, host memory", Draft.PACKED, _FILL, "packed"),
    Step("draft=packed: a fresh engine, from the store", Draft.PACKED, (Take.STORE,), "packed", reads_only=True),
    Step("draft=sidecar: cold, device, host memory", Draft.SIDECAR, _FILL, "sidecar"),
    Step("draft=sidecar: a fresh engine, from the store", Draft.SIDECAR, (Take.STORE,), "sidecar", reads_only=True),
    Step("an engine without a draft writes", Draft.NONE, (Take.COLD,), "none"),
    Step(
        "draft_miss=serve: a fresh engine, without draft state",
        Draft.PACKED,
        (Take.SERVED,),
        "none",
        reads_only=True,
        draft_miss="serve",
    ),
    Step("draft_miss=recompute: a fresh engine", Draft.PACKED, (Take.RECOMPUTED,), "none", True, True),
)
"""In order: one that reads a store comes behind the one that writes it."""


@dataclass(slots=True)
class Bench:
    """The run, one engine at a time. `folder` holds stores while they are needed, `log` vLLM's lines."""

    model: Path
    prompts: dict[int, list[int]]
    num_few: int
    output_tokens: int
    folder: Path
    log: Path
    found: dict[Draft, list[Sample]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    def run(self, steps: Sequence[Step] = STEPS) -> None:
        """All engines; one that fails is a problem, and the others are still of interest."""
        for number, step in enumerate(steps):
            self._measure(step, self.folder / f"job-{number}")
            if step.store is not None and step.store not in [later.store for later in steps[number + 1 :]]:
                shutil.rmtree(self.store(step.store), ignore_errors=True)

    def job_of(self, step: Step) -> Job:
        """What its engine is to do."""
        return Job(
            model=str(self.model),
            connector=self._connector(step),
            has_draft=step.draft != Draft.NONE,
            takes=step.takes,
            prompts=few_of(self.prompts, self.num_few) if step.is_few else self.prompts,
            output_tokens=self.output_tokens,
        )

    def store(self, name: str) -> Path:
        """Where the store of that name lies."""
        return self.folder / f"store-{name}"

    def _connector(self, step: Step) -> dict[str, str | float] | None:
        """A reader leaves the store as it was written. No lookup is to fail on a busy machine."""
        if step.store is None:
            return None
        settings: dict[str, str | float] = {
            "store": f"file://{self.store(step.store)}",
            "prefetch": "wait_complete",
            "lookup_timeout_s": 5.0,
        }
        if step.draft != Draft.NONE:
            settings |= {"draft": step.draft.value, "draft_miss": step.draft_miss}
        return settings | ({"write": "never"} if step.reads_only else {})

    def _measure(self, step: Step, folder: Path) -> None:
        began_s = time.monotonic()
        try:
            record = run_job(self.job_of(step), folder, self.log)
        except EngineError as error:
            self.problems.append(f"{step.text}: {error}")
            self._say(f"{step.text}: FAILED", began_s)
            return
        self.versions |= record.versions
        self.found.setdefault(step.draft, []).extend(record.samples)
        self._say(f"{step.text}, {len(record.samples)} samples", began_s)

    def _say(self, text: str, began_s: float) -> None:
        """Progress, apart from the result."""
        minutes, rest = divmod(int(time.monotonic() - self.began_s), 60)
        print(f"[{minutes}:{rest:02}] {text} ({time.monotonic() - began_s:.0f} s)", file=sys.stderr, flush=True)


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line: see the module."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench_speculative", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=OUT / "bench-speculative.json", help="result")
    parser.add_argument("--prompts", type=int, metavar="N", help="prompts (default: 20)")
    parser.add_argument("--lengths", type=lengths, metavar="A-B", help="tokens, evenly spread (default: 1000-6000)")
    parser.add_argument("--few", type=int, metavar="N", help="prompts of vLLM alone and of recompute (default: 5)")
    parser.add_argument("--output", type=int, metavar="N", help="tokens of an answer (default: 64)")
    parser.add_argument("--quick", action="store_true", help="4 prompts of 1000-2000, 32 tokens each: does it work?")
    args = parser.parse_args(arguments)
    for name, value in (QUICK if args.quick else WHOLE).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    try:
        check(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def lengths(text: str) -> tuple[int, int]:
    """Of `1000-6000`."""
    shortest, longest = text.split("-")
    return int(shortest), int(longest)


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for what cannot be measured."""
    shortest, longest = args.lengths
    limit = MAX_MODEL_LEN - NUM_DRAFTED - 1
    if min(args.prompts, args.few) < 1:
        raise ValueError(f"--prompts {args.prompts} --few {args.few} measures nothing: give at least 1 of both")
    if args.output < 2:
        raise ValueError(f"--output {args.output} leaves no room for a draft: give at least 2, better 64")
    if not SHORTEST <= shortest <= longest:
        raise ValueError(f"--lengths {shortest}-{longest} is no range from {SHORTEST} tokens on: a page has one less")
    if longest + args.output > limit:
        raise ValueError(
            f"{longest} tokens and an answer of {args.output} are more than the {limit} that the model's length and "
            "a draft leave: give less"
        )


def measure(args: argparse.Namespace) -> Bench:
    """Run everything, with stores in a folder that is removed afterwards. One that is stopped has what it found."""
    OUT.mkdir(exist_ok=True)
    log = OUT / "bench-speculative.log"
    log.unlink(missing_ok=True)
    model = prepare_model(default_cache())
    shortest, longest = args.lengths
    prompts = prompts_of(lengths_between(shortest, longest, args.prompts), docs_text(), load_encoder(model))
    with tempfile.TemporaryDirectory(dir=OUT, prefix="bench-speculative-", ignore_cleanup_errors=True) as folder:
        bench = Bench(model, prompts, args.few, args.output, Path(folder), log)
        try:
            bench.run()
        except KeyboardInterrupt:
            bench.problems.append("stopped: what was measured before is shown")
    return bench


def assemble(args: argparse.Namespace, bench: Bench, rows: Sequence[Row], aims: Sequence[Aim]) -> dict[str, object]:
    """The result."""
    return {
        "versions": bench.versions,
        "machine": machine(),
        "quick": args.quick,
        "seconds": time.monotonic() - bench.began_s,
        "settings": {
            "model": bench.model.name,
            "num_drafted": NUM_DRAFTED,
            "prompt_tokens": [len(prompt) for prompt in bench.prompts.values()],
            "prompts_sha256": digest_of(bench.prompts),
            "output_tokens": args.output,
            "loss_limit": LOSS_LIMIT,
        },
        "rows": [row.to_json() for row in rows],
        "aims": [asdict(aim) for aim in aims],
        "problems": bench.problems,
    }


def main() -> int:
    """Measure, show, and say whether it ran."""
    args = read_arguments()
    signal.signal(signal.SIGTERM, stop)
    try:
        bench = measure(args)
    except (OSError, RuntimeError, ValueError) as error:  # a model that is not there, docs without text
        print(f"scripts/bench_speculative: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("scripts/bench_speculative: stopped before the first engine", file=sys.stderr)
        return 130
    rows = rows_of(bench.found, {number: len(prompt) for number, prompt in bench.prompts.items()})
    aims = aims_of(rows)
    args.json.write_text(json.dumps(assemble(args, bench, rows, aims), indent=2) + "\n")
    print(table(rows), "\n".join(aim.sentence for aim in aims), f"result in {args.json}", sep="\n\n")
    for problem in bench.problems:
        print(f"scripts/bench_speculative: {problem}", file=sys.stderr)
    return 1 if bench.problems else 0


if __name__ == "__main__":
    sys.exit(main())
