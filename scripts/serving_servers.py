"""vLLM's own HTTP servers and `vllm-router`, each a process with a port, a log and an end.

Owner: whoever enters the `with` block, from one thread; requests may come from several. Several servers start side by
side: enter them all, then wait for each.

    with Server(model, folder, transfer=hicache("kv_both")) as one, Server(model, folder) as other:
        for server in (one, other):
            server.wait_healthy()
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from engine_job import transfer_config
from engine_process import ENVIRONMENT, EngineError
from redis_server import HOST, free_port
from serving_process import HttpProcess, Streamed

MAX_MODEL_LEN = 8192

Role = Literal["kv_producer", "kv_consumer", "kv_both"]


def hicache(role: Role = "kv_both", **extra: object) -> dict[str, object]:
    """vLLM's `kv_transfer_config` for this package; `extra` is its `kv_connector_extra_config`.

    A producer is reached on this host, unless `extra` says where else.
    """
    reached = {"peer_host": HOST} if role == "kv_producer" else {}
    return {**transfer_config({**reached, **extra}), "kv_role": role}


def nixl(role: Role = "kv_both") -> dict[str, object]:
    """vLLM's `kv_transfer_config` for its own `NixlConnector`, between hosts' memories."""
    return {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}


ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""Variables of a server that computes with one thread on whichever core is free.

NIXL has a thread of its own in each worker that never rests. Where vLLM binds the worker to one core, that thread is
bound to the same, and what computes has less than half of it.
"""

FOR_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""The `kv_transfer_params` with which a proxy asks prefill; its answer's go to decode."""


def cores_of(num_processes: int) -> list[int | None]:
    """A core for each process where there are as many, so that they do not slow each other; else none is bound."""
    cores = sorted(os.sched_getaffinity(0))
    if num_processes == 1 or num_processes > len(cores):
        return [None] * num_processes
    return list(cores[:num_processes])


class Server(HttpProcess):
    """One vLLM engine behind its OpenAI-like server.

    Args:
        model: directory of the model; it is served under the directory's name, and that is `model` in requests.
        folder: for its log, `NAME.log`.
        transfer: vLLM's `kv_transfer_config`, see `hicache` and `nixl`; `None` for plain vLLM.
        options: further arguments of the server, such as `--num-gpu-blocks-override`.
        port: to answer on; 0 for a free one.
        core: the one core that it may use; `None` for all.
        environment: variables beside those of every engine.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        name: str = "server",
        *,
        transfer: Mapping[str, object] | None = None,
        options: Sequence[str] = (),
        port: int = 0,
        core: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        port = port or free_port()
        base = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        shape = ["--served-model-name", model.name, "--host", HOST, "--port", str(port), "--dtype", "bfloat16"]
        sizes = ["--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN), "--disable-uvicorn-access-log"]
        connector = [] if transfer is None else ["--kv-transfer-config", json.dumps(transfer)]
        variables = {**ENVIRONMENT, **os.environ, **_side_channel(transfer), **(environment or {})}
        self.name = name
        self.model = model.name
        super().__init__([*base, *shape, *sizes, *connector, *options], port, folder / f"{name}.log", variables, core)

    def complete(self, prompt: Sequence[int], max_tokens: int, **extra: object) -> dict[str, Any]:
        return super().complete(prompt, max_tokens, model=self.model, **extra)

    def stream(self, prompt: Sequence[int], max_tokens: int, **extra: object) -> Streamed:
        return super().stream(prompt, max_tokens, model=self.model, **extra)


class Router(HttpProcess):
    """`vllm-router` before servers that are healthy already; it asks each whether it is.

    Args:
        workers: servers that each do everything; or else `prefill` and `decode`, which hand requests over.
        options: further arguments, such as `--policy`, `kv_aware`.
    """

    def __init__(
        self,
        folder: Path,
        name: str = "router",
        *,
        workers: Sequence[str] = (),
        prefill: Sequence[str] = (),
        decode: Sequence[str] = (),
        options: Sequence[str] = (),
        port: int = 0,
    ) -> None:
        port = port or free_port()
        program = Path(sys.executable).with_name("vllm-router")
        if not program.exists():
            raise EngineError(f"there is no {program}: install the extra, pip install 'vllm-hicache[serving]'")
        if prefill or decode:
            pairs = [("--prefill", url) for url in prefill] + [("--decode", url) for url in decode]
            behind = ["--vllm-pd-disaggregation", "--kv-connector", "nixl", *(word for pair in pairs for word in pair)]
        else:
            behind = ["--worker-urls", *workers]
        # Its own metrics would lie on a fixed port otherwise.
        ports = ["--host", HOST, "--port", str(port), "--prometheus-port", str(free_port()), "--prometheus-host", HOST]
        self.name = name
        super().__init__([str(program), *behind, *ports, *options], port, folder / f"{name}.log", {**os.environ})


def _side_channel(transfer: Mapping[str, object] | None) -> dict[str, str]:
    """Where NIXL's servers exchange their addresses: a port for each server."""
    if transfer is None or transfer["kv_connector"] != "NixlConnector":
        return {}
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
