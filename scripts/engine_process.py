"""A vLLM engine in a process of its own, so that it can be stopped and started again like a real one.

This is the side that scripts use; `engine_serve.py` is the program that holds the engine. They speak JSON lines
over its stdin and a pipe of their own. What vLLM itself prints goes to a log file.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import psutil

PROGRAM = Path(__file__).with_name("engine_serve.py")

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Set for the engine where the caller's environment does not say otherwise.

vLLM by itself reserves one core more for an engine with a connector than for one without, and on two cores none at
all. Threads then differ between the two, and with them both speed and rounding: here every engine has all cores.
"""

STOP_TIMEOUT_S = 60.0
QUIET_S = 0.15
QUIET_LIMIT_S = 10.0


class EngineError(RuntimeError):
    """The engine did not start, died, or refused a request."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What an engine is started with; `connector` is its `kv_connector_extra_config`, `None` for plain vLLM."""

    model: str
    max_model_len: int
    connector: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's outcome. Times are seconds from handing it over; `hit_tokens` come from the metrics."""

    ttft_s: float
    total_s: float
    tokens: list[int]
    logprobs: list[float]
    hit_tokens: dict[str, int]


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """Several requests at once: wall time in seconds, and tokens read and written."""

    seconds: float
    num_tokens: int


class Engine:
    """A started engine; use as a context manager. Engines of one script must not compute at the same time."""

    def __init__(self, settings: Settings, log: Path) -> None:
        self._log = log
        answers, theirs = os.pipe()
        with log.open("ab") as output, open(theirs, "wb"):
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM), json.dumps(asdict(settings)), str(theirs)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs,),
                env={**ENVIRONMENT, **os.environ},
            )
        self._answers = os.fdopen(answers)
        try:
            hello = self._read()
        except BaseException:
            self.close()
            raise
        self.versions: dict[str, str] = hello["versions"]

    def ask(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Run one request alone, greedily."""
        return Answer(**self._call("ask", prompt=list(prompt), max_tokens=max_tokens))

    def ask_all(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> BatchAnswer:
        """Run several requests as one batch."""
        return BatchAnswer(**self._call("ask_all", prompts=[list(each) for each in prompts], max_tokens=max_tokens))

    def forget_device(self) -> None:
        """Empty vLLM's own prefix cache, once saves that still read from it have ended."""
        self._call("forget_device")

    def metrics(self) -> dict[str, float]:
        """The connector's counters so far, `name|label` to number."""
        return self._call("metrics")

    def settle(self) -> None:
        """Wait until the engine is idle, that is until what it does in the background has ended."""
        deadline = time.monotonic() + QUIET_LIMIT_S
        before = self.cpu_s()
        while time.monotonic() < deadline:
            time.sleep(QUIET_S)
            now = self.cpu_s()
            if now - before < 0.2 * QUIET_S:
                return
            before = now

    def cpu_s(self) -> float:
        """CPU seconds that the engine's processes have used so far."""
        total = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            for process in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    total += times.user + times.system
        return total

    def close(self) -> None:
        """Stop the engine; what its connector has queued for the store is flushed first."""
        try:
            self._process.communicate(timeout=STOP_TIMEOUT_S)  # closes its stdin
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            self._answers.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, name: str, **arguments: object) -> dict[str, Any]:
        if self._process.stdin is None:
            raise EngineError("the engine's process was started without a pipe to talk to it")
        try:
            self._process.stdin.write(json.dumps({"call": name, "arguments": arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self._died()
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            self._died()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(f"the engine failed: {answer['error']} (its log: {self._log})")
        return answer

    def _died(self) -> NoReturn:
        raise EngineError(f"the engine's process ended before it answered (its log: {self._log})")
