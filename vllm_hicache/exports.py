"""Prompts that this engine computes for others: which of their pages may be read, and until when.

Owned by the scheduler half; scheduler thread only. Pages are exported as they come to host memory, while the rest is
still computed. The tree keeps them under a lease until the other engine has acknowledged the prompt, or its time is
over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_hicache.metrics import Metrics
from vllm_hicache.names import OpId
from vllm_hicache.operations import Operations
from vllm_hicache.tracking import Handoff

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Export:
    """One prompt.

    Attributes:
        num_exported: its leading pages that may be read.
        until_s: when its time is over, on the monotonic clock; `None` while it is computed.
        is_complete: whether nothing is added any more.
    """

    handoff: Handoff
    ops: list[OpId] = field(default_factory=list)
    num_exported: int = 0
    until_s: float | None = None
    is_complete: bool = False


class Exports:
    """See the module.

    Args:
        lease_s: how long pages wait for their reader once the prompt has ended, seconds.
    """

    def __init__(self, operations: Operations, lease_s: float, metrics: Metrics) -> None:
        self._operations = operations
        self._lease_s = lease_s
        self._metrics = metrics
        self._open: dict[str, _Export] = {}
        self._num_commits = 0
        self._has_new = False

    @property
    def has_pending(self) -> bool:
        """Whether pages of a prompt that has ended are still to be exported."""
        return any(export.until_s is not None and not export.is_complete for export in self._open.values())

    def begin(self, handoff: Handoff) -> None:
        """A prompt is to be computed for another engine. One of the same name is over."""
        self._end(handoff.request, "expired")
        self._open[handoff.request] = _Export(handoff)
        self._has_new = True

    def finished(self, request: str, now_s: float, is_computed: bool) -> None:
        """The prompt's request has ended; where it was not computed, nobody will come."""
        export = self._open.get(request)
        if export is None:
            return
        export.until_s = now_s + self._lease_s
        if not is_computed:
            self._end(request, "aborted")

    def acknowledged(self, requests: Iterable[str]) -> None:
        """Other engines have read what they need of these."""
        for request in requests:
            self._end(request, "acknowledged")

    def reset(self) -> None:
        """Nothing of what is known so far may be read any more."""
        for request in list(self._open):
            self._end(request, "aborted")

    def tend(self, now_s: float) -> None:
        """Export what has come to host memory since the last call, and end what nobody came for."""
        for request in [name for name, it in self._open.items() if it.until_s is not None and it.until_s < now_s]:
            logger.warning("Nobody came for the pages of request %s within %.0f s", request, self._lease_s)
            self._end(request, "expired")
        if self._num_commits == self._operations.num_commits and not self._has_new and not self.has_pending:
            return
        self._num_commits, self._has_new = self._operations.num_commits, False
        for export in self._open.values():
            if not export.is_complete:
                self._extend(export)

    def _extend(self, export: _Export) -> None:
        handoff = export.handoff
        is_last = export.until_s is not None and not any(map(self._operations.is_moving, handoff.keys))
        op, stop = self._operations.export(handoff.keys, handoff.plain, export.num_exported, is_last)
        export.num_exported = stop
        export.is_complete = is_last
        if op is not None:
            export.ops.append(op)

    def _end(self, request: str, outcome: str) -> None:
        export = self._open.pop(request, None)
        if export is None:
            return
        self._metrics.count("handoffs", outcome)
        for op in export.ops:
            self._operations.cancel(op)
