"""Configuration: defaults that suit a first try, and a clear refusal of everything else."""

from __future__ import annotations

from dataclasses import fields

import pytest

from vllm_hicache.config import (
    Config,
    Consensus,
    DraftMiss,
    DraftTier,
    HostMemory,
    HostTier,
    PeerTransport,
    PrefetchPolicy,
    WritePolicy,
)
from vllm_hicache.errors import ConfigError
from vllm_hicache.grid import Grid

EVERYTHING: dict[str, tuple[object, object]] = {
    "store": ("memory://shared", "memory://shared"),
    "host_memory": ("8GiB", HostMemory(8 << 30, None)),
    "host_tier": ("replicated", HostTier.REPLICATED),
    "draft": ("sidecar", DraftTier.SIDECAR),
    "draft_miss": ("serve", DraftMiss.SERVE),
    "page_tokens": (256, 256),
    "grid": ("2x4", Grid(2, 4)),
    "write": ("selective", WritePolicy.SELECTIVE),
    "prefetch": ("wait_complete", PrefetchPolicy.WAIT_COMPLETE),
    "prefetch_timeout_s": (3, 3.0),
    "load_threshold": (0, 0),
    "eviction": ("lru", "lru"),
    "store_timeout_s": (2.5, 2.5),
    "lookup_timeout_s": (0.25, 0.25),
    "io_threads": (8, 8),
    "flush_queue_pages": (1, 1),
    "shutdown_timeout_s": (1.5, 1.5),
    "model_id": ("llama", "llama"),
    "generation": ("2", "2"),
    "consensus": ("enforce", Consensus.ENFORCE),
    "consensus_dir": ("logs/ranks", "logs/ranks"),
    "rank_timeout_s": (5, 5.0),
    "peer_host": ("10.0.0.7", "10.0.0.7"),
    "peer_port": (7000, 7000),
    "peer_transport": ("nixl", PeerTransport.NIXL),
    "peer_timeout_s": (2, 2.0),
    "peer_lease_s": (5, 5.0),
    "rank_faults": ("faults.json", "faults.json"),
}


def test_an_empty_mapping_gives_the_documented_defaults() -> None:
    assert Config.parse({}) == Config()
    assert (Config().write, Config().load_threshold, Config().page_tokens) == (WritePolicy.THROUGH, 64, None)
    assert (Config().draft, Config().draft_miss) == (DraftTier.PACKED, DraftMiss.RECOMPUTE)


def test_every_setting_has_an_example_here() -> None:
    assert list(EVERYTHING) == [field.name for field in fields(Config)]


@pytest.mark.parametrize("key", EVERYTHING)
def test_each_key_is_read_and_changes_its_own_field_only(key: str) -> None:
    raw, value = EVERYTHING[key]
    config = Config.parse({key: raw})
    changed = [field.name for field in fields(Config) if getattr(config, field.name) != getattr(Config(), field.name)]
    assert (changed, getattr(config, key)) == ([key], value)


@pytest.mark.parametrize(
    "key", ["page_tokens", "grid", "io_threads", "model_id", "consensus_dir", "peer_host", "rank_faults"]
)
def test_null_means_unset_where_there_is_no_default_value(key: str) -> None:
    assert Config.parse({key: None}) == Config()


