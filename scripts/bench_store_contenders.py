"""The contenders: our stores with and without the envelope's checks, plain clients, and raw transfers."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench_store_peer import HOST, REQUEST, TAKEN, receive
from bench_store_rounds import Buffer, Contender, Job

from vllm_hicache.grid import Grid
from vllm_hicache.names import ObjectName, PageKey, Role
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.storage.envelope import ChunkId

UNIT_BYTES = 32 << 10
CHECKED_NAMESPACE = bytes(32)
BARE_NAMESPACE = b"\x01" * 32
PEER_PROGRAM = Path(__file__).with_name("bench_store_peer.py")


def chunk_of(job: Job) -> ChunkId:
    return ChunkId(job.key, 0, Role.TARGET, 0, 0)


def bare_name(job: Job) -> ObjectName:
    return chunk_of(job).object_name(BARE_NAMESPACE)


class Checked(Contender):
    """A store as transfers use it: `ChunkStore.save` from slots and `ChunkStore.load` into them."""

    name = "checked"

    def __init__(self, store: Store) -> None:
        self._store = store
        self._chunks = ChunkStore(store, CHECKED_NAMESPACE, Grid())

    def write(self, worker: int, job: Job) -> None:
        if not self._chunks.save(chunk_of(job), job.slot, UNIT_BYTES):
            raise RuntimeError(f"{job.key.hex()} was there already: the store was not empty")

    def read(self, worker: int, job: Job) -> Buffer:
        reason = self._chunks.load(chunk_of(job), job.slot, UNIT_BYTES)
        if reason is not None:
            raise RuntimeError(f"{self._store.describe()} missed {job.key.hex()}, which was written: {reason}")
        return job.slot

    def delete(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._store.delete(chunk_of(job).object_name(CHECKED_NAMESPACE))

    def close(self) -> None:
        """The store is its owner's to close."""


