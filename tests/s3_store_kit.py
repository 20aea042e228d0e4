"""One real S3 server for all tests of a run, and stores on it: each with a prefix of its own."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from s3_server import S3Server, environment_of

from vllm_hicache.storage.base import StoreOptions
from vllm_hicache.storage.s3 import S3Store
from vllm_hicache.storage.s3_client import parse_location
from vllm_hicache.storage.url import parse_url

TIMEOUT_S = 20.0
"""Generous: of several conditional writes of one key, the server answers some after seconds."""


@functools.cache
def shared_server() -> S3Server:
    """The server of this run, started by the first test that wants it."""
    folder = Path(tempfile.mkdtemp(prefix="hicache-s3-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    server = S3Server(folder)
    atexit.register(server.stop)
    server.start()
    return server


@contextmanager
def credentials(variables: Mapping[str, str]) -> Iterator[None]:
    """Nothing of AWS's in the environment but `variables`, and no file of this user's."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    nowhere = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    with mock.patch.dict(os.environ, {**kept, **nowhere, "AWS_EC2_METADATA_DISABLED": "true", **variables}, clear=True):
        yield


def open_s3(
    url: str, identity: str = "rw", *, timeout_s: float = TIMEOUT_S, multipart_bytes: int | None = None
) -> S3Store:
    """A store that is not probed, with the credentials of one of the server's identities."""
    options, location = StoreOptions(timeout_s=timeout_s), parse_location(parse_url(url))
    with credentials(environment_of(identity)):
        if multipart_bytes is None:
            return S3Store(location, options)
        return S3Store(location, options, multipart_bytes=multipart_bytes)


def fresh_url() -> str:
    """Of an empty prefix on the shared server."""
    return shared_server().url_of(f"tests/{uuid.uuid4().hex}")
