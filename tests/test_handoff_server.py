"""Pages of a rank's host pool, read by others as objects of a store."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from draft_kit import DRAFTS, SPACES, DraftRank, content, moves

from vllm_hicache.errors import ObjectMissing
from vllm_hicache.handoff.peers import ACKNOWLEDGEMENT, PeerAccess, Peers
from vllm_hicache.handoff.server import PageServer
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import MissReason, ObjectName, OpId, Role
from vllm_hicache.namespace import Spaces
from vllm_hicache.plan import ExportOp, PageMove, PeerRank
from vllm_hicache.storage.base import Store
from vllm_hicache.storage.chunks import ChunkStore, RoleChunks
from vllm_hicache.storage.envelope import XXH3, ChunkId
from vllm_hicache.storage.file import FileStore

SLOTS, SOURCE = (7, 12, 19), ([30], [5], [11])
WAIT_S = 0.2
DRAFT = next(iter(DRAFTS.values()))


class Serving:
    """A rank whose three pages are served, and what the server has told."""

    def __init__(self, folder: Path) -> None:
        self.rank = DraftRank(store=FileStore(str(folder), 1 << 24), draft=DRAFT, has_sidecar=False)
        self.pages = moves(SLOTS, SOURCE)
        self.rank.save(self.pages)
        self.ended: list[OpId] = []
        self.acknowledged: list[str] = []
        self.metrics = Metrics()
        self.server = PageServer(
            self.rank.pool,
            self.rank.geometry,
            XXH3,
            "secret",
            WAIT_S,
            self.metrics,
            self.ended.append,
            self.acknowledged.append,
        )
        self.export(OpId(1), self.pages)
        self.stores: list[Store] = []

    def export(self, op: OpId, pages: Sequence[PageMove], absent: Sequence[PageMove] = ()) -> None:
        self.server.export(ExportOp(op, SPACES, tuple(pages), tuple(absent)), len(pages))

    def store(self, password: str = "secret") -> Store:
        place = PeerRank("127.0.0.1", self.server.port, ())
        peers = Peers(self.rank.geometry.layout, PeerAccess(password, XXH3, 5.0, 2), Metrics())
        self.stores.append(peers._open(place).store)
        return self.stores[-1]

    def chunks(self, spaces: Spaces = SPACES) -> RoleChunks:
        store, layout = self.store(), self.rank.geometry.layout
        digests = {Role.TARGET: spaces.target, Role.DRAFT: spaces.draft}
        grids = {shape.role: layout.grid_of(shape) for shape in layout.roles}
        return RoleChunks({role: ChunkStore(store, digests[role] or b"", grid) for role, grid in grids.items()})

    def close(self) -> None:
        for store in self.stores:
            store.close()
        self.server.close()
        self.rank.close()


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    serving = Serving(tmp_path)
    yield serving
    serving.close()


def read(serving: Serving, chunks: RoleChunks) -> list[MissReason | None]:
    """Load every cell of every page over what the pool holds; reasons of misses."""
    reasons = []
    for page in serving.pages:
        for part in serving.rank.geometry.parts:
            payload = memoryview(bytearray(part.num_bytes))
            chunk = ChunkId.of(page.name(part.cell.role), part.cell)
            reasons.append(chunks.load(chunk, payload, part.cell.unit_bytes))
            if reasons[-1] is None:
                assert payload == serving.rank.pool.part(page.slot, part)
    return reasons


def read_before_export(serving: Serving) -> set[MissReason | None]:
    """Ask for every page before it is exported; reasons of misses."""
    found: list[MissReason | None] = []
    reader = threading.Thread(target=lambda: found.extend(read(serving, serving.chunks())))
    reader.start()
    serving.export(OpId(2), serving.pages)
    reader.join(30)
    return set(found)


def test_every_cell_of_every_page_is_read_as_it_lies_in_its_slot(serving: Serving) -> None:
    assert set(read(serving, serving.chunks())) == {None}
    assert content(serving.rank.tensors, 30)


def test_another_namespace_finds_nothing(serving: Serving) -> None:
    assert set(read(serving, serving.chunks(Spaces(b"o" * 32, b"p" * 32)))) == {MissReason.ABSENT}


def test_without_the_secret_nothing_is_read(serving: Serving) -> None:
    with pytest.raises(Exception, match="password"):
        serving.store("wrong").exists([ObjectName("a/b")])


def test_who_has_read_a_prompt_says_so_and_its_pages_stay_until_they_are_withdrawn(serving: Serving) -> None:
    assert serving.store().delete(ObjectName(f"{ACKNOWLEDGEMENT}cmpl-1"))
    assert serving.acknowledged == ["cmpl-1"]
    assert serving.ended == []
    assert set(read(serving, serving.chunks())) == {None}


def test_a_withdrawn_page_ends_when_the_last_read_of_it_has(serving: Serving) -> None:
    name = next(iter(serving.server._known))
    served = serving.server._begin(name.encode())
    assert served is not None
    serving.server.withdraw(OpId(1))
    assert serving.ended == []
    serving.server._finish(served)
    assert serving.ended == [OpId(1)]
    assert set(read(serving, serving.chunks())) == {MissReason.ABSENT}


def test_a_page_that_two_prompts_share_is_known_until_both_are_over(serving: Serving) -> None:
    serving.export(OpId(2), serving.pages)
    serving.server.withdraw(OpId(2))
    assert set(read(serving, serving.chunks())) == {None}
    serving.export(OpId(3), serving.pages)
    serving.server.withdraw(OpId(1))
    assert set(read(serving, serving.chunks())) == {None}


def test_a_page_that_comes_later_is_waited_for(serving: Serving) -> None:
    serving.server.withdraw(OpId(1))
    serving.server._wait_s = 30.0
    assert read_before_export(serving) == {None}


def test_who_comes_late_for_a_page_hears_so_soon_and_who_comes_a_moment_too_early_has_it(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving.server._wait_s = 1000.0
    serving.server.withdraw(OpId(1))
    monkeypatch.setattr("vllm_hicache.handoff.server._LATE_WAIT_S", 0.0)
    assert set(read(serving, serving.chunks())) == {MissReason.ABSENT}
    monkeypatch.setattr("vllm_hicache.handoff.server._LATE_WAIT_S", 30.0)
    assert read_before_export(serving) == {None}


def test_a_page_that_will_not_come_is_said_to_be_absent_at_once(serving: Serving) -> None:
    serving.server.withdraw(OpId(1))
    serving.server._wait_s = 1000.0
    serving.export(OpId(2), (), serving.pages)
    assert set(read(serving, serving.chunks())) == {MissReason.ABSENT}


def test_a_page_that_the_rank_does_not_vouch_for_is_absent(serving: Serving) -> None:
    serving.server.withdraw(OpId(1))
    serving.server.export(ExportOp(OpId(2), SPACES, tuple(serving.pages)), 1)
    num_parts = len(serving.rank.geometry.parts)
    assert read(serving, serving.chunks()) == [None] * num_parts + [MissReason.ABSENT] * (2 * num_parts)


def test_bytes_on_the_wire_are_counted(serving: Serving) -> None:
    assert set(read(serving, serving.chunks())) == {None}
    payload = sum(part.num_bytes for part in serving.rank.geometry.parts) * len(serving.pages)
    sent = serving.metrics.drain()["peer_bytes|sent"]
    assert payload < sent < 1.5 * payload + 4096


def test_nothing_can_be_written_or_removed(serving: Serving) -> None:
    store, name = serving.store(), next(iter(serving.server._known))
    with pytest.raises(Exception, match="only be read"):
        store.write(ObjectName("a/b"), [memoryview(b"x")])
    assert not store.delete(name)
    assert store.exists([name]) == [True]


def test_a_range_is_read_and_what_is_absent_is_missing(serving: Serving) -> None:
    store, name = serving.store(), next(iter(serving.server._known))
    whole = bytearray(1 << 20)
    total = store.read(name, [memoryview(whole)])
    part = bytearray(100)
    assert store.read(name, [memoryview(part)], 50) == total
    assert part == whole[50:150]
    with pytest.raises(ObjectMissing):
        store.read(ObjectName("a/b"), [memoryview(part)])


def test_many_readers_at_once_read_the_same(serving: Serving) -> None:
    found: list[set[MissReason | None]] = []
    threads = [threading.Thread(target=lambda: found.append(set(read(serving, serving.chunks())))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [{None}] * 6
