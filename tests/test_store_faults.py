"""Real faults under a real Redis and a real S3 server: a miss or the right bytes, in time, and hits come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from chaos_stores import ChaosRedis, ChaosS3, ChaosStore, NotPossible, SmallDisk
from fault_kinds import Fault, Flip, Hang, HttpError, Latency, Overlong, Refuse, Reset, Throttle, Truncate
from fault_rig import NUM_CHUNKS, PAYLOAD_BYTES, UNIT_BYTES, Rig, await_true, poisoned, rigged

from vllm_hicache.errors import StoreError, StoreUnavailable
from vllm_hicache.names import MissReason
from vllm_hicache.storage.envelope import header_bytes
from vllm_hicache.storage.wrappers import Outcome

HEADER_BYTES = header_bytes(PAYLOAD_BYTES, UNIT_BYTES)
MID_PAYLOAD = 100_000
AGES_S = 3600.0
SLOW = 64 << 10

Rigged = tuple[Rig, Counter[Outcome]]


@pytest.fixture(scope="module", params=[ChaosRedis, ChaosS3], ids=lambda kind: kind.name)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosStore]:
    with request.param(tmp_path_factory.mktemp("server")) as server, pytest.MonkeyPatch.context() as patch:
        for variable, value in server.environment.items():
            patch.setenv(variable, value)
        yield server


@pytest.fixture
def mortal(server: ChaosStore) -> Iterator[ChaosStore]:
    """The server, which the test may leave dead."""
    yield server
    if not is_up(server):
        server.server.start()


def is_up(server: ChaosStore) -> bool:
    try:
        return server.server.pid > 0
    except RuntimeError:
        return False


@pytest.fixture
def rig(server: ChaosStore) -> Iterator[Rig]:
    with rigged(server) as (rig, _):
        rig.fill()
        yield rig


WIRE: dict[str, tuple[Fault, frozenset[MissReason]]] = {
    "flip in the header": (Flip(HEADER_BYTES // 2 + 800), frozenset({MissReason.CORRUPT, MissReason.UNAVAILABLE})),
    "flip in the payload": (Flip(MID_PAYLOAD), frozenset({MissReason.CORRUPT})),
    "overlong": (Overlong(MID_PAYLOAD), frozenset({MissReason.CORRUPT, MissReason.UNAVAILABLE})),
    "truncate": (Truncate(MID_PAYLOAD), frozenset({MissReason.UNAVAILABLE})),
    "reset": (Reset(MID_PAYLOAD), frozenset({MissReason.UNAVAILABLE})),
    "reset before the reply": (Reset(0), frozenset({MissReason.UNAVAILABLE})),
    "refuse": (Refuse(), frozenset({MissReason.UNAVAILABLE})),
    "hang": (Hang(), frozenset({MissReason.TIMEOUT})),
    "throttle": (Throttle(SLOW), frozenset({MissReason.TIMEOUT})),
    "latency": (Latency(AGES_S), frozenset({MissReason.TIMEOUT})),
}


@pytest.mark.parametrize("kind", WIRE)
def test_a_fault_on_the_wire_is_a_miss_with_its_reason_and_hits_come_back(rig: Rig, kind: str) -> None:
    fault, reasons = WIRE[kind]
    rig.proxy.set_fault(fault)
    assert rig.load(rig.first) in reasons
    assert rig.proxy.counters.num_struck > 0
    rig.proxy.clear()
    rig.assert_hits_return()


@pytest.mark.parametrize("kind", WIRE)
def test_a_fault_that_strikes_open_connections_under_load_never_gives_a_wrong_byte(rig: Rig, kind: str) -> None:
    chunks = list(rig.contents) * 4
    with ThreadPoolExecutor(NUM_CHUNKS) as pool:
        before = list(pool.map(rig.load, chunks))
        rig.proxy.set_fault(WIRE[kind][0])
        during = list(pool.map(rig.load, chunks))
        rig.proxy.clear()
        after = list(pool.map(rig.load, chunks))
    assert before == [rig.contents[chunk] for chunk in chunks]
    assert all(isinstance(loaded, MissReason) for loaded in during)
    assert all(rig.is_right(chunk, loaded) for chunk, loaded in zip(chunks, after, strict=True))
    rig.assert_hits_return()


@pytest.mark.parametrize("fault", [Hang(), Throttle(SLOW), Latency(AGES_S)], ids=repr)
def test_a_call_that_ran_out_of_time_is_counted_and_writes_nothing_afterwards(server: ChaosStore, fault: Fault) -> None:
    with rigged(server, timeout_s=0.5) as (rig, outcomes):
        rig.fill()
        rig.proxy.set_fault(fault)
        buffer = poisoned()
        assert rig.view.load(rig.first, memoryview(buffer), UNIT_BYTES) is MissReason.TIMEOUT
        left = bytes(buffer)
        assert outcomes[Outcome.TIMEOUT] == 1
        assert rig.view.misses()[MissReason.TIMEOUT] == 1
        rig.proxy.clear()
        rig.assert_hits_return()
        assert buffer == left


def test_a_little_latency_costs_no_hit(rig: Rig) -> None:
    rig.proxy.set_fault(Latency(0.05))
    assert [rig.load(chunk) for chunk in rig.contents] == list(rig.contents.values())
    assert rig.proxy.counters.num_struck >= NUM_CHUNKS


def test_one_reset_in_mid_read_is_tried_again_and_costs_no_hit(rig: Rig) -> None:
    assert rig.hits(rig.first)
    rig.proxy.set_fault(Reset(MID_PAYLOAD, num_times=1))
    assert rig.load(rig.first) == rig.contents[rig.first]
    assert rig.proxy.counters.num_struck == 1


def test_connections_that_were_reset_while_idle_cost_no_hit(rig: Rig) -> None:
    assert rig.hits(rig.first)
    rig.proxy.set_fault(Refuse())
    rig.proxy.clear()
    assert rig.load(rig.first) == rig.contents[rig.first]


@pytest.mark.parametrize("status", [(503, "SlowDown"), (500, "InternalError"), (403, "AccessDenied")], ids=str)
def test_an_error_of_an_s3_server_is_a_miss_and_no_error_once_it_is_over(rig: Rig, status: tuple[int, str]) -> None:
    if not isinstance(rig.server, ChaosS3):
        pytest.skip("Redis does not speak HTTP")
    rig.proxy.set_fault(HttpError(*status))
    assert {rig.load(chunk) for chunk in rig.contents} == {MissReason.UNAVAILABLE}
    rig.proxy.clear()
    rig.assert_hits_return()


BROKEN_WRITES: dict[str, Fault] = {
    "refuse": Refuse(),
    "hang": Hang(),
    "reset": Reset(0),
    "truncate": Truncate(0),
    "throttle": Throttle(SLOW),
}


@pytest.mark.parametrize("kind", BROKEN_WRITES)
def test_a_write_that_fails_leaves_the_whole_object_or_none(server: ChaosStore, kind: str) -> None:
    with rigged(server) as (rig, _):
        rig.proxy.set_fault(BROKEN_WRITES[kind])
        with pytest.raises(StoreError):
            rig.view.save(rig.first, memoryview(rig.contents[rig.first]), UNIT_BYTES)
        assert rig.load(rig.first, rig.direct) in (MissReason.ABSENT, rig.contents[rig.first])
        rig.proxy.clear()
        await_true(lambda: rig.saves(rig.first), "a save to go through")
        await_true(lambda: rig.hits(rig.first), "a hit")


PLANTED: dict[str, tuple[Callable[[Rig], bytes], MissReason]] = {
    "short": (lambda rig: rig.sealed(rig.first)[:-1], MissReason.SHORT),
    "short of its header": (lambda rig: rig.sealed(rig.first)[:50], MissReason.SHORT),
    "empty": (lambda rig: b"", MissReason.SHORT),
    "long": (lambda rig: rig.sealed(rig.first) + b"x", MissReason.LONG),
    "long by far": (lambda rig: rig.sealed(rig.first) + bytes(40 * PAYLOAD_BYTES), MissReason.LONG),
    "flipped": (lambda rig: rig.sealed(rig.first)[:-1] + bytes([rig.sealed(rig.first)[-1] ^ 1]), MissReason.CORRUPT),
    "another page's": (lambda rig: rig.sealed(rig.second), MissReason.FOREIGN),
    "garbage": (lambda rig: b"\x00" * len(rig.sealed(rig.first)), MissReason.CORRUPT),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_bad_object_is_one_miss_is_removed_and_the_next_save_heals_it(rig: Rig, kind: str) -> None:
    content, reason = PLANTED[kind]
    rig.plant(rig.first, content(rig))
    assert rig.load(rig.first) is reason
    assert rig.load(rig.first) is MissReason.ABSENT
    assert rig.view.save(rig.first, memoryview(rig.contents[rig.first]), UNIT_BYTES) is True
    assert rig.load(rig.first) == rig.contents[rig.first]


def test_an_object_deleted_between_lookup_and_read_is_absent(rig: Rig) -> None:
    assert rig.view.present([rig.first, rig.second]) == [True, True]
    rig.around.delete(rig.first.object_name(rig.namespace))
    assert rig.load(rig.first) is MissReason.ABSENT
    assert rig.load(rig.second) == rig.contents[rig.second]


def test_a_server_that_stands_still_is_a_timeout_and_hits_come_back_when_it_goes_on(rig: Rig) -> None:
    rig.server.pause()
    try:
        assert rig.load(rig.first) is MissReason.TIMEOUT
    finally:
        rig.server.server.resume()
    rig.assert_hits_return()


def test_a_server_killed_in_mid_read_is_a_miss_and_comes_back_empty(mortal: ChaosStore) -> None:
    with rigged(mortal, timeout_s=20) as (rig, _), ThreadPoolExecutor(1) as pool:
        rig.fill()
        rig.proxy.set_fault(Throttle(SLOW))
        loading = pool.submit(rig.load, rig.first)
        await_true(lambda: rig.proxy.counters.reply_bytes > SLOW // 4, "the middle of a read")
        mortal.server.kill()
        # Without this the kernel would deliver what the server had handed to it.
        rig.proxy.set_fault(Refuse())
        assert loading.result() is MissReason.UNAVAILABLE
        mortal.start_empty()
        rig.proxy.clear()
        await_true(lambda: rig.load(rig.first) is MissReason.ABSENT, "the empty store to answer")
        rig.assert_hits_return()


def test_a_server_killed_in_mid_write_has_the_whole_object_or_none(mortal: ChaosStore) -> None:
    with rigged(mortal, timeout_s=20) as (rig, _), ThreadPoolExecutor(1) as pool:
        rig.proxy.set_fault(Throttle(SLOW))
        saving = pool.submit(rig.saves, rig.first)
        await_true(lambda: rig.proxy.counters.request_bytes > SLOW // 4, "the middle of a write")
        mortal.server.kill()
        rig.proxy.clear()
        assert saving.result() is False
        mortal.server.start()
        await_true(lambda: rig.load(rig.first) in (MissReason.ABSENT, rig.contents[rig.first]), "an answer")
        rig.assert_hits_return()


def test_a_server_that_is_not_up_at_start_is_used_when_it_comes(mortal: ChaosStore) -> None:
    mortal.server.kill()
    with rigged(mortal) as (rig, _):
        assert rig.load(rig.first) is MissReason.UNAVAILABLE
        with pytest.raises(StoreUnavailable):
            rig.around.probe()
        mortal.server.start()
        rig.assert_hits_return()


def test_a_full_redis_refuses_saves_and_serves_hits(server: ChaosStore) -> None:
    if not isinstance(server, ChaosRedis):
        pytest.skip("S3 has a test of its own")
    with rigged(server) as (rig, _):
        assert_full_serves_hits(rig)


def test_an_s3_server_on_a_full_disk_refuses_saves_and_serves_hits(tmp_path: Path) -> None:
    try:
        disk = SmallDisk(tmp_path / "disk").__enter__()
    except NotPossible as error:
        pytest.skip(str(error))
    try:
        with ChaosS3(disk.folder / "weed", disk) as server, pytest.MonkeyPatch.context() as patch:
            for variable, value in server.environment.items():
                patch.setenv(variable, value)
            with rigged(server, timeout_s=5) as (rig, _):
                assert_full_serves_hits(rig)
    finally:
        disk.__exit__(None, None, None)


def assert_full_serves_hits(rig: Rig) -> None:
    """`second` is in the store, `first` finds no room in it until there is some again."""
    assert rig.direct.save(rig.second, memoryview(rig.contents[rig.second]), UNIT_BYTES)
    with rig.server.full():
        for _ in range(8):
            with pytest.raises(StoreUnavailable):
                rig.view.save(rig.first, memoryview(rig.contents[rig.first]), UNIT_BYTES)
        assert rig.load(rig.second) == rig.contents[rig.second]
        assert rig.load(rig.first) is MissReason.ABSENT
    await_true(lambda: rig.saves(rig.first), "a save to go through")
    assert rig.load(rig.first) == rig.contents[rig.first]


def test_credentials_that_lose_the_right_to_write_cost_no_hit(rig: Rig) -> None:
    rig.around.delete(rig.first.object_name(rig.namespace))
    with rig.server.read_only(rig.proxy):
        for _ in range(8):
            with pytest.raises(StoreUnavailable):
                rig.view.save(rig.first, memoryview(rig.contents[rig.first]), UNIT_BYTES)
        assert rig.load(rig.second) == rig.contents[rig.second]
    await_true(lambda: rig.saves(rig.first), "a save to go through")
    assert rig.load(rig.first) == rig.contents[rig.first]
