"""Sizes and durations: what people write is read exactly, and nonsense is refused with advice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.errors import ConfigError
from vllm_hicache.units import format_bytes, parse_bytes, parse_duration_s


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("512", 512),
        ("512B", 512),
        ("8GiB", 8 << 30),
        ("8gib", 8 << 30),
        ("8Gi", 8 << 30),
        (" 8 GiB ", 8 << 30),
        ("8GB", 8_000_000_000),
        ("1.5MiB", 3 << 19),
        ("0.1KB", 100),
        ("2TiB", 2 << 40),
        ("1PB", 10**15),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_a_size_is_read_exactly(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "8 G i B", "8XiB", "0x10", "1,5GiB", "inf", "٣", "8GiBs"])
def test_nonsense_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_bytes(text)


def test_a_unit_that_tools_read_differently_is_refused_with_both_readings() -> None:
    with pytest.raises(ConfigError, match=r"8GiB \(times 1073741824\) or 8GB \(times 1000000000\)"):
        parse_bytes("8G")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0B"), (1023, "1023B"), (1024, "1KiB"), (1536, "1.5KiB"), (8 << 30, "8GiB"), (-1024, "-1KiB")],
)
def test_a_size_is_shown_in_its_largest_unit(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(0, 1 << 60))
def test_a_shown_size_reads_back_to_within_its_decimals(num_bytes: int) -> None:
    assert abs(parse_bytes(format_bytes(num_bytes)) - num_bytes) <= max(1, num_bytes // 100)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1.5h", 5400), ("7d", 604800), ("2w", 1209600)])
def test_a_duration_is_read_in_seconds(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "7y", "7 days"])
def test_nonsense_is_no_duration(text: str) -> None:
    with pytest.raises(ConfigError, match="duration"):
        parse_duration_s(text)
