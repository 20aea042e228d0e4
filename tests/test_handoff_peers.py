"""Other engines whose ranks serve pages: who is asked for which cell, and what is kept of connections."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from draft_kit import DRAFT_NAMESPACE, DRAFTS, SPACES, DraftRank, moves
from hypothesis import given
from hypothesis import strategies as st
from transfer_fixtures import NAMESPACE, POISON

from vllm_hicache.geometry import Holding, PageLayout, Range, RoleShape
from vllm_hicache.grid import Grid
from vllm_hicache.handoff import peers as module
from vllm_hicache.handoff.peers import PeerAccess, PeerChunks, Peers
from vllm_hicache.handoff.server import PageServer
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import MissReason, OpId, Role
from vllm_hicache.namespace import Spaces
from vllm_hicache.plan import ExportOp, Peer, PeerRank
from vllm_hicache.storage.envelope import XXH3, ChunkId, HmacSealer, Sealer
from vllm_hicache.storage.file import FileStore

HOST = "127.0.0.1"
SLOTS, SOURCE = (3, 1, 4), ([30], [5], [11])
DRAFT = next(iter(DRAFTS.values()))
PAGES = moves(SLOTS, SOURCE)
CUT = Grid(1, 2)
LAYOUT = PageLayout((RoleShape(Role.TARGET, 3, 2, 128), RoleShape(Role.DRAFT, 2, 2, 128)), 4, 4, CUT)


class Rank:
    """A rank of another engine: it holds heads of every page and serves those of `pages`.

    Attributes:
        acknowledged: prompts of which a reader has said that it needs no more.
    """

    def __init__(
        self, folder: Path, heads: Range = (0, 2), pages: Sequence[int] = (0, 1, 2), absent: Sequence[int] = ()
    ) -> None:
        held = {Role.TARGET: heads, Role.DRAFT: heads}
        store = FileStore(str(folder), 1 << 24)
        self.machine = DraftRank(store, DRAFT, grid=CUT, heads=held)
        self.machine.save(PAGES)
        self.acknowledged: list[str] = []
        self.metrics = Metrics()
        pool, geometry = self.machine.pool, self.machine.geometry
        self.server = PageServer(
            pool, geometry, XXH3, None, 0.05, self.metrics, lambda op: None, self.acknowledged.append
        )
        named, missing = tuple(PAGES[page] for page in pages), tuple(PAGES[page] for page in absent)
        self.server.export(ExportOp(OpId(1), SPACES, named, missing), len(named))

    @property
    def address(self) -> PeerRank:
        return PeerRank(HOST, self.server.port, self.machine.geometry.holdings)

    @property
    def num_connections(self) -> int:
        return len(self.server._connections)

    def close(self) -> None:
        self.server.close()
        self.machine.close()


class Reader:
    """This engine's side, and what it counts."""

    def __init__(self, folder: Path, sealer: Sealer = XXH3) -> None:
        self.whole = DraftRank(FileStore(str(folder), 1 << 24), DRAFT, grid=CUT)
        self.whole.save(PAGES)
        self.metrics = Metrics()
        access = PeerAccess(None, sealer, 5.0, 2)
        self.peers = Peers(self.whole.geometry.layout, access, self.metrics)

    def read(self, peer: Peer, page: int = 0, spaces: Spaces = SPACES) -> list[MissReason | None]:
        """Every cell of a page, checked byte by byte; what was not there is left as it was."""
        chunks, found = self.peers.chunks(peer, spaces), []
        for part in self.whole.geometry.parts:
            payload = bytearray([POISON]) * part.num_bytes
            chunk = ChunkId.of(PAGES[page].name(part.cell.role), part.cell)
            found.append(chunks.load(chunk, memoryview(payload), part.cell.unit_bytes))
            if found[-1] is None:
                assert payload == bytes(self.whole.pool.part(PAGES[page].slot, part))
        return found

    def close(self) -> None:
        self.peers.close()
        self.whole.close()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path / "reader")
    yield reader
    reader.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    """To be filled by a test; closed at its end."""
    ranks: list[Rank] = []
    yield ranks
    for rank in ranks:
        rank.close()


def peer_of(ranks: Sequence[Rank], request: str = "cmpl-1") -> Peer:
    return Peer(request, tuple(rank.address for rank in ranks))


# Who is asked


