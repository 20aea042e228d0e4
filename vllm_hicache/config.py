"""Configuration: `kv_connector_extra_config`, parsed once at the border and strictly.

Every key has a default that suits a first try. An unknown key, a value of the wrong type and settings that
contradict each other are refused at start; the message names what, the numbers and the way out.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TypeVar

from vllm_hicache.errors import ConfigError
from vllm_hicache.grid import Grid
from vllm_hicache.machine import neighbouring_cpus
from vllm_hicache.units import parse_bytes

DEFAULT_STORE = "file://~/.cache/vllm-hicache/store?capacity=20GiB"
NO_STORE = "none"


class WritePolicy(StrEnum):
    """When a page that is in host memory is flushed to the store."""

    THROUGH = "through"
    SELECTIVE = "selective"
    BACK = "back"
    NEVER = "never"


class Consensus(StrEnum):
    """What the rank checker does: nothing, tell of differences between ranks, or stop the engine at the first."""

    OFF = "off"
    RECORD = "record"
    ENFORCE = "enforce"


class HostTier(StrEnum):
    """What host memory keeps of KV that several ranks hold alike: each page once among them, or on each of them."""

    SHARDED = "sharded"
    REPLICATED = "replicated"


class DraftTier(StrEnum):
    """Where a draft model's state lies: in the target's host slots, or in a pool of its own with the same slots."""

    PACKED = "packed"
    SIDECAR = "sidecar"


class DraftMiss(StrEnum):
    """What becomes of a page whose draft state is not in the store: computed again, or served without it."""

    RECOMPUTE = "recompute"
    SERVE = "serve"


class PrefetchPolicy(StrEnum):
    """How long a request waits for pages that are in the store only."""

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


class PeerTransport(StrEnum):
    """How pages cross from another engine."""

    TCP = "tcp"
    NIXL = "nixl"


class Eviction(StrEnum):
    """Which pages of host memory go first."""

    SLRU = "slru"
    LRU = "lru"


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Size of one rank's host pool: bytes, or a multiple of that rank's device cache."""

    num_bytes: int | None
    ratio: float | None

    @classmethod
    def parse(cls, value: object) -> HostMemory:
        """Read `"8GiB"`, a number of bytes as an int, or a ratio such as `2.0` or `"2x"`."""
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ConfigError(
                f"host_memory={value!r} is neither bytes nor a ratio: write '8GiB', or '2x' for twice the device cache"
            )
        if isinstance(value, int):
            return cls(value, None)._checked(value)
        if isinstance(value, float):
            return cls(None, value)._checked(value)
        if value.endswith("x"):
            try:
                ratio = float(value[:-1])
            except ValueError:
                raise ConfigError(f"host_memory={value!r} is no ratio: write '2x' for twice the device cache") from None
            return cls(None, ratio)._checked(ratio)
        num_bytes = parse_bytes(value)
        return cls(num_bytes, None)._checked(num_bytes)

    def _checked(self, number: float) -> HostMemory:
        if not 0 < number < float("inf"):
            raise ConfigError(f"host_memory={number} holds no page: give a positive size, such as '8GiB' or '2x'")
        return self

    def resolve(self, device_bytes: int) -> int:
        """Bytes of the pool of a rank whose device cache has `device_bytes` bytes."""
        return self.num_bytes if self.num_bytes is not None else int((self.ratio or 0) * device_bytes)


