"""`vllm-hicache store verify`: every object read whole and checked against its own envelope and name.

Owner: `cli/`. Thread: the console's main thread; reads run on the sweep's threads.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, field

from vllm_hicache.cli.output import EXIT_BAD, EXIT_ERROR, EXIT_GOOD, emit, plain, progress, table
from vllm_hicache.cli.sweep import listed, sweep
from vllm_hicache.errors import StoreError
from vllm_hicache.names import MissReason
from vllm_hicache.storage.base import ObjectInfo, Store
from vllm_hicache.storage.envelope import Sealer
from vllm_hicache.storage.inventory import is_manifest, verify_object
from vllm_hicache.storage.warning import miss_reason
from vllm_hicache.units import format_bytes

_GOOD = "good"
_SHOWN_BAD = 50


@dataclass(slots=True)
class _Findings:
    """What a sweep found: `proven` are the namespaces in which a chunk was good."""

    counts: Counter[str] = field(default_factory=Counter)
    sizes: Counter[str] = field(default_factory=Counter)
    bad: list[tuple[ObjectInfo, MissReason]] = field(default_factory=list)
    unread: list[StoreError] = field(default_factory=list)
    proven: set[str] = field(default_factory=set)

    def add(self, info: ObjectInfo, result: MissReason | StoreError | None) -> None:
        reason = miss_reason(result) if isinstance(result, StoreError) else result
        outcome = _GOOD if reason is None else reason.value
        self.counts[outcome] += 1
        self.sizes[outcome] += info.size_bytes
        if isinstance(result, StoreError):
            self.unread.append(result)
        elif result is None and not is_manifest(info.name):
            self.proven.add(_namespace_of(info))
        elif result is not None and result is not MissReason.ABSENT:
            self.bad.append((info, result))


def verify(sealer: Sealer, store: Store, args: argparse.Namespace) -> int:
    """Check every object, and with `--delete` remove the bad ones. Raises StoreError when the store has gone away.

    A namespace without one good chunk is kept: a wrong or missing key makes all of it look bad.
    """
    found, infos = _Findings(), listed(store, args)
    results = sweep(lambda info: verify_object(store, info, sealer), infos, args.threads)
    for info, outcome in progress(args, "verify", results, len(infos)):
        found.add(info, outcome)
    num_removed = _remove(store, found, args) if args.delete else 0
    names = [{"name": info.name, "reason": reason.value} for info, reason in found.bad]
    result = {
        "store": store.describe(),
        "outcomes": found.counts,
        "bad": names,
        "num_unread": len(found.unread),
        "num_removed": num_removed,
    }
    emit(args, result, _lines(found, num_removed, args))
    return EXIT_BAD if found.bad else EXIT_ERROR if found.unread else EXIT_GOOD


def _remove(store: Store, found: _Findings, args: argparse.Namespace) -> int:
    doomed = [info for info, _ in found.bad if _namespace_of(info) in found.proven]
    results = sweep(lambda info: store.delete(info.name), doomed, args.threads)
    return sum(result is True for _, result in progress(args, "delete", results, len(doomed)))


def _lines(found: _Findings, num_removed: int, args: argparse.Namespace) -> list[str]:
    bad = sorted(found.bad, key=lambda one: one[0].name)
    lines = table(
        ["outcome", "objects", "bytes"],
        [[outcome, count, format_bytes(found.sizes[outcome])] for outcome, count in found.counts.most_common()],
    )
    lines += ["", *(f"{reason.value:8} {info.name}" for info, reason in bad[:_SHOWN_BAD])] if bad else []
    lines += [f"... and {len(bad) - _SHOWN_BAD} more: --json has all"] if len(bad) > _SHOWN_BAD else []
    if found.unread:
        lines += [f"{len(found.unread)} objects could not be read, the last: {plain(str(found.unread[-1]))}"]
    lines += [f"removed {num_removed} of {len(bad)} bad objects"] if args.delete else []
    for part in sorted({_namespace_of(info) for info, _ in bad} - found.proven):
        lines += [
            f"namespace {part} has no good chunk: is this the right key, or a newer release's? --delete keeps it, "
            f"`store gc --namespace {part}` removes it"
        ]
    return lines


def _namespace_of(info: ObjectInfo) -> str:
    return info.name.split("/", 1)[0]
