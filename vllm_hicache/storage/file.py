"""Objects as files below one directory, which any number of processes and hosts may share.

A write goes to a temporary file that is then linked to its name: a reader sees all or nothing, and of
several writers one wins. Files are not fsynced: that would cost more than the cache saves. After a power
loss a file may therefore hold less or other bytes than were written; its envelope's length and digests
catch that, and the object becomes one miss and is removed. A killed process loses nothing that it wrote.

Directories are made 0700 and files 0600, since the bytes reveal prompts: sharers run as one user.

Owner: `storage/`. Thread: every method may be called from any thread; no state but the serial of temps.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import ClassVar
from urllib.parse import quote

from vllm_hicache.errors import ConfigError, ObjectMissing, StoreUnavailable
from vllm_hicache.names import ObjectName
from vllm_hicache.storage import file_tree
from vllm_hicache.storage.base import ObjectInfo, Rights, Store, StoreOptions, StoreUsage, teller
from vllm_hicache.storage.file_space import TEMP_FOLDER, Reservation, Space
from vllm_hicache.storage.iovec import read_into, write_from
from vllm_hicache.storage.url import StoreUrl
from vllm_hicache.units import format_bytes

# A planted link is not followed, and a planted pipe does not block.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# What may pass without a person's doing; all else at the probe is a setting to repair.
_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE})
_PUBLISH_TRIES = 8


class FileStore(Store):
    """A directory that holds at most `capacity_bytes` of objects, the least recently read evicted first."""

    scheme: ClassVar[str] = "file"

    def __init__(self, root: str, capacity_bytes: int) -> None:
        """Touches no file: `probe` makes the directory. Raises ConfigError for a capacity below one byte."""
        if capacity_bytes <= 0:
            raise ConfigError(f"capacity of {root} is {capacity_bytes} bytes: give one object's size or more")
        self._root = root.rstrip("/") or "/"
        self._capacity_bytes = capacity_bytes
        self._space = Space(self._root, capacity_bytes)

    @property
    def num_undeletable(self) -> int:
        """Evictions that the system refused; the files stay counted as used."""
        return self._space.num_undeletable

    @property
    def root(self) -> str:
        """Absolute path of the directory."""
        return self._root

    def describe(self) -> str:
        return f"{self.scheme}://{quote(self._root)}?capacity={format_bytes(self._capacity_bytes)}"

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        with self._seam("look for objects"):
            return [self._is_object(self._path(name)) for name in names]

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        path = self._path(name)
        with self._seam(f"read {name}"):
            try:
                fd = os.open(path, _READ_FLAGS)
            except (FileNotFoundError, NotADirectoryError):
                raise ObjectMissing(name) from None
            try:
                # An eviction from here on unlinks the name; the open file stays readable.
                return self._read_open(name, fd, parts, offset)
            finally:
                os.close(fd)

    def write(self, name: ObjectName, parts: Sequence[memoryview]) -> bool:
        path = self._path(name)
        with self._seam(f"write {name}"):
            if self._is_object(path):
                self._touch(path)
                return False
            reservation = self._reserve(sum(part.nbytes for part in parts))
            try:
                self._fill(reservation, parts)
                published = self._publish(reservation.path, path)
            except BaseException:
                with suppress(OSError):
                    self._space.cancel(reservation)
                raise
            if published:
                self._space.settle(reservation)
            else:
                self._space.cancel(reservation)
            return published

    def delete(self, name: ObjectName) -> bool:
        path = self._path(name)
        with self._seam(f"delete {name}"):
            return self._is_object(path) and self._space.remove(path)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._seam("list objects"):
            self._require_root()
            for name, _, status in file_tree.walk(self._root, file_tree.folder_of(prefix)):
                if name.startswith(prefix):
                    yield ObjectInfo(name, status.st_size, status.st_mtime)

    def usage(self) -> StoreUsage:
        with self._seam("read the usage"):
            self._require_root()
            return self._space.usage()

    def probe(self) -> Rights:
        if not os.path.isabs(self._root):
            raise ConfigError(f"store directory {self._root!r} is relative: give it as file:///absolute/path")
        try:
            self.make_root()
            self._try_rights()
        except OSError as error:
            if error.errno in _PASSING:
                raise StoreUnavailable(f"probe of {self._root} failed: {error.strerror}") from error
            raise ConfigError(self._refusal(error)) from error
        return Rights()

    def close(self) -> None:
        """Nothing is held between calls."""

    def make_root(self) -> None:
        """Make the directory. Raises OSError or ConfigError."""
        file_tree.make_folders(self._root)

    def _reserve(self, num_bytes: int) -> Reservation:
        try:
            return self._space.reserve(num_bytes)
        except FileNotFoundError:
            # Somebody removed the whole directory while we run: start over, as at the first start.
            self.make_root()
            return self._space.reserve(num_bytes)

    def _fill(self, reservation: Reservation, parts: Sequence[memoryview]) -> None:
        """Write and close: network file systems report a full disk only then."""
        try:
            write_from(reservation.fd, parts)
            self._touch(reservation.fd, written=True)
        except BaseException:
            os.close(reservation.fd)
            raise
        os.close(reservation.fd)

    def _publish(self, temp: str, path: str) -> bool:
        """Give the file its name unless that is taken. An eviction may prune the directory in between."""
        for _ in range(_PUBLISH_TRIES):
            try:
                # Unlike a rename, a link never replaces: of several writers one wins.
                os.link(temp, path)
                return True
            except FileExistsError:
                return False
            except FileNotFoundError:
                with suppress(FileNotFoundError):
                    file_tree.make_folders(os.path.dirname(path))
        raise StoreUnavailable(f"directory of {path} vanished {_PUBLISH_TRIES} times while it was written to")

    def _read_open(self, name: ObjectName, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ObjectMissing(name)
        count = read_into(fd, parts, offset, teller(parts))
        if count:
            self._touch(fd, modified_ns=status.st_mtime_ns)
        wanted = sum(part.nbytes for part in parts)
        # A file that shrank while it was read is as long as what came out of it.
        cut = count < wanted and offset + count < status.st_size
        return offset + count if cut else status.st_size

    def _touch(self, file: int | str, *, written: bool = False, modified_ns: int | None = None) -> None:
        """Set the time of the last read. Best effort: a file that vanished needs no recency."""
        now = time.time_ns()
        with suppress(OSError):
            # Set outright: mounts with noatime or relatime do not keep it for us.
            if modified_ns is None:
                modified_ns = now if written else os.stat(file).st_mtime_ns
            os.utime(file, ns=(now, modified_ns))

    def _path(self, name: ObjectName) -> str:
        return f"{self._root}/{file_tree.encode(name)}"

    @staticmethod
    def _is_object(path: str) -> bool:
        try:
            return stat.S_ISREG(os.lstat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _require_root(self) -> None:
        if not os.path.isdir(self._root):
            raise StoreUnavailable(f"store directory {self._root} does not exist: check the path")

    def _try_rights(self) -> None:
        """Write, link, read, list and remove one file, as every later call does. Raises OSError."""
        reservation = self._space.reserve(0)
        os.close(reservation.fd)
        try:
            linked = f"{reservation.path}.link"
            os.link(reservation.path, linked)
            os.unlink(linked)
            with open(reservation.path, "rb"), os.scandir(os.path.join(self._root, TEMP_FOLDER)):
                pass
        finally:
            self._space.cancel(reservation)

    def _refusal(self, error: OSError) -> str:
        rights = "?"
        with suppress(OSError):
            status = os.stat(self._root)
            rights = f"mode {stat.filemode(status.st_mode)} of user {status.st_uid}"
        return (
            f"store directory {self._root} cannot be used: {error.strerror} (errno {error.errno}; it has "
            f"{rights}, this process is user {os.geteuid()}); give a directory that this user may write, "
            "on a file system with hard links"
        )

    @contextmanager
    def _seam(self, action: str) -> Iterator[None]:
        """Translate the system's errors, and a refused root, into StoreUnavailable."""
        try:
            yield
        except OSError as error:
            raise StoreUnavailable(f"cannot {action} in {self._root}: {error.strerror}") from error
        except ConfigError as error:
            raise StoreUnavailable(str(error)) from error


def default_capacity_bytes(path: str) -> int:
    """Return half of the file system that `path` is or will be on, in bytes. Raises ConfigError."""
    folder = path
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    try:
        status = os.statvfs(folder or ".")
    except OSError as error:
        raise ConfigError(f"cannot size the disk of {path}: {error.strerror}; give `capacity`") from error
    return max(1, status.f_blocks * status.f_frsize // 2)


def open_url(url: StoreUrl, options: StoreOptions) -> Store:
    """Open `file:///dir?capacity=50GiB`; `~` expands; half of the disk by default. Raises ConfigError."""
    url.allow_parameters("capacity")
    url.refuse_user()
    if url.host not in ("", "~"):
        raise ConfigError(f"store URL names the host {url.host!r}: write three slashes, file:///dir")
    root = os.path.expanduser("~" + url.path) if url.host == "~" else url.path
    if not root.strip("/"):
        raise ConfigError("store URL names no directory: write file:///absolute/path")
    capacity_bytes = url.size_bytes("capacity")
    return FileStore(root, default_capacity_bytes(root) if capacity_bytes is None else capacity_bytes)
