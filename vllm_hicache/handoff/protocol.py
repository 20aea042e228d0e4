"""What a prefill engine says of a prompt's pages, in the parameters that vLLM's proxies carry to a decode engine.

Pure. The words beside `hicache` are those of vLLM's NIXL connector, so that proxies made for it take them. Those under
`hicache` are signed where the engines share a key: a decode engine connects to nobody that a client names, and tells
its password to nobody else.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from vllm_hicache.errors import ConfigError
from vllm_hicache.geometry import Holding
from vllm_hicache.inventory import Inventory
from vllm_hicache.names import Role
from vllm_hicache.namespace import Spaces
from vllm_hicache.plan import Peer, PeerRank

VERSION = 1
_LOCAL_NAMES = frozenset({"localhost"})


@dataclass(frozen=True, slots=True)
class Serving:
    """This engine as others see it.

    Attributes:
        engine: vLLM's name of it.
        host: address at which its ranks serve pages.
        ranks: what each of them holds, and where it serves.
        tp_size: its tensor ranks.
    """

    engine: str
    host: str
    ranks: Sequence[Inventory]
    tp_size: int

    def told(self, request: str, spaces: Spaces, key: bytes | None) -> dict[str, object]:
        """The parameters of an answer: whose pages they are, under which namespaces, which rank serves what."""
        own = {
            "version": VERSION,
            "target": spaces.target.hex(),
            "draft": spaces.draft.hex() if spaces.draft is not None else None,
            "ranks": [[self.host, rank.port, list(map(_words, rank.holdings))] for rank in self.ranks],
        }
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine,
            "remote_request_id": request,
            "remote_block_ids": [],
            "remote_host": self.host,
            "remote_port": self.ranks[0].port,
            "tp_size": self.tp_size,
            "hicache": own if key is None else {**own, "signature": _signature(own, key)},
        }


def peer_of(parameters: Mapping[str, object], spaces: Spaces, key: bytes | None) -> Peer | None:
    """The engine that has computed a prompt; `None` where none has.

    Raises:
        ConfigError: parameters of another version or namespace, that nobody with the key has signed, or that make no
            sense.
    """
    if not parameters.get("do_remote_prefill"):
        return None
    own = parameters.get("hicache")
    if not isinstance(own, Mapping) or own.get("version") != VERSION:
        raise ConfigError(
            f"a prompt was computed by an engine that says nothing this one understands (version {VERSION}): run the "
            "same vllm-hicache release in both"
        )
    signature = str(own.get("signature")).encode(errors="replace")
    if key is not None and not hmac.compare_digest(_signature(own, key).encode(), signature):
        raise ConfigError(
            "a prompt comes with parameters that nobody with this engine's key has signed: give both engines the same "
            "VLLM_HICACHE_PEER_KEY, and let a proxy pass on kv_transfer_params as they are"
        )
    if own.get("target") != spaces.target.hex():
        raise ConfigError(
            f"a prompt was computed under namespace {str(own.get('target'))[:16]}, this engine's is "
            f"{spaces.target.hex()[:16]}: give both the same model, dtype, block size and settings"
        )
    try:
        ranks = tuple(
            PeerRank(str(host), _port(port), tuple(map(_holding, holdings))) for host, port, holdings in own["ranks"]
        )
        if not ranks:
            raise ValueError("there are none")
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"a prompt's parameters name its ranks in a way that makes no sense: {error}") from error
    strange = [rank.host for rank in ranks if not is_local(rank.host)]
    if key is None and strange:
        raise ConfigError(
            f"a prompt was computed at {strange[0]}, and engines without a key read from their own machine only: set "
            "VLLM_HICACHE_PEER_KEY in both"
        )
    return Peer(str(parameters.get("remote_request_id")), ranks)


def password(key: bytes | None) -> str | None:
    """What a reader of pages says first; the key itself does not cross the link."""
    return hmac.new(key, b"vllm-hicache pages", hashlib.sha256).hexdigest() if key is not None else None


def is_local(host: str) -> bool:
    """Whether an address is this machine's own, which none but its users reach."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host in _LOCAL_NAMES


def _signature(own: Mapping[str, object], key: bytes) -> str:
    said = {name: value for name, value in own.items() if name != "signature"}
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, b"vllm-hicache handoff" + text.encode(), hashlib.sha256).hexdigest()


def _words(holding: Holding) -> list[object]:
    return [str(holding.role), *holding.layers, *holding.heads, holding.replica, holding.num_replicas]


def _port(word: object) -> int:
    port = int(str(word))
    if not 0 < port <= 65535:
        raise ValueError(f"{port} is no port")
    return port


def _holding(words: Sequence[object]) -> Holding:
    role, *numbers = words
    first_layer, end_layer, first_head, end_head, replica, num_replicas = (int(str(number)) for number in numbers)
    return Holding(Role(str(role)), (first_layer, end_layer), (first_head, end_head), replica, num_replicas)
