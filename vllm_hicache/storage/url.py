"""A store's URL in parts, parsed strictly and once.

Owner: `storage/registry.py`. Pure; any thread. A URL may hold secrets, so messages and reprs never quote it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from urllib.parse import parse_qsl, unquote, urlsplit

from vllm_hicache.errors import ConfigError
from vllm_hicache.units import parse_bytes


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """Scheme, host part as written (user and port included), decoded path and query parameters."""

    scheme: str
    host: str = field(repr=False)
    path: str
    parameters: Mapping[str, str] = field(repr=False)

    def allow_parameters(self, *known: str) -> None:
        """Raise ConfigError for the first parameter that is not `known`, naming the closest one."""
        for name in self.parameters:
            if name not in known:
                raise ConfigError(f"store URL parameter {name!r} is unknown: {suggest(name, known)}")

    def refuse_user(self) -> None:
        """Raise ConfigError when the URL names a user or a password: this store has no use for them."""
        if "@" in self.host:
            raise ConfigError(f"a {self.scheme}:// store takes no user or password: remove all up to the @")

    def size_bytes(self, name: str) -> int | None:
        """Return a size parameter in bytes, None when it is not given. Raises ConfigError."""
        text = self.parameters.get(name)
        if text is None:
            return None
        try:
            size = parse_bytes(text)
        except ConfigError as error:
            raise ConfigError(f"store URL parameter {name!r}: {error}") from None
        if size == 0:
            raise ConfigError(f"store URL parameter {name!r} is 0: give an object's size or more")
        return size


def parse_url(text: str) -> StoreUrl:
    """Parse `scheme://host/path?name=value&…`. Raises ConfigError; its message never holds a secret."""
    try:
        parts = urlsplit(text.strip())
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
    except ValueError:
        raise ConfigError("store URL is malformed: write for example file:///dir?capacity=50GiB") from None
    if not parts.scheme or "://" not in text:
        raise ConfigError("store is no URL: write for example file:///dir or memory://name")
    if parts.fragment or text.rstrip().endswith("#"):
        raise ConfigError("store URL has a fragment after #: write # as %23")
    # The host part stays encoded: decoding could turn a password's %40 into an @.
    parameters = dict(pairs)
    if len(parameters) != len(pairs):
        raise ConfigError(f"store URL gives a parameter twice: {len(pairs)} given, {len(parameters)} different")
    return StoreUrl(parts.scheme, parts.netloc, unquote(parts.path), parameters)


def suggest(word: str, known: Iterable[str]) -> str:
    """Return `did you mean 'x'? known: …` for a message about an unknown word."""
    names = sorted(known)
    close = get_close_matches(word, names, n=1, cutoff=0.0)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(names) or 'none'}"
