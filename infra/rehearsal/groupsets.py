"""What a LeaderWorkerSet means: the pods of its groups, when a group must be made anew, and the set's status. Pure."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from infra.rehearsal.kubeclient import JsonObject
from infra.rehearsal.kuberesources import LEADER_WORKER_SETS

PREFIX = "leaderworkerset.sigs.k8s.io"
NAME_LABEL = f"{PREFIX}/name"
GROUP_INDEX_LABEL = f"{PREFIX}/group-index"
WORKER_INDEX_LABEL = f"{PREFIX}/worker-index"
GROUP_KEY_LABEL = f"{PREFIX}/group-key"
REVISION_LABEL = f"{PREFIX}/template-revision-hash"
SIZE_ANNOTATION = f"{PREFIX}/size"
REPLICAS_ANNOTATION = f"{PREFIX}/replicas"
LEADER_NAME_ANNOTATION = f"{PREFIX}/leader-name"


@dataclass(frozen=True)
class GroupSet:
    """A LeaderWorkerSet with its defaults filled in."""

    raw: JsonObject

    @property
    def name(self) -> str:
        """Return the set's name."""
        return str(self.raw["metadata"]["name"])

    @property
    def namespace(self) -> str:
        """Return the set's namespace."""
        return str(self.raw["metadata"]["namespace"])

    @property
    def replicas(self) -> int:
        """Return how many groups there shall be."""
        return int(self.raw["spec"].get("replicas", 1))

    @property
    def size(self) -> int:
        """Return how many pods a group has, the leader included."""
        return int(self.raw["spec"]["leaderWorkerTemplate"].get("size", 1))

    @property
    def restart_policy(self) -> str:
        """Return when a whole group is made anew."""
        policy = str(self.raw["spec"]["leaderWorkerTemplate"].get("restartPolicy") or "RecreateGroupOnPodRestart")
        return "None" if policy == "Default" else policy

    @property
    def leader_first(self) -> bool:
        """Tell whether workers wait for a ready leader."""
        return str(self.raw["spec"].get("startupPolicy")) == "LeaderReady"

    @property
    def unique_subdomains(self) -> bool:
        """Tell whether each group has a subdomain of its own."""
        network = self.raw["spec"].get("networkConfig") or {}
        return str(network.get("subdomainPolicy")) == "UniquePerReplica"

    @property
    def partition(self) -> int:
        """Return the first group index that a changed template applies to."""
        return int(self._rolling().get("partition") or 0)

    @property
    def max_unavailable(self) -> int:
        """Return how many groups may be unready during a change of the template; a percentage counts as one."""
        value = self._rolling().get("maxUnavailable", 1)
        return max(int(value), 1) if not isinstance(value, str) else 1

    @property
    def revision(self) -> str:
        """Return a digest of everything that makes a group outdated when it changes."""
        spec = self.raw["spec"]
        content = {"template": spec["leaderWorkerTemplate"], "network": spec.get("networkConfig")}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]

    def _rolling(self) -> JsonObject:
        return (self.raw["spec"].get("rolloutStrategy") or {}).get("rollingUpdateConfiguration") or {}


def pod_name(group_set: GroupSet, group: int, worker: int) -> str:
    """Return the name of a pod: the leader's is the group's."""
    return f"{group_set.name}-{group}" if worker == 0 else f"{group_set.name}-{group}-{worker}"


def group_pod(group_set: GroupSet, group: int, worker: int) -> JsonObject:
    """Return the pod to create for one place in one group."""
    template = group_set.raw["spec"]["leaderWorkerTemplate"]
    chosen = template.get("leaderTemplate") if worker == 0 else None
    chosen = copy.deepcopy(chosen or template["workerTemplate"])
    leader = pod_name(group_set, group, 0)
    labels = {
        NAME_LABEL: group_set.name,
        GROUP_INDEX_LABEL: str(group),
        WORKER_INDEX_LABEL: str(worker),
        GROUP_KEY_LABEL: hashlib.sha1(f"{group_set.namespace}/{leader}".encode(), usedforsecurity=False).hexdigest(),
        REVISION_LABEL: group_set.revision,
    }
    annotations = {SIZE_ANNOTATION: str(group_set.size)}
    annotations |= {REPLICAS_ANNOTATION: str(group_set.replicas)} if worker == 0 else {LEADER_NAME_ANNOTATION: leader}
    metadata = chosen.get("metadata") or {}
    spec = chosen["spec"]
    spec["hostname"] = pod_name(group_set, group, worker)
    spec["subdomain"] = leader if group_set.unique_subdomains else group_set.name
    address = f"{leader}.{spec['subdomain']}.{group_set.namespace}"
    for container in [*(spec.get("initContainers") or []), *spec["containers"]]:
        container["env"] = _group_environment(container.get("env") or [], address, group_set.size, worker)
    return {
        "metadata": {
            "name": pod_name(group_set, group, worker),
            "namespace": group_set.namespace,
            "labels": (metadata.get("labels") or {}) | labels,
            "annotations": (metadata.get("annotations") or {}) | annotations,
            "ownerReferences": [_owner(group_set)],
        },
        "spec": spec,
    }


def headless_service(group_set: GroupSet, group: int | None = None) -> JsonObject:
    """Return the Service that gives the pods of the set (or of one group) their names."""
    name = group_set.name if group is None else pod_name(group_set, group, 0)
    selector = {NAME_LABEL: group_set.name} | ({} if group is None else {GROUP_INDEX_LABEL: str(group)})
    return {
        "metadata": {
            "name": name,
            "namespace": group_set.namespace,
            "labels": {NAME_LABEL: group_set.name},
            "ownerReferences": [_owner(group_set)],
        },
        "spec": {"clusterIP": "None", "selector": selector, "publishNotReadyAddresses": True},
    }


