"""Whether all ranks consumed the same: entries of several ranks compared, and the first difference named.

Pure. Owner: the scheduler half, or the console for recorded logs. Thread: its owner's.

Entries other than `DONE` come in one order on all ranks and are compared by position; `DONE` comes whenever work
ended and is compared by operation. Nothing waits: what some rank has not delivered is compared when it comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice, takewhile

from vllm_hicache.entries import Entry, EntryKind, Mark
from vllm_hicache.errors import InvariantError
from vllm_hicache.names import OpId

MAX_WAITING = 1 << 16
"""Entries of a rank, and operations, that wait for other ranks at most."""
_WINDOW = 64
_CHUNK = 4096
_Identity = tuple[OpId, EntryKind]


class DifferenceKind(StrEnum):
    """In what ranks differ."""

    CAPACITY = "capacity"
    HIT = "hit length"
    EVICT = "eviction eligibility"
    LOCK_ORDER = "lock order"
    ACK = "ack consumption"
    DONE = "restore completion"
    MISSING = "missing report"


_KINDS = {
    EntryKind.CAPACITY: DifferenceKind.CAPACITY,
    EntryKind.HIT: DifferenceKind.HIT,
    EntryKind.EVICT: DifferenceKind.EVICT,
    EntryKind.LOCK: DifferenceKind.LOCK_ORDER,
    EntryKind.UNLOCK: DifferenceKind.LOCK_ORDER,
    EntryKind.ACK: DifferenceKind.ACK,
    EntryKind.DONE: DifferenceKind.DONE,
}
_DEEDS = {
    EntryKind.CAPACITY: "capacity",
    EntryKind.HIT: "hit",
    EntryKind.EVICT: "eviction",
    EntryKind.LOCK: "lock",
    EntryKind.ACK: "ack",
    EntryKind.UNLOCK: "unlock",
    EntryKind.DONE: "completion",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One point at which ranks differ; its text is one sentence.

    Attributes:
        op: the operation, the lowest where ranks were at several; 0 for none.
        values: by rank a number, or in words what it did at that point; of a missing report only the silent ranks.
        time_s: Unix time at which the last of the ranks got there.
    """

    op: OpId
    kind: DifferenceKind
    values: Mapping[int, int | str]
    time_s: float

    def __str__(self) -> str:
        place = f"operation {self.op}" if self.op else "start"
        groups: dict[int | str, list[int]] = {}
        for rank, value in sorted(self.values.items()):
            groups.setdefault(value, []).append(rank)
        told = ", ".join(_told(ranks, value) for value, ranks in groups.items())
        if self.kind == DifferenceKind.MISSING:
            return f"{place}: missing report: {told}"
        return f"{place}: ranks differ in {self.kind}: {told}"


