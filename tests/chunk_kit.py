"""One chunk, stores that fail on demand, and objects that are wrong in every way: for tests of checked stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from vllm_hicache.geometry import UnitRun
from vllm_hicache.grid import Grid
from vllm_hicache.names import MissReason, ObjectName, PageKey, Role
from vllm_hicache.storage.base import ObjectInfo, Store
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.storage.envelope import ChunkId, Identity, header_bytes, seal
from vllm_hicache.storage.wrappers import StoreWrapper

NAMESPACE = b"n" * 32
GRID = Grid(1, 1)
UNIT_BYTES = 1024
PAYLOAD = bytes(index % 251 for index in range(8 * UNIT_BYTES))
CHUNK = ChunkId(PageKey(b"k" * 32), 0, Role.TARGET, 0, 0)
OTHER = ChunkId(PageKey(b"j" * 32), 0, Role.TARGET, 0, 0)
NAME = CHUNK.object_name(NAMESPACE)
HEADER_BYTES = header_bytes(len(PAYLOAD), UNIT_BYTES)


class Faulty(StoreWrapper):
    """Raises `fault` in every call that `broken` names."""

    def __init__(self, inner: Store, fault: Exception, *broken: str) -> None:
        super().__init__(inner)
        self.fault = fault
        self.broken = set(broken)
        self.num_reads = 0

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        self._fail("exists")
        return super().exists(names)

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        self.num_reads += 1
        self._fail("read")
        return super().read(name, parts, offset)

    def write(self, name: ObjectName, parts: Sequence[memoryview]) -> bool:
        self._fail("write")
        return super().write(name, parts)

    def delete(self, name: ObjectName) -> bool:
        self._fail("delete")
        return super().delete(name)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._fail("list")
        return super().list(prefix)

    def _fail(self, operation: str) -> None:
        if operation in self.broken:
            raise self.fault


def chunks(store: Store) -> ChunkStore:
    return ChunkStore(store, NAMESPACE, GRID)


def sealed(chunk: ChunkId = CHUNK, namespace: bytes = NAMESPACE) -> bytes:
    return seal(Identity(chunk, namespace, GRID), memoryview(PAYLOAD), UNIT_BYTES) + PAYLOAD


def load(store: ChunkStore, chunk: ChunkId = CHUNK) -> bytes | MissReason:
    buffer = bytearray(b"\xa5") * len(PAYLOAD)
    reason = store.load(chunk, memoryview(buffer), UNIT_BYTES)
    return bytes(buffer) if reason is None else reason


BAD = {
    "short": (sealed()[:-1], MissReason.SHORT),
    "empty": (b"", MissReason.SHORT),
    "long": (sealed() + b"x", MissReason.LONG),
    "flipped payload": (sealed()[:-1] + b"\xff", MissReason.CORRUPT),
    "flipped header": (sealed()[:50] + b"\xff" + sealed()[51:], MissReason.CORRUPT),
    "other key": (sealed(OTHER), MissReason.FOREIGN),
    "other namespace": (sealed(namespace=b"m" * 32), MissReason.FOREIGN),
    "other version": (sealed()[:8] + b"\x09" + sealed()[9:], MissReason.VERSION),
}


def load_part(view: ChunkStore, *ranges: tuple[int, int]) -> bytes | MissReason:
    """Read (first unit, number) ranges of `CHUNK` into a poisoned part."""
    offsets = accumulate((count for _, count in ranges), initial=0)
    runs = [UnitRun(first, offset, count) for (first, count), offset in zip(ranges, offsets, strict=False)]
    buffer = bytearray(b"\xa5") * (sum(count for _, count in ranges) * UNIT_BYTES)
    reason = view.load_part(CHUNK, runs, memoryview(buffer), UNIT_BYTES, 8)
    return bytes(buffer) if reason is None else reason


def units(*ranges: tuple[int, int]) -> bytes:
    return b"".join(PAYLOAD[first * UNIT_BYTES : (first + count) * UNIT_BYTES] for first, count in ranges)
