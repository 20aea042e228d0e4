"""The checked, chunk-level view of a store that transfers use: errors and bad bytes end here, as misses.

Owner: `storage/`. Thread: as thread-safe as the store inside.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm_hicache.errors import StoreError
from vllm_hicache.geometry import UnitRun
from vllm_hicache.grid import Grid
from vllm_hicache.names import MissReason, ObjectName, Role
from vllm_hicache.storage.base import Store, WatchedParts
from vllm_hicache.storage.envelope import (
    XXH3,
    ChunkId,
    Header,
    Identity,
    Sealer,
    header_bytes,
    read_header,
    seal,
)
from vllm_hicache.storage.warning import RareWarning, miss_reason

# For these the object may be sound, so it stays.
_NOT_A_FAULT_OF_THE_OBJECT = frozenset(
    {MissReason.ABSENT, MissReason.TIMEOUT, MissReason.UNAVAILABLE, MissReason.ERROR}
)

MOST_GAP_BYTES = 256 << 10
"""So much between two runs is read and thrown away: with most stores that takes less time than another call.

Measured on local stores, a call is worth 200 KiB on shared memory, 400 KiB on files and Redis, 2 MiB on S3.
"""


class ChunkSource(Protocol):
    """What pages are filled from: a store, or another engine."""

    def load(self, chunk: ChunkId, payload: memoryview, unit_bytes: int) -> MissReason | None:
        """See `ChunkStore.load`."""
        ...

    def load_part(
        self, chunk: ChunkId, runs: Sequence[UnitRun], payload: memoryview, unit_bytes: int, num_units: int
    ) -> MissReason | None:
        """See `ChunkStore.load_part`."""
        ...


class RoleChunks:
    """The chunks of an engine's namespaces, one for each role; else as `ChunkStore`."""

    def __init__(self, by_role: Mapping[Role, ChunkStore]) -> None:
        self._by_role = dict(by_role)

    def load(self, chunk: ChunkId, payload: memoryview, unit_bytes: int) -> MissReason | None:
        """See `ChunkStore.load`."""
        return self._by_role[chunk.role].load(chunk, payload, unit_bytes)

    def load_part(
        self, chunk: ChunkId, runs: Sequence[UnitRun], payload: memoryview, unit_bytes: int, num_units: int
    ) -> MissReason | None:
        """See `ChunkStore.load_part`."""
        return self._by_role[chunk.role].load_part(chunk, runs, payload, unit_bytes, num_units)

    def save(self, chunk: ChunkId, payload: memoryview, unit_bytes: int) -> bool:
        """See `ChunkStore.save`."""
        return self._by_role[chunk.role].save(chunk, payload, unit_bytes)

    def present(self, chunks: Sequence[ChunkId]) -> list[bool]:
        """See `ChunkStore.present`; one call for each role that is asked about."""
        found = [False] * len(chunks)
        for role, store in self._by_role.items():
            places = [place for place, chunk in enumerate(chunks) if chunk.role is role]
            answers = store.present([chunks[place] for place in places]) if places else []
            for place, is_there in zip(places, answers, strict=True):
                found[place] = is_there
        return found


