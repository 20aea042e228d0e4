"""Which server a key is on: one that the URL names, a sentinel's master, or a node of a cluster.

redis-py knows sentinels and clusters; commands do not go through it, save those that a cluster redirects.

Owner: `redis.RedisStore`. Thread: any.
"""

# redis-py annotates little of its clusters and sentinels.
# mypy: allow-untyped-calls

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import RedisClusterException, SlotNotCoveredError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from vllm_hicache.errors import StoreTimeout, StoreUnavailable
from vllm_hicache.storage.redis_pool import Address, Login, NeedsRepair, connect, raise_error
from vllm_hicache.storage.resp import Deadline, Reply, command


class Nodes(ABC):
    """The servers of a store. All methods raise StoreUnavailable, StoreTimeout or NeedsRepair."""

    @abstractmethod
    def of_key(self, key: bytes, deadline: Deadline) -> Address:
        """Return the server that a key is written to and read from."""

    @abstractmethod
    def all(self, deadline: Deadline) -> list[Address]:
        """Return the servers that hold all keys between them."""

    def forget(self) -> None:
        """Find the servers anew at the next call: one of them failed."""
        return

    def elsewhere(self, requests: Sequence[Sequence[bytes]], deadline: Deadline) -> list[Reply]:
        """Answer commands on one key whose server said that another has it."""
        raise NeedsRepair("the redis server is part of a cluster: add cluster=true to its URL")


class FixedNode(Nodes):
    """One server, whose address is in the URL."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def of_key(self, key: bytes, deadline: Deadline) -> Address:
        return self._address

    def all(self, deadline: Deadline) -> list[Address]:
        return [self._address]


class SentinelNodes(Nodes):
    """The master of one name, as sentinels tell it."""

    def __init__(self, sentinels: Sequence[Address], master: str, login: Login) -> None:
        self._sentinels = sentinels
        self._master = master
        # Sentinels have no databases, and users of their own: ours are the servers'.
        self._login = replace(login, username=None, password=None, db=0)
        self._lock = threading.Lock()
        self._address: Address | None = None

    def of_key(self, key: bytes, deadline: Deadline) -> Address:
        return self._find(deadline)

    def all(self, deadline: Deadline) -> list[Address]:
        return [self._find(deadline)]

    def forget(self) -> None:
        self._address = None

    def _find(self, deadline: Deadline) -> Address:
        found = self._address
        if found is None:
            with _locked(self._lock, deadline):
                found = self._address = self._address or self._ask(deadline)
        return found

    def _ask(self, deadline: Deadline) -> Address:
        seed = _reachable(self._sentinels, self._login, deadline)
        sentinel = Sentinel([(seed.host, seed.port)], sentinel_kwargs=_client_settings(self._login, deadline))
        try:
            host, port = sentinel.discover_master(self._master)
        except MasterNotFoundError as error:
            raise StoreUnavailable(
                f"the sentinel at {seed} knows no healthy master {self._master!r}: is the name right?"
            ) from error
        except (redis.RedisError, OSError) as error:
            raise StoreUnavailable(f"the sentinel at {seed} failed: {type(error).__name__}") from error
        finally:
            for client in sentinel.sentinels:
                client.close()
        return Address(host, port)


class ClusterNodes(Nodes):
    """The primaries of a cluster, by the slots of their keys."""

    def __init__(self, seeds: Sequence[Address], login: Login) -> None:
        self._seeds = seeds
        self._login = login
        self._lock = threading.Lock()
        self._cluster: RedisCluster | None = None

    def of_key(self, key: bytes, deadline: Deadline) -> Address:
        try:
            return _address(self._map(deadline).get_node_from_key(key))
        except SlotNotCoveredError as error:
            self.forget()
            raise StoreUnavailable("the redis cluster has no server for the slot of a key: is one down?") from error

    def all(self, deadline: Deadline) -> list[Address]:
        return [_address(node) for node in self._map(deadline).get_primaries()]

    def forget(self) -> None:
        self._cluster = None

    def elsewhere(self, requests: Sequence[Sequence[bytes]], deadline: Deadline) -> list[Reply]:
        """Let redis-py follow MOVED and ASK, whereby it learns. Copies; a rare path."""
        with self._foreign(deadline) as cluster:
            return [cluster.execute_command(name.decode(), *words) for name, *words in requests]

    def _map(self, deadline: Deadline) -> RedisCluster:
        found = self._cluster
        if found is None:
            with _locked(self._lock, deadline):
                found = self._cluster = self._cluster or self._discover(deadline)
        return found

    def _discover(self, deadline: Deadline) -> RedisCluster:
        seed = _reachable(self._seeds, self._login, deadline)
        try:
            cluster = RedisCluster(
                startup_nodes=[ClusterNode(seed.host, seed.port)],
                username=self._login.username,
                password=self._login.password,
                require_full_coverage=False,
                **_client_settings(self._login, deadline),
            )
        except RedisClusterException as error:
            if "not enabled" in str(error):
                raise NeedsRepair(f"redis at {seed} is not part of a cluster: remove cluster=true") from error
            raise StoreUnavailable(f"redis at {seed} did not tell the servers of its cluster") from error
        except Exception as error:  # miss: of a cluster that is being made redis-py raises IndexError, too
            raise StoreUnavailable(f"redis at {seed} did not tell the servers of its cluster") from error
        # It knows all it has to; its own connections are not ours.
        cluster.disconnect_connection_pools()
        return cluster

    @contextmanager
    def _foreign(self, deadline: Deadline) -> Iterator[RedisCluster]:
        """Lend redis-py's client, and translate its errors."""
        cluster = self._map(deadline)
        with _locked(self._lock, deadline):
            try:
                yield cluster
            except redis.TimeoutError as error:
                raise deadline.passed() from error
            except (redis.RedisError, RedisClusterException, OSError) as error:
                self.forget()
                raise StoreUnavailable(f"a redirection in the redis cluster failed: {type(error).__name__}") from error
            finally:
                cluster.disconnect_connection_pools()


@contextmanager
def _locked(lock: threading.Lock, deadline: Deadline) -> Iterator[None]:
    """Hold `lock`, waiting no longer than the deadline."""
    if not lock.acquire(timeout=deadline.left_s()):
        raise deadline.passed()
    try:
        yield
    finally:
        lock.release()


def _reachable(seeds: Sequence[Address], login: Login, deadline: Deadline) -> Address:
    """Return the first server that answers us. Each is waited for as long as leaves time for the others."""
    failure: StoreTimeout | StoreUnavailable = StoreUnavailable("no redis server is known")
    for num_left, seed in zip(range(len(seeds), 0, -1), seeds, strict=True):
        patience = Deadline(deadline.left_s() / num_left)
        try:
            wire = connect(seed, login, patience)
            try:
                (reply,) = wire.ask([command(b"PING")], bytes, patience)
            finally:
                wire.close()
            raise_error(reply, seed)
            return seed
        except NeedsRepair:
            raise
        except (StoreTimeout, StoreUnavailable) as error:
            failure = error
    raise failure


def _client_settings(login: Login, deadline: Deadline) -> dict[str, Any]:
    """Return what redis-py's own connections are made with: no retries, no protocol that pushes."""
    settings: dict[str, Any] = {
        "socket_timeout": deadline.left_s(),
        "socket_connect_timeout": deadline.left_s(),
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if login.tls is not None:
        settings |= {"ssl": True, "ssl_cert_reqs": "required", "ssl_check_hostname": True, "ssl_ca_certs": login.ca}
    return settings


def _address(node: ClusterNode) -> Address:
    return Address(node.host, int(node.port))
