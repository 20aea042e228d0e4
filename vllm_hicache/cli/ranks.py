"""`vllm-hicache ranks DIR`: recorded logs of an engine's ranks compared, and the first difference named.

Owner: `cli/`. Thread: the console's main thread. Reads what `vllm_hicache.ranklog` writes. Exit status: 0 no
difference, 1 a difference, 2 logs that cannot be read or have nothing in common.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from vllm_hicache.checker import Difference, aligned, compare
from vllm_hicache.cli.output import EXIT_BAD, EXIT_GOOD, QUIET_S, Json, emit, table
from vllm_hicache.cli.ranks_picture import picture, timeline
from vllm_hicache.entries import Entry, EntryKind
from vllm_hicache.errors import ConfigError
from vllm_hicache.names import OpId
from vllm_hicache.ranklog import LOG_FORMAT, digest_of, log_paths

DEFAULT_DEADLINE_S = 30.0
_NUM_FURTHER = 20
_APART_S = 10.0
"""An engine does not start again within this, and clocks of its hosts do not differ by more, seconds."""
_NAME = re.compile(r"rank-(\d+)\.jsonl")
_KINDS = {kind.value: kind for kind in EntryKind}


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank's log as read.

    Attributes:
        started_s: Unix time at which the rank began to record.
        is_torn: its last line was not written to its end, and is left out.
    """

    rank: int
    started_s: float
    entries: Sequence[Entry]
    is_torn: bool


@dataclass(frozen=True, slots=True)
class _Row:
    """What is told of one rank. `digest` covers what was compared."""

    rank: int
    num_entries: int
    started_s: float
    first_s: float
    last_s: float
    digest: str


@dataclass(frozen=True, slots=True)
class _Result:
    """All findings: `num_compared` is ordered entries of each rank, `notes` what a reader should know."""

    rows: Sequence[_Row]
    num_compared: int
    differences: Sequence[Difference]
    notes: Sequence[str]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `ranks`; `run` serves it."""
    parser = subparsers.add_parser("ranks", help="compare recorded logs of an engine's ranks")
    parser.add_argument("directory", metavar="DIR", help="where rank-<n>.jsonl of all ranks lie")
    parser.add_argument(
        "--json", metavar="PATH", nargs="?", const="-", help="write the result as JSON to PATH, or to stdout"
    )
    parser.add_argument("--svg", metavar="PATH", help="draw the ranks over time to PATH")
    parser.add_argument(
        "--deadline",
        type=float,
        default=DEFAULT_DEADLINE_S,
        metavar="SECONDS",
        help=f"a report is missing so long after another rank's, {DEFAULT_DEADLINE_S:g} by default",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do what the parsed arguments ask; return the exit status.

    Raises:
        ConfigError: arguments that make no sense, or logs that cannot be read or compared.
    """
    if not 0 <= args.deadline < math.inf:
        raise ConfigError(f"--deadline {args.deadline:g} is no time to wait: give seconds, 0 or more")
    records = read_records(Path(args.directory))
    logs = {record.rank: record.entries for record in records}
    result = _compared(records, logs, args.deadline)
    first = next(iter(result.differences), None)
    if args.svg is not None:
        _write(Path(args.svg), picture(logs, first))
    around = timeline(logs, first) if first is not None and args.svg is None else []
    emit(args, _json(result), _lines(result, around))
    return EXIT_BAD if result.differences else EXIT_GOOD


def read_records(directory: Path) -> list[RankRecord]:
    """Read the logs of all ranks, by rank.

    Raises:
        ConfigError: there are none, one cannot be read, or they are of several runs.
    """
    try:
        matches = [_NAME.fullmatch(path.name) for path in directory.iterdir()]
    except OSError as error:
        raise ConfigError(f"cannot read the directory {directory}: {error.strerror}; give another one") from error
    ranks = sorted(int(match[1]) for match in matches if match)
    if not ranks:
        raise ConfigError(f"0 logs named rank-<n>.jsonl are in {directory}: give the directory that an engine records")
    shown = tqdm(ranks, desc="read", unit="rank", file=sys.stderr, disable=None, delay=QUIET_S)
    records = [_read_rank(directory, rank) for rank in shown]
    newest = max(records, key=lambda each: each.started_s)
    for record in records:
        if not record.entries:
            raise ConfigError(
                f"the log of rank {record.rank} has 0 entries: compare when the engine has run for longer"
            )
        before_s = newest.started_s - record.entries[-1].time_s
        if before_s > _APART_S:
            raise ConfigError(
                f"the log of rank {record.rank} ends {before_s:.1f} s before that of rank {newest.rank} begins, so "
                "they are of two runs: move the earlier one's files away"
            )
    return records


