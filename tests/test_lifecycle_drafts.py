"""The life of a request on engines that draft: what is restored of both models, and what is stored of neither.

Every step compares all KV that the target's attention would read, and what the draft would read where it must be
whole. Every test ends with the conservation laws, and with every stored object of a draft compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from lifecycle_kit import check_ranks_agreed, check_reset, check_stored, preempt_after_every_load, prompt
from simulated_draft import Draft, DraftingEngine, DraftingRank, start_of
from simulated_engine import SimulatedEngine, engines_on
from simulated_faults import StoreFaults
from simulated_model import BLOCK, HEADS, LAYERS, POISON, Cut, Job
from simulated_traffic import Traffic

from vllm_hicache.errors import StoreUnavailable
from vllm_hicache.names import ObjectName, Role
from vllm_hicache.storage.registry import open_store

pytest_plugins = ["lifecycle_fixtures"]

PACKED, SIDECAR, AHEAD = Draft(), Draft("sidecar"), Draft("sidecar", looks_ahead=True)
DRAFTS = {"packed": PACKED, "sidecar": SIDECAR, "looks ahead": AHEAD}
KINDS: dict[str, Draft | None] = {"no draft": None, **DRAFTS}
CUTS = [Cut(), Cut(2), Cut(1, 2), Cut(2, 2), Cut(2, 1, 2, 1)]
SHARED = Cut(2, 2, 1, 1)
"""Two stages of two ranks that hold the same heads, and keep each page once."""
TEXT = prompt(100)
NUM_PAGES = 6

Start = Callable[..., SimulatedEngine]
every_kind = pytest.mark.parametrize("draft", KINDS.values(), ids=KINDS)
every_draft = pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
every_cut = pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"tp{cut.tp_size}-pp{cut.pp_size}-dcp{cut.dcp_size}")
every_miss = pytest.mark.parametrize("miss", ["recompute", "serve"])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts engines of all kinds on one store."""
    engines: list[SimulatedEngine] = []
    with engines_on(tmp_path, start_of) as begin:

        def started(draft: Draft | None = None, cut: Cut = CUTS[0], **how: object) -> SimulatedEngine:
            usual = {"grid": f"{LAYERS}x{cut.num_heads}", **cut._asdict()}
            engines.append(begin(draft=draft, **(usual | how)))
            return engines[-1]

        yield started
    check_ranks_agreed(engines)


class Stored:
    """The objects of one request's pages, to be removed."""

    def __init__(self, tmp_path: Path, engine: SimulatedEngine, job: Job) -> None:
        self._store = open_store(f"file://{tmp_path}/store?capacity=1GiB")
        self._names = [info.name for info in self._store.list("")]
        keys = engine.page_keys(job)
        self._of = {Role.TARGET: keys.plain, Role.DRAFT: keys.keys}

    def remove(self, role: Role, *pages: int) -> None:
        for page in pages:
            names = [name for name in self._names if f"{self._of[role][page].hex()}.0.{role.value}." in name]
            assert names
            for name in names:
                self._store.delete(name)

    def num_objects(self, role: Role) -> int:
        return sum(f".{role.value}." in info.name for info in self._store.list(""))


def inexact(draft: Draft | None) -> dict[str, bool]:
    """For texts that part at a page's end: see `DraftingEngine`."""
    return {"is_exact": False} if draft is not None and draft.looks_ahead else {}


def drafting(engine: SimulatedEngine) -> DraftingEngine:
    return cast("DraftingEngine", engine)


def drafts_of(engine: SimulatedEngine, job: Job) -> list[bool]:
    """For each page of a request, whether the draft's part of it is stored; that it is right is checked at the end."""
    return [found is not None for found in drafting(engine).stored_drafts(job)]


