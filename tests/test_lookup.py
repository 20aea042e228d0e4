"""Background lookups: the leading run of whole pages, and no failure of a store ends the thread."""

from __future__ import annotations

import logging
import shutil
import threading
import uuid
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hicache.errors import StoreUnavailable
from vllm_hicache.geometry import Cell, PageLayout, RoleShape
from vllm_hicache.grid import Grid
from vllm_hicache.lookup import Lookup, StoreLookups
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import ObjectName, PageKey, Role
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.chunks import ChunkStore, RoleChunks
from vllm_hicache.storage.envelope import ChunkId
from vllm_hicache.storage.file import FileStore
from vllm_hicache.storage.memory import MemoryStore
from vllm_hicache.storage.wrappers import StoreWrapper

SHAPE = Grid(2, 2)
CELLS = PageLayout((RoleShape(Role.TARGET, 2, 2, 8),), 16, 64, SHAPE).cells
KEYS = [PageKey(index.to_bytes(32, "big")) for index in range(200)]


class Gate(StoreWrapper):
    """Answers `exists` only once it is open, or with `fault` while there is one; counts the calls."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.open = threading.Event()
        self.entered = threading.Event()
        self.fault: Exception | None = None
        self.num_calls = 0

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        self.num_calls += 1
        self.entered.set()
        assert self.open.wait(30)
        if self.fault is not None:
            raise self.fault
        return super().exists(names)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    gate = Gate(FileStore(str(tmp_path), 1 << 24))
    gate.probe()
    gate.open.set()
    return gate


@pytest.fixture
def chunks(gate: Gate) -> RoleChunks:
    return RoleChunks({Role.TARGET: ChunkStore(gate, b"n" * 32, SHAPE)})


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def lookups(metrics: Metrics) -> Iterator[StoreLookups]:
    lookups = StoreLookups(CELLS, metrics)
    yield lookups
    lookups.close()


def put(chunks: ChunkStore | RoleChunks, keys: Sequence[PageKey], cells: Sequence[Cell] = CELLS) -> None:
    for key in keys:
        for cell in cells:
            chunk = ChunkId(key, 0, cell.role, cell.layer_group, cell.head_group)
            chunks.save(chunk, memoryview(bytes(cell.num_bytes)), cell.unit_bytes)


def answer(lookup: Lookup) -> int | None:
    assert lookup.done.wait(30)
    return lookup.num_pages


@pytest.mark.parametrize("present", [0, 1, 2, 64, 65, 66, 200])
def test_the_leading_run_is_counted(present: int, lookups: StoreLookups, chunks: RoleChunks) -> None:
    put(chunks, KEYS[:present])
    put(chunks, KEYS[present + 1 :][:3])
    assert answer(lookups.begin(KEYS, chunks)) == present


@pytest.mark.parametrize("missing", CELLS, ids=lambda cell: f"{cell.layer_group}.{cell.head_group}")
def test_a_page_that_lacks_one_of_its_cells_is_absent(missing: Cell, lookups: StoreLookups, chunks: RoleChunks) -> None:
    put(chunks, KEYS[:2])
    put(chunks, KEYS[2:3], [cell for cell in CELLS if cell != missing])
    put(chunks, KEYS[3:4])
    assert answer(lookups.begin(KEYS[:4], chunks)) == 2


def test_no_keys_are_no_pages(lookups: StoreLookups, chunks: RoleChunks) -> None:
    assert answer(lookups.begin([], chunks)) == 0


def test_asking_does_not_wait_for_the_store(lookups: StoreLookups, chunks: RoleChunks, gate: Gate) -> None:
    put(chunks, KEYS[:1])
    gate.open.clear()
    lookup = lookups.begin(KEYS[:1], chunks)
    assert gate.entered.wait(30)
    assert (lookup.num_pages, lookup.done.is_set()) == (None, False)
    gate.open.set()
    assert answer(lookup) == 1


def test_questions_are_answered_each_in_its_own_namespace(
    lookups: StoreLookups, chunks: RoleChunks, gate: Gate
) -> None:
    put(chunks, KEYS[:2])
    other = RoleChunks({Role.TARGET: ChunkStore(gate, b"o" * 32, SHAPE)})
    asked = [lookups.begin(KEYS[:3], store) for store in (other, chunks, other)]
    assert [answer(lookup) for lookup in asked] == [0, 2, 0]


def test_a_store_that_raises_has_no_pages_and_the_thread_lives(
    lookups: StoreLookups, chunks: RoleChunks, gate: Gate
) -> None:
    put(chunks, KEYS[:2])
    for fault in (StoreUnavailable("down"), RuntimeError("a client's own"), None):
        gate.fault = fault
        assert answer(lookups.begin(KEYS[:2], chunks)) == (0 if fault else 2)


def test_a_store_that_raises_is_counted(
    lookups: StoreLookups, chunks: RoleChunks, gate: Gate, metrics: Metrics
) -> None:
    gate.fault = StoreUnavailable("down")
    answer(lookups.begin(KEYS[:2], chunks))
    assert metrics.drain()


class Broken(RoleChunks):
    def present(self, chunks: Sequence[ChunkId]) -> list[bool]:
        raise ZeroDivisionError


def test_an_error_of_our_own_is_counted_and_logged_and_the_thread_lives(
    lookups: StoreLookups, chunks: RoleChunks, gate: Gate, metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    put(chunks, KEYS[:2])
    with caplog.at_level(logging.ERROR, "vllm_hicache.lookup"):
        assert answer(lookups.begin(KEYS[:2], Broken({}))) == 0
    assert (metrics.drain(), len(caplog.records)) == ({"errors|lookup": 1}, 1)
    assert answer(lookups.begin(KEYS[:2], chunks)) == 2


def test_an_abandoned_question_is_not_asked_any_further(lookups: StoreLookups, chunks: RoleChunks, gate: Gate) -> None:
    put(chunks, KEYS)
    gate.open.clear()
    lookup = lookups.begin(KEYS, chunks)
    assert gate.entered.wait(30)
    lookup.abandoned = True
    gate.open.set()
    assert answer(lookup) == gate.num_calls == 1


def test_a_question_abandoned_while_it_waits_costs_the_store_nothing(
    lookups: StoreLookups, chunks: RoleChunks, gate: Gate
) -> None:
    lookup = Lookup(KEYS, KEYS, chunks, abandoned=True)
    assert lookups._count(lookup) == (0, 0)
    assert gate.num_calls == 0


def test_closing_does_not_wait_for_a_stuck_store_and_leaves_open_questions_unanswered(
    metrics: Metrics, chunks: RoleChunks, gate: Gate
) -> None:
    lookups = StoreLookups(CELLS, metrics)
    gate.open.clear()
    first, second = lookups.begin(KEYS, chunks), lookups.begin(KEYS, chunks)
    assert gate.entered.wait(30)
    lookups.close()
    assert not first.done.is_set()
    gate.open.set()
    lookups.close()
    assert (first.done.is_set(), second.done.is_set()) == (True, False)


DRAFT_CELLS = PageLayout((RoleShape(Role.TARGET, 2, 2, 8), RoleShape(Role.DRAFT, 1, 2, 8)), 16, 64, SHAPE).cells
OF_DRAFT = [cell for cell in DRAFT_CELLS if cell.role is Role.DRAFT]
OTHER_NAMES = [PageKey(b"p" + key[1:]) for key in KEYS]


@pytest.mark.parametrize("needs_draft", [True, False])
@pytest.mark.parametrize("holes", [((), ()), ((3,), (1,)), ((1,), (3,)), ((), (0,)), ((70,), (66,)), ((), (64, 66))])
def test_the_run_ends_where_a_role_that_is_needed_is_missing(
    needs_draft: bool, holes: tuple[tuple[int, ...], ...], metrics: Metrics, gate: Gate
) -> None:
    by_role = {Role.TARGET: ChunkStore(gate, b"n" * 32, SHAPE), Role.DRAFT: ChunkStore(gate, b"d" * 32, Grid(1, 2))}
    without_target, without_draft = ([page for page in range(80) if page not in missing] for missing in holes)
    put(by_role[Role.TARGET], [OTHER_NAMES[page] for page in without_target])
    put(by_role[Role.DRAFT], [KEYS[page] for page in without_draft], OF_DRAFT)
    lookups = StoreLookups(DRAFT_CELLS, metrics, needs_draft)
    lookup = lookups.begin(KEYS[:80], RoleChunks(by_role), OTHER_NAMES[:80])
    target, draft = (min(missing, default=80) for missing in holes)
    assert answer(lookup) == (min(target, draft) if needs_draft else target)
    assert lookup.num_whole == min(target, draft)
    lookups.close()


NUM_PAGES = 150
"""More than two batches of 64 after the first page."""

NAMES: dict[tuple[Role, str], list[PageKey]] = {
    (role, state): [PageKey(f"{role}{state}{page}".encode().ljust(32)) for page in range(NUM_PAGES)]
    for role in Role
    for state in ("whole", "half", "absent")
}
"""Names of pages of which the store has all objects of a role, all but one, or none."""

holes = st.dictionaries(st.integers(0, NUM_PAGES - 1), st.sampled_from(["half", "absent"]), max_size=3)


@pytest.fixture(scope="module", params=["file", "memory"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleChunks]:
    """Both roles of the pages that `NAMES` names, each in its namespace."""
    is_memory, folder = request.param == "memory", str(tmp_path_factory.mktemp("store"))
    store = MemoryStore(f"test-{uuid.uuid4().hex}", 1 << 24) if is_memory else FileStore(folder, 1 << 24)
    store.probe()
    chunks = RoleChunks(
        {Role.TARGET: ChunkStore(store, b"n" * 32, SHAPE), Role.DRAFT: ChunkStore(store, b"d" * 32, Grid(1, 2))}
    )
    for role in Role:
        cells = [cell for cell in DRAFT_CELLS if cell.role is role]
        put(chunks, NAMES[role, "whole"], cells)
        put(chunks, NAMES[role, "half"], cells[1:])
    yield chunks
    store.close()
    if is_memory:
        shutil.rmtree(store.root)


def named(role: Role, num_pages: int, missing: dict[int, str]) -> list[PageKey]:
    return [NAMES[role, missing.get(page, "whole")][page] for page in range(num_pages)]


@settings(deadline=None)
@given(st.integers(0, NUM_PAGES), holes, holes, st.booleans())
def test_runs_are_those_that_a_count_page_by_page_finds(
    stored: RoleChunks, num_pages: int, of_target: dict[int, str], of_draft: dict[int, str], needs_draft: bool
) -> None:
    lookups = StoreLookups(DRAFT_CELLS, Metrics(), needs_draft)
    keys, plain = named(Role.DRAFT, num_pages, of_draft), named(Role.TARGET, num_pages, of_target)
    lookup = lookups.begin(keys, stored, plain)
    num_whole = len([*takewhile(lambda page: page not in {*of_target, *of_draft}, range(num_pages))])
    num_target = len([*takewhile(lambda page: page not in of_target, range(num_pages))])
    assert answer(lookup) == (num_whole if needs_draft else num_target)
    assert lookup.num_whole == num_whole
    lookups.close()
