"""`vllm-hicache store`: what it prints, what it removes, and its exit codes."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_hicache.cli import store as cli
from vllm_hicache.errors import ConfigError
from vllm_hicache.names import ObjectName, PageKey, Role
from vllm_hicache.storage import file_tree
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.storage.envelope import ChunkId, Grid, Identity, seal
from vllm_hicache.storage.file import FileStore
from vllm_hicache.storage.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    Unreadable,
    manifest_name,
    read_manifests,
    write_manifest,
)

UNIT_BYTES = 64
PAYLOAD = bytes(range(256))
GRID = Grid(1, 2)
ONE, TWO = b"\x01" * 32, b"\x02" * 32
ONE_PART, TWO_PART = "01" * 8, "02" * 8
FIELDS: dict[str, str | int] = {"model": "m/x", "dtype": "bfloat16", "page_tokens": 256}
DAY_S = 86400

Run = Callable[..., int]


def chunk(page: int, head_group: int = 0) -> ChunkId:
    return ChunkId(PageKey(bytes([page]) * 32), 0, Role.TARGET, 0, head_group)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """Three pages of two chunks in namespace one, one page of one chunk in namespace two."""
    store = FileStore(str(tmp_path / "store"), 1 << 20)
    store.probe()
    write_manifest(store, ONE, FIELDS)
    for page in range(3):
        for head_group in range(2):
            ChunkStore(store, ONE, GRID).save(chunk(page, head_group), memoryview(PAYLOAD), UNIT_BYTES)
    ChunkStore(store, TWO, GRID).save(chunk(9), memoryview(PAYLOAD), UNIT_BYTES)
    return store


@pytest.fixture
def run(store: FileStore) -> Run:
    def call(verb: str, *options: str, url: str = "") -> int:
        parser = argparse.ArgumentParser()
        cli.add_parser(parser.add_subparsers())
        args = parser.parse_args(["store", verb, url or f"file://{store.root}?capacity=1MiB", *options])
        code: int = args.run(args)
        return code

    return call


def names(store: FileStore) -> set[str]:
    return {info.name for info in store.list("")}


def path_of(store: FileStore, name: ObjectName) -> Path:
    return Path(store.root, file_tree.encode(name))


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def age(store: FileStore, name: ObjectName, days: float) -> None:
    path = path_of(store, name)
    written_s = path.stat().st_mtime - days * DAY_S
    os.utime(path, (written_s, written_s))


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return result


def test_ls_shows_each_namespace_with_its_fields_pages_and_objects(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("ls") == 0
    _, _, one, two = capsys.readouterr().out.splitlines()
    assert one.split()[:6] == [ONE_PART, "model=m/x", "dtype=bfloat16", "page_tokens=256", "3", "7"]
    assert two.split()[:5] == [TWO_PART, "(no", "manifest)", "1", "1"]


def test_ls_of_an_empty_store_says_so(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert run("ls", url=f"file://{tmp_path}/empty?capacity=1MiB") == 0
    assert "holds no objects" in capsys.readouterr().out


def test_ls_long_shows_every_field_as_plain_text(
    run: Run, store: FileStore, capsys: pytest.CaptureFixture[str]
) -> None:
    write_manifest(store, TWO, {"zebra": 1, "escape": "\x1b[31m"})
    assert run("ls", "--long") == 0
    output = capsys.readouterr().out
    assert "escape=?[31m zebra=1" in output
    assert "\x1b" not in output


def test_stat_shows_usage_against_capacity_and_a_bar(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("stat") == 0
    output = capsys.readouterr().out
    assert "objects   8" in output
    assert "capacity  1MiB" in output
    assert "[....................................." in output
    assert ONE_PART in output


def test_stat_as_json_has_the_numbers(run: Run, store: FileStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("stat", "--json", "-") == 0
    result = printed(capsys)
    assert result["num_objects"] == 8
    assert result["used_bytes"] == store.usage().used_bytes
    assert result["capacity_bytes"] == 1 << 20


def test_verify_finds_a_sound_store_good(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify") == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["good", "8"]


def spoil(store: FileStore) -> dict[str, str]:
    """Make one object of each kind of bad; return the expected reason by name."""
    chunks = [chunk(0), chunk(0, 1), chunk(1), chunk(1, 1)]
    flipped, short, long, version = (one.object_name(ONE) for one in chunks)
    flip_last_byte(path_of(store, flipped))
    os.truncate(path_of(store, short), 300)
    os.truncate(path_of(store, long), 5000)
    with path_of(store, version).open("r+b") as file:
        file.seek(8)
        file.write(b"\x07")
    swapped = chunk(2).object_name(ONE)
    other = Identity(chunk(7), ONE, GRID)
    path_of(store, swapped).write_bytes(seal(other, memoryview(PAYLOAD), UNIT_BYTES) + PAYLOAD)
    manifest = manifest_name(TWO_PART)
    store.write(manifest, [memoryview(b"{")])
    reasons = ["corrupt", "short", "long", "version", "foreign", "corrupt"]
    return dict(zip([flipped, short, long, version, swapped, manifest], reasons, strict=True))


def test_verify_names_every_bad_object_with_its_reason(
    run: Run, store: FileStore, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = spoil(store)
    assert run("verify", "--json", "-") == 1
    result = printed(capsys)
    bad = result["bad"]
    assert isinstance(bad, list)
    assert {one["name"]: one["reason"] for one in bad} == expected
    assert result["outcomes"] == {"good": 3, "corrupt": 2, "short": 1, "long": 1, "version": 1, "foreign": 1}
    assert len(names(store)) == 9


def test_verify_with_delete_removes_the_bad_objects_only(run: Run, store: FileStore) -> None:
    bad = set(spoil(store))
    before = names(store)
    assert run("verify", "--delete") == 1
    assert names(store) == before - bad
    assert run("verify") == 0


@pytest.mark.parametrize("at", range(0, 216, 3))
def test_verify_finds_a_flip_anywhere_in_a_header(run: Run, store: FileStore, at: int) -> None:
    path = path_of(store, chunk(0).object_name(ONE))
    content = bytearray(path.read_bytes())
    content[at] ^= 0x80
    path.write_bytes(content)
    assert run("verify") == 1


def test_gc_by_age_removes_old_chunks_and_keeps_manifests(run: Run, store: FileStore) -> None:
    old = chunk(0).object_name(ONE)
    age(store, old, 8)
    age(store, manifest_name(ONE_PART), 8)
    before = names(store)
    assert run("gc", "--older-than", "7d", "--dry-run") == 0
    assert names(store) == before
    assert run("gc", "--older-than", "7d") == 0
    assert names(store) == before - {old}


def test_gc_by_capacity_removes_the_oldest_first(run: Run, store: FileStore) -> None:
    oldest, second = chunk(2, 1).object_name(ONE), chunk(9).object_name(TWO)
    age(store, oldest, 2)
    age(store, second, 1)
    before, used_bytes = names(store), store.usage().used_bytes
    assert run("gc", "--capacity", f"{used_bytes - 1}") == 0
    assert names(store) == before - {oldest}


def test_gc_by_namespace_removes_all_of_it(run: Run, store: FileStore) -> None:
    assert run("gc", "--namespace", ONE_PART) == 0
    assert names(store) == {chunk(9).object_name(TWO)}


def test_gc_reports_what_it_could_not_remove(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unlink = os.unlink

    def refusing(path: str) -> None:
        if f"/{TWO_PART}/" in path:
            raise PermissionError(1, "Operation not permitted")
        unlink(path)

    monkeypatch.setattr(os, "unlink", refusing)
    assert run("gc", "--capacity", "0") == 1
    captured = capsys.readouterr()
    assert "removed 6 objects" in captured.out
    assert "1 could not be removed" in captured.out
    assert "passed over: cannot delete" in captured.err


@pytest.mark.parametrize("verb", ["ls", "stat", "verify"])
def test_json_goes_to_a_file_beside_the_table(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    target = tmp_path / "result.json"
    assert run(verb, "--json", str(target)) == 0
    assert "store" in json.loads(target.read_text())
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("verb", "options", "url", "advice"),
    [
        ("ls", (), "file:///no/such/dir?capacity=1MiB", "does not exist"),
        ("ls", (), "nonsense", "no URL"),
        ("stat", (), "flie:///d", "did you mean 'file'"),
        ("gc", ("--older-than", "7"), "", "write 7d"),
        ("gc", ("--capacity", "10G"), "", "write 10GiB"),
        ("gc", ("--namespace", "ff"), "", "`store ls` names"),
        ("ls", ("--json", "/no/such/dir/x"), "", "give another path or -"),
    ],
)
def test_an_error_is_one_sentence_and_exit_code_two(
    run: Run, capsys: pytest.CaptureFixture[str], verb: str, options: tuple[str, ...], url: str, advice: str
) -> None:
    assert run(verb, *options, url=url) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert advice in captured.err


# Manifests


def test_a_manifest_is_written_once_and_read_back(store: FileStore) -> None:
    assert write_manifest(store, ONE, {"model": "another"}) is False
    assert read_manifests(store) == {ONE_PART: Manifest(ONE, FIELDS)}


def test_equal_fields_make_equal_bytes_in_any_order(tmp_path: Path) -> None:
    stores = [FileStore(str(tmp_path / label), 1 << 20) for label in "ab"]
    for store, fields in zip(stores, [FIELDS, dict(reversed(FIELDS.items()))], strict=True):
        write_manifest(store, ONE, fields)
    one, other = (path_of(store, manifest_name(ONE_PART)).read_bytes() for store in stores)
    assert one == other


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 60_000,
        b"[]",
        b"1" * 5000,
        b'{"digest":"%s","fields":{}}' % (b"03" * 32),
        b'{"digest":"zz","fields":{}}',
        b'{"digest":5,"fields":{}}',
        b'{"digest":"%s","fields":[]}' % (b"02" * 32),
        b'{"digest":"%s","fields":{"a":1.5}}' % (b"02" * 32),
        b'{"digest":"%s","fields":{"a":true}}' % (b"02" * 32),
        b" " * (MAX_MANIFEST_BYTES + 1),
    ],
)
def test_a_malformed_manifest_is_unreadable_and_nothing_worse(
    run: Run, store: FileStore, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    store.write(manifest_name(TWO_PART), [memoryview(content)])
    assert isinstance(read_manifests(store)[TWO_PART], Unreadable)
    assert run("ls") == 0
    assert "(unreadable manifest:" in capsys.readouterr().out


def test_a_manifest_too_large_to_be_read_is_refused(store: FileStore) -> None:
    with pytest.raises(ConfigError, match="the limit is 65536: shorten"):
        write_manifest(store, TWO, {"model": "x" * MAX_MANIFEST_BYTES})
