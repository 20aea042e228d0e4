"""Small draft models with seeded random weights, in the shapes that real ones have, beside `random_model`'s targets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from random_model import VOCABULARY, small_config, write_model

Shapes = Mapping[str, tuple[int, ...]]
_SPREAD = 3.0


def eagle_draft(directory: Path, target: Path, num_kv_heads: int = 2, head_size: int = 64, seed: int = 1) -> Path:
    """An EAGLE head of one layer for a target, with other heads than it has: it shares hidden size and vocabulary."""
    config, hidden = _beside(target, 1, num_kv_heads, head_size)
    shapes = {
        "embed_tokens.weight": (VOCABULARY, hidden),
        "fc.weight": (hidden, 2 * hidden),
        **_layer("layers.0.", hidden, num_kv_heads * head_size, has_norm=False),
    }
    return _write(directory, config, shapes, seed)


def eagle3_draft(directory: Path, target: Path, num_kv_heads: int = 1, head_size: int = 32, seed: int = 3) -> Path:
    """An EAGLE3 head of two layers, which sees three of a target's layers: the target has eight or more."""
    config, hidden = _beside(target, 2, num_kv_heads, head_size)
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCABULARY, hidden),
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (VOCABULARY, hidden),
        **_layer("layers.0.", hidden, num_kv_heads * head_size, attended=2 * hidden),
        **_layer("layers.1.", hidden, num_kv_heads * head_size),
    }
    shapes |= {f"layers.{layer}.hidden_norm.weight": (hidden,) for layer in range(2)}
    return _write(directory, config, shapes, seed)


def _beside(target: Path, num_layers: int, num_kv_heads: int, head_size: int) -> tuple[dict[str, object], int]:
    """The config of a draft that shares a target's hidden size and vocabulary, and the former."""
    config = json.loads((target / "config.json").read_text())
    hidden: int = config["hidden_size"]
    own = {
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden // head_size,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_size,
    }
    return config | own, hidden


def mtp_model(directory: Path, num_layers: int = 3, num_kv_heads: int = 2, seed: int = 2) -> Path:
    """A target that brings its own layer for predicting one more token, in the shape of MiMo's."""
    num_heads, head_size = 4, 64
    hidden, kv_size = num_heads * head_size, num_kv_heads * head_size
    config = small_config(num_layers, num_heads, num_kv_heads, head_size)
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (VOCABULARY, hidden),
    }
    for layer in range(num_layers):
        shapes |= _layer(f"model.layers.{layer}.", hidden, kv_size, has_bias=True)
    extra = "model.mtp_layers.0."
    shapes |= _layer(extra, hidden, kv_size, has_bias=True)
    shapes |= {f"{extra}{name}_layernorm.weight": (hidden,) for name in ("token", "hidden", "final")}
    shapes[f"{extra}input_proj.weight"] = (hidden, 2 * hidden)
    return _write(directory, config, shapes, seed)


def _layer(
    prefix: str, hidden: int, kv_size: int, attended: int | None = None, has_norm: bool = True, has_bias: bool = False
) -> Shapes:
    """A decoder layer whose attention takes `attended` numbers, by default the hidden size."""
    attended = attended or hidden
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (hidden, attended),
        "self_attn.k_proj.weight": (kv_size, attended),
        "self_attn.v_proj.weight": (kv_size, attended),
        "self_attn.o_proj.weight": (hidden, hidden),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (2 * hidden, hidden),
        "mlp.up_proj.weight": (2 * hidden, hidden),
        "mlp.down_proj.weight": (hidden, 2 * hidden),
    }
    if has_norm:
        shapes["input_layernorm.weight"] = (hidden,)
    if has_bias:
        shapes |= {
            f"self_attn.{name}_proj.bias": (size,) for name, size in zip("qkv", (hidden, kv_size, kv_size), strict=True)
        }
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def _write(directory: Path, config: Mapping[str, object], shapes: Shapes, seed: int) -> Path:
    return write_model(directory, config, {name: (shape, _SPREAD) for name, shape in shapes.items()}, seed)
