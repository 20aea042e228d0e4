"""The CPU's attention under context parallelism, as far as it goes without an engine: names, classes and slots."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.triton_utils import dispatcher
from vllm.utils import cpu_triton_utils
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.block_table import ComputeSlotMappingKernel

from vllm_hicache.connectors import plugin
from vllm_hicache.context_parallel import backend
from vllm_hicache.context_parallel.backend import (
    ContextParallelBackend,
    ContextParallelBuilder,
    ContextParallelImpl,
)
from vllm_hicache.errors import UnsupportedEngineError
from vllm_hicache.ownership import check_interleave

UNTOUCHED = 12_345
PAD = -1


# Which classes


def configured(monkeypatch: pytest.MonkeyPatch, dcp_size: int | None) -> None:
    """An engine is being built, with this many ranks over which it shards its KV; None: none is."""
    parallel = SimpleNamespace(decode_context_parallel_size=dcp_size)
    config = None if dcp_size is None else SimpleNamespace(parallel_config=parallel)
    monkeypatch.setattr(backend, "get_current_vllm_config_or_none", lambda: config)


@pytest.mark.parametrize("dcp_size", [None, 1])
def test_without_context_parallelism_the_classes_are_vllms_own(
    monkeypatch: pytest.MonkeyPatch, dcp_size: int | None
) -> None:
    configured(monkeypatch, dcp_size)
    assert ContextParallelBackend.get_impl_cls() is CPUAttentionBackendImpl
    assert ContextParallelBackend.get_builder_cls() is CPUAttentionMetadataBuilder


@pytest.mark.parametrize("dcp_size", [2, 4])
def test_with_context_parallelism_the_classes_are_ours(monkeypatch: pytest.MonkeyPatch, dcp_size: int) -> None:
    configured(monkeypatch, dcp_size)
    assert ContextParallelBackend.get_impl_cls() is ContextParallelImpl
    assert ContextParallelBackend.get_builder_cls() is ContextParallelBuilder


def test_the_backend_says_of_itself_what_vllms_does() -> None:
    told = ("get_name", "get_supported_head_sizes", "get_supported_kernel_block_sizes", "is_mla")
    ours, theirs = ContextParallelBackend, CPUAttentionBackend
    assert [getattr(ours, name)() for name in told] == [getattr(theirs, name)() for name in told]


def test_our_attention_admits_what_vllm_asks_for_under_context_parallelism_and_its_own_does_not() -> None:
    admits = ("can_return_lse_for_decode", "supports_dcp", "supports_mtp_with_cp_non_trivial_interleave_size")
    assert [getattr(ContextParallelImpl, name) for name in admits] == [True] * 3
    assert not any(getattr(CPUAttentionBackendImpl, name, False) for name in admits)


def test_an_interleave_that_is_not_the_block_size_is_refused_with_the_setting() -> None:
    check_interleave(32, 32)
    with pytest.raises(UnsupportedEngineError, match=r"cp_kv_cache_interleave_size=1 with blocks of 32 tokens: .* 32"):
        check_interleave(1, 32)


# Registration


@pytest.fixture
def unregistered() -> Iterator[None]:
    """Whatever was registered in place of vLLM's CPU attention is so again afterwards."""
    cpu = AttentionBackendEnum.CPU_ATTN
    before = cpu.get_path() if cpu.is_overridden() else None
    cpu.clear_override()
    yield
    cpu.clear_override()
    if before is not None:
        register_backend(cpu, before)


@pytest.mark.usefixtures("unregistered")
def test_the_plugin_puts_our_backend_in_the_place_of_vllms() -> None:
    plugin.register()
    assert AttentionBackendEnum.CPU_ATTN.get_path() == plugin.CPU_BACKEND
    assert AttentionBackendEnum.CPU_ATTN.get_class() is ContextParallelBackend


@pytest.mark.usefixtures("unregistered")
def test_the_plugin_leaves_a_backend_that_somebody_else_registered() -> None:
    register_backend(AttentionBackendEnum.CPU_ATTN, "somebody.elses.Backend")
    plugin.register()
    assert AttentionBackendEnum.CPU_ATTN.get_path() == "somebody.elses.Backend"


@pytest.mark.usefixtures("unregistered")
def test_the_plugin_may_be_registered_twice() -> None:
    plugin.register()
    AttentionBackendEnum.CPU_ATTN.clear_override()
    register_backend(AttentionBackendEnum.CPU_ATTN, "somebody.elses.Backend")
    plugin.register()
    assert AttentionBackendEnum.CPU_ATTN.get_path() == "somebody.elses.Backend"


