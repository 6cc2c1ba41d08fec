"""Progress of a flow run as people see it: the run's log (which `k2ctl` follows) and Prefect artifacts."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

from tasks.core.units import eta_s, format_bytes, format_duration

_EVERY_S = 1.0


class RunProgress:
    """Implements ports.Progress on the present flow or task run."""

    def __init__(self) -> None:
        self._shown: dict[str, float] = {}
        self._began: dict[str, tuple[float, float]] = {}
        self._last: dict[str, str] = {}

    def say(self, message: str) -> None:
        """Log one line."""
        _logger().info(message)

    def show(self, step: str, done: float, total: float, unit: str, note: str = "") -> None:
        """Log how far a step is, at most once a second and always at its end."""
        now = time.monotonic()
        began, first = self._began.setdefault(step, (now, done))
        if done < total and now - self._shown.get(step, -_EVERY_S) < _EVERY_S:
            return
        self._shown[step] = now
        line = progress_line(step, done, total, unit, now - began, done - first, note)
        if line != self._last.get(step):
            self._last[step] = line
            self.say(line)

    def table(self, key: str, rows: list[dict[str, Any]], title: str) -> None:
        """Publish a table as an artifact under a stable key."""
        create_table_artifact(table=rows, key=f"k2-{key}", description=title)

    def document(self, key: str, markdown: str) -> None:
        """Publish a markdown document as an artifact under a stable key."""
        create_markdown_artifact(markdown=markdown, key=f"k2-{key}")


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


def _logger() -> logging.Logger | logging.LoggerAdapter[Any]:
    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger("k2")


class TerminalProgress:
    """Implements ports.Progress on standard error, for commands that run without a flow."""

    def say(self, message: str) -> None:
        """Write one line."""
        print(message, file=sys.stderr, flush=True)

    def show(self, step: str, done: float, total: float, unit: str, note: str = "") -> None:
        """Write how far a step is when it is done; commands that read are short."""
        if done >= total:
            self.say(progress_line(step, done, total, unit, 0.0, 0.0, note))

    def table(self, key: str, rows: list[dict[str, Any]], title: str) -> None:
        """Tables are for flow runs; nothing is shown."""

    def document(self, key: str, markdown: str) -> None:
        """Documents are for flow runs; nothing is shown."""
