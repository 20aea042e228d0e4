"""Redis' protocol on a socket pair: what is understood, what is refused, and what ends a connection."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

import pytest

from vllm_hicache.errors import StoreTimeout, StoreUnavailable
from vllm_hicache.storage.resp import Deadline, NoRedis, ServerError, Wire, command

POISON = 0xA5


def soon() -> Deadline:
    return Deadline(0.1)


def later() -> Deadline:
    return Deadline(30.0)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Wire]]:
    server, client = socket.socketpair()
    wire = Wire(client)
    yield server, wire
    wire.close()
    server.close()


def is_closed(server: socket.socket) -> bool:
    """The other end sees the end of the connection, and nothing else comes any more."""
    server.settimeout(30.0)
    try:
        while server.recv(1 << 20):
            pass
    except ConnectionResetError:
        pass
    return True


def test_a_request_is_its_words_with_their_lengths() -> None:
    assert command(b"GET", b"k y", b"") == b"*3\r\n$3\r\nGET\r\n$3\r\nk y\r\n$0\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "kind", "found"),
    [
        (b"+OK\r\n", bytes, b"OK"),
        (b":-12\r\n", int, -12),
        (b"$5\r\nab\r\nc\r\n", bytes, b"ab\r\nc"),
        (b"$0\r\n\r\n", bytes, b""),
        (b"$-1\r\n", object, None),
        (b"*-1\r\n", object, None),
        (b"*2\r\n$1\r\n0\r\n*2\r\n$1\r\na\r\n$2\r\nbc\r\n", list, [b"0", [b"a", b"bc"]]),
        (b"-NOPERM no right\r\n", int, ServerError("NOPERM", "NOPERM no right")),
    ],
)
def test_every_kind_of_reply_is_understood_however_it_is_cut(
    ends: tuple[socket.socket, Wire], sent: bytes, kind: type, found: object
) -> None:
    server, wire = ends
    request = command(b"X")

    def answer_the_rest(cut: int) -> None:
        assert server.recv(len(request)) == request
        server.sendall(sent[cut:])

    for cut in range(1, len(sent)):
        server.sendall(sent[:cut])
        writer = threading.Thread(target=answer_the_rest, args=(cut,))
        writer.start()
        assert wire.ask([request], kind, later()) == [found]
        writer.join()
        assert wire.clean


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x15\x03\x03\x00\x02\x02\x28\r\n",
        b":12a\r\n",
        b":\r\n",
        b":99999999999999999999\r\n",
        b"$-2\r\n",
        b"$2\r\nabc\r\n",
        b"$2\r\nabXY",
        b"$99999999\r\n",
        b"*99999999\r\n",
        b"*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n",
        b"%1\r\n+a\r\n+b\r\n",
        b">1\r\n+push\r\n",
        b"x" * 100_000,
    ],
)
def test_what_is_no_reply_closes_the_connection(ends: tuple[socket.socket, Wire], sent: bytes) -> None:
    server, wire = ends
    server.sendall(sent)
    with pytest.raises(NoRedis):
        wire.ask([command(b"X")], object, later())
    assert not wire.clean
    assert is_closed(server)


def test_a_reply_of_another_kind_closes_the_connection(ends: tuple[socket.socket, Wire]) -> None:
    server, wire = ends
    server.sendall(b"+OK\r\n")
    with pytest.raises(NoRedis, match="bytes where int"):
        wire.ask([command(b"STRLEN", b"k")], int, later())
    assert is_closed(server)


@pytest.mark.parametrize("num_bytes", [0, 1, 30, 5_000, 3_000_000])
def test_a_string_is_scattered_into_parts(ends: tuple[socket.socket, Wire], num_bytes: int) -> None:
    server, wire = ends
    data = os.urandom(num_bytes)
    buffer = bytearray([POISON]) * (num_bytes + 20)
    view = memoryview(buffer)
    cuts = sorted({0, *(min(at, num_bytes) for at in (1, 7, 40, 4_096, 1_000_000)), num_bytes})
    parts = [view[low:high] for low, high in pairwise(cuts)]
    writer = threading.Thread(target=server.sendall, args=(b"$%d\r\n%s\r\n" % (num_bytes, data),))
    writer.start()
    wire.send([command(b"X")], 1, later())
    assert wire.reply_into(parts, later()) == num_bytes
    writer.join()
    assert buffer == data + bytes([POISON]) * 20
    assert wire.clean


def test_a_string_that_is_shorter_than_the_parts_leaves_the_rest_alone(ends: tuple[socket.socket, Wire]) -> None:
    server, wire = ends
    buffer = bytearray([POISON]) * 10
    server.sendall(b"$4\r\nabcd\r\n:7\r\n")
    wire.send([command(b"X"), command(b"Y")], 2, later())
    view = memoryview(buffer)
    assert wire.reply_into([view[:3], view[3:6], view[6:]], later()) == 4
    assert buffer == b"abcd" + bytes([POISON]) * 6
    assert not wire.clean
    assert wire.reply(int, later()) == 7
    assert wire.clean


@pytest.mark.parametrize(
    "sent", [b"$11\r\n12345678901\r\n", b"$3\r\nabcXX", b"$-1\r\n", b":3\r\n", b"$3\r\nab", b"$3\r\nabc\r", b""]
)
def test_a_string_too_long_or_cut_closes_the_connection(ends: tuple[socket.socket, Wire], sent: bytes) -> None:
    server, wire = ends
    buffer = bytearray([POISON]) * 12
    server.sendall(sent)
    server.shutdown(socket.SHUT_WR)
    wire.send([command(b"X")], 1, later())
    with pytest.raises(StoreUnavailable):
        wire.reply_into([memoryview(buffer)[:10]], later())
    assert buffer[10:] == bytes([POISON]) * 2
    assert not wire.clean
    assert is_closed(server)


def test_an_error_instead_of_a_string_keeps_the_connection(ends: tuple[socket.socket, Wire]) -> None:
    server, wire = ends
    server.sendall(b"-LOADING wait\r\n")
    wire.send([command(b"X")], 1, later())
    assert wire.reply_into([memoryview(bytearray(3))], later()) == ServerError("LOADING", "LOADING wait")
    assert wire.clean


@pytest.mark.parametrize("extra", [b"\r", b":1\r\n", b"x"])
def test_a_byte_that_nobody_asked_for_makes_a_wire_unclean(ends: tuple[socket.socket, Wire], extra: bytes) -> None:
    server, wire = ends
    server.sendall(b":1\r\n" + extra)
    assert wire.ask([command(b"X")], int, later()) == [1]
    assert not wire.clean


def test_a_wire_that_is_owed_a_reply_is_unclean(ends: tuple[socket.socket, Wire]) -> None:
    _, wire = ends
    wire.send([command(b"X")], 1, later())
    assert not wire.clean


def test_a_byte_that_comes_to_an_idle_wire_makes_it_unclean(ends: tuple[socket.socket, Wire]) -> None:
    server, wire = ends
    assert wire.clean
    server.sendall(b"x")
    assert not wire.clean


def test_a_wire_whose_peer_is_gone_is_unclean(ends: tuple[socket.socket, Wire]) -> None:
    server, wire = ends
    server.close()
    assert not wire.clean


def test_a_reply_that_comes_byte_by_byte_is_cut_at_the_deadline(ends: tuple[socket.socket, Wire]) -> None:
    server, wire = ends
    over = threading.Event()

    def dribble() -> None:
        with suppress(BrokenPipeError):
            server.sendall(b"$1000\r\n")
            while not over.wait(0.01):
                server.sendall(b"x")

    writer = threading.Thread(target=dribble)
    writer.start()
    try:
        wire.send([command(b"X")], 1, soon())
        with pytest.raises(StoreTimeout, match=r"0\.1 s"):
            wire.reply_into([memoryview(bytearray(1000))], soon())
    finally:
        over.set()
        writer.join()
    assert not wire.clean


def test_a_request_that_nobody_takes_is_cut_at_the_deadline(ends: tuple[socket.socket, Wire]) -> None:
    server, wire = ends
    with pytest.raises(StoreTimeout):
        wire.send([bytes(64 << 20)], 1, soon())
    assert is_closed(server)


def test_a_deadline_that_has_passed_sends_nothing(ends: tuple[socket.socket, Wire]) -> None:
    server, wire = ends
    with pytest.raises(StoreTimeout):
        wire.send([b"PING\r\n"], 1, Deadline(0.0))
    assert server.recv(100) == b""


def test_thousands_of_parts_are_gathered_in_order(ends: tuple[socket.socket, Wire]) -> None:
    server, wire = ends
    data = os.urandom(300_000)
    parts = [memoryview(data)[at : at + 100] for at in range(0, 300_000, 100)]
    received = bytearray()

    def receive() -> None:
        while len(received) < len(data):
            received.extend(server.recv(1 << 20))

    reader = threading.Thread(target=receive)
    reader.start()
    wire.send([b"", *parts, b""], 1, later())
    reader.join()
    assert received == data
