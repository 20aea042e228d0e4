"""The demo's stores: which one an argument means, and what the result says of it."""

from __future__ import annotations

from pathlib import Path

import demo_report
import pytest
from demo_report import StoreNote
from demo_stores import DemoStore, open_demo_store, seconds
from s3_server import environment_of
from test_scripts import a_record

from vllm_hicache.errors import ConfigError
from vllm_hicache.names import ObjectName
from vllm_hicache.storage.registry import open_store


def opened(argument: str | None, folder: Path) -> DemoStore:
    with open_demo_store(argument, folder) as store:
        return store


def without_second_restart(store: StoreNote) -> demo_report.Result:
    records = [a_record(length) for length in (7680, 7900)]
    for record in records:
        del record.samples["store_cached"], record.samples["device_beside_store_cached"]
    return demo_report.assemble(records, {}, {"redis-py": 0.123}, store)


def test_files_of_its_own_are_the_default(tmp_path: Path) -> None:
    store = opened(None, tmp_path)
    assert (store.kind, store.url, store.shown) == ("file", f"file://{tmp_path}/store", None)
    assert store.second_restart
    assert store.aim == 1.15


def test_plain_reads_of_files_take_the_largest(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    for number in range(3):
        (tmp_path / "store" / str(number)).write_bytes(bytes(number))
    assert opened(None, tmp_path).plain_reads(2).keys() == {"disk", "page_cache"}


@pytest.mark.parametrize(
    ("name", "client", "aim"), [("redis", "redis-py", 1.25), ("lmcache", "redis-py", None), ("s3", "boto3", 1.5)]
)
def test_a_word_starts_a_real_server_whose_largest_objects_are_read(
    name: str, client: str, aim: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in environment_of("rw").items():
        monkeypatch.setenv(variable, value)
    with open_demo_store(name, tmp_path) as own:
        store = open_store(own.url)
        store.probe()
        for number in range(3):
            assert store.write(ObjectName(f"object/{number}"), [memoryview(bytes(1000 * number + 1))])
        store.close()
        assert own.plain_reads(2).keys() == {client}
    assert (own.kind, own.shown, own.second_restart, own.aim) == (name, None, False, aim)


@pytest.mark.parametrize(
    ("url", "kind", "second_restart"),
    [("memory://demo", "memory", False), ("file:///srv/store?capacity=1GiB", "file", True)],
)
def test_a_url_is_used_as_it_is(url: str, kind: str, second_restart: bool, tmp_path: Path) -> None:
    store = opened(url, tmp_path)
    assert (store.url, store.kind, store.second_restart) == (url, kind, second_restart)
    assert store.shown is not None
    assert store.plain_reads(3) == {}


def test_a_word_that_is_no_store_is_refused_before_an_engine_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no URL"):
        opened("redsi", tmp_path)


def test_reads_are_timed_one_after_the_other() -> None:
    done: list[int] = []
    assert seconds(lambda number=number: done.append(number) for number in range(3)) >= 0
    assert done == [0, 1, 2]


def test_without_a_second_restart_its_rows_are_left_out(tmp_path: Path) -> None:
    result = without_second_restart(StoreNote("redis", None, 1.25))
    assert "store_cached_ttft_s" not in result
    assert not any(name.startswith("store_cached") for name in result["ratios"])
    assert demo_report.failures(result) == []
    demo_report.draw(result, tmp_path / "chart.png")
    for text in (demo_report.table(result), demo_report.bars(result)):
        assert demo_report.TIERS["store_cached"] not in text
        assert text.count(demo_report.TIERS["store"]) == 2


@pytest.mark.parametrize(("aim", "verdict"), [(1.5, "aim 1.50: ok"), (1.25, "aim 1.25: OVER")])
def test_the_result_says_which_store_it_was_and_whether_it_met_its_aim(aim: float, verdict: str) -> None:
    result = without_second_restart(StoreNote("redis", "redis://host/0", aim))
    assert result["store"] == {
        "kind": "redis",
        "url": "redis://host/0",
        "aim": aim,
        "over_device_paired": [1.5, 1.5],
        "aim_met": aim == 1.5,
    }
    line = demo_report.store_line(result)
    assert line.startswith(f"store (redis): 1.50 and 1.50 x device, {verdict}")
    assert line.endswith("on one thread: redis-py 0.123 s")


def test_a_store_without_an_aim_is_not_judged() -> None:
    result = without_second_restart(StoreNote("lmcache"))
    assert result["store"]["aim_met"] is None
    assert "aim" not in demo_report.store_line(result)
