"""The benchmark of speculative decoding without engines: prompts, jobs, counters, ratios, aims and the table."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_speculative_engine
import bench_speculative_run
import engine_job
import matrix_worker
import pytest
from bench_speculative_engine import (
    ACCEPTED,
    BARE_PAGES,
    DEVICE_HITS,
    DRAFTS,
    NUM_DRAFTED,
    TIER_HITS,
    Counts,
    Engine,
    Job,
    Record,
    Sample,
    Take,
    counts_of,
    run_job,
    samples_of,
    times_of,
)
from bench_speculative_prompts import digest_of, docs_text, few_of, lengths_between, prompts_of
from bench_speculative_report import Acceptance, Aim, Draft, Ratio, Row, aims_of, rows_of, table
from bench_speculative_run import STEPS, Bench, Step, assemble, read_arguments
from engine_process import EngineError
from hypothesis import given
from hypothesis import strategies as st
from matrix_cut import PAGE_TOKENS

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
LENGTHS = {0: 1000, 1: 2000}


def encode(text: str) -> list[int]:
    return list(text.encode())


# Prompts


@pytest.mark.parametrize(("num_prompts", "expected"), [(4, [1000, 1333, 1666, 2000]), (2, [1000, 2000]), (1, [1500])])
def test_lengths_are_spread_from_the_shortest_to_the_longest(num_prompts: int, expected: list[int]) -> None:
    assert lengths_between(1000, 2000, num_prompts) == expected


class TestPrompts:
    def test_each_has_its_length_even_where_the_text_is_shorter(self) -> None:
        found = prompts_of([200, 5000, 300], "some text of 25 characters", encode)
        assert [len(found[number]) for number in range(3)] == [200, 5000, 300]

    def test_no_two_have_the_first_page_in_common(self) -> None:
        found = prompts_of([1000] * 20, docs_text(), encode)
        assert len({tuple(prompt[:PAGE_TOKENS]) for prompt in found.values()}) == 20

    def test_they_are_the_same_every_time(self) -> None:
        one, again, other = (prompts_of([300, 300], text, encode) for text in ("some text", "some text", "other text"))
        assert digest_of(one) == digest_of(again) != digest_of(other)

    def test_they_go_on_with_the_text_from_where_each_of_them_begins(self) -> None:
        found = prompts_of([17, 34], "abcdefghijklmnop", encode)
        assert bytes(found[0]) == b"Part 1 of 2.\n\nabc"
        assert bytes(found[1]) == b"Part 2 of 2.\n\nijklmnopabcdefghijkl"

    def test_a_first_page_that_two_have_in_common_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="2 prompts have 1 first pages"):
            prompts_of([300, 300], "a", lambda text: [1] * len(text))

    def test_no_text_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="there is no text"):
            prompts_of([300], "", encode)

    def test_docs_are_in_the_text(self) -> None:
        assert "## " in docs_text()
        assert docs_text(SCRIPTS) == ""

    @pytest.mark.parametrize(("num_few", "numbers"), [(2, [0, 4]), (3, [0, 2, 4]), (1, [2]), (9, [0, 1, 2, 3, 4])])
    def test_a_few_of_them_keep_their_numbers(self, num_few: int, numbers: list[int]) -> None:
        few = few_of({number: [number] for number in range(5)}, num_few)
        assert few == {number: [number] for number in numbers}


# What an engine counts


def metric(name: str, value: float, **labels: str) -> SimpleNamespace:
    return SimpleNamespace(name=name, value=value, labels=labels)


def metrics(drafts: int, accepted: Sequence[int], **hits: int) -> list[SimpleNamespace]:
    tiers = [metric(TIER_HITS, count, tier=tier) for tier, count in hits.items() if tier != "device"]
    return [
        metric(DRAFTS, drafts),
        SimpleNamespace(name=ACCEPTED, values=list(accepted), labels={}),
        metric(DEVICE_HITS, hits.get("device", 0)),
        metric(BARE_PAGES, 3),
        metric("vllm:other", 99),
        *tiers,
    ]


def test_counts_come_from_the_engines_metrics_by_tier_and_position() -> None:
    assert counts_of(metrics(7, [6, 5, 4], device=128, host=256, store=512)) == Counts(
        7, (6, 5, 4), {"device": 128, "host": 256, "store": 512}, 3
    )


def test_an_engine_without_a_draft_or_the_connector_counts_no_drafts() -> None:
    assert counts_of([metric(DEVICE_HITS, 5)]) == Counts(0, (), {"device": 5}, 0)


def test_a_sample_counts_what_came_after_it_began() -> None:
    before = Counts(3, (3, 2, 1), {"device": 128, "host": 5}, 2)
    after = Counts(10, (9, 7, 5), {"device": 128, "host": 133, "store": 1}, 6)
    assert after.since(before) == Counts(7, (6, 5, 4), {"host": 128, "store": 1}, 4)


def test_before_the_first_draft_nothing_was_accepted() -> None:
    assert Counts(2, (2, 1, 0), {}, 0).since(Counts(0, (), {}, 0)) == Counts(2, (2, 1, 0), {}, 0)


def test_a_steps_tokens_share_its_time() -> None:
    assert times_of([(0.5, 1), (0.75, 5), (1.5, 6)]) == (0.5, 0.2, 1.5)


def test_tokens_of_the_first_output_are_not_later_ones() -> None:
    assert times_of([(0.5, 4), (1.0, 6)]) == (0.5, 0.25, 1.0)
    assert times_of([(0.5, 4)]) == (0.5, 0.0, 0.5)


class FakeLlm:
    """Counts in its metrics what its requests would have; every answer is 4, 5, 6. Notes what it is asked."""

    def __init__(self, num_open: int = 0) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.llm_engine = self
        self._is_busy = False
        self._num_drafts = 0
        self._num_open = num_open
        self._num_resets = 0

    def add_request(self, name: str, prompt: Mapping[str, list[int]], params: Any) -> None:
        self.asked.append(("ask", len(prompt["prompt_token_ids"]), params.max_tokens))
        assert (params.temperature, params.ignore_eos) == (0, True)
        self._is_busy = True

    def has_unfinished_requests(self) -> bool:
        return self._is_busy

    def step(self) -> Iterator[Any]:
        self._is_busy = False
        self._num_drafts += 1
        self._num_open -= 1
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[4])])
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[4, 5, 6])])

    def get_metrics(self) -> list[SimpleNamespace]:
        counted = metrics(self._num_drafts, [self._num_drafts] * NUM_DRAFTED)
        return [*counted, metric(engine_job.OPEN_OPERATIONS, max(0, self._num_open))]

    def reset_prefix_cache(self) -> bool:
        self._num_resets += 1
        return self._num_resets % 2 == 0

    def collective_rpc(self, function: object) -> None:
        self.asked.append(("rpc", function))


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLlm:
    fake_vllm = SimpleNamespace(SamplingParams=lambda **named: SimpleNamespace(**named))
    monkeypatch.setitem(sys.modules, "vllm", fake_vllm)
    monkeypatch.setattr(engine_job, "_PAUSE_S", 0)
    return FakeLlm()


REST = ("ask", 8, 2)
POISON = ("rpc", matrix_worker.poison)


@pytest.mark.parametrize("take", Take)
def test_the_device_is_overwritten_before_every_restore_and_not_before_a_device_hit(llm: FakeLlm, take: Take) -> None:
    Engine(llm, 32).sample(take, 0, range(700))
    expected = [("ask", 700, 32), REST]
    assert llm.asked == (expected if take in (Take.COLD, Take.DEVICE) else [POISON, *expected])


def test_a_sample_holds_its_answer_and_counts_its_own_request_alone(llm: FakeLlm) -> None:
    engine = Engine(llm, 32)
    for _ in range(2):
        found = engine.sample(Take.DEVICE, 5, range(700))
        assert (found.take, found.prompt, found.tokens) == (Take.DEVICE, 5, [4, 5, 6])
        assert found.counts == Counts(1, (1, 1, 1), {}, 0)
        assert 0 < found.ttft_s <= found.total_s


def test_an_engine_comes_to_rest_once_no_operation_is_open(llm: FakeLlm) -> None:
    llm._num_open = 3
    Engine(llm, 32).settle()
    assert llm.asked == [REST] * 3


def test_saves_that_do_not_end_are_an_error(llm: FakeLlm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_speculative_engine, "SETTLE_LIMIT_S", 0.0)
    llm._num_open = 1000
    with pytest.raises(EngineError, match="had not ended"):
        Engine(llm, 32).settle()


def test_all_takes_of_a_prompt_come_before_the_next_one_and_a_warm_up_before_all(llm: FakeLlm) -> None:
    job = a_job(takes=(Take.COLD, Take.HOST), prompts={0: [1] * 700, 3: [2] * 900}, output_tokens=16)
    found = samples_of(Engine(llm, 16), job)
    assert [(sample.prompt, sample.take) for sample in found] == [
        (0, Take.COLD),
        (0, Take.HOST),
        (3, Take.COLD),
        (3, Take.HOST),
    ]
    assert llm.asked[:4] == [("ask", 512, 16), ("ask", 512, 16), REST, ("ask", 700, 16)]


# Jobs


def a_job(**changed: Any) -> Job:
    return replace(
        Job("/model", {"store": "none", "lookup_timeout_s": 5.0}, True, (Take.COLD,), {0: [1, 2], 7: [3]}, 64),
        **changed,
    )


def a_sample(take: Take = Take.COLD, prompt: int = 0, **counts: Any) -> Sample:
    counted: dict[str, Any] = {"drafts": 20, "accepted": (20, 18, 16), "hit_tokens": {}, "bare_pages": 0} | counts
    return Sample(take, prompt, [1, 2, 3], 0.5, 0.02, 1.5, Counts(**counted))


@pytest.mark.parametrize("connector", [None, {"store": "none", "lookup_timeout_s": 5.0}])
def test_a_job_and_a_sample_come_back_from_json_as_they_were(connector: dict[str, Any] | None) -> None:
    job, sample = a_job(connector=connector), a_sample(hit_tokens={"host": 5})
    assert Job.of(json.loads(json.dumps(asdict(job)))) == job
    assert Sample.of(json.loads(json.dumps(asdict(sample)))) == sample


def test_a_job_has_more_time_the_more_there_is_to_compute() -> None:
    short, long = a_job(prompts={0: [1] * 1000}), a_job(prompts={0: [1] * 6000}, takes=tuple(Take))
    assert 300 < short.limit_s < long.limit_s


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for the engine's process."""
    monkeypatch.setattr(bench_speculative_engine, "__file__", str(tmp_path / "program.py"))
    return tmp_path / "program.py"


