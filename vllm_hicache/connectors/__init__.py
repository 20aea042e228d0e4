"""The vLLM connector. The only part of the package that imports vLLM.

`HiCacheConnector` is imported when it is asked for, so that the plugin entry point, which every vLLM process
loads, costs nothing where the connector is not in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_hicache.connectors.hicache import HiCacheConnector

__all__ = ["HiCacheConnector"]


def __getattr__(name: str) -> type[HiCacheConnector]:
    if name != "HiCacheConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_hicache.connectors.hicache import HiCacheConnector

    return HiCacheConnector
