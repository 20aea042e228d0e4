"""From a URL to a store. A store's module is imported when its scheme is first asked for.

Owner: `storage/`. Thread: `open_store` may be called from any thread. A new backend adds one line.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from vllm_hicache.errors import ConfigError
from vllm_hicache.storage.base import Store, StoreOptions
from vllm_hicache.storage.url import StoreUrl, parse_url, suggest

_MODULES = {
    "file": "vllm_hicache.storage.file",
    "memory": "vllm_hicache.storage.memory",
    "redis": "vllm_hicache.storage.redis",
    "rediss": "vllm_hicache.storage.redis",
    "unix": "vllm_hicache.storage.redis",
    "s3": "vllm_hicache.storage.s3",
    "lmcache": "vllm_hicache.storage.lmcache",
}
_EXTRAS = {"redis": "redis", "rediss": "redis", "unix": "redis", "s3": "s3", "lmcache": "lmcache"}


def open_store(url: str, options: StoreOptions | None = None) -> Store:
    """Return the store that `url` names, not yet probed. Raises ConfigError with the way out."""
    parsed = parse_url(url)
    if parsed.scheme not in _MODULES:
        raise ConfigError(f"store scheme {parsed.scheme!r} is unknown: {suggest(parsed.scheme, _MODULES)}")
    try:
        opener: Callable[[StoreUrl, StoreOptions], Store] = import_module(_MODULES[parsed.scheme]).open_url
    except ModuleNotFoundError as error:
        if parsed.scheme not in _EXTRAS:
            raise
        raise ConfigError(
            f"a {parsed.scheme}:// store needs the package {error.name!r}, which is not installed: "
            f"pip install 'vllm-hicache[{_EXTRAS[parsed.scheme]}]'"
        ) from error
    return opener(parsed, options or StoreOptions())
