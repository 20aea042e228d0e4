"""From a URL to a store. A store's module is imported when its scheme is first asked for.

Owner: `storage/`. Thread: `open_store` may be called from any thread. A new backend adds one line.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from vllm_hicache.errors import ConfigError
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.url import StoreUrl, parse_url, suggest

_MODULES = {
    "file": "vllm_hicache.storage.file",
    "memory": "vllm_hicache.storage.memory",
}
_LATER = {
    "redis": "the Redis store",
    "rediss": "the Redis store",
    "unix": "the Redis store",
    "s3": "the S3 store",
    "lmcache": "the LMCache store",
}


def open_store(url: str) -> Store:
    """Return the store that `url` names, not yet probed. Raises ConfigError with the way out."""
    parsed = parse_url(url)
    if parsed.scheme in _LATER:
        raise ConfigError(
            f"store scheme {parsed.scheme!r} comes with {_LATER[parsed.scheme]}, which is not here yet: "
            "use file:// or memory:// for now"
        )
    if parsed.scheme not in _MODULES:
        raise ConfigError(f"store scheme {parsed.scheme!r} is unknown: {suggest(parsed.scheme, [*_MODULES, *_LATER])}")
    opener: Callable[[StoreUrl], Store] = import_module(_MODULES[parsed.scheme]).open_url
    return opener(parsed)
