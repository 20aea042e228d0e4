"""What the benchmark of speculative decoding found: rows, aims in words and a table. No engine here.

Acceptance at a position is drafted tokens accepted there by times that tokens were drafted, as vLLM counts both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import reduce
from operator import attrgetter

from bench_speculative_engine import Sample, Take
from columns import shown, titles

LOSS_LIMIT = 0.01
"""Of the acceptance after a device hit, at every position."""


class Draft(StrEnum):
    """What an engine does with a draft: the connector's two ways, none at all, and vLLM without the connector."""

    PACKED = "packed"
    SIDECAR = "sidecar"
    NONE = "none"
    ALONE = "vLLM alone"


Found = Mapping[Draft, Sequence[Sample]]

_REFERENCE_TAKES = {Take.COLD: Take.COLD, Take.RECOMPUTED: Take.COLD}
_RESTORED = {Take.HOST: "host restore", Take.STORE: "store restore"}


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of some samples together: times that tokens were drafted, and how many were accepted at each position."""

    drafts: int
    accepted: tuple[int, ...]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Acceptance:
        """Over all samples."""
        counted = [cls(sample.counts.drafts, sample.counts.accepted) for sample in samples]
        return reduce(cls.__add__, counted, cls(0, ()))

    def __add__(self, other: Acceptance) -> Acceptance:
        if not (self.accepted and other.accepted):
            return Acceptance(self.drafts + other.drafts, self.accepted or other.accepted)
        together = tuple(map(sum, zip(self.accepted, other.accepted, strict=True)))
        return Acceptance(self.drafts + other.drafts, together)

    @property
    def rates(self) -> tuple[float, ...]:
        """By position; none where nothing was drafted."""
        return tuple(count / self.drafts for count in self.accepted) if self.drafts else ()

    @property
    def per_draft(self) -> float | None:
        """Tokens accepted of a draft, all positions together."""
        return sum(self.rates) if self.drafts else None

    def beside(self, reference: Acceptance) -> Ratio | None:
        """By a reference; where that accepts nothing there is nothing to lose."""
        pairs = list(zip(self.rates, reference.rates, strict=False))
        if not pairs:
            return None
        each = [ours / theirs if theirs else 1.0 for ours, theirs in pairs]
        theirs = sum(reference.rates)
        return Ratio(sum(self.rates) / theirs if theirs else 1.0, min(each))


@dataclass(frozen=True, slots=True)
class Ratio:
    """Acceptance by a reference's: of all positions together, and the least of the positions."""

    mean: float
    worst: float

    @property
    def holds(self) -> bool:
        """Whether no position lost more than the limit."""
        return min(self.mean, self.worst) >= 1 - LOSS_LIMIT


@dataclass(frozen=True, slots=True)
class Row:
    """One take in one kind of engine. Times are medians over prompts.

    Attributes:
        acceptance: by position.
        hit_tokens: of all prompts, by tier; `device_hit_tokens` what a device hit of the same prompts has in all.
        bare_pages: pages restored without draft state.
        to_device, to_cold: acceptance by that of these takes in the same kind of engine, of the same prompts.
        same_tokens: prompts whose answer is that of the device hit; `None` where there was none.
        ttft_to_peer, total_to_peer: medians of ratios to vLLM alone, cold or after a device hit, by prompt.
    """

    take: Take
    draft: Draft
    num_prompts: int
    prompt_tokens: int
    num_drafts: int
    acceptance: tuple[float, ...]
    accepted_per_draft: float | None
    ttft_s: float
    tpot_s: float
    total_s: float
    hit_tokens: dict[str, int]
    device_hit_tokens: int
    bare_pages: int
    to_device: Ratio | None
    to_cold: Ratio | None
    same_tokens: int | None
    ttft_to_peer: float | None
    total_to_peer: float | None

    @property
    def num_hit(self) -> int:
        """Tokens hit in all tiers."""
        return sum(self.hit_tokens.values())

    def to_json(self) -> dict[str, object]:
        """All fields, with the ratio to a device hit on top."""
        return {**asdict(self), "ratio_to_device": self.to_device.mean if self.to_device else None}


