"""A worker half of an engine that drafts: which layers are the draft's, what each rank holds of it, who writes it."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import pytest
import torch
from draft_kit import DRAFTS, Content, Draft, content, poison
from transfer_fixtures import DRAFT, Layout, Tensors, WatchedStore, device_tensors
from worker_kit import SOURCE, TARGET, MakeHalf, collected, done, flushes, loads, saves, step

from vllm_hicache.errors import ConfigError
from vllm_hicache.geometry import Holding, RoleShape
from vllm_hicache.inventory import Agreed, Inventory, agree
from vllm_hicache.names import OpId, Role
from vllm_hicache.place import Place
from vllm_hicache.plan import Ack, Plan
from vllm_hicache.worker import WorkerHalf, _shard

pytest_plugins = ["worker_fixtures"]

WHOLE = Layout(layers=3, heads=2)
MEMORY = "64KiB"
every_draft = pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
every_tier = pytest.mark.parametrize("tier", ["packed", "sidecar"])


def layers(draft: Draft | None, layout: Layout = WHOLE, seed: int = 0) -> Tensors:
    return device_tensors(layout, seed) | (draft.tensors(layout, seed + 9) if draft is not None else {})


def counting_on(tensors: Tensors, first: int = WHOLE.layers) -> Tensors:
    """The draft's layers by EAGLE's names: numbers behind the target's."""
    return {
        f"model.layers.{first + int(name.split('.')[3])}.self_attn.attn" if name.startswith(DRAFT) else name: tensor
        for name, tensor in tensors.items()
    }


