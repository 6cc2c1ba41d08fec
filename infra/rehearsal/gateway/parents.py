"""Decides which Gateway Envoy serves, and which of a route's parent references it answers for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infra.rehearsal.gateway.routes import Object

GATEWAY_GROUP = "gateway.networking.k8s.io"


@dataclass(frozen=True, slots=True)
class Parent:
    """One parent reference of a route to a Gateway of our class."""

    ref: Object
    refused: tuple[str, str] | None = None
    """Reason and message when the route cannot be attached there."""


def our_classes(classes: Sequence[Object], controller: str) -> set[str]:
    """Return the names of the GatewayClasses that are ours."""
    return {item["metadata"]["name"] for item in classes if item["spec"].get("controllerName") == controller}


def our_gateways(classes: Sequence[Object], gateways: Sequence[Object], controller: str) -> list[Object]:
    """Return the Gateways of our classes, the oldest first."""
    names = our_classes(classes, controller)
    ours = [item for item in gateways if item["spec"].get("gatewayClassName") in names]
    return sorted(ours, key=lambda item: (item["metadata"].get("creationTimestamp", ""), item["metadata"]["name"]))


def served_gateway(classes: Sequence[Object], gateways: Sequence[Object], controller: str) -> Object | None:
    """Return the one Gateway that Envoy serves: there is one listener, so the oldest of ours has it."""
    usable = [item for item in our_gateways(classes, gateways, controller) if gateway_problem(item) is None]
    return usable[0] if usable else None


def gateway_problem(gateway: Object) -> tuple[str, str] | None:
    """Return reason and message when a Gateway asks for what Envoy is not set up to do here, else None."""
    listeners = gateway["spec"].get("listeners") or []
    if len(listeners) != 1:
        return "ListenersNotValid", f"the rehearsal serves one listener, this Gateway has {len(listeners)}"
    listener = listeners[0]
    if listener.get("protocol") != "HTTP" or listener.get("tls"):
        return "ListenersNotValid", f"listener {listener['name']} is {listener.get('protocol')}: only HTTP is served"
    if listener.get("hostname"):
        return "ListenersNotValid", f"listener {listener['name']} has a hostname: all hosts are served alike"
    return None


def attach(
    route: Object, classes: Sequence[Object], gateways: Sequence[Object], served: Object | None, controller: str
) -> list[Parent]:
    """Return the parents of a route that are ours to answer for; none when it belongs to other controllers."""
    ours = {_key(item) for item in our_gateways(classes, gateways, controller)}
    found = []
    for ref in route.get("spec", {}).get("parentRefs") or ():
        key = (ref.get("namespace") or route["metadata"]["namespace"], ref["name"])
        kind = (ref.get("group", GATEWAY_GROUP), ref.get("kind", "Gateway"))
        if kind == (GATEWAY_GROUP, "Gateway") and key in ours:
            found.append(Parent(ref, _refusal(ref, key, served)))
    return found


def _refusal(ref: Object, key: tuple[str, str], served: Object | None) -> tuple[str, str] | None:
    if served is None or key != _key(served):
        return "NoMatchingParent", f"Gateway {key[0]}/{key[1]} is not the one that Envoy serves"
    listener = served["spec"]["listeners"][0]
    if ref.get("sectionName") not in (None, listener["name"]):
        return "NoMatchingParent", f"the Gateway has no listener {ref['sectionName']!r}"
    if ref.get("port") not in (None, listener["port"]):
        return "NoMatchingParent", f"the Gateway has no listener at port {ref['port']}"
    return None


def _key(item: Object) -> tuple[str, str]:
    return (item["metadata"]["namespace"], item["metadata"]["name"])
