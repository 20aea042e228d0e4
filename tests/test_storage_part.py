"""Parts of a chunk: in few reads, checked alone, and never from two objects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from chunk_kit import (
    BAD,
    CHUNK,
    GRID,
    HEADER_BYTES,
    NAME,
    NAMESPACE,
    PAYLOAD,
    UNIT_BYTES,
    Faulty,
    chunks,
    load_part,
    sealed,
    units,
)

from vllm_hicache.errors import StoreTimeout
from vllm_hicache.geometry import UnitRun
from vllm_hicache.names import MissReason, ObjectName
from vllm_hicache.storage import chunks as chunks_module
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.envelope import Identity, seal
from vllm_hicache.storage.file import FileStore
from vllm_hicache.storage.wrappers import StoreWrapper

RANGES = [
    [(0, 8)],
    [(0, 1)],
    [(3, 2)],
    [(7, 1)],
    [(0, 3), (3, 5)],
    [(0, 1), (2, 1), (4, 1), (6, 1)],
    [(1, 1), (3, 2), (7, 1)],
]


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    store = FileStore(str(tmp_path / "store"), 1 << 30)
    store.probe()
    return store


@pytest.fixture(params=[0, UNIT_BYTES, 1 << 20], ids=["no gap is read", "small gaps are read", "all gaps are read"])
def gaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(chunks_module, "MOST_GAP_BYTES", request.param)
    return request.param


@pytest.mark.usefixtures("gaps")
@pytest.mark.parametrize("ranges", RANGES, ids=str)
def test_a_part_is_loaded_alone(store: FileStore, ranges: list[tuple[int, int]]) -> None:
    chunks(store).save(CHUNK, memoryview(PAYLOAD), UNIT_BYTES)
    assert load_part(chunks(store), *ranges) == units(*ranges)


@pytest.mark.parametrize(
    ("most_gap_bytes", "ranges", "num_calls"),
    [
        (0, [(0, 2)], 1),
        (0, [(0, 2), (2, 1)], 1),
        (0, [(1, 1), (3, 1), (5, 1)], 4),
        (UNIT_BYTES, [(1, 1), (3, 1), (5, 1)], 1),
        (UNIT_BYTES, [(2, 1), (4, 1), (7, 1)], 3),
        (1 << 20, [(0, 1), (7, 1)], 1),
    ],
)
def test_runs_that_lie_close_together_are_read_at_once(
    store: FileStore,
    monkeypatch: pytest.MonkeyPatch,
    most_gap_bytes: int,
    ranges: list[tuple[int, int]],
    num_calls: int,
) -> None:
    monkeypatch.setattr(chunks_module, "MOST_GAP_BYTES", most_gap_bytes)
    chunks(store).save(CHUNK, memoryview(PAYLOAD), UNIT_BYTES)
    counting = Faulty(store, RuntimeError())
    assert load_part(chunks(counting), *ranges) == units(*ranges)
    assert counting.num_reads == num_calls


@pytest.mark.usefixtures("gaps")
@pytest.mark.parametrize("flipped", range(8))
def test_a_flip_inside_a_run_is_corrupt_and_outside_it_is_not_seen(store: FileStore, flipped: int) -> None:
    content = bytearray(sealed())
    content[HEADER_BYTES + flipped * UNIT_BYTES + flipped] ^= 1
    store.write(NAME, [memoryview(content)])
    is_seen = flipped in (1, 3, 4, 7)
    expected = MissReason.CORRUPT if is_seen else units((1, 1), (3, 2), (7, 1))
    assert load_part(chunks(store), (1, 1), (3, 2), (7, 1)) == expected
    assert store.exists([NAME]) == [not is_seen]


@pytest.mark.usefixtures("gaps")
@pytest.mark.parametrize("kind", BAD)
def test_a_part_of_a_bad_object_is_a_miss_unless_the_flip_lies_elsewhere(store: FileStore, kind: str) -> None:
    content, reason = BAD[kind]
    store.write(NAME, [memoryview(content)])
    view, is_elsewhere = chunks(store), kind == "flipped payload"
    assert load_part(view, (0, 1), (6, 1)) == (units((0, 1), (6, 1)) if is_elsewhere else reason)
    assert view.misses() == ({} if is_elsewhere else {reason: 1})
    assert store.exists([NAME]) == [is_elsewhere]
    assert view.save(CHUNK, memoryview(PAYLOAD), UNIT_BYTES) is not is_elsewhere


class Replacing(StoreWrapper):
    """Puts `content` in the object's place after the first read."""

    def __init__(self, inner: Store, content: bytes) -> None:
        super().__init__(inner)
        self.content = content

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        total_bytes = super().read(name, parts, offset)
        self.delete(name)
        self.write(name, [memoryview(self.content)])
        return total_bytes


REVERSED = PAYLOAD[::-1]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (sealed()[:-1], MissReason.SHORT),
        (b"", MissReason.SHORT),
        (sealed() + b"x", MissReason.LONG),
        (seal(Identity(CHUNK, NAMESPACE, GRID), memoryview(REVERSED), UNIT_BYTES) + REVERSED, MissReason.CORRUPT),
    ],
    ids=["shorter", "empty", "longer", "other bytes"],
)
def test_an_object_that_changes_between_two_reads_of_a_part_is_a_miss(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, content: bytes, reason: MissReason
) -> None:
    monkeypatch.setattr(chunks_module, "MOST_GAP_BYTES", 0)
    store.write(NAME, [memoryview(sealed())])
    assert load_part(chunks(Replacing(store, content)), (0, 1), (4, 1)) is reason


def test_a_fault_while_a_part_is_read_is_a_miss_that_leaves_the_object(store: FileStore) -> None:
    chunks(store).save(CHUNK, memoryview(PAYLOAD), UNIT_BYTES)
    faulty = Faulty(store, StoreTimeout("x"), "read")
    assert load_part(chunks(faulty), (0, 1)) is MissReason.TIMEOUT
    assert store.exists([NAME]) == [True]


@pytest.mark.parametrize(
    ("runs", "num_bytes"),
    [
        ([UnitRun(-1, 0, 1)], 1024),
        ([UnitRun(8, 0, 1)], 1024),
        ([UnitRun(0, 0, 9)], 9 * 1024),
        ([UnitRun(0, 0, 1)], 1000),
        ([UnitRun(0, 0, 1)], 2 * 1024),
        ([UnitRun(0, 1, 1)], 1024),
        ([UnitRun(0, 0, 0)], 0),
        ([UnitRun(4, 0, 1), UnitRun(2, 1, 1)], 2 * 1024),
        ([UnitRun(2, 0, 2), UnitRun(3, 2, 1)], 3 * 1024),
        ([UnitRun(2, 0, 1), UnitRun(4, 2, 1)], 3 * 1024),
    ],
    ids=str,
)
def test_runs_that_do_not_fill_the_part_from_inside_the_chunk_are_refused(
    store: FileStore, runs: list[UnitRun], num_bytes: int
) -> None:
    with pytest.raises(ValueError, match=r"inside the chunk|ascending runs"):
        chunks(store).load_part(CHUNK, runs, memoryview(bytearray(num_bytes)), UNIT_BYTES, 8)