class TestTiers:
    @every_kind
    @every_miss
    @every_cut
    def test_a_prompt_is_served_from_the_device_then_host_memory_then_the_store(
        self, start: Start, draft: Draft | None, miss: str, cut: Cut
    ) -> None:
        engine = start(draft, cut, draft_miss=miss)
        cold = engine.serve(TEXT)
        again = engine.serve(TEXT)
        assert (cold.num_external, again.num_local + again.num_external) == (0, 96)
        engine.drop_device()
        assert engine.serve(TEXT).num_external == 96
        other = start(draft, cut, draft_miss=miss)
        assert other.serve(TEXT).num_external == 96
        assert (other.hits, other.counters["pages_without_draft"]) == ({"disk": 96}, 0)
        assert check_stored(other, cold) == NUM_PAGES
        assert draft is None or drafts_of(other, cold) == [True] * NUM_PAGES

    @every_kind
    def test_ranks_that_hold_the_same_keep_each_page_once_and_give_each_other_both_halves(
        self, start: Start, draft: Draft | None
    ) -> None:
        engine = start(draft, SHARED, num_slots=8)
        assert engine.tier.num_slots == 16
        engine.serve(TEXT)
        engine.drop_device()
        assert engine.serve(TEXT).num_external == 96
        assert start(draft, SHARED).serve(TEXT).num_external == 96

    @every_draft
    def test_pages_of_many_blocks_are_restored_where_the_device_ends_inside_one(
        self, start: Start, draft: Draft
    ) -> None:
        engine, text = start(draft, page_blocks=4), prompt(12 * BLOCK + 1)
        engine.serve(text)
        for num_local in (0, 1, 3, 6):
            engine.drop_device()
            engine.serve(text[: num_local * BLOCK + 1], max_tokens=1)
            job = engine.serve(text)
            assert job.num_local + job.num_external == 12 * BLOCK

    @every_draft
    def test_wrong_guesses_are_taken_back_and_what_was_guessed_right_serves_the_next_turn(
        self, start: Start, draft: Draft
    ) -> None:
        engine = drafting(start(draft))
        first = engine.serve(prompt(30), max_tokens=70)
        assert 0 < engine.num_right < engine.num_guessed
        engine.drop_device()
        assert engine.serve([*first.tokens, *prompt(9, 1)]).num_external == 96

    @every_draft
    @pytest.mark.parametrize("cut", [Cut(2), Cut(2, 2)], ids=str)
    def test_each_rank_may_hold_all_heads_of_the_draft(self, start: Start, draft: Draft, cut: Cut) -> None:
        alike = replace(draft, heads=2, is_cut=False)
        engine = start(alike, cut)
        engine.serve(TEXT)
        heads = [cast("DraftingRank", rank).heads for rank in engine.ranks]
        assert heads == [slice(0, 0)] * (cut.num_ranks - 2) + [slice(0, 2)] * 2
        assert start(alike).serve(TEXT).num_external == start(replace(alike, is_cut=True), cut).serve(TEXT).num_external
        assert start(replace(alike, is_cut=True), cut).serve(TEXT).num_external == 96

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=str)
    @pytest.mark.parametrize("heads", [1, 2, 4])
    def test_a_draft_may_have_any_heads_and_elements(self, start: Start, dtype: torch.dtype, heads: int) -> None:
        draft = Draft(heads=heads, dtype=dtype, head_size=12)
        start(draft, Cut(2)).serve(TEXT)
        assert start(replace(draft, tier="sidecar"), Cut(2, 2)).serve(TEXT).num_external == 96

    def test_stages_without_draft_layers_keep_pages_of_the_target_alone(self, start: Start) -> None:
        engine = start(PACKED, Cut(1, 2), num_slots=10)
        engine.serve(TEXT)
        sizes = [rank.half._pool.slot_bytes for rank in engine.ranks]
        assert sizes == [
            engine.ranks[0].share.page_bytes(BLOCK),
            engine.ranks[1].share.page_bytes(BLOCK) + PACKED.page_bytes(BLOCK, slice(0, 1)),
        ]
        assert [rank.half._pool.shard for rank in engine.ranks] == [engine.ranks[0].half._pool.shard] * 2


