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
            address = str(worker.get("url", "")).removeprefix("http://").rstrip("/")
            seen.setdefault(str(worker.get("worker_type", "")), set()).add(address)
    return seen
