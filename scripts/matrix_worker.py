"""Looks into the device caches of an engine's ranks. These functions run inside vLLM's worker processes.

They go there by vLLM's `collective_rpc`, which must be allowed to carry code: `VLLM_ALLOW_INSECURE_SERIALIZATION=1`.
Which heads a rank holds is worked out here again, so that a mistake in the package's own geometry would be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

POISON = 0xA5

Bytes = npt.NDArray[np.uint8]


class Worker(Protocol):
    """vLLM's own, as far as it is used here; `watched_blocks` is ours."""

    rank: int
    model_runner: Any
    vllm_config: Any
    watched_blocks: list[int]


class Scheduled(Protocol):
    """A step as vLLM's scheduler hands it to a worker."""

    scheduled_new_reqs: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's share of some pages; numbers count over the whole model.

    Attributes:
        file: a numpy file, uint8 [pages][layers][heads][slab bytes].
    """

    file: str
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int


def watch(worker: Worker) -> None:
    """Note from now on which blocks each request is given; vLLM forgets them when the request ends."""
    runner = worker.model_runner
    execute: Callable[..., object] = runner.execute_model
    worker.watched_blocks = []

    def watched(scheduled: Scheduled, *arguments: object, **named: object) -> object:
        for request in scheduled.scheduled_new_reqs:
            worker.watched_blocks = list(request.block_ids[0])
        return execute(scheduled, *arguments, **named)

    runner.execute_model = watched


def dump(worker: Worker, num_pages: int, path: str) -> Piece:
    """Write the first pages of the request that came last to `path` and the rank's number; one block is one page.

    Raises RuntimeError when that request has fewer blocks.
    """
    blocks = worker.watched_blocks[:num_pages]
    if len(blocks) < num_pages:
        raise RuntimeError(f"the last request has {len(blocks)} blocks, {num_pages} were asked for")
    layers = held_layers(worker)
    numbers = [number for number, _ in layers]
    slabs = np.stack([caches[blocks] for _, caches in layers], axis=1)
    file = Path(f"{path}-rank{worker.rank}.npy")
    np.save(file, slabs.reshape(*slabs.shape[:3], -1))
    return Piece(str(file), numbers[0], len(numbers), first_head(worker), slabs.shape[2])


def poison(worker: Worker) -> None:
    """Overwrite every block."""
    for _, caches in held_layers(worker):
        caches.fill(POISON)


def held_layers(worker: Worker) -> list[tuple[int, Bytes]]:
    """The rank's layers in ascending order: number in the whole model, bytes [blocks][heads][...] without a copy."""
    return sorted(_layers(worker), key=lambda layer: layer[0])


def _layers(worker: Worker) -> Iterator[tuple[int, Bytes]]:
    import torch

    for name, layer in worker.vllm_config.compilation_config.static_forward_context.items():
        yield int(name.split(".")[2]), layer.kv_cache.view(torch.uint8).numpy()


def first_head(worker: Worker) -> int:
    """The first KV head that the rank holds. Tensor ranks are counted first; where they outnumber heads they share.

    A latent counts as one head.
    """
    config = worker.vllm_config
    num_heads: int = 1 if config.model_config.use_mla else config.model_config.get_total_num_kv_heads()
    num_ranks: int = config.parallel_config.tensor_parallel_size
    return (worker.rank % num_ranks) * num_heads // num_ranks
