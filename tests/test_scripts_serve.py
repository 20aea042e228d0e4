"""`scripts/serve`: which processes it starts for which arguments, and that they live and end together."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import serving_run
from engine_process import EngineError
from redis_server import free_port
from serving_run import KV_AWARE, Settings, engines_of, read_arguments, router_of, serve, settings_of
from serving_servers import Server

PYTHON = sys.executable
MODEL = Path("models") / "Small-Model"
ENDS_AFTER_AN_ANSWER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
server.handle_request()
if sys.argv[2] == "mortal":
    sys.exit("OSError: no more")
server.serve_forever()
"""


@pytest.fixture(autouse=True)
def router_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving_servers.sys.executable", str(tmp_path / "python"))
    (tmp_path / "vllm-router").touch()


def transfer_of(server: Server) -> dict[str, object]:
    found: dict[str, object] = json.loads(server.command[server.command.index("--kv-transfer-config") + 1])
    return found


def names_and_roles(settings: Settings) -> list[tuple[str, object]]:
    return [(engine.name, transfer_of(engine)["kv_role"]) for engine in engines_of(settings, Path())]


def test_one_engine_answers_on_the_port_itself() -> None:
    settings = Settings(MODEL, 7000, store="redis://one")
    (engine,) = engines_of(settings, Path())
    assert engine.url.endswith(":7000")
    assert transfer_of(engine)["kv_connector_extra_config"] == {"store": "redis://one"}
    assert router_of(settings, [engine], Path()) is None


def test_before_several_engines_stands_a_router_on_the_port() -> None:
    settings = Settings(MODEL, 7000, num_engines=3)
    engines = engines_of(settings, Path())
    router = router_of(settings, engines, Path())
    assert router is not None
    assert len({router.url, *(engine.url for engine in engines)}) == 4
    assert router.url.endswith(":7000")
    place = router.command.index("--worker-urls")
    assert router.command[place + 1 : place + 4] == [engine.url for engine in engines]
    assert "--policy" not in router.command


def test_engines_do_all_and_a_pair_shares_the_work() -> None:
    assert names_and_roles(Settings(MODEL, 7000, num_engines=2)) == [("engine-0", "kv_both"), ("engine-1", "kv_both")]
    assert names_and_roles(Settings(MODEL, 7000, pair=True)) == [("prefill", "kv_producer"), ("decode", "kv_consumer")]


def test_a_pair_stands_behind_a_router_that_hands_over() -> None:
    settings = Settings(MODEL, 7000, pair=True, policy="round_robin")
    prefill, decode = engines_of(settings, Path())
    router = router_of(settings, [prefill, decode], Path())
    assert router is not None
    for option, value in (("--prefill", prefill.url), ("--decode", decode.url), ("--policy", "round_robin")):
        assert router.command[router.command.index(option) + 1] == value


def test_a_router_that_follows_events_knows_where_each_engine_publishes_them() -> None:
    settings = Settings(MODEL, 7000, num_engines=2, policy=KV_AWARE)
    engines = engines_of(settings, Path())
    router = router_of(settings, engines, Path())
    published = [json.loads(each.command[each.command.index("--kv-events-config") + 1]) for each in engines]
    sources = [f"--kv-event-source={each.url}={one['endpoint']}" for each, one in zip(engines, published, strict=True)]
    assert router is not None
    assert [word for word in router.command if word.startswith("--kv-event-source")] == sources
    assert len(set(sources)) == 2


def test_without_the_cache_it_is_plain_vllm_with_the_options_of_every_engine() -> None:
    engines = engines_of(Settings(MODEL, 7000, num_engines=2, store=None, options=("--seed", "7")), Path())
    for engine in engines:
        assert "--kv-transfer-config" not in engine.command
        assert "--kv-events-config" not in engine.command
        assert engine.command[-2:] == ["--seed", "7"]


def test_the_command_line_becomes_settings(tmp_path: Path) -> None:
    words = ["--model", str(tmp_path), "--port", "7", "--engines", "2", "--policy", "random", "--", "--seed", "7"]
    settings = settings_of(read_arguments(words))
    assert settings == Settings(tmp_path, 7, 2, False, "random", "none", ("--seed", "7"))
    assert settings_of(read_arguments(["--model", str(tmp_path), "--no-cache"])).store is None
    assert settings_of(read_arguments(["--model", str(tmp_path), "--store", "file:///x"])).store == "file:///x"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engines", "0"], "--engines 0 serves nothing"),
        (["--no-cache", "--pair"], "--no-cache leaves nothing"),
        (["--no-cache", "--store", "none"], "--no-cache leaves nothing"),
        (["--policy", "random"], "has one engine to choose from"),
        (["--policy", KV_AWARE, "--pair"], "one engine of each kind"),
        (["--pair", "--engines", "2"], "not allowed with"),
        (["--engines", "2", "--policy", "best"], "invalid choice"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        read_arguments(words)
    assert message in capsys.readouterr().err


def fakes(folder: Path, *kinds: str) -> list[Server]:
    """Servers whose process is another: a mortal one ends when it has been asked once."""
    servers = []
    for kind in kinds:
        server = Server(MODEL, folder, kind, port=free_port())
        server.command = [PYTHON, "-c", ENDS_AFTER_AN_ANSWER, str(server.port), kind]
        servers.append(server)
    return servers


def test_when_one_dies_the_others_end_and_its_log_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = fakes(tmp_path, "immortal", "mortal")
    monkeypatch.setattr(serving_run, "engines_of", lambda *_: engines)
    monkeypatch.setattr(serving_run, "router_of", lambda *_: None)
    with pytest.raises(EngineError, match=r"(?s)the others are ended too.*OSError: no more"):
        serve(Settings(MODEL, 7000), tmp_path)
    assert not any(engine.is_running() for engine in engines)
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in shown[:2]] == [[engine.name, engine.url] for engine in engines]
    assert shown[3].startswith(f"  curl {engines[-1].url}/v1/chat/completions ")


def test_ctrl_c_ends_all(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    engines = fakes(tmp_path, "immortal")
    monkeypatch.setattr(serving_run, "engines_of", lambda *_: engines)
    monkeypatch.setattr(serving_run, "router_of", lambda *_: None)
    monkeypatch.setattr(serving_run, "read_arguments", lambda: read_arguments(["--model", str(tmp_path)]))
    monkeypatch.setattr(serving_run, "FOLDER", tmp_path / "logs")
    # Where a shell has put the tests into the background Python ignores it.
    set_handler = signal.signal
    before = set_handler(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: set_handler(signal.SIGINT, before))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(serving_run, "question", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    assert serving_run.main() == 130
    assert not engines[0].is_running()
    assert "stopped" in capsys.readouterr().err


def test_the_question_can_be_asked_as_it_is_shown() -> None:
    shown = serving_run.question("http://127.0.0.1:7000", "Small-Model")
    body = json.loads(shown[shown.index("'{") + 1 : -1])
    assert (body["model"], body["messages"][0]["role"]) == ("Small-Model", "user")
