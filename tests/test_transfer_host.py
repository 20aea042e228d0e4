"""The host pool: slots that do not overlap, parts at their offsets, and sizes that are refused."""

from __future__ import annotations

import pytest
from transfer_fixtures import Layout, Rig

from vllm_hicache.errors import ConfigError
from vllm_hicache.grid import Grid
from vllm_hicache.names import Slot
from vllm_hicache.transfer.host import HostPool


@pytest.fixture(params=[{}, {"layers": (1, 3), "heads": (1, 4)}], ids=["whole", "part"])
def rig(request: pytest.FixtureRequest) -> Rig:
    rig = Rig(Layout(layers=3, heads=4, draft_layers=2), grid=Grid(2, 2), num_slots=3, **request.param)
    rig.pool.regions[0].zero_()
    return rig


def test_slots_are_disjoint() -> None:
    pool = HostPool(3, 100)
    for slot in range(3):
        pool.regions[0][slot].fill_(slot + 1)
    assert [pool.regions[0][slot].unique().tolist() for slot in range(3)] == [[1], [2], [3]]
    assert (pool.num_slots, pool.slot_bytes, pool.regions[0].shape) == (3, 100, (3, 100))


def test_the_parts_of_a_slot_tile_it_without_gaps_or_overlaps(rig: Rig) -> None:
    for number, part in enumerate(rig.geometry.parts, start=1):
        view = rig.pool.part(Slot(1), part)
        assert view.nbytes == part.num_bytes
        view[:] = bytes([number]) * view.nbytes
    expected = b"".join(bytes([n]) * part.num_bytes for n, part in enumerate(rig.geometry.parts, start=1))
    assert rig.slot(1) == expected
    assert rig.slot(0) == rig.slot(2) == bytes(rig.pool.slot_bytes)


@pytest.mark.parametrize("num_slots", [0, -1])
def test_a_pool_without_a_slot_is_refused_with_the_size_of_a_page(num_slots: int) -> None:
    with pytest.raises(ConfigError, match=rf"holds {num_slots} pages.*takes 3MiB.*host_memory"):
        HostPool(num_slots, 3 << 20)


@pytest.mark.parametrize("num_slots", [1 << 40, 1 << 60], ids=["no such memory", "no such address"])
def test_a_pool_that_cannot_be_mapped_is_refused_with_its_size(num_slots: int) -> None:
    with pytest.raises(ConfigError, match=r"PiB cannot be mapped.*set a smaller host_memory"):
        HostPool(num_slots, 1 << 20)


def test_committing_ahead_leaves_the_content_of_slots_as_it_is() -> None:
    pool = HostPool(5, 3 * 4096)
    pool.regions[0][1].fill_(7)
    pool.commit_ahead()
    pool.close()
    assert pool.regions[0][1].eq(7).all()
    assert not pool.regions[0][0].any()
