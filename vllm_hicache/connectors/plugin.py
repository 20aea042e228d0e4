"""Registers the connector's name and the CPU's attention under context parallelism with vLLM.

Loaded in every vLLM process, through the `vllm.general_plugins` entry point, with and without the connector in use: it
registers two names and does nothing else.
"""

from __future__ import annotations

NAME = "HiCacheConnector"
CPU_BACKEND = "vllm_hicache.context_parallel.backend.ContextParallelBackend"


def register() -> None:
    """Make `"kv_connector": "HiCacheConnector"` and the backend known. Calling it again does nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "vllm_hicache.connectors.hicache", NAME)
    if not AttentionBackendEnum.CPU_ATTN.is_overridden():
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
