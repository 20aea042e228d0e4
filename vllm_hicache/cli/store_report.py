"""`doctor`'s section on the store: may it be used, how fast is it, and what an engine will do with it.

Owner: `cli/`. Thread: the console's main thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_hicache.cli import probe, trial
from vllm_hicache.cli.advice import exposure_lines, key_lines, medium_lines
from vllm_hicache.cli.asked import Asked
from vllm_hicache.cli.contents import Contents, look_into
from vllm_hicache.cli.probe import ModelFacts
from vllm_hicache.cli.report import Line, fail, ok, warn
from vllm_hicache.cli.trial import IN_FLIGHT, StoreSpeed
from vllm_hicache.config import Config
from vllm_hicache.errors import ConfigError, StoreError
from vllm_hicache.grid import Grid
from vllm_hicache.storage.base import Rights, Store, StoreOptions, StoreUsage
from vllm_hicache.storage.envelope import sealer_for
from vllm_hicache.storage.registry import open_store
from vllm_hicache.storage.stack import with_keys
from vllm_hicache.units import format_bytes

_PROMPT_TOKENS = 7808


@dataclass(frozen=True, slots=True)
class Opened:
    """The store, open and probed: `bare`, and as an engine with our keys sees it. A text is why it is not listed."""

    bare: Store
    store: Store
    rights: Rights
    contents: Contents | str


def open_asked(asked: Asked) -> Opened | Line:
    """Open, probe and list the store; the line says why that is not possible."""
    if asked.config is None:
        return warn("skipped", "not looked at: the settings are refused")
    if not asked.config.has_store:
        return ok("none", "no store: pages live in host memory alone")
    bare = None
    try:
        bare = open_store(asked.config.store, StoreOptions(asked.config.store_timeout_s, IN_FLIGHT))
        store = with_keys(bare, asked.secrets)
        return Opened(bare, store, store.probe(), look_into(store))
    except (ConfigError, StoreError) as error:
        if bare is not None:
            bare.close()
        later = "; an engine starts, serves without it, and uses it when it comes"
        return fail("usable", f"{error}{'' if isinstance(error, ConfigError) else later}")


def store_lines(asked: Asked, facts: ModelFacts | None, opened: Opened) -> Iterator[Line]:
    """Everything about a store that answers."""
    config = asked.config or Config()
    yield _rights_line(opened)
    yield from key_lines(asked.secrets)
    yield from exposure_lines(config.store, os.environ, asked.secrets)
    usage = _usage(opened)
    yield from _usage_lines(usage, opened.contents)
    yield from medium_lines(config.store, opened.bare, usage)
    try:
        speed = _measure(asked, facts, opened, usage)
    except StoreError as error:
        yield fail("speed", f"cannot be measured: {error}")
        return
    yield from _latency_lines(speed)
    yield from _speed_lines(speed, opened.rights)
    yield from _prompt_lines(asked, config, facts, speed)
    for fault in speed.faults:
        yield fail("trial", fault)
    if speed.num_left:
        way_out = f"`vllm-hicache store gc URL --namespace {trial.RESERVED_PART}`"
        yield fail("left_behind", f"{speed.num_left} objects of the trial: {way_out}", speed.num_left)


def _rights_line(opened: Opened) -> Line:
    where = opened.store.describe()
    if not opened.rights.write:
        return warn("usable", f"{where} is read-only for us: hits work, nothing will be saved", False)
    if not opened.rights.delete:
        text = f"{where} may be written, read and listed, not deleted from: bad objects stay, as one miss each"
        return warn("usable", text, False)
    return ok("usable", f"{where}: may be written, read, listed and deleted from", True)


def _usage(opened: Opened) -> StoreUsage | None:
    """What the store holds; None where it is too much to count, or cannot be listed."""
    if isinstance(opened.contents, str) or not opened.contents.is_whole:
        return None
    try:
        return opened.store.usage()
    except StoreError:  # miss: the listing has counted all but the capacity
        return StoreUsage(opened.contents.num_objects, opened.contents.used_bytes, None)


def _usage_lines(usage: StoreUsage | None, contents: Contents | str) -> Iterator[Line]:
    if usage is not None:
        limit = usage.capacity_bytes
        share = "" if limit is None else f", {usage.used_bytes / limit:.1%} of {format_bytes(limit)}"
        used = f"{format_bytes(usage.used_bytes)} in {usage.num_objects} objects{share}"
        yield ok("used_bytes", used, usage.used_bytes)
    elif isinstance(contents, Contents):
        seen = f"more than {format_bytes(contents.used_bytes)} in {contents.num_objects} objects"
        yield ok("used_bytes", f"{seen}, as far as was looked: `vllm-hicache store stat` counts all", None)


def _measure(asked: Asked, facts: ModelFacts | None, opened: Opened, usage: StoreUsage | None) -> StoreSpeed:
    if not (opened.rights.write and opened.rights.delete):
        return trial.measure_reads(opened.store)
    config = asked.config or Config()
    page_bytes = facts.page_bytes(config.page_tokens_for(probe.block_tokens())) if facts else None
    grid = facts.grid(config, page_bytes) if facts and page_bytes else config.grid or Grid()
    object_bytes = trial.object_bytes_of(page_bytes, grid.layer_groups * grid.head_groups)
    limit = None if usage is None else usage.capacity_bytes
    # A tenth is left: servers count more than our bytes against their limit.
    room_bytes = None if usage is None or limit is None else limit * 9 // 10 - usage.used_bytes
    return trial.measure_store(opened.store, sealer_for(asked.secrets.seal_key), object_bytes, room_bytes)


def _latency_lines(speed: StoreSpeed) -> Iterator[Line]:
    yield ok("exists_s", f"{speed.exists_s * 1e3:.3f} ms, median of one look-up", speed.exists_s)
    many = f"{speed.exists_many_s * 1e3:.3f} ms, median of one look-up of {trial.NUM_NAMES} names"
    yield ok("exists_many_s", many, speed.exists_many_s)
    if speed.read_s is not None:
        yield ok("read_s", f"{speed.read_s * 1e3:.3f} ms, median of one small read", speed.read_s)


def _speed_lines(speed: StoreSpeed, rights: Rights) -> Iterator[Line]:
    if speed.num_objects == 0 and not speed.faults:
        if rights.write and rights.delete:
            yield warn("speed", "not measured, that would evict pages: raise the store's capacity")
        else:
            yield ok("speed", "not measured: nothing to read in a store that may not be written and deleted from")
    amount = f"MiB/s, objects of {format_bytes(speed.object_bytes)}"
    for what, rates, note in (
        ("write", speed.write_rates, ""),
        ("read", speed.read_rates, ", a cache may have helped"),
    ):
        for num, rate in rates.items():
            name = f"{what}_bytes_per_s" if num == 1 else f"{what}_{num}_bytes_per_s"
            yield ok(name, f"{rate / (1 << 20):.0f} {amount}, {num} in flight{note}", rate)


def _prompt_lines(asked: Asked, config: Config, facts: ModelFacts | None, speed: StoreSpeed) -> Iterator[Line]:
    """How long a long prefix takes from the store, and when that pays."""
    token_bytes, rate = facts.kv_bytes_per_token if facts else None, max(speed.read_rates.values(), default=None)
    if token_bytes is None or rate is None:
        return
    page = config.page_tokens_for(probe.block_tokens())
    tokens = _PROMPT_TOKENS // page * page
    num_bytes, first_s = tokens * token_bytes, speed.exists_many_s + (speed.read_s or 0.0)
    seconds = first_s + num_bytes / rate
    text = f"a {tokens}-token prefix ({format_bytes(num_bytes)}) comes back in about {seconds:.3f} s"
    late = config.time_limit_s is not None and seconds > config.time_limit_s
    text += f", cut off after {config.time_limit_s} s: raise prefetch_timeout_s" if late else ""
    yield (warn if late else ok)("prompt_s", text, seconds)
    yield _worth_line(asked.prefill_tokens_per_s, rate / token_bytes, first_s, seconds, tokens)


def _worth_line(prefill: float | None, fetched: float, first_s: float, seconds: float, tokens: int) -> Line:
    """Compare with recomputing: n tokens take `first_s + n / fetched` from the store and `n / prefill` anew."""
    if prefill is None:
        even = tokens / seconds
        text = (
            f"pays where the engine computes fewer than {even:.0f} tokens/s of such a prompt; --prefill RATE compares"
        )
        return ok("pays_below_tokens_per_s", text, even)
    if fetched <= prefill:
        text = f"the engine computes {prefill:.0f} tokens/s, the store brings {fetched:.0f}: recomputing is faster"
        return warn("pays_from_tokens", f"{text}, set store to 'none' or use a faster one", None)
    least = first_s / (1 / prefill - 1 / fetched)
    text = f"recomputing takes longer than the store from {least:.0f} tokens on, at {prefill:.0f} tokens/s"
    return ok("pays_from_tokens", f"{text}: a load_threshold below is of no use", least)
