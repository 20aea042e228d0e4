"""Which bytes come over NIXL, what the session brings instead, and what the server knows of open reads."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import pytest
from transport_kit import (
    BOTH,
    GEOMETRY,
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
from vllm_hicache.errors import ObjectMissing, StoreTimeout, StoreUnavailable
from vllm_hicache.handoff import nixl_store, server
from vllm_hicache.handoff.nixl_link import NixlReader, Piece
from vllm_hicache.handoff.nixl_store import NixlStore
from vllm_hicache.names import MissReason, ObjectName, OpId
from vllm_hicache.storage.base import WatchedParts
from vllm_hicache.storage.redis_pool import Address, Login, connect
from vllm_hicache.storage.resp import Deadline, NoRedis, Wire, command

pytest_plugins = ["transport_fixtures"]

KEY = names()[0].encode()


@pytest.fixture
def ends() -> Iterator[tuple[Served, Reading]]:
    with link(PeerTransport.NIXL) as ends:
        yield ends


@pytest.fixture
def over_nixl(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each read over NIXL."""
    sizes: list[int] = []
    read = NixlReader.read

    def counted(reader: NixlReader, metadata: bytes, pieces: Sequence[Piece], timeout_s: float) -> None:
        read(reader, metadata, pieces, timeout_s)
        sizes.append(sum(piece.local.nbytes for piece in pieces))

    monkeypatch.setattr(NixlReader, "read", counted)
    return sizes


