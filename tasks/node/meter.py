"""What a transfer has done so far, file by file, and the thread that tells it to whoever watches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tasks.core.lock import LockedFile
from tasks.node.program import PROGRESS_INTERVAL_S, Stop

Tell = Callable[[Mapping[str, Any]], None]


class Meter:
    """Counts for one file. The file's own thread writes, another one reads.

    `moved` counts every byte that went anywhere, so that it grows as long as anything happens; `offset` is how much of
    the file is through in this try.
    """

    def __init__(self, path: str, size_bytes: int, now: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.hub_bytes = 0
        self.streams = 0
        self.done = False
        self._now = now
        self._began = now()
        self._offset = 0
        self._moved = 0
        self._quiet_until = -1.0
        self._last_error = ""

    def opened(self) -> None:
        """Count a stream from the Hub."""
        self.streams += 1

    def received(self, count_bytes: int) -> None:
        """Count bytes from the Hub."""
        self.hub_bytes += count_bytes
        self._moved += count_bytes

    def moved(self, count_bytes: int) -> None:
        """Count bytes to or from the store."""
        self._moved += count_bytes

    def at(self, offset_bytes: int) -> None:
        """Say how much of the file is through in this try."""
        self._offset = offset_bytes

    def quiet(self, seconds: float) -> None:
        """Say that no byte is to be expected for so long; 0 ends that."""
        self._quiet_until = self._now() + seconds if seconds else -1.0

    def wait(self, stop: Stop, seconds: float) -> None:
        """Wait, and say that it is meant."""
        self.quiet(seconds)
        stop.sleep(seconds)
        self.quiet(0.0)

    def failed(self, message: str) -> None:
        """Keep what went wrong last."""
        self._last_error = message

    def line(self) -> dict[str, Any]:
        """Return how far the file is, as plain data."""
        now = self._now()
        return {
            "path": self.path,
            "size_bytes": self.size_bytes,
            "offset_bytes": self._offset,
            "moved_bytes": self._moved,
            "hub_bytes": self.hub_bytes,
            "streams": self.streams,
            "seconds": round(now - self._began, 1),
            "quiet_s": round(max(0.0, self._quiet_until - now), 3),
            "done": self.done,
            "last_error": self._last_error[:300],
        }


class Reports:
    """Tells of all files that are under way, twice a second: who hears nothing knows that the process stands.

    Args:
        tell: takes one line.
        interval_s: time between two lines.
    """

    def __init__(self, tell: Tell, interval_s: float = PROGRESS_INTERVAL_S) -> None:
        self.tell = tell
        self._interval_s = interval_s
        self._meters: list[Meter] = []
        self._lock = threading.Lock()
        self._over = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Tell while the context is open, and once more at its end."""
        thread = threading.Thread(target=self._run, name="reports", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            self._report()

    @contextmanager
    def meter(self, file: LockedFile) -> Iterator[Meter]:
        """Yield the meter of a file that is under way now; it is done if nothing is raised."""
        meter = Meter(file.path, file.size_bytes)
        with self._lock:
            self._meters.append(meter)
        yield meter
        meter.at(file.size_bytes)
        meter.done = True

    def _run(self) -> None:
        while not self._over.wait(self._interval_s):
            self._report()

    def _report(self) -> None:
        with self._lock:
            lines = [meter.line() for meter in self._meters]
            # A file that is done is told of once.
            done = {line["path"] for line in lines if line["done"]}
            self._meters = [meter for meter in self._meters if meter.path not in done]
            self.tell({"files": lines})
