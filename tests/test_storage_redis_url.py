"""What a redis URL may say, and what is told about one that says it wrongly."""

from __future__ import annotations

import pytest

from vllm_hicache.errors import ConfigError
from vllm_hicache.storage.redis_pool import Address
from vllm_hicache.storage.redis_url import parse_redis_url
from vllm_hicache.storage.registry import open_store
from vllm_hicache.storage.url import parse_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h", "redis://h:6379/0"),
        ("redis://me:hunter2@h:1/3", "redis://h:1/3"),
        ("redis://:hunter2@[::1]:7/", "redis://[::1]:7/0"),
        ("redis://h?prefix=a%20b/&ttl=7d", "redis://h:6379/0?prefix=a+b/&ttl=7d"),
        ("rediss://h", "rediss://h:6379/0"),
        ("redis://a,b:1/?cluster=true", "redis://a:6379,b:1/0?cluster=true"),
        ("redis://a,b:1/2?sentinel=main", "redis://a:26379,b:1/2?sentinel=main"),
        ("unix:///run/a%20b/s", "unix:///run/a%20b/s?db=0"),
        ("unix://:hunter2@/run/s?db=4", "unix:///run/s?db=4"),
    ],
)
def test_a_description_opens_the_same_store_and_shows_no_secret(url: str, shown: str) -> None:
    assert open_store(url).describe() == shown
    assert open_store(shown).describe() == shown
    assert "hunter2" not in repr(parse_redis_url(parse_url(url)))


def test_user_password_and_hosts_are_told_apart_and_decoded() -> None:
    parsed = parse_redis_url(parse_url("redis://m%3Ae:p%40%2F%3A%25@a:1,[::1]/2?sentinel=x&prefix=p"))
    assert (parsed.login.username, parsed.login.password, parsed.login.db) == ("m:e", "p@/:%", 2)
    assert parsed.addresses == (Address("a", 1), Address("::1", 26379))
    assert (parsed.sentinel, parsed.cluster, parsed.prefix, parsed.ttl_ms) == ("x", False, "p", None)


def test_the_url_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HICACHE_REDIS_USERNAME", "theirs")
    monkeypatch.setenv("VLLM_HICACHE_REDIS_PASSWORD", "secret")
    login = parse_redis_url(parse_url("redis://mine@h")).login
    assert (login.username, login.password) == ("mine", "secret")
    login = parse_redis_url(parse_url("unix://:own@/s")).login
    assert (login.username, login.password) == ("theirs", "own")


@pytest.mark.parametrize(
    ("ttl", "milliseconds"), [("90s", 90_000), ("1.5m", 90_000), ("2h", 7_200_000), ("7d", 604_800_000)]
)
def test_a_life_time_has_a_unit(ttl: str, milliseconds: int) -> None:
    assert parse_redis_url(parse_url(f"redis://h?ttl={ttl}")).ttl_ms == milliseconds


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://h?tll=7d", "did you mean 'ttl'"),
        ("redis://h?ca=/x", "'ca' is unknown"),
        ("redis://h?db=1", "'db' is unknown"),
        ("unix:///s?cluster=true", "'cluster' is unknown"),
        ("redis://h?ttl=7", "'ttl': duration '7'"),
        ("redis://h?ttl=0s", "nothing would stay"),
        ("redis://h?prefix=", "keeps our keys apart"),
        ("redis://h?prefix=%C3%A9", "keeps our keys apart"),
        ("redis://h?cluster=yes", "write true or false"),
        ("redis://h?cluster=true&sentinel=x", "remove one"),
        ("redis://h/1?cluster=true", "database 1 of a cluster"),
        ("redis://h?sentinel=", "name of the master"),
        ("redis://a,b", "names 2 hosts"),
        ("redis://", "write redis://host:6379/0"),
        ("redis://a,,b?cluster=true", "write redis://host:6379/0"),
        ("redis://h:port", "write redis://host:6379/0"),
        ("redis://h:70000", "write redis://host:6379/0"),
        ("redis://h/x", "database is no number"),
        ("redis://h/-1", "database is no number"),
        ("redis://h/²", "database is no number"),
        ("unix://s", "three slashes"),
        ("unix:///", "three slashes"),
        ("redis://me@h", "a user and no password"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_way_out(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(url)


@pytest.mark.parametrize("url", ["redis://me:hunter2/3@host:6379/0", "redis://:1/hunter2@h/0", "redis://:hunter2@h:x"])
def test_a_password_that_is_not_encoded_is_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="%2F") as refusal:
        open_store(url)
    assert "hunter2" not in str(refusal.value)
    assert refusal.value.__cause__ is None
