"""What a release makes, counted as quotas count it: objects that stay, and pods that run at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from tasks.core.pod_status import condition
from tasks.core.quantity import quantity
from tasks.core.render import ROLE_LABEL
from tasks.core.topology import group_name, node_rank

Object = Mapping[str, Any]
Amounts = Mapping[str, Decimal]

_ENDED = ("Succeeded", "Failed")
# An object counts under these names, and so does what its controller makes of it: StatefulSets and a headless Service
# of a group, a ReplicaSet of the router.
_COUNTED: Mapping[str, tuple[str, ...]] = {
    "Deployment": ("count/deployments.apps", "count/replicasets.apps"),
    "HTTPRoute": ("count/httproutes.gateway.networking.k8s.io",),
    "Job": ("count/jobs.batch",),
    "LeaderWorkerSet": (
        "count/leaderworkersets.leaderworkerset.x-k8s.io",
        "count/statefulsets.apps",
        "services",
        "count/services",
    ),
    "Service": ("services", "count/services"),
}


@dataclass(frozen=True)
class PodAsk:
    """A number of pods of one template."""

    count: int
    spec: Object

    def amounts(self) -> dict[str, Decimal]:
        """Return what the pods count for, by the names that a quota limits."""
        totals = {"pods": Decimal(self.count)}
        for section, prefix in (("requests", "requests."), ("limits", "limits.")):
            for resource, amount in _pod_amounts(self.spec, section).items():
                totals[prefix + resource] = amount * self.count
                if section == "requests" and resource in ("cpu", "memory"):
                    totals[resource] = amount * self.count
        return totals


def _pod_amounts(spec: Object, section: str) -> dict[str, Decimal]:
    """Return what a pod asks for: all containers together, or the largest init container where that is more."""
    total: dict[str, Decimal] = {}
    for container in spec.get("containers") or ():
        for resource, amount in _stated(container, section).items():
            total[resource] = total.get(resource, Decimal(0)) + amount
    for container in spec.get("initContainers") or ():
        for resource, amount in _stated(container, section).items():
            total[resource] = max(total.get(resource, Decimal(0)), amount)
    return total


def _stated(container: Object, section: str) -> dict[str, Decimal]:
    resources = container.get("resources") or {}
    # A limit without a request is the request too: so the API server completes it.
    stated = (
        {**(resources.get("limits") or {}), **(resources.get(section) or {})}
        if section == "requests"
        else resources.get(section) or {}
    )
    return {name: quantity(str(amount)) for name, amount in stated.items()}


@dataclass(frozen=True)
class Demand:
    """What is to be made: objects that stay, and pods in stages of which each ends before the next begins."""

    objects: Amounts
    stages: Mapping[str, Sequence[PodAsk]]

    def needed(self, quota: Object) -> dict[str, Decimal]:
        """Return how much of each resource of a quota is needed on top of what is used now."""
        needed = {} if _is_scoped(quota) else dict(self.objects)
        for asks in self.stages.values():
            totals: dict[str, Decimal] = {}
            for ask in asks:
                if applies(quota, ask.spec):
                    for name, amount in ask.amounts().items():
                        totals[name] = totals.get(name, Decimal(0)) + amount
            for name, amount in totals.items():
                needed[name] = max(needed.get(name, Decimal(0)), amount)
        return needed


def demand_of(
    serving: Sequence[Object], jobs: Mapping[str, Sequence[Object]], there: Sequence[Object], pods: Sequence[Object]
) -> Demand:
    """Return what is still to be made of a serving set and of the Jobs before it.

    Args:
        serving: the rendered objects of the set.
        jobs: the rendered Jobs by step; steps come one after another, and ended Jobs stay.
        there: objects of these kinds that the namespace has already.
        pods: its pods.
    """
    known = {(str(obj["kind"]), str(obj["metadata"]["name"])): obj for obj in there}
    running = [pod for pod in pods if (pod.get("status") or {}).get("phase") not in _ENDED]
    stages = {step: [ask for job in of_step for ask in _job_asks(job, known)] for step, of_step in jobs.items()}
    stages["rollout"] = [ask for obj in serving for ask in _serving_asks(obj, running) if ask.count > 0]
    objects: dict[str, Decimal] = {}
    for obj in (*serving, *(job for of_step in jobs.values() for job in of_step)):
        if (str(obj["kind"]), str(obj["metadata"]["name"])) not in known:
            for name in _COUNTED.get(str(obj["kind"]), ()):
                objects[name] = objects.get(name, Decimal(0)) + 1
            if obj["kind"] == "LeaderWorkerSet" and _size(obj) > 1:
                objects["count/statefulsets.apps"] += 1
            if obj["kind"] == "Job":
                objects["count/pods"] = objects.get("count/pods", Decimal(0)) + 1
    engines = sum(ask.count for ask in stages["rollout"])
    return Demand({**objects, "count/pods": objects.get("count/pods", Decimal(0)) + engines}, stages)


def _job_asks(job: Object, known: Mapping[tuple[str, str], Object]) -> list[PodAsk]:
    """Return the pod of a Job, unless the Job runs now: an ended one is replaced."""
    status = (known.get(("Job", str(job["metadata"]["name"]))) or {"status": _NO_JOB}).get("status") or {}
    ended = condition(status, "Complete") == "True" or condition(status, "Failed") == "True"
    return [PodAsk(1, job["spec"]["template"]["spec"])] if ended else []


_NO_JOB = {"conditions": [{"type": "Complete", "status": "True"}]}


def _serving_asks(obj: Object, running: Iterable[Object]) -> list[PodAsk]:
    if obj["kind"] == "Deployment":
        there = sum(_labels(pod).get(ROLE_LABEL) == "router" and _of_set(pod, obj) for pod in running)
        return [PodAsk(int(obj["spec"]["replicas"]) - there, obj["spec"]["template"]["spec"])]
    if obj["kind"] != "LeaderWorkerSet":
        return []
    ranks = [node_rank(pod) for pod in running if group_name(pod) == obj["metadata"]["name"]]
    shape = obj["spec"]["leaderWorkerTemplate"]
    return [
        PodAsk(1 - (0 in ranks), shape["leaderTemplate"]["spec"]),
        PodAsk(_size(obj) - 1 - sum(rank > 0 for rank in ranks), shape["workerTemplate"]["spec"]),
    ]


def _of_set(pod: Object, deployment: Object) -> bool:
    wanted = deployment["spec"]["selector"]["matchLabels"]
    return all(_labels(pod).get(key) == value for key, value in wanted.items())


def _labels(obj: Object) -> Mapping[str, Any]:
    return obj["metadata"].get("labels") or {}


def _size(group: Object) -> int:
    return int(group["spec"]["leaderWorkerTemplate"]["size"])


def _is_scoped(quota: Object) -> bool:
    return bool(quota["spec"].get("scopes") or (quota["spec"].get("scopeSelector") or {}).get("matchExpressions"))


def applies(quota: Object, pod_spec: Object) -> bool:
    """Say whether a quota counts pods of a spec: all of its scopes have to hold."""
    spec = quota["spec"]
    expressions = [{"scopeName": name, "operator": "Exists"} for name in spec.get("scopes") or ()]
    expressions += (spec.get("scopeSelector") or {}).get("matchExpressions") or ()
    return all(_in_scope(expression, pod_spec) for expression in expressions)


def _in_scope(expression: Object, pod_spec: Object) -> bool:
    scope, operator = expression["scopeName"], expression["operator"]
    if scope == "PriorityClass":
        return _of_class(str(pod_spec.get("priorityClassName") or ""), operator, expression.get("values") or ())
    best_effort = not _pod_amounts(pod_spec, "requests") and not _pod_amounts(pod_spec, "limits")
    ends = pod_spec.get("activeDeadlineSeconds") is not None
    held = {
        "Terminating": ends,
        "NotTerminating": not ends,
        "BestEffort": best_effort,
        "NotBestEffort": not best_effort,
    }
    # What no pod of ours is: volume attribute classes, affinity to pods of other namespaces.
    return held.get(scope, False)


def _of_class(name: str, operator: str, values: Sequence[str]) -> bool:
    if operator == "In":
        return name in values
    if operator == "NotIn":
        return name not in values
    return bool(name) == (operator == "Exists")
