"""What lies in a store: summed up by namespace, verified object by object, and chosen for removal.

Owner: `cli/store.py`. Thread: any; reads only, removal is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from vllm_hicache.errors import ObjectMissing, StoreCorrupt
from vllm_hicache.names import MissReason, ObjectName
from vllm_hicache.storage.base import MANIFEST_PART, ObjectInfo, Store
from vllm_hicache.storage.envelope import (
    FIXED_BYTES,
    XXH3,
    Header,
    Sealer,
    declared_header_bytes,
    header_bytes,
)
from vllm_hicache.storage.manifest import Manifest, parse_manifest

_MAX_HEADER_BYTES = 16 << 20
_STEP_BYTES = 32 << 20


@dataclass(slots=True)
class NamespaceSummary:
    """The objects of one namespace; times are Unix seconds of the oldest and the newest write."""

    part: str
    num_objects: int = 0
    used_bytes: int = 0
    oldest_s: float = float("inf")
    newest_s: float = 0.0
    pages: set[str] = field(default_factory=set)

    def add(self, info: ObjectInfo) -> None:
        self.num_objects += 1
        self.used_bytes += info.size_bytes
        self.oldest_s = min(self.oldest_s, info.modified_s)
        self.newest_s = max(self.newest_s, info.modified_s)
        if not is_manifest(info.name):
            self.pages.add(info.name.rsplit("/", 1)[-1].split(".", 1)[0])


def is_manifest(name: ObjectName) -> bool:
    """Return whether `name` is a namespace's manifest."""
    return name.count("/") == 1 and name.endswith(f"/{MANIFEST_PART}")


def survey(infos: Iterable[ObjectInfo]) -> dict[str, NamespaceSummary]:
    """Sum up objects by the first part of their names, in the order of these."""
    found: dict[str, NamespaceSummary] = {}
    for info in infos:
        part = info.name.split("/", 1)[0]
        found.setdefault(part, NamespaceSummary(part)).add(info)
    return dict(sorted(found.items()))


def verify_object(store: Store, info: ObjectInfo, sealer: Sealer = XXH3) -> MissReason | None:
    """Read one object and check all of it, its name against its header included; None is good.

    ABSENT means that it went meanwhile. Memory: at most 32 MiB, or one unit, at a time. Raises StoreError.
    """
    try:
        if is_manifest(info.name):
            return _verify_manifest(store, info)
        if info.size_bytes > _STEP_BYTES:
            return _verify_in_steps(store, info, sealer)
        return _verify_whole(store, info, sealer)
    except ObjectMissing:
        return MissReason.ABSENT
    except StoreCorrupt:
        return MissReason.CORRUPT


def choose(infos: Iterable[ObjectInfo], before_s: float | None, max_bytes: int | None) -> Iterator[ObjectInfo]:
    """Yield the chunks to remove: those last used before `before_s` (Unix seconds), then of the others the
    longest unused, until what is left fits `max_bytes`. None is no limit. Manifests stay, and count.
    """
    known = sorted(infos, key=lambda info: (last_used_s(info), info.name))
    used_bytes = sum(info.size_bytes for info in known)
    for info in known:
        is_old = before_s is not None and last_used_s(info) < before_s
        is_too_much = max_bytes is not None and used_bytes > max_bytes
        if not is_old and not is_too_much:
            return
        if not is_manifest(info.name):
            used_bytes -= info.size_bytes
            yield info


def last_used_s(info: ObjectInfo) -> float:
    """Return when an object was last used, Unix seconds: when it was written, as a listing tells no reads."""
    return info.modified_s


def _verify_manifest(store: Store, info: ObjectInfo) -> MissReason | None:
    buffer = bytearray(info.size_bytes)
    store.read(info.name, [memoryview(buffer)])
    good = isinstance(parse_manifest(bytes(buffer), info.name.split("/", 1)[0]), Manifest)
    return None if good else MissReason.CORRUPT


def _verify_whole(store: Store, info: ObjectInfo, sealer: Sealer) -> MissReason | None:
    """Check by one call: across a network each costs more than the bytes of most objects."""
    buffer = memoryview(bytearray(info.size_bytes))
    total_bytes = store.read(info.name, [buffer])
    if total_bytes != info.size_bytes:
        # Replaced since it was listed.
        return _verify_in_steps(store, info, sealer)
    header = _check_header(buffer, total_bytes, info.name, sealer)
    if isinstance(header, MissReason):
        return header
    return header.check_units(0, buffer[total_bytes - header.payload_bytes :])


def _verify_in_steps(store: Store, info: ObjectInfo, sealer: Sealer) -> MissReason | None:
    """Check by one read for the header's length, one for the header, and one for each 32 MiB."""
    fixed = memoryview(bytearray(FIXED_BYTES))
    total_bytes = store.read(info.name, [fixed])
    if total_bytes < FIXED_BYTES:
        return MissReason.SHORT
    # Unchecked as yet, hence the limits: a flipped length must not ask for all of the memory.
    buffer = memoryview(bytearray(min(total_bytes, declared_header_bytes(fixed), _MAX_HEADER_BYTES)))
    store.read(info.name, [buffer])
    header = _check_header(buffer, total_bytes, info.name, sealer)
    return header if isinstance(header, MissReason) else _verify_payload(store, info.name, header)


def _check_header(buffer: memoryview, total_bytes: int, name: ObjectName, sealer: Sealer) -> Header | MissReason:
    """Return the header that `buffer` starts with, of the object `name` of `total_bytes`."""
    header = Header.parse(buffer, sealer)
    if isinstance(header, MissReason):
        return header
    expected_bytes = header_bytes(header.payload_bytes, header.unit_bytes, sealer) + header.payload_bytes
    if total_bytes != expected_bytes:
        return MissReason.SHORT if total_bytes < expected_bytes else MissReason.LONG
    return header if header.identity.object_name() == name else MissReason.FOREIGN


def _verify_payload(store: Store, name: ObjectName, header: Header) -> MissReason | None:
    step_units = max(1, _STEP_BYTES // header.unit_bytes)
    start = header_bytes(header.payload_bytes, header.unit_bytes, header.sealer)
    for first in range(0, header.payload_bytes // header.unit_bytes, step_units):
        skip_bytes = first * header.unit_bytes
        size = min(step_units * header.unit_bytes, header.payload_bytes - skip_bytes)
        piece = memoryview(bytearray(size))
        store.read(name, [piece], start + skip_bytes)
        reason = header.check_units(first, piece)
        if reason is not None:
            return reason
    return None
