"""Progress of a command that works long, on standard error: a line that changes on a terminal, else one at times."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, TextIO

from tasks.core.units import progress_line

_CLEAR = "\r\x1b[K"
_TERMINAL_EVERY_S, _LINE_EVERY_S = 0.25, 10.0
_SILENT_S = 1.0


class LiveProgress:
    """Implements ports.Progress on standard error, without the orchestrator's libraries. Threads may share it.

    Work that is done within a second shows nothing.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._lock = threading.Lock()
        self._began: dict[str, tuple[float, float]] = {}
        self._next = 0.0
        self._shown = False

    def say(self, message: str) -> None:
        """Write one line."""
        with self._lock:
            self._clear()
            print(message, file=self._stream, flush=True)

    def show(self, step: str, done: float, total: float, unit: str, note: str = "") -> None:
        """Show how far a step is, every now and then; at its end what was shown is taken away or completed."""
        now = time.monotonic()
        with self._lock:
            if step not in self._began:
                self._began[step] = (now, done)
                self._next = now + (_SILENT_S if self._terminal else _LINE_EVERY_S)
            began, first = self._began[step]
            over = done >= total
            if (not over and now < self._next) or (over and not self._shown):
                return
            line = progress_line(step, done, total, unit, now - began, done - first, note)
            self._clear()
            if not self._terminal:
                print(line, file=self._stream, flush=True)
            elif not over:
                self._stream.write(line)
                self._stream.flush()
            self._shown = not over
            self._next = now + (_TERMINAL_EVERY_S if self._terminal else _LINE_EVERY_S)

    def clear(self) -> None:
        """Take away a line that stands on the terminal."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        if self._terminal and self._shown:
            self._stream.write(_CLEAR)
            self._stream.flush()

    def table(self, key: str, rows: list[dict[str, Any]], title: str) -> None:
        """Tables are for flow runs; nothing is shown."""

    def document(self, key: str, markdown: str) -> None:
        """Documents are for flow runs; nothing is shown."""


class ShownTally:
    """Counts bytes and files of one step and shows them."""

    def __init__(self, progress: LiveProgress, step: str, total_bytes: int, files: int) -> None:
        self._progress, self._step = progress, step
        self._total_bytes, self._files = total_bytes, files
        self._lock = threading.Lock()
        self._done_bytes = self._files_done = 0

    def advance(self, count_bytes: int) -> None:
        """Count bytes; a negative count takes back those of a try that failed."""
        with self._lock:
            self._done_bytes += count_bytes
            done, files = self._done_bytes, self._files_done
        self._progress.show(self._step, done, self._total_bytes, "bytes", f"{files} of {self._files} files")

    def file_done(self) -> None:
        """Count a file."""
        with self._lock:
            self._files_done += 1
