"""Ranks that tile the model agree; each that does not is refused by its number, and a grid is named that would do."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_kit import Cut, cuts, inventories, layout_of, layouts, role_shapes

from vllm_hicache.errors import ConfigError
from vllm_hicache.geometry import Holding, PageLayout, RankGeometry, RoleShape
from vllm_hicache.grid import Grid
from vllm_hicache.inventory import Inventory, agree, check_writers
from vllm_hicache.names import Role
from vllm_hicache.ownership import Ownership, Shard

UNHURRIED = settings(deadline=None)
ENGINES = role_shapes().flatmap(lambda roles: st.tuples(layouts(roles), cuts(roles)))
LAYOUT = layout_of(61, 8, Grid())
CUT = Cut(2, (31, 30))


def ranks(cut: Cut = CUT, layout: PageLayout = LAYOUT) -> list[Inventory]:
    return inventories(cut.ranks(layout))


def changed(number: int, **change: object) -> list[Inventory]:
    """The four ranks of `CUT`, one of which holds or says something else."""
    found = ranks()
    holding = found[number].holdings[0]
    fields = {key: value for key, value in change.items() if key in Holding.__dataclass_fields__}
    others = {key: value for key, value in change.items() if key not in fields}
    found[number] = replace(found[number], holdings=(replace(holding, **fields),), **others)  # type: ignore[arg-type]
    return found


def refusal(found: list[Inventory], num_ranks: int = 4) -> str:
    with pytest.raises(ConfigError) as caught:
        agree(found, num_ranks)
    return str(caught.value)


@UNHURRIED
@given(ENGINES)
def test_ranks_of_any_cut_agree(engine: tuple[PageLayout, Cut]) -> None:
    layout, cut = engine
    found = inventories(cut.ranks(layout))
    agreed = agree(found, len(found))
    assert (agreed.layout, agreed.encodings) == (layout, {Role.TARGET: "made-up"})


@UNHURRIED
@given(ENGINES, st.data())
def test_ranks_agree_in_whatever_order_they_come_on_the_smallest_pool(
    engine: tuple[PageLayout, Cut], data: st.DataObject
) -> None:
    layout, cut = engine
    found = inventories(cut.ranks(layout))
    pools = data.draw(st.lists(st.integers(1, 1_000), min_size=len(found), max_size=len(found)))
    found = [replace(each, num_rows=size) for each, size in zip(found, pools, strict=True)]
    assert agree(data.draw(st.permutations(found)), len(found)).num_slots == min(pools)


def test_uneven_stages_tile_the_model() -> None:
    assert agree(ranks(), 4).layout == LAYOUT


def test_replicas_tile_the_model() -> None:
    layout = layout_of(4, 2, Grid())
    assert agree(ranks(Cut(8, (4,)), layout), 8).layout == layout


@pytest.mark.parametrize("missing", range(4))
def test_a_rank_without_an_inventory_is_missed_by_its_number(missing: int) -> None:
    found = [each for each in ranks() if each.rank != missing]
    assert f"the engine has 4: rank {missing} is missing, look for its error in the log" in refusal(found)


def test_a_rank_that_comes_twice_is_refused() -> None:
    assert "ranks [0, 1, 2, 3, 3] handed over an inventory, but the engine has 4: some came twice" in refusal(
        [*ranks(), ranks()[3]]
    )


def test_a_rank_that_the_engine_does_not_have_is_refused() -> None:
    assert "ranks [0, 1, 2, 3] handed over an inventory, but the engine has 3" in refusal(ranks(), 3)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_rank_of_another_encoding_is_refused_with_both(number: int) -> None:
    found = changed(number, encodings={Role.TARGET: "cpu-amx-b128"})
    for arrived in (found, found[::-1]):
        message = refusal(arrived)
        assert message.startswith(f"rank {number} has another slab encoding than rank 0: cpu-amx-b128 and made-up; ")


@pytest.mark.parametrize(
    "other",
    [
        replace(LAYOUT, grid=Grid(1, 2)),
        replace(LAYOUT, page_tokens=4),
        replace(LAYOUT, roles=(replace(LAYOUT.roles[0], slab_bytes=16),)),
    ],
    ids=["grid", "page", "slab"],
)
def test_a_rank_that_sees_another_model_is_refused(other: PageLayout) -> None:
    assert "rank 2 has another layout of a page than rank 0" in refusal(changed(2, layout=other))


@pytest.mark.parametrize(("number", "place"), [(0, "layer 0, KV head 0"), (3, "layer 31, KV head 4")])
def test_layers_and_heads_that_no_rank_holds_are_named(number: int, place: str) -> None:
    found = ranks()
    found[number] = replace(found[number], holdings=())
    assert f"no rank holds target {place}, of 61 layers and 8 heads" in refusal(found)


DRAFT = RoleShape(Role.DRAFT, 2, 4, 8)


def with_draft(*numbers: int, shape: RoleShape = DRAFT) -> list[Inventory]:
    """Of two stages with two ranks each: those of `numbers` have the draft's layers as well, two heads each."""
    found = ranks()
    for number in numbers:
        holding = Holding(Role.DRAFT, (0, shape.num_layers), (number % 2 * 2, number % 2 * 2 + 2), 0, 1)
        layout = replace(LAYOUT, roles=(*LAYOUT.roles, shape))
        encodings = {Role.TARGET: "made-up", Role.DRAFT: "draft's"}
        holdings = (*found[number].holdings, holding)
        found[number] = replace(found[number], layout=layout, holdings=holdings, encodings=encodings)
    return found


