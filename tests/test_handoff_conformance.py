"""What every transport of pages from engine to engine must do, over a real server of pages in a host pool."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transfer_fixtures import POISON
from transport_kit import (
    BOTH,
    GEOMETRY,
    NUM_SLOTS,
    NUM_UNITS,
    PAGES,
    PART,
    UNIT_BYTES,
    Reading,
    Served,
    link,
    load,
    names,
    same,
    until,
)

from vllm_hicache.config import PeerTransport
from vllm_hicache.errors import ObjectMissing, StoreDenied, StoreError, StoreTimeout
from vllm_hicache.geometry import UnitRun
from vllm_hicache.names import MissReason, ObjectName, OpId
from vllm_hicache.storage.base import Store, WatchedParts
from vllm_hicache.storage.envelope import ChunkId
from vllm_hicache.storage.wrappers import StoreWrapper

pytest_plugins = ["transport_fixtures"]

GONE = (MissReason.ABSENT, MissReason.UNAVAILABLE, MissReason.TIMEOUT)


@pytest.fixture(params=PeerTransport, scope="module")
def transport(request: pytest.FixtureRequest) -> PeerTransport:
    return PeerTransport(request.param)


@pytest.fixture
def ends(transport: PeerTransport) -> Iterator[tuple[Served, Reading]]:
    with link(transport) as ends:
        yield ends


@pytest.fixture
def store(served: Served, reading: Reading) -> Store:
    return reading.store(served)


def whole(store: Store, name: str) -> bytes:
    """An object, read into memory that is no pool's."""
    data = bytearray(b"x") * (1 << 20)
    return bytes(data[: store.read(ObjectName(name), [memoryview(data)])])


def test_every_page_comes_as_it_lies_and_other_slots_are_left_alone(
    served: Served, reading: Reading, store: Store
) -> None:
    for page, slot in enumerate((5, 1, 2)):
        assert load(reading, reading.chunks(store), page, slot) == BOTH
        assert same(served, reading, page, slot)
    assert reading.touched() == {5, 1, 2}


def test_what_comes_is_what_lies_in_the_slot_when_it_is_asked_for_first(
    served: Served, reading: Reading, store: Store
) -> None:
    served.content(1, PART)[777] ^= 1
    assert load(reading, reading.chunks(store), 1, 0) == BOTH
    assert same(served, reading, 1, 0)


def test_a_byte_that_changes_after_the_envelope_was_made_is_found(
    served: Served, reading: Reading, store: Store
) -> None:
    assert load(reading, reading.chunks(store), 0, 0) == BOTH
    served.content(0, PART)[12_345] ^= 0x10
    assert load(reading, reading.chunks(store), 0, 1) == [MissReason.CORRUPT, None]


class Flipping(StoreWrapper):
    """Changes one byte of what has come."""

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        total_bytes = super().read(name, list(parts), offset)
        parts[-1][5] ^= 1
        return total_bytes


def test_a_byte_that_changes_on_the_way_is_found_and_the_page_is_served_still(
    served: Served, reading: Reading, store: Store
) -> None:
    assert load(reading, reading.chunks(Flipping(store)), 2, 0) == [MissReason.CORRUPT] * 2
    assert load(reading, reading.chunks(store), 2, 0) == BOTH


@pytest.mark.parametrize("first_units", [(0, 5), (1, 7), (4,), (9,), (0, 2, 4, 6, 8)])
def test_runs_of_units_come_one_behind_the_other(
    served: Served, reading: Reading, store: Store, first_units: tuple[int, ...]
) -> None:
    num_units = 2 if first_units[-1] < 9 and len(first_units) < 5 else 1
    runs = [UnitRun(first, at * num_units, num_units) for at, first in enumerate(first_units)]
    target = reading.part(3, PART)[: len(runs) * num_units * UNIT_BYTES]
    chunk = ChunkId.of(PAGES[0].key, PART.cell)
    assert reading.chunks(store).load_part(chunk, runs, target, UNIT_BYTES, NUM_UNITS) is None
    source = served.content(0, PART)
    assert target == b"".join(source[first * UNIT_BYTES :][: num_units * UNIT_BYTES] for first in first_units)
    assert set(reading.part(3, PART)[target.nbytes :]) <= {POISON}


SIZES = st.sampled_from([0, 1, 7, 255, 256, 257, 4096, 70_000])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=6), st.integers(0, 83_000))
def test_any_parts_from_any_offset_are_filled_and_nothing_else(
    served: Served, reading: Reading, store: Store, cut: list[tuple[int, bool]], offset: int
) -> None:
    reading.poison()
    expected, at = whole(store, names()[0]), offset
    pool, used = reading.part(0, PART), 0
    parts = []
    for num_bytes, is_in_pool in cut:
        fits = is_in_pool and used + num_bytes <= pool.nbytes
        parts.append(pool[used : used + num_bytes] if fits else memoryview(bytearray([POISON]) * num_bytes))
        used += num_bytes if fits else 0
    assert store.read(ObjectName(names()[0]), parts, offset) == len(expected)
    for part in parts:
        wanted = expected[at : at + part.nbytes]
        assert part[: len(wanted)] == wanted
        at += part.nbytes
    assert set(pool[used:]) <= {POISON}
    assert reading.touched() <= {0}


