"""What the reuse matrix found: figures of a cell, what is wrong with it, a table and a picture. No engine here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo_report import machine
from matrix_cut import PAGE_TOKENS
from matrix_engine import Answer, Take
from matrix_pages import Difference, assemble, compare

LOGPROB_LIMIT = 1e-4
"""A restored answer and a device hit's do the same work: their log-probabilities are equal to four decimals."""

NAME_WIDTH = 19

if TYPE_CHECKING:
    from matplotlib.patches import Rectangle

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PromptFigures:
    """One prompt in one cell.

    Attributes:
        expected: tokens that the writer's pages can give; `restored` by the request, `stored` by the connector's
            metric for the store.
        pages: the restored pages beside the writer's, those apart in which a token was computed again.
        recomputed: the page whose last token was computed again beside the writer's; None without one.
        token_values: values that one token has in a slab.
        num_torn: slabs of the writer or the reader that are not the same on all ranks that hold them.
        cold: the restored pages beside what the reader computes itself.
        own: what the reader computes beside what it computes a second time.
        logprob_diff: largest difference to vLLM's own hit in the same engine, which did `same_work`.
    """

    num_tokens: int
    expected: int
    restored: int
    stored: int
    pages: Difference
    recomputed: Difference | None
    token_values: int
    num_torn: int
    cold: Difference
    own: Difference
    same_work: bool
    tokens_equal: bool
    logprob_diff: float

    @classmethod
    def of(cls, num_tokens: int, written: Mapping[str, Take], read: Mapping[str, Take]) -> PromptFigures:
        """From a writer's and a reader's takes of the same prompt."""
        expected = expected_tokens(num_tokens)
        num_whole = expected // PAGE_TOKENS
        restored, hit = read["restored"].answer, read["hit"].answer
        theirs, ours = assemble(written["cold"].pieces), assemble(read["restored"].pieces)
        cold, again = assemble(read["cold"].pieces), assemble(read["cold_again"].pieces)
        parted = theirs.slabs.shape[0] > num_whole
        return cls(
            num_tokens=num_tokens,
            expected=expected,
            restored=restored.cached,
            stored=restored.stored,
            pages=compare(theirs.slabs[:num_whole], ours.slabs[:num_whole]),
            recomputed=compare(theirs.slabs[num_whole:], ours.slabs[num_whole:]) if parted else None,
            token_values=theirs.slabs.shape[3] // (2 * PAGE_TOKENS),
            num_torn=theirs.num_torn + ours.num_torn,
            cold=compare(ours.slabs[:num_whole], cold.slabs[:num_whole]),
            own=compare(cold.slabs, again.slabs),
            same_work=restored.cached == hit.cached,
            tokens_equal=restored.tokens == hit.tokens,
            logprob_diff=logprob_difference(restored, hit),
        )

    @property
    def problems(self) -> list[str]:
        """What is wrong, a sentence each."""
        checks = {
            f"restored {self.restored} tokens, {self.expected} were expected": self.restored == self.expected,
            f"the metric counts {self.stored} tokens from the store": self.stored == self.expected,
            f"{self.pages.num_unequal} of {self.pages.num_slabs} slabs are not the writer's, "
            f"first (page, layer, head) {self.pages.first_unequal}": not self.pages.num_unequal,
            f"{self.num_torn} slabs differ between ranks that hold the same head": not self.num_torn,
            "more than the last token of a page was computed again": self.recomputed is None
            or self.recomputed.most_values <= self.token_values,
            "vLLM's own hit computed another number of tokens": self.same_work,
            "the tokens are not those of vLLM's own hit": self.tokens_equal,
            f"log-probabilities differ by {self.logprob_diff:.2g} from vLLM's own hit": self.logprob_diff
            <= LOGPROB_LIMIT,
        }
        return [f"{self.num_tokens} tokens: {problem}" for problem, holds in checks.items() if not holds]


@dataclass(frozen=True, slots=True)
class Cell:
    """One reader that read what one writer wrote; without figures there is an error."""

    model: str
    writer: str
    reader: str
    seconds: float
    prompts: list[PromptFigures]
    error: str | None = None

    @property
    def problems(self) -> list[str]:
        """What is wrong, a sentence each; empty for a cell that holds."""
        found = [problem for prompt in self.prompts for problem in prompt.problems]
        if self.error is not None:
            return [*found, self.error]
        return found if self.prompts else ["nothing was measured"]

    @property
    def verdict(self) -> str:
        """In one word."""
        return "FAILS" if self.problems else "ok"

    @property
    def restored(self) -> int:
        """Tokens of all prompts that were restored."""
        return sum(prompt.restored for prompt in self.prompts)

    @property
    def num_slabs(self) -> int:
        """Slabs of whole restored pages."""
        return sum(prompt.pages.num_slabs for prompt in self.prompts)

    @property
    def num_unequal(self) -> int:
        """Those that are not the writer's."""
        return sum(prompt.pages.num_unequal for prompt in self.prompts)


