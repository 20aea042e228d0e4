"""Whole scatter reads and gather writes on a file descriptor, however the kernel cuts them.

Owner: `storage/`. No state; any thread. OSError passes through to the caller's seam.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

_MAX_PARTS = os.sysconf("SC_IOV_MAX")


def read_into(fd: int, parts: Sequence[memoryview], offset: int) -> int:
    """Fill `parts` in order from `offset` until they are full or the file ends; return the bytes read."""
    pending, done = [part for part in parts if part.nbytes], 0
    while pending:
        count = os.preadv(fd, pending[:_MAX_PARTS], offset + done)
        # The end of the file, or of one that is being cut.
        if count == 0:
            break
        done += count
        pending = _after(pending, count)
    return done


def write_from(fd: int, parts: Sequence[memoryview]) -> None:
    """Write all bytes of `parts` in order from the start of the file."""
    pending, done = [part for part in parts if part.nbytes], 0
    while pending:
        count = os.pwritev(fd, pending[:_MAX_PARTS], done)
        done += count
        pending = _after(pending, count)


def _after(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of non-empty `parts` once their first `num_bytes` are done."""
    for index, part in enumerate(parts):
        if num_bytes < part.nbytes:
            return [part[num_bytes:], *parts[index + 1 :]]
        num_bytes -= part.nbytes
    return []
