"""Says while it waits why a worker Job does not run: nothing else would, until its deadline is over."""

from __future__ import annotations

from collections.abc import Mapping

from tasks.core.errors import UnavailableError
from tasks.core.job_obstacles import UID_LABEL, Obstacle, obstacle_of
from tasks.ports import Mirror
from tasks.steps.context import Ports

_LOOK_S = 5.0


class JobObstacles:
    """Looks every few seconds at Jobs that do not run; what has not gone away by the next look is said once."""

    def __init__(self, ports: Ports, step: str) -> None:
        self._ports = ports
        self._step = step
        self._looked = ports.clock.now()
        self._known: Mapping[str, Obstacle] = {}
        self._said: set[str] = set()

    @property
    def first(self) -> Obstacle | None:
        """The first obstacle that was seen at the last look."""
        return next(iter(self._known.values()), None)

    def look(self, waiting: Mapping[str, str], pods: Mirror) -> None:
        """Look, if it is time to, at the Jobs that have not ended.

        Args:
            waiting: name -> uid of these Jobs.
            pods: of the namespace.
        """
        now = self._ports.clock.now()
        if now - self._looked < _LOOK_S:
            return
        before, self._known = self._known, self._find(waiting, pods)
        # The end of the look: one that took long is not begun again at once.
        self._looked = self._ports.clock.now()
        for name, obstacle in self._known.items():
            if name in before and obstacle.summary not in self._said:
                self._said.add(obstacle.summary)
                self._ports.progress.say(f"{self._step}: Job {name} waits. {obstacle.summary} {obstacle.remedy}")

    def _find(self, waiting: Mapping[str, str], pods: Mirror) -> dict[str, Obstacle]:
        placed = [pod for pod in pods.objects() if pod["spec"].get("nodeName")]
        running = {(pod["metadata"].get("labels") or {}).get(UID_LABEL) for pod in placed}
        idle = {name: uid for name, uid in waiting.items() if uid not in running}
        if not idle:
            return {}
        try:
            cluster = self._ports.cluster.impatient
            nodes, events = cluster.list_objects("Node"), cluster.list_objects("Event")
        except UnavailableError:
            return {}  # an API that does not answer explains nothing
        found = {name: obstacle_of(uid, pods.objects(), nodes, events) for name, uid in idle.items()}
        return {name: obstacle for name, obstacle in found.items() if obstacle is not None}
