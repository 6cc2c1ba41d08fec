"""The injection `apiserver-killed`: etcd and the API server die together in staging, in rollout and in the shift."""

from __future__ import annotations

import threading
from typing import Any

from flows.console.submission import say
from tasks.core.render import ROLE_LABEL
from tasks.core.spec import ROLES
from tasks.steps.context import Ports
from tasks.steps.journal import states
from tasks.steps.traffic import read_live_route

API_KILLED = "apiserver-killed"
_AWAY_S = 60.0
_RESTART_S = 185.0  # a little more than both servers are given to answer
_RELEASE = "k2-release.io/release"
_SHIFTED_PERCENT = 10


class Outages:
    """Three outages of one release, each in the middle of a step.

    Args:
        site: the embedded site (`lose_api`).
        release: whose steps are watched.
        stop: ends an outage before its time, and has the API server started again.
        away_s: how long nothing answers at the API server's address.
    """

    def __init__(self, site: Any, release: str, stop: threading.Event, away_s: float = _AWAY_S) -> None:
        self._site = site
        self._release = release
        self._stop = stop
        self._away_s = away_s
        self._moments = [("stage", self._staging), ("rollout", self._rolling_out), ("shift", self._shifting)]
        self.missed: list[str] = []
        """The steps that had ended before the API server could be killed in them, or while it was away."""
        self.restart_s = _RESTART_S
        """How long the API server may take to be back after an outage."""

    def look(self, ports: Ports) -> bool:
        """Carry out the next outage if its moment has come; return whether all three have been."""
        if not self._moments:
            return not self.missed
        step, is_now = self._moments[0]
        state = states(ports.store, self._release).get(step)
        if state is None:
            return False
        if state.outcome != "interrupted":  # what a step is called that has begun and not ended
            say(f"inject: {step} ended ({state.outcome}) before the API server could be killed in it")
            self._moments.pop(0)
            self.missed.append(step)
        elif is_now(ports):
            self._moments.pop(0)
            say(f"inject: etcd and kube-apiserver are killed in {step}; nothing answers for {self._away_s:.0f} s")
            if not self._site.lose_api(self._away_s, self._stop):
                self.missed.append(step)
            say("inject: etcd and kube-apiserver are back")
        return not self._moments and not self.missed

    def _staging(self, ports: Ports) -> bool:
        pods = ports.cluster.list_objects("Pod", {ROLE_LABEL: "stage"})
        return any(pod.get("status", {}).get("phase") == "Running" for pod in pods)

    def _rolling_out(self, ports: Ports) -> bool:
        groups = ports.cluster.list_objects("LeaderWorkerSet")
        ours = {g["metadata"]["name"] for g in groups if g["metadata"]["annotations"].get(_RELEASE) == self._release}
        pods = [
            pod
            for pod in ports.cluster.list_objects("Pod")
            if pod["metadata"].get("labels", {}).get("leaderworkerset.sigs.k8s.io/name") in ours
            and pod["metadata"]["labels"].get(ROLE_LABEL) in ROLES
        ]
        return any(pod.get("status", {}).get("phase") == "Running" for pod in pods)

    def _shifting(self, ports: Ports) -> bool:
        return read_live_route(ports)[0].candidate_percent >= _SHIFTED_PERCENT
