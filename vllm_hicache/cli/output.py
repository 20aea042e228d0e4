"""How `vllm-hicache store` writes: aligned tables and JSON to stdout, progress to stderr.

Owner: `cli/`. Thread: the console's main thread.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from vllm_hicache.errors import ConfigError

EXIT_GOOD, EXIT_BAD, EXIT_ERROR = 0, 1, 2
Json = Mapping[str, object]
_Item = TypeVar("_Item")
_BAR_CHARS = 40
QUIET_S = 1.0
"""A bar is shown on a terminal once a verb takes longer, seconds."""


def emit(args: argparse.Namespace, result: Json, lines: Sequence[str]) -> None:
    """Print the lines, and write the result where `--json` says. Raises ConfigError."""
    text = json.dumps(result, indent=2) + "\n"
    if args.json == "-":
        sys.stdout.write(text)
        return
    if args.json is not None:
        try:
            Path(args.json).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {args.json}: {error.strerror}; give another path or -") from error
    print("\n".join(lines))


def progress(args: argparse.Namespace, what: str, items: Iterable[_Item], total: int | None = None) -> Iterator[_Item]:
    """Yield `items` under a bar on stderr: on a terminal where it takes over a second, always with `--progress`."""
    yield from tqdm(
        items,
        desc=what,
        total=total,
        unit="object",
        file=sys.stderr,
        disable=False if args.progress else None,
        delay=0.0 if args.progress else QUIET_S,
    )


def table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return aligned lines: numbers to the right, text to the left, a rule below the titles."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    right = [bool(rows) and isinstance(rows[0][index], int) for index in range(len(titles))]

    def line(row: Sequence[str]) -> str:
        fitted = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        return "  ".join(fitted).rstrip()

    return [line(titles), "  ".join("-" * width for width in widths), *map(line, cells)]


def bar(share: float) -> str:
    """Return a bar of 40 characters, filled to `share` of 1."""
    filled = round(min(1.0, max(0.0, share)) * _BAR_CHARS)
    return "[" + "#" * filled + "." * (_BAR_CHARS - filled) + "]"


def age(seconds: float) -> str:
    """Return a duration in its largest whole unit, as in `3.5h`."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.1f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def plain(text: str) -> str:
    """Return `text` as printable ASCII: a manifest or a file name must not steer the terminal."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)
