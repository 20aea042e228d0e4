"""What ranks did over time, as an SVG and as a few lines of characters.

Owner: `cli/`. Thread: the console's main thread. Pure: texts from entries.
"""

from __future__ import annotations

import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from math import floor, log10

from vllm_hicache.checker import Difference, DifferenceKind
from vllm_hicache.entries import Entry, EntryKind
from vllm_hicache.names import OpId

Logs = Mapping[int, Sequence[Entry]]
_WIDTH, _LEFT, _RIGHT, _LANE_GAP = 1200, 76, 24, 8
_LANES_HEIGHT = 1400
_MAX_OPS = 160
_MIN_BAR = 1.5
_LABEL_ROW, _LABEL_BAR = 10, 26
_COLOURS = {"load": "#4477aa", "save": "#e69f00", "flush": "#3aa18a", "unknown": "#b8b8b8"}
_RED = "#c1121f"
_LINE_CHARS, _MAX_LINES = 150, 4
_MAX_TEXT_RANKS, _TEXT_CHARS = 8, 72
_LETTERS = {
    EntryKind.CAPACITY: "C",
    EntryKind.HIT: "H",
    EntryKind.EVICT: "E",
    EntryKind.LOCK: "L",
    EntryKind.ACK: "A",
    EntryKind.DONE: "D",
    EntryKind.UNLOCK: "U",
}


@dataclass(slots=True)
class Span:
    """One operation on one rank, from its lock to its unlock. Unix times; `end_s` is the log's end while it is open."""

    op: OpId
    kind: str
    start_s: float
    end_s: float
    is_open: bool = True
    done_s: float | None = None


def spans(log: Sequence[Entry]) -> dict[OpId, Span]:
    """Return the operations whose lock is in a rank's log."""
    found: dict[OpId, Span] = {}
    kinds: dict[OpId, str] = {}
    for entry in log:
        span = found.get(entry.op)
        if entry.kind == EntryKind.HIT:
            kinds[entry.op] = "load"
        elif entry.kind == EntryKind.EVICT:
            kinds.setdefault(entry.op, "save")
        elif entry.kind == EntryKind.LOCK:
            # The first entry of a log that was cut may be a load's or a save's lock.
            kind = kinds.pop(entry.op, "flush" if entry is not log[0] else "unknown")
            found[entry.op] = Span(entry.op, kind, entry.time_s, log[-1].time_s)
        elif entry.kind == EntryKind.DONE and span is not None:
            span.done_s = entry.time_s
        elif entry.kind == EntryKind.UNLOCK and span is not None:
            span.end_s, span.is_open = entry.time_s, False
    return found


def picture(logs: Logs, first: Difference | None) -> str:
    """Return an SVG: a lane a rank, a bar an operation, a tick where the rank was done, a line at the difference.

    Of many operations it shows those around the first difference, or else the last ones.
    """
    by_rank = {rank: spans(log) for rank, log in logs.items()}
    extents = _extents(by_rank)
    shown = _shown(extents, first)
    return _Picture(by_rank, {op: extents[op] for op in shown}, len(extents), first).text()


def timeline(logs: Logs, first: Difference) -> list[str]:
    """Return lines of characters: a row a rank with the entries of the operation that differs first, if it is one."""
    if not first.op:
        return []
    concerned = [entry.time_s for log in logs.values() for entry in log if entry.op == first.op]
    if first.kind != DifferenceKind.MISSING:
        concerned.append(first.time_s)
    start_s, end_s = min(concerned), max(concerned)
    column_s = max(end_s - start_s, 1e-6) / (_TEXT_CHARS - 13)
    start_s -= 6 * column_s
    ranks = sorted(logs, key=lambda rank: (rank not in _witnesses(first), rank))[:_MAX_TEXT_RANKS]
    rows = [f"  rank {rank:3}  {_row(logs[rank], first.op, start_s, column_s)}" for rank in sorted(ranks)]
    mark = " " * min(_TEXT_CHARS - 1, _column(first.time_s, start_s, column_s))
    left_out = [f"  and {len(logs) - len(ranks)} further ranks"] if len(logs) > len(ranks) else []
    return [
        f"  operation {first.op} from {_clock(start_s)} UTC on, {_duration(column_s)} a column",
        *rows,
        f"            {mark}^",
        *left_out,
        "  H hit, E eviction, L lock, A ack, D done, U unlock, = in use, . other operations",
    ]


def _witnesses(first: Difference) -> set[int]:
    """The lowest rank of each value."""
    lowest: dict[int | str, int] = {}
    for rank, value in sorted(first.values.items()):
        lowest.setdefault(value, rank)
    return set(lowest.values())


