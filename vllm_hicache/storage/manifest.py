"""One small readable object a namespace, which says what the namespace's digest was made of.

It has no envelope: people and other tools read it. Nothing is ever loaded on its word.

Owner: `storage/`. Thread: any.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vllm_hicache.errors import ConfigError, ObjectMissing, StoreCorrupt
from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import MANIFEST_PART, Store
from vllm_hicache.storage.envelope import NAMESPACE_BYTES, namespace_part

MAX_MANIFEST_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Manifest:
    """A namespace's full digest and the fields that it was made of."""

    digest: bytes
    fields: Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A manifest that is there but says nothing, and why."""

    why: str


def manifest_name(part: str) -> ObjectName:
    """Return the manifest's name for a namespace's part (`namespace_part`)."""
    return ObjectName(f"{part}/{MANIFEST_PART}")


def write_manifest(store: Store, namespace: bytes, fields: Mapping[str, str | int]) -> bool:
    """Write the manifest of `namespace` (32 bytes) as canonical JSON; False when it was there already.

    Raises ConfigError above 64 KiB, StoreError from the store.
    """
    content = {"digest": namespace.hex(), "fields": dict(fields)}
    data = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(data) > MAX_MANIFEST_BYTES:
        raise ConfigError(
            f"namespace manifest of {len(fields)} fields has {len(data)} bytes, the limit is "
            f"{MAX_MANIFEST_BYTES}: shorten its longest fields"
        )
    return store.write(manifest_name(namespace_part(namespace)), [memoryview(data)])


def read_manifests(store: Store, parts: Iterable[str] | None = None) -> dict[str, Manifest | Unreadable]:
    """Return the manifests of the namespaces `parts`, by part; by default of all.

    A namespace without a manifest is left out. Raises StoreError when the store itself fails.
    """
    if parts is None:
        ending = f"/{MANIFEST_PART}"
        names = (info.name for info in store.list(""))
        parts = [name.removesuffix(ending) for name in names if name.endswith(ending) and name.count("/") == 1]
    found = {part: _read(store, part) for part in parts}
    return {part: manifest for part, manifest in found.items() if manifest is not None}


def parse_manifest(data: bytes, part: str) -> Manifest | Unreadable:
    """Return the manifest that `data` is, or why it is none of namespace `part`."""
    try:
        content: object = json.loads(data)
    # ValueError covers bad UTF-8 and integers of thousands of digits; deep nesting recurses.
    except (ValueError, RecursionError):
        return Unreadable("not JSON")
    if not isinstance(content, dict) or content.keys() != {"digest", "fields"}:
        return Unreadable("not an object of digest and fields")
    digest, fields = _digest(content["digest"]), content["fields"]
    if digest is None or namespace_part(digest) != part:
        return Unreadable("digest of another namespace")
    if not isinstance(fields, dict) or not all(isinstance(value, str | int) for value in fields.values()):
        return Unreadable("fields are not all strings, integers and booleans")
    return Manifest(digest, fields)


def _read(store: Store, part: str) -> Manifest | Unreadable | None:
    buffer = bytearray(MAX_MANIFEST_BYTES)
    try:
        total_bytes = store.read(manifest_name(part), [memoryview(buffer)])
    except ObjectMissing:
        return None
    except StoreCorrupt:
        return Unreadable("not encrypted with this key")
    if total_bytes > MAX_MANIFEST_BYTES:
        return Unreadable(f"{total_bytes} bytes, the limit is {MAX_MANIFEST_BYTES}")
    return parse_manifest(bytes(buffer[:total_bytes]), part)


def _digest(value: object) -> bytes | None:
    try:
        digest = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        return None
    return digest if len(digest) == NAMESPACE_BYTES else None
