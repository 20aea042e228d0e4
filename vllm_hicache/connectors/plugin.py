"""Registers the connector's name with vLLM, through its `vllm.general_plugins` entry point.

Loaded in every vLLM process, with and without the connector in use: it registers a name and does nothing else.
"""

from __future__ import annotations

NAME = "HiCacheConnector"


def register() -> None:
    """Make `"kv_connector": "HiCacheConnector"` known. Calling it again does nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "vllm_hicache.connectors.hicache", NAME)
