"""What `doctor` says of a store: rights, speed, who can read it, and when it pays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from file_store_kit import names, opened, put

from vllm_hicache.cli import trial
from vllm_hicache.cli.advice import exposure_lines, medium_lines
from vllm_hicache.cli.asked import Asked
from vllm_hicache.cli.contents import Contents, look_into
from vllm_hicache.cli.probe import ModelFacts
from vllm_hicache.cli.report import Line, Mark
from vllm_hicache.cli.store_report import Opened, store_lines
from vllm_hicache.config import Config
from vllm_hicache.errors import StoreDenied, StoreError, StoreTimeout, StoreUnavailable
from vllm_hicache.names import ObjectName
from vllm_hicache.secrets import Secrets
from vllm_hicache.storage.base import ObjectInfo, Rights, Store, StoreUsage
from vllm_hicache.storage.envelope import XXH3, Header, HmacSealer
from vllm_hicache.storage.file import FileStore
from vllm_hicache.storage.wrappers import StoreWrapper

FAR, NEAR = "redis://10.0.0.5:6379/0", "redis://127.0.0.1:6379/0"
KEY = b"k" * 32
OBJECT_BYTES = 2 * trial.UNIT_BYTES
MODEL = ModelFacts("ab", 0.0, "", 4, 2, 64, "bfloat16", "none", None, {})
WAIT_S = 20.0


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return opened(tmp_path / "store", 256 << 20)


def asked(prefill: float | None = None, **settings: object) -> Asked:
    return Asked(settings, Config.parse(settings), "", None, Secrets(), prefill)


def report(
    store: Store,
    rights: Rights = Rights(),  # noqa: B008 - frozen
    contents: Contents | str = Contents(0, 0, True, {}),  # noqa: B008 - frozen
    facts: ModelFacts | None = None,
    question: Asked | None = None,
) -> dict[str, Line]:
    question = question or asked()
    return {line.name: line for line in store_lines(question, facts, Opened(store, store, rights, contents))}


class Writeless(StoreWrapper):
    """Takes nothing, and remembers that it was asked to."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.num_writes = 0

    def write(self, name: ObjectName, parts: Sequence[memoryview]) -> bool:
        self.num_writes += 1
        raise StoreDenied("read-only")


@pytest.mark.parametrize("rights", [Rights(write=False, delete=False), Rights(delete=False)])
def test_nothing_is_written_where_it_could_not_be_removed_again(store: FileStore, rights: Rights) -> None:
    put(store, "a/aa/1", 1 << 20)
    guarded = Writeless(store)
    lines = report(guarded, rights)
    assert guarded.num_writes == 0
    assert lines["usable"].mark is Mark.WARN
    assert {"read_bytes_per_s", "read_4_bytes_per_s", "read_s"} <= lines.keys()


def test_an_empty_store_that_is_read_only_is_not_measured_and_no_warning(store: FileStore) -> None:
    assert report(store, Rights(write=False))["speed"].mark is Mark.OK


def test_an_unlisted_store_is_measured_all_the_same(store: FileStore) -> None:
    lines = report(store, contents="cannot be listed: no adapter")
    assert "used_bytes" not in lines
    assert "read_bytes_per_s" in lines


def test_a_listing_that_was_cut_is_told_as_a_lower_bound(store: FileStore) -> None:
    line = report(store, contents=Contents(7, 1 << 20, False, {}))["used_bytes"]
    assert line.text.startswith("more than 1MiB in 7 objects")
    assert line.value is None


class Clock:
    """Ten seconds pass at each look."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += 10.0
        return self._now_s


def test_a_listing_ends_in_time(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(3):
        put(store, f"a/aa/{index}")
    monkeypatch.setattr("time.monotonic", Clock())
    found = look_into(store)
    assert isinstance(found, Contents)
    assert (found.num_objects, found.is_whole) == (1, False)


class Unlistable(StoreWrapper):
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        raise StoreError("the adapter cannot list")

    def usage(self) -> StoreUsage:
        raise StoreTimeout("too many to count")


def test_a_store_that_cannot_be_listed_says_why(store: FileStore) -> None:
    assert look_into(Unlistable(store)) == "the store cannot be listed: the adapter cannot list"


def test_a_store_too_large_to_count_is_told_by_its_listing(store: FileStore) -> None:
    line = report(Unlistable(store), contents=Contents(7, 1 << 20, True, {}))["used_bytes"]
    assert line.value == 1 << 20


def test_objects_are_as_large_as_the_engines() -> None:
    assert trial.object_bytes_of(None, 1) == 2 << 20
    assert trial.object_bytes_of(3_000_000, 1) == 46 * trial.UNIT_BYTES
    assert trial.object_bytes_of(3_000_000, 4) == 12 * trial.UNIT_BYTES
    assert trial.object_bytes_of(1, 1) == trial.UNIT_BYTES
    assert trial.object_bytes_of(1 << 40, 1) == 16 << 20


def test_only_as_many_objects_are_written_as_evict_nothing(store: FileStore) -> None:
    room_bytes = 3 * OBJECT_BYTES
    assert trial.measure_store(store, XXH3, OBJECT_BYTES, room_bytes).num_objects == 2
    assert trial.measure_store(store, XXH3, OBJECT_BYTES, None).num_objects == 8
    assert trial.measure_store(store, XXH3, OBJECT_BYTES, -1).num_objects == 0
    assert names(store) == set()


class Noting(StoreWrapper):
    """Notes the headers that are written."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.headers: list[bytes] = []

    def write(self, name: ObjectName, parts: Sequence[memoryview]) -> bool:
        self.headers.append(bytes(parts[0]))
        return super().write(name, parts)


