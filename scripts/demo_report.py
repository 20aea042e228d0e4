"""What the demo found: from samples to a result, a table, bars on the terminal and a chart. No engine here."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_process import Answer

EXACT_LIMIT = 0.001
ROUNDING_LIMIT = 0.5
BAR_WIDTH = 44

TIERS = {
    "cold": "recomputed",
    "store": "store, after a restart",
    "store_cached": "store, files just read",
    "host": "host memory",
    "device_connector": "device, with connector",
    "device": "device, vLLM alone",
}
"""Kinds of samples that are shown, slowest first."""

DEVICE_KINDS = ("device", "device_beside_store", "device_beside_store_cached")
"""Samples of vLLM's own prefix cache, without the connector, taken beside those of other tiers."""

TIER_OF_KIND = {"device": "device", "host": "host", "store": "store"}

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Comparison:
    """An answer beside its reference, token by token.

    Attributes:
        same_work: whether both recomputed the same number of tokens. If so, they round alike and must be equal.
        max_logprob_diff: largest difference of the chosen tokens' log-probabilities, up to and including the
            first token that differs, after which the two say different things.
    """

    kind: str
    same_work: bool
    tokens_equal: bool
    max_logprob_diff: float

    @classmethod
    def of(cls, kind: str, answer: Answer, reference: Answer) -> Comparison:
        """Compare."""
        same_work = sum(answer.hit_tokens.values()) == sum(reference.hit_tokens.values())
        diffs = []
        for token, other, logprob, other_logprob in zip(
            answer.tokens, reference.tokens, answer.logprobs, reference.logprobs, strict=True
        ):
            diffs.append(abs(logprob - other_logprob))
            if token != other:
                break
        return cls(kind, same_work, answer.tokens == reference.tokens, max(diffs))

    @property
    def holds(self) -> bool:
        """Equal; or, after unequal work, as near as rounding, by which two like tokens may change places."""
        if self.same_work:
            return self.tokens_equal and self.max_logprob_diff <= EXACT_LIMIT
        return self.max_logprob_diff <= ROUNDING_LIMIT


@dataclass(slots=True)
class LengthRecord:
    """Everything measured with prompts of one length: answers by kind of sample."""

    prompt_tokens: int
    samples: dict[str, list[Answer]] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    turn_tokens: list[int] = field(default_factory=list)

    def ttfts(self, *kinds: str) -> list[float]:
        """Times to first token, seconds."""
        return [answer.ttft_s for kind in kinds for answer in self.samples.get(kind, [])]

    def median_s(self, *kinds: str) -> float:
        """Median time to first token, seconds."""
        return statistics.median(self.ttfts(*kinds))

    def has(self, kind: str) -> bool:
        """Whether there are samples of that kind."""
        return bool(self.samples.get(kind))

    def paired_ratio(self, kind: str, peer: str) -> float:
        """Median of ratios of samples that were taken one right after the other."""
        pairs = zip(self.ttfts(kind), self.ttfts(peer), strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)

    def hits(self, kind: str, tier: str) -> int:
        """Hit tokens of one request, the smallest of its kind."""
        return min((answer.hit_tokens.get(tier, 0) for answer in self.samples.get(kind, [])), default=0)


@dataclass(frozen=True, slots=True)
class StoreNote:
    """Which store it was: `url` without secrets, None for one of the demo's own; `aim` in device hits, if any."""

    kind: str = "file"
    url: str | None = None
    aim: float | None = None


def assemble(
    records: Sequence[LengthRecord],
    versions: Mapping[str, str],
    reads: Mapping[str, float] | None = None,
    store: StoreNote | None = None,
) -> Result:
    """The result: that of the longest prompt on top, and one record for each length."""
    lengths = [of_length(record) for record in records]
    main = max(lengths, key=lambda each: int(each["prompt_tokens"]))
    shown = {key: value for key, value in main.items() if key not in ("samples_s", "next_turn")}
    return {
        **shown,
        "outputs_equal": all(each["outputs_equal"] for each in lengths),
        "lengths": lengths,
        "versions": dict(versions),
        "machine": machine(),
        "store": store_record(store or StoreNote(), [each["ratios"]["store_over_device_paired"] for each in lengths]),
        "plain_read_s": dict(reads or {}),
        "notes": {
            "ttft": "seconds from handing token ids to the engine to its first token, medians of samples_s",
            "device": "vLLM's own prefix cache in an engine without the connector, sampled beside the other tiers",
            "paired": "median of ratios of two samples that were taken one after the other",
            "store": "each sample another session of that length, files as the system left them; store_cached, for "
            "files alone, is after a second restart, with them in the operating system's page cache",
            "plain_read_s": "reading as many of the store's objects as the longest prompt has pages, on one thread",
            "outputs_equal": f"{EXACT_LIMIT} in log-probability and every token, against the prefix cache's own hit; "
            f"{ROUNDING_LIMIT} for 'alone' where vLLM alone recomputes a whole block and the connector one token",
        },
    }


