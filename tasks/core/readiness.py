"""Whether a serving set is ready, and if not, in which phase each rank is and what is known to be wrong.

Pure: it gets objects as the API shows them, the router's own list of workers and the last lines of logs, and returns a
value. "Not ready" always comes with a phase for each pod; a fatal diagnosis means that waiting cannot help.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.core.engine_log import find_cause, last_line, read_phase
from tasks.core.errors import NotReadyError
from tasks.core.pod_status import (
    condition,
    container_statuses,
    dead_container,
    is_done,
    ready_nodes,
    scheduler_message,
    termination_data,
)
from tasks.core.render import ROLE_LABEL
from tasks.core.router_view import expected_workers, seen_workers, workers_match
from tasks.core.spec import ROLES, plain
from tasks.core.topology import group_name, node_rank

Object = Mapping[str, Any]

MISSING = "Missing"
PENDING = "Pending"
INIT = "Init"
PULLING = "Pulling image"
STARTING = "Starting"
READY = "Ready"
CRASHED = "CrashLoop"
NODE_LOST = "NodeLost"
TERMINATING = "Terminating"

_PATIENCE_S = 30.0
"""How long a state that is normal for a moment is no diagnosis."""
_SAME_DEATH_LIMIT = 2
_IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_NEVER_IMAGE_REASONS = ("InvalidImageName", "ErrImageNeverPull")
_CONFIG_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_EXIT_INTEGRITY = 5


@dataclass(frozen=True)
class PodPhase:
    """Where one pod stands. `rank` is its node rank in the group, -1 for a pod of no group (the router)."""

    pod: str
    uid: str
    role: str
    group: str
    rank: int
    node: str
    phase: str
    detail: str


@dataclass(frozen=True)
class Diagnosis:
    """Something that is wrong. `fatal`: it does not go away by waiting."""

    level: str
    category: str
    summary: str
    detail: str
    resolution: str
    pod: str = ""
    node: str = ""
    rank: int = -1
    fatal: bool = False


@dataclass(frozen=True)
class Readiness:
    """The state of a serving set at one moment. `deaths` counts, for each group, how often it was made anew."""

    ready: bool
    phases: tuple[PodPhase, ...]
    diagnoses: tuple[Diagnosis, ...]
    deaths: Mapping[str, int]

    @property
    def fatal(self) -> tuple[Diagnosis, ...]:
        """The diagnoses that waiting does not cure."""
        return tuple(diagnosis for diagnosis in self.diagnoses if diagnosis.fatal)

    @property
    def summary(self) -> str:
        """One line: how many pods of each role are in which phase."""
        parts = []
        for role in (*ROLES, "router"):
            phases = [phase.phase for phase in self.phases if phase.role == role]
            counts = [f"{phases.count(name)} {name}" for name in dict.fromkeys(sorted(phases))]
            if counts:
                parts.append(f"{role}: {', '.join(counts)}")
        return "; ".join(parts) or "no pods"


def assess(
    groups: Sequence[Object],
    pods: Sequence[Object],
    nodes: Sequence[Object],
    workers: Sequence[Object] | None,
    elapsed_s: float,
    logs: Mapping[str, str] | None = None,
    previous: Readiness | None = None,
) -> Readiness:
    """Return the state of a serving set.

    Args:
        groups: its LeaderWorkerSets.
        pods: its pods, the router's too.
        nodes: the GPU nodes that they may be on; a router on another node is taken at its own word.
        workers: the router's own list (url, worker_type, is_healthy); None while it does not answer.
        elapsed_s: since the objects were applied.
        logs: last lines of engine logs by pod name, as far as there are any.
        previous: the state before this one, so that a group that was made anew since is noticed.
    """
    known = ready_nodes(nodes)
    texts = logs or {}
    phases = tuple(
        sorted(
            (*(_phase(pod, known, texts) for pod in pods), *_missing(groups, pods)),
            key=lambda phase: ((*ROLES, "router").index(phase.role), phase.group, phase.rank, phase.pod),
        )
    )
    deaths = _deaths(phases, previous)
    diagnoses = (
        *_lost_nodes(phases, known),
        *(diagnosis for pod in pods for diagnosis in _pod_diagnoses(pod, texts, known, elapsed_s)),
        *_recreated(phases, deaths, previous),
        *_router_diagnoses(phases, pods, workers, elapsed_s),
    )
    everything_up = bool(phases) and all(phase.phase == READY for phase in phases) and _has_all_roles(phases)
    ready = everything_up and workers is not None and workers_match(pods, workers)
    return Readiness(ready, phases, diagnoses, deaths)


def not_ready_error(readiness: Readiness, code: str, summary: str) -> NotReadyError:
    """Return the error that ends a wait: the first fatal diagnosis leads, all of them are in the details."""
    ordered = sorted(readiness.diagnoses, key=lambda diagnosis: (not diagnosis.fatal, diagnosis.level != "error"))
    details = {"phases": plain(readiness.phases), "diagnoses": plain(tuple(ordered))}
    if not ordered:
        return NotReadyError(code, summary, got=readiness.summary, expected="every pod Ready", details=details)
    first = ordered[0]
    place = ", ".join(part for part in (first.node, first.pod, f"rank {first.rank}" if first.rank >= 0 else "") if part)
    return NotReadyError(
        code,
        f"{summary} {first.summary}",
        where=place,
        got=first.detail or readiness.summary,
        expected="every pod Ready",
        hint=first.resolution,
        details=details,
    )


def _phase(pod: Object, nodes: Mapping[str, bool], logs: Mapping[str, str]) -> PodPhase:
    phase, detail = _phase_and_detail(pod, nodes, logs)
    meta = pod["metadata"]
    role = str((meta.get("labels") or {}).get(ROLE_LABEL, "router"))
    node = str(pod["spec"].get("nodeName") or "")
    name, uid = str(meta["name"]), str(meta.get("uid", ""))
    return PodPhase(name, uid, role, group_name(pod), node_rank(pod), node, phase, detail)


def _phase_and_detail(pod: Object, nodes: Mapping[str, bool], logs: Mapping[str, str]) -> tuple[str, str]:
    node = pod["spec"].get("nodeName")
    status = pod.get("status") or {}
    if _is_lost(pod, nodes):
        return NODE_LOST, f"{node} is not Ready" if node in nodes else f"{node} is gone"
    if pod["metadata"].get("deletionTimestamp"):
        return TERMINATING, ""
    if not node:
        return PENDING, scheduler_message(status)
    dead = dead_container(status)
    if dead is not None:
        name, terminated, restarts = dead
        return CRASHED, f"{name} exited {terminated.get('exitCode')} ({terminated.get('reason', 'Error')}), {restarts}x"
    for container in container_statuses(status):
        reason = container.get("state", {}).get("waiting", {}).get("reason", "")
        if reason in _IMAGE_REASONS:
            return PULLING, f"{container['name']}: {reason}"
    if condition(status, "Ready") == "True":
        return READY, ""
    if any(not is_done(item) for item in status.get("initContainerStatuses") or ()):
        return INIT, ""
    read = read_phase(logs.get(str(pod["metadata"]["name"]), ""))
    return (read.phase, read.detail) if read else (STARTING, str(status.get("message", "")))


def _missing(groups: Iterable[Object], pods: Sequence[Object]) -> Iterator[PodPhase]:
    """Yield a phase for each pod that a LeaderWorkerSet is to have and has not."""
    for group in groups:
        meta, spec = group["metadata"], group["spec"]
        name = str(meta["name"])
        role = str(meta["labels"][ROLE_LABEL])
        there = {node_rank(pod) for pod in pods if group_name(pod) == name}
        for rank in range(int(spec["leaderWorkerTemplate"].get("size", 1)) if spec.get("replicas", 1) else 0):
            if rank not in there:
                yield PodPhase("", "", role, name, rank, "", MISSING, "not created yet")


def _lost_nodes(phases: Iterable[PodPhase], nodes: Mapping[str, bool]) -> Iterator[Diagnosis]:
    for phase in phases:
        if phase.phase == NODE_LOST:
            state = "does not report any more" if phase.node in nodes else "is no longer in the cluster"
            yield Diagnosis(
                "error",
                "node",
                f"Node {phase.node} {state}"
                + (
                    f"; the whole {phase.role} group falls with it."
                    if phase.role in ROLES
                    else ", and the router with it."
                ),
                phase.detail,
                f"kubectl describe node {phase.node}; repair or cordon it, then run the release again.",
                phase.pod,
                phase.node,
                phase.rank,
                fatal=True,
            )


def _pod_diagnoses(
    pod: Object, logs: Mapping[str, str], nodes: Mapping[str, bool], elapsed_s: float
) -> Iterator[Diagnosis]:
    status, name = pod.get("status") or {}, str(pod["metadata"]["name"])
    node, rank = str(pod["spec"].get("nodeName") or ""), node_rank(pod)
    if _is_lost(pod, nodes):
        return
    if not node and elapsed_s > _PATIENCE_S and (message := scheduler_message(status)):
        # A lost node takes its pods with it: what is left is a pod that fits nowhere, and the node is the news.
        silent = ", ".join(sorted(name for name, ready in nodes.items() if not ready))
        yield Diagnosis(
            "error",
            "capacity",
            "The scheduler finds no node for a pod.",
            message + (f" Not Ready: {silent}." if silent else ""),
            "Free nodes, or check the node selector and the staged label of the nodes.",
            name,
            node,
            rank,
        )
    dead = dead_container(status)
    if dead is not None:
        yield _death(pod, dead, logs.get(name, ""))
    elif (cause := find_cause(logs.get(name, ""))) is not None and condition(status, "Ready") != "True":
        known = cause.signature
        yield Diagnosis(
            "error", known.category, known.summary, cause.line, known.resolution, name, node, rank, known.fatal
        )
    yield from _waiting(status, name, node, rank, elapsed_s)


def _death(pod: Object, dead: tuple[str, Object, int], log: str) -> Diagnosis:
    """Return what is known of a container's death: its own message, then its log, then its exit code."""
    container, terminated, restarts = dead
    name, node, rank = str(pod["metadata"]["name"]), str(pod["spec"].get("nodeName") or ""), node_rank(pod)
    code = int(terminated.get("exitCode", 1))
    repeated = restarts >= _SAME_DEATH_LIMIT
    said = termination_data(str(terminated.get("message", "")))
    if said is not None or (container == "marker-check" and code == _EXIT_INTEGRITY):
        said = said or {}
        detail = (
            ", ".join(f"{key} {said[key]}" for key in ("where", "got", "expected") if said.get(key))
            or f"{container} exited {code}"
        )
        return Diagnosis(
            "error",
            "integrity" if code == _EXIT_INTEGRITY else "program",
            str(said.get("summary", "The weights on the node are not the ones that were verified.")),
            detail,
            str(said.get("next", "Run the release again: the stager verifies and repairs what is there.")),
            name,
            node,
            rank,
            fatal=code == _EXIT_INTEGRITY or repeated,
        )
    cause = find_cause(log)
    if cause is not None:
        known = cause.signature
        return Diagnosis(
            "error", known.category, known.summary, cause.line, known.resolution, name, node, rank,
            fatal=known.fatal or repeated,
        )  # fmt: skip
    out_of_memory = terminated.get("reason") == "OOMKilled"
    return Diagnosis(
        "error",
        "memory" if out_of_memory else "arguments" if code == 2 else "crash",
        "The host memory of a container was not enough." if out_of_memory else f"Container {container} ended.",
        f"exit code {code} ({terminated.get('reason', 'Error')}), restarts {restarts}" + last_line(log),
        "Raise host_memory_gib of the profile." if out_of_memory else f"kubectl logs {name} -c {container} --previous",
        name,
        node,
        rank,
        fatal=out_of_memory or code == 2 or repeated,
    )


