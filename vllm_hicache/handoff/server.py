"""Serves pages of this rank's host pool to other engines, as the objects that a store would hold.

It speaks as much of Redis' protocol as reading takes (AUTH, STRLEN, GET, GETRANGE, UNLINK), so that the reader is
`RedisStore` with all its checks and deadlines. Nothing can be written. A value is 8 bytes of time, the envelope, and
the payload as it lies in the slot, which is sent without a copy. A page that nobody has heard of yet may still be
computed: a question for it waits.

Owner: the worker half. Threads: one that accepts, one for each connection; `export` and `withdraw` any.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hmac import compare_digest
from urllib.parse import unquote

from vllm_hicache.errors import ConfigError
from vllm_hicache.geometry import Part, RankGeometry
from vllm_hicache.handoff.nixl_link import MemoryRange, NixlMemory
from vllm_hicache.handoff.peers import ACKNOWLEDGEMENT
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import ObjectName, OpId, Role
from vllm_hicache.namespace import Spaces
from vllm_hicache.plan import ExportOp, PageMove
from vllm_hicache.storage.envelope import ChunkId, Identity, Sealer, seal
from vllm_hicache.storage.iovec import after_bytes, first_bytes
from vllm_hicache.transfer.host import HostPool

logger = logging.getLogger(__name__)

_STAMP = bytes(8)
_MAX_LINE_BYTES = 4096
_MAX_WORDS = 8
_MAX_WORD_BYTES = 4096
_STEP_LIMIT_S = 5.0
_IDLE_LIMIT_S = 600.0
_LOCATED_LIMIT_S = 60.0
"""So long a reader may be silent that has located a page and not released it: it keeps the slot."""
_LATE_WAIT_S = 1.0
_MOST_OVER = 1 << 16
_NO_VALUE = b"$-1\r\n"


@dataclass(slots=True)
class _Export:
    """What one operation lets others read, and how many reads of it are open."""

    op: OpId
    names: list[ObjectName] = field(default_factory=list)
    num_reading: int = 0
    is_withdrawn: bool = False


@dataclass(slots=True)
class Served:
    """One object: where its payload lies, and its envelope once somebody has asked. Without `part` it is absent."""

    export: _Export
    identity: Identity
    page: PageMove
    part: Part | None
    header: bytes | None = None


class PageServer:
    """See the module.

    Args:
        password: what a client must say; `None` lets everybody read.
        wait_s: how long a question waits for a page that nobody has heard of yet, seconds.
        ended: called, on any thread, with an operation that was withdrawn, once none of its pages is being read.
        acknowledged: called, on any thread, with the prompt of which a client says that it needs no more.
        memory: the pool's, where it may be read over NIXL too (AGENT, LOCATE, RELEASE: see `nixl_store`).

    Raises:
        ConfigError: the address cannot be had.
    """

    def __init__(
        self,
        pool: HostPool,
        geometry: RankGeometry,
        sealer: Sealer,
        password: str | None,
        wait_s: float,
        metrics: Metrics,
        ended: Callable[[OpId], None],
        acknowledged: Callable[[str], None],
        host: str = "127.0.0.1",
        port: int = 0,
        memory: NixlMemory | None = None,
    ) -> None:
        self._pool = pool
        self._parts = [part for part in geometry.parts if part.is_whole]
        self._grids = {shape.role: geometry.layout.grid_of(shape) for shape in geometry.layout.roles}
        self._sealer = sealer
        self._password = password.encode() if password is not None else None
        self._wait_s = wait_s
        self._metrics = metrics
        self._ended = ended
        self._acknowledged = acknowledged
        self._memory = memory
        self._lock = threading.Condition()
        self._known: dict[ObjectName, list[Served]] = {}
        self._exports: dict[OpId, _Export] = {}
        # Names of what was served last: whoever asks for it now comes late, or a moment before it is served again.
        self._over: OrderedDict[ObjectName, None] = OrderedDict()
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        try:
            self._listener = socket.create_server((host, port), backlog=128)
            # Connections have it of their listener.
            self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise ConfigError(
                f"pages cannot be served at {host}:{port} ({error.strerror or error}): set peer_host to an address of "
                "this machine, and peer_port to one that is free, with as many behind it as the engine has ranks"
            ) from error
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="hicache-page-server", daemon=True).start()

    def export(self, op: ExportOp, num_vouched: int) -> None:
        """Serve the whole cells of the operation's first `num_vouched` pages until it is withdrawn."""
        export = _Export(op.op)
        entries = list(self._entries(export, op.spaces, op.pages[:num_vouched], is_here=True))
        entries += self._entries(export, op.spaces, (*op.pages[num_vouched:], *op.absent), is_here=False)
        with self._lock:
            self._exports[op.op] = export
            for entry in entries:
                name = entry.identity.object_name()
                export.names.append(name)
                self._known.setdefault(name, []).append(entry)
            self._lock.notify_all()

    def withdraw(self, op: OpId) -> None:
        """Stop serving an operation's pages; `ended` is called when the last open read has ended."""
        with self._lock:
            export = self._exports.pop(op, None)
            if export is None:
                return
            export.is_withdrawn = True
            for name in export.names:
                left = [entry for entry in self._known.pop(name, ()) if entry.export is not export]
                if left:
                    self._known[name] = left
                self._over[name] = None
            while len(self._over) > _MOST_OVER:
                self._over.popitem(last=False)
            has_ended = not export.num_reading
        if has_ended:
            self._ended(op)

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
            connections = list(self._connections)
        for each in (self._listener, *connections):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _entries(self, export: _Export, spaces: Spaces, pages: Iterable[PageMove], is_here: bool) -> Iterable[Served]:
        namespaces = {Role.TARGET: spaces.target, Role.DRAFT: spaces.draft}
        for page in pages:
            for part in self._parts:
                role = part.cell.role
                namespace = namespaces[role]
                if namespace is not None:
                    identity = Identity(ChunkId.of(page.name(role), part.cell), namespace, self._grids[role].shape)
                    holds = is_here and self._pool.shard.owns(page.slot) and (page.has_draft or role is Role.TARGET)
                    yield Served(export, identity, page, part if holds else None)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="hicache-page-reader", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        session = Session(connection, self._password is None)
        try:
            while (words := session.request()) is not None:
                if words[0].upper() == b"AUTH":
                    self._let_in(session, words[-1])
                elif session.is_trusted:
                    self._answer(session, words)
                else:
                    session.send([b"-NOAUTH a password is needed\r\n"])
        except (OSError, ValueError) as error:
            logger.debug("A reader of pages has gone: %s", error)
        finally:
            for key in tuple(session.located):
                self._release(session, key)
            self._metrics.count("peer_bytes", "sent", session.num_sent)
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _let_in(self, session: Session, password: bytes) -> None:
        session.is_trusted = self._password is None or compare_digest(password, self._password)
        session.send([b"+OK\r\n" if session.is_trusted else b"-WRONGPASS wrong password\r\n"])

    def _answer(self, session: Session, words: Sequence[bytes]) -> None:
        verb, *rest = words
        match verb.upper(), rest:
            case b"STRLEN", [key]:
                session.send([b":%d\r\n" % self._num_bytes(key)])
            case b"GET", [key]:
                self._send(session, key, 0, None)
            case b"GETRANGE", [key, first, last]:
                self._send(session, key, int(first), int(last))
            case b"AGENT", []:
                session.send(_bulk(self._memory.metadata if self._memory is not None else b""))
            case b"LOCATE", [key]:
                self._locate(session, key)
            case b"RELEASE", [key, num_bytes]:
                session.num_sent += int(num_bytes)
                session.send([b":%d\r\n" % self._release(session, key)])
            case b"UNLINK", [key]:
                # What a reader finds to be bad it would remove: here it stays, for it is no file of a store.
                name = _name(key)
                is_told = name.startswith(ACKNOWLEDGEMENT)
                if is_told:
                    self._acknowledged(unquote(name.removeprefix(ACKNOWLEDGEMENT)))
                session.send([b":%d\r\n" % is_told])
            case _:
                session.send([b"-ERR pages can only be read here\r\n"])
        self._metrics.count("peer_bytes", "sent", session.take_sent())

    def _send(self, session: Session, key: bytes, first: int, last: int | None) -> None:
        """A value, or bytes [first, last] of it."""
        served = self._begin(key)
        if served is None or served.part is None:
            session.send([_NO_VALUE if last is None else b"$0\r\n\r\n"])
            return
        try:
            value = [
                memoryview(_STAMP),
                memoryview(self._header(served)),
                self._pool.part(served.page.slot, served.part),
            ]
            total = sum(part.nbytes for part in value)
            end = total if last is None else max(first, min(last + 1, total))
            chosen = first_bytes(after_bytes(value, first), end - first)
            session.send([b"$%d\r\n" % (end - first), *chosen, b"\r\n"])
        finally:
            self._finish(served)

    def _locate(self, session: Session, key: bytes) -> None:
        """Say where a payload lies. It stays there until the connection releases it, or ends."""
        self._release(session, key)
        served = self._begin(key) if self._memory is not None else None
        if self._memory is None or served is None or served.part is None:
            session.send([_NO_VALUE])
            return
        self._memory.attend()
        session.located[key] = served
        payload = MemoryRange.of(self._pool.part(served.page.slot, served.part))
        place = b"%d %d" % (payload.address, payload.num_bytes)
        session.send([b"*2\r\n", *_bulk(self._header(served)), *_bulk(place)])

    def _release(self, session: Session, key: bytes) -> bool:
        """End the read that `_locate` has begun, if there is one."""
        served = session.located.pop(key, None)
        if served is None or self._memory is None:
            return False
        self._memory.leave()
        self._finish(served)
        return True

    def _num_bytes(self, key: bytes) -> int:
        served = self._begin(key)
        if served is None or served.part is None:
            return 0
        try:
            return len(_STAMP) + len(self._header(served)) + served.part.num_bytes
        finally:
            self._finish(served)

    def _header(self, served: Served) -> bytes:
        """Of the bytes that were there when somebody asked first: the lease keeps them as they are."""
        if served.header is None and served.part is not None:
            payload = self._pool.part(served.page.slot, served.part)
            served.header = seal(served.identity, payload, served.part.cell.unit_bytes, self._sealer)
        return served.header or b""

    def _begin(self, key: bytes) -> Served | None:
        """An object that is here, now being read; `None` for one that is not, nor comes in time."""
        name = _name(key)
        with self._lock:
            limit_s = min(_LATE_WAIT_S, self._wait_s) if name in self._over else self._wait_s
            self._lock.wait_for(lambda: name in self._known or self._is_closed, limit_s)
            served = next((entry for entry in reversed(self._known.get(name, ())) if entry.part is not None), None)
            if served is not None:
                served.export.num_reading += 1
            return served

    def _finish(self, served: Served) -> None:
        export = served.export
        with self._lock:
            export.num_reading -= 1
            has_ended = export.is_withdrawn and not export.num_reading
        if has_ended:
            self._ended(export.op)


