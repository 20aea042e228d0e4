"""What `scripts/serve --pair` starts: two engines behind `vllm-router` answer, and decode computes no prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from engine_job import total_of
from engine_kit import model_directory, prompt_of, wait_until
from redis_server import free_port
from serving_run import Settings, engines_of, router_of
from serving_servers import Router, Server

pytestmark = pytest.mark.engine

CHAT = {"messages": [{"role": "user", "content": "Say what a cache is. " * 60}], "max_tokens": 4, "temperature": 0}


@dataclass(frozen=True)
class Pair:
    """Both engines and the router."""

    prefill: Server
    decode: Server
    router: Router

    def peer_tokens(self) -> int:
        """Prompt tokens that decode had from prefill, so far."""
        return total_of(self.decode.metrics(), "vllm:hicache_hit_tokens_total", tier="peer")

    def peer_bytes(self) -> int:
        return total_of(self.decode.metrics(), "vllm:hicache_peer_bytes_total", direction="received")

    def wait_for_tokens(self, count: int) -> None:
        """Metrics move with a step."""
        wait_until(lambda: self.peer_tokens() == count, f"decode to have had {count} tokens from prefill")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("serving")
    settings = Settings(model_directory(), free_port(), pair=True)
    prefill, decode = engines_of(settings, folder)
    router = router_of(settings, [prefill, decode], folder)
    assert router is not None
    with prefill, decode:
        for server in (prefill, decode):
            server.wait_healthy()
        with router:
            router.wait_healthy()
            yield Pair(prefill, decode, router)


def tokens_of(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def test_a_completion_goes_on_from_prefills_prompt_and_says_what_prefill_would(pair: Pair) -> None:
    prompt, before = prompt_of(300, seed=1), pair.peer_tokens()
    answer = pair.router.complete(prompt, 4, model=pair.decode.model)
    assert answer["usage"]["completion_tokens"] == 4
    assert tokens_of(answer) == tokens_of(pair.prefill.complete(prompt, 4))
    pair.wait_for_tokens(before + 299)


def test_a_chat_goes_on_from_prefills_prompt(pair: Pair) -> None:
    before = pair.peer_tokens()
    answer = pair.router.post("/v1/chat/completions", {"model": pair.decode.model, **CHAT})
    assert answer["choices"][0]["message"]["content"]
    pair.wait_for_tokens(before + answer["usage"]["prompt_tokens"] - 1)


def test_a_stream_comes_from_decode_and_what_it_has_does_not_cross_again(pair: Pair) -> None:
    prompt = prompt_of(300, seed=2)
    first = pair.router.stream(prompt, 4, model=pair.decode.model)
    before = pair.peer_bytes()
    assert pair.router.stream(prompt, 4, model=pair.decode.model).tokens == first.tokens
    assert pair.peer_bytes() == before > 0
