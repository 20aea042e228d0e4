"""Every error this package raises, in one tree.

    HiCacheError
    ├── ConfigError (also ValueError)   refused at start: what, the numbers, the way out
    │   └── UnsupportedEngineError      this vLLM, this model or this platform is not served
    ├── StoreError                      a store call failed: the caller turns it into a miss
    │   ├── ObjectMissing               the object is not there
    │   ├── StoreCorrupt                what came back cannot be what was written
    │   ├── StoreTimeout                the call's deadline passed
    │   └── StoreUnavailable            the store cannot be reached or is full
    │       └── StoreDenied             the store answers, and refuses us this
    ├── CollectiveError                 ranks of a group did not come together in time
    ├── RanksDisagree                   ranks differ, and the operator asked to stop then
    └── InvariantError                  a conservation law is broken: a bug of ours, always a stop

Which border turns which error into a miss and which into a stop is the table in `docs/design.md`.
"""

from __future__ import annotations


class HiCacheError(Exception):
    """Root of all errors of this package."""


class ConfigError(HiCacheError, ValueError):
    """A setting cannot be honoured. The message says what, the numbers, and the way out."""


class UnsupportedEngineError(ConfigError):
    """The engine, the model or the platform is outside what this package serves."""


class StoreError(HiCacheError):
    """A call to a store failed. Callers outside `storage/` count it and treat it as a miss."""


class ObjectMissing(StoreError):
    """The object does not exist."""


class StoreCorrupt(StoreError):
    """What came back cannot be what was written under this name. The object is of no use to anybody."""


class StoreTimeout(StoreError):
    """A store call passed its deadline."""


class StoreUnavailable(StoreError):
    """The store cannot be reached, is full, or has had its circuit opened."""


class StoreDenied(StoreUnavailable):
    """The store answers and refuses our credentials, or this call to them. Trying again does not help."""


class CollectiveError(HiCacheError):
    """An all-gather among ranks failed or passed its deadline: a miss for a load, a stop in the forward pass."""


class RanksDisagree(HiCacheError):
    """The rank checker found a difference, and `consensus` is `enforce`. The message names it."""


class InvariantError(HiCacheError):
    """A conservation law does not hold. The message carries all of its numbers."""
