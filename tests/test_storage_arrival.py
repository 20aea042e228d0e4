"""Units are checked while they come in; nothing that changes afterwards is believed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from vllm_hicache.grid import Grid
from vllm_hicache.names import MissReason, ObjectName, PageKey, Role
from vllm_hicache.storage.base import Store, teller
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.storage.envelope import ChunkId, header_bytes
from vllm_hicache.storage.file import FileStore
from vllm_hicache.storage.wrappers import StoreWrapper

NAMESPACE, GRID = b"n" * 32, Grid(1, 1)
UNIT_BYTES, NUM_UNITS = 4096, 32
PAYLOAD = bytes(index % 249 for index in range(NUM_UNITS * UNIT_BYTES))
CHUNK = ChunkId(PageKey(b"k" * 32), 0, Role.TARGET, 0, 0)
HEADER_BYTES = header_bytes(len(PAYLOAD), UNIT_BYTES)

Told = Callable[[int], None]
Script = Callable[[memoryview, memoryview, Told], None]


class Scripted(StoreWrapper):
    """Reads the object plainly, and then does with the parts what the test says."""

    def __init__(self, inner: Store, script: Script) -> None:
        super().__init__(inner)
        self.script = script

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        total_bytes = super().read(name, list(parts), offset)
        told = teller(parts)
        assert told is not None
        self.script(parts[0], parts[1], told)
        return total_bytes


def load(tmp_path: Path, script: Script) -> bytes | MissReason:
    store = FileStore(str(tmp_path), 1 << 30)
    store.probe()
    ChunkStore(store, NAMESPACE, GRID).save(CHUNK, memoryview(PAYLOAD), UNIT_BYTES)
    buffer = bytearray(b"\xa5") * len(PAYLOAD)
    reason = ChunkStore(Scripted(store, script), NAMESPACE, GRID).load(CHUNK, memoryview(buffer), UNIT_BYTES)
    return bytes(buffer) if reason is None else reason


@pytest.mark.parametrize("step", [1_000, UNIT_BYTES, 3 * UNIT_BYTES + 5, HEADER_BYTES + len(PAYLOAD)])
def test_an_object_that_is_told_of_piece_by_piece_is_served(tmp_path: Path, step: int) -> None:
    def script(header: memoryview, payload: memoryview, told: Told) -> None:
        for num_bytes in range(step, HEADER_BYTES + len(PAYLOAD) + step, step):
            told(num_bytes)

    assert load(tmp_path, script) == PAYLOAD


@pytest.mark.parametrize("at", [0, 5 * UNIT_BYTES, len(PAYLOAD) - 1])
def test_a_flipped_byte_is_found_wherever_it_lies(tmp_path: Path, at: int) -> None:
    def script(header: memoryview, payload: memoryview, told: Told) -> None:
        payload[at] ^= 1
        for num_units in range(0, NUM_UNITS, 5):
            told(HEADER_BYTES + num_units * UNIT_BYTES)

    assert load(tmp_path, script) is MissReason.CORRUPT


def test_units_that_a_second_attempt_overwrites_are_checked_again(tmp_path: Path) -> None:
    def script(header: memoryview, payload: memoryview, told: Told) -> None:
        told(HEADER_BYTES + 8 * UNIT_BYTES)
        payload[0] ^= 1
        told(0)

    assert load(tmp_path, script) is MissReason.CORRUPT


def test_a_second_attempt_mends_what_the_first_one_spoiled(tmp_path: Path) -> None:
    def script(header: memoryview, payload: memoryview, told: Told) -> None:
        payload[0] ^= 1
        told(HEADER_BYTES + 8 * UNIT_BYTES)
        told(0)
        payload[0] ^= 1

    assert load(tmp_path, script) == PAYLOAD


def test_units_that_were_compared_with_another_header_are_compared_again(tmp_path: Path) -> None:
    def script(header: memoryview, payload: memoryview, told: Told) -> None:
        good = bytes(header)
        header[:] = bytes(len(good))
        payload[0] ^= 1
        told(HEADER_BYTES + 8 * UNIT_BYTES)
        header[:] = good

    assert load(tmp_path, script) is MissReason.CORRUPT


def test_a_header_that_is_spoiled_after_its_units_were_checked_is_a_miss(tmp_path: Path) -> None:
    def script(header: memoryview, payload: memoryview, told: Told) -> None:
        told(HEADER_BYTES + len(PAYLOAD))
        header[60] ^= 1

    assert load(tmp_path, script) is MissReason.CORRUPT
