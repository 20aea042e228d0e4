"""A prefill and a decode server with a real model: only what decode lacks crosses the link, and what goes wrong on the
way costs time alone.

Decode's first third lies on its device, the second in host memory or the store, the third comes from prefill. Chunks of
prefill and decode end at the same tokens, so that both compute the same bytes.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from engine_job import total_of
from engine_kit import PAGE, model_directory, prompt_of, wait_until
from engine_process import EngineError
from serving_servers import Server, hicache

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NUM_TOKENS, THIRD = 6000, 2048
PAGE_BYTES = 30 * 3 * 2 * 64 * PAGE * 4
"""SmolLM2: layers, KV heads, keys and values, head size, tokens, bytes of float32."""

ROUNDING = 0.01
ROOM = PAGE_BYTES * 91
LEASE_S = 20.0
KEY = {"VLLM_HICACHE_PEER_KEY": "5e" * 32, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


@dataclass(frozen=True)
class Answer:
    """Tokens of a completion and their log-probabilities."""

    tokens: list[str]
    logprobs: list[float]

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> Answer:
        found = reply["choices"][0]["logprobs"]
        return cls(found["tokens"], found["token_logprobs"])

    def is_like(self, other: Answer) -> bool:
        """Equal but for the rounding of other batches."""
        steps = zip(self.logprobs, other.logprobs, strict=True)
        return self.tokens == other.tokens and all(abs(one - its) < ROUNDING for one, its in steps)


class Pair:
    """Two servers, and the proxy between them."""

    def __init__(self, prefill: Server, decode: Server) -> None:
        self.prefill = prefill
        self.decode = decode
        self.num_prompts = 0

    def prompt(self, num_tokens: int) -> list[int]:
        """One that shares nothing with any before."""
        self.num_prompts += 1
        return prompt_of(num_tokens, 7000 + self.num_prompts)

    def compute(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Have prefill compute a prompt; the parameters for decode."""
        reply = self.prefill.complete(prompt, 1, kv_transfer_params={"do_remote_decode": True})
        parameters: dict[str, Any] = reply["kv_transfer_params"]
        return parameters

    def go_on(self, prompt: Sequence[int], parameters: Mapping[str, Any]) -> Answer:
        return ask(self.decode, prompt, kv_transfer_params=parameters)

    def counted(self, server: Server, name: str, **labels: str) -> int:
        return total_of(server.metrics(), f"vllm:hicache_{name}", **labels)

    def settle(self, server: Server) -> None:
        """Wait until everything is acknowledged; metrics move with a step only."""

        def is_settled() -> bool:
            server.complete(range(900, 905), 2)
            names = ("open_operations", "open_exports")
            return sum(self.counted(server, name) for name in names) == 0

        wait_until(is_settled, f"{server.name} to come to rest")


def ask(server: Server, prompt: Sequence[int], **extra: object) -> Answer:
    return Answer.of(server.complete(prompt, 8, logprobs=1, **extra))


def forget_device(server: Server) -> None:
    wait_until(lambda: server.post("/reset_prefix_cache", {})["success"], "vLLM's prefix cache to be free")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    options = ["--dtype", "float32", "--max-num-batched-tokens", str(THIRD), "--max-num-seqs", "16"]
    common: dict[str, Any] = {"options": options, "environment": KEY}
    give = hicache("kv_producer", store="none", host_memory=2 * ROOM, peer_host="127.0.0.1", peer_lease_s=LEASE_S)
    take = hicache(
        "kv_consumer", store=f"file://{folder}/store?capacity=2GiB", host_memory=ROOM, peer_timeout_s=4,
        lookup_timeout_s=5,
    )  # fmt: skip
    model = model_directory()
    with (
        Server(model, folder, "prefill", transfer=give, **common) as prefill,
        Server(model, folder, "decode", transfer=take, **common) as decode,
    ):
        prefill.wait_healthy()
        decode.wait_healthy()
        yield Pair(prefill, decode)


@dataclass(frozen=True)
class Crossed:
    """What one prompt took from where, and both engines' answers."""

    host: int
    store: int
    peer: int
    received: int
    sent: int
    restored: Answer
    known: Answer


