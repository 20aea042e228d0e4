"""The transfer engine: runs operations on lanes for loads, saves, fetches and flushes.

Owned by the worker half. `load`, `save`, `flush`, `cancel` and `collect` are called on the engine's own thread and
never wait for bytes. Each direction has threads of its own, so that neither a long queue of flushes nor one that
hangs is in a load's way. Saves have one thread, because a page is of use only after the pages before it. Each page
of a load is fetched, checked and copied on its own, so that reading and copying overlap.

Bytes of a page are its owner's affair. Where owners give each other their pages, those of a load are exchanged once
every owner holds them: what was in host memory at once, what came from the store when that is acknowledged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from vllm_hicache.errors import CollectiveError, StoreError
from vllm_hicache.geometry import Part, RankGeometry
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import MissReason, OpId, Phase, Role
from vllm_hicache.plan import Ack, FlushOp, LoadOp, OpReport, PageMove, SaveOp
from vllm_hicache.storage.chunks import ChunkSource, RoleChunks
from vllm_hicache.storage.envelope import ChunkId
from vllm_hicache.transfer.copier import Copier, Fence
from vllm_hicache.transfer.exchange import Batch, PageExchange
from vllm_hicache.transfer.host import HostPool
from vllm_hicache.transfer.lane import Lane
from vllm_hicache.transfer.tasks import LoadTask, WriteTask

logger = logging.getLogger(__name__)

_PROGRESS_S = 0.02
_FLUSH_NICE = 19
"""Flushes take what computing leaves: nobody waits for them, and what is declined is offered again."""


@dataclass(slots=True)
class _Exchanged:
    """A load whose pages owners give each other: the first `num_pages` of them, so far. The same on every rank."""

    task: LoadTask
    fence: Fence
    num_pages: int = 0


class TransferEngine:
    """Moves what plans ask for and tells what has come of it.

    Args:
        rank: stands in every report.
        io_threads: threads that read from the store.
        flush_threads: threads that write to it.
        flush_queue_pages: pages that may wait to be flushed; beyond it a flush is declined.
        exchange: gives this rank the pages of other owners; `None` where it has no use for them.
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
        exchange: PageExchange | None = None,
    ) -> None:
        self._rank = rank
        self._exchange = exchange
        self._pool = pool
        self._geometry = geometry
        self._whole_parts = [part for part in geometry.parts if part.is_whole]
        self._slot_bytes = geometry.slot_bytes
        self._copier = copier
        self._metrics = metrics
        # A queued flush holds its host pages: a store that is slow without failing must not take half of the pool.
        self._flush_queue_pages = min(flush_queue_pages, max(1, pool.num_rows // 2))
        self._loading = Lane("load", copier.num_load_threads, partial(self._count_error, "load"))
        self._saving = Lane("save", 1, partial(self._count_error, "save"))
        self._fetching = Lane("fetch", io_threads, partial(self._count_error, "fetch"))
        self._flushing = Lane("flush", flush_threads, partial(self._count_error, "flush"), _FLUSH_NICE)
        self._lanes = [self._fetching, self._flushing, self._saving, self._loading]
        if exchange is not None:
            # One thread, for every rank takes part in the same exchanges in the same order.
            self._exchanging = Lane("exchange", 1, partial(self._count_error, "exchange"))
            self._lanes.append(self._exchanging)
        self._exchanged: dict[OpId, _Exchanged] = {}
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

    def load(
        self,
        op: LoadOp,
        store: RoleChunks | None,
        fence: Fence,
        vouched: int | None = None,
        peer: ChunkSource | None = None,
    ) -> None:
        """Start a load; `collect` tells of its end, whatever happens.

        Args:
            vouched: leading pages whose slots are what the plan says; the others are not touched. `None`: all.
            peer: the other engine, where the operation names one.
        """
        self._num_open += 1
        is_exchanged = self._exchange is not None and op.request_id is not None
        task = LoadTask(op, self._on_received, self._on_settled, self._pool.shard, is_exchanged)
        self._loads[op.op] = task
        task.start()
        if vouched is not None and vouched < len(op.pages):
            task.fail(vouched, MissReason.DISAGREED)
        if is_exchanged:
            self._exchanged[op.op] = _Exchanged(task, fence)
            self._exchange_up_to(op.op, sum(not page.from_store for page in op.pages))
        # One queue entry a page: a page is copied while the next one is still being read and checked.
        for index, page in enumerate(op.pages[:vouched]):
            if not task.owns(index):
                continue
            if not page.from_store:
                if page.blocks and not is_exchanged:
                    self._loading.submit(partial(self._copy, task, index, fence))
                continue
            sources = self._sources(page, store, peer)
            if sources:
                self._fetching.submit(partial(self._fetch, task, index, sources, fence))
            else:
                self._metrics.count("misses", MissReason.ABSENT.value)
                task.fail(index, MissReason.ABSENT)
        if is_exchanged and task.is_held and any(page.from_store for page in op.pages):
            # It has nothing to fetch: the owners that have wait to hear so.
            self._note_end()

    def save(self, op: SaveOp, fence: Fence, vouched: int | None = None) -> None:
        """Start a save; the blocks must stay untouched until its report. `vouched` as for a load."""
        self._num_open += 1
        task = WriteTask(op.op, op.pages)
        self._refuse(task, vouched)
        for index, page in enumerate(op.pages[:vouched]):
            if self._pool.shard.owns(page.slot):
                self._saving.submit(partial(self._save, task, index, fence))
            else:
                # In its turn: pages of a save that ends before an earlier one of its chain could not enter the tree.
                self._saving.submit(partial(self._end_write, task, index, None))

    def flush(self, op: FlushOp, store: RoleChunks | None, vouched: int | None = None) -> None:
        """Start a flush; declined as a whole when too much waits already. `vouched` as for a load."""
        self._num_open += 1
        task = WriteTask(op.op, op.pages)
        self._refuse(task, vouched)
        own = self._split(task, vouched)
        waiting = self._flushing.depth
        # One that finds the queue empty is taken whatever its length, or it would be declined for ever.
        declined = store is None or (waiting > 0 and waiting + len(own) > self._flush_queue_pages)
        if declined:
            self._metrics.count("declined_pages", "flush", len(own))
        for index in own:
            if declined or store is None:
                self._end_write(task, index, MissReason.NO_SLOT)
            else:
                self._flushing.submit(partial(self._flush, task, index, store))

    def acknowledged(self, ack: Ack) -> None:
        """All ranks have come so far. Called for every acknowledgement, in the plan's order, before its operations."""
        if ack.op in self._exchanged:
            if ack.phase == Phase.RUNNING:
                self._exchange_up_to(ack.op, ack.pages_held)
                if ack.reason is not None:
                    # A rank has ended there: what it does not hold cannot be exchanged, and is not waited for.
                    self._exchanged[ack.op].task.fail(ack.pages_held, ack.reason)
            else:
                del self._exchanged[ack.op]

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
            # Pages that are only held are of interest where others wait for them.
            progress = report.pages_held if task.is_exchanged else report.pages_done
            if report == self._told.get(op) or (report.phase == Phase.RUNNING and not progress):
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
        if self._exchange is not None:
            self._exchange.close()
        if dropped:
            logger.warning(
                "Stopped with %d pages not yet saved or flushed after %.1f s; they will be computed again. "
                "Raise shutdown_timeout_s to keep them",
                dropped,
                timeout_s,
            )

    def submit(self, task: Callable[[], None]) -> None:
        """Run something that waits for others on a thread that reads."""
        self._fetching.submit(task)

    @staticmethod
    def _sources(page: PageMove, store: ChunkSource | None, peer: ChunkSource | None) -> dict[str, ChunkSource]:
        """Where a page may come from, by the metrics' names of the way, in the order in which they are asked."""
        found = {"fetch": None if page.from_peer else store, "handoff": peer}
        return {name: source for name, source in found.items() if source is not None}

    def _fetch(self, task: LoadTask, index: int, sources: Mapping[str, ChunkSource], fence: Fence) -> None:
        if not task.begin_fetch(index):
            return
        reason: MissReason | None = MissReason.ERROR
        try:
            for name, source in sources.items():
                reason = self._timed(name, partial(self._fetch_page, task.op.pages[index], source))
                if reason is None:
                    break
        finally:
            if reason is not None:
                self._metrics.count("misses", reason.value)
            is_wanted = task.end_fetch(index, reason)
            if task.is_exchanged:
                if task.is_held:
                    self._note_end()
            elif is_wanted:
                self._loading.submit(partial(self._copy, task, index, fence))

    def _fetch_page(self, page: PageMove, source: ChunkSource) -> MissReason | None:
        for part in self._geometry.parts:
            cell, payload = part.cell, self._pool.part(page.slot, part)
            chunk = ChunkId.of(page.name(cell.role), cell)
            reason: MissReason | None = None
            if cell.role is Role.DRAFT and not page.has_draft:
                # What a slot held before must not pass for state.
                payload[:] = bytes(len(payload))
            elif part.is_whole:
                reason = source.load(chunk, payload, cell.unit_bytes)
            else:
                reason = source.load_part(chunk, part.runs, payload, cell.unit_bytes, cell.num_units)
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

    def _exchange_up_to(self, op: OpId, num_pages: int) -> None:
        """Have a load's pages before `num_pages` exchanged that have not been yet."""
        state = self._exchanged[op]
        while self._exchange is not None and state.num_pages < num_pages:
            first = state.num_pages
            state.num_pages = min(num_pages, first + self._exchange.batch_pages)
            self._exchanging.submit(partial(self._swap, self._exchange, state, first, state.num_pages))

    def _swap(self, exchange: PageExchange, state: _Exchanged, first: int, stop: int) -> None:
        task = state.task
        wanted = tuple(task.begin_copy(index) for index in range(first, stop))
        batch = Batch(task.op.op, first, task.op.pages[first:stop], wanted, state.fence)
        reasons: list[MissReason | None] = [MissReason.ERROR] * len(wanted)
        start, was_broken = time.perf_counter(), exchange.is_broken
        try:
            reasons = exchange.run(batch)
        except CollectiveError as error:
            self._count_error("exchange", error)
            if not was_broken:
                logger.error("Pages of host memory cannot be given to other ranks, they are computed again: %s", error)
        finally:
            self._metrics.count("seconds", "exchange", time.perf_counter() - start)
            for offset, reason in enumerate(reasons):
                if reason is MissReason.CORRUPT:  # what its owner lacks the owner has counted
                    self._metrics.count("misses", reason.value)
                if reason is None:
                    direction = "load" if task.owns(first + offset) else "exchange"
                    self._metrics.count("bytes", direction, self._slot_bytes)
                if wanted[offset]:
                    task.end_copy(first + offset, reason)

    def _save(self, task: WriteTask, index: int, fence: Fence) -> None:
        reason: MissReason | None = MissReason.ERROR
        try:
            if task.is_wanted(index):
                reason = self._timed("save", partial(self._copier.save, (task.pages[index],), fence))
        finally:
            self._end_write(task, index, reason)

    def _flush(self, task: WriteTask, index: int, store: RoleChunks) -> None:
        reason: MissReason | None = MissReason.ERROR
        try:
            if task.is_wanted(index):
                page = task.pages[index]
                parts = [part for part in self._whole_parts if self._is_written(page, part)]
                num_bytes = sum(part.num_bytes for part in parts)
                reason = self._timed("flush", partial(self._flush_page, page, parts, store), num_bytes)
        except StoreError as error:
            self._count_error("flush", error)
            reason = MissReason.UNAVAILABLE
        finally:
            self._end_write(task, index, reason)

    def _is_written(self, page: PageMove, part: Part) -> bool:
        return (page.has_draft or part.cell.role is Role.TARGET) and self._geometry.writes(page.key, part)

    def _flush_page(self, page: PageMove, parts: Sequence[Part], store: RoleChunks) -> MissReason | None:
        for part in parts:
            store.save(
                ChunkId.of(page.name(part.cell.role), part.cell), self._pool.part(page.slot, part), part.cell.unit_bytes
            )
        return None

    def _split(self, task: WriteTask, vouched: int | None) -> list[int]:
        """This rank's pages among the first `vouched`; the others are written by their owners, and end here at once."""
        own = []
        for index, page in enumerate(task.pages[:vouched]):
            if self._pool.shard.owns(page.slot):
                own.append(index)
            else:
                self._end_write(task, index, None)
        return own

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
        broken = self._exchange is not None and self._exchange.is_broken
        self._metrics.gauge("healthy", 0 if dead or broken else 1)
        for lane in self._lanes:
            self._metrics.gauge("queue_depth", lane.depth, lane.name)
