"""The loads of the serving benchmark, as vLLM's `bench serve` is told of them. No server and no vLLM here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRACE = Path(__file__).with_name("bench_serving_trace.jsonl")
TRACE_BLOCK_TOKENS = 512
BLOCK_TOKENS = 128
"""Of a trace's block here: one quarter of the original's, and with it all lengths."""
TIME_SCALE = 0.1
OUTPUT_TOKENS = 64
CONCURRENCY = 4
FIRST_BLOCKS = 3
TURN_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to send: what `bench serve` is told of them.

    Attributes:
        name: in the table.
        text: what it is, in words.
        num_requests: all that there are.
        dataset: arguments that name the requests, and when they are sent.
    """

    name: str
    text: str
    num_requests: int
    dataset: tuple[str, ...]


def loads(folder: Path, is_quick: bool) -> list[Load]:
    """All loads, of few requests if `is_quick`; files that they read are written to `folder`."""
    prefixes, copies, num_random = (3, 2, 2) if is_quick else (8, 3, 8)
    num_conversations, num_turns = (4, 2) if is_quick else (8, 4)
    return [
        _prefix_repetition(prefixes, copies),
        _random(num_random),
        _trace(folder, 6 if is_quick else None),
        _multi_turn(folder, num_conversations, num_turns),
    ]


def _prefix_repetition(num_prefixes: int, copies: int) -> Load:
    num_requests = num_prefixes * copies
    sizes = {"prefix-len": 1024, "suffix-len": 128, "num-prefixes": num_prefixes, "output-len": OUTPUT_TOKENS}
    named = [word for name, value in sizes.items() for word in (f"--prefix-repetition-{name}", str(value))]
    text = (
        f"{num_requests} requests, {num_prefixes} prefixes of 1,024 tokens with 128 more each, {CONCURRENCY} at a time"
    )
    return Load("prefix_repetition", text, num_requests, ("--dataset-name", "prefix_repetition", *named, *_closed()))


def _random(num_requests: int) -> Load:
    sizes = ("--random-input-len", "1024", "--random-output-len", str(OUTPUT_TOKENS))
    text = f"{num_requests} requests of 1,024 tokens that share nothing, {CONCURRENCY} at a time"
    return Load("random", text, num_requests, ("--dataset-name", "random", *sizes, *_closed()))


def _trace(folder: Path, limit: int | None) -> Load:
    requests = [json.loads(line) for line in TRACE.read_text().splitlines()][:limit]
    path = _write(folder / "trace.jsonl", scaled(requests))
    span_s = (requests[-1]["timestamp"] - requests[0]["timestamp"]) / 1000 * TIME_SCALE
    text = f"{len(requests)} requests of a public trace, lengths to a quarter, sent at its times within {span_s:.0f} s"
    return Load("timed_trace", text, len(requests), _replayed(path))


def _multi_turn(folder: Path, num_conversations: int, num_turns: int) -> Load:
    path = _write(folder / "multi_turn.jsonl", conversations(num_conversations, num_turns))
    num_requests = num_conversations * num_turns
    text = (
        f"{num_conversations} conversations of {num_turns} turns, {FIRST_BLOCKS * BLOCK_TOKENS} tokens and each turn "
        f"{TURN_BLOCKS * BLOCK_TOKENS} more, {CONCURRENCY} at a time"
    )
    return Load("multi_turn", text, num_requests, (*_replayed(path), "--no-self-timed", *_closed()))


def scaled(requests: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, object]]:
    """A trace's requests with shorter blocks and prompts, at closer times from zero on, and short answers."""
    start = requests[0]["timestamp"]
    for request in requests:
        yield {
            "timestamp": (request["timestamp"] - start) * TIME_SCALE,
            "input_length": request["input_length"] * BLOCK_TOKENS // TRACE_BLOCK_TOKENS,
            "output_length": OUTPUT_TOKENS,
            "hash_ids": request["hash_ids"],
        }


def conversations(num_conversations: int, num_turns: int) -> Iterator[dict[str, object]]:
    """Turns of conversations, each beginning with the one before it: first all first turns, then all second ones.

    What an engine said is not in the next prompt: as in a trace, that has tokens of its own there.
    """
    for turn in range(num_turns):
        num_blocks = FIRST_BLOCKS + turn * TURN_BLOCKS
        for conversation in range(num_conversations):
            first = 1_000_000 + conversation * 1_000
            yield {
                "timestamp": 0,
                "input_length": num_blocks * BLOCK_TOKENS,
                "output_length": OUTPUT_TOKENS,
                "hash_ids": list(range(first, first + num_blocks)),
            }


def _write(path: Path, requests: Iterator[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


def _closed() -> tuple[str, ...]:
    return ("--max-concurrency", str(CONCURRENCY))


def _replayed(path: Path) -> tuple[str, ...]:
    blocks = ("--timed-trace-chunk-hash-size", str(BLOCK_TOKENS), "--timed-trace-sec-multiplier", "0.001")
    return ("--dataset-name", "timed_trace", "--dataset-path", str(path), *blocks)
