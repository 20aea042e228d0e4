"""Redis' wire protocol (RESP2) on one socket: values are scattered and gathered in place, under one deadline.

Requests are pipelined; whoever reads fewer replies than were asked for, or meets any error, has a wire that is
not `clean` any more and must be closed. Protocol: https://redis.io/docs/latest/develop/reference/protocol-spec

Owner: `redis_nodes.WirePool`. Thread: a wire belongs to one call at a time; `Deadline` and `command` to any.
"""

from __future__ import annotations

import math
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from vllm_hicache.errors import StoreTimeout, StoreUnavailable
from vllm_hicache.storage.iovec import after_bytes, first_bytes

_LIMIT_SLACK_S = 0.05
"""By how much a call may pass its deadline."""
_TIMEVAL = struct.Struct("@ll")
_MAX_PARTS = os.sysconf("SC_IOV_MAX")
_CONTROL_READ_BYTES = 64 << 10
# Little enough that next to nothing of a value is copied by way of the line buffer.
_HEADER_READ_BYTES = 64
_MAX_LINE_BYTES = 64 << 10
_MAX_CONTROL_BULK_BYTES = 1 << 20
_MAX_ITEMS = 1 << 20
_PIECE_BYTES = 256 << 10
_CRLF = b"\r\n"


class NoRedis(StoreUnavailable):
    """What came is no reply, or none to what was asked."""


class Deadline:
    """The end of one store call."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Return the seconds left, more than 0. Raises StoreTimeout."""
        left = self._end_s - time.monotonic()
        if left <= 0:
            raise self.passed()
        return left

    def passed(self) -> StoreTimeout:
        """Return the error to raise."""
        return StoreTimeout(f"redis did not answer within {self._timeout_s:g} s: is it overloaded, or far away?")


@dataclass(frozen=True, slots=True)
class ServerError:
    """An error reply. `code` is its first word in capitals; `text` the whole line."""

    code: str
    text: str


Reply: TypeAlias = "int | bytes | ServerError | list[Reply] | None"
Kind = TypeVar("Kind")


