"""Quantities as people read them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.units import eta_s, format_bytes, format_duration, format_usd, utc_time


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (512, "512 B"), (999, "999 B"), (1000, "1 kB"), (17_123_456_789, "17.1 GB"),
        (1_029_173_256_720, "1.03 TB"), (999_600_000_000, "1 TB"), (5_123_000_000_000_000, "5123 TB"),
        (-1500, "-1.5 kB"),
    ],
)  # fmt: skip
def test_bytes_have_three_digits(count, text):
    assert format_bytes(count) == text


@given(st.integers(0, 10**18))
def test_bytes_never_show_an_exponent_and_are_right_to_half_a_percent(count):
    number, unit = format_bytes(count).split()
    assert "e" not in number
    factor = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]
    assert float(number) * factor == pytest.approx(count, rel=0.0051)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"), (0.85, "850 ms"), (0.9999, "1.0 s"), (12.34, "12.3 s"), (59.99, "1 min 00 s"), (60, "1 min 00 s"),
        (245, "4 min 05 s"), (3599.9, "1 h 00 min"), (3600, "1 h 00 min"), (7380, "2 h 03 min"),
        (math.inf, "unknown"), (math.nan, "unknown"),
    ],
)  # fmt: skip
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_dollars_have_cents():
    assert format_usd(1234.5) == "$1,234.50"


@pytest.mark.parametrize(
    ("done", "total", "elapsed", "left"),
    [(0, 10, 5, math.inf), (5, 10, 5, 5), (10, 10, 5, 0), (11, 10, 5, 0), (0, 0, 0, 0), (5, 10, 0, math.inf)],
)
def test_time_left(done, total, elapsed, left):
    assert eta_s(done, total, elapsed) == left


def test_times_are_utc_and_say_so():
    assert utc_time(1796024439.7) == "2026-11-30 07:40:39Z"
