"""Connections to redis servers: opened, logged in, lent to one call at a time and kept.

Sockets are opened here and not by a client library, so that one deadline holds from the look-up of the host to
the last byte (`docs/decisions/0012-redis-wire.md`).

Owner: `redis.RedisStore`. Thread: everything here may be called from any thread, also after a fork.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from vllm_hicache.errors import StoreDenied, StoreError, StoreTimeout, StoreUnavailable
from vllm_hicache.storage.resp import Deadline, NoRedis, ServerError, Wire, command

USERNAME_VARIABLE = "VLLM_HICACHE_REDIS_USERNAME"
PASSWORD_VARIABLE = "VLLM_HICACHE_REDIS_PASSWORD"
_REFUSED_LOGIN = (
    "redis at {} refuses the user or the password: give them as redis://user:password@host, or in the environment as "
    f"{USERNAME_VARIABLE} and {PASSWORD_VARIABLE}"
)


class NeedsRepair(StoreDenied):
    """Only a person can repair this: the credentials, the database or a certificate. A probe refuses it."""


@dataclass(frozen=True, slots=True)
class Address:
    """Of a server; `port` is None for the path of a socket file."""

    host: str
    port: int | None

    def __str__(self) -> str:
        if self.port is None:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Login:
    """What every server of a store is told at first. `ca` is the file that `tls` trusts, None for the system's."""

    username: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    ca: str | None = None


def connect(address: Address, login: Login, deadline: Deadline) -> Wire:
    """Return a wire to `address`, logged in. Raises NeedsRepair, StoreUnavailable or StoreTimeout."""
    try:
        wire = Wire(_open_socket(address, login.tls, deadline))
    except TimeoutError as error:
        if login.tls is None:
            raise deadline.passed() from error
        raise StoreTimeout(f"{deadline.passed()} Or does it speak no TLS? Then use redis://") from error
    except ssl.SSLCertVerificationError as error:
        raise NeedsRepair(
            f"the certificate of redis at {address} does not verify: {error.verify_message}; "
            "give its authority's file as ca=, and the host as the certificate names it"
        ) from error
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
        raise StoreUnavailable(f"redis at {address} ended the TLS handshake") from error
    except ssl.SSLError as error:
        raise NeedsRepair(f"redis at {address} does not speak TLS: {error.reason}; use redis:// without TLS") from error
    except OSError as error:
        raise StoreUnavailable(f"redis at {address} cannot be reached: {error.strerror or error}") from error
    try:
        _log_in(wire, address, login, deadline)
    except BaseException:
        wire.close()
        raise
    return wire


def _open_socket(address: Address, tls: ssl.SSLContext | None, deadline: Deadline) -> socket.socket:
    """Connect to the first of the host's addresses that takes us. Raises OSError."""
    if address.port is None:
        return _connected(socket.AF_UNIX, address.host, deadline)
    failure = OSError("the host has no address")
    for family, _, _, _, target in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
        try:
            plain = _connected(family, target, deadline)
        except OSError as error:
            failure = error
            continue
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return plain if tls is None else tls.wrap_socket(plain, server_hostname=address.host)
        except BaseException:
            plain.close()
            raise
    raise failure


def _connected(family: int, target: str | tuple[str | int | bytes, ...], deadline: Deadline) -> socket.socket:
    plain = socket.socket(family, socket.SOCK_STREAM)
    try:
        plain.settimeout(deadline.left_s())
        plain.connect(target)
    except BaseException:
        plain.close()
        raise
    return plain


