"""What the status of a pod or a node says, read out of the API's nested fields."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

Object = Mapping[str, Any]


def condition(status: Object, kind: str) -> str:
    """Return the status of a condition (`True`, `False`, `Unknown`), empty if there is none."""
    return next((str(item["status"]) for item in status.get("conditions") or () if item["type"] == kind), "")


def ready_nodes(nodes: Iterable[Object]) -> dict[str, bool]:
    """Return for each node by name whether it is Ready."""
    return {str(node["metadata"]["name"]): condition(node.get("status") or {}, "Ready") == "True" for node in nodes}


def lost_node_remedy(node: str) -> str:
    """Return what a person does about a silent node: its pods hold their group's place until it is back or given up."""
    return (
        f"kubectl describe node {node}; repair it, or give it up: "
        f"kubectl taint node {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute; "
        "then run the release again."
    )


def scheduler_message(status: Object) -> str:
    """Return why the scheduler finds no node for a pod; empty if it does."""
    for item in status.get("conditions") or ():
        if item["type"] == "PodScheduled" and item["status"] == "False":
            return str(item.get("message", ""))
    return ""


def container_statuses(status: Object) -> list[Object]:
    """Return the statuses of a pod, init containers first."""
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def is_done(container: Object) -> bool:
    """Say whether a container has ended well."""
    return bool(container.get("state", {}).get("terminated", {}).get("exitCode") == 0)


def dead_container(status: Object) -> tuple[str, Object, int] | None:
    """Return (container, how it ended, restarts) of a container that ended badly and does not run again, if any."""
    for container in container_statuses(status):
        state, last = container.get("state") or {}, container.get("lastState") or {}
        ended = state.get("terminated") or ({} if "running" in state else last.get("terminated") or {})
        if ended and ended.get("exitCode") != 0:
            return str(container["name"]), ended, int(container.get("restartCount", 0))
    return None


def disruption(pod: Object) -> tuple[str, str] | None:
    """Return (reason, message) of who takes a pod away, where it is being taken away and its status says why."""
    going = pod["metadata"].get("deletionTimestamp") or (pod.get("status") or {}).get("phase") == "Failed"
    for item in (pod.get("status") or {}).get("conditions") or ():
        if going and item["type"] == "DisruptionTarget" and item["status"] == "True":
            return str(item.get("reason", "")), str(item.get("message", ""))
    return None


def termination_data(message: str) -> Mapping[str, Any] | None:
    """Return the error that a program of ours left as termination message, or None."""
    try:
        data = json.loads(message)
    except ValueError:
        return None
    return data if isinstance(data, dict) and "code" in data else None
