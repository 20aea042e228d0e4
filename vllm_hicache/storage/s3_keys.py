"""Which key of a bucket holds an object, and which keys are objects.

Each part of a name is a part of the key, and the last ends in `.hc`: servers that keep keys as files then
hold `a` beside `a/b`. What is not a letter, a digit or one of `-._` becomes `!` and two hex digits, all of
them characters that Amazon lists as safe. A name too long for that is `!/` and its base64 in pieces, so that a
key has at most `MAX_KEY_CHARS`. The encoding is one to one, and a key that is not exactly the encoding of a
name is not ours: never listed, counted or deleted.

Owner: `storage/s3.py`. Pure; any thread.
"""

from __future__ import annotations

import base64
import re

from vllm_hicache.errors import StoreError
from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import MAX_NAME_CHARS, check_name

SUFFIX = ".hc"
MAX_KEY_CHARS = 700
LONG_FOLDER = "!/"
"""Begins the key of every name that escaping makes too long; no escaped name begins so."""

_PIECE_CHARS = 200
# Names that encode to themselves, as those of chunks do.
_PLAIN = re.compile(r"(?:[A-Za-z0-9_-]{1,200}+/)*+[A-Za-z0-9_-][A-Za-z0-9._-]{0,190}", re.ASCII)
# A part never begins with a dot, so that none is `.` or `..`.
_UNSAFE = re.compile(r"[^A-Za-z0-9._/-]|(?:(?<=/)|^)\.", re.ASCII)
_ESCAPE = re.compile(r"!([0-9A-F]{2})", re.ASCII)
_LEAF_LIKE = re.compile(re.escape(SUFFIX) + "/")
_MAYBE_LEAF_LIKE = re.compile(r"\.(?:hc?)?$")


def encode(name: ObjectName) -> str:
    """Return the key below the store's prefix for `name`. Raises StoreError for an invalid name."""
    if len(name) <= MAX_NAME_CHARS and _PLAIN.fullmatch(name):
        return name + SUFFIX
    # A folder never ends as an object does, so that `a.hc/b` and `a` do not meet.
    key = _LEAF_LIKE.sub("!2Ehc/", _escape(check_name(name)) + SUFFIX)
    return key if _fits(key) else LONG_FOLDER + _in_pieces(name)


def decode(key: str) -> ObjectName | None:
    """Return the name whose key below the store's prefix is `key`, or None when it is no object's key."""
    if not key.endswith(SUFFIX):
        return None
    try:
        name = _decode_long(key) if key.startswith(LONG_FOLDER) else _unescape(key.removesuffix(SUFFIX))
        return name if encode(name) == key else None
    except (StoreError, ValueError):
        return None


def key_prefixes(prefix: str) -> list[str]:
    """Return what the keys of all names that start with `prefix` begin with, one or the other."""
    escaped = _LEAF_LIKE.sub("!2Ehc/", _escape(prefix))
    # The rest of the name may turn the end into a folder that looks like an object.
    exact = _MAYBE_LEAF_LIKE.sub("", escaped)
    return [exact, LONG_FOLDER] if exact else [""]


def _escape(text: str) -> str:
    return _UNSAFE.sub(lambda match: f"!{ord(match[0]):02X}", text)


def _unescape(text: str) -> ObjectName:
    return ObjectName(_ESCAPE.sub(lambda match: chr(int(match[1], 16)), text))


def _fits(key: str) -> bool:
    return len(key) <= MAX_KEY_CHARS and all(len(part) <= _PIECE_CHARS for part in key.split("/"))


def _in_pieces(name: ObjectName) -> str:
    text = base64.urlsafe_b64encode(name.encode("ascii")).decode("ascii").rstrip("=")
    return "/".join(text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS)) + SUFFIX


def _decode_long(key: str) -> ObjectName:
    text = key.removeprefix(LONG_FOLDER).removesuffix(SUFFIX).replace("/", "")
    return ObjectName(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode("ascii"))
