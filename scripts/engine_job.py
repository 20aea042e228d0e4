"""One vLLM engine in a process of its own that does one job and ends, and what such engines have in common.

A job lies in a folder as `job.json`, its record goes there as `record.json`. Owner: `matrix_engine.py` and
`bench_speculative_engine.py`, each on both sides: `run_program` is the caller's, `RestingEngine` the job's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import matrix_worker
from engine_process import ENVIRONMENT, EngineError

if TYPE_CHECKING:
    from vllm import LLM

OPEN_OPERATIONS = "vllm:hicache_open_operations"
_PAUSE_S = 0.02
_STOP_LIMIT_S = 60.0


def run_program(
    program: str, job: object, folder: Path, log: Path, limit_s: float, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Do a job in a process of its own; its record. `folder` is made; vLLM's lines are added to `log`.

    Args:
        program: the file of the job's module.
        job: as it goes to JSON.
        environment: variables beside those of every engine.

    Raises:
        EngineError: the engine did not start, failed, or took longer than `limit_s`.
    """
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(job))
    whole = {**ENVIRONMENT, **os.environ, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", **environment}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, program, str(folder)], stdout=output, stderr=subprocess.STDOUT, env=whole
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise EngineError(f"it took longer than {limit_s:.0f} s (its log: {log})") from None
        finally:
            end(process)
    if status:
        raise EngineError(f"it ended with status {status} (its log: {log})")
    record: dict[str, Any] = json.loads((folder / "record.json").read_text())
    return record


def end(process: subprocess.Popen[bytes]) -> None:
    """End it if it still runs; asked first, so that it takes its workers with it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def stop(signum: int, frame: FrameType | None) -> NoReturn:
    """Ends in good order, so that vLLM ends its workers."""
    sys.exit(1)


def transfer_config(connector: Mapping[str, object]) -> dict[str, object]:
    """vLLM's `kv_transfer_config` for this package; `connector` is its `kv_connector_extra_config`."""
    return {
        "kv_connector": "HiCacheConnector",
        "kv_connector_module_path": "vllm_hicache.connectors",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(connector),
    }


def total_of(metrics: Sequence[Any], name: str, **labels: str) -> int:
    """Of all metrics of that name that match `labels`."""
    found = [metric.value for metric in metrics if metric.name == name and labels.items() <= metric.labels.items()]
    return sum(map(round, found))


class RestingEngine(ABC):
    """A started engine that can be emptied and brought to rest.

    Args:
        settle_limit_s: how long saves and flushes may take, seconds.
    """

    def __init__(self, llm: LLM, settle_limit_s: float) -> None:
        self._llm = llm
        self._settle_limit_s = settle_limit_s

    def poison(self) -> None:
        """Empty vLLM's own prefix cache, once saves have let go of its blocks, and overwrite every block."""
        self._wait(self._llm.reset_prefix_cache)
        self._llm.collective_rpc(matrix_worker.poison)

    def settle(self) -> None:
        """Wait until every save and flush has ended."""
        self._wait(self._is_settled)

    @abstractmethod
    def _stir(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Ask something small."""

    def _is_settled(self) -> bool:
        self._stir(range(8), 2)  # metrics move with a step only
        return total_of(self._llm.get_metrics(), OPEN_OPERATIONS) == 0

    def _wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + self._settle_limit_s
        while not condition():
            if time.monotonic() > deadline:
                raise EngineError(f"saves had not ended after {self._settle_limit_s:.0f} s")
            time.sleep(_PAUSE_S)
