"""Sixteen nodes of eight GPUs under the real scheduler and controllers, and our own objects on them.

The pods are those of a rendered release: priority, tolerations, affinity and resources are ours. Only what they run is
not: nothing is staged here and nothing serves, so each container sleeps.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

from infra.rehearsal import apiserver, crds
from infra.rehearsal.addresses import SubnetLease
from infra.rehearsal.apiserver import ApiError, ControlPlane
from infra.rehearsal.binaries import ensure_control_plane
from infra.rehearsal.processes import ProcessSpec, Supervisor
from tasks.adapters.clock import SystemClock
from tasks.adapters.cluster import KubeCluster
from tasks.core.quantity import quantity
from tasks.core.readiness import Readiness
from tasks.core.render import (
    GROUP_NAME_LABEL,
    WORKER_INDEX_LABEL,
    placed_label,
    render_base,
    render_serving,
    staged_label,
)
from tasks.core.spec import Release
from tasks.specs import load_base, load_profile
from tasks.steps.capacity import read_nodes
from tasks.steps.context import Ports, Subject
from tasks.steps.locking import make_accepted_lock
from tasks.steps.rollout import _look, _View
from tasks.wiring import pipeline_rights
from tests.contract.agent_site import wait_for
from tests.fakes.checkpoints import REPO, REVISION
from tests.fakes.memory_cluster import MemoryCluster
from tests.fakes.memory_engine import MemoryEngine, MemoryStats
from tests.fakes.memory_hub import MemoryHub
from tests.fakes.memory_store import MemoryStore
from tests.fakes.small_world import IMAGES, TEMPLATES, RecordingProgress, checkpoint, release, site
from tests.fakes.steady_clock import SteadyClock

NAMESPACE = "k2"
NODES = tuple(f"node-{number}" for number in range(1, 17))
PIPELINE = "k2-pipeline"
LATE_S = 60.0
"""How long a rollout is said to have waited: longer than the patience that a state of a moment is given."""
# An engine takes a moment to end, in which its pod's status says who ends it.
_SLEEP = "trap 'sleep 1; exit 143' TERM; sleep 3600 & wait"
_NOT_HERE = ("Gateway", "NetworkPolicy")
_MERGE = "application/merge-patch+json"

T = TypeVar("T")
Object = dict[str, Any]


def condition(obj: Object, kind: str) -> Object:
    """Return a condition of an object's status, empty if there is none."""
    return next((c for c in obj.get("status", {}).get("conditions") or [] if c["type"] == kind), {})


