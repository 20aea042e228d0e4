"""Chunks by role: the target's and the draft's lie in namespaces of their own; what is present is told in order."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from chunk_kit import Faulty, units
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_hicache.errors import StoreError, StoreUnavailable
from vllm_hicache.geometry import UnitRun
from vllm_hicache.grid import Grid
from vllm_hicache.names import MissReason, ObjectName, PageKey, Role
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.chunks import ChunkStore, RoleChunks
from vllm_hicache.storage.envelope import ChunkId, namespace_part
from vllm_hicache.storage.file import FileStore
from vllm_hicache.storage.memory import MemoryStore
from vllm_hicache.storage.wrappers import StoreWrapper

NAMESPACES = {Role.TARGET: b"t" * 32, Role.DRAFT: b"d" * 32}
GRIDS = {Role.TARGET: Grid(2, 2), Role.DRAFT: Grid(1, 2)}
UNIT_BYTES = {Role.TARGET: 1024, Role.DRAFT: 24}
NUM_UNITS = {Role.TARGET: 8, Role.DRAFT: 3}
PAYLOADS = {Role.TARGET: units((0, 8)), Role.DRAFT: bytes(range(72))}
KEYS = [PageKey(bytes([page]) * 32) for page in range(4)]
CHUNKS = [
    ChunkId(key, 0, role, layer_group, head_group)
    for key in KEYS
    for role, grid in GRIDS.items()
    for layer_group in range(grid.layer_groups)
    for head_group in range(grid.head_groups)
]
TARGET, DRAFT = ChunkId(KEYS[0], 0, Role.TARGET, 0, 0), ChunkId(KEYS[0], 0, Role.DRAFT, 0, 0)


class Counted(StoreWrapper):
    """Notes the names of each `exists`."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.asked: list[list[ObjectName]] = []

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        self.asked.append(list(names))
        return super().exists(names)


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    is_memory = request.param == "memory"
    store = MemoryStore(f"test-{uuid.uuid4().hex}", 16 << 20) if is_memory else FileStore(str(tmp_path), 16 << 20)
    store.probe()
    yield store
    store.close()
    if is_memory:
        shutil.rmtree(store.root)


def opened(store: Store, *roles: Role) -> RoleChunks:
    return RoleChunks({role: ChunkStore(store, NAMESPACES[role], GRIDS[role]) for role in roles or Role})


def save(view: RoleChunks, chunk: ChunkId) -> bool:
    return view.save(chunk, memoryview(PAYLOADS[chunk.role]), UNIT_BYTES[chunk.role])


def load(view: RoleChunks | ChunkStore, chunk: ChunkId) -> bytes | MissReason:
    buffer = bytearray(b"\xa5") * len(PAYLOADS[chunk.role])
    return view.load(chunk, memoryview(buffer), UNIT_BYTES[chunk.role]) or bytes(buffer)


def test_each_roles_objects_lie_in_its_own_namespace(store: Store) -> None:
    view = opened(store)
    assert [save(view, chunk) for chunk in CHUNKS] == [True] * len(CHUNKS)
    for role, namespace in NAMESPACES.items():
        expected = {chunk.object_name(namespace) for chunk in CHUNKS if chunk.role is role}
        assert {info.name for info in store.list(f"{namespace_part(namespace)}/")} == expected
    assert len(list(store.list(""))) == len(CHUNKS)


def test_each_role_comes_back_as_it_was_saved(store: Store) -> None:
    view = opened(store)
    assert [save(view, chunk) for chunk in (TARGET, DRAFT)] == [True, True]
    assert [load(view, chunk) for chunk in (TARGET, DRAFT)] == [PAYLOADS[Role.TARGET], PAYLOADS[Role.DRAFT]]
    assert [save(view, chunk) for chunk in (TARGET, DRAFT)] == [False, False]


@pytest.mark.parametrize("role", Role)
def test_a_part_is_read_in_its_roles_namespace(store: Store, role: Role) -> None:
    view, chunk, size = opened(store), ChunkId(KEYS[0], 0, role, 0, 1), UNIT_BYTES[role]
    save(view, chunk)
    last = NUM_UNITS[role] - 1
    buffer = bytearray(b"\xa5") * (2 * size)
    runs = [UnitRun(0, 0, 1), UnitRun(last, 1, 1)]
    assert view.load_part(chunk, runs, memoryview(buffer), size, last + 1) is None
    assert bytes(buffer) == PAYLOADS[role][:size] + PAYLOADS[role][last * size :]


@pytest.mark.parametrize(("saved", "other"), [(TARGET, DRAFT), (DRAFT, TARGET)], ids=["target", "draft"])
def test_a_page_that_one_role_has_is_absent_for_the_other(store: Store, saved: ChunkId, other: ChunkId) -> None:
    view = opened(store)
    save(view, saved)
    assert view.present([other, saved]) == [False, True]
    assert load(view, other) is MissReason.ABSENT


def test_an_engine_without_a_draft_reads_what_one_with_a_draft_wrote_and_the_other_way_round(store: Store) -> None:
    both, alone = opened(store), opened(store, Role.TARGET)
    other = ChunkId(KEYS[1], 0, Role.TARGET, 1, 1)
    save(both, TARGET)
    save(alone, other)
    assert (load(alone, TARGET), load(both, other)) == (PAYLOADS[Role.TARGET],) * 2


def test_the_targets_namespace_has_no_object_of_a_draft(store: Store) -> None:
    save(opened(store), DRAFT)
    in_targets = ChunkStore(store, NAMESPACES[Role.TARGET], GRIDS[Role.DRAFT])
    assert in_targets.present([DRAFT]) == [False]
    assert load(in_targets, DRAFT) is MissReason.ABSENT


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.sampled_from(CHUNKS), max_size=40))
def test_what_is_present_is_told_in_the_order_of_the_question(store: Store, asked: list[ChunkId]) -> None:
    view = opened(store)
    there = [chunk for number, chunk in enumerate(CHUNKS) if number % 3 == 0]
    for chunk in there:
        save(view, chunk)
    assert view.present(asked) == [chunk in there for chunk in asked]


@pytest.mark.parametrize("asked", [[], [TARGET], [DRAFT, DRAFT], [DRAFT, TARGET, DRAFT]], ids=len)
def test_the_store_is_asked_once_for_each_role_in_the_question(store: Store, asked: list[ChunkId]) -> None:
    counted = Counted(store)
    opened(counted).present(asked)
    expected = [
        [chunk.object_name(NAMESPACES[role]) for chunk in asked if chunk.role is role]
        for role in Role
        if any(chunk.role is role for chunk in asked)
    ]
    assert counted.asked == expected


def test_a_role_that_the_engine_has_not_is_absent(store: Store) -> None:
    save(opened(store), DRAFT)
    save(opened(store), TARGET)
    assert opened(store, Role.TARGET).present([DRAFT, TARGET, DRAFT]) == [False, True, False]


def test_a_store_that_cannot_tell_of_a_role_raises(store: Store) -> None:
    faulty = Faulty(store, StoreUnavailable("down"), "exists")
    sound = ChunkStore(store, NAMESPACES[Role.TARGET], GRIDS[Role.TARGET])
    view = RoleChunks({Role.TARGET: sound, Role.DRAFT: ChunkStore(faulty, NAMESPACES[Role.DRAFT], GRIDS[Role.DRAFT])})
    with pytest.raises(StoreError, match="down"):
        view.present([TARGET, DRAFT])
