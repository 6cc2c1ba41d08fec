"""Step `scrub`: every byte of what is live, and of what rollback goes to, is read again on every node that holds it.

A few nodes at a time, one of each unit; never while a release stages or shifts: what reads stands back at once, and
goes on afterwards. A node with rot that could not be put right loses its label: no engine is started there any more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.core.errors import After, ConflictError, IntegrityError, K2Error, UnavailableError
from tasks.core.identity import sha256_hex
from tasks.core.lease import LEASE, read_lease
from tasks.core.lock import Lock
from tasks.core.marker import check_marker_against_lock
from tasks.core.mounts import uses_of
from tasks.core.node_state import engine_tolerations, why_unusable
from tasks.core.render import staged_label
from tasks.core.scrub_order import next_batch, units_of
from tasks.core.units import format_bytes
from tasks.core.worker_jobs import WRITES_LABEL, render_scrub_job
from tasks.ports import Object
from tasks.steps.context import Ports
from tasks.steps.documents import get_lock
from tasks.steps.jobs import JobResult, end_jobs, follow_jobs, has_ended, pinned_to
from tasks.steps.node_holder import node_lease_name
from tasks.steps.pool import pool_nodes
from tasks.steps.staging import parse_marker, read_marker_bytes
from tasks.steps.tool_image import tool_image
from tasks.steps.weights_needed import read_ledgers, served_locks

_LOOK_S = 5.0
_PEACE_PATIENCE_S = 2 * 3600.0
_SAY_EVERY_S = 60.0
_TRIES = 2
_SLOWEST = 3.0
_UNLIMITED_S = 6 * 3600.0
RIGHT, REPAIRED, WRONG, UNREAD, SKIPPED = "right", "repaired", "wrong", "not read", "skipped"


@dataclass(frozen=True)
class Target:
    """One lock that is scrubbed, the releases that it is for, and the nodes that hold it."""

    lock: Lock
    releases: tuple[str, ...]
    nodes: tuple[str, ...]


class _DisturbedError(ConflictError):
    """A release has begun to work on the nodes that are scrubbed."""


def scrub_step(ports: Ports, named: Sequence[str] = ()) -> dict[str, Any]:
    """Scrub the nodes that hold the weights of what is live and of the rollback target, and return a row for each.

    Args:
        ports: of the site; the caller is its caretaker.
        named: only these nodes, if any. One that has lost its label gets it back when every byte is right again.

    Raises:
        IntegrityError: a node has rot that could not be put right; it has no label any more.
        InputError: a named node is not one of the site's pool.
        ConflictError: a release was at work for hours.
        UnavailableError: a node could not be read to its end.
    """
    nodes = pool_nodes(ports, named)
    rows: list[dict[str, Any]] = []
    for target in _targets(ports, nodes, named):
        rows += _scrub_target(ports, target, nodes)
    ports.progress.table("scrub", [_shown(row) for row in rows], "Scrub of the staged weights")
    _raise_problems(rows)
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in (RIGHT, REPAIRED, SKIPPED)}
    return {
        "outcome": "repaired" if counts[REPAIRED] else "done" if counts[RIGHT] else "unchanged",
        "nodes": rows,
        "bytes_read": sum(int(row.get("bytes_read", 0)) for row in rows),
        "note": _note(rows, counts),
    }


def _note(rows: Sequence[Mapping[str, Any]], counts: Mapping[str, int]) -> str:
    if not rows:
        return "nothing is live: no weights to scrub"
    read = format_bytes(sum(int(row.get("bytes_read", 0)) for row in rows))
    skipped = f", {counts[SKIPPED]} skipped" if counts[SKIPPED] else ""
    return f"{counts[RIGHT]} nodes right, {counts[REPAIRED]} repaired{skipped}; {read} read"


def _targets(ports: Ports, nodes: Mapping[str, Object], named: Sequence[str]) -> list[Target]:
    served = served_locks(ports, read_ledgers(ports.store))
    releases: dict[str, list[str]] = {}
    for release, digest, _ in served:
        releases.setdefault(digest, []).append(release)
    pods = ports.cluster.list_objects("Pod")
    targets = []
    for digest, names in releases.items():
        lock = get_lock(ports.store, digest)
        holding = _labelled(nodes, lock) | _serving(ports, pods, lock)
        holding |= {node for node in named if _was_staged(ports, node, lock)}
        targets.append(Target(lock, tuple(dict.fromkeys(names)), tuple(sorted(holding & nodes.keys()))))
    return targets


def _labelled(nodes: Mapping[str, Object], lock: Lock) -> set[str]:
    label = staged_label(lock.digest)
    return {name for name, node in nodes.items() if (node["metadata"].get("labels") or {}).get(label) == "true"}


def _serving(ports: Ports, pods: Sequence[Object], lock: Lock) -> set[str]:
    """Return the nodes on which pods of sets use the lock's directory, with a label or without."""
    uses = [use for pod in pods for use in uses_of(pod, ports.site.nvme_path, ports.site.namespace)]
    return {use.node for use in uses if use.path == lock.model_dir and use.node}


