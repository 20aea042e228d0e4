"""The faults that `fault_proxy.py` knows, as records.

Those that wait for `after_bytes` of a reply leave shorter replies alone, so that look-ups pass and large reads are
hit in their payload, behind the protocol's own header.

Owner: scripts and tests. Pure; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

PAYLOAD_OFFSET_BYTES = 4096
"""Further into a reply than any header of HTTP or RESP reaches."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Holds each request back for `seconds`; with `marks`, only those that have one in their first KiB."""

    seconds: float
    marks: tuple[bytes, ...] = ()

    def applies(self, request: bytes) -> bool:
        """Whether a request that begins like this is held back."""
        return not self.marks or any(mark in request[:1024] for mark in self.marks)


@dataclass(frozen=True, slots=True)
class Throttle:
    """Lets bytes through at `bytes_per_s`, on each connection and in each direction."""

    bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Ends the connection by RST after so many bytes of a reply; `num_times` of them, all for None."""

    after_bytes: int = PAYLOAD_OFFSET_BYTES
    num_times: int | None = None


@dataclass(frozen=True, slots=True)
class Truncate:
    """Ends the connection in good order, by FIN, after so many bytes of a reply."""

    after_bytes: int = PAYLOAD_OFFSET_BYTES


@dataclass(frozen=True, slots=True)
class Overlong:
    """Puts `extra` into each reply after so many bytes."""

    after_bytes: int = PAYLOAD_OFFSET_BYTES
    extra: bytes = b"\x5a" * 64


@dataclass(frozen=True, slots=True)
class Flip:
    """Turns one bit of each reply, in the byte at this offset."""

    after_bytes: int = PAYLOAD_OFFSET_BYTES


@dataclass(frozen=True, slots=True)
class HttpError:
    """Answers HTTP requests itself, with an S3 error; with `methods`, only those. Others pass."""

    status: int = 503
    code: str = "SlowDown"
    methods: frozenset[str] = frozenset()

    def reply(self) -> bytes:
        """The whole answer."""
        body = f"<?xml version='1.0'?><Error><Code>{self.code}</Code><Message>fault</Message></Error>".encode()
        head = f"HTTP/1.1 {self.status} {self.code}\r\nContent-Type: application/xml\r\nConnection: close\r\n"
        return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


@dataclass(frozen=True, slots=True)
class Hang:
    """Accepts, swallows and never answers. Connections that lost bytes are reset when the fault ends."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Closes the listening socket and resets every connection."""


Fault = Latency | Throttle | Reset | Truncate | Overlong | Flip | HttpError | Hang | Refuse
