"""What a rehearsal's processes cost, sampled while it runs."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from tasks.core.ledger import STEPS


class CpuClock:
    """Samples the CPU seconds of all the site's processes, so that each step can be given its share."""

    def __init__(self, site: Any) -> None:
        self._site = site
        self._samples: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> CpuClock:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(5)

    def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(OSError):
                self._samples.append((time.time(), self._site.cpu_seconds()))
            self._stop.wait(0.5)

    def now(self) -> float:
        """Return the CPU seconds so far."""
        return float(self._site.cpu_seconds())

    def between(self, start: float, end: float) -> float:
        """Return the CPU seconds used by all processes between two moments, from the nearest samples."""
        if not self._samples:
            return 0.0
        value = {at: min(self._samples, key=lambda sample: abs(sample[0] - at))[1] for at in (start, end)}
        return max(0.0, value[end] - value[start])

    def steps(self, known: dict[str, Any]) -> list[dict[str, Any]]:
        """Return each step of a release with its wall and CPU seconds."""
        rows = []
        for name in STEPS:
            if name in known:
                state = known[name]
                rows.append(
                    {
                        "name": name,
                        "outcome": state.outcome,
                        "seconds": round(state.seconds, 2),
                        "cpu_seconds": round(self.between(state.ended_at - state.seconds, state.ended_at), 2),
                    }
                )
        return rows
