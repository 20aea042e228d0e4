"""A real engine on a real Redis that comes late, hangs, is killed while it is read, and returns empty.

The host pool holds fewer pages than two prompts have, so that a prompt which was pushed out of it comes from the
store. Whatever the store does, answers are those of a clean run; and hits return without a restart.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from engine_kit import PAGE, Answer, Engine, alike, engine, prompt_of, wait_until
from redis import Redis
from redis_server import RedisServer

pytestmark = pytest.mark.engine

NUM_PAGES = 8
RECOVERY_S = 10


class Served:
    """An engine that was started while its store was down."""

    def __init__(self, running: Engine, server: RedisServer) -> None:
        self.engine = running
        self.server = server
        self.prompts = [prompt_of(NUM_PAGES * PAGE + 30, seed) for seed in range(3)]
        self.references = [running.ask(prompt) for prompt in self.prompts]

    def store_hits(self) -> float:
        return self.engine.metric("hit_tokens", tier="store")

    def push_out(self, index: int) -> None:
        """Leave a prompt on neither the device nor the host pool: others take its place."""
        for other in range(len(self.prompts)):
            if other != index:
                self.ask(other)
        self.engine.settle()

    def ask(self, index: int) -> Answer:
        """Ask past the device's own prefix cache; the answer is right, whatever the cache did."""
        self.engine.poison_device()
        answer = self.engine.ask(self.prompts[index])
        assert alike(answer, self.references[index])
        return answer

    def hits_again(self) -> bool:
        """Whether a round of prompts brings a store hit."""
        self.push_out(0)
        before = self.store_hits()
        self.ask(0)
        return self.store_hits() > before


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("redis")
    with RedisServer(folder, config=["maxmemory 512mb"]) as server:
        server.kill()
        with engine(
            server.url, host_memory="36MiB", eviction="lru", store_timeout_s=1.0, lookup_timeout_s=1.0
        ) as running:
            served = Served(running, server)
            assert served.store_hits() == 0
            server.start()
            wait_until(served.hits_again, "hits from a store that came late", seconds=4 * RECOVERY_S)
            yield served


@pytest.fixture(autouse=True)
def nothing_leaks(served: Served) -> Iterator[None]:
    yield
    served.engine.settle()
    assert served.engine.metric("host_pages", state="reserved") == 0
    assert served.engine.metric("healthy") == 1


def test_the_store_restores_the_very_bytes_into_a_poisoned_device(served: Served) -> None:
    prompt = served.prompts[1]
    served.ask(1)
    computed = served.engine.device_pages()
    hit = served.engine.ask(prompt)
    served.push_out(1)
    before = served.store_hits()
    assert served.ask(1) == hit
    assert served.store_hits() - before == NUM_PAGES * PAGE
    assert len(served.engine.device_pages() & computed) >= NUM_PAGES


def test_a_store_killed_while_it_is_read_costs_no_answer_and_hits_return(served: Served) -> None:
    """E5."""
    served.push_out(1)
    killer = threading.Thread(target=kill_when_read, args=(served.server,))
    killer.start()
    for index in (1, 2, 0, 1):
        served.ask(index)
    killer.join()
    errors = served.engine.metric("misses", reason="unavailable") + served.engine.metric("errors", place="flush")
    assert errors > 0
    served.server.start()
    wait_until(served.hits_again, "hits from a store that came back empty", seconds=4 * RECOVERY_S)


def test_a_store_that_hangs_costs_its_time_limit_and_no_answer(served: Served) -> None:
    timeouts = served.engine.metric("store_calls", outcome="timeout")
    served.server.pause()
    try:
        for index in (0, 1, 2):
            served.ask(index)
    finally:
        served.server.resume()
    assert served.engine.metric("store_calls", outcome="timeout") > timeouts
    wait_until(served.hits_again, "hits from a store that goes on", seconds=4 * RECOVERY_S)


def test_a_store_that_is_full_costs_saves_and_no_hits(served: Served) -> None:
    """E12: what the store refused is counted, and never taken for saved."""
    served.push_out(1)
    with Redis.from_url(served.server.url) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1mb")
    failed = served.engine.metric("errors", place="flush")
    fresh = prompt_of(NUM_PAGES * PAGE + 30, seed=77)
    served.engine.ask(fresh)
    served.engine.settle()
    assert served.engine.metric("errors", place="flush") > failed
    before = served.store_hits()
    served.ask(1)
    assert served.store_hits() > before
    with Redis.from_url(served.server.url) as client:
        client.config_set("maxmemory", "512mb")


def kill_when_read(server: RedisServer) -> None:
    """Kill the server while a client reads from it, seen by its count of read keys."""
    with Redis.from_url(server.url) as client:
        start = client.info("stats")["keyspace_hits"]
        wait_until(lambda: client.info("stats")["keyspace_hits"] > start + 1, "the store to be read")
    server.kill()
