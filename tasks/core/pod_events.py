"""What events say of pods that are not there: refused when they were to be made, or taken away by somebody else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.core.diagnosis import MISSING, NODE_LOST, READY, Diagnosis, PodPhase
from tasks.core.pod_status import disruption
from tasks.core.quota import read_refusal

Object = Mapping[str, Any]

_MAKERS = ("LeaderWorkerSet", "StatefulSet", "ReplicaSet")
_TAKEN = {"Preempted": "PreemptionByScheduler", "TaintManagerEviction": "DeletionByTaintManager"}
_SECOND = len("2026-11-30T00:00:00")

_CAUSES: Mapping[str, tuple[str, str]] = {
    "PreemptionByScheduler": (
        "the scheduler gave its place to a pod of higher priority",
        "Find that pod (kubectl get pods -A --sort-by=.spec.priority) and move it to other nodes, or give k2-engine a "
        "higher value than it has.",
    ),
    "DeletionByTaintManager": (
        "its node got a NoExecute taint",
        "kubectl describe node: take the taint away once the node is fit for use, or run the release again: it chooses "
        "other nodes.",
    ),
    "EvictionByEvictionAPI": (
        "it was evicted, as kubectl drain does",
        "Ask who drains the node; the budget k2-engines forbids it, so somebody changed or went round it.",
    ),
    "DeletionByPodGC": ("its node is no longer in the cluster", "Run the release again: it chooses other nodes."),
    "TerminationByKubelet": (
        "its node ran short of something and ended it",
        "kubectl describe node: see its pressure.",
    ),
}


@dataclass(frozen=True)
class _Refused:
    """A pod that could not be made: who was to make it, and the API server's words."""

    maker: str
    message: str
    at: str


def event_diagnoses(events: Iterable[Object], phases: Sequence[PodPhase], since: str) -> Iterator[Diagnosis]:
    """Yield why pods are missing and why they were taken away.

    Args:
        events: of the namespace, whatever they are about.
        phases: of the serving set.
        since: when its groups were made (RFC 3339): what is older is about a set of the same name before it.
    """
    recent = [event for event in events if event_time(event) >= since[:_SECOND]]
    yield from _refusals(recent, phases)
    yield from _losses(recent, phases)


def _refusals(events: Iterable[Object], phases: Iterable[PodPhase]) -> Iterator[Diagnosis]:
    refused = [
        _Refused(str(event["involvedObject"].get("name", "")), str(event.get("message", "")), event_time(event))
        for event in events
        if event.get("reason") == "FailedCreate" and event["involvedObject"].get("kind") in _MAKERS
    ]
    lacking = [phase for phase in phases if phase.phase == MISSING]
    for group in dict.fromkeys(phase.group for phase in lacking):
        of_group = [item for item in refused if item.maker == group or item.maker.startswith(f"{group}-")]
        if of_group:
            latest = max(of_group, key=lambda item: item.at)
            first = next(phase for phase in lacking if phase.group == group)
            count = sum(phase.group == group for phase in lacking)
            yield _refusal(latest, group, first.rank, count)


def _refusal(refused: _Refused, group: str, rank: int, count: int) -> Diagnosis:
    quota = read_refusal(refused.message)
    pods = f"{count} pod{'s' if count > 1 else ''} of {group} cannot be made"
    if quota is None:
        return Diagnosis(
            "error",
            "admission",
            f"{pods}: the API server refuses.",
            refused.message,
            f"kubectl describe statefulset,replicaset {refused.maker}; remove what refuses, and it is tried again.",
            rank=rank,
        )
    return Diagnosis(
        "error",
        "quota",
        f"{pods}. {quota.summary}",
        refused.message,
        f"{quota.remedy} The controller tries again by itself, at growing intervals of up to 17 minutes.",
        rank=rank,
    )


def _losses(events: Iterable[Object], phases: Sequence[PodPhase]) -> Iterator[Diagnosis]:
    """Yield the pods that were taken away and whose successor, if there is one, is not ready yet."""
    waiting = {phase.pod: phase for phase in phases if phase.pod and phase.phase not in (READY, NODE_LOST)}
    groups = {phase.group for phase in phases if phase.group and phase.phase == MISSING}
    latest: dict[str, Object] = {}
    for event in events:
        about = event["involvedObject"]
        name = str(about.get("name", ""))
        is_ours = name in waiting or any(name == f"{g}-0" or name.startswith(f"{g}-0-") for g in groups)
        same = name in waiting and about.get("uid") == waiting[name].uid
        if event.get("reason") in _TAKEN and about.get("kind") == "Pod" and is_ours and not same:
            latest[name] = max((event, latest.get(name, event)), key=event_time)
    for name, event in sorted(latest.items()):
        rank = waiting[name].rank if name in waiting else -1
        yield _loss(name, "", rank, _TAKEN[str(event["reason"])], str(event.get("message", "")))


def taken_away(pod: Object, rank: int) -> Diagnosis | None:
    """Return why a pod is being taken away, where its status says so."""
    found = disruption(pod)
    if found is None:
        return None
    reason, message = found
    return _loss(str(pod["metadata"]["name"]), str(pod["spec"].get("nodeName") or ""), rank, reason, message)


def _loss(pod: str, node: str, rank: int, reason: str, message: str) -> Diagnosis:
    why, remedy = _CAUSES.get(reason, (f"reason {reason}", "kubectl get events --sort-by=.lastTimestamp"))
    return Diagnosis("error", "disruption", f"Pod {pod} was taken away: {why}.", message, remedy, pod, node, rank)


def event_time(event: Object) -> str:
    """Return when an event was seen last, to the second."""
    series = event.get("series") or {}
    times = (event.get("lastTimestamp"), series.get("lastObservedTime"), event.get("eventTime"))
    return str(next((time for time in times if time), event["metadata"].get("creationTimestamp", "")))[:_SECOND]