def _was_staged(ports: Ports, node: str, lock: Lock) -> bool:
    keys = (f"markers/{node}/{lock.digest}.json", f"scrubs/{node}/{lock.digest}.json")
    return any(ports.store.head(key) is not None for key in keys)


def _scrub_target(ports: Ports, target: Target, nodes: Mapping[str, Object]) -> list[dict[str, Any]]:
    tolerations = engine_tolerations(ports.templates)
    closed = {name: why for name in target.nodes if (why := why_unusable(nodes[name], tolerations))}
    rows = [_row(target, name, SKIPPED, error=why) for name, why in closed.items()]
    waiting = [name for name in target.nodes if name not in closed]
    tries = dict.fromkeys(waiting, 0)
    units = units_of(ports.cluster.list_objects("Pod"))
    while waiting:
        batch = next_batch(waiting, units, len(target.nodes))
        for node, result in _run_batch(ports, target, batch, nodes).items():
            tries[node] += 1
            waiting.remove(node)
            if isinstance(result, UnavailableError) and isinstance(result.retry, After) and tries[node] < _TRIES:
                ports.progress.say(f"scrub: {node} again, it was not read to its end: {result}")
                waiting.append(node)
            else:
                rows.append(_conclude(ports, target, node, nodes[node], result))
    return sorted(rows, key=lambda row: str(row["node"]))


def _run_batch(
    ports: Ports, target: Target, batch: Sequence[str], nodes: Mapping[str, Object]
) -> dict[str, JobResult | K2Error]:
    """Scrub some nodes at once, however often a release comes between, and return what came of each."""
    image, lock = tool_image(ports), target.lock
    jobs = [
        render_scrub_job(lock, ports.site, ports.templates, image, node, nodes[node]["metadata"]["uid"])
        for node in batch
    ]
    rate = ports.site.staging.scrub_bytes_per_s
    deadline_s = _UNLIMITED_S + (_SLOWEST * lock.total_bytes / rate if rate else 0.0)
    total, peace = lock.total_bytes * len(jobs), _Peace(ports, batch)
    while True:
        peace.wait()
        ports.progress.say(f"scrub: {', '.join(batch)}: lock {lock.digest[:12]}, {format_bytes(lock.total_bytes)} each")
        try:
            ended = follow_jobs(ports, "scrub", jobs, total, deadline_s, stop_at_failure=False, watch=peace.require)
        except _DisturbedError as error:
            ports.progress.say(f"scrub: stands back from {', '.join(batch)}: {error.got}")
            end_jobs(ports, jobs)
        else:
            return dict(zip(batch, ended, strict=True))


class _Peace:
    """Looks whether a release moves traffic, or writes weights to one of some nodes."""

    def __init__(self, ports: Ports, nodes: Sequence[str]) -> None:
        self._ports = ports
        self._nodes = nodes
        self._looked_at = -math.inf

    def require(self) -> None:
        """Raise if there is none; look every few seconds only."""
        now = self._ports.clock.now()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        if why := self._disturbed_by():
            raise _DisturbedError("K2-CON-001", "A release is at work.", where=", ".join(self._nodes), got=why)

    def wait(self) -> None:
        """Wait until there is peace; ConflictError after hours."""
        clock, said = self._ports.clock, -_SAY_EVERY_S
        began = clock.now()
        while why := self._disturbed_by():
            waited_s = clock.now() - began
            if waited_s >= _PEACE_PATIENCE_S:
                raise ConflictError(
                    "K2-CON-001",
                    "A release has been at work for too long; the rest was not scrubbed.",
                    where=", ".join(self._nodes),
                    got=why,
                    expected=f"none within {_PEACE_PATIENCE_S / 3600:.0f} h",
                    hint="k2ctl status; then scrub again, it goes on where it was",
                )
            if waited_s - said >= _SAY_EVERY_S:
                said = waited_s
                self._ports.progress.say(f"scrub: waiting for a release: {why}")
            clock.sleep(_LOOK_S)

    def _disturbed_by(self) -> str:
        cluster, now = self._ports.cluster, self._ports.clock.now()
        for name in (LEASE, *map(node_lease_name, self._nodes)):
            obj = cluster.get("Lease", name)
            held = read_lease(obj) if obj is not None else None
            if held is not None and held.holder and not held.expired(now):
                doing = "traffic is moved" if name == LEASE else f"{name.removeprefix(node_lease_name(''))} is staged"
                return f"{doing} by {held.holder}"
        for job in cluster.list_objects("Job"):
            writes = WRITES_LABEL in (job["metadata"].get("labels") or {})
            # Its flow may have died; the Job goes on without a Lease.
            if writes and not has_ended(job) and (node := pinned_to(job)) in self._nodes:
                return f"{job['metadata']['name']} writes to {node}"
        return ""


