"""The frame of every node program: signals, progress lines, the termination message and the exit code.

Standard library only: the marker check runs before every engine start and may not wait for imports.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tasks.core.errors import After, K2Error, UnavailableError

PROGRESS_INTERVAL_S = 0.5
TERMINATION_LOG = "/dev/termination-log"
_MESSAGE_LIMIT_BYTES = 4096  # Kubernetes cuts longer termination messages, which would break their JSON
_LONG_FIELDS = ("summary", "where", "got", "expected", "next")


class Stop:
    """Tells threads that SIGTERM or SIGINT arrived, so that each removes what it has half done."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def install(self) -> None:
        """Turn SIGTERM and SIGINT into this flag."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._event.set())

    def set(self) -> None:
        """Ask everybody to stop."""
        self._event.set()

    def is_set(self) -> bool:
        """Say whether everybody is to stop."""
        return self._event.is_set()

    def check(self) -> None:
        """Raise UnavailableError if everybody is to stop."""
        if self.is_set():
            raise stopped()

    def sleep(self, seconds: float) -> None:
        """Wait, and raise UnavailableError as soon as everybody is to stop."""
        if self._event.wait(seconds):
            raise stopped()


class StoppedError(UnavailableError):
    """The program was told to stop."""


def stopped() -> StoppedError:
    """Return the error of a program that was told to stop."""
    return StoppedError(
        "K2-UNA-001",
        "Stopped by a signal; nothing half done was left.",
        where=os.environ.get("POD_NAME", f"pid {os.getpid()}"),
        hint="Run the same command again; it resumes.",
        retry=After(0.0),
    )


class ProgressLines:
    """Prints how far the work is as JSON lines on stdout, at most one each half second and one at the end."""

    def __init__(self, total_bytes: int, files_total: int, now: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._now = now  # not the clock that people set: put back, it would keep the lines away
        self._total_bytes = total_bytes
        self._files_total = files_total
        self._done_bytes = 0
        self._files_done = 0
        self._last = -math.inf

    def show(self, done_bytes: int, files_done: int) -> None:
        """Take over how far the work is from whoever counts it."""
        with self._lock:
            self._done_bytes, self._files_done = done_bytes, files_done
            self._print()

    def advance(self, count_bytes: int) -> None:
        """Count bytes; a negative count takes back bytes of an attempt that failed."""
        with self._lock:
            self._done_bytes += count_bytes
            self._print()

    def file_done(self) -> None:
        """Count one finished file."""
        with self._lock:
            self._files_done += 1
            self._print()

    def finish(self) -> None:
        """Print the last line whatever the interval."""
        with self._lock:
            self._print(force=True)

    def _print(self, *, force: bool = False) -> None:
        tick = self._now()
        if not force and tick - self._last < PROGRESS_INTERVAL_S:
            return
        self._last = tick
        line = {
            "done_bytes": self._done_bytes,
            "total_bytes": self._total_bytes,
            "files_done": self._files_done,
            "files_total": self._files_total,
            "t": round(time.time(), 3),
        }
        print(json.dumps({"progress": line}), flush=True)


def say(message: str) -> None:
    """Print one line for a person on stderr."""
    print(message, file=sys.stderr, flush=True)


def write_termination_message(data: Mapping[str, Any]) -> None:
    """Leave the outcome where Kubernetes reads it; a place that cannot be written is no error."""
    named = os.environ.get("K2_TERMINATION_LOG")
    path = Path(named or TERMINATION_LOG)
    # The default is a file that the kubelet has made; elsewhere it would be litter in /dev.
    if named or path.exists():
        with contextlib.suppress(OSError):
            path.write_text(json.dumps(_fitting(data), separators=(",", ":")))


def _fitting(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data in a form that fits a termination message: without details, then with cut sentences."""
    fitted = dict(data)
    if len(json.dumps(fitted)) > _MESSAGE_LIMIT_BYTES:
        fitted["details"] = {}
    if len(json.dumps(fitted)) > _MESSAGE_LIMIT_BYTES:
        fitted |= {key: str(fitted[key])[:300] for key in _LONG_FIELDS if key in fitted}
    return fitted


def run(work: Callable[[], Mapping[str, Any]]) -> int:
    """Do the work of a node program and return its exit code; the outcome becomes the termination message."""
    try:
        outcome = work()
    except K2Error as error:
        say(error.as_text())
        write_termination_message(error.as_data())
        return int(error.exit_code)
    except Exception as error:
        # Whatever it is, the flow reads a message and not only an exit code.
        unexpected = K2Error("K2-UNX-001", f"{type(error).__name__}: {error}"[:300])
        write_termination_message(unexpected.as_data())
        sys.excepthook(type(error), error, error.__traceback__)
        return int(unexpected.exit_code)
    write_termination_message(outcome)
    say("done: " + json.dumps(dict(outcome)))
    return 0
