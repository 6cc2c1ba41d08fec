"""A clock that stands still until somebody sleeps on it, so that tests run hours in milliseconds."""

from __future__ import annotations

from collections.abc import Callable

START = 1_796_000_000.0


class SteadyClock:
    """Implements ports.Clock; `on_sleep` are called with the new time after each sleep, to let the world go on."""

    def __init__(self, at: float = START) -> None:
        self.at = at
        self.slept: list[float] = []
        self.on_sleep: list[Callable[[float], None]] = []

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.at += seconds
        self.slept.append(seconds)
        for react in self.on_sleep:
            react(self.at)
