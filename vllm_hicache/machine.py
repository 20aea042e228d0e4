"""What the machine has to give: memory, limits on it, and CPUs. Reads files of the operating system; any thread."""

from __future__ import annotations

import os
import re
import resource
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The host's memory, bytes; None where the system does not say or sets no limit.

    `container_bytes` is what the memory cgroup still allows, `huge_pages` one of always, madvise, never.
    """

    available_bytes: int | None
    container_bytes: int | None
    huge_pages: str | None
    locked_bytes: int | None

    @property
    def spare_bytes(self) -> int | None:
        """What a process may still take: the lesser of the machine's memory and the container's limit."""
        known = [number for number in (self.available_bytes, self.container_bytes) if number is not None]
        return min(known, default=None)


def look_at_host(root: Path = Path("/")) -> HostFacts:
    """Read the host's memory from the files that Linux shows below `root`."""
    available = re.search(r"^MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    limit, used = (_text(root / f"sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    choice = re.search(r"\[(\w+)\]", _text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostFacts(
        available_bytes=int(available[1]) * 1024 if available else None,
        container_bytes=max(0, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else None,
        huge_pages=choice[1] if choice else None,
        locked_bytes=None if soft == resource.RLIM_INFINITY else soft,
    )


def neighbouring_cpus(root: Path = Path("/")) -> set[int]:
    """CPUs that background threads of this process should run on.

    vLLM pins a CPU worker's main thread to one core, and threads inherit that: left alone, copies and reads would all
    share the core that computes. Theirs are the cores of the same memory node that the parent process may use.
    """
    own = os.sched_getaffinity(0)
    try:
        allowed = os.sched_getaffinity(os.getppid()) | own
    except OSError:  # the parent has ended
        allowed = own
    nodes = [_cpu_list(_text(file)) for file in root.glob("sys/devices/system/node/node*/cpulist")]
    near = set[int]().union(*(node for node in nodes if node & own))
    return (allowed & near) or allowed


def run_on(cpus: set[int]) -> None:
    """Let the calling thread run on `cpus`; where the system refuses, it stays where it is."""
    with suppress(OSError, ValueError):
        os.sched_setaffinity(0, cpus)


def yield_to_others(nice: int) -> None:
    """Make the calling thread give way to threads of a lower `nice`. On Linux niceness belongs to a thread."""
    if nice:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def _cpu_list(text: str) -> set[int]:
    """Read the kernel's form of a set of CPUs, e.g. `0-3,8`."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {cpu for bounds in ranges for cpu in range(int(bounds[0]), int(bounds[-1]) + 1)}


def _text(path: Path) -> str:
    """A file's text, empty where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
