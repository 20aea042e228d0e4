"""What tests of the worker half give it to do: three pages, saved, flushed and loaded into other blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from transfer_fixtures import NAMESPACE, PATIENCE_S, Layout, Tensors, move, page_bytes

from vllm_hicache.names import BlockId, OpId, Phase, RequestId
from vllm_hicache.namespace import Spaces
from vllm_hicache.plan import FlushOp, LoadOp, OpReport, Plan, SaveOp, StepResult
from vllm_hicache.worker import WorkerHalf

LAYOUT = Layout(layers=3, heads=2, draft_layers=2, shared_draft=True)
PAGE_BYTES = 2 * 2 * 5 * LAYOUT.slab_bytes
SOURCE, TARGET = [[0, 1], [2, 3], [4, 5]], [[10, 11], [12, 13], [14, 15]]
MakeHalf = Callable[..., WorkerHalf]


def collected(half: WorkerHalf, num_settled: int) -> StepResult:
    """All that a half tells until this many operations have settled; of its reports the last ones, by operation."""
    deadline, total = time.monotonic() + PATIENCE_S, StepResult()
    while len(total.reports) < num_settled:
        assert time.monotonic() < deadline, total
        new = half.collect(Plan())
        settled = [report for report in new.reports if report.phase == Phase.SETTLED]
        reports = tuple(sorted([*total.reports, *settled], key=lambda report: report.op))
        received, invalid = total.received | new.received, total.invalid_blocks | new.invalid_blocks
        total = StepResult(reports, received=received, invalid_blocks=invalid)
    return total


def ended(reports: Sequence[OpReport], request: str | None = None, invalid: Sequence[int] = ()) -> StepResult:
    """What `collected` gives."""
    received = frozenset([RequestId(request)] if request else [])
    return StepResult(tuple(reports), received=received, invalid_blocks=frozenset(map(BlockId, invalid)))


def done(op: int, pages: int, rank: int = 5) -> OpReport:
    return OpReport(rank, OpId(op), pages, pages)


def saves(op: int = 1) -> tuple[SaveOp, ...]:
    return (SaveOp(OpId(op), tuple(move(n, n, blocks) for n, blocks in enumerate(SOURCE))),)


def loads(op: int, from_store: bool, first_slot: int, namespace: bytes = NAMESPACE) -> tuple[LoadOp, ...]:
    pages = tuple(move(n, first_slot + n, blocks, 0, from_store) for n, blocks in enumerate(TARGET))
    return (LoadOp(OpId(op), Spaces(namespace), RequestId("r"), pages),)


def flushes(op: int) -> tuple[FlushOp, ...]:
    return (FlushOp(OpId(op), Spaces(NAMESPACE), tuple(move(n, n) for n in range(3))),)


def step(half: WorkerHalf, plan: Plan) -> None:
    half.start_loads(plan)
    half.commit_saves(plan)


def pages(tensors: Tensors, blocks: list[list[int]]) -> list[bytes]:
    """The content of pages, of which `tensors` are all or one rank's part."""
    return [page_bytes(tensors, page) for page in blocks]
