"""Why a worker Job has no running pod: no node takes it, or the API server refuses to have it made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.core.pod_events import event_time
from tasks.core.pod_status import scheduler_message
from tasks.core.quota import read_refusal
from tasks.core.scheduling import unschedulable

Object = Mapping[str, Any]

UID_LABEL = "batch.kubernetes.io/controller-uid"


@dataclass(frozen=True)
class Obstacle:
    """What keeps a Job from running, in the words of whoever keeps it, and what helps."""

    summary: str
    detail: str
    remedy: str


def obstacle_of(
    job_uid: str, pods: Sequence[Object], nodes: Sequence[Object], events: Sequence[Object]
) -> Obstacle | None:
    """Return what keeps a Job from running, or None if nothing is known to.

    Args:
        job_uid: of the Job.
        pods: of the namespace.
        nodes: that it may be on.
        events: of the namespace.
    """
    own = [pod for pod in pods if (pod["metadata"].get("labels") or {}).get(UID_LABEL) == job_uid]
    for pod in own:
        message = scheduler_message(pod.get("status") or {})
        if message and not pod["spec"].get("nodeName"):
            return Obstacle(*unschedulable(pod, message, nodes))
    refused = [
        event
        for event in events
        if event.get("reason") == "FailedCreate" and event["involvedObject"].get("uid") == job_uid
    ]
    if own or not refused:
        return None
    message = str(max(refused, key=event_time).get("message", ""))
    if (quota := read_refusal(message)) is not None:
        return Obstacle(f"Its pod cannot be made. {quota.summary}", message, quota.remedy)
    return Obstacle("Its pod cannot be made: the API server refuses.", message, "Remove what refuses it.")
