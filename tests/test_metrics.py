"""Metrics: one table of names, counts that are neither lost nor told twice, and merges by kind."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import vllm_hicache
from vllm_hicache.metrics import BY_NAME, SPECS, Metrics, merge


def test_counts_add_up_by_label() -> None:
    metrics = Metrics()
    metrics.count("hit_tokens", "host", 64)
    metrics.count("hit_tokens", "host")
    metrics.count("hit_tokens", "store", 2)
    metrics.count("lookup_tokens", by=3)
    assert metrics.drain() == {"hit_tokens|host": 65, "hit_tokens|store": 2, "lookup_tokens": 3}


def test_the_last_value_of_a_gauge_holds() -> None:
    metrics = Metrics()
    metrics.gauge("host_pages", 5, "free")
    metrics.gauge("host_pages", 4, "free")
    assert metrics.drain() == {"host_pages|free": 4}


def test_what_was_drained_is_not_told_again() -> None:
    metrics = Metrics()
    metrics.count("misses", "absent")
    metrics.gauge("healthy", 1)
    metrics.drain()
    assert metrics.drain() == {}
    metrics.count("misses", "absent")
    assert metrics.drain() == {"misses|absent": 1}


def test_no_count_of_many_threads_is_lost_between_drains() -> None:
    metrics, total = Metrics(), 0.0

    def count(_: int) -> float:
        for _ in range(500):
            metrics.count("bytes", "save")
        return metrics.drain().get("bytes|save", 0)

    with ThreadPoolExecutor(8) as threads:
        total = sum(threads.map(count, range(16)))
    assert total + metrics.drain().get("bytes|save", 0) == 16 * 500


def test_counters_of_two_sides_add_up_and_of_gauges_the_later_holds() -> None:
    one = {"bytes|load": 1.0, "bytes|save": 2.0, "open_operations": 7.0}
    assert merge(one, {"bytes|load": 4.0, "errors|flush": 1.0, "open_operations": 3.0}) == {
        "bytes|load": 5.0,
        "bytes|save": 2.0,
        "errors|flush": 1.0,
        "open_operations": 3.0,
    }
    assert one == {"bytes|load": 1.0, "bytes|save": 2.0, "open_operations": 7.0}


@pytest.mark.parametrize(("one", "other", "worse"), [(1, 0, 0), (0, 1, 0), (1, 1, 1), (None, 0, 0), (0, None, 0)])
def test_one_unhealthy_side_is_enough(one: float | None, other: float | None, worse: float) -> None:
    said = [{} if value is None else {"healthy": value} for value in (one, other)]
    assert merge(*said) == {"healthy": worse}


def test_a_name_outside_the_table_cannot_be_merged() -> None:
    with pytest.raises(KeyError, match="unheard_of"):
        merge({}, {"unheard_of": 1})


def test_the_table_has_each_name_once_with_a_kind_and_a_help_text() -> None:
    assert len(BY_NAME) == len(SPECS)
    assert {spec.kind for spec in SPECS} == {"counter", "gauge"}
    assert all(spec.help.endswith(".") and "|" not in spec.name for spec in SPECS)


def uses_in_the_package() -> Iterator[tuple[str, str, bool]]:
    """(name, kind, has a label) of every call of `count` and `gauge` on a `metrics` or `_metrics`."""
    for path in Path(inspect.getfile(vllm_hicache)).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
                continue
            owner, name = node.func.value, node.args[0]
            if getattr(owner, "attr", getattr(owner, "id", "")).lstrip("_") == "metrics" and isinstance(
                name, ast.Constant
            ):
                kind = {"count": "counter"}.get(node.func.attr, node.func.attr)
                yield str(name.value), kind, len(node.args) > (1 if kind == "counter" else 2)


def test_every_metric_that_is_counted_is_in_the_table_with_its_kind_and_label() -> None:
    uses = set(uses_in_the_package())
    assert uses >= {("hit_tokens", "counter", True), ("open_operations", "gauge", False)}
    assert uses == {(spec.name, spec.kind, spec.label is not None) for spec in SPECS}


def test_a_gauge_that_has_not_changed_is_not_worth_a_report_of_its_own() -> None:
    metrics = Metrics()
    metrics.gauge("healthy", 1)
    assert metrics.drain() == {"healthy": 1}
    metrics.gauge("healthy", 1)
    assert metrics.drain() == {}
    metrics.gauge("healthy", 0)
    assert metrics.drain() == {"healthy": 0}
    metrics.gauge("healthy", 0)
    metrics.count("misses", "absent")
    assert metrics.drain() == {"healthy": 0, "misses|absent": 1}
