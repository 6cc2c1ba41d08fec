"""The kinds of objects that the pipeline handles, and where an API server keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote


@dataclass(frozen=True)
class Kind:
    """Where the API server keeps objects of a kind."""

    api_version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str, name: str = "") -> str:
        """Return the path of one object, or of the collection; without a namespace that of all namespaces."""
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        scope = f"/namespaces/{quote(namespace, safe='')}" if self.namespaced and namespace else ""
        return f"{root}{scope}/{self.plural}" + (f"/{quote(name, safe='')}" if name else "")


KINDS: Mapping[str, Kind] = {
    "ClusterRole": Kind("rbac.authorization.k8s.io/v1", "clusterroles", namespaced=False),
    "ClusterRoleBinding": Kind("rbac.authorization.k8s.io/v1", "clusterrolebindings", namespaced=False),
    "ConfigMap": Kind("v1", "configmaps"),
    "Deployment": Kind("apps/v1", "deployments"),
    "Event": Kind("v1", "events"),
    "Gateway": Kind("gateway.networking.k8s.io/v1", "gateways"),
    "GatewayClass": Kind("gateway.networking.k8s.io/v1", "gatewayclasses", namespaced=False),
    "HTTPRoute": Kind("gateway.networking.k8s.io/v1", "httproutes"),
    "Job": Kind("batch/v1", "jobs"),
    "Lease": Kind("coordination.k8s.io/v1", "leases"),
    "LeaderWorkerSet": Kind("leaderworkerset.x-k8s.io/v1", "leaderworkersets"),
    "Namespace": Kind("v1", "namespaces", namespaced=False),
    "NetworkPolicy": Kind("networking.k8s.io/v1", "networkpolicies"),
    "Node": Kind("v1", "nodes", namespaced=False),
    "Pod": Kind("v1", "pods"),
    "PodDisruptionBudget": Kind("policy/v1", "poddisruptionbudgets"),
    "PriorityClass": Kind("scheduling.k8s.io/v1", "priorityclasses", namespaced=False),
    "ResourceQuota": Kind("v1", "resourcequotas"),
    "Role": Kind("rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": Kind("rbac.authorization.k8s.io/v1", "rolebindings"),
    "Secret": Kind("v1", "secrets"),
    "Service": Kind("v1", "services"),
    "ServiceAccount": Kind("v1", "serviceaccounts"),
}
