"""Quantities as people read them. Decimal units: 1 TB of weights is 10^12 bytes."""

from __future__ import annotations

import math
from datetime import UTC, datetime


def format_bytes(count_bytes: float) -> str:
    """Return bytes in decimal units with three significant digits: `1.03 TB`, `17.1 GB`, `512 B`."""
    value = float(count_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        # 999.5 would be shown as 1e+03.
        if abs(value) < 999.5 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 999.5 else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def format_duration(seconds: float) -> str:
    """Return a duration as `850 ms`, `12.3 s`, `4 min 05 s` or `2 h 03 min`."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_usd(usd: float) -> str:
    """Return an amount of US dollars with cents."""
    return f"${usd:,.2f}"


def utc_time(at: float) -> str:
    """Return seconds since the epoch as `2026-11-30 07:41:30Z`."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def eta_s(done: float, total: float, elapsed_s: float) -> float:
    """Return the seconds left at the average rate so far; infinity before anything is done."""
    if done >= total:
        return 0.0
    return (total - done) * elapsed_s / done if done > 0 and elapsed_s > 0 else math.inf


def progress_line(step: str, done: float, total: float, unit: str, elapsed_s: float, moved: float, note: str) -> str:
    """Return one line of progress: how much of how much, the rate and the time left."""
    rate = moved / elapsed_s if elapsed_s > 0 else 0.0
    if unit == "bytes":
        amount = f"{format_bytes(done)} of {format_bytes(total)}"
        speed = f"{format_bytes(rate)}/s"
    else:
        amount, speed = f"{done:.0f} of {total:.0f} {unit}", f"{rate:.1f} {unit}/s"
    left = eta_s(moved, total - (done - moved), elapsed_s)
    parts = [f"{step}: {amount}"]
    if 0 < done < total and rate > 0:
        parts += [speed, f"ETA {format_duration(left)}"]
    return ", ".join([*parts, *([note] if note else [])])
