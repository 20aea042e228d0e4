"""A store as the console uses it: with this environment's keys, without the circuits and retries of an engine.

A person wants to see the failure itself, and a circuit that opens would keep a trial from removing what it wrote.
Owner: `cli/`. Thread: the console's main thread.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from vllm_hicache.errors import ConfigError
from vllm_hicache.secrets import ENCRYPTION_KEY_VARIABLE, Secrets
from vllm_hicache.storage.base import Store


def with_keys(store: Store, secrets: Secrets) -> Store:
    """Return `store` as an engine with these keys sees it. Raises ConfigError where encryption is not installed."""
    if secrets.encryption_key is None:
        return store
    try:
        encrypt: Callable[[Store, bytes], Store] = import_module("vllm_hicache.storage.encrypted").Encrypted
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{ENCRYPTION_KEY_VARIABLE} is set, and encryption needs the package {error.name!r}, which is not "
            "installed: pip install 'vllm-hicache[encryption]', or unset it"
        ) from error
    return encrypt(store, secrets.encryption_key)