def test_a_trial_with_a_seal_key_seals_as_the_engine_will(store: FileStore) -> None:
    noting = Noting(store)
    speed = trial.measure_store(noting, HmacSealer(KEY), OBJECT_BYTES, None)
    assert speed.faults == []
    assert speed.read_rates.keys() == speed.write_rates.keys() == {1, trial.IN_FLIGHT}
    assert len(noting.headers) == 8
    assert all(isinstance(Header.parse(memoryview(header), HmacSealer(KEY)), Header) for header in noting.headers)


class Meeting(StoreWrapper):
    """The last half of the writes, and of the reads of whole objects, meets before it ends."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._barriers = {verb: threading.Barrier(trial.IN_FLIGHT) for verb in ("write", "read")}
        self._calls = {"write": 0, "read": 0}
        self._lock = threading.Lock()

    def write(self, name: ObjectName, parts: Sequence[memoryview]) -> bool:
        self._meet("write", first=4)
        return super().write(name, parts)

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        if len(parts) > 1:
            self._meet("read", first=8)
        return super().read(name, parts, offset)

    def _meet(self, verb: str, first: int) -> None:
        with self._lock:
            self._calls[verb] += 1
            meets = self._calls[verb] > first
        if meets:
            self._barriers[verb].wait(WAIT_S)


def test_four_calls_are_in_flight_where_the_report_says_so(store: FileStore) -> None:
    assert trial.measure_store(Meeting(store), XXH3, OBJECT_BYTES, None).faults == []


class Faulty(StoreWrapper):
    """Does wrong what `fault` says."""

    def __init__(self, inner: Store, fault: str) -> None:
        super().__init__(inner)
        self._fault = fault

    def write(self, name: ObjectName, parts: Sequence[memoryview]) -> bool:
        written = super().write(name, parts)
        if self._fault == "lost reply":
            raise StoreUnavailable("the reply was lost")
        return written

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        # Parts of its own: what is changed after the read must not have been looked at before.
        total_bytes = super().read(name, list(parts), offset)
        if self._fault == "flipped byte":
            parts[-1][-1] ^= 1
        return total_bytes

    def delete(self, name: ObjectName) -> bool:
        if self._fault == "no delete":
            raise StoreUnavailable("deleting is refused")
        return super().delete(name)


@pytest.mark.parametrize(
    ("fault", "said", "num_left"),
    [
        ("lost reply", "a write of 131072 bytes failed: the reply was lost", 0),
        ("flipped byte", "an object of 131072 bytes did not come back: corrupt", 0),
        ("no delete", "a delete failed: deleting is refused", 8),
    ],
)
def test_a_faulty_store_is_found_out_and_cleaned_where_it_can_be(
    store: FileStore, fault: str, said: str, num_left: int
) -> None:
    speed = trial.measure_store(Faulty(store, fault), XXH3, OBJECT_BYTES, None)
    assert speed.faults[0] == said
    assert speed.num_left == len(names(store)) == num_left


def test_a_trial_that_is_interrupted_leaves_nothing(store: FileStore) -> None:
    class Interrupted(StoreWrapper):
        def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trial.measure_store(Interrupted(store), XXH3, OBJECT_BYTES, None)
    assert names(store) == set()


def test_a_prefix_is_told_in_seconds_and_against_recomputing(store: FileStore) -> None:
    lines = report(store, facts=MODEL)
    assert lines["prompt_s"].text.startswith("a 7808-token prefix")
    even = lines["pays_below_tokens_per_s"].value
    seconds = lines["prompt_s"].value
    assert isinstance(even, float)
    assert isinstance(seconds, float)
    assert even == pytest.approx(7808 / seconds)


def test_a_slow_engine_gains_from_the_first_tokens_on_and_a_fast_one_never(store: FileStore) -> None:
    slow = report(store, facts=MODEL, question=asked(prefill=1e-3))["pays_from_tokens"]
    assert slow.mark is Mark.OK
    assert isinstance(slow.value, float)
    assert 0 <= slow.value < 1
    fast = report(store, facts=MODEL, question=asked(prefill=1e15))["pays_from_tokens"]
    assert fast.mark is Mark.WARN
    assert "recomputing is faster" in fast.text


def test_a_prefix_that_takes_longer_than_the_engine_waits_is_warned_of(store: FileStore) -> None:
    line = report(store, facts=MODEL, question=asked(prefetch_timeout_s=1e-9))["prompt_s"]
    assert line.mark is Mark.WARN
    assert "raise prefetch_timeout_s" in line.text


# Who can read and change pages


def exposed(url: str, environ: Mapping[str, str] | None = None, secrets: Secrets | None = None) -> set[str]:
    return {line.name for line in exposure_lines(url, environ or {}, secrets or Secrets())}


@pytest.mark.parametrize(
    ("url", "warned"),
    [
        (NEAR, set()),
        ("redis://localhost/0", set()),
        ("redis://[::1]:6379/0", set()),
        ("unix:///run/redis.sock", set()),
        ("file:///dir", set()),
        (FAR, {"exposure", "password"}),
        ("redis://127.0.0.1:1,10.0.0.5:2/?cluster=true", {"exposure", "password"}),
        ("redis://:secret@store.example:6379/0", {"exposure"}),
        ("redis://user@store.example:6379/0", {"exposure", "password"}),
        ("rediss://10.0.0.5:6379/0", {"password"}),
        ("rediss://:secret@10.0.0.5:6379/0", set()),
        ("s3://bucket/prefix", set()),
        ("s3://bucket?endpoint=https://store.example", set()),
        ("s3://bucket?endpoint=http://store.example:9000", {"exposure"}),
        ("s3://bucket?endpoint=http://127.0.0.1:9000", set()),
        ("lmcache://resp?host=10.0.0.5&port=6379", {"exposure"}),
        ("lmcache://resp?host=127.0.0.1&port=6379", set()),
    ],
)
def test_who_can_read_or_change_pages_is_warned_of(url: str, warned: set[str]) -> None:
    assert exposed(url) == warned


def test_a_password_from_the_environment_and_an_encryption_key_count() -> None:
    assert exposed(FAR, {"VLLM_HICACHE_REDIS_PASSWORD": "secret"}) == {"exposure"}
    assert exposed(FAR, secrets=Secrets(encryption_key=KEY)) == {"password"}
    assert exposed(FAR, secrets=Secrets(seal_key=KEY)) == {"exposure", "password"}


def test_a_warning_shows_no_password() -> None:
    lines = exposure_lines("redis://user:hunter2@store.example/0", {}, Secrets())
    assert "hunter2" not in " ".join(line.text for line in lines)


# What happens when it is full


class Evicts(StoreWrapper):
    policy: str | None = None

    def eviction_policy(self) -> str | None:
        return self.policy


class Expires(StoreWrapper):
    def __init__(self, inner: Store, answer: Callable[[], int | None]) -> None:
        super().__init__(inner)
        self._answer = answer

    def lifecycle(self) -> int | None:
        return self._answer()


@pytest.mark.parametrize(
    ("policy", "mark", "said"),
    [
        ("allkeys-lru", Mark.OK, "allkeys-lru"),
        ("noeviction", Mark.WARN, "writes will fail when redis is full"),
        ("volatile-lru", Mark.WARN, "evicts only what has a ttl"),
        (None, Mark.OK, "does not tell"),
    ],
)
def test_a_policy_that_refuses_writes_is_warned_of(store: FileStore, policy: str | None, mark: Mark, said: str) -> None:
    evicting = Evicts(store)
    evicting.policy = policy
    (line,) = medium_lines(NEAR, evicting, StoreUsage(0, 0, 1 << 30))
    assert (line.mark, line.value) == (mark, policy)
    assert said in line.text


def test_redis_without_a_limit_is_warned_of_and_a_bucket_is_not(store: FileStore) -> None:
    (line,) = medium_lines(NEAR, store, StoreUsage(0, 0, None))
    assert "no maxmemory" in line.text
    assert list(medium_lines(NEAR, store, None)) == []
    assert list(medium_lines("s3://bucket", store, StoreUsage(0, 0, None))) == []


def test_a_bucket_without_a_life_cycle_rule_is_warned_of(store: FileStore) -> None:
    (line,) = medium_lines("s3://bucket", Expires(store, lambda: None), None)
    assert line.mark is Mark.WARN
    (line,) = medium_lines("s3://bucket", Expires(store, lambda: 14), None)
    assert (line.mark, line.value) == (Mark.OK, 14)


def test_a_server_that_does_not_tell_its_settings_is_no_failure(store: FileStore) -> None:
    def refuse() -> int | None:
        raise StoreUnavailable("AccessDenied")

    (line,) = medium_lines("s3://bucket", Expires(store, refuse), None)
    assert line.mark is Mark.OK
    assert "AccessDenied" in line.text
