"""Finds where a Service's requests go: the ready pods behind its selector.

EndpointSlices are not read. Pods of a rehearsal live at 127/8 addresses, which the API server refuses in EndpointSlices
(they stay empty) and accepts in a pod's status; so Services are resolved here as the endpoint controller would do it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from infra.rehearsal.gateway.routes import BackendRef, Object


class UnresolvedError(Exception):
    """A backend reference leads nowhere.

    Args:
        reason: CamelCase word for the ResolvedRefs condition.
        message: names the reference and what is wrong with it.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """One pod that takes requests."""

    address: str
    port: int
    pod: str


def service_port(ref: BackendRef, services: Iterable[Object], *, from_namespace: str) -> tuple[Object, Object]:
    """Return the Service a reference means, and the port of it.

    Raises:
        UnresolvedError: there is none, or it may not be used from `from_namespace`.
    """
    shown = f"{ref.namespace}/{ref.name}"
    if (ref.group, ref.kind) != ("", "Service"):
        raise UnresolvedError("InvalidKind", f"backend {shown} is a {ref.group or 'core'} {ref.kind}, not a Service")
    if ref.namespace != from_namespace:
        raise UnresolvedError("RefNotPermitted", f"backend {shown} is in another namespace than the route")
    service = next((item for item in services if _is(item, ref.namespace, ref.name)), None)
    if service is None:
        raise UnresolvedError("BackendNotFound", f"there is no Service {shown}")
    if not service.get("spec", {}).get("selector"):
        raise UnresolvedError("BackendNotFound", f"Service {shown} has no selector, so no pods can be found for it")
    port = next((item for item in service["spec"].get("ports", ()) if item["port"] == ref.port), None)
    if port is None:
        raise UnresolvedError("BackendNotFound", f"Service {shown} has no port {ref.port}")
    return service, port


def ready_endpoints(service: Object, port: Object, pods: Iterable[Object]) -> tuple[Endpoint, ...]:
    """Return the addresses of the Service's pods that are Ready and not on their way out, in a fixed order.

    With `publishNotReadyAddresses` those of all pods that have one and have not ended, as endpoint controllers do it.
    """
    in_service = _has_address if service["spec"].get("publishNotReadyAddresses") else is_ready
    selector = service["spec"]["selector"]
    namespace = service["metadata"]["namespace"]
    found = set()
    for pod in pods:
        labels = pod["metadata"].get("labels") or {}
        if pod["metadata"]["namespace"] != namespace or not selector.items() <= labels.items():
            continue
        number = _target_port(pod, port)
        if number is not None and in_service(pod):
            found.add(Endpoint(str(pod["status"]["podIP"]), number, str(pod["metadata"]["name"])))
    return tuple(sorted(found))


def is_ready(pod: Object) -> bool:
    """Say whether a pod may get new requests: Ready, with an address, and not being deleted."""
    status = pod.get("status") or {}
    if pod["metadata"].get("deletionTimestamp") or not status.get("podIP"):
        return False
    return any(item["type"] == "Ready" and item["status"] == "True" for item in status.get("conditions") or ())


def _has_address(pod: Object) -> bool:
    status = pod.get("status") or {}
    return bool(status.get("podIP")) and status.get("phase") not in ("Succeeded", "Failed")


def _target_port(pod: Object, port: Object) -> int | None:
    """Return the number that a Service port means in this pod; None when its name is not one of the pod's ports."""
    target = port.get("targetPort") or port["port"]
    if isinstance(target, int):
        return target
    for container in pod.get("spec", {}).get("containers", ()):
        for item in container.get("ports") or ():
            if item.get("name") == target:
                return int(item["containerPort"])
    return None


def _is(item: Object, namespace: str, name: str) -> bool:
    return bool(item["metadata"]["namespace"] == namespace and item["metadata"]["name"] == name)
