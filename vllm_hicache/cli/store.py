"""`vllm-hicache store ls|stat|verify|gc URL`: what lies in a store, whether it is sound, and less of it.

Owner: `cli/`. Runs in the console's process on its main thread. Tables go to stdout, progress and errors
to stderr; `--json -` replaces the tables on stdout. Exit codes: 0 good, 1 bad objects found or some that
could not be removed, 2 an error, or objects that could not be read.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial

from vllm_hicache.cli.advice import Evicting
from vllm_hicache.cli.contents import draft_of, manifest_of
from vllm_hicache.cli.output import EXIT_ERROR, EXIT_GOOD, Json, age, bar, emit, plain, table
from vllm_hicache.cli.removal import gc
from vllm_hicache.cli.sweep import listed
from vllm_hicache.cli.verification import verify
from vllm_hicache.errors import ConfigError, HiCacheError, StoreError
from vllm_hicache.secrets import Secrets
from vllm_hicache.storage.base import ObjectInfo, Store, StoreOptions, StoreUsage
from vllm_hicache.storage.envelope import sealer_for
from vllm_hicache.storage.inventory import NamespaceSummary, survey
from vllm_hicache.storage.manifest import Manifest, Unreadable
from vllm_hicache.storage.registry import open_store
from vllm_hicache.storage.stack import with_keys
from vllm_hicache.units import format_bytes

DEFAULT_THREADS = 8
_MAX_THREADS = 64
_SHORT_FIELDS = ("model", "model_id", "dtype", "kv_dtype", "page_tokens", "generation")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `store` and its four verbs; `run` serves them (`args.run`)."""
    parser = subparsers.add_parser("store", help="look into a store, verify it, remove from it")
    verbs = parser.add_subparsers(dest="verb", required=True)
    ls = verbs.add_parser("ls", help="list namespaces: model, pages, objects, bytes, age")
    ls.add_argument("--long", action="store_true", help="show every field of each namespace")
    stat = verbs.add_parser("stat", help="show usage against capacity, by namespace")
    check = verbs.add_parser("verify", help="read every object and check it; exit 1 if bad ones are found")
    check.add_argument("--delete", action="store_true", help="remove the bad objects")
    rid = verbs.add_parser("gc", help="remove objects by age, by bytes, or a whole namespace")
    rid.add_argument("--max-age", metavar="AGE", help="remove chunks written longer ago, such as 7d")
    rid.add_argument("--max-bytes", metavar="SIZE", help="remove the oldest chunks beyond it, as in 50GiB")
    rid.add_argument("--dry-run", action="store_true", help="only tell what would be removed")
    for verb in (ls, stat, check, rid):
        verb.add_argument("url", metavar="URL", help="the store, such as file:///dir, redis://host or s3://bucket")
        verb.add_argument("--namespace", metavar="HEX", help="only this namespace, as `ls` names it")
        verb.add_argument("--json", metavar="PATH", help="write the result as JSON to PATH, or - for stdout")
        verb.add_argument("--progress", action="store_true", help="show progress on stderr, though it is no terminal")
        verb.add_argument(
            "--threads",
            type=int,
            default=DEFAULT_THREADS,
            metavar="N",
            help=f"calls to the store at once, {DEFAULT_THREADS} by default; up to 32 MiB each",
        )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do what the parsed arguments ask; return the exit code. Errors become one sentence on stderr."""
    try:
        if not 1 <= args.threads <= _MAX_THREADS:
            raise ConfigError(f"--threads {args.threads} is outside 1..{_MAX_THREADS}: leave it out for the default")
        secrets = Secrets.from_environment(os.environ)
        bare = open_store(args.url, StoreOptions(num_connections=args.threads))
        verbs: Mapping[str, Callable[[Store, argparse.Namespace], int]] = {
            "ls": _ls,
            "stat": partial(_stat, bare),
            "verify": partial(verify, sealer_for(secrets.seal_key)),
            "gc": gc,
        }
        with closing(bare):
            return verbs[args.verb](with_keys(bare, secrets), args)
    except HiCacheError as error:
        print(f"vllm-hicache store {args.verb}: {plain(str(error))}", file=sys.stderr)
        return EXIT_ERROR


def _ls(store: Store, args: argparse.Namespace) -> int:
    found = survey(listed(store, args))
    manifests = {part: manifest_of(store, part) for part in found}
    now = time.time()
    rows = [
        (
            part,
            _fields(manifests[part], args.long),
            len(one.pages),
            one.num_objects,
            format_bytes(one.used_bytes),
            age(now - one.newest_s),
            age(now - one.oldest_s),
        )
        for part, one in found.items()
    ]
    result = [_namespace_json(one, manifests[part]) for part, one in found.items()]
    titles = ["namespace", "what it holds", "pages", "objects", "bytes", "newest", "oldest"]
    lines = table(titles, rows) if rows else [f"{store.describe()} holds no objects"]
    emit(args, {"store": store.describe(), "namespaces": result}, lines)
    return EXIT_GOOD


def _stat(bare: Store, store: Store, args: argparse.Namespace) -> int:
    infos = listed(store, args)
    found, usage = survey(infos), _usage(store, infos)
    limit_bytes = usage.capacity_bytes
    lines = [store.describe(), f"objects   {usage.num_objects}"]
    lines += [f"used      {format_bytes(usage.used_bytes)}"]
    if limit_bytes is None:
        lines += ["capacity  none that it tells: `store gc --max-bytes` keeps it within one"]
    else:
        share = usage.used_bytes / limit_bytes
        lines += [f"capacity  {format_bytes(limit_bytes)}", f"          {bar(share)} {share:.1%}"]
    policy = _policy(bare)
    lines += [f"policy    {policy}"] if policy is not None else []
    listed_bytes = sum(one.used_bytes for one in found.values())
    rows = [
        [part, one.num_objects, format_bytes(one.used_bytes), bar(one.used_bytes / max(1, listed_bytes))]
        for part, one in found.items()
    ]
    if rows:
        lines += ["", *table(["namespace", "objects", "bytes", "share of the bytes listed"], rows)]
    result = {
        "store": store.describe(),
        "num_objects": usage.num_objects,
        "used_bytes": usage.used_bytes,
        "capacity_bytes": limit_bytes,
        "eviction_policy": policy,
        "namespaces": [_namespace_json(one, None) for one in found.values()],
    }
    emit(args, result, lines)
    return EXIT_GOOD


def _usage(store: Store, infos: Sequence[ObjectInfo]) -> StoreUsage:
    try:
        return store.usage()
    except StoreError:  # miss: a store may be too large to count in one call, and has just been listed
        return StoreUsage(len(infos), sum(info.size_bytes for info in infos), None)


def _policy(bare: Store) -> str | None:
    try:
        return bare.eviction_policy() if isinstance(bare, Evicting) else None
    except StoreError:  # miss: a server may refuse to tell its settings, and serves all the same
        return None


def _fields(manifest: Manifest | Unreadable | None, long: bool) -> str:
    if manifest is None:
        return "(no manifest)"
    if isinstance(manifest, Unreadable):
        return plain(f"(unreadable manifest: {manifest.why})")
    fields = manifest.fields
    shown = sorted(fields) if long else [name for name in _SHORT_FIELDS if name in fields]
    told = " ".join(f"{name}={fields[name]}" for name in shown) or f"({len(fields)} fields: --long)"
    draft = draft_of(fields)
    return plain(told if draft is None else f"{draft}: {told}")


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
