"""The URL of a redis store, parsed strictly.

    redis://[user[:password]@]host[:port][/db]         also rediss:// (TLS, `ca=` the file of its authority)
    redis://…@host[:port],host[:port]/?cluster=true    some nodes of a cluster
    redis://…@host[:port],host[:port]/db?sentinel=name sentinels, and the name of the master that they watch
    unix://[user[:password]@]/path/of/socket?db=0

All take `prefix=` (of the keys, `hicache/` unless given) and `ttl=` (`7d`; for ever unless given). User and
password may come from the environment instead. No message quotes the host part or the path: a password with a
`/` in it ends up in either.

Owner: `redis.open_url`. Thread: any.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlencode, urlsplit

from vllm_hicache.errors import ConfigError
from vllm_hicache.storage.redis_pool import PASSWORD_VARIABLE, USERNAME_VARIABLE, Address, Login
from vllm_hicache.storage.url import StoreUrl
from vllm_hicache.units import parse_duration_s

DEFAULT_PREFIX = "hicache/"
_DEFAULT_PORT = 6379
_DEFAULT_SENTINEL_PORT = 26379


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """What a URL says. `shown` is the URL without secrets; `sentinel` the master's name, None without sentinels."""

    shown: str
    addresses: tuple[Address, ...]
    login: Login
    prefix: str
    ttl_ms: int | None
    cluster: bool
    sentinel: str | None


def parse_redis_url(url: StoreUrl) -> RedisUrl:
    """Raises ConfigError."""
    own = {"unix": ("db",), "redis": ("cluster", "sentinel"), "rediss": ("cluster", "sentinel", "ca")}
    url.allow_parameters("prefix", "ttl", *own[url.scheme])
    user, _, hosts = url.host.rpartition("@")
    cluster, sentinel = _is_cluster(url), url.parameters.get("sentinel")
    if url.scheme == "unix":
        addresses: tuple[Address, ...] = (_socket_file(url, hosts),)
        db = _database(url.parameters.get("db", ""))
    else:
        port = _DEFAULT_PORT if sentinel is None else _DEFAULT_SENTINEL_PORT
        addresses = tuple(_address(host, port) for host in hosts.split(","))
        db = _database(url.path.strip("/"))
    if cluster and sentinel is not None:
        raise ConfigError("redis URL has both cluster and sentinel: servers are set up in one way, remove one")
    if cluster and db:
        raise ConfigError(f"redis URL gives database {db} of a cluster, which has 0 alone: remove it")
    if sentinel == "":
        raise ConfigError("redis URL parameter 'sentinel' is empty: give the name of the master that they watch")
    if len(addresses) > 1 and not cluster and sentinel is None:
        raise ConfigError(f"redis URL names {len(addresses)} hosts: say what they are, cluster=true or sentinel=name")
    username, password = _user(user)
    return RedisUrl(
        shown=_shown(url, addresses, db),
        addresses=addresses,
        login=Login(username, password, db, _tls(url), url.parameters.get("ca")),
        prefix=_prefix(url),
        ttl_ms=_ttl_ms(url),
        cluster=cluster,
        sentinel=sentinel,
    )


def _is_cluster(url: StoreUrl) -> bool:
    text = url.parameters.get("cluster", "false")
    if text not in ("true", "false"):
        raise ConfigError(f"redis URL parameter 'cluster' is {text!r}: write true or false")
    return text == "true"


def _socket_file(url: StoreUrl, hosts: str) -> Address:
    if hosts or not url.path.strip("/"):
        raise ConfigError("redis socket URL is no path: write three slashes, unix:///path/of/socket?db=0")
    return Address(url.path, None)


def _address(text: str, default_port: int) -> Address:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port == 0:
        raise ConfigError(
            "redis URL has a host that is not name, name:port or [address]:port: write redis://host:6379/0, and "
            "in a password / as %2F, @ as %40 and : as %3A"
        )
    return Address(host, port or default_port)


def _database(text: str) -> int:
    if text and not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ConfigError("redis database is no number: write redis://host:6379/0, and in a password / as %2F")
    return int(text or 0)


def _user(text: str) -> tuple[str | None, str | None]:
    """Return user and password: the URL's, else the environment's. Raises ConfigError for a user alone."""
    username, _, password = (unquote(part) for part in text.partition(":"))
    username = username or os.environ.get(USERNAME_VARIABLE, "")
    password = password or os.environ.get(PASSWORD_VARIABLE, "")
    if username and not password:
        raise ConfigError(
            f"redis has a user and no password: write redis://user:password@host or set {PASSWORD_VARIABLE}"
        )
    return username or None, password or None


def _tls(url: StoreUrl) -> ssl.SSLContext | None:
    if url.scheme != "rediss":
        return None
    ca = url.parameters.get("ca")
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        reason = "no certificates in it" if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(
            f"redis URL parameter 'ca' names {ca!r}: {reason}; give a file of PEM certificates"
        ) from error


def _prefix(url: StoreUrl) -> str:
    prefix = url.parameters.get("prefix", DEFAULT_PREFIX)
    if not prefix or not prefix.isprintable() or not prefix.isascii():
        raise ConfigError("redis URL parameter 'prefix' is empty or not printable ASCII: it keeps our keys apart")
    return prefix


def _ttl_ms(url: StoreUrl) -> int | None:
    text = url.parameters.get("ttl")
    if text is None:
        return None
    try:
        ttl_ms = round(parse_duration_s(text) * 1000)
    except ConfigError as error:
        raise ConfigError(f"redis URL parameter 'ttl': {error}") from None
    if not ttl_ms:
        raise ConfigError(f"redis URL parameter 'ttl' is {text!r}, nothing would stay: leave it out to keep objects")
    return ttl_ms


def _shown(url: StoreUrl, addresses: tuple[Address, ...], db: int) -> str:
    """Return the URL of the same store without user and password."""
    parameters = {name: value for name, value in url.parameters.items() if name != "db"}
    if url.scheme == "unix":
        base = f"unix://{quote(addresses[0].host)}"
        parameters = {"db": str(db), **parameters}
    else:
        base = f"{url.scheme}://{','.join(map(str, addresses))}/{db}"
    return f"{base}?{urlencode(parameters, safe='/')}" if parameters else base
