"""Step `rollout`: apply the groups, the router and the probe route, and wait through named phases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tasks.core.diagnosis import NODE_LOST
from tasks.core.errors import NotReadyError, UnavailableError
from tasks.core.node_state import engine_tolerations, why_unusable
from tasks.core.plan import waiting_cost
from tasks.core.pod_status import lost_node_remedy
from tasks.core.readiness import Readiness, assess, needs_events, not_ready_error
from tasks.core.render import ROLE_LABEL, SERVING_LABEL, render_serving
from tasks.core.spec import ROLES, plain
from tasks.core.topology import placement_of
from tasks.ports import Mirror
from tasks.steps.context import Ports, Subject
from tasks.steps.documents import put_by_digest
from tasks.steps.patience import Deadline
from tasks.steps.placement import place
from tasks.steps.recent_events import RecentEvents
from tasks.steps.router_workers import StaleWorkers, known_workers
from tasks.steps.staging import require_markers

_POLL_S = 0.5
_SAY_EVERY_S = 2.0
_NODE_PATIENCE_S = 30.0
_LOG_LINES = 20
_LOGS_WITHIN_S = 5.0
"""How long logs that do not come are waited for in one look: in an outage each costs its whole timeout."""


def rollout_step(ports: Ports, subject: Subject, nodes: Sequence[str]) -> dict[str, Any]:
    """Bring the serving set up and return where each rank runs; applied again it changes nothing.

    No group is created before every chosen node's marker has been read and is right (I2).

    Raises:
        IntegrityError: a chosen node has no right marker.
        NotReadyError: a node is lost, a cause is static, or the profile's deadline has passed; carries the diagnoses.
    """
    require_markers(ports, subject.lock, nodes)
    objects = render_serving(subject.release, subject.lock, ports.site, ports.templates)
    place(ports, subject.serving, nodes)
    for obj in objects:
        ports.cluster.apply(obj)
    readiness = _wait(ports, subject, nodes)
    pods = set_pods(ports, subject.serving)
    seats = placement_of(pods, subject.release.profile.gpus_per_node)
    rows = plain(seats)
    ports.progress.table("placement", rows, f"Placement of {subject.release.id}")
    return {
        "placement": rows,
        "manifests_digest": put_by_digest(ports.store, "manifests", list(objects)),
        "objects": len(objects),
        "note": f"{len(rows)} engine pods ready, {readiness.summary}",
    }


def set_pods(ports: Ports, serving: str) -> list[dict[str, Any]]:
    """Return the pods of a serving set."""
    return ports.cluster.list_objects("Pod", {SERVING_LABEL: serving})


def _wait(ports: Ports, subject: Subject, nodes: Sequence[str]) -> Readiness:
    with _View.of(ports, subject.serving) as view:
        return _wait_for(ports, subject, nodes, view)


def _wait_for(ports: Ports, subject: Subject, nodes: Sequence[str], view: _View) -> Readiness:
    profile = subject.release.profile
    usd_per_hour = profile.nodes * profile.gpus_per_node * ports.site.usd_per_gpu_hour
    deadline, began, said = Deadline(ports, profile.ready_deadline_s), ports.clock.now(), 0.0
    state: Readiness | None = None
    lost_since: float | None = None
    while True:
        state = _look(ports, subject, view, deadline.elapsed_s, state)
        if state.ready:
            return state
        if any(diagnosis.category != "node" for diagnosis in state.fatal):
            raise not_ready_error(state, "K2-RDY-001", "The set does not become ready.")
        problem = _node_problem(ports, view, nodes, state)
        if problem is not None and not _is_true_now(ports, nodes, state):
            problem = None
        lost_since = None if problem is None else deadline.elapsed_s if lost_since is None else lost_since
        # After an outage of the API every node is NotReady until its kubelet has renewed its lease.
        if problem is not None and lost_since is not None and deadline.elapsed_s - lost_since >= _NODE_PATIENCE_S:
            raise problem
        if deadline.passed:
            raise not_ready_error(state, "K2-RDY-001", f"Not ready after {deadline.elapsed_s:.0f} s.")
        if ports.clock.now() - said >= _SAY_EVERY_S:
            said = ports.clock.now()
            ports.progress.say(
                f"rollout: waiting for {state.summary}; {state.news + ' ' if state.news else ''}"
                f"{waiting_cost(said - began, usd_per_hour)}; "
                f"gives up in {deadline.left_s:.0f} s; "
                f"kubectl -n {ports.site.namespace} get pods -l {SERVING_LABEL}={subject.serving}"
            )
        ports.clock.sleep(_POLL_S)


@dataclass(frozen=True)
class _View:
    """What a rollout looks at again and again, kept by watches; events are listed now and then."""

    groups: Mirror
    pods: Mirror
    nodes: Mirror
    events: RecentEvents
    ghosts: StaleWorkers

    @classmethod
    @contextmanager
    def of(cls, ports: Ports, serving: str) -> Iterator[_View]:
        """Open the view of a serving set, and close it."""
        labels, mirror = {SERVING_LABEL: serving}, ports.cluster.mirror
        with (
            mirror("LeaderWorkerSet", labels) as groups,
            mirror("Pod", labels) as pods,
            mirror("Node", ports.site.node_selector) as nodes,
        ):
            yield cls(groups, pods, nodes, RecentEvents(ports), StaleWorkers(ports, serving))


def _look(ports: Ports, subject: Subject, view: _View, elapsed_s: float, previous: Readiness | None) -> Readiness:
    pods = view.pods.objects()
    # The router is asked only once the pods are ready: before that its Service has no endpoint.
    up = bool(pods) and all(is_ready(pod) for pod in pods)
    workers = known_workers(ports, subject.serving) if up else None
    groups, nodes = view.groups.objects(), view.nodes.objects()
    events = view.events.objects() if needs_events(groups, pods) else []
    state = assess(groups, pods, nodes, workers, elapsed_s, _logs(ports, pods), previous, events)
    if workers and not state.ready:
        view.ghosts.look(workers)
    return state


def is_ready(pod: dict[str, Any]) -> bool:
    """Return whether a pod's own condition says Ready."""
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod.get("status", {}).get("conditions", []))


