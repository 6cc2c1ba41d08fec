"""Progress of a flow run as people see it: the run's log (which `k2ctl` follows) and Prefect artifacts."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

from tasks.core.units import progress_line

_EVERY_S = 1.0
_PUBLISH_S = 5.0
_SILENT_S = 60.0


class RunProgress:
    """Implements ports.Progress on the present flow or task run, as well as that can be done.

    What is shown is a courtesy: an orchestrator that does not answer costs a few seconds a minute, and stops nothing.
    """

    def __init__(self) -> None:
        self._shown: dict[str, float] = {}
        self._began: dict[str, tuple[float, float]] = {}
        self._last: dict[str, str] = {}
        self._silent_until = 0.0
        self._complained = False

    def say(self, message: str) -> None:
        """Log one line."""
        with contextlib.suppress(Exception):
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
        rows = [dict(row) for row in rows]
        self._publish(lambda: create_table_artifact(table=rows, key=f"k2-{key}", description=title))

    def document(self, key: str, markdown: str) -> None:
        """Publish a markdown document as an artifact under a stable key."""
        self._publish(lambda: create_markdown_artifact(markdown=markdown, key=f"k2-{key}"))

    def _publish(self, act: Callable[[], Any]) -> None:
        """Do it in a thread, because a client without an answer waits for minutes, and leave it there if it takes long.

        After a failure nothing is published for a while, so that not every table waits.
        """
        if time.monotonic() < self._silent_until:
            return
        failed: list[str] = ["no answer in time"]

        def run() -> None:
            try:
                act()
                failed.clear()
            except Exception as error:
                failed[:] = [type(error).__name__]

        # The run that an artifact belongs to is found in the context.
        thread = threading.Thread(target=copy_context().run, args=(run,), daemon=True, name="publish")
        thread.start()
        thread.join(_PUBLISH_S)
        if failed:
            self._silent_until = time.monotonic() + _SILENT_S
            if not self._complained:
                self._complained = True
                self.say(f"the orchestrator does not take artifacts ({failed[0]}); the work goes on without")


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
