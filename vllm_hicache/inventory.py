"""What every rank hands over at start, and whether the ranks together hold the model.

Pure. The scheduler half takes nothing for granted: ranks whose parts do not tile the model exactly would store
pages with holes, so that they are refused, by name, before the first request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from vllm_hicache.errors import ConfigError
from vllm_hicache.geometry import Holding, PageLayout, RankGeometry, cut_of
from vllm_hicache.names import Role
from vllm_hicache.ownership import Ownership, Shard


@dataclass(frozen=True, slots=True)
class Inventory:
    """One rank: who it is, what it holds of every page, and how many pages its host pool has room for.

    Attributes:
        rank: number among the engine's ranks, from 0: pipeline stage x tensor ranks + tensor rank.
        holdings: one a role.
        layout: the whole model's page, as this rank sees it.
        slot_bytes: bytes of a page on this rank.
        num_rows: pages of its host pool.
        encodings: how a slab's interior is laid out, by role.
        shard: which pages of its group it keeps.
        port: where it serves pages to other engines.
    """

    rank: int
    holdings: tuple[Holding, ...]
    layout: PageLayout
    slot_bytes: int
    num_rows: int
    encodings: Mapping[Role, str]
    shard: Shard = Shard()
    port: int | None = None


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks have in common.

    Attributes:
        layout: the whole model's page.
        encodings: how a slab's interior is laid out, by role.
        num_slots: pages that every group of ranks has room for, each kept once.
        ownership: how a group shares them out.
    """

    layout: PageLayout
    encodings: Mapping[Role, str]
    num_slots: int
    ownership: Ownership = Ownership()


def agree(inventories: Sequence[Inventory], num_ranks: int) -> Agreed:
    """Check that the ranks tile the model exactly.

    Raises:
        ConfigError: a rank is missing, sees another model than rank 0, or leaves a gap or an overlap; which one.
    """
    ranks = [each.rank for each in inventories]
    if sorted(ranks) != list(range(num_ranks)):
        missing = sorted(set(range(num_ranks)) - set(ranks))
        raise ConfigError(
            f"ranks {sorted(ranks)} handed over an inventory, but the engine has {num_ranks}: "
            f"{f'rank {missing[0]} is missing' if missing else 'some came twice'}, look for its error in the log"
        )
    ordered = sorted(inventories, key=lambda each: each.rank)
    first = ordered[0]
    # Backwards, so that what the first rank says of a role counts: stages without draft layers know nothing of it.
    shapes = {shape.role: shape for each in reversed(ordered) for shape in each.layout.roles}
    encodings = {role: text for each in reversed(ordered) for role, text in each.encodings.items()}
    layout = replace(first.layout, roles=tuple(shapes[role] for role in Role if role in shapes))
    for each in ordered:
        own_roles = {shape.role for shape in each.layout.roles}
        seen = replace(layout, roles=tuple(shape for shape in layout.roles if shape.role in own_roles))
        for what, own, other in (
            ("layout of a page", each.layout, seen),
            *(("slab encoding", each.encodings[role], encodings[role]) for role in each.encodings),
            ("way of sharing out pages", each.shard.ownership, first.shard.ownership),
        ):
            if own != other:
                raise ConfigError(
                    f"rank {each.rank} has another {what} than rank {first.rank}: {own} and {other}; "
                    "give all ranks the same version, instruction set and settings"
                )
    for shape in layout.roles:
        _check_tiling(inventories, shape.role, shape.num_layers, shape.num_heads)
    for each in inventories:
        _check_owner(each)
    ownership = first.shard.ownership
    num_rows = min(each.num_rows for each in inventories)
    return Agreed(layout, encodings, num_rows * ownership.num_owners, ownership)


def check_writers(inventories: Sequence[Inventory], layout: PageLayout) -> None:
    """Check that every rank holds whole cells, so that each can write its objects by itself.

    Raises:
        ConfigError: a rank that holds a part of a cell, and the grid with which no rank would.
    """
    held = [holding for each in inventories for holding in each.holdings]
    for each in inventories:
        for part in RankGeometry(layout, each.holdings).parts:
            if not part.is_whole:
                cell, grid = part.cell, cut_of(held, layout)
                advice = "no grid suits this cut, set"
                if grid is not None:
                    advice = f"set grid='{grid}' on all engines that share this store, or"
                raise ConfigError(
                    f"rank {each.rank} holds {part.num_layers} of {cell.num_layers} layers and {part.num_heads} of "
                    f"{cell.num_heads} KV heads of a {cell.role} object of grid {layout.grid}, and so cannot write or "
                    f"serve it: {advice} write='never' without peer_host, to only read here"
                )


def _check_tiling(inventories: Sequence[Inventory], role: Role, num_layers: int, num_heads: int) -> None:
    """Every (layer, head) is held by one rank, or by all replicas of one holding."""
    # By (layer, head) and replica: the rank, and how many replicas it says there are.
    holders: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
    for each in inventories:
        for holding in (one for one in each.holdings if one.role == role):
            for place in product(range(*holding.layers), range(*holding.heads)):
                by_replica = holders.setdefault(place, {})
                if holding.replica in by_replica:
                    raise ConfigError(
                        f"ranks {by_replica[holding.replica][0]} and {each.rank} both hold {_named(role, place)} as "
                        f"replica {holding.replica}: this cut of the model is not supported"
                    )
                by_replica[holding.replica] = (each.rank, holding.num_replicas)
    for place in product(range(num_layers), range(num_heads)):
        held = holders.pop(place, {})
        if not held:
            raise ConfigError(
                f"no rank holds {_named(role, place)}, of {num_layers} layers and {num_heads} heads: "
                "this cut of the model is not supported"
            )
        for replica, (rank, count) in held.items():
            if count != len(held) or replica not in range(count):
                raise ConfigError(
                    f"rank {rank} is replica {replica} of {count} of {_named(role, place)}, but {len(held)} ranks "
                    "hold it: this cut of the model is not supported"
                )
    for place, held in holders.items():
        raise ConfigError(
            f"rank {min(held.values())[0]} holds {_named(role, place)}, outside the model's {num_layers} layers and "
            f"{num_heads} heads: this model is not supported"
        )


def _check_owner(inventory: Inventory) -> None:
    """Replicas are owners in turn, so that each page has one owner among those that hold the same heads."""
    shard = inventory.shard
    for each in inventory.holdings:
        if each.num_replicas % shard.num_owners or each.replica % shard.num_owners != shard.owner:
            raise ConfigError(
                f"rank {inventory.rank} is owner {shard.owner} of {shard.num_owners}, but replica {each.replica} of "
                f"{each.num_replicas} of its {each.role} heads: set decode_context_parallel_size to a divisor of "
                f"{each.num_replicas}"
            )


def _named(role: Role, place: tuple[int, int]) -> str:
    return f"{role} layer {place[0]}, KV head {place[1]}"
