"""One large object written in parts, that appears when all are there and only where nothing is.

Owner: `storage/s3.py`. Thread: any; each upload has one.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from botocore.client import BaseClient

from vllm_hicache.errors import StoreTimeout
from vllm_hicache.storage.s3_faults import fault_of

MIN_PART_BYTES = 5 << 20
"""S3 refuses smaller parts, but for the last."""
_log = logging.getLogger(__name__)


def write_in_parts(control: BaseClient, bucket: str, key: str, body: bytes, part_bytes: int, deadline_s: float) -> bool:
    """Return False when the key was taken. Raises what boto3 raises, and StoreTimeout past `deadline_s`.

    Whatever goes wrong, the upload is aborted, so that the server keeps no parts.
    """
    where = {"Bucket": bucket, "Key": key}
    upload = {**where, "UploadId": control.create_multipart_upload(**where)["UploadId"]}
    try:
        parts = []
        for number, at in enumerate(range(0, len(body), part_bytes), start=1):
            _check_time(deadline_s, at, len(body))
            answer = control.upload_part(**upload, PartNumber=number, Body=body[at : at + part_bytes])
            parts.append({"PartNumber": number, "ETag": answer["ETag"]})
        _check_time(deadline_s, len(body), len(body))
        control.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}, IfNoneMatch="*")
    except Exception as error:  # neither: the parts are cleaned up, and the caller decides
        _abort(control, upload)
        if fault_of(error).taken:
            return False
        raise
    return True


def _check_time(deadline_s: float, num_sent: int, num_bytes: int) -> None:
    if time.monotonic() > deadline_s:
        raise StoreTimeout(f"{num_sent} of {num_bytes} bytes were sent when the time was up: raise the timeout")


def _abort(control: BaseClient, upload: dict[str, Any]) -> None:
    try:
        control.abort_multipart_upload(**upload)
    except Exception as error:  # neither: the first error is the one to tell; a life-cycle rule cleans up as well
        _log.warning("cannot abort the upload of %s: %s", upload["Key"], fault_of(error).reason)