def pod_ready(pod: JsonObject) -> bool:
    """Tell whether a pod runs and is ready."""
    conditions = pod.get("status", {}).get("conditions") or []
    ready = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
    return ready and pod["status"].get("phase") == "Running"


def breakage(
    group_set: GroupSet, pods: Mapping[int, JsonObject], lost: Iterable[str], *, was_whole: bool
) -> str | None:
    """Return why a group must be made anew, or None when it need not."""
    policy = group_set.restart_policy
    if policy == "None" or not (pods or was_whole):
        return None
    pending = len(pods) < group_set.size or any(_phase(pod) == "Pending" for pod in pods.values())
    if policy == "RecreateGroupAfterStart" and pending and not was_whole:
        return None
    if was_whole and len(pods) < group_set.size:
        return "a pod is gone"
    lost_names = set(lost)
    for pod in pods.values():
        name = pod["metadata"]["name"]
        if "deletionTimestamp" in pod["metadata"]:
            return f"{name} is being deleted"
        if _phase(pod) in ("Failed", "Succeeded"):
            return f"{name} is {_phase(pod)}"
        if pod["spec"].get("nodeName") in lost_names:
            return f"{name} is on the lost node {pod['spec']['nodeName']}"
        if _restarts(pod):
            return f"a container of {name} was restarted"
    return None


def set_status(group_set: GroupSet, groups: Mapping[int, Mapping[int, JsonObject]], now: str) -> JsonObject:
    """Return the status of a set whose groups have these pods."""
    revision = group_set.revision
    leaders = {index: pods for index, pods in groups.items() if 0 in pods}
    ready = {index for index, pods in leaders.items() if group_ready(group_set, pods)}
    updated = {index for index, pods in leaders.items() if _group_revision(pods) == {revision}}
    wanted = range(group_set.replicas)
    current = {index for index in leaders if group_set.partition <= index < group_set.replicas}
    if current - updated:
        true = {"UpdateInProgress", "Progressing"}
    elif all(index in ready for index in wanted) and current <= updated:
        true = {"Available"}
    else:
        true = {"Progressing"}
    return {
        "replicas": len(leaders),
        "readyReplicas": len(ready),
        "updatedReplicas": len(updated),
        "hpaPodSelector": f"{NAME_LABEL}={group_set.name},{WORKER_INDEX_LABEL}=0",
        "observedGeneration": group_set.raw["metadata"].get("generation", 0),
        "conditions": _conditions(group_set, true, now),
    }


def outdated_groups(group_set: GroupSet, groups: Mapping[int, Mapping[int, JsonObject]]) -> list[int]:
    """Return the groups to make anew now because their template changed: unready ones, and as many more as may be."""
    revision = group_set.revision
    due = [
        index
        for index, pods in sorted(groups.items(), reverse=True)
        if pods and _group_revision(pods) != {revision} and group_set.partition <= index < group_set.replicas
    ]
    unready = [index for index in due if not group_ready(group_set, groups[index])]
    whole = [index for index in due if index not in unready]
    missing = sum(not group_ready(group_set, groups.get(index, {})) for index in range(group_set.replicas))
    return unready + whole[: max(group_set.max_unavailable - missing, 0)]


def _group_environment(declared: Sequence[JsonObject], address: str, size: int, worker: int) -> list[JsonObject]:
    # In front of what is declared, so that declared values may refer to them.
    given = {"LWS_LEADER_ADDRESS": address, "LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": str(worker)}
    first = [{"name": name, "value": value} for name, value in given.items()]
    return first + [entry for entry in declared if entry["name"] not in given]


def _owner(group_set: GroupSet) -> JsonObject:
    return {
        "apiVersion": LEADER_WORKER_SETS.api_version,
        "kind": LEADER_WORKER_SETS.kind,
        "name": group_set.name,
        "uid": group_set.raw["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _conditions(group_set: GroupSet, true: set[str], now: str) -> list[JsonObject]:
    words = {
        "Available": ("AllGroupsReady", "All replicas are ready"),
        "Progressing": ("GroupsProgressing", "Replicas are progressing"),
        "UpdateInProgress": ("GroupsUpdating", "Rolling Upgrade is in progress"),
    }
    stored = {entry["type"]: entry for entry in group_set.raw.get("status", {}).get("conditions") or []}
    conditions = []
    for kind, (reason, message) in words.items():
        before = stored.get(kind)
        if before is None and kind not in true:
            continue
        status = "True" if kind in true else "False"
        same = before is not None and before["status"] == status
        conditions.append(
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": message,
                "observedGeneration": group_set.raw["metadata"].get("generation", 0),
                "lastTransitionTime": before["lastTransitionTime"] if before is not None and same else now,
            }
        )
    return conditions


def group_ready(group_set: GroupSet, pods: Mapping[int, JsonObject]) -> bool:
    """Tell whether a group is whole and every pod of it is ready."""
    return len(pods) == group_set.size and all(pod_ready(pod) for pod in pods.values())


def _group_revision(pods: Mapping[int, JsonObject]) -> set[str]:
    return {pod["metadata"]["labels"].get(REVISION_LABEL, "") for pod in pods.values()}


def _phase(pod: JsonObject) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def _restarts(pod: JsonObject) -> int:
    status = pod.get("status", {})
    entries = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    return sum(entry.get("restartCount", 0) for entry in entries)
