"""Real clusters and sentinels: every node is used, and slots that move and masters that change are followed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import redis
from redis.crc import key_slot
from redis_server import HOST, RedisServer, free_port
from redis_store_kit import DATA, OBJECT, get, num_connections, opened, put, until

from vllm_hicache.errors import ConfigError, StoreUnavailable
from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import Rights, Store, StoreOptions

NUM_SLOTS = 16384
NAMES = [ObjectName(f"n/{index}") for index in range(60)]
SECRET = "hunter2"


class Cluster:
    """Three servers of a third of the slots each, and a client of each."""

    def __init__(self, servers: list[RedisServer]) -> None:
        self.servers = servers
        self.clients = [redis.Redis(HOST, server.port, password=SECRET) for server in servers]
        for index, client in enumerate(self.clients):
            low, high = (NUM_SLOTS * at // len(servers) for at in (index, index + 1))
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", low, high - 1)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        buses = [int(client.config_get("cluster-port")["cluster-port"]) for client in self.clients]
        for server, bus in zip(servers[1:], buses[1:], strict=True):
            self.clients[0].execute_command("CLUSTER", "MEET", HOST, server.port, bus)
        until(lambda: all(is_whole(client, len(servers)) for client in self.clients))

    @property
    def url(self) -> str:
        return f"redis://:{SECRET}@{HOST}:{self.servers[0].port},{HOST}:{self.servers[1].port}/?cluster=true"

    def owner(self, slot: int) -> int:
        """Index of the server that has the slot by the first division."""
        return slot * len(self.servers) // NUM_SLOTS

    def ids(self) -> list[str]:
        return [client.execute_command("CLUSTER", "MYID").decode() for client in self.clients]

    def give(self, slot: int, owner: int) -> None:
        """Make the server with this index the slot's owner, as the last step of a migration does."""
        owner_id = self.ids()[owner]
        # Of two servers that claim a slot, the one with the later epoch has it.
        self.clients[owner].execute_command("CLUSTER", "BUMPEPOCH")
        for client in (self.clients[owner], *self.clients):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", owner_id)


def is_whole(client: redis.Redis, num_nodes: int) -> bool:
    info = client.execute_command("CLUSTER INFO")
    return info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(num_nodes)


def own_all_slots(server: RedisServer) -> None:
    """Make a server a cluster by itself."""
    with redis.Redis(HOST, server.port) as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, NUM_SLOTS - 1)
        until(lambda: is_whole(client, 1))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        servers = []
        for index in range(3):
            config = ["cluster-enabled yes", f"cluster-port {free_port()}", f'masterauth "{SECRET}"']
            folder = tmp_path_factory.mktemp(f"node{index}")
            servers.append(stack.enter_context(RedisServer(folder, password=SECRET, config=config)))
        running = Cluster(servers)
        for client in running.clients:
            stack.enter_context(closing(client))
        yield running


@pytest.fixture
def store(cluster: Cluster) -> Iterator[Store]:
    for client in cluster.clients:
        client.flushall()
        client.config_resetstat()
    with opened(cluster.url, StoreOptions(num_connections=2)) as running:
        yield running


@pytest.fixture
def moved_slot(cluster: Cluster) -> Iterator[tuple[int, int, int]]:
    """The slot of `OBJECT`, who has it and who shall have it. Afterwards the first has it again."""
    slot = key_slot(b"hicache/a/b")
    source = cluster.owner(slot)
    target = (source + 1) % len(cluster.clients)
    yield slot, source, target
    for client in cluster.clients:
        client.flushall()
        client.execute_command("CLUSTER", "SETSLOT", slot, "STABLE")
    cluster.give(slot, source)


