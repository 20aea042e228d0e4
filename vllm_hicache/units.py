"""Sizes and durations as people write them, to and from numbers.

Lowest layer: imports only `errors`. Pure functions, callable from any thread.
"""

from __future__ import annotations

import re
from decimal import Decimal

from vllm_hicache.errors import ConfigError

_BINARY = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "pib": 1 << 50}
_DECIMAL = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15}
_FACTORS = {"": 1, **_DECIMAL, **_BINARY, **{name[:2]: factor for name, factor in _BINARY.items()}}
_AMBIGUOUS = frozenset("kmgtp")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_NUMBER = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([a-z]{0,3})", re.ASCII)


def parse_bytes(text: str) -> int:
    """Return the bytes that `text` means: `512`, `8GiB`, `8Gi` (binary), `8GB` (decimal), `1.5 TiB`.

    Fractions of a byte are cut off. Raises ConfigError for anything else, and for `8G`, which some
    tools read as 8e9 and others as 8 * 2**30.
    """
    match = _NUMBER.fullmatch(text.strip().lower())
    if match is None:
        raise ConfigError(f"size {text!r} is not a number with a unit: write for example 8GiB, 500MB or 4096")
    number, unit = match.groups()
    if unit in _AMBIGUOUS:
        raise ConfigError(
            f"size {text!r} is ambiguous: write {number}{unit.upper()}iB (times {_FACTORS[unit + 'ib']}) "
            f"or {number}{unit.upper()}B (times {_FACTORS[unit + 'b']})"
        )
    if unit not in _FACTORS:
        raise ConfigError(f"size {text!r} has the unknown unit {unit!r}: use B, KiB, MiB, GiB, KB, MB or GB")
    return int(Decimal(number) * _FACTORS[unit])


def format_bytes(num_bytes: int) -> str:
    """Return `num_bytes` in the largest binary unit that leaves at least 1, with at most two decimals.

    Whole numbers of a unit are exact, so that `parse_bytes(format_bytes(8 << 30)) == 8 << 30`.
    """
    sign, size = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        factor = _BINARY[unit.lower()]
        if size >= factor:
            return f"{sign}{size / factor:.2f}".rstrip("0").rstrip(".") + unit
    return f"{sign}{size}B"


def parse_duration_s(text: str) -> float:
    """Return the seconds that `text` means: `90s`, `15m`, `12h`, `7d`, `2w`. Raises ConfigError."""
    match = _NUMBER.fullmatch(text.strip().lower())
    if match is None or match.group(2) not in _SECONDS:
        raise ConfigError(f"duration {text!r} is not a number with one of the units s, m, h, d, w: write 7d")
    return float(Decimal(match.group(1)) * _SECONDS[match.group(2)])