class Bare(Contender):
    """The same store without envelope and checks."""

    name = "bare"

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(self, worker: int, job: Job) -> None:
        if not self._store.write(bare_name(job), [job.slot]):
            raise RuntimeError(f"{job.key.hex()} was there already: the store was not empty")

    def read(self, worker: int, job: Job) -> Buffer:
        total_bytes = self._store.read(bare_name(job), [job.slot])
        if total_bytes != job.slot.nbytes:
            raise RuntimeError(f"{self._store.describe()} gave {total_bytes} of {job.slot.nbytes} bytes")
        return job.slot

    def delete(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._store.delete(bare_name(job))

    def close(self) -> None:
        """The store is its owner's to close."""


class RawFile(Contender):
    """The system calls alone: a file opened, read into the slot, closed."""

    name = "raw"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    def write(self, worker: int, job: Job) -> None:
        fd = os.open(self._path(job), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        try:
            done = 0
            while done < job.slot.nbytes:
                done += os.pwrite(fd, job.slot[done:], done)
        finally:
            os.close(fd)

    def read(self, worker: int, job: Job) -> Buffer:
        with open(self._path(job), "rb", buffering=0) as file:
            done = 0
            while done < job.slot.nbytes:
                done += file.readinto(job.slot[done:]) or 0
        return job.slot

    def delete(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._path(job).unlink()

    def close(self) -> None:
        """Nothing is held between calls."""

    def _path(self, job: Job) -> Path:
        return self._folder / job.key.hex()


class RawSocket(Contender):
    """Bytes over a socket to a process that does nothing else: `recv_into` the slot, `sendall` from it."""

    name = "raw"

    def __init__(self, unix_path: Path | None = None) -> None:
        path = [] if unix_path is None else [str(unix_path)]
        self._peer = subprocess.Popen(
            [sys.executable, str(PEER_PROGRAM), *path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self._peer.stdout is None:
            raise RuntimeError("the peer was started without a pipe to read its address from")
        where = self._peer.stdout.readline().strip()
        if not where:
            self.close()
            raise RuntimeError("the loopback peer did not start: see what it printed above")
        self._address: str | tuple[str, int] = where if unix_path else (HOST, int(where))
        self._connections: dict[int, socket.socket] = {}

    def write(self, worker: int, job: Job) -> None:
        connection = self._connection(worker)
        connection.sendall(REQUEST.pack(-job.slot.nbytes))
        connection.sendall(job.slot)
        if connection.recv(1) != TAKEN:
            raise RuntimeError("the loopback peer did not take what it was sent")

    def read(self, worker: int, job: Job) -> None:
        connection = self._connection(worker)
        connection.sendall(REQUEST.pack(job.slot.nbytes))
        if not receive(connection, job.slot):
            raise RuntimeError("the loopback peer closed before it had sent all")

    def delete(self, jobs: Sequence[Job]) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._peer.communicate()  # closes its stdin

    def _connection(self, worker: int) -> socket.socket:
        if worker not in self._connections:
            family = socket.AF_UNIX if isinstance(self._address, str) else socket.AF_INET
            connection = socket.socket(family)
            connection.connect(self._address)
            if family == socket.AF_INET:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections[worker] = connection
        return self._connections[worker]


class PlainRedis(Contender):
    """redis-py with hiredis: GET and SET."""

    name = "client"

    def __init__(self, url: str) -> None:
        import hiredis  # noqa: F401  # redis-py takes its parser when it is there, and this contender is with it
        import redis

        self._client = redis.Redis.from_url(url)

    def write(self, worker: int, job: Job) -> None:
        self._client.set(self._key(job), bytes(job.slot))  # packs bytes faster than a view

    def read(self, worker: int, job: Job) -> Buffer:
        content = self._client.get(self._key(job))
        if not isinstance(content, bytes):
            raise RuntimeError(f"Redis has lost {job.key.hex()}: give it more memory")
        return content

    def delete(self, jobs: Sequence[Job]) -> None:
        self._client.delete(*map(self._key, jobs))

    def close(self) -> None:
        self._client.close()

    def _key(self, job: Job) -> str:
        return f"plain/{job.key.hex()}"


class PlainS3(Contender):
    """boto3 as one would write it: get_object().read() and put_object."""

    name = "client"

    def __init__(self, client: Any, bucket: str) -> None:  # noqa: ANN401  # boto3 makes its clients at run time
        self._client = client
        self._bucket = bucket

    def write(self, worker: int, job: Job) -> None:
        self._client.put_object(Bucket=self._bucket, Key=self._key(job), Body=bytes(job.slot))

    def read(self, worker: int, job: Job) -> Buffer:
        content: bytes = self._client.get_object(Bucket=self._bucket, Key=self._key(job))["Body"].read()
        return content

    def delete(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._client.delete_object(Bucket=self._bucket, Key=self._key(job))

    def close(self) -> None:
        self._client.close()

    def _key(self, job: Job) -> str:
        return f"plain/{job.key.hex()}"


class RawHttp(Contender):
    """HTTP alone: requests signed beforehand, `readinto` the slot, one connection a worker."""

    name = "raw"

    def __init__(self, client: Any, bucket: str, endpoint: str) -> None:  # noqa: ANN401  # as in PlainS3
        self._client = client
        self._bucket = bucket
        self._host = urlsplit(endpoint).netloc
        self._signed: dict[tuple[str, PageKey], str] = {}
        self._connections: dict[int, http.client.HTTPConnection] = {}

    def prepare(self, jobs: Sequence[Job]) -> None:
        self._signed = {(verb, job.key): self._sign(verb, job) for job in jobs for verb in ("get_object", "put_object")}

    def write(self, worker: int, job: Job) -> None:
        response = self._ask(worker, "PUT", self._signed["put_object", job.key], job.slot)
        response.read()

    def read(self, worker: int, job: Job) -> Buffer:
        response = self._ask(worker, "GET", self._signed["get_object", job.key])
        done = 0
        while count := response.readinto(job.slot[done:]):
            done += count
        response.read()
        if done != job.slot.nbytes:
            raise RuntimeError(f"the S3 server sent {done} of {job.slot.nbytes} bytes")
        return job.slot

    def delete(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._client.delete_object(Bucket=self._bucket, Key=f"raw/{job.key.hex()}")

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._client.close()

    def _ask(self, worker: int, verb: str, path: str, body: memoryview | None = None) -> http.client.HTTPResponse:
        if worker not in self._connections:
            self._connections[worker] = http.client.HTTPConnection(self._host)
        connection = self._connections[worker]
        length = {} if body is None else {"Content-Length": str(body.nbytes)}
        connection.request(verb, path, body, length)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise RuntimeError(f"the S3 server answered {response.status} to {verb}: {response.read(300)!r}")
        return response

    def _sign(self, verb: str, job: Job) -> str:
        where = {"Bucket": self._bucket, "Key": f"raw/{job.key.hex()}"}
        url = urlsplit(self._client.generate_presigned_url(verb, Params=where, ExpiresIn=3600))
        return f"{url.path}?{url.query}"
