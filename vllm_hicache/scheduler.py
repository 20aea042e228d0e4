"""The scheduler half: decides what is loaded, saved, flushed and evicted.

There is one per engine, used on the scheduler thread only. It knows pages, slots and numbered operations, and
nothing of bytes: workers move those and report. State changes on acknowledgements only. Nothing here waits,
apart from a grace of half a millisecond that spares fast lookups an engine step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any

from vllm_hicache.checker import Difference, DifferenceKind, RankChecker
from vllm_hicache.config import Config, Consensus, PrefetchPolicy, WritePolicy
from vllm_hicache.drafts import BarePages
from vllm_hicache.entries import Entry, Mark
from vllm_hicache.errors import RanksDisagree
from vllm_hicache.events import PageEvents
from vllm_hicache.exports import Exports
from vllm_hicache.index.host import HostTier
from vllm_hicache.keys import Adapter, ExtraKey, PageKeys, chain_root
from vllm_hicache.lookup import StoreLookups
from vllm_hicache.metrics import Metrics
from vllm_hicache.names import BlockId, MissReason, PageKey, RequestId, Tier
from vllm_hicache.namespace import DraftSpace, Namespace, Spaces
from vllm_hicache.operations import Operations
from vllm_hicache.ownership import Ownership
from vllm_hicache.plan import OpReport, Peer, Plan
from vllm_hicache.stores import StoreFactory
from vllm_hicache.tracking import Answer, BlockHolds, Handoff, TokenSource, Tracked

logger = logging.getLogger(__name__)

_GRACE_S = 0.0005
_NOTHING: Mapping[int, Any] = MappingProxyType({})
_RETRY_STEPS = 16
_LEAST_BARE = 1 << 16


@dataclass(frozen=True, slots=True)
class Offer:
    """What the cache can add beyond the engine's own prefix: `tokens`, or ask again while `pending`."""

    tokens: int = 0
    pending: bool = False


