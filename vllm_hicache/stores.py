"""Opens the configured store for a half: one stack of wrappers, a chunk view for each namespace.

Each process of an engine has its own. A store that cannot be reached at start is no reason not to start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

from vllm_hicache.config import Config
from vllm_hicache.errors import StoreError
from vllm_hicache.geometry import PageLayout
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import Role
from vllm_hicache.namespace import Spaces
from vllm_hicache.secrets import Secrets
from vllm_hicache.storage.base import StoreOptions
from vllm_hicache.storage.breaker import CircuitState
from vllm_hicache.storage.chunks import ChunkStore, RoleChunks
from vllm_hicache.storage.envelope import Sealer, sealer_for
from vllm_hicache.storage.manifest import write_manifest
from vllm_hicache.storage.stack import StoreStack, open_stack
from vllm_hicache.storage.wrappers import StoreCall

logger = logging.getLogger(__name__)

StoreFactory = Callable[[Spaces], RoleChunks]
"""Opens the store under an engine's namespaces."""

_STATE_CODES = {CircuitState.CLOSED: 0, CircuitState.HALF_OPEN: 1, CircuitState.OPEN: 2}


class StoreOpener:
    """See the module.

    Args:
        stack: opened, and probed as far as it could be.
        sealer: how its objects are sealed.
    """

    def __init__(self, stack: StoreStack, sealer: Sealer) -> None:
        self._stack = stack
        self._sealer = sealer
        self._announced: dict[bytes, Mapping[str, str | int]] = {}
        # A store that comes late, or returns empty, has no record of what its pages are.
        stack.on_recovery = self._announce_all

    @classmethod
    def for_config(cls, config: Config, metrics: Metrics) -> StoreOpener | None:
        """Open and probe the configured store; `None` where there is none.

        Raises:
            ConfigError: a wrong URL or key, or a store that will never work as configured.
        """
        if not config.has_store:
            return None
        secrets = Secrets.from_environment(os.environ)
        # Each thread that reads or writes has a connection, and so has the one that looks up.
        options = StoreOptions(config.store_timeout_s, config.fetch_threads + config.flush_threads + 1)
        meter = StoreMeter(metrics)
        stack = open_stack(config.store, options, secrets, meter.count)
        meter.watch(stack)
        name = stack.store.describe()
        try:
            rights = stack.store.probe()
        except StoreError as error:  # a miss for as long as it lasts
            logger.warning("The store %s is not usable now (%s); serving without it until it is", name, error)
        else:
            if not rights.write:
                logger.warning("The store %s is read-only for this engine: hits work, nothing is saved", name)
        return cls(stack, sealer_for(secrets.seal_key))

    def on(self, layout: PageLayout) -> StoreFactory:
        """What opens the chunks of namespaces, of pages that are cut so."""
        grids = {shape.role: layout.grid_of(shape) for shape in layout.roles}

        def opened(spaces: Spaces) -> RoleChunks:
            digests = {Role.TARGET: spaces.target, Role.DRAFT: spaces.draft}
            return RoleChunks(
                {
                    role: ChunkStore(self._stack.store, digest, grids[role], self._sealer)
                    for role, digest in digests.items()
                    if digest is not None and role in grids
                }
            )

        return opened

    def announce(self, namespace: bytes, made_of: Mapping[str, str | int]) -> None:
        """Leave a readable record of a namespace's fields in the store, for `store ls` and `doctor`."""
        self._announced[namespace] = made_of
        self._write(namespace, made_of)

    def describe(self) -> str:
        """The store's URL without secrets."""
        return self._stack.store.describe()

    def close(self) -> None:
        """Close the store."""
        self._stack.store.close()

    def _announce_all(self) -> None:
        for namespace, made_of in list(self._announced.items()):
            self._write(namespace, made_of)

    def _write(self, namespace: bytes, made_of: Mapping[str, str | int]) -> None:
        try:
            write_manifest(self._stack.store, namespace, made_of)
        except StoreError as error:  # a miss: only listings suffer
            logger.warning("The namespace's manifest was not written to %s: %s", self.describe(), error)


class StoreMeter:
    """Counts store calls, and shows how the circuits stand after each of them. Any thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._stack: StoreStack | None = None

    def watch(self, stack: StoreStack) -> None:
        """Show this stack's circuits from now on."""
        self._stack = stack

    def count(self, call: StoreCall) -> None:
        """One finished call."""
        self._metrics.count("store_calls", call.outcome.value)
        self._metrics.count("store_seconds", call.operation, call.seconds)
        if self._stack is not None:
            for side, state in self._stack.circuits().items():
                self._metrics.gauge("store_circuit", _STATE_CODES[state], side.value)
