"""Worker Jobs: create or attach, follow their progress, read their results. A dead flow does not stop them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.core.errors import After, K2Error, NotReadyError, UnavailableError, error_from_data
from tasks.core.job_obstacles import UID_LABEL
from tasks.ports import Mirror
from tasks.steps.context import Ports
from tasks.steps.job_obstacles import JobObstacles
from tasks.steps.patience import Deadline

_POLL_S = 0.5
_LOG_LINES = 5
_LOG_EVERY_S = 1.0
_GONE_TRIES = 120
_NODE_LOOK_S = 5.0
_NODE_PATIENCE_S = 30.0


@dataclass(frozen=True)
class JobResult:
    """A finished Job: its name and the JSON that its pod left as termination message."""

    name: str
    message: Mapping[str, Any]


@dataclass(frozen=True)
class _Job:
    """A Job that is followed, and the node that it is pinned to (empty: any)."""

    name: str
    uid: str
    node: str


Watch = Callable[[], None]


def unwatched() -> None:
    """Look at nothing."""


def run_jobs(
    ports: Ports,
    step: str,
    jobs: Sequence[dict[str, Any]],
    total_bytes: int,
    deadline_s: float,
    watch: Watch = unwatched,
) -> list[JobResult]:
    """Attach to the Jobs that still run, start the others, wait for all and return their results in order.

    A finished Job is history and proves nothing of the world now, so it is replaced: the programs that Jobs run look
    first and move only what is missing. Progress is read from the pods' last log lines, so it survives a re-attach.

    Args:
        ports: of the site.
        step: what progress is shown under.
        jobs: the rendered Jobs.
        total_bytes: what they will have moved or read in all; 0 if they only look.
        deadline_s: when they have to be done.
        watch: called every half second while they run; what it raises ends the waiting, not the Jobs.

    Raises:
        K2Error: what the first failed Job said of itself, or what `watch` raised.
        UnavailableError: a Job failed and left no message.
        NotReadyError: not all were done before the deadline (K2-RDY-001), or a node that a Job is pinned to is gone or
            not Ready (K2-RDY-002).
    """
    results = follow_jobs(ports, step, jobs, total_bytes, deadline_s, stop_at_failure=True, watch=watch)
    return [_raised(result) for result in results]


def follow_jobs(
    ports: Ports,
    step: str,
    jobs: Sequence[dict[str, Any]],
    total_bytes: int,
    deadline_s: float,
    *,
    stop_at_failure: bool,
    watch: Watch = unwatched,
    optional: Collection[str] = (),
    optional_s: Callable[[float], float] = lambda _: 0.0,
) -> list[JobResult | K2Error]:
    """Do as `run_jobs` does, but return a failed Job's error in its place; the first one is raised where wanted.

    Also a Job whose node is lost, or that is not done before the deadline, has failed; it keeps no other from ending.
    Jobs named in `optional` are waited for `optional_s(elapsed)` seconds more when all others have ended.
    """
    running = _attach_or_start(ports, jobs)
    nodes, deadline = _Nodes(ports), Deadline(ports, deadline_s)
    obstacles = JobObstacles(ports, step)
    shown = _Shown(ports, step, running, total_bytes)
    results: dict[str, JobResult | K2Error] = {}
    with ports.cluster.mirror("Job") as known_jobs, ports.cluster.mirror("Pod") as known_pods:
        while True:
            waiting = [job for job in running if job.name not in results]
            results |= _outcomes(ports, waiting, known_jobs.objects())
            waiting = [job for job in waiting if job.name not in results]
            results |= nodes.lost(waiting)
            waiting = [job for job in waiting if job.name not in results]
            obstacles.look({job.name: job.uid for job in waiting}, known_pods)
            if optional and waiting and {job.name for job in waiting} <= set(optional):
                deadline, optional = Deadline(ports, optional_s(deadline.elapsed_s)), ()
            results |= _too_late(step, waiting, deadline, obstacles)
            if stop_at_failure:
                for result in results.values():
                    _raised(result)
            shown.show(results, known_pods)
            if results.keys() == {job.name for job in running}:
                return [results[job.name] for job in running]
            watch()
            ports.clock.sleep(_POLL_S)


def end_jobs(ports: Ports, jobs: Sequence[Mapping[str, Any]]) -> None:
    """Delete those of the Jobs that have not ended: their programs are told to stop, and leave nothing half done."""
    names = {job["metadata"]["name"] for job in jobs}
    for job in ports.cluster.list_objects("Job"):
        if job["metadata"]["name"] in names and not has_ended(job):
            ports.cluster.delete("Job", job["metadata"]["name"], uid=job["metadata"]["uid"])


class _Nodes:
    """Watches the nodes that Jobs are pinned to: nothing else would end a Job whose node is gone."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._looked = -math.inf
        self._since: dict[str, float] = {}

    def lost(self, waiting: Sequence[_Job]) -> dict[str, K2Error]:
        """Return an error for each Job whose node has not been Ready for as long as a restart may take."""
        now = self._ports.clock.now()
        pinned = {job.node for job in waiting if job.node}
        if not pinned or now - self._looked < _NODE_LOOK_S:
            return {}
        self._looked = now
        try:
            nodes = {node["metadata"]["name"]: node for node in self._ports.cluster.list_objects("Node")}
        except UnavailableError:
            return {}  # an API that does not answer says nothing about nodes
        # Nor does a time in which it did not: all nodes are NotReady for a moment after an outage.
        now = self._ports.clock.now() - self._ports.cluster.silent_s
        problems = {name: problem for name in pinned if (problem := _problem(nodes.get(name)))}
        self._since = {name: self._since.get(name, now) for name in problems}
        gone = {name for name, since in self._since.items() if now - since >= _NODE_PATIENCE_S}
        return {job.name: _lost(job, problems[job.node]) for job in waiting if job.node in gone}


