"""What fault tests share: a real server, the proxy in front of it, and a whole store stack that talks through both."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random

from chaos_stores import ChaosStore
from fault_proxy import FaultProxy

from vllm_hicache.errors import StoreError
from vllm_hicache.grid import Grid
from vllm_hicache.names import KEY_BYTES, MissReason, PageKey, Role
from vllm_hicache.storage.base import StoreOptions
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.storage.envelope import NAMESPACE_BYTES, ChunkId, Identity, seal
from vllm_hicache.storage.stack import StoreStack, open_stack
from vllm_hicache.storage.wrappers import Outcome, StoreCall

GRID = Grid(1, 1)
UNIT_BYTES = 16 << 10
PAYLOAD_BYTES = 16 * UNIT_BYTES
NUM_CHUNKS = 4
POISON = 0xA5
RETURN_LIMIT_S = 10.0
"""Hits must be back this long after a fault."""

Loaded = bytes | MissReason


class Rig:
    """Chunks of a namespace of its own behind a proxy; `direct` is the way around the proxy, without hurry.

    `contents` has the payload of each chunk, all different, none of them in the store yet.
    """

    def __init__(self, server: ChaosStore, proxy: FaultProxy, through: StoreStack, around: StoreStack) -> None:
        self.server = server
        self.proxy = proxy
        self.namespace = os.urandom(NAMESPACE_BYTES)
        self.view = ChunkStore(through.store, self.namespace, GRID)
        self.direct = ChunkStore(around.store, self.namespace, GRID)
        self.around = around.store
        draw = Random(7)
        ids = [ChunkId(PageKey(draw.randbytes(KEY_BYTES)), 0, Role.TARGET, 0, 0) for _ in range(NUM_CHUNKS)]
        self.contents = {chunk: draw.randbytes(PAYLOAD_BYTES) for chunk in ids}
        self.first, self.second = ids[:2]

    def fill(self) -> None:
        """Put every chunk that is missing into the store, around the proxy."""
        for chunk, payload in self.contents.items():
            self.direct.save(chunk, memoryview(payload), UNIT_BYTES)

    def load(self, chunk: ChunkId, view: ChunkStore | None = None) -> Loaded:
        """The payload into a poisoned buffer, or the reason why not."""
        buffer = poisoned()
        reason = (view or self.view).load(chunk, memoryview(buffer), UNIT_BYTES)
        return bytes(buffer) if reason is None else reason

    def is_right(self, chunk: ChunkId, loaded: Loaded) -> bool:
        """Whether it is a miss or the chunk's own bytes."""
        return isinstance(loaded, MissReason) or loaded == self.contents[chunk]

    def hits(self, chunk: ChunkId) -> bool:
        """Whether a load is a hit now. Fails on wrong bytes."""
        loaded = self.load(chunk)
        assert self.is_right(chunk, loaded)
        return not isinstance(loaded, MissReason)

    def saves(self, chunk: ChunkId) -> bool:
        """Whether a save goes through now."""
        with suppress(StoreError):
            self.view.save(chunk, memoryview(self.contents[chunk]), UNIT_BYTES)
            return True
        return False

    def sealed(self, chunk: ChunkId) -> bytes:
        """The chunk's whole object."""
        payload = self.contents[chunk]
        return seal(Identity(chunk, self.namespace, GRID), memoryview(payload), UNIT_BYTES) + payload

    def plant(self, chunk: ChunkId, content: bytes) -> None:
        """Put any bytes under the chunk's name, whatever was there."""
        name = chunk.object_name(self.namespace)
        self.around.delete(name)
        assert self.around.write(name, [memoryview(content)])

    def assert_hits_return(self) -> None:
        """Every chunk is a hit again in time, once what was lost has been saved again."""
        await_true(lambda: self.server_is_filled(), "the server to take chunks")
        for chunk in self.contents:
            await_true(lambda chunk=chunk: self.hits(chunk), "a hit")  # type: ignore[misc]

    def server_is_filled(self) -> bool:
        with suppress(StoreError):
            self.fill()
            return True
        return False


@contextmanager
def rigged(server: ChaosStore, timeout_s: float = 1.0) -> Iterator[tuple[Rig, Counter[Outcome]]]:
    """A rig, and how the calls through the proxy ended."""
    outcomes: Counter[Outcome] = Counter()

    def observe(call: StoreCall) -> None:
        outcomes[call.outcome] += 1

    with FaultProxy("127.0.0.1", server.server.port) as proxy:
        around = open_stack(server.engine_url(server.server.port), StoreOptions(timeout_s=20.0))
        through = open_stack(server.engine_url(proxy.port), StoreOptions(timeout_s=timeout_s), observer=observe)
        try:
            yield Rig(server, proxy, through, around), outcomes
        finally:
            through.store.close()
            around.store.close()


def poisoned() -> bytearray:
    return bytearray([POISON]) * PAYLOAD_BYTES


def await_true(holds: Callable[[], bool], what: str) -> None:
    """Wait for it, as long as hits may take to come back."""
    end = time.monotonic() + RETURN_LIMIT_S
    while not holds():
        assert time.monotonic() < end, f"waited {RETURN_LIMIT_S} s for {what}"
        time.sleep(0.02)
