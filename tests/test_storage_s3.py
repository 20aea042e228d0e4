"""The S3 store on a real server: settings refused, rights, parts, foreign keys, life cycle, outages.

What every store must do is in `store_conformance.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import ClientError
from s3_server import BUCKET, S3Server, environment_of
from s3_store_kit import credentials, fresh_url, open_s3, shared_server

from vllm_hicache.errors import ConfigError, ObjectMissing, StoreDenied, StoreTimeout, StoreUnavailable
from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import Rights, StoreOptions
from vllm_hicache.storage.registry import open_store
from vllm_hicache.storage.s3 import S3Store, open_url
from vllm_hicache.storage.s3_client import parse_location
from vllm_hicache.storage.s3_lifecycle import lifecycle_rule
from vllm_hicache.storage.s3_multipart import MIN_PART_BYTES, write_in_parts
from vllm_hicache.storage.url import parse_url

NAME = ObjectName("o")
SECRET = environment_of("rw")["AWS_SECRET_ACCESS_KEY"]


def put(store: S3Store, text: str, data: bytes = b"12345") -> bool:
    return store.write(ObjectName(text), [memoryview(data)])


def get(store: S3Store, text: str, num_bytes: int = 5) -> bytes:
    buffer = bytearray(b"\xa5" * num_bytes)
    assert store.read(ObjectName(text), [memoryview(buffer)]) == num_bytes
    return bytes(buffer)


def prefix_of(url: str) -> str:
    return parse_location(parse_url(url)).prefix + "/"


@pytest.fixture
def url() -> str:
    return fresh_url()


@pytest.fixture
def store(url: str) -> Iterator[S3Store]:
    store = open_s3(url)
    yield store
    store.close()


@pytest.fixture
def control() -> Iterator[Any]:
    client = shared_server().client()
    yield client
    client.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket/p?endpont=http://h:1", "did you mean 'endpoint'"),
        ("s3://key:secret@bucket/p", "takes no user or password"),
        ("s3:///p", "names no valid bucket"),
        ("s3://Bucket_/p", "names no valid bucket"),
        ("s3://bucket/a b", "prefix 'a b' of 3 characters"),
        ("s3://bucket/a/../b", "is not valid"),
        ("s3://bucket/" + "x" * 301, "of 301 characters"),
        ("s3://bucket/p?endpoint=h:1", "write http"),
        ("s3://bucket/p?endpoint=http://user:secret@h:1", "no password"),
        ("s3://bucket/p?endpoint=http://h:1/path", "more than a host"),
        ("s3://bucket/p?addressing=paths", "did you mean 'path'"),
        ("s3://bucket/p?region=", "'region' is empty"),
        ("s3://bucket/p?ca=/no/such/file", "No such file"),
        ("s3://bucket/p?profile=nobody", "nobody"),
    ],
)
def test_a_url_that_cannot_be_honoured_is_refused(url: str, message: str) -> None:
    with credentials(environment_of("rw")), pytest.raises(ConfigError, match=message) as caught:
        open_url(parse_url(url), StoreOptions())
    assert "secret" not in str(caught.value)


def test_the_registry_opens_it_and_its_description_opens_the_same_place(url: str) -> None:
    with credentials(environment_of("rw")):
        first = open_store(url)
        second = open_store(first.describe())
    first.write(NAME, [memoryview(b"12345")])
    assert second.describe() == first.describe()
    assert second.read(NAME, []) == 5
    assert SECRET not in first.describe() + repr(first) + str(vars(first))
    first.close()
    second.close()


def test_without_credentials_the_way_out_is_told(url: str) -> None:
    with credentials({}), pytest.raises(ConfigError, match=r"set AWS_ACCESS_KEY_ID .* or give profile="):
        open_url(parse_url(url), StoreOptions())


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "InvalidAccessKeyId.*not known there"),
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "SignatureDoesNotMatch.*the secret key is wrong"),
    ],
)
def test_wrong_credentials_are_a_setting_to_repair(url: str, variables: dict[str, str], message: str) -> None:
    with credentials(environment_of("rw") | variables):
        store = open_url(parse_url(url), StoreOptions())
    with pytest.raises(ConfigError, match=message) as caught:
        store.probe()
    assert "wrong'" not in str(caught.value)
    with pytest.raises(StoreDenied):
        store.read(NAME, [memoryview(bytearray(1))])
    store.close()


def test_a_bucket_that_does_not_exist_is_a_setting_to_repair_and_is_not_made(url: str, control: Any) -> None:
    store = open_s3(url.replace(BUCKET, "no-such-bucket"))
    with pytest.raises(ConfigError, match=r"bucket 'no-such-bucket' does not exist at http://127.0.0.1:\d+: create it"):
        store.probe()
    for call in (lambda: store.read(NAME, [memoryview(bytearray(1))]), lambda: put(store, "o"), lambda: store.usage()):
        with pytest.raises(StoreUnavailable, match="NoSuchBucket"):
            call()
    assert [bucket["Name"] for bucket in control.list_buckets()["Buckets"]] == [BUCKET]


def test_full_rights_are_found(store: S3Store) -> None:
    assert store.probe() == Rights(write=True, delete=True)


def test_who_may_only_read_gets_hits_and_refused_writes(url: str, store: S3Store) -> None:
    put(store, "o")
    reader = open_s3(url, "ro")
    assert reader.probe() == Rights(write=False, delete=False)
    assert get(reader, "o") == b"12345"
    assert reader.exists([NAME, ObjectName("p")]) == [True, False]
    assert [info.name for info in reader.list("")] == ["o"]
    for call in (lambda: put(reader, "p"), lambda: reader.delete(NAME), lambda: reader.apply_lifecycle(3)):
        with pytest.raises(StoreDenied, match="403 AccessDenied"):
            call()
    reader.close()


def test_the_probe_leaves_no_key_of_any_kind(url: str, store: S3Store, control: Any) -> None:
    store.probe()
    open_s3(url, "ro").probe()
    assert "Contents" not in control.list_objects_v2(Bucket=BUCKET, Prefix=prefix_of(url))


def test_keys_that_are_no_objects_are_neither_listed_nor_counted(url: str, store: S3Store, control: Any) -> None:
    put(store, "a/o")
    for key in ("a/x.txt", "a/o", "a/!41.hc", "b c.hc", ".probe", "a.hc/b.hc", "!/YQ.hc", "folder/"):
        control.put_object(Bucket=BUCKET, Key=prefix_of(url) + key, Body=b"1")
    assert [info.name for info in store.list("")] == ["a/o"]
    assert store.usage().num_objects == 1


def test_two_prefixes_of_one_bucket_do_not_see_each_other(url: str, store: S3Store) -> None:
    neighbour = open_s3(url.replace("?", "0?"))
    put(neighbour, "o", b"1")
    assert list(store.list("")) == []
    assert store.exists([NAME]) == [False]
    neighbour.close()


def test_a_listing_of_several_pages_has_every_object_once(store: S3Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: put(store, f"n/{index}", b"1"), range(1_050)))
    listed = [info.name for info in store.list("n/")]
    assert sorted(listed) == sorted(f"n/{index}" for index in range(1_050))
    assert store.usage().used_bytes == 1_050


def test_a_prefix_finds_names_that_are_kept_elsewhere_for_their_length_or_look(store: S3Store) -> None:
    names = ["a.hb", "a.hc/b", "a.h", "x" * 300, "y" * 300]
    for text in names:
        put(store, text)
    for prefix in ("", "a", "a.", "a.h", "a.hc", "a.hc/", "x", "x" * 300, "yy", "z"):
        assert sorted(info.name for info in store.list(prefix)) == [n for n in sorted(names) if n.startswith(prefix)]


def test_a_large_object_goes_in_parts_and_replaces_nothing(url: str, control: Any) -> None:
    store = open_s3(url, multipart_bytes=MIN_PART_BYTES)
    data = os.urandom(2 * MIN_PART_BYTES + 12_345)
    parts = [memoryview(data)[:7], memoryview(data)[7:]]
    assert store.write(NAME, parts) is True
    assert store.write(NAME, [memoryview(bytes(len(data)))]) is False
    assert get(store, "o", len(data)) == data
    head = control.head_object(Bucket=BUCKET, Key=prefix_of(url) + "o.hc")
    assert head["ETag"].endswith('-3"')
    assert uploads(control, url) == []
    store.close()


class FailsAtPart:
    """boto3's client, save that one call of it fails."""

    def __init__(self, client: Any, number: int) -> None:
        self._client = client
        self._number = number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def upload_part(self, **arguments: Any) -> Any:
        if arguments["PartNumber"] == self._number:
            raise ClientError({"Error": {"Code": "SlowDown"}}, "UploadPart")
        return self._client.upload_part(**arguments)