class ChunkStore:
    """The chunks of one namespace in a store: bytes come out as they went in, or not at all.

    Caller guarantees: payloads are contiguous memoryviews of whole units; units and sizes are the
    namespace's own; `sealer` is that of all who share it. Thread: all methods are thread-safe and blocking.
    Failure: `load` and `load_part` never raise for what a store does; `save` and `present` raise only
    StoreError. Arguments that make no sense (a payload of part of a unit) raise ValueError.
    """

    def __init__(self, store: Store, namespace: bytes, grid: Grid, sealer: Sealer = XXH3) -> None:
        self._store = store
        self._namespace = namespace
        self._grid = grid.shape
        self._sealer = sealer
        self._lock = threading.Lock()
        self._misses: Counter[MissReason] = Counter()
        self._warnings = RareWarning()

    def load(self, chunk: ChunkId, payload: memoryview, unit_bytes: int) -> MissReason | None:
        """Read a whole chunk into `payload` by one scatter read; None is a hit.

        On a miss the content of `payload` is undefined. A bad object is removed, so that the next save
        heals it; nothing is retried.
        """
        identity, payload = self._identity(chunk), payload.cast("B")
        arrival = _Arrival(identity, payload, unit_bytes, self._sealer)

        def attempt() -> MissReason | None:
            return arrival.verdict(self._store.read(identity.object_name(), arrival))

        return self._judged(identity.object_name(), attempt)

    def load_part(
        self, chunk: ChunkId, runs: Sequence[UnitRun], payload: memoryview, unit_bytes: int, num_units: int
    ) -> MissReason | None:
        """Read `runs` of the units of a chunk of `num_units` into `payload`, which they fill one after the other.

        The header comes with the first read; runs that lie close together are read at once. Only the units of the
        runs are checked. Else as `load`.
        """
        identity, payload, chunk_bytes = self._identity(chunk), payload.cast("B"), num_units * unit_bytes
        _require_tiling(runs, payload.nbytes, unit_bytes, num_units)
        header = memoryview(bytearray(header_bytes(chunk_bytes, unit_bytes, self._sealer)))
        reads = _reads(header, runs, payload, unit_bytes)

        def attempt() -> MissReason | None:
            found: Header | MissReason | None = None
            for read in reads:
                total_bytes = self._store.read(identity.object_name(), read.parts, read.offset)
                # The object may have been replaced between two reads: the total and the digests tell.
                if found is None or total_bytes != header.nbytes + chunk_bytes:
                    found = read_header(header, total_bytes, identity, chunk_bytes, unit_bytes, self._sealer)
                if isinstance(found, MissReason):
                    return found
                for run in read.runs:
                    reason = found.check_units(run.first_unit, _of_run(payload, run, unit_bytes))
                    if reason is not None:
                        return reason
            return None

        return self._judged(identity.object_name(), attempt)

    def save(self, chunk: ChunkId, payload: memoryview, unit_bytes: int) -> bool:
        """Write a chunk; True when it was not there. On return any process may load it. Raises StoreError."""
        identity, payload = self._identity(chunk), payload.cast("B")
        header = memoryview(seal(identity, payload, unit_bytes, self._sealer))
        try:
            return self._store.write(identity.object_name(), [header, payload])
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"{self._store.describe()} failed to write with {error!r}") from error

    def present(self, chunks: Sequence[ChunkId]) -> list[bool]:
        """Return for each chunk whether a load is worth trying. Raises StoreError while the store cannot tell."""
        names = [chunk.object_name(self._namespace) for chunk in chunks]
        try:
            found = self._store.exists(names)
            if len(found) != len(names):
                raise StoreError(f"{len(found)} answers to {len(names)} names")
        except Exception as error:
            self._count(miss_reason(error), error)
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{self._store.describe()} failed to look up with {error!r}") from error
        return found

    def misses(self) -> dict[MissReason, int]:
        """Return how many loads missed so far, and how many `present` calls failed, by reason."""
        with self._lock:
            return dict(self._misses)

    def _identity(self, chunk: ChunkId) -> Identity:
        return Identity(chunk, self._namespace, self._grid)

    def _judged(self, name: ObjectName, attempt: Callable[[], MissReason | None]) -> MissReason | None:
        """Run one load: an error is a miss, and a bad object is removed."""
        fault: Exception | None = None
        try:
            reason = attempt()
        except Exception as error:  # miss: whatever a store raises, the thread that loads must live
            reason, fault = miss_reason(error), error
        if reason is None:
            return None
        self._count(reason, fault)
        if reason not in _NOT_A_FAULT_OF_THE_OBJECT:
            self._remove(name)
        return reason

    def _remove(self, name: ObjectName) -> None:
        try:
            self._store.delete(name)
        except Exception as error:  # miss: it has been counted; a bad object that stays is found bad again
            self._warnings.warn(f"{self._store.describe()} cannot remove the bad object {name}", error)

    def _count(self, reason: MissReason, fault: Exception | None) -> None:
        with self._lock:
            self._misses[reason] += 1
        if fault is not None and reason is not MissReason.ABSENT:
            self._warnings.warn(f"{self._store.describe()} failed: counted as a miss ({reason})", fault)


