"""The real `vllm-router` between a prefill and a decode server that only note what they are asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from engine_process import EngineError
from serving_servers import FOR_PREFILL, Router

OURS = {"do_remote_prefill": True, "hicache": {"version": 1, "ranks": [["127.0.0.1", 7000]]}}


@dataclass
class Worker:
    """A server that notes requests for answers and gives one; others it answers with nothing."""

    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    parameters: dict[str, Any] | None = None
    status: int = 200

    def __enter__(self) -> Worker:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, path: str, body: dict[str, Any]) -> bytes:
        if path.endswith("/render"):
            return b"{}"
        self.asked.append((path, body))
        choice = {"index": 0, "text": "a", "token_ids": [3], "message": {"role": "assistant", "content": "a"}}
        if body["stream"]:
            return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\ndata: [DONE]\n\n"
        return json.dumps({"choices": [choice], "kv_transfer_params": self.parameters}).encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        worker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200, b"{}")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._send(worker.status, worker.answer(self.path, body))

            def _send(self, status: int, text: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        return Handler


@dataclass
class Rig:
    prefill: Worker
    decode: Worker
    router: Router


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Worker() as prefill, Worker() as decode:
        folder = tmp_path_factory.mktemp("router")
        with Router(folder, prefill=[prefill.url], decode=[decode.url]) as router:
            router.wait_healthy()
            yield Rig(prefill, decode, router)


@pytest.fixture
def rig(started: Rig) -> Rig:
    for worker in (started.prefill, started.decode):
        worker.asked.clear()
        worker.parameters, worker.status = OURS, 200
    return started


QUESTIONS = {
    "/v1/completions": {"prompt": [1, 2, 3], "max_tokens": 9},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}


@pytest.mark.parametrize("path", QUESTIONS)
def test_decode_is_given_what_prefill_answered_unread(rig: Rig, path: str) -> None:
    rig.router.post(path, {"model": "m", **QUESTIONS[path]})
    ((first, before),), ((second, after),) = rig.prefill.asked, rig.decode.asked
    assert (first, before["kv_transfer_params"], before["max_tokens"]) == (path, FOR_PREFILL, 1)
    assert (second, after["kv_transfer_params"], after["max_tokens"]) == (path, OURS, 9)


def test_a_stream_is_decodes_alone(rig: Rig) -> None:
    assert rig.router.stream([1, 2, 3], 9, model="m").tokens == [3]
    assert [worker.asked[0][1]["stream"] for worker in (rig.prefill, rig.decode)] == [False, True]


def test_decode_is_asked_though_prefill_had_nothing_to_hand_over(rig: Rig) -> None:
    rig.prefill.parameters = None
    rig.router.complete([1, 2, 3], 9, model="m")
    assert rig.decode.asked[0][1].get("kv_transfer_params") is None


def test_what_prefill_refuses_is_refused_and_decode_not_asked(rig: Rig) -> None:
    rig.prefill.status = 500
    with pytest.raises(EngineError, match="answered 500"):
        rig.router.complete([1, 2, 3], 9, model="m")
    assert not rig.decode.asked
