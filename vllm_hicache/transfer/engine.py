"""The transfer engine: runs operations on lanes for loads, saves, fetches and flushes.

Owned by the worker half. `load`, `save`, `flush`, `cancel` and `collect` are called on the engine's own thread and
never wait for bytes. Each direction has threads of its own, so that neither a long queue of flushes nor one that
hangs is in a load's way. Saves have one thread, because a page is of use only after the pages before it. Each page
of a load is fetched, checked and copied on its own, so that reading and copying overlap.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from vllm_hicache.errors import StoreError
from vllm_hicache.geometry import Part, RankGeometry
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import MissReason, OpId, Phase
from vllm_hicache.plan import FlushOp, LoadOp, OpReport, PageMove, SaveOp
from vllm_hicache.storage.chunks import ChunkStore
from vllm_hicache.storage.envelope import ChunkId
from vllm_hicache.transfer.copier import Copier, Fence
from vllm_hicache.transfer.host import HostPool
from vllm_hicache.transfer.lane import Lane
from vllm_hicache.transfer.tasks import LoadTask, WriteTask

logger = logging.getLogger(__name__)

_PROGRESS_S = 0.02
_FLUSH_NICE = 19
"""Flushes take what computing leaves: nobody waits for them, and what is declined is offered again."""


class TransferEngine:
    """Moves what plans ask for and tells what has come of it.

    Args:
        rank: stands in every report.
        io_threads: threads that read from the store.
        flush_threads: threads that write to it.
        flush_queue_pages: pages that may wait to be flushed; beyond it a flush is declined.
    """

    def __init__(
        self,
        rank: int,
        pool: HostPool,
        geometry: RankGeometry,
        copier: Copier,
        metrics: Metrics,
        io_threads: int,
        flush_threads: int,
        flush_queue_pages: int,
    ) -> None:
        self._rank = rank
        self._pool = pool
        self._geometry = geometry
        self._whole_parts = [part for part in geometry.parts if part.is_whole]
        self._slot_bytes = geometry.slot_bytes
        self._copier = copier
        self._metrics = metrics
        # A queued flush holds its host pages: a store that is slow without failing must not take half of the pool.
        self._flush_queue_pages = min(flush_queue_pages, max(1, pool.num_slots // 2))
        self._loading = Lane("load", copier.num_load_threads, partial(self._count_error, "load"))
        self._saving = Lane("save", 1, partial(self._count_error, "save"))
        self._fetching = Lane("fetch", io_threads, partial(self._count_error, "fetch"))
        self._flushing = Lane("flush", flush_threads, partial(self._count_error, "flush"), _FLUSH_NICE)
        self._lanes = (self._fetching, self._flushing, self._saving, self._loading)
        self._loads: dict[OpId, LoadTask] = {}
        self._changed = threading.Condition()
        self._num_open = 0
        self._num_ended = 0
        self._told: dict[OpId, OpReport] = {}
        self._progress_from_s = 0.0
        self._written: list[OpReport] = []

    def fence(self) -> Fence:
        """Mark the present for copies that are submitted with it."""
        return self._copier.fence()

    def load(self, op: LoadOp, store: ChunkStore | None, fence: Fence, vouched: int | None = None) -> None:
        """Start a load; `collect` tells of its end, whatever happens.

        Args:
            vouched: leading pages whose slots are what the plan says; the others are not touched. `None`: all.
        """
        self._num_open += 1
        task = LoadTask(op, self._on_received, self._on_settled)
        self._loads[op.op] = task
        task.start()
        if vouched is not None and vouched < len(op.pages):
            task.fail(vouched, MissReason.DISAGREED)
        # One queue entry a page: a page is copied while the next one is still being read and checked.
        for index, page in enumerate(op.pages[:vouched]):
            if not page.from_store:
                if page.blocks:
                    self._loading.submit(partial(self._copy, task, index, fence))
            elif store is None:
                self._metrics.count("misses", MissReason.ABSENT.value)
                task.fail(index, MissReason.ABSENT)
            else:
                self._fetching.submit(partial(self._fetch, task, index, store, fence))

    def save(self, op: SaveOp, fence: Fence, vouched: int | None = None) -> None:
        """Start a save; the blocks must stay untouched until its report. `vouched` as for a load."""
        self._num_open += 1
        task = WriteTask(op.op, op.pages)
        self._refuse(task, vouched)
        for index in range(len(op.pages[:vouched])):
            self._saving.submit(partial(self._save, task, index, fence))

    def flush(self, op: FlushOp, store: ChunkStore | None, vouched: int | None = None) -> None:
        """Start a flush; declined as a whole when too much waits already. `vouched` as for a load."""
        self._num_open += 1
        task = WriteTask(op.op, op.pages)
        self._refuse(task, vouched)
        waiting = self._flushing.depth
        # One that finds the queue empty is taken whatever its length, or it would be declined for ever.
        declined = store is None or (waiting > 0 and waiting + len(op.pages) > self._flush_queue_pages)
        if declined:
            self._metrics.count("declined_pages", "flush", len(op.pages))
        for index in range(len(op.pages[:vouched])):
            if declined or store is None:
                self._end_write(task, index, MissReason.NO_SLOT)
            else:
                self._flushing.submit(partial(self._flush, task, index, store))

    def cancel(self, op: OpId) -> None:
        """Give up what is left of a load; it still reports."""
        task = self._loads.get(op)
        if task is not None:
            task.cut(MissReason.CANCELLED)

    def collect(self, wait_s: float = 0.0) -> list[OpReport]:
        """Operations that have come further since the last call. Also applies time limits and sets the gauges.

        Args:
            wait_s: longest wait, seconds, for something to end where operations are open and nothing has.
        """
        if wait_s and self._num_open:
            with self._changed:
                self._changed.wait_for(lambda: self._num_ended, timeout=wait_s)
        now = time.monotonic()
        for task in list(self._loads.values()):
            task.cut_if_late(now)
        self._set_gauges()
        with self._changed:
            ended, self._num_ended = self._num_ended, 0
            written, self._written = self._written, []
        # What is still under way is told of now and then: it lets others use the pages that have come.
        tells = ended or now >= self._progress_from_s
        reports = written + (self._loads_further() if tells else [])
        if tells:
            self._progress_from_s = now + _PROGRESS_S
        self._num_open -= sum(report.phase == Phase.SETTLED for report in reports)
        return reports

    def _loads_further(self) -> list[OpReport]:
        further = []
        for op, task in list(self._loads.items()):
            report = task.report(self._rank)
            if report == self._told.get(op) or (report.phase == Phase.RUNNING and not report.pages_done):
                continue
            further.append(report)
            self._told[op] = report
            if report.phase == Phase.SETTLED:
                del self._loads[op], self._told[op]
        return further

    def close(self, timeout_s: float) -> None:
        """Finish saves and flushes for at most `timeout_s` seconds, then drop what is left, and say so."""
        deadline = time.monotonic() + timeout_s
        dropped = 0
        for lane in self._lanes:
            dropped += lane.close(max(0.0, deadline - time.monotonic()))
        if dropped:
            logger.warning(
                "Stopped with %d pages not yet saved or flushed after %.1f s; they will be computed again. "
                "Raise shutdown_timeout_s to keep them",
                dropped,
                timeout_s,
            )

    def _fetch(self, task: LoadTask, index: int, store: ChunkStore, fence: Fence) -> None:
        if not task.begin_fetch(index):
            return
        reason: MissReason | None = MissReason.ERROR
        try:
            reason = self._timed("fetch", partial(self._fetch_page, task.op.pages[index], store))
        finally:
            if reason is not None:
                self._metrics.count("misses", reason.value)
            if task.end_fetch(index, reason):
                self._loading.submit(partial(self._copy, task, index, fence))

    def _fetch_page(self, page: PageMove, store: ChunkStore) -> MissReason | None:
        for part in self._geometry.parts:
            cell, payload = part.cell, self._pool.part(page.slot, part)
            chunk = ChunkId.of(page.key, cell)
            if part.is_whole:
                reason = store.load(chunk, payload, cell.unit_bytes)
            else:
                reason = store.load_part(chunk, part.runs, payload, cell.unit_bytes, cell.num_units)
            if reason is not None:
                return reason
        return None

    def _copy(self, task: LoadTask, index: int, fence: Fence) -> None:
        if not task.begin_copy(index):
            return
        page = task.op.pages[index]
        num_bytes = self._slot_bytes * len(page.blocks) // self._geometry.blocks_per_page
        reason: MissReason | None = MissReason.ERROR
        try:
            reason = self._timed("load", partial(self._copier.load, (page,), fence), num_bytes)
        finally:
            task.end_copy(index, reason)

    def _save(self, task: WriteTask, index: int, fence: Fence) -> None:
        reason: MissReason | None = MissReason.ERROR
        try:
            if task.is_wanted(index):
                reason = self._timed("save", partial(self._copier.save, (task.pages[index],), fence))
        finally:
            self._end_write(task, index, reason)

    def _flush(self, task: WriteTask, index: int, store: ChunkStore) -> None:
        reason: MissReason | None = MissReason.ERROR
        try:
            if task.is_wanted(index):
                page = task.pages[index]
                parts = [part for part in self._whole_parts if self._geometry.writes(page.key, part)]
                num_bytes = sum(part.num_bytes for part in parts)
                reason = self._timed("flush", partial(self._flush_page, page, parts, store), num_bytes)
        except StoreError as error:
            self._count_error("flush", error)
            reason = MissReason.UNAVAILABLE
        finally:
            self._end_write(task, index, reason)

    def _flush_page(self, page: PageMove, parts: Sequence[Part], store: ChunkStore) -> MissReason | None:
        for part in parts:
            store.save(ChunkId.of(page.key, part.cell), self._pool.part(page.slot, part), part.cell.unit_bytes)
        return None

    def _refuse(self, task: WriteTask, vouched: int | None) -> None:
        """End pages whose slots are not what the plan says, without touching them."""
        for index in range(len(task.pages) if vouched is None else vouched, len(task.pages)):
            self._end_write(task, index, MissReason.DISAGREED)

    def _end_write(self, task: WriteTask, index: int, reason: MissReason | None) -> None:
        if task.end(index, reason):
            with self._changed:
                self._written.append(task.report(self._rank))
                self._num_ended += 1
                self._changed.notify()

    def _on_received(self, task: LoadTask) -> None:
        if task.was_cut and task.reason is not None:
            self._metrics.count("misses", task.reason.value, len(task.op.pages) - task.pages_done)
        self._note_end()

    def _on_settled(self, task: LoadTask) -> None:
        self._note_end()

    def _note_end(self) -> None:
        with self._changed:
            self._num_ended += 1
            self._changed.notify()

    def _timed(
        self, direction: str, move: Callable[[], MissReason | None], num_bytes: int | None = None
    ) -> MissReason | None:
        start = time.perf_counter()
        reason = move()
        self._metrics.count("seconds", direction, time.perf_counter() - start)
        if reason is None:
            self._metrics.count("bytes", direction, self._slot_bytes if num_bytes is None else num_bytes)
        return reason

    def _count_error(self, place: str, error: Exception) -> None:
        self._metrics.count("errors", place)
        logger.debug("%s failed: %s", place, error)

    def _set_gauges(self) -> None:
        dead = sum(lane.revive() for lane in self._lanes)
        self._metrics.gauge("healthy", 0 if dead else 1)
        for lane in self._lanes:
            self._metrics.gauge("queue_depth", lane.depth, lane.name)
