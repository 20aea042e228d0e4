"""A simulated engine that drafts: beside the target's KV every rank of the last stage keeps a draft's.

A draft's state at a position is a function of all tokens up to it, and of the one that follows where it looks ahead. It
is so only on a prefix that is whole: what is computed where some of that is missing is noise, which no store may ever
hold. Guesses, right and wrong ones, make the engine compute tokens that it takes back; behind the last one a draft
leaves noise too. Thread: the test's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import save_file
from simulated_engine import SimulatedEngine
from simulated_model import (
    BLOCK,
    LAYERS,
    POISON,
    VOCABULARY,
    Cut,
    Job,
    Share,
    Truth,
    Words,
    folded,
    mixed,
    next_token,
    stored_page,
    write_model,
)
from simulated_rank import Batch, SimulatedRank, Span, sampled
from vllm.config import LoadConfig, SpeculativeConfig, VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, UniformTypeKVCacheSpecs
from vllm.v1.outputs import DraftTokenIds

from vllm_hicache.geometry import PageLayout, RoleShape
from vllm_hicache.grid import Grid
from vllm_hicache.names import PageKey, Role, Slot

NUM_GUESSES = 3


@dataclass(frozen=True, slots=True)
class Draft:
    """What drafts, and how its state is kept.

    Attributes:
        tier: the connector's setting `draft`.
        looks_ahead: EAGLE, whose layers are numbered from the target's last one on; else a draft model.
        is_cut: whether tensor ranks share its heads; else each has them all.
        max_tokens: its longest text.
        weights: the content of its file of weights.
    """

    tier: str = "packed"
    looks_ahead: bool = False
    layers: int = 2
    heads: int = 1
    head_size: int = 6
    dtype: torch.dtype = torch.float32
    is_cut: bool = True
    max_tokens: int = 4096
    weights: str = "draft"

    @property
    def num_words(self) -> int:
        """64-bit words of one token, per layer and head."""
        return 2 * self.head_size * self.dtype.itemsize // 8

    @property
    def layer_names(self) -> list[str]:
        first, prefix = (LAYERS, "") if self.looks_ahead else (0, "draft_model.")
        return [f"{prefix}model.layers.{first + layer}.self_attn.attn" for layer in range(self.layers)]

    def heads_of(self, rank: int, cut: Cut) -> slice:
        """Those that a rank holds; none but on the last stage."""
        if rank < cut.num_ranks - cut.tp_size:
            return slice(0, 0)
        if not self.is_cut:
            return slice(0, self.heads)
        each, copies = max(1, self.heads // cut.tp_size), max(1, cut.tp_size // self.heads)
        first = rank % cut.tp_size // copies * each
        return slice(first, first + each)

    def page_bytes(self, page_tokens: int, heads: slice) -> int:
        return page_tokens * self.layers * (heads.stop - heads.start) * self.num_words * 8

    def words(self, truth: Truth, tokens: Sequence[int]) -> Words:
        """What its state must be, as far as `tokens` decide it: [tokens, layers, heads, words]."""
        hashes = truth.hashes(tokens)[int(self.looks_ahead) :]
        shape = (self.layers, self.heads, self.num_words)
        places = mixed(np.arange(1 << 20, (1 << 20) + np.prod(shape), dtype=np.uint64)).reshape(shape)
        return mixed(hashes[:, None, None, None] ^ places)

    def configure(self, config: VllmConfig, model: Path, cut: Cut) -> None:
        """Have vLLM's configuration speak of it."""
        folder = model / f"draft-{self.weights}-{self.heads}"
        _write_model(folder, self)
        config.speculative_config = SpeculativeConfig(
            method="eagle" if self.looks_ahead else "draft_model",
            model=str(folder),
            num_speculative_tokens=NUM_GUESSES,
            draft_tensor_parallel_size=cut.tp_size if self.is_cut else 1,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
        config.speculative_config.draft_model_config.max_model_len = self.max_tokens
        # Weights are told apart by their files, and pipeline stages with a draft are refused on the CPU alone.
        config.load_config = LoadConfig(load_format="auto")
        config.device_config = SimpleNamespace(device_type="simulated")
        layer = next(iter(config.compilation_config.static_forward_context.values()))
        config.compilation_config.static_forward_context.update(dict.fromkeys(self.layer_names, layer))


def _write_model(folder: Path, draft: Draft) -> None:
    write_model(folder, draft.heads, draft.head_size, draft.layers)
    save_file({"weights": torch.tensor(list(draft.weights.encode()))}, folder / "model.safetensors")


class DraftingRank(SimulatedRank):
    """A rank that runs the draft after each forward pass, where it has some of it.

    Args:
        num_places: those of each block that are compared.
        must_be_whole: whether the draft's state is never missing.
    """

    def __init__(
        self, draft: Draft, heads: slice, num_places: int, must_be_whole: bool, number: int, share: Share, *rest: object
    ) -> None:
        self.draft, self.heads = draft, heads
        self._num_places = num_places
        self._must_be_whole = must_be_whole
        num_blocks = rest[0]
        shape = (draft.layers, num_blocks, heads.stop - heads.start, draft.num_words, BLOCK)
        self.draft_device: Words = np.full(shape, POISON, np.uint64)
        super().__init__(number, share, *rest)  # type: ignore[arg-type]

    @property
    def has_draft(self) -> bool:
        """Whether it has layers of the draft."""
        return self.heads.stop > 0

    def _cache_config(self) -> KVCacheConfig:
        config = super()._cache_config()
        if not self.has_draft:
            return config
        (group,) = config.kv_cache_groups
        own = FullAttentionSpec(
            block_size=BLOCK,
            num_kv_heads=self.draft_device.shape[2],
            head_size=self.draft.head_size,
            dtype=self.draft.dtype,
        )
        specs = dict.fromkeys(group.layer_names, group.kv_cache_spec) | dict.fromkeys(self.draft.layer_names, own)
        return KVCacheConfig(
            config.num_blocks, [], [KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs.from_specs(specs))]
        )

    def _tensors(self) -> dict[str, torch.Tensor]:
        if not self.has_draft:
            return super()._tensors()
        layers, blocks, heads = self.draft_device.shape[:3]
        flat = torch.from_numpy(self.draft_device.view(np.int64)).view(self.draft.dtype)
        tensors = flat.reshape(layers, blocks, heads, BLOCK, 2 * self.draft.head_size)
        return super()._tensors() | dict(zip(self.draft.layer_names, tensors, strict=True))

    def _poison(self, blocks: Sequence[int]) -> None:
        super()._poison(blocks)
        self.draft_device[:, blocks] = POISON

    def _forward(self, batch: Batch) -> list[list[int]]:
        folds = super()._forward(batch)
        longest = max((span.end for span in batch.spans), default=0)
        if self.has_draft and longest + NUM_GUESSES <= self.draft.max_tokens:
            for span in batch.spans:
                self._draft(span)
        return folds

    def _draft(self, span: Span) -> None:
        """The draft's own pass over what the target has computed, of which wrong guesses are known by now."""
        folds = [folded(span.truth.words(span.tokens[:end])) for end in span.ends]
        new = sampled(span.guesses, folds)
        num_true = span.ends[0] + len(new) - 1 if new else span.end
        tokens = [*span.tokens[:num_true], new[-1] if new else span.tokens[num_true]]
        words = self.draft.words(span.truth, tokens)[:num_true, :, self.heads]
        is_whole = self._is_whole(span, words[: span.start])
        room = len(span.blocks) * BLOCK * self.share.num_owners
        noise = min(room, max(span.end, num_true + NUM_GUESSES)) - num_true
        written = np.concatenate([words if is_whole else mixed(words), np.zeros((noise, *words.shape[1:]), np.uint64)])
        positions = self.share.owned(np.arange(span.start, len(written)))
        self._at(span, positions, written)

    def _is_whole(self, span: Span, words: Words) -> bool:
        """Whether all that it sees is state. Of a sharded request it sees its own part."""
        positions = self.share.owned(np.arange(span.start))
        positions = positions[positions % BLOCK < self._num_places]
        blocks = np.array(span.blocks, int)[positions // (BLOCK * self.share.num_owners)]
        wrong = np.argwhere(self.draft_device.transpose(1, 4, 0, 2, 3)[blocks, positions % BLOCK] != words[positions])
        assert not len(wrong) or not self._must_be_whole, (
            f"rank {self.number}: the draft of request {span.name} sees no state at position {positions[wrong[0][0]]}"
        )
        return not len(wrong)

    def _at(self, span: Span, positions: Sequence[int], written: Words) -> None:
        blocks = np.array(span.blocks, int)[np.asarray(positions) // (BLOCK * self.share.num_owners)]
        self.draft_device.transpose(1, 4, 0, 2, 3)[blocks, np.asarray(positions) % BLOCK] = written[positions]


class DraftingEngine(SimulatedEngine):
    """See the module; `extra` as for `SimulatedEngine`.

    Args:
        is_exact: whether the last place of a block counts where the draft looks ahead. vLLM's own prefix cache may take
            a block for another of which only the token that follows differs, once there are chains behind both.

    Attributes:
        num_guessed: tokens that the draft proposed, `num_right` of which the target took.
    """

    def __init__(
        self,
        model: Path,
        store: str = "none",
        num_slots: int = 64,
        page_blocks: int = 1,
        draft: Draft = Draft(),
        draft_miss: str = "recompute",
        is_exact: bool = True,
        **extra: object,
    ) -> None:
        self.draft = draft
        self._num_places = BLOCK if is_exact else BLOCK - 1
        names = ("tp_size", "pp_size", "dcp_size", "num_heads")
        self._cut = Cut(**{name: extra[name] for name in names if name in extra})  # type: ignore[arg-type]
        self._must_be_whole = draft_miss == "recompute" and draft.max_tokens == Draft().max_tokens
        self._guesses = random.Random(11)
        self.num_right = self.num_guessed = 0
        tokens = page_blocks * BLOCK
        most = max(
            Share.of(rank, *self._cut).page_bytes(tokens) + draft.page_bytes(tokens, draft.heads_of(rank, self._cut))
            for rank in range(self._cut.num_ranks)
        )
        settings = {"host_memory": num_slots * most, "draft": draft.tier, "draft_miss": draft_miss} | extra
        super().__init__(model, store, num_slots=num_slots, page_blocks=page_blocks, **settings)  # type: ignore[arg-type]

    def _configure(self, config: VllmConfig, model: Path) -> None:
        self.draft.configure(config, model, self._cut)

    def _make_rank(self, number: int, share: Share, *rest: object) -> DraftingRank:  # type: ignore[override]
        heads = self.draft.heads_of(number, self._cut)
        return DraftingRank(self.draft, heads, self._num_places, self._must_be_whole, number, share, *rest)

    @property
    def looks_ahead(self) -> bool:
        return self.draft.looks_ahead

    def is_bare(self, key: PageKey) -> bool:
        """Whether a page in host memory is known to have no draft state."""
        return key in self.half._bare

    def draft_bytes(self, job: Job, page: int, heads: slice | None = None) -> bytes:
        """The draft's part of a page, of these heads, as it lies in a slot."""
        start = page * self.page_tokens
        words = self.draft.words(job.truth, job.tokens)[start : start + self.page_tokens]
        whole = words.reshape(-1, BLOCK, *words.shape[1:]).transpose(3, 2, 0, 4, 1)
        return whole[heads if heads is not None else slice(None)].tobytes()

    def stored_drafts(self, job: Job) -> Iterator[bytes | None]:
        """The draft's payloads of a request's pages as the store has them, `None` where one is missing or bad."""
        shape = RoleShape(Role.DRAFT, self.draft.layers, self.draft.heads, BLOCK * self.draft.num_words * 8)
        grid = Grid(1, gcd(self._grid.head_groups, self.draft.heads))
        cells = PageLayout((shape,), BLOCK, self.page_tokens, grid).cells
        return (stored_page(self.half._store, key, cells) for key in self.keys(job))

    def check_at_rest(self) -> None:
        super().check_at_rest()
        used = self.tier.num_slots - self.tier.num_free
        assert len(self.half._operations._storable._plain) == (used if self.looks_ahead else 0), (
            "names of pages that have gone"
        )
        for job in self.jobs.values():
            if self.half._store is not None and job.request.lora_request is None and job.weights == self.weights:
                for page, found in enumerate(self.stored_drafts(job)):
                    is_right = found is None or self._is_state(found, self.draft_bytes(job, page))
                    assert is_right, f"noise is stored for page {page}"

    def _is_right(self, job: Job, page: int, rank: SimulatedRank, slot: Slot) -> bool:
        found, target = rank.host_bytes(slot), self.page_bytes(job, page, rank.share)
        draft = self.draft_bytes(job, page, rank.heads) if rank.has_draft else b""
        is_right = self._is_state(found[len(target) :], draft) or self.is_bare(self.keys(job)[page])
        return found[: len(target)] == target and is_right

    def _is_state(self, found: bytes, expected: bytes) -> bool:
        words = [np.frombuffer(each, np.uint64).reshape(-1, BLOCK)[:, : self._num_places] for each in (found, expected)]
        return np.array_equal(*words)

    def _finish_oldest(self) -> None:
        super()._finish_oldest()
        if self.cut.pp_size == 1:
            running = [each for each in self.scheduler.running if not each.is_prefill_chunk]
            guesses = [self._guess(self.jobs[each.request_id]) for each in running]
            self.scheduler.update_draft_token_ids(DraftTokenIds([each.request_id for each in running], guesses))

    def _take(self, outputs: object) -> None:
        super()._take(outputs)
        stats = outputs.scheduler_stats
        if stats is not None and stats.spec_decoding_stats is not None:
            self.num_guessed += stats.spec_decoding_stats.num_draft_tokens
            self.num_right += stats.spec_decoding_stats.num_accepted_tokens

    def _guess(self, job: Job) -> list[int]:
        """What may follow: the first tokens of it are right."""
        tokens = list(job.request.all_token_ids)
        for _ in range(self._guesses.randint(0, NUM_GUESSES)):
            tokens.append(next_token(folded(job.truth.words(tokens))))
        guesses = tokens[job.request.num_tokens :]
        return guesses + self._guesses.choices(range(VOCABULARY), k=NUM_GUESSES - len(guesses))


def start_of(*where: object, draft: Draft | None = None, **extra: object) -> SimulatedEngine:
    """An engine with this draft, or without one."""
    if draft is not None:
        return DraftingEngine(*where, draft=draft, **extra)  # type: ignore[arg-type]
    return SimulatedEngine(*where, **extra)  # type: ignore[arg-type]
