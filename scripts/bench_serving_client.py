"""vLLM's `bench serve` in a process of its own, which sends one load after the other.

Owner: `bench_serving_run.py`, one thread. As a program this is `bench serve` itself, for vLLM's command does not start
where only its CPU distribution is installed; it reads arguments as JSON lines from stdin, and answers each by a line on
a pipe of its own. One process for all loads, since its start alone takes longer than a load.

Equal loads are equal tokens: all come from one seed, and the process has a fixed hash seed, by which vLLM makes up the
tokens of a trace's blocks.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bench_serving_load import Load
from engine_job import end
from engine_process import ENVIRONMENT, EngineError

LOAD_LIMIT_S = 300.0
_SEED = 20261201
_LOG_LINES = 20


@dataclass(frozen=True, slots=True)
class Sent:
    """What the requests of a load met, as their sender saw it.

    Attributes:
        seconds: from the first request to the last answer.
        prompt_tokens: of all answered requests, and `output_tokens`.
        ttft_s: time to the first token of each request that was answered, seconds.
        tpot_s: mean time of each further token, request by request, seconds.
    """

    seconds: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Sent:
        """From what `bench serve` saves with all details."""
        lengths, errors = result["output_lens"], result["errors"]
        whole = [place for place, error in enumerate(errors) if not error and lengths[place]]
        gaps = {place: result["itls"][place] for place in whole if lengths[place] > 1}
        return cls(
            seconds=result["duration"],
            prompt_tokens=result["total_input_tokens"],
            output_tokens=result["total_output_tokens"],
            ttft_s=tuple(result["ttfts"][place] for place in whole),
            tpot_s=tuple(sum(each) / (lengths[place] - 1) for place, each in gaps.items()),
        )


class Sender:
    """A started `bench serve`; use as a context manager.

    Args:
        folder: for its log and its results.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "bench.log"

    def __enter__(self) -> Self:
        answers, theirs = os.pipe()
        with self._log.open("ab") as output, open(theirs, "wb"):
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__)), str(theirs)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs,),
                env={**ENVIRONMENT, **os.environ, "PYTHONHASHSEED": "0"},
            )
        self._answers = os.fdopen(answers)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._answers.close()
        end(self._process)

    def send(self, load: Load, url: str, model: Path) -> Sent:
        """Send a load to a server that serves `model` by its directory's name.

        Raises:
            EngineError: `bench serve` failed, or took longer than it may; with the end of what it printed.
        """
        path = self._folder / f"{load.name}.json"
        path.unlink(missing_ok=True)
        self._ask(_arguments(load, url, model, path))
        if not select.select([self._answers], [], [], LOAD_LIMIT_S)[0]:
            raise EngineError(f"load {load.name} took more than {LOAD_LIMIT_S:.0f} s. {self._last_lines()}")
        said = self._answers.readline().strip()
        if said != "done":
            raise EngineError(f"load {load.name}: bench serve {said or 'ended'}. {self._last_lines()}")
        return Sent.of(json.loads(path.read_text()))

    def _ask(self, arguments: Sequence[str]) -> None:
        if self._process.stdin is None:
            raise EngineError("bench serve was started without a pipe to talk to it")
        try:
            self._process.stdin.write(json.dumps(arguments).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineError(f"bench serve ended. {self._last_lines()}") from None

    def _last_lines(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "\n  ".join([f"The end of its log {self._log}:", *lines])


def _arguments(load: Load, url: str, model: Path, path: Path) -> list[str]:
    target = ["--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions", "--model", model.name]
    asked = ["--tokenizer", str(model), "--num-prompts", str(load.num_requests), "--seed", str(_SEED)]
    answers = ["--temperature", "0", "--ignore-eos", "--ready-check-timeout-sec", "0", "--disable-tqdm"]
    result = ["--save-result", "--save-detailed", "--result-dir", str(path.parent), "--result-filename", path.name]
    return [*target, *asked, *answers, *result, *load.dataset]


def main(descriptor: int) -> None:
    """vLLM's `bench serve` for each line of arguments; `descriptor` is where it says how that ended."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    with os.fdopen(descriptor, "w") as answers:
        for line in sys.stdin:
            try:
                serve.main(parser.parse_args(json.loads(line)))
                said = "done"
            except (Exception, SystemExit) as error:
                said = f"failed with {type(error).__name__}: {error}".replace("\n", " ")
            print(said, file=answers, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