@pytest.mark.parametrize(
    ("typo", "meant"), [("host_mem", "host_memory"), ("prefetch_timeout", "prefetch_timeout_s"), ("stor", "store")]
)
def test_an_unknown_key_is_refused_and_names_the_closest(typo: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key '{typo}'.*did you mean '{meant}'\?.*Known keys: store, "):
        Config.parse({typo: 1})


def test_a_key_like_no_other_is_refused_without_a_guess() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'zzz' .*: remove it"):
        Config.parse({"zzz": 1})


WRONG: list[tuple[str, object]] = [
    *(("store", value) for value in (None, 3, "", ["file://x"])),
    *(("draft", value) for value in (None, "", True, "Packed", "serve")),
    *(("draft_miss", value) for value in (None, "", 0, "Serve", "sidecar")),
    *(("page_tokens", value) for value in (0, -64, 64.0, "64", True)),
    *(("grid", value) for value in (2, "", "2", "0x1", "1x0", "2x", "-1x1", "2x4x6", " 1x1", "1+0x1", "+1x1")),
    *(("write", value) for value in (None, 1, "", "Through", "Never")),
    *(("prefetch", value) for value in (None, "never")),
    *(("prefetch_timeout_s", value) for value in (None, 0, -1, "10", True, float("nan"), float("inf"), 86400)),
    *(("load_threshold", value) for value in (None, -1, 1.5, "64", False)),
    *(("eviction", value) for value in (None, "", 1)),
    *(("lookup_timeout_s", value) for value in (0, "1s", None)),
    *(("io_threads", value) for value in (0, -1, 2.0)),
    *(("flush_queue_pages", value) for value in (0, "many", None)),
    *(("shutdown_timeout_s", value) for value in (0, True, None)),
    *(("model_id", value) for value in ("", 7)),
    *(("generation", value) for value in (None, "", 2)),
    *(("consensus", value) for value in (None, "on", True)),
    *(("consensus_dir", value) for value in ("", 3)),
    *(("peer_host", value) for value in ("", 7)),
    *(("peer_port", value) for value in (-1, "7000", None, 65536)),
    *(("peer_transport", value) for value in ("udp", None)),
    *(("peer_timeout_s", value) for value in (0, "1", None)),
    *(("peer_lease_s", value) for value in (0, True, None)),
    *(("rank_timeout_s", value) for value in (None, 0, "30", True)),
    *(("rank_faults", value) for value in ("", ["a"])),
]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_a_value_of_the_wrong_type_or_range_is_refused_by_key_and_value(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{key}=") as refusal:
        Config.parse({key: value})
    assert repr(value) in str(refusal.value)


def test_a_choice_that_is_not_known_names_the_closest_and_all() -> None:
    with pytest.raises(ConfigError, match=r"write='thru' is not known: .*through, selective, back, never"):
        Config.parse({"write": "thru"})
    with pytest.raises(ConfigError, match=r"did you mean 'best_effort'\?"):
        Config.parse({"prefetch": "best-effort"})
    with pytest.raises(ConfigError, match=r"did you mean 'sidecar'\? choose one of packed, sidecar$"):
        Config.parse({"draft": "side-car"})


@pytest.mark.parametrize("key", ["write", "prefetch", "prefetch_timeout_s", "lookup_timeout_s", "flush_queue_pages"])
def test_without_a_store_its_settings_contradict(key: str) -> None:
    with pytest.raises(ConfigError, match=f"store='none' contradicts {key}.*: remove"):
        Config.parse({"store": "none", key: EVERYTHING[key][0]})


def test_all_contradictions_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match="contradicts flush_queue_pages, write"):
        Config.parse({"store": "none", "write": "back", "flush_queue_pages": 2})


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete"])
def test_a_time_limit_that_nothing_uses_is_refused(policy: str) -> None:
    with pytest.raises(ConfigError, match=rf"prefetch_timeout_s=3\.0 has no meaning with prefetch='{policy}'"):
        Config.parse({"prefetch": policy, "prefetch_timeout_s": 3})


def test_a_log_that_nothing_writes_is_refused() -> None:
    with pytest.raises(ConfigError, match="consensus_dir contradicts consensus='off'"):
        Config.parse({"consensus": "off", "consensus_dir": "logs"})
    assert Config.parse({"consensus": "record", "consensus_dir": "logs"}).consensus_dir == "logs"


def test_without_a_setting_the_grid_is_left_to_the_model_and_differences_are_recorded() -> None:
    assert (Config().grid, Config().consensus, Config().rank_timeout_s) == (None, Consensus.RECORD, 30)


def test_the_layers_of_each_group_may_be_given() -> None:
    assert Config.parse({"grid": "31+30x4"}).grid == Grid(2, 4, (31, 30))


def test_a_generation_cannot_look_like_a_reset() -> None:
    with pytest.raises(ConfigError, match=r"generation='1\+a' contains '\+'"):
        Config.parse({"generation": "1+a"})


@pytest.mark.parametrize(
    ("raw", "num_bytes"), [("8GiB", 8 << 30), (4096, 4096), ("2x", 2000), (2.0, 2000), ("0.5x", 500), (0.25, 250)]
)
def test_host_memory_is_bytes_or_a_multiple_of_the_device_cache(raw: object, num_bytes: int) -> None:
    assert HostMemory.parse(raw).resolve(1000) == num_bytes


@pytest.mark.parametrize(
    "raw",
    [None, True, [1], 0, -1, 0.0, -2.0, float("nan"), float("inf"), "0x", "-1x", "nanx", "x", "twox", "8G", "much", ""],
)
def test_host_memory_that_means_nothing_is_refused(raw: object) -> None:
    with pytest.raises(ConfigError, match=r"host_memory|size"):
        Config.parse({"host_memory": raw})


@pytest.mark.parametrize("raw", ["0", "0GiB", "0.1B"])
def test_host_memory_of_no_bytes_is_refused_however_it_is_written(raw: str) -> None:
    with pytest.raises(ConfigError, match="holds no page"):
        Config.parse({"host_memory": raw})


@pytest.mark.parametrize(("block", "page"), [(16, 64), (32, 64), (48, 96), (64, 64), (128, 128), (1, 64)])
def test_the_default_page_is_the_smallest_multiple_of_the_block_from_64_on(block: int, page: int) -> None:
    assert Config().page_tokens_for(block) == page
    assert Config(page_tokens=256).page_tokens_for(block) == 256


def test_only_the_policy_with_a_time_limit_has_one() -> None:
    limits = [Config(prefetch=policy, prefetch_timeout_s=7).time_limit_s for policy in PrefetchPolicy]
    assert dict(zip(PrefetchPolicy, limits, strict=True)) == {
        PrefetchPolicy.BEST_EFFORT: None,
        PrefetchPolicy.WAIT_COMPLETE: None,
        PrefetchPolicy.TIMEOUT: 7,
    }


def test_none_is_no_store() -> None:
    assert (Config.parse({"store": "none"}).has_store, Config().has_store) == (False, True)


@pytest.mark.parametrize(("store", "most"), [("redis://h", 4), ("file:///d", 4), ("s3://b/p", 8)])
def test_reading_takes_threads_that_suit_the_store_and_the_machine(store: str, most: int) -> None:
    assert 1 <= Config.parse({"store": store}).fetch_threads <= most
    assert Config.parse({"store": store, "io_threads": 3}).fetch_threads == 3
    assert Config.parse({"store": store, "io_threads": 3}).flush_threads == 1