def _name(key: bytes) -> ObjectName:
    return ObjectName(key.decode(errors="replace"))


def _bulk(data: bytes) -> list[bytes]:
    return [b"$%d\r\n" % len(data), data, b"\r\n"]


class Session:
    """Requests and replies on one connection. Raises OSError or ValueError where it cannot go on."""

    def __init__(self, connection: socket.socket, is_trusted: bool) -> None:
        self._connection = connection
        self._file = connection.makefile("rb")
        self.is_trusted = is_trusted
        self.num_sent = 0
        self.located: dict[bytes, Served] = {}

    def request(self) -> list[bytes] | None:
        """The words of the next request; `None` at the end of the connection."""
        limit_s = _IDLE_LIMIT_S if self.is_trusted else _STEP_LIMIT_S
        self._connection.settimeout(_LOCATED_LIMIT_S if self.located else limit_s)
        line = self._file.readline(_MAX_LINE_BYTES)
        if not line:
            return None
        num_words = self._number(line, b"*", _MAX_WORDS)
        if num_words < 1:
            raise ValueError("a request without words")
        return [self._word() for _ in range(num_words)]

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Gather `parts` into the socket. A reader that takes nothing for long is given up."""
        self._connection.settimeout(_STEP_LIMIT_S)
        left = [memoryview(part) for part in parts if len(part)]
        while left:
            count = self._connection.sendmsg(left)
            self.num_sent += count
            left = after_bytes(left, count)

    def take_sent(self) -> int:
        """Bytes sent since the last call."""
        taken, self.num_sent = self.num_sent, 0
        return taken

    def _word(self) -> bytes:
        size = self._number(self._file.readline(_MAX_LINE_BYTES), b"$", _MAX_WORD_BYTES)
        word = self._file.read(size + 2)
        if len(word) != size + 2:
            raise ValueError("a request that ends early")
        return word[:-2]

    @staticmethod
    def _number(line: bytes, mark: bytes, most: int) -> int:
        if not line.startswith(mark) or not line.endswith(b"\r\n"):
            raise ValueError(f"a line that does not begin with {mark!r}")
        number = int(line[1:-2])
        if not 0 <= number <= most:
            raise ValueError(f"{number} is outside 0..{most}")
        return number
