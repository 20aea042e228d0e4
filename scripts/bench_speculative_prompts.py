"""Prompts made of the repository's own docs: the same for the same docs, and no two share a page."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, cycle, islice
from pathlib import Path

from matrix_cut import PAGE_TOKENS

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("README.md", "docs/*.md", "docs/decisions/*.md")

Encode = Callable[[str], list[int]]
"""Turns text into token ids."""


def docs_text(root: Path = ROOT) -> str:
    """All docs, one behind the other."""
    files = chain.from_iterable(sorted(root.glob(pattern)) for pattern in SOURCES)
    return "\n\n".join(file.read_text() for file in files)


def lengths_between(shortest: int, longest: int, num_prompts: int) -> list[int]:
    """Evenly spread; a single one lies in the middle."""
    if num_prompts == 1:
        return [(shortest + longest) // 2]
    return [shortest + (longest - shortest) * number // (num_prompts - 1) for number in range(num_prompts)]


def prompts_of(lengths: Sequence[int], text: str, encode: Encode) -> dict[int, list[int]]:
    """Token ids by number, of exactly these lengths. Each begins with its number, and somewhere else in the text.

    Raises:
        ValueError: the text is empty, or two prompts have the first page in common.
    """
    tokens = encode(text)
    if not tokens:
        raise ValueError(f"there is no text in {', '.join(SOURCES)}: nothing can be made of it")
    prompts = {}
    for number, length in enumerate(lengths):
        start = len(tokens) * number // len(lengths)
        endless = chain(encode(f"Part {number + 1} of {len(lengths)}.\n\n"), cycle(tokens[start:] + tokens[:start]))
        prompts[number] = list(islice(endless, length))
    first_pages = {tuple(prompt[:PAGE_TOKENS]) for prompt in prompts.values()}
    if len(first_pages) < len(prompts):
        raise ValueError(f"{len(prompts)} prompts have {len(first_pages)} first pages: they would hit each other's")
    return prompts


def few_of(prompts: Mapping[int, list[int]], num_prompts: int) -> dict[int, list[int]]:
    """So many of them, shortest and longest among them, evenly spread; all where there are no more."""
    numbers = sorted(prompts)
    if num_prompts >= len(numbers):
        return dict(prompts)
    return {numbers[place]: prompts[numbers[place]] for place in lengths_between(0, len(numbers) - 1, num_prompts)}


def digest_of(prompts: Mapping[int, list[int]]) -> str:
    """Says whether two runs had the same prompts."""
    return hashlib.sha256(json.dumps([prompts[number] for number in sorted(prompts)]).encode()).hexdigest()
