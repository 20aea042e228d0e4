"""Pages of another engine as a store whose payloads come over NIXL, and all else over the session that serves them.

On that session `AGENT` asks for the server's NIXL metadata, `LOCATE key` for an object's header and where its payload
lies, which begins a read that `RELEASE key bytes` or the end of the connection ends. So the server knows what is being
read, and nothing is read that it has not offered. Where NIXL does not reach the server the session brings its objects.

Owner: `peers.Peers`. Thread: any.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_hicache.errors import ObjectMissing, StoreTimeout, StoreUnavailable
from vllm_hicache.handoff.nixl_link import NixlReader, Piece
from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import teller
from vllm_hicache.storage.redis import Layout, RedisStore
from vllm_hicache.storage.redis_nodes import FixedNode
from vllm_hicache.storage.redis_pool import Address, WirePool, raise_error
from vllm_hicache.storage.resp import Deadline, NoRedis, command
from vllm_hicache.storage.warning import RareWarning
from vllm_hicache.storage.wrappers import StoreWrapper

_TRY_AGAIN_S = 60.0
_SHARE = 0.5
"""So much of the time that is left NIXL may take: the session brings the object in the rest."""
_MAX_ADDRESS = 1 << 64


class _NoWay(StoreUnavailable):
    """NIXL does not bring what the session has offered."""


@dataclass(frozen=True, slots=True)
class _Located:
    """An object of a server: its header, and where its payload lies there."""

    metadata: bytes
    header: bytes
    address: int
    payload_bytes: int

    @property
    def num_bytes(self) -> int:
        return len(self.header) + self.payload_bytes


class NixlStore(StoreWrapper):
    """See the module. `reader` knows the memory that most parts of reads lie in; its owner closes it.

    Once NIXL has failed where the session did not, the session brings all for a minute.
    """

    def __init__(self, layout: Layout, address: Address, wires: WirePool, reader: NixlReader, timeout_s: float) -> None:
        self._layout = layout
        self._address = address
        self._wires = wires
        self._reader = reader
        self._timeout_s = timeout_s
        super().__init__(self._over_session(timeout_s))
        self._warnings = RareWarning()
        self._lock = threading.Lock()
        self._next_try_s = 0.0

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        with self._lock:
            may_try = time.monotonic() >= self._next_try_s
        if not may_try:
            return super().read(name, parts, offset)
        deadline, told = Deadline(self._timeout_s), teller(parts)
        try:
            total_bytes = self._over_nixl(name, parts, offset, deadline)
        except _NoWay as error:
            total_bytes = self._over_session(deadline.left_s()).read(name, parts, offset)
            self._stay_away(error)
            return total_bytes
        if total_bytes is None:
            raise ObjectMissing(name)
        if told is not None:
            told(max(0, min(sum(part.nbytes for part in parts), total_bytes - offset)))
        return total_bytes

    def _over_session(self, timeout_s: float) -> RedisStore:
        return RedisStore(self._layout, FixedNode(self._address), self._wires, timeout_s)

    def _stay_away(self, error: Exception) -> None:
        self._warnings.warn(f"pages of {self.describe()} come over TCP and not NIXL", error)
        with self._lock:
            self._next_try_s = time.monotonic() + _TRY_AGAIN_S

    def _over_nixl(self, name: ObjectName, parts: Sequence[memoryview], offset: int, deadline: Deadline) -> int | None:
        """Fill `parts`; an object's bytes, None where there is none. Raises _NoWay."""
        key = name.encode()
        asked = [command(b"AGENT"), command(b"LOCATE", key)]
        with self._wires.lend(self._address, deadline) as wire:
            replies: list[object] = list(wire.ask(asked, object, deadline))
            for reply in replies:
                raise_error(reply, self._address)
            located = _parse(*replies)
            if located is None:
                return None
            pieces = _pieces(located, parts, offset)
            if pieces:
                try:
                    self._reader.read(located.metadata, pieces, _SHARE * deadline.left_s())
                except (StoreUnavailable, StoreTimeout) as error:
                    raise _NoWay(str(error)) from error
            num_read = sum(piece.local.nbytes for piece in pieces)
            wire.ask([command(b"RELEASE", key, b"%d" % num_read)], int, deadline)
        return located.num_bytes


def _parse(metadata: object, found: object) -> _Located | None:
    """What a server answers to AGENT and LOCATE; None for an object that it has not. Raises _NoWay and NoRedis."""
    if metadata == b"":
        raise _NoWay("the other engine offers no memory: set peer_transport to nixl in both engines")
    match metadata, found:
        case bytes(), None:
            return None
        case bytes() as agent, [bytes() as header, bytes() as where]:
            numbers = where.split(b" ")
            if len(numbers) == 2 and all(number.isdigit() and len(number) <= 20 for number in numbers):
                address, payload_bytes = map(int, numbers)
                if address + payload_bytes < _MAX_ADDRESS:
                    return _Located(agent, header, address, payload_bytes)
    raise NoRedis("the server answers to LOCATE with what names no place: run the same vllm-hicache release in both")


def _pieces(located: _Located, parts: Sequence[memoryview], offset: int) -> list[Piece]:
    """Fill what the header covers of `parts`, which begin at `offset`; what is left to be read of the payload."""
    pieces, at = [], offset
    for part in parts:
        known = located.header[at : at + part.nbytes]
        part[: len(known)] = known
        start = at + len(known) - len(located.header)
        rest = part[len(known) :][: max(0, located.payload_bytes - start)]
        if rest.nbytes:
            pieces.append(Piece(located.address + start, rest))
        at += part.nbytes
    return pieces
