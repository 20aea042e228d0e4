"""Tables as text: columns with a title, a width, and what they show of a row. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Row = TypeVar("Row")
Columns = Sequence[tuple[str, int, Callable[[Row], str]]]


def titles(columns: Columns[Row]) -> str:
    """The table's head."""
    return "".join(f"{title:>{width}}" for title, width, _ in columns)


def shown(columns: Columns[Row], row: Row) -> str:
    """A row's line."""
    return "".join(f"{show(row):>{width}}" for _, width, show in columns)
