"""Who may use the redis store: logins, rights of users, replicas, TLS. Secrets are shown nowhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis_server import RedisServer
from redis_store_kit import DATA, OBJECT, get, num_connections, opened, put, until

from vllm_hicache.errors import ConfigError, StoreDenied, StoreTimeout, StoreUnavailable
from vllm_hicache.storage.base import Rights, StoreOptions
from vllm_hicache.storage.registry import open_store

SECRET = "hunter2/:@?"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Open to everybody."""
    with RedisServer(tmp_path_factory.mktemp("redis"), config=["repl-diskless-sync-delay 0"]) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    users = [
        "user reader on >secret ~hicache/* -@all +strlen +getrange +scan",
        "user keeper on >secret ~hicache/* -@all +strlen +getrange +scan +set",
        "user stranger on >secret ~other/* +@all",
        "user blind on >secret ~hicache/* +@all -scan",
    ]
    with RedisServer(tmp_path_factory.mktemp("guarded"), password=SECRET, config=users) as running:
        yield running


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(
        tmp_path_factory.mktemp("tls"), tls=True, password=SECRET, config=["bind 127.0.0.1 127.0.0.2"]
    ) as running:
        yield running


def url_of(server: RedisServer, user: str) -> str:
    return f"redis://{user}:secret@127.0.0.1:{server.port}/0"


class TestLogin:
    def test_the_password_of_the_url_is_decoded_and_shown_nowhere(self, guarded: RedisServer) -> None:
        with opened(guarded.url) as store:
            assert store.probe() == Rights()
            assert store.describe() == f"redis://127.0.0.1:{guarded.port}/0"
            assert "hunter2" not in repr(vars(store))

    def test_user_and_password_may_come_from_the_environment(
        self, guarded: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("VLLM_HICACHE_REDIS_USERNAME", "reader")
        monkeypatch.setenv("VLLM_HICACHE_REDIS_PASSWORD", "secret")
        with opened(f"redis://127.0.0.1:{guarded.port}") as store:
            assert store.probe() == Rights(write=False, delete=False)

    @pytest.mark.parametrize("user", ["", ":wrong@", "nobody:secret@"])
    def test_a_wrong_login_is_one_sentence_and_a_denial(self, guarded: RedisServer, user: str) -> None:
        with opened(f"redis://{user}127.0.0.1:{guarded.port}/0") as store:
            with pytest.raises(ConfigError, match="refuses the user or the password: give them as") as refusal:
                store.probe()
            with pytest.raises(StoreDenied):
                store.exists([OBJECT])
        assert "wrong" not in str(refusal.value)
        assert "nobody" not in str(refusal.value)

    def test_a_password_that_a_server_does_not_ask_for_is_refused(self, server: RedisServer) -> None:
        with (
            opened(f"redis://:hunter2@127.0.0.1:{server.port}") as store,
            pytest.raises(ConfigError, match="refuses") as refusal,
        ):
            store.probe()
        assert "hunter2" not in str(refusal.value)

    def test_a_database_that_is_not_there_is_refused(self, server: RedisServer) -> None:
        with opened(f"redis://127.0.0.1:{server.port}/99") as store, pytest.raises(ConfigError, match="no database 99"):
            store.probe()

    def test_a_user_who_may_only_read_reads(self, guarded: RedisServer) -> None:
        with opened(guarded.url) as writer, opened(url_of(guarded, "reader")) as reader:
            put(writer)
            assert reader.probe() == Rights(write=False, delete=False)
            assert get(reader) == DATA
            assert [info.name for info in reader.list("")] == [OBJECT]
            assert reader.usage().capacity_bytes is None
            with pytest.raises(StoreDenied, match="NOPERM"):
                put(reader, name="more")
            with pytest.raises(StoreDenied):
                reader.delete(OBJECT)
            writer.delete(OBJECT)

    def test_a_user_who_may_not_delete_keeps(self, guarded: RedisServer) -> None:
        with opened(url_of(guarded, "keeper")) as store:
            assert store.probe() == Rights(write=True, delete=False)
            assert list(store.list("")) == []

    @pytest.mark.parametrize("user", ["stranger", "blind"])
    def test_a_user_who_may_not_read_or_list_is_refused(self, guarded: RedisServer, user: str) -> None:
        with opened(url_of(guarded, user)) as store, pytest.raises(ConfigError, match="NOPERM"):
            store.probe()

    def test_a_replica_is_read_only(self, server: RedisServer, tmp_path: Path) -> None:
        with (
            RedisServer(tmp_path, config=[f"replicaof 127.0.0.1 {server.port}"]) as replica,
            opened(server.url) as original,
            opened(replica.url) as copy,
        ):
            put(original)
            until(lambda: copy.exists([OBJECT]) == [True])
            assert copy.probe() == Rights(write=False, delete=False)
            assert get(copy) == DATA
            with pytest.raises(StoreUnavailable, match="READONLY"):
                put(copy, name="more")


class TestTls:
    def test_objects_cross_tls_whole(self, secure: RedisServer) -> None:
        data = os.urandom(3_000_000)
        with opened(secure.url) as store:
            assert store.probe() == Rights()
            view = memoryview(data)
            assert store.write(OBJECT, [view[:1], view[1:200_000], view[200_000:]]) is True
            buffer = bytearray(b"\xa5") * len(data)
            parts = memoryview(buffer)
            assert store.read(OBJECT, [parts[:77], parts[77:1_000_000], parts[1_000_000:]]) == len(data)
            assert buffer == data
            assert store.describe() == f"rediss://127.0.0.1:{secure.port}/0?ca={secure.ca_path}"

    def test_a_tls_connection_is_kept(self, secure: RedisServer) -> None:
        tls = {"ssl": True, "ssl_ca_certs": str(secure.ca_path), "password": SECRET}
        with redis.Redis(port=secure.port, **tls) as direct, opened(secure.url) as store:
            direct.config_resetstat()
            for _ in range(20):
                store.exists([OBJECT])
            assert num_connections(direct) == 1

    def test_a_certificate_of_another_authority_is_refused(self, secure: RedisServer, server: RedisServer) -> None:
        url = f"rediss://:x@127.0.0.1:{secure.port}/0"
        with opened(url) as store, pytest.raises(ConfigError, match=r"certificate .* does not verify"):
            store.probe()

    def test_a_certificate_of_another_host_is_refused(self, secure: RedisServer) -> None:
        url = secure.url.replace("127.0.0.1", "127.0.0.2")
        with opened(url) as store, pytest.raises(ConfigError, match=r"127\.0\.0\.2.* does not verify"):
            store.probe()

    def test_a_server_without_tls_is_waited_for_and_told(self, server: RedisServer, secure: RedisServer) -> None:
        url = f"rediss://127.0.0.1:{server.port}/0?ca={secure.ca_path}"
        with opened(url, StoreOptions(timeout_s=0.3)) as store, pytest.raises(StoreTimeout, match="no TLS"):
            store.probe()

    def test_a_server_with_tls_alone_is_not_served_without(self, secure: RedisServer) -> None:
        with opened(f"redis://127.0.0.1:{secure.port}/0") as store, pytest.raises((ConfigError, StoreUnavailable)):
            store.probe()

    def test_a_missing_authority_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"'ca' names .*No such file"):
            open_store(f"rediss://host/0?ca={tmp_path}/none.pem")
        (tmp_path / "empty.pem").write_text("")
        with pytest.raises(ConfigError, match="no certificates"):
            open_store(f"rediss://host/0?ca={tmp_path}/empty.pem")
