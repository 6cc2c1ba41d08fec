"""What a pod's containers amount to: phase, conditions and container statuses. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from infra.rehearsal.kubeclient import JsonObject

TERMINATION_MESSAGE_BYTES = 4096


@dataclass
class ContainerState:
    """One container as its status shows it. `state` and `last_state` are in the API's own form."""

    name: str
    image: str
    state: JsonObject = field(default_factory=lambda: {"waiting": {"reason": "PodInitializing"}})
    last_state: JsonObject = field(default_factory=dict)
    container_id: str = ""
    restart_count: int = 0
    started: bool = False
    ready: bool = False
    sidecar: bool = False

    @property
    def running(self) -> bool:
        """Tell whether the container's process runs."""
        return "running" in self.state

    @property
    def exit_code(self) -> int | None:
        """Return the exit code of a container that has ended and is not waiting for a restart."""
        return self.state["terminated"]["exitCode"] if "terminated" in self.state else None

    def wait(self, reason: str, message: str = "") -> None:
        """Show the container as waiting; an ended run becomes its last state."""
        if "terminated" in self.state:
            self.last_state = self.state
        self.state = {"waiting": {"reason": reason} | ({"message": message} if message else {})}
        self.ready = self.started = False

    def as_status(self) -> JsonObject:
        """Return the containerStatuses entry."""
        return {
            "name": self.name,
            "image": self.image,
            "imageID": image_id(self.image) if self.container_id else "",
            "containerID": self.container_id,
            "state": self.state,
            "lastState": self.last_state,
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.restart_count,
        }


@dataclass
class PodState:
    """Everything that a pod's status is computed from."""

    host_ip: str
    pod_ip: str = ""
    start_time: str = ""
    init: list[ContainerState] = field(default_factory=list)
    main: list[ContainerState] = field(default_factory=list)
    initialized: bool = False
    restart_policy: str = "Always"
    reason: str = ""
    message: str = ""
    forced_phase: str = ""

    @property
    def phase(self) -> str:
        """Return the pod's phase, as a kubelet derives it."""
        if self.forced_phase:
            return self.forced_phase
        if not self.initialized:
            failed = any(container.exit_code not in (None, 0) for container in self.init if not container.sidecar)
            return "Failed" if failed and self.restart_policy == "Never" else "Pending"
        if any("waiting" in container.state and not container.last_state for container in self.main):
            return "Pending"
        codes = [container.exit_code for container in self.main]
        if any(code is None for code in codes) or self.restart_policy == "Always":
            return "Running"
        if all(code == 0 for code in codes):
            return "Succeeded"
        return "Failed" if self.restart_policy == "Never" else "Running"


def pod_status(pod: JsonObject, state: PodState, now: str) -> JsonObject:
    """Return the status to write; transition times are kept where nothing changed since the stored one."""
    status: JsonObject = {
        "phase": state.phase,
        "hostIP": state.host_ip,
        "hostIPs": [{"ip": state.host_ip}],
        "startTime": state.start_time,
        "conditions": _conditions(pod, state, now),
        "containerStatuses": [container.as_status() for container in state.main],
        "observedGeneration": pod["metadata"].get("generation", 0),
    }
    if state.init:
        status["initContainerStatuses"] = [container.as_status() for container in state.init]
    if state.pod_ip:
        status |= {"podIP": state.pod_ip, "podIPs": [{"ip": state.pod_ip}]}
    if state.reason:
        status |= {"reason": state.reason, "message": state.message}
    return status


def conditions_differ(pod: JsonObject, written: JsonObject) -> bool:
    """Tell whether somebody else changed a condition, or the phase, that was written."""
    status = pod.get("status", {})
    stored = {condition["type"]: condition["status"] for condition in status.get("conditions") or []}
    ours = written["conditions"]
    return status.get("phase") != written["phase"] or any(stored.get(one["type"]) != one["status"] for one in ours)


def image_id(image: str) -> str:
    """Return the identity of an image: its own digest, or a simulated one made from the reference."""
    if "@sha256:" in image:
        return image
    repository, _, tag = image.rpartition(":")
    name = repository if repository and "/" not in tag else image
    return f"{name}@sha256:{hashlib.sha256(image.encode()).hexdigest()}"


def terminated(
    *, exit_code: int, signal: int, started_at: str, finished_at: str, message: str, container_id: str, reason: str = ""
) -> JsonObject:
    """Return the state of a container whose process has ended."""
    state: JsonObject = {
        "exitCode": exit_code,
        "reason": reason or ("Completed" if exit_code == 0 else "Error"),
        "startedAt": started_at,
        "finishedAt": finished_at,
        "containerID": container_id,
    }
    if signal:
        state["signal"] = signal
    if message:
        state["message"] = message
    return {"terminated": state}


def backoff_s(failures: int, *, first_s: float = 1.0, cap_s: float = 10.0) -> float:
    """Return how long to wait before the restart after this many failures in a row."""
    return float(min(first_s * 2 ** max(failures - 1, 0), cap_s))


def _conditions(pod: JsonObject, state: PodState, now: str) -> list[JsonObject]:
    stored = {condition["type"]: condition for condition in pod.get("status", {}).get("conditions") or []}
    containers_ready, ready = _readiness(state, stored, pod["spec"].get("readinessGates") or [])
    wanted = {
        "PodReadyToStartContainers": ("True" if state.pod_ip else "False", "", ""),
        "Initialized": _initialized(state),
        "Ready": ready,
        "ContainersReady": containers_ready,
        "PodScheduled": ("True", "", ""),
    }
    conditions = []
    for kind, (status, reason, message) in wanted.items():
        before = stored.get(kind)
        same = before is not None and before["status"] == status
        # Empty strings, not left out: in a merge by type, what is left out keeps an old reason alive.
        conditions.append(
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": message,
                "lastTransitionTime": before["lastTransitionTime"] if before is not None and same else now,
                "observedGeneration": pod["metadata"].get("generation", 0),
            }
        )
    return conditions


def _initialized(state: PodState) -> tuple[str, str, str]:
    if state.phase == "Succeeded":
        return "True", "PodCompleted", ""
    if state.initialized:
        return "True", "", ""
    names = _names(container.name for container in state.init if container.exit_code != 0 and not container.started)
    return "False", "ContainersNotInitialized", f"containers with incomplete status: [{names}]"


def _readiness(
    state: PodState, stored: Mapping[str, JsonObject], gates: Sequence[JsonObject]
) -> tuple[tuple[str, str, str], tuple[str, str, str]]:
    if state.phase in ("Succeeded", "Failed"):
        over = ("False", "PodCompleted" if state.phase == "Succeeded" else "PodFailed", "")
        return over, over
    unready = _names(container.name for container in state.main if not container.ready)
    if unready or not state.initialized:
        no = ("False", "ContainersNotReady", f"containers with unready status: [{unready}]")
        return no, no
    closed = [gate["conditionType"] for gate in gates if stored.get(gate["conditionType"], {}).get("status") != "True"]
    if closed:
        message = f'corresponding condition of pod readiness gate "{closed[0]}" does not exist or is not "True".'
        return ("True", "", ""), ("False", "ReadinessGatesNotReady", message)
    return ("True", "", ""), ("True", "", "")


def _names(names: Iterable[str]) -> str:
    return " ".join(names)
