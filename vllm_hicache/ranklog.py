"""What one rank consumed, in its order, and what it knows of its own host slots: the rank checker's witness.

Owner: the worker half, one a rank. Thread: the engine's thread only.

The table of slots is a second look at what the scheduler half believes, built from plans and acknowledgements
alone: a page is known to lie in a slot once all ranks have it, and a slot changes hands only when no open operation
of this rank uses it. What the table cannot confirm is not served. On disk a log is `rank-<n>.jsonl`, a header and
then one JSON object an entry; when it is full it becomes `rank-<n>.old.jsonl`, in place of an earlier one.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from xxhash import xxh3_64_intdigest, xxh3_128

from vllm_hicache.entries import Entry, EntryKind, Mark
from vllm_hicache.errors import InvariantError
from vllm_hicache.names import OpId, PageKey, Phase, Slot
from vllm_hicache.plan import Ack, ExportOp, FlushOp, LoadOp, OpReport, PageMove, SaveOp

LOG_FORMAT = 1
MAX_FILE_BYTES = 16 << 20
"""A log file becomes the old one before it grows beyond this; a rank has two, so 32 MiB at most."""
_FLUSH_EVERY_S = 1.0
_NO_OP = OpId(0)
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _OpenOp:
    """An operation between its beginning and the acknowledgement that it has settled.

    `num_vouched` leading pages are what this rank can stand for, `num_known` those whose keys are in force.
    """

    pages: tuple[PageMove, ...]
    writes: tuple[bool, ...]
    is_load: bool
    num_vouched: int
    num_known: int = 0
    is_done: bool = False


class RankLog:
    """One rank's entries and its table of host slots.

    Args:
        rank: number among the engine's ranks.
        num_slots: pages of this rank's host pool.
        directory: where entries are kept on disk as well; it is made when it does not exist.
    """

    def __init__(self, rank: int, num_slots: int, directory: Path | None = None) -> None:
        self._num_slots = num_slots
        self._keys: dict[Slot, PageKey] = {}
        self._num_users: dict[Slot, int] = {}
        self._open: dict[OpId, _OpenOp] = {}
        self._entries: list[Entry] = []
        self._hash = xxh3_128()
        self._num_entries = 0
        self._done_sum = 0
        self._num_done = 0
        self._journal = None if directory is None else _Journal(rank, directory)

    @property
    def num_entries(self) -> int:
        """Ordered entries so far, `DONE` left out: as many as `digest` covers."""
        return self._num_entries

    @property
    def digest(self) -> str:
        """32 hexadecimal digits over the ordered entries without their times: equal on all ranks at equal numbers."""
        return str(self._hash.hexdigest())

    @property
    def mark(self) -> Mark:
        """How far this rank has come."""
        return Mark(self._num_entries + self._num_done, f"{self.digest}{self._done_sum:016x}")

    def agreed(self, num_slots: int) -> None:
        """Note how many slots of every host pool are used: once, with the first plan's number."""
        self._note(_NO_OP, EntryKind.CAPACITY, num_slots, time.time())

    def begin(self, op: LoadOp | SaveOp | FlushOp | ExportOp) -> int:
        """Note that an operation begins, in plan order, and take its slots into use.

        Returns:
            Leading pages that this rank can vouch for. The caller writes nothing for those after them and fails them
            with `MissReason.DISAGREED`.

        Raises:
            InvariantError: the operation is open already.
        """
        if op.op in self._open:
            raise InvariantError(
                f"operation {op.op} with {len(op.pages)} pages begins again, and {len(self._open)} are open"
            )
        is_load = isinstance(op, LoadOp)
        is_save = isinstance(op, SaveOp)
        writes = tuple(is_save or (is_load and page.from_store) for page in op.pages)
        sound = [
            self._take(page) if written else self._read(page) for page, written in zip(op.pages, writes, strict=True)
        ]
        now_s = time.time()
        if is_load:
            hits = [good for good, written in zip(sound, writes, strict=True) if not written]
            self._note(op.op, EntryKind.HIT, _num_leading(hits), now_s)
        if any(writes):
            num_eligible = sum(good for good, written in zip(sound, writes, strict=True) if written)
            self._note(op.op, EntryKind.EVICT, num_eligible, now_s)
        self._note(op.op, EntryKind.LOCK, len(sound), now_s)
        num_vouched = _num_leading(sound)
        self._open[op.op] = _OpenOp(op.pages, writes, is_load, num_vouched)
        return num_vouched

    def consume(self, ack: Ack) -> None:
        """Note an acknowledgement, in plan order; one of an operation that is not open here is passed over."""
        opened = self._open.get(ack.op)
        if opened is None:
            return
        now_s = time.time()
        self._note(ack.op, EntryKind.ACK, ack.pages_done, now_s)
        is_settled = ack.phase >= Phase.SETTLED
        if is_settled or opened.is_load:
            self._know(opened, ack.pages_held if is_settled and opened.is_load else ack.pages_done)
        if is_settled:
            self._close(opened)
            del self._open[ack.op]
            self._note(ack.op, EntryKind.UNLOCK, len(opened.pages), now_s)

    def done(self, report: OpReport) -> None:
        """Note this rank's own end of an operation; reports before it and further ones are passed over."""
        opened = self._open.get(report.op)
        if opened is not None and report.phase >= Phase.SETTLED and not opened.is_done:
            opened.is_done = True
            self._note(report.op, EntryKind.DONE, report.pages_done, time.time())

    def forget(self, slots: Iterable[Slot]) -> None:
        """Lose the keys of these slots: for drills of a rank that disagrees."""
        for slot in slots:
            self._keys.pop(slot, None)

    def pin(self, slots: Iterable[Slot]) -> None:
        """Give each of these slots a user that never goes: for drills."""
        for slot in slots:
            self._num_users[slot] = self._num_users.get(slot, 0) + 1

    def take(self) -> tuple[Entry, ...]:
        """Return the entries since it was called last, oldest first."""
        entries = tuple(self._entries)
        self._entries.clear()
        if self._journal is not None:
            self._journal.write(entries)
        return entries

    def close(self) -> None:
        """Write to disk what is left, and end."""
        self.take()
        if self._journal is not None:
            self._journal.close()

    def _read(self, page: PageMove) -> bool:
        """Add a user to a slot that must hold a page; return whether it does."""
        self._num_users[page.slot] = self._num_users.get(page.slot, 0) + 1
        return self._keys.get(page.slot) == page.key

    def _take(self, page: PageMove) -> bool:
        """Let a slot change hands; return whether it could: it is ours, and nobody used it."""
        num_users = self._num_users.get(page.slot, 0)
        self._num_users[page.slot] = num_users + 1
        self._keys.pop(page.slot, None)
        return not num_users and 0 <= page.slot < self._num_slots

    def _know(self, opened: _OpenOp, num_pages: int) -> None:
        """Let the keys of leading destinations come into force, never of more than this rank vouched for."""
        num_known = min(num_pages, opened.num_vouched)
        for index in range(opened.num_known, num_known):
            if opened.writes[index]:
                self._keys[opened.pages[index].slot] = opened.pages[index].key
        opened.num_known = max(opened.num_known, num_known)

    def _close(self, opened: _OpenOp) -> None:
        """Remove the users of an operation's slots; what did not come has left its slot without a key."""
        for page in opened.pages:
            num_users = self._num_users[page.slot] - 1
            if num_users:
                self._num_users[page.slot] = num_users
            else:
                del self._num_users[page.slot]

    def _note(self, op: OpId, kind: EntryKind, value: int, time_s: float) -> None:
        self._entries.append(Entry(op, kind, value, time_s))
        meaning = _meaning(op, kind, value)
        if kind is EntryKind.DONE:
            # A sum, because ends come in any order.
            self._done_sum = (self._done_sum + xxh3_64_intdigest(meaning)) % 2**64
            self._num_done += 1
        else:
            self._hash.update(meaning)
            self._num_entries += 1