def _waiting(status: Object, name: str, node: str, rank: int, elapsed_s: float) -> Iterator[Diagnosis]:
    for container in container_statuses(status):
        waiting = container.get("state", {}).get("waiting", {})
        reason = waiting.get("reason", "")
        if reason in _IMAGE_REASONS and (reason in _NEVER_IMAGE_REASONS or elapsed_s > _PATIENCE_S):
            yield Diagnosis(
                "error",
                "image",
                f"The image of {container['name']} does not arrive.",
                f"{reason}: {waiting.get('message', '')}",
                "Check the digest, the registry's credentials and the mirror.",
                name,
                node,
                rank,
                fatal=reason in _NEVER_IMAGE_REASONS,
            )
        elif reason in _CONFIG_REASONS and elapsed_s > _PATIENCE_S:
            yield Diagnosis(
                "error",
                "configuration",
                f"Container {container['name']} cannot be made.",
                f"{reason}: {waiting.get('message', '')}",
                "Create what is missing (Secret, ConfigMap, directory) and run the release again.",
                name,
                node,
                rank,
            )


def _deaths(phases: Iterable[PodPhase], previous: Readiness | None) -> dict[str, int]:
    """Count groups whose leader is another pod than before: the controller deleted and made all of it anew."""
    deaths = dict(previous.deaths) if previous else {}
    before = {phase.group: phase.uid for phase in previous.phases if phase.rank == 0 and phase.uid} if previous else {}
    for phase in phases:
        if phase.group and phase.rank == 0 and phase.uid and before.get(phase.group, phase.uid) != phase.uid:
            deaths[phase.group] = deaths.get(phase.group, 0) + 1
    return deaths


