"""The connector on a real vLLM engine with a real model: what is restored is what was computed, byte for byte.

The reference for a restored run is vLLM's own prefix-cache hit, and the device cache is overwritten before each
restore, so that nothing can be right by luck. One engine serves the module; a second one, started on the same
store, stands for a restart.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_kit import (
    PAGE,
    Answer,
    Engine,
    engine,
    flip_last_byte,
    object_names,
    perturbed_copy,
    prompt_of,
    stored_pages,
    wait_until,
)

from vllm_hicache.names import ObjectName
from vllm_hicache.storage.file import FileStore

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine") / "store"


@pytest.fixture(scope="module")
def store(root: Path) -> FileStore:
    return FileStore(str(root), 2**30)


@pytest.fixture(scope="module")
def first(root: Path) -> Iterator[Engine]:
    with engine(f"file://{root}?capacity=1GiB") as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def to_damage(first: Engine, store: FileStore) -> tuple[list[int], Answer, list[ObjectName]]:
    """A prompt of three pages, the answer after a device hit, and the names of its objects."""
    before = object_names(store)
    prompt = prompt_of(3 * PAGE + 9, seed=91)
    first.ask(prompt)
    hit = first.ask(prompt)
    first.settle()
    return prompt, hit, sorted(object_names(store) - before)


@pytest.fixture(scope="module")
def second(root: Path, first: Engine) -> Iterator[Engine]:
    """The engine after a restart, as it were: it shares nothing with the first one but the store."""
    with engine(f"file://{root}?capacity=1GiB") as running:
        yield running


def test_host_memory_restores_the_very_bytes_into_a_poisoned_device(first: Engine, store: FileStore) -> None:
    prompt = prompt_of(5 * PAGE + 60, seed=1)
    first.ask(prompt)
    hit = first.ask(prompt)
    first.settle()
    pages = set(stored_pages(store))
    first.poison_device()
    assert not first.device_pages() & pages
    assert first.ask(prompt) == hit
    assert hit.cached == 5 * PAGE
    assert len(first.device_pages() & pages) == 5


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_prompt_around_a_page_border_restores_all_but_what_must_be_computed(first: Engine, extra: int) -> None:
    prompt = prompt_of(4 * PAGE + extra, seed=20 + extra)
    first.ask(prompt)
    hit = first.ask(prompt)
    first.settle()
    first.poison_device()
    restored = first.ask(prompt)
    assert restored == hit
    assert restored.cached == {-1: 3 * PAGE, 0: 4 * PAGE - 1, 1: 4 * PAGE}[extra]


def test_a_device_hit_is_completed_from_host_memory(first: Engine) -> None:
    head, tail = prompt_of(3 * PAGE, seed=31), prompt_of(3 * PAGE, seed=32)
    first.ask(head + tail)
    hit = first.ask(head + tail + [7])
    first.settle()
    first.poison_device()
    first.ask([*head, 5])
    assert first.ask(head + tail + [7]) == hit
    assert hit.cached == 6 * PAGE


def test_the_next_turn_of_a_conversation_restores_what_the_last_one_generated(first: Engine) -> None:
    prompt = prompt_of(2 * PAGE + 100, seed=41)
    answer = first.ask(prompt, max_tokens=40)
    turn = [*prompt, *answer.tokens, 11]
    hit = first.ask(turn)
    first.settle()
    first.poison_device()
    assert first.ask(turn) == hit
    assert hit.cached == 3 * PAGE


def test_another_salt_shares_nothing(first: Engine) -> None:
    prompt = prompt_of(3 * PAGE + 5, seed=51)
    first.ask(prompt, salt="one")
    first.settle()
    first.forget_device()
    assert first.ask(prompt, salt="other").cached == 0
    first.settle()
    first.forget_device()
    assert first.ask(prompt, salt="one").cached == 3 * PAGE


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.5])
def test_an_aborted_request_leaves_no_lease_and_no_held_block(first: Engine, seconds: float) -> None:
    prompt = prompt_of(3000, seed=61)
    first.abort_after(prompt, seconds)
    first.settle()
    assert first.metric("host_pages", state="reserved") == 0
    first.forget_device()
    assert first.metric("open_operations") == 0


def test_the_engines_own_metrics_tell_hits_by_tier_and_bytes_by_direction(first: Engine) -> None:
    prompt = prompt_of(2 * PAGE + 3, seed=71)
    first.ask(prompt)
    first.settle()
    first.forget_device()
    before, moved = first.metric("hit_tokens", tier="host"), first.metric("bytes", direction="load")
    first.ask(prompt)
    assert first.metric("hit_tokens", tier="host") - before == 2 * PAGE
    assert first.metric("bytes", direction="load") - moved == 2 * 30 * 3 * 32768
    assert first.metric("healthy") == 1


def test_a_reset_of_the_connector_gives_no_hit_ever_after(first: Engine, store: FileStore) -> None:
    prompt = prompt_of(2 * PAGE + 9, seed=81)
    first.ask(prompt)
    first.settle()
    names = object_names(store)
    wait_until(lambda: first.llm.reset_prefix_cache(reset_connector=True), "the reset")
    assert first.ask(prompt).cached == 0
    first.settle()
    assert len(object_names(store) - names) == 2


def test_a_restarted_engine_reads_what_the_store_holds(second: Engine, store: FileStore) -> None:
    pages = set(stored_pages(store))
    prompt = prompt_of(5 * PAGE + 60, seed=1)
    restored = second.ask(prompt)
    assert restored.cached == 5 * PAGE
    assert second.metric("hit_tokens", tier="store") == 5 * PAGE
    assert len(second.device_pages() & pages) == 5
    assert second.ask(prompt) == restored


def test_a_damaged_object_is_one_miss_and_the_next_save_heals_it(
    second: Engine, store: FileStore, to_damage: tuple[list[int], Answer, list[ObjectName]]
) -> None:
    prompt, hit, names = to_damage
    flip_last_byte(store, names[0])
    assert second.ask(prompt).tokens == hit.tokens
    assert second.metric("misses", reason="corrupt") == 1
    second.settle()
    assert object_names(store) >= set(names)
    second.poison_device()
    assert second.ask(prompt) == hit


def test_weights_that_differ_share_nothing_under_one_served_name(root: Path, tmp_path: Path) -> None:
    with engine(f"file://{root}?capacity=1GiB", model=perturbed_copy(tmp_path)) as other:
        assert other.ask(prompt_of(5 * PAGE + 60, seed=1)).cached == 0
        assert other.metric("misses") == 0
