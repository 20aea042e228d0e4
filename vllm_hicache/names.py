"""The words of this project as types: identities, tiers, roles and outcomes.

Lowest layer: imports nothing of the package. The words are those of `docs/design.md`, section 1.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NewType

PageKey = NewType("PageKey", bytes)
"""32-byte digest that names a page: everything that decides the meaning of its bytes."""

Slot = NewType("Slot", int)
"""Number of a page in the host memory of a group of ranks: it says on which of them the page lies, and where."""

BlockId = NewType("BlockId", int)
"""vLLM's block number on one rank."""

OpId = NewType("OpId", int)
"""Number of a logical operation; one sequence per engine, starting at 1."""

RequestId = NewType("RequestId", str)
"""vLLM's request identifier."""

ObjectName = NewType("ObjectName", str)
"""Name of one object in a store: printable ASCII, `/` separates parts."""

KEY_BYTES = 32


class Tier(StrEnum):
    """Where a page's bytes are held."""

    DEVICE = "device"
    HOST = "host"
    STORE = "store"
    PEER = "peer"


class Role(StrEnum):
    """Which model's layers a chunk belongs to."""

    TARGET = "target"
    DRAFT = "draft"


class Phase(IntEnum):
    """How far an operation has come on a rank, or on all of them; each phase includes the ones before."""

    RUNNING = 0
    RECEIVED = 1
    """The device blocks of a load are no longer written: its request may use or recompute them."""
    SETTLED = 2
    """Nothing touches the operation's slots and blocks any more: they may change hands."""


class MissReason(StrEnum):
    """Why a page that was looked for is not served. Also the label of the miss counter."""

    ABSENT = "absent"
    SHORT = "short"
    LONG = "long"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"
    VERSION = "version"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    ERROR = "error"
    NO_SLOT = "no_slot"
    CANCELLED = "cancelled"
    DISAGREED = "disagreed"
