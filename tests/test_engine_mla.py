"""A real engine with latent attention (MLA) on two tensor ranks, which both hold all of it: each page is stored once.

A small model of DeepSeek-V2's shape. Its weights are vLLM's own dummies, so that what it says proves nothing: the
bytes of the device are compared. On the CPU a block of such a model has 16 tokens, so that a page is four blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_kit import Engine, engine, object_names, prompt_of
from matrix_cut import Cut

from vllm_hicache.storage.file import FileStore
from vllm_hicache.storage.registry import open_store

pytestmark = pytest.mark.engine

PAGE, BLOCK = 64, 16
NUM_PAGES = 9
CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 4,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FileStore]:
    opened = open_store(f"file://{tmp_path_factory.mktemp('store')}?capacity=1GiB")
    assert isinstance(opened, FileStore)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def latent(store: FileStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with engine(store.describe(), folder, Cut(tensor=2), load_format="dummy", model_id="latent") as running:
        yield running


def test_a_latent_is_restored_on_both_ranks_and_stored_once(latent: Engine, store: FileStore, tmp_path: Path) -> None:
    prompt = prompt_of(NUM_PAGES * PAGE + 5, 1, 4096)
    latent.ask(prompt)
    before = latent.pages(NUM_PAGES * PAGE // BLOCK, tmp_path)
    latent.settle()
    assert len(object_names(store)) == NUM_PAGES
    assert latent.metric("bytes", direction="flush") == before.slabs.nbytes
    latent.poison_device()
    assert latent.ask(prompt).cached == NUM_PAGES * PAGE
    after = latent.pages(NUM_PAGES * PAGE // BLOCK, tmp_path)
    assert (before.num_torn, after.num_torn) == (0, 0)
    assert np.array_equal(before.slabs, after.slabs)
    assert len(np.unique(after.slabs[:, 0, 0], axis=0)) == NUM_PAGES * PAGE // BLOCK
