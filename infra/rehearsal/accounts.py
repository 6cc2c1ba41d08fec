"""Who the site's own programs are to the API server, and the objects that give them their rights."""

from __future__ import annotations

import json
import time
from importlib import resources
from typing import Any

import yaml

from infra.rehearsal.apiserver import ApiConnection, ControlPlane
from infra.rehearsal.audit import GATEWAY, NAMESPACE, NODE_AGENT
from infra.rehearsal.errors import SiteError

_PATHS = {
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles/",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/",
    "Role": f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles/",
    "RoleBinding": f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/rolebindings/",
}
_RIGHTS_WITHIN_S = 30.0


def rights_objects() -> list[dict[str, Any]]:
    """Return the roles and bindings of the site's own programs, as written."""
    text = (resources.files("manifests") / "sites" / "rehearsal" / "rights.yaml").read_text()
    return list(yaml.safe_load_all(text))


def connection_of(plane: ControlPlane, user: str) -> ApiConnection:
    """Return a connection with the identity of one of the users that the API server knows by token."""
    config = json.loads(plane.kubeconfig_of(user).read_text())
    return ApiConnection(plane.url, plane.ca_path, config["users"][0]["user"]["token"])


def install(plane: ControlPlane) -> None:
    """Make the namespace, and the rights of the site's own programs, and wait until these have effect.

    Raises:
        SiteError: they have none within half a minute.
    """
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    plane.admin.apply(f"/api/v1/namespaces/{NAMESPACE}", namespace)
    for obj in rights_objects():
        plane.admin.apply(_PATHS[obj["kind"]] + obj["metadata"]["name"], obj)
    agent, gateway = connection_of(plane, NODE_AGENT), connection_of(plane, GATEWAY)
    deadline = time.monotonic() + _RIGHTS_WITHIN_S
    # What is made last: a binding that has effect means that those before it have.
    while not (agent.answers("/api/v1/nodes") and gateway.answers(f"/api/v1/namespaces/{NAMESPACE}/services")):
        if time.monotonic() > deadline:
            raise SiteError("the rights of the node agent and the gateway have no effect")
        time.sleep(0.05)
