"""The stores that are measured, each on a real server of its own, with the contenders on it and what they move."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench_store_contenders import Bare, Checked, PlainRedis, PlainS3, RawFile, RawHttp, RawSocket
from bench_store_rounds import Contender, Job

from vllm_hicache.storage.base import StoreOptions
from vllm_hicache.storage.registry import open_store

KIB, MIB = 1 << 10, 1 << 20
IN_FLIGHT = (1, 8)
OPTIONS = StoreOptions(timeout_s=60.0, num_connections=max(IN_FLIGHT))


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is moved at one object size: objects a round, and rounds a median is taken of.

    The first round of writes is what all reads read. `write_in_flight`: with how many in flight writes are measured.
    """

    object_bytes: int
    num_objects: int
    num_read_rounds: int
    num_write_rounds: int
    write_in_flight: tuple[int, ...] = IN_FLIGHT

    def written_bytes(self, num_contenders: int) -> int:
        """Bytes that a medium has to hold for this plan if it never reclaims."""
        num_rounds = self.num_write_rounds * len(self.write_in_flight)
        return self.object_bytes * self.num_objects * num_rounds * num_contenders


FAST = (Plan(256 * KIB, 64, 15, 11), Plan(MIB, 32, 15, 11), Plan(4 * MIB, 16, 11, 9))
# SeaweedFS does not give back what is deleted: these rounds write 1.6 GiB in all, so the largest are written once.
SLOW = (
    Plan(256 * KIB, 32, 9, 5),
    Plan(MIB, 16, 7, 3),
    Plan(4 * MIB, 8, 7, 2),
    Plan(32 * MIB, 3, 5, 1, write_in_flight=(1,)),
)
QUICK_FAST = (Plan(256 * KIB, 16, 3, 2), Plan(MIB, 16, 3, 2))
QUICK_SLOW = (Plan(256 * KIB, 16, 3, 2), Plan(MIB, 8, 2, 1))


@dataclass(frozen=True, slots=True)
class Medium:
    """A store under measurement. `client` names the plain client, None where there is none.

    `reclaims`: whether deleting makes room.
    """

    name: str
    client: str | None
    contenders: Sequence[Contender]
    reclaims: bool

    def remove(self, jobs: Sequence[Job]) -> None:
        """Delete what the jobs wrote, where that makes room."""
        if self.reclaims:
            for contender in self.contenders:
                contender.delete(jobs)


@contextmanager
def open_file(folder: Path) -> Iterator[Medium]:
    """Files, which stay in the operating system's page cache."""
    url = f"file://{folder / 'store'}?capacity=4GiB"
    with contending(url, lambda: [RawFile(folder / "raw")]) as contenders:
        yield Medium("file", None, contenders, reclaims=True)


@contextmanager
def open_redis_tcp(folder: Path) -> Iterator[Medium]:
    """Redis over the loopback interface."""
    from redis_server import RedisServer

    with (
        RedisServer(folder) as server,
        contending(server.url, lambda: [PlainRedis(server.url), RawSocket()]) as contenders,
    ):
        yield Medium("redis tcp", "redis-py", contenders, reclaims=True)


@contextmanager
def open_redis_unix(folder: Path) -> Iterator[Medium]:
    """Redis over a socket file."""
    from redis_server import RedisServer

    with (
        RedisServer(folder, unix=True) as server,
        contending(server.unix_url, lambda: [PlainRedis(server.unix_url), RawSocket(folder / "p")]) as contenders,
    ):
        yield Medium("redis unix", "redis-py", contenders, reclaims=True)


@contextmanager
def open_s3(folder: Path) -> Iterator[Medium]:
    """SeaweedFS over the loopback interface. The store finds the server's credentials in our environment."""
    from s3_server import S3Server

    with S3Server(folder) as server:
        os.environ.update(server.environment)

        def others() -> list[Contender]:
            plain = PlainS3(server.client(), server.bucket)
            return [plain, RawHttp(server.client(), server.bucket, server.endpoint)]

        with contending(server.url, others) as contenders:
            yield Medium("s3", "boto3", contenders, reclaims=False)


MEDIA = {"file": open_file, "redis-tcp": open_redis_tcp, "redis-unix": open_redis_unix, "s3": open_s3}


@contextmanager
def contending(url: str, others: Callable[[], Sequence[Contender]]) -> Iterator[Sequence[Contender]]:
    """Our store at `url`, with checks and without, then the others; all are closed at the end."""
    with ExitStack() as closing:
        store = open_store(url, OPTIONS)
        contenders: list[Contender] = [Checked(store), Bare(store)]
        closing.callback(store.close)
        store.probe()
        for contender in others():
            closing.callback(contender.close)
            contenders.append(contender)
        yield contenders


def plans_of(medium: Medium, quick: bool) -> Sequence[Plan]:
    if quick:
        return QUICK_FAST if medium.reclaims else QUICK_SLOW
    return FAST if medium.reclaims else SLOW
