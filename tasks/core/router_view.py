"""The router's own list of workers, against the leaders that it should know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tasks.core.render import ENGINE_PORT, ROLE_LABEL
from tasks.core.spec import ROLES
from tasks.core.topology import node_rank

Object = Mapping[str, Any]


def workers_match(pods: Sequence[Object], workers: Sequence[Object]) -> bool:
    """Say whether the router sees exactly the leaders, each in its role."""
    return seen_workers(workers) == expected_workers(pods)


def stale_workers(pods: Sequence[Object], workers: Iterable[Object]) -> list[Object]:
    """Return the workers, healthy or not, that belong to no leader of today: what is sent to them is lost.

    The router (0.3.2) takes workers from a watch of pods. A pod that goes while the watch is cut stays a worker.
    """
    addresses = set().union(*expected_workers(pods).values())
    return [worker for worker in workers if _address(worker) not in addresses]


def expected_workers(pods: Iterable[Object]) -> dict[str, set[str]]:
    """Return the addresses of the leaders by role."""
    expected: dict[str, set[str]] = {}
    for pod in pods:
        role = (pod["metadata"].get("labels") or {}).get(ROLE_LABEL)
        address = (pod.get("status") or {}).get("podIP")
        if role in ROLES and node_rank(pod) == 0 and address:
            expected.setdefault(role, set()).add(f"{address}:{ENGINE_PORT}")
    return expected


def seen_workers(workers: Iterable[Object]) -> dict[str, set[str]]:
    """Return the healthy workers by type. One that nobody asked for is no match either: it would get requests."""
    seen: dict[str, set[str]] = {}
    for worker in workers:
        if worker.get("is_healthy"):
            seen.setdefault(str(worker.get("worker_type", "")), set()).add(_address(worker))
    return seen


def _address(worker: Object) -> str:
    return str(worker.get("url", "")).removeprefix("http://").rstrip("/")
