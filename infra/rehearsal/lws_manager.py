"""The real LeaderWorkerSet manager beside the control plane, with its own webhooks, identity and rights.

It runs as a process and not as a pod, so three things differ from its installation in a cluster: its webhooks are
reached by URL and our CA instead of through a Service and its own certificates, it elects no leader because it is
alone, and its kubeconfig holds a token of its ServiceAccount. Everything else is read from its Go module: the rules of
its ClusterRoles and its webhook configurations.
"""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from infra.rehearsal import apiserver
from infra.rehearsal.apiserver import ApiError, ControlPlane
from infra.rehearsal.binaries import LEADER_WORKER_SET, LWS_MANAGER, LWS_MODULE, ensure_program
from infra.rehearsal.cache import Report
from infra.rehearsal.certificates import write_private
from infra.rehearsal.gomodules import ModuleFiles
from infra.rehearsal.processes import Child, ProcessSpec, Supervisor, free_ports

NAMESPACE, ACCOUNT = "lws-system", "lws-controller-manager"
FILES = ModuleFiles(
    "lws-manifests",
    LWS_MODULE,
    tuple(
        (LEADER_WORKER_SET, f"config/{file}")
        for file in (
            "rbac/role.yaml",
            "rbac/auth_proxy_role.yaml",
            "webhook/manifests.yaml",
            "webhook/mutating-patch.yaml",
            "webhook/validating-patch.yaml",
        )
    ),
)
_HOST = "127.0.0.1"
_PREFIX = "lws-"
"""What upstream's own installation puts in front of every name."""
_TOKEN_S = 30 * 86400
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_ADMISSION = "/apis/admissionregistration.k8s.io/v1"
_PATHS = {
    "MutatingWebhookConfiguration": f"{_ADMISSION}/mutatingwebhookconfigurations",
    "ValidatingWebhookConfiguration": f"{_ADMISSION}/validatingwebhookconfigurations",
}

Object = dict[str, Any]


@dataclass(frozen=True)
class ManagerPrograms:
    """What the manager is started from: its program and the files of its module."""

    program: Path
    manifests: Mapping[str, Path]
    """Name of a file of `FILES` -> its path."""


def prepare(report: Report) -> ManagerPrograms:
    """Return the program and the manifests, built and fetched now if this machine has none."""
    program = ensure_program(LWS_MANAGER, report)
    return ManagerPrograms(program, {path.name: path for path in FILES.ensure(report)})


