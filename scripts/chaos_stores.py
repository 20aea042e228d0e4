"""The real stores that `scripts/chaos` breaks, each with what only its own kind of server can suffer.

Owner: `chaos_run.py`, from one thread; `empty` and `num_pages` may be called from others.
"""

from __future__ import annotations

import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import redis
from botocore.client import BaseClient
from fault_kinds import HttpError
from fault_proxy import FaultProxy
from redis_server import RedisServer
from s3_server import BUCKET, REGION, S3Server

PAGE_OBJECT_BYTES = 1 << 20
"""Objects from this size on are pages; smaller ones describe them."""

DISK_BYTES = 3 << 30
_SMALL_MEMORY = "1mb"


class NotPossible(RuntimeError):
    """This machine does not let us make this fault."""


class ChaosStore(ABC):
    """A server of one's own. Use as a context manager, which starts it."""

    name: ClassVar[str]
    read_marks: ClassVar[tuple[bytes, ...]]
    """How the requests begin that read a page, for `fault_proxy.Latency`."""

    server: RedisServer | S3Server

    def __enter__(self) -> Self:
        self.server.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.__exit__(kind, error, trace)

    @abstractmethod
    def engine_url(self, port: int) -> str:
        """The store's URL by way of `port` on loopback."""

    @property
    @abstractmethod
    def environment(self) -> Mapping[str, str]:
        """What an engine needs to use it."""

    def pause(self) -> None:
        """SIGSTOP; returns when every thread of it stands still, which the signal alone does not promise."""
        self.server.pause()

    @abstractmethod
    def start_empty(self) -> None:
        """Start it, dead as it is, with nothing in it."""

    def restart_empty(self) -> None:
        """Kill it and start it again with nothing in it."""
        self.server.kill()
        self.start_empty()

    @abstractmethod
    def empty(self) -> None:
        """Remove every object."""

    @abstractmethod
    def num_pages(self) -> int:
        """Pages in the store."""

    @abstractmethod
    def backup(self) -> Mapping[str, bytes]:
        """Every object as the server has it."""

    @abstractmethod
    def restore(self, objects: Mapping[str, bytes]) -> None:
        """Put those back that are missing."""

    @abstractmethod
    def full(self) -> AbstractContextManager[None]:
        """Has no room for one more page inside the `with` block. Raises NotPossible."""

    @abstractmethod
    def read_only(self, proxy: FaultProxy) -> AbstractContextManager[None]:
        """Refuses to write and delete inside the `with` block."""


class ChaosRedis(ChaosStore):
    """redis-server; full is its memory limit, read-only an access rule."""

    name = "redis"
    read_marks = (b"\r\nGET\r\n", b"\r\nGETRANGE\r\n")

    def __init__(self, folder: Path) -> None:
        self.server: RedisServer = RedisServer(folder)

    @property
    def environment(self) -> Mapping[str, str]:
        return {}

    def engine_url(self, port: int) -> str:
        return f"redis://127.0.0.1:{port}/0"

    def start_empty(self) -> None:
        self.server.start()

    def empty(self) -> None:
        with self._client() as client:
            client.flushall()

    def num_pages(self) -> int:
        with self._client() as client:
            return sum(client.strlen(key) >= PAGE_OBJECT_BYTES for key in client.scan_iter(count=1000))

    def backup(self) -> Mapping[str, bytes]:
        with self._client() as client:
            return {key.decode(): client.get(key) for key in client.scan_iter(count=1000)}

    def restore(self, objects: Mapping[str, bytes]) -> None:
        with self._client() as client:
            for key, content in objects.items():
                client.set(key, content, nx=True)

    @contextmanager
    def full(self) -> Iterator[None]:
        with self._client() as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", _SMALL_MEMORY)
            try:
                yield
            finally:
                client.config_set("maxmemory", 0)

    @contextmanager
    def read_only(self, proxy: FaultProxy) -> Iterator[None]:
        with self._client() as client:
            client.execute_command("ACL", "SETUSER", "default", "-@write")
            try:
                yield
            finally:
                client.execute_command("ACL", "SETUSER", "default", "+@all")

    def _client(self) -> redis.Redis:
        return redis.Redis("127.0.0.1", self.server.port, socket_timeout=10)