class TestCluster:
    def test_objects_are_on_all_nodes_and_are_found_there(self, store: Store, cluster: Cluster) -> None:
        assert store.probe() == Rights()
        for name in NAMES:
            assert put(store, name.encode(), name) is True
            assert put(store, b"other", name) is False
        assert all(client.dbsize() > 5 for client in cluster.clients)
        assert [get(store, len(name), name) for name in NAMES] == [name.encode() for name in NAMES]
        asked = [name for present in NAMES for name in (present, ObjectName(f"{present}x"))]
        assert store.exists(asked) == [True, False] * len(NAMES)
        assert sorted(info.name for info in store.list("")) == sorted(NAMES)
        assert store.usage().num_objects == len(NAMES)
        assert all(store.delete(name) for name in NAMES)
        assert sum(client.dbsize() for client in cluster.clients) == 0

    def test_a_node_has_few_connections_and_keeps_them(self, store: Store, cluster: Cluster) -> None:
        store.exists(NAMES)
        before = [num_connections(client) for client in cluster.clients]
        for _ in range(10):
            store.exists(NAMES)
        assert [num_connections(client) for client in cluster.clients] == before
        # The first one is also asked for the map of slots; what asked it is closed. The other client is the test's.
        assert before[1:] == [1, 1]
        until(lambda: [len(client.client_list()) for client in cluster.clients] == [2, 2, 2])

    def test_the_capacity_is_that_of_all_nodes(self, store: Store, cluster: Cluster) -> None:
        for client in cluster.clients:
            client.config_set("maxmemory", 50 << 20)
        assert store.usage().capacity_bytes == 150 << 20
        cluster.clients[0].config_set("maxmemory", 0)
        assert store.usage().capacity_bytes is None

    def test_a_slot_that_has_moved_is_followed_by_every_call(
        self, store: Store, cluster: Cluster, moved_slot: tuple[int, int, int]
    ) -> None:
        slot, source, target = moved_slot
        store.exists([OBJECT])
        cluster.give(slot, target)
        assert put(store) is True
        assert cluster.clients[target].dbsize() == 1
        assert get(store) == DATA
        assert store.exists([OBJECT]) == [True]
        until(lambda: len(cluster.clients[target].client_list()) == 2)
        cluster.clients[source].config_resetstat()
        assert get(store, 10) == DATA[:10]
        assert "cmdstat_getrange" not in cluster.clients[source].info("commandstats")

    @pytest.mark.parametrize("call", ["read", "exists", "delete"])
    def test_each_call_follows_a_slot_that_has_moved(
        self, store: Store, cluster: Cluster, moved_slot: tuple[int, int, int], call: str
    ) -> None:
        slot, _, target = moved_slot
        store.exists([OBJECT])
        cluster.give(slot, target)
        cluster.clients[target].set("hicache/a/b", b"12345678" + DATA)
        if call == "read":
            first, second = bytearray(b"\xa5") * 100, bytearray(b"\xa5") * 30
            assert store.read(OBJECT, [memoryview(first), memoryview(second)], 7) == len(DATA)
            assert first + second == DATA[7:137]
        elif call == "exists":
            assert store.exists([ObjectName("x"), OBJECT]) == [False, True]
        else:
            assert store.delete(OBJECT) is True

    def test_a_slot_on_its_way_is_written_and_read_where_it_goes(
        self, store: Store, cluster: Cluster, moved_slot: tuple[int, int, int]
    ) -> None:
        slot, source, target = moved_slot
        ids = cluster.ids()
        cluster.clients[target].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        cluster.clients[source].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        assert put(store) is True
        assert put(store) is False
        assert cluster.clients[target].dbsize() == 1
        assert get(store) == DATA
        assert [info.name for info in store.list("")] == [OBJECT]

    def test_a_node_that_dies_costs_its_keys_and_serves_again(self, tmp_path: Path) -> None:
        config = ["cluster-enabled yes", f"cluster-port {free_port()}"]
        with RedisServer(tmp_path, config=config) as server, opened(f"{server.url}?cluster=true") as store:
            own_all_slots(server)
            put(store)
            server.kill()
            with pytest.raises(StoreUnavailable):
                get(store)
            server.start()
            # It has forgotten its slots.
            with pytest.raises(StoreUnavailable):
                put(store)
            own_all_slots(server)
            assert put(store) is True

    def test_a_wrong_password_is_refused(self, cluster: Cluster) -> None:
        with opened(cluster.url.replace(SECRET, "wrong")) as store, pytest.raises(ConfigError, match="refuses"):
            store.probe()

    def test_a_server_on_its_own_is_no_cluster(self, tmp_path: Path) -> None:
        with (
            RedisServer(tmp_path) as server,
            opened(f"{server.url}?cluster=true") as store,
            pytest.raises(ConfigError, match="remove cluster=true"),
        ):
            store.probe()

    def test_a_cluster_that_is_taken_for_a_server_is_refused(self, cluster: Cluster) -> None:
        with opened(cluster.servers[0].url) as store, pytest.raises(StoreUnavailable, match="add cluster=true"):
            store.exists(NAMES)

    def test_the_second_host_serves_when_the_first_is_down(self, cluster: Cluster) -> None:
        url = cluster.url.replace(f":{cluster.servers[0].port},", f":{free_port()},")
        with opened(url) as store:
            assert store.probe() == Rights()

    def test_the_second_host_serves_when_the_first_hangs(self, cluster: Cluster) -> None:
        with socket.create_server((HOST, 0)) as silent:
            url = cluster.url.replace(f":{cluster.servers[0].port},", f":{silent.getsockname()[1]},")
            with opened(url, StoreOptions(timeout_s=2.0)) as store:
                assert store.exists([OBJECT]) == [False]


