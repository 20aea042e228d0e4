"""Which part an engine has in handoffs: whether it computes prompts for others, takes them over, or both.

Roles are vLLM's `kv_role`: `kv_producer`, `kv_consumer`, `kv_both`. Keys come from the environment. Any thread.
"""

from __future__ import annotations

import os

from vllm_hicache.config import Config
from vllm_hicache.errors import ConfigError
from vllm_hicache.handoff.peers import PeerAccess
from vllm_hicache.handoff.protocol import is_local, password
from vllm_hicache.secrets import PEER_KEY_VARIABLE, Secrets
from vllm_hicache.storage.envelope import sealer_for


def check_role(role: str, config: Config) -> None:
    """Refuse a role without what it needs.

    Raises:
        ConfigError: what is missing or contradicts, and the way out.
    """
    if role == "kv_producer" and config.peer_host is None:
        raise ConfigError(
            "kv_role='kv_producer' computes prompts for other engines, and peer_host does not say where they reach it: "
            "set peer_host in kv_connector_extra_config to an address of this machine"
        )
    if role == "kv_consumer" and config.peer_host is not None:
        raise ConfigError(
            f"kv_role='kv_consumer' contradicts peer_host={config.peer_host!r}, at which others would read from it: "
            "remove peer_host, or set kv_role to 'kv_both'"
        )
    if config.peer_port and config.peer_host is None:
        raise ConfigError(
            f"peer_port={config.peer_port} without peer_host serves nobody: set peer_host to the address at which "
            "decode engines reach this machine, or remove peer_port"
        )
    if config.peer_host is not None and not is_local(config.peer_host) and peer_key() is None:
        raise ConfigError(
            f"peer_host={config.peer_host!r} is reached from other machines, and there is no key: set "
            f"{PEER_KEY_VARIABLE} in the environment of all engines to the same 32 random bytes (openssl rand -hex 32)"
        )


def takes_over(role: str, config: Config) -> bool:
    """Whether prompts that other engines have computed may be read from them."""
    return role == "kv_consumer" or (role == "kv_both" and config.peer_host is not None)


def peer_key() -> bytes | None:
    """The key that engines share which hand prompts to each other."""
    return Secrets.from_environment(os.environ).peer_key


def peer_access(role: str, config: Config) -> PeerAccess | None:
    """How pages are read from other engines, and served to them; `None` where neither can be asked for."""
    reads = takes_over(role, config)
    if config.peer_host is None and not reads:
        return None
    keys = Secrets.from_environment(os.environ)
    return PeerAccess(
        password(keys.peer_key), sealer_for(keys.seal_key), config.peer_timeout_s, config.fetch_threads, reads
    )
