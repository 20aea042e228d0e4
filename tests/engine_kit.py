"""Real vLLM engines for tests: SmolLM2 with and without the connector, and looks into a worker's memory.

Functions that run inside the worker go there by vLLM's `collective_rpc`, which must be allowed to carry code.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from prepare_model import default_cache, prepare_model

from vllm_hicache.names import ObjectName
from vllm_hicache.storage.base import MANIFEST_PART
from vllm_hicache.storage.envelope import Header
from vllm_hicache.storage.file import FileStore

if TYPE_CHECKING:
    from vllm import LLM

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"

PAGE = 128
POISON = 0xA5

Bytes = npt.NDArray[np.uint8]


def model_directory() -> Path:
    """The prepared model."""
    return prepare_model(default_cache())


@dataclass(frozen=True)
class Answer:
    """What an engine made of a prompt: tokens, their logprobs, and how many prompt tokens it did not compute."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int


class Engine:
    """One engine and what tests ask of it."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def ask(self, prompt: Sequence[int], salt: str | None = None, max_tokens: int = 4) -> Answer:
        """Generate greedily from token ids."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=1, ignore_eos=True)
        request: dict[str, object] = {"prompt_token_ids": list(prompt)}
        if salt is not None:
            request["cache_salt"] = salt
        output = self.llm.generate([request], params, use_tqdm=False)[0]  # type: ignore[arg-type, list-item]
        chosen = output.outputs[0]
        logprobs = [step[token].logprob for step, token in zip(chosen.logprobs, chosen.token_ids, strict=True)]
        return Answer(tuple(chosen.token_ids), tuple(logprobs), output.num_cached_tokens or 0)

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
        self.llm.collective_rpc(_poison)

    def device_pages(self) -> set[str]:
        """Digests of all blocks of the device cache, each over all layers and heads."""
        return set(self.llm.collective_rpc(_block_digests)[0])

    def metric(self, name: str, **labels: str) -> float:
        """The engine's own metric, summed over what matches `labels`."""
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
def engine(store: str, model: Path | None = None, **settings: object) -> Iterator[Engine]:
    """An engine with the connector on `store`; `settings` go into the connector's own configuration."""
    from vllm import LLM

    transfer = {
        "kv_connector": "HiCacheConnector",
        "kv_connector_module_path": "vllm_hicache.connectors",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": store, "host_memory": "512MiB", **settings},
    }
    llm = LLM(
        model=str(model or model_directory()),
        served_model_name="smollm2",
        enforce_eager=True,
        max_model_len=4096,
        disable_log_stats=False,
        kv_transfer_config=transfer,
        seed=0,
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


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """Random token ids: a prompt that shares nothing with another seed's."""
    source = random.Random(seed)
    return [source.randrange(1000, 40000) for _ in range(num_tokens)]


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Poll a condition; fails by name when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds} s for {what}")
        time.sleep(0.02)


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


def _layers(worker: Any) -> list[Bytes]:
    import torch

    context = worker.vllm_config.compilation_config.static_forward_context
    names = sorted(context, key=lambda name: int(name.split(".")[2]))
    return [context[name].kv_cache.view(torch.uint8).numpy() for name in names]


def _poison(worker: Any) -> None:
    for layer in _layers(worker):
        layer.fill(POISON)


def _block_digests(worker: Any) -> list[str]:
    layers = _layers(worker)
    digests = []
    for block in range(layers[0].shape[0]):
        parts = [layer[block, head].tobytes() for head in range(layers[0].shape[1]) for layer in layers]
        digests.append(hashlib.sha256(b"".join(parts)).hexdigest())
    return digests
