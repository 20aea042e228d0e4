"""`doctor`'s section on sharing: this engine's namespace against those that lie in the store, field by field.

Owner: `cli/`. Thread: the console's main thread. Reads only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

from vllm_hicache.cli.asked import Asked
from vllm_hicache.cli.contents import Contents, draft_of
from vllm_hicache.cli.probe import ModelFacts, known_fields
from vllm_hicache.cli.report import BY_ENGINE, Line, ok, warn
from vllm_hicache.namespace import Namespace, difference
from vllm_hicache.storage.manifest import Manifest, Unreadable

_SHARED_SETTINGS = frozenset({"generation", "page_tokens", "grid"})
_WAYS_OUT = {
    "kv_dtype": "start both with the same --dtype and --kv-cache-dtype",
    "quantization": "start both with the same --quantization",
    "encoding": "run both on the same attention backend, instruction set and --block-size",
    "block_tokens": "start both with the same --block-size",
    "protection": "give both the same VLLM_HICACHE_SEAL_KEY and VLLM_HICACHE_ENCRYPTION_KEY",
    "format_version": "install the same vllm-hicache release for both",
}

Fields = Mapping[str, str | int]


def namespace_lines(asked: Asked, facts: ModelFacts | None, contents: Contents | str | None) -> Iterator[Line]:
    """What decides sharing, and with which namespaces of the store it can be."""
    if asked.config is None:
        yield warn("skipped", "not looked at: the settings are refused")
        return
    known = known_fields(asked.config, facts, asked.secrets)
    for field in fields(Namespace):
        value = known.get(field.name)
        lacking = field.name == "model" and facts is None
        unknown = "give --model DIR, or pin model_id" if lacking else BY_ENGINE
        yield ok(field.name, str(unknown if value is None else value), value)
    if not isinstance(contents, Contents):
        yield from [] if contents is None else [warn("in_store", contents)]
        return
    found = {part: one.fields for part, one in contents.manifests.items() if isinstance(one, Manifest)}
    drafts = {part: told for part, there in found.items() if (told := draft_of(there)) is not None}
    for part, manifest in contents.manifests.items():
        if part not in drafts:
            yield _compared(part, manifest, known, facts)
    yield from _siblings({part: there for part, there in found.items() if part not in drafts})
    for part, told in drafts.items():
        yield ok(part, f"{told}; shared with the same draft alone", False)


def _compared(part: str, found: Manifest | Unreadable, known: Fields, facts: ModelFacts | None) -> Line:
    if isinstance(found, Unreadable):
        way_out = f"written under other keys? If not, `vllm-hicache store gc URL --namespace {part}`"
        return warn(part, f"unreadable manifest ({found.why}): {way_out}")
    theirs = {name: value for name, value in found.fields.items() if name in known}
    differing = difference(dict(known), theirs)
    model = differing.pop("model", None)
    told = f"differs in {_told(differing)}" if differing else "differs in no field known without an engine"
    if "model" not in known:
        return ok(part, f"model not compared; {told}", False)
    if model is not None:
        dtype = facts and facts.dtype_of(model[1])
        if dtype is None:
            return ok(part, f"another model, not shared ({model[1][:16]}); {told}", False)
        return warn(part, f"same weights run in {dtype}, not shared: start both with the same --dtype", False)
    if differing:
        return warn(part, f"same model; {told}: {_ways_out(differing)}", False)
    left = (f"{name}={value}" for name, value in found.fields.items() if name not in known)
    return ok(part, f"same model; {told}; shared if the engine has {', '.join(left)}", True)


def _siblings(found: Mapping[str, Fields]) -> Iterator[Line]:
    """Why namespaces of one model that are in the store do not share with each other."""
    first: dict[str | int, str] = {}
    for part, there in found.items():
        one = first.setdefault(there.get("model", part), part)
        differing = difference(dict(found[one]), dict(there)) if one != part else {}
        if differing:
            text = f"same model as {one}; differs in {_told(differing)}: {_ways_out(differing)}"
            yield (ok if differing.keys() == {"generation"} else warn)(part, text, False)


def _told(differing: Mapping[str, tuple[str, str]]) -> str:
    return ", ".join(f"{name}: {one} vs {other}" for name, (one, other) in differing.items())


def _ways_out(differing: Mapping[str, tuple[str, str]]) -> str:
    alike = "set {} alike in both engines' kv_connector_extra_config"
    ways = (alike.format(name) if name in _SHARED_SETTINGS else _WAYS_OUT.get(name) for name in differing)
    return "; ".join(dict.fromkeys(way for way in ways if way)) or "another config.json, not to be mended"
