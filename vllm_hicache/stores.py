"""Opens the configured store for a half: one connection, a chunk view for each namespace.

Each process of an engine has its own. A store that cannot be reached at start is no reason not to start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from vllm_hicache.config import Config
from vllm_hicache.errors import StoreError
from vllm_hicache.grid import Grid
from vllm_hicache.namespace import Namespace
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.storage.manifest import write_manifest
from vllm_hicache.storage.registry import open_store

logger = logging.getLogger(__name__)

StoreFactory = Callable[[bytes], ChunkStore]
"""Opens the store under a namespace digest (32 bytes)."""


class StoreOpener:
    """See the module.

    Args:
        store: open and probed.
        grid: how pages are cut into its objects.
    """

    def __init__(self, store: Store, grid: Grid) -> None:
        self._store = store
        self._grid = grid

    @classmethod
    def for_config(cls, config: Config) -> StoreOpener | None:
        """Open and probe the configured store; `None` where there is none.

        Raises:
            ConfigError: a wrong URL, or a store that will never work as configured.
        """
        if not config.has_store:
            return None
        store = open_store(config.store)
        try:
            store.probe()
        except StoreError as error:  # a miss for as long as it lasts
            logger.warning(
                "The store %s is not usable now (%s); serving without it until it is", store.describe(), error
            )
        return cls(store, config.grid)

    def chunks(self, namespace: bytes) -> ChunkStore:
        """The chunks of one namespace (32-byte digest)."""
        return ChunkStore(self._store, namespace, self._grid)

    def announce(self, namespace: Namespace) -> None:
        """Leave a readable record of the namespace's fields in the store, for `store ls` and `doctor`."""
        try:
            write_manifest(self._store, namespace.digest(), namespace.fields())
        except StoreError as error:  # a miss: only listings suffer
            logger.warning("The namespace's manifest was not written to %s: %s", self._store.describe(), error)

    def describe(self) -> str:
        """The store's URL without secrets."""
        return self._store.describe()

    def close(self) -> None:
        """Close the store."""
        self._store.close()
