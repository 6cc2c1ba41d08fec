"""Setting a site up: its base objects, and the live route that sends everything to the parking backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks.core.errors import ConflictError, NotReadyError
from tasks.core.render import render_base, render_live_route
from tasks.core.route import LIVE_ROUTE, PARKING, RouteState, to_annotations
from tasks.steps.context import FIELD_MANAGER, Ports
from tasks.steps.traffic import route_is_live

_PARKING_DEADLINE_S = 120.0
_MANAGED_BY = "app.kubernetes.io/managed-by"
_ROLES = ("Role", "ClusterRole")


def set_up_site(ports: Ports, base: Sequence[dict[str, Any]], tool_image: str) -> None:
    """Apply the base objects, wait for the parking backend, and create the live route if there is none.

    Twice is the same as once: an existing live route is never touched.
    """
    for obj in render_base(base, ports.site, tool_image):
        _apply(ports, obj)
    if ports.cluster.get("HTTPRoute", LIVE_ROUTE) is None:
        state = RouteState(stable=PARKING, since=ports.clock.now())
        backends = [(backend.service, weight, backend.serving) for backend, weight in state.weights()]
        route = render_live_route(
            ports.templates["live-route"],
            backends,
            to_annotations(state),
            ports.site.namespace,
            ports.site.gateway.name,
        )
        ports.cluster.create(route)
    _wait_parking(ports)


def _apply(ports: Ports, obj: dict[str, Any]) -> None:
    """Apply a base object; rules of ours that a hand has changed (as K2-RGT-001 asks for) are made ours again.

    Server-side apply calls another's value a conflict, and one that is the same as ours none.
    """
    try:
        ports.cluster.apply(obj)
    except ConflictError:
        kind, name = obj["kind"], obj["metadata"]["name"]
        there = ports.cluster.get(kind, name) if kind in _ROLES else None
        if there is None or (there["metadata"].get("labels") or {}).get(_MANAGED_BY) != FIELD_MANAGER:
            raise
        ports.progress.say(f"site: the rules of {kind} {name} were changed by another hand; they are ours again")
        ports.cluster.replace({**there, "rules": obj["rules"]})
        ports.cluster.apply(obj)


def _wait_parking(ports: Ports) -> None:
    deadline = ports.clock.now() + _PARKING_DEADLINE_S
    while ports.clock.now() < deadline:
        deployment = ports.cluster.get("Deployment", PARKING.service)
        route = ports.cluster.get("HTTPRoute", LIVE_ROUTE)
        available = int((deployment or {}).get("status", {}).get("readyReplicas", 0)) > 0
        if available and route is not None and route_is_live(route, int(route["metadata"]["generation"])):
            return
        ports.clock.sleep(0.25)
    raise NotReadyError(
        "K2-RDY-001",
        "The parking backend or the live route does not come up.",
        where=PARKING.service,
        hint="kubectl -n k2 get deployment,httproute,gateway",
    )