class TestNextToken:
    """A draft that looks ahead knows a page by the token that follows it too."""

    @pytest.mark.parametrize(("draft", "hit"), [(PACKED, 96), (AHEAD, 80)], ids=["draft model", "looks ahead"])
    def test_a_hit_loses_the_page_whose_next_token_is_another(self, start: Start, draft: Draft, hit: int) -> None:
        engine, other = start(draft), [*TEXT[:96], (TEXT[96] + 1) % 1000, *TEXT[97:]]
        engine.serve(TEXT)
        engine.drop_device()
        assert engine.serve(other).num_external == hit
        assert start(draft).serve(other).num_external == 96

    @pytest.mark.parametrize(("draft", "hit"), [(PACKED, 95), (AHEAD, 80)], ids=["draft model", "looks ahead"])
    def test_a_hit_loses_the_last_page_where_no_next_token_is_known(self, start: Start, draft: Draft, hit: int) -> None:
        start(draft).serve(TEXT[:96])
        assert start(draft).serve(TEXT[:96]).num_external == hit

    def test_the_targets_object_is_one_whatever_the_next_token_is(self, start: Start, tmp_path: Path) -> None:
        engine = start(AHEAD, grid="1x1")
        jobs = [engine.serve([*TEXT[:96], token], max_tokens=1) for token in (1, 2, 3)]
        stored = Stored(tmp_path, engine, jobs[0])
        assert (stored.num_objects(Role.TARGET), stored.num_objects(Role.DRAFT)) == (NUM_PAGES, NUM_PAGES + 2)
        assert [start(AHEAD, grid="1x1").serve(job.tokens).num_external for job in jobs] == [96] * 3

    @pytest.mark.xfail(
        strict=True,
        raises=AssertionError,
        reason="vLLM's own prefix cache does not tell blocks apart by the token that follows: it serves one inside "
        "a chain whose last place belongs to another text, and saved again that has the name of this one",
    )
    def test_a_page_is_not_saved_from_a_block_whose_next_token_was_another(self, start: Start) -> None:
        engine = drafting(start(AHEAD, store="none", num_slots=6, eviction="lru", is_exact=False))
        one, other = [*prompt(48), 1, *prompt(30, 2)], [*prompt(48), 2, *prompt(40, 1)]
        for text in (one, other, prompt(97, 7)):  # the last one takes all slots
            engine.serve(text)
        job = engine.serve(other)
        slot = engine.tier.match(engine.keys(job), touch=False).slots[2]
        assert engine.host_bytes(slot).endswith(engine.draft_bytes(job, 2))

    def test_such_a_page_leaves_no_object_of_the_draft(self, start: Start, tmp_path: Path) -> None:
        engine = drafting(start(AHEAD, num_slots=6, eviction="lru", is_exact=False, grid="1x1"))
        one, other = [*prompt(48), 1, *prompt(30, 2)], [*prompt(48), 2, *prompt(40, 1)]
        for text in (one, other):
            job = engine.serve(text)
        Stored(tmp_path, engine, job).remove(Role.DRAFT, 2)
        engine.serve(prompt(97, 7))  # takes all slots
        job = engine.serve(other)
        assert job.num_local >= 48
        assert list(engine.stored_drafts(job))[2] is None
        assert engine.half._operations._storable._doubtful <= set(engine.keys(job))
        engine.serve(prompt(97, 8))
        assert not engine.half._operations._storable._doubtful


class TestSharing:
    """Engines of all kinds share the target's objects, and a draft's with their like."""

    @every_kind
    @pytest.mark.parametrize("writer", KINDS.values(), ids=[f"by {kind}" for kind in KINDS])
    @pytest.mark.parametrize("cut", [Cut(2, 2)], ids=str)
    def test_every_kind_is_served_what_any_other_has_written(
        self, start: Start, writer: Draft | None, draft: Draft | None, cut: Cut
    ) -> None:
        start(writer).serve(TEXT)
        reader = start(draft, cut, draft_miss="serve", grid=f"{LAYERS}x{HEADS}")
        assert reader.serve(TEXT).num_external == 96
        alike = draft is None or (writer is not None and writer.looks_ahead == draft.looks_ahead)
        assert reader.counters["pages_without_draft"] == (0 if alike else NUM_PAGES)

    @every_draft
    @pytest.mark.parametrize("writer", KINDS.values(), ids=[f"by {kind}" for kind in KINDS])
    def test_where_a_miss_is_computed_again_only_ones_like_is_served(
        self, start: Start, writer: Draft | None, draft: Draft
    ) -> None:
        start(writer).serve(TEXT)
        alike = writer is not None and writer.looks_ahead == draft.looks_ahead
        reader = start(draft)
        job = reader.serve(TEXT)
        assert job.num_external == (96 if alike else 0)
        assert drafts_of(reader, job) == [True] * NUM_PAGES
        assert start(draft).serve(TEXT).num_external == 96

    def test_a_draft_of_other_weights_finds_nothing_of_anothers(self, start: Start) -> None:
        other = replace(PACKED, weights="other")
        start(PACKED).serve(TEXT)
        assert start(other, draft_miss="serve", write="never").serve(TEXT).num_external == 96
        assert start(other).serve(TEXT).num_external == 0
        assert [start(draft).serve(TEXT).num_external for draft in (PACKED, other)] == [96, 96]

    def test_all_kinds_of_engines_and_cuts_write_equal_bytes(
        self, start: Start, tmp_path: Path, faults: StoreFaults
    ) -> None:
        """What is there already is not written again, so that each has a store of its own."""
        for number, (draft, cut) in enumerate(product(KINDS.values(), CUTS[:4])):
            start(draft, cut, store=f"file://{tmp_path}/store-{number}?capacity=64MiB").serve(TEXT)
        assert {(len(digests) > 4, len(set(digests))) for digests in faults.written.values()} >= {(True, 1)}
        assert {len(set(digests)) for digests in faults.written.values()} == {1}