def cross(pair: Pair, prompt: Sequence[int]) -> Crossed:
    def numbers() -> list[int]:
        tiers = [pair.counted(pair.decode, "hit_tokens_total", tier=tier) for tier in ("host", "store", "peer")]
        received = pair.counted(pair.decode, "peer_bytes_total", direction="received")
        return [*tiers, received, pair.counted(pair.prefill, "peer_bytes_total", direction="sent")]

    parameters = pair.compute(prompt)
    before = numbers()
    restored = pair.go_on(prompt, parameters)
    pair.settle(pair.decode)
    pair.settle(pair.prefill)
    return Crossed(
        *(after - old for after, old in zip(numbers(), before, strict=True)), restored, ask(pair.prefill, prompt)
    )


def is_bytes_of(num_bytes: int, num_pages: int) -> bool:
    """As many pages, and what frames them."""
    return num_pages * PAGE_BYTES < num_bytes < 1.01 * num_pages * PAGE_BYTES


NUM_PAGES = -(-NUM_TOKENS // PAGE)
MISSING = NUM_PAGES - 2 * THIRD // PAGE


@pytest.fixture(scope="module")
def stored(pair: Pair) -> list[int]:
    """A prompt of which decode has computed two thirds: they leave host memory later, and stay in the store."""
    prompt = pair.prompt(NUM_TOKENS)
    ask(pair.decode, prompt[: 2 * THIRD + 1])
    pair.settle(pair.decode)
    return prompt


class TestThirds:
    """In this order: the store's prompt is computed first and leaves host memory for the others."""

    def test_of_a_prompt_in_thirds_only_the_last_one_crosses(self, pair: Pair, stored: list[int]) -> None:
        prompt = pair.prompt(NUM_TOKENS)
        ask(pair.decode, prompt[: 2 * THIRD + 1])
        forget_device(pair.decode)
        ask(pair.decode, prompt[: THIRD + 1])
        found = cross(pair, prompt)
        assert (found.host, found.store, found.peer) == (THIRD, 0, NUM_TOKENS - 1 - 2 * THIRD)
        assert is_bytes_of(found.received, MISSING)
        assert is_bytes_of(found.sent, MISSING)
        assert found.restored.is_like(found.known)

    def test_with_nothing_local_all_of_it_crosses(self, pair: Pair, stored: list[int]) -> None:
        found = cross(pair, pair.prompt(NUM_TOKENS))
        assert (found.host, found.store, found.peer) == (0, 0, NUM_TOKENS - 1)
        assert is_bytes_of(found.received, NUM_PAGES)
        assert is_bytes_of(found.sent, NUM_PAGES)
        assert found.restored.is_like(found.known)

    def test_a_third_in_the_store_does_not_cross(self, pair: Pair, stored: list[int]) -> None:
        forget_device(pair.decode)
        ask(pair.decode, stored[: THIRD + 1])
        found = cross(pair, stored)
        assert (found.host, found.store, found.peer) == (0, THIRD, NUM_TOKENS - 1 - 2 * THIRD)
        assert is_bytes_of(found.received, MISSING)
        assert found.restored.is_like(found.known)

    def test_nothing_crosses_where_decode_has_it_all(self, pair: Pair, stored: list[int]) -> None:
        prompt = stored[: 2 * THIRD]
        found = cross(pair, prompt)
        assert (found.store, found.peer, found.received) == (0, 0, 0)
        assert found.restored.is_like(found.known)


@pytest.mark.parametrize("num_tokens", [2049, 2048, 2047, 200, 129])
def test_a_prompt_arrives_to_its_last_token(pair: Pair, num_tokens: int) -> None:
    found = cross(pair, pair.prompt(num_tokens))
    assert found.peer == num_tokens - 1
    assert found.restored.is_like(found.known)


def test_a_prompt_shorter_than_the_threshold_is_computed(pair: Pair) -> None:
    found = cross(pair, pair.prompt(40))
    assert (found.peer, found.received) == (0, 0)
    assert found.restored.is_like(found.known)


class TestFaults:
    """Ends that go wrong while other requests run: no answer is wrong, none is missing, nothing is left behind."""

    NUM_CALLERS, NUM_EACH = 4, 2

    def run(self, pair: Pair, fault: Callable[[], None]) -> list[str]:
        """Requests of several callers, some of them under way when `fault` happens; whose answers were wrong."""
        prompts = [pair.prompt(300 + 61 * number) for number in range(self.NUM_CALLERS * self.NUM_EACH)]
        known = [ask(pair.prefill, prompt) for prompt in prompts]
        has_begun = threading.Event()
        worker = threading.Thread(target=lambda: (has_begun.wait(60), fault()))
        worker.start()

        def handed_over(prompt: list[int]) -> Answer:
            try:
                parameters = pair.compute(prompt)
            except (EngineError, OSError):
                return ask(pair.decode, prompt)
            has_begun.set()
            return pair.go_on(prompt, parameters)

        with ThreadPoolExecutor(self.NUM_CALLERS) as callers:
            found = list(callers.map(handed_over, prompts, timeout=200))
        worker.join(60)
        steps = enumerate(zip(found, known, strict=True))
        return [f"prompt {number}: {one} is not {other}" for number, (one, other) in steps if not one.is_like(other)]

    def check_rest(self, pair: Pair) -> None:
        for server in (pair.prefill, pair.decode):
            pair.settle(server)
            assert pair.counted(server, "host_pages", state="reserved") == 0
            forget_device(server)
            assert total_of(server.metrics(), "vllm:kv_cache_usage_perc") == 0

    def test_prefill_that_stops_for_a_while(self, pair: Pair) -> None:
        def stop() -> None:
            for sign in (signal.SIGSTOP, signal.SIGCONT):
                os.killpg(pair.prefill.pid, sign)
                time.sleep(6)

        assert self.run(pair, stop) == []
        self.check_rest(pair)

    def test_decode_requests_that_are_aborted(self, pair: Pair) -> None:
        prompts = [pair.prompt(700 + number) for number in range(4)]
        told = [pair.compute(prompt) for prompt in prompts]

        def abort() -> None:
            for prompt, parameters in zip(prompts, told, strict=True):
                body = {"model": pair.decode.model, "prompt": prompt, "max_tokens": 64}
                asked = urllib.request.Request(
                    pair.decode.url + "/v1/completions",
                    json.dumps({**body, "kv_transfer_params": parameters}).encode(),
                    {"Content-Type": "application/json"},
                )
                with suppress(OSError):
                    urllib.request.urlopen(asked, timeout=0.1)

        assert self.run(pair, abort) == []
        self.check_rest(pair)

    def test_parameters_of_another_namespace_or_without_a_signature(self, pair: Pair) -> None:
        prompt = pair.prompt(555)
        known, told = ask(pair.prefill, prompt), pair.compute(prompt)
        own = told["hicache"]
        wrong_ones = ({**own, "target": "00" * 32}, {**own, "version": 99}, {**own, "signature": "0"}, None)
        for number, wrong in enumerate(wrong_ones):
            before = pair.counted(pair.decode, "peer_bytes_total", direction="received")
            salt = {"cache_salt": f"salt {number}"}
            assert ask(pair.decode, prompt, kv_transfer_params={**told, "hicache": wrong}, **salt).is_like(known)
            assert pair.counted(pair.decode, "peer_bytes_total", direction="received") == before
        assert pair.counted(pair.decode, "handoffs_total", outcome="refused") == 4
        self.check_rest(pair)

    def test_prompts_that_nobody_comes_for_expire(self, pair: Pair) -> None:
        before = pair.counted(pair.prefill, "handoffs_total", outcome="expired")
        for _ in range(3):
            pair.compute(pair.prompt(300))
        self.check_rest(pair)
        assert pair.counted(pair.prefill, "handoffs_total", outcome="expired") - before == 3

    def test_prefill_that_is_killed(self, pair: Pair) -> None:
        assert self.run(pair, lambda: os.killpg(pair.prefill.pid, signal.SIGKILL)) == []
        pair.settle(pair.decode)
        forget_device(pair.decode)
        assert total_of(pair.decode.metrics(), "vllm:kv_cache_usage_perc") == 0