class SmallDisk:
    """A tmpfs over `folder`, which is made, that can be filled without writing. Raises NotPossible on entry."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._mount(f"size={DISK_BYTES}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        subprocess.run(["umount", str(self.folder)], check=True)

    @contextmanager
    def full(self) -> Iterator[None]:
        """No byte is free inside the `with` block."""
        space = os.statvfs(self.folder)
        self._mount(f"remount,size={(space.f_blocks - space.f_bfree) * space.f_frsize}")
        try:
            yield
        finally:
            self._mount(f"remount,size={DISK_BYTES}")

    def _mount(self, options: str) -> None:
        call = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)]
        done = subprocess.run(call, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotPossible(f"a disk that fills up takes a tmpfs, and mount said {done.stderr.strip()!r}: be root")


class ChaosS3(ChaosStore):
    """SeaweedFS; full is the small disk that it lies on, if it does, and read-only an answer of the proxy."""

    name = "s3"
    read_marks = (f"GET /{BUCKET}/chaos".encode(),)

    def __init__(self, folder: Path, disk: SmallDisk | None = None) -> None:
        self._disk = disk
        self.server: S3Server = S3Server(folder)

    @property
    def environment(self) -> Mapping[str, str]:
        return self.server.environment

    def engine_url(self, port: int) -> str:
        return f"s3://{BUCKET}/chaos?endpoint=http://127.0.0.1:{port}&region={REGION}"

    def start_empty(self) -> None:
        self.server.start(empty=True)

    def empty(self) -> None:
        with self._client() as client:
            keys = [{"Key": entry["Key"]} for entry in _entries(client)]
            for at in range(0, len(keys), 1000):
                client.delete_objects(Bucket=BUCKET, Delete={"Objects": keys[at : at + 1000]})

    def num_pages(self) -> int:
        with self._client() as client:
            return sum(entry["Size"] >= PAGE_OBJECT_BYTES for entry in _entries(client))

    def backup(self) -> Mapping[str, bytes]:
        with self._client() as client:
            keys = [entry["Key"] for entry in _entries(client)]
            return {key: client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}

    def restore(self, objects: Mapping[str, bytes]) -> None:
        with self._client() as client:
            there = {entry["Key"] for entry in _entries(client)}
            for key, content in objects.items():
                if key not in there:
                    client.put_object(Bucket=BUCKET, Key=key, Body=content)

    @contextmanager
    def full(self) -> Iterator[None]:
        if self._disk is None:
            raise NotPossible("this server does not lie on a small disk")
        with self._disk.full():
            yield

    @contextmanager
    def read_only(self, proxy: FaultProxy) -> Iterator[None]:
        proxy.set_fault(HttpError(403, "AccessDenied", frozenset({"PUT", "POST", "DELETE"})))
        try:
            yield
        finally:
            proxy.clear()

    @contextmanager
    def _client(self) -> Iterator[BaseClient]:
        client = self.server.client()
        try:
            yield client
        finally:
            client.close()


def _entries(client: BaseClient) -> list[dict[str, Any]]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    return [entry for page in pages for entry in page.get("Contents", ())]


@contextmanager
def opened(name: str, folder: Path) -> Iterator[ChaosStore]:
    """The running store of this name, on a small disk of its own where the machine lets us have one."""
    with ExitStack() as stack:
        if name == ChaosRedis.name:
            yield stack.enter_context(ChaosRedis(folder))
            return
        disk: SmallDisk | None = None
        with suppress(NotPossible):
            disk = stack.enter_context(SmallDisk(folder))
        yield stack.enter_context(ChaosS3(folder / "weed", disk))


STORES = (ChaosRedis.name, ChaosS3.name)