def test_the_plugin_registers_names_and_imports_neither_connector_nor_attention() -> None:
    program = (
        "import sys; from vllm_hicache.connectors import plugin; plugin.register(); "
        "print([name for name in sys.modules if name.startswith(('vllm_hicache.worker', 'vllm_hicache.scheduler', "
        "'vllm_hicache.transfer', 'vllm_hicache.context_parallel', 'vllm_hicache.connectors.hicache', "
        "'vllm.v1.attention.backends.cpu_attn'))])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240)
    assert found.stdout.splitlines()[-1] == "[]"


# Slots


@dataclass(frozen=True)
class Step:
    """Tokens of some requests.

    Attributes:
        starts: first token of each request, and their number.
        table: blocks of each request, and a row of nobody's.
    """

    positions: list[int]
    starts: list[int]
    table: list[list[int]]
    num_owners: int
    block: int

    def expected(self, rank: int) -> list[int]:
        """Slots by vLLM's `ComputeSlotMappingKernel.kernel`, token by token."""
        slots, interleave, virtual = [], self.block, self.block * self.num_owners
        for request, row in enumerate(self.table[:-1]):
            for position in self.positions[self.starts[request] : self.starts[request + 1]]:
                index, within = position // virtual, position % virtual
                is_local = within // interleave % self.num_owners == rank
                local = within // (self.num_owners * interleave) * interleave + within % interleave
                slots.append(row[index] * self.block + local if is_local else PAD)
        return slots

    def arguments(self, rank: int, num_padding: int = 0, room: int = 0) -> list[Any]:
        """Of the slot mapping, with tokens of no request and room behind them; what it writes is the seventh."""
        num_tokens = len(self.positions) + num_padding
        mapping = torch.full((num_tokens + room + 3,), UNTOUCHED, dtype=torch.int64)
        rows = torch.tensor(self.table, dtype=torch.int32)
        positions = torch.tensor(self.positions + [0] * num_padding, dtype=torch.int64)
        starts = torch.tensor(self.starts, dtype=torch.int32)
        lengths = [num_tokens, num_tokens + room]
        return [*lengths, starts, positions, rows, 50, mapping, self.block, self.num_owners, rank, self.block, PAD, 8]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    positions, starts, table = list[int](), [0], list[list[int]]()
    for number in range(draw(st.integers(0, 4))):
        first, num_tokens = draw(st.integers(0, 30)), draw(st.integers(0, 12))
        positions += range(first, first + num_tokens)
        starts.append(len(positions))
        table.append([100 * number + index for index in range(50)])
    return Step(positions, starts, [*table, [9_999] * 50], draw(st.integers(2, 4)), draw(st.integers(1, 4)))


@settings(deadline=None)
@given(steps(), st.integers(0, 3), st.integers(0, 4))
def test_slots_are_vllms_and_what_lies_behind_is_padding(step: Step, num_padding: int, room: int) -> None:
    for rank in range(step.num_owners):
        arguments = step.arguments(rank, num_padding, room)
        backend._slot_mapping(*arguments)
        behind = [PAD] * (num_padding + room) + [UNTOUCHED] * 3
        assert arguments[6].tolist() == step.expected(rank) + behind


@settings(deadline=None)
@given(steps())
def test_every_token_has_a_slot_on_exactly_one_rank(step: Step) -> None:
    ranks = [step.arguments(rank) for rank in range(step.num_owners)]
    for arguments in ranks:
        backend._slot_mapping(*arguments)
    slots = [arguments[6][:-3].tolist() for arguments in ranks]
    assert all(sum(slot != PAD for slot in each) == 1 for each in zip(*slots, strict=True))


@settings(deadline=None)
@given(steps())
def test_slots_are_mapped_when_vllm_launches_its_kernel_by_the_names_of_its_parameters(step: Step) -> None:
    kernel = ComputeSlotMappingKernel.__dict__["kernel"].__func__
    names = dispatcher._kernel_arg_names(kernel)
    arguments = step.arguments(1)
    override = dispatcher.KernelOverride(kernel, backend._slot_mapping)
    override[(1,)](**dict(zip(names, arguments, strict=True)))
    assert arguments[6].tolist() == step.expected(1) + [UNTOUCHED] * 3


def test_without_context_parallelism_slots_are_mapped_by_vllms_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(cpu_triton_utils, "_compute_slot_mapping_kernel_impl", lambda *every: calls.append(every))
    arguments = Step([5, 6], [0, 2], [[1] * 50, [2] * 50], 1, 16).arguments(0)
    backend._slot_mapping(*arguments)
    assert calls == [tuple(arguments[:8])]
    assert arguments[6].tolist() == [UNTOUCHED] * 5


def test_the_slot_mapping_is_registered_for_the_kernel_that_vllm_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, object] = {}
    monkeypatch.setattr(backend, "register_kernels", registered.update)
    backend._use_sharded_slot_mapping.__wrapped__()
    assert registered == {
        f"{ComputeSlotMappingKernel.__module__}.{ComputeSlotMappingKernel.__qualname__}.kernel": backend._slot_mapping
    }


def test_a_vllm_that_is_not_known_keeps_its_slot_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.vllm, "__version__", "0.99.0")
    monkeypatch.setattr(backend, "register_kernels", lambda kernels: pytest.fail("registered"))
    with pytest.raises(UnsupportedEngineError, match=r"0\.99\.0 is installed"):
        backend._use_sharded_slot_mapping.__wrapped__()


@pytest.mark.parametrize("shared", [None, "layers.3"])
def test_layers_that_share_their_kv_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, shared: str | None) -> None:
    def of_vllm(self: CPUAttentionBackendImpl, kv_sharing_target_layer_name: str | None) -> None:
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    monkeypatch.setattr(CPUAttentionBackendImpl, "__init__", of_vllm)
    if shared is None:
        ContextParallelImpl(shared)
        return
    with pytest.raises(UnsupportedEngineError, match=r"shares the KV of 'layers\.3', .* set it to 1"):
        ContextParallelImpl(shared)
