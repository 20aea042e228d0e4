"""What an engine of one cut computed, engines of other cuts take over: each slab byte for byte, to the last token.

Three engines at once, a model of eight layers and eight KV heads with random weights in float32. The reader's device is
overwritten before; the last page is unfinished.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_kit import PAGE, Answer, Engine, _answer, check_slabs, engine, prompt_of
from matrix_cut import Cut
from matrix_pages import Pages
from random_model import VOCABULARY, random_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NUM_PAGES, TAIL = 7, 37
NUM_LAYERS = NUM_HEADS = 8
CUTS = {"TP1": Cut(), "TP2": Cut(tensor=2), "PP2": Cut(pipeline=2)}
WAYS = [("TP2", "TP1"), ("TP1", "TP2"), ("PP2", "TP1"), ("TP1", "PP2"), ("TP2", "PP2"), ("PP2", "TP2")]
ROUNDING = 1e-3


def ask(running: Engine, prompt: Sequence[int], max_tokens: int, told: Mapping[str, Any]) -> tuple[Answer, Any]:
    """An answer, and what is told of its prompt."""
    from vllm import SamplingParams

    extra = {"kv_transfer_params": dict(told)}
    how = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=1, ignore_eos=True, extra_args=extra)
    request: Any = {"prompt_token_ids": list(prompt)}
    (output,) = running.llm.generate([request], how, use_tqdm=False)
    return _answer(output), output.kv_transfer_params


@dataclass(frozen=True)
class HandedOver:
    """One prompt on both engines."""

    computed: Pages
    taken: Pages
    restored: Answer
    known: Answer


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    model = random_model(tmp_path_factory.mktemp("cuts") / "model", num_layers=NUM_LAYERS, num_kv_heads=NUM_HEADS)
    options = {"dtype": "float32"}
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                engine("none", model, cut, grid="2x2", peer_host="127.0.0.1", engine_options=options)
            )
            for name, cut in CUTS.items()
        }


@pytest.fixture(scope="module", params=WAYS, ids=" to ".join)
def handed_over(request: pytest.FixtureRequest, engines: dict[str, Engine], tmp_path_factory: Any) -> HandedOver:
    one, other = (engines[name] for name in request.param)
    folder: Path = tmp_path_factory.mktemp("pages")
    prompt = prompt_of(NUM_PAGES * PAGE + TAIL, WAYS.index(request.param), VOCABULARY)
    _, told = ask(one, prompt, 1, {"do_remote_decode": True})
    computed = one.pages(NUM_PAGES, folder)
    other.poison_device()
    restored, _ = ask(other, prompt, 8, told)
    return HandedOver(computed, other.pages(NUM_PAGES, folder), restored, one.ask(prompt, max_tokens=8))


def test_each_slab_has_the_bytes_that_were_computed(handed_over: HandedOver) -> None:
    check_slabs(handed_over.computed, handed_over.taken, NUM_PAGES * NUM_LAYERS * NUM_HEADS)


def test_the_answer_is_that_of_the_engine_that_computed_the_prompt(handed_over: HandedOver) -> None:
    assert handed_over.restored.tokens == handed_over.known.tokens
    assert handed_over.restored.logprobs == pytest.approx(handed_over.known.logprobs, abs=ROUNDING)
