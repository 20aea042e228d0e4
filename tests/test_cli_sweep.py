"""Many calls at once: how many run together, what is passed over, and when a sweep gives up."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from vllm_hicache.cli.sweep import sweep
from vllm_hicache.errors import InvariantError, StoreDenied, StoreTimeout, StoreUnavailable
from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import ObjectInfo

WAIT_S = 20.0


def infos(num_objects: int) -> list[ObjectInfo]:
    return [ObjectInfo(ObjectName(f"a/{index}"), index, 0.0) for index in range(num_objects)]


def test_every_object_comes_out_once_with_its_result() -> None:
    results = list(sweep(lambda info: info.size_bytes * 2, infos(100), 8))
    assert sorted((info.size_bytes, result) for info, result in results) == [(n, 2 * n) for n in range(100)]


def test_as_many_calls_run_at_once_as_there_are_threads() -> None:
    barrier = threading.Barrier(4)
    results = list(sweep(lambda info: barrier.wait(WAIT_S), infos(8), 4))
    assert len(results) == 8


def test_no_more_objects_are_taken_than_are_under_way() -> None:
    taken = list[ObjectInfo]()

    def source() -> Iterator[ObjectInfo]:
        for info in infos(1000):
            taken.append(info)
            yield info

    results = sweep(lambda info: 0, source(), 2)
    next(results)
    assert len(taken) <= 4
    results.close()


def test_a_single_failure_is_passed_over() -> None:
    def call(info: ObjectInfo) -> str:
        if info.size_bytes % 10 == 3:
            raise StoreTimeout("slow")
        return "fine"

    results = list(sweep(call, infos(100), 4))
    assert sum(isinstance(result, StoreTimeout) for _, result in results) == 10
    assert sum(result == "fine" for _, result in results) == 90


def test_a_store_that_went_away_ends_the_sweep() -> None:
    calls = list[ObjectInfo]()

    def call(info: ObjectInfo) -> None:
        calls.append(info)
        raise StoreUnavailable("gone")

    with pytest.raises(StoreUnavailable, match="20 objects in a row failed, the last with: gone"):
        list(sweep(call, infos(1000), 4))
    assert len(calls) < 60


def test_a_store_that_refuses_us_ends_the_sweep_at_once() -> None:
    calls = list[ObjectInfo]()

    def call(info: ObjectInfo) -> None:
        calls.append(info)
        raise StoreDenied("read-only")

    with pytest.raises(StoreDenied, match="read-only"):
        list(sweep(call, infos(1000), 1))
    assert len(calls) <= 4


def test_a_bug_ends_the_sweep_with_its_own_error() -> None:
    def call(info: ObjectInfo) -> None:
        raise InvariantError("2 of 1")

    with pytest.raises(InvariantError, match="2 of 1"):
        list(sweep(call, infos(10), 2))


def test_no_thread_is_left_after_a_sweep_that_was_left_early() -> None:
    results = sweep(lambda info: 0, infos(100), 4)
    next(results)
    results.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hicache-sweep")]
