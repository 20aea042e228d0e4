"""From a URL to the two clients of a bucket: obstore for the data, boto3 for everything else.

Credentials come from boto3's own chain alone (environment, profile, instance role), and obstore asks that same
chain, so that those which expire keep working.

Owner: `storage/s3.py`. Thread: `connect` from any thread; both clients are thread-safe.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode, urlsplit

import boto3
import obstore.store
from botocore.client import BaseClient
from botocore.config import Config
from botocore.exceptions import BotoCoreError
from obstore.auth.boto3 import Boto3CredentialProvider

from vllm_hicache.errors import ConfigError
from vllm_hicache.storage.base import StoreOptions
from vllm_hicache.storage.url import StoreUrl, suggest

if TYPE_CHECKING:
    # Not importable at run time.
    from obstore.store import ClientConfig

MAX_PREFIX_CHARS = 300
DEFAULT_REGION = "us-east-1"
# obstore asks anew when less than five minutes are left of this: once a minute. boto3 hands out credentials
# that are good for ten minutes or more.
_CREDENTIALS_FOR = timedelta(minutes=6)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)
_PREFIX_PART = re.compile(r"(?!\.)[A-Za-z0-9._=-]+", re.ASCII)


class Addressing(StrEnum):
    """Where a request names its bucket: in the path, or in the host's name."""

    PATH = "path"
    VIRTUAL = "virtual"


@dataclass(frozen=True, slots=True)
class S3Location:
    """A bucket, a prefix in it without slashes around it, and how both are reached. Holds no secret."""

    bucket: str
    prefix: str
    addressing: Addressing
    endpoint: str | None = None
    region: str | None = None
    ca: str | None = None
    profile: str | None = None

    def url(self) -> str:
        """Return the URL that opens this place."""
        given = {"endpoint": self.endpoint, "region": self.region, "addressing": self.addressing.value}
        query = urlencode({k: v for k, v in {**given, "ca": self.ca, "profile": self.profile}.items() if v}, safe=":/")
        return f"s3://{self.bucket}{'/' if self.prefix else ''}{quote(self.prefix)}?{query}"

    @property
    def host(self) -> str:
        """What messages call the server."""
        return self.endpoint or "Amazon S3"


@dataclass(frozen=True, slots=True)
class Clients:
    """`data` is obstore's store of the bucket, `control` boto3's client."""

    data: obstore.store.S3Store
    control: BaseClient


def parse_location(url: StoreUrl) -> S3Location:
    """Read `s3://bucket/prefix?endpoint=…&region=…&addressing=path|virtual&ca=…&profile=…`. Raises ConfigError."""
    url.allow_parameters("endpoint", "region", "addressing", "ca", "profile")
    url.refuse_user()
    if _BUCKET.fullmatch(url.host) is None:
        raise ConfigError(f"store URL names no valid bucket ({url.host!r}): write s3://bucket/prefix")
    prefix = url.path.strip("/")
    if len(prefix) > MAX_PREFIX_CHARS or (prefix and not all(map(_PREFIX_PART.fullmatch, prefix.split("/")))):
        raise ConfigError(
            f"prefix {prefix[:80]!r} of {len(prefix)} characters in the store's URL is not valid: use up to "
            f"{MAX_PREFIX_CHARS} letters, digits and -._= in parts that do not begin with a dot"
        )
    given = url.parameters
    for name, value in given.items():
        if not value:
            raise ConfigError(f"store URL parameter {name!r} is empty: give a value or leave it out")
    endpoint = _endpoint(given.get("endpoint"))
    usual = Addressing.PATH if endpoint else Addressing.VIRTUAL
    addressing = _addressing(given.get("addressing", usual))
    return S3Location(
        url.host, prefix, addressing, endpoint, given.get("region"), given.get("ca"), given.get("profile")
    )


def connect(location: S3Location, options: StoreOptions) -> Clients:
    """Make both clients; asks no server but the one that gives credentials. Raises ConfigError."""
    try:
        session = boto3.Session(profile_name=location.profile, region_name=location.region)
        found = session.get_credentials()
    except BotoCoreError as error:
        raise ConfigError(f"no credentials for {location.url()}: {error}; correct AWS's settings") from None
    if found is None:
        raise ConfigError(
            f"no credentials for {location.url()} in the environment, the AWS configuration or an instance role: "
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give profile= in the URL"
        )
    region = session.region_name or DEFAULT_REGION
    return Clients(_data(location, options, session, region), _control(location, options, session, region))


def _data(location: S3Location, options: StoreOptions, session: boto3.Session, region: str) -> obstore.store.S3Store:
    timeout = timedelta(seconds=options.timeout_s)
    client: ClientConfig = {"timeout": timeout, "connect_timeout": timeout, "allow_http": True}
    if location.ca is not None:
        client["root_certificate"] = _certificates(location.ca)
    endpoint, virtual = location.endpoint, location.addressing is Addressing.VIRTUAL
    if endpoint is not None and virtual:
        # obstore takes the endpoint as it is and expects the bucket in it.
        endpoint = endpoint.replace("://", f"://{location.bucket}.", 1)
    return obstore.store.S3Store(
        location.bucket,
        endpoint=endpoint,
        region=region,
        virtual_hosted_style_request=virtual,
        credential_provider=Boto3CredentialProvider(session, ttl=_CREDENTIALS_FOR),
        client_options=client,
        retry_config={"max_retries": 0, "retry_timeout": timeout},
    )


def _control(location: S3Location, options: StoreOptions, session: boto3.Session, region: str) -> BaseClient:
    return session.client(
        "s3",
        endpoint_url=location.endpoint,
        region_name=region,
        verify=location.ca,
        config=Config(
            connect_timeout=options.timeout_s,
            read_timeout=options.timeout_s,
            retries={"total_max_attempts": 1},
            s3={"addressing_style": location.addressing.value},
            # Servers other than Amazon's refuse the newer checksums; the envelope has its own.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            tcp_keepalive=True,
        ),
    )


def _endpoint(text: str | None) -> str | None:
    if text is None:
        return None
    parts = urlsplit(text)
    # An endpoint could hold a password: it is never quoted.
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ConfigError("store URL parameter 'endpoint' is not valid: write http(s)://host:port, and no password")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigError("store URL parameter 'endpoint' has more than a host: write http(s)://host:port")
    return f"{parts.scheme}://{parts.netloc}"


def _addressing(text: str) -> Addressing:
    known = [value.value for value in Addressing]
    if text not in known:
        raise ConfigError(f"store URL parameter 'addressing' is {text!r}: {suggest(text, known)}")
    return Addressing(text)


def _certificates(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the certificates {path}: {error.strerror}; correct ca= in the URL") from None
