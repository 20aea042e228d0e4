"""Metrics on vLLM's roads: a stats record that its processes pass on, and its Prometheus registry.

The names and meanings are the table in `vllm_hicache.metrics`; this file only registers and forwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from vllm_hicache.metrics import BY_NAME, SPECS, merge

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT

PREFIX = "vllm:hicache_"


@dataclass
class HiCacheStats(KVConnectorStats):
    """Counts since the last step: `name` or `name|label` to number."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Both together."""
        return HiCacheStats(data=merge(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """What the engine's log line shows: hits by tier, bytes by direction, misses and errors."""
        shown = ("hit_tokens", "bytes", "misses", "errors")
        picked = {key: value for key, value in self.data.items() if key.split("|", 1)[0] in shown}
        return {key.replace("|", "_"): round(value) for key, value in sorted(picked.items())}

    def is_empty(self) -> bool:
        """Whether there is nothing to show. A gauge that changed is shown, or an idle engine's would go stale."""
        return not self.data


class HiCachePromMetrics(KVConnectorPromMetrics):
    """The metrics of `vllm_hicache.metrics` in the engine's own `/metrics`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for spec in SPECS:
            kind = Counter if spec.kind == "counter" else Gauge
            labels = [*labelnames, spec.label] if spec.label else labelnames
            self._metrics[spec.name] = metric_types[kind](
                name=PREFIX + spec.name, documentation=spec.help, labelnames=labels
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one step's counts for an engine."""
        values = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            name, _, label = key.partition("|")
            metric = self._metrics[name].labels(*values, *([label] if BY_NAME[name].label else []))
            if BY_NAME[name].kind == "counter":
                metric.inc(value)
            else:
                metric.set(value)
