"""The report that `doctor` writes: sections of lines, each with its mark, printed as they come and kept for JSON.

Owner: `cli/`. Thread: the console's main thread.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from vllm_hicache.errors import ConfigError

BY_ENGINE = "decided by the engine"
Value = str | int | float | bool | None


class Mark(StrEnum):
    """How a line turned out."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Line:
    """One finding. `value` is what stands behind the text, numbers in the unit that the name says."""

    mark: Mark
    name: str
    text: str
    value: Value = None


class Report:
    """Collects the sections; prints each as it comes, unless stdout is for the JSON."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._sections: dict[str, list[Line]] = {}

    def add(self, section: str, lines: Iterator[Line]) -> None:
        """Take a section's lines and print them."""
        found = self._sections[section] = list(lines)
        width = max(len(line.name) for line in found)
        self._print(section)
        for line in found:
            self._print(f"  {line.mark:4}  {line.name:{width}}  {line.text}")
        self._print("")

    def finish(self, path: str | None) -> bool:
        """Print the verdict, write the JSON to `path` (`-`: stdout); True when nothing fails."""
        counts = Counter(line.mark for lines in self._sections.values() for line in lines)
        good = not counts[Mark.FAIL]
        told = ", ".join(f"{counts[mark]} {mark}" for mark in Mark)
        self._print(f"{'fine' if good else 'something fails'}: {told}")
        sections = {name: [asdict(line) for line in lines] for name, lines in self._sections.items()}
        text = json.dumps({"ok": good, "sections": sections}, indent=2) + "\n"
        if path == "-":
            sys.stdout.write(text)
        elif path is not None:
            try:
                Path(path).write_text(text, encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"cannot write {path}: {error.strerror}; give another path or -") from error
        return good

    def _print(self, text: str) -> None:
        """Printable ASCII alone: a manifest or a path must not steer the terminal."""
        if not self._quiet:
            print("".join(char if " " <= char <= "~" else "?" for char in text), flush=True)


ok, warn, fail = partial(Line, Mark.OK), partial(Line, Mark.WARN), partial(Line, Mark.FAIL)
