"""Looks up the failures that are switched on for this pod: files in the directory that K2_REHEARSAL_INJECT names."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_POLL_S = 0.5


class Injections:
    """Knows whether this engine is slow or wrong; looks at the files at most twice a second, and only when asked."""

    def __init__(self, env: Mapping[str, str]) -> None:
        directory = env.get("K2_REHEARSAL_INJECT")
        self._directory = Path(directory) if directory else None
        self._pod_name = env.get("POD_NAME", "")
        self._slow_factor = 1.0
        self._wrong = False
        self._next_look = 0.0

    @property
    def slow_factor(self) -> float:
        """How many times slower than the model this engine is: 1.0 normally."""
        self._look()
        return self._slow_factor

    @property
    def wrong(self) -> bool:
        """True when answers must be garbage with HTTP 200."""
        self._look()
        return self._wrong

    def _look(self) -> None:
        now = time.monotonic()
        if self._directory is None or now < self._next_look:
            return
        self._next_look = now + _POLL_S
        slow = self._parameters("engine-slow")
        self._slow_factor = max(1.0, float(slow.get("factor", 20))) if slow is not None else 1.0
        self._wrong = self._parameters("engine-wrong") is not None

    def _parameters(self, name: str) -> dict[str, Any] | None:
        """Answers the parameters of an injection that is on and meant for this pod."""
        assert self._directory is not None
        try:
            found = json.loads((self._directory / f"{name}.json").read_text(encoding="utf-8") or "{}")
        except (OSError, ValueError):
            # ValueError: half-written; the next look sees it whole.
            return None
        prefix = str(found.get("pod_prefix", ""))
        return found if self._pod_name.startswith(prefix) else None
