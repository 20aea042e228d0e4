"""Whole scatter reads and gather writes on a file descriptor, however the kernel cuts them.

Owner: `storage/`. No state; any thread. OSError passes through to the caller's seam.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

_MAX_PARTS = os.sysconf("SC_IOV_MAX")
_TELL_BYTES = 256 << 10


def read_into(fd: int, parts: Sequence[memoryview], offset: int, told: Callable[[int], None] | None = None) -> int:
    """Fill `parts` in order from `offset` until they are full or the file ends; return the bytes read.

    `told` hears after every 256 KiB how many are in place, while the processor still has them in its cache.
    """
    pending, done = [part for part in parts if part.nbytes], 0
    while pending:
        wanted = pending[:_MAX_PARTS] if told is None else first_bytes(pending[:_MAX_PARTS], _TELL_BYTES)
        count = os.preadv(fd, wanted, offset + done)
        # The end of the file, or of one that is being cut.
        if count == 0:
            break
        done += count
        pending = after_bytes(pending, count)
        if told is not None:
            told(done)
    return done


def write_from(fd: int, parts: Sequence[memoryview]) -> None:
    """Write all bytes of `parts` in order from the start of the file."""
    pending, done = [part for part in parts if part.nbytes], 0
    while pending:
        count = os.pwritev(fd, pending[:_MAX_PARTS], done)
        done += count
        pending = after_bytes(pending, count)


def after_bytes(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of non-empty `parts` once their first `num_bytes` are done."""
    for index, part in enumerate(parts):
        if num_bytes < part.nbytes:
            return [part[num_bytes:], *parts[index + 1 :]]
        num_bytes -= part.nbytes
    return []


def first_bytes(parts: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Return the first `num_bytes` of `parts`, or all where there are fewer."""
    found = []
    for part in parts:
        if num_bytes <= 0:
            break
        found.append(part[:num_bytes])
        num_bytes -= part.nbytes
    return found
