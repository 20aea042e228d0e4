"""What a store's URL and its server's settings mean for people: who can read the pages, what happens when it is full.

Owner: `cli/`. Thread: the console's main thread. Reads only.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable
from urllib.parse import urlsplit

from vllm_hicache.cli.report import Line, ok, warn
from vllm_hicache.errors import ConfigError, StoreError
from vllm_hicache.secrets import ENCRYPTION_KEY_VARIABLE, Secrets, key_id
from vllm_hicache.storage.base import Store, StoreUsage
from vllm_hicache.storage.url import parse_url

_PASSWORD_VARIABLE = "VLLM_HICACHE_REDIS_PASSWORD"


@runtime_checkable
class Evicting(Protocol):
    """A store whose server evicts by a policy of its own."""

    def eviction_policy(self) -> str | None:
        """Return redis's `maxmemory-policy`; None where the server does not tell. Raises StoreError."""


@runtime_checkable
class Expiring(Protocol):
    """A store whose server removes what has grown old."""

    def lifecycle(self) -> int | None:
        """Return after how many days; None without a rule of ours. Raises StoreError."""


def key_lines(secrets: Secrets) -> Iterator[Line]:
    """Which keys the environment gives, by their ids."""
    for name, key in (("seal_key", secrets.seal_key), ("encryption_key", secrets.encryption_key)):
        yield ok(name, f"id {key_id(key)}" if key else "not set", key_id(key) if key else None)


def exposure_lines(url: str, environ: Mapping[str, str], secrets: Secrets) -> Iterator[Line]:
    """Warn where others can read pages, and with them prompts, or can change them. Raises ConfigError for no URL."""
    parsed = parse_url(url)
    is_redis = parsed.scheme in ("redis", "rediss")
    endpoint = parsed.parameters.get("endpoint", "")
    is_plain = parsed.scheme in ("redis", "lmcache") or endpoint.startswith("http://")
    authority = parsed.host if is_redis else parsed.parameters.get("host") or urlsplit(endpoint).netloc
    far = [host for host in _hosts(authority) if not _is_loopback(host)]
    if far and is_plain and secrets.encryption_key is None:
        way_out = "use rediss://" if is_redis else "use an https:// endpoint"
        text = f"no TLS to {far[0]}, and KV pages reveal prompts: {way_out}, or set {ENCRYPTION_KEY_VARIABLE}"
        yield warn("exposure", text, "no TLS")
    if far and is_redis and ":" not in parsed.host.rpartition("@")[0] and not environ.get(_PASSWORD_VARIABLE):
        text = f"no password for {far[0]}, whoever reaches it reads and changes pages: set {_PASSWORD_VARIABLE}"
        yield warn("password", text, "none")


def medium_lines(url: str, bare: Store, usage: StoreUsage | None) -> Iterator[Line]:
    """What happens when the store is full, as far as its server tells. `usage` is None where nobody counted."""
    if parse_url(url).scheme in ("redis", "rediss", "unix") and usage is not None and usage.capacity_bytes is None:
        way_out = "CONFIG SET maxmemory SIZE, and maxmemory-policy allkeys-lru"
        text = f"redis tells no maxmemory, and without one it grows until the kernel kills it: {way_out}"
        yield warn("capacity_bytes", text, None)
    try:
        if isinstance(bare, Evicting):
            yield from _policy_lines(bare.eviction_policy())
        if isinstance(bare, Expiring):
            yield from _life_lines(bare.lifecycle())
    except StoreError as error:  # miss: a server may refuse to tell, and serves all the same
        yield ok("server", f"does not tell its settings: {error}", None)


def _policy_lines(policy: str | None) -> Iterator[Line]:
    if policy == "noeviction":
        text = "noeviction, writes will fail when redis is full: CONFIG SET maxmemory-policy allkeys-lru"
        yield warn("eviction_policy", text, policy)
    elif policy is not None and policy.startswith("volatile"):
        text = f"{policy} evicts only what has a ttl: give the store's URL one, or set allkeys-lru"
        yield warn("eviction_policy", text, policy)
    else:
        yield ok("eviction_policy", policy or "the server does not tell", policy)


def _life_lines(days: int | None) -> Iterator[Line]:
    if days is None:
        way_out = "set deploy/s3/lifecycle.json, or run `vllm-hicache store gc URL --max-age 14d` daily"
        yield warn("lifecycle_days", f"no life-cycle rule of ours, the bucket grows for ever: {way_out}", None)
    else:
        yield ok("lifecycle_days", f"the server removes objects {days} days after they were written", days)


def _hosts(authority: str) -> list[str]:
    """The hosts of `user:password@host:port,host:port`."""
    try:
        found = [urlsplit(f"//{place}").hostname for place in authority.rpartition("@")[2].split(",")]
    except ValueError as error:
        raise ConfigError("store URL names no valid host: write redis://host:6379/0") from error
    return [host for host in found if host]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
