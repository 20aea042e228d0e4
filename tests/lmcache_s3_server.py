"""Just enough S3 for LMCache's `s3` adapter: objects by path, ranges, a listing in pages; signatures unchecked.

That adapter takes virtual-hosted addresses alone, so the bucket is the whole server.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 3


class Bucket(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}

    @property
    def settings(self) -> dict[str, str]:
        """Of LMCache's `s3` adapter."""
        return {
            "s3_endpoint": f"127.0.0.1:{self.server_port}",
            "s3_region": "us-east-1",
            "s3_num_io_threads": "2",
            "s3_prefer_http2": "false",
            "disable_tls": "true",
            "aws_access_key_id": "id",
        }


@contextmanager
def running_bucket() -> Iterator[Bucket]:
    with Bucket() as bucket:
        thread = threading.Thread(target=bucket.serve_forever, args=[0.01])
        thread.start()
        yield bucket
        bucket.shutdown()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Bucket

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        data = self._object()
        self._answer(404 if data is None else 200, b"", length=len(data or b""))

    def do_GET(self) -> None:
        if urlsplit(self.path).path == "/":
            self._answer(200, self._listing())
            return
        data = self._object()
        if data is None:
            self._answer(404, b"")
        elif "Range" in self.headers:
            low, high = (int(each or len(data)) for each in self.headers["Range"].split("=")[1].split("-"))
            high = min(high, len(data) - 1)
            self._answer(206, data[low : high + 1], {"Content-Range": f"bytes {low}-{high}/{len(data)}"})
        else:
            self._answer(200, data)

    def do_PUT(self) -> None:
        self.server.objects[self._key()] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, b"")

    def do_DELETE(self) -> None:
        self.server.objects.pop(self._key(), None)
        self._answer(204, b"")

    def _key(self) -> str:
        return unquote(urlsplit(self.path).path[1:])

    def _object(self) -> bytes | None:
        return self.server.objects.get(self._key())

    def _listing(self) -> bytes:
        query = {key: value for key, (value,) in parse_qs(urlsplit(self.path).query).items()}
        start, prefix = int(query.get("continuation-token", "0")), query.get("prefix", "")
        found = [(key, data) for key, data in sorted(self.server.objects.items()) if key.startswith(prefix)]
        items = [
            f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size></Contents>"
            for key, data in found[start : start + PAGE]
        ]
        if start + PAGE < len(found):
            items.append(f"<NextContinuationToken>{start + PAGE}</NextContinuationToken>")
        return f"<ListBucketResult>{''.join(items)}</ListBucketResult>".encode()

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"ETag": '"1"', **(headers or {})}.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)
