"""Objects in redis: one server, a sentinel's master or a cluster; over TCP, TLS or a socket file.

An object `name` is the string value of the key prefix + name: 8 bytes of the time of its write (milliseconds of
Unix time, little-endian), which redis does not keep, then the object's bytes.

Owner: `storage/registry.py`. Thread: as `base.Store`.
"""

from __future__ import annotations

import re
import struct
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from vllm_hicache.errors import ConfigError, ObjectMissing, StoreDenied, StoreError, StoreTimeout, StoreUnavailable
from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import ObjectInfo, Rights, Store, StoreOptions, StoreUsage, check_name, teller
from vllm_hicache.storage.redis_nodes import ClusterNodes, FixedNode, Nodes, SentinelNodes
from vllm_hicache.storage.redis_pool import Address, WirePool, raise_error
from vllm_hicache.storage.redis_url import parse_redis_url
from vllm_hicache.storage.resp import Deadline, NoRedis, ServerError, Wire, command
from vllm_hicache.storage.url import StoreUrl

_TIME = struct.Struct("<Q")
_SCAN_COUNT = 1000
_WHOLE_BYTES = 64 << 10
_ELSEWHERE = object()
_PROBE_LIFE_MS = 1000
_OTHER_MASTER = ("READONLY", "MASTERDOWN", "CLUSTERDOWN")
_POLICY = re.compile(rb"^maxmemory_policy:([a-z-]+)\r?$", re.MULTILINE)
_MAXMEMORY = re.compile(rb"^maxmemory:([0-9]+)\r?$", re.MULTILINE)
_Page = tuple[bytes, Sequence[ObjectInfo]]
_GLOB = str.maketrans({char: f"\\{char}" for char in "\\*?[]"})


@dataclass(frozen=True, slots=True)
class Layout:
    """How objects lie in redis. `url` describes the store without secrets; `ttl_ms` is their life, None for ever."""

    url: str
    prefix: str
    ttl_ms: int | None = None


