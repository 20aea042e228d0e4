"""What went wrong in a call to S3, read from the errors of both clients: the one seam of the S3 store.

The clients' own texts quote the server's answer, which for a wrong signature holds the signature; so of an
answer only its status and its code go on, and the original error is not chained.

Owner: `storage/s3.py`. Pure; any thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import botocore.exceptions as boto
import obstore.exceptions as obs

from vllm_hicache.errors import ConfigError, ObjectMissing, StoreDenied, StoreError, StoreTimeout, StoreUnavailable

_MAX_REASON_CHARS = 200
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>|\(code: (\w{1,64})\)", re.ASCII)
_QUOTED = re.compile(r'(?:message|error): "([^"\\]{1,150})"')
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
_CREDENTIALS = {
    "InvalidAccessKeyId": "the access key is not known there",
    "SignatureDoesNotMatch": "the secret key is wrong",
    "InvalidToken": "the session token is not valid",
    "ExpiredToken": "the session token has expired",
    "RequestTimeTooSkewed": "this host's clock is wrong",
}
_REGION = frozenset({"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"})


@dataclass(frozen=True, slots=True)
class Fault:
    """One failed call. `status` and `code` are the server's, 0 and empty when it did not answer."""

    reason: str
    status: int = 0
    code: str = ""
    timed_out: bool = False
    certificate: bool = False

    @property
    def denied(self) -> bool:
        return self.status in (401, 403) or self.code == "AccessDenied"

    @property
    def taken(self) -> bool:
        """A write found its name taken, or another writer at it."""
        return self.status in (409, 412)

    def store_error(self, action: str) -> StoreError:
        """Return what the contract of a store says for it. `action` begins the message."""
        text = f"{action} failed: {self.reason}"
        if self.timed_out:
            return StoreTimeout(text)
        if self.denied:
            return StoreDenied(text)
        if self.status == 404 and self.code != "NoSuchBucket":
            return ObjectMissing(text)
        return StoreUnavailable(text)

    def refusal(self, bucket: str, endpoint: str) -> str | None:
        """Return what only a person can repair about it, with the way out; None for what may pass by itself."""
        if self.code == "NoSuchBucket":
            return f"bucket {bucket!r} does not exist at {endpoint}: create it, or correct the store's URL"
        if self.code in _CREDENTIALS:
            return (
                f"{endpoint} refuses our credentials for bucket {bucket!r} ({self.code}): {_CREDENTIALS[self.code]}; "
                "correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile that the URL names"
            )
        if self.code in _REGION or self.status == 301:
            return f"bucket {bucket!r} is not in the region that was asked ({self.reason}): give region= in the URL"
        if self.certificate:
            return f"TLS with {endpoint} failed ({self.reason}): give the authority's certificates as ca=/file.pem"
        if self.denied:
            return (
                f"{endpoint} lets our credentials not list and read bucket {bucket!r} ({self.reason}): "
                "grant s3:ListBucket and s3:GetObject"
            )
        return None


def fault_of(error: Exception) -> Fault:
    """Return what an error of boto3 or obstore says. Other errors are a fault without an answer."""
    if isinstance(error, boto.ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = error.response.get("Error", {}).get("Code", "")
        return Fault(_answer(status, code), status, code)
    if isinstance(error, boto.ConnectTimeoutError | boto.ReadTimeoutError):
        return Fault("no answer in time", timed_out=True)
    if isinstance(error, boto.SSLError):
        return Fault(_line(str(error.kwargs.get("error", error))), certificate=True)
    if isinstance(error, obs.BaseError | FileNotFoundError):
        return _of_obstore(str(error))
    return Fault(_line(f"{type(error).__name__}: {error}"))


@contextmanager
def seam(action: str) -> Iterator[None]:
    """Translate the errors of both clients into this package's."""
    try:
        yield
    except (StoreError, ConfigError):
        raise
    except Exception as error:  # miss: whatever the clients raise, the store cannot serve this call
        raise fault_of(error).store_error(action) from None


def _of_obstore(text: str) -> Fault:
    summary, _, details = text.partition("\n\nDebug source:")
    status, code = _STATUS.search(summary), _CODE.search(summary)
    if status or code:
        number, word = int(status[1]) if status else 0, (code[1] or code[2]) if code else ""
        return Fault(_answer(number, word), number, word)
    if "incorrectly configured region" in summary:
        return Fault("the server redirected us", code="PermanentRedirect")
    if "kind: Timeout" in details or "TimedOut" in details:
        return Fault("no answer in time", timed_out=True)
    certificate = _CERTIFICATE.search(details)
    if certificate:
        return Fault(f"the server's certificate is not valid: {certificate[1]}", certificate=True)
    # The summary ends in `error sending request`; the system's own words are further down.
    quoted = _QUOTED.findall(details)
    return Fault(_line(quoted[-1] if quoted else summary.rsplit(" - ", 1)[-1]))


def _answer(status: int, code: str) -> str:
    return f"the server answered {status or ''} {code}".replace("  ", " ").rstrip()


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_REASON_CHARS else line[: _MAX_REASON_CHARS - 1] + "…"
