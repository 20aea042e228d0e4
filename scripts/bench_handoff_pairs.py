"""A prefill and a decode server, and handing prompts from one to the other as a proxy does.

Owner: `bench_handoff_run.py`, one thread. A pair that is not measured is paused, and so is each server that has nothing
to do: on few cores they would disturb the one that is measured.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from engine_job import total_of
from prometheus_client.samples import Sample
from serving_servers import FOR_PREFILL, ONE_THREAD, Role, Server, hicache, nixl

WARM_UP = range(1000, 1300)
_DEVELOPER = {"VLLM_SERVER_DEV_MODE": "1"}  # /reset_prefix_cache needs it


def our_bytes(samples: Sequence[Sample]) -> int:
    """Received from other engines so far, by this package's metrics."""
    return total_of(samples, "vllm:hicache_peer_bytes_total", direction="received")


def nixl_bytes(samples: Sequence[Sample]) -> int:
    """Read from other engines so far, by the metrics of vLLM's NixlConnector."""
    return total_of(samples, "vllm:nixl_bytes_transferred_sum")


@dataclass(frozen=True, slots=True)
class Kind:
    """A connector: its configuration by role, and its count of bytes over the link."""

    name: str
    transfer: Callable[[Role], dict[str, object]]
    received: Callable[[Sequence[Sample]], int]


def ours(**extra: object) -> Kind:
    """This package's connector without a store; `extra` goes into its configuration."""
    return Kind("ours", lambda role: hicache(role, store="none", **extra), our_bytes)


NIXL = Kind("nixl", nixl, nixl_bytes)


@dataclass(frozen=True, slots=True)
class Handoff:
    """One prompt, computed by prefill and gone on with by decode.

    Attributes:
        prefill_s: prefill's answer, of one token; seconds as the others.
        first_s: from asking decode to its first token.
        step_s: from the first to the second, a decode step without a transfer.
        received_bytes: by decode, of what its metrics count.
        agrees: whether decode's first token is prefill's.
    """

    prefill_s: float
    first_s: float
    step_s: float
    received_bytes: int
    agrees: bool


class Pair:
    """Two servers of one kind of connector; use as a context manager, which starts them and leaves them paused."""

    def __init__(self, kind: Kind, model: Path, folder: Path, options: Sequence[str] = ()) -> None:
        self.kind = kind
        self._prefill = _server(kind, "kv_producer", model, folder, options)
        self._decode = _server(kind, "kv_consumer", model, folder, options)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for server in (self._prefill, self._decode):
                stack.enter_context(server)
            for server in (self._prefill, self._decode):
                server.wait_healthy()
            self.pause()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def pause(self) -> None:
        """Both."""
        self._prefill.pause()
        self._decode.pause()

    def hand_over(self, prompt: Sequence[int], max_tokens: int = 3) -> Handoff:
        """Both must be paused; they are afterwards. Raises EngineError."""
        with _awake(self._prefill):
            start = time.perf_counter()
            answer = self._prefill.complete(prompt, 1, kv_transfer_params=FOR_PREFILL)
            prefill_s = time.perf_counter() - start
            with _awake(self._decode):
                before = self.kind.received(self._decode.metrics())
                said = self._decode.stream(prompt, max_tokens, kv_transfer_params=answer["kv_transfer_params"])
                received = self._received() - before
        step_s = (said.total_s - said.first_s) / max(1, max_tokens - 1)
        agrees = said.tokens[:1] == answer["choices"][0]["token_ids"]
        return Handoff(prefill_s, said.first_s, step_s, received, agrees)

    def forget_device(self) -> None:
        """Empty decode's prefix cache; what its connector keeps in host memory stays."""
        with _awake(self._decode):
            self._decode.post("/reset_prefix_cache", {})

    def _received(self) -> int:
        """A step passes on what was counted in the one before."""
        self._decode.complete(range(1000, 1008), 2)
        return self.kind.received(self._decode.metrics())


def _server(kind: Kind, role: Role, model: Path, folder: Path, options: Sequence[str]) -> Server:
    name = f"{kind.name}-{role}"
    environment = {**ONE_THREAD, **_DEVELOPER}
    return Server(model, folder, name, transfer=kind.transfer(role), options=options, environment=environment)


@contextlib.contextmanager
def _awake(server: Server) -> Iterator[None]:
    server.resume()
    try:
        server.wait_healthy()
        yield
    finally:
        server.pause()
