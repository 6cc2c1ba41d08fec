"""A real control plane with the node agent, and with the LeaderWorkerSet manager for those who ask for it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from infra.rehearsal import accounts, apiserver, crds, lws_manager
from infra.rehearsal.addresses import SubnetLease
from infra.rehearsal.apiserver import ApiError, ControlPlane
from infra.rehearsal.audit import NODE_AGENT
from infra.rehearsal.binaries import ensure_control_plane
from infra.rehearsal.processes import ProcessSpec, Supervisor

NAMESPACE = "k2"
NODES = 4
T = TypeVar("T")


@dataclass(frozen=True)
class Site:
    directory: Path
    plane: ControlPlane
    supervisor: Supervisor

    def get(self, path: str) -> dict[str, Any]:
        return self.plane.admin.request("GET", path)

    def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self.plane.admin.request("POST", path, body)

    def delete(self, path: str, grace_s: int | None = None) -> None:
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        self.plane.admin.request("DELETE", path, options | ({} if grace_s is None else {"gracePeriodSeconds": grace_s}))

    def pod(self, name: str) -> dict[str, Any] | None:
        try:
            return self.get(f"/api/v1/namespaces/{NAMESPACE}/pods/{name}")
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def pods(self, selector: str) -> list[dict[str, Any]]:
        return self.get(f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector={selector}")["items"]

    def log(self, pod: str, query: str = "") -> str:
        # This is what `kubectl logs` asks for; the API server fetches it from the node over HTTPS.
        answer = self.get(f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/log?{query}")
        return str(answer["text"]) if set(answer) == {"text"} else json.dumps(answer)

    def processes(self, pod: str) -> list[dict[str, Any]]:
        content = json.loads((self.directory / "nodes" / "processes.json").read_text())
        return [process for process in content["processes"] if process["pod"] == pod]

    def run_pod(self, name: str, *containers: dict[str, Any], **spec: Any) -> None:
        body = {
            "metadata": {"name": name, "labels": {"test": name}},
            "spec": {"terminationGracePeriodSeconds": 2, **spec, "containers": list(containers)},
        }
        self.create(f"/api/v1/namespaces/{NAMESPACE}/pods", {"apiVersion": "v1", "kind": "Pod", **body})

    def start_agent(self) -> None:
        subnet = ".".join(self.agent_argv_subnet.split(".")[:2])
        config = str(self.plane.kubeconfig_of(NODE_AGENT))
        argv = [sys.executable, "-m", "infra.rehearsal.nodes", "--kubeconfig", config]
        argv += ["--site", str(self.directory), "--subnet", subnet, "--nodes", str(NODES)]
        self.supervisor.start(ProcessSpec("node-agent", tuple(argv)), wait=False)

    @property
    def agent_argv_subnet(self) -> str:
        return (self.directory / "subnet").read_text()


def wait_for(what: str, probe: Callable[[], T | None], timeout_s: float = 120.0) -> T:
    deadline = time.monotonic() + timeout_s
    while True:
        found = probe()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.1)


def container(command: list[str], name: str = "main", **more: Any) -> dict[str, Any]:
    return {"name": name, "image": "registry.example/test:1", "command": command, **more}


def python(source: str, name: str = "main", **more: Any) -> dict[str, Any]:
    return container(["python", "-c", source], name, **more)


def condition(item: dict[str, Any], kind: str) -> str:
    conditions = item.get("status", {}).get("conditions") or []
    return next((entry["status"] for entry in conditions if entry["type"] == kind), "")


def first_status(pod: dict[str, Any] | None) -> dict[str, Any]:
    return ((pod or {}).get("status", {}).get("containerStatuses") or [{}])[0]


def phase(pod: dict[str, Any] | None) -> str:
    return str((pod or {}).get("status", {}).get("phase", ""))


def ready_nodes(site: Site) -> list[str]:
    nodes = site.get("/api/v1/nodes")["items"]
    return [node["metadata"]["name"] for node in nodes if condition(node, "Ready") == "True"]


def sleeping(seconds: str) -> int | None:
    """Return the pid of the one `sleep` with this argument."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[:2] == [b"sleep", seconds.encode()]:
            return int(path.parent.name)
    return None


@contextmanager
def agent_site(directory: Path, *, groups: bool) -> Iterator[Site]:
    """Start everything in the directory; stop it at the end."""
    with SubnetLease.acquire() as lease, Supervisor(directory, hold_fds=[lease.fileno()]) as supervisor:
        (directory / "subnet").write_text(str(lease.network.network_address))
        definitions = crds.GROUP_FILES.ensure(print) if groups else ()
        plane = apiserver.start(supervisor, ensure_control_plane(print), definitions=definitions)
        if groups:
            lws_manager.start(supervisor, plane, lws_manager.prepare(print))
        accounts.install(plane)
        started = Site(directory, plane, supervisor)
        started.start_agent()
        wait_for("nodes ready", lambda: len(ready_nodes(started)) == NODES)
        account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default"
        wait_for("ServiceAccount", lambda: plane.admin.answers(account))
        yield started
