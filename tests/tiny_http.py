"""An HTTP server of a few lines whose every answer is scripted: truncated, endless, refusing or silent.

with TinyHttp(lambda connection, head: connection.sendall(answer(b"12345"))) as server: ...
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable

Script = Callable[[socket.socket, str], None]
"""Gets the connection and the request's head; the connection is closed when it returns."""


class TinyHttp:
    """Serves one request a connection, each on a thread of its own. `heads` holds the requests so far."""

    def __init__(self, script: Script, context: ssl.SSLContext | None = None) -> None:
        self._script = script
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept)]
        self._open: set[socket.socket] = set()
        self.heads: list[str] = []
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> TinyHttp:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    @property
    def endpoint(self) -> str:
        return f"{'https' if self._context else 'http'}://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"s3://bucket/p?endpoint={self.endpoint}&region=us-east-1"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        # What a client does to its connection is no failure of the server's.
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            if self._context is not None:
                connection = stack.enter_context(self._context.wrap_socket(connection, server_side=True))
            self._open.add(connection)
            stack.callback(self._open.discard, connection)
            head = read_head(connection)
            if head:
                self.heads.append(head)
                self._script(connection, head)


def read_head(connection: socket.socket) -> str:
    """The request up to its empty line; empty when the client went away."""
    received = b""
    while b"\r\n\r\n" not in received:
        chunk = connection.recv(65536)
        if not chunk:
            return ""
        received += chunk
    return received.partition(b"\r\n\r\n")[0].decode("latin-1")


def answer(body: bytes = b"", status: str = "200 OK", *, num_bytes: int | None = None, **headers: str) -> bytes:
    """A whole answer; `num_bytes` is the length that it promises, by default the right one."""
    lines = [
        f"HTTP/1.1 {status}",
        f"Content-Length: {len(body) if num_bytes is None else num_bytes}",
        "Last-Modified: Mon, 30 Nov 2026 13:58:28 GMT",
        'ETag: "0"',
        "Connection: close",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def part(body: bytes, first: int, total: int, *, promised: int | None = None) -> bytes:
    """A 206 that promises `promised` bytes from `first` on of `total`, by default those that it carries."""
    last = first + (len(body) if promised is None else promised) - 1
    return answer(body, "206 Partial Content", Content_Range=f"bytes {first}-{last}/{total}")


def refusal(status: str, code: str, text: str = "") -> bytes:
    """An answer as S3 gives it, with a code in a body of XML."""
    return answer(f"<Error><Code>{code}</Code><Message>no</Message>{text}</Error>".encode(), status)