def _problem(node: Mapping[str, Any] | None) -> str:
    """Return why nothing can end on a node, or nothing; a cordoned one still works."""
    if node is None:
        return "gone"
    ready = next((c for c in node.get("status", {}).get("conditions", []) if c["type"] == "Ready"), None)
    if ready is None or ready["status"] == "True":
        return ""
    return f"not Ready ({ready.get('reason', 'no reason')})"


def _lost(job: _Job, problem: str) -> NotReadyError:
    return NotReadyError(
        "K2-RDY-002",
        "A node was lost while a Job worked on it.",
        where=job.node,
        got=problem,
        expected="Ready",
        hint=f"kubectl describe node {job.node}; cordon it, and run the release again: another node is chosen",
        details={"job": job.name},
    )


def _raised(result: JobResult | K2Error) -> JobResult:
    if isinstance(result, K2Error):
        raise result
    return result


def _outcomes(
    ports: Ports, waiting: Sequence[_Job], known: Sequence[Mapping[str, Any]]
) -> dict[str, JobResult | K2Error]:
    """Return how Jobs ended that look as if they had. A mirror may lag behind: what it hints at is read directly."""
    running = {job["metadata"]["uid"] for job in known if not has_ended(job)}
    hinted = [job for job in waiting if job.uid not in running]
    return {job.name: result for job in hinted if (result := _outcome(ports, job)) is not None}


def _outcome(ports: Ports, job: _Job) -> JobResult | K2Error | None:
    try:
        return _result(ports, job)
    except K2Error as error:
        return error


def _attach_or_start(ports: Ports, jobs: Sequence[dict[str, Any]]) -> list[_Job]:
    there = {job["metadata"]["name"]: job for job in ports.cluster.list_objects("Job")}
    for job in jobs:
        old = there.get(job["metadata"]["name"])
        if old is not None and has_ended(old):
            ports.cluster.delete("Job", old["metadata"]["name"], uid=old["metadata"]["uid"])
    return [_create(ports, job) for job in jobs]


def _create(ports: Ports, job: dict[str, Any]) -> _Job:
    """Create a Job, waiting for an ended one of the same name to be gone; attach to one that still runs."""
    name = job["metadata"]["name"]
    for _ in range(_GONE_TRIES):
        existing, created = ports.cluster.create(job)
        if created or not (has_ended(existing) or "deletionTimestamp" in existing["metadata"]):
            return _Job(name, existing["metadata"]["uid"], pinned_to(job))
        if "deletionTimestamp" not in existing["metadata"]:  # it has ended since the Jobs were listed
            ports.cluster.delete("Job", name, uid=existing["metadata"]["uid"])
        ports.clock.sleep(_POLL_S / 2)
    raise UnavailableError(
        "K2-UNA-003",
        "An old Job of the same name does not go away.",
        where=f"Job {name}",
        hint=f"kubectl delete job {name}",
        retry=After(5),
    )


def pinned_to(job: Mapping[str, Any]) -> str:
    """Return the one node that a Job's affinity allows, or an empty name."""
    found: Any = job.get("spec", {})
    for field in ("template", "spec", "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"):
        found = found.get(field, {})
    fields = [f for term in found.get("nodeSelectorTerms", []) for f in term.get("matchFields", [])]
    names = [name for f in fields if f["key"] == "metadata.name" for name in f["values"]]
    return str(names[0]) if len(names) == 1 else ""


def has_ended(job: Mapping[str, Any]) -> bool:
    """Return whether a Job will do nothing any more."""
    return _condition(job, "Complete") or _condition(job, "Failed")


