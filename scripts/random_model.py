"""Small Llama models with seeded random weights, as Hugging Face directories without a tokenizer.

Two processes that load the same directory have the same weights and the same fingerprint, which vLLM's `dummy` weights
do not give. Prompts are token ids below VOCABULARY.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

VOCABULARY = 4096
MLP_FACTOR = 2
ATTENTION_SPREAD = 3.0
"""Standard deviation of attention scores: a query attends to a few keys, so that answers depend on the pages' bytes."""

LOGIT_SPREAD = 3.0
"""Standard deviation of logits over the vocabulary."""

MAX_TOKENS = 4096

Tensor = tuple[tuple[int, ...], float]
"""Shape of a tensor, and the standard deviation of what it makes of an input with deviation 1."""


def random_model(
    directory: Path, num_layers: int = 8, num_heads: int = 8, num_kv_heads: int = 8, head_size: int = 64, seed: int = 0
) -> Path:
    """Write a model in bfloat16 to `directory`, which is made; equal arguments give equal files.

    Args:
        num_heads: query heads, a multiple of `num_kv_heads`; `num_heads * head_size` is the hidden size.

    Raises:
        ValueError: query heads that KV heads cannot share.
        FileExistsError: the directory is there.
    """
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads={num_heads} is no multiple of num_kv_heads={num_kv_heads}: give all of them as many"
        )
    hidden = num_heads * head_size
    config = small_config(num_layers, num_heads, num_kv_heads, head_size)
    return write_model(directory, config, shapes(num_layers, hidden, num_kv_heads * head_size), seed)


def small_config(num_layers: int, num_heads: int, num_kv_heads: int, head_size: int) -> dict[str, object]:
    """The `config.json` of a Llama whose hidden size is `num_heads * head_size`."""
    hidden = num_heads * head_size
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": MLP_FACTOR * hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": MAX_TOKENS,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def write_model(directory: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor], seed: int) -> Path:
    """Write a model of seeded random weights in bfloat16 to `directory`, which is made; vectors are ones."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else (torch.randn(shape, generator=generator) * (spread / shape[1] ** 0.5)).to(torch.bfloat16)
        for name, (shape, spread) in tensors.items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def shapes(num_layers: int, hidden: int, kv_size: int) -> dict[str, Tensor]:
    """Shape of every tensor, and the standard deviation of what it makes of an input with deviation 1."""
    sharp = ATTENTION_SPREAD**0.5
    found: dict[str, Tensor] = {
        "model.embed_tokens.weight": ((VOCABULARY, hidden), hidden**0.5),
        "model.norm.weight": ((hidden,), 1.0),
        "lm_head.weight": ((VOCABULARY, hidden), LOGIT_SPREAD),
    }
    for layer in range(num_layers):
        found |= {
            f"model.layers.{layer}.{name}.weight": entry
            for name, entry in {
                "input_layernorm": ((hidden,), 1.0),
                "self_attn.q_proj": ((hidden, hidden), sharp),
                "self_attn.k_proj": ((kv_size, hidden), sharp),
                "self_attn.v_proj": ((kv_size, hidden), 1.0),
                "self_attn.o_proj": ((hidden, hidden), 1.0),
                "post_attention_layernorm": ((hidden,), 1.0),
                "mlp.gate_proj": ((MLP_FACTOR * hidden, hidden), 1.0),
                "mlp.up_proj": ((MLP_FACTOR * hidden, hidden), 1.0),
                "mlp.down_proj": ((hidden, MLP_FACTOR * hidden), 1.0),
            }.items()
        }
    return found