def start(supervisor: Supervisor, plane: ControlPlane, programs: ManagerPrograms) -> Child:
    """Install the manager's account, rights and webhooks, start it, and wait until its webhooks do their work."""
    webhooks, metrics, health = free_ports(3, _HOST)
    directory = supervisor.site_dir / "lws"
    directory.mkdir(mode=0o700, exist_ok=True)
    plane.authority.issue("tls", "lws-webhooks", addresses=[_HOST], directory=directory)
    _install_account(plane, programs)
    _write_kubeconfig(plane, directory / "kubeconfig")
    config = {
        "apiVersion": "config.lws.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"host": _HOST, "port": webhooks, "certDir": str(directory)},
        "metrics": {"bindAddress": f"{_HOST}:{metrics}"},
        "health": {"healthProbeBindAddress": f"{_HOST}:{health}"},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    argv = (
        str(programs.program),
        f"--config={directory / 'config.yaml'}",
        f"--kubeconfig={directory / 'kubeconfig'}",
        "--zap-devel=false",
    )
    address = f"https://{_HOST}:{webhooks}"
    for configuration in webhook_configurations(programs, address, plane.ca_path.read_bytes()):
        plane.admin.apply(f"{_PATHS[configuration['kind']]}/{configuration['metadata']['name']}", configuration)
    spec = ProcessSpec(
        LWS_MANAGER, argv, unset=("ENABLE_WEBHOOKS", "KUBERNETES_"), address=address, ready=lambda: answers(plane)
    )
    return supervisor.start(spec)


def webhook_configurations(programs: ManagerPrograms, url: str, ca_pem: bytes) -> Iterator[Object]:
    """Yield the module's webhook configurations with the patches of its own installation, reached at the URL."""
    patches = {
        "MutatingWebhookConfiguration": "mutating-patch.yaml",
        "ValidatingWebhookConfiguration": "validating-patch.yaml",
    }
    for document in yaml.safe_load_all(programs.manifests["manifests.yaml"].read_text()):
        patch = yaml.safe_load(programs.manifests[patches[document["kind"]]].read_text())
        yield reached_at(_patched(document, patch), url, ca_pem)


def _patched(document: Object, patch: list[Object]) -> Object:
    """Return a configuration after the module's JSON patch: its group pods' webhooks see no other pods."""
    patched = copy.deepcopy(document)
    for operation in patch:
        if operation["op"] != "replace":
            raise ValueError(f"a patch of {LEADER_WORKER_SET} has the operation {operation['op']}, not replace")
        index = int(operation["path"].removeprefix("/webhooks/"))
        patched["webhooks"][index] = operation["value"]
    patched["metadata"]["name"] = _PREFIX + patched["metadata"]["name"]
    return patched


def reached_at(configuration: Object, url: str, ca_pem: bytes) -> Object:
    """Return a webhook configuration whose webhooks are called at the URL instead of through a Service."""
    reached = copy.deepcopy(configuration)
    bundle = base64.b64encode(ca_pem).decode()
    for webhook in reached["webhooks"]:
        webhook["clientConfig"] = {"url": url + webhook["clientConfig"]["service"]["path"], "caBundle": bundle}
    return reached


def _install_account(plane: ControlPlane, programs: ManagerPrograms) -> None:
    """Give the manager a ServiceAccount that has the rules of its module's ClusterRoles, and no other."""
    admin = plane.admin
    admin.apply(f"/api/v1/namespaces/{NAMESPACE}", {"apiVersion": "v1", "kind": "Namespace", **_named(NAMESPACE)})
    account = {"apiVersion": "v1", "kind": "ServiceAccount", **_named(ACCOUNT)}
    admin.apply(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{ACCOUNT}", account)
    for file in ("role.yaml", "auth_proxy_role.yaml"):
        role = yaml.safe_load(programs.manifests[file].read_text())
        name = role["metadata"]["name"] = _PREFIX + role["metadata"]["name"]
        admin.apply(f"{_RBAC}/clusterroles/{name}", role)
        binding = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            **_named(name),
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}],
        }
        admin.apply(f"{_RBAC}/clusterrolebindings/{name}", binding)


def _write_kubeconfig(plane: ControlPlane, path: Path) -> None:
    token_path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{ACCOUNT}/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
    answer = plane.admin.request("POST", token_path, {**request, "spec": {"expirationSeconds": _TOKEN_S}})
    config = apiserver.kubeconfig(plane.url, plane.ca_path, ACCOUNT, answer["status"]["token"])
    write_private(path, json.dumps(config).encode())


def answers(plane: ControlPlane) -> bool:
    """Tell whether a group's pod gets its environment from the manager's webhook; nothing is stored.

    The manager's own health page says yes before its webhooks are there; that of pods comes after those of groups.
    """
    pod: Object = {
        "metadata": {
            "name": "probe-0",
            "labels": {
                "leaderworkerset.sigs.k8s.io/name": "probe",
                "leaderworkerset.sigs.k8s.io/worker-index": "0",
            },
            "annotations": {"leaderworkerset.sigs.k8s.io/size": "1"},
        },
        "spec": {"containers": [{"name": "probe", "image": "probe"}]},
    }
    try:
        made = plane.admin.request("POST", "/api/v1/namespaces/default/pods?dryRun=All", pod)
    except ApiError:
        return False  # its webhooks fail closed until they are there
    given = {entry["name"] for entry in made["spec"]["containers"][0].get("env", ())}
    return "LWS_LEADER_ADDRESS" in given  # until the API server has read the configuration, it calls no webhook


def _named(name: str) -> Object:
    return {"metadata": {"name": name}}