def uploads(control: Any, url: str) -> list[Any]:
    return control.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix_of(url)).get("Uploads", [])


def test_an_upload_of_which_a_part_fails_leaves_nothing(url: str, store: S3Store, control: Any) -> None:
    body = bytes(3 * MIN_PART_BYTES)
    with pytest.raises(ClientError):
        write_in_parts(FailsAtPart(control, 2), BUCKET, prefix_of(url) + "o.hc", body, MIN_PART_BYTES, float("inf"))
    assert uploads(control, url) == []
    assert list(store.list("")) == []


def test_an_upload_whose_time_is_up_sends_no_more_and_leaves_nothing(url: str, store: S3Store, control: Any) -> None:
    body = bytes(3 * MIN_PART_BYTES)
    with pytest.raises(StoreTimeout, match=f"^0 of {len(body)} bytes were sent"):
        write_in_parts(control, BUCKET, prefix_of(url) + "o.hc", body, MIN_PART_BYTES, 0.0)
    assert uploads(control, url) == []
    assert store.exists([NAME]) == [False]


def test_the_life_cycle_rule_is_set_changed_and_removed_beside_others(store: S3Store, control: Any) -> None:
    other = lifecycle_rule("elsewhere/", 9)
    control.put_bucket_lifecycle_configuration(Bucket=BUCKET, LifecycleConfiguration={"Rules": [other]})
    assert store.lifecycle() is None
    store.apply_lifecycle(3)
    assert store.lifecycle() == 3
    store.apply_lifecycle(4)
    assert store.lifecycle() == 4
    rules = control.get_bucket_lifecycle_configuration(Bucket=BUCKET)["Rules"]
    assert len(rules) == 2
    store.apply_lifecycle(None)
    assert store.lifecycle() is None
    (left,) = control.get_bucket_lifecycle_configuration(Bucket=BUCKET)["Rules"]
    assert left["Filter"] == {"Prefix": "elsewhere/"}
    control.delete_bucket_lifecycle(Bucket=BUCKET)
    assert store.lifecycle() is None


