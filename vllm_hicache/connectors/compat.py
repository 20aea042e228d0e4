"""Refuses a vLLM that is not served, when any module of `connectors` is imported.

Another vLLM is then named in one clear sentence instead of failing somewhere inside.
"""

from __future__ import annotations

import vllm

from vllm_hicache.support import SUPPORTED as SUPPORTED
from vllm_hicache.support import check_version as check_version
from vllm_hicache.support import version_tuple as version_tuple

check_version(vllm.__version__)
