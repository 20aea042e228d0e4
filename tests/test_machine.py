"""What is read of the machine: CPUs near the ones a process is pinned to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_hicache.machine import neighbouring_cpus, run_on

PINNED = """
import os, threading
from vllm_hicache.machine import neighbouring_cpus, run_on
first = min(os.sched_getaffinity(0))
os.sched_setaffinity(0, {first})
seen = []
def work():
    seen.append(os.sched_getaffinity(0)); run_on(neighbouring_cpus()); seen.append(os.sched_getaffinity(0))
thread = threading.Thread(target=work); thread.start(); thread.join()
print([sorted(cpus) for cpus in seen], sorted(os.sched_getaffinity(0)))
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    for number, cpus in enumerate(("0-1\n", "2-3,6\n")):
        node = tmp_path / f"sys/devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(cpus)
    return tmp_path


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_thread_of_a_pinned_process_gets_the_cpus_its_parent_has() -> None:
    printed = subprocess.run([sys.executable, "-c", PINNED], capture_output=True, text=True, check=True).stdout
    everywhere = sorted(os.sched_getaffinity(0))
    assert printed.strip() == f"{[everywhere[:1], everywhere]} {everywhere[:1]}"


@pytest.mark.parametrize(
    ("own", "near"), [({1}, {0, 1}), ({3}, {2, 3, 6}), ({1, 2}, {0, 1, 2, 3, 6}), ({9}, set(range(10)))]
)
def test_they_are_those_of_the_same_memory_node(
    own: set[int], near: set[int], nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: own if process == 0 else set(range(10)))
    assert neighbouring_cpus(nodes) == near


def test_cpus_that_do_not_exist_are_no_error() -> None:
    before = os.sched_getaffinity(0)
    run_on({100_000})
    assert os.sched_getaffinity(0) == before
