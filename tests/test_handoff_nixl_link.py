"""Reads of another agent's memory over NIXL: exact bytes, and none that come late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from vllm_hicache.errors import ConfigError, InvariantError, StoreTimeout, StoreUnavailable
from vllm_hicache.handoff import nixl_link
from vllm_hicache.handoff.nixl_link import MemoryRange, NixlMemory, NixlReader, Piece

pytest.importorskip("nixl._api", exc_type=ImportError)

KIB, MIB = 1 << 10, 1 << 20
POISON = 0xA5
PATIENCE_S = 30.0


class Block:
    """Bytes of this process: random ones, or poison."""

    def __init__(self, num_bytes: int, seed: int | None = None) -> None:
        self.view = memoryview(bytearray([POISON]) * num_bytes)
        if seed is not None:
            self.view[:] = np.random.default_rng(seed).bytes(num_bytes)
        self.range = MemoryRange.of(self.view)

    def changed(self) -> list[tuple[int, int]]:
        """Ranges [first, end) that are poison no more, as far as neighbouring bytes tell."""
        is_changed = np.frombuffer(self.view, np.uint8) != POISON
        edges = np.flatnonzero(np.diff(np.concatenate([[False], is_changed, [False]]).astype(np.int8)))
        return [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]


class Pair:
    """Memory, and a reader with poisoned memory of its own."""

    def __init__(self, num_bytes: int) -> None:
        self.source, self.target = Block(num_bytes, seed=1), Block(num_bytes)
        self.memory, self.reader = NixlMemory([self.source.range]), NixlReader([self.target.range])

    def piece(self, source: int, target: int, num_bytes: int) -> Piece:
        return Piece(self.source.range.address + source, self.target.view[target : target + num_bytes])

    def read(self, *pieces: Piece, timeout_s: float = PATIENCE_S) -> None:
        self.reader.read(self.memory.metadata, pieces, timeout_s)

    def close(self) -> None:
        self.reader.close()
        self.memory.close()


@pytest.fixture
def open_pair() -> Iterator[Callable[[int], Pair]]:
    with ExitStack() as closing:

        def opened(num_bytes: int) -> Pair:
            pair = Pair(num_bytes)
            closing.callback(pair.close)
            return pair

        yield opened


@pytest.fixture
def pair(open_pair: Callable[[int], Pair]) -> Pair:
    return open_pair(4 * MIB)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between machines without RDMA. On one machine the kernel copies."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@pytest.fixture
def emulated(network: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that the other side answers, as far as it gets: what RDMA does, as to the time that bytes are under way."""
    monkeypatch.setattr(nixl_link, "_SETTINGS", "PROTO_EMULATION_ENABLE=y")


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_one_read_fills_its_piece_and_nothing_around(pair: Pair) -> None:
    with pair.memory.attended():
        pair.read(pair.piece(1000, 50_001, 2 * MIB + 3))
    assert pair.target.view[50_001 : 50_001 + 2 * MIB + 3] == pair.source.view[1000 : 1000 + 2 * MIB + 3]
    assert set(pair.target.view[:50_001]) | set(pair.target.view[50_001 + 2 * MIB + 3 :]) == {POISON}


@pytest.mark.usefixtures("network")
def test_over_tcp_alone_a_read_is_refused(pair: Pair) -> None:
    with pair.memory.attended(), pytest.raises(StoreUnavailable, match="cannot be read over NIXL"):
        pair.read(pair.piece(0, 0, MIB))
    assert not pair.target.changed()


@pytest.mark.usefixtures("emulated")
def test_reads_that_the_other_side_answers_bring_the_same_bytes(pair: Pair) -> None:
    with pair.memory.attended():
        pair.read(pair.piece(1000, 0, 2 * MIB), pair.piece(0, 3 * MIB, 1))
    assert pair.target.view[: 2 * MIB] == pair.source.view[1000 : 1000 + 2 * MIB]
    assert pair.target.view[3 * MIB] == pair.source.view[0]
    assert set(pair.target.view[2 * MIB : 3 * MIB]) == {POISON}