@dataclass(frozen=True, slots=True)
class Config:
    """All settings, checked. Field names are the keys of `kv_connector_extra_config`.

    Attributes:
        store: URL of the L3 store, or `none`.
        host_memory: size of the host pool of each rank.
        host_tier: whether ranks that hold the same KV keep its pages in turn, or all of them each.
        draft: where a draft model's state lies in host memory.
        draft_miss: what becomes of a page whose draft state is missing.
        page_tokens: tokens of a page; `None` takes the smallest multiple of the block size from 64 on.
        grid: objects a page is cut in; `None` takes what suits the model.
        write: when pages are flushed to the store.
        prefetch: how long a request waits for the store.
        prefetch_timeout_s: time limit of `prefetch=timeout`, seconds.
        load_threshold: fewer tokens than this beyond vLLM's own prefix are recomputed, not loaded.
        eviction: policy of the host pool.
        store_timeout_s: every call to the store ends within this time, seconds.
        lookup_timeout_s: a store lookup that takes longer counts as a miss, seconds.
        io_threads: threads that read from the store and from other engines, per rank; half as many write to the store.
            `None` takes as many as suit the store and the machine.
        flush_queue_pages: pages that may wait to be flushed; more are offered again later.
        shutdown_timeout_s: time to flush what is queued when the engine stops, seconds.
        model_id: the operator's name for these weights, instead of a fingerprint of the files.
        generation: the operator's generation of the weights.
        consensus: what the rank checker does.
        consensus_dir: directory for every rank's log, for `vllm-hicache ranks`; `None` keeps them in memory.
        peer_host: address of this host at which other engines read pages; `None` where they do not.
        peer_port: where the first rank serves them, the others behind it; 0 takes free ones.
        peer_transport: how pages cross from other engines.
        peer_timeout_s: what other engines do not give within this time is computed here, seconds.
        peer_lease_s: how long pages wait for the engine that is to read them, seconds.
        rank_timeout_s: how long after the first rank's end of an operation others may be silent, seconds.
        rank_faults: file of faults that ranks play out in tests and drills.
    """

    store: str = DEFAULT_STORE
    host_memory: HostMemory = HostMemory(None, 2.0)
    host_tier: HostTier = HostTier.SHARDED
    draft: DraftTier = DraftTier.PACKED
    draft_miss: DraftMiss = DraftMiss.RECOMPUTE
    page_tokens: int | None = None
    grid: Grid | None = None
    write: WritePolicy = WritePolicy.THROUGH
    prefetch: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    prefetch_timeout_s: float = 10.0
    load_threshold: int = 64
    eviction: Eviction = Eviction.SLRU
    store_timeout_s: float = 5.0
    lookup_timeout_s: float = 0.5
    io_threads: int | None = None
    flush_queue_pages: int = 4096
    shutdown_timeout_s: float = 10.0
    model_id: str | None = None
    generation: str = "0"
    consensus: Consensus = Consensus.RECORD
    consensus_dir: str | None = None
    rank_timeout_s: float = 30.0
    peer_host: str | None = None
    peer_port: int = 0
    peer_transport: PeerTransport = PeerTransport.TCP
    peer_timeout_s: float = 10.0
    peer_lease_s: float = 60.0
    rank_faults: str | None = None

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> Config:
        """Read and check the mapping a user wrote.

        Raises:
            ConfigError: an unknown key, a wrong type or range, or settings that contradict each other.
        """
        names = [field.name for field in fields(cls)]
        for key in raw:
            if key not in names:
                close = difflib.get_close_matches(key, names, n=1)
                hint = f"did you mean {close[0]!r}?" if close else "remove it."
                raise ConfigError(
                    f"unknown key {key!r} in kv_connector_extra_config: {hint} Known keys: {', '.join(names)}"
                )
        values = _Values(raw)
        config = cls(
            store=values.text("store", DEFAULT_STORE),
            host_memory=HostMemory.parse(raw["host_memory"]) if "host_memory" in raw else HostMemory(None, 2.0),
            host_tier=values.choice("host_tier", HostTier, HostTier.SHARDED),
            draft=values.choice("draft", DraftTier, DraftTier.PACKED),
            draft_miss=values.choice("draft_miss", DraftMiss, DraftMiss.RECOMPUTE),
            page_tokens=values.optional_count("page_tokens"),
            grid=Grid.parse(values.text("grid", "1x1")) if raw.get("grid") is not None else None,
            write=values.choice("write", WritePolicy, WritePolicy.THROUGH),
            prefetch=values.choice("prefetch", PrefetchPolicy, PrefetchPolicy.TIMEOUT),
            prefetch_timeout_s=values.seconds("prefetch_timeout_s", 10.0),
            load_threshold=values.count("load_threshold", 64, least=0),
            eviction=values.choice("eviction", Eviction, Eviction.SLRU),
            store_timeout_s=values.seconds("store_timeout_s", 5.0),
            lookup_timeout_s=values.seconds("lookup_timeout_s", 0.5),
            io_threads=values.optional_count("io_threads"),
            flush_queue_pages=values.count("flush_queue_pages", 4096, least=1),
            shutdown_timeout_s=values.seconds("shutdown_timeout_s", 10.0),
            model_id=values.optional_text("model_id"),
            generation=values.text("generation", "0"),
            consensus=values.choice("consensus", Consensus, Consensus.RECORD),
            consensus_dir=values.optional_text("consensus_dir"),
            rank_timeout_s=values.seconds("rank_timeout_s", 30.0),
            peer_host=values.optional_text("peer_host"),
            peer_port=values.count("peer_port", 0, least=0),
            peer_transport=values.choice("peer_transport", PeerTransport, PeerTransport.TCP),
            peer_timeout_s=values.seconds("peer_timeout_s", 10.0),
            peer_lease_s=values.seconds("peer_lease_s", 60.0),
            rank_faults=values.optional_text("rank_faults"),
        )
        config._check(raw)
        return config

    @property
    def has_store(self) -> bool:
        """Whether there is an L3 store."""
        return self.store != NO_STORE

    @property
    def fetch_threads(self) -> int:
        """Threads that read from the store, per rank.

        By default 8 for S3, which is bound by latency; for others up to 4, and no more than there are cores, for
        reading is then bound by copying, and more threads take the cores from each other.
        """
        if self.io_threads is not None:
            return self.io_threads
        return 8 if self.store.startswith("s3:") else min(4, len(neighbouring_cpus()))

    @property
    def flush_threads(self) -> int:
        """Threads that write to the store, per rank: reading goes first."""
        return max(1, self.fetch_threads // 2)

    @property
    def time_limit_s(self) -> float | None:
        """How long a load may wait for the store, seconds; `None` waits for every page or its failure."""
        return self.prefetch_timeout_s if self.prefetch == PrefetchPolicy.TIMEOUT else None

    def page_tokens_for(self, block_tokens: int, is_sharded: bool = False) -> int:
        """Tokens of a page for an engine with blocks of `block_tokens` tokens; one block where it shards requests.

        Raises:
            ConfigError: `page_tokens` is another number than such an engine's.
        """
        if is_sharded:
            if self.page_tokens not in (None, block_tokens):
                raise ConfigError(
                    f"page_tokens={self.page_tokens} with context parallelism, where a page is one block of "
                    f"{block_tokens} tokens: leave page_tokens out, or set --block-size and "
                    f"--cp-kv-cache-interleave-size to {self.page_tokens}"
                )
            return block_tokens
        if self.page_tokens is not None:
            return self.page_tokens
        return -(-64 // block_tokens) * block_tokens

    def _check(self, raw: Mapping[str, object]) -> None:
        if not self.has_store:
            useless = sorted(key for key in raw if key in _STORE_KEYS)
            if useless:
                raise ConfigError(
                    f"store='none' contradicts {', '.join(useless)}, which only an engine with a store has: "
                    "remove them or name a store"
                )
        if "prefetch_timeout_s" in raw and self.prefetch != PrefetchPolicy.TIMEOUT:
            raise ConfigError(
                f"prefetch_timeout_s={self.prefetch_timeout_s} has no meaning with prefetch="
                f"{self.prefetch.value!r}: remove it or set prefetch='timeout'"
            )
        if self.peer_port > 65535:
            raise ConfigError(f"peer_port={self.peer_port} is no port: give one up to 65535, or 0 for any")
        if self.consensus_dir is not None and self.consensus == Consensus.OFF:
            raise ConfigError("consensus_dir contradicts consensus='off', which writes no log: remove one of them")
        if "+" in self.generation:
            raise ConfigError(
                f"generation={self.generation!r} contains '+', which marks resets at run time: use another name"
            )


_STORE_KEYS = frozenset(
    {
        "write",
        "prefetch",
        "prefetch_timeout_s",
        "store_timeout_s",
        "lookup_timeout_s",
        "flush_queue_pages",
    }
)

_Choice = TypeVar("_Choice", bound=StrEnum)


class _Values:
    """Typed access to the raw mapping; every refusal names key, value and what is allowed."""

    def __init__(self, raw: Mapping[str, object]) -> None:
        self._raw = raw

    def text(self, key: str, default: str) -> str:
        value = self._raw.get(key, default)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{key}={value!r} must be a non-empty text: give one, such as {default!r}")
        return value

    def optional_text(self, key: str) -> str | None:
        return self.text(key, "") if self._raw.get(key) is not None else None

    def count(self, key: str, default: int, least: int) -> int:
        value = self._raw.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{key}={value!r} must be a whole number from {least} on: the default is {default}")
        return value

    def optional_count(self, key: str) -> int | None:
        return self.count(key, 64, least=1) if self._raw.get(key) is not None else None

    def seconds(self, key: str, default: float) -> float:
        value = self._raw.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 86400:
            raise ConfigError(f"{key}={value!r} must be seconds between 0 and 86400: the default is {default}")
        return float(value)

    def choice(self, key: str, kind: type[_Choice], default: _Choice) -> _Choice:
        value = self._raw.get(key, default)
        try:
            return kind(str(value))
        except ValueError:
            names = [member.value for member in kind]
            close = difflib.get_close_matches(str(value), names, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(f"{key}={value!r} is not known: {hint}choose one of {', '.join(names)}") from None
