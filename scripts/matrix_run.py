"""Which engine can read what which engine wrote: every pair of cuts, on real engines and a real Redis.

    scripts/matrix [--json PATH] [--svg PATH] [--quick | --cp] [--models NAME,...] [--cuts NAME,...]

A writer engine computes three prompts of random tokens and ends; then, for every cut, a fresh engine in a process of
its own reads their pages from the store. A cell holds when all pages are restored, every slab of every layer and head
has the writer's bytes, and the answer is that of vLLM's own prefix-cache hit in the same engine. Beside it stands what
the reader computes itself, and how well it repeats itself.

The models: eight KV heads (random weights), the same with one object a page, of which ranks read byte ranges, one KV
head (random weights, held twice under TP2), and SmolLM2, whose three heads two ranks cannot share. Starts 27 engines,
one at a time, of about a minute each on two cores; `--quick` starts six, for the first model between TP2 and PP2.
`--cp` starts eleven: one KV head, where two ranks share out the pages of each request (CP2), against every cut. Exits
with 1 if a cell does not hold.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from engine_process import EngineError
from matrix_cut import PAGE_TOKENS, Cut
from matrix_engine import Job, Record, Settings, run_job
from matrix_report import Cell, PromptFigures, assemble_result, draw, table
from prepare_model import default_cache, prepare_model
from random_model import VOCABULARY, random_model
from redis import Redis
from redis_server import RedisServer

OUT = Path(__file__).resolve().parent.parent / "out"
PROMPT_TOKENS = (5 * PAGE_TOKENS, 7 * PAGE_TOKENS + 37, 3 * PAGE_TOKENS + 1)
REDIS_CONFIG = ("maxmemory 2gb",)
TP1, TP2, PP2, CP2 = Cut(), Cut(tensor=2), Cut(pipeline=2), Cut(tensor=2, context=2)


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the matrix; `make` returns its directory, given one that it may make.

    `grid` gives every rank of every cut whole cells, unless `parts` says that only TP1 has them: the other cuts then
    read byte ranges, and write nothing. With `beside` only the cells in which that cut writes or reads.
    """

    name: str
    grid: str
    cuts: tuple[Cut, ...]
    make: Callable[[Path], Path]
    parts: bool = False
    beside: Cut | None = None

    @property
    def writers(self) -> tuple[Cut, ...]:
        """The cuts whose ranks hold whole cells."""
        return tuple(cut for cut in self.cuts if cut == TP1 or not self.parts)

    def readers(self, writer: Cut) -> tuple[Cut, ...]:
        """The cuts that read what one of them wrote; of parts only those that hold parts."""
        if self.beside not in (None, writer):
            return tuple(cut for cut in self.cuts if cut == self.beside)
        return tuple(cut for cut in self.cuts if cut != TP1 or not self.parts)


def one_head(directory: Path) -> Path:
    """A random model whose KV head every tensor rank holds."""
    return random_model(directory, num_kv_heads=1)


MODELS = (
    Model("8 KV heads", "2x2", (TP1, TP2, PP2), random_model),
    Model("8 KV heads, by ranges", "1x1", (TP1, TP2, PP2), random_model, parts=True),
    Model("1 KV head", "1x1", (TP1, TP2), one_head),
    Model("SmolLM2", "2x1", (TP1, PP2), lambda _: prepare_model(default_cache())),
)
QUICK = (Model("8 KV heads", "2x2", (TP2, PP2), random_model),)
CONTEXT_PARALLEL = (Model("1 KV head shared out", "2x1", (TP1, TP2, PP2, CP2), one_head, beside=CP2),)


@dataclass(slots=True)
class Found:
    """What has been measured so far, and with which versions."""

    cells: list[Cell] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    began_s: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.began_s


@dataclass(slots=True)
class Matrix:
    """The runs, one engine at a time. `folder` holds models and pages while it lasts, `log` vLLM's lines."""

    server: RedisServer
    folder: Path
    log: Path
    found: Found

    def measure(self, model: Model) -> None:
        """All pairs of the model's cuts."""
        directory = model.make(self.folder / f"model-{model.name.replace(' ', '-').replace(',', '')}")
        for writer in model.writers:
            self._measure_row(model, directory, writer)

    def _measure_row(self, model: Model, directory: Path, writer: Cut) -> None:
        """One writer with all its readers, on a store that holds nothing yet."""
        with Redis.from_url(self.server.url) as client:
            client.flushall()
        prompts = [prompt_of(num_tokens, seed) for seed, num_tokens in enumerate(PROMPT_TOKENS)]
        connector = connector_of(self.server.url, model.grid, f"matrix-{writer.name}")
        began_s = time.monotonic()
        with self._pages() as folder:
            written: Record | str
            try:
                written = self._run(Job.WRITE, Settings(str(directory), writer, connector, prompts), folder)
            except (EngineError, ValueError) as error:  # a row that fails, as with fewer cores than ranks
                written = f"writer: {error}"
            self._say(f"{model.name}: {writer.name} writes", time.monotonic() - began_s)
            reading = connector | {"write": "never"} if model.parts else connector
            for reader in model.readers(writer):
                began_s = time.monotonic()
                settings = Settings(str(directory), reader, reading, prompts)
                figures, error_text = self._read(settings, written) if isinstance(written, Record) else ([], written)
                seconds = time.monotonic() - began_s
                cell = Cell(model.name, writer.name, reader.name, seconds, figures, error_text)
                self._say(f"{model.name}: {reader.name} reads what {writer.name} wrote: {cell.verdict}", seconds)
                self.found.cells.append(cell)

    def _read(self, settings: Settings, written: Record) -> tuple[list[PromptFigures], str | None]:
        with self._pages() as folder:
            try:
                found = self._run(Job.READ, settings, folder)
                triples = zip(settings.prompts, written.takes, found.takes, strict=True)
                return [PromptFigures.of(len(prompt), theirs, ours) for prompt, theirs, ours in triples], None
            except (EngineError, ValueError) as error:  # a cell that fails; the others are still of interest
                return [], f"reader: {error}"

    def _run(self, job: Job, settings: Settings, folder: Path) -> Record:
        record = run_job(job, settings, folder, self.log)
        self.found.versions |= record.versions
        return record

    @contextmanager
    def _pages(self) -> Iterator[Path]:
        """A folder's name for a job, whose pages are no longer wanted at the end."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="job-") as folder:
            yield Path(folder) / "pages"

    def _say(self, text: str, seconds: float) -> None:
        """Progress, apart from the result."""
        minutes, rest = divmod(int(self.found.seconds), 60)
        print(f"[{minutes}:{rest:02}] {text} ({seconds:.0f} s)", file=sys.stderr, flush=True)


def connector_of(url: str, grid: str, generation: str) -> dict[str, str | int | float]:
    """The connector's settings, the same in all engines that share; the lookup is not to fail on a busy machine."""
    return {
        "store": url,
        "grid": grid,
        "generation": generation,
        "host_memory": "512MiB",
        "page_tokens": PAGE_TOKENS,
        "lookup_timeout_s": 5.0,
        "prefetch": "wait_complete",
        "consensus": "enforce",
    }


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """Random token ids, which share no page with another seed's."""
    source = random.Random(seed)
    return [source.randrange(16, VOCABULARY) for _ in range(num_tokens)]


