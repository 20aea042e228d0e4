"""What the serving benchmark found: hits by tier from servers' metrics, rows, a table and a picture. No server here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench_serving_client import Sent
from columns import shown, titles
from engine_job import total_of
from prometheus_client.samples import Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIERS = ("device", "host", "store", "peer")
"""Where prompt tokens were that no engine had to compute; `peer` is another engine."""

_COLOURS = {"device": "#9d9da1", "host": "#4c78a8", "store": "#54a24b", "peer": "#f58518"}
_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Counts:
    """An engine's prompt tokens so far: in all, and those found in each tier."""

    prompt: int
    hits: dict[str, int]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Counts:
        """From its metrics. What another connector than ours brings from outside is from another engine."""
        hits = {tier: total_of(samples, "vllm:hicache_hit_tokens_total", tier=tier) for tier in TIERS}
        hits["device"] = total_of(samples, "vllm:prefix_cache_hits_total")
        if not any(sample.name.startswith("vllm:hicache") for sample in samples):
            hits["peer"] = total_of(samples, "vllm:external_prefix_cache_hits_total")
        return cls(total_of(samples, "vllm:prompt_tokens_total"), hits)

    def since(self, before: Counts) -> Counts:
        """What came after `before`."""
        return Counts(self.prompt - before.prompt, {tier: self.hits[tier] - before.hits[tier] for tier in TIERS})


@dataclass(frozen=True, slots=True)
class Row:
    """One load on one set-up.

    Attributes:
        seconds: from the first request to the last answer.
        ttft_s: percentiles 50, 90 and 99 of the time to the first token, seconds; 99 of few requests is the slowest's.
        tpot_s: median over requests of the mean time of a further token, seconds.
        hits: prompt tokens found in each tier, by engine and tier.
        engine_tokens: prompt tokens that each engine was given, whether computed or found.
    """

    setup: str
    load: str
    num_requests: int
    num_failed: int
    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    ttft_s: tuple[float, ...]
    tpot_s: float
    hits: dict[str, dict[str, int]]
    engine_tokens: dict[str, int]

    @classmethod
    def of(cls, setup: str, load: str, num_requests: int, sent: Sent, counts: Mapping[str, Counts]) -> Row:
        """From what the sender saw and what the engines counted meanwhile, by engine."""
        return cls(
            setup=setup,
            load=load,
            num_requests=num_requests,
            num_failed=num_requests - len(sent.ttft_s),
            seconds=sent.seconds,
            requests_per_s=len(sent.ttft_s) / sent.seconds,
            output_tokens_per_s=sent.output_tokens / sent.seconds,
            prompt_tokens=sent.prompt_tokens,
            ttft_s=tuple(percentile(sent.ttft_s, percent) for percent in _PERCENTILES),
            tpot_s=statistics.median(sent.tpot_s) if sent.tpot_s else 0.0,
            hits={engine: counted.hits for engine, counted in counts.items()},
            engine_tokens={engine: counted.prompt for engine, counted in counts.items()},
        )

    def hit(self, tier: str) -> int:
        """Prompt tokens found in a tier by all engines together."""
        return sum(each[tier] for each in self.hits.values())

    def to_json(self) -> dict[str, object]:
        """All fields, and hits of all engines together by tier."""
        return {**asdict(self), "hit_tokens": {tier: self.hit(tier) for tier in TIERS}}


def percentile(values: Sequence[float], percent: int) -> float:
    """The least value that `percent` of 100 do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[-(-len(ordered) * percent // 100) - 1] if ordered else 0.0


_COLUMNS: tuple[tuple[str, int, Callable[[Row], str]], ...] = (
    ("requests", 9, lambda row: f"{row.num_requests}"),
    ("failed", 7, lambda row: f"{row.num_failed}"),
    ("s", 7, lambda row: f"{row.seconds:.1f}"),
    ("req/s", 7, lambda row: f"{row.requests_per_s:.2f}"),
    ("TTFT p50 s", 11, lambda row: f"{row.ttft_s[0]:.2f}"),
    ("p90", 7, lambda row: f"{row.ttft_s[1]:.2f}"),
    ("p99", 7, lambda row: f"{row.ttft_s[2]:.2f}"),
    ("TPOT ms", 9, lambda row: f"{row.tpot_s * 1e3:.1f}"),
    ("prompt", 9, lambda row: f"{row.prompt_tokens:,}"),
    ("device", 9, lambda row: f"{row.hit('device'):,}"),
    ("host", 8, lambda row: f"{row.hit('host'):,}"),
    ("store", 8, lambda row: f"{row.hit('store'):,}"),
    ("peer", 8, lambda row: f"{row.hit('peer'):,}"),
)


def table(rows: Sequence[Row]) -> str:
    """One line a row. A pair's hits are those of both engines, each of which is given the whole prompt."""
    head = f"{'load':<19}{'set-up':<18}{titles(_COLUMNS)}"
    return "\n".join([head, *(f"{row.load:<19}{row.setup:<18}{shown(_COLUMNS, row)}" for row in rows)])


def draw(rows: Sequence[Row], path: Path) -> None:
    """A column of plots a load: requests per second, time to the first token, hits by tier."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    loads = list(dict.fromkeys(row.load for row in rows))
    figure = Figure(figsize=(3 + 2.6 * len(loads), 6.4), layout="constrained")
    plots = figure.subplots(3, len(loads), squeeze=False, sharey=True)
    for column, load in enumerate(loads):
        shown = [row for row in rows if row.load == load][::-1]
        setups = [row.setup for row in shown]
        plots[0][column].set_title(load, fontsize=10)
        plots[0][column].barh(setups, [row.requests_per_s for row in shown], color="#4c78a8")
        _draw_first_tokens(plots[1][column], shown)
        _draw_hits(plots[2][column], shown)
        for axes, unit in zip(plots[:, column], ("requests/s", "TTFT p50, p90, p99, s", "hit tokens"), strict=True):
            axes.set_xlabel(unit, fontsize=8)
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
    plots[2][0].legend(frameon=False, fontsize=7)
    with rc_context({"svg.hashsalt": "serving"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _draw_first_tokens(axes: Axes, rows: Sequence[Row]) -> None:
    setups = [row.setup for row in rows]
    axes.barh(setups, [row.ttft_s[0] for row in rows], color="#4c78a8")
    for place, marker in ((1, "|"), (2, "x")):
        axes.scatter([row.ttft_s[place] for row in rows], setups, marker=marker, color="black", s=24)


def _draw_hits(axes: Axes, rows: Sequence[Row]) -> None:
    setups = [row.setup for row in rows]
    left = [0] * len(rows)
    for tier in TIERS:
        hits = [row.hit(tier) for row in rows]
        axes.barh(setups, hits, left=left, color=_COLOURS[tier], label=tier)
        left = [start + hit for start, hit in zip(left, hits, strict=True)]