def test_each_cell_is_read_from_the_rank_that_holds_it(tmp_path: Path, ranks: list[Rank], reader: Reader) -> None:
    ranks += [Rank(tmp_path / f"{head}", (head, head + 1)) for head in range(2)]
    assert [reader.read(peer_of(ranks), page) for page in range(3)] == [[None] * 4] * 3
    assert [rank.num_connections for rank in ranks] == [1, 1]


def test_a_page_that_the_first_of_two_alike_has_not_got_is_read_from_the_second(
    tmp_path: Path, ranks: list[Rank], reader: Reader
) -> None:
    ranks += [Rank(tmp_path / "first", pages=[0], absent=[1]), Rank(tmp_path / "second", pages=[1], absent=[0])]
    assert [reader.read(peer_of(ranks), page) for page in (0, 1)] == [[None] * 4] * 2


def test_a_page_that_none_of_two_alike_has_got_is_absent(tmp_path: Path, ranks: list[Rank], reader: Reader) -> None:
    ranks += [Rank(tmp_path / name, pages=[], absent=[2]) for name in ("first", "second")]
    assert reader.read(peer_of(ranks), 2) == [MissReason.ABSENT] * 4


def test_a_cell_that_no_rank_holds_is_absent_and_asked_of_none(
    tmp_path: Path, ranks: list[Rank], reader: Reader
) -> None:
    ranks.append(Rank(tmp_path / "half", (0, 1)))
    assert reader.read(peer_of(ranks)) == [None, MissReason.ABSENT] * 2


def test_a_rank_that_holds_a_part_of_a_cell_is_not_asked_for_it(
    tmp_path: Path, ranks: list[Rank], reader: Reader
) -> None:
    ranks.append(Rank(tmp_path / "whole"))
    some_layers = (Holding(Role.TARGET, (0, 2), (0, 2)), Holding(Role.DRAFT, (0, 2), (0, 2)))
    peer = Peer("cmpl-1", (PeerRank(HOST, ranks[0].server.port, some_layers),))
    assert reader.read(peer) == [MissReason.ABSENT, MissReason.ABSENT, None, None]


def test_an_engine_without_a_draft_gives_the_targets_cells_alone(
    tmp_path: Path, ranks: list[Rank], reader: Reader
) -> None:
    ranks.append(Rank(tmp_path / "whole"))
    assert reader.read(peer_of(ranks), spaces=Spaces(NAMESPACE)) == [None, None, *[MissReason.ABSENT] * 2]


def test_another_draft_is_missed_and_the_target_is_not(tmp_path: Path, ranks: list[Rank], reader: Reader) -> None:
    ranks.append(Rank(tmp_path / "whole"))
    other = Spaces(NAMESPACE, DRAFT_NAMESPACE[::-1].replace(b"d", b"e"))
    assert reader.read(peer_of(ranks), spaces=other) == [None, None, *[MissReason.ABSENT] * 2]


def test_a_rank_that_has_gone_is_not_taken_for_one_that_has_no_page(
    tmp_path: Path, ranks: list[Rank], reader: Reader
) -> None:
    ranks += [Rank(tmp_path / "first"), Rank(tmp_path / "second", pages=[], absent=[0])]
    peer = peer_of(list(reversed(ranks)))
    ranks[0].server.close()
    assert set(reader.read(peer)) == {MissReason.UNAVAILABLE}


def test_what_somebody_without_the_key_has_sealed_is_refused(tmp_path: Path, ranks: list[Rank]) -> None:
    reader = Reader(tmp_path / "reader", HmacSealer(bytes(32)))
    ranks.append(Rank(tmp_path / "whole"))
    assert None not in reader.read(peer_of(ranks))
    reader.close()


numbers = st.tuples(st.integers(-5, 2**70), st.integers(-5, 2**70))


@given(st.lists(st.builds(Holding, st.sampled_from(Role), numbers, numbers, st.integers(), st.integers()), max_size=4))
def test_whatever_a_rank_says_it_holds_no_rank_is_asked_for_what_is_not_a_whole_cell(held: list[Holding]) -> None:
    layout = LAYOUT
    peers = Peers(layout, PeerAccess(None, XXH3, 5.0, 1), Metrics())
    chunks = peers.chunks(Peer("cmpl-1", (PeerRank(HOST, 1, tuple(held)),)), SPACES)
    for cell in layout.cells:
        whole = [
            each
            for each in held
            if each.role is cell.role
            and each.layers[0] <= cell.first_layer
            and each.layers[1] >= cell.first_layer + cell.num_layers
            and each.heads[0] <= cell.first_head
            and each.heads[1] >= cell.first_head + cell.num_heads
        ]
        place = (cell.role, cell.layer_group, cell.head_group)
        assert len(chunks._by_cell.get(place, ())) == len(whole)
    peers.close()