def store_record(store: StoreNote, ratios: Sequence[float]) -> Result:
    """The store, and whether its hits met the aim at every length."""
    met = None if store.aim is None else max(ratios) <= store.aim
    return {"kind": store.kind, "url": store.url, "aim": store.aim, "over_device_paired": list(ratios), "aim_met": met}


def of_length(record: LengthRecord) -> Result:
    """The result for one prompt length."""
    device_s = record.median_s(*DEVICE_KINDS)
    host_s, store_s, cold_s = record.median_s("host"), record.median_s("store"), record.median_s("cold")
    cached, cached_ratios = of_second_restart(record, device_s)
    return {
        "prompt_tokens": record.prompt_tokens,
        "cold_ttft_s": cold_s,
        "cold_connector_ttft_s": record.median_s("cold_connector"),
        "device_ttft_s": device_s,
        "device_connector_ttft_s": record.median_s("device_connector"),
        "host_ttft_s": host_s,
        "store_restart_ttft_s": store_s,
        **cached,
        "restored_tokens": record.hits("store", "store"),
        "outputs_equal": all(each.holds for each in record.comparisons),
        "tokens_equal": all(each.tokens_equal for each in record.comparisons),
        "max_logprob_diff": worst_by_kind(record.comparisons),
        "hit_tokens": {tier: record.hits(kind, tier) for kind, tier in TIER_OF_KIND.items()},
        "ratios": {
            "host_over_device": host_s / device_s,
            "host_over_device_paired": record.paired_ratio("host", "device"),
            "store_over_device": store_s / device_s,
            "store_over_device_paired": record.paired_ratio("store", "device_beside_store"),
            **cached_ratios,
            "cold_over_host": cold_s / host_s,
            "cold_over_store": cold_s / store_s,
        },
        "next_turn": {
            "prompt_tokens": record.turn_tokens,
            "hit_tokens": record.hits("turn_host", "host"),
            "host_ttft_s": record.median_s("turn_host"),
            "device_ttft_s": record.median_s("turn_device"),
        },
        "samples_s": {kind: record.ttfts(kind) for kind in record.samples},
    }


def of_second_restart(record: LengthRecord, device_s: float) -> tuple[Result, Result]:
    """Its time and its ratios; both empty where there was none."""
    if not record.has("store_cached"):
        return {}, {}
    cached_s = record.median_s("store_cached")
    return {"store_cached_ttft_s": cached_s}, {
        "store_cached_over_device": cached_s / device_s,
        "store_cached_over_device_paired": record.paired_ratio("store_cached", "device_beside_store_cached"),
    }


