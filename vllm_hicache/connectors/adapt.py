"""Translates vLLM's words into this package's: what an engine is, what a request is.

The only place that reads vLLM's configuration and request objects. No side effects at import.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vllm_hicache.config import Config
from vllm_hicache.connectors import compat as compat
from vllm_hicache.errors import ConfigError, UnsupportedEngineError
from vllm_hicache.fingerprint import model_identity as fingerprint_identity
from vllm_hicache.fingerprint import weights_fingerprint
from vllm_hicache.handoff.roles import check_role
from vllm_hicache.inventory import Agreed
from vllm_hicache.keys import Adapter, ExtraKey
from vllm_hicache.names import BlockId, Role
from vllm_hicache.namespace import DraftSpace, Namespace
from vllm_hicache.ownership import check_interleave
from vllm_hicache.place import Place
from vllm_hicache.secrets import Secrets
from vllm_hicache.transfer.device import role_of_layer

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
    from vllm.v1.request import Request

_KINDS = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
_DRAFT_METHODS = frozenset({"draft_model", "eagle", "eagle3", "mtp"})
_STATELESS_METHODS = frozenset({"ngram", "ngram_gpu", "suffix"})
_PLAIN_DTYPES = frozenset({"auto", "bfloat16", "float16", "half", "float", "float32"})


def use_engine_log() -> None:
    """Send this package's log lines where vLLM's own go, at vLLM's level. Calling it again does nothing."""
    ours, theirs = logging.getLogger("vllm_hicache"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def parse_config(vllm_config: VllmConfig) -> Config:
    """The connector's settings.

    Raises:
        ConfigError: unknown, malformed or contradictory settings.
    """
    return Config.parse(vllm_config.kv_transfer_config.kv_connector_extra_config)


def check_engine(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse engines whose KV this package cannot yet keep right.

    Raises:
        UnsupportedEngineError: which property, its value and the way out.
    """
    check_role(vllm_config.kv_transfer_config.kv_role, parse_config(vllm_config))
    parallel = vllm_config.parallel_config
    if parallel.prefill_context_parallel_size != 1:
        raise UnsupportedEngineError(
            f"prefill_context_parallel_size={parallel.prefill_context_parallel_size} is not supported, because the "
            "runner that this package is tested on has none: set it to 1, and shard KV by decode_context_parallel_size"
        )
    _check_speculation(vllm_config)
    _check_groups(kv_cache_config)
    if parallel.decode_context_parallel_size != 1:
        # vLLM takes the older name too, but applies it in workers only.
        older, newer = parallel.dcp_kv_cache_interleave_size, parallel.cp_kv_cache_interleave_size
        check_interleave(older if older > 1 else newer, block_tokens(kv_cache_config))


def _check_speculation(vllm_config: VllmConfig) -> None:
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in _STATELESS_METHODS:
        return
    if speculative.method not in _DRAFT_METHODS:
        raise UnsupportedEngineError(
            f"speculative method {speculative.method!r} is not supported: its state would not be restored, use one of "
            f"{', '.join(sorted(_DRAFT_METHODS | _STATELESS_METHODS))} or run without the connector"
        )
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1 and vllm_config.device_config.device_type == "cpu":
        raise UnsupportedEngineError(
            f"pipeline_parallel_size={stages} with speculative decoding crashes in vLLM on the CPU: set it to 1, or "
            "remove speculative_config"
        )


def _check_groups(kv_cache_config: KVCacheConfig) -> None:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(
            f"{type(group.kv_cache_spec).__name__} ({len(group.layer_names)} layers, e.g. {group.layer_names[0]})"
            for group in groups
        )
        raise UnsupportedEngineError(
            f"this model has {len(groups)} KV cache groups: {kinds or 'none'}; models with one group are supported "
            "so far, run this one without the connector"
        )
    specs = _layer_specs(groups[0]).values()
    kind = next((kind for kind in (type(spec).__name__ for spec in specs) if kind not in _KINDS), None)
    if kind is not None:
        raise UnsupportedEngineError(
            f"this model's KV cache is of kind {kind}; full attention and MLA are supported so far, run without the "
            "connector"
        )


def _layer_specs(group: KVCacheGroupSpec) -> dict[str, KVCacheSpec]:
    """The KV of every layer of a group: a draft's may have another shape than the target's."""
    own = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    return {name: own.get(name, group.kv_cache_spec) for name in group.layer_names}


def place(vllm_config: VllmConfig, rank: int | None = None) -> Place:
    """This process's rank, or the given one, and how the engine cuts its model."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    draft = _draft_model(vllm_config)
    return Place(
        rank=parallel.rank if rank is None else rank,
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        num_heads=_num_heads(model),
        num_layers=model.get_total_num_hidden_layers(),
        num_neighbours=parallel.local_world_size,
        dcp_size=parallel.decode_context_parallel_size,
        draft_heads=_num_heads(draft) if draft is not None else 0,
        draft_tp_size=(
            vllm_config.speculative_config.draft_parallel_config.tensor_parallel_size if draft is not None else 1
        ),
    )


def _num_heads(model: ModelConfig) -> int:
    """KV heads of a whole model."""
    return 1 if model.use_mla else int(model.get_total_num_kv_heads())


def _draft_model(vllm_config: VllmConfig) -> ModelConfig | None:
    """The draft that keeps KV of its own, where there is one."""
    speculative = vllm_config.speculative_config
    return speculative.draft_model_config if speculative and speculative.method in _DRAFT_METHODS else None


def block_tokens(kv_cache_config: KVCacheConfig) -> int:
    """Tokens of a device block on one rank."""
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def slab_encodings(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[Role, str]:
    """How a slab's interior is laid out by role, as texts that differ wherever bytes would.

    On the CPU the kernel packs keys by instruction set and block; elsewhere the attention backend's name decides.
    Workers alone know.
    """
    first = _first_layers(vllm_config, kv_cache_config)
    return {role: _slab_encoding(vllm_config, name, spec) for role, (name, spec) in first.items()}


def _first_layers(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[Role, tuple[str, KVCacheSpec]]:
    """Name and KV of one layer of each role that this process knows of."""
    num_target_layers = place(vllm_config).num_target_layers
    specs = _layer_specs(kv_cache_config.kv_cache_groups[0])
    return {role_of_layer(name, num_target_layers): (name, spec) for name, spec in reversed(specs.items())}


def _slab_encoding(vllm_config: VllmConfig, name: str, spec: KVCacheSpec) -> str:
    layer = vllm_config.compilation_config.static_forward_context[name]
    backend = layer.get_attn_backend().get_name().lower()
    if backend.startswith("cpu"):
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        isa = _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype)
        return f"{backend}-{isa}-b{spec.block_size}"
    return f"{backend}-b{spec.block_size}"


def namespace(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: Config, agreed: Agreed) -> Namespace:
    """The namespace of this engine, from its configuration and what all ranks have in common."""
    _, spec = _first_layers(vllm_config, kv_cache_config)[Role.TARGET]
    model = vllm_config.model_config
    cache_dtype = vllm_config.cache_config.cache_dtype
    layout = agreed.layout
    target = layout.roles[0]
    return Namespace(
        model=model_identity(vllm_config, config),
        generation=config.generation,
        kv_dtype=str(spec.dtype) if cache_dtype in _PLAIN_DTYPES else cache_dtype,
        quantization=str(model.quantization or "none"),
        encoding=agreed.encodings[Role.TARGET],
        layers=target.num_layers,
        kv_heads=target.num_heads,
        slab_bytes=target.slab_bytes,
        block_tokens=layout.block_tokens,
        page_tokens=layout.page_tokens,
        grid=str(layout.grid),
        protection=Secrets.from_environment(os.environ).protection,
    )


def model_identity(vllm_config: VllmConfig, config: Config) -> str:
    """What stands for the weights in the namespace.

    The operator's `model_id` where given; else a fingerprint of config and weight files together with what
    overrides them. Random (`dummy`) weights get a nonce: no two engines share them.
    """
    if config.model_id is not None:
        return f"id:{config.model_id}"
    model = vllm_config.model_config
    overrides = json.dumps(model.hf_overrides, sort_keys=True, default=str) if model.hf_overrides else ""
    return _weights_identity(model, vllm_config.load_config, overrides)


def _weights_identity(model: ModelConfig, load: LoadConfig, overrides: str = "") -> str:
    if load.load_format == "dummy":
        return f"dummy:{secrets.token_hex(16)}"
    fingerprint = weights_fingerprint(_local_files(model.model, model.revision))
    return fingerprint_identity(fingerprint, str(model.dtype), overrides)


def draft_space(vllm_config: VllmConfig, agreed: Agreed) -> DraftSpace | None:
    """What the draft's part of a page is; `None` where pages have none."""
    model, layout = _draft_model(vllm_config), agreed.layout
    shape = next((shape for shape in layout.roles if shape.role is Role.DRAFT), None)
    if model is None or shape is None:
        return None
    speculative = vllm_config.speculative_config
    return DraftSpace(
        method=speculative.method,
        # What overrides a draft's config vLLM derives from the target's overrides, which the target's namespace has.
        model=_weights_identity(model, speculative.draft_load_config or vllm_config.load_config),
        kv_dtype=str(speculative.kv_cache_dtype or vllm_config.cache_config.cache_dtype),
        quantization=str(model.quantization or "none"),
        encoding=agreed.encodings[Role.DRAFT],
        layers=shape.num_layers,
        kv_heads=shape.num_heads,
        slab_bytes=shape.slab_bytes,
        grid=str(layout.grid_of(shape)),
        looks_ahead=speculative.use_eagle(),
    )


def draft_limit(vllm_config: VllmConfig) -> int | None:
    """Tokens of a step's longest request up to which vLLM runs the draft pass of that step; `None` without a draft."""
    model = _draft_model(vllm_config)
    if model is None:
        return None
    longest: int = model.max_model_len or vllm_config.model_config.max_model_len
    return longest - int(vllm_config.speculative_config.num_speculative_tokens)


def _local_files(name: str, revision: str | None) -> Path:
    if os.path.exists(name):
        return Path(name)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception as error:  # a stop: without the files the weights cannot be told apart
        raise ConfigError(
            f"the weight files of {name!r} are not on this machine ({type(error).__name__}), so their fingerprint "
            "cannot be taken: give a local directory (or, for a model, pin 'model_id' in kv_connector_extra_config)"
        ) from error


class AdapterVersions:
    """Fingerprints of LoRA adapters, each taken when the engine first uses that adapter.

    The engine loads an adapter's files once for each adapter id. Files that change under an id it has loaded leave
    open which weights it computes with, until it is told to load them again (`load_inplace`).
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[list[tuple[str, int, int]], str]] = {}

    def adapter(self, request: LoRARequest | None) -> Adapter | None:
        """The adapter of a request as keys see it.

        Raises:
            ConfigError: its files cannot be found or read, or have changed since the engine loaded them.
        """
        if request is None:
            return None
        files = _local_files(os.path.expanduser(request.lora_path), None)
        signature = list(_file_signatures(files))
        place = (request.lora_int_id, request.lora_path)
        known = self._known.get(place)
        if known is None or (request.load_inplace and known[0] != signature):
            known = self._known[place] = (signature, weights_fingerprint(files))
        if known[0] != signature:
            raise ConfigError(
                f"the files of LoRA adapter {request.lora_name!r} (id {request.lora_int_id}) changed after the engine "
                "loaded them: load the adapter again to have its requests cached"
            )
        return Adapter(request.lora_name, request.lora_path, known[1])


def _file_signatures(path: Path) -> Iterator[tuple[str, int, int]]:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    for file in files:
        if file.is_file():
            stat = file.stat()
            yield str(file), stat.st_size, stat.st_mtime_ns


def extra_keys(request: Request, page_tokens: int) -> Iterator[ExtraKey]:
    """What besides token ids decides a request's KV: multimodal items and prompt embeddings."""
    for feature in request.mm_features:
        position = feature.mm_position
        yield ExtraKey(
            position.offset, position.offset + position.length, feature.modality, feature.identifier.encode()
        )
    if request.prompt_embeds is not None:
        for start in range(0, len(request.prompt_embeds), page_tokens):
            piece = request.prompt_embeds[start : start + page_tokens].contiguous()
            content = hashlib.sha256(piece.view(-1).view(torch.uint8).numpy()).digest()
            yield ExtraKey(start, start + len(piece), "embeds", content)


class DeviceHolds:
    """Holds device blocks by vLLM's own reference counts, so that a save may read them after their request ended."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: dict[BlockId, int] = {}

    def hold(self, blocks: Sequence[BlockId]) -> None:
        """Count one more user of each block."""
        self._pool.touch([self._pool.blocks[block] for block in blocks])
        for block in blocks:
            self._held[block] = self._held.get(block, 0) + 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Count one user less; a block nobody uses becomes free, the last ones first."""
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])
        for block in blocks:
            count = self._held[block] - 1
            if count:
                self._held[block] = count
            else:
                del self._held[block]

    @property
    def num_held(self) -> int:
        """Blocks under a hold."""
        return len(self._held)

    @property
    def would_free(self) -> bool:
        """Whether a block is kept from its pool by holds alone."""
        return any(self._pool.blocks[block].ref_cnt <= count for block, count in self._held.items())
