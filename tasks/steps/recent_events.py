"""The namespace's Events, for explanations: read every few seconds at most; no step waits or ends for want of them."""

from __future__ import annotations

import contextlib
import math

from tasks.core.errors import UnavailableError
from tasks.ports import Object
from tasks.steps.context import Ports

_READ_EVERY_S = 5.0
"""A namespace in trouble has thousands of Events, and they are all listed."""


class RecentEvents:
    """Keeps the Events that were read last."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._read = -math.inf
        self._events: list[Object] = []

    def objects(self) -> list[Object]:
        """Return the Events, at most some seconds old; where they cannot be read now, those that were read last."""
        now = self._ports.clock.now()
        if now - self._read >= _READ_EVERY_S:
            with contextlib.suppress(UnavailableError):
                self._events = self._ports.cluster.impatient.list_objects("Event")
            # The end of the reading: one that took long is not begun again at once.
            self._read = self._ports.clock.now()
        return self._events