def test_an_object_has_the_same_bytes_over_either_transport(served: Served, reading: Reading, store: Store) -> None:
    with link(PeerTransport.TCP) as (other, tcp):
        plain = tcp.store(other)
        for name in names():
            assert whole(store, name) == whole(plain, name)


def test_watched_parts_hear_the_beginning_and_the_end(store: Store) -> None:
    class Watching(WatchedParts):
        heard: list[int] = []  # noqa: RUF012

        def filled(self, num_bytes: int) -> None:
            self.heard.append(num_bytes)

    parts = Watching([memoryview(bytearray(100)), memoryview(bytearray(1 << 20))])
    total_bytes = store.read(ObjectName(names()[1]), parts)
    assert parts.heard[0] == 0
    assert parts.heard[-1] in (0, total_bytes)


def test_what_nobody_serves_is_absent(served: Served, reading: Reading, store: Store) -> None:
    with pytest.raises(ObjectMissing):
        store.read(ObjectName("a/b"), [reading.part(0, PART)])
    served.server.withdraw(OpId(1))
    assert load(reading, reading.chunks(store), 0, 0) == [MissReason.ABSENT] * 2
    assert not reading.touched()
    assert served.ended == [1]


def test_a_withdrawn_page_has_ended_when_its_last_read_has(served: Served, reading: Reading, store: Store) -> None:
    assert load(reading, reading.chunks(store), 0, 0) == BOTH
    until(lambda: served.num_open == 0, "the end of all reads")
    entry = served.server._begin(names()[0].encode())
    assert entry is not None
    served.server.withdraw(OpId(1))
    assert served.ended == []
    served.server._finish(entry)
    assert served.ended == [1]


def test_without_the_password_nothing_comes(served: Served, reading: Reading) -> None:
    with pytest.raises(StoreDenied, match="password"):
        reading.store(served, secret="wrong").read(ObjectName(names()[0]), [reading.part(0, PART)])
    assert not reading.touched()


def test_nothing_can_be_written_or_removed(store: Store) -> None:
    with pytest.raises(StoreError, match="only be read"):
        store.write(ObjectName("a/b"), [memoryview(b"x")])
    assert not store.delete(ObjectName(names()[0]))
    assert store.exists([ObjectName(name) for name in (*names(), "a/b")]) == [True] * len(names()) + [False]


def test_a_server_that_does_not_answer_in_time_is_late(transport: PeerTransport) -> None:
    with link(transport, wait_s=60.0) as (served, reading):
        with pytest.raises(StoreTimeout):
            reading.store(served, timeout_s=0.2).read(ObjectName("a/b"), [reading.part(0, PART)])
        assert not reading.touched()


def test_many_threads_read_the_same_and_different_pages(served: Served, reading: Reading, store: Store) -> None:
    def work(slot: int) -> bool:
        chunks = reading.chunks(store)
        return all(
            load(reading, chunks, (slot + turn) % 3, slot) == BOTH and same(served, reading, (slot + turn) % 3, slot)
            for turn in range(15)
        )

    with ThreadPoolExecutor(NUM_SLOTS) as threads:
        assert all(threads.map(work, range(NUM_SLOTS)))
    until(lambda: served.num_open == 0, "the end of all reads")


def test_a_server_that_closes_in_mid_read_is_a_miss_and_never_wrong_bytes(
    served: Served, reading: Reading, store: Store
) -> None:
    reasons: list[MissReason | None] = []
    begun, chunks = threading.Event(), reading.chunks(reading.store(served, timeout_s=2.0))

    def work(slot: int) -> bool:
        is_right = True
        for turn in range(300):
            found = load(reading, chunks, turn % 3, slot)
            begun.set()
            reasons.extend(found)
            is_right &= found != BOTH or same(served, reading, turn % 3, slot)
            if found != BOTH:
                break
        return is_right

    with ThreadPoolExecutor(4) as threads:
        results = [threads.submit(work, slot) for slot in range(4)]
        assert begun.wait(30)
        served.server.close()
        assert all(result.result(60) for result in results)
    assert set(reasons) <= {None, *GONE}
    assert served.ended == []


def test_the_server_counts_the_bytes_that_have_gone(served: Served, reading: Reading, store: Store) -> None:
    served.metrics.drain()
    assert load(reading, reading.chunks(store), 0, 0) == BOTH
    store.close()
    found: list[float] = []
    until(lambda: bool(found.extend(served.metrics.drain().values()) or sum(found) >= GEOMETRY.slot_bytes), "the count")
    assert GEOMETRY.slot_bytes < sum(found) < 1.1 * GEOMETRY.slot_bytes


def test_random_reads_of_random_pages_are_always_right(served: Served, reading: Reading, store: Store) -> None:
    rng, chunks = np.random.default_rng(3), reading.chunks(store)
    for page, slot in zip(rng.integers(0, 3, 60), rng.integers(0, NUM_SLOTS, 60), strict=True):
        assert load(reading, chunks, int(page), int(slot)) == BOTH
        assert same(served, reading, int(page), int(slot))
