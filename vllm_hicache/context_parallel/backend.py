"""vLLM's CPU attention under decode context parallelism, which vLLM 0.32 itself refuses there.

Registered over vLLM's CPU backend by its own registries (`connectors.plugin`), and equal to it unless decode context
parallelism is on. The one place where this package changes what the engine computes with; it checks vLLM's version.

Every rank computes all keys and values of the step, for the KV heads of a group are replicated. It writes those of
its own pages to its cache and all of them to the scratch, into which what earlier steps left on the other ranks is
gathered, a layer ahead; attention is vLLM's own kernel on the scratch, whose pages a remapped block table names. Used
on the rank's engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_dcp_group
from vllm.forward_context import get_forward_context
from vllm.triton_utils.dispatcher import register_kernels
from vllm.utils import cpu_triton_utils
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_hicache.context_parallel.gather import LayerGather
from vllm_hicache.context_parallel.scratch import Scratch
from vllm_hicache.context_parallel.tables import ScratchTables, local_slots, scratch_tables
from vllm_hicache.errors import InvariantError, UnsupportedEngineError
from vllm_hicache.names import Role
from vllm_hicache.ownership import check_interleave
from vllm_hicache.support import check_version
from vllm_hicache.transfer.collective import GlooCollective, new_group
from vllm_hicache.transfer.device import layer_number, role_of_layer

_SLOT_MAPPING = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"
_GATHER_LIMIT_S = 300.0
"""As vLLM's own limit for a step: a rank that is this far behind in a forward pass has died or hangs."""


def _is_sharded() -> bool:
    """Whether the engine that is being built shards its KV over ranks."""
    config = get_current_vllm_config_or_none()
    return config is not None and config.parallel_config.decode_context_parallel_size > 1


class ContextParallelBackend(CPUAttentionBackend):
    """See the module. Its name stays vLLM's: what it writes is the same."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """See the base class."""
        return ContextParallelImpl if _is_sharded() else CPUAttentionBackendImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """See the base class."""
        return ContextParallelBuilder if _is_sharded() else CPUAttentionMetadataBuilder


@dataclass
class ContextParallelMetadata(CPUAttentionMetadata):
    """A batch; `block_table` names pages of the scratch."""

    tables: ScratchTables | None = None


class ContextParallelBuilder(CPUAttentionMetadataBuilder):
    """Adds what a batch's scratch looks like to vLLM's metadata."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        check_interleave(vllm_config.parallel_config.cp_kv_cache_interleave_size, self.block_size)
        _use_sharded_slot_mapping()

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> ContextParallelMetadata:
        """See the base class."""
        plain = super().build(common_prefix_len, common_attn_metadata, fast_build)
        group = get_dcp_group()
        tables = scratch_tables(
            plain.block_table,
            plain.seq_lens,
            plain.query_start_loc,
            group.world_size,
            group.rank_in_group,
            self.block_size,
        )
        found = ContextParallelMetadata(**vars(plain), tables=tables)
        found.block_table = tables.block_table
        return found


class ContextParallelImpl(CPUAttentionBackendImpl):
    """Attention over gathered pages."""

    # What vLLM asks for is that a step sees the whole context; here it does so without partial results.
    can_return_lse_for_decode = True
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.kv_sharing_target_layer_name is not None:
            raise UnsupportedEngineError(
                f"a layer of this model shares the KV of {self.kv_sharing_target_layer_name!r}, which is not supported "
                "with decode_context_parallel_size > 1 on the CPU: set it to 1"
            )

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write the step's keys and values: all to the scratch, those of own pages to the cache."""
        metadata = _metadata_of(layer.layer_name)
        if metadata is None or metadata.tables is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        tables = metadata.tables
        num_tokens = len(tables.scratch_slots)
        scratch = _steps().enter(layer.layer_name, tables)
        super().do_kv_cache_update(layer, key[:num_tokens], value[:num_tokens], scratch, tables.scratch_slots)
        if len(tables.owned_tokens):
            owned = tables.owned_tokens
            super().do_kv_cache_update(layer, key[owned], value[owned], kv_cache, tables.owned_slots)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend on the scratch, while the next layer's is being gathered."""
        if attn_metadata is not None:
            kv_cache = _steps().leave(layer.layer_name)
        return super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )


