"""A lane of threads: urgent work first, no thread lost to a task that raises, and an end that counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from vllm_hicache.transfer.lane import Lane

PATIENCE_S = 30.0
_serial = count()

MakeLane = Callable[..., Lane]


@pytest.fixture
def errors() -> list[Exception]:
    return []


@pytest.fixture
def make_lane(errors: list[Exception]) -> Iterator[MakeLane]:
    lanes: list[Lane] = []

    def make(num_threads: int = 1) -> Lane:
        lanes.append(Lane(f"test{next(_serial)}", num_threads, errors.append))
        return lanes[-1]

    yield make
    for lane in lanes:
        lane.close(PATIENCE_S)


class Gate:
    """A task that waits until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.opened.wait(PATIENCE_S)


def threads_of(lane: Lane) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"hicache-{lane.name}-")]


def blocked(lane: Lane) -> Gate:
    """Occupy the lane's only thread."""
    lane.submit(gate := Gate())
    assert gate.entered.wait(PATIENCE_S)
    return gate


def finish(lane: Lane) -> None:
    """Return when a task submitted now has run, and with it all before it."""
    lane.submit((done := threading.Event()).set)
    assert done.wait(PATIENCE_S)


def fail(error: BaseException) -> Callable[[], None]:
    def task() -> None:
        raise error

    return task


def test_tasks_run_in_the_order_in_which_they_came(make_lane: MakeLane) -> None:
    lane, order = make_lane(), list[int]()
    gate = blocked(lane)
    for number in range(5):
        lane.submit(lambda number=number: order.append(number))
    gate.opened.set()
    finish(lane)
    assert order == list(range(5))


def test_waiting_tasks_are_counted(make_lane: MakeLane) -> None:
    gate = blocked(lane := make_lane())
    for _ in range(3):
        lane.submit(lambda: None)
    assert lane.depth == 3
    gate.opened.set()
    finish(lane)
    assert lane.depth == 0


def test_tasks_run_on_as_many_threads_as_the_lane_has(make_lane: MakeLane, errors: list[Exception]) -> None:
    lane, barrier = make_lane(3), threading.Barrier(3, timeout=PATIENCE_S)
    met = [threading.Event() for _ in range(3)]
    for event in met:
        lane.submit(lambda event=event: (barrier.wait(), event.set()))
    assert all(event.wait(PATIENCE_S) for event in met)
    assert errors == []


@pytest.mark.parametrize("error", [ValueError("x"), KeyError(), OSError(5, "io"), MemoryError(), RecursionError()])
def test_a_task_that_raises_is_counted_and_its_thread_lives(
    make_lane: MakeLane, errors: list[Exception], error: Exception
) -> None:
    lane = make_lane()
    before = threads_of(lane)
    for _ in range(3):
        lane.submit(fail(error))
    finish(lane)
    assert errors == [error] * 3
    assert threads_of(lane) == before
    assert lane.revive() == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_died_is_replaced_once_and_works(make_lane: MakeLane) -> None:
    lane = make_lane(2)
    before = threads_of(lane)
    lane.submit(fail(SystemExit()))
    while all(thread.is_alive() for thread in before):
        before[0].join(0.01)
        before[1].join(0.01)
    assert (lane.revive(), lane.revive()) == (1, 0)
    assert len(threads_of(lane)) == 2
    finish(lane)


def test_close_finishes_what_is_queued(make_lane: MakeLane) -> None:
    lane, ran = make_lane(2), list[int]()
    for number in range(50):
        lane.submit(lambda number=number: ran.append(number))
    assert lane.close(PATIENCE_S) == 0
    assert sorted(ran) == list(range(50))
    assert threads_of(lane) == []


def test_close_waits_for_the_task_that_runs(make_lane: MakeLane) -> None:
    gate, ended = blocked(lane := make_lane()), threading.Event()
    closer = threading.Thread(target=lambda: (lane.close(PATIENCE_S), ended.set()))
    closer.start()
    assert not ended.is_set()
    gate.opened.set()
    closer.join(PATIENCE_S)
    assert ended.is_set()
    assert threads_of(lane) == []


def test_close_drops_and_counts_what_its_time_does_not_suffice_for(make_lane: MakeLane) -> None:
    gate, ran = blocked(lane := make_lane()), list[str]()
    threads = threads_of(lane)
    for _ in range(3):
        lane.submit(lambda: ran.append("ran"))
    assert lane.close(0.0) == 3
    gate.opened.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert ran == []
    assert threads_of(lane) == []


def test_a_closed_lane_refuses_tasks_by_its_name(make_lane: MakeLane) -> None:
    lane = make_lane()
    lane.close(PATIENCE_S)
    with pytest.raises(RuntimeError, match=rf"{lane.name} is closed"):
        lane.submit(lambda: None)


def test_a_lane_can_be_closed_twice(make_lane: MakeLane) -> None:
    lane = make_lane()
    assert (lane.close(PATIENCE_S), lane.close(PATIENCE_S)) == (0, 0)
