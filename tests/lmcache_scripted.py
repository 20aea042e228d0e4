"""An L2 adapter that misbehaves on demand, loaded by LMCache's own `plugin` adapter.

It keeps its values in a `Medium` that the test holds too, and ends each task while it is submitted, unless told
to hold loads back.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from vllm_hicache.storage.lmcache_config import quiet_import

with quiet_import():
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.platform import create_event_notifier


@dataclass
class Medium:
    """Values by key, and the faults that are on."""

    label: str
    values: dict[ObjectKey, bytes] = field(default_factory=dict)
    num_adapters: int = 0
    num_loads: int = 0
    num_open: int = 0
    finds_nothing: bool = False
    stores_nothing: bool = False
    cannot_delete: bool = False
    holds_loads: bool = False
    loads_short_by: int = 0
    """Reported as loaded, with so many bytes missing at the end."""
    overrun_bytes: int = 0
    """Loaded behind the end of the buffer."""
    held: list[tuple[Callable[[], None], Callable[[], None]]] = field(default_factory=list)
    """Loads held back: how to fill the buffer, and how to say so."""

    def release(self) -> None:
        """Fill all that was held back, the oldest last, and then say so."""
        held, self.held = self.held, []
        for fill, _ in reversed(held):
            fill()
        for _, tell in held:
            tell()


MEDIA: dict[str, Medium] = {}
"""Media that tests hold, by the name that the adapter is given."""


def settings(label: str) -> dict[str, str]:
    """Of LMCache's `plugin` adapter, to give this one the medium `label`."""
    return {
        "module_path": __name__,
        "class_name": ScriptedAdapter.__name__,
        "adapter_params": json.dumps({"medium": label}),
    }


class ScriptedAdapter(L2AdapterInterface):
    def __init__(self, parameters: dict[str, str]) -> None:
        super().__init__()
        self._medium = medium = MEDIA[parameters["medium"]]
        medium.num_adapters += 1
        medium.num_open += 1
        self._numbers = count()
        self._notifiers = [create_event_notifier() for _ in range(3)]
        self._stores: dict[int, L2StoreResult] = {}
        self._bitmaps: dict[int, Bitmap] = {}

    def get_store_event_fd(self) -> int:
        return self._notifiers[0].fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._notifiers[1].fileno()

    def get_load_event_fd(self) -> int:
        return self._notifiers[2].fileno()

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        task = next(self._numbers)
        if not self._medium.stores_nothing:
            for key, value in zip(keys, objects, strict=True):
                self._medium.values[key] = bytes(value.byte_array)
        self._stores[task] = L2StoreResult(not self._medium.stores_nothing, 1)
        self._notifiers[0].notify()
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        done, self._stores = self._stores, {}
        return done

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], group_layout_descs: dict[int, Any]) -> int:
        found = [key in self._medium.values and not self._medium.finds_nothing for key in keys]
        return self._end(1, next(self._numbers), found)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._bitmaps.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        pass

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        task, medium, (key,), (target,) = next(self._numbers), self._medium, keys, objects
        # Like LMCache's S3 adapter: of the buffer no more is kept than its address.
        address, size_bytes = target.data_ptr, target.get_size()
        medium.num_loads += 1

        value = medium.values.get(key, b"")[:size_bytes]

        def fill() -> None:
            cut = len(value) - medium.loads_short_by
            ctypes.memmove(address, value[:cut] + b"\xee" * medium.overrun_bytes, cut + medium.overrun_bytes)

        medium.held.append((fill, lambda: self._end(2, task, [bool(value)])))
        if not medium.holds_loads:
            medium.release()
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._bitmaps.pop(task_id, None)

    def delete(self, keys: list[ObjectKey]) -> None:
        for key in keys:
            if not self._medium.cannot_delete:
                self._medium.values.pop(key, None)

    def close(self) -> None:
        self._medium.num_open -= 1
        for notifier in self._notifiers:
            notifier.close()

    def _end(self, notifier: int, task: int, outcome: Sequence[bool]) -> int:
        bitmap = Bitmap(len(outcome))
        for index, is_set in enumerate(outcome):
            if is_set:
                bitmap.set(index)
        self._bitmaps[task] = bitmap
        self._notifiers[notifier].notify()
        return task
