"""`vllm-hicache store ls|stat|verify|gc URL`: what lies in a store, whether it is sound, and less of it.

Owner: `cli/`. Runs in the console's process on its main thread. Tables go to stdout, progress and errors
to stderr; `--json -` replaces the tables on stdout. Exit codes: 0 good, 1 bad objects found, 2 an error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from vllm_hicache.errors import ConfigError, HiCacheError, StoreUnavailable
from vllm_hicache.names import MissReason
from vllm_hicache.storage.base import ObjectInfo, Store
from vllm_hicache.storage.inventory import (
    NamespaceSummary,
    choose_expired,
    choose_oldest,
    survey,
    verify_object,
)
from vllm_hicache.storage.manifest import Manifest, Unreadable, read_manifests
from vllm_hicache.storage.registry import open_store
from vllm_hicache.units import format_bytes, parse_bytes, parse_duration_s

EXIT_GOOD, EXIT_BAD, EXIT_ERROR = 0, 1, 2
_BAR_CHARS = 40
_SHOWN_BAD = 50
_SHORT_FIELDS = ("model", "model_id", "dtype", "kv_dtype", "page_tokens", "generation")

Json = Mapping[str, object]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `store` and its four verbs; `run` serves them (`args.run`)."""
    parser = subparsers.add_parser("store", help="look into a store, verify it, remove from it")
    verbs = parser.add_subparsers(dest="verb", required=True)
    ls = verbs.add_parser("ls", help="list namespaces: model, pages, objects, bytes, age")
    ls.add_argument("--long", action="store_true", help="show every field of each namespace")
    stat = verbs.add_parser("stat", help="show usage against capacity, by namespace")
    verify = verbs.add_parser("verify", help="read every object and check it; exit 1 if bad ones are found")
    verify.add_argument("--delete", action="store_true", help="remove the bad objects")
    gc = verbs.add_parser("gc", help="remove objects by age, capacity or namespace")
    rule = gc.add_mutually_exclusive_group(required=True)
    rule.add_argument("--older-than", metavar="AGE", help="remove chunks written longer ago, such as 7d")
    rule.add_argument("--capacity", metavar="SIZE", help="remove the oldest chunks beyond it, as in 10GiB")
    rule.add_argument("--namespace", metavar="HEX", help="remove this namespace, as `ls` names it")
    gc.add_argument("--dry-run", action="store_true", help="only tell what would be removed")
    for verb in (ls, stat, verify, gc):
        verb.add_argument("url", metavar="URL", help="the store, such as file:///dir")
        verb.add_argument("--json", metavar="PATH", help="write the result as JSON to PATH, or - for stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do what the parsed arguments ask; return the exit code. Errors become one sentence on stderr."""
    verbs = {"ls": _ls, "stat": _stat, "verify": _verify, "gc": _gc}
    try:
        store = open_store(args.url)
        try:
            return verbs[args.verb](store, args)
        finally:
            store.close()
    except HiCacheError as error:
        print(f"vllm-hicache store {args.verb}: {_plain(str(error))}", file=sys.stderr)
        return EXIT_ERROR


def _ls(store: Store, args: argparse.Namespace) -> int:
    found = survey(store.list(""))
    manifests = read_manifests(store, found)
    now = time.time()
    rows = [
        (
            part,
            _fields(manifests.get(part), args.long),
            len(one.pages),
            one.num_objects,
            format_bytes(one.used_bytes),
            _age(now - one.newest_s),
            _age(now - one.oldest_s),
        )
        for part, one in found.items()
    ]
    result = [_namespace_json(one, manifests.get(part)) for part, one in found.items()]
    titles = ["namespace", "what it holds", "pages", "objects", "bytes", "newest", "oldest"]
    lines = _table(titles, rows) if rows else [f"{store.describe()} holds no objects"]
    _emit(args, {"store": store.describe(), "namespaces": result}, lines)
    return EXIT_GOOD


def _stat(store: Store, args: argparse.Namespace) -> int:
    usage, found = store.usage(), survey(store.list(""))
    limit_bytes = usage.capacity_bytes
    lines = [store.describe(), f"objects   {usage.num_objects}"]
    lines += [f"used      {format_bytes(usage.used_bytes)}"]
    if limit_bytes is not None:
        share = usage.used_bytes / limit_bytes
        lines += [f"capacity  {format_bytes(limit_bytes)}", f"          {_bar(share)} {share:.1%}"]
    listed_bytes = sum(one.used_bytes for one in found.values())
    rows = [
        [part, one.num_objects, format_bytes(one.used_bytes), _bar(one.used_bytes / max(1, listed_bytes))]
        for part, one in found.items()
    ]
    if rows:
        lines += ["", *_table(["namespace", "objects", "bytes", "share of the bytes listed"], rows)]
    result = {
        "store": store.describe(),
        "num_objects": usage.num_objects,
        "used_bytes": usage.used_bytes,
        "capacity_bytes": limit_bytes,
        "namespaces": [_namespace_json(one, None) for one in found.values()],
    }
    _emit(args, result, lines)
    return EXIT_GOOD


def _verify(store: Store, args: argparse.Namespace) -> int:
    infos, bad, num_removed = list(store.list("")), list[tuple[ObjectInfo, MissReason]](), 0
    counts, sizes = Counter[str](), Counter[str]()
    for info in tqdm(infos, desc="verify", unit="object", file=sys.stderr, disable=None):
        reason = verify_object(store, info)
        outcome = "good" if reason is None else reason.value
        counts[outcome] += 1
        sizes[outcome] += info.size_bytes
        if reason is not None and reason is not MissReason.ABSENT:
            bad.append((info, reason))
            num_removed += args.delete and store.delete(info.name)
    lines = _table(
        ["outcome", "objects", "bytes"],
        [[outcome, count, format_bytes(sizes[outcome])] for outcome, count in counts.most_common()],
    )
    lines += ["", *(f"{reason.value:8} {info.name}" for info, reason in bad[:_SHOWN_BAD])] if bad else []
    lines += [f"... and {len(bad) - _SHOWN_BAD} more: --json has all"] if len(bad) > _SHOWN_BAD else []
    lines += [f"removed {num_removed} of {len(bad)} bad objects"] if args.delete else []
    names = [{"name": info.name, "reason": reason.value} for info, reason in bad]
    result = {"store": store.describe(), "outcomes": counts, "bad": names, "num_removed": num_removed}
    _emit(args, result, lines)
    return EXIT_BAD if bad else EXIT_GOOD


def _gc(store: Store, args: argparse.Namespace) -> int:
    chosen = list(_chosen(store, args))
    num_bytes, num_refused = sum(info.size_bytes for info in chosen), 0
    if not args.dry_run:
        for info in tqdm(chosen, desc="gc", unit="object", file=sys.stderr, disable=None):
            try:
                store.delete(info.name)
            except StoreUnavailable as error:
                num_refused += 1
                num_bytes -= info.size_bytes
                print(f"passed over: {_plain(str(error))}", file=sys.stderr)
    verb = "would remove" if args.dry_run else "removed"
    line = f"{verb} {len(chosen) - num_refused} objects, {format_bytes(num_bytes)} in all"
    line += f"; {num_refused} could not be removed" if num_refused else ""
    result = {
        "store": store.describe(),
        "dry_run": args.dry_run,
        "num_objects": len(chosen) - num_refused,
        "num_bytes": num_bytes,
        "num_refused": num_refused,
    }
    _emit(args, result, [line])
    return EXIT_BAD if num_refused else EXIT_GOOD


def _chosen(store: Store, args: argparse.Namespace) -> Iterable[ObjectInfo]:
    """Return the objects that the rule of `gc` removes. Raises ConfigError for an unknown namespace."""
    if args.older_than is not None:
        return choose_expired(store.list(""), time.time() - parse_duration_s(args.older_than))
    if args.capacity is not None:
        return choose_oldest(store.list(""), parse_bytes(args.capacity))
    chosen = list(store.list(f"{args.namespace}/"))
    if not chosen:
        raise ConfigError(f"namespace {args.namespace!r} has 0 objects: `store ls` names those that are there")
    return chosen


def _fields(manifest: Manifest | Unreadable | None, long: bool) -> str:
    if manifest is None:
        return "(no manifest)"
    if isinstance(manifest, Unreadable):
        return f"(unreadable manifest: {manifest.why})"
    fields = manifest.fields
    shown = sorted(fields) if long else [name for name in _SHORT_FIELDS if name in fields]
    return _plain(" ".join(f"{name}={fields[name]}" for name in shown)) or f"({len(fields)} fields: --long)"


def _namespace_json(one: NamespaceSummary, manifest: Manifest | Unreadable | None) -> Json:
    result: dict[str, object] = {
        "namespace": one.part,
        "num_pages": len(one.pages),
        "num_objects": one.num_objects,
        "used_bytes": one.used_bytes,
        "oldest_s": one.oldest_s,
        "newest_s": one.newest_s,
    }
    if isinstance(manifest, Manifest):
        result |= {"digest": manifest.digest.hex(), "fields": dict(manifest.fields)}
    elif isinstance(manifest, Unreadable):
        result["unreadable"] = manifest.why
    return result


def _emit(args: argparse.Namespace, result: Json, lines: Sequence[str]) -> None:
    """Print the lines, and write the result where `--json` says. Raises ConfigError."""
    text = json.dumps(result, indent=2) + "\n"
    if args.json == "-":
        sys.stdout.write(text)
        return
    if args.json is not None:
        try:
            Path(args.json).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {args.json}: {error.strerror}; give another path or -") from error
    print("\n".join(lines))


def _table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return aligned lines: numbers to the right, text to the left, a rule below the titles."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    right = [bool(rows) and isinstance(rows[0][index], int) for index in range(len(titles))]

    def line(row: Sequence[str]) -> str:
        fitted = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        return "  ".join(fitted).rstrip()

    return [line(titles), "  ".join("-" * width for width in widths), *map(line, cells)]


def _bar(share: float) -> str:
    filled = round(min(1.0, max(0.0, share)) * _BAR_CHARS)
    return "[" + "#" * filled + "." * (_BAR_CHARS - filled) + "]"


def _age(seconds: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.1f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def _plain(text: str) -> str:
    """Return `text` as printable ASCII: a manifest or a file name must not steer the terminal."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)