def _recreated(
    phases: Iterable[PodPhase], deaths: Mapping[str, int], previous: Readiness | None
) -> Iterator[Diagnosis]:
    for group, count in deaths.items():
        if not any(phase.group == group for phase in phases):
            continue
        causes = [item for item in (previous.diagnoses if previous else ()) if item.pod.startswith(f"{group}-")]
        yield Diagnosis(
            "error",
            "crash",
            f"Group {group} was made anew {count} time{'s' if count > 1 else ''}: one of its pods had ended.",
            "; ".join(f"{item.pod}: {item.summary} {item.detail}" for item in causes[:3]),
            "The same death twice is a static fault: read the log of the pod that ended first.",
            fatal=count >= _SAME_DEATH_LIMIT,
        )


def _router_diagnoses(
    phases: Iterable[PodPhase], pods: Sequence[Object], workers: Sequence[Object] | None, elapsed_s: float
) -> Iterator[Diagnosis]:
    engines_up = all(phase.phase == READY for phase in phases if phase.role in ROLES)
    if not engines_up or elapsed_s <= _PATIENCE_S:
        return
    if workers is None:
        yield Diagnosis(
            "warning",
            "router",
            "The engines are ready and the router does not answer.",
            "",
            "kubectl logs of the router; check the Service and the probe route.",
        )
        return
    wanted, seen = expected_workers(pods), seen_workers(workers)
    for role in ROLES:
        if seen.get(role, set()) != wanted.get(role, set()):
            yield Diagnosis(
                "warning",
                "router",
                f"The router does not see exactly the {role} leaders.",
                f"sees {sorted(seen.get(role, set()))}, wants {sorted(wanted.get(role, set()))}",
                "Check the rights of the ServiceAccount k2-router; a worker that is gone leaves with a restart of it.",
            )


def _has_all_roles(phases: Iterable[PodPhase]) -> bool:
    return {*ROLES, "router"} <= {phase.role for phase in phases}


def _is_lost(pod: Object, nodes: Mapping[str, bool]) -> bool:
    """Say whether a pod's node is not there any more; a router may run outside of the pool that was listed."""
    node = str(pod["spec"].get("nodeName") or "")
    of_pool = (pod["metadata"].get("labels") or {}).get(ROLE_LABEL) in ROLES
    return bool(node) and not nodes.get(node, not of_pool)
