"""What the handoff benchmark found: rows of medians, a table and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench_handoff_pairs import Handoff
from columns import shown, titles

MIB = 1 << 20
RATIO_AIM = 1.1


@dataclass(frozen=True, slots=True)
class Case:
    """What decode has of a prompt before it is asked.

    Attributes:
        reuse: that share of the prompt, percent, rounded down to whole pages.
        tier: where: `device`, vLLM's prefix cache, or `host`, where only a connector with a host tier has it.
    """

    reuse: int
    tier: str

    @property
    def title(self) -> str:
        return f"{self.reuse} % on {self.tier}" if self.reuse else "nothing"


@dataclass(frozen=True, slots=True)
class Side:
    """One connector's medians over rounds, seconds, see `Handoff`.

    Attributes:
        fastest_s: the least `first_s` of all rounds: what it takes when nothing else wants a core.
        link_s: time to the first token beyond a decode step: what the transfer costs.
        num_differing: handoffs after which decode's first token was not prefill's.
    """

    prefill_s: float
    first_s: float
    fastest_s: float
    step_s: float
    link_s: float
    received_bytes: int
    num_differing: int


@dataclass(frozen=True, slots=True)
class Row:
    """One case.

    Attributes:
        missing_bytes: keys and values of the tokens that decode lacks; `page_bytes` of one page.
        ratio: ours by NIXL's, of the time to the first token; the median over rounds.
        ceiling_s: the same bytes through one plain socket between two processes.
    """

    case: Case
    num_tokens: int
    missing_tokens: int
    missing_bytes: int
    page_bytes: int
    num_rounds: int
    sides: Mapping[str, Side]
    ratio: float
    ceiling_s: float

    @property
    def fastest_ratio(self) -> float:
        """Of the fastest handoffs of both."""
        return self.sides["ours"].fastest_s / self.sides["nixl"].fastest_s

    @property
    def verdict(self) -> str:
        """Whether the aims are met: time, bytes within a page of the missing ones, and tokens."""
        ours = self.sides["ours"]
        if any(side.num_differing for side in self.sides.values()):
            return "DIFFERS"
        if abs(ours.received_bytes - self.missing_bytes) > self.page_bytes:
            return "BYTES"
        return "ok" if self.ratio <= RATIO_AIM else "SLOW"

    def to_json(self) -> dict[str, object]:
        """All fields, the aim and the verdict."""
        return {**asdict(self), "fastest_ratio": self.fastest_ratio, "ratio_aim": RATIO_AIM, "verdict": self.verdict}


def side_of(handoffs: Sequence[Handoff]) -> Side:
    """Of what one connector did in all rounds of a case."""
    return Side(
        prefill_s=statistics.median(each.prefill_s for each in handoffs),
        first_s=statistics.median(each.first_s for each in handoffs),
        fastest_s=min(each.first_s for each in handoffs),
        step_s=statistics.median(each.step_s for each in handoffs),
        link_s=statistics.median(each.first_s - each.step_s for each in handoffs),
        received_bytes=round(statistics.median(each.received_bytes for each in handoffs)),
        num_differing=sum(not each.agrees for each in handoffs),
    )


def ratio_of(ours: Sequence[Handoff], theirs: Sequence[Handoff]) -> float:
    """The median over rounds of ours by theirs, to the first token."""
    return statistics.median(one.first_s / other.first_s for one, other in zip(ours, theirs, strict=True))


_COLUMNS: tuple[tuple[str, int, Callable[[Row], str]], ...] = (
    ("decode has", 15, lambda row: row.case.title),
    ("missing", 9, lambda row: f"{row.missing_tokens:,}"),
    ("MiB", 8, lambda row: f"{row.missing_bytes / MIB:.1f}"),
    ("ours MiB", 10, lambda row: f"{row.sides['ours'].received_bytes / MIB:.1f}"),
    ("nixl MiB", 10, lambda row: f"{row.sides['nixl'].received_bytes / MIB:.1f}"),
    ("ours ms", 9, lambda row: f"{row.sides['ours'].first_s * 1e3:.0f}"),
    ("nixl ms", 9, lambda row: f"{row.sides['nixl'].first_s * 1e3:.0f}"),
    ("ratio", 7, lambda row: f"{row.ratio:.2f}"),
    ("fastest", 9, lambda row: f"{row.fastest_ratio:.2f}"),
    ("ours link", 11, lambda row: f"{row.sides['ours'].link_s * 1e3:.0f}"),
    ("nixl link", 11, lambda row: f"{row.sides['nixl'].link_s * 1e3:.0f}"),
    ("socket", 8, lambda row: f"{row.ceiling_s * 1e3:.0f}"),
    ("step", 6, lambda row: f"{row.sides['ours'].step_s * 1e3:.0f}"),
    ("prefill s", 11, lambda row: f"{row.sides['ours'].prefill_s:.1f}"),
)


def table(rows: Sequence[Row]) -> str:
    """One line a row."""
    return "\n".join([titles(_COLUMNS), *(f"{shown(_COLUMNS, row)} {row.verdict}" for row in rows)])


_BARS: tuple[tuple[str, str], ...] = (("ours", "#4c78a8"), ("nixl", "#f58518"))


def draw(rows: Sequence[Row], path: Path) -> None:
    """Time to the first token and bytes, both connectors, by what decode has."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    times, sizes = figure.subplots(1, 2)
    places = range(len(rows))
    for number, (name, colour) in enumerate(_BARS):
        beside = [place + (number - 0.5) * 0.36 for place in places]
        first_ms = [row.sides[name].first_s * 1e3 for row in rows]
        times.bar(beside, first_ms, 0.34, color=colour, label=name)
        received = [row.sides[name].received_bytes / MIB for row in rows]
        sizes.bar(beside, received, 0.34, color=colour, label=name)
    times.plot(places, [row.ceiling_s * 1e3 for row in rows], "k_", markersize=28, label="socket alone")
    sizes.plot(places, [row.missing_bytes / MIB for row in rows], "k_", markersize=28, label="missing tokens")
    times.set_title("from asking decode to its first token, ms", fontsize=10)
    sizes.set_title("read from prefill, MiB", fontsize=10)
    for axes in (times, sizes):
        axes.set_xticks(list(places), [row.case.title for row in rows], fontsize=8)
        axes.set_xlabel("what decode has of the prompt")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    with rc_context({"svg.hashsalt": "handoff"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