def _conclude(ports: Ports, target: Target, node: str, obj: Object, result: JobResult | K2Error) -> dict[str, Any]:
    """Return the row of a node, its label put right: on it only while its marker is true."""
    try:
        if isinstance(result, K2Error):
            raise result
        message = result.message
        _check_marker(ports, target.lock, node, message)
    except IntegrityError as error:
        _label(ports, target.lock, node, obj, None)
        ports.store.delete(f"markers/{node}/{target.lock.digest}.json")
        ports.progress.say(f"scrub: {node} has lost its label, no engine is started there: {error}")
        return _row(target, node, WRONG, error=error, problems=error.details.get("problems", []))
    except K2Error as error:
        return _row(target, node, UNREAD, error=error)
    _label(ports, target.lock, node, obj, "true")
    for problem in message["problems"]:
        ports.progress.say(f"scrub: {node}: {problem['path']} ({problem['problem']}) was put right")
    facts = {key: message[key] for key in ("files", "bytes_read", "how", "rotten", "marker", "problems")}
    return _row(target, node, REPAIRED if message["rotten"] else RIGHT, **facts)


def _check_marker(ports: Ports, lock: Lock, node: str, message: Mapping[str, Any]) -> None:
    """Check the node's own marker against the lock; an exit code is no evidence."""
    data = read_marker_bytes(ports, lock, node)
    if sha256_hex(data) != message.get("marker_sha256"):
        raise IntegrityError(
            "K2-INT-004",
            "The marker in the store is not the one that the scrub found on the node.",
            where=node,
            got=sha256_hex(data),
            expected=str(message.get("marker_sha256")),
        )
    check_marker_against_lock(parse_marker(data, node), lock, node)


def _label(ports: Ports, lock: Lock, node: str, obj: Object, value: str | None) -> None:
    label = staged_label(lock.digest)
    if (obj["metadata"].get("labels") or {}).get(label) != value:
        ports.cluster.merge_patch("Node", node, {"metadata": {"labels": {label: value}}})


def _row(target: Target, node: str, outcome: str, **facts: Any) -> dict[str, Any]:
    error = facts.pop("error", None)
    row: dict[str, Any] = {
        "node": node,
        "outcome": outcome,
        "lock_digest": target.lock.digest,
        "releases": list(target.releases),
    }
    if isinstance(error, K2Error):
        row["error"] = error.as_data()
    elif error:
        row["why"] = error
    return row | facts


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row that fits a screen; the ledger keeps it in full."""
    return {
        "node": row["node"],
        "outcome": row["outcome"],
        "lock": row["lock_digest"][:12],
        "read": format_bytes(row["bytes_read"]) if "bytes_read" in row else "",
        "problems": "; ".join(f"{p['path']}: {p['problem']}" for p in row.get("problems", [])[:3])
        or row.get("why", "")
        or row.get("error", {}).get("summary", ""),
    }


def _raise_problems(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise what is worst: rot that stays, then what was not read."""
    bad = [row for row in rows if row["outcome"] == WRONG]
    worst = bad or [row for row in rows if row["outcome"] == UNREAD]
    if not worst:
        return
    first = worst[0]["error"]
    told = {
        "where": ", ".join(dict.fromkeys(row["node"] for row in worst)),
        "got": f"{first['code']} {first['summary']} {first['where']}".strip(),
        "expected": "every byte as the lock says",
        "hint": first["next"],
    }
    count, details = f"{len(worst)} of {len(rows)} nodes", {"nodes": [dict(row) for row in rows]}
    if bad:
        raise IntegrityError("K2-INT-002", f"{count} have rot that could not be put right.", details=details, **told)
    raise UnavailableError("K2-UNA-003", f"{count} were not read to their end.", details=details, **told)
