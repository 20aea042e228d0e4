"""The versions of everything that decides what is measured."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of Python, and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