def _row(log: Sequence[Entry], op: OpId, start_s: float, column_s: float) -> str:
    """One rank's row: letters of the operation over `=` over dots over blanks."""
    cells = [" "] * _TEXT_CHARS
    span = spans(log).get(op)
    for entry in log:
        column = _column(entry.time_s, start_s, column_s)
        if entry.op != op and 0 <= column < _TEXT_CHARS:
            cells[column] = "."
    if span is not None:
        end = min(_TEXT_CHARS, _column(span.end_s, start_s, column_s))
        for column in range(_column(span.start_s, start_s, column_s), end):
            cells[column] = "="
    column = -1
    for entry in (each for each in log if each.op == op):
        # Entries of one moment stand side by side, so that none hides another.
        column = max(column + 1, _column(entry.time_s, start_s, column_s))
        if column < _TEXT_CHARS:
            cells[column] = _LETTERS[entry.kind]
    return "".join(cells).rstrip()


def _column(time_s: float, start_s: float, column_s: float) -> int:
    return floor((time_s - start_s) / column_s + 1e-6)


def _extents(by_rank: Mapping[int, Mapping[OpId, Span]]) -> dict[OpId, tuple[float, float]]:
    """From the first lock to the last unlock of all ranks, operations in order of that first lock."""
    found: dict[OpId, tuple[float, float]] = {}
    for one in by_rank.values():
        for op, span in one.items():
            start_s, end_s = found.get(op, (span.start_s, span.end_s))
            found[op] = (min(start_s, span.start_s), max(end_s, span.end_s))
    return dict(sorted(found.items(), key=lambda item: (item[1][0], item[0])))


