"""Page keys: chained digests that name a page by everything that decides its bytes.

Pure functions of ints and bytes. Keys know nothing of tensor, pipeline or context parallelism, of vLLM's
own block hashes, of the process's hash seed or of the order in which Python iterates anything, so that two
engines that share nothing but a store compute equal keys. `PageKeys` is owned by one request and used on
the scheduler thread.

    root  = H(namespace, cache salt, adapter name, adapter path, adapter version)
    key i = H(key i-1 (or root), tokens of page i as little-endian uint32, extra keys that touch page i)

Some drafts (EAGLE, MTP) put into a page's last place what depends on the token that follows. There a page has two
names: the key above for the target's bytes, and one that stands for the next token as well for everything else:

    key with what follows i = H(key i, first token of page i+1 as little-endian uint32)

`H` is SHA-256 over length-prefixed fields, so ("a", "bc") and ("ab", "c") differ.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_hicache.names import KEY_BYTES, PageKey

_LENGTH = struct.Struct("<I")
_EXTRA = struct.Struct("<qq")
_BEFORE = _LENGTH.pack(KEY_BYTES)
_NONE = _LENGTH.pack(0)


def digest(*fields: bytes) -> bytes:
    """SHA-256 (32 bytes) of `fields`, each prefixed with its length as little-endian uint32."""
    hasher = hashlib.sha256()
    for field in fields:
        hasher.update(_LENGTH.pack(len(field)))
        hasher.update(field)
    return hasher.digest()


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as far as keys care: its name, its path and a fingerprint of its weights."""

    name: str
    path: str
    version: str


@dataclass(frozen=True, slots=True)
class ExtraKey:
    """Something besides token ids that decides the KV of tokens [start, stop) of a request.

    A multimodal item gives its full media hash; prompt embeddings give a digest of their bytes.
    Its position is part of the key: the same item elsewhere is another page.
    """

    start: int
    stop: int
    kind: str
    data: bytes

    def encoded(self) -> bytes:
        """The bytes that enter the key of each page this item touches."""
        kind = self.kind.encode()
        position = _EXTRA.pack(self.start, self.stop)
        return b"".join((_LENGTH.pack(len(kind)), kind, position, _LENGTH.pack(len(self.data)), self.data))


def chain_root(namespace: bytes, salt: str | None = None, adapter: Adapter | None = None) -> bytes:
    """Parent of a request's first page key (32 bytes).

    An absent salt and an empty one differ, and so do an absent adapter and one with empty names.
    """
    fields = [namespace, b"salt" if salt is not None else b"", (salt or "").encode()]
    if adapter is not None:
        fields += [b"adapter", adapter.name.encode(), adapter.path.encode(), adapter.version.encode()]
    return digest(*fields)


class PageKeys:
    """The keys of one request's full pages, computed once and incrementally.

    Args:
        root: 32 bytes from `chain_root`.
        page_tokens: tokens in a page, at least 1.
        extras: items that touch some of the pages, in any order.
        with_next: whether a page is known by the token that follows it too; its key is then there one token later.

    Attributes:
        keys: what pages are known by.
        plain: names of the target's bytes; the same list unless `with_next`, which may be one page longer.
    """

    __slots__ = ("_extras", "_pending", "_root", "keys", "page_tokens", "plain")

    def __init__(self, root: bytes, page_tokens: int, extras: Iterable[ExtraKey] = (), with_next: bool = False) -> None:
        if page_tokens < 1 or len(root) != KEY_BYTES:
            raise ValueError(
                f"need page_tokens >= 1 and a root of {KEY_BYTES} bytes, got {page_tokens} and {len(root)}"
            )
        self.plain: list[PageKey] = []
        self.keys: list[PageKey] = [] if with_next else self.plain
        self.page_tokens = page_tokens
        self._root = root
        self._extras = sorted(extras, key=lambda extra: (extra.start, extra.stop, extra.kind, extra.data))
        self._pending = array("I")

    @property
    def num_tokens(self) -> int:
        """Tokens given so far, those of an unfinished last page included."""
        return len(self.plain) * self.page_tokens + len(self._pending)

    def named(self, start: int, stop: int) -> tuple[list[PageKey], list[PageKey]]:
        """What pages [start, stop) are known by, and the names of their target's bytes: one list where they are one."""
        keys = self.keys[start:stop]
        return keys, self.plain[start:stop] if self.has_next else keys

    @property
    def has_next(self) -> bool:
        """Whether a page is known by the token that follows it too."""
        return self.keys is not self.plain

    @property
    def next_at(self) -> int:
        """Number of tokens with which the next page gets its key."""
        return (len(self.keys) + 1) * self.page_tokens + self.has_next

    def tail(self) -> PageKey | None:
        """Name of the unfinished last page as it is now, by the same formula; `None` where there is none."""
        if not self._pending:
            return None
        parent = self.plain[-1] if self.plain else self._root
        return _page_key(parent, _little_endian(self._pending), self._extras_of(len(self.plain)))

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens that follow those already given; adds a key for every page they complete.

        Raises:
            ValueError: a token id is outside [0, 2**32).
        """
        try:
            self._pending.extend(array("I", token_ids))
        except (OverflowError, TypeError) as error:
            raise ValueError(f"token ids must be integers in [0, 2**32): {error}") from error
        first = len(self.plain)
        num_pages = len(self._pending) // self.page_tokens
        if num_pages:
            self._hash_pages(num_pages)
        if self.has_next:
            self._hash_next(first)
        del self._pending[: num_pages * self.page_tokens]

    def _hash_next(self, first: int) -> None:
        """Name pages whose next token is known; what is pending begins with page `first`."""
        for page in range(len(self.keys), len(self.plain)):
            place = (page + 1 - first) * self.page_tokens
            if place >= len(self._pending):
                return
            self.keys.append(PageKey(digest(self.plain[page], self._pending[place].to_bytes(4, "little"))))

    def _hash_pages(self, num_pages: int) -> None:
        data = _little_endian(self._pending)
        size = self.page_tokens * 4
        parent: bytes = self.plain[-1] if self.plain else self._root
        for start in range(0, num_pages * size, size):
            extras = self._extras_of(len(self.plain)) if self._extras else _NONE
            parent = _page_key(parent, data[start : start + size], extras)
            self.plain.append(PageKey(parent))

    def _extras_of(self, page: int) -> bytes:
        start, stop = page * self.page_tokens, (page + 1) * self.page_tokens
        touching = [extra.encoded() for extra in self._extras if extra.start < stop and extra.stop > start]
        encoded = b"".join(_LENGTH.pack(len(item)) + item for item in touching)
        return _LENGTH.pack(len(touching)) + encoded


def _page_key(parent: bytes, tokens: memoryview, extras: bytes) -> PageKey:
    return PageKey(hashlib.sha256(b"".join((_BEFORE, parent, _LENGTH.pack(len(tokens)), tokens, extras))).digest())


def _little_endian(tokens: array[int]) -> memoryview:
    if tokens.itemsize != 4:
        raise ValueError(f"this platform's unsigned int has {tokens.itemsize} bytes, keys need 4")
    if sys.byteorder == "big":
        tokens = array("I", tokens)
        tokens.byteswap()
    return memoryview(tokens.tobytes())
