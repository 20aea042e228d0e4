"""The redis store on a real server: layout of values, life time, connections, faults and recovery."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import redis
from redis_server import RedisServer
from redis_store_kit import DATA, OBJECT, get, num_connections, opened, put, until

from vllm_hicache.errors import ObjectMissing, StoreError, StoreTimeout, StoreUnavailable
from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import Rights, Store, StoreOptions
from vllm_hicache.storage.redis_pool import Address, Login, WirePool
from vllm_hicache.storage.resp import Deadline


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), unix=True) as running:
        yield running


@pytest.fixture
def direct(server: RedisServer) -> Iterator[redis.Redis]:
    """The server as others see it, empty."""
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        client.config_resetstat()
        yield client


@pytest.fixture
def store(server: RedisServer, direct: redis.Redis) -> Iterator[Store]:
    with opened(server.url) as running:
        yield running


def num_commands(client: redis.Redis, command: str) -> int:
    return client.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0)


class TestValues:
    def test_a_value_is_the_time_of_its_write_and_the_bytes(self, store: Store, direct: redis.Redis) -> None:
        put(store)
        (info,) = store.list("")
        value = direct.get("hicache/a/b")
        assert value[8:] == DATA
        assert int.from_bytes(value[:8], "little") / 1000 == info.modified_s

    def test_a_prefix_keeps_stores_apart(self, server: RedisServer, store: Store, direct: redis.Redis) -> None:
        with opened(f"{server.url}?prefix=*other[") as other:
            put(other, b"1")
            put(store, b"22")
            assert [info.size_bytes for info in other.list("")] == [1]
            assert [info.size_bytes for info in store.list("")] == [2]
        assert set(direct.keys()) == {b"*other[a/b", b"hicache/a/b"}

    def test_a_database_of_its_own(self, server: RedisServer, store: Store) -> None:
        with opened(server.url.replace("/0", "/5")) as other:
            put(other)
            assert other.exists([OBJECT]) == [True]
        assert store.exists([OBJECT]) == [False]

    def test_objects_stay_for_ever_unless_a_life_time_is_given(
        self, server: RedisServer, store: Store, direct: redis.Redis
    ) -> None:
        with opened(f"{server.url}?ttl=2h") as mortal:
            assert put(mortal, name="mortal") is True
            assert put(mortal, name="mortal") is False
        put(store, name="immortal")
        assert 7_100_000 < direct.pttl("hicache/mortal") <= 7_200_000
        assert direct.pttl("hicache/immortal") == -1

    def test_an_expired_object_is_missing_and_may_be_written_anew(self, store: Store, direct: redis.Redis) -> None:
        put(store)
        direct.pexpire("hicache/a/b", -1)
        with pytest.raises(ObjectMissing):
            get(store)
        assert put(store) is True

    def test_what_others_put_under_the_prefix_is_left_alone(self, store: Store, direct: redis.Redis) -> None:
        put(store)
        direct.set("hicache/short", b"1234567")
        direct.rpush("hicache/list", b"12345678")
        direct.set("hicache/ends with /", b"123456789")
        direct.set(b"hicache/\xff", b"123456789")
        assert [info.name for info in store.list("")] == [OBJECT]
        assert store.usage().num_objects == 1
        assert store.exists([ObjectName("short"), ObjectName("list"), OBJECT]) == [False, False, True]
        for name in ("short", "list"):
            with pytest.raises(StoreError):
                get(store, name=name)

    def test_only_the_bytes_that_are_asked_for_are_sent(self, store: Store, direct: redis.Redis) -> None:
        data = os.urandom(4 << 20)
        put(store, data)
        before = direct.info("stats")["total_net_output_bytes"]
        assert get(store, 100) == data[:100]
        buffer = bytearray(64)
        assert store.read(OBJECT, [memoryview(buffer)], 1 << 20) == len(data)
        assert buffer == data[1 << 20 :][:64]
        assert direct.info("stats")["total_net_output_bytes"] - before < 100_000

    def test_names_are_looked_up_in_one_round_trip(self, store: Store, direct: redis.Redis) -> None:
        names = [ObjectName(f"n/{index}") for index in range(3000)]
        for name in names[::2]:
            put(store, b"", name)
        before = direct.info("stats")["total_reads_processed"]
        assert store.exists(names) == [True, False] * 1500
        # 130 kB of requests in pieces of the server's 16 kB buffer.
        assert direct.info("stats")["total_reads_processed"] - before < 30

    def test_thousands_are_listed_once_each_also_while_the_table_grows(self, store: Store, direct: redis.Redis) -> None:
        with direct.pipeline(transaction=False) as pipe:
            for index in range(5000):
                pipe.set(f"hicache/n/{index}", b"12345678" + b"x" * (index % 7))
            pipe.execute()
        found = []
        for count, info in enumerate(store.list("n/")):
            found.append(info.name)
            if count == 100:
                direct.mset({f"other{index}": b"" for index in range(20_000)})
        assert sorted(found) == sorted(f"n/{index}" for index in range(5000))
        assert store.usage().used_bytes == sum(index % 7 for index in range(5000))

    def test_the_capacity_is_the_servers_maxmemory(self, store: Store, direct: redis.Redis) -> None:
        assert store.usage().capacity_bytes is None
        direct.config_set("maxmemory", 100 << 20)
        try:
            assert store.usage().capacity_bytes == 100 << 20
        finally:
            direct.config_set("maxmemory", 0)

    def test_a_full_server_is_unavailable_for_writes_and_still_read(self, store: Store, direct: redis.Redis) -> None:
        put(store)
        direct.config_set("maxmemory", 1)
        try:
            with pytest.raises(StoreUnavailable, match="full; raise maxmemory"):
                put(store, name="more")
            assert get(store) == DATA
        finally:
            direct.config_set("maxmemory", 0)
        assert store.exists([ObjectName("more")]) == [False]

    def test_a_socket_file_serves_as_well(self, server: RedisServer, store: Store) -> None:
        put(store)
        with opened(server.unix_url) as other:
            assert other.probe() == Rights()
            assert get(other) == DATA
            assert other.describe() == f"unix://{server.unix_path}?db=0"


class TestConnections:
    def test_connections_are_kept_and_never_more_than_allowed(self, server: RedisServer, direct: redis.Redis) -> None:
        with opened(server.url, StoreOptions(num_connections=3)) as store:
            put(store)
            start = threading.Barrier(12)

            def read_often(_: int) -> None:
                start.wait()
                for _ in range(50):
                    assert get(store) == DATA

            with ThreadPoolExecutor(12) as pool:
                list(pool.map(read_often, range(12)))
            assert num_connections(direct) <= 3
            assert num_commands(direct, "getrange") == 600

    def test_an_abandoned_list_holds_no_connection(self, server: RedisServer, direct: redis.Redis) -> None:
        with opened(server.url, StoreOptions(num_connections=1)) as store:
            put(store, name="a")
            put(store, name="b")
            listing = store.list("")
            next(listing)
            assert store.exists([ObjectName("a")]) == [True]

    def test_a_restarted_server_costs_no_call(self, tmp_path: Path) -> None:
        with RedisServer(tmp_path) as server, opened(server.url) as store:
            start = threading.Barrier(8)

            def connect(_: int) -> None:
                start.wait()
                store.exists([OBJECT])

            with ThreadPoolExecutor(8) as pool:
                list(pool.map(connect, range(8)))
            server.kill()
            with pytest.raises(StoreUnavailable, match="cannot be reached"):
                put(store)
            server.start()
            assert put(store) is True
            server.stop()
            server.start()
            assert store.exists([OBJECT]) == [False]

    def test_a_server_that_hangs_is_a_timeout_and_serves_when_it_is_back(self, tmp_path: Path) -> None:
        with RedisServer(tmp_path) as server, opened(server.url, StoreOptions(timeout_s=0.2)) as store:
            put(store)
            server.pause()
            try:
                for call in (lambda: get(store), lambda: put(store, bytes(8 << 20), "big"), store.usage):
                    with pytest.raises(StoreTimeout, match=r"0\.2 s"):
                        call()
                # It never saw the request whole, or answers to nobody.
                with pytest.raises(StoreTimeout):
                    store.delete(ObjectName("other"))
            finally:
                server.resume()
            assert get(store) == DATA

    def test_waiting_for_a_connection_counts(self, tmp_path: Path) -> None:
        options = StoreOptions(timeout_s=0.3, num_connections=1)
        with RedisServer(tmp_path) as server, opened(server.url, options) as store:
            put(store)
            server.pause()
            try:
                with ThreadPoolExecutor(4) as pool:
                    calls = [pool.submit(get, store) for _ in range(4)]
                    for call in calls:
                        with pytest.raises(StoreTimeout):
                            call.result()
            finally:
                server.resume()

    def test_who_waits_for_a_connection_gives_up_at_its_deadline(self, server: RedisServer) -> None:
        address = Address("127.0.0.1", server.port)
        with (
            closing(WirePool(Login(), 1)) as pool,
            pool.lend(address, Deadline(30.0)),
            pytest.raises(StoreTimeout, match="all 1 connections"),
            pool.lend(address, Deadline(0.05)),
        ):
            pass

    def test_a_connection_that_is_lent_when_the_pool_closes_is_closed_afterwards(
        self, server: RedisServer, direct: redis.Redis
    ) -> None:
        pool = WirePool(Login(), 1)
        with pool.lend(Address("127.0.0.1", server.port), Deadline(30.0)) as wire:
            pool.close()
            assert wire.clean
        assert not wire.clean
        until(lambda: len(direct.client_list()) == 1)

    def test_a_list_may_take_longer_than_one_call(self, server: RedisServer, direct: redis.Redis) -> None:
        direct.mset({f"hicache/n/{index}": b"12345678" for index in range(3000)})
        with opened(server.url, StoreOptions(timeout_s=1.0)) as store:
            listing = store.list("")
            next(listing)
            end_s = time.monotonic() + 1.1
            until(lambda: time.monotonic() > end_s)
            assert len(list(listing)) == 2999

    def test_a_forked_process_makes_connections_of_its_own(self, store: Store, direct: redis.Redis) -> None:
        put(store)
        child = os.fork()
        if child == 0:
            os._exit(0 if get(store) == DATA and get(store) == DATA else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert get(store) == DATA
        assert num_connections(direct) == 2

    def test_a_closed_store_leaves_no_connection(self, server: RedisServer, direct: redis.Redis) -> None:
        with opened(server.url) as store:
            put(store)
            assert len(direct.client_list()) == 2
        until(lambda: len(direct.client_list()) == 1)