def _condition(job: Mapping[str, Any], kind: str) -> bool:
    return any(c["type"] == kind and c["status"] == "True" for c in job.get("status", {}).get("conditions", []))


def _result(ports: Ports, running: _Job) -> JobResult | None:
    job = ports.cluster.get("Job", running.name)
    if job is None or job["metadata"]["uid"] != running.uid:
        raise UnavailableError(
            "K2-UNA-003", "A worker Job is gone before it ended.", where=f"Job {running.name}", retry=After(5)
        )
    if _condition(job, "Complete"):
        message = _message(ports, running)
        if message is None:
            raise UnavailableError(
                "K2-UNA-003", "A worker Job completed without a result.", where=f"Job {running.name}", retry=After(5)
            )
        return JobResult(running.name, message)
    if _condition(job, "Failed"):
        raise _failure(_message(ports, running), running.name)
    return None


def _pods(ports: Ports, job: _Job) -> list[dict[str, Any]]:
    return ports.cluster.list_objects("Pod", {UID_LABEL: job.uid})


def _message(ports: Ports, job: _Job) -> dict[str, Any] | None:
    """Return the JSON termination message of a Job's pod, or None if there is none."""
    for pod in _pods(ports, job):
        for status in pod.get("status", {}).get("containerStatuses", []):
            text = status.get("state", {}).get("terminated", {}).get("message", "")
            if text:
                try:
                    return dict(json.loads(text))
                except (ValueError, TypeError):
                    return None
    return None


def _failure(message: Mapping[str, Any] | None, name: str) -> K2Error:
    if message and "code" in message:
        try:
            return error_from_data(message)
        except (KeyError, IndexError, TypeError, ValueError):
            pass  # not one of our errors: said below
    return UnavailableError(
        "K2-UNA-003",
        "A worker Job failed without saying why.",
        where=f"Job {name}",
        hint=f"kubectl logs job/{name}",
        retry=After(5),
    )


class _Shown:
    """The progress of Jobs, read from the last log lines of their pods."""

    def __init__(self, ports: Ports, step: str, running: Sequence[_Job], total_bytes: int) -> None:
        self._ports = ports
        self._step = step
        self._running = running
        self._total_bytes = total_bytes
        self._seen: dict[str, float] = {}
        self._read_at = -math.inf

    def show(self, results: Mapping[str, JobResult | K2Error], pods: Mirror) -> None:
        """Show how far the Jobs are; logs, which come from the nodes, are read every now and then."""
        progress, total, count = self._ports.progress, self._total_bytes, len(self._running)
        if not total:
            progress.show(self._step, len(results), count, "jobs")
            return
        everything = len(results) == count
        if not everything and self._ports.clock.now() - self._read_at >= _LOG_EVERY_S:
            self._read_at = self._ports.clock.now()
            self._read([job for job in self._running if job.name not in results], pods.objects())
        done = float(total) if everything else min(float(total), sum(self._seen.values()))
        progress.show(self._step, done, total, "bytes", f"{len(results)} of {count} jobs done")

    def _read(self, running: Sequence[_Job], pods: Sequence[Mapping[str, Any]]) -> None:
        for job in running:
            own = [pod for pod in pods if (pod["metadata"].get("labels") or {}).get(UID_LABEL) == job.uid]
            if (done := _progress(self._ports, own)) is not None:
                self._seen[job.name] = done


def _progress(ports: Ports, pods: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the bytes that a Job's pod says it has done, or None if it says nothing (yet)."""
    for pod in pods:
        if pod.get("status", {}).get("phase") == "Pending":
            continue
        try:
            log = ports.cluster.pod_log(pod["metadata"]["name"], pod["spec"]["containers"][0]["name"], _LOG_LINES)
        except (KeyError, UnavailableError):
            continue
        for line in reversed(log.splitlines()):
            try:
                return float(json.loads(line)["progress"]["done_bytes"])
            except (ValueError, KeyError, TypeError):
                continue
    return None


def _too_late(
    step: str, waiting: Sequence[_Job], deadline: Deadline, obstacles: JobObstacles
) -> dict[str, NotReadyError]:
    """Return the error of all Jobs that are not done at the deadline; none before it."""
    if not waiting or not deadline.passed:
        return {}
    waited, first = deadline.elapsed_s, obstacles.first
    error = NotReadyError(
        "K2-RDY-001",
        f"{step}: {len(waiting)} Jobs are not done after {waited:.0f} s." + (f" {first.summary}" if first else ""),
        where=", ".join(job.name for job in waiting[:5]),
        got=first.detail if first else f"{waited:.0f} s",
        expected=f"at most {deadline.within_s:.0f} s",
        hint=first.remedy if first else f"kubectl describe job {waiting[0].name}",
    )
    return {job.name: error for job in waiting}
