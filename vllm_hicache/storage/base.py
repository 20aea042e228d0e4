"""The contract of every store: named objects, written once, read by scatter.

Owner: `storage/`. A store knows bytes and names; pages, envelopes and misses are `wrappers.ChunkStore`'s.
Thread: every method of a store may be called from any number of threads at once.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, overload

from vllm_hicache.errors import StoreError
from vllm_hicache.names import ObjectName

MAX_NAME_CHARS = 512
MANIFEST_PART = "namespace.json"
"""Last part of the names that a store with a capacity evicts last: small, and they explain the rest."""

_NAME = re.compile(r"[!-.0-~](?:[ -.0-~]*[!-.0-~])?(?:/[!-.0-~](?:[ -.0-~]*[!-.0-~])?)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object as `Store.list` sees it."""

    name: ObjectName
    size_bytes: int
    modified_s: float
    """Unix time of the write."""


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """What a store holds; `capacity_bytes` is None where the store has no limit of its own."""

    num_objects: int
    used_bytes: int
    capacity_bytes: int | None


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """What every store is opened with, whatever its URL.

    Attributes:
        timeout_s: each call ends within this time, with StoreTimeout if need be. Seconds.
        num_connections: calls that may run at once without one waiting for another.
    """

    timeout_s: float = 5.0
    num_connections: int = 8


@dataclass(frozen=True, slots=True)
class Rights:
    """What a store lets us do, found out by trying. Without `write`, hits work and nothing is saved."""

    write: bool = True
    delete: bool = True


class WatchedParts(Sequence[memoryview]):
    """Parts of a read that are looked at while they are filled: checking overlaps receiving, and finds bytes in cache.

    A store that fills parts from front to back calls `filled` on the reading thread, first with 0, then with
    the number of leading bytes that will not change any more. One that never calls it is checked at the end.
    A wrapper that changes what the store inside wrote must give that store parts of its own.
    """

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = tuple(parts)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[memoryview]: ...

    def __getitem__(self, index: int | slice) -> memoryview | Sequence[memoryview]:
        return self._parts[index]

    def __len__(self) -> int:
        return len(self._parts)

    def filled(self, num_bytes: int) -> None:
        """`num_bytes` from the front are in place; 0 when a read begins, or begins anew. Raises nothing."""


def teller(parts: Sequence[memoryview]) -> Callable[[int], None] | None:
    """Return whom a store tells of its progress in filling `parts`, having told of the beginning; None for nobody."""
    if not isinstance(parts, WatchedParts):
        return None
    parts.filled(0)
    return parts.filled


def check_name(name: ObjectName) -> ObjectName:
    """Return `name`; raises StoreError unless it is 1 to 512 printable ASCII characters whose `/`-separated
    parts are not empty and neither begin nor end with a blank. `.` and `..` are ordinary parts."""
    if len(name) > MAX_NAME_CHARS or _NAME.fullmatch(name) is None:
        raise StoreError(
            f"object name {name[:80]!r} of {len(name)} characters is not valid: use up to {MAX_NAME_CHARS} "
            "printable ASCII characters in non-empty parts separated by /"
        )
    return name


class Store(ABC):
    """A set of objects; equal names mean equal bytes, so an object is written once and never changed.

    Caller guarantees: names are valid (`check_name`); parts are contiguous memoryviews of format `B`
    that nobody else touches during the call; parts given to `read` are writable.
    Implementer must: raise only StoreError subclasses (ConfigError from `probe` alone), translate the
    medium's own errors at one seam, keep secrets out of every message, retry nothing (`Retrying` does),
    and end every call within `StoreOptions.timeout_s` where anything but this host's kernel is waited for.
    After a call has ended, nobody may write into its parts any more.
    Thread: all methods are thread-safe and blocking; several processes may use one medium at once.
    Failure: a call that raises has changed nothing that a later call can see, save that a write or a
    delete whose reply was lost may have taken place.
    """

    scheme: ClassVar[str]
    """Scheme of the URLs that open this store."""

    @abstractmethod
    def describe(self) -> str:
        """Return the URL of this store without secrets."""

    @abstractmethod
    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        """Return for each name, in order, whether a read would find it now. One round trip where possible."""

    @abstractmethod
    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        """Fill `parts` in order with the object's bytes from `offset` on; return the object's TOTAL bytes.

        Caller guarantees: `offset` is not negative. The total tells short objects (parts not filled to
        the end) from long ones (bytes left over); an offset past the end fills nothing.
        Implementer must: never write outside `parts`, and copy nothing on the way where the medium
        allows that (preadv, recv_into). Parts past the object's end, or after an error, are undefined.
        Failure: ObjectMissing, StoreTimeout, StoreUnavailable.
        """

    @abstractmethod
    def write(self, name: ObjectName, parts: Sequence[memoryview]) -> bool:
        """Gather `parts` into one object; False when the name was there already, whose bytes then stay.

        Implementer must: let a reader see all of the object or nothing, at every moment, and return only
        when the medium would serve it after this process is killed. Of several writers of one name
        exactly one is told True. Failure: StoreUnavailable (also when full) or StoreTimeout; nothing is
        left behind that counts, is listed or is read.
        """

    @abstractmethod
    def delete(self, name: ObjectName) -> bool:
        """Remove the object; return whether it was there. Readers that have begun may finish."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield each object whose name starts with `prefix` (any string), once, in no particular order.

        Objects that come or go meanwhile may or may not be seen. Entries that this package did not
        write are left out. Failure: StoreError while iterating.
        """

    @abstractmethod
    def usage(self) -> StoreUsage:
        """Return what the store holds, cheaply: a counter may lag behind what others just did."""

    @abstractmethod
    def probe(self) -> Rights:
        """Check once at start the rights to read, list, write and delete, by doing so; leave nothing behind.

        Creates what the store needs (a directory). A shared store that lets us read and list but not
        write is no error. Failure: ConfigError for what only a person can repair (a wrong password, a
        bucket that does not exist, a certificate that does not verify), with what, the numbers and the
        way out; StoreUnavailable or StoreTimeout for what may pass by itself.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back connections and threads. A second call does nothing; no other call may follow."""