def test_a_draft_on_the_last_stage_is_part_of_the_whole_model() -> None:
    agreed = agree(with_draft(2, 3), 4)
    assert agreed.layout == replace(LAYOUT, roles=(*LAYOUT.roles, DRAFT))
    assert agreed.encodings == {Role.TARGET: "made-up", Role.DRAFT: "draft's"}


@pytest.mark.parametrize("first", range(4))
def test_where_in_the_engine_the_draft_lies_and_who_comes_first_does_not_matter(first: int) -> None:
    found = with_draft(0, 1)
    assert agree(found[first:] + found[:first], 4) == agree(with_draft(2, 3), 4)


def test_a_draft_of_which_heads_are_missing_is_refused() -> None:
    assert "no rank holds draft layer 0, KV head 2, of 2 layers and 4 heads" in refusal(with_draft(2))


def test_a_draft_that_ranks_see_and_none_holds_is_refused() -> None:
    found = [replace(each, holdings=each.holdings[:1]) for each in with_draft(2, 3)]
    assert "no rank holds draft layer 0, KV head 0, of 2 layers and 4 heads" in refusal(found)


def test_a_rank_with_another_encoding_of_the_draft_is_refused_with_both() -> None:
    found = with_draft(2, 3)
    found[3] = replace(found[3], encodings={**found[3].encodings, Role.DRAFT: "cpu-amx-b128"})
    message = refusal(found)
    assert message.startswith("rank 3 has another slab encoding than rank ")
    assert "cpu-amx-b128 and draft's; give all ranks the same" in message


def test_a_rank_with_another_draft_is_refused() -> None:
    found = with_draft(2, 3)
    found[3] = with_draft(2, 3, shape=replace(DRAFT, slab_bytes=16))[3]
    message = refusal(found)
    assert message.startswith("rank 3 has another layout of a page than rank ")
    assert message.index("slab_bytes=16") < message.rindex("slab_bytes=8")


def test_a_gap_of_one_layer_between_stages_is_found() -> None:
    assert "no rank holds target layer 31, KV head 4" in refusal(changed(3, layers=(32, 61)))


