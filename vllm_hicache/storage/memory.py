"""The file store on shared memory: one host's ranks and processes share it, and it outlives an engine.

Objects are files on the host's tmpfs, below a directory of this user that nobody else may enter. They go
with a reboot, or when the directory is removed. tmpfs pages are memory: the capacity is part of the host's.

Owner: `storage/`. Thread: as `FileStore`.
"""

from __future__ import annotations

import os
import re
import stat
from typing import ClassVar

from vllm_hicache.errors import ConfigError
from vllm_hicache.storage.base import Store, StoreOptions
from vllm_hicache.storage.file import FileStore, default_capacity_bytes
from vllm_hicache.storage.url import StoreUrl
from vllm_hicache.units import format_bytes

SHARED_MEMORY = "/dev/shm"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", re.ASCII)


class MemoryStore(FileStore):
    """A named store on the host's shared memory; half of the tmpfs unless a capacity is given."""

    scheme: ClassVar[str] = "memory"

    def __init__(self, name: str, capacity_bytes: int | None = None, tmpfs: str = SHARED_MEMORY) -> None:
        """Raises ConfigError without a tmpfs at `tmpfs`, when that is smaller than the capacity, for a bad
        name, and when another user could read the directory."""
        if _NAME.fullmatch(name) is None:
            raise ConfigError(f"memory store name {name[:80]!r} is not 1 to 64 letters, digits, . _ or -")
        if not _is_tmpfs(tmpfs):
            raise ConfigError(f"no tmpfs at {tmpfs}: mount one (docker: --shm-size=8g), or use file:///dir")
        half_bytes = default_capacity_bytes(tmpfs)
        if capacity_bytes is not None and capacity_bytes > 2 * half_bytes:
            raise ConfigError(
                f"memory store {name!r} of {format_bytes(capacity_bytes)} does not fit {tmpfs} of "
                f"{format_bytes(2 * half_bytes)}: lower `capacity`, or enlarge it (docker: --shm-size)"
            )
        self._name = name
        self._private = os.path.join(tmpfs, f"vllm-hicache-{os.geteuid()}")
        root = os.path.join(self._private, name)
        super().__init__(root, half_bytes if capacity_bytes is None else capacity_bytes)
        # Refuse early what is there already; `make_root` looks again at what came since.
        if os.path.lexists(self._private):
            _refuse_foreign(self._private)

    def describe(self) -> str:
        return f"memory://{self._name}?capacity={format_bytes(self._capacity_bytes)}"

    def make_root(self) -> None:
        try:
            os.mkdir(self._private, mode=0o700)
        except FileExistsError:
            _refuse_foreign(self._private)
        super().make_root()


def open_url(url: StoreUrl, options: StoreOptions) -> Store:
    """Open `memory://name?capacity=1GiB`; the name is `default` when left out. Raises ConfigError."""
    url.allow_parameters("capacity")
    url.refuse_user()
    if url.path.strip("/"):
        raise ConfigError(f"memory store URL has the path {url.path!r}: write memory://name without one")
    return MemoryStore(url.host or "default", url.size_bytes("capacity"))


def _refuse_foreign(folder: str) -> None:
    """Raise ConfigError unless `folder` is a directory of this user's that nobody else may enter.

    The tmpfs is open to all users, so somebody may have made it first to read prompts or plant objects.
    """
    status = os.lstat(folder)
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
        return
    raise ConfigError(
        f"{folder} is {stat.filemode(status.st_mode)} of user {status.st_uid}, and must be a directory of "
        f"mode 0700 of user {os.geteuid()}: remove it, or use file:///dir"
    )


def _is_tmpfs(folder: str) -> bool:
    """Return whether `folder` lies on a mounted tmpfs, by the longest mount point above it."""
    if not os.path.isdir(folder):
        return False
    kind, longest = "", -1
    # Of two mounts on one point the later line is the one that is seen, hence >= below.
    real = os.path.realpath(folder) + "/"
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            point, found = line.split()[1:3]
            point = point.replace("\\040", " ").rstrip("/") + "/"
            if real.startswith(point) and len(point) >= longest:
                kind, longest = found, len(point)
    return kind == "tmpfs"
