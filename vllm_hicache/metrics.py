"""Metrics: the one table of names, and a thread-safe accumulator that both halves fill.

The connector registers the table with vLLM's own Prometheus registry and drains the accumulators once a step;
nothing here knows Prometheus. Names follow `vllm:hicache_*` with units in the name.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One exported metric: its name without prefix, kind (`counter` or `gauge`), label name and help text."""

    name: str
    kind: str
    label: str | None
    help: str


SPECS = (
    MetricSpec("hit_tokens", "counter", "tier", "Prompt tokens served from this tier instead of being computed."),
    MetricSpec("lookup_tokens", "counter", None, "Prompt tokens that were looked for beyond vLLM's own prefix."),
    MetricSpec("bytes", "counter", "direction", "Bytes moved: load, save, exchange (ranks), fetch, flush, handoff."),
    MetricSpec("peer_bytes", "counter", "direction", "Bytes between this engine and others: received, sent."),
    MetricSpec("seconds", "counter", "direction", "Seconds spent moving bytes, summed over threads."),
    MetricSpec("misses", "counter", "reason", "Pages that were promised or looked for and not served."),
    MetricSpec("pages_without_draft", "counter", None, "Pages fetched without the draft model's state of them."),
    MetricSpec("evicted_pages", "counter", "tier", "Pages evicted."),
    MetricSpec("declined_pages", "counter", "direction", "Pages not saved or flushed for want of room; offered again."),
    MetricSpec("errors", "counter", "place", "Failures that were turned into misses."),
    MetricSpec("store_calls", "counter", "outcome", "Store calls by outcome; absent and present are no failures."),
    MetricSpec("store_seconds", "counter", "operation", "Seconds in store calls, summed over threads."),
    MetricSpec("store_circuit", "gauge", "side", "Circuit for reading, writing: 0 closed, 1 half-open, 2 open."),
    MetricSpec("queue_depth", "gauge", "queue", "What waits: load, save (device), exchange (ranks), fetch, flush."),
    MetricSpec("host_pages", "gauge", "state", "Pages of the host pool: used, free, reserved."),
    MetricSpec("open_operations", "gauge", None, "Operations that have not settled on every rank."),
    MetricSpec("open_exports", "gauge", None, "Exports whose pages wait for the engine that is to read them."),
    MetricSpec(
        "handoffs", "counter", "outcome", "Prompts for others: acknowledged, expired, aborted; of others: refused."
    ),
    MetricSpec("rank_differences", "counter", "kind", "Differences between ranks that the rank checker has named."),
    MetricSpec("healthy", "gauge", None, "1 while every transfer thread runs and ranks can exchange pages, else 0."),
)

BY_NAME = {spec.name: spec for spec in SPECS}

Key = tuple[str, str]
"""Metric name and label value; the label value is empty for metrics without a label."""


class Metrics:
    """Counts and gauges since they were drained last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[Key, float] = {}
        self._gauges: dict[Key, float] = {}
        self._shown: dict[Key, float] = {}

    def count(self, name: str, label: str = "", by: float = 1) -> None:
        """Add `by` to a counter of the table."""
        with self._lock:
            key = (name, label)
            self._counters[key] = self._counters.get(key, 0) + by

    def gauge(self, name: str, value: float, label: str = "") -> None:
        """Set a gauge of the table."""
        with self._lock:
            self._gauges[(name, label)] = value

    def drain(self) -> dict[str, float]:
        """Everything new, keyed `name` or `name|label`: nothing while no counter moved and no gauge changed.

        Counters start from zero again.
        """
        with self._lock:
            is_new = bool(self._counters) or any(self._shown.get(key) != self._gauges[key] for key in self._gauges)
            merged = {**self._counters, **self._gauges} if is_new else {}
            self._shown |= self._gauges
            self._counters, self._gauges = {}, {}
        return {f"{name}|{label}" if label else name: value for (name, label), value in merged.items()}


def merge(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Combine two drained mappings of one step: counters add up, of gauges the later one holds,
    of `healthy` and `store_circuit` the worse."""
    merged = dict(one)
    for key, value in other.items():
        name = key.split("|", 1)[0]
        if BY_NAME[name].kind == "counter":
            merged[key] = merged.get(key, 0) + value
        elif name == "healthy":
            merged[key] = min(merged.get(key, 1), value)
        elif name == "store_circuit":
            merged[key] = max(merged.get(key, 0), value)
        else:
            merged[key] = value
    return merged
