"""What lies in a store: summed up by namespace, verified object by object, and chosen for removal.

Owner: `cli/store.py`. Thread: any; reads only, removal is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from vllm_hicache.errors import ObjectMissing
from vllm_hicache.names import MissReason, ObjectName
from vllm_hicache.storage.base import MANIFEST_PART, ObjectInfo, Store
from vllm_hicache.storage.envelope import (
    DIGEST_BYTES,
    FIXED_BYTES,
    Header,
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


def verify_object(store: Store, info: ObjectInfo) -> MissReason | None:
    """Read one object and check all of it, its name against its header included; None is good.

    ABSENT means that it went meanwhile. Memory: at most 32 MiB, or one unit, at a time. Raises StoreError.
    """
    try:
        if is_manifest(info.name):
            return _verify_manifest(store, info)
        header = _read_header(store, info.name)
        if isinstance(header, MissReason):
            return header
        if header.identity.object_name() != info.name:
            return MissReason.FOREIGN
        return _verify_payload(store, info.name, header)
    except ObjectMissing:
        return MissReason.ABSENT


def choose_expired(infos: Iterable[ObjectInfo], before_s: float) -> Iterator[ObjectInfo]:
    """Yield the chunks written before `before_s`, Unix seconds. Manifests stay."""
    return (info for info in infos if info.modified_s < before_s and not is_manifest(info.name))


def choose_oldest(infos: Iterable[ObjectInfo], capacity_bytes: int) -> Iterator[ObjectInfo]:
    """Yield the chunks written first, until what is left fits `capacity_bytes`. Manifests stay."""
    known = sorted(infos, key=lambda info: (info.modified_s, info.name))
    used_bytes = sum(info.size_bytes for info in known)
    for info in known:
        if used_bytes <= capacity_bytes:
            return
        if not is_manifest(info.name):
            used_bytes -= info.size_bytes
            yield info


def _verify_manifest(store: Store, info: ObjectInfo) -> MissReason | None:
    buffer = bytearray(info.size_bytes)
    store.read(info.name, [memoryview(buffer)])
    good = isinstance(parse_manifest(bytes(buffer), info.name.split("/", 1)[0]), Manifest)
    return None if good else MissReason.CORRUPT


def _read_header(store: Store, name: ObjectName) -> Header | MissReason:
    """Read a header of unknown length; the object's total is checked against what the header says."""
    fixed = memoryview(bytearray(FIXED_BYTES))
    total_bytes = store.read(name, [fixed])
    if total_bytes < FIXED_BYTES + DIGEST_BYTES:
        return MissReason.SHORT
    # Unchecked as yet, hence the limits: a flipped length must not ask for all of the memory.
    declared_bytes = declared_header_bytes(fixed)
    buffer = memoryview(bytearray(min(total_bytes, declared_bytes, _MAX_HEADER_BYTES)))
    store.read(name, [buffer])
    header = Header.parse(buffer)
    if isinstance(header, MissReason):
        return header
    expected_bytes = header_bytes(header.payload_bytes, header.unit_bytes) + header.payload_bytes
    if total_bytes != expected_bytes:
        return MissReason.SHORT if total_bytes < expected_bytes else MissReason.LONG
    return header


def _verify_payload(store: Store, name: ObjectName, header: Header) -> MissReason | None:
    step_units = max(1, _STEP_BYTES // header.unit_bytes)
    start = header_bytes(header.payload_bytes, header.unit_bytes)
    for first in range(0, header.payload_bytes // header.unit_bytes, step_units):
        skip_bytes = first * header.unit_bytes
        size = min(step_units * header.unit_bytes, header.payload_bytes - skip_bytes)
        piece = memoryview(bytearray(size))
        store.read(name, [piece], start + skip_bytes)
        reason = header.check_units(first, piece)
        if reason is not None:
            return reason
    return None