def command(*words: bytes) -> bytes:
    """Return one request."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


class Wire:
    """One connection. All methods raise StoreTimeout or StoreUnavailable, and then the socket is closed."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._gathers = not isinstance(connection, ssl.SSLSocket)
        # On a socket file waiting for all only adds wake-ups: it hands over as much as it holds.
        self._receive_flags = 0 if connection.family == socket.AF_UNIX else socket.MSG_WAITALL
        self._limit_s = math.inf
        if self._gathers:
            connection.settimeout(None)
        self._unread = b""
        self._at = 0
        self._num_owed = 0

    @property
    def clean(self) -> bool:
        """Whether every byte of every reply was read, and no other came. Only such a wire may be used again."""
        if self._socket.fileno() < 0 or self._num_owed or self._at < len(self._unread):
            return False
        poll = select.poll()
        # An idle connection has nothing to say: what is readable is its end, or a reply nobody waits for.
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Close the socket; a second call does nothing."""
        with suppress(OSError):
            self._socket.close()

    def ask(self, requests: Sequence[bytes], kind: type[Kind], deadline: Deadline) -> list[Kind | ServerError]:
        """Send requests in one go and return their replies in order, as `reply` does."""
        self.send([b"".join(requests)], len(requests), deadline)
        return [self.reply(kind, deadline) for _ in requests]

    def send(self, parts: Sequence[bytes | memoryview], num_requests: int, deadline: Deadline) -> None:
        """Send bytes that are `num_requests` requests; nothing is joined or copied."""
        pending = [view for part in parts if (view := memoryview(part)).nbytes]
        self._num_owed += num_requests
        with self._closing(deadline):
            while pending:
                self._wait_until(deadline)
                if self._gathers:
                    count = self._socket.sendmsg(pending[:_MAX_PARTS])
                else:
                    count = self._socket.send(pending[0])
                pending = after_bytes(pending, count)

    def reply(self, kind: type[Kind], deadline: Deadline) -> Kind | ServerError:
        """Return the next reply, which must be of `kind` or an error; strings are copied: 1 MiB at most."""
        with self._closing(deadline):
            found = self._item(deadline, 0)
            if not isinstance(found, kind | ServerError):
                raise NoRedis(f"redis answered with {type(found).__name__} where {kind.__name__} was asked for")
            self._num_owed -= 1
            return found

    def reply_into(
        self, parts: Sequence[memoryview], deadline: Deadline, told: Callable[[int], None] | None = None
    ) -> int | ServerError:
        """Scatter the next reply, a string that fits into `parts`; return its length in bytes.

        `told` hears how many leading bytes are in place. An error reply is returned. A longer string, or anything
        else, is no answer to what was asked.
        """
        with self._closing(deadline):
            return self._string_into(self._line(deadline, _HEADER_READ_BYTES), parts, deadline, told)

    def value_into(
        self, parts: Sequence[memoryview], deadline: Deadline, told: Callable[[int], None] | None = None
    ) -> int | ServerError | None:
        """Scatter the next reply, a string of any length, into `parts`; return its length in bytes, None for no string.

        What does not fit is not received: the wire is not clean any more. Else as `reply_into`.
        """
        with self._closing(deadline):
            line = self._line(deadline, _HEADER_READ_BYTES)
            if line == b"$-1":
                self._num_owed -= 1
                return None
            num_bytes = _number(line[1:]) if line[:1] == b"$" else -1
            if num_bytes > sum(part.nbytes for part in parts):
                self._fill([part for part in parts if part.nbytes], deadline, told)
                return num_bytes
            return self._string_into(line, parts, deadline, told)

    def _string_into(
        self, line: bytes, parts: Sequence[memoryview], deadline: Deadline, told: Callable[[int], None] | None
    ) -> int | ServerError:
        if line[:1] == b"-":
            self._num_owed -= 1
            return _server_error(line)
        num_bytes = _number(line[1:]) if line[:1] == b"$" else -1
        if not 0 <= num_bytes <= sum(part.nbytes for part in parts):
            raise _no_redis(line)
        end = memoryview(bytearray(2))
        # The line end comes with the last bytes, and is none of them.
        tell = None if told is None else lambda count: told(min(count, num_bytes))
        self._fill([*first_bytes(parts, num_bytes), end], deadline, tell)
        if end != _CRLF:
            raise _no_redis(bytes(end))
        self._num_owed -= 1
        return num_bytes

    def _item(self, deadline: Deadline, depth: int) -> Reply:
        line = self._line(deadline, _CONTROL_READ_BYTES)
        kind, text = line[:1], line[1:]
        if kind == b"+":
            return text
        if kind == b"-":
            return _server_error(line)
        if kind not in (b":", b"$", b"*") or depth > 2:
            raise _no_redis(line)
        number = _number(text)
        if kind == b":":
            return number
        if number == -1:
            return None
        if number < 0 or number > (_MAX_ITEMS if kind == b"*" else _MAX_CONTROL_BULK_BYTES):
            raise _no_redis(line)
        if kind == b"*":
            return [self._item(deadline, depth + 1) for _ in range(number)]
        return self._string(number, deadline)

    def _string(self, num_bytes: int, deadline: Deadline) -> bytes:
        """Take a short string and its line end out of the buffer."""
        end = self._at + num_bytes
        if len(self._unread) < end + 2:
            text = bytearray(num_bytes + 2)
            self._fill([memoryview(text)], deadline)
        else:
            text = bytearray(self._unread[self._at : end + 2])
            self._at = end + 2
        if text[-2:] != _CRLF:
            raise _no_redis(bytes(text[-2:]))
        return bytes(text[:-2])

    def _line(self, deadline: Deadline, num_bytes: int) -> bytes:
        """Take one line out of the buffer, receiving up to `num_bytes` at a time."""
        while (end := self._unread.find(_CRLF, self._at)) < 0:
            if len(self._unread) - self._at > _MAX_LINE_BYTES:
                raise _no_redis(self._unread[self._at :])
            self._wait_until(deadline)
            received = self._socket.recv(num_bytes)
            if not received:
                raise ConnectionResetError("it closed the connection")
            self._unread, self._at = self._unread[self._at :] + received, 0
        line = self._unread[self._at : end]
        self._at = end + 2
        return line

    def _fill(self, parts: Sequence[memoryview], deadline: Deadline, told: Callable[[int], None] | None = None) -> None:
        """Fill `parts` from the buffer, then from the socket."""
        pending = [part for part in parts if part.nbytes]
        num_filled = num_told = 0
        while pending and self._at < len(self._unread):
            count = min(pending[0].nbytes, len(self._unread) - self._at)
            pending[0][:count] = self._unread[self._at : self._at + count]
            self._at += count
            num_filled += count
            pending = after_bytes(pending, count)
        while pending:
            self._wait_until(deadline)
            if self._gathers:
                piece = first_bytes(pending[:_MAX_PARTS], _PIECE_BYTES)
                count = self._socket.recvmsg_into(piece, 0, self._receive_flags)[0]
            else:
                count = self._socket.recv_into(pending[0])
            if not count:
                raise ConnectionResetError("it closed the connection")
            num_filled += count
            pending = after_bytes(pending, count)
            # Checked while the processor still has the bytes in its cache, and the kernel receives more.
            if told is not None and num_filled - num_told >= _PIECE_BYTES:
                told(num_filled)
                num_told = num_filled

    def _wait_until(self, deadline: Deadline) -> None:
        """Bound the next call of the socket. The kernel's own limit spares a poll before each call, and holds for a
        whole receive with MSG_WAITALL; TLS has a layer above it that knows Python's limit alone."""
        left_s = deadline.left_s()
        if not self._gathers:
            self._socket.settimeout(left_s)
            return
        # Most calls begin with the limit that the last one left behind: no system call then.
        if abs(self._limit_s - left_s) <= _LIMIT_SLACK_S:
            return
        self._limit_s = left_s
        seconds, rest = divmod(max(1, int(left_s * 1e6)), 1_000_000)
        limit = _TIMEVAL.pack(seconds, rest)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    @contextmanager
    def _closing(self, deadline: Deadline) -> Iterator[None]:
        """Close the socket on any error: what is still under way on it must never answer another request."""
        try:
            yield
        except (TimeoutError, BlockingIOError) as error:
            self.close()
            raise deadline.passed() from error
        except OSError as error:
            self.close()
            raise StoreUnavailable(f"the connection to redis broke: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise


def _server_error(line: bytes) -> ServerError:
    text = line[1:].decode("ascii", "replace")
    return ServerError(text.partition(" ")[0], text)


def _number(text: bytes) -> int:
    digits = text.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > 19:
        raise _no_redis(text)
    return int(text)


def _no_redis(found: bytes) -> NoRedis:
    return NoRedis(f"the server does not speak redis' protocol: {len(found)} bytes that make no reply: is it redis?")
