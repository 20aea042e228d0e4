"""Worker halves that share out their pages, each way of it: what all have come to is acknowledged, and consumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from halves_kit import BLOCK_TOKENS, LAYERS, NUM_PAGES, NUM_ROWS, REQUEST, Engine
from thread_collective import Groups
from transfer_fixtures import NAMESPACE, Gate, Layout, WatchedStore, device_tensors, key, page_bytes, share

from vllm_hicache.config import Config
from vllm_hicache.errors import ConfigError
from vllm_hicache.geometry import Holding
from vllm_hicache.grid import Grid
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import MissReason, Role
from vllm_hicache.ownership import Ownership, Shard
from vllm_hicache.place import Place
from vllm_hicache.plan import Ack
from vllm_hicache.storage.envelope import ChunkId
from vllm_hicache.transfer.collective import Collective
from vllm_hicache.worker import WorkerHalf

pytest_plugins = ["worker_fixtures"]

MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(store: WatchedStore) -> Iterator[MakeEngine]:
    engines: list[Engine] = []

    def make(tp_size: int, **how: object) -> Engine:
        engines.append(Engine(store, tp_size, **how))  # type: ignore[arg-type]
        return engines[-1]

    yield make
    for engine in engines:
        for collective in engine.collectives:
            collective.before_meeting = lambda row: None
            collective.close()
        for half in engine.halves:
            half.close()


WAYS: dict[str, dict[str, int]] = {
    "dcp 2 of tp 2": {"tp_size": 2, "dcp_size": 2},
    "dcp 2 of tp 4, 2 heads": {"tp_size": 4, "num_heads": 2, "dcp_size": 2},
    "dcp 2 of tp 4, 1 head": {"tp_size": 4, "dcp_size": 2},
    "dcp 4 of tp 4": {"tp_size": 4, "dcp_size": 4},
    "2 replicas": {"tp_size": 2},
    "4 replicas": {"tp_size": 4},
    "2 replicas of 2 heads": {"tp_size": 4, "num_heads": 2},
}
EXCHANGED = {name: way for name, way in WAYS.items() if "dcp_size" not in way}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
each_exchanged = pytest.mark.parametrize("way", EXCHANGED.values(), ids=EXCHANGED)


def saved(engine: Engine) -> None:
    """Every page is computed and saved; then devices are poisoned."""
    engine.compute()
    op = engine.save(engine.moves(0))
    assert engine.finish(op) == Ack(op, NUM_PAGES, NUM_PAGES)
    engine.poison()


def stored(engine: Engine) -> None:
    """Every page is in the store."""
    saved(engine)
    op = engine.flush(engine.moves(0))
    assert engine.finish(op) == Ack(op, NUM_PAGES, NUM_PAGES)


# What ranks say at start


@pytest.mark.parametrize(
    ("way", "ownership", "owners"),
    [
        ("dcp 2 of tp 2", Ownership(2, True), [0, 1]),
        ("dcp 2 of tp 4, 2 heads", Ownership(2, True), [0, 1, 0, 1]),
        ("dcp 2 of tp 4, 1 head", Ownership(2, True), [0, 1, 0, 1]),
        ("dcp 4 of tp 4", Ownership(4, True), [0, 1, 2, 3]),
        ("2 replicas", Ownership(2), [0, 1]),
        ("4 replicas", Ownership(4), [0, 1, 2, 3]),
        ("2 replicas of 2 heads", Ownership(2), [0, 1, 0, 1]),
    ],
)
def test_ranks_say_which_pages_they_keep_and_agree_on_room_for_all(
    make_engine: MakeEngine, way: str, ownership: Ownership, owners: list[int]
) -> None:
    engine = make_engine(**WAYS[way])
    assert [half.hand_over().shard for half in engine.halves] == [Shard(ownership, owner) for owner in owners]
    assert [half.hand_over().num_rows for half in engine.halves] == [NUM_ROWS] * len(owners)
    assert (engine.agreed.ownership, engine.agreed.num_slots) == (ownership, NUM_ROWS * ownership.num_owners)


@pytest.mark.parametrize("how", [{"connected": False}, {"host_tier": "replicated"}], ids=str)
def test_ranks_that_are_not_to_exchange_pages_keep_all_of_them_each(
    make_engine: MakeEngine, how: dict[str, object]
) -> None:
    engine = make_engine(2, **how)
    assert (engine.agreed.ownership, engine.agreed.num_slots) == (Ownership(), NUM_ROWS)
    assert engine.opened == []


def test_ranks_with_heads_of_their_own_keep_their_pages_and_are_not_connected(make_engine: MakeEngine) -> None:
    engine = make_engine(2, num_heads=2)
    assert (engine.agreed.ownership, engine.opened) == (Ownership(), [])


@pytest.mark.parametrize(
    ("way", "members"),
    [
        ("2 replicas", [[0, 1]] * 2),
        ("4 replicas", [[0, 1, 2, 3]] * 4),
        ("2 replicas of 2 heads", [[0, 1], [0, 1], [2, 3], [2, 3]]),
        ("dcp 2 of tp 4, 2 heads", []),
    ],
)
def test_ranks_are_connected_with_those_that_hold_the_same(
    make_engine: MakeEngine, way: str, members: list[list[int]]
) -> None:
    assert make_engine(**WAYS[way]).opened == [(rank, group, "cpu") for rank, group in enumerate(members)]


def test_the_stage_decides_nothing_about_the_tensor_ranks_that_are_connected(store: WatchedStore) -> None:
    opened: list[list[int]] = []

    def open_collective(members: Sequence[int], device: torch.device) -> Collective:
        opened.append(list(members))
        return Groups().join(0, 1, 2, 1.0)

    tensors = share(device_tensors(Layout(LAYERS, 1, 4, BLOCK_TOKENS, 2)), (0, LAYERS), (0, 1))
    place = Place(3, 2, 2, 1, 2 * LAYERS, 4)
    config = Config.parse({"page_tokens": BLOCK_TOKENS, "grid": "2x1", "host_memory": 4096})
    half = WorkerHalf(
        config, place, tensors, BLOCK_TOKENS, {Role.TARGET: "test"}, Metrics(), 1 << 30, None, open_collective
    )
    half.close()
    assert opened == [[0, 1]]
    assert half.hand_over().holdings == (Holding(Role.TARGET, (0, LAYERS), (0, 1), 1, 2),)


def test_with_context_parallelism_a_page_is_a_block_and_another_setting_is_refused(make_engine: MakeEngine) -> None:
    assert make_engine(2, dcp_size=2, page_tokens=None).agreed.layout.page_tokens == BLOCK_TOKENS
    with pytest.raises(ConfigError, match="page_tokens=8 with context parallelism, where a page is one block of"):
        make_engine(2, dcp_size=2, page_tokens=8)


# Pages come back


@each_way
def test_saved_pages_come_back_from_host_memory_to_other_blocks(make_engine: MakeEngine, way: dict[str, int]) -> None:
    saved(engine := make_engine(**way))
    op = engine.load(engine.moves(20))
    assert engine.finish(op) == Ack(op, NUM_PAGES, NUM_PAGES)
    engine.check_blocks(20, NUM_PAGES)
    assert engine.received == [{REQUEST}] * way["tp_size"]
    assert engine.invalid == [set()] * way["tp_size"]


@each_way
def test_pages_are_flushed_once_and_come_back_from_the_store_to_other_slots_and_blocks(
    make_engine: MakeEngine, store: WatchedStore, way: dict[str, int]
) -> None:
    stored(engine := make_engine(**way))
    writes = Counter(page for operation, page in store.calls if operation == "write")
    assert writes == dict.fromkeys(range(NUM_PAGES), way.get("num_heads", 1))
    num_owners = engine.ownership.num_owners
    first_slot = engine.agreed.num_slots // 2 // num_owners * num_owners
    moves = engine.moves(20, first_slot, True)
    op, num_pages = engine.load(moves), len(moves)
    assert engine.finish(op) == Ack(op, num_pages, num_pages)
    engine.check_blocks(20, num_pages)
    assert engine.received == [{REQUEST}] * way["tp_size"]
    reads = Counter(page for operation, page in store.calls if operation == "read")
    assert reads == dict.fromkeys(range(num_pages), way["tp_size"] // num_owners)


def test_an_engine_reads_what_one_that_shares_in_another_way_has_written(make_engine: MakeEngine) -> None:
    stored(make_engine(**WAYS["dcp 2 of tp 4, 2 heads"]))
    for name in ("2 replicas of 2 heads", "dcp 2 of tp 4, 2 heads"):
        engine = make_engine(**WAYS[name])
        op = engine.load(engine.moves(20, 0, True))
        assert engine.finish(op) == Ack(op, NUM_PAGES, NUM_PAGES)
        engine.check_blocks(20, NUM_PAGES)


@each_exchanged
def test_store_pages_are_given_to_other_ranks_as_acknowledgements_come(
    make_engine: MakeEngine, store: WatchedStore, way: dict[str, int]
) -> None:
    stored(make_engine(**way))
    engine = make_engine(**way)
    store.before["read", 5] = gate = Gate()
    op = engine.load(engine.moves(20, 0, True))
    engine.until(lambda: any(ack.op == op and ack.pages_done == 5 for ack in engine.acked))
    engine.check_blocks(20, 5)
    assert engine.received == [set()] * way["tp_size"]
    gate.open()
    assert engine.finish(op) == Ack(op, NUM_PAGES, NUM_PAGES)
    engine.check_blocks(20, NUM_PAGES)
    assert {each.num_gathers > 0 for each in engine.collectives} == {True}


def test_a_prefetch_fills_each_owners_slots_and_is_then_loaded_from_them(
    make_engine: MakeEngine, store: WatchedStore
) -> None:
    stored(make_engine(2))
    engine = make_engine(2)
    op = engine.load([replace(page, blocks=()) for page in engine.moves(0, 0, True)], request=None)
    assert engine.finish(op) == Ack(op, NUM_PAGES, NUM_PAGES)
    assert [each.num_gathers for each in engine.collectives] == [0, 0]
    engine.check_blocks(0, 0)
    store.calls.clear()
    assert engine.finish(engine.load(engine.moves(20))).pages_done == NUM_PAGES
    engine.check_blocks(20, NUM_PAGES)
    assert store.calls == []


# Pages that do not come


@each_way
@pytest.mark.parametrize("page", [0, 3])
def test_a_page_that_one_owner_misses_ends_the_load_on_all_ranks_without_waiting(
    make_engine: MakeEngine, store: WatchedStore, way: dict[str, int], page: int
) -> None:
    stored(make_engine(**way))
    for head in range(way.get("num_heads", 1)):
        store.delete(ChunkId(key(page), 0, Role.TARGET, 0, head).object_name(NAMESPACE))
    engine = make_engine(**way, prefetch="wait_complete")
    op = engine.load(engine.moves(20, 0, True))
    ack = engine.finish(op)
    assert (ack.pages_done, ack.reason) == (page, MissReason.ABSENT)
    assert engine.received == [{REQUEST}] * way["tp_size"]
    invalid = {engine.block(each, 20) for each in range(page, NUM_PAGES)}
    assert engine.invalid == [invalid] * way["tp_size"]
    if not engine.ownership.on_device:
        engine.check_blocks(20, page)


def test_a_load_that_was_given_up_writes_nothing_more_and_later_ones_still_go_through(
    make_engine: MakeEngine, store: WatchedStore
) -> None:
    stored(make_engine(2))
    engine = make_engine(2)
    store.before["read", 4] = gate = Gate()
    op = engine.load(engine.moves(20, 0, True))
    engine.until(lambda: any(ack.op == op and ack.pages_done == 4 for ack in engine.acked))
    engine.give_up(op)
    engine.until(lambda: engine.received == [{REQUEST}] * 2)
    gathers = [each.num_gathers for each in engine.collectives]
    gate.open()
    assert engine.finish(op).pages_done == 4
    engine.check_blocks(20, 4)
    assert [each.num_gathers for each in engine.collectives] == gathers
    assert engine.invalid == [{engine.block(page, 20) for page in range(4, NUM_PAGES)}] * 2
    engine.poison()
    assert engine.finish(engine.load(engine.moves(30, 0, True))).pages_done == NUM_PAGES
    engine.check_blocks(30, NUM_PAGES)


def test_an_abort_while_pages_are_exchanged_gives_blocks_back_after_it(make_engine: MakeEngine) -> None:
    saved(engine := make_engine(2))
    gate = Gate()
    engine.collectives[0].before_meeting = lambda row: gate()
    op = engine.load(engine.moves(20))
    gate.await_entry()
    engine.step(cancels=(op,))
    for _ in range(5):
        engine.step()
    assert (engine.received, op in engine.settled) == ([set(), set()], False)
    gate.open()
    assert engine.finish(op).reason is MissReason.CANCELLED
    assert engine.received == [{REQUEST}] * 2


def test_ranks_that_lose_each_other_compute_again_and_go_on(make_engine: MakeEngine) -> None:
    saved(engine := make_engine(2, timeout_s=0.5))
    engine.collectives[1].close()
    for first in (20, 30):
        op = engine.load(engine.moves(first))
        assert engine.finish(op).pages_done == 0
        assert engine.invalid == [{engine.block(page, first) for page in range(NUM_PAGES)}] * 2
        engine.invalid = [set(), set()]
    engine.check_blocks(20, 0)
    engine.compute()
    op = engine.save(engine.moves(0))
    assert engine.finish(op) == Ack(op, NUM_PAGES, NUM_PAGES)


@pytest.mark.parametrize("name", ["2 replicas", "dcp 2 of tp 2"])
def test_a_slot_that_holds_another_page_on_its_owner_is_not_served(make_engine: MakeEngine, name: str) -> None:
    saved(engine := make_engine(**WAYS[name]))
    swapped = engine.moves(20)
    swapped[3] = replace(swapped[3], key=key(99))
    ack = engine.finish(engine.load(swapped))
    assert (ack.pages_done, ack.reason) == (3, MissReason.DISAGREED)
    if name == "2 replicas":
        engine.check_blocks(20, 3)


def test_a_slot_of_each_rank_holds_the_pages_of_its_own(make_engine: MakeEngine) -> None:
    engine = make_engine(2, num_heads=1)
    saved(engine)
    for rank, half in enumerate(engine.halves):
        pool = half._pool
        expected = [engine.content(rank, page) for page in range(NUM_PAGES) if (page + 1) % 2 == rank]
        first = 1 - rank  # slot 0, of rank 0, is nobody's
        assert [row.numpy().tobytes() for row in pool.regions[0][first : first + 4]] == expected
        assert not pool.regions[0][first + 4 :].any()


def test_a_grid_of_several_objects_is_exchanged_whole(make_engine: MakeEngine) -> None:
    saved(engine := make_engine(2, grid="3x1"))
    op = engine.load(engine.moves(20))
    assert engine.finish(op) == Ack(op, NUM_PAGES, NUM_PAGES)
    engine.check_blocks(20, NUM_PAGES)
    assert page_bytes(engine.tensors[0], [20], Grid(3, 1)) == page_bytes(engine.source, [0], Grid(3, 1))