def test_a_gap_of_one_head_is_found() -> None:
    assert "no rank holds target layer 0, KV head 7" in refusal(changed(1, heads=(4, 7)))


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (3, {"layers": (30, 61)}, "ranks 1 and 3 both hold target layer 30, KV head 4 as replica 0"),
        (1, {"heads": (3, 8)}, "ranks 0 and 1 both hold target layer 0, KV head 3 as replica 0"),
        (2, {"heads": (0, 8)}, "ranks 2 and 3 both hold target layer 31, KV head 4 as replica 0"),
    ],
)
def test_an_overlap_is_refused_with_both_ranks(number: int, change: dict[str, object], message: str) -> None:
    assert message in refusal(changed(number, **change))


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (3, {"layers": (31, 62)}, "rank 3 holds target layer 61, KV head 4, outside the model's 61 layers and 8"),
        (1, {"heads": (4, 9)}, "rank 1 holds target layer 0, KV head 8, outside the model's 61 layers and 8"),
    ],
)
def test_what_lies_outside_the_model_is_refused(number: int, change: dict[str, object], message: str) -> None:
    assert message in refusal(changed(number, **change))


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (2, {"num_replicas": 2}, "rank 2 is replica 0 of 2 of target layer 31, KV head 0, but 1 ranks hold it"),
        (1, {"replica": 1}, "rank 1 is replica 1 of 1 of target layer 0, KV head 4, but 1 ranks hold it"),
        (1, {"heads": (0, 8), "replica": 1, "num_replicas": 2}, "rank 0 is replica 0 of 1 of target layer 0, KV head"),
    ],
)
def test_replicas_that_are_counted_wrongly_are_refused(number: int, change: dict[str, object], message: str) -> None:
    assert message in refusal(changed(number, **change))


def test_replicas_whose_numbers_leave_one_out_are_refused() -> None:
    found = ranks(Cut(2, (4,)), layout_of(4, 1, Grid()))
    found[1] = replace(found[1], holdings=(replace(found[1].holdings[0], replica=2),))
    assert "rank 1 is replica 2 of 2 of target layer 0, KV head 0, but 2 ranks hold it" in refusal(found, 2)


# Owners


ONE_HEAD = layout_of(4, 1, Grid())


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("tp_size", "num_owners"), [(2, 2), (4, 2), (4, 4), (8, 4), (3, 3), (8, 1)])
def test_a_group_has_room_for_as_many_pages_as_all_of_its_owners_in_the_least_pool(
    tp_size: int, num_owners: int, on_device: bool
) -> None:
    ownership = Ownership(num_owners, on_device)
    found = inventories(Cut(tp_size, (2, 2)).ranks(ONE_HEAD, ownership))
    found[tp_size + 1] = replace(found[tp_size + 1], num_rows=7)
    agreed = agree(found, 2 * tp_size)
    assert (agreed.ownership, agreed.num_slots) == (ownership, 7 * num_owners)


@pytest.mark.parametrize(
    ("layout", "tp_size", "num_owners", "message"),
    [
        (LAYOUT, 2, 2, "rank 0 is owner 0 of 2, but replica 0 of 1 of its target heads: set .* to a divisor of 1"),
        (ONE_HEAD, 4, 3, "rank 0 is owner 0 of 3, but replica 0 of 4 of its target heads: set .* to a divisor of 4"),
        (layout_of(4, 2, Grid()), 4, 4, "rank 0 is owner 0 of 4, but replica 0 of 2 of its target heads"),
    ],
)
def test_owners_that_are_not_as_many_as_replicas_can_be_shared_among_are_refused(
    layout: PageLayout, tp_size: int, num_owners: int, message: str
) -> None:
    (num_layers,) = (shape.num_layers for shape in layout.roles)
    found = inventories(Cut(tp_size, (num_layers,)).ranks(layout, Ownership(num_owners)))
    assert re.search(message, refusal(found, tp_size))


def test_a_rank_that_is_another_owner_than_its_replica_says_is_refused() -> None:
    found = inventories(Cut(4, (4,)).ranks(ONE_HEAD, Ownership(2)))
    found[3] = replace(found[3], shard=Shard(Ownership(2), 0))
    assert "rank 3 is owner 0 of 2, but replica 3 of 4 of its target heads" in refusal(found)


def test_a_draft_with_fewer_replicas_than_owners_is_refused() -> None:
    layout = PageLayout((RoleShape(Role.TARGET, 4, 1, 8), RoleShape(Role.DRAFT, 2, 4, 8)), 2, 2, Grid())
    found = inventories(Cut(4, (4,)).ranks(layout, Ownership(2)))
    assert "rank 0 is owner 0 of 2, but replica 0 of 1 of its draft heads" in refusal(found)


@pytest.mark.parametrize("other", [Ownership(4), Ownership(2, True), Ownership()])
@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_shares_its_pages_out_in_another_way_is_refused(rank: int, other: Ownership) -> None:
    found = inventories(Cut(4, (4,)).ranks(ONE_HEAD, Ownership(2)))
    found[rank] = replace(found[rank], shard=Shard(other, rank % other.num_owners))
    message = refusal(found)
    assert message.startswith(f"rank {rank} has another way of sharing out pages than rank 0: {other} and ")


