"""The S3 store against servers that truncate, dribble, refuse or lie: no silent loss, no hang, no secret told."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from s3_server import environment_of
from s3_store_kit import open_s3
from tiny_http import Script, TinyHttp, answer, part, refusal

from vllm_hicache.errors import ConfigError, ObjectMissing, StoreDenied, StoreTimeout, StoreUnavailable
from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import Rights
from vllm_hicache.storage.s3 import S3Store

NAME = ObjectName("o")
BRIEF_S = 0.25


def says(data: bytes) -> Script:
    return lambda connection, head: connection.sendall(data)


def dribbles(data: bytes) -> Script:
    """Sends a byte whenever a read would time out otherwise, until the client goes away."""
    pause = threading.Event()

    def script(connection: socket.socket, head: str) -> None:
        for at in range(len(data)):
            connection.sendall(data[at : at + 1])
            pause.wait(BRIEF_S / 4)

    return script


def hangs(connection: socket.socket, head: str) -> None:
    while connection.recv(65536):
        pass


def read(store: S3Store, num_bytes: int = 10, offset: int = 0) -> bytes:
    buffer = bytearray(b"\xa5" * num_bytes)
    store.read(NAME, [memoryview(buffer)], offset)
    return bytes(buffer)


def write(store: S3Store) -> bool:
    return store.write(NAME, [memoryview(b"12345")])


CALLS: dict[str, Callable[[S3Store], object]] = {
    "read": read,
    "read without parts": lambda store: store.read(NAME, []),
    "write": write,
    "exists": lambda store: store.exists([NAME]),
    "delete": lambda store: store.delete(NAME),
    "list": lambda store: list(store.list("")),
    "usage": lambda store: store.usage(),
    "probe": lambda store: store.probe(),
    "lifecycle": lambda store: store.lifecycle(),
}
# Without ours, obstore gives up after 30 s.
shorter_than_a_clients_own_limit = pytest.mark.timeout(25)
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


def test_a_read_is_one_request_of_exactly_the_wanted_bytes() -> None:
    with TinyHttp(says(part(b"345", 3, 1_000_000))) as server:
        store = open_s3(server.url)
        assert store.read(NAME, [memoryview(bytearray(2)), memoryview(bytearray(1))], 3) == 1_000_000
    (head,) = server.heads
    assert head.startswith("GET /bucket/p/o.hc ")
    assert "range: bytes=3-5" in head.lower()


def test_a_write_is_one_request_that_replaces_nothing_and_is_signed_with_its_body() -> None:
    with TinyHttp(says(answer())) as server:
        assert write(open_s3(server.url)) is True
    (head,) = server.heads
    assert head.startswith("PUT /bucket/p/o.hc ")
    assert "if-none-match: *" in head.lower()
    assert f"x-amz-content-sha256: {hashlib.sha256(b'12345').hexdigest()}" in head.lower()


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(part(b"12345", 0, 100, promised=10), id="a part that is shorter than its range"),
        pytest.param(part(b"x" * 50, 0, 100, promised=10), id="a part that is longer than its range"),
        pytest.param(part(b"12345", 0, 10, promised=5), id="half of what is there"),
        pytest.param(part(b"1234567890", 5, 100), id="another range"),
        pytest.param(answer(b"1234567890"), id="no range at all"),
        pytest.param(part(b"1234567890", 0, 100)[:-4], id="a body cut off"),
        pytest.param(b"HTTP/1.1 206 Par", id="a head cut off"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"hello\r\n\r\n", id="another protocol"),
        pytest.param(refusal("503 Slow Down", "SlowDown"), id="too many requests"),
        pytest.param(refusal("500 Oops", "InternalError"), id="an internal error"),
        pytest.param(refusal("404 Not Found", "NoSuchBucket"), id="the bucket is gone"),
        pytest.param(refusal("409 Conflict", "Conflict"), id="a conflict where none can be"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(reply: bytes) -> None:
    with TinyHttp(says(reply)) as server, pytest.raises(StoreUnavailable, match="read of o failed"):
        read(open_s3(server.url))


@pytest.mark.parametrize("name", ["read", "write", "exists", "delete", "list", "lifecycle"])
def test_a_request_that_failed_is_not_sent_again(name: str) -> None:
    with TinyHttp(says(refusal("503 Slow Down", "SlowDown"))) as server, pytest.raises(StoreUnavailable, match="503"):
        CALLS[name](open_s3(server.url))
    assert len(server.heads) == 1


def test_a_whole_answer_is_read_as_it_is_and_a_flipped_byte_is_the_envelopes_to_find() -> None:
    with TinyHttp(says(part(b"12345\x00789a", 0, 10))) as server:
        assert read(open_s3(server.url)) == b"12345\x00789a"


def test_an_overlong_answer_fills_no_more_than_the_parts() -> None:
    buffer = bytearray(b"\xa5" * 40)
    with TinyHttp(says(part(b"x" * 50, 0, 100, promised=10))) as server, pytest.raises(StoreUnavailable):
        open_s3(server.url).read(NAME, [memoryview(buffer)[10:15], memoryview(buffer)[20:25]])
    assert buffer[:10] + buffer[15:20] + buffer[25:] == b"\xa5" * 30


def test_an_object_that_is_not_there_is_missing() -> None:
    with TinyHttp(says(refusal("404 Not Found", "NoSuchKey"))) as server, pytest.raises(ObjectMissing):
        read(open_s3(server.url))


def test_an_object_replaced_between_two_requests_is_an_error() -> None:
    def script(connection: socket.socket, head: str) -> None:
        is_get = head.startswith("GET")
        connection.sendall(refusal("416 Bad Range", "InvalidRange") if is_get else answer(num_bytes=1_000))

    with TinyHttp(script) as server, pytest.raises(StoreUnavailable, match="replaced"):
        read(open_s3(server.url), offset=500)


@shorter_than_a_clients_own_limit
@every_call
def test_a_server_that_never_answers_is_a_timeout(call: Callable[[S3Store], object]) -> None:
    with TinyHttp(hangs) as server, pytest.raises(StoreTimeout):
        call(open_s3(server.url, timeout_s=BRIEF_S))


@shorter_than_a_clients_own_limit
@every_call
def test_an_answer_that_comes_byte_by_byte_is_a_timeout(call: Callable[[S3Store], object]) -> None:
    with TinyHttp(dribbles(part(b"1234567890", 0, 10) * 20)) as server, pytest.raises(StoreTimeout):
        call(open_s3(server.url, timeout_s=BRIEF_S))


def test_a_read_past_the_end_ends_in_time_though_its_second_request_hangs() -> None:
    def script(connection: socket.socket, head: str) -> None:
        if head.startswith("GET"):
            connection.sendall(refusal("416 Bad Range", "InvalidRange"))
        else:
            hangs(connection, head)

    with TinyHttp(script) as server, pytest.raises(StoreTimeout):
        read(open_s3(server.url, timeout_s=BRIEF_S), offset=5)


def test_a_delete_ends_in_time_though_its_second_request_dribbles() -> None:
    dribble = dribbles(answer(status="204 No Content") * 20)

    def script(connection: socket.socket, head: str) -> None:
        if head.startswith("HEAD"):
            connection.sendall(answer())
        else:
            dribble(connection, head)

    with TinyHttp(script) as server, pytest.raises(StoreTimeout):
        open_s3(server.url, timeout_s=BRIEF_S).delete(NAME)


def test_looking_up_many_names_shares_one_time() -> None:
    pause = threading.Event()

    def script(connection: socket.socket, head: str) -> None:
        pause.wait(BRIEF_S / 2)
        connection.sendall(answer())

    with TinyHttp(script) as server, pytest.raises(StoreTimeout, match="looking up 160 objects"):
        open_s3(server.url, timeout_s=BRIEF_S).exists([NAME] * 160)


def test_nothing_is_written_into_parts_after_a_timeout() -> None:
    released, done = threading.Event(), threading.Event()

    def script(connection: socket.socket, head: str) -> None:
        data = part(b"x" * 1_000_000, 0, 1_000_000)
        try:
            connection.sendall(data[:-1000])
            released.wait()
            connection.sendall(data[-1000:])
        finally:
            done.set()

    buffer = bytearray(b"\xa5" * 1_000_000)
    with TinyHttp(script) as server:
        with pytest.raises(StoreTimeout):
            open_s3(server.url, timeout_s=BRIEF_S).read(NAME, [memoryview(buffer)])
        before = bytes(buffer)
        released.set()
        done.wait(timeout=10)
    assert buffer == before


@every_call
def test_a_port_where_nobody_listens_is_unavailable(call: Callable[[S3Store], object]) -> None:
    with TinyHttp(hangs) as server:
        url = server.url
    with pytest.raises(StoreUnavailable):
        call(open_s3(url))


@pytest.mark.parametrize("status", ["412 Precondition Failed", "409 Conflict"])
def test_a_write_that_finds_the_name_taken_says_so(status: str) -> None:
    with TinyHttp(says(refusal(status, "PreconditionFailed"))) as server:
        assert write(open_s3(server.url)) is False


@pytest.mark.parametrize("status", ["507 Insufficient Storage", "500 Internal Server Error", "400 Bad Request"])
def test_a_write_that_the_server_could_not_do_is_unavailable(status: str) -> None:
    with (
        TinyHttp(says(refusal(status, "EntityTooLarge"))) as server,
        pytest.raises(StoreUnavailable, match=f"{status[:3]} EntityTooLarge"),
    ):
        write(open_s3(server.url))


@pytest.mark.parametrize("name", ["read", "write", "exists", "delete", "list", "lifecycle"])
def test_a_refusal_is_told_as_one_and_without_what_the_server_quotes(name: str) -> None:
    quoted = "<AWSAccessKeyId>rw-access-key</AWSAccessKeyId><SignatureProvided>5ec2e7</SignatureProvided>"
    with TinyHttp(says(refusal("403 Forbidden", "SignatureDoesNotMatch", quoted))) as server:
        with pytest.raises(StoreDenied) as caught:
            CALLS[name](open_s3(server.url))
        with pytest.raises(ConfigError, match="the secret key is wrong") as refused:
            open_s3(server.url).probe()
    for error in (caught.value, refused.value):
        assert error.__cause__ is None
        assert error.__suppress_context__
        for secret in ("5ec2e7", "rw-access-key", environment_of("rw")["AWS_SECRET_ACCESS_KEY"], "\n"):
            assert secret not in str(error)


def test_a_server_of_another_region_is_a_setting_to_repair() -> None:
    with (
        TinyHttp(says(refusal("400 Bad Request", "AuthorizationHeaderMalformed"))) as server,
        pytest.raises(ConfigError, match="region="),
    ):
        open_s3(server.url).probe()


EMPTY_LIST = answer(b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")


def serves(puts: bytes, deletes: bytes) -> Script:
    """An empty bucket that answers to writes and deletes as told."""
    by_verb = {"PUT": puts, "DELETE": deletes, "GET": refusal("404 Not Found", "NoSuchKey")}

    def script(connection: socket.socket, head: str) -> None:
        connection.sendall(EMPTY_LIST if "list-type" in head else by_verb[head.split()[0]])

    return script


def requests(server: TinyHttp, verb: str) -> list[str]:
    return [head.split()[1] for head in server.heads if head.startswith(verb)]


def test_who_may_write_and_not_delete_leaves_the_same_one_key_at_every_start() -> None:
    with TinyHttp(serves(answer(), refusal("403 Forbidden", "AccessDenied"))) as server:
        for _ in range(2):
            assert open_s3(server.url).probe() == Rights(write=True, delete=False)
    assert set(requests(server, "PUT")) == {"/bucket/p/.probe"}


def test_a_probe_that_fails_half_way_removes_its_key() -> None:
    script = serves(refusal("500 Oops", "InternalError"), answer(status="204 No Content"))
    with TinyHttp(script) as server, pytest.raises(StoreUnavailable, match="500 InternalError"):
        open_s3(server.url).probe()
    (written,) = requests(server, "PUT")
    assert requests(server, "DELETE")[-1] == written


def test_a_server_that_ignores_if_none_match_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with TinyHttp(serves(answer(), answer(status="204 No Content"))) as server:
        assert open_s3(server.url).probe() == Rights()
    assert "ignores If-None-Match" in caplog.text


def test_with_virtual_addressing_the_bucket_is_in_the_hosts_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # A proxy is told the whole address and no name has to resolve.
    with TinyHttp(serves(answer(), answer())) as server:
        for variable in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(variable, server.endpoint)
        store = open_s3("s3://bucket/p?endpoint=http://store.test&addressing=virtual")
        assert write(store) is True
        assert list(store.list("")) == []
    assert requests(server, "PUT") == ["http://bucket.store.test/p/o.hc"]
    (listing,) = requests(server, "GET")
    assert listing.startswith("http://bucket.store.test/?list-type=2&prefix=p%2F")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key and self-signed certificate of 127.0.0.1 in one file."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=1))
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=True)
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    path.write_bytes(private + builder.sign(key, hashes.SHA256()).public_bytes(pem))
    return path


@pytest.fixture
def context(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def test_a_certificate_that_does_not_verify_is_a_setting_to_repair(context: ssl.SSLContext) -> None:
    with (
        TinyHttp(says(answer()), context) as server,
        pytest.raises(ConfigError, match=r"TLS with https://127.0.0.1:\d+ failed .*ca=/file.pem"),
    ):
        open_s3(server.url).probe()


def test_a_certificate_that_does_not_verify_fails_later_calls_too(context: ssl.SSLContext) -> None:
    with (
        TinyHttp(says(part(b"1234567890", 0, 10)), context) as server,
        pytest.raises(StoreUnavailable, match="not valid: UnknownIssuer"),
    ):
        read(open_s3(server.url))


def test_the_authority_that_the_url_names_is_believed(context: ssl.SSLContext, certificate: Path) -> None:
    def script(connection: socket.socket, head: str) -> None:
        connection.sendall(refusal("404 N", "NoSuchBucket") if "list-type" in head else part(b"1234567890", 0, 10))

    with TinyHttp(script, context) as server:
        store = open_s3(f"{server.url}&ca={certificate}")
        assert read(store) == b"1234567890"
        with pytest.raises(StoreUnavailable, match="NoSuchBucket"):
            list(store.list(""))