def test_many_pieces_come_in_any_order_each_to_its_place(pair: Pair) -> None:
    places = np.random.default_rng(2).permutation(4 * MIB // KIB)[:1000]
    with pair.memory.attended():
        pair.read(*(pair.piece(KIB * int(place), KIB * at, KIB - 1) for at, place in enumerate(places)))
    for at, place in enumerate(places):
        row, source = pair.target.view[KIB * at : KIB * (at + 1)], KIB * int(place)
        assert row[:-1] == pair.source.view[source : source + KIB - 1]
        assert row[-1] == POISON


def test_memory_that_is_not_registered_is_filled_too(pair: Pair) -> None:
    elsewhere = [Block(size) for size in (7, 2 * MIB + 11, 0, 300 * KIB)]
    starts, pieces = (0, 7, 0, 3 * MIB), []
    for block, start in zip(elsewhere, starts, strict=True):
        pieces.append(Piece(pair.source.range.address + start, block.view))
    with pair.memory.attended():
        pair.read(*pieces[:2], pair.piece(5, 9, 100), *pieces[2:])
    for block, start in zip(elsewhere, starts, strict=True):
        assert block.view == pair.source.view[start : start + block.view.nbytes]
    assert pair.target.view[9:109] == pair.source.view[5:105]


@pytest.mark.parametrize("first", [-4096, -1, 4 * MIB - 1, 4 * MIB, 1 << 40])
def test_a_wrong_address_is_refused_and_the_next_read_works(pair: Pair, first: int) -> None:
    with pair.memory.attended():
        with pytest.raises(StoreUnavailable, match="NOT_FOUND"):
            pair.read(pair.piece(0, 0, 10), pair.piece(first, 10, 10))
        assert not pair.target.changed()
        pair.read(pair.piece(0, 0, 10))
    assert pair.target.view[:10] == pair.source.view[:10]


def test_metadata_that_is_none_is_refused(pair: Pair) -> None:
    for metadata in (b"", b"x" * 400, pair.memory.metadata[:-9]):
        with pytest.raises(StoreUnavailable, match=r"MISMATCH|NOT_FOUND"):
            pair.reader.read(metadata, [pair.piece(0, 0, 1)], PATIENCE_S)


def test_a_first_read_that_nobody_attends_ends_in_time_and_writes_nothing_late(pair: Pair) -> None:
    with pytest.raises(StoreTimeout, match="in time"):
        pair.read(pair.piece(0, 0, MIB), timeout_s=0.2)
    pair.target.view[:] = bytes([POISON]) * (4 * MIB)
    with pair.memory.attended():
        for _ in range(20):
            pair.read(pair.piece(0, 3 * MIB, MIB))
    assert pair.target.view[3 * MIB :] == pair.source.view[:MIB]
    assert pair.target.changed()[0][0] >= 3 * MIB


def test_threads_read_at_once_each_its_own(open_pair: Callable[[int], Pair]) -> None:
    pair, failures = open_pair(16 * MIB), []

    def work(part: int) -> None:
        for turn in range(20):
            place = 2 * MIB * ((part + turn) % 8)
            pair.read(pair.piece(place, 2 * MIB * part, 2 * MIB))
            if pair.target.view[2 * MIB * part :][: 2 * MIB] != pair.source.view[place:][: 2 * MIB]:
                failures.append((part, turn))

    threads = [threading.Thread(target=work, args=(part,)) for part in range(8)]
    with pair.memory.attended():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not failures
    assert pair.target.changed()[-1][1] > 14 * MIB


def too_late(reader: NixlReader, metadata: bytes, piece: Piece) -> None:
    with pytest.raises(StoreTimeout):
        reader.read(metadata, [piece], 1.0)


def test_one_that_is_late_leaves_the_others_alone(open_pair: Callable[[int], Pair]) -> None:
    pair, block = open_pair(4 * MIB), Block(1)
    silent = NixlMemory([block.range])
    piece = Piece(block.range.address, pair.target.view[:1])
    late = threading.Thread(target=too_late, args=(pair.reader, silent.metadata, piece))
    late.start()
    num_reads = 0
    with pair.memory.attended():
        while late.is_alive():
            pair.read(pair.piece(0, MIB, MIB))
            num_reads += 1
    silent.close()
    assert num_reads > 1
    assert pair.target.view[MIB : 2 * MIB] == pair.source.view[:MIB]


def test_links_are_kept_and_one_that_has_met_too_many_is_not(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with pair.memory.attended():
        pair.read(pair.piece(0, 0, 1))
        (link,) = pair.reader._idle
        pair.read(pair.piece(0, 0, 1))
        assert pair.reader._idle == [link]
        monkeypatch.setattr(nixl_link, "_MOST_REMOTES", 1)
        pair.read(pair.piece(0, 0, 1))
    assert pair.reader._idle == []


def test_a_closed_reader_reads_no_more(pair: Pair) -> None:
    pair.reader.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        pair.read(pair.piece(0, 0, 1))


def test_an_agent_that_outlives_its_link_stops_everything(pair: Pair) -> None:
    (link,) = pair.reader._idle
    agent = link._agent.agent
    with pytest.raises(InvariantError, match="outlives"):
        pair.reader.close()
    del agent


def test_an_agent_does_what_is_queued_before_its_end(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[None] = []
    (link,) = pair.reader._idle
    monkeypatch.setattr(type(link._agent), "get_new_notifs", lambda agent: steps.append(None))
    pair.reader.close()
    assert len(steps) == nixl_link._NUM_LAST_STEPS


def test_leaving_without_a_reader_is_a_bug(pair: Pair) -> None:
    with pytest.raises(InvariantError, match="there is none"):
        pair.memory.leave()


def test_memory_that_nobody_reads_waits_and_does_not_spin(pair: Pair) -> None:
    with pair.memory.attended():
        pair.read(pair.piece(0, 0, 1))
        assert not pair.memory._changed._waiters  # type: ignore[attr-defined]
    until(lambda: len(pair.memory._changed._waiters) == 1)  # type: ignore[attr-defined]


def test_without_nixl_the_message_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    for start in (NixlMemory, NixlReader):
        with pytest.raises(ConfigError, match="install the package nixl, or set peer_transport to tcp"):
            start([Block(16).range])


SERVER = """
import sys
from vllm_hicache.handoff import nixl_link
from vllm_hicache.handoff.nixl_link import MemoryRange, NixlMemory
view = memoryview(bytearray(b"s") * (64 << 20))
memory = NixlMemory([MemoryRange.of(view)])
memory.attend()
print("SERVES", memory.metadata.hex(), MemoryRange.of(view).address, flush=True)
sys.stdin.read()
"""


class Child:
    """Another process whose 64 MiB of `s` may be read."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        root = str(Path(nixl_link.__file__).parents[2])
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=pipe, stdout=pipe, text=True, env=os.environ | {"PYTHONPATH": root}
        )
        assert self.process.stdout is not None
        words = next(line for line in self.process.stdout if line.startswith("SERVES")).split()
        self.metadata, self.address = bytes.fromhex(words[1]), int(words[2])

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.close()


@pytest.fixture
def reading() -> Iterator[tuple[NixlReader, Block]]:
    block = Block(64 * MIB)
    reader = NixlReader([block.range])
    yield reader, block
    reader.close()


def test_another_process_is_read(child: Child, reading: tuple[NixlReader, Block]) -> None:
    reader, block = reading
    reader.read(child.metadata, [Piece(child.address, block.view[: 5 * MIB])], PATIENCE_S)
    assert block.view[: 5 * MIB] == b"s" * (5 * MIB)
    assert block.changed() == [(0, 5 * MIB)]


def test_a_killed_process_ends_the_read_with_an_error(child: Child, reading: tuple[NixlReader, Block]) -> None:
    reader, block = reading
    reader.read(child.metadata, [Piece(child.address, block.view[:1])], PATIENCE_S)
    child.close()
    for _ in range(2):
        with pytest.raises((StoreUnavailable, StoreTimeout)):
            reader.read(child.metadata, [Piece(child.address, block.view[MIB:])], 1.0)
    assert block.changed() == [(0, 1)]


@pytest.mark.usefixtures("emulated")
def test_a_process_killed_in_mid_read_ends_it_long_before_the_deadline(
    child: Child, reading: tuple[NixlReader, Block]
) -> None:
    reader, block = reading
    reader.read(child.metadata, [Piece(child.address, block.view[:1])], PATIENCE_S)
    os.kill(child.process.pid, signal.SIGSTOP)
    killer = threading.Timer(0.3, child.process.kill)
    killer.start()
    with pytest.raises(StoreUnavailable, match="still there"):
        reader.read(child.metadata, [Piece(child.address, block.view[1:])], PATIENCE_S)
    killer.join()


@pytest.mark.usefixtures("emulated")
def test_what_a_stopped_process_sends_later_is_not_written(child: Child, reading: tuple[NixlReader, Block]) -> None:
    (reader, block), near = reading, Block(MIB, seed=1)
    memory = NixlMemory([near.range])
    reader.read(child.metadata, [Piece(child.address, block.view[:1])], PATIENCE_S)
    os.kill(child.process.pid, signal.SIGSTOP)
    with pytest.raises(StoreTimeout):
        reader.read(child.metadata, [Piece(child.address, block.view[: 60 * MIB])], 0.3)
    block.view[:] = bytes([POISON]) * (64 * MIB)
    os.kill(child.process.pid, signal.SIGCONT)
    with memory.attended():
        for _ in range(50):
            reader.read(memory.metadata, [Piece(near.range.address, block.view[63 * MIB :])], PATIENCE_S)
    memory.close()
    assert block.view[63 * MIB :] == near.view
    assert block.changed()[0][0] >= 63 * MIB