def fail(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[float]:
    """Have every read over NIXL fail; the time limits that they were given."""
    limits: list[float] = []

    def failing(reader: NixlReader, metadata: bytes, pieces: Sequence[Piece], timeout_s: float) -> None:
        limits.append(timeout_s)
        raise error

    monkeypatch.setattr(NixlReader, "read", failing)
    return limits


@pytest.fixture
def wire(served: Served) -> Iterator[Wire]:
    wire = connect(Address("127.0.0.1", served.server.port), Login(password="secret"), Deadline(30))
    yield wire
    wire.close()


def ask(wire: Wire, *words: bytes) -> object:
    return wire.ask([command(*words)], object, Deadline(30))[0]


def test_payloads_come_over_nixl_and_headers_do_not(served: Served, reading: Reading, over_nixl: list[int]) -> None:
    assert load(reading, reading.chunks(reading.store(served)), 1, 2) == BOTH
    assert same(served, reading, 1, 2)
    assert over_nixl == [part.num_bytes for part in GEOMETRY.parts]


def test_a_read_of_the_header_alone_needs_no_nixl(served: Served, reading: Reading, over_nixl: list[int]) -> None:
    assert reading.store(served).read(ObjectName(names()[0]), [memoryview(bytearray(100))]) > 100
    assert over_nixl == []
    until(lambda: served.num_open == 0, "the end of the read")


def test_watched_parts_hear_how_much_is_in_place(served: Served, reading: Reading) -> None:
    heard: list[int] = []

    class Watching(WatchedParts):
        def filled(self, num_bytes: int) -> None:
            heard.append(num_bytes)

    store, name = reading.store(served), ObjectName(names()[0])
    total_bytes = store.read(name, Watching([memoryview(bytearray(100)), memoryview(bytearray(1 << 20))]), 1000)
    store.read(name, Watching([memoryview(bytearray(100))]))
    store.read(name, Watching([memoryview(bytearray(100))]), total_bytes + 1)
    assert heard == [0, total_bytes - 1000, 0, 100, 0, 0]


@pytest.mark.parametrize("error", [StoreUnavailable("gone"), StoreTimeout("late")], ids=["gone", "late"])
def test_what_nixl_does_not_bring_the_session_does(
    served: Served, reading: Reading, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    limits = fail(monkeypatch, error)
    chunks = reading.chunks(reading.store(served, timeout_s=20.0))
    assert load(reading, chunks, 0, 0) == BOTH
    assert same(served, reading, 0, 0)
    assert len(limits) == 1
    assert limits[0] <= 10.0
    until(lambda: served.num_open == 0, "the end of the read")


def test_where_nixl_has_failed_it_rests_and_is_warned_of_once(
    served: Served, reading: Reading, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits, chunks = fail(monkeypatch, StoreUnavailable("gone")), reading.chunks(reading.store(served))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert load(reading, chunks, 0, 0) == BOTH
    assert len(limits) == 1
    assert len([record for record in caplog.records if "come over TCP and not NIXL" in record.message]) == 1


def test_after_its_rest_nixl_is_tried_again(served: Served, reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    limits, chunks = fail(monkeypatch, StoreUnavailable("gone")), reading.chunks(reading.store(served))
    monkeypatch.setattr(nixl_store, "_TRY_AGAIN_S", 0.0)
    assert load(reading, chunks, 0, 0) == BOTH
    assert len(limits) == 2


def test_a_server_without_nixl_is_read_over_the_session(
    reading: Reading, over_nixl: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    served = Served(memory=False)
    with caplog.at_level(logging.WARNING):
        assert load(reading, reading.chunks(reading.store(served)), 1, 1) == BOTH
    assert same(served, reading, 1, 1)
    assert over_nixl == []
    assert "set peer_transport to nixl in both engines" in caplog.text
    served.close()


def test_where_only_tcp_leads_the_session_brings_all(monkeypatch: pytest.MonkeyPatch, over_nixl: list[int]) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    with link(PeerTransport.NIXL) as (served, reading):
        assert load(reading, reading.chunks(reading.store(served)), 1, 1) == BOTH
        assert same(served, reading, 1, 1)
        assert over_nixl == []


def test_a_server_that_is_gone_is_a_miss_and_nixl_is_tried_at_the_next_one(reading: Reading) -> None:
    first = Served(memory=True)
    store = reading.store(first)
    assert load(reading, reading.chunks(store), 0, 0) == BOTH
    first.close()
    assert load(reading, reading.chunks(store), 0, 1) == [MissReason.UNAVAILABLE] * 2
    assert isinstance(store, NixlStore)
    assert store._next_try_s == 0


def test_a_located_page_is_being_read_until_it_is_released(served: Served, wire: Wire) -> None:
    assert served.memory is not None
    assert ask(wire, b"AGENT") == served.memory.metadata
    found = ask(wire, b"LOCATE", KEY)
    assert isinstance(found, list)
    served.server.withdraw(OpId(1))
    assert served.ended == []
    assert ask(wire, b"RELEASE", KEY, b"10") == 1
    assert served.ended == [1]
    assert ask(wire, b"RELEASE", KEY, b"0") == 0


def test_a_located_page_is_being_read_until_the_connection_ends(served: Served, wire: Wire) -> None:
    assert ask(wire, b"LOCATE", KEY)
    assert ask(wire, b"LOCATE", KEY)
    assert served.num_open == 1
    served.server.withdraw(OpId(1))
    assert served.ended == []
    wire.close()
    until(lambda: served.ended == [1], "the end of the export")
    assert served.memory is not None
    assert served.memory._num_readers == 0


def test_a_reader_that_located_a_page_and_is_silent_is_given_up(
    served: Served, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_LOCATED_LIMIT_S", 0.05)
    assert ask(wire, b"LOCATE", KEY)
    served.server.withdraw(OpId(1))
    until(lambda: served.ended == [1], "the end of the export")
    with pytest.raises(StoreUnavailable):
        ask(wire, b"RELEASE", KEY, b"0")


def test_memory_is_attended_while_a_page_is_located_and_not_otherwise(served: Served, wire: Wire) -> None:
    assert served.memory is not None
    assert served.memory._num_readers == 0
    assert ask(wire, b"LOCATE", KEY)
    assert served.memory._num_readers == 1
    assert ask(wire, b"RELEASE", KEY, b"0") == 1
    assert served.memory._num_readers == 0


def test_what_is_absent_or_not_served_over_nixl_cannot_be_located(served: Served, wire: Wire) -> None:
    assert ask(wire, b"LOCATE", b"a/b") is None
    plain = Served(memory=False)
    other = connect(Address("127.0.0.1", plain.server.port), Login(password="secret"), Deadline(30))
    assert ask(other, b"AGENT") == b""
    assert ask(other, b"LOCATE", KEY) is None
    other.close()
    plain.close()


def test_without_the_password_nobody_learns_of_memory(served: Served) -> None:
    wire = connect(Address("127.0.0.1", served.server.port), Login(), Deadline(30))
    for words in ((b"AGENT",), (b"LOCATE", KEY), (b"RELEASE", KEY, b"0")):
        assert "NOAUTH" in repr(ask(wire, *words))
    wire.close()


NO_PLACES: list[object] = [b"", 7, [], [b"h"], [b"h", b"1"], [b"h", b"1 2 3"], [b"h", b"-1 2"], [b"h", b"x 2"]]
NO_PLACES += [[b"h", 12], [1, b"1 2"], [b"h", b"18446744073709551615 1"], [b"h", b"1 " + b"9" * 21]]


@pytest.mark.parametrize("found", NO_PLACES, ids=repr)
def test_an_answer_that_names_no_place_is_refused(found: object) -> None:
    with pytest.raises(NoRedis, match="same vllm-hicache release"):
        nixl_store._parse(b"agent", found)


def test_a_place_outside_the_pool_is_not_read(
    served: Served, reading: Reading, monkeypatch: pytest.MonkeyPatch, over_nixl: list[int]
) -> None:
    monkeypatch.setattr(nixl_store, "_parse", lambda metadata, found: nixl_store._Located(metadata, b"", 4096, 8192))
    store = reading.store(served)
    assert store.read(ObjectName(names()[0]), [reading.part(0, PART)[:UNIT_BYTES]]) > UNIT_BYTES
    assert over_nixl == []
    with pytest.raises(ObjectMissing):
        store.read(ObjectName("a/b"), [reading.part(0, PART)[:UNIT_BYTES]])
