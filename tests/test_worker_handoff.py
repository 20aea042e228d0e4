"""Worker halves of two engines: one serves pages of its host memory, the other reads them into its blocks."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from draft_kit import poison
from layout_kit import role_chunks
from transfer_fixtures import NAMESPACE, PATIENCE_S, Tensors, WatchedStore, block_bytes, device_tensors, move
from worker_kit import LAYOUT, PAGE_BYTES, SOURCE, TARGET, collected, done, ended, pages, saves, step

from vllm_hicache.config import Config
from vllm_hicache.errors import ConfigError
from vllm_hicache.geometry import PageLayout
from vllm_hicache.handoff.peers import PeerAccess
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import BlockId, MissReason, OpId, RequestId, Role, Slot
from vllm_hicache.namespace import Spaces
from vllm_hicache.place import Place
from vllm_hicache.plan import Ack, ExportOp, FlushOp, LoadOp, OpReport, PageMove, Peer, PeerRank, Plan
from vllm_hicache.storage.envelope import XXH3
from vllm_hicache.stores import StoreFactory
from vllm_hicache.worker import WorkerHalf

SPACES = Spaces(NAMESPACE, b"d" * 32)
ACCESS = PeerAccess("secret", XXH3, 5.0, 2)
HOST = "127.0.0.1"
ALL = range(3)
ALONE, OF_TWO = Place(), Place(0, 2, 1, 4, 3, 2, 1, 4, 2)


class Rank:
    """A worker half that is alone, or the first of several, with its device and the bytes that it has counted.

    Attributes:
        acknowledged: prompts of which readers have said that they need no more, as the half tells it.
    """

    def __init__(
        self, store: WatchedStore, seed: int, place: Place, access: PeerAccess | None, **settings: object
    ) -> None:
        self.tensors: Tensors = device_tensors(LAYOUT, seed)
        self.metrics = Metrics()
        self.acknowledged: list[str] = []

        def open_store(layout: PageLayout) -> StoreFactory:
            return lambda spaces: role_chunks(store, layout, spaces.target)

        raw = {"page_tokens": 8, "grid": "1x2", "host_memory": 8 * PAGE_BYTES, "io_threads": 2} | settings
        self.half = WorkerHalf(
            Config.parse(raw),
            place,
            self.tensors,
            4,
            {Role.TARGET: "test"},
            self.metrics,
            1 << 30,
            open_store,
            access=access,
        )
        self.inventory = self.half.hand_over()

    def saved(self) -> list[bytes]:
        """Three pages in slots 0 to 2 as operation 1; what they hold."""
        content = pages(self.tensors, SOURCE)
        step(self.half, Plan(saves=saves(), num_slots=8))
        assert collected(self.half, 1).reports == (done(1, 3, self.inventory.rank),)
        return content

    def export(self, op: int, numbers: Sequence[int] = ALL, absent: Sequence[int] = ()) -> None:
        named, missing = [move(each, each) for each in numbers], [move(each, -1) for each in absent]
        step(self.half, Plan(exports=(ExportOp(OpId(op), SPACES, tuple(named), tuple(missing)),)))

    def reports(self) -> list[OpReport]:
        """What has settled since this was asked last; nothing is waited for."""
        result = self.half.collect(Plan())
        self.acknowledged += result.acknowledged
        return list(result.reports)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def peer(self, request: str = "cmpl-1") -> Peer:
        """This rank as others know it."""
        assert self.inventory.port is not None
        return Peer(request, (PeerRank(HOST, self.inventory.port, self.inventory.holdings),))


MakeRank = Callable[..., Rank]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRank]:
    """Makes ranks, each of an engine of its own over one store; those with `peer_host` serve."""
    store = WatchedStore.on_files(tmp_path)
    ranks: list[Rank] = []

    def make(place: Place = ALONE, access: PeerAccess | None = ACCESS, **settings: object) -> Rank:
        ranks.append(Rank(store, len(ranks), place, access, **settings))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.half.close()


@pytest.fixture
def prefill(make: MakeRank) -> Rank:
    return make(peer_host=HOST)


@pytest.fixture
def decode(prefill: Rank, make: MakeRank) -> Rank:
    """Reads from `prefill`; its device and its host memory hold other bytes."""
    rank = make()
    poison(rank.tensors)
    return rank


def load_of(peer: Peer | None, numbers: Sequence[int] = ALL, op: int = 1, from_peer: bool = True) -> LoadOp:
    """Pages into slots 4 and on."""
    moves = tuple(
        PageMove(page.key, Slot(4 + number), tuple(map(BlockId, TARGET[number])), 0, True, from_peer=from_peer)
        for number, page in ((number, move(number, 0)) for number in numbers)
    )
    return LoadOp(OpId(op), SPACES, RequestId("r"), moves, peer=peer)


# Pages cross


def test_exported_pages_reach_the_other_engines_blocks_byte_for_byte_and_nothing_else_is_written(
    prefill: Rank, decode: Rank
) -> None:
    expected = prefill.saved()
    prefill.export(2)
    others = [block for block in range(LAYOUT.blocks) if not any(block in page for page in TARGET)]
    before = [block_bytes(decode.tensors, block) for block in others]
    step(decode.half, Plan(loads=(load_of(prefill.peer()),)))
    assert collected(decode.half, 1) == ended([done(1, 3, 0)], "r")
    assert pages(decode.tensors, TARGET) == expected
    assert [block_bytes(decode.tensors, block) for block in others] == before


def test_both_sides_count_the_bytes_that_cross(prefill: Rank, decode: Rank) -> None:
    prefill.saved()
    prefill.export(2)
    step(decode.half, Plan(loads=(load_of(prefill.peer()),)))
    collected(decode.half, 1)
    received = decode.metrics.drain()["peer_bytes|received"]
    assert 3 * PAGE_BYTES <= received < 3 * PAGE_BYTES + 3 * 8 * 256
    sent: list[float] = []
    prefill.until(lambda: sent.append(prefill.metrics.drain().get("peer_bytes|sent", 0)) or sum(sent) >= received)
    assert sum(sent) < received + 3 * 8 * 256


def test_pages_that_are_exported_later_are_waited_for(prefill: Rank, decode: Rank) -> None:
    expected = prefill.saved()
    prefill.export(2, [0])
    step(decode.half, Plan(loads=(load_of(prefill.peer()),)))
    prefill.export(3, [1, 2])
    assert collected(decode.half, 1).reports == (done(1, 3, 0),)
    assert pages(decode.tensors, TARGET) == expected


def test_pages_that_will_not_come_are_missed_at_once(make: MakeRank) -> None:
    prefill, decode = make(peer_host=HOST, peer_timeout_s=PATIENCE_S * 4), make(access=ACCESS)
    expected = prefill.saved()
    prefill.export(2, [0, 1], absent=[2])
    step(decode.half, Plan(loads=(load_of(prefill.peer()),)))
    report = collected(decode.half, 1).reports[0]
    assert (report.pages_done, report.reason) == (2, MissReason.ABSENT)
    assert pages(decode.tensors, TARGET)[:2] == expected[:2]


def test_pages_whose_slots_hold_something_else_are_served_to_nobody(prefill: Rank, decode: Rank) -> None:
    prefill.saved()
    pages_of = (move(0, 0), move(7, 1), move(2, 2))
    step(prefill.half, Plan(exports=(ExportOp(OpId(2), SPACES, pages_of),)))
    step(decode.half, Plan(loads=(load_of(prefill.peer(), [0, 2]),)))
    assert [report.pages_done for report in collected(decode.half, 1).reports] == [1]
    step(prefill.half, Plan(cancels=(OpId(2),)))
    assert [report.pages_done for report in collected(prefill.half, 1).reports] == [1]


def test_another_namespace_is_served_nothing(make: MakeRank) -> None:
    prefill, decode = make(peer_host=HOST, peer_timeout_s=0.1), make()
    prefill.saved()
    prefill.export(2)
    load = load_of(prefill.peer())
    other = LoadOp(load.op, Spaces(b"o" * 32, b"p" * 32), load.request_id, load.pages, peer=load.peer)
    step(decode.half, Plan(loads=(other,)))
    assert [report.pages_done for report in collected(decode.half, 1).reports] == [0]


def test_a_reader_with_another_password_gets_nothing(prefill: Rank, make: MakeRank) -> None:
    prefill.saved()
    prefill.export(2)
    stranger = make(access=PeerAccess("guess", XXH3, 5.0, 2))
    step(stranger.half, Plan(loads=(load_of(prefill.peer()),)))
    assert [report.pages_done for report in collected(stranger.half, 1).reports] == [0]


def test_a_page_that_the_store_has_is_not_read_from_the_peer_and_one_that_it_lacks_is(make: MakeRank) -> None:
    prefill, decode = make(peer_host=HOST), make()
    expected = prefill.saved()
    step(prefill.half, Plan(flushes=(FlushOp(OpId(2), SPACES, (move(0, 0),)),)))
    assert len(collected(prefill.half, 1).reports) == 1
    prefill.export(3, [1, 2], absent=[0])
    step(decode.half, Plan(loads=(load_of(prefill.peer(), from_peer=False),)))
    assert collected(decode.half, 1).reports == (done(1, 3, 0),)
    assert pages(decode.tensors, TARGET) == expected


@pytest.mark.parametrize("is_given", [False, True], ids=["no peer", "no access"])
def test_pages_of_a_peer_are_missed_where_there_is_none_to_ask(prefill: Rank, make: MakeRank, is_given: bool) -> None:
    decode = make(access=None if is_given else ACCESS)
    step(decode.half, Plan(loads=(load_of(prefill.peer() if is_given else None),)))
    report = collected(decode.half, 1).reports[0]
    assert (report.pages_done, report.reason) == (0, MissReason.ABSENT)


def test_an_engine_that_has_gone_is_a_miss_of_every_page(make: MakeRank) -> None:
    prefill, decode = make(peer_host=HOST), make()
    gone = prefill.peer()
    prefill.half.close()
    step(decode.half, Plan(loads=(load_of(gone),)))
    result = collected(decode.half, 1)
    assert [report.pages_done for report in result.reports] == [0]
    assert result.invalid_blocks == {BlockId(block) for page in TARGET for block in page}


# The end of an export


def test_an_export_is_reported_when_it_is_cancelled_and_not_before(prefill: Rank) -> None:
    prefill.saved()
    prefill.export(2)
    assert prefill.reports() == []
    step(prefill.half, Plan(cancels=(OpId(2),)))
    assert prefill.reports() == [done(2, 3, 0)]
    assert prefill.reports() == []


def test_an_export_is_reported_once_the_last_open_read_of_it_has_ended(prefill: Rank) -> None:
    prefill.saved()
    prefill.export(2)
    server = prefill.half._server
    assert server is not None
    read = server._begin(next(iter(server._known)).encode())
    assert read is not None
    step(prefill.half, Plan(cancels=(OpId(2),)))
    assert prefill.reports() == []
    server._finish(read)
    assert prefill.reports() == [done(2, 3, 0)]


def test_a_cancelled_export_is_read_no_more(make: MakeRank) -> None:
    prefill, decode = make(peer_host=HOST, peer_timeout_s=0.1), make()
    prefill.saved()
    prefill.export(2)
    step(prefill.half, Plan(cancels=(OpId(2),)))
    step(decode.half, Plan(loads=(load_of(prefill.peer()),)))
    assert [report.reason for report in collected(decode.half, 1).reports] == [MissReason.ABSENT]


def test_an_export_without_pages_is_reported_like_any_other(prefill: Rank) -> None:
    prefill.export(1, [], absent=[0])
    step(prefill.half, Plan(cancels=(OpId(1),)))
    assert prefill.reports() == [done(1, 0, 0)]


def test_a_rank_that_serves_nobody_reports_an_export_at_once(make: MakeRank) -> None:
    rank = make()
    rank.saved()
    rank.export(2)
    assert rank.reports() == [done(2, 3, 0)]
    step(rank.half, Plan(cancels=(OpId(2),)))
    assert rank.reports() == []


def test_the_cancel_of_something_else_ends_no_export(prefill: Rank) -> None:
    prefill.saved()
    prefill.export(2)
    step(prefill.half, Plan(cancels=(OpId(1), OpId(77))))
    assert prefill.reports() == []


def test_an_export_that_is_asked_about_again_is_told_again(make: MakeRank) -> None:
    rank = make(OF_TWO, peer_host=HOST)
    rank.export(1, [], absent=[0])
    step(rank.half, Plan(cancels=(OpId(1),)))
    assert rank.reports() == [done(1, 0, 0)]
    step(rank.half, Plan(asks=(OpId(1),)))
    assert rank.reports() == [done(1, 0, 0)]
    step(rank.half, Plan(acks=(Ack(OpId(1), 0, 0),)))
    step(rank.half, Plan(asks=(OpId(1),)))
    assert rank.reports() == []


# Acknowledgements


def test_an_acknowledged_prompt_is_told_of_once(prefill: Rank, decode: Rank) -> None:
    step(decode.half, Plan(releases=(prefill.peer("cmpl-1"), prefill.peer("cmpl-2"))))
    prefill.until(lambda: bool(prefill.reports() or len(prefill.acknowledged) == 2))
    assert sorted(prefill.acknowledged) == ["cmpl-1", "cmpl-2"]
    prefill.reports()
    assert len(prefill.acknowledged) == 2


def test_only_the_first_rank_of_an_engine_acknowledges(prefill: Rank, make: MakeRank) -> None:
    first, second = make(Place(rank=0)), make(Place(rank=1))
    step(second.half, Plan(releases=(prefill.peer("by the second"),)))
    second.half._engine.close(PATIENCE_S)
    step(first.half, Plan(releases=(prefill.peer("by the first"),)))
    prefill.until(lambda: bool(prefill.reports() or prefill.acknowledged))
    assert prefill.acknowledged == ["by the first"]


def test_without_access_to_others_a_release_goes_nowhere(make: MakeRank, prefill: Rank) -> None:
    rank = make(access=None)
    step(rank.half, Plan(releases=(prefill.peer(),)))
    rank.half.close()
    assert (prefill.reports(), prefill.acknowledged) == ([], [])


# Where pages are served


def test_a_rank_that_serves_says_where(prefill: Rank, make: MakeRank) -> None:
    assert isinstance(prefill.inventory.port, int)
    assert make().inventory.port is None
    assert make(access=None).inventory.port is None


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        port: int = server.getsockname()[1]
    return port


def test_ranks_take_ports_behind_the_first_ones(make: MakeRank) -> None:
    port = free_port()
    rank = make(Place(rank=1), peer_host=HOST, peer_port=port - 1)
    assert rank.inventory.port == port


def test_an_address_that_is_taken_is_refused_with_the_way_out(make: MakeRank, prefill: Rank) -> None:
    with pytest.raises(ConfigError, match=r"pages cannot be served at 127\.0\.0\.1:.*set peer_host .* and peer_port"):
        make(peer_host=HOST, peer_port=prefill.inventory.port)


def test_a_rank_that_closes_serves_no_more(make: MakeRank) -> None:
    rank = make(peer_host=HOST)
    rank.half.close()
    assert rank.inventory.port is not None
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((HOST, rank.inventory.port), timeout=PATIENCE_S)