# Connections


def test_connections_are_kept_from_one_prompt_to_the_next(tmp_path: Path, ranks: list[Rank], reader: Reader) -> None:
    ranks.append(Rank(tmp_path / "whole"))
    for page in range(3):
        reader.read(peer_of(ranks, f"cmpl-{page}"), page)
    assert ranks[0].num_connections == 1


def test_the_engine_that_was_read_longest_ago_is_parted_from(
    tmp_path: Path, ranks: list[Rank], reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_RANKS", 2)
    ranks += [Rank(tmp_path / name) for name in ("first", "second", "third")]
    for number in (0, 1, 0, 2):
        assert set(reader.read(peer_of([ranks[number]]))) == {None}
    kept = [(HOST, ranks[number].server.port) for number in (0, 2)]
    assert list(reader.peers._ranks) == kept
    assert set(reader.read(peer_of([ranks[1]]))) == {None}  # and comes back


def test_a_read_that_is_open_outlives_the_parting(
    tmp_path: Path, ranks: list[Rank], reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_RANKS", 1)
    ranks += [Rank(tmp_path / name) for name in ("first", "second")]
    chunks: PeerChunks = reader.peers.chunks(peer_of(ranks[:1]), SPACES)
    reader.read(peer_of(ranks[1:]))
    part = reader.whole.geometry.parts[0]
    chunk = ChunkId.of(PAGES[0].name(part.cell.role), part.cell)
    assert chunks.load(chunk, memoryview(bytearray(part.num_bytes)), part.cell.unit_bytes) is None


def test_nothing_is_connected_before_something_is_read(tmp_path: Path, ranks: list[Rank], reader: Reader) -> None:
    ranks.append(Rank(tmp_path / "whole"))
    reader.peers.chunks(peer_of(ranks), SPACES)
    assert ranks[0].num_connections == 0


def test_received_bytes_are_counted(tmp_path: Path, ranks: list[Rank], reader: Reader) -> None:
    ranks.append(Rank(tmp_path / "whole"))
    reader.read(peer_of(ranks))
    counted = reader.metrics.drain()["peer_bytes|received"]
    assert reader.whole.geometry.slot_bytes <= counted < reader.whole.geometry.slot_bytes + 4 * 256


# Acknowledgements


def test_the_first_rank_of_a_peer_is_told_that_a_prompt_is_read_and_no_other(
    tmp_path: Path, ranks: list[Rank], reader: Reader
) -> None:
    ranks += [Rank(tmp_path / f"{head}", (head, head + 1)) for head in range(2)]
    reader.peers.acknowledge(peer_of(ranks, "cmpl-7"))
    assert [rank.acknowledged for rank in ranks] == [["cmpl-7"], []]


@pytest.mark.parametrize(
    "request_name", ["0", "a/b", "cmpl-1 2", "x" * 300, "../up", "request/1", "\u00e9", "a\n", " b "]
)
def test_a_prompt_is_acknowledged_by_the_name_that_its_engine_gave_it(
    tmp_path: Path, ranks: list[Rank], reader: Reader, request_name: str
) -> None:
    ranks.append(Rank(tmp_path / "whole"))
    reader.peers.acknowledge(peer_of(ranks, request_name))
    assert ranks[0].acknowledged == [request_name]


def test_a_peer_that_cannot_be_told_is_one_warning(
    tmp_path: Path, ranks: list[Rank], reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    ranks.append(Rank(tmp_path / "whole"))
    ranks[0].server.close()
    with caplog.at_level(logging.WARNING):
        reader.peers.acknowledge(peer_of(ranks))
    (record,) = [each for each in caplog.records if each.name == module.__name__]
    assert "A peer was not told that its pages have been read" in record.getMessage()


@pytest.mark.parametrize("request_name", ["", "x" * 600], ids=["empty", "long"])
def test_a_prompt_whose_name_no_object_can_have_is_left_to_its_lease(
    tmp_path: Path, ranks: list[Rank], reader: Reader, caplog: pytest.LogCaptureFixture, request_name: str
) -> None:
    ranks.append(Rank(tmp_path / "whole"))
    with caplog.at_level(logging.WARNING):
        reader.peers.acknowledge(peer_of(ranks, request_name))
    assert "A peer was not told" in caplog.text
    assert ranks[0].acknowledged == []