def expected_tokens(num_tokens: int) -> int:
    """Tokens that are restored of a prompt whose full pages are all stored: one is always left to compute."""
    return min(num_tokens // PAGE_TOKENS * PAGE_TOKENS, num_tokens - 1)


def logprob_difference(one: Answer, other: Answer) -> float:
    """Largest difference up to and including the first token that differs."""
    largest = 0.0
    for token, its_token, logprob, its_logprob in zip(
        one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True
    ):
        largest = max(largest, abs(logprob - its_logprob))
        if token != its_token:
            break
    return largest


def decimals(difference: float) -> int:
    """Decimals to which two numbers that differ by so much are equal."""
    return max(0, math.floor(-math.log10(2 * difference)))


def assemble_result(cells: Sequence[Cell], versions: Mapping[str, str], seconds: float) -> Result:
    """Everything, as JSON."""
    return {
        "ok": bool(cells) and not any(cell.problems for cell in cells),
        "cells": [{**asdict(cell), "problems": cell.problems} for cell in cells],
        "seconds": seconds,
        "versions": dict(versions),
        "machine": machine(),
        "notes": {
            "pages": "restored slabs (page, layer, kv head) beside the writer's, every byte",
            "cold": "restored pages beside those that the reader computes itself, as bytes and as bfloat16 values",
            "own": "pages that the reader computes beside the same computed by it a second time",
            "logprob_diff": "restored answer beside vLLM's own prefix-cache hit in the same engine",
        },
    }


def table(cells: Sequence[Cell]) -> str:
    """For each model writers by readers, and a line for each cell."""
    models = [[cell for cell in cells if cell.model == model] for model in names(cells, "model")]
    return "\n\n".join(f"{of_model[0].model}\n{square(of_model)}\n\n{lines(of_model)}" for of_model in models)


def names(cells: Sequence[Cell], field: str) -> list[str]:
    """A field's values, in the order in which they come."""
    return list(dict.fromkeys(getattr(cell, field) for cell in cells))


def square(cells: Sequence[Cell]) -> str:
    """Verdicts of one model: a row for each writer, a column for each reader."""
    readers = names(cells, "reader")
    rows = [f"{'writes / reads':<{NAME_WIDTH}}" + "".join(f"{reader:>8}" for reader in readers)]
    for writer in names(cells, "writer"):
        verdicts = {cell.reader: cell.verdict for cell in cells if cell.writer == writer}
        rows.append(f"{writer:<{NAME_WIDTH}}" + "".join(f"{verdicts.get(reader, '-'):>8}" for reader in readers))
    return "\n".join(rows)


def lines(cells: Sequence[Cell]) -> str:
    """One model's figures, a line for each cell."""
    heads = ("restored", "slabs equal", "reader's own", "off by", "twice", "log-probs", "seconds")
    return "\n".join([f"{'':<{NAME_WIDTH}}{'':<7}" + "".join(f"{head:>14}" for head in heads), *map(line, cells)])


def line(cell: Cell) -> str:
    """A cell's figures: of several prompts the sum, or the worst."""
    name = f"{cell.writer + ' -> ' + cell.reader:<{NAME_WIDTH}}{cell.verdict:<7}"
    if not cell.prompts:
        return f"{name}{(cell.error or 'nothing was measured').splitlines()[0]}"
    figures = (
        f"{cell.restored:,}/{sum(prompt.expected for prompt in cell.prompts):,}",
        f"{cell.num_slabs - cell.num_unequal:,}/{cell.num_slabs:,}",
        f"{min(prompt.cold.share_equal for prompt in cell.prompts):.2%}",
        f"{max(prompt.cold.largest for prompt in cell.prompts):.3g}",
        f"{min(prompt.own.share_equal for prompt in cell.prompts):.2%}",
        nearness(max(prompt.logprob_diff for prompt in cell.prompts)),
        f"{cell.seconds:.0f}",
    )
    return name + "".join(f"{figure:>14}" for figure in figures)


def nearness(difference: float) -> str:
    """A difference in words."""
    return "equal" if difference == 0 else f"{decimals(difference)} decimals"


def draw(cells: Sequence[Cell], path: Path) -> None:
    """The matrix as a picture: one square a cell, green where it holds."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    models = names(cells, "model")
    figure = Figure(figsize=(3.4 * len(models) + 0.6, 3.6), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        shown = [cell for cell in cells if cell.model == model]
        writers, readers = names(shown, "writer"), names(shown, "reader")
        for cell in shown:
            place = (readers.index(cell.reader), writers.index(cell.writer))
            colour = "#f3b0a8" if cell.problems else "#bfe3c0"
            axes.add_patch(_square(place, colour))
            axes.text(*place, _words(cell), ha="center", va="center", fontsize=8)
        axes.set_xticks(range(len(readers)), readers)
        axes.set_yticks(range(len(writers)), writers)
        axes.set_xlim(-0.5, len(readers) - 0.5)
        axes.set_ylim(len(writers) - 0.5, -0.5)
        axes.set_title(model, fontsize=10)
        axes.set_xlabel("reads")
        axes.set_ylabel("writes")
        axes.set_aspect("equal")
    with rc_context({"svg.hashsalt": "matrix"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _square(place: tuple[int, int], colour: str) -> Rectangle:
    from matplotlib.patches import Rectangle

    return Rectangle((place[0] - 0.48, place[1] - 0.48), 0.96, 0.96, facecolor=colour, edgecolor="white")


def _words(cell: Cell) -> str:
    if not cell.prompts:
        return "no figures"
    return f"{cell.restored:,} tokens\n{cell.num_slabs - cell.num_unequal:,} of {cell.num_slabs:,}\nslabs equal"
