"""The scripts' parts that need no engine: the made-up conversation, and results, tables and verdicts."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import demo_conversation
import demo_report
import overhead_run
import pytest
from demo_report import Comparison, LengthRecord
from engine_process import Answer
from overhead_run import Series

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"

DEMO_KEYS = {
    "prompt_tokens",
    "cold_ttft_s",
    "device_ttft_s",
    "host_ttft_s",
    "store_restart_ttft_s",
    "restored_tokens",
    "outputs_equal",
    "hit_tokens",
    "lengths",
    "ratios",
    "versions",
}


def encode(text: str) -> list[int]:
    """A token for each byte."""
    return list(text.encode())


def answer(ttft_s: float, **hit_tokens: int) -> Answer:
    return Answer(ttft_s, ttft_s + 0.5, [1, 2, 3], [-0.1, -0.2, -0.3], hit_tokens)


def a_record(prompt_tokens: int, **changed: list[Answer]) -> LengthRecord:
    record = LengthRecord(prompt_tokens, turn_tokens=[prompt_tokens + 40])
    record.samples = {
        "cold": [answer(20.0)],
        "cold_connector": [answer(19.0), answer(21.0), answer(20.0)],
        "device": [answer(0.5, device=7808), answer(1.0, device=7808)],
        "device_beside_store": [answer(0.5, device=7808)],
        "device_beside_store_cached": [answer(0.5, device=7808)],
        "device_connector": [answer(0.6, device=7808)],
        "host": [answer(0.6, host=7808), answer(1.1, host=7808)],
        "store": [answer(0.75, store=7808)],
        "store_cached": [answer(0.55, store=7808)],
        "turn_host": [answer(0.7, host=7808)],
        "turn_device": [answer(0.7, device=7808)],
    } | changed
    record.comparisons = [
        Comparison.of("host", record.samples["host"][0], answer(0.5, device=7808)),
        Comparison.of("alone", answer(0.5, device=7808), answer(0.5, device=7808)),
    ]
    return record


def a_result(**changed: list[Answer]) -> demo_report.Result:
    return demo_report.assemble([a_record(7680, **changed), a_record(7900, **changed)], {"torch": "2"})


def a_series(loss: float) -> Series:
    without = [1.0, 2.0, 4.0] * 2
    return Series("TTFT", "s", False, without, [each * (1 + loss) for each in without])


@pytest.mark.parametrize("num_tokens", [300, 2048, 7900, 20_001])
def test_a_conversation_has_exactly_the_tokens_asked_for(num_tokens: int) -> None:
    assert len(demo_conversation.conversation(1, num_tokens, encode)) == num_tokens


def test_a_conversation_is_the_same_every_time() -> None:
    code = "import demo_conversation as d; print(d.conversation(5, 3000, lambda text: list(text.encode())))"
    again = subprocess.run([sys.executable, "-c", code], cwd=SCRIPTS, capture_output=True, text=True, check=True)
    assert json.loads(again.stdout) == demo_conversation.conversation(5, 3000, encode)


def test_two_sessions_share_no_page() -> None:
    one, other = (demo_conversation.conversation(session, 3000, encode)[:128] for session in (1, 2))
    assert one != other


def test_too_few_tokens_for_the_question_are_refused() -> None:
    with pytest.raises(ValueError, match="10 tokens are too few"):
        demo_conversation.conversation(1, 10, encode)


def test_a_next_turn_continues_what_was_said() -> None:
    prompt = demo_conversation.conversation(1, 3000, encode)
    turn = demo_conversation.next_turn(prompt, [7, 7], 0, encode)
    assert turn[:3002] == [*prompt, 7, 7]
    assert bytes(turn[3002:]).endswith(b"<|im_start|>assistant\n")


def test_a_conversation_reads_as_an_agents() -> None:
    text = bytes(demo_conversation.conversation(1, 60_000, encode)).decode()
    assert text.startswith("<|im_start|>system\nSession 00000001")
    for name in demo_conversation.TOOLS:
        assert f'<tool_call>{{"name": "{name}"' in text


def test_the_demos_result_has_every_promised_key_and_is_json() -> None:
    result = json.loads(json.dumps(a_result()))
    assert result.keys() >= DEMO_KEYS
    assert [each["prompt_tokens"] for each in result["lengths"]] == [7680, 7900]
    assert result["prompt_tokens"] == 7900
    assert result["hit_tokens"] == {"device": 7808, "host": 7808, "store": 7808}


def test_ratios_of_the_demo_compare_with_vllms_own_hit() -> None:
    ratios = a_result()["ratios"]
    assert ratios["host_over_device"] == pytest.approx(0.85 / 0.5)
    assert ratios["host_over_device_paired"] == pytest.approx((1.2 + 1.1) / 2)
    assert ratios["store_over_device_paired"] == pytest.approx(1.5)
    assert ratios["cold_over_host"] == pytest.approx(20 / 0.85)


def test_a_demo_that_did_what_it_promised_has_no_failures() -> None:
    assert demo_report.failures(a_result()) == []


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"store": [answer(20.0)]}, "nothing was restored from the store"),
        ({"host": [answer(20.0), answer(20.0)]}, "nothing was restored from host memory"),
        ({"host": [replace(answer(0.6, host=7808), tokens=[1, 9, 3])] * 2}, "an answer differs from vLLM's own"),
        ({"host": [replace(answer(0.6, host=7808), logprobs=[-0.1, -1.2, -0.3])] * 2}, "host 1.0000"),
    ],
)
def test_a_demo_that_did_not_says_what_is_wrong(changed: dict[str, list[Answer]], sentence: str) -> None:
    problems = demo_report.failures(a_result(**changed))
    assert len(problems) == 2
    assert sentence in problems[0]


def test_equal_work_must_give_equal_answers() -> None:
    own, near = answer(1.0, device=128), replace(answer(1.0, host=128), logprobs=[-0.1, -0.21, -0.3])
    assert Comparison.of("host", replace(own, hit_tokens={"host": 128}), own).holds
    assert not Comparison.of("host", near, own).holds


@pytest.mark.parametrize(("logprob", "holds"), [(-0.3, True), (-0.9, False)])
def test_unequal_work_may_round_differently_and_swap_two_like_tokens(logprob: float, holds: bool) -> None:
    swapped = replace(answer(1.0, host=127), tokens=[1, 8, 3], logprobs=[-0.1, logprob, -9.0])
    assert Comparison.of("alone", swapped, answer(1.0)).holds is holds


def test_the_demos_table_bars_and_chart_show_every_tier(tmp_path: Path) -> None:
    result = a_result()
    demo_report.draw(result, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    for text in (demo_report.table(result), demo_report.bars(result)):
        assert all(text.count(name) >= 2 for name in demo_report.TIERS.values())


@pytest.mark.parametrize(("loss", "verdict"), [(0.01, "within"), (0.05, "over"), (-0.2, "within")])
def test_an_overhead_is_judged_by_its_interval(loss: float, verdict: str) -> None:
    summary = a_series(loss).summary()
    assert summary["loss"] == pytest.approx(loss)
    assert summary["verdict"] == verdict


def test_an_overhead_lost_in_noise_is_undecided() -> None:
    noisy = Series("TTFT", "s", False, [1.0] * 8, [0.9, 1.1, 0.95, 1.2] * 2)
    assert noisy.summary()["verdict"] == "undecided"


def test_two_pairs_decide_nothing() -> None:
    assert Series("TTFT", "s", False, [1.0, 1.0], [1.0, 1.0]).summary()["verdict"] == "undecided"


def test_lower_throughput_is_a_loss() -> None:
    slower = Series("throughput", "tok/s", True, [100.0, 200.0], [50.0, 100.0])
    assert slower.summary()["loss"] == pytest.approx(1.0)
    assert slower.summary()["ratio"] == pytest.approx(0.5)


def test_the_overheads_result_is_json_and_its_table_says_what_was_left_out() -> None:
    counters = {"vllm:hicache_bytes|save": 3e6, "vllm:hicache_bytes|flush": 2e6}
    result = overhead_run.assemble([a_series(0.01)], counters, {"torch": "2"}, {"note": "left out: not there"})
    assert json.loads(json.dumps(result))["series"][0]["pairs"] == 6
    shown = overhead_run.table(result)
    assert "saved 3 MB, flushed 2 MB, hit tokens 0" in shown
    assert "copy bandwidth left out: not there" in shown


def test_a_copy_benchmark_that_is_missing_or_has_changed_is_a_note(tmp_path: Path) -> None:
    other = tmp_path / "bench_other"
    assert overhead_run.copy_bandwidth(other) == {"note": "left out: bench_other is not there"}
    other.write_text("MODELS = ()\n")
    assert "not what this script knows" in overhead_run.copy_bandwidth(other)["note"]


def test_random_prompts_are_distinct() -> None:
    prompts = overhead_run.Prompts(seed=1)
    taken = [tuple(prompt) for prompt in [*prompts.take(3), *prompts.take(3)]]
    assert len(set(taken)) == 6
    assert {len(prompt) for prompt in taken} == {overhead_run.PROMPT_TOKENS}


@pytest.mark.parametrize("program", ["demo_run.py", "overhead_run.py"])
def test_help_works(program: str) -> None:
    shown = subprocess.run([sys.executable, SCRIPTS / program, "--help"], capture_output=True, text=True, check=True)
    assert "--json" in shown.stdout


@pytest.mark.parametrize(
    ("program", "arguments"), [("demo_run.py", ["--rounds", "0"]), ("overhead_run.py", ["--pairs", "1"])]
)
def test_too_few_samples_are_refused(program: str, arguments: list[str]) -> None:
    ended = subprocess.run([sys.executable, SCRIPTS / program, *arguments], capture_output=True, check=False)
    assert ended.returncode == 2
