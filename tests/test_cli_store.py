"""`vllm-hicache store`: what it lists, what it removes, and its exit codes."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest
from cli_store_kit import (
    DRAFT,
    DRAFT_PART,
    FIELDS,
    ONE,
    ONE_PART,
    SPACE,
    TWO,
    TWO_PART,
    Run,
    age,
    chunk,
    fill_draft,
    filled,
    flip_last_byte,
    names,
    path_of,
    printed,
    put_in_front,
    run_on,
    url_of,
)

from vllm_hicache.cli import output
from vllm_hicache.errors import ConfigError
from vllm_hicache.storage.file import FileStore
from vllm_hicache.storage.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    Unreadable,
    manifest_name,
    read_manifests,
    write_manifest,
)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return filled(tmp_path / "store")


@pytest.fixture
def run(store: FileStore) -> Run:
    return partial(run_on, url_of(store))


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


def test_only_the_namespace_asked_for_is_looked_at(
    run: Run, store: FileStore, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_last_byte(path_of(store, chunk(0).object_name(ONE)))
    for verb in ("ls", "stat", "verify"):
        assert run(verb, "--namespace", TWO_PART) == 0
        assert ONE_PART not in capsys.readouterr().out
    assert run("verify", "--namespace", ONE_PART) == 1


def test_ls_shows_the_rest_where_a_manifest_cannot_be_read(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_in_front(monkeypatch, f"{ONE_PART}/namespace.json")
    assert run("ls") == 0
    output = capsys.readouterr().out
    assert "(unreadable manifest: took more than 5 s)" in output
    assert TWO_PART in output


@pytest.mark.parametrize("options", [("verify",), ("gc", "--max-bytes", "0"), ("ls",)])
def test_progress_is_shown_when_asked_for_and_not_into_a_file(
    run: Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
) -> None:
    monkeypatch.setattr(output, "QUIET_S", 0.0)
    verb, *rest = options
    assert run(verb, *rest, "--json", "-", "--progress") == 0
    captured = capsys.readouterr()
    assert "list: " in captured.err
    assert json.loads(captured.out)
    assert run(verb, *rest, "--json", "-") == 0
    assert capsys.readouterr().err == ""


def test_gc_by_age_removes_old_chunks_and_keeps_manifests(run: Run, store: FileStore) -> None:
    old = chunk(0).object_name(ONE)
    age(store, old, 8)
    age(store, manifest_name(ONE_PART), 8)
    before = names(store)
    assert run("gc", "--max-age", "7d", "--dry-run") == 0
    assert names(store) == before
    assert run("gc", "--max-age", "7d") == 0
    assert names(store) == before - {old}


def test_gc_by_capacity_removes_the_oldest_first(run: Run, store: FileStore) -> None:
    oldest, second = chunk(2, 1).object_name(ONE), chunk(9).object_name(TWO)
    age(store, oldest, 2)
    age(store, second, 1)
    before, used_bytes = names(store), store.usage().used_bytes
    assert run("gc", "--max-bytes", f"{used_bytes - 1}") == 0
    assert names(store) == before - {oldest}


def test_gc_by_age_and_bytes_keeps_what_passes_both(run: Run, store: FileStore) -> None:
    old, older, young = (chunk(page, half).object_name(ONE) for page, half in ((0, 0), (0, 1), (1, 0)))
    age(store, old, 8)
    age(store, older, 9)
    age(store, young, 1)
    before, used_bytes = names(store), store.usage().used_bytes
    assert run("gc", "--max-age", "7d", "--max-bytes", f"{used_bytes}") == 0
    assert names(store) == before - {old, older}
    assert run("gc", "--max-age", "7d", "--max-bytes", f"{store.usage().used_bytes - 1}") == 0
    assert names(store) == before - {old, older, young}


def test_gc_by_namespace_removes_all_of_it(run: Run, store: FileStore) -> None:
    assert run("gc", "--namespace", ONE_PART) == 0
    assert names(store) == {chunk(9).object_name(TWO)}


def test_gc_with_a_rule_and_a_namespace_looks_at_that_namespace_alone(run: Run, store: FileStore) -> None:
    age(store, chunk(0).object_name(ONE), 8)
    age(store, chunk(9).object_name(TWO), 8)
    before = names(store)
    assert run("gc", "--max-age", "7d", "--namespace", TWO_PART) == 0
    assert names(store) == before - {chunk(9).object_name(TWO)}
    assert run("gc", "--max-bytes", "0", "--namespace", ONE_PART, "--dry-run") == 0
    assert names(store) == before - {chunk(9).object_name(TWO)}


def test_gc_reports_what_it_could_not_remove(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unlink = os.unlink

    def refusing(path: str) -> None:
        if f"/{TWO_PART}/" in path:
            raise PermissionError(1, "Operation not permitted")
        unlink(path)

    monkeypatch.setattr(os, "unlink", refusing)
    assert run("gc", "--max-bytes", "0") == 1
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
        ("gc", ("--max-age", "7"), "", "write 7d"),
        ("gc", ("--max-bytes", "10G"), "", "write 10GiB"),
        ("gc", (), "", "say --max-age AGE, --max-bytes SIZE or --namespace HEX"),
        ("gc", ("--namespace", "ff"), "", "`store ls` names"),
        ("ls", ("--namespace", "ff"), "", "`store ls` names"),
        ("verify", ("--threads", "0"), "", "outside 1..64"),
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


# Drafts


def test_ls_says_which_namespace_is_a_drafts_and_beside_which_it_lies(
    run: Run, store: FileStore, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_draft(store)
    assert run("ls") == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    told = f"draft (eagle3) beside namespace {ONE_PART}: model=m/draft kv_dtype=bfloat16"
    assert rows[DRAFT_PART].split(maxsplit=1)[1].startswith(told)
    assert rows[DRAFT_PART].removeprefix(f"{DRAFT_PART}  {told}").split()[:2] == ["2", "5"]
    assert [part for part, row in rows.items() if "draft" in row] == [DRAFT_PART]


def test_ls_long_shows_every_field_of_a_draft(run: Run, store: FileStore, capsys: pytest.CaptureFixture[str]) -> None:
    fill_draft(store)
    assert run("ls", "--long", "--namespace", DRAFT_PART) == 0
    told = capsys.readouterr().out
    assert f"draft (eagle3) beside namespace {ONE_PART}: encoding=made-up grid=1x2" in told
    assert f"looks_ahead=True method=eagle3 model=m/draft quantization=none slab_bytes=64 target={ONE.hex()} " in told


def test_the_json_of_ls_has_the_fields_of_a_draft(
    run: Run, store: FileStore, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_draft(store)
    assert run("ls", "--namespace", DRAFT_PART, "--json", "-") == 0
    (found,) = json.loads(capsys.readouterr().out)["namespaces"]
    assert (found["digest"], found["fields"]) == (DRAFT.hex(), SPACE.fields_for(ONE))
    assert (found["num_pages"], found["num_objects"]) == (2, 5)


@pytest.mark.parametrize("fields", [{"target": "\x1b[31m"}, {"target": 7}, {"target": "01" * 32, "method": "\x1b[31m"}])
def test_a_manifest_that_only_looks_like_a_drafts_is_shown_as_plain_text(
    run: Run, store: FileStore, capsys: pytest.CaptureFixture[str], fields: dict[str, str | int]
) -> None:
    write_manifest(store, TWO, fields)
    assert run("ls") == 0
    told = capsys.readouterr().out
    assert f"{TWO_PART}  draft (" in told
    assert "\x1b" not in told


def test_stat_counts_a_drafts_namespace_by_itself(
    run: Run, store: FileStore, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_draft(store)
    assert run("stat", "--json", "-") == 0
    counts = {one["namespace"]: one["num_objects"] for one in json.loads(capsys.readouterr().out)["namespaces"]}
    assert counts == {ONE_PART: 7, TWO_PART: 1, DRAFT_PART: 5}


def test_gc_of_a_drafts_namespace_leaves_the_targets_objects(run: Run, store: FileStore) -> None:
    before = names(store)
    fill_draft(store)
    assert run("gc", "--namespace", DRAFT_PART) == 0
    assert names(store) == before


def test_gc_by_age_removes_a_drafts_chunks_and_keeps_its_manifest(run: Run, store: FileStore) -> None:
    old, *_ = drafts = sorted(fill_draft(store))
    age(store, old, 8)
    age(store, manifest_name(DRAFT_PART), 8)
    before = names(store)
    assert run("gc", "--max-age", "7d") == 0
    assert names(store) == before - {old}
    assert run("gc", "--max-bytes", "0", "--namespace", DRAFT_PART) == 0
    assert names(store) == before - {*drafts}


# Manifests


def test_a_manifest_is_written_once_and_read_back(store: FileStore) -> None:
    assert write_manifest(store, ONE, {"model": "another"}) is False
    assert read_manifests(store) == {ONE_PART: Manifest(ONE, FIELDS)}


def test_a_drafts_manifest_is_read_back_with_each_field_of_its_own_type(store: FileStore) -> None:
    fill_draft(store)
    found = read_manifests(store)[DRAFT_PART]
    assert isinstance(found, Manifest)
    assert (found.digest, repr(dict(sorted(found.fields.items())))) == (
        DRAFT,
        repr(dict(sorted(SPACE.fields_for(ONE).items()))),
    )


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
        b'{"digest":"%s","fields":{"a":null}}' % (b"02" * 32),
        b'{"digest":"%s","fields":{"a":["b"]}}' % (b"02" * 32),
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
