"""Looks into the device caches of an engine's ranks. These functions run inside vLLM's worker processes.

They go there by vLLM's `collective_rpc`, which must be allowed to carry code: `VLLM_ALLOW_INSECURE_SERIALIZATION=1`.
Which heads a rank holds is worked out here again, so that a mistake in the package's own geometry would be seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from vllm_hicache.names import Role

if TYPE_CHECKING:
    from vllm_hicache.context_parallel.scratch import Scratch

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
    scheduled_cached_reqs: Any


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's share of some pages; numbers count over the whole model, target or draft.

    Attributes:
        file: a numpy file, uint8 [pages][layers][heads][slab bytes].
        owner: the first page in the file; those after it are `num_owners` apart.
        num_owners: ranks that share out the pages of a request; 1 where each has all.
    """

    file: str
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    owner: int = 0
    num_owners: int = 1


def watch(worker: Worker) -> None:
    """Note from now on which blocks the request that came last is given; vLLM forgets them when it ends."""
    runner = worker.model_runner
    execute: Callable[..., object] = runner.execute_model
    worker.watched_blocks = []
    last = None

    def watched(scheduled: Scheduled, *arguments: object, **named: object) -> object:
        nonlocal last
        for request in scheduled.scheduled_new_reqs:
            last, worker.watched_blocks = request.req_id, list(request.block_ids[0])
        later = scheduled.scheduled_cached_reqs
        for request_id, more in zip(later.req_ids, later.new_block_ids, strict=True):
            if request_id in later.resumed_req_ids:
                raise RuntimeError(f"request {request_id} was preempted: give the engine room for what is asked of it")
            if request_id == last and more:
                worker.watched_blocks += more[0]
        return execute(scheduled, *arguments, **named)

    runner.execute_model = watched


def dump(worker: Worker, num_pages: int, path: str, role: Role = Role.TARGET) -> Piece:
    """Write this rank's of the first pages of the request that came last to `path`, the role and the rank's number.

    One block of a rank is one page. Where N ranks share pages out, page q is the q // N-th block of rank q mod N.

    Raises RuntimeError when that request has fewer blocks, or the rank has no layers of that role.
    """
    owner, num_owners = share(worker)
    num_owned = len(range(owner, num_pages, num_owners))
    blocks = worker.watched_blocks[:num_owned]
    if len(blocks) < num_owned:
        raise RuntimeError(f"the last request has {len(blocks)} blocks, {num_owned} were asked for")
    layers = held_layers(worker, role)
    if not layers:
        raise RuntimeError(f"rank {worker.rank} has no {role} layers")
    numbers = [number for number, _ in layers]
    slabs = np.stack([caches[blocks] for _, caches in layers], axis=1)
    file = Path(f"{path}-{role}-rank{worker.rank}.npy")
    np.save(file, slabs.reshape(*slabs.shape[:3], math.prod(slabs.shape[3:])))
    return Piece(str(file), numbers[0], len(numbers), first_head(worker, role), slabs.shape[2], owner, num_owners)


def poison(worker: Worker) -> None:
    """Overwrite every block, and where ranks share pages out what they were gathered in. A number in every dtype."""
    for _, _, caches in _layers(worker):
        caches.fill(POISON)
    if share(worker)[1] > 1:
        for buffer in scratch()._buffers:
            if buffer is not None:
                buffer.numpy().fill(POISON)


def share(worker: Worker) -> tuple[int, int]:
    """Which owner of a request's pages this rank is, of how many: neighbouring tensor ranks share them out."""
    parallel = worker.vllm_config.parallel_config
    num_owners: int = parallel.decode_context_parallel_size
    return worker.rank % parallel.tensor_parallel_size % num_owners, num_owners


def scratch() -> Scratch:
    """What this process gathers pages in under context parallelism. All ranks of the engine must ask together."""
    from vllm_hicache.context_parallel.backend import _steps

    return _steps().gather.scratch


def held_layers(worker: Worker, role: Role = Role.TARGET) -> list[tuple[int, Bytes]]:
    """The rank's layers of a role in ascending order: number in the whole model, bytes [blocks][heads][...], no copy.

    A draft's layers count from 0, also where vLLM's names of them go on after the target's.
    """
    held = [(number, caches) for its_role, number, caches in _layers(worker) if its_role is role]
    return sorted(held, key=lambda layer: layer[0])


def _layers(worker: Worker) -> Iterator[tuple[Role, int, Bytes]]:
    import torch

    from vllm_hicache.transfer.device import layer_number, role_of_layer

    config = worker.vllm_config
    num_target_layers: int = config.model_config.get_total_num_hidden_layers()
    beyond = num_target_layers if config.speculative_config else None
    for name, layer in config.compilation_config.static_forward_context.items():
        role, number = role_of_layer(name, beyond), layer_number(name)
        if role is not role_of_layer(name):
            number -= num_target_layers
        yield role, number, layer.kv_cache.view(torch.uint8).numpy()


def first_head(worker: Worker, role: Role = Role.TARGET) -> int:
    """The first KV head that the rank holds. Tensor ranks are counted first; where they outnumber heads they share.

    A latent counts as one head. A draft may be cut over fewer ranks than the target, that is over one.
    """
    config = worker.vllm_config
    model, parallel = config.model_config, config.parallel_config
    if role is Role.DRAFT:
        speculative = config.speculative_config
        model, parallel = speculative.draft_model_config, speculative.draft_parallel_config
    num_heads: int = 1 if model.use_mla else model.get_total_num_kv_heads()
    num_ranks: int = parallel.tensor_parallel_size
    return (worker.rank % num_ranks) * num_heads // num_ranks
