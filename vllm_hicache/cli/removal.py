"""`vllm-hicache store gc`: objects removed by age, by bytes, or a whole namespace.

Owner: `cli/`. Thread: the console's main thread; deletes run on the sweep's threads.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable

from vllm_hicache.cli.output import EXIT_BAD, EXIT_GOOD, emit, plain, progress
from vllm_hicache.cli.sweep import listed, sweep
from vllm_hicache.errors import ConfigError, StoreError
from vllm_hicache.storage.base import ObjectInfo, Store
from vllm_hicache.storage.inventory import choose
from vllm_hicache.units import format_bytes, parse_bytes, parse_duration_s

_SHOWN_REFUSED = 10


def gc(store: Store, args: argparse.Namespace) -> int:
    """Remove what the rules choose. `--namespace` alone removes all of it, its manifest included.

    Raises ConfigError without a rule, StoreError when the store has gone away or refuses deletes.
    """
    chosen = _chosen(store, args)
    refused = [] if args.dry_run else _delete(store, chosen, args)
    num_bytes = sum(info.size_bytes for info in chosen) - sum(info.size_bytes for info in refused)
    num_objects = len(chosen) - len(refused)
    verb = "would remove" if args.dry_run else "removed"
    line = f"{verb} {num_objects} objects, {format_bytes(num_bytes)} in all"
    line += f"; {len(refused)} could not be removed" if refused else ""
    result = {
        "store": store.describe(),
        "dry_run": args.dry_run,
        "num_objects": num_objects,
        "num_bytes": num_bytes,
        "num_refused": len(refused),
    }
    emit(args, result, [line])
    return EXIT_BAD if refused else EXIT_GOOD


def _chosen(store: Store, args: argparse.Namespace) -> list[ObjectInfo]:
    if args.max_age is None and args.max_bytes is None:
        if args.namespace is None:
            raise ConfigError("no rule given: say --max-age AGE, --max-bytes SIZE or --namespace HEX")
        return listed(store, args)
    before_s = None if args.max_age is None else time.time() - parse_duration_s(args.max_age)
    max_bytes = None if args.max_bytes is None else parse_bytes(args.max_bytes)
    return list(choose(listed(store, args), before_s, max_bytes))


def _delete(store: Store, chosen: Iterable[ObjectInfo], args: argparse.Namespace) -> list[ObjectInfo]:
    """Delete what is chosen; return what the store refused, one by one."""
    chosen, refused = list(chosen), list[ObjectInfo]()
    results = sweep(lambda info: store.delete(info.name), chosen, args.threads)
    for info, result in progress(args, "gc", results, len(chosen)):
        if isinstance(result, StoreError):
            refused.append(info)
            if len(refused) <= _SHOWN_REFUSED:
                print(f"passed over: {plain(str(result))}", file=sys.stderr)
    return refused
