"""What a server may do wrong on the wire, played by one that is no redis: an error, and never a wrong byte."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, repeat

import pytest
from redis_store_kit import OBJECT, get, opened, put

from vllm_hicache.errors import ConfigError, ObjectMissing, StoreError, StoreTimeout, StoreUnavailable
from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import Store, StoreOptions

QUICK = StoreOptions(timeout_s=0.2)
WHOLE = b":12\r\n$4\r\nabcd\r\n"
"""The answer to a read of 4 bytes."""


class Impostor:
    """Listens on the loopback interface and lets `play` have each connection, one after the other."""

    def __init__(self, play: Callable[[socket.socket, threading.Event], None]) -> None:
        self._play = play
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve)
        self.num_connections = 0

    @property
    def address(self) -> str:
        return "{}:{}".format(*self._listener.getsockname())

    def __enter__(self) -> Impostor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            with connection, suppress(OSError):
                self._play(connection, self._over)


def answering(first: bytes, later: bytes, *, ends: bool = False) -> Impostor:
    """Answers the first request ever with `first`, each one after that with `later`; then hangs up if it `ends`."""
    answers: Iterator[bytes] = chain([first], repeat(later))

    def play(connection: socket.socket, _: threading.Event) -> None:
        while connection.recv(1 << 20):
            answer = next(answers)
            connection.sendall(answer)
            if ends and answer is first:
                return

    return Impostor(play)


def dribbling(start: bytes = b"") -> Impostor:
    """Sends digits, one at a time, for ever."""

    def play(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(1 << 20)
        connection.sendall(start)
        while not over.wait(0.02):
            connection.sendall(b"1")

    return Impostor(play)


@contextmanager
def served(impostor: Impostor, options: StoreOptions | None = None, user: str = "") -> Iterator[Store]:
    with impostor, opened(f"redis://{user}{impostor.address}", options) as store:
        yield store


@pytest.mark.parametrize(
    "first",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"+OK\r\n+OK\r\n",
        b"$2\r\n12\r\n$4\r\nabcd\r\n",
        b":12\r\n:4\r\n",
        b":12\r\n$-1\r\n",
        b":12\r\n$5\r\nabcde\r\n",
        b":12\r\n$4\r\nabcdXX",
        b":12\r\n$4\r\nabcde\r\n",
        b":12\r\n$999999999999\r\nabcd",
    ],
)
def test_a_wrong_answer_to_a_read_ends_that_connection_and_the_next_call_is_right(first: bytes) -> None:
    impostor = answering(first, WHOLE)
    with served(impostor) as store:
        with pytest.raises(StoreUnavailable):
            get(store, 4)
        assert get(store, 4) == b"abcd"
        assert get(store, 4) == b"abcd"
    assert impostor.num_connections == 2


@pytest.mark.parametrize("first", [b"", b":1", b":12\r\n", b":12\r\n$4\r", b":12\r\n$4\r\nab", b":12\r\n$4\r\nabcd\r"])
def test_a_connection_that_breaks_in_mid_read_is_unavailable_and_made_anew(first: bytes) -> None:
    impostor = answering(first, WHOLE, ends=True)
    with served(impostor) as store:
        with pytest.raises(StoreUnavailable, match="broke"):
            get(store, 4)
        assert get(store, 4) == b"abcd"
    assert impostor.num_connections == 2


def test_bytes_after_an_answer_never_reach_the_next_call() -> None:
    impostor = answering(WHOLE + b":12\r\n$4\r\nEVIL\r\n", WHOLE)
    with served(impostor) as store:
        assert get(store, 4) == b"abcd"
        assert get(store, 4) == b"abcd"
    assert impostor.num_connections == 2


@pytest.mark.parametrize("answer", [b":12\r\n$3\r\nabc\r\n", b":12\r\n$0\r\n\r\n", b":0\r\n$4\r\nabcd\r\n"])
def test_an_object_that_came_or_went_between_the_two_questions_is_missing(answer: bytes) -> None:
    impostor = answering(answer, WHOLE)
    with served(impostor) as store:
        with pytest.raises(ObjectMissing):
            get(store, 4)
        assert get(store, 4) == b"abcd"
    assert impostor.num_connections == 1


def test_a_scan_that_comes_by_a_key_twice_lists_it_once() -> None:
    keys = b"*1\r\n$11\r\nhicache/a/b\r\n"
    about = b":9\r\n$8\r\n\1\0\0\0\0\0\0\0\r\n"
    answers = iter([b"*2\r\n$1\r\n7\r\n" + keys, about, b"*2\r\n$1\r\n0\r\n" + keys, about])

    def play(connection: socket.socket, _: threading.Event) -> None:
        while connection.recv(1 << 20):
            connection.sendall(next(answers))

    with served(Impostor(play)) as store:
        assert [(info.name, info.size_bytes, info.modified_s) for info in store.list("")] == [(OBJECT, 1, 0.001)]


@pytest.mark.parametrize(
    "answer", [b"*1\r\n$1\r\n0\r\n", b"*2\r\n:0\r\n*0\r\n", b"*2\r\n$1\r\n0\r\n*1\r\n:1\r\n", b"$1\r\n0\r\n", b":0\r\n"]
)
def test_a_wrong_answer_to_a_scan_is_no_empty_list(answer: bytes) -> None:
    with served(answering(answer, answer)) as store, pytest.raises(StoreUnavailable):
        list(store.list(""))


def test_a_wrong_answer_to_a_delete_is_an_error() -> None:
    impostor = answering(b"+OK\r\n", b":1\r\n")
    with served(impostor) as store:
        with pytest.raises(StoreUnavailable):
            store.delete(OBJECT)
        assert store.delete(OBJECT) is True
    assert impostor.num_connections == 2


@pytest.mark.parametrize("answer", [b"+QUEUED\r\n", b":1\r\n", b"$2\r\nOK\r\n\r\n", b"*0\r\n"])
def test_a_wrong_answer_to_a_write_is_no_success(answer: bytes) -> None:
    impostor = answering(answer, b"+OK\r\n")
    with served(impostor) as store:
        with suppress(StoreUnavailable):
            assert put(store, b"1") is True
            assert answer.startswith(b"$2\r\nOK")
        assert put(store, b"1") is True
    assert impostor.num_connections == 2


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (b"-OOM command not allowed\r\n", StoreUnavailable, "maxmemory-policy"),
        (b"-MISCONF cannot persist\r\n", StoreUnavailable, "MISCONF"),
        (b"-LOADING in memory\r\n", StoreUnavailable, "LOADING"),
        (b"-READONLY replica\r\n", StoreUnavailable, "READONLY"),
        (b"-CLUSTERDOWN Hash slot not served\r\n", StoreUnavailable, "CLUSTERDOWN"),
        (b"-MASTERDOWN Link\r\n", StoreUnavailable, "MASTERDOWN"),
        (b"-MOVED 1 10.0.0.1:6379\r\n", StoreUnavailable, "add cluster=true"),
        (b"-ERR max number of clients reached\r\n", StoreUnavailable, "maxclients"),
        (b"-ERR invalid bulk length\r\n", StoreError, "invalid bulk length"),
    ],
)
def test_an_error_reply_is_translated_and_keeps_the_connection(
    answer: bytes, error: type[StoreError], message: str
) -> None:
    impostor = answering(answer, b"+OK\r\n")
    with served(impostor) as store:
        with pytest.raises(error, match=message):
            put(store, b"1")
        assert put(store, b"1") is True
    assert impostor.num_connections == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda store: get(store, 4),
        lambda store: put(store, b"1234"),
        lambda store: store.exists([OBJECT, ObjectName("c")]),
        lambda store: store.delete(OBJECT),
        lambda store: list(store.list("")),
        lambda store: store.usage(),
        lambda store: store.probe(),
    ],
    ids=["read", "write", "exists", "delete", "list", "usage", "probe"],
)
@pytest.mark.parametrize("start", [b":", b"$1000\r\n", b"*1\r\n"])
@pytest.mark.parametrize("user", ["", ":secret@"])
def test_a_server_that_answers_byte_by_byte_is_a_timeout(
    call: Callable[[Store], object], start: bytes, user: str
) -> None:
    with served(dribbling(start), QUICK, user) as store, pytest.raises(StoreError) as failure:
        call(store)
    # What is no answer to this question may be told at once.
    assert isinstance(failure.value, StoreTimeout) or start != b":"


def test_a_value_that_comes_byte_by_byte_is_a_timeout_and_ends_the_connection() -> None:
    impostor = dribbling(b":1008\r\n$1000\r\n")
    with served(impostor, QUICK) as store:
        for _ in range(2):
            with pytest.raises(StoreTimeout, match=r"0\.2 s"):
                get(store, 1000)
    assert impostor.num_connections == 2


def test_a_server_that_takes_no_bytes_is_a_timeout() -> None:
    def play(connection: socket.socket, over: threading.Event) -> None:
        over.wait()

    with served(Impostor(play), QUICK) as store, pytest.raises(StoreTimeout):
        put(store, bytes(64 << 20))


def test_a_value_longer_than_asked_for_is_not_written_past_the_parts() -> None:
    buffer = bytearray(b"\xa5") * 10
    impostor = answering(b":108\r\n$100\r\n" + b"x" * 100 + b"\r\n", WHOLE)
    with served(impostor) as store, pytest.raises(StoreUnavailable):
        store.read(OBJECT, [memoryview(buffer)[2:6]])
    assert buffer == b"\xa5" * 10


@pytest.mark.parametrize("told", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"220 mail ESMTP\r\n", b"SSH-2.0-OpenSSH\r\n"])
def test_a_probe_of_what_is_no_redis_says_so(told: bytes) -> None:
    with served(answering(told, told)) as store, pytest.raises(ConfigError, match="is it redis"):
        store.probe()


def test_a_server_that_repeats_what_it_is_told_learns_us_nothing_about_the_password() -> None:
    def play(connection: socket.socket, _: threading.Event) -> None:
        while request := connection.recv(1 << 20):
            word = b"-ERR unknown command with args: " + request.replace(b"\r\n", b" ") + b"\r\n"
            connection.sendall(word)

    with served(Impostor(play), user="me:hunter2@") as store, pytest.raises(ConfigError) as refusal:
        store.probe()
    assert "hunter2" not in str(refusal.value)
    assert "hunter2" not in repr(refusal.value.__cause__)


@pytest.mark.parametrize("answer", [b"-LOADING in memory\r\n", b"+WHAT\r\n", b":1\r\n"])
def test_no_call_is_made_before_the_database_is_selected(answer: bytes) -> None:
    with (
        answering(answer, WHOLE) as impostor,
        opened(f"redis://{impostor.address}/1") as store,
        pytest.raises(StoreUnavailable),
    ):
        get(store, 4)


def test_nobody_who_listens_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with opened(f"redis://127.0.0.1:{port}") as store, pytest.raises(StoreUnavailable, match="refused"):
        store.probe()


def test_a_socket_file_that_is_not_there_is_unavailable(tmp_path: object) -> None:
    with opened(f"unix://{tmp_path}/none") as store, pytest.raises(StoreUnavailable, match="No such file"):
        store.probe()


def test_a_host_without_an_address_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with (
        opened("redis://nowhere:1") as store,
        pytest.raises(StoreUnavailable, match="nowhere:1 cannot be reached: Name"),
    ):
        store.probe()