@dataclass
class SixteenNodes:
    """The cluster as a test acts on it (`admin`), and as the pipeline sees it, with its own rights (`ports`)."""

    directory: Path
    plane: ControlPlane
    admin: KubeCluster
    ports: Ports
    subject: Subject

    # -- the cluster's side -----------------------------------------------------------------------------------------

    def path(self, plural: str, name: str = "", group: str = "") -> str:
        """Return the path of objects of the namespace."""
        root = f"/apis/{group}" if group else "/api/v1"
        return f"{root}/namespaces/{NAMESPACE}/{plural}" + (f"/{name}" if name else "")

    def pod(self, name: str) -> Object | None:
        """Return a pod, or None."""
        return self.admin.get("Pod", name)

    def pods(self, **labels: str) -> dict[str, Object]:
        """Return pods by name."""
        return {pod["metadata"]["name"]: pod for pod in self.admin.list_objects("Pod", labels)}

    def patch(self, path: str, body: Object) -> None:
        """Change an object by a merge patch."""
        self.plane.admin.request("PATCH", path, body, content_type=_MERGE)

    def delete(self, path: str, **options: Any) -> None:
        """Delete an object with its dependents; what is not there is no error."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background", **options}
        try:
            self.plane.admin.request("DELETE", path, body)
        except ApiError as error:
            if error.status != 404:
                raise

    def cordon(self, node: str, on: bool = True) -> None:
        """Do what `kubectl cordon` and `kubectl uncordon` do."""
        self.patch(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": on or None}})

    def taint(self, node: str, *taints: Object) -> None:
        """Give a node taints of ours, or take all away."""
        self.patch(f"/api/v1/nodes/{node}", {"spec": {"taints": list(taints)}})

    def evict(self, pod: str) -> None:
        """Ask for an eviction as `kubectl drain` does; ApiError 429 where a budget forbids it."""
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": NAMESPACE}}
        self.plane.admin.request("POST", self.path("pods", pod) + "/eviction", body)

    def lose(self, node: str) -> Callable[[], None]:
        """Stop a node's heartbeats and processes; the answer brings it back."""
        injection = self.directory / "inject" / "node-lost.json"
        injection.parent.mkdir(exist_ok=True)
        injection.write_text(json.dumps({"node": node}))
        return injection.unlink

    def node_ready(self, node: str) -> str:
        """Return whether the API says that a node is Ready."""
        return str(condition(self.admin.get("Node", node) or {}, "Ready").get("status", ""))

    def quota(self, name: str, **hard: str) -> None:
        """Set a ResourceQuota and wait until its use has been counted."""
        spec = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": name}, "spec": {"hard": hard}}
        self.admin.apply(spec)
        wait_for(f"quota {name} counted", lambda: _counted(self.admin.get("ResourceQuota", name), hard))

    def used(self, name: str) -> dict[str, Decimal]:
        """Return what the API server counts of a quota."""
        quota = self.admin.get("ResourceQuota", name) or {}
        return {key: quantity(value) for key, value in quota["status"]["used"].items()}

    def clear(self) -> None:
        """Take away what a test made: quotas, engines, pods, taints, cordons."""
        for quota in self.admin.list_objects("ResourceQuota"):
            self.delete(self.path("resourcequotas", quota["metadata"]["name"]))
        for plural, group in (("statefulsets", "apps/v1"), ("jobs", "batch/v1")):
            for item in self.plane.admin.request("GET", self.path(plural, group=group))["items"]:
                self.delete(self.path(plural, item["metadata"]["name"], group))
        for lws in self.admin.list_objects("LeaderWorkerSet"):
            self.admin.delete("LeaderWorkerSet", lws["metadata"]["name"])
        for event in self.admin.list_objects("Event"):
            self.delete(self.path("events", event["metadata"]["name"]))
        wait_for("no engine pods", self._no_pods)
        for node in self.admin.list_objects("Node"):
            if node["spec"].get("unschedulable") or node["spec"].get("taints"):
                self.patch(f"/api/v1/nodes/{node['metadata']['name']}", {"spec": {"unschedulable": None, "taints": []}})

    def _no_pods(self) -> bool:
        left = [name for name in self.pods() if not name.startswith("k2-parking-")]
        for name in left:
            self.delete(self.path("pods", name), gracePeriodSeconds=0)
        return not left

    # -- our objects ------------------------------------------------------------------------------------------------

    def group(self, role: str) -> Object:
        """Return the rendered group of a role."""
        objects = render_serving(self.subject.release, self.subject.lock, self.ports.site, self.ports.templates)
        return next(obj for obj in objects if obj["metadata"]["name"].endswith(f"-{role}"))

    def engine_pod(self, name: str, **spec: Any) -> Object:
        """Return one engine pod of the decode group's leader."""
        group = self.group("decode")
        template = _sleeping(group["spec"]["leaderWorkerTemplate"]["leaderTemplate"])
        labels = {
            **template["metadata"]["labels"],
            GROUP_NAME_LABEL: group["metadata"]["name"],
            WORKER_INDEX_LABEL: "0",
        }
        meta = {"name": name, "namespace": NAMESPACE, "labels": labels}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {**template["spec"], **spec}}

    def place(self, *nodes: str) -> None:
        """Give nodes, and no others, the labels that engine pods want."""
        labels = (staged_label(self.subject.lock.digest), placed_label(self.subject.serving))
        for node in self.admin.list_objects("Node"):
            name = node["metadata"]["name"]
            wanted = dict.fromkeys(labels, "true" if name in nodes else None)
            if any(node["metadata"]["labels"].get(key) != value for key, value in wanted.items()):
                self.patch(f"/api/v1/nodes/{name}", {"metadata": {"labels": wanted}})

    def apply_group(self, role: str, size: int) -> Object:
        """Create a group's LeaderWorkerSet, and of the two StatefulSets that its manager makes of it the leader's."""
        group = self.group(role)
        group["spec"]["leaderWorkerTemplate"]["size"] = size
        self.admin.apply(group)
        name = group["metadata"]["name"]
        self._stateful_set(name, group["spec"]["leaderWorkerTemplate"]["leaderTemplate"], name, replicas=1, first=0)
        return group

    def start_group(self, role: str, size: int) -> str:
        """Create a group as its manager does: the workers' StatefulSet once the leader is there; return its name."""
        group = self.apply_group(role, size)
        name, shape = str(group["metadata"]["name"]), group["spec"]["leaderWorkerTemplate"]
        wait_for(f"leader of {role}", lambda: self.pod(f"{name}-0"))
        self._stateful_set(f"{name}-0", shape["workerTemplate"], name, replicas=size - 1, first=1)
        return name

    def _stateful_set(self, name: str, template: Object, group: str, *, replicas: int, first: int) -> None:
        pod = _sleeping(template)
        labels = {GROUP_NAME_LABEL: group, "test/set": name}
        pod["metadata"]["labels"] |= labels
        spec = {
            "replicas": replicas,
            "serviceName": group,
            "podManagementPolicy": "Parallel",
            "ordinals": {"start": first},
            "selector": {"matchLabels": labels},
            "template": pod,
        }
        self.plane.admin.request(
            "POST", self.path("statefulsets", group="apps/v1"), {"metadata": {"name": name}, "spec": spec}
        )

    def scale(self, stateful_set: str, replicas: int) -> None:
        """Have another number of pods of a StatefulSet."""
        self.patch(self.path("statefulsets", stateful_set, "apps/v1"), {"spec": {"replicas": replicas}})

    def number(self) -> None:
        """Label each engine pod with its rank, as the webhook of the LeaderWorkerSet manager does."""
        for name, pod in self.pods().items():
            labels = pod["metadata"]["labels"]
            if GROUP_NAME_LABEL in labels and WORKER_INDEX_LABEL not in labels:
                rank = name.removeprefix(labels[GROUP_NAME_LABEL]).split("-")[1:]
                index = rank[1] if len(rank) > 1 else "0"
                self.patch(self.path("pods", name), {"metadata": {"labels": {WORKER_INDEX_LABEL: index}}})

    # -- the product's view -----------------------------------------------------------------------------------------

    def look(self, previous: Readiness | None = None) -> Readiness:
        """Return what the rollout step sees, with the pipeline's own rights, after having waited a while."""
        self.number()
        with _View.of(self.ports, self.subject.serving) as view:
            return _look(self.ports, self.subject, view, LATE_S, previous)

    def node_facts(self) -> dict[str, str]:
        """Return for each node why the plan does not choose it; empty for those that it may."""
        return {facts.name: facts.why_not for facts in read_nodes(self.ports, self.subject.serving)}


