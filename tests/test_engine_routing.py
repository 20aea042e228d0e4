"""`vllm-router` sends a prompt to the engine whose host memory holds its prefix, by the KV events of the two engines.

Each engine is given a prefix that the other never saw, and then other prompts until its device has nothing of it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from engine_job import total_of
from engine_kit import PAGE, model_directory, prompt_of, wait_until
from redis_server import HOST, free_port
from serving_servers import Router, Server, cores_of, hicache

pytestmark = pytest.mark.engine

DEVICE_BLOCKS = 18
MAX_TOKENS = 2048
PREFIX_TOKENS = 8 * PAGE
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Tiers:
    """What an engine has published: the first block's tokens and the hashes of what each tier holds."""

    socket: zmq.Socket[bytes]
    sequence: int = -1
    held: dict[str, dict[bytes, tuple[int, ...]]] = field(default_factory=dict)

    def holding(self, medium: str) -> set[tuple[int, ...]]:
        """Tokens of the blocks that a tier holds now."""
        while self.socket.poll(0):
            _, sequence, batch = self.socket.recv_multipart()
            self.sequence = int.from_bytes(sequence, "big")
            for event in msgspec.msgpack.decode(batch)[1]:
                self._apply(event)
        return set(self.held.get(medium, {}).values())

    def _apply(self, event: dict[str, Any]) -> None:
        tier = self.held.setdefault(event.get("medium") or "", {})
        for index, block in enumerate(event.get("block_hashes", ())):
            if event["type"] == "BlockRemoved":
                tier.pop(block, None)
            else:
                size = event["block_size"]
                tier[block] = tuple(event["token_ids"][index * size : (index + 1) * size])


@dataclass
class Side:
    """One of the two engines, what it published, and prompts that only it has seen."""

    server: Server
    tiers: Tiers
    prompts: tuple[list[int], ...]

    def warm(self, seed: int) -> None:
        """Compute the prompts, then others until host memory alone has the former."""
        for prompt in (*self.prompts, *(prompt_of(MAX_TOKENS - 100, seed=seed + index) for index in range(3))):
            self.server.complete(prompt, 2)
        wait_until(self._has_all_in_host_memory_only, "prompts to have left the device for host memory")

    def _has_all_in_host_memory_only(self) -> bool:
        pages = {page for prompt in self.prompts for page in pages_of(prompt)}
        return pages <= self.tiers.holding("CPU") and not pages & self.tiers.holding("GPU")

    def num_requests(self) -> int:
        return total_of(self.server.metrics(), "vllm:request_success_total")

    def host_hit_tokens(self) -> int:
        return total_of(self.server.metrics(), "vllm:hicache_hit_tokens_total", tier="host")


def pages_of(prompt: list[int]) -> set[tuple[int, ...]]:
    return {tuple(prompt[start : start + PAGE]) for start in range(0, PREFIX_TOKENS, PAGE)}


@dataclass
class Pair:
    """Two engines, and two routers before both."""

    sides: list[Side]
    kv_aware: Router
    round_robin: Router

    def ask(self, router: Router, prompt: list[int]) -> tuple[int, list[int]]:
        """Which engine answered a prompt that goes on differently, and what each took from its host memory."""
        before = [(side.num_requests(), side.host_hit_tokens()) for side in self.sides]
        longer = [*prompt, *prompt_of(100, seed=sum(prompt))]
        # Not by `complete`: where token ids are to be returned, the router counts no prefix.
        router.post("/v1/completions", {"model": self.sides[0].server.model, "prompt": longer, "max_tokens": 2})
        wait_until(lambda: any(self._answered(before)), "an engine to count the request")
        hits = [side.host_hit_tokens() - count for side, (_, count) in zip(self.sides, before, strict=True)]
        return self._answered(before).index(1), hits

    def _answered(self, before: list[tuple[int, int]]) -> list[int]:
        return [side.num_requests() - count for side, (count, _) in zip(self.sides, before, strict=True)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Engines that hold prompts of their own in host memory, known to a router that counts on it."""
    folder = tmp_path_factory.mktemp("routing")
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        ports = [free_port(), free_port()]
        servers = [
            stack.enter_context(engine(folder, f"engine-{number}", port, core))
            for number, (port, core) in enumerate(zip(ports, cores_of(2), strict=True))
        ]
        sides = [
            Side(server, Tiers(stack.enter_context(listener(context, port))), prompts_of(number))
            for number, (server, port) in enumerate(zip(servers, ports, strict=True))
        ]
        for server in servers:
            server.wait_healthy()
        urls = [server.url for server in servers]
        sources = [f"--kv-event-source={url}=tcp://{HOST}:{port}" for url, port in zip(urls, ports, strict=True)]
        model = ["--kv-event-model", servers[0].model, "--kv-event-block-size", str(PAGE), "--log-level", "debug"]
        kv_aware = Router(folder, "kv-aware", workers=urls, options=["--policy", "kv_aware", *sources, *model])
        round_robin = Router(folder, "round-robin", workers=urls, options=["--policy", "round_robin"])
        for router in (kv_aware, round_robin):
            stack.enter_context(router).wait_healthy()
        for number, side in enumerate(sides):
            side.warm(seed=1000 * (number + 1))
            wait_until(lambda side=side: is_told(kv_aware, side), "the router to have read the events")
        yield Pair(sides, kv_aware, round_robin)


def engine(folder: Path, name: str, events_port: int, core: int | None) -> Server:
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events_port}"}
    small = ["--max-model-len", str(MAX_TOKENS), "--num-gpu-blocks-override", str(DEVICE_BLOCKS)]
    options = [*small, "--kv-events-config", json.dumps(events)]
    transfer = hicache(store="none", host_memory="256MiB")
    return Server(model_directory(), folder, name, transfer=transfer, options=options, core=core)


def listener(context: zmq.Context[Any], port: int) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.SUB)
    socket.connect(f"tcp://{HOST}:{port}")
    socket.subscribe("")
    return socket


def prompts_of(number: int) -> tuple[list[int], ...]:
    return tuple(prompt_of(PREFIX_TOKENS, seed=10 * number + index) for index in range(3))


def is_told(router: Router, side: Side) -> bool:
    """Whether the router has read what we have read of an engine's events."""
    log = COLOURS.sub("", router.log.read_text(errors="replace"))
    read = re.findall(rf"live sequence advanced source={re.escape(side.server.url)} rank=0 seq=(\d+)", log)
    return bool(read) and int(read[-1]) >= side.tiers.sequence


@pytest.mark.parametrize("holder", [0, 1])
def test_a_prefix_goes_to_the_engine_that_holds_it_in_host_memory(pair: Pair, holder: int) -> None:
    answered, hits = pair.ask(pair.kv_aware, pair.sides[holder].prompts[0])
    assert answered == holder
    assert hits == [PREFIX_TOKENS if number == holder else 0 for number in range(2)]


def test_a_router_that_takes_turns_sends_the_same_prefix_to_the_other_engine_too(pair: Pair) -> None:
    asked = [pair.ask(pair.round_robin, pair.sides[0].prompts[1]) for _ in range(2)]
    assert sorted(answered for answered, _ in asked) == [0, 1]
    assert sorted(sum(hits) for _, hits in asked) == [0, PREFIX_TOKENS]