@dataclass(slots=True)
class _Read:
    """One call of the store: where it begins, what it fills, and which runs are in place afterwards."""

    offset: int
    end: int
    parts: list[memoryview]
    runs: list[UnitRun] = field(default_factory=list)


def _reads(header: memoryview, runs: Sequence[UnitRun], payload: memoryview, unit_bytes: int) -> list[_Read]:
    """The header and the runs in as few calls as are worth it: small gaps are read too, and thrown away."""
    reads = [_Read(0, header.nbytes, [header])]
    for run in runs:
        part = _of_run(payload, run, unit_bytes)
        start, last = header.nbytes + run.first_unit * unit_bytes, reads[-1]
        gap_bytes = start - last.end
        if gap_bytes > MOST_GAP_BYTES:
            last = _Read(start, start, [])
            reads.append(last)
        elif gap_bytes:
            last.parts.append(memoryview(bytearray(gap_bytes)))
        last.parts.append(part)
        last.runs.append(run)
        last.end = start + part.nbytes
    return reads


def _of_run(payload: memoryview, run: UnitRun, unit_bytes: int) -> memoryview:
    return payload[run.offset_units * unit_bytes : (run.offset_units + run.num_units) * unit_bytes]


def _require_tiling(runs: Sequence[UnitRun], payload_bytes: int, unit_bytes: int, num_units: int) -> None:
    """Raise ValueError unless ascending runs inside the chunk fill the payload one after the other."""
    filled, end = 0, 0
    for run in runs:
        if run.first_unit < end or run.offset_units != filled or run.num_units < 1:
            raise ValueError(
                f"{run} does not follow the run before it: give ascending runs without gaps in the payload"
            )
        filled, end = filled + run.num_units, run.first_unit + run.num_units
    if filled * unit_bytes != payload_bytes or end > num_units:
        raise ValueError(
            f"runs of {filled} units of {unit_bytes} bytes up to unit {end} do not fill {payload_bytes} bytes from a "
            f"chunk of {num_units} units: give a payload of whole units inside the chunk"
        )


class _Arrival(WatchedParts):
    """A header and its payload, whose units are checked as they come in."""

    def __init__(self, identity: Identity, payload: memoryview, unit_bytes: int, sealer: Sealer) -> None:
        self._header = memoryview(bytearray(header_bytes(payload.nbytes, unit_bytes, sealer)))
        super().__init__([self._header, payload])
        self._identity = identity
        self._payload = payload
        self._unit_bytes = unit_bytes
        self._sealer = sealer
        self._begin()

    def filled(self, num_bytes: int) -> None:
        num_units = min(num_bytes - self._header.nbytes, self._payload.nbytes) // self._unit_bytes
        if num_units < self._num_checked:
            self._begin()
        elif num_units > self._num_checked and self._reason is None:
            self._check(num_units)

    def verdict(self, total_bytes: int) -> MissReason | None:
        """Judge what came of an object of `total_bytes`; None is a hit."""
        found = self._read_header(total_bytes)
        # The header that units were compared with must be the one that is there in the end.
        if self._found is not None and self._found != found:
            self._begin()
        if isinstance(found, MissReason):
            return found
        if self._reason is None:
            self._check(self._payload.nbytes // self._unit_bytes)
        return self._reason

    def _begin(self) -> None:
        self._found: Header | MissReason | None = None
        self._reason: MissReason | None = None
        self._num_checked = 0

    def _check(self, num_units: int) -> None:
        """Check the units that came since the last time, up to `num_units` from the front."""
        if self._found is None:
            self._found = self._read_header(self._header.nbytes + self._payload.nbytes)
        if isinstance(self._found, Header):
            first, unit_bytes = self._num_checked, self._unit_bytes
            self._reason = self._found.check_units(first, self._payload[first * unit_bytes : num_units * unit_bytes])
        self._num_checked = num_units

    def _read_header(self, total_bytes: int) -> Header | MissReason:
        payload_bytes = self._payload.nbytes
        return read_header(self._header, total_bytes, self._identity, payload_bytes, self._unit_bytes, self._sealer)