def worst_by_kind(comparisons: Sequence[Comparison]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for each in comparisons:
        worst[each.kind] = max(worst.get(each.kind, 0.0), each.max_logprob_diff)
    return worst


def machine() -> Result:
    """Where it was measured, and how busy it was over the last five minutes."""
    return {"cpus": os.cpu_count(), "cpu": cpu_name(), "load_average": os.getloadavg()[1]}


def cpu_name() -> str:
    """What the kernel calls the processor; empty where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def failures(result: Result) -> list[str]:
    """What the demo promised and did not find, a sentence each; slowness is reported, not failed."""
    found = []
    for each in result["lengths"]:
        name = f"with {each['prompt_tokens']:,} prompt tokens"
        if not each["outputs_equal"]:
            diffs = ", ".join(f"{kind} {diff:.4f}" for kind, diff in each["max_logprob_diff"].items())
            found.append(f"{name} an answer differs from vLLM's own; largest log-probability differences: {diffs}")
        if not each["hit_tokens"]["host"]:
            found.append(f"{name} nothing was restored from host memory")
        if not each["restored_tokens"]:
            found.append(f"{name} nothing was restored from the store after the restart")
    return found


def seconds_of(each: Result, kind: str) -> float:
    """A length's median for a kind of sample in TIERS."""
    seconds: float = each["store_restart_ttft_s" if kind == "store" else f"{kind}_ttft_s"]
    return seconds


def tiers_of(each: Result) -> dict[str, str]:
    """Those of TIERS that a length was measured in."""
    return {kind: name for kind, name in TIERS.items() if kind in each["samples_s"] or kind == "device"}


def table(result: Result) -> str:
    """Medians by tier and length, and their ratio to vLLM's own prefix cache."""
    lines = [f"{'tokens':>7}  {'first token from':<24}{'TTFT s':>9}{'x device':>10}{'samples':>9}{'hit tokens':>12}"]
    for each in result["lengths"]:
        for kind, name in tiers_of(each).items():
            seconds = seconds_of(each, kind)
            hits = each["hit_tokens"].get(kind, "")
            lines.append(
                f"{each['prompt_tokens']:>7,}  {name:<24}{seconds:>9.3f}{seconds / each['device_ttft_s']:>10.2f}"
                f"{num_samples(each, kind):>9}{hits:>12}"
            )
        lines += summary(each)
    return "\n".join(lines)


def num_samples(each: Result, kind: str) -> int:
    kinds = DEVICE_KINDS if kind == "device" else (kind,)
    return sum(len(each["samples_s"].get(name, [])) for name in kinds)


def summary(each: Result) -> list[str]:
    """What a length's numbers say, losses included."""
    ratios, turn = each["ratios"], each["next_turn"]
    names = {"host": "host memory", "store": "store", "store_cached": "store just read"}
    beside = {name: ratios.get(f"{kind}_over_device_paired") for kind, name in names.items()}
    answers = "equal to" if each["outputs_equal"] else "DIFFERENT from"
    diffs = each["max_logprob_diff"]
    restored = max(diff for kind, diff in diffs.items() if kind != "alone")
    return [
        "         beside a device hit: "
        + ", ".join(f"{name} {ratio - 1:+.1%}" for name, ratio in beside.items() if ratio is not None),
        f"         next turn: {turn['hit_tokens']:,} of {turn['prompt_tokens'][0]:,} tokens from host memory, "
        f"{turn['host_ttft_s']:.3f} s (vLLM's own {turn['device_ttft_s']:.3f} s)",
        f"         answers {answers} vLLM's own: log-probabilities within {restored:.4f} of the prefix cache's, "
        f"{diffs['alone']:.4f} of vLLM's alone",
        "",
    ]


def store_line(result: Result) -> str:
    """How the store's hits stand to its aim, and what plain reads of as many bytes take."""
    store = result["store"]
    ratios = " and ".join(f"{ratio:.2f}" for ratio in store["over_device_paired"])
    text = f"store ({store['kind']}): {ratios} x device"
    if store["aim"] is not None:
        text += f", aim {store['aim']:.2f}: {'ok' if store['aim_met'] else 'OVER'}"
    reads = ", ".join(f"{way.replace('_', ' ')} {seconds:.3f} s" for way, seconds in result["plain_read_s"].items())
    return f"{text}; plain reads of as many bytes on one thread: {reads}" if reads else text


def bars(result: Result) -> str:
    """The table as bars on a logarithmic scale."""
    rows = [
        (f"{each['prompt_tokens']:,} {name}", seconds_of(each, kind))
        for each in result["lengths"]
        for kind, name in tiers_of(each).items()
    ]
    low = math.log(min(seconds for _, seconds in rows) / 1.5)
    span = math.log(max(seconds for _, seconds in rows)) - low
    width = max(len(name) for name, _ in rows)
    return "\n".join(
        f"{name:<{width}}  {'#' * max(1, round(BAR_WIDTH * (math.log(seconds) - low) / span))} {seconds:.3g} s"
        for name, seconds in rows
    )


def draw(result: Result, path: Path) -> None:
    """The chart: time to first token by tier, one colour for each prompt length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots()
    lengths, tiers = result["lengths"], tiers_of(result["lengths"][0])
    height = 0.8 / len(lengths)
    for number, (each, colour) in enumerate(zip(lengths, ("#4c78a8", "#f58518"), strict=False)):
        places = [row + (number - (len(lengths) - 1) / 2) * height for row in range(len(tiers))]
        values = [seconds_of(each, kind) for kind in tiers]
        drawn = axes.barh(places, values, height * 0.92, color=colour, label=f"{each['prompt_tokens']:,} tokens")
        axes.bar_label(drawn, [f"{value:.3g} s" for value in values], padding=4, fontsize=9)
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_yticks(range(len(tiers)), list(tiers.values()))
    axes.invert_yaxis()
    axes.set_xlabel("time to first token, seconds (logarithmic)")
    axes.set_title("SmolLM2-135M on a CPU: where a conversation's prompt comes from")
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
