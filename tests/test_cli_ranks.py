"""`vllm-hicache ranks`: recorded logs read, compared, told and drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from vllm_hicache.cli import main as front
from vllm_hicache.cli.ranks import read_records
from vllm_hicache.entries import EntryKind
from vllm_hicache.errors import ConfigError
from vllm_hicache.names import OpId, PageKey, Slot
from vllm_hicache.plan import Ack, OpReport, PageMove, SaveOp
from vllm_hicache.ranklog import RankLog

CAPACITY, HIT, EVICT, LOCK, ACK, UNLOCK, DONE = EntryKind
START_S = 1_790_000_000.0
SVG = "{http://www.w3.org/2000/svg}"
Row = tuple[int, EntryKind, int, float]


def life(op: int, start_s: float, hits: int = 4, length_s: float = 0.8) -> list[Row]:
    """A load that runs for `length_s` seconds."""
    end_s = start_s + length_s
    return [
        (op, HIT, hits, start_s),
        (op, LOCK, 4, start_s),
        (op, DONE, 4, end_s),
        (op, ACK, 4, end_s),
        (op, UNLOCK, 4, end_s),
    ]


def lives(num_ops: int, odd: int = 0) -> list[Row]:
    """A second each; of the operation `odd` the hit length is another one."""
    rows = [row for op in range(1, num_ops + 1) for row in life(op, float(op), 2 if op == odd else 4)]
    return [(0, CAPACITY, 9, 0.5), *rows]


def texts(rank: int, rows: Sequence[Row], started_s: float = START_S) -> list[str]:
    header = {"rank": rank, "started_s": started_s, "format": 1}
    names = ("op", "kind", "value", "time_s")
    fields = [dict(zip(names, (*row[:3], START_S + row[3]), strict=True)) for row in rows]
    return [json.dumps(each) for each in (header, *fields)]


def write(folder: Path, rank: int, rows: Sequence[Row], suffix: str = "", started_s: float = START_S) -> Path:
    path = folder / f"rank-{rank}{suffix}.jsonl"
    path.write_text("\n".join(texts(rank, rows, started_s)) + "\n")
    return path


def differing(folder: Path, num_ops: int = 3, num_ranks: int = 2, odd: int = 2) -> str:
    """Logs of which the last rank differs in the operation `odd`."""
    for rank in range(num_ranks):
        write(folder, rank, lives(num_ops, odd if rank == num_ranks - 1 else 0))
    return str(folder)


def silent(folder: Path, num_ops: int) -> str:
    """Logs of which rank 1 never reports operation 3."""
    write(folder, 0, lives(num_ops))
    write(folder, 1, [row for row in lives(num_ops) if row[:2] != (3, DONE)])
    return str(folder)


def unequal(folder: Path) -> str:
    """Logs that differ in capacity."""
    write(folder, 0, lives(3))
    write(folder, 1, [(0, CAPACITY, 8, 0.5), *lives(3)[1:]])
    return str(folder)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = front.main(["ranks", *arguments])
    return status, capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert front.main(["ranks", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_logs_without_a_difference_are_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1, 10):
        write(tmp_path, rank, lives(3))
    status, text = run(capsys, str(tmp_path))
    lines = text.splitlines()
    assert status == 0
    assert [line.split()[:2] for line in lines[2:5]] == [["0", "16"], ["1", "16"], ["10", "16"]]
    assert lines[5:] == ["digests agree over 13 ordered entries of each rank", "no difference"]


def test_real_logs_of_two_ranks_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        log = RankLog(rank, 4, tmp_path)
        log.agreed(4)
        log.begin(SaveOp(OpId(1), (PageMove(PageKey(b"k" * 32), Slot(0), ()),)))
        log.done(OpReport(rank, OpId(1), 1, 1))
        log.consume(Ack(OpId(1), 1, 1))
        log.close()
    status, text = run(capsys, str(tmp_path), "--json")
    told = json.loads(text)
    assert (status, told["ok"], told["num_compared"]) == (0, True, 5)
    assert [each["digest"] for each in told["ranks"]] == [log.digest] * 2


def test_the_first_difference_is_one_sentence_with_a_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = run(capsys, differing(tmp_path))
    lines = text.splitlines()
    assert status == 1
    assert lines[4] == "digests differ over 13 ordered entries of each rank"
    assert lines[5] == "first difference: operation 2: ranks differ in hit length: rank 0 has 4, rank 1 has 2"
    assert lines[6] == "  operation 2 from 2026-09-21 14:13:21.918 UTC on, 13.6 ms a column"
    assert lines[7] == "  rank   0       HL" + "=" * 57 + "DAU"
    assert lines[8] == lines[7].replace("0", "1")
    assert lines[9] == " " * 17 + "^"


def test_a_timeline_shows_eight_ranks_and_one_of_each_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, text = run(capsys, differing(tmp_path, num_ranks=20))
    shown = [int(line.split()[1]) for line in text.splitlines() if line.startswith("  rank ")]
    assert shown == [0, 1, 2, 3, 4, 5, 6, 19]
    assert "  and 12 further ranks" in text.splitlines()


def test_an_operation_that_is_still_open_fills_its_row_to_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 0, lives(9))
    write(tmp_path, 1, [row for row in lives(9) if row[:2] not in ((2, ACK), (2, UNLOCK))])
    _, text = run(capsys, str(tmp_path))
    rows = [line for line in text.splitlines() if line.startswith("  rank ")]
    assert rows[0].count("U") == 1
    assert rows[1].endswith("=")
    assert max(map(len, rows)) <= 84


def test_a_timeline_of_a_missing_report_ends_with_its_operation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, text = run(capsys, silent(tmp_path, 50))
    assert "  operation 3 from 2026-09-21 14:13:22.918 UTC on, 13.6 ms a column" in text.splitlines()


def test_a_difference_of_no_operation_has_no_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, unequal(tmp_path))
    assert status == 1
    assert text.splitlines()[-1] == "first difference: start: ranks differ in capacity: rank 0 has 9, rank 1 has 8"


def test_up_to_twenty_further_differences_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, lives(30))
    write(tmp_path, 1, [(op, kind, 1 if kind == HIT else value, s) for op, kind, value, s in lives(30)])
    _, text = run(capsys, str(tmp_path))
    lines = text.splitlines()
    assert lines[-2].startswith("then: operation 21: ranks differ in hit length")
    assert lines[-1] == "... and 9 more: --json has all"
    assert sum(line.startswith("then: ") for line in lines) == 20


def test_json_holds_all_differences_with_their_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "result.json"
    status, text = run(capsys, differing(tmp_path), "--json", str(target))
    told = json.loads(target.read_text())
    assert text.startswith("rank  entries")
    assert (status, told["ok"], told["digests_agree"]) == (1, False, False)
    assert told["differences"] == [told["first"]]
    assert told["first"] == {
        "op": 2,
        "kind": "hit length",
        "time_s": START_S + 2,
        "values": {"0": 4, "1": 2},
        "text": "operation 2: ranks differ in hit length: rank 0 has 4, rank 1 has 2",
    }


def test_the_deadline_decides_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    silent(tmp_path, 9)
    assert run(capsys, str(tmp_path), "--deadline", "10")[0] == 0
    status, text = run(capsys, str(tmp_path), "--deadline", "4")
    assert status == 1
    assert "first difference: operation 3: missing report: rank 1: silent for 6.0 s" in text


@pytest.mark.parametrize("deadline", ["-1", "nan", "inf"])
def test_a_deadline_that_is_none_is_refused(deadline: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is no time to wait" in refused(capsys, differing(tmp_path), "--deadline", deadline)


def test_a_full_log_is_read_behind_its_old_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = lives(9, odd=2)
    write(tmp_path, 0, lives(9))
    write(tmp_path, 1, rows[:20], ".old")
    write(tmp_path, 1, rows[20:])
    status, text = run(capsys, str(tmp_path))
    assert status == 1
    assert "operation 2: ranks differ in hit length" in text


def test_an_old_part_of_an_earlier_run_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    differing(tmp_path, odd=0)
    write(tmp_path, 1, lives(3, odd=1), ".old", started_s=START_S - 100)
    assert run(capsys, str(tmp_path))[0] == 0


def test_a_log_that_was_cut_says_so_and_its_rest_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 0, lives(9))
    write(tmp_path, 1, lives(9, odd=7)[13:])
    status, text = run(capsys, str(tmp_path))
    assert status == 1
    assert "the beginning of rank 1 is no longer there" in text.splitlines()
    assert "digests differ over 24 ordered entries of each rank" in text.splitlines()
    assert "first difference: operation 7: ranks differ in hit length" in text


def test_a_half_written_last_line_is_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    differing(tmp_path, odd=0)
    path = tmp_path / "rank-1.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    status, text = run(capsys, str(tmp_path))
    assert status == 0
    assert "the last line of rank 1 is half-written and left out" in text.splitlines()
    assert len(read_records(tmp_path)[1].entries) == 15


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"op":1,"kind":"lock","value":1}',
        '{"op":1,"kind":"unknown","value":1,"time_s":1.0}',
        '{"op":"1","kind":"lock","value":1,"time_s":1.0}',
        '{"op":1,"kind":"lock","value":1.5,"time_s":1.0}',
        '{"op":1,"kind":"lock","value":1,"time_s":NaN}',
        '{"op":1,"kind":[],"value":1,"time_s":1.0}',
        '{"op":1,"kind":"lock","value":1,"time_s":"1"}',
        "\xff",
    ],
)
def test_a_damaged_line_is_named(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = texts(0, lives(3))
    lines[4] = line
    (tmp_path / "rank-0.jsonl").write_text("\n".join(lines) + "\n", encoding="latin-1")
    assert "rank-0.jsonl, line 5, is no entry of a rank's log" in refused(capsys, str(tmp_path))


@pytest.mark.parametrize("header", ["", "{}", "3", "{"])
def test_a_file_without_a_header_is_named(header: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.jsonl").write_text(header and f"{header}\n")
    assert "rank-0.jsonl, line 1, is no header" in refused(capsys, str(tmp_path))


def test_a_file_of_another_rank_or_format_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 1, lives(1)).rename(tmp_path / "rank-0.jsonl")
    assert "has format 1 and is of rank 1, but format 1 of rank 0" in refused(capsys, str(tmp_path))
    header = json.dumps({"rank": 0, "started_s": START_S, "format": 2})
    (tmp_path / "rank-0.jsonl").write_text(f"{header}\n")
    assert "has format 2 and is of rank 0" in refused(capsys, str(tmp_path))


def test_logs_of_two_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, lives(3))
    write(tmp_path, 1, [(op, kind, value, s + 100) for op, kind, value, s in lives(3)], started_s=START_S + 100)
    assert "the log of rank 0 ends 96.2 s before that of rank 1 begins" in refused(capsys, str(tmp_path))


def test_logs_that_cannot_be_compared_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "0 logs named rank-<n>.jsonl are in" in refused(capsys, str(tmp_path))
    assert "cannot read the directory" in refused(capsys, str(tmp_path / "gone"))
    write(tmp_path, 0, lives(3))
    write(tmp_path, 1, [])
    assert "the log of rank 1 has 0 entries" in refused(capsys, str(tmp_path))
    write(tmp_path, 1, life(7, 1.0))
    assert "no operation is in the logs of all 2 ranks" in refused(capsys, str(tmp_path))


def test_a_file_that_cannot_be_read_or_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "gone" / "picture.svg")
    assert "cannot write" in refused(capsys, differing(tmp_path), "--svg", target)
    (tmp_path / "rank-7.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"cannot read .*rank-7.jsonl"):
        read_records(tmp_path)


def test_one_rank_alone_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, lives(3))
    status, text = run(capsys, str(tmp_path))
    assert status == 0
    assert "one rank alone is compared with nothing" in text.splitlines()


def drawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[ElementTree.Element, list[str]]:
    """The picture of a folder's logs, and the titles of its bars."""
    target = folder / "picture.svg"
    run(capsys, str(folder), "--svg", str(target))
    root = ElementTree.fromstring(target.read_text())
    return root, [title.text or "" for title in root.iter(f"{SVG}title")]