class RedisStore(Store):
    """Objects as string values. What redis evicts or lets expire is missing; it is never half there."""

    scheme: ClassVar[str] = "redis"

    def __init__(self, layout: Layout, nodes: Nodes, pool: WirePool, timeout_s: float) -> None:
        self._layout = layout
        self._nodes = nodes
        self._pool = pool
        self._timeout_s = timeout_s

    def describe(self) -> str:
        return self._layout.url

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        deadline = Deadline(self._timeout_s)
        keys = [self._key(name) for name in names]
        by_node: defaultdict[Address, list[int]] = defaultdict(list)
        for index, key in enumerate(keys):
            by_node[self._nodes.of_key(key, deadline)].append(index)
        found = [False] * len(keys)
        for address, indices in by_node.items():
            requests = [command(b"STRLEN", keys[index]) for index in indices]
            with self._lent(address, deadline) as wire:
                sizes = wire.ask(requests, int, deadline)
            for index, size in zip(indices, sizes, strict=True):
                final = self._followed(size, (b"STRLEN", keys[index]), deadline)
                found[index] = self._total_bytes(final, address) is not None
        return found

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        deadline, key, told = Deadline(self._timeout_s), self._key(name), teller(parts)
        wanted = sum(part.nbytes for part in parts)
        # GET hands out the value as it lies in memory; a range is copied by the server first.
        whole = offset == 0 and wanted >= _WHOLE_BYTES
        found = self._read_whole(key, parts, deadline, told) if whole else _ELSEWHERE
        if found is _ELSEWHERE:
            found = self._read_range(key, parts, offset, wanted, deadline, told)
        if not isinstance(found, int):
            raise ObjectMissing(name)
        return found

    def _read_whole(
        self, key: bytes, parts: Sequence[memoryview], deadline: Deadline, told: Callable[[int], None] | None
    ) -> object:
        """Return the object's bytes, None for what is no object, `_ELSEWHERE` for a key of another server."""
        address = self._nodes.of_key(key, deadline)
        stamp = memoryview(bytearray(_TIME.size))
        tell = None if told is None else lambda count: told(max(0, count - _TIME.size))
        with self._lent(address, deadline) as wire:
            wire.send([command(b"GET", key)], 1, deadline)
            size: object = wire.value_into([stamp, *parts], deadline, tell)
        if _redirected(size):
            return _ELSEWHERE
        return self._total_bytes(-1 if size is None else size, address)

    def _read_range(
        self,
        key: bytes,
        parts: Sequence[memoryview],
        offset: int,
        wanted: int,
        deadline: Deadline,
        told: Callable[[int], None] | None,
    ) -> int | None:
        """Return the object's bytes, None for what is no object. Brings no more than the parts hold."""
        address = self._nodes.of_key(key, deadline)
        first = _TIME.size + offset
        asked = [(b"STRLEN", key), (b"GETRANGE", key, b"%d" % first, b"%d" % (first + wanted - 1))]
        size: object
        got: object
        with self._lent(address, deadline) as wire:
            wire.send([command(*words) for words in asked], len(asked), deadline)
            size = wire.reply(int, deadline)
            got = wire.reply_into(parts, deadline, told)
        if _redirected(size) or _redirected(got):
            size, data = self._nodes.elsewhere(asked, deadline)
            got = _scatter(data, parts)
        total_bytes = self._total_bytes(size, address)
        if total_bytes is None:
            return None
        self._check(got, address)
        # The key may have come or gone between the two commands.
        return total_bytes if got == max(0, min(wanted, total_bytes - offset)) else None

    def write(self, name: ObjectName, parts: Sequence[memoryview]) -> bool:
        deadline, key = Deadline(self._timeout_s), self._key(name)
        address = self._nodes.of_key(key, deadline)
        stamp = _TIME.pack(time.time_ns() // 1_000_000)
        num_bytes = len(stamp) + sum(part.nbytes for part in parts)
        options = [b"NX"] if self._layout.ttl_ms is None else [b"NX", b"PX", b"%d" % self._layout.ttl_ms]
        head, tail = _around_value(key, num_bytes, options)
        reply: object
        with self._lent(address, deadline) as wire:
            wire.send([head, stamp, *parts, tail], 1, deadline)
            reply = wire.reply(object, deadline)
            _check_set(reply)
        if _redirected(reply):
            (reply,) = self._nodes.elsewhere([(b"SET", key, b"".join([stamp, *parts]), *options)], deadline)
        self._check(reply, address)
        return reply is not None

    def delete(self, name: ObjectName) -> bool:
        return self._ask(int, Deadline(self._timeout_s), b"UNLINK", self._key(name)) == 1

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """As `Store.list`; each step of the iteration ends within the timeout."""
        return self._objects(prefix, lambda: Deadline(self._timeout_s))

    def usage(self) -> StoreUsage:
        deadline = Deadline(self._timeout_s)
        num_objects = used_bytes = 0
        for info in self._objects("", lambda: deadline):
            num_objects += 1
            used_bytes += info.size_bytes
        return StoreUsage(num_objects, used_bytes, self._capacity_bytes(deadline))

    def probe(self) -> Rights:
        try:
            return self._try_rights(Deadline(self._timeout_s))
        except (StoreDenied, NoRedis) as error:
            raise ConfigError(f"store {self.describe()} cannot be used: {error}") from error

    def close(self) -> None:
        self._pool.close()

    def eviction_policy(self) -> str | None:
        """Return the servers' `maxmemory-policy`, all of them where they differ; None where none tells."""
        matches = map(_POLICY.search, self._memory_infos(Deadline(self._timeout_s)))
        return ", ".join(sorted({match[1].decode() for match in matches if match})) or None

    def _try_rights(self, deadline: Deadline) -> Rights:
        """Raises StoreDenied unless we may read and list."""
        key = self._key(ObjectName(f"probe-{uuid.uuid4().hex}"))
        self._ask(int, deadline, b"STRLEN", key)
        self._ask(bytes, deadline, b"GETRANGE", key, b"0", b"0")
        for address in self._nodes.all(deadline):
            self._page(address, "", b"0", deadline)
        # Too short for an object, so no list shows it; it goes by itself where we may not delete.
        written = self._allowed(deadline, b"SET", key, b"", b"NX", b"PX", b"%d" % _PROBE_LIFE_MS)
        return Rights(write=written, delete=self._allowed(deadline, b"UNLINK", key))

    def _allowed(self, deadline: Deadline, *words: bytes) -> bool:
        """Run a command; False when this user, or this replica, is not to change anything."""
        reply = self._reply(object, deadline, *words)
        if isinstance(reply, ServerError) and reply.code in ("NOPERM", "READONLY"):
            return False
        self._check(reply, self._nodes.of_key(words[1], deadline))
        return True

    def _objects(self, prefix: str, deadline: Callable[[], Deadline]) -> Iterator[ObjectInfo]:
        seen: set[ObjectName] = set()
        for address in self._nodes.all(deadline()):
            cursor = b""
            while cursor != b"0":
                cursor, found = self._page(address, prefix, cursor or b"0", deadline())
                # A scan may come by a key twice.
                fresh = [info for info in found if info.name not in seen]
                seen.update(info.name for info in fresh)
                yield from fresh

    def _page(self, address: Address, prefix: str, cursor: bytes, deadline: Deadline) -> _Page:
        """Return the next cursor, 0 at the end, and some objects."""
        pattern = f"{(self._layout.prefix + prefix).translate(_GLOB)}*".encode()
        scan = command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % _SCAN_COUNT)
        with self._lent(address, deadline) as wire:
            (reply,) = wire.ask([scan], list, deadline)
            self._check(reply, address)
            cursor, keys = _scanned(reply)
            names = {key: name for key in keys if (name := self._name(key)) is not None}
            asked = [command(b"STRLEN", key) + command(b"GETRANGE", key, b"0", b"7") for key in names]
            wire.send([b"".join(asked)], 2 * len(asked), deadline)
            told = [(wire.reply(int, deadline), wire.reply(bytes, deadline)) for _ in names]
        found = []
        for (key, name), (size, written) in zip(names.items(), told, strict=True):
            # A slot under way: its keys are listed where they were, and asked about where they are.
            length = self._followed(size, (b"STRLEN", key), deadline)
            stamp = self._followed(written, (b"GETRANGE", key, b"0", b"7"), deadline)
            total_bytes = self._total_bytes(length, address)
            if total_bytes is not None and isinstance(stamp, bytes) and len(stamp) == _TIME.size:
                found.append(ObjectInfo(name, total_bytes, _TIME.unpack(stamp)[0] / 1000))
        return cursor, found

    def _capacity_bytes(self, deadline: Deadline) -> int | None:
        """Return the `maxmemory` of all servers; None where one has none, or does not tell."""
        limits = [int(match[1]) if (match := _MAXMEMORY.search(told)) else 0 for told in self._memory_infos(deadline)]
        return sum(limits) if all(limits) else None

    def _memory_infos(self, deadline: Deadline) -> Sequence[bytes]:
        """Return what each server says of its memory; empty for one that does not tell."""
        infos = []
        for address in self._nodes.all(deadline):
            with self._lent(address, deadline) as wire:
                (told,) = wire.ask([command(b"INFO", b"memory")], bytes, deadline)
            infos.append(b"" if isinstance(told, ServerError) else told)
        return infos

    def _ask(self, kind: type, deadline: Deadline, *words: bytes) -> object:
        """Run a small command on the key `words[1]`. Raises for an error reply."""
        reply = self._reply(kind, deadline, *words)
        self._check(reply, self._nodes.of_key(words[1], deadline))
        return reply

    def _reply(self, kind: type, deadline: Deadline, *words: bytes) -> object:
        with self._lent(self._nodes.of_key(words[1], deadline), deadline) as wire:
            (reply,) = wire.ask([command(*words)], kind, deadline)
        return self._followed(reply, words, deadline)

    def _followed(self, reply: object, words: Sequence[bytes], deadline: Deadline) -> object:
        """Return `reply`, or what another server answers to the same words when it is a redirection."""
        return self._nodes.elsewhere([words], deadline)[0] if _redirected(reply) else reply

    @contextmanager
    def _lent(self, address: Address, deadline: Deadline) -> Iterator[Wire]:
        """Lend a wire; a server that fails may not be the right one any more."""
        try:
            with self._pool.lend(address, deadline) as wire:
                yield wire
        except (StoreTimeout, StoreUnavailable):
            self._nodes.forget()
            raise

    def _check(self, reply: object, address: Address) -> None:
        """Raise what an error reply means."""
        if isinstance(reply, ServerError):
            if reply.code in _OTHER_MASTER:
                self._nodes.forget()
            raise_error(reply, address)

    def _total_bytes(self, size: object, address: Address) -> int | None:
        """Return an object's bytes after STRLEN's answer; None for what is no object."""
        if isinstance(size, ServerError) and size.code == "WRONGTYPE":
            return None
        self._check(size, address)
        return size - _TIME.size if isinstance(size, int) and size >= _TIME.size else None

    def _key(self, name: ObjectName) -> bytes:
        return (self._layout.prefix + check_name(name)).encode()

    def _name(self, key: bytes) -> ObjectName | None:
        """Return the name of the object that a key holds; None when it cannot be one of ours."""
        name = ObjectName(key.decode(errors="replace").removeprefix(self._layout.prefix))
        try:
            return check_name(name)
        except StoreError:
            return None


