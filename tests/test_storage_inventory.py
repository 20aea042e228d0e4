"""What lies in a store: which objects are chosen for removal, and how each is checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from file_store_kit import opened
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.errors import StoreCorrupt
from vllm_hicache.grid import Grid
from vllm_hicache.names import MissReason, ObjectName, PageKey, Role
from vllm_hicache.storage.base import MANIFEST_PART, ObjectInfo, Store
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.storage.encrypted import Encrypted
from vllm_hicache.storage.envelope import XXH3, ChunkId, HmacSealer, Sealer
from vllm_hicache.storage.inventory import choose, is_manifest, verify_object
from vllm_hicache.storage.wrappers import StoreWrapper

NAMESPACE = b"\x01" * 32
UNIT_BYTES = 1 << 20
SMALL_BYTES, LARGE_BYTES = 2 * UNIT_BYTES, 40 * UNIT_BYTES
KEY = b"k" * 32

infos = st.lists(
    st.builds(
        lambda part, is_manifest, size, written: ObjectInfo(
            ObjectName(f"{part}/{MANIFEST_PART}" if is_manifest else f"{part}/aa/{size}.{written}"), size, written
        ),
        st.integers(0, 3),
        st.booleans(),
        st.integers(1, 100),
        st.floats(0, 50),
    ),
    unique_by=lambda info: info.name,
)


class Recording(StoreWrapper):
    """Notes how many bytes each read asked for."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.asked: list[int] = []

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        self.asked.append(sum(part.nbytes for part in parts))
        return super().read(name, parts, offset)


class Refusing(StoreWrapper):
    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        raise StoreCorrupt("another key's")


def saved(store: Store, num_bytes: int, sealer: Sealer = XXH3) -> ObjectInfo:
    chunk = ChunkId(PageKey(bytes(32)), 0, Role.TARGET, 0, 0)
    payload = memoryview(bytearray(b"\x5a" * num_bytes))
    ChunkStore(store, NAMESPACE, Grid(), sealer).save(chunk, payload, UNIT_BYTES)
    (info,) = store.list("")
    return info


def flip_last_byte(root: Path) -> None:
    (path,) = [path for path in root.rglob("*") if path.is_file() and path.stat().st_size >= SMALL_BYTES]
    with path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))


@given(infos, st.floats(0, 50), st.integers(0, 1000))
def test_what_is_kept_is_young_enough_and_fits(known: list[ObjectInfo], before_s: float, max_bytes: int) -> None:
    chosen = list(choose(known, before_s, max_bytes))
    kept = [info for info in known if info not in chosen]
    chunks = [info for info in kept if not is_manifest(info.name)]
    assert all(info.modified_s >= before_s for info in chunks)
    assert sum(info.size_bytes for info in kept) <= max_bytes or not chunks
    assert not any(is_manifest(info.name) for info in chosen)


@given(infos, st.floats(0, 50), st.integers(0, 1000))
def test_nothing_is_removed_that_neither_rule_asks_for(
    known: list[ObjectInfo], before_s: float, max_bytes: int
) -> None:
    chosen = list(choose(known, before_s, max_bytes))
    kept_bytes = sum(info.size_bytes for info in known if info not in chosen)
    for info in reversed(chosen):
        assert info.modified_s < before_s or kept_bytes + info.size_bytes > max_bytes
        kept_bytes += info.size_bytes


@given(infos)
def test_without_limits_nothing_is_chosen(known: list[ObjectInfo]) -> None:
    assert list(choose(known, None, None)) == []


def test_a_usual_object_is_checked_by_a_single_read(tmp_path: Path) -> None:
    store = Recording(opened(tmp_path))
    info = saved(store, SMALL_BYTES)
    assert verify_object(store, info) is None
    assert store.asked == [info.size_bytes]


def test_a_large_object_is_checked_in_steps_of_bounded_memory(tmp_path: Path) -> None:
    store = Recording(opened(tmp_path))
    info = saved(store, LARGE_BYTES)
    assert verify_object(store, info) is None
    assert max(store.asked) <= 32 << 20
    assert sum(store.asked) >= LARGE_BYTES


@pytest.mark.parametrize("num_bytes", [SMALL_BYTES, LARGE_BYTES])
def test_a_flip_in_the_last_byte_is_found_at_any_size(tmp_path: Path, num_bytes: int) -> None:
    store = opened(tmp_path)
    info = saved(store, num_bytes)
    flip_last_byte(tmp_path)
    assert verify_object(store, info) is MissReason.CORRUPT


def test_an_object_that_was_replaced_since_it_was_listed_is_checked_as_it_is_now(tmp_path: Path) -> None:
    store = opened(tmp_path)
    info = saved(store, SMALL_BYTES)
    assert verify_object(store, ObjectInfo(info.name, 400, 0.0)) is None
    assert verify_object(store, ObjectInfo(info.name, info.size_bytes + 1, 0.0)) is None


@pytest.mark.parametrize("num_bytes", [SMALL_BYTES, LARGE_BYTES])
def test_a_sealed_object_is_good_under_its_key_alone(tmp_path: Path, num_bytes: int) -> None:
    store = opened(tmp_path)
    info = saved(store, num_bytes, HmacSealer(KEY))
    assert verify_object(store, info, HmacSealer(KEY)) is None
    assert verify_object(store, info, HmacSealer(b"o" * 32)) is MissReason.CORRUPT
    assert verify_object(store, info) is MissReason.VERSION


def test_an_encrypted_object_is_good_under_its_key_alone(tmp_path: Path) -> None:
    store = opened(tmp_path)
    info = saved(Encrypted(store, KEY), SMALL_BYTES)
    (listed,) = Encrypted(store, KEY).list("")
    assert verify_object(Encrypted(store, KEY), listed) is None
    assert verify_object(Encrypted(store, b"o" * 32), listed) is MissReason.CORRUPT
    assert verify_object(store, info) is MissReason.CORRUPT


def test_an_object_that_the_store_finds_spoiled_is_corrupt(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert verify_object(Refusing(store), saved(store, SMALL_BYTES)) is MissReason.CORRUPT


def test_an_object_that_went_meanwhile_is_absent(tmp_path: Path) -> None:
    store = opened(tmp_path)
    info = saved(store, SMALL_BYTES)
    store.delete(info.name)
    assert verify_object(store, info) is MissReason.ABSENT
