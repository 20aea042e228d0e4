"""The one place that puts a store's wrappers together.

    across a network    Encrypted? (Metered (Breaker (Retrying (store))))
    file, memory        Encrypted? (Metered (Breaker (store)))

A local file system drops no connections, so there is nothing to try twice; but a full or dying disk fails
write after write, and a hung mount read after read, so it has circuits as well. The meter stands outside the
breaker: refused calls count as unavailable. Encryption stands outside the meter, which so measures what
crosses the wire, and outside the breaker, as an object that does not open is no failure of the store.

The console takes `with_keys` alone: a person wants to see the failure itself, and a circuit that opens would keep a
trial from removing what it wrote.

Owner: `storage/`. Thread: `open_stack` may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

from vllm_hicache.errors import ConfigError
from vllm_hicache.secrets import ENCRYPTION_KEY_VARIABLE, Secrets
from vllm_hicache.storage.base import Store, StoreOptions
from vllm_hicache.storage.breaker import Breaker, CircuitState, Side
from vllm_hicache.storage.file import FileStore
from vllm_hicache.storage.registry import open_store
from vllm_hicache.storage.retry import Retrying
from vllm_hicache.storage.wrappers import Metered, Observer


class StoreStack:
    """A store with everything around it. Raises ConfigError where a package for encryption is missing.

    Attributes:
        store: what to call, and to close.
        on_recovery: called after the store was away and hits are back, on the thread that found out.
    """

    def __init__(
        self,
        bare: Store,
        options: StoreOptions,
        secrets: Secrets,
        observer: Observer | None = None,
        on_recovery: Callable[[], None] | None = None,
    ) -> None:
        self.on_recovery = on_recovery
        is_local = isinstance(bare, FileStore)
        tried = bare if is_local else Retrying(bare, options.timeout_s)
        self._breaker = Breaker(tried, self._recovered)
        store: Store = self._breaker if observer is None else Metered(self._breaker, observer)
        self.store = with_keys(store, secrets)

    def circuits(self) -> Mapping[Side, CircuitState]:
        """How the circuits stand."""
        return {side: self._breaker.state(side) for side in Side}

    def _recovered(self) -> None:
        if self.on_recovery is not None:
            self.on_recovery()


def open_stack(
    url: str,
    options: StoreOptions | None = None,
    secrets: Secrets | None = None,
    observer: Observer | None = None,
    on_recovery: Callable[[], None] | None = None,
) -> StoreStack:
    """Return the store that `url` names with its wrappers, not yet probed. Raises ConfigError with the way out.

    Args:
        options: kept by the store itself; with a retry a call may take a quarter longer (`Retrying`).
        secrets: an encryption key is used here; a seal key by who makes a `ChunkStore` (`sealer_for`).
        observer: told of every call.
        on_recovery: see `StoreStack`.
    """
    options = options or StoreOptions()
    return StoreStack(open_store(url, options), options, secrets or Secrets(), observer, on_recovery)


def with_keys(store: Store, secrets: Secrets) -> Store:
    """Return `store` as an engine with these keys sees it. Raises ConfigError where encryption is not installed."""
    if secrets.encryption_key is None:
        return store
    try:
        # Only what is asked for: without a key the package `cryptography` is not needed.
        encrypt: Callable[[Store, bytes], Store] = import_module("vllm_hicache.storage.encrypted").Encrypted
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{ENCRYPTION_KEY_VARIABLE} is set, and encryption needs the package {error.name!r}, which is not "
            "installed: pip install 'vllm-hicache[encryption]', or unset it"
        ) from error
    return encrypt(store, secrets.encryption_key)