def digest_of(entries: Iterable[Entry]) -> str:
    """Return what `RankLog.digest` is after these entries."""
    total = xxh3_128()
    for entry in entries:
        if entry.kind != EntryKind.DONE:
            total.update(_meaning(entry.op, entry.kind, entry.value))
    return str(total.hexdigest())


def log_paths(directory: Path, rank: int) -> tuple[Path, Path]:
    """Return where a rank's log lies, and where its earlier part does."""
    return directory / f"rank-{rank}.jsonl", directory / f"rank-{rank}.old.jsonl"


def _meaning(op: OpId, kind: EntryKind, value: int) -> bytes:
    return f"{op} {kind.value} {value}\n".encode()


def _num_leading(flags: Sequence[bool]) -> int:
    """How many are true before the first that is not."""
    return next((index for index, flag in enumerate(flags) if not flag), len(flags))


class _Journal:
    """The entries on disk. An error of the disk ends the recording with one warning, and nothing else."""

    def __init__(self, rank: int, directory: Path) -> None:
        self._path, self._old_path = log_paths(directory, rank)
        header = {"rank": rank, "started_s": round(time.time(), 6), "format": LOG_FORMAT}
        self._header = (json.dumps(header) + "\n").encode()
        self._file: BinaryIO | None = None
        self._num_bytes = 0
        self._next_flush_s = time.monotonic() + _FLUSH_EVERY_S
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            self._give_up(error)

    def write(self, entries: Sequence[Entry]) -> None:
        """Append entries; what was appended reaches the file within about a second of further calls."""
        try:
            for entry in entries:
                self._append(_line(entry))
            if self._file is not None and time.monotonic() >= self._next_flush_s:
                self._file.flush()
                self._next_flush_s = time.monotonic() + _FLUSH_EVERY_S
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write what is buffered, and end."""
        try:
            if self._file is not None:
                self._file.close()
                self._file = None
        except OSError as error:
            self._give_up(error)

    def _append(self, line: bytes) -> None:
        if self._file is None:
            return
        if self._num_bytes + len(line) > MAX_FILE_BYTES:
            self._file.close()
            self._open()
        self._file.write(line)
        self._num_bytes += len(line)

    def _open(self) -> None:
        """Begin a file; what lies there, also of an earlier run, becomes the old one."""
        with suppress(FileNotFoundError):
            os.replace(self._path, self._old_path)
        self._file = self._path.open("xb")
        self._num_bytes = self._file.write(self._header)
        self._file.flush()

    def _give_up(self, error: OSError) -> None:
        _log.warning("the rank's log ends here, for %s cannot be written: %s", self._path, error)
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()


def _line(entry: Entry) -> bytes:
    return (
        f'{{"op":{entry.op},"kind":"{entry.kind.value}","value":{entry.value},"time_s":{entry.time_s:.6f}}}\n'
    ).encode()
