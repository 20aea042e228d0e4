"""The namespace: engines that differ in any field that decides bytes never meet, and can be told why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vllm_hicache.grid import Grid
from vllm_hicache.keys import PageKeys, chain_root
from vllm_hicache.names import MissReason, PageKey, Role
from vllm_hicache.namespace import DraftSpace, Namespace, Spaces, difference
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.storage.envelope import ChunkId
from vllm_hicache.storage.file import FileStore

SPACE = Namespace("weights", "0", "torch.bfloat16", "none", "cpu-vec-b32", 30, 3, 8192, 32, 64, "1x1")
CHANGES: dict[str, str | int] = {
    "model": "other weights",
    "generation": "1",
    "kv_dtype": "fp8_e4m3",
    "quantization": "awq",
    "encoding": "cpu-amx-b32",
    "layers": 31,
    "kv_heads": 6,
    "slab_bytes": 4096,
    "block_tokens": 64,
    "page_tokens": 128,
    "grid": "2x1",
    "protection": "hmac-sha256:0a1b2c3d",
    "format_version": 2,
}
CHUNK = ChunkId(PageKey(b"k" * 32), 0, Role.TARGET, 0, 0)
PAYLOAD = bytes(range(256))
GOLDEN = "e71d80120d156a8eb5b39f32e81d1d64cb1f266db2b1e047bf08507f28c8eb5d"


def chunks(root: Path, space: Namespace) -> ChunkStore:
    store = FileStore(str(root), 1 << 20)
    store.probe()
    return ChunkStore(store, space.digest(), Grid(1, 1))


def keys(space: Namespace) -> set[PageKey]:
    chain = PageKeys(chain_root(space.digest()), 8)
    chain.extend(range(64))
    return set(chain.keys)


def test_every_field_has_a_change_here() -> None:
    assert list(SPACE.fields()) == list(CHANGES)


@pytest.mark.parametrize("field", CHANGES)
def test_each_field_changes_the_digest_and_every_key(field: str) -> None:
    other = replace(SPACE, **{field: CHANGES[field]})  # type: ignore[arg-type]
    assert other.digest() != SPACE.digest()
    assert not keys(other) & keys(SPACE)


@pytest.mark.parametrize("field", CHANGES)
def test_bytes_of_a_namespace_that_differs_in_one_field_are_a_miss(field: str, tmp_path: Path) -> None:
    chunks(tmp_path, SPACE).save(CHUNK, memoryview(PAYLOAD), 64)
    other = chunks(tmp_path, replace(SPACE, **{field: CHANGES[field]}))  # type: ignore[arg-type]
    assert other.present([CHUNK]) == [False]
    assert other.load(CHUNK, memoryview(bytearray(256)), 64) == MissReason.ABSENT


def test_bytes_of_the_same_namespace_are_a_hit(tmp_path: Path) -> None:
    chunks(tmp_path, SPACE).save(CHUNK, memoryview(PAYLOAD), 64)
    found = bytearray(b"\xee" * 256)
    assert chunks(tmp_path, replace(SPACE)).load(CHUNK, memoryview(found), 64) is None
    assert found == PAYLOAD


def test_bytes_moved_under_another_namespace_are_refused(tmp_path: Path) -> None:
    chunks(tmp_path, SPACE).save(CHUNK, memoryview(PAYLOAD), 64)
    other = replace(SPACE, kv_dtype="fp8_e4m3")
    (objects,) = (path for path in tmp_path.rglob(CHUNK.page_key.hex() + "*") if path.is_file())
    moved = tmp_path / objects.relative_to(tmp_path).as_posix().replace(
        SPACE.digest()[:8].hex(), other.digest()[:8].hex()
    )
    moved.parent.mkdir(parents=True)
    objects.rename(moved)
    assert chunks(tmp_path, other).load(CHUNK, memoryview(bytearray(256)), 64) == MissReason.FOREIGN


def test_values_are_told_apart_by_kind_and_by_field() -> None:
    assert replace(SPACE, model="a", generation="b").digest() != replace(SPACE, model="b", generation="a").digest()
    assert replace(SPACE, model="x' generation='y").digest() != replace(SPACE, model="x").digest()


def test_the_digest_has_not_drifted() -> None:
    assert SPACE.digest().hex() == GOLDEN


def test_a_bumped_generation_finds_nothing_that_was_saved_before(tmp_path: Path) -> None:
    chunks(tmp_path, SPACE).save(CHUNK, memoryview(PAYLOAD), 64)
    bumped = SPACE.bumped("nonce")
    assert chunks(tmp_path, bumped).present([CHUNK]) == [False]
    assert not keys(bumped) & keys(SPACE)


def test_bumps_replace_each_other_and_keep_the_operators_generation() -> None:
    twice = SPACE.bumped("one").bumped("two")
    assert (twice.generation, twice) == ("0+two", SPACE.bumped("two"))
    assert replace(twice, generation="0") == SPACE


def test_the_difference_names_fields_with_both_values() -> None:
    other = replace(SPACE, kv_dtype="fp8_e4m3", layers=31)
    told = difference(SPACE.fields(), other.fields())
    assert told == {"kv_dtype": ("torch.bfloat16", "fp8_e4m3"), "layers": ("30", "31")}
    assert difference(SPACE.fields(), replace(SPACE).fields()) == {}


def test_the_difference_names_fields_that_only_one_of_them_has() -> None:
    assert difference({"new": 1}, {"old": "x"}) == {"new": ("1", "absent"), "old": ("absent", "x")}


DRAFT = DraftSpace("eagle", "weights", "auto", "none", "cpu-vec-b32", 1, 2, 4096, "1x1", True)
GOLDEN_DRAFT = "494057c3760ac68ab44540fe281ef71f6d7119d1cac8412a33f646f105d6e5cb"
DRAFT_CHANGES: dict[str, str | int] = {
    "method": "draft_model",
    "model": "other weights",
    "kv_dtype": "fp8_e4m3",
    "quantization": "awq",
    "encoding": "cpu-amx-b32",
    "layers": 2,
    "kv_heads": 3,
    "slab_bytes": 8192,
    "grid": "1x2",
    "looks_ahead": False,
}


def test_every_field_of_a_draft_has_a_change_here() -> None:
    assert ["target", *DRAFT_CHANGES] == list(DRAFT.fields_for(SPACE.digest()))


@pytest.mark.parametrize("field", DRAFT_CHANGES)
def test_each_field_changes_the_namespace_of_a_draft(field: str) -> None:
    other = replace(DRAFT, **{field: DRAFT_CHANGES[field]})  # type: ignore[arg-type]
    assert other.digest_for(SPACE.digest()) != DRAFT.digest_for(SPACE.digest())


def test_the_same_draft_beside_another_target_has_another_namespace() -> None:
    digests = {DRAFT.digest_for(space.digest()) for space in (SPACE, SPACE.bumped("nonce"))}
    assert len(digests | {SPACE.digest()}) == 3


def test_the_digest_of_a_draft_has_not_drifted() -> None:
    assert DRAFT.digest_for(SPACE.digest()).hex() == GOLDEN_DRAFT


def test_a_draft_names_its_target_in_hexadecimal() -> None:
    assert DRAFT.fields_for(bytes(range(32)))["target"] == bytes(range(32)).hex()


def test_the_spaces_of_engines_are_equal_where_both_digests_are() -> None:
    target, draft = SPACE.digest(), DRAFT.digest_for(SPACE.digest())
    assert {Spaces(target), Spaces(target, draft)} == {Spaces(target, draft), Spaces(target, None)}
    assert len({Spaces(target), Spaces(target, draft), Spaces(draft, target), Spaces(draft)}) == 4