class TestHoles:
    """C2. The usable prefix is the leading run of pages of which every required role is there."""

    @every_draft
    @pytest.mark.parametrize("cut", [Cut(), Cut(2, 2), Cut(2, 1, 2, 1)], ids=str)
    @pytest.mark.parametrize("page", [0, 5])
    def test_pages_before_the_first_without_a_draft_are_used(
        self, start: Start, tmp_path: Path, draft: Draft, cut: Cut, page: int
    ) -> None:
        writer = start(draft, cut)
        job = writer.serve(TEXT)
        Stored(tmp_path, writer, job).remove(Role.DRAFT, page)
        assert start(draft, cut, write="never").serve(TEXT).num_external == page * BLOCK
        serving = start(draft, cut, draft_miss="serve", write="never")
        assert serving.serve(TEXT).num_external == 96
        assert serving.counters["pages_without_draft"] == NUM_PAGES - page
        assert start(draft, cut).serve(TEXT).num_external == page * BLOCK
        assert start(draft, cut).serve(TEXT).num_external == 96

    @every_draft
    @every_miss
    def test_holes_in_both_roles_leave_the_run_before_the_first(
        self, start: Start, tmp_path: Path, draft: Draft, miss: str
    ) -> None:
        writer = start(draft)
        stored = Stored(tmp_path, writer, writer.serve(TEXT))
        stored.remove(Role.DRAFT, 1, 5)
        stored.remove(Role.TARGET, 4)
        reader = start(draft, draft_miss=miss)
        assert reader.serve(TEXT).num_external == {"recompute": 1, "serve": 4}[miss] * BLOCK
        assert reader.counters["pages_without_draft"] == {"recompute": 0, "serve": 3}[miss]

    @every_draft
    @every_miss
    @pytest.mark.parametrize("role", list(Role))
    def test_a_promised_object_that_cannot_be_read_is_a_miss_of_its_page(
        self, start: Start, faults: StoreFaults, draft: Draft, miss: str, role: Role
    ) -> None:
        writer = start(draft)
        keys = writer.page_keys(writer.serve(TEXT))
        bad = {Role.TARGET: keys.plain, Role.DRAFT: keys.keys}[role][2].hex()

        def fault(operation: str, name: ObjectName) -> None:
            if operation == "read" and f"{bad}.0.{role.value}." in name:
                raise StoreUnavailable("down")

        faults.fault = fault
        reader = start(draft, draft_miss=miss, write="never")
        reader.serve(TEXT)
        assert reader.counters["hit_tokens|store"] == 2 * BLOCK


