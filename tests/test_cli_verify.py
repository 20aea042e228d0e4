"""`vllm-hicache store verify`: what it finds, what it removes, and what it keeps for want of a key."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from cli_store_kit import (
    FIELDS,
    GRID,
    ONE,
    ONE_PART,
    PAYLOAD,
    TWO_PART,
    UNIT_BYTES,
    Run,
    chunk,
    empty,
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

from vllm_hicache.secrets import ENCRYPTION_KEY_VARIABLE, SEAL_KEY_VARIABLE, Secrets
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.storage.envelope import Identity, seal, sealer_for
from vllm_hicache.storage.file import FileStore
from vllm_hicache.storage.manifest import manifest_name, write_manifest
from vllm_hicache.storage.stack import with_keys

KEYS = {SEAL_KEY_VARIABLE: "11" * 32, ENCRYPTION_KEY_VARIABLE: "22" * 32}


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return filled(tmp_path / "store")


@pytest.fixture
def run(store: FileStore) -> Run:
    return partial(run_on, url_of(store))


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


def test_verify_checks_a_drafts_objects_beside_the_targets(
    run: Run, store: FileStore, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, *_ = sorted(fill_draft(store))
    assert run("verify") == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["good", "13"]
    flip_last_byte(path_of(store, bad))
    before = names(store)
    assert run("verify", "--delete", "--json", "-") == 1
    assert printed(capsys)["bad"] == [{"name": bad, "reason": "corrupt"}]
    assert names(store) == before - {bad}


def test_a_targets_object_under_a_drafts_name_is_found(
    run: Run, store: FileStore, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *_ = sorted(fill_draft(store))
    path_of(store, name).write_bytes(path_of(store, chunk(0).object_name(ONE)).read_bytes())
    assert run("verify", "--json", "-") == 1
    assert printed(capsys)["bad"] == [{"name": name, "reason": "foreign"}]


def test_verify_goes_on_after_an_object_that_cannot_be_read_and_exits_with_two(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_in_front(monkeypatch, f"{TWO_PART}/")
    assert run("verify", "--delete") == 2
    output = capsys.readouterr().out
    assert "1 objects could not be read, the last: took more than 5 s" in output
    assert "removed 0 of 0 bad objects" in output
    assert "good           7" in output


def test_verify_uses_the_environments_keys(
    run: Run, store: FileStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty(store)
    secrets = Secrets.from_environment(KEYS)
    protected = with_keys(store, secrets)
    write_manifest(protected, ONE, FIELDS)
    ChunkStore(protected, ONE, GRID, sealer_for(secrets.seal_key)).save(chunk(0), memoryview(PAYLOAD), UNIT_BYTES)
    for variable, key in KEYS.items():
        monkeypatch.setenv(variable, key)
    assert run("verify") == 0
    assert run("ls") == 0
    assert "model=m/x" in capsys.readouterr().out


@pytest.mark.parametrize("variable", [SEAL_KEY_VARIABLE, ENCRYPTION_KEY_VARIABLE])
@pytest.mark.parametrize("given", ["", "99" * 32])
def test_verify_never_deletes_what_only_looks_bad_for_want_of_the_key(
    run: Run,
    store: FileStore,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    given: str,
) -> None:
    empty(store)
    secrets = Secrets.from_environment({variable: KEYS[variable]})
    protected = with_keys(store, secrets)
    write_manifest(protected, ONE, FIELDS)
    view = ChunkStore(protected, ONE, GRID, sealer_for(secrets.seal_key))
    view.save(chunk(0), memoryview(PAYLOAD), UNIT_BYTES)
    if given:
        monkeypatch.setenv(variable, given)
    before = names(store)
    assert run("verify", "--delete") == 1
    output = capsys.readouterr().out
    assert "removed 0 of " in output
    assert f"namespace {ONE_PART} has no good chunk: is this the right key" in output
    assert names(store) == before


def test_a_malformed_key_is_one_sentence_without_the_key(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SEAL_KEY_VARIABLE, "hunter2")
    assert run("verify") == 2
    error = capsys.readouterr().err
    assert SEAL_KEY_VARIABLE in error
    assert "hunter2" not in error


@pytest.mark.parametrize("at", range(0, 216, 3))
def test_verify_finds_a_flip_anywhere_in_a_header(run: Run, store: FileStore, at: int) -> None:
    path = path_of(store, chunk(0).object_name(ONE))
    content = bytearray(path.read_bytes())
    content[at] ^= 0x80
    path.write_bytes(content)
    assert run("verify") == 1
