"""The handoff benchmark's parts: who is asked what in which order, what is counted, and how it is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import bench_handoff_pairs
import bench_handoff_run
import pytest
from bench_handoff_pairs import NIXL, Handoff, Kind, Pair, nixl_bytes, our_bytes, ours
from bench_handoff_report import Case, Row, draw, ratio_of, side_of, table
from bench_handoff_run import Bench, cases, read_arguments, token_bytes
from bench_store_contenders import RawSocket
from prometheus_client.samples import Sample
from serving_process import Streamed
from serving_servers import FOR_PREFILL

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
MIB = 1 << 20


def a_handoff(**changed: Any) -> Handoff:
    return replace(Handoff(prefill_s=9.0, first_s=1.0, step_s=0.25, received_bytes=10 * MIB, agrees=True), **changed)


def a_row(ratio: float = 1.0, ours_bytes: int = 10 * MIB, **changed: Any) -> Row:
    sides = {"ours": side_of([a_handoff(received_bytes=ours_bytes, **changed)]), "nixl": side_of([a_handoff()])}
    return Row(Case(50, "host"), 1000, 500, 10 * MIB, MIB, 1, sides, ratio, 0.5)


def test_a_side_is_of_medians() -> None:
    times = [a_handoff(first_s=first_s, step_s=step_s) for first_s, step_s in ((1.0, 0.5), (4.0, 0.5), (3.0, 2.0))]
    side = side_of([*times[:2], replace(times[2], agrees=False)])
    assert (side.first_s, side.step_s, side.link_s, side.num_differing) == (3.0, 0.5, 1.0, 1)
    assert side.fastest_s == 1.0


def test_the_ratio_is_the_median_over_rounds_of_one_by_the_other() -> None:
    one, other = ([a_handoff(first_s=first_s) for first_s in times] for times in ((1.0, 6.0, 4.0), (2.0, 2.0, 2.0)))
    assert ratio_of(one, other) == 2.0


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (a_row(1.1), "ok"),
        (a_row(1.11), "SLOW"),
        (a_row(ours_bytes=11 * MIB), "ok"),
        (a_row(ours_bytes=11 * MIB + 1), "BYTES"),
        (a_row(ours_bytes=9 * MIB - 1), "BYTES"),
        (a_row(agrees=False), "DIFFERS"),
    ],
)
def test_a_row_is_judged_by_time_bytes_and_tokens(row: Row, verdict: str) -> None:
    assert row.to_json()["verdict"] == verdict
    assert table([row]).endswith(verdict)


def test_a_table_shows_what_decode_had_and_times_of_both() -> None:
    shown = table([a_row(ratio=0.5, first_s=2.0), replace(a_row(), case=Case(0, "device"))]).splitlines()
    assert "50 % on host" in shown[1]
    assert "nothing" in shown[2]
    sizes, times = ["500", "10.0", "10.0", "10.0"], ["2000", "1000", "0.50", "2.00", "1750", "750", "500", "250"]
    assert shown[1].split()[4:] == [*sizes, *times, "9.0", "ok"]


def test_the_picture_is_the_same_each_time(tmp_path: Path) -> None:
    one, other = tmp_path / "one.svg", tmp_path / "other.svg"
    for path in (one, other):
        draw([a_row()], path)
    assert one.read_bytes() == other.read_bytes()


def test_cases_are_shares_with_or_without_a_tier() -> None:
    assert cases("0,90@host") == (Case(0, "device"), Case(90, "host"))


@pytest.mark.parametrize("text", ["100", "x", "50@disk", "-1"])
def test_what_is_no_case_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_arguments([f"--cases={text}"])
    assert "is no case: give a share below 100" in capsys.readouterr().err


def test_a_quick_run_is_one_round_of_short_prompts() -> None:
    args = read_arguments(["--quick"])
    assert (args.rounds, args.tokens) == (1, 1000)


def test_a_tokens_bytes_are_those_of_all_layers_keys_and_values(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert token_bytes(tmp_path) == 30 * 2 * 3 * 64 * 2
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 128}))
    assert token_bytes(tmp_path) == 30 * 2 * 3 * 128 * 2


def test_each_connector_is_counted_by_its_own_metric() -> None:
    samples = [
        Sample("vllm:hicache_peer_bytes_total", {"direction": "received"}, 5.0),
        Sample("vllm:hicache_peer_bytes_total", {"direction": "sent"}, 7.0),
        Sample("vllm:nixl_bytes_transferred_sum", {}, 11.0),
        Sample("vllm:nixl_bytes_transferred_count", {}, 13.0),
    ]
    assert (our_bytes(samples), nixl_bytes(samples)) == (5, 11)


def test_pairs_are_configured_by_role() -> None:
    kind = ours(peer_transport="nixl")
    assert kind.transfer("kv_consumer")["kv_connector_extra_config"] == {"store": "none", "peer_transport": "nixl"}
    assert [each.transfer("kv_producer")["kv_role"] for each in (kind, NIXL)] == ["kv_producer", "kv_producer"]


@dataclass
class FakeServer:
    """Notes what it is asked, and whether it was awake then."""

    name: str
    notes: list[tuple[Any, ...]]
    awake: bool = True
    received: int = 0

    def __enter__(self) -> FakeServer:
        self.notes.append((self.name, "start"))
        return self

    def __exit__(self, *_: object) -> None:
        self.notes.append((self.name, "stop"))

    def wait_healthy(self) -> None:
        assert self.awake

    def pause(self) -> None:
        self.awake = False

    def resume(self) -> None:
        self.awake = True

    def metrics(self) -> list[Sample]:
        assert self.awake
        return [Sample("bytes", {}, self.received)]

    def post(self, path: str, body: dict[str, object]) -> None:
        assert self.awake
        self.notes.append((self.name, path))

    def complete(self, prompt: Sequence[int], max_tokens: int, **extra: Any) -> dict[str, Any]:
        assert self.awake
        if "kv_transfer_params" in extra:
            self.notes.append((self.name, list(prompt), max_tokens, extra["kv_transfer_params"]))
        return {"kv_transfer_params": {"from": self.name}, "choices": [{"token_ids": [4]}]}

    def stream(self, prompt: Sequence[int], max_tokens: int, **extra: Any) -> Streamed:
        assert self.awake
        self.notes.append((self.name, list(prompt), max_tokens, extra["kv_transfer_params"]))
        self.received += 100 * len(prompt)
        return Streamed(1.0, 2.0, "x", [4, 5, 6], {})


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(bench_handoff_pairs, "_server", lambda kind, role, *_: FakeServer(role, found))
    return found


def a_pair() -> Pair:
    return Pair(Kind("fake", lambda role: {}, lambda samples: round(samples[0].value)), Path("model"), Path("logs"))


def test_decode_goes_on_from_what_prefill_answered(notes: list[tuple[Any, ...]]) -> None:
    with a_pair() as pair:
        first, second = pair.hand_over([1, 2]), pair.hand_over([1, 2, 3], max_tokens=1)
    prefill, decode = "kv_producer", "kv_consumer"
    assert notes[2:4] == [(prefill, [1, 2], 1, FOR_PREFILL), (decode, [1, 2], 3, {"from": prefill})]
    assert (first.first_s, first.step_s, first.received_bytes, first.agrees) == (1.0, 0.5, 200, True)
    assert second.received_bytes == 300
    assert notes[-2:] == [(decode, "stop"), (prefill, "stop")]


def test_a_first_token_that_is_not_prefills_is_noticed(
    notes: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeServer, "stream", lambda *_, **__: Streamed(1.0, 2.0, "x", [5, 4, 6], {}))
    with a_pair() as pair:
        assert not pair.hand_over([1, 2]).agrees


def test_a_pair_is_paused_but_for_what_it_is_asked(
    notes: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    awake: list[tuple[bool, bool]] = []
    with a_pair() as pair:
        servers: Any = (pair._prefill, pair._decode)
        for name in ("complete", "stream"):
            monkeypatch.setattr(FakeServer, name, spying(getattr(FakeServer, name), servers, awake))
        pair.hand_over([1, 2])
        assert awake == [(True, False), (True, True), (True, True)]
        assert not any(server.awake for server in servers)
        pair.forget_device()
        assert notes[-1] == ("kv_consumer", "/reset_prefix_cache")


def spying(
    method: Callable[..., Any], servers: Sequence[FakeServer], awake: list[tuple[bool, ...]]
) -> Callable[..., Any]:
    def spied(*given: Any, **named: Any) -> Any:
        awake.append(tuple(server.awake for server in servers))
        return method(*given, **named)

    return spied


@dataclass
class FakePair:
    """Notes what is handed over."""

    name: str
    notes: list[tuple[str, Any]]
    kind: Kind = field(init=False)

    def __post_init__(self) -> None:
        self.kind = Kind(self.name, lambda role: {}, lambda samples: 0)

    def hand_over(self, prompt: Sequence[int], max_tokens: int = 3) -> Handoff:
        self.notes.append((self.name, tuple(prompt)))
        return a_handoff(first_s=2.0 if self.name == "ours" else 1.0)

    def forget_device(self) -> None:
        self.notes.append((self.name, "forget"))


class FakeSocket(RawSocket):
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def read(self, worker: int, job: Any) -> None:
        self.sizes.append(job.slot.nbytes)


@dataclass
class Rig:
    notes: list[tuple[str, Any]] = field(default_factory=list)
    ceiling: FakeSocket = field(default_factory=FakeSocket)

    def __post_init__(self) -> None:
        pairs: Any = [FakePair(name, self.notes) for name in ("ours", "nixl")]
        self.bench = Bench(pairs, self.ceiling, num_tokens=1000)


def test_a_round_gives_decode_whole_pages_and_then_the_whole_prompt() -> None:
    rig = Rig()
    rig.bench.run_round(Case(50, "device"), swapped=False, missing_bytes=7)
    (first, given), (_, whole), (third, _), _ = rig.notes
    assert (first, third) == ("ours", "nixl")
    assert (len(given), len(whole)) == (384, 1000)
    assert whole[:384] == given
    assert rig.notes[2][1] == given
    assert rig.ceiling.sizes == [7, 7]


def test_rounds_take_turns_and_fresh_prompts() -> None:
    rig = Rig()
    for swapped in (False, True):
        rig.bench.run_round(Case(0, "device"), swapped=swapped, missing_bytes=7)
    assert [name for name, _ in rig.notes] == ["ours", "nixl", "nixl", "ours"]
    assert rig.notes[0][1] == rig.notes[1][1] != rig.notes[2][1] == rig.notes[3][1]


def test_what_shall_be_in_host_memory_alone_is_forgotten_on_the_device_first() -> None:
    rig = Rig()
    rig.bench.run_round(Case(50, "host"), swapped=False, missing_bytes=7)
    assert [what == "forget" for _, what in rig.notes] == [False, True, False] * 2


def test_a_row_has_the_missing_tokens_bytes() -> None:
    rig = Rig()
    rig.bench.run_round(Case(50, "device"), swapped=False, missing_bytes=7)
    row = rig.bench.row(Case(50, "device"), bytes_of_token=10)
    assert (row.missing_tokens, row.missing_bytes, row.page_bytes, row.num_rounds) == (616, 6160, 1280, 1)
    assert row.ratio == 2.0


def test_the_ceiling_moves_its_bytes_between_two_processes() -> None:
    ceiling = RawSocket()
    try:
        assert Bench([], ceiling, 1)._time_ceiling(MIB) > 0
    finally:
        ceiling.close()


def test_its_help_says_what_it_measures() -> None:
    command = [sys.executable, str(SCRIPTS / "bench_handoff_run.py"), "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "NixlConnector" in shown
    assert bench_handoff_run.DEFAULT_CASES in shown
