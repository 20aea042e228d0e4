"""The model of the simulated engine: what a token's KV must be, which part of it a rank holds, and vLLM's config of it.

What a token's KV must be is a function of all tokens up to it and of what else decides it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.utils import get_pp_indices
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from vllm_hicache.geometry import Cell
from vllm_hicache.grid import Grid
from vllm_hicache.names import PageKey
from vllm_hicache.plan import LoadOp
from vllm_hicache.storage.chunks import RoleChunks
from vllm_hicache.storage.envelope import ChunkId

LAYERS, HEADS, HEAD_SIZE, BLOCK = 3, 2, 8, 16
WORDS = 2 * HEAD_SIZE * 2 // 8
"""64-bit words of one token's K and V in bfloat16, per layer and head."""
VOCABULARY = 1000
POISON = 0xDEAD_BEEF_DEAD_BEEF

Words = npt.NDArray[np.uint64]


def mixed(values: Words) -> Words:
    """Splitmix64 of each value."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_PLACES = mixed(np.arange(LAYERS * HEADS * WORDS, dtype=np.uint64)).reshape(LAYERS, HEADS, WORDS)


class Cut(NamedTuple):
    """How the ranks of an engine share its model, of `num_heads` KV heads.

    Attributes:
        dcp_size: tensor ranks with the same heads over which the KV of each request is sharded, block by block.
    """

    tp_size: int = 1
    pp_size: int = 1
    dcp_size: int = 1
    num_heads: int = HEADS

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine."""
        return self.tp_size * self.pp_size


class Truth:
    """What the KV of a chain of tokens must be: words [tokens, layers, heads, WORDS].

    The chain grows; where its end turns out to be another, as after a wrong guess, it is computed anew from there.
    """

    def __init__(self, *identity: object, num_heads: int = HEADS) -> None:
        self._root = int.from_bytes(hashlib.sha256(repr(identity).encode()).digest()[:8], "little")
        self._tokens: list[int] = []
        self._hashes: list[int] = []
        self._places = _PLACES[:, :num_heads]
        self._words: Words = np.empty((0, LAYERS, num_heads, WORDS), np.uint64)

    def hashes(self, tokens: Sequence[int]) -> Words:
        """A word for each token, which stands for all tokens up to it."""
        if self._tokens[: len(tokens)] != list(tokens[: len(self._tokens)]):
            self._forget_from(
                next(n for n, pair in enumerate(zip(self._tokens, tokens, strict=False)) if len({*pair}) > 1)
            )
        for token in tokens[len(self._tokens) :]:
            state = self._hashes[-1] if self._hashes else self._root
            state = ((state ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x632BE5AB) % 2**64
            self._hashes.append(state ^ state >> 29)
            self._tokens.append(token)
        return np.array(self._hashes[: len(tokens)], np.uint64)

    def words(self, tokens: Sequence[int]) -> Words:
        """The words of `tokens`."""
        hashes, known = self.hashes(tokens), len(self._words)
        if len(tokens) > known:
            new = hashes[known:, None, None, None] ^ self._places
            self._words = np.concatenate([self._words, mixed(new)])
        return self._words[: len(tokens)]

    def _forget_from(self, number: int) -> None:
        del self._tokens[number:], self._hashes[number:]
        self._words = self._words[:number]


def folded(words: Words) -> int:
    """Every word of KV in one; the whole model's is that of all ranks' parts together."""
    return int(np.bitwise_xor.reduce(words, axis=None))


def next_token(fold: int) -> int:
    """The token that follows: a function of every word of KV that attention sees."""
    return fold % VOCABULARY


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank holds of the model, cut as vLLM does; with more tensor ranks than heads, heads have replicas.

    Attributes:
        replica: which of the ranks with the same heads, and of the same blocks, this is.
        owner: which blocks of each request it has on the device: every `num_owners`-th one from this on.
    """

    layers: slice
    heads: slice
    replica: int = 0
    owner: int = 0
    num_owners: int = 1

    @classmethod
    def of(cls, rank: int, *cut: int) -> Share:
        """Rank `rank` of an engine cut like this."""
        tp_size, pp_size, dcp_size, num_heads = Cut(*cut)
        layers = get_pp_indices(LAYERS, rank // tp_size, pp_size)
        each, copies = max(1, num_heads // tp_size), max(1, tp_size // num_heads)
        tp_rank = rank % tp_size
        head = tp_rank // copies * each
        replica = tp_rank % copies // dcp_size
        return cls(slice(*layers), slice(head, head + each), replica, tp_rank % dcp_size, dcp_size)

    def owned(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of a request's positions whose KV it has on the device."""
        return positions[positions // BLOCK % self.num_owners == self.owner]

    @property
    def num_layers(self) -> int:
        """Layers it holds."""
        return self.layers.stop - self.layers.start

    @property
    def num_heads(self) -> int:
        """Heads it holds of each."""
        return self.heads.stop - self.heads.start

    def page_bytes(self, page_tokens: int) -> int:
        """Bytes of its part of a page."""
        return page_tokens * self.num_layers * self.num_heads * WORDS * 8

    @property
    def layer_names(self) -> list[str]:
        """Its layers, by the numbers of the whole model."""
        return [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)[self.layers]]

    def cache_config(self, num_blocks: int) -> KVCacheConfig:
        """The KV cache as this rank's worker knows it."""
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=self.num_heads, head_size=HEAD_SIZE, dtype=torch.bfloat16
        )
        return KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(self.layer_names, spec)])