def measure(models: Sequence[Model], found: Found) -> None:
    """All cells of these models."""
    OUT.mkdir(exist_ok=True)
    log = OUT / "matrix.log"
    log.unlink(missing_ok=True)
    scratch = tempfile.TemporaryDirectory(dir=OUT, prefix="matrix-", ignore_cleanup_errors=True)
    with scratch as folder, RedisServer(Path(folder) / "redis", config=REDIS_CONFIG) as server:
        matrix = Matrix(server, Path(folder), log, found)
        for model in models:
            matrix.measure(model)


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line: see the module; `models` become those to run."""
    parser = argparse.ArgumentParser(
        prog="scripts/matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=OUT / "matrix.json", help="result (default: out/matrix.json)")
    parser.add_argument("--svg", type=Path, help="picture of the matrix")
    fewer = parser.add_mutually_exclusive_group()
    fewer.add_argument("--quick", action="store_true", help="the first model alone, TP2 and PP2")
    fewer.add_argument("--cp", action="store_true", help="context parallelism alone, against every cut")
    parser.add_argument("--models", help="only these, such as 'SmolLM2,1 KV head'")
    parser.add_argument("--cuts", help="only these, such as TP1,PP2")
    args = parser.parse_args(arguments)
    try:
        models = QUICK if args.quick else CONTEXT_PARALLEL if args.cp else MODELS
        args.models = chosen(models, args.models, args.cuts)
    except ValueError as error:
        parser.error(str(error))
    return args


def chosen(models: Sequence[Model], names: str | None, cuts: str | None) -> list[Model]:
    """The models and cuts that are named; all where nothing is.

    Raises:
        ValueError: a name is unknown, or nothing is left.
    """
    known = {model.name for model in models}, {cut.name for model in models for cut in model.cuts}
    wanted = [set(text.split(",")) if text else all_names for text, all_names in zip((names, cuts), known, strict=True)]
    for asked, all_names in zip(wanted, known, strict=True):
        if asked - all_names:
            raise ValueError(f"unknown {sorted(asked - all_names)}: there are {sorted(all_names)}")
    found = [
        replace(model, cuts=tuple(cut for cut in model.cuts if cut.name in wanted[1]))
        for model in models
        if model.name in wanted[0]
    ]
    if not all(model.cuts and model.beside in (None, *model.cuts) for model in found):
        raise ValueError(f"a model has none of the cuts {cuts}: name its cuts or leave it out")
    return found


def stop(signum: int, frame: FrameType | None) -> NoReturn:
    """Ends as after Ctrl-C: the engine and the server are stopped and what they wrote is removed."""
    raise KeyboardInterrupt


def show(found: Found, json_path: Path, svg_path: Path | None) -> None:
    """Write the result and print it, with what is wrong with each cell."""
    json_path.write_text(json.dumps(assemble_result(found.cells, found.versions, found.seconds), indent=2) + "\n")
    if svg_path is not None:
        draw(found.cells, svg_path)
    print(table(found.cells), f"result in {json_path}", sep="\n\n")
    for cell in found.cells:
        for problem in cell.problems:
            print(f"scripts/matrix: {cell.model}, {cell.writer} -> {cell.reader}: {problem}", file=sys.stderr)


def main() -> int:
    """Run, show, and say whether every cell holds."""
    args = read_arguments()
    signal.signal(signal.SIGTERM, stop)
    found = Found()
    try:
        measure(args.models, found)
    except (OSError, RuntimeError) as error:  # a server or a model that is not there
        print(f"scripts/matrix: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"scripts/matrix: stopped after {len(found.cells)} cells, which are not written", file=sys.stderr)
        print(table(found.cells))
        return 130
    show(found, args.json, args.svg)
    return 1 if any(cell.problems for cell in found.cells) else 0


if __name__ == "__main__":
    sys.exit(main())