class _Steps:
    """The layers of this process, in the order in which a forward pass comes to them, and their gather."""

    def __init__(self) -> None:
        group = get_dcp_group()
        collective = GlooCollective(new_group(group.ranks, _GATHER_LIMIT_S), _GATHER_LIMIT_S)
        self.gather = LayerGather(collective, Scratch(torch.device("cpu"), collective.allocate))
        self._layers: dict[Role, list[str]] = {}
        self._places: dict[str, int] = {}
        self._scratch: torch.Tensor | None = None

    def enter(self, layer_name: str, tables: ScratchTables) -> torch.Tensor:
        """The layer's scratch with all that earlier steps left. The first layer of a role begins a pass."""
        if not self._layers:  # which layers there are is known in a pass alone
            self._layers = {role: _layers_of(role) for role in Role}
            self._places = {name: index for names in self._layers.values() for index, name in enumerate(names)}
        index = self._places[layer_name]
        if index == 0:
            layers = get_forward_context().no_compile_layers
            caches = [layers[name].kv_cache for name in self._layers[role_of_layer(layer_name)]]
            self.gather.begin(caches, tables)
        self._scratch = self.gather.wait(index)
        return self._scratch

    def leave(self, layer_name: str) -> torch.Tensor:
        """The layer's scratch, complete; the next layer's gather begins."""
        self.gather.ahead(self._places[layer_name])
        scratch, self._scratch = self._scratch, None
        if scratch is None:
            raise InvariantError(f"layer {layer_name} attends before its keys and values were written")
        return scratch


def _layers_of(role: Role) -> list[str]:
    layers = get_forward_context().no_compile_layers
    names = [name for name, layer in layers.items() if isinstance(getattr(layer, "impl", None), ContextParallelImpl)]
    return sorted((name for name in names if role_of_layer(name) == role), key=layer_number)


@cache
def _steps() -> _Steps:
    return _Steps()


def _metadata_of(layer_name: str) -> ContextParallelMetadata | None:
    found = get_forward_context().attn_metadata
    if isinstance(found, list):
        found = found[0]
    return found[layer_name] if isinstance(found, dict) else found


@cache
def _use_sharded_slot_mapping() -> None:
    """Give vLLM's slot mapping on the CPU the ranks it leaves out."""
    check_version(vllm.__version__)
    register_kernels({_SLOT_MAPPING: _slot_mapping})


def _slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    slot_mapping: torch.Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int = 1,
    TOTAL_CP_RANK: int = 0,
    CP_KV_CACHE_INTERLEAVE_SIZE: int = 1,
    PAD_ID: int = -1,
    BLOCK_SIZE: int = 1024,
) -> None:
    """In place of `cpu_triton_utils._compute_slot_mapping_kernel_impl`, whose signature this is."""
    if TOTAL_CP_WORLD_SIZE == 1:
        cpu_triton_utils._compute_slot_mapping_kernel_impl(
            num_tokens,
            max_num_tokens,
            query_start_loc,
            positions,
            block_table,
            block_table_stride,
            slot_mapping,
            KV_CACHE_BLOCK_SIZE,
        )
        return
    slots = local_slots(
        positions[:num_tokens],
        query_start_loc,
        block_table,
        TOTAL_CP_WORLD_SIZE,
        TOTAL_CP_RANK,
        KV_CACHE_BLOCK_SIZE,
        PAD_ID,
    )
    slot_mapping[:num_tokens] = slots
    slot_mapping[num_tokens:max_num_tokens] = PAD_ID