def _log_in(wire: Wire, address: Address, login: Login, deadline: Deadline) -> None:
    """Send AUTH and SELECT. What a server answers to them may repeat a secret, and is not quoted."""
    if login.password is not None:
        words = [word.encode() for word in (login.username, login.password) if word is not None]
        (reply,) = wire.ask([command(b"AUTH", *words)], bytes, deadline)
        if reply != b"OK":
            if isinstance(reply, ServerError) and "max number of clients" in reply.text:
                raise_error(reply, address)
            raise NeedsRepair(_REFUSED_LOGIN.format(address))
    if login.db:
        (reply,) = wire.ask([command(b"SELECT", b"%d" % login.db)], bytes, deadline)
        if isinstance(reply, ServerError) and reply.code == "ERR":
            raise NeedsRepair(
                f"redis at {address} has no database {login.db}: {reply.text}; lower it, or its databases"
            )
        if reply != b"OK":
            raise_error(reply, address)
            raise NoRedis(f"redis at {address} answered neither OK nor an error to SELECT")


def raise_error(reply: object, address: object) -> None:
    """Raise what an error reply means, if `reply` is one; the one place that knows the server's errors."""
    if not isinstance(reply, ServerError):
        return
    told = f"redis at {address} answered {reply.text[:200]!r}"
    match reply.code:
        case "NOAUTH" | "WRONGPASS":
            raise NeedsRepair(_REFUSED_LOGIN.format(address))
        case "DENIED":
            raise NeedsRepair(f"redis at {address} is in protected mode: give it a password, or bind it otherwise")
        case "MOVED" | "ASK":
            raise NeedsRepair(f"redis at {address} is part of a cluster: add cluster=true to its URL")
        case "NOPERM":
            raise StoreDenied(f"{told}: give its user the right")
        case "OOM" | "MISCONF":
            raise StoreUnavailable(f"{told}: it is full; raise maxmemory, or set a maxmemory-policy that evicts")
        case "READONLY" | "CLUSTERDOWN" | "LOADING" | "MASTERDOWN" | "TRYAGAIN" | "BUSY" | "NOREPLICAS":
            raise StoreUnavailable(told)
        case _ if "max number of clients" in reply.text:
            raise StoreUnavailable(f"{told}: raise its maxclients")
    raise StoreError(told)


class WirePool:
    """Wires that are open and idle, by address; at most `num_connections` are lent at once."""

    def __init__(self, login: Login, num_connections: int) -> None:
        self._login = login
        self._num_connections = num_connections
        self._closed = False
        self._reset()

    @contextmanager
    def lend(self, address: Address, deadline: Deadline) -> Iterator[Wire]:
        """Lend a connected wire; it is kept for the next call unless this one fails or leaves it unclean."""
        if os.getpid() != self._pid:
            self._reset()
        turns = self._turns
        if not turns.acquire(timeout=deadline.left_s()):
            raise StoreTimeout(
                f"all {self._num_connections} connections to redis are in use: raise the number of connections"
            )
        try:
            wire = self._idle(address) or connect(address, self._login, deadline)
            try:
                yield wire
            except BaseException:
                wire.close()
                raise
            self._keep(address, wire)
        finally:
            turns.release()

    def close(self) -> None:
        """Close all idle wires; those that are lent are closed when they come back."""
        with self._lock:
            self._closed = True
            wires = [wire for idle in self._wires.values() for wire in idle]
            self._wires.clear()
        for wire in wires:
            wire.close()

    def _reset(self) -> None:
        """Start without a connection, as after a fork: the parent's are the parent's."""
        self._lock = threading.Lock()
        self._turns = threading.Semaphore(self._num_connections)
        self._wires: defaultdict[Address, list[Wire]] = defaultdict(list)
        self._pid = os.getpid()

    def _idle(self, address: Address) -> Wire | None:
        """Return the wire used last that is still good: the server may have closed it meanwhile."""
        while True:
            with self._lock:
                wires = self._wires[address]
                wire = wires.pop() if wires else None
            if wire is None or wire.clean:
                return wire
            wire.close()

    def _keep(self, address: Address, wire: Wire) -> None:
        if wire.clean:
            with self._lock:
                if not self._closed:
                    self._wires[address].append(wire)
                    return
        wire.close()
