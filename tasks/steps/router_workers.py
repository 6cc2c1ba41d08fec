"""The workers that a release's router knows, held against the pods: none may be missing, none may be a ghost.

sglang-router 0.3.2 learns of workers by a watch of pods. When that watch is cut it waits for a minute, and a pod that
is deleted meanwhile stays a healthy worker that gets requests. Its own API could forget a worker, but no path through
the gateway changes a router (a header that users see would be the key to it): a router without users is made anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasks.core.errors import ConflictError, K2Error, NotReadyError
from tasks.core.render import ROLE_LABEL, SERVING_LABEL, serving_names
from tasks.core.router_view import expected_workers, seen_workers, stale_workers, workers_match
from tasks.core.units import utc_time
from tasks.ports import Object
from tasks.steps.context import Ports
from tasks.steps.patience import Deadline
from tasks.steps.traffic import read_live_route

_POLL_S = 1.0
_OWN_TIME_S = 10.0
"""How long a router whose watch is not cut may need to see that a pod is gone."""
SETTLE_S = 180.0
"""Twice what the router waits after a cut watch, and time for a new router to start and to find its workers."""
_RESTARTED_AT = "kubectl.kubernetes.io/restartedAt"
"""What `kubectl rollout restart` writes."""


def known_workers(ports: Ports, serving: str) -> list[Object] | None:
    """Return the router's workers, or None while it does not answer."""
    try:
        return ports.engine.workers(serving)
    except K2Error:
        return None


class StaleWorkers:
    """Workers without a pod: left to the router for some seconds, then ended, once, by making the router anew."""

    def __init__(self, ports: Ports, serving: str) -> None:
        self._ports = ports
        self._serving = serving
        self._since: Deadline | None = None
        self._acted = False

    def look(self, workers: Sequence[Object]) -> None:
        """Take in what the router knows now, and restart it if it has known a worker without a pod for too long.

        The pods are listed now: a mirror that lags behind the router's own watch would make a new worker look stale.
        """
        pods = self._ports.cluster.list_objects("Pod", {SERVING_LABEL: self._serving})
        stale = [str(worker.get("url")) for worker in stale_workers(pods, workers) if worker.get("is_healthy")]
        if not stale:
            self._since = None
        elif self._since is None:
            self._since = Deadline(self._ports, _OWN_TIME_S)
        elif self._since.passed and not self._acted:
            self._acted = True
            self._restart(", ".join(stale))

    def _restart(self, stale: str) -> None:
        ports, deployment = self._ports, serving_names(self._serving).router
        if _may_have_users(ports, self._serving):
            ports.progress.say(f"router: {stale} is no pod of this set any more; it has users and is left alone")
            return
        ports.progress.say(
            f"router: {stale} is no pod of this set any more; {deployment} is restarted, it has no users"
        )
        annotations = {_RESTARTED_AT: utc_time(ports.clock.now()).replace(" ", "T")}
        patch = {"spec": {"template": {"metadata": {"annotations": annotations}}}}
        ports.cluster.merge_patch("Deployment", deployment, patch)


def settle_workers(ports: Ports, serving: str) -> None:
    """Wait until the set has one router and that knows exactly the leaders; one that keeps a stale worker is restarted.

    Raises:
        NotReadyError: it does not within three minutes (K2-RDY-001).
    """
    deadline, ghosts = Deadline(ports, SETTLE_S), StaleWorkers(ports, serving)
    while True:
        pods = ports.cluster.list_objects("Pod", {SERVING_LABEL: serving})
        workers = known_workers(ports, serving)
        if workers is not None and workers_match(pods, workers) and _routers(pods) == 1:
            return
        if workers:
            ghosts.look(workers)
        if deadline.passed:
            raise NotReadyError(
                "K2-RDY-001",
                "The router does not know exactly the leaders of the set.",
                where=f"router of {serving}",
                got=str(_plain(seen_workers(workers or ()))) if workers is not None else "no answer",
                expected=str(_plain(expected_workers(pods))),
                hint=f"kubectl rollout restart deployment {serving_names(serving).router} (unless it has users)",
            )
        ports.clock.sleep(_POLL_S)


def _routers(pods: Sequence[Object]) -> int:
    """Return how many routers take requests, those that are on their way out included."""
    return sum((pod["metadata"].get("labels") or {}).get(ROLE_LABEL) == "router" for pod in pods)


def _may_have_users(ports: Ports, serving: str) -> bool:
    try:
        state, _ = read_live_route(ports)
    except NotReadyError:
        return False  # there is no live route
    except ConflictError:
        return True  # a human hand wrote it: nobody knows
    return any(backend.serving == serving and percent > 0 for backend, percent in state.weights())


def _plain(addresses: dict[str, set[str]]) -> dict[str, list[str]]:
    return {role: sorted(addresses[role]) for role in sorted(addresses)}