def bars(root: ElementTree.Element) -> list[ElementTree.Element]:
    return [rect for rect in root.iter(f"{SVG}rect") if len(rect)]


def words(root: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("num_ranks", [2, 32])
def test_a_picture_has_a_lane_a_rank_and_a_bar_an_operation(
    num_ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    differing(tmp_path, 3, num_ranks)
    root, titles = drawn(tmp_path, capsys)
    assert titles == [f"rank {rank}, load {op}, 800 ms" for rank in range(num_ranks) for op in (1, 2, 3)]
    lanes = [text for text in root.iter(f"{SVG}text") if (text.text or "").startswith("rank ")]
    assert [lane.text for lane in lanes] == [f"rank {rank}" for rank in range(num_ranks)]
    assert [lane.text for lane in lanes if lane.get("font-weight") == "bold"] == [f"rank {num_ranks - 1}"]
    assert any("ranks differ in hit length" in text for text in words(root))


def test_a_picture_marks_the_difference_and_its_operation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    differing(tmp_path)
    root, _ = drawn(tmp_path, capsys)
    [line] = [path for path in root.iter(f"{SVG}path") if path.get("stroke-dasharray")]
    marked = [rect for rect in root.iter(f"{SVG}rect") if rect.get("stroke")]
    assert [rect[0].text for rect in marked] == ["rank 0, load 2, 800 ms", "rank 1, load 2, 800 ms"]
    assert (line.get("d") or "").startswith(f"M{marked[0].get('x')} ")


def test_a_picture_shows_a_difference_before_the_first_operation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unequal(tmp_path)
    root, _ = drawn(tmp_path, capsys)
    [line] = [path.get("d") or "" for path in root.iter(f"{SVG}path") if path.get("stroke-dasharray")]
    assert float(line[1:].split()[0]) < float(bars(root)[0].get("x") or 0) - 100


def test_a_picture_of_a_missing_report_marks_the_silent_rank_and_stays_with_its_operation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        rows = [(op, kind, value, s / 10) for op, kind, value, s in lives(1000)]
        write(tmp_path, rank, [row for row in rows if (rank, *row[:2]) != (1, 3, DONE)])
    root, _ = drawn(tmp_path, capsys)
    assert float(bars(root)[0].get("width") or 0) > 4
    bold = [text.text for text in root.iter(f"{SVG}text") if text.get("font-weight") == "bold"]
    assert bold == ["rank 1"]


def test_a_picture_of_many_operations_shows_those_around_the_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    differing(tmp_path, 1000, odd=700)
    root, titles = drawn(tmp_path, capsys)
    assert [int(title.split()[3].rstrip(",")) for title in titles[:160]] == list(range(620, 780))
    assert len(titles) == 320
    assert words(root)[0].startswith("2 ranks, 160 of 1000 operations, from 2026-09-21 14:")


def test_a_picture_of_many_equal_operations_shows_the_last_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    differing(tmp_path, 1000, odd=0)
    root, titles = drawn(tmp_path, capsys)
    assert [int(title.split()[3].rstrip(",")) for title in titles[:160]] == list(range(841, 1001))
    assert "no difference" in words(root)


def test_kinds_of_operations_have_their_colours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[Row] = [(9, LOCK, 1, 0.9), *life(1, 1.0), (2, EVICT, 1, 2.0), (2, LOCK, 1, 2.0), (3, LOCK, 1, 3.0)]
    rows += [(4, HIT, 1, 4.0), (4, EVICT, 1, 4.0), (4, LOCK, 1, 4.0)]
    write(tmp_path, 0, rows)
    root, titles = drawn(tmp_path, capsys)
    assert [title.split(",")[1].split()[0] for title in titles] == ["unknown", "load", "save", "flush", "load"]
    assert [title.endswith(", open") for title in titles] == [True, False, True, True, True]
    fills = [rect.get("fill") for rect in bars(root)]
    assert len(set(fills)) == 4
    assert fills[1] == fills[4]


def test_a_tick_shows_when_a_rank_was_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, [*life(1, 1.0)[:2], (1, DONE, 4, 1.4), (1, ACK, 4, 1.8), (1, UNLOCK, 4, 1.8)])
    root, _ = drawn(tmp_path, capsys)
    [bar] = bars(root)
    [tick] = [path.get("d") or "" for path in root.iter(f"{SVG}path") if f" {bar.get('y')}v" in (path.get("d") or "")]
    middle = float(bar.get("x") or 0) + float(bar.get("width") or 0) / 2
    assert float(tick[1:].split()[0]) == pytest.approx(middle, abs=0.2)


def test_operations_at_the_same_time_do_not_cover_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = sorted([*life(1, 1.0), *life(2, 1.5), *life(3, 1.9)], key=lambda row: row[3])
    write(tmp_path, 0, rows)
    root, _ = drawn(tmp_path, capsys)
    heights = [rect.get("y") for rect in bars(root)]
    assert heights[0] == heights[2] != heights[1]


def test_a_picture_stays_within_its_frame(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, lives(400))
    write(tmp_path, 1, [row for row in lives(400) if row[:2] not in ((2, ACK), (2, UNLOCK))])
    root, titles = drawn(tmp_path, capsys)
    ends = [float(rect.get("x") or 0) + float(rect.get("width") or 0) for rect in bars(root)]
    assert max(ends) <= float(root.get("width") or 0) - 20
    # 160 operations fill it, and not the one that is open to the log's end.
    assert float(bars(root)[0].get("width") or 0) > 4
    assert titles[161].endswith("399 s, open")
