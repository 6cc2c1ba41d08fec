"""Whether a serving set is ready, and if not, in which phase each rank is and what is known to be wrong.

Pure: it gets objects as the API shows them, the router's own list of workers and the last lines of logs, and returns a
value. "Not ready" always comes with a phase for each pod; a fatal diagnosis means that waiting cannot help.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.core.container_faults import IMAGE_REASONS, SAME_DEATH_LIMIT, death, stuck
from tasks.core.diagnosis import (
    CRASHED,
    INIT,
    MISSING,
    NODE_LOST,
    PATIENCE_S,
    PENDING,
    PULLING,
    READY,
    STARTING,
    TERMINATING,
    Diagnosis,
    PodPhase,
)
from tasks.core.engine_log import find_cause, read_phase
from tasks.core.errors import NotReadyError
from tasks.core.pod_events import event_diagnoses, taken_away
from tasks.core.pod_status import (
    condition,
    container_statuses,
    dead_container,
    disruption,
    is_done,
    lost_node_remedy,
    ready_nodes,
    scheduler_message,
)
from tasks.core.render import ROLE_LABEL
from tasks.core.router_view import expected_workers, seen_workers, workers_match
from tasks.core.scheduling import pending_diagnosis
from tasks.core.spec import ROLES, plain
from tasks.core.topology import group_name, node_rank

Object = Mapping[str, Any]


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
    def news(self) -> str:
        """The first thing that is known to be wrong, in one sentence; empty if nothing is."""
        first = next((item for item in self.diagnoses if item.level == "error"), None)
        return first.summary if first else ""

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
    events: Sequence[Object] = (),
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
        events: of the namespace, where `needs_events` says that they are wanted.
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
        *(diagnosis for pod in pods for diagnosis in _pod_diagnoses(pod, texts, known, nodes, elapsed_s)),
        *event_diagnoses(events, phases, _made_at(groups)),
        *_recreated(phases, deaths, previous),
        *_router_diagnoses(phases, pods, workers, elapsed_s),
    )
    everything_up = bool(phases) and all(phase.phase == READY for phase in phases) and _has_all_roles(phases)
    ready = everything_up and workers is not None and workers_match(pods, workers)
    return Readiness(ready, phases, diagnoses, deaths)


def needs_events(groups: Sequence[Object], pods: Sequence[Object]) -> bool:
    """Say whether events may explain something: a pod is missing, has no node, or is being taken away."""
    unplaced = any(pod["metadata"].get("deletionTimestamp") or not pod["spec"].get("nodeName") for pod in pods)
    return unplaced or next(_missing(groups, pods), None) is not None


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
        return TERMINATING, (disruption(pod) or ("", ""))[1]
    if not node:
        return PENDING, scheduler_message(status)
    dead = dead_container(status)
    if dead is not None:
        name, terminated, restarts = dead
        return CRASHED, f"{name} exited {terminated.get('exitCode')} ({terminated.get('reason', 'Error')}), {restarts}x"
    for container in container_statuses(status):
        reason = container.get("state", {}).get("waiting", {}).get("reason", "")
        if reason in IMAGE_REASONS:
            return PULLING, f"{container['name']}: {reason}"
    if condition(status, "Ready") == "True":
        return READY, ""
    if any(not is_done(item) for item in status.get("initContainerStatuses") or ()):
        return INIT, ""
    read = read_phase(logs.get(str(pod["metadata"]["name"]), ""))
    return (read.phase, read.detail) if read else (STARTING, str(status.get("message", "")))


def _missing(groups: Sequence[Object], pods: Sequence[Object]) -> Iterator[PodPhase]:
    """Yield a phase for each pod that a LeaderWorkerSet, or the router's Deployment, is to have and has not."""
    for group in groups:
        meta, spec = group["metadata"], group["spec"]
        name = str(meta["name"])
        role = str(meta["labels"][ROLE_LABEL])
        there = {node_rank(pod) for pod in pods if group_name(pod) == name}
        for rank in range(int(spec["leaderWorkerTemplate"].get("size", 1)) if spec.get("replicas", 1) else 0):
            if rank not in there:
                yield PodPhase("", "", role, name, rank, "", MISSING, "not created yet")
    if groups and not any((pod["metadata"].get("labels") or {}).get(ROLE_LABEL) == "router" for pod in pods):
        name = str(groups[0]["metadata"]["name"]).rpartition("-")[0] + "-router"
        yield PodPhase("", "", "router", name, -1, "", MISSING, "not created yet")


def _made_at(groups: Iterable[Object]) -> str:
    """Return when the first of the groups was made; empty if that is not known."""
    return min((str(group["metadata"].get("creationTimestamp", "")) for group in groups), default="")


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
                lost_node_remedy(phase.node),
                phase.pod,
                phase.node,
                phase.rank,
                fatal=True,
            )


def _pod_diagnoses(
    pod: Object, logs: Mapping[str, str], nodes: Mapping[str, bool], pool: Sequence[Object], elapsed_s: float
) -> Iterator[Diagnosis]:
    status, name = pod.get("status") or {}, str(pod["metadata"]["name"])
    node, rank = str(pod["spec"].get("nodeName") or ""), node_rank(pod)
    if _is_lost(pod, nodes):
        return
    if (taken := taken_away(pod, rank)) is not None:
        yield taken  # its containers die of it, and that is no news
        return
    if not node and elapsed_s > PATIENCE_S and (message := scheduler_message(status)):
        # A lost node takes its pods with it: what is left is a pod that fits nowhere, and the node is the news.
        yield pending_diagnosis(pod, message, pool, rank)
    dead = dead_container(status)
    if dead is not None:
        yield death(pod, dead, logs.get(name, ""))
    elif (cause := find_cause(logs.get(name, ""))) is not None and condition(status, "Ready") != "True":
        known = cause.signature
        yield Diagnosis(
            "error", known.category, known.summary, cause.line, known.resolution, name, node, rank, known.fatal
        )
    yield from stuck(status, name, node, rank, elapsed_s)


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
            fatal=count >= SAME_DEATH_LIMIT,
        )


def _router_diagnoses(
    phases: Iterable[PodPhase], pods: Sequence[Object], workers: Sequence[Object] | None, elapsed_s: float
) -> Iterator[Diagnosis]:
    engines_up = all(phase.phase == READY for phase in phases if phase.role in ROLES)
    if not engines_up or elapsed_s <= PATIENCE_S:
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