def _read_rank(directory: Path, rank: int) -> RankRecord:
    """Read one rank's file, behind its old one where that is of the same run."""
    path, old_path = log_paths(directory, rank)
    record = _read_file(path, rank)
    if not old_path.exists():
        return record
    old = _read_file(old_path, rank)
    if old.started_s != record.started_s:
        return record
    return RankRecord(rank, record.started_s, [*old.entries, *record.entries], record.is_torn)


def _read_file(path: Path, rank: int) -> RankRecord:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; make it readable") from error
    is_torn = bool(lines.pop())
    try:
        header = json.loads(lines[0] if lines else b"")
        version, said, started_s = header["format"], header["rank"], float(header["started_s"])
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}, line 1, is no header of a rank's log: remove the file") from error
    if (version, said) != (LOG_FORMAT, rank):
        raise ConfigError(
            f"{path} has format {version} and is of rank {said}, but format {LOG_FORMAT} of rank {rank} is expected: "
            "use the release that wrote it, and leave its name"
        )
    return RankRecord(rank, started_s, list(_entries(path, lines)), is_torn)


def _entries(path: Path, lines: Sequence[bytes]) -> Iterator[Entry]:
    for number, line in enumerate(lines[1:], 2):
        try:
            fields = json.loads(line)
            op, value, time_s = fields["op"], fields["value"], fields["time_s"]
            if type(op) is not int or type(value) is not int or not math.isfinite(time_s):
                raise ValueError("not of the right type")
            yield Entry(OpId(op), _KINDS[fields["kind"]], value, time_s)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{path}, line {number}, is no entry of a rank's log: remove the file") from error


def _compared(records: Sequence[RankRecord], logs: Mapping[int, Sequence[Entry]], deadline_s: float) -> _Result:
    ordered = {rank: [entry for entry in log if entry.kind != EntryKind.DONE] for rank, log in aligned(logs).items()}
    num_compared = min(map(len, ordered.values()))
    if not num_compared:
        raise ConfigError(f"no operation is in the logs of all {len(logs)} ranks: record a shorter run")
    rows = [
        _Row(
            record.rank,
            len(record.entries),
            record.started_s,
            record.entries[0].time_s,
            record.entries[-1].time_s,
            digest_of(ordered[record.rank][:num_compared]),
        )
        for record in records
    ]
    notes = [f"the last line of rank {each.rank} is half-written and left out" for each in records if each.is_torn]
    cut = [each.rank for each in records if each.entries[0].kind != EntryKind.CAPACITY]
    notes += [f"the beginning of rank {rank} is no longer there" for rank in cut]
    notes += ["one rank alone is compared with nothing"] if len(records) == 1 else []
    return _Result(rows, num_compared, compare(logs, deadline_s), notes)


def _lines(result: _Result, around: Sequence[str]) -> list[str]:
    rows = [
        (row.rank, row.num_entries, _utc(row.first_s), f"{row.last_s - row.first_s:.1f} s", row.digest)
        for row in result.rows
    ]
    agree = "digests agree" if _agree(result) else "digests differ"
    lines = [
        *table(["rank", "entries", "begins (UTC)", "lasts", "digest"], rows),
        f"{agree} over {result.num_compared} ordered entries of each rank",
        *result.notes,
    ]
    if not result.differences:
        return [*lines, "no difference"]
    first, *further = result.differences
    lines += [f"first difference: {first}", *around]
    lines += [f"then: {each}" for each in further[:_NUM_FURTHER]]
    num_left = len(further) - _NUM_FURTHER
    return [*lines, f"... and {num_left} more: --json has all"] if num_left > 0 else lines


def _json(result: _Result) -> Json:
    differences = [
        {"op": each.op, "kind": each.kind, "time_s": each.time_s, "values": each.values, "text": str(each)}
        for each in result.differences
    ]
    return {
        "ok": not differences,
        "ranks": [asdict(row) for row in result.rows],
        "num_compared": result.num_compared,
        "digests_agree": _agree(result),
        "notes": result.notes,
        "first": differences[0] if differences else None,
        "differences": differences,
    }


def _agree(result: _Result) -> bool:
    return len({row.digest for row in result.rows}) == 1


def _utc(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time_s))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; give another path") from error
