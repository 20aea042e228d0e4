"""`vllm-hicache store` and `doctor` on real servers: the same verbs on Redis and on S3."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest
import redis
from cli_store_kit import ONE_PART, TWO_PART, Run, chunk, fill, names, printed, run_on

from vllm_hicache.cli import main as front
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.registry import open_store

pytest.importorskip("boto3")
from redis_server import RedisServer
from s3_server import S3Server

MAX_MEMORY_BYTES = 64 << 20
READER = "reader"


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    users = [f"user {READER} on >{READER} ~hicache/* +@read +@connection +info"]
    limits = [f"maxmemory {MAX_MEMORY_BYTES}", "maxmemory-policy allkeys-lru"]
    with RedisServer(tmp_path_factory.mktemp("redis"), config=[*limits, *users]) as server:
        yield server


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["redis", "s3"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of an empty store on a real server, as this environment may use it."""
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        with redis.Redis(port=server.port) as client:
            client.flushall()
        return server.url
    weed: S3Server = request.getfixturevalue("s3_server")
    for name, value in weed.environment.items():
        monkeypatch.setenv(name, value)
    with closing(open_store(weed.url)) as store:
        for info in list(store.list("")):
            store.delete(info.name)
    return weed.url


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with closing(open_store(url)) as store:
        fill(store)
        yield store


@pytest.fixture
def run(url: str) -> Run:
    return partial(run_on, url)


def read_only(url: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same store's URL for somebody who may only read."""
    if url.startswith("s3"):
        for name, value in request.getfixturevalue("s3_server").read_only_environment.items():
            monkeypatch.setenv(name, value)
        return url
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{READER}:{READER}@{parts.netloc}"))


def doctor(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, dict[str, object]]:
    """`doctor`'s lines about the store, by name."""
    front.main(["doctor", *options, "--json", "-"])
    sections = json.loads(capsys.readouterr().out)["sections"]
    return {line["name"]: line for line in sections["store"]}


@pytest.mark.usefixtures("store")
def test_ls_shows_namespaces_with_fields_pages_bytes_and_ages(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ls") == 0
    _, _, one, two = capsys.readouterr().out.splitlines()
    assert one.split()[:6] == [ONE_PART, "model=m/x", "dtype=bfloat16", "page_tokens=256", "3", "7"]
    assert two.split()[:5] == [TWO_PART, "(no", "manifest)", "1", "1"]
    assert one.split()[-1].endswith("s")


def test_stat_shows_the_limit_where_the_server_has_one(
    run: Run, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("stat", "--json", "-") == 0
    result = printed(capsys)
    assert result["num_objects"] == 8
    assert result["used_bytes"] == sum(info.size_bytes for info in store.list(""))
    assert result["capacity_bytes"] == (MAX_MEMORY_BYTES if store.scheme == "redis" else None)


def test_verify_finds_a_foreign_object_and_removes_it(
    run: Run, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("verify") == 0
    bad = chunk(77).object_name(b"\x01" * 32)
    store.write(bad, [memoryview(bytes(1000))])
    assert run("verify", "--delete") == 1
    assert f"corrupt  {bad}" in capsys.readouterr().out
    assert bad not in names(store)
    assert run("verify") == 0


def test_gc_keeps_a_store_without_a_capacity_within_bytes(run: Run, store: Store) -> None:
    limit_bytes = sum(info.size_bytes for info in store.list("")) - 1
    before = names(store)
    assert run("gc", "--max-bytes", str(limit_bytes), "--dry-run") == 0
    assert names(store) == before
    assert run("gc", "--max-bytes", str(limit_bytes)) == 0
    assert len(before - names(store)) == 1
    assert sum(info.size_bytes for info in store.list("")) <= limit_bytes


def test_gc_by_age_keeps_what_is_young_and_a_namespace_can_be_removed(run: Run, store: Store) -> None:
    before = names(store)
    assert run("gc", "--max-age", "1h") == 0
    assert names(store) == before
    assert run("gc", "--namespace", ONE_PART) == 0
    assert names(store) == {chunk(9).object_name(b"\x02" * 32)}


def test_gc_by_somebody_who_may_only_read_is_one_sentence_and_exit_code_two(
    run: Run,
    store: Store,
    url: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = names(store)
    assert run("gc", "--max-bytes", "0", url=read_only(url, request, monkeypatch)) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert names(store) == before


def test_doctor_measures_a_server_and_leaves_nothing(
    store: Store, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = names(store)
    lines = doctor(capsys, "--store", url)
    assert lines["usable"]["mark"] == "ok"
    assert {"exists_s", "exists_many_s", "read_s"} <= lines.keys()
    speeds = ["write_bytes_per_s", "write_4_bytes_per_s", "read_bytes_per_s", "read_4_bytes_per_s"]
    assert all(isinstance(lines[name]["value"], float) for name in speeds)
    assert not [line for line in lines.values() if line["mark"] == "fail"]
    assert names(store) == before


def test_doctor_says_that_a_read_only_store_serves_hits_and_measures_what_is_there(
    store: Store,
    url: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = names(store)
    lines = doctor(capsys, "--store", read_only(url, request, monkeypatch))
    assert lines["usable"]["mark"] == "warn"
    assert "read-only for us: hits work, nothing will be saved" in str(lines["usable"]["text"])
    assert "read_bytes_per_s" in lines
    assert "write_bytes_per_s" not in lines
    assert names(store) == before


def test_doctor_says_what_an_engine_does_while_the_server_is_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RedisServer(tmp_path / "gone") as server:
        url = server.url
    lines = doctor(capsys, "--store", url)
    assert list(lines) == ["usable"]
    assert lines["usable"]["mark"] == "fail"
    assert "an engine starts, serves without it, and uses it when it comes" in str(lines["usable"]["text"])


def test_doctor_says_that_redis_has_no_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RedisServer(tmp_path / "boundless") as server:
        lines = doctor(capsys, "--store", server.url)
    assert lines["capacity_bytes"]["mark"] == "warn"
    assert "no maxmemory" in str(lines["capacity_bytes"]["text"])


def test_doctor_looks_for_the_life_cycle_rule_of_a_bucket(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    assert doctor(capsys, "--store", s3_server.url)["lifecycle_days"]["mark"] == "warn"
    with closing(open_store(s3_server.url)) as store:
        store.apply_lifecycle(14)  # type: ignore[attr-defined]
        try:
            assert doctor(capsys, "--store", s3_server.url)["lifecycle_days"]["value"] == 14
        finally:
            store.apply_lifecycle(None)  # type: ignore[attr-defined]
