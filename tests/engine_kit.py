"""Real vLLM engines for tests, of one rank or cut over several, and looks into their workers' memory.

Functions that run inside the worker go there by vLLM's `collective_rpc`, which must be allowed to carry code.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matrix_worker
import numpy as np
import pytest
from matrix_cut import Cut
from matrix_pages import Pages, assemble, compare
from matrix_worker import Piece, Worker
from prepare_model import default_cache, prepare_model

from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import MANIFEST_PART
from vllm_hicache.storage.envelope import Header
from vllm_hicache.storage.file import FileStore

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"

PAGE = 128


def model_directory() -> Path:
    """The prepared model."""
    return prepare_model(default_cache())


@dataclass(frozen=True)
class Answer:
    """What an engine made of a prompt: tokens, their logprobs, and how many prompt tokens it did not compute."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int


ROUNDING = 0.5
"""A prompt of which a part is computed anew has other rounding than one that was restored whole."""


def alike(one: Answer, other: Answer) -> bool:
    """Equal up to the first token at which rounding of unequal batches may have parted them."""
    steps = zip(one.tokens, one.logprobs, other.tokens, other.logprobs, strict=True)
    for token, logprob, its_token, its_logprob in steps:
        if abs(logprob - its_logprob) > ROUNDING:
            return False
        if token != its_token:
            break
    return True


class Engine:
    """One engine and what tests ask of it."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        llm.collective_rpc(matrix_worker.watch)

    def ask(self, prompt: Sequence[int], salt: str | None = None, max_tokens: int = 4) -> Answer:
        """Generate greedily from token ids."""
        return self.ask_together([prompt], salt, max_tokens)[0]

    def ask_together(
        self, prompts: Sequence[Sequence[int]], salt: str | None = None, max_tokens: int = 4
    ) -> list[Answer]:
        """Generate greedily from several prompts that come at once."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=1, ignore_eos=True)
        common = {} if salt is None else {"cache_salt": salt}
        requests: Any = [{"prompt_token_ids": list(prompt)} | common for prompt in prompts]
        return [_answer(output) for output in self.llm.generate(requests, params, use_tqdm=False)]

    def abort_after(self, prompt: Sequence[int], seconds: float) -> None:
        """Start a request and abort it some time later, wherever it is then."""
        from vllm import SamplingParams

        request: Any = {"prompt_token_ids": list(prompt)}
        (name,) = self.llm.enqueue([request], SamplingParams(max_tokens=4), use_tqdm=False)
        time.sleep(seconds)
        self.llm.llm_engine.abort_request([name], internal=True)

    def forget_device(self) -> None:
        """Empty vLLM's own prefix cache, once saves have let go of their blocks."""
        wait_until(self.llm.reset_prefix_cache, "vLLM's prefix cache to be free")

    def poison_device(self) -> None:
        """Empty vLLM's own prefix cache and overwrite every block."""
        self.forget_device()
        self.llm.collective_rpc(matrix_worker.poison)

    def device_pages(self) -> set[str]:
        """Digests of all blocks of the device cache, each over all layers and heads. For an engine of one rank."""
        (digests,) = self.device_pages_by_rank()
        return digests

    def device_pages_by_rank(self) -> list[set[str]]:
        """Digests of all blocks of each rank's device cache, each over the layers and heads that it holds."""
        return [set(digests) for digests in self.llm.collective_rpc(_block_digests)]

    def pages(self, num_pages: int, folder: Path) -> Pages:
        """The first pages of the request that came last, of the whole model, from all ranks; `folder` is scratch."""
        return assemble(self.pieces(num_pages, folder))

    def pieces(self, num_pages: int, folder: Path) -> list[Piece]:
        """What each rank has of these pages; the files are overwritten by the next call with the same `folder`."""
        return self.llm.collective_rpc(matrix_worker.dump, args=(num_pages, str(folder / "pages")))

    def metric(self, name: str, **labels: str) -> float:
        """The engine's own metric, summed over what matches `labels`.

        vLLM keeps one registry a process: with several engines it is the one that was started last that speaks.
        """
        found = [metric for metric in self.llm.get_metrics() if metric.name == f"vllm:hicache_{name}"]
        matching = [metric for metric in found if labels.items() <= metric.labels.items()]
        return sum(metric.value for metric in matching)

    def settle(self) -> None:
        """Wait until every save and flush has been acknowledged."""
        wait_until(self._settled, "saves and flushes to end")

    def _settled(self) -> bool:
        self.ask(range(900, 905), max_tokens=2)
        return self.metric("open_operations") == 0


