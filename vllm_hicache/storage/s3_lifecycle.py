"""The rule by which an S3 server removes, on its own, objects that have grown old.

Owner: `storage/s3.py` and the command line. Thread: any; two that change a bucket's rules at once may undo
each other, for S3 replaces all rules of a bucket together.
"""

from __future__ import annotations

from typing import Any

from botocore.client import BaseClient

from vllm_hicache.storage.s3_faults import fault_of

_NO_RULES = "NoSuchLifecycleConfiguration"


def rule_id(prefix: str) -> str:
    """Return the name of the rule for the keys that begin with `prefix`."""
    return f"vllm-hicache {prefix}"[:255]


def lifecycle_rule(prefix: str, days: int) -> dict[str, Any]:
    """Return the rule that removes keys that begin with `prefix` this many days after they were written.

    Uploads in parts that were never finished go after a day. Raises ValueError below one day.
    """
    if days < 1:
        raise ValueError(f"objects are to be removed after {days} days: S3 counts in whole days from 1 on")
    return {
        "ID": rule_id(prefix),
        "Status": "Enabled",
        "Filter": {"Prefix": prefix},
        "Expiration": {"Days": days},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
    }


def read_days(control: BaseClient, bucket: str, prefix: str) -> int | None:
    """Return after how many days our rule removes; None without such a rule. Raises what boto3 raises."""
    for rule in _rules(control, bucket):
        if rule.get("ID") == rule_id(prefix):
            days: int | None = rule.get("Expiration", {}).get("Days")
            return days
    return None


def apply_days(control: BaseClient, bucket: str, prefix: str, days: int | None) -> None:
    """Set our rule, or remove it for None; the bucket's other rules stay. Raises what boto3 raises."""
    rules = [rule for rule in _rules(control, bucket) if rule.get("ID") != rule_id(prefix)]
    if days is not None:
        rules.append(lifecycle_rule(prefix, days))
    if rules:
        control.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": rules})
    else:
        control.delete_bucket_lifecycle(Bucket=bucket)


def _rules(control: BaseClient, bucket: str) -> list[dict[str, Any]]:
    try:
        rules: list[dict[str, Any]] = control.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    except Exception as error:  # neither: only the answer that there are none is taken here
        if fault_of(error).code == _NO_RULES:
            return []
        raise
    return rules
