"""The workers that a release's router knows, held against the pods: none may be missing, none may be a ghost.

sglang-router 0.3.2 learns of workers by a watch of pods. When that watch is cut it waits for a minute, and a pod that
is deleted meanwhile stays a healthy worker that gets requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.core.errors import K2Error, NotReadyError
from tasks.core.render import SERVING_LABEL
from tasks.core.router_view import expected_workers, seen_workers, stale_workers, workers_match
from tasks.ports import Object
from tasks.steps.context import Ports
from tasks.steps.patience import Deadline

_POLL_S = 1.0
SETTLE_S = 120.0
"""Twice what the router waits after a cut watch, for a probe of each worker that it then finds."""


def known_workers(ports: Ports, serving: str) -> list[Object] | None:
    """Return the router's workers, or None while it does not answer."""
    try:
        return ports.engine.workers(serving)
    except K2Error:
        return None


def forget_stale_workers(ports: Ports, serving: str, workers: Sequence[Object]) -> list[str]:
    """Have the router forget the workers whose pods are gone, and return the addresses of those it agreed to forget.

    One that it refuses to forget is said, and is there at the next look. The pods are listed now: a mirror that lags
    behind the router's own watch would make a new worker look stale, and the router would not find that one again.
    """
    pods = ports.cluster.list_objects("Pod", {SERVING_LABEL: serving})
    return [str(worker.get("url")) for worker in stale_workers(pods, workers) if _forget(ports, serving, worker)]


def _forget(ports: Ports, serving: str, worker: Mapping[str, Any]) -> bool:
    ports.progress.say(f"router: {worker.get('url')} is no pod of this set any more; the router is told to forget it")
    try:
        ports.engine.forget_worker(serving, str(worker["id"]))
    except K2Error as error:
        ports.progress.say(f"router: {worker.get('url')} is not forgotten yet: {error}")
        return False
    return True


def settle_workers(ports: Ports, serving: str) -> None:
    """Wait until the router knows exactly the leaders of the set, having it forget what is stale.

    Raises:
        NotReadyError: it does not within two minutes (K2-RDY-001).
    """
    deadline = Deadline(ports, SETTLE_S)
    while True:
        pods = ports.cluster.list_objects("Pod", {SERVING_LABEL: serving})
        workers = known_workers(ports, serving)
        if workers is not None and workers_match(pods, workers):
            return
        if workers:
            forget_stale_workers(ports, serving, workers)
        if deadline.passed:
            raise NotReadyError(
                "K2-RDY-001",
                "The router does not know exactly the leaders of the set.",
                where=f"router of {serving}",
                got=str(_plain(seen_workers(workers or ()))) if workers is not None else "no answer",
                expected=str(_plain(expected_workers(pods))),
                hint=f"kubectl rollout restart deployment k2-{serving[:8]}-router (it has no users yet)",
            )
        ports.clock.sleep(_POLL_S)


def _plain(addresses: dict[str, set[str]]) -> dict[str, list[str]]:
    return {role: sorted(addresses[role]) for role in sorted(addresses)}
