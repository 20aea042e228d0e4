"""vLLM's own server with the connector found by name: what an operator sees, and what is refused at start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from engine_kit import PAGE, model_directory, prompt_of, wait_until
from redis_server import free_port

pytestmark = pytest.mark.engine


def command(extra: dict[str, object], *flags: str) -> list[str]:
    transfer = {
        "kv_connector": "HiCacheConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    base = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_directory())]
    shape = ["--served-model-name", "smollm2", "--enforce-eager", "--max-model-len", "2048", "--host", "127.0.0.1"]
    return [*base, *shape, "--kv-transfer-config", json.dumps(transfer), *flags]


class Server:
    """A running server."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            return reply.read().decode()

    def complete(self, prompt: Sequence[int]) -> dict[str, object]:
        body = {"model": "smollm2", "prompt": list(prompt), "max_tokens": 4, "temperature": 0}
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.load(reply)

    def is_up(self) -> bool:
        try:
            self.get("/health")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def metric(self, line_start: str) -> float:
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(line_start)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@contextmanager
def serving(log: Path, extra: dict[str, object], *flags: str) -> Iterator[Server]:
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command(extra, *flags), "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"},
        )
    server = Server(port)
    try:
        wait_until(lambda: server.is_up() or process.poll() is not None, "the server", seconds=180)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def test_the_server_shows_our_metrics_and_publishes_pages_with_their_tier(tmp_path: Path) -> None:
    events_at = f"tcp://127.0.0.1:{free_port()}"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events_at.replace("127.0.0.1", "*")}
    prompt = prompt_of(3 * PAGE + 20, seed=7)
    with (
        zmq.Context() as context,
        context.socket(zmq.SUB) as subscriber,
        serving(
            tmp_path / "log",
            {"store": f"file://{tmp_path}/store", "host_memory": "256MiB"},
            "--kv-events-config",
            json.dumps(events),
        ) as server,
    ):
        subscriber.connect(events_at)
        subscriber.subscribe("")
        cold = server.complete(prompt)
        wait_until(lambda: server.metric("vllm:hicache_bytes_total{") > 0, "the save to be counted")
        urllib.request.urlopen(urllib.request.Request(server.url + "/reset_prefix_cache", method="POST"), timeout=10)
        again = server.complete(prompt)
        assert again["choices"][0]["text"] == cold["choices"][0]["text"]  # type: ignore[index]
        wait_until(
            lambda: server.metric('vllm:hicache_hit_tokens_total{engine="0",model_name="smollm2",tier="host"}') > 0,
            "the hit to be counted",
        )
        assert {"CPU", "STORAGE"} <= mediums_of(subscriber)


def mediums_of(subscriber: zmq.Socket[bytes]) -> set[str]:
    """Mediums of all pages whose entry has been published so far."""
    found: set[str] = set()
    while subscriber.poll(1000):
        batch = msgspec.msgpack.decode(subscriber.recv_multipart()[-1])
        found |= {event["medium"] for event in batch[1] if event["type"] == "BlockStored" and event["medium"]}
    return found


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"host_memry": "1GiB"}, "did you mean 'host_memory'?"),
        ({"store": "none", "page_tokens": 100}, "no whole number of blocks of 128 tokens"),
    ],
)
def test_a_wrong_setting_stops_the_start_with_a_sentence_that_says_the_way_out(
    extra: dict[str, object], sentence: str
) -> None:
    done = subprocess.run(
        [*command(extra), "--port", str(free_port())], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode != 0
    assert sentence in done.stdout + done.stderr
