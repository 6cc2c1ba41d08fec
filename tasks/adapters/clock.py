"""The machine's clock."""

from __future__ import annotations

import time


class SystemClock:
    """Implements `ports.Clock` with real time."""

    def now(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait; a negative time is none."""
        time.sleep(max(0.0, seconds))
