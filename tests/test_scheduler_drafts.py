"""The scheduler half of an engine that drafts: what pages are known by, and which of them have a draft's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from scheduler_kit import PAGE, SPACE, Gate, MakeRig, OpenStore, Rig, prompt

from vllm_hicache.keys import PageKeys, chain_root, digest
from vllm_hicache.names import MissReason, PageKey, RequestId, Role
from vllm_hicache.namespace import DraftSpace, Spaces
from vllm_hicache.plan import FlushOp, PageMove
from vllm_hicache.scheduler import Offer

pytest_plugins = ["scheduler_fixtures"]

PLAIN = DraftSpace("draft_model", "draft weights", "bf16", "none", "cpu", 1, 1, 16, "1x1", looks_ahead=False)
AHEAD = replace(PLAIN, method="eagle3", looks_ahead=True)
every_draft = pytest.mark.parametrize("draft", [PLAIN, AHEAD], ids=["draft model", "looks ahead"])
every_miss = pytest.mark.parametrize("miss", ["recompute", "serve"])


def plain_keys(rig: Rig, tokens: Sequence[int]) -> list[PageKey]:
    keys = PageKeys(chain_root(rig.half.namespace.digest()), PAGE)
    keys.extend(tokens)
    return keys.keys


def keys_ahead(rig: Rig, tokens: Sequence[int]) -> list[PageKey]:
    """Of pages whose next token is among `tokens`."""
    after = tokens[PAGE::PAGE]
    plain = plain_keys(rig, tokens)
    return [PageKey(digest(key, token.to_bytes(4, "little"))) for key, token in zip(plain, after, strict=False)]


def stored(gate: Gate, role: Role) -> set[PageKey]:
    names = [info.name for info in gate.list("") if f".{role.value}." in info.name]
    return {PageKey(bytes.fromhex(name.split("/")[2].split(".")[0])) for name in names}


def spoil(gate: Gate, role: Role, key: PageKey) -> None:
    """An object is gone."""
    (name,) = [info.name for info in gate.list("") if f"{key.hex()}.0.{role.value}." in info.name]
    gate.delete(name)


def states(pages: Sequence[PageMove]) -> list[bool]:
    return [page.has_draft for page in pages]


def flushes(rig: Rig, name: str) -> list[PageMove]:
    """Compute a request, save all of it, and take down what is then flushed."""
    rig.compute(name)
    (save,) = rig.plan().saves
    rig.report(save)
    (flush,) = rig.plan().flushes
    return list(flush.pages)


# The token that follows


@pytest.mark.parametrize(("draft", "num_saved"), [(PLAIN, 2), (AHEAD, 1), (None, 2)])
def test_a_page_that_the_next_token_decides_is_saved_when_that_is_known(
    make: MakeRig, draft: DraftSpace | None, num_saved: int
) -> None:
    rig = make(draft=draft)
    rig.begin("a", prompt(2))
    rig.compute("a")
    (save,) = rig.plan().saves
    assert len(save.pages) == num_saved
    rig.sources["a"].all_token_ids.append(7)
    rig.compute("a")
    assert [len(each.pages) for each in rig.plan().saves] == [1] * (2 - num_saved)


def test_tokens_that_a_draft_may_lose_name_no_page(make: MakeRig) -> None:
    rig = make(draft=AHEAD)
    rig.begin("a", prompt(1))
    rig.compute("a", upto=PAGE + 3)
    assert not rig.plan().saves


def test_a_page_is_known_by_the_token_that_follows_it(make: MakeRig) -> None:
    rig, tokens = make(draft=AHEAD), [*prompt(2), 5]
    rig.begin("a", tokens)
    rig.compute("a")
    (save,) = rig.plan().saves
    assert [page.key for page in save.pages] == keys_ahead(rig, tokens)


def test_a_flush_names_the_targets_bytes_as_an_engine_without_a_draft_does(
    make: MakeRig, open_store: OpenStore, gate: Gate
) -> None:
    rig, tokens = make(open_store, draft=AHEAD), [*prompt(2), 5]
    rig.run("a", tokens)
    assert stored(gate, Role.TARGET) == set(plain_keys(rig, tokens))
    assert stored(gate, Role.DRAFT) == set(keys_ahead(rig, tokens))


def test_requests_that_part_behind_a_page_share_the_pages_before_and_the_targets_object_of_it(
    make: MakeRig, open_store: OpenStore, gate: Gate
) -> None:
    rig = make(open_store, draft=AHEAD)
    rig.run("a", [*prompt(3), 5])
    assert rig.run("b", [*prompt(3), 6]) == 2 * PAGE
    assert [len(stored(gate, role)) for role in Role] == [3, 4]
    assert [rig.run("c", [*prompt(3), token]) for token in (5, 6)] == [3 * PAGE] * 2


@pytest.mark.parametrize(("draft", "offered"), [(None, 3 * PAGE - 1), (PLAIN, 3 * PAGE - 1), (AHEAD, 2 * PAGE)])
@pytest.mark.parametrize("has_store", [False, True], ids=["from host memory", "from the store"])
def test_a_hit_loses_the_page_whose_next_token_is_not_known_and_no_other(
    make: MakeRig, open_store: OpenStore, draft: DraftSpace | None, offered: int, has_store: bool
) -> None:
    writer = make(open_store, draft=draft)
    writer.run("a", [*prompt(3), 5])
    reader = make(open_store, draft=draft) if has_store else writer
    reader.begin("b", prompt(3))
    assert reader.match("b") == Offer(offered)
    assert reader.match("b", PAGE) == Offer(offered - PAGE)


def test_a_load_says_both_names_of_every_page(make: MakeRig, open_store: OpenStore) -> None:
    tokens = [*prompt(3), 5]
    make(open_store, draft=AHEAD).run("a", tokens)
    rig = make(open_store, draft=AHEAD)
    rig.begin("b", tokens)
    rig.admit("b")
    (load,) = rig.plan().loads
    assert [page.name(Role.DRAFT) for page in load.pages] == keys_ahead(rig, tokens)
    assert [page.name(Role.TARGET) for page in load.pages] == plain_keys(rig, tokens)


@pytest.mark.parametrize("write", ["through", "back", "selective"])
def test_plain_names_are_forgotten_with_the_pages_that_leave_host_memory(
    make: MakeRig, open_store: OpenStore, gate: Gate, write: str
) -> None:
    rig = make(open_store, num_slots=4, draft=AHEAD, write=write)
    for first in range(1, 9):
        rig.run(f"r{first}", prompt(3.5, first))
        assert len(rig.half._operations._storable._plain) == rig.half.tier.num_slots - rig.half.tier.num_free
    rig.half.reset("new weights")
    assert not rig.half._operations._storable._plain
    assert stored(gate, Role.TARGET) <= {key for first in range(1, 9) for key in plain_keys_of(first)}


def plain_keys_of(first: int) -> list[PageKey]:
    keys = PageKeys(chain_root(SPACE.digest()), PAGE)
    keys.extend(prompt(3.5, first))
    return keys.keys


def test_without_looking_ahead_there_are_no_other_names(make: MakeRig, open_store: OpenStore) -> None:
    rig = make(open_store, draft=PLAIN)
    rig.run("a", prompt(3))
    assert not rig.half._operations._storable._plain


# What the store lacks


@every_draft
@pytest.mark.parametrize(("miss", "pages"), [("recompute", 0), ("serve", 3)])
def test_pages_that_an_engine_without_a_draft_has_written_are_served_as_configured(
    make: MakeRig, open_store: OpenStore, draft: DraftSpace, miss: str, pages: int
) -> None:
    make(open_store).run("writer", prompt(3.5))
    rig = make(open_store, draft=draft, draft_miss=miss)
    rig.begin("a", prompt(3.5))
    assert rig.admit("a") == pages * PAGE
    assert [states(load.pages) for load in rig.plan().loads] == [[False] * 3] * (pages > 0)


@every_draft
@every_miss
@pytest.mark.parametrize("page", range(4))
def test_a_load_has_draft_state_up_to_the_first_page_without(
    make: MakeRig, open_store: OpenStore, gate: Gate, draft: DraftSpace, miss: str, page: int
) -> None:
    writer, tokens = make(open_store, draft=draft), prompt(4.5)
    writer.run("writer", tokens)
    spoil(gate, Role.DRAFT, (keys_ahead if draft.looks_ahead else plain_keys)(writer, tokens)[page])
    rig = make(open_store, draft=draft, draft_miss=miss)
    rig.begin("a", tokens)
    num_pages = page if miss == "recompute" else 4
    assert rig.admit("a") == num_pages * PAGE
    loads = rig.plan().loads
    assert [states(load.pages) for load in loads] == [([True] * page + [False] * 4)[:num_pages]] * (num_pages > 0)


@every_draft
def test_host_memory_before_the_stores_pages_counts_as_it_was_saved(
    make: MakeRig, open_store: OpenStore, gate: Gate, draft: DraftSpace
) -> None:
    make(open_store).run("writer", prompt(4.5))
    rig = make(open_store, draft=draft, draft_miss="serve", write="never")
    rig.begin("a", prompt(2.5))
    rig.compute("a")
    rig.settle()
    rig.begin("b", prompt(4.5))
    assert rig.admit("b") == 4 * PAGE
    (load,) = rig.plan().loads
    assert [(page.from_store, page.has_draft) for page in load.pages] == [(False, True)] * 2 + [(True, False)] * 2


def test_pages_without_state_are_counted_as_they_come(make: MakeRig, open_store: OpenStore) -> None:
    make(open_store).run("writer", prompt(3.5))
    rig = make(open_store, draft=PLAIN, draft_miss="serve")
    rig.begin("a", prompt(3.5))
    rig.admit("a")
    (load,) = rig.plan().loads
    rig.report(load, 2, reason=MissReason.ABSENT)
    assert rig.counts["pages_without_draft"] == 2


# Bare pages


def bare(make: MakeRig, open_store: OpenStore, draft: DraftSpace = PLAIN, **settings: object) -> Rig:
    """An engine that has been served two pages without state, in host memory now."""
    make(open_store).run("writer", prompt(2.5))
    rig = make(open_store, draft=draft, draft_miss="serve", **settings)
    rig.begin("a", prompt(2.5))
    assert rig.admit("a") == 2 * PAGE
    rig.settle()
    return rig


def goes_on(rig: Rig, name: str, pages: float) -> None:
    """The request is given more tokens."""
    rig.sources[name].all_token_ids[:] = prompt(pages)


@every_draft
def test_what_is_computed_behind_a_bare_page_is_flushed_without_a_draft(
    make: MakeRig, open_store: OpenStore, gate: Gate, draft: DraftSpace
) -> None:
    rig = bare(make, open_store, draft)
    goes_on(rig, "a", 4.5)
    assert states(flushes(rig, "a")) == [False, False]
    rig.settle()
    assert stored(gate, Role.DRAFT) == set()
    assert len(stored(gate, Role.TARGET)) == 4


@every_draft
def test_a_bare_page_in_host_memory_makes_the_next_request_bare(
    make: MakeRig, open_store: OpenStore, draft: DraftSpace
) -> None:
    rig = bare(make, open_store, draft)
    rig.finish("a")
    rig.begin("b", prompt(3.5))
    assert rig.admit("b") == 2 * PAGE
    rig.settle()
    assert states(flushes(rig, "b")) == [False]


@every_draft
@pytest.mark.parametrize("local", [PAGE, 2 * PAGE])
def test_a_bare_page_on_the_device_makes_the_next_request_bare(
    make: MakeRig, open_store: OpenStore, draft: DraftSpace, local: int
) -> None:
    rig = bare(make, open_store, draft)
    rig.begin("b", prompt(3.5))
    rig.admit("b", local)
    rig.settle()
    assert states(flushes(rig, "b")) == [False]


def test_a_device_that_ends_inside_a_bare_page_makes_the_next_request_bare(
    make: MakeRig, open_store: OpenStore
) -> None:
    make(open_store).run("writer", prompt(1.5))
    rig = make(open_store, draft=PLAIN, draft_miss="serve")
    rig.begin("a", prompt(1.5))
    assert rig.admit("a") == PAGE
    rig.settle()
    rig.begin("b", prompt(2.5))
    rig.half.match(RequestId("b"), 16)
    rig.half.allocated(RequestId("b"), rig.blocks("b"), 0)
    assert states(flushes(rig, "b")) == [False]


@every_draft
def test_a_request_beside_bare_ones_is_whole(make: MakeRig, open_store: OpenStore, draft: DraftSpace) -> None:
    rig = bare(make, open_store, draft)
    rig.begin("b", prompt(2.5, 1))
    assert rig.admit("b") == 0
    assert states(flushes(rig, "b")) == [True, True]


@every_draft
def test_what_is_computed_from_the_first_token_on_is_whole_and_heals_the_store(
    make: MakeRig, open_store: OpenStore, gate: Gate, draft: DraftSpace
) -> None:
    rig = bare(make, open_store, draft, num_slots=3)
    rig.finish("a")
    rig.run("b", prompt(3.5, 1))  # evicts the bare pages
    rig.begin("c", prompt(2.5))
    rig.half.match(RequestId("c"), 0)
    rig.half.allocated(RequestId("c"), rig.blocks("c"), 0)  # not asked of the store: all of it is computed
    assert states(flushes(rig, "c")) == [True, True]
    rig.settle()
    other = make(open_store, draft=draft)
    other.begin("d", prompt(2.5))
    assert other.match("d") == Offer(2 * PAGE)


@every_draft
def test_pages_are_prefetched_with_the_state_that_the_store_has(
    make: MakeRig, open_store: OpenStore, gate: Gate, draft: DraftSpace
) -> None:
    writer, tokens = make(open_store, draft=draft), prompt(3.5)
    writer.run("writer", tokens)
    spoil(gate, Role.DRAFT, (keys_ahead if draft.looks_ahead else plain_keys)(writer, tokens)[1])
    rig = make(open_store, draft=draft, draft_miss="serve", prefetch="best_effort")
    rig.begin("a", tokens)
    assert rig.lookups is not None
    rig.lookups.wait()
    (load,) = rig.plan().loads
    assert (load.request_id, states(load.pages)) == (None, [True, False, False])
    assert [page.plain for page in load.pages] == plain_keys(rig, tokens)
    rig.report(load)
    goes_on(rig, "a", 4.5)
    assert rig.admit("a") == 3 * PAGE
    rig.settle()
    assert states(flushes(rig, "a")) == [False]


@every_draft
def test_a_step_without_a_draft_pass_leaves_its_pages_and_all_behind_them_bare(
    make: MakeRig, open_store: OpenStore, draft: DraftSpace
) -> None:
    rig, found = make(open_store, draft=draft), []
    rig.begin("a", prompt(1.5))
    for pages, is_drafted in ((1.5, True), (2.5, False), (3.5, True)):
        goes_on(rig, "a", pages)
        rig.compute("a", is_drafted=is_drafted)
        (save,) = rig.plan().saves
        rig.report(save)
        (flush,) = rig.plan().flushes
        found += states(flush.pages)
    assert found == [True, False, False]


def test_a_reset_leaves_no_page_bare_that_is_computed_afterwards(make: MakeRig, open_store: OpenStore) -> None:
    rig = bare(make, open_store)
    rig.half.reset("new weights")
    rig.finish("a")
    rig.begin("b", prompt(2.5))
    assert rig.admit("b") == 0
    assert states(flushes(rig, "b")) == [True, True]


# Namespaces


@pytest.mark.parametrize("draft", [None, PLAIN, AHEAD])
def test_operations_say_under_which_namespaces_they_read_and_write(
    make: MakeRig, open_store: OpenStore, draft: DraftSpace | None
) -> None:
    rig = make(open_store, draft=draft)
    rig.begin("a", prompt(1.5))
    rig.compute("a")
    (save,) = rig.plan().saves
    rig.report(save)
    (flush,) = rig.plan().flushes
    target = SPACE.digest()
    assert isinstance(flush, FlushOp)
    assert flush.spaces == Spaces(target, draft.digest_for(target) if draft is not None else None)
    rig.half.reset("nonce")
    target = rig.half.namespace.digest()
    rig.begin("b", prompt(1.5))
    rig.compute("b")
    rig.report(rig.plan().saves[0])
    assert rig.plan().flushes[0].spaces == Spaces(target, draft.digest_for(target) if draft is not None else None)
