"""A real vLLM server with the connector, as `scripts/chaos` drives it: by HTTP, from several threads.

Owner: `chaos_run.py`. Thread: `ask` and `metrics` from any; starting and stopping from one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from engine_process import ENVIRONMENT, Answer, EngineError
from prepare_model import default_cache, model_path
from redis_server import free_port

START_LIMIT_S = 180.0
STOP_LIMIT_S = 60.0
HUNG_S = 60.0
"""A request that takes longer has hung."""

OUTPUT_TOKENS = 4
MODEL_NAME = "chaos"
_PREFIX = "vllm:hicache_"
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_POLL_S = 0.1

Reading = dict[tuple[str, str], float]
"""The connector's metrics by name (without prefix) and label value, empty for metrics without one."""


class ServedEngine:
    """`python -m vllm.entrypoints.openai.api_server` with these connector settings; use as a context manager.

    Raises EngineError when it does not start.
    """

    def __init__(self, settings: Mapping[str, object], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        self._url = f"http://127.0.0.1:{free_port()}"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command(settings, self._url.rpartition(":")[2]),
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**ENVIRONMENT, **os.environ, "VLLM_SERVER_DEV_MODE": "1", **environment},
            )

    def __enter__(self) -> ServedEngine:
        deadline = time.monotonic() + START_LIMIT_S
        while not self._answers():
            if not self.is_alive or time.monotonic() > deadline:
                self._stop()
                raise EngineError(f"vLLM did not serve within {START_LIMIT_S:.0f} s (its log: {self._log})")
            time.sleep(_POLL_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def is_alive(self) -> bool:
        """Whether the server's process runs."""
        return self._process.poll() is None

    def ask(self, prompt: Sequence[int]) -> Answer:
        """One greedy request. Raises OSError (with its subclasses) when it fails, TimeoutError when it hangs."""
        body = {
            "model": MODEL_NAME,
            "prompt": list(prompt),
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "logprobs": 1,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        start = time.monotonic()
        choice = json.loads(self._call("/v1/completions", body))["choices"][0]
        seconds = time.monotonic() - start
        return Answer(seconds, seconds, choice["token_ids"], choice["logprobs"]["token_logprobs"], {})

    def forget_device(self) -> None:
        """Empty vLLM's own prefix cache, as soon as saves have let go of its blocks. Raises EngineError."""
        deadline = time.monotonic() + HUNG_S
        while not json.loads(self._call("/reset_prefix_cache", {}))["success"]:
            if time.monotonic() > deadline:
                raise EngineError(f"vLLM's prefix cache was not free within {HUNG_S:.0f} s: blocks are leaked")
            time.sleep(_POLL_S)

    def metrics(self) -> Reading:
        """The connector's metrics as the server shows them now."""
        lines = self._call("/metrics").splitlines()
        return dict(sample(line) for line in lines if line.startswith(_PREFIX))

    def _call(self, path: str, body: object = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=HUNG_S) as reply:
            text: str = reply.read().decode()
            return text

    def _answers(self) -> bool:
        try:
            self._call("/health")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def sample(line: str) -> tuple[tuple[str, str], float]:
    """One line of the metrics page that is one of the connector's: its key and value."""
    name, _, rest = line.removeprefix(_PREFIX).partition("{")
    labels, _, value = rest.rpartition("} ")
    own = [value for label, value in _LABEL.findall(labels) if label not in ("engine", "model_name")]
    return (name.removesuffix("_total"), own[0] if own else ""), float(value)


def command(settings: Mapping[str, object], port: str) -> list[str]:
    """The command line of the server."""
    transfer = {
        "kv_connector": "HiCacheConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(settings),
    }
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", port]
    model = ["--model", str(model_path(default_cache())), "--served-model-name", MODEL_NAME]
    shape = ["--enforce-eager", "--max-model-len", "2048", "--disable-uvicorn-access-log"]
    return [*program, *model, *shape, "--kv-transfer-config", json.dumps(transfer)]
