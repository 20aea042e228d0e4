"""Objects that whoever can read the store cannot read: AES-256-GCM around every object.

    head        magic and version      8 bytes
    nonce       random                 12 bytes
    ciphertext  as long as the object
    tag                                16 bytes

The object's name is authenticated with it: an object moved under another name does not open. A key is good
for 2^32 writes (random 96-bit nonces, NIST SP 800-38D, 8.3): 12 PiB of objects of 3 MB. Names, sizes and
times stay readable.

Owner: `storage/`. Thread: as thread-safe as the store inside.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from vllm_hicache.errors import StoreCorrupt, StoreError, StoreUnavailable
from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import ObjectInfo, Store, StoreUsage, check_name
from vllm_hicache.storage.wrappers import StoreWrapper

MAGIC = b"VLLMHiE\1"
MAX_OBJECT_BYTES = (2 << 30) - 1
"""One update of the library's takes no more."""
_NONCE_BYTES = 12
_TAG_BYTES = 16
_LEAD_BYTES = len(MAGIC) + _NONCE_BYTES
OVERHEAD_BYTES = _LEAD_BYTES + _TAG_BYTES
_READ_TRIES = 3
_KEPT_BYTES = 128 << 20


class _Scratch:
    """Memory for ciphertext, kept from call to call: fresh pages cost more than the cipher.

    Holds as many buffers as calls ran at once, at most 128 MiB in all.
    """

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    @contextmanager
    def take(self, num_bytes: int) -> Iterator[memoryview]:
        """Lend `num_bytes` with any content."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = bytearray()
        if len(buffer) < num_bytes:
            buffer = bytearray(num_bytes)
        try:
            yield memoryview(buffer)[:num_bytes]
        finally:
            if sum(map(len, self._free)) + len(buffer) <= _KEPT_BYTES:
                self._free.append(buffer)


class Encrypted(StoreWrapper):
    """Encrypts what goes into the store inside under `key` (32 bytes) and opens what comes out.

    Sizes are those of the plain objects. Every read with parts fetches and opens the whole object, since one
    tag covers all of it: one call inside where the parts cover the object or more, else two. Failure beyond
    the contract: StoreCorrupt for an object that was not written under this key and this name or has been
    changed; StoreError for one of 2 GiB or more. After an error, parts hold what must not be used.
    """

    def __init__(self, inner: Store, key: bytes) -> None:
        super().__init__(inner)
        self._algorithm = algorithms.AES256(key)
        self._scratch = _Scratch()

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        wanted_bytes = sum(part.nbytes for part in parts)
        if wanted_bytes == 0:
            return _plain_bytes(name, self._inner.read(name, []))
        guess_bytes = min(wanted_bytes, MAX_OBJECT_BYTES) + OVERHEAD_BYTES
        size = self._inner.read(name, []) if offset else guess_bytes
        for _ in range(_READ_TRIES):
            if size > MAX_OBJECT_BYTES + OVERHEAD_BYTES:
                raise StoreCorrupt(f"object {name} has {size} bytes: nothing of 2 GiB or more was ever encrypted")
            with self._scratch.take(size) as room:
                size = self._inner.read(name, [room])
                if size <= room.nbytes:
                    return self._open(name, room[:size], parts, offset)
        # Only removed and written anew can it have grown.
        raise StoreUnavailable(f"object {name} changed {_READ_TRIES} times while it was read")

    def write(self, name: ObjectName, parts: Sequence[memoryview]) -> bool:
        plain_bytes = sum(part.nbytes for part in parts)
        if plain_bytes > MAX_OBJECT_BYTES:
            raise StoreError(
                f"object {check_name(name)} of {plain_bytes} bytes is too long to encrypt, the limit is "
                f"{MAX_OBJECT_BYTES}: use smaller pages or a finer grid"
            )
        lead = MAGIC + os.urandom(_NONCE_BYTES)
        encryptor = Cipher(self._algorithm, modes.GCM(lead[len(MAGIC) :])).encryptor()
        encryptor.authenticate_additional_data(_associated(name))
        with self._scratch.take(plain_bytes) as sealed:
            at = 0
            for part in parts:
                at += encryptor.update_into(part, sealed[at:])
            encryptor.finalize()
            return self._inner.write(name, [memoryview(lead), sealed, memoryview(encryptor.tag)])

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for info in self._inner.list(prefix):
            if info.size_bytes >= OVERHEAD_BYTES:
                yield ObjectInfo(info.name, info.size_bytes - OVERHEAD_BYTES, info.modified_s)

    def usage(self) -> StoreUsage:
        usage = self._inner.usage()
        used_bytes = max(0, usage.used_bytes - usage.num_objects * OVERHEAD_BYTES)
        return StoreUsage(usage.num_objects, used_bytes, usage.capacity_bytes)

    def _open(self, name: ObjectName, sealed: memoryview, parts: Sequence[memoryview], offset: int) -> int:
        """Decrypt straight into `parts` what they ask for, and the rest for the tag's sake; return the plain size."""
        plain_bytes = _plain_bytes(name, sealed.nbytes)
        if sealed[: len(MAGIC)] != MAGIC:
            raise StoreCorrupt(f"object {name} of {sealed.nbytes} bytes was not encrypted, or by another release")
        end = _LEAD_BYTES + plain_bytes
        mode = modes.GCM(bytes(sealed[len(MAGIC) : _LEAD_BYTES]), bytes(sealed[end:]))
        decryptor = Cipher(self._algorithm, mode).decryptor()
        decryptor.authenticate_additional_data(_associated(name))
        start = min(end, _LEAD_BYTES + offset)
        decryptor.update(sealed[_LEAD_BYTES:start])
        for part in parts:
            stop = min(end, start + part.nbytes)
            start += decryptor.update_into(sealed[start:stop], part)
        decryptor.update(sealed[start:end])
        try:
            decryptor.finalize()
        except InvalidTag:
            raise StoreCorrupt(
                f"object {name} does not open: another key wrote it, or it was changed or moved ({sealed.nbytes} bytes)"
            ) from None
        return plain_bytes


def _associated(name: ObjectName) -> bytes:
    return MAGIC + check_name(name).encode("ascii")


def _plain_bytes(name: ObjectName, sealed_bytes: int) -> int:
    """Return the plain object's size. Raises StoreCorrupt for an object that is too short to be one."""
    if sealed_bytes < OVERHEAD_BYTES:
        raise StoreCorrupt(f"object {name} has {sealed_bytes} bytes: an encrypted one has {OVERHEAD_BYTES} or more")
    return sealed_bytes - OVERHEAD_BYTES
