"""A long agent conversation, made up deterministically and cut to an exact number of tokens.

It has the shape of what coding agents send: a system prompt, descriptions of tools, then turns in which the
agent calls a tool and reads pages of output. The first line names the session, so that two sessions share no
prefix. The text needs no model; only counting its tokens needs an encoder.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import chain

Encode = Callable[[str], list[int]]
"""Turns text into token ids."""

TOOLS = {
    "read_file": ("Return a file of the repository with line numbers.", {"path": "string", "first": "integer"}),
    "run_tests": ("Run tests and return their log.", {"selector": "string", "timeout_s": "integer"}),
    "search": ("Search the repository for a regular expression.", {"pattern": "string", "glob": "string"}),
    "query_metrics": ("Return samples of a time series as JSON.", {"series": "string", "minutes": "integer"}),
    "git_log": ("List commits that touch a path.", {"path": "string", "limit": "integer"}),
}
RULES = (
    "Work in small steps and say what you expect before each of them.",
    "Read a file before you change it, and run the tests that cover it afterwards.",
    "Never touch generated files, vendored code or anything below deploy/production.",
    "Quote paths and line numbers, so that a reviewer can follow you.",
    "If a tool fails twice with the same message, stop and ask.",
)
PARTS = ("billing", "ledger", "invoice", "webhook", "session", "quota", "export", "search", "mailer", "audit")
VERBS = ("load", "apply", "merge", "retry", "reserve", "commit", "expire", "render", "verify", "collect")
NOUNS = ("entry", "batch", "cursor", "token", "window", "account", "snapshot", "bucket", "record", "lease")
GOAL = (
    "The nightly job of {part} fails about once a week with a timeout, and the on-call engineer restarts it by "
    "hand. Find out why, propose the smallest change that fixes it, and tell me how to prove that it did."
)
FOLLOW_UPS = (
    "Before you go on: which of the files that you have read would you change, and why that one?",
    "Write the commit message for the change you have in mind, in at most five lines.",
    "Which test would have caught this earlier? Name it, and say where it should live.",
    "Summarise for the on-call engineer what happened, in three sentences without jargon.",
    "What would you measure in production to be sure that the timeout is gone?",
    "Is there a way to roll this back without a deployment? Explain it step by step.",
    "List the open questions that only the owner of this service can answer.",
    "Which dashboards should page someone, and at which threshold?",
)
QUESTION = "Continue. State the most likely cause in one sentence, then the next step you would take."
CUT = "\n[output truncated]"


def conversation(session: int, num_tokens: int, encode: Encode) -> list[int]:
    """Token ids of one session's prompt: exactly `num_tokens`, ending where the assistant is to speak.

    The last tool output is cut where the room ends, as agents do it.

    Raises:
        ValueError: `num_tokens` leaves no room for the question.
    """
    tail = encode(CUT) + close_turn(QUESTION, encode)
    room = num_tokens - len(tail)
    if room < 1:
        raise ValueError(f"{num_tokens} tokens are too few: the closing question alone has {len(tail)}")
    head: list[int] = []
    for text in messages(session):
        if len(head) >= room:
            break
        head += encode(text)
    return head[:room] + tail


def next_turn(prompt: list[int], answer: list[int], number: int, encode: Encode) -> list[int]:
    """The same session one turn later: what was said, the assistant's answer, and another question."""
    return prompt + answer + close_turn(FOLLOW_UPS[number % len(FOLLOW_UPS)], encode)


def close_turn(question: str, encode: Encode) -> list[int]:
    """The end of the message before, a user's question, and the opening of the assistant's answer."""
    return encode(f"<|im_end|>\n{message('user', question)}<|im_start|>assistant\n")


def message(role: str, content: str) -> str:
    """One message as SmolLM2's chat template writes it."""
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def messages(session: int) -> Iterator[str]:
    """The session's messages without end: the system prompt, the task, then calls and their outputs."""
    rng = random.Random(session)
    part = rng.choice(PARTS)
    yield message("system", system_prompt(session, part))
    yield message("user", GOAL.format(part=part))
    while True:
        name = rng.choice(list(TOOLS))
        yield message("assistant", a_call(rng, name))
        yield message("tool", "\n".join(OUTPUTS[name](rng)))


