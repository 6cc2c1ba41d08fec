"""What the gateway writes into the status of routes and Gateways. Pure: an unchanged answer is an unchanged status, so
a restart or a quiet day moves no resourceVersion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infra.rehearsal.gateway.parents import GATEWAY_GROUP, gateway_problem
from infra.rehearsal.gateway.routes import Object
from infra.rehearsal.gateway.translate import Outcome, RouteVerdict

LIVE = "k2-release.io/Live"
"""Condition of a route: Envoy serves by the observed generation at this moment (read back from Envoy, not assumed)."""


def route_status(
    route: Object, verdicts: Sequence[RouteVerdict], *, controller: str, served: Outcome, now: str
) -> Object | None:
    """Return the new status of an HTTPRoute, or None when it already says so.

    Args:
        route: the object as read.
        verdicts: what we say about it, one for each parent that is ours; empty when none is.
        controller: our name; what other controllers wrote stays.
        served: whether Envoy took the routes that came of it.
        now: RFC 3339 time for conditions that change.
    """
    current = list((route.get("status") or {}).get("parents") or ())
    before = {_ref_key(item["parentRef"]): item for item in current if item["controllerName"] == controller}
    ours = []
    for verdict in verdicts:
        live = served if verdict.accepted.true else Outcome(False, "NotAccepted", "no request follows this route")
        wanted = {"Accepted": verdict.accepted, "ResolvedRefs": verdict.resolved, LIVE: live}
        old = before.get(_ref_key(verdict.parent_ref), {}).get("conditions", ())
        conditions = _conditions(wanted, old, verdict.generation, now)
        ours.append({"parentRef": dict(verdict.parent_ref), "controllerName": controller, "conditions": conditions})
    parents = [item for item in current if item["controllerName"] != controller] + ours
    return None if parents == current else {"parents": parents}


def gateway_status(
    gateway: Object, *, is_served: bool, ready: Outcome, address: str, url: str, attached_routes: int, now: str
) -> Object | None:
    """Return the new status of a Gateway of ours, or None when it already says so.

    Args:
        gateway: the object as read.
        is_served: whether it is the one that Envoy serves.
        ready: whether Envoy runs and took its routes.
        address: host that Envoy listens on.
        url: where requests go: the listener's port may be another one than the Gateway names.
        attached_routes: how many routes Envoy follows.
        now: RFC 3339 time for conditions that change.
    """
    current = gateway.get("status") or {}
    problem = gateway_problem(gateway)
    if problem is None and not is_served:
        problem = ("Unsupported", "the rehearsal serves one Gateway, and an older one has it")
    accepted = Outcome(False, *problem) if problem else Outcome(True, "Accepted", "the rehearsal's gateway has it")
    programmed = Outcome(True, "Programmed", f"Envoy serves it at {url}") if ready.true else ready
    if problem:
        programmed = Outcome(False, "Invalid", problem[1])
    generation = int(gateway["metadata"].get("generation", 0))
    wanted = {"Accepted": accepted, "Programmed": programmed}
    status: dict[str, Any] = {"conditions": _conditions(wanted, current.get("conditions", ()), generation, now)}
    if problem is None:
        status["addresses"] = [{"type": "IPAddress", "value": address}]
        status["listeners"] = [_listener(gateway, current, wanted, attached_routes, now)]
    same = all(current.get(key) == value for key, value in status.items())
    return None if same else status


def class_status(item: Object, *, now: str) -> Object | None:
    """Return the new status of a GatewayClass of ours, or None when it already says so."""
    old = (item.get("status") or {}).get("conditions", ())
    accepted = {"Accepted": Outcome(True, "Accepted", "the rehearsal's gateway follows this class")}
    conditions = _conditions(accepted, old, int(item["metadata"].get("generation", 0)), now)
    return None if conditions == list(old) else {"conditions": conditions}


def _listener(gateway: Object, current: Object, wanted: dict[str, Outcome], routes: int, now: str) -> Object:
    name = gateway["spec"]["listeners"][0]["name"]
    old: Object = next((item for item in current.get("listeners") or () if item["name"] == name), {})
    outcomes = {**wanted, "ResolvedRefs": Outcome(True, "ResolvedRefs", "HTTPRoutes can be attached")}
    generation = int(gateway["metadata"].get("generation", 0))
    return {
        "name": name,
        "attachedRoutes": routes,
        "supportedKinds": [{"group": GATEWAY_GROUP, "kind": "HTTPRoute"}],
        "conditions": _conditions(outcomes, old.get("conditions", ()), generation, now),
    }


def _conditions(wanted: dict[str, Outcome], old: Sequence[Object], generation: int, now: str) -> list[Object]:
    """Return conditions; the time of one moves only when its status does."""
    before = {item["type"]: item for item in old}
    made: list[Object] = []
    for kind, outcome in wanted.items():
        status = "True" if outcome.true else "False"
        known = before.get(kind, {})
        since = known["lastTransitionTime"] if known.get("status") == status else now
        made.append(
            {
                "type": kind,
                "status": status,
                "reason": outcome.reason,
                "message": outcome.message,
                "observedGeneration": generation,
                "lastTransitionTime": since,
            }
        )
    return made


def _ref_key(ref: Object) -> tuple[Any, ...]:
    return tuple(ref.get(key) for key in ("namespace", "name", "sectionName", "port"))
