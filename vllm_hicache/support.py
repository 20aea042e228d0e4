"""Which vLLM versions are served. Pure: `connectors` checks the one it imports, `doctor` the one that is installed."""

from __future__ import annotations

import re

from vllm_hicache.errors import UnsupportedEngineError

SUPPORTED = ((0, 32), (0, 33))


def version_tuple(text: str) -> tuple[int, int]:
    """Major and minor number of a version text such as `0.32.0+cpu`.

    Raises:
        UnsupportedEngineError: the text is no version.
    """
    match = re.match(r"v?(\d+)\.(\d+)", text)
    if match is None:
        raise UnsupportedEngineError(f"vLLM says its version is {text!r}: install a released vLLM 0.32 or 0.33")
    return int(match[1]), int(match[2])


def check_version(text: str) -> None:
    """Refuse a vLLM whose connector interface is not known to be the one served here.

    Raises:
        UnsupportedEngineError: its minor version is not supported.
    """
    if version_tuple(text) not in SUPPORTED:
        known = ", ".join(f"{major}.{minor}.x" for major, minor in SUPPORTED)
        raise UnsupportedEngineError(
            f"vllm-hicache serves vLLM {known}, but vLLM {text} is installed: install one of these, or the "
            "vllm-hicache release that serves yours"
        )


def is_supported(text: str) -> bool:
    """Whether this version of vLLM is served."""
    try:
        check_version(text)
    except UnsupportedEngineError:
        return False
    return True