def test_a_jobs_process_finds_it_in_its_folder_and_leaves_the_record_there(program: Path, tmp_path: Path) -> None:
    record = Record([a_sample()], 12.5, {"vllm": "0.32"})
    (tmp_path / "theirs.json").write_text(json.dumps(asdict(record)))
    program.write_text(
        "import os, pathlib, sys\n"
        "assert os.environ['VLLM_ALLOW_INSECURE_SERIALIZATION'] == '1'\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "(folder / 'record.json').write_text((folder.parent / 'theirs.json').read_text())\n"
    )
    assert run_job(a_job(), tmp_path / "job", tmp_path / "log") == record
    assert Job.of(json.loads((tmp_path / "job" / "job.json").read_text())) == a_job()


def test_an_engine_that_fails_is_an_error_that_names_its_log(program: Path, tmp_path: Path) -> None:
    program.write_text("print('vLLM says why'); raise SystemExit(3)")
    with pytest.raises(EngineError, match=r"status 3 .*log"):
        run_job(a_job(), tmp_path / "job", tmp_path / "log")
    assert "vLLM says why" in (tmp_path / "log").read_text()


def test_an_engine_that_takes_too_long_is_ended(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program.write_text("import threading; threading.Event().wait()")
    monkeypatch.setattr(Job, "limit_s", 0.1)
    with pytest.raises(EngineError, match="longer than 0 s"):
        run_job(a_job(), tmp_path / "job", tmp_path / "log")


# Arithmetic

draws = st.lists(
    st.integers(1, 50).flatmap(lambda drafts: st.tuples(st.just(drafts), *[st.integers(0, drafts)] * NUM_DRAFTED)),
    min_size=1,
    max_size=5,
)


@given(draws)
def test_acceptance_is_accepted_by_drafted_over_all_prompts(counted: list[tuple[int, ...]]) -> None:
    found = Acceptance.of([a_sample(drafts=drafts, accepted=tuple(accepted)) for drafts, *accepted in counted])
    drafts = sum(each[0] for each in counted)
    expected = [sum(each[place + 1] for each in counted) / drafts for place in range(NUM_DRAFTED)]
    assert list(found.rates) == expected
    assert found.per_draft == pytest.approx(sum(expected))


def test_prompts_without_a_draft_leave_what_others_accepted_as_it_is() -> None:
    without = a_sample(drafts=0, accepted=())
    assert Acceptance.of([without, a_sample(), without]) == Acceptance(20, (20, 18, 16))
    assert (Acceptance.of([without]).rates, Acceptance.of([without]).per_draft) == ((), None)


def test_a_ratio_is_that_of_all_positions_and_of_the_worst() -> None:
    found = Acceptance(8, (8, 4, 2)).beside(Acceptance(16, (16, 16, 8)))
    assert found == Ratio(1.75 / 2.5, 0.5)


def test_where_a_reference_accepts_nothing_there_is_nothing_to_lose() -> None:
    assert Acceptance(10, (0, 0)).beside(Acceptance(10, (0, 0))) == Ratio(1.0, 1.0)
    assert Acceptance(10, ()).beside(Acceptance(10, ())) is None


@pytest.mark.parametrize(
    ("mean", "worst", "holds"), [(1.0, 0.991, True), (1.2, 1.1, True), (1.0, 0.989, False), (0.98, 1.0, False)]
)
def test_a_ratio_holds_where_no_position_lost_more_than_a_hundredth(mean: float, worst: float, holds: bool) -> None:
    assert Ratio(mean, worst).holds is holds


# Rows

HITS = {Take.DEVICE: {"device": 896}, Take.HOST: {"host": 896}, Take.STORE: {"store": 896}, Take.SERVED: {"store": 896}}


def found_samples() -> dict[Draft, list[Sample]]:
    """What a run finds that meets every aim; vLLM alone has the second prompt only."""
    lost = {"drafts": 40, "accepted": (20, 10, 5), "bare_pages": 7}
    every = [
        a_sample(take, number, hit_tokens=HITS.get(take, {}), **(lost if take == Take.SERVED else {}))
        for take in Take
        for number in LENGTHS
    ]
    kept = [each for each in every if each.take not in (Take.SERVED, Take.RECOMPUTED)]
    alone = [replace(each, ttft_s=0.25, total_s=3.0) for each in kept if each.take == Take.DEVICE and each.prompt == 1]
    cold = replace(a_sample(prompt=1), ttft_s=0.125, total_s=1.0)
    without = [a_sample(Take.COLD, number, drafts=0, accepted=()) for number in LENGTHS]
    return {Draft.ALONE: [cold, *alone], Draft.PACKED: every, Draft.SIDECAR: kept, Draft.NONE: without}


def row_of(draft: Draft, take: Take, found: Mapping[Draft, Sequence[Sample]] | None = None) -> Row:
    (row,) = (row for row in rows_of(found or found_samples(), LENGTHS) if (row.draft, row.take) == (draft, take))
    return row


def test_there_is_a_row_for_each_take_of_each_kind_of_engine() -> None:
    rows = rows_of(found_samples(), LENGTHS)
    assert [(row.draft, row.take) for row in rows] == [
        *((Draft.ALONE, take) for take in (Take.COLD, Take.DEVICE)),
        *((Draft.PACKED, take) for take in Take),
        *((Draft.SIDECAR, take) for take in (Take.COLD, Take.DEVICE, Take.HOST, Take.STORE)),
        (Draft.NONE, Take.COLD),
    ]


def test_a_row_counts_over_its_prompts() -> None:
    row = row_of(Draft.PACKED, Take.SERVED)
    assert (row.num_prompts, row.prompt_tokens, row.num_drafts) == (2, 3000, 80)
    assert (row.hit_tokens, row.device_hit_tokens, row.bare_pages) == ({"store": 1792}, 1792, 14)
    assert row.acceptance == (0.5, 0.25, 0.125)
    assert row.to_device is not None
    assert (row.to_device.mean, row.to_device.worst) == pytest.approx((0.875 / 2.7, 0.125 / 0.8))


def test_times_are_medians() -> None:
    found = {
        Draft.PACKED: [replace(a_sample(prompt=number), ttft_s=ttft) for number, ttft in enumerate((1.0, 9.0, 2.0))]
    }
    (row,) = rows_of(found, dict.fromkeys(range(3), 10))
    assert (row.ttft_s, row.tpot_s, row.total_s) == (2.0, 0.02, 1.5)


def test_a_take_of_a_few_prompts_is_compared_with_the_same_prompts() -> None:
    found = found_samples()
    worse = a_sample(Take.COLD, 0, drafts=40, accepted=(1, 1, 1))
    packed = [worse if (each.take, each.prompt) == (Take.COLD, 0) else each for each in found[Draft.PACKED]]
    few = [each for each in packed if each.take != Take.RECOMPUTED or each.prompt == 1]
    assert row_of(Draft.PACKED, Take.RECOMPUTED, {Draft.PACKED: few}).to_cold == Ratio(1.0, 1.0)
    all_of_them = row_of(Draft.PACKED, Take.RECOMPUTED, {Draft.PACKED: packed}).to_cold
    assert all_of_them is not None
    assert all_of_them.mean > 1.5


def test_where_the_reference_lacks_a_prompt_there_is_no_ratio() -> None:
    found = [each for each in found_samples()[Draft.PACKED] if (each.take, each.prompt) != (Take.DEVICE, 1)]
    row = row_of(Draft.PACKED, Take.HOST, {Draft.PACKED: found})
    assert (row.to_device, row.same_tokens) == (None, 1)


def test_other_tokens_than_those_of_the_device_hit_are_counted() -> None:
    packed = [
        replace(each, tokens=[9]) if (each.take, each.prompt) == (Take.HOST, 0) else each
        for each in found_samples()[Draft.PACKED]
    ]
    assert row_of(Draft.PACKED, Take.HOST, {Draft.PACKED: packed}).same_tokens == 1
    assert row_of(Draft.NONE, Take.COLD).same_tokens is None


@pytest.mark.parametrize(
    ("take", "ttft", "total"),
    [(Take.COLD, 4.0, 1.5), (Take.RECOMPUTED, 4.0, 1.5), (Take.HOST, 2.0, 0.5), (Take.SERVED, 2.0, 0.5)],
)
def test_vllm_alone_stands_beside_each_take_cold_or_after_a_device_hit(take: Take, ttft: float, total: float) -> None:
    row = row_of(Draft.PACKED, take)
    assert (row.ttft_to_peer, row.total_to_peer) == (ttft, total)


def test_vllm_alone_does_not_stand_beside_itself() -> None:
    assert row_of(Draft.ALONE, Take.COLD).ttft_to_peer is None


def test_a_row_in_json_has_the_ratio_to_the_device_hit_on_top() -> None:
    raw = json.loads(json.dumps(row_of(Draft.PACKED, Take.STORE).to_json()))
    assert (raw["take"], raw["draft"], raw["ratio_to_device"]) == ("store", "packed", 1.0)
    assert raw["hit_tokens"] == {"store": 1792}
    assert row_of(Draft.NONE, Take.COLD).to_json()["ratio_to_device"] is None


# Aims


def aim_names(met: bool | None, found: Mapping[Draft, Sequence[Sample]]) -> list[str]:
    return [aim.name.split(" within")[0] for aim in aims_of(rows_of(found, LENGTHS)) if aim.met is met]


def with_counts(draft: Draft, take: Take, **changed: Any) -> dict[Draft, list[Sample]]:
    """A run that meets every aim but for what one take's samples count."""
    found = found_samples()
    found[draft] = [
        replace(each, counts=replace(each.counts, **changed)) if each.take == take else each for each in found[draft]
    ]
    return found


def test_a_run_that_restores_drafts_meets_every_aim() -> None:
    assert len(aim_names(True, found_samples())) == 6


@pytest.mark.parametrize("draft", [Draft.PACKED, Draft.SIDECAR])
@pytest.mark.parametrize(("take", "name"), [(Take.HOST, "host restore"), (Take.STORE, "store restore")])
@pytest.mark.parametrize(
    "changed",
    [
        {"accepted": (20, 18, 15)},
        {"hit_tokens": {"host": 768}},
        {"bare_pages": 1},
    ],
    ids=["less accepted", "less restored", "bare"],
)
def test_a_draft_that_did_not_come_back_whole_misses_its_aim_alone(
    draft: Draft, take: Take, name: str, changed: dict[str, Any]
) -> None:
    assert aim_names(False, with_counts(draft, take, **changed)) == [f"draft={draft}, {name}"]


def test_where_a_device_hit_hits_nothing_a_restore_proves_nothing() -> None:
    found = with_counts(Draft.PACKED, Take.DEVICE, hit_tokens={})
    assert aim_names(False, found) == ["draft=packed, host restore", "draft=packed, store restore"]


@pytest.mark.parametrize("changed", [{"drafts": 20, "accepted": (20, 18, 16)}, {"bare_pages": 0}, {"hit_tokens": {}}])
def test_a_control_that_cannot_tell_a_lost_draft_is_not_met(changed: dict[str, Any]) -> None:
    (name,) = aim_names(False, with_counts(Draft.PACKED, Take.SERVED, **changed))
    assert name == "control: a target restored without its draft is accepted less"


@pytest.mark.parametrize("changed", [{"hit_tokens": {"store": 128}}, {"accepted": (20, 18, 15)}])
def test_recompute_takes_nothing_and_is_accepted_as_cold(changed: dict[str, Any]) -> None:
    (name,) = aim_names(False, with_counts(Draft.PACKED, Take.RECOMPUTED, **changed))
    assert name.startswith("control: draft_miss=recompute takes nothing")


def test_what_was_not_measured_is_said() -> None:
    found = {Draft.PACKED: [a_sample(take) for take in (Take.COLD, Take.DEVICE)]}
    assert len(aim_names(None, found)) == 6


@pytest.mark.parametrize(
    ("met", "numbers", "sentence"),
    [(True, "a", "it: met (a)"), (False, "b", "it: NOT MET (b)"), (None, "", "it: not measured")],
)
def test_an_aim_is_said_in_words(met: bool | None, numbers: str, sentence: str) -> None:
    assert Aim("it", met, numbers).sentence == sentence


def test_the_table_has_a_line_of_equal_columns_for_every_row() -> None:
    rows = rows_of(found_samples(), LENGTHS)
    head, *lines = table(rows).splitlines()
    assert len(lines) == len(rows)
    assert {len(line) for line in lines} == {len(head)}
    assert lines[6].split() == [
        *("packed", "served", "2", "0.500", "0.250", "0.125", "0.875", "0.324", "0.156"),
        *("0.500", "20.0", "1.50", "59.7%", "14", "2", "2.00", "0.50"),
    ]


def test_an_engine_without_a_draft_has_dashes_for_its_acceptance() -> None:
    line = table([row_of(Draft.NONE, Take.COLD)]).splitlines()[1]
    assert line.split()[2:7] == ["2", "-", "-", "-", "-"]


# The run


def test_defaults_are_twenty_prompts_and_quick_is_a_few_short_ones() -> None:
    whole, quick = read_arguments([]), read_arguments(["--quick", "--prompts", "2"])
    assert (whole.prompts, whole.lengths, whole.few, whole.output) == (20, (1000, 6000), 5, 64)
    assert (quick.prompts, quick.lengths, quick.few, quick.output) == (2, (1000, 2000), 2, 32)
    assert read_arguments(["--lengths", "200-300"]).lengths == (200, 300)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "0"], "measures nothing"),
        (["--few", "0"], "measures nothing"),
        (["--output", "1"], "no room for a draft"),
        (["--lengths", "128-1000"], "no range from 129 tokens on"),
        (["--lengths", "2000-1000"], "no range"),
        (["--lengths", "1000-8125"], "more than the 8188"),
        (["--lengths", "1000"], "invalid lengths value"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read_arguments(arguments)
    assert message in capsys.readouterr().err


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    prompts = {number: [number] * 200 for number in range(5)}
    return Bench(tmp_path / "model", prompts, 2, 64, tmp_path, tmp_path / "log")


def step_of(take: Take, draft: Draft = Draft.PACKED) -> Step:
    (step,) = (step for step in STEPS if take in step.takes and step.draft == draft)
    return step


def test_every_store_is_written_before_it_is_read() -> None:
    written: set[str | None] = set()
    for step in STEPS:
        assert (step.store in written) is step.reads_only
        written.add(step.store)


def test_both_drafts_are_taken_from_every_tier() -> None:
    for draft in (Draft.PACKED, Draft.SIDECAR):
        takes = [take for step in STEPS if step.draft == draft for take in step.takes]
        assert takes[:4] == [Take.COLD, Take.DEVICE, Take.HOST, Take.STORE]


@pytest.mark.parametrize(
    ("take", "draft", "settings"),
    [
        (Take.HOST, Draft.SIDECAR, {"draft": "sidecar", "draft_miss": "recompute"}),
        (Take.STORE, Draft.SIDECAR, {"draft": "sidecar", "draft_miss": "recompute", "write": "never"}),
        (Take.COLD, Draft.NONE, {}),
        (Take.SERVED, Draft.PACKED, {"draft": "packed", "draft_miss": "serve", "write": "never"}),
        (Take.RECOMPUTED, Draft.PACKED, {"draft": "packed", "draft_miss": "recompute", "write": "never"}),
    ],
)
def test_readers_write_nothing_and_each_engine_has_its_draft(
    bench: Bench, take: Take, draft: Draft, settings: dict[str, str]
) -> None:
    job = bench.job_of(step_of(take, draft))
    common = {"store", "prefetch", "lookup_timeout_s"}
    assert job.connector is not None
    assert {name: value for name, value in job.connector.items() if name not in common} == settings
    assert job.has_draft is (draft != Draft.NONE)


def test_controls_read_what_an_engine_without_a_draft_wrote(bench: Bench) -> None:
    steps = [step_of(Take.SERVED), step_of(Take.RECOMPUTED), step_of(Take.COLD, Draft.NONE)]
    urls = {(bench.job_of(step).connector or {})["store"] for step in steps}
    assert urls == {f"file://{bench.store('none')}"}


def test_vllm_alone_has_a_draft_and_no_connector_and_a_few_prompts(bench: Bench) -> None:
    job = bench.job_of(step_of(Take.COLD, Draft.ALONE))
    assert (job.connector, job.has_draft, list(job.prompts)) == (None, True, [0, 4])
    assert list(bench.job_of(step_of(Take.STORE)).prompts) == [0, 1, 2, 3, 4]
    assert list(bench.job_of(step_of(Take.RECOMPUTED)).prompts) == [0, 4]


class FakeRun:
    """Stands in for engines: a sample of each prompt and take, and a file in the store."""

    def __init__(self, bench: Bench, failing: Take | None = None) -> None:
        self._bench = bench
        self._failing = failing
        self.stores: list[list[str]] = []

    def __call__(self, job: Job, folder: Path, log: Path) -> Record:
        if self._failing in job.takes:
            raise EngineError("it ended with status 3")
        if job.connector is not None:
            store = Path(str(job.connector["store"]).removeprefix("file://"))
            (store / "deep").mkdir(parents=True, exist_ok=True)
            (store / "deep" / "object").touch()
        self.stores.append(sorted(path.name for path in self._bench.folder.glob("store-*")))
        return Record([a_sample(take, number) for number in job.prompts for take in job.takes], 1.0, {"vllm": "0.32"})


@pytest.fixture
def ran(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    fake = FakeRun(bench)
    monkeypatch.setattr(bench_speculative_run, "run_job", fake)
    bench.run()
    return fake


def test_a_store_is_there_from_its_writer_to_its_last_reader(bench: Bench, ran: FakeRun) -> None:
    assert ran.stores == [[], *[["store-packed"]] * 2, *[["store-sidecar"]] * 2, *[["store-none"]] * 3]
    assert list(bench.folder.glob("store-*")) == []


def test_samples_are_kept_by_kind_of_engine(bench: Bench, ran: FakeRun) -> None:
    assert {draft: len(samples) for draft, samples in bench.found.items()} == {
        Draft.ALONE: 4,
        Draft.PACKED: 5 * 3 + 5 + 5 + 2,
        Draft.SIDECAR: 5 * 3 + 5,
        Draft.NONE: 5,
    }
    assert (bench.versions, bench.problems) == ({"vllm": "0.32"}, [])


def test_an_engine_that_fails_is_a_problem_and_the_others_still_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_speculative_run, "run_job", FakeRun(bench, failing=Take.STORE))
    bench.run()
    assert [problem.split(":")[0] for problem in bench.problems] == ["draft=packed", "draft=sidecar"]
    assert {sample.take for sample in bench.found[Draft.PACKED]} == set(Take) - {Take.STORE}
    assert capsys.readouterr().err.count("FAILED") == 2


def test_a_run_that_is_stopped_shows_what_it_had_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_job(job: Job, folder: Path, log: Path) -> Record:
        if job.connector is not None:
            raise KeyboardInterrupt
        return Record([a_sample(take, number) for number in job.prompts for take in job.takes], 1.0, {})

    monkeypatch.setattr(bench_speculative_run, "run_job", run_job)
    monkeypatch.setattr(bench_speculative_run, "OUT", tmp_path)
    monkeypatch.setattr(bench_speculative_run, "prepare_model", lambda _: tmp_path)
    monkeypatch.setattr(bench_speculative_run, "load_encoder", lambda _: encode)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["bench", "--quick", "--json", str(tmp_path / "found.json")])
    assert bench_speculative_run.main() == 1
    result = json.loads((tmp_path / "found.json").read_text())
    assert [(row["draft"], row["take"]) for row in result["rows"]] == [("vLLM alone", "cold"), ("vLLM alone", "device")]
    assert result["problems"] == ["stopped: what was measured before is shown"]
    assert "not measured" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_the_result_names_its_prompts_its_aims_and_its_problems(bench: Bench, ran: FakeRun) -> None:
    rows = rows_of(bench.found, dict.fromkeys(range(5), 200))
    result = json.loads(json.dumps(assemble(read_arguments(["--quick"]), bench, rows, aims_of(rows))))
    assert result["settings"]["prompt_tokens"] == [200] * 5
    assert result["settings"]["prompts_sha256"] == digest_of(bench.prompts)
    assert (len(result["rows"]), len(result["aims"]), result["problems"]) == (len(rows), 6, [])
    assert {"cpus", "cpu", "load_average"} <= result["machine"].keys()


def test_the_script_can_be_run() -> None:
    assert os.access(SCRIPTS / "bench_speculative", os.X_OK)