class TestSentinel:
    @pytest.fixture
    def masters(self, tmp_path: Path) -> Iterator[list[RedisServer]]:
        config = ["repl-diskless-sync-delay 0"]
        with (
            RedisServer(tmp_path / "a", password=SECRET, config=config) as first,
            RedisServer(tmp_path / "b", password=SECRET, config=config) as second,
        ):
            yield [first, second]

    @pytest.fixture
    def sentinel(self, tmp_path: Path, masters: list[RedisServer]) -> Iterator[RedisServer]:
        config = [f"sentinel monitor main {HOST} {masters[0].port} 1", f"sentinel auth-pass main {SECRET}"]
        with RedisServer(tmp_path / "sentinel", config=config, sentinel=True) as running:
            yield running

    @staticmethod
    def url(sentinel: RedisServer, master: str = "main") -> str:
        return f"redis://:{SECRET}@{HOST}:{free_port()},{HOST}:{sentinel.port}/1?sentinel={master}"

    def test_the_master_that_sentinels_name_is_used_until_another_is(
        self, sentinel: RedisServer, masters: list[RedisServer]
    ) -> None:
        with opened(self.url(sentinel)) as store, redis.Redis(HOST, sentinel.port) as watcher:
            assert store.probe() == Rights()
            assert put(store) is True
            masters[0].kill()
            with pytest.raises(StoreUnavailable):
                get(store)
            watcher.sentinel_remove("main")
            watcher.sentinel_monitor("main", HOST, masters[1].port, 1)
            watcher.sentinel_set("main", "auth-pass", SECRET)
            assert put(store) is True
            with redis.Redis(HOST, masters[1].port, db=1, password=SECRET) as direct:
                assert direct.keys() == [b"hicache/a/b"]

    def test_a_master_that_became_a_replica_is_left(self, sentinel: RedisServer, masters: list[RedisServer]) -> None:
        with opened(self.url(sentinel)) as store, redis.Redis(HOST, sentinel.port) as watcher:
            put(store)
            with redis.Redis(HOST, masters[0].port, password=SECRET) as direct:
                direct.config_set("masterauth", SECRET)
                watcher.sentinel_remove("main")
                direct.replicaof(HOST, masters[1].port)
            watcher.sentinel_monitor("main", HOST, masters[1].port, 1)
            watcher.sentinel_set("main", "auth-pass", SECRET)
            with pytest.raises(StoreUnavailable, match="READONLY"):
                put(store, name="more")
            assert put(store, name="more") is True

    def test_a_master_that_no_sentinel_knows_is_unavailable(self, sentinel: RedisServer) -> None:
        with opened(self.url(sentinel, "mian")) as store, pytest.raises(StoreUnavailable, match="'mian'"):
            store.probe()
