"""How an engine is cut over ranks, and what vLLM on a CPU needs to be started so."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

PAGE_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Cut:
    """Ranks of an engine: `tensor` share each layer's heads, `pipeline` share the layers.

    Each `context` neighbouring tensor ranks, which then hold the same heads, share the pages of a request.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @property
    def name(self) -> str:
        """As in `TP2`, `PP2`, `TP2 PP2`, `TP2 CP2`; one rank is `TP1`."""
        sizes = {"TP": self.tensor, "PP": self.pipeline, "CP": self.context}
        return " ".join(f"{kind}{size}" for kind, size in sizes.items() if size > 1) or "TP1"

    @property
    def num_ranks(self) -> int:
        """Worker processes: those that share pages are tensor ranks."""
        return self.tensor * self.pipeline

    @property
    def options(self) -> dict[str, int | bool]:
        """Arguments of `vllm.LLM`. Stages of a pipeline must be compiled on a CPU: without, vLLM 0.32 refuses them."""
        options: dict[str, int | bool] = {
            "tensor_parallel_size": self.tensor,
            "pipeline_parallel_size": self.pipeline,
            "enforce_eager": self.pipeline == 1,
        }
        if self.context > 1:
            options["decode_context_parallel_size"] = self.context
            options["cp_kv_cache_interleave_size"] = PAGE_TOKENS
        return options

    def environment(self, cpus: Collection[int]) -> dict[str, str]:
        """Gives each rank cores of its own; empty for one rank, for which vLLM itself does well.

        Raises:
            ValueError: fewer cores than ranks.
        """
        if self.num_ranks == 1:
            return {}
        share = len(cpus) // self.num_ranks
        if not share:
            raise ValueError(
                f"{self.name} has {self.num_ranks} ranks for {len(cpus)} cores: run it where each rank has a core"
            )
        ordered = [str(cpu) for cpu in sorted(cpus)]
        shares = [ordered[rank * share : (rank + 1) * share] for rank in range(self.num_ranks)]
        return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(",".join, shares))}
