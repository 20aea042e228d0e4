"""The namespace: everything that must be equal for two engines to share bytes.

Pure record. Its digest is the first parent of every page key and stands in the envelope of every object, so
that engines which differ in any field can neither find nor accept each other's pages. `doctor` prints every
field and `difference` tells two operators why their engines do not share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from vllm_hicache.keys import digest

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Namespace:
    """Fields that decide the meaning of a page's bytes. Parallelism is not among them.

    Attributes:
        model: fingerprint of config and weights, or the operator's pinned `model_id`.
        generation: the operator's generation; a reset at run time appends a nonce nobody shares.
        kv_dtype: element type of the device cache, e.g. `torch.bfloat16` or `fp8_e4m3`.
        quantization: weight quantisation method, `none` without one.
        encoding: how a slab's interior is laid out, e.g. `cpu-vec-b128` (K transposed, by instruction set).
        layers: number of layers of the whole model.
        kv_heads: number of KV heads of the whole model.
        slab_bytes: bytes of one (block, layer, kv head), which hold `block_tokens` tokens.
        block_tokens: tokens a slab holds.
        page_tokens: tokens of a page.
        grid: layer groups x head groups of the objects, e.g. `1x1`.
        protection: how objects are sealed and encrypted, with the keys' ids (`Secrets.protection`).
        format_version: version of keys and envelope.
    """

    model: str
    generation: str
    kv_dtype: str
    quantization: str
    encoding: str
    layers: int
    kv_heads: int
    slab_bytes: int
    block_tokens: int
    page_tokens: int
    grid: str
    protection: str = "none"
    format_version: int = FORMAT_VERSION

    def fields(self) -> dict[str, str | int]:
        """Every field by name, in the order of declaration."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def digest(self) -> bytes:
        """32 bytes; differs whenever any field does."""
        return _digest_of(b"vllm-hicache namespace", self.fields())

    def bumped(self, nonce: str) -> Namespace:
        """The same namespace in a generation of its own, after weights changed under a running engine."""
        base = self.generation.split("+", 1)[0]
        return replace(self, generation=f"{base}+{nonce}")


@dataclass(frozen=True, slots=True)
class DraftSpace:
    """What decides the meaning of a draft's bytes beside all that decides the target's.

    Attributes:
        method: how it drafts, e.g. `draft_model`, `eagle3`.
        model: fingerprint of its config and weights.
        kv_dtype: element type of its layers' cache.
        encoding: how the interior of its slabs is laid out.
        looks_ahead: whether a page's last place holds what depends on the token that follows.
    """

    method: str
    model: str
    kv_dtype: str
    quantization: str
    encoding: str
    layers: int
    kv_heads: int
    slab_bytes: int
    grid: str
    looks_ahead: bool

    def fields_for(self, target: bytes) -> dict[str, str | int]:
        """Every field by name, with the target's namespace (32-byte digest), on whose pages it lies."""
        own: dict[str, str | int] = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"target": target.hex(), **own}

    def digest_for(self, target: bytes) -> bytes:
        """32 bytes; differs whenever any field or the target's namespace does."""
        return _digest_of(b"vllm-hicache draft", self.fields_for(target))


@dataclass(frozen=True, slots=True)
class Spaces:
    """Where an engine's pages lie in the store: 32-byte digests of its namespaces, by role.

    Attributes:
        draft: `None` for an engine whose pages have no draft layers.
    """

    target: bytes
    draft: bytes | None = None


def _digest_of(what: bytes, made_of: Mapping[str, str | int]) -> bytes:
    return digest(what, *(f"{name}={value!r}".encode() for name, value in made_of.items()))


def difference(one: dict[str, str | int], other: dict[str, str | int]) -> dict[str, tuple[str, str]]:
    """Fields in which two namespaces differ, with both values as text."""
    names = sorted(set(one) | set(other))
    pairs = {name: (str(one.get(name, "absent")), str(other.get(name, "absent"))) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
