"""Servers of scripts: they answer, are paused, end with all that they started, and say why they did not start."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from engine_job import total_of
from engine_process import EngineError
from redis_server import free_port
from serving_process import HttpProcess
from serving_servers import Role, Router, Server, cores_of, hicache, nixl
from tiny_http import TinyHttp

ANSWERS = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
WITH_A_DEAF_CHILD = f"""
import subprocess, sys
deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
child.stdout.readline()
{ANSWERS}
"""
TIERS = (("host", 5), ("peer", 3))
SILENT = "import signal; signal.pause()"
ENDS_IN_GOOD_ORDER = f"""
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit("it was asked to end"))
{ANSWERS}
"""
MODEL = Path("models") / "Small-Model"


def fake(folder: Path, program: str, core: int | None = None) -> HttpProcess:
    port = free_port()
    return HttpProcess([sys.executable, "-c", program, str(port)], port, folder / "fake.log", os.environ, core)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline


def asked(*bodies: str, status: str = "200 OK") -> tuple[TinyHttp, HttpProcess]:
    """A server that gives the same answer to each request, and the process that would have started it."""

    def script(connection: socket.socket, _: str) -> None:
        head = f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n"
        connection.sendall("".join([head, *bodies]).encode())
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):  # closed with a request unread, it would take the answer back
            pass

    server = TinyHttp(script)
    return server, HttpProcess([], server.port, Path("none.log"), {})


def event(**fields: object) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def choice(text: str, *tokens: int) -> str:
    return event(choices=[{"text": text, "token_ids": tokens}])


def test_a_server_is_healthy_when_it_answers_and_gone_when_the_block_ends(tmp_path: Path) -> None:
    with fake(tmp_path, ANSWERS) as server:
        server.wait_healthy()
        pid = server.pid
        assert server.is_running()
    assert not psutil.pid_exists(pid)
    assert not server.is_running()
    assert not server.is_healthy()


def test_what_a_server_started_is_ended_with_it_though_it_is_deaf(tmp_path: Path) -> None:
    with fake(tmp_path, WITH_A_DEAF_CHILD) as server:
        server.wait_healthy()
        (child,) = psutil.Process(server.pid).children()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_a_server_that_dies_says_its_first_error_and_its_last_lines(tmp_path: Path) -> None:
    program = "print('KeyError: the cause'); print('\\n' * 100); print('RuntimeError: its end'); raise SystemExit(3)"
    with fake(tmp_path, program) as server, pytest.raises(EngineError, match="ended before it answered") as caught:
        server.wait_healthy()
    message = str(caught.value)
    assert str(tmp_path / "fake.log") in message
    assert message.index("KeyError: the cause") < message.index("RuntimeError: its end")


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with fake(tmp_path, SILENT) as server, pytest.raises(EngineError, match="did not answer within 0 s"):
        server.wait_healthy(limit_s=0.3)


def test_a_server_that_is_not_started_has_no_process(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="is not started: enter its `with` block"):
        _ = fake(tmp_path, ANSWERS).pid


def test_a_paused_server_stands_still_goes_on_and_can_be_ended(tmp_path: Path) -> None:
    with fake(tmp_path, ENDS_IN_GOOD_ORDER) as server:
        server.wait_healthy()
        process = psutil.Process(server.pid)
        server.pause()
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
        server.resume()
        server.wait_healthy()
        server.pause()
    assert not process.is_running()
    assert "it was asked to end" in server.last_lines()


def test_a_server_keeps_to_its_core(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    with fake(tmp_path, SILENT, core) as server:
        assert psutil.Process(server.pid).cpu_affinity() == [core]


def test_a_completion_is_of_token_ids_and_greedy_with_what_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, dict[str, object]]] = []
    monkeypatch.setattr(HttpProcess, "post", lambda _, path, body: sent.append((path, dict(body))) or {})
    Server(MODEL, Path()).complete(range(3), 5, kv_transfer_params={"a": 1})
    ((path, body),) = sent
    assert path == "/v1/completions"
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("Small-Model", [0, 1, 2], 5)
    assert (body["temperature"], body["ignore_eos"], body["kv_transfer_params"]) == (0, True, {"a": 1})


def test_an_answer_is_its_json_and_none_is_empty() -> None:
    for text, expected in (('{"a": [1]}', {"a": [1]}), ("", {})):
        server, process = asked(text)
        with server:
            assert process.post("/any", {"b": 2}) == expected
            assert server.heads[0].startswith("POST /any ")


def test_a_refusal_is_an_error_with_what_was_said() -> None:
    server, process = asked('{"error": "too long"}', status="400 Bad Request")
    with server, pytest.raises(EngineError, match=r"/v1/completions answered 400: .*too long"):
        process.complete([1], 2)


def test_a_stream_is_put_together_and_timed_by_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving_process.time.perf_counter", itertools.count().__next__)
    usage = {"prompt_tokens": 1, "completion_tokens": 3}
    server, process = asked(choice("a", 7), choice("bc", 8, 9), event(choices=[], usage=usage), "data: [DONE]\n\n")
    with server:
        said = process.stream([1], 3)
    assert (said.text, said.tokens, said.usage) == ("abc", [7, 8, 9], usage)
    assert (said.first_s, said.total_s) == (1, 2)


@pytest.mark.parametrize(
    ("body", "message"),
    [(choice("a", 7) + event(error={"message": "gone"}), "broke off its stream: .*gone"), ("", "streamed no token")],
)
def test_a_stream_that_breaks_off_is_an_error(tmp_path: Path, body: str, message: str) -> None:
    server, process = asked(body)
    process.log = tmp_path / "empty.log"
    process.log.touch()
    with server, pytest.raises(EngineError, match=message):
        process.stream([1], 3)


def test_metrics_are_samples_with_labels() -> None:
    text = "# TYPE hits counter\n" + "".join(f'hits_total{{tier="{tier}"}} {number}\n' for tier, number in TIERS)
    server, process = asked(text)
    with server:
        found = process.metrics()
    assert total_of(found, "hits_total", tier="host") == 5
    assert total_of(found, "hits_total") == 8


@pytest.mark.parametrize(("role", "host"), [("kv_producer", "127.0.0.1"), ("kv_consumer", None), ("kv_both", None)])
def test_who_computes_for_others_says_where_it_is_reached(role: Role, host: str | None) -> None:
    config = hicache(role, store="none")
    extra = config["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    assert (config["kv_role"], extra.get("peer_host"), extra["store"]) == (role, host, "none")


def test_a_host_that_is_given_is_kept() -> None:
    extra = hicache("kv_producer", peer_host="10.0.0.7")["kv_connector_extra_config"]
    assert extra == {"peer_host": "10.0.0.7"}


def test_a_server_is_started_with_its_connector_and_options() -> None:
    command = Server(MODEL, Path(), transfer=hicache(), options=["--seed", "7"]).command
    assert json.loads(command[command.index("--kv-transfer-config") + 1]) == hicache()
    assert command[command.index("--served-model-name") + 1] == "Small-Model"
    assert command[-2:] == ["--seed", "7"]
    assert "--kv-transfer-config" not in Server(MODEL, Path()).command


def test_nixl_has_a_side_channel_for_each_server_and_others_have_none() -> None:
    name = "VLLM_NIXL_SIDE_CHANNEL_PORT"
    ports = {Server(MODEL, Path(), transfer=nixl()).environment.get(name) for _ in range(2)}
    assert len(ports - {None}) == 2
    assert name not in Server(MODEL, Path(), transfer=hicache()).environment


def test_variables_of_a_server_go_over_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "mine")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    environment = Server(MODEL, Path(), environment={"OMP_NUM_THREADS": "1"}).environment
    assert (environment["OMP_NUM_THREADS"], environment["TOKENIZERS_PARALLELISM"]) == ("1", "mine")


@pytest.fixture
def router_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    program = tmp_path / "vllm-router"
    program.touch()
    return program


def test_a_router_is_before_servers_that_do_everything(router_program: Path) -> None:
    command = Router(Path(), workers=["http://a", "http://b"], options=["--policy", "random"]).command
    assert command[:4] == [str(router_program), "--worker-urls", "http://a", "http://b"]
    assert command[-2:] == ["--policy", "random"]
    assert "--vllm-pd-disaggregation" not in command


def test_a_router_is_before_prefill_and_decode(router_program: Path) -> None:
    command = Router(Path(), prefill=["http://a", "http://b"], decode=["http://c"]).command
    behind = ["--prefill", "http://a", "--prefill", "http://b", "--decode", "http://c"]
    assert command[1:10] == ["--vllm-pd-disaggregation", "--kv-connector", "nixl", *behind]
    assert "--worker-urls" not in command


def test_a_router_that_is_not_installed_says_how(router_program: Path) -> None:
    router_program.unlink()
    with pytest.raises(EngineError, match=r"pip install 'vllm-hicache\[serving\]'"):
        Router(Path(), workers=["http://a"])


@pytest.mark.parametrize(
    ("num_cores", "num_processes", "expected"),
    [(2, 1, [None]), (2, 2, [0, 1]), (2, 3, [None, None, None]), (4, 3, [0, 1, 2])],
)
def test_each_process_has_a_core_where_there_are_enough(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, num_processes: int, expected: list[int | None]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(num_cores)))
    assert cores_of(num_processes) == expected
