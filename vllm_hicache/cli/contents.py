"""What lies in a store as far as `doctor` looks: for ten seconds, since a bucket may hold millions of objects.

Owner: `cli/`. Thread: the console's main thread. Reads only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_hicache.errors import StoreError
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.envelope import NAMESPACE_BYTES, namespace_part
from vllm_hicache.storage.manifest import Manifest, Unreadable, read_manifests

_LISTING_LIMIT_S = 10.0
_OF_DRAFT = "target"
"""Names, in hexadecimal, the namespace beside which a draft's lies (`DraftSpace.fields_for`)."""

_PART_LENGTH = len(namespace_part(bytes(NAMESPACE_BYTES)))


@dataclass(frozen=True, slots=True)
class Contents:
    """The objects that were looked at, all of them where `is_whole`, and the manifests of their namespaces."""

    num_objects: int
    used_bytes: int
    is_whole: bool
    manifests: Mapping[str, Manifest | Unreadable]


def look_into(store: Store) -> Contents | str:
    """List the store and read its manifests; a text says why that is not possible."""
    try:
        return _listed(store)
    except StoreError as error:  # miss: a store that cannot be listed serves engines all the same
        return f"the store cannot be listed: {error}"


def _listed(store: Store) -> Contents:
    num_objects = used_bytes = 0
    parts, is_whole = set[str](), True
    end_s = time.monotonic() + _LISTING_LIMIT_S
    for info in store.list(""):
        if time.monotonic() > end_s:
            is_whole = False
            break
        num_objects += 1
        used_bytes += info.size_bytes
        parts.add(info.name.split("/", 1)[0])
    found = {part: manifest_of(store, part) for part in sorted(parts)}
    manifests = {part: manifest for part, manifest in found.items() if manifest is not None}
    return Contents(num_objects, used_bytes, is_whole, manifests)


def manifest_of(store: Store, part: str) -> Manifest | Unreadable | None:
    """Return the manifest of one namespace; Unreadable also where the store cannot give it."""
    try:
        return read_manifests(store, [part]).get(part)
    except StoreError as error:  # miss: the rest of the listing is worth having
        return Unreadable(str(error))


def draft_of(fields: Mapping[str, str | int]) -> str | None:
    """What a draft's namespace is and beside which it lies, by the fields of its manifest; `None` for any other's."""
    target = fields.get(_OF_DRAFT)
    return None if target is None else f"draft ({fields.get('method')}) beside namespace {str(target)[:_PART_LENGTH]}"
