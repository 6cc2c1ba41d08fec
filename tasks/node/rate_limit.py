"""A limit of bytes per second that all threads of a program share, for work beside something that serves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BURST_S = 0.25


class RateLimit:
    """Lets so many bytes per second through, whoever takes them; what was not used is kept for a quarter of a second.

    Each take is put behind all earlier ones and waits until they and it are paid for, so that a large block delays the
    next one by as much as many small ones would, and no thread gets more by asking more often.

    Args:
        bytes_per_s: the limit; more than zero.
        sleep: waits; `Stop.sleep` lets a program that is told to stop end at once instead of waiting.
        now: a clock that never goes back.
    """

    def __init__(
        self,
        bytes_per_s: float,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"a rate limit is more than zero: {bytes_per_s}")
        self._bytes_per_s = bytes_per_s
        self._sleep = sleep
        self._now = now
        self._lock = threading.Lock()
        self._free_at = now()
        """When everything that was taken so far has been paid for."""

    def __repr__(self) -> str:
        return f"RateLimit({self._bytes_per_s:g})"

    @property
    def bytes_per_s(self) -> float:
        """The limit."""
        return self._bytes_per_s

    def take(self, count_bytes: int) -> None:
        """Wait until so many bytes may pass."""
        with self._lock:
            now = self._now()
            # What nobody took is lost, but for a burst.
            self._free_at = max(self._free_at, now - BURST_S) + count_bytes / self._bytes_per_s
            wait_s = self._free_at - now
        if wait_s > 0:
            self._sleep(wait_s)