def _counted(quota: Object | None, hard: Object) -> bool:
    """Say whether the quota controller has counted what is used of every limit, as it is now."""
    status = (quota or {}).get("status", {})
    known = {key: quantity(value) for key, value in status.get("hard", {}).items()}
    return set(status.get("used", {})) == set(hard) and known == {key: quantity(value) for key, value in hard.items()}


def _sleeping(template: Object) -> Object:
    """Return a pod template that is placed as before and runs nothing."""
    pod: Object = copy.deepcopy(template)
    spec = pod["spec"]
    for container in spec["initContainers"]:
        container |= {"command": ["true"], "args": []}
    for volume in spec["volumes"]:
        if "hostPath" in volume:
            volume["hostPath"]["type"] = "DirectoryOrCreate"
    for container in spec["containers"]:
        container |= {"command": ["sh", "-c", _SLEEP], "args": []}
        container.pop("startupProbe"), container.pop("readinessProbe")
    return pod


def the_release() -> Release:
    """Return a release of the published layout: 4 prefill and 12 decode nodes."""
    return replace(release("k2-full-1"), profile=load_profile("h200x16-4p12d"))


@contextmanager
def sixteen_nodes(directory: Path) -> Iterator[SixteenNodes]:
    """Start the control plane, 16 nodes and our base objects; stop everything at the end."""
    with SubnetLease.acquire() as lease, Supervisor(directory, hold_fds=[lease.fileno()]) as supervisor:
        definitions = crds.ensure_files(print)
        plane = apiserver.start(supervisor, ensure_control_plane(print), definitions=definitions)
        admin = KubeCluster(str(plane.kubeconfig), "k2-rehearsal", NAMESPACE)
        for obj in render_base(load_base(), site(), IMAGES.tool):
            if obj["kind"] not in _NOT_HERE:
                admin.apply(obj)
        subnet = ".".join(str(lease.network.network_address).split(".")[:2])
        argv = [sys.executable, "-m", "infra.rehearsal.nodes", "--kubeconfig", str(plane.kubeconfig)]
        argv += ["--site", str(directory), "--subnet", subnet, "--nodes", str(len(NODES))]
        supervisor.start(ProcessSpec("node-agent", tuple(argv)), wait=False)
        started = SixteenNodes(directory, plane, admin, _pipeline_ports(directory, plane), _subject())
        wait_for("nodes ready", lambda: all(started.node_ready(node) == "True" for node in NODES))
        yield started


def _subject() -> Subject:
    return Subject(the_release(), make_accepted_lock(MemoryHub(REPO, REVISION, checkpoint()), REPO, REVISION)[0])


def _pipeline_ports(directory: Path, plane: ControlPlane) -> Ports:
    """Return ports whose cluster is reached with the pipeline's own ServiceAccount."""
    account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{PIPELINE}/token"
    wanted = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    token = plane.admin.request("POST", account, wanted)["status"]["token"]
    kubeconfig = directory / "pipeline.kubeconfig"
    kubeconfig.write_text(json.dumps(apiserver.kubeconfig(plane.url, plane.ca_path, PIPELINE, token)))
    return Ports(
        site=site(),
        hub=MemoryHub(REPO, REVISION, checkpoint()),
        store=MemoryStore(),
        cluster=KubeCluster(str(kubeconfig), "k2-rehearsal", NAMESPACE),
        engine=MemoryEngine(MemoryCluster(), SteadyClock()),
        stats=MemoryStats(),
        clock=SystemClock(),
        progress=RecordingProgress(),
        templates=TEMPLATES,
        run="run-1",
        tool="k2-release 0",
        rights=pipeline_rights(site()),
    )
