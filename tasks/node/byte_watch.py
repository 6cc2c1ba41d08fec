"""Whether a process that moves files still moves them: decided from what it tells of each, and from when it told it.

Pure but for the times it is given, so that hours can be tried in a moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NOT_RUN_S = 5.0


@dataclass(frozen=True)
class Patience:
    """When a process counts as standing.

    Args:
        window_s: over so long a time ...
        min_bytes_per_s: ... each file must move at least so many bytes a second, whichever way, unless it said that it
            waits for something.
        silent_s: and the process must have told anything at all.
    """

    window_s: float
    min_bytes_per_s: int
    silent_s: float


@dataclass(frozen=True)
class Stall:
    """What was seen of a process that stands; `path` is empty if it said nothing at all."""

    path: str
    offset_bytes: int
    size_bytes: int
    moved_bytes: int
    within_s: float
    last_error: str

    def __str__(self) -> str:
        """Return one line for a person."""
        if not self.path:
            return f"nothing was heard for {self.within_s:.1f} s"
        text = f"{self.path}: byte {self.offset_bytes} of {self.size_bytes}; {self.moved_bytes} moved"
        return f"{text} in {self.within_s:.1f} s" + (f"; before that: {self.last_error}" if self.last_error else "")


class ByteWatch:
    """Follows one process.

    Args:
        patience: when it counts as standing.
        now: time at which it was started, as all times in seconds of any one clock that is not set.
    """

    def __init__(self, patience: Patience, now: float) -> None:
        self._patience = patience
        self._heard = self._looked = now
        self._files: dict[str, Mapping[str, Any]] = {}
        self._samples: dict[str, deque[tuple[float, int]]] = {}
        self._quiet_until: dict[str, float] = {}

    def heard(self, line: Mapping[str, Any], now: float) -> None:
        """Take in one line of the process."""
        self._heard = now
        for file in line.get("files", ()):
            path = file["path"]
            samples = self._samples.setdefault(path, deque())
            if file["quiet_s"]:
                self._quiet_until[path] = now + file["quiet_s"]
            if file["done"] or file["quiet_s"]:
                samples.clear()
            if file["done"]:
                self._files.pop(path, None)
                continue
            self._files[path] = file
            samples.append((now, file["moved_bytes"]))
            # One sample that is as old as the window stays.
            while len(samples) > 1 and samples[1][0] <= now - self._patience.window_s:
                samples.popleft()

    def stall(self, now: float) -> Stall | None:
        """Return what is seen if the process stands, or None. To be asked often."""
        if now - self._looked >= _NOT_RUN_S:
            # Whoever asks was not run for a while (a frozen machine), and so nor was the process: it begins anew.
            self._heard = now
            self._samples = {path: deque([(now, file["moved_bytes"])]) for path, file in self._files.items()}
        self._looked = now
        if now - self._heard >= self._patience.silent_s:
            return Stall("", 0, 0, 0, now - self._heard, "")
        for path, file in self._files.items():
            began, moved_then = self._samples[path][0]
            within_s, moved = now - max(began, self._quiet_until.get(path, began)), file["moved_bytes"] - moved_then
            if within_s >= self._patience.window_s and moved < within_s * self._patience.min_bytes_per_s:
                return Stall(path, file["offset_bytes"], file["size_bytes"], moved, within_s, file["last_error"])
        return None
