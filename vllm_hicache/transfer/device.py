"""The device cache as pages see it: strided views [block][head][layer][slab] over the engine's own tensors.

Owned by the worker half, built once from what the engine registers. vLLM lays every layer's cache out as
[blocks, kv heads, tokens, content]; a (block, layer, head) slab is contiguous, and layers of one allocation lie
at equal distances, so that a whole page is one strided copy. Where layers lie in several allocations there is
one view for each run of layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm_hicache.errors import ConfigError
from vllm_hicache.names import Role

_DRAFT_PREFIX = "draft_model."


@dataclass(frozen=True, slots=True)
class RoleLayers:
    """The layers of one role on this rank.

    Attributes:
        numbers: their numbers in vLLM's names, ascending.
        num_heads: KV heads that this rank holds of each.
        slab_bytes: bytes of one (block, head) of each.
    """

    role: Role
    numbers: tuple[int, ...]
    num_heads: int
    slab_bytes: int


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Consecutive layers of one role in one allocation.

    Attributes:
        first_layer: position of the first one among the rank's layers of that role.
        view: uint8 [blocks, heads, layers, slab_bytes], strided.
    """

    role: Role
    first_layer: int
    view: torch.Tensor

    @property
    def num_layers(self) -> int:
        """Layers in this run."""
        return self.view.shape[2]


@dataclass(frozen=True, slots=True)
class DeviceCache:
    """All attention layers of one rank.

    Attributes:
        roles: target, then draft where there is one.
        runs: views that cover every layer once.
        num_blocks: blocks of the device cache.
        block_tokens: tokens a block holds.
    """

    roles: tuple[RoleLayers, ...]
    runs: tuple[LayerRun, ...]
    num_blocks: int
    block_tokens: int

    @classmethod
    def from_tensors(
        cls, caches: Mapping[str, torch.Tensor], block_tokens: int, num_target_layers: int | None = None
    ) -> DeviceCache:
        """Build views over registered tensors of shape [blocks, kv heads, tokens, content].

        Args:
            num_target_layers: layers with this number and above are the draft's, as those named so.

        Raises:
            ConfigError: a layer whose slabs are not contiguous, or layers of different shapes.
        """
        named = sorted(caches.items(), key=lambda item: (layer_number(item[0]), item[0]))
        roles: list[RoleLayers] = []
        runs: list[LayerRun] = []
        for role in (Role.TARGET, Role.DRAFT):
            of_role = {name: tensor for name, tensor in named if role_of_layer(name, num_target_layers) == role}
            if of_role:
                roles.append(_role_layers(role, of_role))
                runs += _runs(role, list(of_role.values()))
        counts = {tensor.shape[0] for tensor in caches.values()}
        if len(counts) > 1:
            raise ConfigError(
                f"layers have different numbers of blocks {sorted(counts)}: this cache layout is not supported"
            )
        return cls(tuple(roles), tuple(runs), counts.pop() if counts else 0, block_tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole device cache of this rank."""
        return self.num_blocks * sum(each.num_heads * each.slab_bytes * len(each.numbers) for each in self.roles)

    def run_bounds(self, run: LayerRun, role: Role, first: int, stop: int) -> tuple[int, int] | None:
        """Part of layers [first, stop) of `role` that lies in `run`, or `None`."""
        low, high = max(first, run.first_layer), min(stop, run.first_layer + run.num_layers)
        return (low, high) if run.role == role and low < high else None


def _role_layers(role: Role, tensors: Mapping[str, torch.Tensor]) -> RoleLayers:
    shapes: dict[tuple[int, int], str] = {}
    for name, tensor in tensors.items():
        _require_contiguous_slabs(name, tensor)
        shapes.setdefault((tensor.shape[1], _slab_bytes(tensor)), name)
    if len(shapes) > 1:
        listed = ", ".join(f"{shape} as in {name}" for shape, name in sorted(shapes.items()))
        raise ConfigError(
            f"the {role} layers have {len(shapes)} different shapes (kv heads, slab bytes): {listed}; "
            "models with several shapes of KV are not supported yet, run without the connector"
        )
    ((num_heads, slab_bytes),) = shapes
    return RoleLayers(role, tuple(layer_number(name) for name in tensors), num_heads, slab_bytes)


def role_of_layer(name: str, num_target_layers: int | None = None) -> Role:
    """Which model vLLM's layer of this name belongs to.

    Draft models have a prefix of their own; EAGLE's and MTP's layers go on where the target's numbers end.
    """
    is_beyond = num_target_layers is not None and layer_number(name) >= num_target_layers
    return Role.DRAFT if name.startswith(_DRAFT_PREFIX) or is_beyond else Role.TARGET


def layer_number(name: str) -> int:
    """The layer's number in vLLM's name of it."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return numbers[0] if numbers else 0


def _slab_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.shape[2] * tensor.shape[3] * tensor.element_size())


def _require_contiguous_slabs(name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() != 4 or tensor.stride(3) != 1 or tensor.stride(2) != tensor.shape[3]:
        raise ConfigError(
            f"cache of layer {name!r} has shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())}, but pages "
            "need [blocks, kv heads, tokens, content] with each (block, head) contiguous: set VLLM_KV_CACHE_LAYOUT=HND"
        )


def _runs(role: Role, tensors: Sequence[torch.Tensor]) -> list[LayerRun]:
    runs: list[LayerRun] = []
    start = 0
    while start < len(tensors):
        stop = start + 1
        while stop < len(tensors) and _continues(tensors, start, stop):
            stop += 1
        runs.append(LayerRun(role, start, _strided(tensors[start:stop])))
        start = stop
    return runs


def _continues(tensors: Sequence[torch.Tensor], start: int, stop: int) -> bool:
    first, last, new = tensors[start], tensors[stop - 1], tensors[stop]
    same = (
        new.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and new.shape == first.shape
        and new.stride() == first.stride()
        and new.dtype == first.dtype
    )
    distance = new.data_ptr() - last.data_ptr()
    return same and distance > 0 and (stop - start == 1 or distance == tensors[start + 1].data_ptr() - first.data_ptr())


def _strided(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    first = tensors[0]
    storage = first.untyped_storage()
    size = first.element_size()
    layer_stride = tensors[1].data_ptr() - first.data_ptr() if len(tensors) > 1 else 1
    # One byte view over the whole storage: a layer's place in it is its address, whatever shape vLLM gave it.
    flat = torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage)
    return torch.as_strided(
        flat,
        (first.shape[0], first.shape[1], len(tensors), _slab_bytes(first)),
        (first.stride(0) * size, first.stride(1) * size, layer_stride, 1),
        first.data_ptr() - storage.data_ptr(),
    )