class SchedulerHalf:
    """See the module.

    Args:
        block_tokens: tokens of a device block.
        num_slots: pages that every group of ranks has room for.
        ranks: every rank that reports; the checker compares them where there are several.
        open_store: `None` without an L3 store.
        lookups: `None` without an L3 store.
        record_events: whether page events are collected.
        ownership: how a group of ranks shares out its pages.
        draft: what the engine's draft is, where its layers are part of every page.
    """

    def __init__(
        self,
        config: Config,
        namespace: Namespace,
        block_tokens: int,
        num_slots: int,
        ranks: Iterable[int],
        holds: BlockHolds,
        metrics: Metrics,
        open_store: StoreFactory | None = None,
        lookups: StoreLookups | None = None,
        record_events: bool = False,
        ownership: Ownership = Ownership(),
        draft: DraftSpace | None = None,
    ) -> None:
        self._config = config
        self._page = namespace.page_tokens
        self._draft = draft
        # A page whose last place depends on the token that follows is known, and saved, once that token is.
        self._num_ahead = int(draft is not None and draft.looks_ahead)
        self._metrics = metrics
        self._open_store = open_store
        self._lookups = lookups
        self.events = PageEvents(record_events)
        ranks = tuple(ranks)
        watched = config.consensus != Consensus.OFF and len(ranks) > 1
        self._checker = RankChecker(ranks) if watched else None
        has_store = open_store is not None
        keep_unstored = has_store and config.write == WritePolicy.BACK
        self.tier = HostTier(num_slots, config.eviction, keep_unstored, ownership)
        # What is bare lies in host memory or on the device, of which the engine's own pool says no size here.
        self._bare = BarePages(max(_LEAST_BARE, 4 * num_slots))
        self._operations = Operations(
            config, self.tier, self._page, block_tokens, ranks, holds, metrics, self.events, has_store, self._bare
        )
        self._exports = Exports(self._operations, config.peer_lease_s, metrics)
        self._tracked: dict[RequestId, Tracked] = {}
        self._prefetching: list[Tracked] = []
        self._epoch = 0
        self._step = 0
        self._enter(namespace)

    @property
    def namespace(self) -> Namespace:
        """The namespace in force."""
        return self._namespace

    @property
    def has_pending(self) -> bool:
        """Whether operations wait to be planned or acknowledged, so that the engine should keep stepping."""
        return self._operations.has_pending or self._exports.has_pending

    def begin(
        self,
        request_id: RequestId,
        source: TokenSource,
        salt: str | None = None,
        adapter: Adapter | None = None,
        extras: Iterable[ExtraKey] = (),
        peer: Peer | None = None,
        export: str | None = None,
    ) -> None:
        """Track a new request, and ask the store about it before the engine does.

        Args:
            peer: another engine that has computed the prompt.
            export: under this name another engine will say that it has read what this one computes of the prompt.
        """
        root = chain_root(self._digest, salt, adapter)
        tracked = Tracked(request_id, source, PageKeys(root, self._page, extras, bool(self._num_ahead)), self._epoch)
        self._tracked[request_id] = tracked
        name = peer.request if peer is not None else export
        if name is not None:
            tracked.keys.extend(source.all_token_ids)
            tracked.handoff = Handoff.of_prompt(name, tracked.keys, peer)
            if peer is None:
                self._exports.begin(tracked.handoff)
        if self._store is None or source.num_tokens <= self._config.load_threshold:
            return
        keys = tracked.extend_keys()
        host = self.tier.match(keys, touch=False).num_pages
        if host < len(keys):
            self._ask_store(tracked, keys, host)
            if self._config.prefetch == PrefetchPolicy.BEST_EFFORT:
                self._prefetching.append(tracked)

    def match(self, request_id: RequestId, local_tokens: int) -> Offer:
        """How many tokens beyond `local_tokens` on the device could be loaded. Pins nothing.

        At least one token of the request is always left to compute.
        """
        tracked = self._live(request_id)
        # An open load means that it was given up and a store call has not come back: nothing more to offer.
        if tracked is None or tracked.load is not None:
            return Offer()
        tracked.answer = None
        tracked.is_bare = False
        tracked.local = local_tokens
        keys: Sequence[PageKey] = tracked.extend_keys()
        if tracked.handoff is not None and tracked.handoff.peer is not None:
            keys = tracked.handoff.keys
        limit = len(keys) if tracked.banned_from is None else min(len(keys), tracked.banned_from)
        first = local_tokens // self._page
        if first >= limit:
            return Offer()
        host = self.tier.match(keys[:limit], touch=False).num_pages
        host_end = store_end = max(host, first)
        num_full = min(limit, len(tracked.keys.keys))
        if host_end < num_full and (self._store is not None or tracked.peer is not None):
            run = self._store_run(tracked, host_end, num_full)
            if run is None:
                return Offer(pending=True)
            # Pages of this very chain count as evictable, but will be leased when the load begins.
            store_end += min(run, max(0, self.tier.num_available - host))
        end = store_end
        if tracked.peer is not None:
            end += min(limit - end, max(0, self.tier.num_available - host - (end - host_end)))
        tokens = min(end * self._page, tracked.source.num_tokens - 1) - local_tokens
        if tokens < max(1, self._config.load_threshold):
            return Offer()
        # The page of a last token that is left to compute has nothing to give.
        end = -(-(local_tokens + tokens) // self._page)
        host_end, store_end = min(host_end, end), min(store_end, end)
        lookup = tracked.lookup
        whole_end = tracked.lookup_start + lookup.num_whole if lookup is not None else store_end
        tracked.answer = Answer(local_tokens, first, host_end, store_end, whole_end, end)
        return Offer(tokens)

    def allocated(self, request_id: RequestId, blocks: Sequence[BlockId], tokens: int) -> None:
        """The engine gave `blocks`, all of the request's, and will wait for `tokens` tokens to be loaded."""
        tracked = self._live(request_id)
        if tracked is None:
            return
        if not tracked.touched:
            tracked.touched = True
            self._metrics.count("lookup_tokens", by=tracked.source.num_tokens - tracked.local)
            self.tier.match(tracked.keys.keys, touch=True)
        if tokens > 0 and tracked.answer is not None:
            self._operations.load(tracked, tracked.answer, blocks, tokens)
        else:
            self._operations.release(tracked)
        num_touched = -(-(tracked.local + tokens) // self._page)
        tracked.is_bare = self._bare.any_of(islice(tracked.keys.keys, num_touched)) or tracked.is_bare

    def scheduled(
        self,
        request_id: RequestId,
        computed_after: int,
        blocks: Callable[[], Sequence[BlockId]],
        is_drafted: bool = True,
    ) -> None:
        """The engine computes this request up to `computed_after` tokens in the coming step: save new full pages.

        Only tokens that are known count, so that positions a draft may still lose are never saved. Where the step has
        no draft pass (`is_drafted`) the draft misses what follows.
        """
        tracked = self._live(request_id)
        if tracked is None:
            return
        tracked.is_bare = tracked.is_bare or not is_drafted
        # Draft positions and placeholders of asynchronous scheduling lie beyond the known tokens.
        ready = min(computed_after, tracked.source.num_tokens - self._num_ahead) // self._page
        handoff = tracked.handoff
        if handoff is not None and handoff.is_due(computed_after):
            handoff.is_saved = self._operations.save(tracked, handoff.keys, blocks)
            tracked.saved = min(tracked.saved, handoff.num_full)
        elif ready > tracked.saved and self._step >= tracked.retry_step:
            keys = tracked.extend_keys()[:ready]
            if not self._operations.save(tracked, keys, blocks):
                tracked.retry_step = self._step + _RETRY_STEPS

    def plan(self, idle: bool = False) -> Plan:
        """Everything decided since the last plan. `idle`: the engine computes nothing in the coming step."""
        self._step += 1
        self._exports.tend(time.monotonic())
        if self._prefetching:
            self._prefetching = [tracked for tracked in self._prefetching if self._still_waits(tracked)]
        if self._config.write == WritePolicy.BACK:
            self._operations.write_back()
        self._set_gauges()
        return self._operations.take_plan(idle)

    def report(
        self,
        reports: Iterable[OpReport],
        entries: Mapping[int, Sequence[Entry]] = _NOTHING,
        marks: Mapping[int, Mark | None] = _NOTHING,
        acknowledged: Iterable[str] = (),
    ) -> None:
        """Take reports of ranks, act on what all of them have reached, and compare what they say they did.

        Args:
            entries: new lines of ranks' logs, by rank.
            marks: how far those logs have come, by rank.
            acknowledged: exports that other engines have read.

        Raises:
            RanksDisagree: ranks differ in more than the lengths they have come to, and `consensus` is `enforce`.
        """
        self._exports.acknowledged(acknowledged)
        silences = self._operations.report(reports, time.monotonic())
        self._set_gauges()
        if self._checker is None:
            return
        found = [each for rank, new in entries.items() for each in self._checker.take(rank, new, marks.get(rank))]
        found += [self._checker.silent(each.op, each.ranks, each.waited_s) for each in silences if each.is_late]
        for difference in found:
            self._differ(difference)

    def finished(self, request_id: RequestId, is_computed: bool = True) -> str | None:
        """The request has ended, in whatever state; what is under way for it ends by itself.

        Args:
            is_computed: whether its prompt was.

        Returns:
            The name of its prompt, whose pages another engine may read; `None` where none may.
        """
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return None
        if tracked.lookup is not None:
            tracked.lookup.abandoned = True
        if tracked.load is not None:
            self._operations.cancel(tracked.load)
        else:
            self._operations.release(tracked)
        handoff = tracked.handoff
        if handoff is None or handoff.peer is not None:
            return None
        is_exported = is_computed and tracked.epoch == self._epoch
        self._exports.finished(handoff.request, time.monotonic(), is_exported)
        return handoff.request if is_exported else None

    def hit_tokens(self, request_id: RequestId, tokens: int) -> dict[Tier, int]:
        """Split `tokens` that were promised to a request by the tier they come from."""
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.answer is None:
            return {}
        return tracked.answer.by_tier(tokens, tracked.answer.end, self._page)

    def reset(self, nonce: str) -> None:
        """Forget every page and enter a generation that nobody shares, as after new weights.

        Requests that run across the reset are neither loaded nor saved any more.
        """
        self._epoch += 1
        self._exports.reset()
        self._operations.pages.leave(self.tier.reset())
        self._enter(self._namespace.bumped(nonce))

    def close(self) -> None:
        """End the lookups."""
        if self._lookups is not None:
            self._lookups.close()

    def _differ(self, difference: Difference) -> None:
        self._metrics.count("rank_differences", difference.kind.value)
        if difference.kind is DifferenceKind.DONE:
            # What ranks come to may differ, by a store's failure on one of them: that is what lengths are agreed for.
            logger.info("Operations ended with other lengths on other ranks, the least counts: %s", difference)
        elif self._config.consensus == Consensus.ENFORCE:
            raise RanksDisagree(f"the ranks of this engine disagree, and consensus is 'enforce': {difference}")
        else:
            logger.warning("The ranks of this engine disagree: %s", difference)

    def _enter(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._digest = namespace.digest()
        self.spaces = Spaces(self._digest, self._draft.digest_for(self._digest) if self._draft is not None else None)
        self._store = self._open_store(self.spaces) if self._open_store is not None else None
        self._operations.enter(self._epoch, self.spaces)

    def _live(self, request_id: RequestId) -> Tracked | None:
        tracked = self._tracked.get(request_id)
        return tracked if tracked is not None and tracked.epoch == self._epoch else None

    def _ask_store(self, tracked: Tracked, keys: Sequence[PageKey], start: int) -> None:
        if self._lookups is not None and self._store is not None:
            asked, plain = tracked.keys.named(start, len(keys))
            tracked.lookup = self._lookups.begin(asked, self._store, plain)
            tracked.lookup_start = start
            tracked.lookup_began_s = time.monotonic()

    def _store_run(self, tracked: Tracked, start: int, limit: int) -> int | None:
        """Pages from `start` on that the store holds in a run; `None` while that is not known yet."""
        if self._operations.is_moving(tracked.keys.keys[start]) and (
            tracked.peer is not None or self._config.prefetch != PrefetchPolicy.BEST_EFFORT
        ):
            return self._wait_for_others(tracked)
        if self._config.prefetch == PrefetchPolicy.BEST_EFFORT:
            return 0
        if tracked.lookup is None or start < tracked.lookup_start:
            self._ask_store(tracked, tracked.keys.keys, start)
        lookup = tracked.lookup
        if lookup is None:
            return 0
        if not lookup.done.wait(_GRACE_S):
            if time.monotonic() - tracked.lookup_began_s < self._config.lookup_timeout_s:
                return None
            if not lookup.abandoned:
                lookup.abandoned = True
                self._metrics.count("misses", MissReason.TIMEOUT.value, limit - start)
            return 0
        return max(0, min(limit, tracked.lookup_start + (lookup.num_pages or 0)) - start)

    def _wait_for_others(self, tracked: Tracked) -> int | None:
        """Pages that another operation moves: wait until they are there, for as long as a load may take."""
        now = time.monotonic()
        if tracked.waiting_since_s is None:
            tracked.waiting_since_s = now
        limit_s = self._config.prefetch_timeout_s if tracked.peer is None else self._config.peer_timeout_s
        return None if now - tracked.waiting_since_s < limit_s else 0

    def _still_waits(self, tracked: Tracked) -> bool:
        """Start the prefetch of a request whose lookup has been answered; whether it has not been."""
        lookup = tracked.lookup
        if lookup is None or lookup.abandoned or tracked.epoch != self._epoch:
            return False
        if lookup.num_pages is None:
            return True
        if lookup.num_pages:
            start = tracked.lookup_start
            self._operations.prefetch(tracked, start, start + lookup.num_pages, start + lookup.num_whole)
        return False

    def _set_gauges(self) -> None:
        tier = self.tier
        self._metrics.gauge("host_pages", tier.num_free, "free")
        self._metrics.gauge("host_pages", tier.num_reserved, "reserved")
        self._metrics.gauge("host_pages", tier.num_slots - tier.num_free - tier.num_reserved, "used")
        self._metrics.gauge("open_operations", self._operations.num_open)
        self._metrics.gauge("open_exports", self._operations.num_exports)
