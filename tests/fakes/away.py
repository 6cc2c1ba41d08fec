"""A cluster whose API is away while a test says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tasks.core.errors import After, UnavailableError


class AwayCluster:
    """Passes calls on to a cluster; while `away` says so, each ends as one that nobody answers."""

    def __init__(self, cluster: Any, away: Callable[[], bool]) -> None:
        self._cluster = cluster
        self._away = away

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._cluster, name)

        def call(*args: Any, **more: Any) -> Any:
            if self._away():
                raise UnavailableError("K2-UNA-001", "Nobody answers.", where=name, retry=After(1.0))
            return method(*args, **more)

        return call if callable(method) else method