class RankChecker:
    """Compares what ranks deliver, as soon as all of them have.

    Where the next ordered entries differ in operation or kind, somebody left out, added or swapped an entry. That is
    told once; then all ranks go on at the nearest entry that all of them have (the least number of entries passed
    over, within 64 a rank), waiting for further entries where there is none yet. What was passed over is
    remembered, so that its counterpart on another rank, as after a swap, is no second difference. By position alone
    one entry left out would shift everything after it; by operation alone a swap would not be seen. At most one
    difference is told for an operation and kind.

    Attributes:
        first: the earliest difference of the first call that found one.
        num_unchecked: ordered entries and completions that were dropped because a rank did not deliver its own.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._waiting: dict[int, deque[Entry]] = {rank: deque() for rank in sorted(set(ranks))}
        self._num_to_skip = dict.fromkeys(self._waiting, 0)
        self._completions: dict[OpId, dict[int, Entry]] = {}
        self._last_dropped = OpId(0)
        self._passed = _Recent()
        self._told = _Recent()
        self._latest_s = 0.0
        self._mark: Mark | None = None
        self._standing: set[int] = set()
        self._unread: list[tuple[int, Sequence[Entry]]] = []
        self._is_apart = False
        self.first: Difference | None = None
        self.num_unchecked = 0

    def take(self, rank: int, entries: Sequence[Entry], mark: Mark | None = None) -> list[Difference]:
        """Take a rank's next entries; return the differences that show now, earliest first.

        Args:
            mark: how far the rank has come with them. Where all ranks have the same, they have consumed the same, and
                nothing is compared one by one; where they have not, it is when each has delivered once, or without
                delay once one is ahead.

        Raises:
            InvariantError: nobody knows that rank.
        """
        if rank not in self._waiting:
            raise InvariantError(f"{len(entries)} entries of rank {rank}, but ranks are {list(self._waiting)}")
        if self._all_stand_at(rank, mark):
            self._start_afresh()
            return []
        self._unread.append((rank, entries))
        # What all ranks deliver in one step is most likely equal: that is known when the last one comes.
        if mark is not None and not self._is_apart and len(self._unread) < len(self._waiting):
            return []
        found = [each for unread in self._unread for each in self._read(*unread)]
        self._unread.clear()
        found += self._advance()
        if max(len(self._waiting[rank]), len(self._completions)) > MAX_WAITING:
            self._drop_oldest()
        self._is_apart = bool(self._completions) or any(self._waiting.values())
        return self._remembered(found)

    def _read(self, rank: int, entries: Sequence[Entry]) -> list[Difference | None]:
        """Put a rank's entries where they wait for those of the others."""
        ordered = [entry for entry in entries if entry.kind is not EntryKind.DONE]
        num_skipped = min(self._num_to_skip[rank], len(ordered))
        self._num_to_skip[rank] -= num_skipped
        self._waiting[rank].extend(ordered[num_skipped:])
        if entries:
            self._latest_s = max(self._latest_s, entries[-1].time_s)
        return [self._complete(rank, entry) for entry in entries if entry.kind is EntryKind.DONE]

    def _start_afresh(self) -> None:
        """All ranks have consumed the same: nothing that waits need be looked at."""
        self._unread.clear()
        self._completions.clear()
        for rank, queue in self._waiting.items():
            queue.clear()
            self._num_to_skip[rank] = 0
        self._is_apart = False

    def _all_stand_at(self, rank: int, mark: Mark | None) -> bool:
        """Note that a rank stands at a mark; return whether all do. A rank elsewhere begins a new count."""
        if mark != self._mark:
            self._mark = mark
            self._standing.clear()
        self._standing.add(rank)
        return mark is not None and len(self._standing) == len(self._waiting)

    def silent(self, op: OpId, ranks: Iterable[int], waited_s: float) -> Difference:
        """Return the difference for ranks that have not reported an operation for so many seconds."""
        difference = _missing(op, dict.fromkeys(ranks, waited_s), self._latest_s)
        self.first = self.first or difference
        return difference

    def _advance(self) -> Iterator[Difference | None]:
        """Compare ordered entries as far as all ranks have delivered them."""
        queues = list(self._waiting.values())
        while all(queues):
            first, *others = [queue[0] for queue in queues]
            if all(each.op == first.op and each.kind == first.kind for each in others):
                if any(each.value != first.value for each in others):
                    yield self._tell(_value_difference(self._heads()))
                for queue in queues:
                    queue.popleft()
            elif not self._pass_counterparts(self._heads()):
                yield self._tell(_order_difference(self._heads()))
                if not self._resynchronise():
                    return

    def _heads(self) -> dict[int, Entry]:
        return {rank: queue[0] for rank, queue in self._waiting.items()}

    def _remembered(self, found: Iterable[Difference | None]) -> list[Difference]:
        told = sorted((each for each in found if each is not None), key=lambda each: each.time_s)
        self.first = self.first or next(iter(told), None)
        return told

    def _complete(self, rank: int, entry: Entry) -> Difference | None:
        """Take a completion; compare when it was the last one missing."""
        if entry.op not in self._completions and entry.op <= self._last_dropped:
            return None
        by_rank = self._completions.setdefault(entry.op, {})
        by_rank.setdefault(rank, entry)
        if len(by_rank) < len(self._waiting):
            return None
        del self._completions[entry.op]
        is_equal = all(each.value == entry.value for each in by_rank.values())
        return None if is_equal else self._tell(_value_difference(by_rank))

    def _tell(self, difference: Difference) -> Difference | None:
        return difference if self._told.add((difference.op, difference.kind)) else None

    def _pass(self, nums: Mapping[int, int]) -> list[Entry]:
        """Remove so many entries from the front of each rank's."""
        return [self._waiting[rank].popleft() for rank, num in nums.items() for _ in range(num)]

    def _pass_counterparts(self, heads: Mapping[int, Entry]) -> bool:
        """Pass over next entries that another rank was seen to have elsewhere; return whether there were any."""
        known = [rank for rank, head in heads.items() if (head.op, head.kind) in self._passed]
        return bool(self._pass(dict.fromkeys(known, 1)))

    def _resynchronise(self) -> bool:
        """Go to the nearest entry that all ranks have; False where more entries are needed to find one."""
        places = [_first_places(islice(queue, _WINDOW)) for queue in self._waiting.values()]
        common = set(places[0]).intersection(*places[1:])
        if common:
            goal = min(common, key=lambda identity: sum(place[identity] for place in places))
            nums = [place[goal] for place in places]
        elif min(map(len, self._waiting.values())) < _WINDOW:
            return False
        else:
            nums = [_WINDOW // 2] * len(places)
        for entry in self._pass(dict(zip(self._waiting, nums, strict=True))):
            self._passed.add((entry.op, entry.kind))
        return True

    def _drop_oldest(self) -> None:
        """Keep what waits within its bounds: the oldest positions go on all ranks, also those still to come."""
        num_excess = max(map(len, self._waiting.values()), default=0) - MAX_WAITING
        if num_excess > 0:
            self.num_unchecked += num_excess
            nums = {rank: min(num_excess, len(queue)) for rank, queue in self._waiting.items()}
            self._pass(nums)
            for rank, num in nums.items():
                self._num_to_skip[rank] += num_excess - num
        while len(self._completions) > MAX_WAITING:
            oldest = next(iter(self._completions))
            del self._completions[oldest]
            self._last_dropped = max(self._last_dropped, oldest)
            self.num_unchecked += 1


class _Recent:
    """A set that forgets its oldest members."""

    def __init__(self) -> None:
        self._members: dict[Hashable, None] = {}

    def __contains__(self, member: Hashable) -> bool:
        return member in self._members

    def add(self, member: Hashable) -> bool:
        """Add a member; return whether it is new."""
        if member in self._members:
            return False
        self._members[member] = None
        if len(self._members) > MAX_WAITING:
            del self._members[next(iter(self._members))]
        return True


def compare(logs: Mapping[int, Sequence[Entry]], deadline_s: float) -> list[Difference]:
    """Compare whole logs by rank; return the differences, earliest first.

    A report is missing where a rank began an operation and has no completion within `deadline_s` of the first one
    of all ranks, although its log goes on for longer than that. Clocks of several hosts must agree that well.
    """
    started = aligned(logs)
    checker = RankChecker(logs)
    found = list[Difference]()
    for start in range(0, max(map(len, started.values()), default=0), _CHUNK):
        for rank, log in started.items():
            found += checker.take(rank, log[start : start + _CHUNK])
    return sorted(found + _missing_reports(logs, deadline_s), key=lambda each: each.time_s)


def aligned(logs: Mapping[int, Sequence[Entry]]) -> dict[int, list[Entry]]:
    """Return the logs from where all of them can be compared: completions, and ordered entries from one point on.

    That point is the beginning where all logs have it, else that of the first operation that is in all logs; a rank's
    ordered entries are empty where there is none.
    """
    ordered = {rank: [entry for entry in log if entry.kind != EntryKind.DONE] for rank, log in logs.items()}
    if len({(log[0].op, log[0].kind) if log else None for log in ordered.values()}) <= 1:
        return {rank: list(log) for rank, log in logs.items()}
    locks = [{entry.op for entry in log if entry.kind == EntryKind.LOCK} for log in ordered.values()]
    common = set.intersection(*locks)
    places = {rank: _first_lock(log, common) for rank, log in ordered.items()}
    # What precedes a lock belongs to the operation's beginning; a log may have been cut in the middle of it.
    num_before = min((_num_before(ordered[rank], place) for rank, place in places.items()), default=0)
    return {rank: _without_first(log, places[rank] - num_before) for rank, log in logs.items()}


def _first_lock(log: Sequence[Entry], ops: set[OpId]) -> int:
    """Where one of these operations is locked first; the log's length where none is."""
    places = (index for index, entry in enumerate(log) if entry.kind == EntryKind.LOCK and entry.op in ops)
    return next(places, len(log))


def _num_before(log: Sequence[Entry], place: int) -> int:
    """Entries of the same operation right before the one at `place`."""
    before = takewhile(lambda index: log[index].op == log[place].op, range(place - 1, -1, -1))
    return sum(1 for _ in before) if place < len(log) else 0


def _without_first(log: Sequence[Entry], num_ordered: int) -> list[Entry]:
    """A log without so many ordered entries."""
    places = (index for index, entry in enumerate(log) if entry.kind != EntryKind.DONE)
    lost = set(islice(places, num_ordered))
    return [entry for index, entry in enumerate(log) if index not in lost]


def _missing_reports(logs: Mapping[int, Sequence[Entry]], deadline_s: float) -> list[Difference]:
    begun = {rank: {each.op for each in log if each.kind == EntryKind.LOCK} for rank, log in logs.items()}
    ended = {rank: {each.op: each.time_s for each in log if each.kind == EntryKind.DONE} for rank, log in logs.items()}
    last_s = {rank: log[-1].time_s for rank, log in logs.items() if log}
    first_s: dict[OpId, float] = {}
    for times in ended.values():
        for op, time_s in times.items():
            first_s[op] = min(time_s, first_s.get(op, time_s))
    found = list[Difference]()
    for op, start_s in first_s.items():
        waited = {rank: ended[rank].get(op, last_s[rank]) - start_s for rank, ops in begun.items() if op in ops}
        late = {rank: wait_s for rank, wait_s in waited.items() if wait_s > deadline_s}
        if late:
            found.append(_missing(op, late, start_s + deadline_s))
    return found


def _missing(op: OpId, waited: Mapping[int, float], time_s: float) -> Difference:
    values = {rank: f"silent for {wait_s:.1f} s" for rank, wait_s in waited.items()}
    return Difference(op, DifferenceKind.MISSING, values, time_s)


def _value_difference(by_rank: Mapping[int, Entry]) -> Difference:
    """Of entries of one operation and kind."""
    entry = next(iter(by_rank.values()))
    kind, time_s = _KINDS[entry.kind], max(each.time_s for each in by_rank.values())
    values: dict[int, int | str] = {rank: each.value for rank, each in by_rank.items()}
    if kind == DifferenceKind.LOCK_ORDER:
        values = {rank: f"{_deed(each)} with {each.value} slots" for rank, each in by_rank.items()}
    return Difference(entry.op, kind, values, time_s)


def _order_difference(heads: Mapping[int, Entry]) -> Difference:
    """Of entries that differ in operation or kind."""
    values = {rank: _deed(head) for rank, head in heads.items()}
    op, time_s = min(head.op for head in heads.values()), max(head.time_s for head in heads.values())
    return Difference(op, DifferenceKind.LOCK_ORDER, values, time_s)


def _deed(entry: Entry) -> str:
    return f"{_DEEDS[entry.kind]} of operation {entry.op}" if entry.op else _DEEDS[entry.kind]


def _first_places(entries: Iterable[Entry]) -> dict[_Identity, int]:
    """Where each operation and kind comes first."""
    places: dict[_Identity, int] = {}
    for index, entry in enumerate(entries):
        places.setdefault((entry.op, entry.kind), index)
    return places


def _told(ranks: Sequence[int], value: int | str) -> str:
    """What ranks in ascending order have in common, in words."""
    many = len(ranks) > 1
    who = f"ranks {_listed(ranks)}" if many else f"rank {ranks[0]}"
    return f"{who}: {value}" if isinstance(value, str) else f"{who} {'have' if many else 'has'} {value}"


def _listed(ranks: Sequence[int]) -> str:
    """Ascending ranks with runs joined: `0-2, 5 and 7`."""
    runs = list[list[int]]()
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]