def rows_of(found: Found, lengths: Mapping[int, int]) -> list[Row]:
    """A row for each take of each kind of engine; `lengths` are the prompts' by number."""
    peers = found.get(Draft.ALONE, ())
    return [
        _row(draft, take, taken, _Beside(samples, taken), peers, lengths)
        for draft, samples in found.items()
        for take in Take
        if (taken := _taken(samples, take))
    ]


class _Beside:
    """What another take of the same kind of engine has of the same prompts."""

    def __init__(self, samples: Sequence[Sample], taken: Sequence[Sample]) -> None:
        numbers = {sample.prompt for sample in taken}
        self._samples = [sample for sample in samples if sample.prompt in numbers]
        self._taken = taken

    def ratio(self, take: Take) -> Ratio | None:
        """Acceptance by its acceptance; `None` where it lacks a prompt or nothing is drafted."""
        others = _taken(self._samples, take)
        if len(others) != len(self._taken):
            return None
        return Acceptance.of(self._taken).beside(Acceptance.of(others))

    def same_tokens(self) -> int | None:
        """Prompts with the device hit's answer."""
        pairs = list(_pairs(self._taken, _taken(self._samples, Take.DEVICE)))
        return sum(one.tokens == other.tokens for one, other in pairs) if pairs else None

    def device_hits(self) -> int:
        return sum(sum(sample.counts.hit_tokens.values()) for sample in _taken(self._samples, Take.DEVICE))


def _row(
    draft: Draft,
    take: Take,
    taken: Sequence[Sample],
    beside: _Beside,
    peers: Sequence[Sample],
    lengths: Mapping[int, int],
) -> Row:
    acceptance = Acceptance.of(taken)
    peer = _taken(peers, _REFERENCE_TAKES.get(take, Take.DEVICE)) if draft != Draft.ALONE else []
    return Row(
        take=take,
        draft=draft,
        num_prompts=len(taken),
        prompt_tokens=sum(lengths[sample.prompt] for sample in taken),
        num_drafts=acceptance.drafts,
        acceptance=acceptance.rates,
        accepted_per_draft=acceptance.per_draft,
        ttft_s=statistics.median(sample.ttft_s for sample in taken),
        tpot_s=statistics.median(sample.tpot_s for sample in taken),
        total_s=statistics.median(sample.total_s for sample in taken),
        hit_tokens=_hits(taken),
        device_hit_tokens=beside.device_hits(),
        bare_pages=sum(sample.counts.bare_pages for sample in taken),
        to_device=beside.ratio(Take.DEVICE),
        to_cold=beside.ratio(Take.COLD),
        same_tokens=beside.same_tokens(),
        ttft_to_peer=_paired(taken, peer, attrgetter("ttft_s")),
        total_to_peer=_paired(taken, peer, attrgetter("total_s")),
    )


def _taken(samples: Sequence[Sample], take: Take) -> list[Sample]:
    return [sample for sample in samples if sample.take == take]


def _hits(samples: Sequence[Sample]) -> dict[str, int]:
    hits: dict[str, int] = {}
    for sample in samples:
        for tier, count in sample.counts.hit_tokens.items():
            hits[tier] = hits.get(tier, 0) + count
    return hits


def _pairs(samples: Sequence[Sample], others: Sequence[Sample]) -> Iterator[tuple[Sample, Sample]]:
    by_prompt = {other.prompt: other for other in others}
    return ((sample, by_prompt[sample.prompt]) for sample in samples if sample.prompt in by_prompt)


def _paired(samples: Sequence[Sample], peers: Sequence[Sample], seconds: Callable[[Sample], float]) -> float | None:
    ratios = [seconds(sample) / seconds(peer) for sample, peer in _pairs(samples, peers)]
    return statistics.median(ratios) if ratios else None