@contextmanager
def engine(
    store: str,
    model: Path | None = None,
    cut: Cut | None = None,
    load_format: str = "auto",
    engine_options: Mapping[str, object] | None = None,
    **settings: object,
) -> Iterator[Engine]:
    """An engine with the connector on `store`; `settings` go into the connector's own configuration.

    Unless they name a grid, an object holds a whole page: `stored_pages` stands on it. `engine_options` are vLLM's own,
    beside those of the cut. A model without a tokenizer is asked by token ids all the same.
    """
    from vllm import LLM

    transfer = {
        "kv_connector": "HiCacheConnector",
        "kv_connector_module_path": "vllm_hicache.connectors",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": store, "host_memory": "512MiB", "grid": "1x1", **settings},
    }
    model = model or model_directory()
    cut = cut or Cut()
    options: Any = {"max_model_len": 4096, "load_format": load_format, **cut.options, **(engine_options or {})}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cut.environment(os.sched_getaffinity(0)).items():
            patch.setenv(name, value)
        llm = LLM(
            model=str(model),
            served_model_name="smollm2",
            skip_tokenizer_init=not (model / "tokenizer.json").exists(),
            disable_log_stats=False,
            kv_transfer_config=transfer,
            seed=0,
            **options,
        )
    try:
        yield Engine(llm)
    finally:
        end_of(llm.llm_engine.engine_core)


def end_of(client: Any) -> None:
    """Shut an engine down, and its client's context with it, which vLLM leaves to the garbage collector."""
    client.shutdown()
    client.output_queue_thread.join(10)
    client.ctx.destroy(linger=0)


def prompt_of(num_tokens: int, seed: int, vocabulary: int = 40000) -> list[int]:
    """Random token ids: a prompt that shares nothing with another seed's."""
    source = random.Random(seed)
    return [source.randrange(1000, vocabulary) for _ in range(num_tokens)]


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Poll a condition; fails by name when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds} s for {what}")
        time.sleep(0.02)


def check_slabs(computed: Pages, restored: Pages, num_slabs: int) -> None:
    """Each slab is there, has the bytes that were computed, and differs from every other."""
    found = compare(computed.slabs, restored.slabs)
    assert found.num_slabs == num_slabs
    assert found.first_unequal is None
    assert len(np.unique(restored.slabs.reshape(num_slabs, -1), axis=0)) == num_slabs


def object_names(store: FileStore) -> set[ObjectName]:
    """Names of all pages' objects."""
    return {info.name for info in store.list("") if not info.name.endswith(MANIFEST_PART)}


def stored_pages(store: FileStore) -> dict[str, ObjectName]:
    """Digest of every stored page's payload, in the order [head][layer], with its object's name."""
    found = {}
    for info in store.list(""):
        content = bytearray(info.size_bytes)
        store.read(info.name, [memoryview(content)])
        header = Header.parse(memoryview(content))
        if isinstance(header, Header):
            found[hashlib.sha256(content[-header.payload_bytes :]).hexdigest()] = info.name
    return found


def flip_last_byte(store: FileStore, name: ObjectName) -> None:
    """Damage one stored object."""
    size = next(info.size_bytes for info in store.list(name))
    content = bytearray(size)
    store.read(name, [memoryview(content)])
    content[-1] ^= 1
    store.delete(name)
    store.write(name, [memoryview(content)])


def perturbed_copy(directory: Path) -> Path:
    """The prepared model with one weight tensor changed."""
    from safetensors.torch import load_file, save_file

    copy = directory / "perturbed"
    shutil.copytree(model_directory(), copy)
    file = copy / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in sorted(weights) if "mlp" in name)
    weights[name] *= 1.5
    save_file(weights, file, metadata={"format": "pt"})
    return copy


def _block_digests(worker: Worker) -> list[str]:
    layers = [caches for _, caches in matrix_worker.held_layers(worker)]
    digests = []
    for block in range(layers[0].shape[0]):
        parts = [layer[block, head].tobytes() for head in range(layers[0].shape[1]) for layer in layers]
        digests.append(hashlib.sha256(b"".join(parts)).hexdigest())
    return digests


def _answer(output: RequestOutput) -> Answer:
    chosen = output.outputs[0]
    steps = zip(chosen.logprobs or [], chosen.token_ids, strict=True)
    logprobs = [step[token].logprob for step, token in steps]
    return Answer(tuple(chosen.token_ids), tuple(logprobs), output.num_cached_tokens or 0)