def page_content(words: Words, grid: Grid, share: Share) -> bytes:
    """A page as it lies in a rank's slot: what it holds of each object, [head][layer][block][slab]."""
    num_heads = words.shape[2]
    whole = words.reshape(-1, BLOCK, LAYERS, num_heads, WORDS).transpose(3, 2, 0, 4, 1)
    objects = product(grid.layer_bounds(LAYERS), grid.head_bounds(num_heads))
    held = [(_common(heads, share.heads), _common(layers, share.layers)) for layers, heads in objects]
    return b"".join(whole[heads, layers].tobytes() for heads, layers in held)


def stored_page(store: RoleChunks, key: PageKey, cells: Sequence[Cell]) -> bytes | None:
    """A page's objects as a store has them, one behind the other; `None` where one is missing or bad."""
    payload, start = bytearray(sum(cell.num_bytes for cell in cells)), 0
    for cell in cells:
        part = memoryview(payload)[start : start + cell.num_bytes]
        if store.load(ChunkId.of(key, cell), part, cell.unit_bytes) is not None:
            return None
        start += cell.num_bytes
    return bytes(payload)


def _common(bounds: tuple[int, int], held: slice) -> slice:
    """What of a half-open range a rank holds; nothing where that is empty."""
    return slice(max(bounds[0], held.start), max(held.start, min(bounds[1], held.stop)))


@dataclass
class Job:
    """One request and what has come of it; `told` are the parameters of the answer, for another engine."""

    request: Request
    truth: Truth
    weights: int
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_local: int = 0
    num_external: int = 0
    told: Mapping[str, object] | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return [*self.request.prompt_token_ids, *self.output]

    def check_output(self) -> None:
        """What it has said so far is what an engine without any cache says."""
        num_prompt = len(self.request.prompt_token_ids)
        for index, token in enumerate(self.output):
            assert token == next_token(folded(self.truth.words(self.tokens[: num_prompt + index]))), (
                self.request.request_id,
                index,
            )


class _Layer:
    """Stands for an attention layer: all that is asked of it is its backend's name."""

    @staticmethod
    def get_attn_backend() -> type[_Layer]:
        return _Layer

    @staticmethod
    def get_name() -> str:
        return "SIMULATED"


def engine_config(
    model: Path,
    cut: Cut,
    step_tokens: int,
    max_requests: int,
    policy: str,
    settings: Mapping[str, object] | None,
    role: str = "kv_both",
) -> VllmConfig:
    """vLLM's configuration of the scheduler's process; without `settings` there is no connector."""
    model = model / f"{cut.num_heads}-heads"
    write_model(model, cut.num_heads)
    transfer = KVTransferConfig(
        kv_connector="HiCacheConnector",
        kv_connector_module_path="vllm_hicache.connectors",
        kv_role=role,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=dict(settings or {}),
    )
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), skip_tokenizer_init=True, dtype="bfloat16"),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        parallel_config=ParallelConfig(
            tensor_parallel_size=cut.tp_size,
            pipeline_parallel_size=cut.pp_size,
            decode_context_parallel_size=cut.dcp_size,
            cp_kv_cache_interleave_size=BLOCK,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_requests,
            max_num_batched_tokens=step_tokens,
            max_model_len=4096,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
            policy=policy,
        ),
        kv_transfer_config=transfer if settings is not None else None,
        load_config=LoadConfig(load_format="dummy"),
        device_config=DeviceConfig("cpu"),
    )
    layers = {name: _Layer() for name in Share.of(0, 1, 1).layer_names}
    config.compilation_config.static_forward_context.update(layers)
    return config


def rank_config(config: VllmConfig, rank: int, settings: Mapping[str, object]) -> VllmConfig:
    """The same as one rank's process has it; `settings` are those of the connector that differ there."""
    own = copy(config)
    own.parallel_config = copy(config.parallel_config)
    own.parallel_config.rank = rank
    own.kv_transfer_config = copy(config.kv_transfer_config)
    own.kv_transfer_config.kv_connector_extra_config = {
        **config.kv_transfer_config.kv_connector_extra_config,
        **settings,
    }
    return own


def free_blocks(pool: BlockPool) -> dict[int, object]:
    """What each free block is known as; `None` where vLLM will not serve it."""
    return {block.block_id: block.block_hash for block in pool.blocks if not block.ref_cnt and not block.is_null}


def to_poison(pool: BlockPool, free: Mapping[int, object]) -> list[int]:
    """Blocks that were free and unknown, and those that were free and are now used as something else."""
    blocks = pool.blocks
    return [
        index
        for index, known in free.items()
        if known is None or (blocks[index].ref_cnt and blocks[index].block_hash != known)
    ]


def check_targets(pool: BlockPool, loads: Sequence[LoadOp]) -> None:
    """A load writes only to blocks that its request alone has, and that nobody is served from."""
    for load in loads:
        for block in (pool.blocks[index] for page in load.pages for index in page.blocks):
            assert (block.ref_cnt, block.block_hash) == (1, None), f"a load for {load.request_id} writes {block}"


def write_model(folder: Path, num_heads: int, head_size: int = HEAD_SIZE, num_layers: int = LAYERS) -> None:
    """The config of a Llama with these KV heads and layers."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4 * HEAD_SIZE,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": num_heads,
        "head_dim": head_size,
        "num_hidden_layers": num_layers,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(shape))