class Cut:
    """The ranks of an engine, cut by tensor ranks and stages; the draft lies on the last stage."""

    def __init__(
        self,
        make_half: MakeHalf,
        drafter: Draft | None,
        tp_size: int = 1,
        stages: Sequence[int] = (3,),
        heads: int = 2,
        is_cut: bool = True,
        **settings: object,
    ) -> None:
        self.whole = layers(drafter, Layout(layers=3, heads=heads))
        self.halves: list[WorkerHalf] = []
        self.tensors: list[Tensors] = []
        num_ranks, draft_tp = tp_size * len(stages), tp_size if is_cut else 1
        for rank in range(num_ranks):
            draft_heads = drafter.heads if drafter is not None else 0
            place = Place(rank, tp_size, len(stages), heads, 3, num_ranks, 1, draft_heads, draft_tp)
            first = sum(stages[: rank // tp_size])
            of_stage = [f"model.layers.{layer}." for layer in range(first, first + stages[rank // tp_size])]
            has_draft = rank >= num_ranks - tp_size
            own = {
                name: self._cut(name, tensor, place)
                for name, tensor in self.whole.items()
                if (has_draft if name.startswith(DRAFT) else any(name.startswith(each) for each in of_stage))
            }
            self.tensors.append(own)
            usual = {"grid": f"1x{heads}", "host_memory": MEMORY}
            self.halves.append(make_half(own, place=place, **(usual | settings)))
        self.inventories: list[Inventory] = [half.hand_over() for half in self.halves]

    @staticmethod
    def _cut(name: str, tensor: torch.Tensor, place: Place) -> torch.Tensor:
        tp_size = place.draft_tp_size if name.startswith(DRAFT) else place.tp_size
        heads = tensor.shape[1]
        each, copies = max(1, heads // tp_size), max(1, tp_size // heads)
        first = place.tp_rank // copies * each if tp_size > 1 else 0
        return tensor[:, first : first + each].clone()

    def agreed(self) -> Agreed:
        return agree(self.inventories, len(self.halves))

    def write(self) -> None:
        """Three pages into the store, on every rank that writes a part of them."""
        for rank, half in enumerate(self.halves):
            step(half, Plan(saves=saves(), num_slots=8))
            assert collected(half, 1).reports == (done(1, 3, rank),)
            step(half, Plan(acks=(Ack(OpId(1), 3, 3),), num_slots=8))
            step(half, Plan(flushes=flushes(2), num_slots=8))
            assert [report.pages_done for report in collected(half, 1).reports] == [3]


def restored(make_half: MakeHalf, draft: Draft | None, heads: int = 2, **settings: object) -> bool:
    """Whether a lone engine is served from the store what `Cut` has written."""
    layout = Layout(layers=3, heads=heads)
    own, expected = layers(draft, layout, seed=4), layers(draft, layout)
    half = make_half(own, **({"grid": f"1x{heads}", "host_memory": MEMORY} | settings))
    poison(own)
    step(half, Plan(loads=loads(1, True, 4)))
    assert collected(half, 1).reports == (done(1, 3),)
    return contents(own, TARGET) == contents(expected, SOURCE)


def contents(tensors: Tensors, pages: Sequence[Sequence[int]]) -> list[Content]:
    """Of all blocks of some pages."""
    return [content(tensors, block) for blocks in pages for block in blocks]


# Names


@every_draft
def test_layers_named_apart_and_layers_that_count_on_make_the_same_inventory(make_half: MakeHalf, draft: Draft) -> None:
    place = Place(num_heads=2, num_layers=3, draft_heads=draft.heads)
    tensors = layers(draft)
    named, counted = (make_half(each, place=place).hand_over() for each in (tensors, counting_on(tensors)))
    assert named == counted
    assert [(shape.role, shape.num_layers, shape.num_heads) for shape in named.layout.roles] == [
        (Role.TARGET, 3, 2),
        (Role.DRAFT, draft.layers, draft.heads),
    ]


def test_without_a_draft_all_layers_are_the_targets_however_they_are_numbered(make_half: MakeHalf) -> None:
    tensors = counting_on(layers(Draft()))
    inventory = make_half(tensors, place=Place(num_heads=2, num_layers=3)).hand_over()
    assert [(shape.role, shape.num_layers) for shape in inventory.layout.roles] == [(Role.TARGET, 5)]


@every_draft
@every_tier
def test_pages_of_both_names_come_back_byte_for_byte(make_half: MakeHalf, draft: Draft, tier: str) -> None:
    place = Place(num_heads=2, num_layers=3, draft_heads=draft.heads)
    tensors = layers(draft)
    pages = contents(tensors, SOURCE)
    for each in (tensors, counting_on(tensors)):
        for name, tensor in layers(draft).items():
            tensors[name].copy_(tensor)
        half = make_half(each, place=place, draft=tier, host_memory=MEMORY)
        step(half, Plan(saves=saves()))
        assert collected(half, 1).reports == (done(1, 3, rank=0),)
        poison(tensors)
        step(half, Plan(loads=loads(2, False, 0)))
        assert collected(half, 1).reports == (done(2, 3, rank=0),)
        assert contents(tensors, TARGET) == pages


# Host memory


@every_draft
def test_a_sidecar_has_as_many_rows_as_the_targets_region(make_half: MakeHalf, draft: Draft) -> None:
    packed, sidecar, alone = (
        make_half(layers(each), draft=tier, host_memory="4KiB", grid="1x1")
        for each, tier in ((draft, "packed"), (draft, "sidecar"), (None, "packed"))
    )
    rows = packed.hand_over().num_rows
    assert (sidecar.hand_over().num_rows, sidecar.hand_over().slot_bytes) == (rows, packed.hand_over().slot_bytes)
    assert [region.shape[0] for region in sidecar._pool.regions] == [rows, rows]
    assert sidecar._pool.region_bytes[0] == alone.hand_over().slot_bytes < packed.hand_over().slot_bytes


# Cuts


@pytest.mark.parametrize("heads", [1, 2, 4])
@every_tier
def test_a_draft_that_is_not_cut_is_a_replica_on_every_tensor_rank(
    make_half: MakeHalf, store: WatchedStore, heads: int, tier: str
) -> None:
    draft = Draft(heads=heads)
    cut = Cut(make_half, draft, tp_size=2, is_cut=False, draft=tier)
    assert [each.holdings for each in cut.inventories] == [
        (Holding(Role.TARGET, (0, 3), (rank, rank + 1)), Holding(Role.DRAFT, (0, 2), (0, heads), rank, 2))
        for rank in range(2)
    ]
    assert cut.agreed().layout.roles[1] == RoleShape(Role.DRAFT, 2, heads, WHOLE.slab_bytes)
    cut.write()
    # Each page's draft is written by one of the ranks, in turn.
    written = [number for operation, number in store.calls if operation == "write"]
    assert sorted(written) == sorted([0, 1, 2] * (2 + gcd(2, heads)))
    assert restored(make_half, draft)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_a_draft_that_is_cut_is_shared_out_by_its_own_heads(make_half: MakeHalf, heads: int) -> None:
    draft = Draft(heads=heads)
    cut = Cut(make_half, draft, tp_size=2)
    shares = {1: [((0, 1), 0, 2), ((0, 1), 1, 2)], 2: [((0, 1), 0, 1), ((1, 2), 0, 1)]}
    shares[4] = [((0, 2), 0, 1), ((2, 4), 0, 1)]
    held = [each.holdings[1] for each in cut.inventories]
    assert [(each.heads, each.replica, each.num_replicas) for each in held] == shares[heads]
    cut.agreed()
    cut.write()
    assert restored(make_half, draft)


@every_draft
@every_tier
@pytest.mark.parametrize("tp_size", [1, 2])
def test_stages_without_draft_layers_agree_with_the_last_one(
    make_half: MakeHalf, draft: Draft, tier: str, tp_size: int
) -> None:
    cut = Cut(make_half, draft, tp_size, stages=(2, 1), draft=tier, grid="2+1x2")
    roles = [[holding.role for holding in each.holdings] for each in cut.inventories]
    assert roles == [[Role.TARGET]] * tp_size + [[Role.TARGET, Role.DRAFT]] * tp_size
    assert [shape.role for shape in cut.agreed().layout.roles] == [Role.TARGET, Role.DRAFT]
    cut.write()
    assert restored(make_half, draft, grid="2+1x2")


@pytest.mark.parametrize(
    ("heads", "draft_heads", "num_owners"), [(1, 0, 2), (1, 1, 2), (1, 2, 1), (2, 1, 1), (2, 2, 1)], ids=str
)
def test_every_stage_shares_out_pages_as_the_heads_of_both_models_allow(
    make_half: MakeHalf, heads: int, draft_heads: int, num_owners: int
) -> None:
    draft = Draft(heads=draft_heads) if draft_heads else None
    place = [Place(rank, 2, 2, heads, 3, 4, 1, draft_heads, 2) for rank in range(4)]
    found = [_shard(each, can_exchange=True) for each in place]
    assert [shard.num_owners for shard in found] == [num_owners] * 4
    assert [shard.owner for shard in found] == [rank % num_owners for rank in (0, 1, 0, 1)]
    assert Cut(make_half, draft, 2, (2, 1), heads, grid=f"2+1x{heads}").agreed().ownership.num_owners == 1


def test_a_draft_on_every_rank_as_a_whole_shares_out_pages_where_the_targets_heads_do() -> None:
    found = [_shard(Place(rank, 2, 1, 1, 3, 2, 1, 4, 1), can_exchange=True) for rank in range(2)]
    assert [(shard.owner, shard.num_owners) for shard in found] == [(0, 2), (1, 2)]
    assert _shard(Place(0, 2, 1, 2, 3, 2, 1, 4, 1), can_exchange=True).num_owners == 1


def test_a_draft_whose_layers_have_other_heads_than_the_engine_says_is_refused(make_half: MakeHalf) -> None:
    tensors = layers(Draft(heads=2))
    place = Place(0, 2, 1, 2, 3, 2, 1, draft_heads=8, draft_tp_size=2)
    with pytest.raises(ConfigError, match=r"rank 0 registered 2 KV heads of draft layers, but its share of 8 is 4"):
        make_half(
            {name: each if name.startswith(DRAFT) else each[:, :1] for name, each in tensors.items()}, place=place
        )
