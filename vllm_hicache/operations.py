"""Operations on their way: what each one holds, and what its acknowledgement changes.

Owned by the scheduler half; scheduler thread only. Every operation is begun with all it needs (a lease on its
prefix in the tree, reserved slots, held device blocks) and gives all of it back exactly once, when it has settled on
every rank. The tree changes on acknowledgements only: pages of a long load enter it as they are acknowledged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from vllm_hicache.config import Config, WritePolicy
from vllm_hicache.consensus import Ledger, Silence
from vllm_hicache.drafts import BarePages, StorablePages
from vllm_hicache.events import PageEvents
from vllm_hicache.index.host import HostTier, runs_of
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import BlockId, MissReason, OpId, PageKey, Phase, Slot, Tier
from vllm_hicache.namespace import Spaces
from vllm_hicache.ownership import PageBlocks
from vllm_hicache.plan import Ack, ExportOp, FlushOp, LoadOp, NextPlan, OpReport, PageMove, Plan, SaveOp
from vllm_hicache.tracking import Answer, BlockHolds, OpenExport, OpenFlush, OpenLoad, OpenOp, OpenSave, Tracked
from vllm_hicache.tree_pages import TreePages

_WRITE_BACK_PAGES = 64
_SELECTIVE_HITS = 2
_FLUSH_REST_STEPS = 16


class Operations:
    """Begins, sends and commits operations.

    Args:
        page_tokens: tokens of a page.
        block_tokens: tokens of a device block.
        ranks: every rank that reports.
        has_store: whether pages can be flushed.
        bare: pages without draft state.
    """

    def __init__(
        self,
        config: Config,
        tier: HostTier,
        page_tokens: int,
        block_tokens: int,
        ranks: Iterable[int],
        holds: BlockHolds,
        metrics: Metrics,
        events: PageEvents,
        has_store: bool,
        bare: BarePages,
    ) -> None:
        self._config = config
        self._tier = tier
        self._page = page_tokens
        self._page_blocks = PageBlocks(tier.ownership, page_tokens, block_tokens)
        self._holds = holds
        self._metrics = metrics
        self._events = events
        self._has_store = has_store
        self._ledger = Ledger(ranks, config.rank_timeout_s)
        self._open: dict[OpId, OpenOp] = {}
        self._moving: set[PageKey] = set()
        self._flushing: set[PageKey] = set()
        self._bare = bare
        self._storable = StorablePages(bare)
        self.pages = TreePages(tier, page_tokens, self._storable, metrics, events)
        self._epoch = 0
        self._spaces = Spaces(b"")
        self._step = 0
        self._flush_from_step = 0
        self._next = NextPlan()
        # Exports that wait for their readers: they end when those have come, or their time is over.
        self._resting: set[OpId] = set()
        self.num_commits = 0

    @property
    def num_open(self) -> int:
        """Operations that have not settled on every rank, without exports that wait for their readers."""
        return self._ledger.num_open - len(self._resting)

    @property
    def num_exports(self) -> int:
        """Exports that wait for their readers."""
        return len(self._resting)

    @property
    def has_pending(self) -> bool:
        """Whether anything waits for ranks, or to be sent to them."""
        waits = self._next.acks or self._next.exports or self._next.releases
        return self.num_open > 0 or bool(waits)

    def is_moving(self, key: PageKey) -> bool:
        """Whether an operation is bringing this page into host memory."""
        return key in self._moving

    def enter(self, epoch: int, spaces: Spaces) -> None:
        """Operations begin in this epoch from now on; results of earlier ones no longer enter the tree."""
        self._epoch = epoch
        self._spaces = spaces
        self._moving.clear()

    def load(self, tracked: Tracked, answer: Answer, blocks: Sequence[BlockId], tokens: int) -> None:
        """Load `tokens` tokens into `blocks` (all of the request's), as far as slots for store pages can be had."""
        keys, plain = tracked.chain(answer.end)
        found = self._tier.match(keys[: answer.host_end], touch=False)
        # The lease comes before the slots: what is reserved must not evict the very pages to be loaded.
        lease = self._tier.lease(keys, found.num_pages)
        slots = self.pages.reserve(keys, answer.host_end, answer.end)
        served = answer.host_end + len(slots)
        by_page = [*found.slots[answer.first :], *slots]
        moves: list[PageMove] = []
        unserved: list[BlockId] = []
        for index in range(answer.first, answer.end):
            page_blocks, first_block = self._page_blocks.of(index, blocks, answer.local)
            if index < served:
                slot = by_page[index - answer.first]
                is_filled, from_peer = index >= answer.host_end, index >= answer.store_end
                has_draft = from_peer or index < answer.bare_start
                moves.append(
                    PageMove(keys[index], slot, page_blocks, first_block, is_filled, plain[index], has_draft, from_peer)
                )
            else:
                unserved += page_blocks
        limit = self._config.time_limit_s if answer.end == answer.store_end else self._config.peer_timeout_s
        if unserved:
            self._metrics.count("misses", MissReason.NO_SLOT.value, answer.end - served)
        op = self._ledger.open(time.monotonic())
        tracked.load = op
        load = LoadOp(op, self._spaces, tracked.request_id, tuple(moves), limit, tuple(unserved), tracked.peer)
        self._next.loads.append(load)
        event_tokens = self._tokens_of(tracked, answer.host_end, answer.end)
        num_full = len(tracked.keys.keys)
        self._open[op] = OpenLoad(
            tracked, keys, plain, answer, tokens, slots, lease, self._epoch, event_tokens, num_full
        )
        self._moving.update(keys[answer.host_end : served])
        self._bare.note(keys[answer.bare_start : min(served, answer.store_end)], is_bare=True)
        if self._config.write != WritePolicy.BACK:
            self._flush_on_hit(keys[: found.num_pages])

    def prefetch(self, tracked: Tracked, start: int, stop: int, whole_end: int) -> None:
        """Bring pages [start, stop) of a request's chain from the store to host memory, for whoever comes next.

        Those from `whole_end` on have no draft state.
        """
        keys, plain = tracked.keys.named(0, stop)
        if self._tier.match(keys[:start], touch=False).num_pages < start or keys[start] in self._moving:
            return
        lease = self._tier.lease(keys, start)
        slots = self.pages.reserve(keys, start, stop)
        if not slots:
            lease.release()
            return
        moves = tuple(
            PageMove(keys[page], slot, (), 0, True, plain[page], page < whole_end)
            for page, slot in enumerate(slots, start)
        )
        op = self._ledger.open(time.monotonic())
        self._next.loads.append(LoadOp(op, self._spaces, None, moves))
        end = start + len(slots)
        answer = Answer(start * self._page, start, start, end, whole_end, end)
        event_tokens = self._tokens_of(tracked, start, stop)
        self._open[op] = OpenLoad(None, keys, plain, answer, 0, slots, lease, self._epoch, event_tokens, end)
        self._moving.update(keys[start : start + len(slots)])
        self._bare.note(keys[max(start, whole_end) : start + len(slots)], is_bare=True)

    def save(self, tracked: Tracked, keys: Sequence[PageKey], blocks: Callable[[], Sequence[BlockId]]) -> bool:
        """Save those of a request's computed pages `keys` that are neither in host memory nor on their way.

        Returns:
            Whether nothing was declined for want of slots.
        """
        present = self._tier.match(keys, touch=False).num_pages
        start = present
        # Pages that another operation brings are left to it; if it fails they are looked at again next step.
        while start < len(keys) and keys[start] in self._moving:
            start += 1
        tracked.saved = present
        if start == len(keys):
            return True
        lease = self._tier.lease(keys, present)
        slots = self.pages.reserve(keys, start, len(keys))
        stop = start + len(slots)
        if stop < len(keys):
            self._metrics.count("declined_pages", "save", len(keys) - stop)
        if not slots:
            lease.release()
            return False
        of_request = blocks()
        pages = [self._page_blocks.of(start + index, of_request)[0] for index in range(len(slots))]
        moves = tuple(PageMove(key, slot, page) for key, slot, page in zip(keys[start:], slots, pages, strict=False))
        # From here on the blocks are ours too, whatever becomes of the request (decisions/0002).
        held = list(dict.fromkeys(block for page in pages for block in page))
        self._holds.hold(held)
        op = self._ledger.open(time.monotonic())
        self._next.saves.append(SaveOp(op, moves))
        tokens = self._tokens_of(tracked, start, stop)
        of_chain, plain = tracked.chain(stop)
        # vLLM's own prefix cache takes blocks for each other that differ in nothing but the token that follows.
        doubtful_end = tracked.local // self._page if tracked.keys.has_next else 0
        num_full = len(tracked.keys.keys)
        self._open[op] = OpenSave(
            of_chain, plain, start, slots, held, lease, self._epoch, tokens, num_full, doubtful_end
        )
        self._moving.update(keys[start:stop])
        self._bare.note(keys[start:stop], tracked.is_bare)
        return stop == len(keys)

    def export(
        self, keys: Sequence[PageKey], plain: Sequence[PageKey], start: int, is_last: bool
    ) -> tuple[OpId | None, int]:
        """Let other engines read those pages of a chain, from `start` on, that are in host memory.

        Args:
            is_last: the others will not come.

        Returns:
            The operation, `None` where there is nothing to say, and where the pages in host memory end.
        """
        found = self._tier.match(keys, touch=False)
        stop = max(start, found.num_pages)
        if stop == start and not (is_last and stop < len(keys)):
            return None, stop
        lease = self._tier.lease(keys, found.num_pages)
        op = self._ledger.open(time.monotonic())
        named = [self._storable.given(keys[page], found.slots[page]) for page in range(start, stop)]
        num_named = len(keys) if is_last else stop
        absent = [PageMove(keys[page], Slot(-1), (), plain=plain[page]) for page in range(stop, num_named)]
        self._next.exports.append(ExportOp(op, self._spaces, tuple(named), tuple(absent)))
        self._open[op] = OpenExport(lease)
        self._resting.add(op)
        return op, stop

    def release(self, tracked: Tracked) -> None:
        """Tell a request's peer that nothing more is read of it."""
        if tracked.peer is not None:
            self._next.releases.append(tracked.peer)
            tracked.handoff = None

    def flush(self, keys: Sequence[PageKey], positions: Sequence[int]) -> None:
        """Flush pages of a chain that are in host memory and not in the store yet."""
        if not self._has_store or self._config.write == WritePolicy.NEVER:
            return
        found = self._tier.match(keys, touch=False)
        wanted = [
            index
            for index in positions
            if index < found.num_pages and not found.stored[index] and keys[index] not in self._flushing
        ]
        if not wanted:
            return
        lease = self._tier.lease(keys, wanted[-1] + 1)
        op = self._ledger.open(time.monotonic())
        moves = tuple(self._storable.given(keys[index], found.slots[index]) for index in wanted)
        self._next.flushes.append(FlushOp(op, self._spaces, moves))
        self._open[op] = OpenFlush(keys, wanted, lease, self._epoch)
        self._flushing.update(keys[index] for index in wanted)

    def write_back(self) -> None:
        """Under write policy `back`: flush what is next in line for eviction, when free slots get few."""
        low = min(max(_WRITE_BACK_PAGES, self._tier.num_slots // 16), self._tier.num_slots // 2 + 1)
        rested = self._step >= self._flush_from_step
        if self._tier.num_free < low and not self._flushing and rested:
            for victims in self._tier.unstored_victims(_WRITE_BACK_PAGES):
                self.flush(victims.keys, victims.positions)

    def cancel(self, op: OpId) -> None:
        """Tell workers that nobody waits for this load any more, or that nobody reads what this export offers."""
        if op in self._open:
            self._resting.discard(op)
            self._next.cancels.append(op)
            self._received(op)

    def take_plan(self, idle: bool) -> Plan:
        """All that was decided since the last call, for the step that now begins."""
        self._step += 1
        gathered, self._next = self._next, NextPlan()
        return gathered.finished(self._tier.num_slots, idle)

    def report(self, reports: Iterable[OpReport], now_s: float) -> list[Silence]:
        """Take reports of ranks, and act on what all of them have reached.

        Returns:
            Operations of which ranks have been silent for too long. They are asked again, and nobody waits for those
            that are late.
        """
        for each in reports:
            self._acknowledge(self._ledger.record(each, now_s))
        silences = self._ledger.silences(now_s)
        for silence in silences:
            self._next.asks.append(silence.op)
            if silence.is_late:
                self._acknowledge(self._ledger.give_up(silence.op))
        return silences

    def _acknowledge(self, ack: Ack | None) -> None:
        if ack is None:
            return
        # A rank that is alone needs nobody's word to know what all ranks have reached.
        if self._ledger.num_ranks > 1:
            self._next.acks.append(ack)
        record = self._open[ack.op]
        if ack.phase < Phase.SETTLED:
            if isinstance(record, OpenLoad):
                self._progress(record, ack)
            return
        del self._open[ack.op]
        self._resting.discard(ack.op)
        self.num_commits += 1
        match record:
            case OpenLoad():
                self._commit_load(record, ack)
            case OpenSave():
                self._commit_save(record, ack)
            case OpenFlush():
                self._commit_flush(record, ack)
            case OpenExport():
                pass
        record.lease.release()
        self.pages.leave(self._tier.drain_retired())

    def _received(self, op: OpId) -> None:
        """A load has ended for its request, though a store call may still be open: nobody else waits for its pages."""
        record = self._open.get(op)
        if isinstance(record, OpenLoad) and record.epoch == self._epoch:
            self._moving.difference_update(record.keys[record.answer.host_end :])

    def _progress(self, record: OpenLoad, ack: Ack) -> None:
        """Pages that no rank copies any more enter the tree while the rest is still on its way.

        Not where another operation has brought them meanwhile, or pages before them are not there: their slots would
        be given back, and change hands while this operation is open.
        """
        if self._tier.match(record.keys, touch=False).num_pages == record.answer.host_end + record.attached:
            self._attach_loaded(record, ack.pages_done)
        if ack.phase == Phase.RECEIVED:
            self._received(ack.op)

    def _attach_loaded(self, record: OpenLoad, num_pages: int) -> None:
        """Store pages among the load's first `num_pages` that are not in the tree yet enter it, under the lease."""
        answer, start = record.answer, record.attached
        stop = max(start, min(answer.first + num_pages - answer.host_end, len(record.slots)))
        if stop == start or record.epoch != self._epoch:
            return
        first = answer.host_end + start
        of_store = max(start, min(stop, answer.store_end - answer.host_end))
        self._moving.difference_update(record.keys[first : answer.host_end + stop])
        self.pages.enter(record, first, record.slots[start:of_store], answer.host_end, stored=True)
        self.pages.enter(record, answer.host_end + of_store, record.slots[of_store:stop], answer.host_end, stored=False)
        record.attached = stop
        # Where the device alone has the pages before, nothing could enter the tree, and there is nothing to lease.
        reach = self._tier.match(record.keys[: first + stop - start], touch=False).num_pages
        old, record.lease = record.lease, self._tier.lease(record.keys, reach)
        old.release()

    def _commit_load(self, record: OpenLoad, ack: Ack) -> None:
        answer = record.answer
        tracked = record.tracked
        num_bare = min(answer.first + ack.pages_held, answer.store_end) - answer.bare_start
        if num_bare > 0:
            self._metrics.count("pages_without_draft", by=num_bare)
        self._attach_loaded(record, ack.pages_held)
        if record.epoch == self._epoch:
            self._moving.difference_update(record.keys[answer.host_end : answer.host_end + len(record.slots)])
        self._tier.abandon(record.slots[record.attached :])
        if tracked is None:
            return
        tracked.load = None
        self.release(tracked)
        # A page that failed is not promised to this request again: vLLM asks anew after a failure.
        done = answer.first + ack.pages_done
        if done < answer.end and ack.reason != MissReason.CANCELLED:
            tracked.banned_from = done
        if done < answer.end and self._tier.ownership.on_device:
            # The engine drops a whole block, and with it a page on every owner.
            done -= done % self._tier.ownership.num_owners
        for tier, count in answer.by_tier(record.tokens, done, self._page).items():
            self._metrics.count("hit_tokens", tier.value, count)

    def _commit_save(self, record: OpenSave, ack: Ack) -> None:
        self._holds.release(record.blocks)
        done = ack.pages_done
        if record.epoch == self._epoch:
            self._moving.difference_update(record.keys[record.start : record.start + len(record.slots)])
            slots = record.slots[:done]
            self.pages.enter(record, record.start, slots, record.start, False, record.doubtful_end)
        else:
            self._tier.abandon(record.slots[:done])
        self._tier.abandon(record.slots[done:])
        if self._config.write == WritePolicy.THROUGH and record.epoch == self._epoch:
            self.flush(record.keys, range(record.start, record.start + done))

    def _commit_flush(self, record: OpenFlush, ack: Ack) -> None:
        self._flushing.difference_update(record.keys[index] for index in record.positions)
        if ack.pages_done < len(record.positions):
            self._flush_from_step = self._step + _FLUSH_REST_STEPS
        if record.epoch != self._epoch:
            return
        done = record.positions[: ack.pages_done]
        for start, stop in runs_of(done):
            self._tier.mark_stored(record.keys, start, stop)
        for index in done:
            self._events.stored(Tier.STORE, record.keys[index], record.keys[index - 1] if index else None, ())

    def _flush_on_hit(self, keys: Sequence[PageKey]) -> None:
        found = self._tier.match(keys, touch=False)
        enough = self._config.write == WritePolicy.THROUGH or found.hits >= _SELECTIVE_HITS
        if enough and 0 in found.stored:
            self.flush(keys, range(found.num_pages))

    def _tokens_of(self, tracked: Tracked, start: int, stop: int) -> Sequence[int]:
        if not self._events.enabled:
            return ()
        return tracked.source.all_token_ids[start * self._page : stop * self._page]
