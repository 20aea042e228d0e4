"""The envelope of every object: who it is, how long it is, and digests that prove it.

    lead      magic, format version, algorithm, header/payload/unit bytes, number of units     40 bytes
    identity  page key, namespace, group, layer group, head group, the grid's shape, role      80 bytes
    table     one digest a unit of the payload, in order                                       16 each
    seal      digest of all the header before it                                               16 or 32 bytes
    payload   follows at once; a whole number of units

All integers are little-endian. A unit is one (head, layer) piece, so that a range of whole units is
checked without the rest. The algorithm says how table and seal are made:

    1  XXH3-128, for both; the seal has 16 bytes. Finds accidents: whoever can write can forge it.
    2  HMAC-SHA-256 under the operator's key; the table's are cut to 16 bytes, the seal has all 32.

A reader takes objects of its own sealer's algorithm alone, whatever they say of themselves, and any other
reads as another version: a reader with a key that took algorithm 1 would take forgeries, and one without
cannot judge 2. The namespace tells keys apart (`Secrets.protection`), so neither meets, let alone removes,
the other's objects unless somebody put them there.

Owner: `storage/`. Pure functions over caller's memory without copies of the payload; any thread.
"""

from __future__ import annotations

import operator
import struct
from dataclasses import dataclass, field
from hmac import compare_digest
from hmac import digest as hmac_digest
from typing import ClassVar

from xxhash import xxh3_128_digest

from vllm_hicache.geometry import Cell
from vllm_hicache.grid import Grid
from vllm_hicache.names import KEY_BYTES, MissReason, ObjectName, PageKey, Role

MAGIC = b"VLLMHiC\n"
FORMAT_VERSION = 1
ALGORITHM_XXH3 = 1
ALGORITHM_HMAC = 2
NAMESPACE_BYTES = 32
DIGEST_BYTES = 16

_LEAD = struct.Struct("<8sHBxIQQI4x")
_IDENTITY = struct.Struct("<32s32sHHHHHB5x")
FIXED_BYTES = _LEAD.size + _IDENTITY.size
_ROLE_CODES = {Role.TARGET: 0, Role.DRAFT: 1}
_ROLES = {code: role for role, code in _ROLE_CODES.items()}
_MAX_COORDINATE = 0xFFFF


@dataclass(frozen=True, slots=True)
class Xxh3Sealer:
    """Seals against accidents. `digest(unit)` and `seal(header)` return 16 bytes."""

    algorithm: ClassVar[int] = ALGORITHM_XXH3
    seal_bytes: ClassVar[int] = DIGEST_BYTES
    # The bare function: a method around it would cost as much as the digest of a small unit.
    digest = staticmethod(xxh3_128_digest)
    seal = staticmethod(xxh3_128_digest)
    equal = staticmethod(operator.eq)


@dataclass(frozen=True, slots=True)
class HmacSealer:
    """Seals against whoever can write to the store and has not the key (32 bytes, `Secrets.seal_key`)."""

    algorithm: ClassVar[int] = ALGORITHM_HMAC
    seal_bytes: ClassVar[int] = 32
    # In constant time: how long a comparison takes must not tell how much of a forgery was right.
    equal = staticmethod(compare_digest)
    key: bytes = field(repr=False)

    def digest(self, unit: memoryview) -> bytes:
        """Return the table's 16 bytes for one unit of the payload."""
        return hmac_digest(self.key, unit, "sha256")[:DIGEST_BYTES]

    def seal(self, header: bytes | memoryview) -> bytes:
        """Return the 32 bytes that end a header."""
        return hmac_digest(self.key, header, "sha256")


Sealer = Xxh3Sealer | HmacSealer
XXH3 = Xxh3Sealer()


def sealer_for(seal_key: bytes | None) -> Sealer:
    """Return the sealer of an engine with this `Secrets.seal_key`."""
    return XXH3 if seal_key is None else HmacSealer(seal_key)


