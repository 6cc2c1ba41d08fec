"""An identity that may do little: it is told what it lacks before it tries, and by each call that it may not make."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.rehearsal import apiserver
from infra.rehearsal.apiserver import ControlPlane
from tasks.core.errors import Never, RightsError
from tasks.core.permissions import Right
from tasks.ports import Cluster
from tests.contract.kubernetes.sides import (
    NAMESPACE,
    client,
    config_map,
    eventually,
    lease,
    service_account_token,
)
from tests.fakes.memory_cluster import MemoryCluster

pytestmark = [pytest.mark.timeout(300)]

ACCOUNT = "t-may-do-little"
MAY = tuple(Right("", "configmaps", verb, NAMESPACE) for verb in ("get", "patch"))
MAY_NOT = (
    *(Right("", "configmaps", verb, NAMESPACE) for verb in ("list", "watch", "create", "update", "delete")),
    Right("", "pods", "list"),
    Right("", "nodes", "patch"),
    Right("", "pods/log", "get", NAMESPACE),
    Right("coordination.k8s.io", "leases", "get", NAMESPACE),
)


def _fake() -> Cluster:
    cluster = MemoryCluster()
    cluster.removed_rights = set(MAY_NOT)
    return cluster


def _real(plane: ControlPlane, directory: Path) -> Cluster:
    token = service_account_token(plane, ACCOUNT)
    path = directory / "kubeconfig"
    path.write_text(json.dumps(apiserver.kubeconfig(plane.url, plane.ca_path, ACCOUNT, token)))
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
    rule = {"apiGroups": [""], "resources": ["configmaps"], "verbs": [right.verb for right in MAY]}
    head = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": ACCOUNT}}
    plane.admin.apply(f"{rbac}/roles/{ACCOUNT}", {**head, "kind": "Role", "rules": [rule]})
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": ACCOUNT}
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}
    binding = {**head, "kind": "RoleBinding", "roleRef": reference, "subjects": [subject]}
    plane.admin.apply(f"{rbac}/rolebindings/{ACCOUNT}", binding)
    cluster = client(plane, path)
    eventually(lambda: not cluster.missing_rights(MAY))
    return cluster


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.site)])
def weak(request: pytest.FixtureRequest, tmp_path: Path) -> Cluster:
    """The port as such an identity has it."""
    return _fake() if request.param == "fake" else _real(request.getfixturevalue("plane"), tmp_path)


def test_it_is_told_what_it_lacks_in_the_order_asked(weak: Cluster) -> None:
    assert weak.missing_rights([*MAY_NOT, *MAY]) == list(MAY_NOT)
    assert weak.missing_rights(reversed([*MAY, *MAY_NOT])) == list(reversed(MAY_NOT))
    assert weak.missing_rights(MAY) == []
    assert weak.missing_rights([]) == []
    assert weak.identity().startswith(f"system:serviceaccount:{NAMESPACE}:")


REFUSED: dict[str, tuple[Right, str, Callable[[Cluster], object]]] = {
    "list": (MAY_NOT[0], "ConfigMap", lambda c: c.list_objects("ConfigMap")),
    "apply": (MAY_NOT[2], "ConfigMap/t-none", lambda c: c.apply(config_map("t-none"))),
    "dry-run": (MAY_NOT[2], "ConfigMap/t-none", lambda c: c.apply(config_map("t-none"), dry_run=True)),
    "create": (MAY_NOT[2], "ConfigMap/t-none", lambda c: c.create(config_map("t-none"))),
    "replace": (
        MAY_NOT[3],
        "ConfigMap/t-none",
        lambda c: c.replace({**config_map("t-none"), "metadata": {"name": "t-none", "resourceVersion": "1"}}),
    ),
    "delete": (MAY_NOT[4], "ConfigMap/t-none", lambda c: c.delete("ConfigMap", "t-none")),
    "everywhere": (MAY_NOT[5], "Pod", lambda c: c.list_objects("Pod", everywhere=True)),
    "patch": (MAY_NOT[6], "Node/t-none", lambda c: c.merge_patch("Node", "t-none", {})),
    "log": (MAY_NOT[7], "Pod/t-none container main", lambda c: c.pod_log("t-none", "main", 1)),
    "get": (MAY_NOT[8], "Lease/t-none", lambda c: c.get("Lease", lease("t-none", "a")["metadata"]["name"])),
}


@pytest.mark.parametrize("call", REFUSED)
def test_a_call_that_it_may_not_make_names_the_right(weak: Cluster, call: str) -> None:
    right, where, act = REFUSED[call]
    with pytest.raises(RightsError) as caught:
        act(weak)
    error = caught.value
    assert error.details["missing"] == [right.as_data()]
    assert error.details["identity"] == weak.identity()
    assert (error.code, error.where, error.retry) == ("K2-RGT-001", where, Never())
