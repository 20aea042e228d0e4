"""What a file of faults may say: the faults that ranks play out in tests and drills, and how they are written.

Pure. `drills` plays them out.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TypeVar

from vllm_hicache.errors import ConfigError
from vllm_hicache.names import Slot
from vllm_hicache.plan import FlushOp, LoadOp, SaveOp

_EXAMPLE = '[{"fault": "delay", "rank": 1, "operation": "load", "seconds": 0.2, "every": 3}]'


class FaultKind(StrEnum):
    """What goes wrong on a rank."""

    DELAY = "delay"
    """Each report of the operation is withheld for `seconds`."""
    FAIL = "fail"
    """No report of the operation says more than `pages` pages; what is cut is an error."""
    SKIP = "skip"
    """Reports of the operation are lost until the scheduler half asks for one."""
    REORDER = "reorder"
    """Reports wait for each other and come latest first; acknowledgements of one plan are consumed latest first."""
    SHORT = "short"
    """The rank consumes at most `pages` pages of what is acknowledged."""
    FORGET = "forget"
    """Before a load, the rank's slot table loses the host slots of the load's pages from number `pages` on."""
    PIN = "pin"
    """The first slot that the operation is to fill is in use on this rank, and stays so."""
    CAPACITY = "capacity"
    """The rank believes that `pages` fewer host pages were agreed at start."""


class OperationKind(StrEnum):
    """Which operations a fault strikes."""

    LOAD = "load"
    SAVE = "save"
    FLUSH = "flush"
    ANY = "any"


Operation = LoadOp | SaveOp | FlushOp
_KINDS = {LoadOp: OperationKind.LOAD, SaveOp: OperationKind.SAVE, FlushOp: OperationKind.FLUSH}

_COUNTED = frozenset({"operation", "every", "times"})
_KEYS: Mapping[FaultKind, frozenset[str]] = {
    FaultKind.DELAY: _COUNTED | {"seconds"},
    FaultKind.FAIL: _COUNTED | {"pages"},
    FaultKind.SKIP: _COUNTED,
    FaultKind.REORDER: _COUNTED,
    FaultKind.SHORT: _COUNTED | {"pages"},
    FaultKind.FORGET: _COUNTED | {"pages"},
    FaultKind.PIN: _COUNTED,
    FaultKind.CAPACITY: frozenset({"pages"}),
}
"""Keys that have a meaning beside `fault` and `rank`."""

_OPERATIONS: Mapping[FaultKind, tuple[OperationKind, ...]] = {
    FaultKind.FORGET: (OperationKind.LOAD, OperationKind.ANY),
    FaultKind.PIN: (OperationKind.LOAD, OperationKind.SAVE, OperationKind.ANY),
}
"""What `operation` may be where it may not be everything."""


@dataclass(frozen=True, slots=True)
class RankFault:
    """One entry of the file. Field names are its keys.

    Attributes:
        rank: the rank that has the fault.
        operation: operations it strikes, of those on which it has an effect.
        seconds: of `delay`: how long a report is withheld.
        pages: of `fail`, `short` and `forget`: leading pages that are spared; of `capacity`: pages that are missing.
        every: of the operations it could strike it strikes each n-th.
        times: operations it strikes in all; `None` without a limit.
    """

    fault: FaultKind
    rank: int
    operation: OperationKind = OperationKind.ANY
    seconds: float = 0.0
    pages: int = 0
    every: int = 1
    times: int | None = None

    def __str__(self) -> str:
        """The fault with those of its values that have a meaning, as an operator would write it."""
        shown = {each.name: getattr(self, each.name) for each in fields(self) if each.name in _KEYS[self.fault]}
        return " ".join([self.fault, *(f"{key}={value}" for key, value in shown.items() if value is not None)])

    def slots(self, op: Operation) -> tuple[Slot, ...]:
        """Slots of `op` that the fault acts on: what `forget` loses and what `pin` keeps in use."""
        if self.fault is FaultKind.FORGET and isinstance(op, LoadOp):
            return tuple(page.slot for page in op.pages[self.pages :] if not page.from_store)
        if self.fault is FaultKind.PIN:
            filled = [page.slot for page in op.pages if page.from_store or isinstance(op, SaveOp)]
            return tuple(filled[:1])
        return ()

    def strikes(self, op: Operation) -> bool:
        """Whether the fault would have an effect on `op`: only such operations are counted."""
        if self.operation not in (OperationKind.ANY, _KINDS[type(op)]) or self.fault is FaultKind.CAPACITY:
            return False
        if self.fault in (FaultKind.FAIL, FaultKind.SHORT):
            return self.pages < len(op.pages)
        return self.fault not in (FaultKind.FORGET, FaultKind.PIN) or bool(self.slots(op))


def parse_faults(text: str) -> tuple[RankFault, ...]:
    """Read the file's text: a JSON list of faults, of all ranks, in its order.

    Raises:
        ConfigError: it is not such a list, or an entry has an unknown or missing key, a value of the wrong type or
            range, or a key that means nothing to its fault.
    """
    try:
        raw: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON ({error}): write a list of faults, such as {_EXAMPLE}") from None
    if not isinstance(raw, list):
        raise ConfigError(f"JSON but not a list of faults: write one, such as {_EXAMPLE}")
    return tuple(_Values(number, each).fault() for number, each in enumerate(raw, start=1))


_Choice = TypeVar("_Choice", bound=StrEnum)


class _Values:
    """Typed access to one entry; every refusal names the entry, the value and what is allowed."""

    def __init__(self, number: int, raw: object) -> None:
        self._where = f"entry {number}"
        if not isinstance(raw, dict):
            raise ConfigError(f"{self._where} is {raw!r}, not an object: write one, such as {_EXAMPLE[1:-1]}")
        self._raw: Mapping[str, object] = raw

    def fault(self) -> RankFault:
        """The entry, checked."""
        kind = self._choice("fault", list(FaultKind), None)
        self._check_keys(kind)
        return RankFault(
            kind,
            self._count("rank", 0, None),
            self._choice("operation", _OPERATIONS.get(kind, tuple(OperationKind)), OperationKind.ANY),
            self._seconds("seconds") if kind is FaultKind.DELAY else 0.0,
            self._count("pages", 1, 1) if kind is FaultKind.CAPACITY else self._count("pages", 0, 0),
            self._count("every", 1, 1),
            self._count("times", 1, None) if "times" in self._raw else None,
        )

    def _check_keys(self, kind: FaultKind) -> None:
        known = ["fault", "rank", *sorted(_KEYS[kind])]
        for key in self._raw:
            if key not in known:
                raise ConfigError(
                    f"{self._where}: unknown key {key!r} of fault={kind.value!r}: "
                    f"{_closest(key, known) or 'remove it. '}Known keys: {', '.join(known)}"
                )

    def _count(self, key: str, least: int, default: int | None) -> int:
        value = self._raw.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{self._where}: {key}={value!r} must be a whole number from {least} on: write one")
        return value

    def _seconds(self, key: str) -> float:
        value = self._raw.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 86400:
            raise ConfigError(f"{self._where}: {key}={value!r} must be seconds between 0 and 86400: write them")
        return float(value)

    def _choice(self, key: str, choices: Sequence[_Choice], default: _Choice | None) -> _Choice:
        value = self._raw.get(key, default)
        if value in choices:
            return choices[choices.index(value)]
        names = [choice.value for choice in choices]
        raise ConfigError(
            f"{self._where}: {key}={value!r} is not known here: {_closest(str(value), names)}"
            f"choose one of {', '.join(names)}"
        )


def _closest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}? " if close else ""