def test_objects_are_not_removed_after_less_than_a_day(store: S3Store) -> None:
    with pytest.raises(ValueError, match="after 0 days"):
        store.apply_lifecycle(0)


PINNED = """
import os, sys
from pathlib import Path
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from vllm_hicache.storage.registry import open_store
store = open_store(sys.argv[1])
store.probe()
store.exists(["a", "b"])
for task in Path("/proc/self/task").iterdir():
    if int(task.name) != os.getpid():
        print((task / "comm").read_text().strip(), len(os.sched_getaffinity(int(task.name))))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: nothing to spread over")
def test_no_thread_of_ours_stays_on_the_core_that_the_caller_is_pinned_to(url: str) -> None:
    with credentials(environment_of("rw")):
        done = subprocess.run([sys.executable, "-c", PINNED, url], capture_output=True, text=True, check=True)
    threads = [line.rsplit(" ", 1) for line in done.stdout.splitlines()]
    assert any(name.startswith("tokio") for name, _ in threads)
    assert all(int(num_cpus) > 1 for _, num_cpus in threads)


@pytest.fixture
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


EVERY_CALL: list[Callable[[S3Store], object]] = [
    lambda store: get(store, "o"),
    lambda store: put(store, "new"),
    lambda store: store.exists([NAME] * 40),
    lambda store: store.delete(NAME),
    lambda store: list(store.list("")),
    lambda store: store.probe(),
]


def get_once_ready(store: S3Store, name: str) -> bytes:
    """Read an object from a server that has just started, and may know its bucket before its volumes."""
    deadline_s = time.monotonic() + 20
    while True:
        try:
            return get(store, name)
        except StoreUnavailable:
            if time.monotonic() > deadline_s:
                raise


def test_an_outage_fails_each_call_and_ends_with_it(own_server: S3Server) -> None:
    store, hasty = open_s3(own_server.url), open_s3(own_server.url, timeout_s=0.3)
    put(store, "o")
    own_server.pause()
    for call in EVERY_CALL:
        with pytest.raises(StoreTimeout):
            call(hasty)
    own_server.resume()
    assert get(store, "o") == b"12345"
    own_server.kill()
    for call in EVERY_CALL:
        with pytest.raises(StoreUnavailable):
            call(store)
    own_server.start()
    assert get_once_ready(store, "o") == b"12345"
    own_server.kill()
    own_server.start(empty=True)
    with pytest.raises(ObjectMissing):
        get(store, "o")
    assert put(store, "o") is True
    store.close()
    hasty.close()
