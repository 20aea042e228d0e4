"""What the tests of handoffs between simulated engines share: faults on the way, and checks of what has come.

Thread: the test's, but for what is done to readers on theirs.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from lifecycle_kit import prompt
from simulated_engine import SimulatedEngine
from simulated_faults import PATIENCE_S, Gate
from simulated_handoff import HandoffEngine
from simulated_model import POISON, Cut, Job, page_content
from vllm.v1.request import RequestStatus

from vllm_hicache.handoff.server import Served, Session
from vllm_hicache.keys import PageKeys, chain_root
from vllm_hicache.names import PageKey, Slot

Parts = Sequence[bytes | memoryview]

LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS
LONE, TENSOR, STAGES, ALL = Cut(), Cut(2), Cut(1, 2), Cut(2, 2)
ONE_HEAD, SHARDED, REPLICAS = Cut(num_heads=1), Cut(2, 1, 2, 1), Cut(2, 1, 1, 1)
"""The last two: context parallelism, and ranks with the same head that share out host memory."""
CUTS = [(LONE, LONE), (TENSOR, LONE), (ALL, TENSOR), (SHARDED, ONE_HEAD), (ONE_HEAD, REPLICAS)]
"""Of prefill and decode, for ends that go wrong."""
TEXT = prompt(100)
KEYS = ("11" * 32, "22" * 32)
PATIENT = {"peer_timeout_s": 0.5}
"""Of the engine that decodes: what it waits for a peer."""


def name_of(cuts: object) -> str | None:
    """What tests call two cuts."""
    if not isinstance(cuts, tuple) or not all(isinstance(cut, Cut) for cut in cuts):
        return None
    return "-to-".join(f"tp{cut.tp_size}pp{cut.pp_size}dcp{cut.dcp_size}h{cut.num_heads}" for cut in cuts)


every_cut = pytest.mark.parametrize("cuts", CUTS, ids=name_of)


def num_owners(cut: Cut) -> int:
    """Ranks that share out pages."""
    return cut.dcp_size if cut.dcp_size > 1 else max(1, cut.tp_size // cut.num_heads)


class Reads:
    """Payloads that an engine's ranks are about to send to readers, on whichever threads.

    Attributes:
        gate: holds them.
        before: called with the page of each; an OSError ends the connection.
        sent: what is sent instead.
    """

    def __init__(self, patch: pytest.MonkeyPatch, engine: HandoffEngine) -> None:
        self.gate = Gate()
        self.before: Callable[[PageKey], None] = lambda page: None
        self.sent: Callable[[PageKey, bytes], bytes] = lambda page, payload: payload
        self._reading = threading.local()
        patch.setattr(Session, "send", self._watched(Session.send))
        for server in engine.servers:
            patch.setattr(server, "_header", self._noted(server._header))

    def _noted(self, header: Callable[[Served], bytes]) -> Callable[[Served], bytes]:
        def noted(served: Served) -> bytes:
            self._reading.page = served.page.key
            return header(served)

        return noted

    def _watched(self, send: Callable[[Session, Parts], None]) -> Callable[[Session, Parts], None]:
        def watched(session: Session, parts: Parts) -> None:
            page, self._reading.page = getattr(self._reading, "page", None), None
            if page is not None and len(parts) > 2:
                self.before(page)
                self.gate.passes()
                *front, payload, end = parts
                parts = [*front, self.sent(page, bytes(payload)), end]
            send(session, parts)

        return watched


ReadsOf = Callable[[HandoffEngine], Reads]


@contextmanager
def talker(answer: bytes) -> Iterator[tuple[str, int]]:
    """Something else that listens, and says this to whoever connects and asks; where it does."""
    listener = socket.create_server(("127.0.0.1", 0))

    def talk() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                connection.recv(1)
                connection.sendall(answer)

    connections: list[socket.socket] = []
    thread = threading.Thread(target=talk, daemon=True)
    thread.start()
    yield listener.getsockname()
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(PATIENCE_S)
    for each in (listener, *connections):
        each.close()


def chain_of(engine: SimulatedEngine, text: Sequence[int]) -> list[PageKey]:
    """Keys of a prompt's pages, its unfinished one included."""
    keys = PageKeys(chain_root(engine.half.namespace.digest(), None), engine.page_tokens)
    keys.extend(text)
    tail = keys.tail()
    return [*keys.keys, tail] if tail is not None else keys.keys


def slots_of(engine: SimulatedEngine, text: Sequence[int]) -> list[Slot]:
    """Where a prompt's pages lie in host memory, its unfinished one included, as far as they do."""
    return list(engine.tier.match(chain_of(engine, text), touch=False).slots)


def check_tail(engine: SimulatedEngine, job: Job) -> None:
    """The unfinished page of a prompt is in host memory on its owners, with the right bytes as far as it goes."""
    text, size = list(job.request.prompt_token_ids), engine.page_tokens
    (slot,) = slots_of(engine, text)[len(text) // size :]
    words = job.truth.words(text)[len(text) // size * size :]
    page = np.zeros((size, *words.shape[1:]), np.uint64)
    known = page.copy()
    page[: len(words)], known[: len(words)] = words, ~np.uint64(0)
    for rank in (rank for rank in engine.ranks if rank.keeps(slot)):
        wanted, mask, there = (
            np.frombuffer(each, np.uint64)
            for each in (
                page_content(page, engine._grid, rank.share),
                page_content(known, engine._grid, rank.share),
                rank.host_bytes(slot),
            )
        )
        assert mask.any()
        assert (there & mask == wanted).all(), f"the unfinished page is wrong on rank {rank.number}"


def check_poison_elsewhere(engine: SimulatedEngine, name: str) -> None:
    """No rank of an engine with one request has written to blocks that are not this request's."""
    (blocks,) = engine.scheduler.kv_cache_manager.get_block_ids(name)
    for rank in engine.ranks:
        others = np.delete(rank.device, list(blocks), axis=1)
        assert (others == POISON).all(), f"rank {rank.number} has written to others' blocks"
