"""Who may use how many bytes below a directory that several processes share.

A counter file (`.usage`, under flock) says how many objects and bytes there are, reservations of writes
in flight included. A writer first reserves: that makes its temporary file at full (sparse) size, so that
a rescan sees reservations as well, and evicts the least recently read objects when there is no room.
Thus the capacity holds at every moment across processes. What changes the directory behind our back
makes the counter drift; a rescan corrects it whenever the directory seems full, when the counter is
missing, and when a process died while it held the lock (the dirty flag).

Owner: `storage/file.py`. Thread: all methods are thread-safe; each opens and locks the counter anew.
Failure: OSError rises to `FileStore`'s seam; StoreUnavailable when no room can be made.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from vllm_hicache.errors import StoreUnavailable
from vllm_hicache.storage.base import MANIFEST_PART, StoreUsage
from vllm_hicache.storage.file_tree import make_folders, walk
from vllm_hicache.units import format_bytes

TEMP_FOLDER = ".tmp"
USAGE_FILE = ".usage"
STALE_S = 3600.0
"""A temporary file this old belongs to a writer that died: no write of one object takes an hour."""

_COUNTER = struct.Struct("<8sQQQ")
_MAGIC = b"HiCacheU"
_LOW_MARK = 0.9
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Account:
    """The counter while its lock is held."""

    num_objects: int
    used_bytes: int

    def add(self, num_objects: int, num_bytes: int) -> None:
        self.num_objects = max(0, self.num_objects + num_objects)
        self.used_bytes = max(0, self.used_bytes + num_bytes)


@dataclass(frozen=True, slots=True)
class Reservation:
    """An empty temporary file, open for writing, whose bytes are counted as used."""

    fd: int
    path: str
    num_bytes: int


@dataclass(frozen=True, slots=True, order=True)
class _Victim:
    """A candidate for eviction; the smallest goes first."""

    is_manifest: bool
    read_ns: int
    path: str
    num_bytes: int


class Space:
    """The bytes of one root directory. `num_undeletable` counts evictions that the system refused."""

    def __init__(self, root: str, capacity_bytes: int) -> None:
        self._root = root
        self._capacity_bytes = capacity_bytes
        self._serial = itertools.count()
        self._swept = False
        self.num_undeletable = 0

    def reserve(self, num_bytes: int) -> Reservation:
        """Make room for `num_bytes`, evicting if need be. Finish it by exactly one `settle` or `cancel`."""
        if num_bytes > self._capacity_bytes:
            raise self._full(num_bytes, "the object alone is larger")
        with self._locked() as account:
            if not self._swept:
                self._sweep(account)
            if account.used_bytes + num_bytes > self._capacity_bytes:
                self._make_room(account, num_bytes)
            reservation = self._create_temp(num_bytes)
            account.add(1, num_bytes)
        return reservation

    def settle(self, reservation: Reservation) -> None:
        """Drop the temporary name of a file that was published under its own: its bytes stay counted."""
        with suppress(OSError):
            os.unlink(reservation.path)

    def cancel(self, reservation: Reservation) -> None:
        """Remove the temporary file and give its bytes back."""
        with self._locked() as account:
            os.unlink(reservation.path)
            account.add(-1, -reservation.num_bytes)

    def remove(self, path: str) -> bool:
        """Remove an object's file; False when it was gone already."""
        with self._locked() as account:
            try:
                num_bytes = os.lstat(path).st_size
                os.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                return False
            account.add(-1, -num_bytes)
        self._prune(path)
        return True

    def usage(self) -> StoreUsage:
        """Return the counter's view."""
        with self._locked() as account:
            return StoreUsage(account.num_objects, account.used_bytes, self._capacity_bytes)

    @contextmanager
    def _locked(self) -> Iterator[Account]:
        # A lock belongs to the open file, so opening anew excludes this process's other threads as well.
        fd = os.open(os.path.join(self._root, USAGE_FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            account = self._load(fd)
            # Dirty until the lock is given back: whoever finds it so counts anew.
            os.pwrite(fd, _COUNTER.pack(_MAGIC, 1, account.num_objects, account.used_bytes), 0)
            try:
                yield account
            finally:
                os.pwrite(fd, _COUNTER.pack(_MAGIC, 0, account.num_objects, account.used_bytes), 0)
        finally:
            os.close(fd)

    def _load(self, fd: int) -> Account:
        data = os.pread(fd, _COUNTER.size + 1, 0)
        if len(data) == _COUNTER.size:
            magic, dirty, num_objects, used_bytes = _COUNTER.unpack(data)
            if magic == _MAGIC and not dirty:
                return Account(num_objects, used_bytes)
        account = Account(0, 0)
        self._rescan(account)
        os.ftruncate(fd, 0)
        return account

    def _make_room(self, account: Account, num_bytes: int) -> None:
        """Evict below the low mark, so that the next rescan is a tenth of the capacity away."""
        self._sweep(account)
        victims = self._rescan(account)
        # An object above a tenth of the capacity needs more room than the low mark gives.
        goal_bytes = min(int(self._capacity_bytes * _LOW_MARK), self._capacity_bytes - num_bytes)
        for victim in sorted(victims):
            if account.used_bytes <= goal_bytes:
                break
            self._evict(account, victim)
        if account.used_bytes + num_bytes > self._capacity_bytes:
            raise self._full(num_bytes, f"{self.num_undeletable} evictions were refused by the system")

    def _evict(self, account: Account, victim: _Victim) -> None:
        """Remove one object. One that cannot be removed is counted and passed over, never waited for."""
        try:
            os.unlink(victim.path)
        except FileNotFoundError:
            # Removed behind our back between the rescan and now.
            account.add(-1, -victim.num_bytes)
        except OSError as error:
            if self.num_undeletable == 0:
                _log.warning("cannot evict %s (%s): remove it by hand", victim.path, error.strerror)
            self.num_undeletable += 1
        else:
            account.add(-1, -victim.num_bytes)
            self._prune(victim.path)

    def _rescan(self, account: Account) -> list[_Victim]:
        """Set `account` to what is really there and return all objects. Reservations are looked at first:
        one that is published meanwhile is the same inode, so it is counted once."""
        # One link: not published yet. Two: its object is found below.
        reserved = {status.st_ino: status.st_size for _, status in self._temps() if status.st_nlink == 1}
        account.num_objects, account.used_bytes = len(reserved), sum(reserved.values())
        victims: list[_Victim] = []
        for name, path, status in walk(self._root):
            is_manifest = name.endswith("/" + MANIFEST_PART)
            victims.append(_Victim(is_manifest, status.st_atime_ns, path, status.st_size))
            if status.st_ino not in reserved:
                account.add(1, status.st_size)
        return victims

    def _sweep(self, account: Account) -> None:
        """Remove what writers that died have left. A second link means that the object was published."""
        self._swept = True
        for path, status in self._temps():
            if time.time() - status.st_mtime > STALE_S:
                with suppress(OSError):
                    os.unlink(path)
                    if status.st_nlink == 1:
                        account.add(-1, -status.st_size)

    def _temps(self) -> list[tuple[str, os.stat_result]]:
        folder, found = os.path.join(self._root, TEMP_FOLDER), []
        with suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    found.append((entry.path, entry.stat(follow_symlinks=False)))
        return [(path, status) for path, status in found if stat.S_ISREG(status.st_mode)]

    def _create_temp(self, num_bytes: int) -> Reservation:
        folder = os.path.join(self._root, TEMP_FOLDER)
        make_folders(folder)
        path = os.path.join(folder, f"{os.uname().nodename}-{os.getpid()}-{id(self):x}-{next(self._serial)}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # Sparse: a rescan sees the size of the whole reservation, and no block is written twice.
            os.ftruncate(fd, num_bytes)
        except OSError:
            os.close(fd)
            os.unlink(path)
            raise
        return Reservation(fd, path, num_bytes)

    def _prune(self, path: str) -> None:
        """Remove the directories above `path` that have become empty."""
        folder = os.path.dirname(path)
        while len(folder) > len(self._root):
            try:
                os.rmdir(folder)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    _log.debug("cannot remove the empty directory %s: %s", folder, error.strerror)
                return
            folder = os.path.dirname(folder)

    def _full(self, num_bytes: int, why: str) -> StoreUnavailable:
        return StoreUnavailable(
            f"no room for {format_bytes(num_bytes)} in {self._root}: the capacity is "
            f"{format_bytes(self._capacity_bytes)} and {why}; raise `capacity` in the store's URL"
        )