def _shown(extents: Mapping[OpId, tuple[float, float]], first: Difference | None) -> list[OpId]:
    """Up to 160 operations in a row."""
    ops, limit = list(extents), _MAX_OPS
    if first is None:
        return ops[-limit:]
    starts = (index for index, op in enumerate(ops) if op == first.op or extents[op][0] > first.time_s)
    middle = next(starts, len(ops))
    begin = max(0, min(middle - limit // 2, len(ops) - limit))
    return ops[begin : begin + limit]


@dataclass(slots=True)
class _Picture:
    """The drawing's measures. `extents` are the operations shown, `num_ops` all there are."""

    by_rank: Mapping[int, Mapping[OpId, Span]]
    extents: Mapping[OpId, tuple[float, float]]
    num_ops: int
    first: Difference | None
    rows: dict[OpId, int] = field(default_factory=dict)
    num_rows: int = 1
    row_height: int = 10
    top: int = 0
    start_s: float = 0.0
    end_s: float = 1.0

    def __post_init__(self) -> None:
        num_lanes = max(1, len(self.by_rank))
        self.row_height = 12 if num_lanes <= 4 else 8 if num_lanes <= 12 else 5
        most_rows = max(3, (_LANES_HEIGHT // num_lanes - _LANE_GAP) // self.row_height)
        self._pack()
        self.num_rows = min(most_rows, self.num_rows)
        is_whole = len(self.extents) == self.num_ops
        times = [start_s for start_s, _ in self.extents.values()]
        times += [end_s for _, end_s in self.extents.values() if is_whole]
        # A report is missing long after its operation, and a window that reached there would show nothing else.
        if self.first and (is_whole or self.first.kind != DifferenceKind.MISSING):
            times.append(self.first.time_s)
        self.start_s, self.end_s = min(times, default=0.0), max(times, default=1.0)
        margin_s = max(self.end_s - self.start_s, 1e-6) * (0.01 if is_whole else 0.03)
        self.start_s, self.end_s = self.start_s - margin_s, self.end_s + margin_s
        self.top = 64 + 18 * len(self._sentence())

    def text(self) -> str:
        height = self._bottom() + 40
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
                f'height="{height}" font-family="sans-serif" font-size="12">',
                f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
                *self._heading(),
                *self._axis(),
                *self._lanes(),
                *self._mark(),
                "</svg>\n",
            ]
        )

    def _pack(self) -> None:
        """Give every operation a row, the same in all lanes, in which no other one overlaps it."""
        ends = list[float]()
        for op, (start_s, end_s) in self.extents.items():
            row = next((index for index, end in enumerate(ends) if end <= start_s), len(ends))
            ends[row : row + 1] = [end_s]
            self.rows[op] = row
        self.num_rows = max(1, len(ends))

    def _x(self, time_s: float) -> float:
        """Where a time lies, at the edge when it lies outside."""
        time_s = min(max(time_s, self.start_s), self.end_s)
        share = (time_s - self.start_s) / (self.end_s - self.start_s)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def _lane_height(self) -> int:
        return self.num_rows * self.row_height + _LANE_GAP

    def _bottom(self) -> int:
        return self.top + len(self.by_rank) * self._lane_height()

    def _sentence(self) -> list[str]:
        sentence = "no difference" if self.first is None else f"first difference: {self.first}"
        return textwrap.wrap(sentence, _LINE_CHARS, max_lines=_MAX_LINES, placeholder=" …")

    def _heading(self) -> Iterator[str]:
        which = f"{len(self.extents)} of {self.num_ops}" if len(self.extents) < self.num_ops else f"{self.num_ops}"
        title = f"{len(self.by_rank)} ranks, {which} operations, from {_clock(self.start_s)} UTC on"
        yield f'<text x="{_LEFT}" y="24" font-size="16" fill="#222222">{title}</text>'
        colour = "#222222" if self.first is None else _RED
        for index, line in enumerate(self._sentence()):
            yield f'<text x="{_LEFT}" y="{44 + 18 * index}" fill="{colour}">{escape(line)}</text>'
        x, y = _LEFT, self.top - 18
        for kind, colour in _COLOURS.items():
            yield f'<rect x="{x}" y="{y - 9}" width="18" height="10" fill="{colour}"/>'
            yield f'<text x="{x + 23}" y="{y}" fill="#444444">{kind}</text>'
            x += 72
        yield f'<path d="M{x + 14} {y - 10}v12" stroke="#000000" stroke-width="1.5"/>'
        yield f'<text x="{x + 22}" y="{y}" fill="#444444">done on that rank; faded: still open</text>'

    def _axis(self) -> Iterator[str]:
        step_s = _step(self.end_s - self.start_s)
        for index in range(floor((self.end_s - self.start_s) / step_s) + 1):
            x = self._x(self.start_s + index * step_s)
            yield f'<path d="M{x:.1f} {self.top - 4}V{self._bottom()}" stroke="#e4e4e4"/>'
            yield (
                f'<text x="{x:.1f}" y="{self._bottom() + 16}" text-anchor="middle" fill="#444444">'
                f"{_duration(index * step_s)}</text>"
            )

    def _lanes(self) -> Iterator[str]:
        odd = _odd(self.first)
        for lane, (rank, one) in enumerate(sorted(self.by_rank.items())):
            y = self.top + lane * self._lane_height()
            middle = y + (self._lane_height() - _LANE_GAP) / 2 + 4
            rule = y + self._lane_height() - _LANE_GAP / 2
            colour = "#222222"
            if rank in odd:
                colour = f'{_RED}" font-weight="bold'
                yield (
                    f'<rect x="0" y="{y - _LANE_GAP / 2:.1f}" width="{_WIDTH}" height="{self._lane_height()}" '
                    f'fill="{_RED}" fill-opacity="0.09"/>'
                )
            yield f'<text x="{_LEFT - 10}" y="{middle:.1f}" text-anchor="end" fill="{colour}">rank {rank}</text>'
            yield f'<path d="M{_LEFT} {rule:.1f}H{_WIDTH - _RIGHT}" stroke="#cccccc" stroke-width="0.7"/>'
            for op in self.extents:
                if op in one:
                    yield from self._bar(one[op], rank, y + self.rows[op] % self.num_rows * self.row_height)

    def _bar(self, span: Span, rank: int, y: int) -> Iterator[str]:
        x, height = self._x(span.start_s), self.row_height - 1
        width = max(_MIN_BAR, self._x(span.end_s) - x)
        is_marked = self.first is not None and span.op == self.first.op
        outline = f' stroke="{_RED}" stroke-width="1.6"' if is_marked else ""
        opacity = "0.35" if span.is_open else "0.9"
        title = f"rank {rank}, {span.kind} {span.op}, {_duration(span.end_s - span.start_s)}"
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{_COLOURS[span.kind]}" '
            f'fill-opacity="{opacity}"{outline}><title>{title}{", open" if span.is_open else ""}</title></rect>'
        )
        if self.row_height >= _LABEL_ROW and width >= _LABEL_BAR:
            yield f'<text x="{x + 3:.1f}" y="{y + height - 2}" font-size="9" fill="#000000">{span.op}</text>'
        if span.done_s is not None and span.done_s <= self.end_s:
            yield f'<path d="M{self._x(span.done_s):.1f} {y}v{height}" stroke="#000000" stroke-width="1.5"/>'

    def _mark(self) -> Iterator[str]:
        if self.first is not None:
            x = self._x(self.first.time_s)
            yield (
                f'<path d="M{x:.1f} {self.top - 12}V{self._bottom()}" stroke="{_RED}" stroke-width="1.5" '
                'stroke-dasharray="5 3"/>'
            )


def _odd(first: Difference | None) -> set[int]:
    """The ranks that are not with the most, nor, where two groups are equal, with the lowest."""
    if first is None:
        return set()
    if first.kind == DifferenceKind.MISSING:
        return set(first.values)
    common, _ = Counter(value for _, value in sorted(first.values.items())).most_common(1)[0]
    return {rank for rank, value in first.values.items() if value != common}


def _step(length_s: float) -> float:
    """A round step that cuts a length in at most ten."""
    power: float = 10.0 ** floor(log10(length_s / 10))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= length_s / 10)


def _duration(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us" if seconds else "0"


def _clock(time_s: float) -> str:
    whole_s, rest_ms = divmod(floor(time_s * 1000), 1000)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(whole_s))}.{rest_ms:03}"
