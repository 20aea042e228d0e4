"""The envelope: whatever happens to an object's bytes, it is never served as what was asked for."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hicache.names import MissReason, PageKey, Role
from vllm_hicache.storage.envelope import (
    FIXED_BYTES,
    XXH3,
    ChunkId,
    Grid,
    Header,
    HmacSealer,
    Identity,
    Sealer,
    check,
    header_bytes,
    read_header,
    seal,
    sealer_for,
)

UNIT_BYTES = 48
NUM_UNITS = 6
GRID = Grid(layer_groups=2, head_groups=4)
NAMESPACE = bytes(range(32))
CHUNK = ChunkId(PageKey(b"k" * 32), 0, Role.TARGET, 1, 2)
ASKED = Identity(CHUNK, NAMESPACE, GRID)
PAYLOAD = bytes((7 * index + 3) % 256 for index in range(UNIT_BYTES * NUM_UNITS))
SEALED = seal(ASKED, memoryview(PAYLOAD), UNIT_BYTES) + PAYLOAD
HEADER_BYTES = len(SEALED) - len(PAYLOAD)
KEY = bytes(range(100, 132))
KEYED = HmacSealer(KEY)
SIGNED = seal(ASKED, memoryview(PAYLOAD), UNIT_BYTES, KEYED) + PAYLOAD
SIGNED_HEADER_BYTES = len(SIGNED) - len(PAYLOAD)

OTHERS = {
    "key": dataclasses.replace(ASKED, chunk=dataclasses.replace(CHUNK, page_key=PageKey(b"j" * 32))),
    "group": dataclasses.replace(ASKED, chunk=dataclasses.replace(CHUNK, group=1)),
    "role": dataclasses.replace(ASKED, chunk=dataclasses.replace(CHUNK, role=Role.DRAFT)),
    "layer group": dataclasses.replace(ASKED, chunk=dataclasses.replace(CHUNK, layer_group=0)),
    "head group": dataclasses.replace(ASKED, chunk=dataclasses.replace(CHUNK, head_group=3)),
    "namespace": dataclasses.replace(ASKED, namespace=bytes(32)),
    "grid": dataclasses.replace(ASKED, grid=Grid(2, 8)),
}


def verdict(stored: bytes, asked: Identity = ASKED, sealer: Sealer = XXH3) -> MissReason | None:
    """Judge stored bytes as a load does: buffers of the expected size, filled as far as they go."""
    room = header_bytes(len(PAYLOAD), UNIT_BYTES, sealer)
    header, payload = bytearray(b"\xa5") * room, bytearray(b"\xa5") * len(PAYLOAD)
    header[: len(stored[:room])] = stored[:room]
    rest = stored[room : room + len(PAYLOAD)]
    payload[: len(rest)] = rest
    found = read_header(memoryview(header), len(stored), asked, len(PAYLOAD), UNIT_BYTES, sealer)
    return check(found, asked, memoryview(payload)) if isinstance(found, Header) else found


def flipped(stored: bytes, at: int, mask: int) -> bytes:
    return stored[:at] + bytes([stored[at] ^ mask]) + stored[at + 1 :]


def test_what_was_sealed_is_a_hit() -> None:
    assert verdict(SEALED) is None


def test_the_header_length_is_known_in_advance() -> None:
    assert header_bytes(len(PAYLOAD), UNIT_BYTES) == HEADER_BYTES


def test_an_empty_payload_is_a_hit() -> None:
    sealed = memoryview(seal(ASKED, memoryview(b""), UNIT_BYTES))
    found = read_header(sealed, len(sealed), ASKED, 0, UNIT_BYTES)
    assert isinstance(found, Header)
    assert check(found, ASKED, memoryview(b"")) is None


@pytest.mark.parametrize("at", range(len(SEALED)))
def test_a_flip_of_any_byte_is_a_miss(at: int) -> None:
    version_or_algorithm = range(8, 11)
    expected = MissReason.VERSION if at in version_or_algorithm else MissReason.CORRUPT
    assert verdict(flipped(SEALED, at, 0xFF)) is expected


@given(at=st.integers(0, len(SEALED) - 1), mask=st.integers(1, 255))
def test_a_flip_of_any_bits_is_a_miss(at: int, mask: int) -> None:
    assert verdict(flipped(SEALED, at, mask)) in (MissReason.CORRUPT, MissReason.VERSION)


@given(length=st.integers(0, len(SEALED) - 1))
@settings(max_examples=300)
def test_a_truncated_object_is_short(length: int) -> None:
    assert verdict(SEALED[:length]) is MissReason.SHORT


@pytest.mark.parametrize(
    "length",
    [0, 1, 8, FIXED_BYTES - 1, FIXED_BYTES, HEADER_BYTES - 16, HEADER_BYTES - 1, HEADER_BYTES]
    + [HEADER_BYTES + unit * UNIT_BYTES for unit in range(NUM_UNITS)]
    + [len(SEALED) - 1],
)
def test_an_object_cut_at_a_border_is_short(length: int) -> None:
    assert verdict(SEALED[:length]) is MissReason.SHORT


@given(extra=st.binary(min_size=1, max_size=3 * UNIT_BYTES))
def test_an_extended_object_is_long(extra: bytes) -> None:
    assert verdict(SEALED + extra) is MissReason.LONG


@pytest.mark.parametrize("field", OTHERS)
def test_another_object_under_this_name_is_foreign(field: str) -> None:
    other = seal(OTHERS[field], memoryview(PAYLOAD), UNIT_BYTES) + PAYLOAD
    assert verdict(other) is MissReason.FOREIGN
    assert verdict(SEALED, asked=OTHERS[field]) is MissReason.FOREIGN


@pytest.mark.parametrize("num_units", [0, 1, NUM_UNITS - 1, NUM_UNITS + 1, 50])
def test_a_whole_object_of_another_size_and_name_is_foreign(num_units: int) -> None:
    payload = bytes(num_units * UNIT_BYTES)
    assert verdict(seal(OTHERS["key"], memoryview(payload), UNIT_BYTES) + payload) is MissReason.FOREIGN


def test_a_whole_object_of_this_name_and_another_size_is_short_or_long() -> None:
    less, more = PAYLOAD[:-UNIT_BYTES], PAYLOAD + PAYLOAD[:UNIT_BYTES]
    assert verdict(seal(ASKED, memoryview(less), UNIT_BYTES) + less) is MissReason.SHORT
    assert verdict(seal(ASKED, memoryview(more), UNIT_BYTES) + more) is MissReason.LONG


@pytest.mark.parametrize("total_change", [0, 16])
def test_another_version_or_algorithm_is_a_version_miss(total_change: int) -> None:
    newer = bytearray(SEALED) + bytes(total_change)
    struct.pack_into("<H", newer, 8, 2)
    unknown = bytearray(SEALED) + bytes(total_change)
    unknown[10] = 2
    assert verdict(bytes(newer)) is MissReason.VERSION
    assert verdict(bytes(unknown)) is MissReason.VERSION


def test_a_key_seals_as_the_format_says() -> None:
    assert SIGNED_HEADER_BYTES == header_bytes(len(PAYLOAD), UNIT_BYTES, KEYED) == HEADER_BYTES + 16
    header, table_end = SIGNED[:SIGNED_HEADER_BYTES], SIGNED_HEADER_BYTES - 32
    units = [PAYLOAD[at : at + UNIT_BYTES] for at in range(0, len(PAYLOAD), UNIT_BYTES)]
    expected = b"".join(hmac.new(KEY, unit, hashlib.sha256).digest()[:16] for unit in units)
    assert header[FIXED_BYTES:table_end] == expected
    assert header[table_end:] == hmac.new(KEY, header[:table_end], hashlib.sha256).digest()
    assert header[10] == 2


def test_without_a_key_sealing_is_what_it_was() -> None:
    assert sealer_for(None) == XXH3
    assert seal(ASKED, memoryview(PAYLOAD), UNIT_BYTES, XXH3) + PAYLOAD == SEALED
    assert SEALED[10] == 1


def test_what_was_sealed_with_a_key_is_a_hit_for_the_key() -> None:
    assert verdict(SIGNED, sealer=sealer_for(KEY)) is None
    assert verdict(SIGNED, sealer=HmacSealer(KEY[:-1] + b"x")) is MissReason.CORRUPT


@pytest.mark.parametrize("at", range(len(SIGNED)))
def test_a_flip_of_any_byte_under_a_key_is_a_miss(at: int) -> None:
    expected = MissReason.VERSION if at in range(8, 11) else MissReason.CORRUPT
    assert verdict(flipped(SIGNED, at, 0x01), sealer=KEYED) is expected


@pytest.mark.parametrize("length", [0, FIXED_BYTES, HEADER_BYTES, SIGNED_HEADER_BYTES - 1, len(SIGNED) - 1])
def test_a_truncated_object_under_a_key_is_short(length: int) -> None:
    assert verdict(SIGNED[:length], sealer=KEYED) is MissReason.SHORT


def test_a_reader_with_a_key_takes_nothing_that_was_sealed_without() -> None:
    assert verdict(SEALED, sealer=KEYED) is MissReason.VERSION
    assert Header.parse(memoryview(SEALED), KEYED) is MissReason.VERSION


def test_a_reader_without_a_key_takes_nothing_that_was_sealed_with_one() -> None:
    assert verdict(SIGNED) is MissReason.VERSION
    assert Header.parse(memoryview(SIGNED)) is MissReason.VERSION


class Forger:
    """Claims algorithm `algorithm` with a seal of the right length, and knows only digests that need no key."""

    def __init__(self, algorithm: int, seal_bytes: int) -> None:
        self.algorithm, self.seal_bytes = algorithm, seal_bytes
        self.digest = XXH3.digest
        self.equal = XXH3.equal

    def seal(self, header: bytes) -> bytes:
        return hashlib.sha256(header).digest()[: self.seal_bytes]


@pytest.mark.parametrize("algorithm", [1, 2, 3])
@pytest.mark.parametrize("seal_bytes", [16, 32])
def test_a_forgery_without_the_key_is_a_miss(algorithm: int, seal_bytes: int) -> None:
    forger = Forger(algorithm, seal_bytes)
    forged = seal(ASKED, memoryview(PAYLOAD), UNIT_BYTES, forger) + PAYLOAD  # type: ignore[arg-type]
    assert verdict(forged, sealer=KEYED) in (MissReason.VERSION, MissReason.CORRUPT, MissReason.SHORT)
    assert not isinstance(Header.parse(memoryview(forged), KEYED), Header)


def test_units_of_two_objects_of_one_key_do_not_mix() -> None:
    other_payload = bytes(255 - byte for byte in PAYLOAD)
    other = seal(ASKED, memoryview(other_payload), UNIT_BYTES, KEYED) + other_payload
    start, table = SIGNED_HEADER_BYTES, FIXED_BYTES
    mixed = bytearray(SIGNED)
    mixed[start : start + UNIT_BYTES] = other[start : start + UNIT_BYTES]
    assert verdict(bytes(mixed), sealer=KEYED) is MissReason.CORRUPT
    mixed[table : table + 16] = other[table : table + 16]
    assert verdict(bytes(mixed), sealer=KEYED) is MissReason.CORRUPT


def test_a_range_under_a_key_is_checked_without_the_rest() -> None:
    header = Header.parse(memoryview(SIGNED), KEYED)
    assert isinstance(header, Header)
    piece = memoryview(PAYLOAD)[2 * UNIT_BYTES : 4 * UNIT_BYTES]
    assert header.check_units(2, piece) is None
    assert header.check_units(1, piece) is MissReason.CORRUPT


def test_no_repr_shows_the_key() -> None:
    header = Header.parse(memoryview(SIGNED), KEYED)
    assert repr(KEY)[2:-1] not in repr(KEYED) + repr(header)
    assert KEY.hex() not in repr(KEYED) + repr(header)


@given(units=st.permutations(range(NUM_UNITS)))
def test_units_in_another_order_are_corrupt(units: list[int]) -> None:
    moved = b"".join(PAYLOAD[unit * UNIT_BYTES : (unit + 1) * UNIT_BYTES] for unit in units)
    expected = None if moved == PAYLOAD else MissReason.CORRUPT
    assert verdict(SEALED[:HEADER_BYTES] + moved) is expected


@given(st.binary(max_size=2 * len(SEALED)))
def test_noise_is_never_a_hit(noise: bytes) -> None:
    assert verdict(noise) is not None
    assert isinstance(Header.parse(memoryview(noise)), MissReason)


@given(first=st.integers(0, NUM_UNITS), count=st.integers(0, NUM_UNITS), wrong=st.integers(0, NUM_UNITS))
def test_a_range_of_units_is_checked_without_the_rest(first: int, count: int, wrong: int) -> None:
    header = Header.parse(memoryview(SEALED))
    assert isinstance(header, Header)
    piece = memoryview(PAYLOAD)[first * UNIT_BYTES : (first + count) * UNIT_BYTES]
    assert header.check_units(first, piece) is None
    if piece.nbytes and wrong != first:
        assert header.check_units(wrong, piece) is MissReason.CORRUPT


@pytest.mark.parametrize(("payload_bytes", "unit_bytes"), [(10, 3), (10, 0), (10, -5)])
def test_a_part_of_a_unit_is_refused(payload_bytes: int, unit_bytes: int) -> None:
    with pytest.raises(ValueError, match="whole units"):
        header_bytes(payload_bytes, unit_bytes)


def test_a_chunk_outside_the_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="outside the grid of 1 layer groups and 4 head groups"):
        Identity(CHUNK, NAMESPACE, Grid(1, 4))


@pytest.mark.parametrize("coordinate", [-1, 1 << 16])
def test_a_coordinate_that_the_header_cannot_hold_is_refused(coordinate: int) -> None:
    with pytest.raises(ValueError, match=r"outside 0\.\.65535"):
        ChunkId(PageKey(b"k" * 32), coordinate, Role.TARGET, 0, 0)


CHUNK_IDS = st.builds(
    ChunkId,
    st.binary(min_size=32, max_size=32).map(PageKey),
    st.integers(0, 200),
    st.sampled_from(Role),
    st.integers(0, 200),
    st.integers(0, 200),
)


@given(CHUNK_IDS, CHUNK_IDS)
def test_different_chunks_never_share_a_name(one: ChunkId, other: ChunkId) -> None:
    assert (one.object_name(NAMESPACE) == other.object_name(NAMESPACE)) == (one == other)


def test_names_are_sharded_by_namespace_and_key() -> None:
    key = "6b" * 32
    assert CHUNK.object_name(NAMESPACE) == f"0001020304050607/6b/{key}.0.target.1.2"