@dataclass(frozen=True, slots=True)
class Aim:
    """What was to be, whether it is, and the numbers. `met` is `None` where it was not measured."""

    name: str
    met: bool | None
    numbers: str

    @property
    def sentence(self) -> str:
        """In words."""
        word = {True: "met", False: "NOT MET", None: "not measured"}[self.met]
        return f"{self.name}: {word}{' (' if self.numbers else ''}{self.numbers}{')' if self.numbers else ''}"


def aims_of(rows: Sequence[Row]) -> list[Aim]:
    """Restored drafts, and the two controls."""
    by_name = {(row.draft, row.take): row for row in rows}
    restored = [
        _restored(f"draft={draft}, {name} within {LOSS_LIMIT:.0%} of the device hit", by_name.get((draft, take)))
        for draft in (Draft.PACKED, Draft.SIDECAR)
        for take, name in _RESTORED.items()
    ]
    served, recomputed = (by_name.get((Draft.PACKED, take)) for take in (Take.SERVED, Take.RECOMPUTED))
    return [*restored, _served(served), _recomputed(recomputed)]


def _restored(name: str, row: Row | None) -> Aim:
    """As much accepted, of as many tokens that were not computed."""
    if row is None or row.to_device is None:
        return Aim(name, None, "")
    whole = row.num_hit >= row.device_hit_tokens > 0
    numbers = f"{_shown(row.to_device)}; {row.num_hit:,} tokens restored, a device hit has {row.device_hit_tokens:,}"
    return Aim(name, row.to_device.holds and whole and row.bare_pages == 0, numbers)


def _served(row: Row | None) -> Aim:
    """A target that comes back without its draft must show, or what is equal elsewhere says nothing."""
    name = "control: a target restored without its draft is accepted less"
    if row is None or row.to_device is None:
        return Aim(name, None, "")
    numbers = f"{_shown(row.to_device)}; {row.bare_pages:,} pages without draft state"
    return Aim(name, not row.to_device.holds and row.bare_pages > 0 and row.num_hit > 0, numbers)


def _recomputed(row: Row | None) -> Aim:
    name = f"control: draft_miss=recompute takes nothing from that store, within {LOSS_LIMIT:.0%} of cold"
    if row is None or row.to_cold is None:
        return Aim(name, None, "")
    numbers = f"{_shown(row.to_cold)}; {row.num_hit:,} tokens restored"
    return Aim(name, row.to_cold.holds and row.num_hit == 0, numbers)


def _shown(ratio: Ratio) -> str:
    return f"acceptance {ratio.mean:.3f} of it, at the worst position {ratio.worst:.3f}"


_COLUMNS: tuple[tuple[str, int, Callable[[Row], str]], ...] = (
    ("prompts", 8, lambda row: f"{row.num_prompts}"),
    ("accepted by position", 22, lambda row: " ".join(f"{rate:.3f}" for rate in row.acceptance) or "-"),
    ("a draft", 9, lambda row: _or_dash(row.accepted_per_draft, ".3f")),
    ("x device", 10, lambda row: _or_dash(row.to_device.mean if row.to_device else None, ".3f")),
    ("worst", 7, lambda row: _or_dash(row.to_device.worst if row.to_device else None, ".3f")),
    ("TTFT s", 9, lambda row: f"{row.ttft_s:.3f}"),
    ("TPOT ms", 9, lambda row: f"{row.tpot_s * 1e3:.1f}"),
    ("total s", 9, lambda row: f"{row.total_s:.2f}"),
    ("hit", 7, lambda row: f"{row.num_hit / row.prompt_tokens:.1%}"),
    ("bare", 6, lambda row: f"{row.bare_pages}"),
    ("as device", 11, lambda row: _or_dash(row.same_tokens, "d")),
    ("TTFT x peer", 13, lambda row: _or_dash(row.ttft_to_peer, ".2f")),
    ("total", 7, lambda row: _or_dash(row.total_to_peer, ".2f")),
)


def _or_dash(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def table(rows: Sequence[Row]) -> str:
    """One line a row."""
    head = f"{'draft':<12}{'take':<12}{titles(_COLUMNS)}"
    return "\n".join([head, *(f"{row.draft:<12}{row.take:<12}{shown(_COLUMNS, row)}" for row in rows)])
