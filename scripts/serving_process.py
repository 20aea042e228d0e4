"""A process that answers HTTP: started, asked, paused and ended, and what it says when it does not start.

Owner: whoever enters the `with` block, from one thread; requests may come from several.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from engine_job import end
from engine_process import EngineError
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from redis_server import HOST

START_LIMIT_S = 180.0
REQUEST_LIMIT_S = 300.0
_POLL_S = 0.1
_LOG_LINES = 20
_ERROR = re.compile(r"\b\w*(Error|Exception): ")
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy stands before this host


@dataclass(frozen=True, slots=True)
class Streamed:
    """A completion as its caller saw it come.

    Attributes:
        first_s: from sending the request to its first token, seconds; `total_s` to its end.
        text: all of it; `tokens` its ids.
        usage: what the server counted: `prompt_tokens`, `completion_tokens` and details.
    """

    first_s: float
    total_s: float
    text: str
    tokens: list[int]
    usage: dict[str, Any]


class HttpProcess:
    """A process that answers HTTP on a port of its own.

    Args:
        command: with its arguments.
        log: file to which what it prints is added.
        environment: whole.
        core: the one core that it may use; `None` for all.
    """

    def __init__(
        self, command: Sequence[str], port: int, log: Path, environment: Mapping[str, str], core: int | None = None
    ) -> None:
        self.url = f"http://{HOST}:{port}"
        self.port = port
        self.log = log
        self.command = list(command)
        self.environment = dict(environment)
        self._core = core
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process that was started. Raises EngineError if none is."""
        if self._process is None:
            raise EngineError(f"the server of {self.url} is not started: enter its `with` block")
        return self._process.pid

    def start(self) -> None:
        """Start it; it answers later, see `wait_healthy`. A session of its own keeps Ctrl-C from it."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        if self._core is not None:
            os.sched_setaffinity(self._process.pid, {self._core})

    def stop(self) -> None:
        """End it and what it has started; it may flush first. Without effect if it does not run."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)  # one that is paused would not hear that it is to end
            try:
                end(process)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def pause(self) -> None:
        """Stop all of its processes where they are, until `resume`; it uses no core meanwhile."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `pause`."""
        os.killpg(self.pid, signal.SIGCONT)

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_healthy(self, limit_s: float = START_LIMIT_S) -> None:
        """Return when it answers. Raises EngineError, with the end of its log, if it dies or takes too long."""
        deadline = time.monotonic() + limit_s
        while not self.is_healthy():
            if not self.is_running():
                raise EngineError(f"the server of {self.url} ended before it answered. {self.last_lines()}")
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the server of {self.url} did not answer within {limit_s:.0f} s. {self.last_lines()}"
                )
            time.sleep(_POLL_S)

    def is_healthy(self) -> bool:
        """Whether it says that it is well."""
        try:
            self.get("/health", limit_s=5.0)
        except (OSError, http.client.HTTPException):
            return False
        return True

    def last_lines(self) -> str:
        """The first error in its log, for what follows is often of others that suffer from it, and the log's end."""
        lines = self.log.read_text(errors="replace").splitlines()
        first = [line for line in lines if _ERROR.search(line)][:1]
        return "\n  ".join([f"Of its log {self.log}:", *first, "...", *lines[-_LOG_LINES:]])

    def get(self, path: str, limit_s: float = REQUEST_LIMIT_S) -> str:
        """The body of an answer. Raises OSError if there is none, or it is an error."""
        with _OPENER.open(self.url + path, timeout=limit_s) as reply:
            body: bytes = reply.read()
        return body.decode()

    def post(self, path: str, body: Mapping[str, object], headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The JSON of an answer; an empty one where there is no body. Raises EngineError with what was said."""
        with self._open(path, body, headers or {}) as reply:
            text = reply.read()
        answer: dict[str, Any] = json.loads(text) if text else {}
        return answer

    def complete(self, prompt: Sequence[int], max_tokens: int, **extra: object) -> dict[str, Any]:
        """A whole completion of token ids, greedy; `extra` goes into the request as it is."""
        return self.post("/v1/completions", _completion(prompt, max_tokens, extra))

    def stream(self, prompt: Sequence[int], max_tokens: int, **extra: object) -> Streamed:
        """A completion of token ids, timed where a streaming caller sees its first token."""
        asked = {"stream": True, "stream_options": {"include_usage": True}, **extra}
        pieces: list[str] = []
        tokens: list[int] = []
        usage: dict[str, Any] = {}
        first_s = 0.0
        start = time.perf_counter()
        with self._open("/v1/completions", _completion(prompt, max_tokens, asked), {}) as reply:
            for event in _events(reply):
                for choice in event["choices"]:
                    first_s = first_s or time.perf_counter() - start
                    pieces.append(choice["text"])
                    tokens += choice["token_ids"]
                usage = event.get("usage") or usage
        if not first_s:
            raise EngineError(f"{self.url} streamed no token of {max_tokens}: {self.last_lines()}")
        return Streamed(first_s, time.perf_counter() - start, "".join(pieces), tokens, usage)

    def metrics(self) -> list[Sample]:
        """What `/metrics` shows now, samples with a name, labels and a value; see `engine_job.total_of`."""
        families = text_string_to_metric_families(self.get("/metrics"))
        return [sample for family in families for sample in family.samples]

    @contextlib.contextmanager
    def _open(
        self, path: str, body: Mapping[str, object], headers: Mapping[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        sent = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
        )
        try:
            with _OPENER.open(sent, timeout=REQUEST_LIMIT_S) as reply:
                yield reply
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:2000]
            raise EngineError(f"{self.url}{path} answered {error.code}: {said}") from None


def _completion(prompt: Sequence[int], max_tokens: int, extra: Mapping[str, object]) -> dict[str, object]:
    return {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **extra,
    }


def _events(reply: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The objects of a stream of server-sent events."""
    for line in reply:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            event: dict[str, Any] = json.loads(line[6:])
            if "error" in event:
                raise EngineError(f"the server broke off its stream: {event['error']}")
            yield event