@dataclass(frozen=True, slots=True)
class ChunkId:
    """Names one chunk of one page inside a namespace. Raises ValueError for coordinates outside 0..65535."""

    page_key: PageKey
    group: int
    role: Role
    layer_group: int
    head_group: int

    def __post_init__(self) -> None:
        if len(self.page_key) != KEY_BYTES:
            raise ValueError(f"page key has {len(self.page_key)} bytes: expected {KEY_BYTES}")
        for value in (self.group, self.layer_group, self.head_group):
            if not 0 <= value <= _MAX_COORDINATE:
                raise ValueError(f"chunk coordinate {value} is outside 0..{_MAX_COORDINATE}")

    @classmethod
    def of(cls, page_key: PageKey, cell: Cell) -> ChunkId:
        """The chunk of `page_key` that holds `cell`."""
        return cls(page_key, 0, cell.role, cell.layer_group, cell.head_group)

    def object_name(self, namespace: bytes) -> ObjectName:
        """Return the chunk's name in a store; different chunks of one namespace never share a name."""
        key = self.page_key.hex()
        where = f"{self.group}.{self.role.value}.{self.layer_group}.{self.head_group}"
        return ObjectName(f"{namespace_part(namespace)}/{key[:2]}/{key}.{where}")


@dataclass(frozen=True, slots=True)
class Identity:
    """All that an object claims to be. Raises ValueError when the chunk lies outside the grid."""

    chunk: ChunkId
    namespace: bytes
    grid: Grid

    def __post_init__(self) -> None:
        chunk, grid = self.chunk, self.grid
        if len(self.namespace) != NAMESPACE_BYTES:
            raise ValueError(f"namespace digest has {len(self.namespace)} bytes: expected {NAMESPACE_BYTES}")
        if chunk.layer_group >= grid.layer_groups or chunk.head_group >= grid.head_groups:
            raise ValueError(
                f"chunk (layer group {chunk.layer_group}, head group {chunk.head_group}) lies outside the "
                f"grid of {grid.layer_groups} layer groups and {grid.head_groups} head groups"
            )

    def object_name(self) -> ObjectName:
        return self.chunk.object_name(self.namespace)

    def pack(self) -> bytes:
        """Return the identity block of the header, 80 bytes."""
        chunk, grid = self.chunk, self.grid
        cell = (chunk.group, chunk.layer_group, chunk.head_group, grid.layer_groups, grid.head_groups)
        return _IDENTITY.pack(chunk.page_key, self.namespace, *cell, _ROLE_CODES[chunk.role])


@dataclass(frozen=True, slots=True)
class Header:
    """A header whose seal was found right by `sealer`. `digests` is the table: 16 bytes a unit."""

    identity: Identity
    payload_bytes: int
    unit_bytes: int
    digests: bytes
    sealer: Sealer = XXH3

    @classmethod
    def parse(cls, buffer: memoryview, sealer: Sealer = XXH3) -> Header | MissReason:
        """Return the header that `buffer` starts with, or why it is none: SHORT, CORRUPT or VERSION.

        A flip inside the version or algorithm field reads as VERSION: another version's seal is unknown.
        Another key's seal is CORRUPT.
        """
        if buffer.nbytes < FIXED_BYTES:
            return MissReason.SHORT
        magic, version, algorithm, num_header, num_payload, unit_bytes, num_units = _LEAD.unpack_from(buffer)
        if magic != MAGIC:
            return MissReason.CORRUPT
        if version != FORMAT_VERSION or algorithm != sealer.algorithm:
            return MissReason.VERSION
        if num_header > buffer.nbytes:
            return MissReason.SHORT
        # Nothing behind the lead is believed before the seal is found right.
        sealed, end = num_header - sealer.seal_bytes, num_header
        if sealed < FIXED_BYTES or not sealer.equal(sealer.seal(buffer[:sealed]), buffer[sealed:end]):
            return MissReason.CORRUPT
        if unit_bytes == 0 or num_units * unit_bytes != num_payload:
            return MissReason.CORRUPT
        identity = _unpack_identity(buffer)
        if isinstance(identity, MissReason):
            return identity
        return cls(identity, num_payload, unit_bytes, bytes(buffer[FIXED_BYTES:sealed]), sealer)

    def check_units(self, first_unit: int, payload: memoryview) -> MissReason | None:
        """Check `payload` as the whole units from `first_unit` on; None or CORRUPT."""
        unit, digest = self.unit_bytes, self.sealer.digest
        # One comparison of the joined digests instead of one a unit: half of the Python time.
        found = b"".join([digest(payload[at : at + unit]) for at in range(0, payload.nbytes, unit)])
        start = first_unit * DIGEST_BYTES
        expected = self.digests[start : start + len(found)]
        return None if self.sealer.equal(found, expected) else MissReason.CORRUPT