class TestWithoutState:
    """`draft_miss=serve`: the target's pages are served, and what the draft makes of them is not stored."""

    @every_draft
    @pytest.mark.parametrize(
        ("cut", "write"),
        [(Cut(), "through"), (Cut(), "back"), (Cut(), "selective"), (Cut(2, 2), "through"), (Cut(2, 1, 2, 1), "back")],
        ids=str,
    )
    def test_what_is_computed_on_a_prefix_without_state_is_stored_without_a_draft(
        self, start: Start, draft: Draft, cut: Cut, write: str
    ) -> None:
        start(None, cut).serve(TEXT)
        engine = start(draft, cut, draft_miss="serve", write=write, num_slots=12)
        job = engine.serve(TEXT, max_tokens=60)
        for seed in range(3):
            engine.drop_device()
            engine.serve([*job.tokens, *prompt(20, seed)])
        num_pages = len(engine.keys(job))
        assert drafts_of(engine, job) == [False] * num_pages
        pages = list(enumerate(engine.stored_pages(job)))
        assert all(found in (None, engine.page_bytes(job, page)) for page, found in pages)
        assert sum(found is not None for _, found in pages) >= NUM_PAGES

    @every_draft
    def test_the_drafts_part_of_such_a_page_is_zero_on_the_device_too(self, start: Start, draft: Draft) -> None:
        start(None).serve(TEXT)
        engine = drafting(start(draft, draft_miss="serve", num_blocks=16))
        engine.serve(prompt(200, 9), max_tokens=1)
        name = engine.add(TEXT, max_tokens=2)
        engine.run(lambda: bool(engine.jobs[name].output))
        (blocks,) = engine.scheduler.kv_cache_manager.get_block_ids(name)
        device = cast("DraftingRank", engine.ranks[0]).draft_device
        assert not device[:, list(blocks[:NUM_PAGES])].any()
        assert set(np.unique(device)) > {0, POISON}

    @every_draft
    def test_an_engine_that_computes_such_pages_again_heals_them_for_all(self, start: Start, draft: Draft) -> None:
        start(None).serve(TEXT)
        serving = start(draft, draft_miss="serve")
        job = serving.serve(TEXT, max_tokens=30)
        assert not any(drafts_of(serving, job))
        healer = start(draft)
        assert healer.serve(job.tokens, max_tokens=1).num_external == 0
        assert all(drafts_of(serving, job))
        last = start(draft, draft_miss="serve")
        assert last.serve(job.tokens, max_tokens=1).num_external == 8 * BLOCK
        assert last.counters["pages_without_draft"] == 0

    @every_draft
    def test_pages_without_state_are_prefetched_and_known_as_such(self, start: Start, draft: Draft) -> None:
        start(None).serve(TEXT)
        engine = start(draft, draft_miss="serve", prefetch="best_effort", max_requests=1)
        engine.add(prompt(20, 5), max_tokens=200)
        name = engine.add(TEXT, max_tokens=40)
        engine.run()
        job = engine.jobs[name]
        assert (job.num_external, engine.counters["pages_without_draft"]) == (96, NUM_PAGES)
        assert drafts_of(engine, job) == [False] * len(engine.keys(job))

    @every_draft
    def test_where_vllm_leaves_out_the_drafts_pass_nothing_of_that_is_stored(self, start: Start, draft: Draft) -> None:
        short = replace(draft, max_tokens=160)
        engine = start(short)
        long, other = engine.add(prompt(120), max_tokens=80), engine.add(prompt(40, 1), max_tokens=80)
        engine.run()
        stored = [drafts_of(engine, engine.jobs[name]) for name in (long, other)]
        for pages in stored:
            assert pages == sorted(pages, reverse=True)
            assert 0 < sum(pages) < len(pages)
        assert check_stored(engine, engine.jobs[long]) == 199 // BLOCK


class TestTraffic:
    @every_draft
    @pytest.mark.parametrize("cut", [Cut(2), Cut(2, 2), Cut(2, 1, 2, 1)], ids=str)
    def test_a_preempted_request_comes_back_after_every_load(self, start: Start, draft: Draft, cut: Cut) -> None:
        engine = start(draft, cut)
        engine.serve(TEXT)
        assert len(preempt_after_every_load(engine, TEXT).output) == 8

    @every_draft
    @pytest.mark.parametrize("cut", [Cut(), Cut(2, 2), Cut(2, 1, 2, 1), SHARED], ids=str)
    def test_random_requests_see_the_right_bytes_while_pages_are_evicted(
        self, start: Start, draft: Draft, cut: Cut
    ) -> None:
        sizes = {"num_blocks": 2 + 26 // cut.dcp_size, "num_slots": 20, "step_tokens": 64}
        engine = start(draft, cut, policy="priority", skew=5, **inexact(draft), **sizes)
        Traffic(engine, seed=3, salts=(None, "a")).run(150)
        engine.run()
        assert engine.counters["evicted_pages|host"] > 0
        assert engine.counters["hit_tokens|host"] + engine.counters["hit_tokens|store"] > 0

    @every_miss
    def test_engines_of_all_kinds_in_traffic_on_one_store_store_no_noise(
        self, start: Start, faults: StoreFaults, miss: str
    ) -> None:
        """A store that fails at random: draft objects are missing where the target's are not, and the reverse."""
        chance = random.Random(5)

        def fault(operation: str, name: ObjectName) -> None:
            if operation != "exists" and chance.random() < 0.1:
                raise StoreUnavailable("down")

        sizes = {"num_blocks": 40, "num_slots": 12}
        engines = [start(draft, draft_miss=miss, **inexact(draft), **sizes) for draft in KINDS.values()]
        faults.fault = fault
        traffic = [Traffic(engine, seed=1) for engine in engines]
        for _ in range(20):
            for each in traffic:
                each.run(8, arrivals=0.6)
        for engine in engines:
            engine.run()
        assert sum(engine.counters["hit_tokens|store"] for engine in engines) > 0

    @every_draft
    def test_nothing_from_before_a_reset_is_served_afterwards(self, start: Start, draft: Draft) -> None:
        check_reset(start(draft), TEXT, 96)
