"""One call for each of many objects, several at once: how `store verify` and `store gc` go through a store.

A store across a network is bound by latency, so calls overlap. A single failure is passed over; a store that
has gone away ends the sweep instead of failing a million times.

Owner: `cli/`. Thread: results are yielded on the caller's thread, the calls run on threads of the sweep's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from typing import TypeVar

from vllm_hicache.cli.output import progress
from vllm_hicache.errors import ConfigError, StoreDenied, StoreError
from vllm_hicache.storage.base import ObjectInfo, Store

_MAX_FAILURES_IN_A_ROW = 20
_WAITING_PER_THREAD = 2
_Result = TypeVar("_Result")


def listed(store: Store, args: argparse.Namespace) -> list[ObjectInfo]:
    """Return the objects of the store, or of the namespace `--namespace`; about 300 bytes of memory each.

    Raises ConfigError where that namespace has no objects, StoreError from the store.
    """
    prefix = "" if args.namespace is None else f"{args.namespace}/"
    found = list(progress(args, "list", store.list(prefix)))
    if prefix and not found:
        raise ConfigError(f"namespace {args.namespace!r} has 0 objects: `store ls` names those that are there")
    return found


def sweep(
    call: Callable[[ObjectInfo], _Result], infos: Iterable[ObjectInfo], num_threads: int
) -> Generator[tuple[ObjectInfo, _Result | StoreError], None, None]:
    """Yield each object with what `call` returned, or the StoreError that it raised, in any order.

    At most `num_threads` calls run at once. Raises StoreError after 20 failures in a row, and at once where
    the store refuses the call; what else a call raises ends the sweep as it is. Left early, it waits for the
    calls that run and begins no other.
    """
    failures = 0
    with closing(_completed(call, infos, num_threads)) as completed:
        for info, future in completed:
            error = future.exception()
            if isinstance(error, StoreDenied) or not isinstance(error, StoreError | None):
                raise error
            failures = 0 if error is None else failures + 1
            if error is not None and failures >= _MAX_FAILURES_IN_A_ROW:
                raise type(error)(f"{failures} objects in a row failed, the last with: {error}") from error
            yield info, future.result() if error is None else error


def _completed(
    call: Callable[[ObjectInfo], _Result], infos: Iterable[ObjectInfo], num_threads: int
) -> Generator[tuple[ObjectInfo, Future[_Result]], None, None]:
    pending: dict[Future[_Result], ObjectInfo] = {}
    with ThreadPoolExecutor(num_threads, thread_name_prefix="hicache-sweep") as pool:
        try:
            for info in infos:
                pending[pool.submit(call, info)] = info
                if len(pending) >= num_threads * _WAITING_PER_THREAD:
                    yield from _take(pending)
            while pending:
                yield from _take(pending)
        finally:
            for future in pending:
                future.cancel()


def _take(pending: dict[Future[_Result], ObjectInfo]) -> list[tuple[ObjectInfo, Future[_Result]]]:
    done, _ = wait(pending, return_when=FIRST_COMPLETED)
    return [(pending.pop(future), future) for future in done]
