"""How fast a store is: a handful of objects of a page's size written, read back, compared and removed again.

Owner: `cli/`. Thread: the console's main thread, with up to `IN_FLIGHT` threads of its own. What it writes it
deletes, whatever happens meanwhile.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import median
from typing import TypeVar

from vllm_hicache.errors import StoreError
from vllm_hicache.grid import Grid
from vllm_hicache.names import KEY_BYTES, MissReason, ObjectName, PageKey, Role
from vllm_hicache.storage.base import ObjectInfo, Store
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.storage.envelope import NAMESPACE_BYTES, XXH3, ChunkId, Sealer, header_bytes, namespace_part
from vllm_hicache.storage.inventory import is_manifest

RESERVED = b"doctor\0\0"
"""First bytes of the throw-away namespaces, and their part of names, by which `store gc` finds remains."""
RESERVED_PART = namespace_part(RESERVED)
UNIT_BYTES = 64 * 1024
IN_FLIGHT = 4
NUM_NAMES = 64
_NUM_OBJECTS = 8
_DEFAULT_BYTES = 2 << 20
_MAX_OBJECT_BYTES = 16 << 20
_SMALL_READ_BYTES = 64
_TRIAL_LIMIT_S = 10.0
_CALLS, _CALLS_LIMIT_S = 20, 2.0
_Item = TypeVar("_Item")

Rates = Mapping[int, float]
"""Payload bytes a second, by the number of calls in flight; a number that could not be tried is left out."""


@dataclass(frozen=True, slots=True)
class StoreSpeed:
    """What a trial measured. Seconds are medians; `read_s` is of a small read, None where there was none.

    `exists_s` is one look-up of one name, `exists_many_s` one of `NUM_NAMES`; `num_left` objects could not
    be deleted.
    """

    num_objects: int
    object_bytes: int
    exists_s: float
    exists_many_s: float
    read_s: float | None
    write_rates: Rates
    read_rates: Rates
    faults: Sequence[str]
    num_left: int


def object_bytes_of(page_bytes: int | None, num_cells: int) -> int:
    """Return the payload bytes of an object like the engine's: whole units of 64 KiB, at most 16 MiB."""
    wanted = _DEFAULT_BYTES if page_bytes is None else min(page_bytes // num_cells, _MAX_OBJECT_BYTES)
    return max(1, -(-wanted // UNIT_BYTES)) * UNIT_BYTES


def measure_store(store: Store, sealer: Sealer, object_bytes: int, room_bytes: int | None) -> StoreSpeed:
    """Write up to eight objects, as many as fit `room_bytes` (None: all), read them back and delete them.

    Stops writing and reading after 10 seconds each. Whatever happens, deletes what it wrote. Raises StoreError
    when even a look-up fails.
    """
    trial = _Trial(store, sealer, object_bytes)
    exists_s, exists_many_s = _look_up_s(store, trial.new_name)
    stored_bytes = object_bytes + header_bytes(object_bytes, UNIT_BYTES, sealer)
    num_objects = _NUM_OBJECTS if room_bytes is None else min(_NUM_OBJECTS, max(0, room_bytes) // stored_bytes)
    try:
        write_rates = trial.write(num_objects)
        read_s, read_rates = trial.read()
    finally:
        num_left = trial.delete()
    speeds = (exists_s, exists_many_s, read_s, write_rates, read_rates)
    return StoreSpeed(len(trial.payloads), object_bytes, *speeds, trial.faults, num_left)


def measure_reads(store: Store) -> StoreSpeed:
    """Read up to eight objects that lie in the store, for a store that is not to be written to. As `measure_store`."""
    trial = _Trial(store, XXH3, 0)
    exists_s, exists_many_s = _look_up_s(store, trial.new_name)
    chunks = (info for info in store.list("") if not is_manifest(info.name))
    infos = [info for info in islice(chunks, _NUM_OBJECTS) if info.size_bytes <= _MAX_OBJECT_BYTES * 2]
    rates = {num: rate for num in (1, IN_FLIGHT) if (rate := trial.rate(trial.read_raw, infos, num))}
    read_s = trial.small_read_s(infos[0].name) if infos else None
    object_bytes = max((info.size_bytes for info in infos), default=0)
    return StoreSpeed(len(infos), object_bytes, exists_s, exists_many_s, read_s, {}, rates, trial.faults, 0)


class _Trial:
    """Objects of a throw-away namespace: nobody else looks for them, and they are deleted afterwards."""

    def __init__(self, store: Store, sealer: Sealer, object_bytes: int) -> None:
        self._store = store
        self._object_bytes = object_bytes
        self._namespace = RESERVED + secrets.token_bytes(NAMESPACE_BYTES - len(RESERVED))
        self._view = ChunkStore(store, self._namespace, Grid(1, 1), sealer)
        self._begun: list[ChunkId] = []
        self.payloads: dict[ChunkId, bytes] = {}
        self.faults: list[str] = []

    def new_name(self) -> ObjectName:
        return _new_chunk().object_name(self._namespace)

    def write(self, num_objects: int) -> Rates:
        """Write one half of the objects one by one and the other half side by side."""
        made = [(_new_chunk(), os.urandom(self._object_bytes)) for _ in range(num_objects)]
        first = -(-num_objects // 2)
        halves = {1: made[:first], IN_FLIGHT: made[first:]}
        return {num: rate for num, half in halves.items() if (rate := self.rate(self._save, half, num))}

    def read(self) -> tuple[float | None, Rates]:
        """Read all back and compare: the median seconds of a small read, and the speeds."""
        chunks = list(self.payloads)
        rates = {num: rate for num in (1, IN_FLIGHT) if (rate := self._read_all(num))}
        read_s = self.small_read_s(chunks[0].object_name(self._namespace)) if chunks and not self.faults else None
        return read_s, {} if self.faults else rates

    def delete(self) -> int:
        """Delete every object whose write was begun; return how many may be left."""
        num_left = 0
        for chunk in self._begun:
            try:
                self._store.delete(chunk.object_name(self._namespace))
            except StoreError as error:
                num_left += 1
                self.faults.append(f"a delete failed: {error}")
        return num_left

    def rate(self, call: Callable[[_Item], int], items: Sequence[_Item], num_threads: int) -> float | None:
        """Bytes a second of `call`, which returns the bytes it moved; None where it moved none."""
        start = time.perf_counter()

        def timely(item: _Item) -> int:
            late = time.perf_counter() - start > _TRIAL_LIMIT_S
            return 0 if late or self.faults else call(item)

        with ThreadPoolExecutor(num_threads) as pool:
            num_bytes = sum(pool.map(timely, items))
        return num_bytes / (time.perf_counter() - start) or None

    def small_read_s(self, name: ObjectName) -> float | None:
        part = memoryview(bytearray(_SMALL_READ_BYTES))
        try:
            return _median_s(lambda: self._store.read(name, [part]))
        except StoreError as error:
            self.faults.append(f"a read of {_SMALL_READ_BYTES} bytes failed: {error}")
            return None

    def read_raw(self, info: ObjectInfo) -> int:
        part = memoryview(bytearray(info.size_bytes))
        try:
            return min(part.nbytes, self._store.read(info.name, [part]))
        except StoreError as error:
            self.faults.append(f"a read of {info.size_bytes} bytes failed: {error}")
            return 0

    def _save(self, made: tuple[ChunkId, bytes]) -> int:
        chunk, payload = made
        self._begun.append(chunk)
        try:
            self._view.save(chunk, memoryview(payload), UNIT_BYTES)
        except StoreError as error:
            self.faults.append(f"a write of {len(payload)} bytes failed: {error}")
            return 0
        self.payloads[chunk] = payload
        return len(payload)

    def _read_all(self, num_threads: int) -> float | None:
        buffers = {chunk: bytearray(b"\xa5" * len(payload)) for chunk, payload in self.payloads.items()}
        answers = dict[ChunkId, MissReason | None]()

        def load(chunk: ChunkId) -> int:
            answers[chunk] = self._view.load(chunk, memoryview(buffers[chunk]), UNIT_BYTES)
            return len(buffers[chunk])

        rate = self.rate(load, list(buffers), num_threads)
        for chunk, reason in answers.items():
            if reason is not None or buffers[chunk] != self.payloads[chunk]:
                fate = reason or "changed"
                self.faults.append(f"an object of {self._object_bytes} bytes did not come back: {fate}")
        return rate


def _new_chunk() -> ChunkId:
    return ChunkId(PageKey(secrets.token_bytes(KEY_BYTES)), 0, Role.TARGET, 0, 0)


def _look_up_s(store: Store, new_name: Callable[[], ObjectName]) -> tuple[float, float]:
    absent = [new_name() for _ in range(NUM_NAMES)]
    return _median_s(lambda: store.exists(absent[:1])), _median_s(lambda: store.exists(absent))


def _median_s(call: Callable[[], object]) -> float:
    """Median seconds of up to 20 calls, of as many as begin within two seconds."""
    clock = [time.perf_counter()]
    while len(clock) <= _CALLS and clock[-1] - clock[0] < _CALLS_LIMIT_S:
        call()
        clock.append(time.perf_counter())
    return median(after - before for before, after in pairwise(clock))
