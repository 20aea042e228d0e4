"""The store benchmark's parts: rounds, the loopback peer, contenders on files, and verdicts."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import bench_store_run
import pytest
from bench_store_contenders import RawFile, RawSocket
from bench_store_media import FAST, MEDIA, MIB, QUICK_FAST, SLOW, Medium, Plan, contending
from bench_store_report import Aim, Row, summary, table
from bench_store_rounds import Buffer, Contender, Crew, Job, Sample, Taken, read_rounds, write_rounds
from s3_server import environment_of

from vllm_hicache.names import PageKey

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
NUM_BYTES = 64 << 10


class InMemory(Contender):
    """Keeps copies in a dict, and notes who was called in `calls`."""

    def __init__(self, name: str, calls: list[str] | None = None) -> None:
        self.name = name
        self.objects: dict[PageKey, bytes] = {}
        self.calls = calls if calls is not None else []

    def write(self, worker: int, job: Job) -> None:
        self.calls.append(self.name)
        self.objects[job.key] = bytes(job.slot)

    def read(self, worker: int, job: Job) -> Buffer:
        self.calls.append(self.name)
        job.slot[:] = self.objects[job.key]
        return job.slot

    def delete(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            del self.objects[job.key]

    def close(self) -> None:
        """Nothing is held."""


def a_job(number: int, num_bytes: int = NUM_BYTES) -> Job:
    pattern = bytes((number + at) % 251 for at in range(251))
    content = bytearray(pattern * (num_bytes // 251 + 1))[:num_bytes]
    return Job(bench_store_run.key_of(number), memoryview(content))


def empty_slots(jobs: Sequence[Job]) -> list[Job]:
    return [Job(job.key, memoryview(bytearray(job.slot.nbytes))) for job in jobs]


def samples(*wall_s: float, cpu_s: float = 1.0) -> list[Sample]:
    return [Sample(each, cpu_s) for each in wall_s]


def a_row(taken: Taken, store: str = "redis tcp", operation: str = "read", size: int = MIB, fly: int = 1) -> Row:
    return Row(store, "redis-py", operation, size, fly, 16, taken)


def even_row(**changed: object) -> Row:
    taken = {name: samples(1.0, 1.0) for name in ("checked", "bare", "client", "raw")}
    return a_row(taken | changed.pop("taken", {}), **changed)


@pytest.fixture(params=["tcp", "unix"])
def peer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RawSocket]:
    raw = RawSocket(tmp_path / "p" if request.param == "unix" else None)
    yield raw
    raw.close()


def test_every_round_runs_each_contender_once_and_in_turns_backwards() -> None:
    calls: list[str] = []
    contenders = [InMemory(name, calls) for name in "abc"]
    with Crew(1) as crew:
        taken = write_rounds(contenders, crew, [[a_job(1)], [a_job(2)], [a_job(3)]], lambda jobs: None)
    assert "".join(calls) == "abccbaabc"
    assert {name: len(each) for name, each in taken.items()} == {"a": 3, "b": 3, "c": 3}


def test_room_is_made_after_each_round_of_writes() -> None:
    contender, seen = InMemory("a"), []
    rounds = [[a_job(1), a_job(2)], [a_job(3)]]
    with Crew(1) as crew:
        write_rounds([contender], crew, rounds, lambda jobs: seen.append(len(contender.objects)))
    assert seen == [2, 3]


@pytest.mark.parametrize("num_workers", [1, 8])
def test_a_crew_does_every_job_once(num_workers: int) -> None:
    done: list[int] = []
    with Crew(num_workers) as crew:
        sample = crew.run(lambda worker, job: done.append(job.slot[0]), [a_job(each, 1) for each in range(40)])
    assert sorted(done) == list(range(40))
    assert sample.wall_s > 0


def test_a_crew_has_as_many_in_flight_as_it_says() -> None:
    together = threading.Barrier(8)
    with Crew(8) as crew:
        crew.run(lambda worker, job: together.wait(timeout=30), [a_job(each, 1) for each in range(8)])


@pytest.mark.parametrize("num_workers", [1, 8])
def test_what_a_job_raises_ends_the_measurement(num_workers: int) -> None:
    def fail(worker: int, job: Job) -> None:
        raise RuntimeError("lost")

    with Crew(num_workers) as crew, pytest.raises(RuntimeError, match="lost"):
        crew.run(fail, [a_job(1)])


def test_reads_are_timed_after_they_were_found_right() -> None:
    contender, jobs = InMemory("a"), [a_job(1), a_job(2)]
    with Crew(1) as crew:
        write_rounds([contender], crew, [jobs], lambda jobs: None)
        taken = read_rounds([contender], crew, empty_slots(jobs), [job.slot for job in jobs], 4)
    assert len(taken["a"]) == 4


def test_other_bytes_than_were_written_end_the_measurement() -> None:
    contender, jobs = InMemory("a"), [a_job(1), a_job(2)]
    with Crew(1) as crew:
        write_rounds([contender], crew, [jobs], lambda jobs: None)
        contender.objects[jobs[1].key] = contender.objects[jobs[0].key]
        with pytest.raises(RuntimeError, match="a gave other bytes"):
            read_rounds([contender], crew, empty_slots(jobs), [job.slot for job in jobs], 1)


def test_a_read_that_fills_nothing_does_not_pass_for_the_last_round() -> None:
    class Idle(InMemory):
        def read(self, worker: int, job: Job) -> Buffer:
            return job.slot

    jobs = [a_job(1)]
    with Crew(1) as crew, pytest.raises(RuntimeError, match="other bytes"):
        read_rounds([Idle("a")], crew, jobs, [memoryview(bytes(jobs[0].slot))], 1)


def test_the_peer_sends_and_takes_any_number_of_bytes(peer: RawSocket) -> None:
    for size in (1, NUM_BYTES, 3 * MIB, 5):
        job = Job(bench_store_run.key_of(size), memoryview(bytearray(b"\xa5" * size)))
        peer.write(0, job)
        peer.read(0, job)
        assert bytes(job.slot) == b"\xa5" * size


def test_the_peer_serves_several_connections_at_once(peer: RawSocket) -> None:
    with Crew(8) as crew:
        crew.run(peer.write, [a_job(each, MIB) for each in range(24)])
        crew.run(peer.read, [a_job(each, MIB) for each in range(24)])


def test_all_of_a_file_stores_measurements_come_out_and_nothing_is_left(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}?capacity=64MiB"
    with contending(url, lambda: [RawFile(tmp_path / "raw")]) as contenders:
        medium = Medium("file", None, contenders, reclaims=True)
        rows = list(bench_store_run.measure(medium, Plan(NUM_BYTES, 3, 2, 2)))
    assert [(row.operation, row.num_in_flight, row.num_jobs) for row in rows] == [
        ("write", 1, 3),
        ("read", 1, 8),
        ("write", 8, 3),
        ("read", 8, 8),
    ]
    assert all(row.taken.keys() == {"checked", "bare", "raw"} for row in rows)
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size >= NUM_BYTES]
    assert left == []


@pytest.mark.parametrize("name", ["redis-tcp", "redis-unix", "s3"])
def test_every_contender_reads_what_it_wrote_on_a_real_server(
    name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in environment_of("rw").items():
        monkeypatch.setenv(variable, value)
    folder = tmp_path_factory.mktemp("m")  # a socket's path is short
    with MEDIA[name](folder) as medium:
        rows = list(bench_store_run.measure(medium, Plan(NUM_BYTES, 3, 1, 1)))
    assert len(rows) == 4
    assert all(list(row.taken) == ["checked", "bare", "client", "raw"] for row in rows)


def test_a_medium_that_does_not_reclaim_is_never_asked_to(tmp_path: Path) -> None:
    contender = InMemory("checked")
    bare = InMemory("bare")
    medium = Medium("s3", None, [contender, bare], reclaims=False)
    list(bench_store_run.measure(medium, Plan(NUM_BYTES, 2, 1, 3)))
    assert len(contender.objects) == len(bare.objects) == 2 * 3 * 2


def test_a_store_that_does_not_reclaim_is_asked_to_hold_2_gib_at_most() -> None:
    assert sum(plan.written_bytes(num_contenders=4) for plan in SLOW) <= 2 << 30
    assert {plan.object_bytes for plan in FAST} == {256 << 10, MIB, 4 * MIB}
    assert {plan.object_bytes for plan in SLOW} == {256 << 10, MIB, 4 * MIB, 32 * MIB}
    assert all(plan.object_bytes <= MIB for plan in QUICK_FAST)


def test_a_ratio_is_the_median_of_pairs_from_the_same_round() -> None:
    row = even_row(taken={"checked": samples(1.0, 2.0, 4.0), "client": samples(3.0, 2.0, 8.0), "raw": samples(1, 1, 1)})
    assert row.speed_ratio("checked", "client") == 2.0
    assert row.speed_ratio("checked", "raw") == 0.5


def test_speeds_and_cpu_are_of_the_bytes_that_were_moved() -> None:
    row = a_row({"checked": samples(1.0, 2.0, 9.0, cpu_s=0.5), "bare": samples(1.0, 2.0, 9.0)})
    assert row.mib_per_s("checked") == 8.0
    assert row.cpu_s_per_gib("checked") == 0.5 * 64


def test_the_envelopes_cost_is_the_time_that_checks_add() -> None:
    row = a_row({"checked": samples(1.2, 1.1, 1.3), "bare": samples(1.0, 1.0, 1.0)}, store="file")
    assert row.ratios() == {"envelope": pytest.approx(0.2)}
    assert row.verdicts() == {"envelope": "OVER"}


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({}, {"envelope", "client", "raw"}),
        ({"operation": "write"}, {"envelope", "client"}),
        ({"size": 256 << 10}, {"envelope"}),
        ({"store": "s3"}, {"envelope"}),
        ({"store": "s3", "size": 256 << 10}, {"envelope", "client"}),
        ({"store": "s3", "size": 256 << 10, "fly": 8}, {"envelope", "client", "client_cpu"}),
        ({"store": "s3", "size": 32 * MIB}, {"envelope", "client"}),
        ({"store": "s3", "size": 32 * MIB, "operation": "write"}, {"envelope"}),
        ({"store": "file"}, {"envelope"}),
    ],
)
def test_aims_depend_on_store_operation_and_size(changed: dict[str, object], names: set[str]) -> None:
    row = even_row(**changed)
    assert row.aims().keys() == names
    assert row.verdicts().keys() == names


def test_an_aim_has_a_side() -> None:
    assert [Aim(1.2).verdict(value) for value in (1.1, 1.2)] == ["UNDER", "ok"]
    assert [Aim(0.4, at_most=True).verdict(value) for value in (0.4, 0.5)] == ["ok", "OVER"]


def test_the_table_shows_what_was_missed_and_the_summary_counts_it() -> None:
    rows = [even_row(), even_row(store="file", taken={})]
    shown = table(rows)
    assert "1.00 UNDER" in shown
    assert "1.00 ok" in shown
    assert summary(rows).startswith("3 of 4 aims met\n")
    assert "redis tcp read, 1,024 KiB, 1 in flight: client 1.00 is UNDER its aim of 1.2 (1.00 without" in summary(rows)


def test_the_columns_of_the_table_stand_below_their_heads() -> None:
    row = even_row()
    without_client = a_row({name: each for name, each in row.taken.items() if name != "client"}, store="file")
    _, head, *lines = table([row, without_client]).splitlines()
    assert {len(line) for line in lines} == {len(head)}


def test_a_row_as_json_has_all_samples() -> None:
    record = json.loads(json.dumps(even_row().to_json()))
    assert record["wall_s"]["raw"] == [1.0, 1.0]
    assert record["verdicts"] == {"envelope": "ok", "client": "UNDER", "raw": "ok"}
    assert record["bare_ratios"] == {"client": 1.0, "raw": 1.0}


def test_the_command_measures_files_and_writes_json(tmp_path: Path) -> None:
    program = [sys.executable, SCRIPTS / "bench_store_run.py", "--stores", "file", "--quick"]
    ended = subprocess.run(
        [*program, "--json", tmp_path / "result.json"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert [row["operation"] for row in result["rows"]] == ["write", "read"] * 4
    assert result["left_out"] == {}
    assert "file: 16 objects of 256 KiB" in ended.stderr
