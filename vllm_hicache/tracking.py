"""What the scheduler half remembers of a request and of each open operation.

Plain records, owned by the scheduler half; scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_hicache.index.tree import Lease
from vllm_hicache.keys import PageKeys
from vllm_hicache.lookup import Lookup
from vllm_hicache.names import BlockId, OpId, PageKey, RequestId, Slot, Tier
from vllm_hicache.plan import Peer


class TokenSource(Protocol):
    """What is read of the engine's request: it grows while the request runs."""

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Those tokens."""
        ...


class BlockHolds(Protocol):
    """Keeps device blocks from being reused while a save reads them."""

    def hold(self, blocks: Sequence[BlockId]) -> None:
        """Count one more user of each block."""

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Count one user less."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What was promised to the engine: pages [first, host_end) from host memory, [host_end, store_end) from the store,
    [store_end, end) from a peer.

    `local` tokens were on the device already; they may end inside page `first`. From page `whole_end` on the store's
    pages have no draft state.
    """

    local: int
    first: int
    host_end: int
    store_end: int
    whole_end: int
    end: int

    @property
    def bare_start(self) -> int:
        """Pages from here to `store_end` have no draft state."""
        return min(max(self.host_end, self.whole_end), self.store_end)

    def by_tier(self, tokens: int, end_page: int, page_tokens: int) -> dict[Tier, int]:
        """Split the first `tokens` tokens after `local` by tier, as far as pages before `end_page` go."""
        total = max(0, min(tokens, end_page * page_tokens - self.local))
        host = max(0, min(total, self.host_end * page_tokens - self.local)) if self.host_end > self.first else 0
        store = max(0, min(total, self.store_end * page_tokens - self.local) - host)
        split = {Tier.HOST: host, Tier.STORE: store, Tier.PEER: total - host - store}
        return {tier: count for tier, count in split.items() if count}


@dataclass(slots=True)
class Handoff:
    """What two engines have between them of one prompt.

    Attributes:
        request: by this name the engine that computes is told that nothing more will be read.
        keys: what its pages are known by. The last one may be unfinished, where its name is its tokens' alone.
        plain: names of their target's bytes.
        num_full: those among them that are full.
        num_tokens: of the prompt.
        peer: the engine that computes it; `None` where that is this one.
        is_saved: whether this engine has begun to save all of it.
    """

    request: str
    keys: Sequence[PageKey]
    plain: Sequence[PageKey]
    num_full: int
    num_tokens: int
    peer: Peer | None = None
    is_saved: bool = False

    @classmethod
    def of_prompt(cls, request: str, keys: PageKeys, peer: Peer | None) -> Handoff:
        """Of a prompt whose tokens `keys` has been given."""
        known, plain = keys.named(0, len(keys.keys))
        tail = keys.tail()
        if tail is not None and not keys.has_next:
            known = plain = [*known, tail]
        return cls(request, known, plain, len(keys.keys), keys.num_tokens, peer)

    def is_due(self, computed: int) -> bool:
        """Whether the rest of the prompt is to be saved, now that `computed` tokens are computed."""
        return self.peer is None and not self.is_saved and computed >= self.num_tokens


@dataclass(slots=True)
class Tracked:
    """One request.

    Attributes:
        epoch: the cache generation it started in; after a reset it is neither loaded nor saved any more.
        saved: leading pages that were in host memory when this was last looked at.
        local: tokens on the device when it was last matched.
        banned_from: first page that failed for this request and is not promised to it again.
        lookup: the question put to the store, about pages from `lookup_start` on.
        waiting_since_s: when it began to wait for pages that another operation moves.
        load: the open load operation. It outlives the load itself while a store call has not come back.
        handoff: what it has to do with another engine; `None` where it has nothing, or nothing any more.
        is_bare: whether draft state of its prefix is missing, so that its pages have none.
    """

    request_id: RequestId
    source: TokenSource
    keys: PageKeys
    epoch: int
    saved: int = 0
    local: int = 0
    banned_from: int | None = None
    lookup: Lookup | None = None
    lookup_start: int = 0
    lookup_began_s: float = 0.0
    waiting_since_s: float | None = None
    answer: Answer | None = None
    load: OpId | None = None
    touched: bool = False
    is_bare: bool = False
    handoff: Handoff | None = None
    retry_step: int = 0

    def extend_keys(self) -> list[PageKey]:
        """Keys of all full pages of the tokens known now."""
        if self.source.num_tokens > self.keys.num_tokens and self.source.num_tokens >= self.keys.next_at:
            self.keys.extend(self.source.all_token_ids[self.keys.num_tokens :])
        return self.keys.keys

    @property
    def peer(self) -> Peer | None:
        """The engine that has computed its prompt, as long as something may be read of it."""
        return self.handoff.peer if self.handoff is not None else None

    def chain(self, stop: int) -> tuple[Sequence[PageKey], Sequence[PageKey]]:
        """What its first pages are known by, and the names of their target's bytes.

        An unfinished page of a prompt that is handed over counts, if `stop` goes beyond the full ones.
        """
        if self.handoff is not None and stop > len(self.keys.keys):
            return self.handoff.keys[:stop], self.handoff.plain[:stop]
        return self.keys.named(0, stop)


@dataclass(slots=True)
class OpenLoad:
    """A load on its way. `slots` are those of pages [host_end, host_end + len(slots)), from the store or a peer.

    `tracked` is `None` for a prefetch, which no request waits for. The first `attached` slots are in the tree
    already, under the lease. Pages from `num_full` on are unfinished.
    """

    tracked: Tracked | None
    keys: Sequence[PageKey]
    plain: Sequence[PageKey]
    answer: Answer
    tokens: int
    slots: Sequence[Slot]
    lease: Lease
    epoch: int
    event_tokens: Sequence[int]
    num_full: int
    attached: int = 0


@dataclass(frozen=True, slots=True)
class OpenSave:
    """A save on its way: pages [start, start + len(slots)) of a chain, read from held `blocks`.

    `event_tokens` are those of the pages where events are recorded, else empty. Pages before `doubtful_end` come from
    blocks whose last place of the draft may belong to another next token; those from `num_full` on are unfinished.
    """

    keys: Sequence[PageKey]
    plain: Sequence[PageKey]
    start: int
    slots: Sequence[Slot]
    blocks: Sequence[BlockId]
    lease: Lease
    epoch: int
    event_tokens: Sequence[int]
    num_full: int
    doubtful_end: int


@dataclass(frozen=True, slots=True)
class OpenExport:
    """Pages under a lease that another engine may read."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class OpenFlush:
    """A flush on its way: the pages at `positions` of a chain."""

    keys: Sequence[PageKey]
    positions: Sequence[int]
    lease: Lease
    epoch: int


OpenOp = OpenLoad | OpenSave | OpenFlush | OpenExport
