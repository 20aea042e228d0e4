"""What tests do to the simulated engine's stores and copies: hold them at gates, and make them fail.

Thread: a test's thread opens and closes; the connector's own threads pass.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from vllm_hicache.names import ObjectName
from vllm_hicache.storage import stack
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.registry import open_store
from vllm_hicache.storage.wrappers import StoreWrapper
from vllm_hicache.transfer.copier import Copier, CpuCopier

PATIENCE_S = 20.0
"""A wait that lasts longer than this is a hang."""


class Gate:
    """A door that threads of the connector pass; closed, it holds them until a test opens it."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._waiting = 0

    @property
    def num_waiting(self) -> int:
        """Threads that stand before the closed door."""
        return self._waiting

    def close(self) -> None:
        """Hold whoever comes from now on."""
        self._open.clear()

    def open(self) -> None:
        """Let everybody through."""
        self._open.set()

    def passes(self) -> None:
        """Called by the thread that is to be held."""
        self._waiting += 1
        try:
            if not self._open.wait(PATIENCE_S):
                raise TimeoutError(f"a gate was closed for more than {PATIENCE_S} s")
        finally:
            self._waiting -= 1


class FaultyStore(StoreWrapper):
    """A store whose calls can be held, and made to fail: `fault` is asked before each, and may raise."""

    def __init__(self, inner: Store, faults: StoreFaults) -> None:
        super().__init__(inner)
        self._faults = faults

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        self._faults.before("exists", names[0])
        return super().exists(names)

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        self._faults.before("read", name)
        return super().read(name, parts, offset)

    def write(self, name: ObjectName, parts: Sequence[memoryview]) -> bool:
        self._faults.before("write", name)
        self._faults.written[name].append(hashlib.sha256(b"".join(parts)).digest())
        return super().write(name, parts)

    def delete(self, name: ObjectName) -> bool:
        self._faults.before("delete", name)
        return super().delete(name)


class CopyGates:
    """Gates before every copy of a page, by direction; before those of one rank where its copier is given."""

    def __init__(self, patch: pytest.MonkeyPatch, target: type[CpuCopier] | Copier = CpuCopier) -> None:
        self.save, self.load = Gate(), Gate()
        for name, gate in (("save", self.save), ("load", self.load)):
            patch.setattr(target, name, self._gated(getattr(target, name), gate))

    def open_all(self) -> None:
        """Hold nothing any more."""
        self.save.open()
        self.load.open()

    @staticmethod
    def _gated(copy: Callable[..., None], gate: Gate) -> Callable[..., None]:
        def gated(*arguments: object) -> None:
            gate.passes()
            copy(*arguments)

        return gated


@dataclass
class StoreFaults:
    """Shared by the stores of all halves of all engines; `written` are digests of what came under each name."""

    fault: Callable[[str, ObjectName], None] = lambda operation, name: None
    gates: dict[str, Gate] = field(default_factory=lambda: {name: Gate() for name in ("exists", "read", "write")})
    calls: Counter[str] = field(default_factory=Counter)
    written: defaultdict[ObjectName, list[bytes]] = field(default_factory=lambda: defaultdict(list))

    def install(self, patch: pytest.MonkeyPatch) -> StoreFaults:
        """Put these faults into every store that an engine opens from now on."""
        patch.setattr(stack, "open_store", lambda url, options: FaultyStore(open_store(url, options), self))
        return self

    def open_all(self) -> None:
        """End every fault."""
        self.fault = lambda operation, name: None
        for gate in self.gates.values():
            gate.open()

    def before(self, operation: str, name: ObjectName) -> None:
        """Hold and fail the call where a test wants that."""
        self.calls[operation] += 1
        if operation in self.gates:
            self.gates[operation].passes()
        self.fault(operation, name)


@contextmanager
def gated_copies(patch: pytest.MonkeyPatch) -> Iterator[CopyGates]:
    """Gates of the copies between host and device; open in the end."""
    gates = CopyGates(patch)
    yield gates
    gates.open_all()


@contextmanager
def faulty_stores(patch: pytest.MonkeyPatch) -> Iterator[StoreFaults]:
    """Gates and faults of every store that is opened; ended in the end."""
    faults = StoreFaults().install(patch)
    yield faults
    faults.open_all()
