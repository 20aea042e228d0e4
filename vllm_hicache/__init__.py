"""vllm-hicache: a hierarchical KV cache for vLLM, in host memory and an object store."""

__version__ = "0.1.0"
