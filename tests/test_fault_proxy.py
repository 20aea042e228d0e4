"""The proxy that other tests break stores with: each fault does what it says, and nothing else."""

from __future__ import annotations

import http.client
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fault_kinds import (
    PAYLOAD_OFFSET_BYTES,
    Fault,
    Flip,
    Hang,
    HttpError,
    Latency,
    Overlong,
    Refuse,
    Reset,
    Throttle,
    Truncate,
)
from fault_proxy import FaultProxy

LONG_BYTES = 700_000
SHORT_BYTES = 100


def reply_of(num_bytes: int) -> bytes:
    return bytes(index % 251 for index in range(251)) * (num_bytes // 251) + b"z" * (num_bytes % 251)


class Answering(socketserver.StreamRequestHandler):
    """Answers each line, whose last word is a number, with so many bytes."""

    def handle(self) -> None:
        try:
            while line := self.rfile.readline():
                self.wfile.write(reply_of(int(line.split()[-1])))
        except ConnectionError:
            return


class Target(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


@contextmanager
def target() -> Iterator[int]:
    with Target(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    with target() as port, FaultProxy("127.0.0.1", port) as proxy:
        yield proxy


class Client:
    """One connection that asks for bytes."""

    def __init__(self, proxy: FaultProxy, timeout_s: float = 20.0) -> None:
        self.socket = socket.create_connection(("127.0.0.1", proxy.port), timeout_s)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def send(self, num_bytes: int) -> None:
        self.socket.sendall(b"%d\n" % num_bytes)

    def receive(self, num_bytes: int) -> bytes:
        """So many bytes, or fewer when the other side ends before."""
        received = bytearray()
        while len(received) < num_bytes and (more := self.socket.recv(num_bytes - len(received))):
            received += more
        return bytes(received)

    def ask(self, num_bytes: int) -> bytes:
        self.send(num_bytes)
        return self.receive(num_bytes)


def test_without_a_fault_bytes_pass_as_they_are(proxy: FaultProxy) -> None:
    with Client(proxy) as client, Client(proxy) as other:
        for each in (client, other, client):
            assert each.ask(LONG_BYTES) == reply_of(LONG_BYTES)
    counters = proxy.counters
    assert (counters.num_connections, counters.num_struck) == (2, 0)
    assert (counters.request_bytes, counters.reply_bytes) == (3 * len(b"700000\n"), 3 * LONG_BYTES)


@pytest.mark.parametrize("fault", [Flip(SHORT_BYTES), Overlong(), Truncate(), Reset()], ids=repr)
def test_a_fault_in_the_payload_leaves_short_replies_alone(proxy: FaultProxy, fault: Fault) -> None:
    proxy.set_fault(fault)
    with Client(proxy) as client:
        for _ in range(50):
            assert client.ask(SHORT_BYTES) == reply_of(SHORT_BYTES)
    assert proxy.counters.num_struck == 0


def test_a_flip_turns_one_bit_of_each_long_reply(proxy: FaultProxy) -> None:
    expected = bytearray(reply_of(LONG_BYTES))
    expected[PAYLOAD_OFFSET_BYTES] ^= 0x10
    with Client(proxy) as client:
        proxy.set_fault(Flip())
        assert [client.ask(LONG_BYTES) for _ in range(2)] == [expected] * 2
        proxy.clear()
        assert client.ask(LONG_BYTES) == reply_of(LONG_BYTES)
    assert proxy.counters.num_struck == 2


def test_an_overlong_reply_has_extra_bytes_in_its_middle(proxy: FaultProxy) -> None:
    proxy.set_fault(Overlong(after_bytes=5000, extra=b"extra"))
    plain = reply_of(LONG_BYTES)
    with Client(proxy) as client:
        client.send(LONG_BYTES)
        assert client.receive(LONG_BYTES + 5) == plain[:5000] + b"extra" + plain[5000:]


def test_a_truncated_reply_ends_in_good_order(proxy: FaultProxy) -> None:
    proxy.set_fault(Truncate(after_bytes=300_000))
    with Client(proxy) as client:
        assert client.ask(LONG_BYTES) == reply_of(LONG_BYTES)[:300_000]


def test_a_reset_is_an_error_and_no_end(proxy: FaultProxy) -> None:
    proxy.set_fault(Reset())
    with Client(proxy) as client, pytest.raises(ConnectionResetError):
        client.ask(LONG_BYTES)
    assert proxy.counters.num_struck == 1


def test_a_reset_may_strike_a_number_of_times_and_no_more(proxy: FaultProxy) -> None:
    proxy.set_fault(Reset(num_times=1))
    with Client(proxy) as client, pytest.raises(ConnectionResetError):
        client.ask(LONG_BYTES)
    with Client(proxy) as client:
        assert client.ask(LONG_BYTES) == reply_of(LONG_BYTES)
    assert proxy.counters.num_struck == 1


def test_after_a_reset_a_new_connection_works(proxy: FaultProxy) -> None:
    proxy.set_fault(Reset(after_bytes=0))
    with Client(proxy) as client, pytest.raises(ConnectionResetError):
        client.ask(SHORT_BYTES)
    proxy.clear()
    with Client(proxy) as client:
        assert client.ask(LONG_BYTES) == reply_of(LONG_BYTES)


def test_a_hang_takes_requests_and_never_answers(proxy: FaultProxy) -> None:
    proxy.set_fault(Hang())
    with Client(proxy, timeout_s=0.2) as client, pytest.raises(TimeoutError):
        client.ask(SHORT_BYTES)


def test_a_hang_strikes_connections_that_are_open_and_its_end_resets_them(proxy: FaultProxy) -> None:
    with Client(proxy) as client:
        client.ask(SHORT_BYTES)
        proxy.set_fault(Hang())
        client.socket.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.ask(SHORT_BYTES)
        client.socket.settimeout(20)
        proxy.clear()
        with pytest.raises(ConnectionResetError):
            client.receive(SHORT_BYTES)


def test_a_connection_that_was_idle_during_a_hang_goes_on(proxy: FaultProxy) -> None:
    with Client(proxy) as client:
        client.ask(SHORT_BYTES)
        proxy.set_fault(Hang())
        proxy.clear()
        assert client.ask(SHORT_BYTES) == reply_of(SHORT_BYTES)


def test_refusing_resets_open_connections_and_takes_no_new_ones_until_it_is_cleared(proxy: FaultProxy) -> None:
    port = proxy.port
    with Client(proxy) as client:
        client.ask(SHORT_BYTES)
        proxy.set_fault(Refuse())
        with pytest.raises(ConnectionError):
            client.ask(SHORT_BYTES)
    with pytest.raises(ConnectionRefusedError):
        Client(proxy)
    proxy.clear()
    assert proxy.port == port
    with Client(proxy) as client:
        assert client.ask(SHORT_BYTES) == reply_of(SHORT_BYTES)


def test_refusing_lets_nothing_out_that_a_throttle_has_held_back(proxy: FaultProxy) -> None:
    proxy.set_fault(Throttle(bytes_per_s=1000))
    with Client(proxy) as client:
        client.send(LONG_BYTES)
        client.receive(50)
        proxy.set_fault(Refuse())
        with pytest.raises(ConnectionResetError):
            client.receive(LONG_BYTES)
    assert proxy.counters.reply_bytes < 10_000


def test_latency_holds_back_requests_with_the_mark_and_no_others(proxy: FaultProxy) -> None:
    proxy.set_fault(Latency(seconds=3600, marks=(b"700",)))
    with Client(proxy) as held, Client(proxy) as free:
        held.send(LONG_BYTES)
        assert free.ask(SHORT_BYTES) == reply_of(SHORT_BYTES)
        proxy.clear()
        assert held.receive(LONG_BYTES) == reply_of(LONG_BYTES)
    assert proxy.counters.num_struck == 1


def test_throttled_requests_arrive_whole(proxy: FaultProxy) -> None:
    proxy.set_fault(Throttle(bytes_per_s=2000))
    with Client(proxy) as client:
        client.socket.sendall(b"x" * 500 + b" 100\n")
        assert client.receive(SHORT_BYTES) == reply_of(SHORT_BYTES)
    assert proxy.counters.num_struck >= 6


def test_throttled_bytes_come_whole_and_the_rest_at_once_when_the_throttle_goes(proxy: FaultProxy) -> None:
    proxy.set_fault(Throttle(bytes_per_s=1000))
    with Client(proxy) as client:
        client.send(LONG_BYTES)
        first = client.receive(50)
        assert proxy.counters.reply_bytes < LONG_BYTES
        proxy.clear()
        assert first + client.receive(LONG_BYTES - 50) == reply_of(LONG_BYTES)


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_an_http_error_is_a_whole_answer_also_to_a_request_with_a_large_body(proxy: FaultProxy, method: str) -> None:
    proxy.set_fault(HttpError())
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=20)
    connection.request(method, "/bucket/key", body=b"x" * 30_000_000 if method == "PUT" else None)
    reply = connection.getresponse()
    assert (reply.status, b"SlowDown" in reply.read()) == (503, True)
    connection.close()
    assert proxy.counters.request_bytes == 0


def test_an_http_error_for_one_method_lets_the_others_pass(proxy: FaultProxy) -> None:
    proxy.set_fault(HttpError(403, "AccessDenied", frozenset({"PUT"})))
    with Client(proxy) as client:
        assert client.ask(SHORT_BYTES) == reply_of(SHORT_BYTES)
        client.socket.sendall(b"GET /x 100\n")
        assert client.receive(SHORT_BYTES) == reply_of(SHORT_BYTES)
        client.socket.sendall(b"PUT /x 100\r\n\r\n")
        assert client.receive(12) == b"HTTP/1.1 403"
    assert proxy.counters.num_struck == 1


def test_a_target_that_is_down_is_a_reset(proxy: FaultProxy) -> None:
    with target() as port:
        pass
    with FaultProxy("127.0.0.1", port) as lonely, pytest.raises(ConnectionError), Client(lonely) as client:
        client.ask(SHORT_BYTES)


def test_a_proxy_ends_with_connections_open_and_leaves_no_thread(proxy: FaultProxy) -> None:
    with target() as port, FaultProxy("127.0.0.1", port) as other:
        client = Client(other)
        client.ask(SHORT_BYTES)
        other.set_fault(Hang())
        client.send(SHORT_BYTES)
        num_threads = threading.active_count()
    with client, pytest.raises(ConnectionResetError):
        client.receive(1)
    assert threading.active_count() < num_threads