def open_url(url: StoreUrl, options: StoreOptions) -> Store:
    """Open what `redis_url` describes; nothing is connected yet. Raises ConfigError."""
    parsed = parse_redis_url(url)
    nodes: Nodes
    if parsed.cluster:
        nodes = ClusterNodes(parsed.addresses, parsed.login)
    elif parsed.sentinel is not None:
        nodes = SentinelNodes(parsed.addresses, parsed.sentinel, parsed.login)
    else:
        nodes = FixedNode(parsed.addresses[0])
    layout = Layout(parsed.shown, parsed.prefix, parsed.ttl_ms)
    return RedisStore(layout, nodes, WirePool(parsed.login, options.num_connections), options.timeout_s)


def _redirected(reply: object) -> bool:
    """Does a cluster's server say that another has the key?"""
    return isinstance(reply, ServerError) and reply.code in ("MOVED", "ASK")


def _around_value(key: bytes, num_bytes: int, options: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Return what stands before and after the value in a SET request."""
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (3 + len(options), len(key), key, num_bytes)
    return head, b"\r\n" + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in options)


def _check_set(reply: object) -> None:
    """Raise NoRedis for what cannot answer SET."""
    if reply not in (b"OK", None) and not isinstance(reply, ServerError):
        raise NoRedis("redis answered neither OK nor nil to SET")


def _scanned(reply: object) -> tuple[bytes, list[bytes]]:
    """Return SCAN's cursor and keys. Raises NoRedis."""
    match reply:
        case [bytes() as cursor, list() as keys] if all(isinstance(key, bytes) for key in keys):
            return cursor, keys
    raise NoRedis("redis answered SCAN without a cursor and keys")


def _scatter(data: object, parts: Sequence[memoryview]) -> int:
    """Copy `data` into `parts`; return its length."""
    if not isinstance(data, bytes):
        raise NoRedis("redis answered GETRANGE without a string")
    at = 0
    for part in parts:
        piece = data[at : at + part.nbytes]
        part[: len(piece)] = piece
        at += len(piece)
    return len(data)
