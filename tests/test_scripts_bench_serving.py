"""The serving benchmark without engines: what it asks of vLLM's `bench serve`, and what it makes of the answers."""

from __future__ import annotations

import contextlib
import json
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import bench_serving_run
import pytest
from bench_serving_client import Sender, Sent
from bench_serving_load import BLOCK_TOKENS, OUTPUT_TOKENS, TRACE, Load, conversations, loads, scaled
from bench_serving_report import TIERS, Counts, Row, draw, percentile, table
from bench_serving_run import SETUPS, Setup
from engine_process import EngineError
from prepare_model import default_cache, model_path
from prometheus_client.samples import Sample
from redis_server import HOST

SENT = Sent(seconds=10.0, prompt_tokens=4000, output_tokens=256, ttft_s=(0.4, 0.1, 0.3, 0.2), tpot_s=(0.02, 0.04, 0.03))


class Answers(BaseHTTPRequestHandler):
    """Streams as many pieces as tokens are asked for; refuses prompts that begin with `refused`."""

    prompts: list[Any]
    refused: int | None

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions" or asked["prompt"][0] == self.refused:
            self.send_error(404)
            return
        self.prompts.append(asked["prompt"])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for _ in range(asked["max_tokens"]):
            self._say({"choices": [{"index": 0, "text": " a"}]})
        self._say({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": asked["max_tokens"]}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _say(self, event: dict[str, object]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def log_message(self, *_: object) -> None:
        """Nothing: the test's output is not its log."""


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bench serve is started."""
    monkeypatch.setattr(bench_serving_run, "Sender", lambda folder: contextlib.nullcontext())


@pytest.fixture
def answers() -> Iterator[type[Answers]]:
    """A server's handler; its address is `url`."""
    handler = type("Handler", (Answers,), {"prompts": [], "refused": None})
    with ThreadingHTTPServer((HOST, 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        handler.url = f"http://{HOST}:{server.server_port}"  # type: ignore[attr-defined]
        yield handler
        server.shutdown()
        thread.join()


def sample(name: str, value: float, **labels: str) -> Sample:
    return Sample(name, labels, value)


def row(setup: str = "one engine", load: str = "random", **hits: int) -> Row:
    counts = {"engine": Counts(4000, {tier: hits.get(tier, 0) for tier in TIERS})}
    return Row.of(setup, load, 5, SENT, counts)


def test_a_scaled_trace_keeps_what_requests_share_and_their_order() -> None:
    requests = [json.loads(line) for line in TRACE.read_text().splitlines()]
    shorter = list(scaled(requests))
    assert [each["hash_ids"] for each in shorter] == [each["hash_ids"] for each in requests]
    assert [each["input_length"] for each in shorter] == [each["input_length"] // 4 for each in requests]
    times = [each["timestamp"] for each in shorter]
    assert times[0] == 0
    assert times[-1] == pytest.approx((requests[-1]["timestamp"] - requests[0]["timestamp"]) / 10)


def test_every_request_of_a_load_fits_the_engines_context(tmp_path: Path) -> None:
    for load in loads(tmp_path, is_quick=False)[2:]:
        path = Path(load.dataset[load.dataset.index("--dataset-path") + 1])
        requests = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(requests) == load.num_requests
        assert all(len(each["hash_ids"]) * BLOCK_TOKENS >= each["input_length"] for each in requests)
        assert max(each["input_length"] for each in requests) + OUTPUT_TOKENS <= bench_serving_run.MAX_TOKENS


def test_what_conversations_come_back_to_is_more_than_the_device_holds(tmp_path: Path) -> None:
    loads(tmp_path, is_quick=False)
    for name in ("multi_turn", "trace"):
        requests = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        blocks = {block for each in requests for block in each["hash_ids"]}
        assert len(blocks) > bench_serving_run.DEVICE_BLOCKS


def test_each_turn_of_a_conversation_begins_with_the_turn_before() -> None:
    turns = [each["hash_ids"] for each in conversations(3, 2)]
    first, second = turns[:3], turns[3:]
    assert [blocks[: len(first[0])] for blocks in second] == first
    assert len({blocks[0] for blocks in first}) == 3
    assert all(len(blocks) > len(first[0]) for blocks in second)


@pytest.mark.engine
def test_bench_serve_sends_a_load_as_it_is_and_tells_of_what_fails(answers: Any, tmp_path: Path) -> None:
    load, model = loads(tmp_path, is_quick=True)[3], model_path(default_cache())
    with Sender(tmp_path) as sender:
        sent = sender.send(load, answers.url, model)
        assert (len(sent.ttft_s), len(sent.tpot_s), sent.output_tokens) == (8, 8, 8 * OUTPUT_TOKENS)
        first = [prompt for prompt in answers.prompts if len(prompt) == 3 * BLOCK_TOKENS]
        second = [prompt for prompt in answers.prompts if len(prompt) == 5 * BLOCK_TOKENS]
        assert sorted(prompt[: 3 * BLOCK_TOKENS] for prompt in second) == sorted(first)
        with pytest.raises(EngineError, match=r"load bad: bench serve failed with SystemExit"):
            sender.send(Load("bad", "", 1, ("--no-such-option",)), answers.url, model)
        answers.refused = first[0][0]
        sent = sender.send(load, answers.url, model)
    assert Row.of("one", load.name, load.num_requests, sent, {}).num_failed == 2


def test_a_bench_serve_that_ends_is_an_error_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no memory\nread line\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    with Sender(tmp_path) as sender, pytest.raises(EngineError, match=r"(?s)load l: bench serve ended.*no memory"):
        sender.send(Load("l", "", 1, ()), "http://nowhere", tmp_path)


def test_requests_without_an_answer_are_failures_and_have_no_times() -> None:
    result = {
        "duration": 2.0,
        "total_input_tokens": 30,
        "total_output_tokens": 4,
        "output_lens": [3, 0, 1, 0],
        "errors": ["", "refused", "", ""],
        "ttfts": [0.5, 0.0, 0.25, 0.0],
        "itls": [[0.25, 0.75], [], [], []],
    }
    sent = Sent.of(result)
    assert (sent.ttft_s, sent.tpot_s) == ((0.5, 0.25), (0.5,))
    assert Row.of("one", "load", 4, sent, {}).num_failed == 2


def test_hits_are_counted_by_tier_from_the_engines_metrics() -> None:
    ours = [
        sample("vllm:prompt_tokens_total", 100, engine="0"),
        sample("vllm:prefix_cache_hits_total", 40, engine="0"),
        sample("vllm:external_prefix_cache_hits_total", 33, engine="0"),
        sample("vllm:hicache_hit_tokens_total", 20, tier="host"),
        sample("vllm:hicache_hit_tokens_total", 8, tier="store"),
        sample("vllm:hicache_hit_tokens_total", 5, tier="peer"),
    ]
    assert Counts.of(ours) == Counts(100, {"device": 40, "host": 20, "store": 8, "peer": 5})
    assert Counts.of(ours[:3]) == Counts(100, {"device": 40, "host": 0, "store": 0, "peer": 33})


def test_counts_of_a_load_are_those_since_it_began() -> None:
    before = Counts(10, dict.fromkeys(TIERS, 1))
    after = Counts(30, {"device": 1, "host": 2, "store": 3, "peer": 4})
    assert after.since(before) == Counts(20, {"device": 0, "host": 1, "store": 2, "peer": 3})


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(number) for number in range(1, 11)]
    assert [percentile(values, percent) for percent in (50, 90, 99)] == [5.0, 9.0, 10.0]
    assert percentile([], 50) == 0.0
    assert percentile([3.0], 99) == 3.0


def test_a_row_has_rates_of_answered_requests_alone_and_adds_up_engines() -> None:
    counts = {name: Counts(9, {"device": 1, "host": 2, "store": 0, "peer": 3}) for name in ("prefill", "decode")}
    found = Row.of("pair, cache", "random", 5, SENT, counts)
    assert (found.num_failed, found.requests_per_s, found.output_tokens_per_s) == (1, 0.4, 25.6)
    assert found.ttft_s == (0.2, 0.4, 0.4)
    assert found.tpot_s == 0.03
    assert found.to_json()["hit_tokens"] == {"device": 2, "host": 4, "store": 0, "peer": 6}


def test_the_table_has_a_line_a_row_with_all_its_numbers() -> None:
    head, line = table([row(host=1234, peer=56)]).splitlines()
    assert head.split()[-4:] == list(TIERS)
    assert line.split()[-4:] == ["0", "1,234", "0", "56"]
    assert "0.40" in line


def test_the_picture_shows_every_set_up_of_every_load_and_is_the_same_each_time(tmp_path: Path) -> None:
    rows = [row(setup.name, load, host=100) for setup in SETUPS for load in ("random", "multi_turn")]
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    draw(rows, first)
    draw(rows, second)
    assert first.read_bytes() == second.read_bytes()
    assert ET.parse(first).getroot().tag.endswith("svg")


@pytest.mark.usefixtures("silent")
def test_a_set_up_that_does_not_start_is_told_and_makes_the_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(setup: Setup, model: Path, each: list[Load], sender: object, folder: Path) -> list[Row]:
        if setup.has_cache and setup.is_pair:
            raise EngineError("no such connector")
        return [Row.of(setup.name, load.name, 4, SENT, {}) for load in each]

    monkeypatch.setattr(bench_serving_run, "run", run)
    files = ["--json", str(tmp_path / "all.json"), "--picture", str(tmp_path / "all.svg")]
    assert bench_serving_run.main(files) == 1
    assert "pair, cache: no such connector" in capsys.readouterr().err
    written = json.loads((tmp_path / "all.json").read_text())
    assert [each["load"] for each in written["rows"][:3]] == ["prefix_repetition"] * 3


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(("num_requests", "status"), [(4, 0), (5, 1)])
def test_a_failed_request_makes_the_status_1(
    num_requests: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(setup: Setup, model: Path, each: list[Load], sender: object, folder: Path) -> list[Row]:
        return [Row.of(setup.name, load.name, num_requests, SENT, {}) for load in each]

    monkeypatch.setattr(bench_serving_run, "run", run)
    assert bench_serving_run.main(["--picture", str(tmp_path / "all.svg")]) == status