def test_a_draft_is_tiled_by_itself() -> None:
    layout = PageLayout((RoleShape(Role.TARGET, 4, 4, 8), RoleShape(Role.DRAFT, 2, 4, 8)), 2, 2, Grid())
    found = ranks(Cut(2, (2, 2)), layout)
    assert agree(found, 4).layout == layout
    target, draft = found[3].holdings
    found[3] = replace(found[3], holdings=(target, replace(draft, layers=(0, 1))))
    assert "no rank holds draft layer 1, KV head 2, of 2 layers and 4 heads" in refusal(found)


@pytest.mark.parametrize(
    ("cut", "grid", "message"),
    [
        (Cut(1, (61,)), Grid(), None),
        (CUT, Grid(2, 2), None),
        (CUT, Grid(61, 8), None),
        (CUT, Grid(), r"rank 0 holds 31 of 61 layers and 4 of 8 KV heads of a target object .* set grid='2x2' on all"),
        (CUT, Grid(4, 2), r"rank 0 holds 1 of 16 layers and 4 of 4 KV heads .* set grid='2x2' on all engines"),
        (Cut(1, (30, 31)), Grid(2, 1), r"rank 0 holds 30 of 31 layers .* set grid='30\+31x1' on all engines"),
        (Cut(8, (61,)), Grid(1, 4), r"rank 0 holds 61 of 61 layers and 1 of 2 KV heads .* grid 1x4, .* grid='1x8'"),
    ],
)
def test_a_rank_that_cannot_write_an_object_is_refused_with_the_grid_that_would_do(
    cut: Cut, grid: Grid, message: str | None
) -> None:
    layout = replace(LAYOUT, grid=grid)
    if message is None:
        check_writers(ranks(cut, layout), layout)
        return
    with pytest.raises(ConfigError, match=message + r".* or write='never' without peer_host, to only read here$"):
        check_writers(ranks(cut, layout), layout)


def test_a_cut_that_no_grid_suits_may_read() -> None:
    layout = PageLayout((RoleShape(Role.TARGET, 2, 2, 8), RoleShape(Role.DRAFT, 1, 8, 8)), 2, 2, Grid())
    with pytest.raises(ConfigError, match="no grid suits this cut, set write='never' without peer_host"):
        check_writers(ranks(Cut(4, (2,)), layout), layout)


def whole(cut: Cut, layout: PageLayout) -> bool:
    return all(part.is_whole for rank in cut.ranks(layout) for part in rank.parts)


@UNHURRIED
@given(ENGINES)
def test_whoever_follows_the_advice_may_write(engine: tuple[PageLayout, Cut]) -> None:
    layout, cut = engine
    try:
        check_writers(ranks(cut, layout), layout)
        assert whole(cut, layout)
    except ConfigError as error:
        assert not whole(cut, layout)
        advice = re.search(r"set grid='([^']+)'", str(error))
        assert advice is not None
        advised = replace(layout, grid=Grid.parse(advice[1]))
        check_writers(ranks(cut, advised), advised)


@UNHURRIED
@given(ENGINES)
def test_no_grid_of_fewer_objects_than_the_advised_one_would_do(engine: tuple[PageLayout, Cut]) -> None:
    layout, cut = engine
    try:
        check_writers(ranks(cut, layout), layout)
    except ConfigError as error:
        advice = re.search(r"set grid='([^']+)'", str(error))
        assert advice is not None
        assert len(replace(layout, grid=Grid.parse(advice[1])).cells) <= min_cells(cut, layout)


def min_cells(cut: Cut, layout: PageLayout) -> int:
    """As many objects as there are different holdings: fewer cannot be written without a part of one."""
    return len({replace(holding, replica=0) for rank in cut.ranks(layout) for holding in rank.holdings})


def test_a_rank_holds_parts_of_its_own_slot_alone() -> None:
    (first, *_) = ranks()
    assert first.slot_bytes == RankGeometry(LAYOUT, first.holdings).slot_bytes == 31 * 4 * 8
