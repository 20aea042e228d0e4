"""Where an object's file lies below a root, and which files below a root are objects.

Each part of a name is a directory, the last a file ending in `.hc`. What a file name cannot hold is
percent-encoded; a part longer than a file name is continued in another directory level (`+` at the end).
The encoding is one to one, so a name such as `..` or `a/b` beside `a` is safe, and a path that is not
exactly the encoding of a name is not ours: never listed, counted or deleted.

Owner: `storage/file.py`. Pure but for `walk` and `make_folders`; any thread.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import quote, unquote

from vllm_hicache.errors import StoreError
from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import MAX_NAME_CHARS, check_name

SUFFIX = ".hc"
_PIECE_CHARS = 200
# Names that encode to themselves, as those of chunks do: no part needs a look of its own.
_PLAIN = re.compile(r"(?:[A-Za-z0-9_-]{1,200}+/)*+[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}", re.ASCII)
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP})


def encode(name: ObjectName) -> str:
    """Return the path below the root for `name`. Raises StoreError for an invalid name."""
    if len(name) <= MAX_NAME_CHARS and _PLAIN.fullmatch(name):
        return name + SUFFIX
    *folders, last = check_name(name).split("/")
    return "/".join([*(_encode_part(part, folder=True) for part in folders), _encode_part(last, folder=False)])


def decode(path: str) -> ObjectName | None:
    """Return the name whose path below the root is `path`, or None when it is no object's path."""
    if not path.endswith(SUFFIX):
        return None
    joined = path[: -len(SUFFIX)].replace("+/", "")
    name = ObjectName(unquote(joined, encoding="latin-1"))
    try:
        return name if encode(name) == path else None
    except StoreError:
        return None


def make_folders(path: str) -> None:
    """Make a directory and those above it that are missing, each for this user alone. Raises OSError."""
    try:
        os.mkdir(path, mode=0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
    except FileNotFoundError:
        if os.path.dirname(path) in ("", path):
            raise
        # os.makedirs would make the folders above with the default mode.
        make_folders(os.path.dirname(path))
        with suppress(FileExistsError):
            os.mkdir(path, mode=0o700)


def walk(root: str, under: str = "") -> Iterator[tuple[ObjectName, str, os.stat_result]]:
    """Yield (name, absolute path, status) of every object's file below `root`/`under`.

    Links are not followed; what vanishes or may not be entered is left out. OSError else.
    """
    pending = [under]
    while pending:
        folder = pending.pop()
        for entry in _entries(os.path.join(root, folder)):
            path = f"{folder}/{entry.name}" if folder else entry.name
            # Ours are the counter and the temporary files: no encoded piece begins with a dot.
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                pending.append(path)
                continue
            name, status = decode(path), _status(entry)
            if name is not None and status is not None and stat.S_ISREG(status.st_mode):
                yield name, entry.path, status


def folder_of(prefix: str) -> str:
    """Return the deepest directory below the root that holds every name starting with `prefix`."""
    parts = prefix.split("/")[:-1]
    return "/".join(_encode_part(part, folder=True) for part in parts)


def _encode_part(part: str, *, folder: bool) -> str:
    text = quote(part, safe=" !#$&'(),;=@[]^_`{}~")
    # A directory never ends as a file does, so that `a.hc/b` and `a` do not meet.
    if folder and text.endswith(SUFFIX):
        text = text[: -len(SUFFIX)] + "%2E" + SUFFIX[1:]
    # A piece may end inside a %XX; joining the pieces before decoding makes that harmless.
    pieces = [text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS)]
    visible = ["%2E" + piece[1:] if piece.startswith(".") else piece for piece in pieces]
    return "+/".join(visible) + ("" if folder else SUFFIX)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        if error.errno in _GONE:
            return []
        raise


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