def _logs(ports: Ports, pods: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the last log lines of engine pods that are not ready yet: the phase is in them."""
    logs, began = {}, ports.clock.now()
    for pod in pods:
        name = pod["metadata"]["name"]
        running = pod.get("status", {}).get("phase") == "Running"
        if pod["metadata"].get("labels", {}).get(ROLE_LABEL) in ROLES and running and not is_ready(pod):
            try:
                logs[name] = ports.cluster.pod_log(name, "engine", _LOG_LINES)
            except KeyError:
                continue
            except UnavailableError:
                if ports.clock.now() - began > _LOGS_WITHIN_S:
                    break
    return logs


def _node_problem(ports: Ports, view: _View, chosen: Sequence[str], state: Readiness) -> NotReadyError | None:
    """Return what is wrong with a node that the set needs, or None; it may be over in a moment."""
    if state.fatal:
        return not_ready_error(state, "K2-RDY-001", "The set does not become ready.")
    return _chosen_problem(ports, view, chosen)


def _is_true_now(ports: Ports, chosen: Sequence[str], state: Readiness) -> bool:
    """Say whether a node that the set needs is closed by a reading of now: a mirror may be of before an outage."""
    tolerations = engine_tolerations(ports.templates)
    known = {node["metadata"]["name"]: node for node in ports.cluster.list_objects("Node", ports.site.node_selector)}
    lost = {phase.node for phase in state.phases if phase.phase == NODE_LOST}
    said_by_log = any(diagnosis.node not in lost for diagnosis in state.fatal)
    return said_by_log or any(n not in known or why_unusable(known[n], tolerations) for n in {*chosen, *lost})


def _chosen_problem(ports: Ports, view: _View, chosen: Sequence[str]) -> NotReadyError | None:
    """Return the error of a chosen node that has gone: its pods may already have been taken away from it."""
    tolerations = engine_tolerations(ports.templates)
    known = {node["metadata"]["name"]: node for node in view.nodes.objects()}
    for name in chosen:
        why_not = why_unusable(known[name], tolerations) if name in known else "no such node"
        if why_not:
            return NotReadyError(
                "K2-RDY-002",
                f"Node {name} was lost during the rollout."
                if why_not.startswith(("not Ready", "no such"))
                else f"Node {name} was closed to pods during the rollout.",
                where=name,
                got=why_not,
                expected="Ready",
                hint=lost_node_remedy(name),
            )
    return None
