"""What the gather benchmark found: rows of medians, a table and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench_gather_rank import CHUNK_TOKENS, Measured
from columns import shown, titles

GIB = 1 << 30
MIB = 1 << 20
RATIO_AIM = 0.9
SCRATCH_AIM = 2.0
"""Layers' buffers that the scratch may take."""


@dataclass(frozen=True, slots=True)
class Row:
    """One context on one size of group: medians over rounds.

    Attributes:
        layer_bytes: one layer's scratch; `received_bytes` of it come from other ranks.
        gib_per_s, bare_gib_per_s: received by one rank.
        ratio: bare time by the gather's, both alone.
        gather_s, attend_s: a layer's, each alone.
        hidden: share of the gathers' time in a step for which attention did not wait; `chunk_hidden` where several
            tokens attend.
        step_s: a step's gathers and attention, one layer ahead; `in_turn_s` one after the other.
        saved: share of the in-turn time that the step does without.
    """

    num_ranks: int
    context_tokens: int
    layer_bytes: int
    received_bytes: int
    gib_per_s: float
    bare_gib_per_s: float
    ratio: float
    gather_s: float
    attend_s: float
    hidden: float
    chunk_hidden: float
    step_s: float
    in_turn_s: float
    saved: float
    scratch_bytes: int

    @property
    def scratch_layers(self) -> float:
        """The scratch by one layer's buffer."""
        return self.scratch_bytes / self.layer_bytes

    @property
    def verdict(self) -> str:
        """Whether the aims are met."""
        if self.scratch_layers > SCRATCH_AIM:
            return "OVER"
        return "ok" if self.ratio >= RATIO_AIM else "UNDER"

    def to_json(self) -> dict[str, object]:
        """All fields, the aims and the verdict."""
        aims = {"ratio_aim": RATIO_AIM, "scratch_layers_aim": SCRATCH_AIM}
        return {**asdict(self), "scratch_layers": self.scratch_layers, **aims, "verdict": self.verdict}


def row_of(num_layers: int, ranks: Sequence[Measured]) -> Row:
    """Of what the ranks found for one context. In each round the slowest rank counts."""
    one = ranks[0]
    wall_s = {name: _slowest([rank.wall_s[name] for rank in ranks]) for name in one.wall_s}
    gather_s, bare_s, step_s, in_turn_s = (wall_s[name] for name in ("gather", "bare", "step", "in turn"))
    gib = num_layers * one.received_bytes / GIB
    return Row(
        num_ranks=one.num_ranks,
        context_tokens=one.context_tokens,
        layer_bytes=one.layer_bytes,
        received_bytes=one.received_bytes,
        gib_per_s=gib / statistics.median(gather_s),
        bare_gib_per_s=gib / statistics.median(bare_s),
        ratio=_median(lambda bare, ours: bare / ours, bare_s, gather_s),
        gather_s=statistics.median(gather_s) / num_layers,
        attend_s=statistics.median(wall_s["attend"]) / num_layers,
        hidden=_hidden(ranks, "step"),
        chunk_hidden=_hidden(ranks, "chunk"),
        step_s=statistics.median(step_s),
        in_turn_s=statistics.median(in_turn_s),
        saved=_median(lambda step, in_turn: 1 - step / in_turn, step_s, in_turn_s),
        scratch_bytes=max(rank.scratch_bytes for rank in ranks),
    )


def _slowest(times: Sequence[Sequence[float]]) -> list[float]:
    return [max(each) for each in zip(*times, strict=True)]


def _median(of: Callable[[float, float], float], one: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(map(of, one, other))


def _hidden(ranks: Sequence[Measured], work: str) -> float:
    shares = (_median(_share_hidden, rank.exposed_s[work], rank.busy_s[work]) for rank in ranks)
    return statistics.mean(shares)


def _share_hidden(exposed_s: float, busy_s: float) -> float:
    return max(0.0, 1 - exposed_s / busy_s)


_COLUMNS: tuple[tuple[str, int, Callable[[Row], str]], ...] = (
    ("ranks", 5, lambda row: f"{row.num_ranks}"),
    ("context", 9, lambda row: f"{row.context_tokens:,}"),
    ("layer MiB", 11, lambda row: f"{row.layer_bytes / MIB:.1f}"),
    ("GiB/s", 7, lambda row: f"{row.gib_per_s:.2f}"),
    ("bare", 6, lambda row: f"{row.bare_gib_per_s:.2f}"),
    ("ratio", 7, lambda row: f"{row.ratio:.2f}"),
    ("gather ms", 11, lambda row: f"{row.gather_s * 1e3:.2f}"),
    ("attend ms", 11, lambda row: f"{row.attend_s * 1e3:.2f}"),
    ("hidden", 8, lambda row: f"{row.hidden:.0%}"),
    ("in chunk", 10, lambda row: f"{row.chunk_hidden:.0%}"),
    ("step ms", 9, lambda row: f"{row.step_s * 1e3:.0f}"),
    ("in turn", 9, lambda row: f"{row.in_turn_s * 1e3:.0f}"),
    ("saved", 7, lambda row: f"{row.saved:.0%}"),
    ("scratch MiB", 13, lambda row: f"{row.scratch_bytes / MIB:.1f}"),
    ("layers", 8, lambda row: f"{row.scratch_layers:.2f}"),
)


def table(rows: Sequence[Row]) -> str:
    """One line a row."""
    return "\n".join([titles(_COLUMNS), *(f"{shown(_COLUMNS, row)} {row.verdict}" for row in rows)])


def draw(rows: Sequence[Row], path: Path) -> None:
    """Rates beside the bare ones, and the share that attention hides, by context."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    rates, hidden = figure.subplots(1, 2)
    for num_ranks, colour in zip(
        sorted({row.num_ranks for row in rows}), ("#4c78a8", "#f58518", "#54a24b"), strict=False
    ):
        shown = [row for row in rows if row.num_ranks == num_ranks]
        contexts = [row.context_tokens for row in shown]
        rates.plot(contexts, [row.gib_per_s for row in shown], color=colour, marker="o", label=f"{num_ranks} ranks")
        rates.plot(contexts, [row.bare_gib_per_s for row in shown], color=colour, linestyle=":", label="bare")
        hidden.plot(contexts, [row.hidden for row in shown], color=colour, marker="o", label=f"{num_ranks} ranks")
        chunks = [row.chunk_hidden for row in shown]
        hidden.plot(contexts, chunks, color=colour, linestyle="--", label=f"by {CHUNK_TOKENS} tokens")
    rates.set_title("received by one rank, GiB/s", fontsize=10)
    hidden.set_title("share of the gather that attention hides", fontsize=10)
    for axes, top in ((rates, None), (hidden, 1.0)):
        axes.set_xscale("log", base=2)
        contexts = sorted({row.context_tokens for row in rows})
        axes.set_xticks(contexts, [f"{tokens / 1024:g}K" for tokens in contexts])
        axes.set_ylim(0, top)
        axes.set_xlabel("tokens of context")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    with rc_context({"svg.hashsalt": "gather"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