def system_prompt(session: int, part: str) -> str:
    rules = "\n".join(f"{number}. {rule}" for number, rule in enumerate(RULES, 1))
    tools = "\n".join(json.dumps(describe(name)) for name in TOOLS)
    return (
        f"Session {session:08x}, workspace acme/{part}.\n"
        "You are a careful software engineer who works on a repository through tools.\n"
        f"{rules}\n\nTools:\n{tools}"
    )


def describe(name: str) -> dict[str, object]:
    text, parameters = TOOLS[name]
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    return {
        "name": name,
        "description": text,
        "parameters": {"type": "object", "properties": properties, "required": list(parameters)},
    }


def a_call(rng: random.Random, name: str) -> str:
    arguments = {
        key: a_path(rng) if kind == "string" else rng.choice((20, 60, 120, 300)) for key, kind in TOOLS[name][1].items()
    }
    thought = f"Next I look at how {a_name(rng)} reaches {a_name(rng)}; I expect a {rng.choice(NOUNS)} left open."
    return f"{thought}\n<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def a_path(rng: random.Random) -> str:
    return f"services/{rng.choice(PARTS)}/{rng.choice(VERBS)}_{rng.choice(NOUNS)}.py"


def a_name(rng: random.Random) -> str:
    return f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"


def a_file(rng: random.Random) -> list[str]:
    lines = chain.from_iterable(a_function(rng) for _ in range(rng.randrange(4, 8)))
    return [f"{number:>4}  {line}" for number, line in enumerate(lines, rng.randrange(1, 200))]


def a_function(rng: random.Random) -> list[str]:
    noun = rng.choice(NOUNS)
    return [
        f"def {a_name(rng)}({noun}: {noun.title()}, limit: int = {rng.randrange(8, 4096)}) -> {noun.title()}:",
        f'    """{rng.choice(VERBS).title()} the {noun} of one {rng.choice(PARTS)}; raises when it is stale."""',
        f"    with {rng.choice(PARTS)}.{rng.choice(VERBS)}(timeout_s={rng.randrange(2, 90)}) as {rng.choice(NOUNS)}:",
        f"        if {noun}.version < {rng.randrange(1000)}:",
        f"            raise Stale{noun.title()}({noun}.key, {rng.randrange(1000)})",
        f"        return {a_name(rng)}({noun}, limit // {rng.randrange(2, 9)})",
        "",
    ]


def a_test_log(rng: random.Random) -> list[str]:
    passed = [
        f"tests/{rng.choice(PARTS)}/test_{a_name(rng)}.py::test_{a_name(rng)} PASSED "
        f"[{percent:>3}%] {rng.random():.3f}s"
        for percent in range(4, 96, rng.randrange(4, 9))
    ]
    failure = [
        f"tests/{rng.choice(PARTS)}/test_{a_name(rng)}.py::test_{a_name(rng)} FAILED",
        f"E   TimeoutError: {a_name(rng)} took {rng.uniform(30, 90):.2f}s, limit 30s (attempt {rng.randrange(1, 6)})",
        f"{a_path(rng)}:{rng.randrange(20, 400)}: TimeoutError",
    ]
    return [*passed, *failure, f"1 failed, {len(passed)} passed in {rng.uniform(5, 120):.2f}s"]


def some_matches(rng: random.Random) -> list[str]:
    return [
        f"{a_path(rng)}:{rng.randrange(1, 500)}:    {rng.choice(NOUNS)} = {a_name(rng)}({rng.choice(PARTS)})"
        for _ in range(rng.randrange(12, 30))
    ]


def some_samples(rng: random.Random) -> list[str]:
    samples = [
        {"minute": minute, "p50_ms": round(rng.lognormvariate(3, 0.4), 1), "errors": rng.randrange(4)}
        for minute in range(rng.randrange(15, 35))
    ]
    return [json.dumps({"series": f"{rng.choice(PARTS)}.{a_name(rng)}", "samples": samples})]


def some_commits(rng: random.Random) -> list[str]:
    return [
        f"{rng.getrandbits(40):010x} {rng.choice(PARTS)}: {rng.choice(VERBS)} the {rng.choice(NOUNS)} "
        f"before the {rng.choice(NOUNS)} (#{rng.randrange(100, 9999)})"
        for _ in range(rng.randrange(10, 25))
    ]


OUTPUTS: dict[str, Callable[[random.Random], list[str]]] = {
    "read_file": a_file,
    "run_tests": a_test_log,
    "search": some_matches,
    "query_metrics": some_samples,
    "git_log": some_commits,
}
