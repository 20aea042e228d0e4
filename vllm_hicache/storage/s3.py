"""Objects as keys of an S3 bucket, which any number of hosts may share.

A write carries `If-None-Match: *`: of several writers one wins, and a reader sees all or nothing. A bucket has
no capacity and no eviction of its own: `apply_lifecycle` lets the server remove what has grown old.

Reads and writes of a single request run on the calling thread, through obstore, whose client bounds each request
from connecting to the last byte. Calls of several requests run on a thread that is left behind when their time
is up; such calls never touch the caller's memory.

Owner: `storage/`. Thread: every method may be called from any thread; the pool serves `exists`.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar, TypeVar

import obstore

from vllm_hicache.errors import ConfigError, ObjectMissing, StoreTimeout, StoreUnavailable
from vllm_hicache.machine import neighbouring_cpus, run_on
from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import ObjectInfo, Rights, Store, StoreOptions, StoreUsage, teller
from vllm_hicache.storage.s3_client import S3Location, connect, parse_location
from vllm_hicache.storage.s3_faults import fault_of, seam
from vllm_hicache.storage.s3_keys import decode, encode, key_prefixes
from vllm_hicache.storage.s3_lifecycle import apply_days, lifecycle_rule, read_days
from vllm_hicache.storage.s3_multipart import MIN_PART_BYTES, write_in_parts
from vllm_hicache.storage.url import StoreUrl
from vllm_hicache.units import format_bytes

MULTIPART_BYTES = 64 << 20
_MIN_EXISTS_THREADS = 16
# Pieces of this size are handed over while the rest still arrives; a whole large body would be copied twice.
_STREAM_BYTES = 256 << 10
_PROBE_KEY = ".probe"
_log = logging.getLogger(__name__)
T = TypeVar("T")


class S3Store(Store):
    """The keys below one prefix of a bucket."""

    scheme: ClassVar[str] = "s3"

    def __init__(self, location: S3Location, options: StoreOptions, *, multipart_bytes: int = MULTIPART_BYTES) -> None:
        """Connects to nothing but the source of credentials. Raises ConfigError.

        Args:
            multipart_bytes: an object larger than this is written in parts of a quarter of this, at least 5 MiB.
        """
        self._location = location
        self._timeout_s = options.timeout_s
        self._multipart_bytes = multipart_bytes
        self._key_prefix = f"{location.prefix}/" if location.prefix else ""
        clients = connect(location, options)
        self._data, self._control = clients.data, clients.control
        # obstore's threads begin at its first call and stay on the cores of the thread that makes it.
        self._cpus = neighbouring_cpus()
        num_threads = max(options.num_connections, _MIN_EXISTS_THREADS)
        self._pool = ThreadPoolExecutor(num_threads, "hicache-s3", run_on, (self._cpus,))

    def describe(self) -> str:
        return self._location.url()

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        keys = [self._key(name) for name in names]
        try:
            return list(self._pool.map(self._is_there, keys, timeout=self._timeout_s))
        except TimeoutError:
            raise StoreTimeout(f"looking up {len(keys)} objects took more than {self._timeout_s:g} s") from None

    def read(self, name: ObjectName, parts: Sequence[memoryview], offset: int = 0) -> int:
        key, num_wanted = self._key(name), sum(part.nbytes for part in parts)
        deadline_s = time.monotonic() + self._timeout_s
        action = f"read of {name}"
        if num_wanted == 0:
            with seam(action):
                return self._size(key)
        try:
            found = obstore.get(self._data, key, options={"range": (offset, offset + num_wanted)})
            total_bytes, (start, end) = found.meta["size"], found.range
            num_filled = _scatter(found.stream(min_chunk_size=_STREAM_BYTES), parts)
        except Exception as error:  # miss: as the seam does, but that an offset past the end is an answer
            fault = fault_of(error)
            if fault.status != 416:
                raise fault.store_error(action) from None
            return self._size_past_end(key, offset, action, deadline_s)
        # obstore compares what was asked with what was promised, not with what then came.
        if end - start != num_filled:
            raise StoreUnavailable(f"{action} failed: {end - start} bytes were promised and {num_filled} came")
        return total_bytes

    def write(self, name: ObjectName, parts: Sequence[memoryview]) -> bool:
        key, num_bytes = self._key(name), sum(part.nbytes for part in parts)
        action = f"write of {format_bytes(num_bytes)} to {name}"
        if num_bytes > self._multipart_bytes:
            return self._write_in_parts(action, key, parts)
        with seam(action):
            return self._put(key, parts)

    def delete(self, name: ObjectName) -> bool:
        key = self._key(name)

        def delete() -> bool:
            there = self._is_there(key)
            if there:
                self._control.delete_object(Bucket=self._location.bucket, Key=key)
            return there

        return self._within(f"delete of {name}", delete, self._timeout_s)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for key_prefix in key_prefixes(prefix):
            for entry in self._entries(self._key_prefix + key_prefix):
                name = decode(entry["Key"].removeprefix(self._key_prefix))
                if name is not None and name.startswith(prefix):
                    yield ObjectInfo(name, entry["Size"], entry["LastModified"].timestamp())

    def usage(self) -> StoreUsage:
        """Count by listing everything: one request a thousand objects, for S3 keeps no sum of a prefix."""
        sizes = [info.size_bytes for info in self.list("")]
        return StoreUsage(len(sizes), sum(sizes), capacity_bytes=None)

    def probe(self) -> Rights:
        return self._within(f"probe of {self._location.host}", self._try_rights, self._timeout_s)

    def close(self) -> None:
        self._pool.shutdown(wait=False)
        self._control.close()

    def lifecycle(self) -> int | None:
        """Return after how many days the server removes our objects; None when no rule of ours is set."""
        args = self._control, self._location.bucket, self._key_prefix
        return self._within("reading the life-cycle rules", partial(read_days, *args), self._timeout_s)

    def apply_lifecycle(self, days: int | None) -> None:
        """Let the server remove our objects this many days after they were written; None ends that.

        Raises ValueError below one day, else StoreError.
        """
        args = self._control, self._location.bucket, self._key_prefix, days
        if days is not None:
            lifecycle_rule(self._key_prefix, days)
        self._within("setting the life-cycle rules", partial(apply_days, *args), self._timeout_s)

    def _key(self, name: ObjectName) -> str:
        return self._key_prefix + encode(name)

    def _size(self, key: str) -> int:
        size: int = obstore.head(self._data, key)["size"]
        return size

    def _is_there(self, key: str) -> bool:
        try:
            with seam(f"look-up of {key}"):
                self._size(key)
        except ObjectMissing:
            return False
        return True

    def _put(self, key: str, parts: Sequence[memoryview]) -> bool:
        # Not joined. A client that is cut off by the time-out may still send some of it from memory that its owner
        # reuses: Amazon then refuses the body for its signature, elsewhere the envelope's digests find it.
        try:
            obstore.put(self._data, key, parts, mode="create", use_multipart=False)
        except Exception as error:  # neither: all but a name that is taken goes on to the seam
            if fault_of(error).taken:
                return False
            raise
        return True

    def _write_in_parts(self, action: str, key: str, parts: Sequence[memoryview]) -> bool:
        # A copy: the thread may outlive this call, and the caller's memory may not be read then.
        body, part_bytes = b"".join(parts), max(self._multipart_bytes // 4, MIN_PART_BYTES)
        deadline_s = time.monotonic() + self._timeout_s
        args = self._control, self._location.bucket, key, body, part_bytes, deadline_s
        return self._within(action, partial(write_in_parts, *args), self._timeout_s)

    def _size_past_end(self, key: str, offset: int, action: str, deadline_s: float) -> int:
        """Return the total of an object that a read began behind the end of."""
        remaining_s = max(0.0, deadline_s - time.monotonic())
        total_bytes = self._within(action, partial(self._size, key), remaining_s)
        if total_bytes > offset:
            raise StoreUnavailable(f"{action} failed: the object was replaced meanwhile")
        return total_bytes

    def _entries(self, prefix: str) -> Iterator[dict[str, Any]]:
        """Yield boto3's entry of each key, one bounded call a thousand."""
        where = {"Bucket": self._location.bucket, "Prefix": prefix}
        while True:
            call = partial(self._control.list_objects_v2, **where)
            page = self._within(f"listing of {prefix}", call, self._timeout_s)
            yield from page.get("Contents", ())
            if not page.get("IsTruncated"):
                return
            where["ContinuationToken"] = page["NextContinuationToken"]

    def _try_rights(self) -> Rights:
        """Do all that later calls do; leave nothing but, where we may not delete, one empty key that is no object."""
        unique = f"{self._key_prefix}{_PROBE_KEY}-{uuid.uuid4().hex}"
        self._require_readable(unique)
        can_delete = self._allowed(lambda: self._remove(unique))
        # Without the right to delete the key stays, so it is the same one at every start.
        key = unique if can_delete else self._key_prefix + _PROBE_KEY
        try:
            can_write = self._allowed(lambda: self._put(key, ()))
            if can_write and can_delete and self._put(key, ()):
                _log.warning(
                    "%s ignores If-None-Match: of two writers of an object both will count it", self.describe()
                )
        finally:
            if can_delete:
                self._remove(key)
        return Rights(can_write, can_delete)

    def _require_readable(self, missing_key: str) -> None:
        """List and read, through both clients. Raises ConfigError for what only a person can repair."""
        try:
            self._control.list_objects_v2(Bucket=self._location.bucket, Prefix=self._key_prefix, MaxKeys=1)
            obstore.get(self._data, missing_key)
        except Exception as error:  # stop for a setting, miss for all else: `refusal` tells which
            fault = fault_of(error)
            refusal = fault.refusal(self._location.bucket, self._location.host)
            if refusal is not None:
                raise ConfigError(refusal) from None
            if fault.status != 404:
                raise

    def _allowed(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except Exception as error:  # neither: a refused right is an answer, all else goes on
            if fault_of(error).denied:
                return False
            raise
        return True

    def _remove(self, key: str) -> None:
        self._control.delete_object(Bucket=self._location.bucket, Key=key)

    def _within(self, action: str, call: Callable[[], T], timeout_s: float) -> T:
        """Run a call that may send several requests, and leave it behind when its time is up."""
        future: Future[T] = Future()

        def run() -> None:
            run_on(self._cpus)
            try:
                with seam(action):
                    future.set_result(call())
            except BaseException as error:  # neither: it is raised on the caller's thread
                future.set_exception(error)

        # A daemon: a server that answers byte by byte must not hold up the end of the process.
        threading.Thread(target=run, name="hicache-s3-call", daemon=True).start()
        try:
            return future.result(timeout_s)
        except TimeoutError:
            raise StoreTimeout(f"{action} took more than {timeout_s:.3g} s") from None


def _scatter(pieces: Iterable[bytes], parts: Sequence[memoryview]) -> int:
    """Copy `pieces` into `parts` until these are full; return how many bytes came, the first too many included."""
    targets, told = iter(parts), teller(parts)
    target = memoryview(b"")
    num_bytes = 0
    for piece in pieces:
        rest = memoryview(piece)
        num_bytes += rest.nbytes
        while rest.nbytes:
            while not target.nbytes:
                following = next(targets, None)
                if following is None:
                    return num_bytes
                target = following
            count = min(rest.nbytes, target.nbytes)
            target[:count] = rest[:count]
            target, rest = target[count:], rest[count:]
        if told is not None:
            told(num_bytes)
    return num_bytes


def open_url(url: StoreUrl, options: StoreOptions) -> Store:
    """Open `s3://bucket/prefix?endpoint=…&region=…&addressing=…&ca=…&profile=…`. Raises ConfigError."""
    return S3Store(parse_location(url), options)
