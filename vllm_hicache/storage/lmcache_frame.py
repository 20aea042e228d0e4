"""How an object lies in LMCache, which knows no sizes and no names: as two values.

    frame    head (magic, payload bytes, digest of the name), payload, digest of the head
    record   magic, payload bytes, time of the write, the name, digest of all that; always `RECORD_BYTES`

All integers are little-endian. The frame's key is a digest of the name and the size, the record's of the name
alone. Owner: `storage/lmcache.py`. Pure; any thread.
"""

from __future__ import annotations

import struct
import time
from hashlib import sha256

from xxhash import xxh3_128_digest

from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import ObjectInfo
from vllm_hicache.storage.lmcache_config import quiet_import

with quiet_import():
    from lmcache.v1.distributed.api import ObjectKey

FRAMES = "vllm-hicache"
RECORDS = "vllm-hicache-names"
"""The model names in LMCache's keys. No part of them is the medium's separator, @."""

_FRAME_MAGIC = b"VHiCFRM1"
_RECORD_MAGIC = b"VHiCREC1"
_HEAD = struct.Struct("<8sQ32s")
_RECORD = struct.Struct("<8sQdH6x512s")
_DIGEST_BYTES = 16
HEAD_BYTES = _HEAD.size
FRAME_BYTES = HEAD_BYTES + _DIGEST_BYTES
"""What a frame is longer than its payload."""
RECORD_BYTES = _RECORD.size + _DIGEST_BYTES

CANARY_KEY = ObjectKey(sha256(b"canary").digest(), FRAMES, 0)
"""Of a value that is in every medium that this package has used."""
CANARY = b"vllm-hicache was here".ljust(32)


def frame_key(name: ObjectName, payload_bytes: int) -> ObjectKey:
    """Return LMCache's key of an object's bytes."""
    return ObjectKey(sha256(b"frame\0%d\0" % payload_bytes + name.encode()).digest(), FRAMES, 0)


def record_key(name: ObjectName) -> ObjectKey:
    """Return LMCache's key of what is known about an object."""
    return ObjectKey(sha256(b"record\0" + name.encode()).digest(), RECORDS, 0)


def frame_ends(name: ObjectName, payload_bytes: int) -> tuple[bytes, bytes]:
    """Return what stands before and after the payload in a frame."""
    head = _HEAD.pack(_FRAME_MAGIC, payload_bytes, sha256(name.encode()).digest())
    return head, xxh3_128_digest(head)


def blank_frame(buffer: memoryview, payload_bytes: int) -> None:
    """Make sure that no earlier frame in `buffer` passes for one of which less was loaded."""
    end = HEAD_BYTES + payload_bytes
    buffer[:HEAD_BYTES] = bytes(HEAD_BYTES)
    buffer[end : end + _DIGEST_BYTES] = bytes(_DIGEST_BYTES)


def is_frame(buffer: memoryview, name: ObjectName, payload_bytes: int) -> bool:
    """Return whether `buffer` starts with the frame of this object, from its head to its end."""
    head, tail = frame_ends(name, payload_bytes)
    end = HEAD_BYTES + payload_bytes
    return buffer[:HEAD_BYTES] == head and buffer[end : end + _DIGEST_BYTES] == tail


def pack_record(name: ObjectName, payload_bytes: int) -> bytes:
    """Return the record of an object written now."""
    text = name.encode()
    record = _RECORD.pack(_RECORD_MAGIC, payload_bytes, time.time(), len(text), text)
    return record + xxh3_128_digest(record)


def parse_record(record: bytes, key: ObjectKey) -> ObjectInfo | None:
    """Return what a record of `RECORD_BYTES` says; None unless it is whole and belongs to `key`."""
    magic, payload_bytes, written_s, num_chars, text = _RECORD.unpack_from(record)
    if magic != _RECORD_MAGIC or xxh3_128_digest(record[: _RECORD.size]) != record[_RECORD.size :]:
        return None
    name = ObjectName(text[:num_chars].decode())
    return ObjectInfo(name, payload_bytes, written_s) if record_key(name) == key else None