def namespace_part(namespace: bytes) -> str:
    """Return the first part of the names of a namespace's objects: 16 hex digits of its digest."""
    return namespace[:8].hex()


def header_bytes(payload_bytes: int, unit_bytes: int, sealer: Sealer = XXH3) -> int:
    """Return the bytes of the header before a payload. Raises ValueError unless it is whole units."""
    if unit_bytes <= 0 or payload_bytes % unit_bytes:
        raise ValueError(f"payload of {payload_bytes} bytes is not whole units of {unit_bytes} bytes")
    return FIXED_BYTES + payload_bytes // unit_bytes * DIGEST_BYTES + sealer.seal_bytes


def declared_header_bytes(buffer: memoryview) -> int:
    """Return what an unchecked header of at least `FIXED_BYTES` says about its own length."""
    declared: int = _LEAD.unpack_from(buffer)[3]
    return max(FIXED_BYTES, declared)


def seal(identity: Identity, payload: memoryview, unit_bytes: int, sealer: Sealer = XXH3) -> bytes:
    """Return the header to write before `payload` (format `B`), which stays where it is."""
    size, num_payload = header_bytes(payload.nbytes, unit_bytes, sealer), payload.nbytes
    starts = range(0, num_payload, unit_bytes)
    lead = _LEAD.pack(MAGIC, FORMAT_VERSION, sealer.algorithm, size, num_payload, unit_bytes, len(starts))
    digest = sealer.digest
    table = [digest(payload[at : at + unit_bytes]) for at in starts]
    body = b"".join([lead, identity.pack(), *table])
    return body + sealer.seal(body)


def check(header: Header, expected: Identity, payload: memoryview) -> MissReason | None:
    """Compare a parsed header and the whole payload with what was asked for; None is a hit."""
    if header.identity != expected:
        return MissReason.FOREIGN
    if header.payload_bytes != payload.nbytes:
        return MissReason.SHORT if payload.nbytes < header.payload_bytes else MissReason.LONG
    return header.check_units(0, payload)


def read_header(
    buffer: memoryview,
    total_bytes: int,
    expected: Identity,
    payload_bytes: int,
    unit_bytes: int,
    sealer: Sealer = XXH3,
) -> Header | MissReason:
    """Judge the header in `buffer` (`header_bytes` long) of an object of `total_bytes`.

    A size other than expected is FOREIGN when the object is whole but another one, else SHORT or LONG.
    """
    if total_bytes < FIXED_BYTES:
        return MissReason.SHORT
    magic, version, algorithm, num_header, num_payload, _, _ = _LEAD.unpack_from(buffer)
    if total_bytes != buffer.nbytes + payload_bytes and magic == MAGIC:
        if version != FORMAT_VERSION or algorithm != sealer.algorithm:
            return MissReason.VERSION
        # Its seal lies where this buffer may not reach; a size that agrees with itself is proof enough here.
        if total_bytes == num_header + num_payload and buffer[_LEAD.size : FIXED_BYTES] != expected.pack():
            return MissReason.FOREIGN
        return MissReason.SHORT if total_bytes < buffer.nbytes + payload_bytes else MissReason.LONG
    header = Header.parse(buffer, sealer)
    # The size was right, so a header that claims to be longer than its room has been flipped.
    if header is MissReason.SHORT:
        return MissReason.CORRUPT
    if isinstance(header, Header):
        if header.identity != expected:
            return MissReason.FOREIGN
        if header.unit_bytes != unit_bytes or header.payload_bytes != payload_bytes:
            return MissReason.CORRUPT
    return header


def _unpack_identity(buffer: memoryview) -> Identity | MissReason:
    """Return the identity of a header whose seal is right: what does not make sense is a newer writer's."""
    key, namespace, group, layer, head, layers, heads, role = _IDENTITY.unpack_from(buffer, _LEAD.size)
    if role not in _ROLES or layer >= layers or head >= heads:
        return MissReason.VERSION
    chunk = ChunkId(PageKey(key), group, _ROLES[role], layer, head)
    return Identity(chunk, namespace, Grid(layers, heads))
