"""Step `stage`: verified bytes onto the nodes' NVMe, then the barrier that reads every node's marker (I2)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.core.errors import IntegrityError, K2Error, NotReadyError
from tasks.core.identity import sha256_hex
from tasks.core.lock import Lock
from tasks.core.marker import Marker, check_marker_against_lock, marker_from_data
from tasks.core.render import staged_label
from tasks.core.units import format_bytes
from tasks.core.ways import STORE, topology_of
from tasks.core.worker_jobs import render_stage_job
from tasks.steps.capacity import read_nodes
from tasks.steps.context import Ports, Subject
from tasks.steps.exchanging import Party, exchange, holding_all
from tasks.steps.jobs import JobResult, Watch, end_jobs, follow_jobs, run_jobs, unwatched
from tasks.steps.node_holder import NodeHolder
from tasks.steps.together import HaltedError
from tasks.steps.weights import PULL_DEADLINE_S

_TOLD = ("seconds", "attempts", "quarantined", "moved", "worst")
"""What a stager says of its work: for whoever asks why a node was slow, and no evidence of anything."""
_STAGE_DEADLINE_S = 2 * 3600.0
# For spares, which nobody waits for: so long at least, or twice what the chosen nodes took.
_SPARE_DEADLINE_S = 600.0
_SOURCE_WAIT_S = 3600.0
"""How long a stager waits without a new file. The flow ends it when the pull fails: this is for when both have died."""
_BUSY_WAIT_S = 3600.0
"""How long another release may go on staging on a chosen node. A spare is not waited for."""


def stage_step(
    ports: Ports,
    subject: Subject,
    nodes: Sequence[str],
    spares: Sequence[str],
    *,
    beside_pull: bool = False,
    watch: Watch = unwatched,
    planned: str = "",
) -> dict[str, Any]:
    """Stage the lock on the chosen nodes and on the spares, read all markers, and label the nodes.

    Every chosen node must be right or the step fails. A spare that fails is reported and left without label: it is
    staged so that the next release that only changes arguments moves no byte. One that is not done in its time is left
    to its Job, which goes on; the next release finds what it has done.

    Args:
        ports: of the site.
        subject: the release.
        nodes: the chosen ones.
        spares: further ones.
        beside_pull: whether the store is still being filled; the stagers wait for what is missing there.
        watch: called while Jobs run; what it raises ends the step.
        planned: the topology that the plan has picked; see `topology_of` for which one counts.

    Raises:
        IntegrityError: a node's bytes or marker are wrong; all chosen nodes lose their label.
        ConflictError: another release is staging on a chosen node (K2-CON-008).
        HaltedError: the pull has failed; the stagers are told to stop.
    """
    work = _Work(ports, subject, node_uids(ports, [*nodes, *spares]), nodes_in_use(ports))
    topology = topology_of(ports.site, planned)
    try:
        if topology == STORE:
            rows, spare_rows = _through_store(work, nodes, spares, beside_pull, watch)
        else:
            rows, spare_rows = _without_store(work, nodes, spares, topology, watch)
    except IntegrityError:
        _unlabel(ports, subject.lock, nodes)
        raise
    for row in [*rows, *(r for r in spare_rows if r["outcome"] == "verified")]:
        ports.cluster.merge_patch(
            "Node", row["node"], {"metadata": {"labels": {staged_label(subject.lock.digest): "true"}}}
        )
    everything = [*rows, *spare_rows]
    _publish(ports, subject.lock, everything)
    written = sum(int(row["bytes_written"]) for row in everything)
    return {
        "outcome": "done" if written else "unchanged",
        "bytes_written": written,
        "nodes": [_evidence(row) for row in rows],
        "spares": [_evidence(row) for row in spare_rows],
        "work": [{"node": row["node"], **_told(row)} for row in everything if _told(row)],
        "note": _note(rows, spare_rows, written),
    }


def _through_store(
    work: _Work, nodes: Sequence[str], spares: Sequence[str], beside_pull: bool, watch: Watch
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Stage the chosen nodes and then the spares from the store, and return the rows of both."""
    began = work.ports.clock.now()
    rows = _stage_chosen(work, nodes, beside_pull, watch)
    deadline_s = max(_SPARE_DEADLINE_S, 2 * (work.ports.clock.now() - began))
    return rows, _stage_spares(work, spares, deadline_s)


def _without_store(
    work: _Work, nodes: Sequence[str], spares: Sequence[str], topology: str, watch: Watch
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Let all nodes exchange the weights, or pull them, at the same time, and return the rows of both kinds."""
    ports, lock = work.ports, work.subject.lock
    party = Party(topology, tuple(nodes), tuple(spares), work.uids, work.in_use)
    with holding_all(ports, work.subject, party, _BUSY_WAIT_S, watch) as held:
        done, ended = exchange(ports, work.subject, held, _SPARE_DEADLINE_S)
        rows = [_barrier(ports, lock, node, result.message) for node, result in zip(nodes, done, strict=True)]
        return rows, [_spare_row(ports, lock, node, ended[node]) for node in spares]


@dataclass(frozen=True)
class _Work:
    """What is staged, the nodes' uids, and the names of those whose GPUs are in use."""

    ports: Ports
    subject: Subject
    uids: Mapping[str, str]
    in_use: frozenset[str]

    def jobs(self, nodes: Sequence[str], source_wait_s: float = 0.0) -> list[dict[str, Any]]:
        """Return the staging Job of each node."""
        return [
            render_stage_job(
                self.subject.lock,
                self.ports.site,
                self.ports.templates,
                self.subject.release.images.tool,
                node,
                self.uids[node],
                serving=node in self.in_use,
                source_wait_s=source_wait_s,
            )
            for node in nodes
        ]


def nodes_in_use(ports: Ports) -> frozenset[str]:
    """Return the names of the nodes of the pool whose GPUs are in use now, by whomever."""
    return frozenset(node.name for node in read_nodes(ports, "") if node.gpus_used)


def _stage_chosen(work: _Work, nodes: Sequence[str], beside_pull: bool, watch: Watch) -> list[dict[str, Any]]:
    """Stage the chosen nodes under their Leases and return the row of each, its marker read."""
    ports, lock = work.ports, work.subject.lock
    jobs = work.jobs(nodes, _SOURCE_WAIT_S if beside_pull else 0.0)
    holder = NodeHolder(ports, work.subject)
    deadline_s = _STAGE_DEADLINE_S + (PULL_DEADLINE_S if beside_pull else 0.0)

    def look() -> None:
        watch()
        holder.keep()

    try:
        with holder.holding(nodes, _BUSY_WAIT_S, watch):
            results = run_jobs(ports, "stage", jobs, lock.total_bytes * len(jobs), deadline_s, look)
            return [_barrier(ports, lock, node, done.message) for node, done in zip(nodes, results, strict=True)]
    except HaltedError as halted:
        if halted.failed:  # nothing more will come
            end_jobs(ports, jobs)
        raise


def _note(rows: Sequence[Mapping[str, Any]], spare_rows: Sequence[Mapping[str, Any]], written: int) -> str:
    moved = sum(int(row.get("quarantined", 0)) for row in (*rows, *spare_rows))
    return f"{len(rows)} nodes verified, {len(spare_rows)} spares, {format_bytes(written)} written" + (
        f", {moved} wrong files in quarantine" if moved else ""
    )


def _publish(ports: Ports, lock: Lock, rows: Sequence[Mapping[str, Any]]) -> None:
    """Publish what each node has, and its worst file, as a table that fits a screen; the ledger keeps all of it."""
    ports.progress.table("staging", [_shown(row) for row in rows], f"Staging of {lock.digest[:12]}")


def _told(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in _TOLD if key in row}


def _evidence(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a row that a receipt carries."""
    return {key: value for key, value in row.items() if key not in _TOLD}


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    worst = [f"{w['path']}: {w['seconds']} s, {w['attempts']} tries, {w['source']}" for w in row.get("worst") or ()]
    return {
        "node": row["node"],
        "outcome": row["outcome"],
        "files": row["files"],
        "marker_content_sha256": row["marker_content_sha256"][:12],
        "bytes_written": format_bytes(row["bytes_written"]),
        "files_kept": row["files_kept"],
        "seconds": row.get("seconds", ""),
        "quarantined": row.get("quarantined", 0),
        "worst": worst[0] if worst else "",
    }


def node_uids(ports: Ports, names: Sequence[str]) -> dict[str, str]:
    """Return the UIDs of nodes by name; NotReadyError if one does not exist."""
    found = {node["metadata"]["name"]: str(node["metadata"]["uid"]) for node in ports.cluster.list_objects("Node")}
    for name in names:
        if name not in found:
            raise NotReadyError("K2-RDY-002", "A chosen node does not exist any more.", where=name)
    return found


def _barrier(ports: Ports, lock: Lock, node: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """Check a node's own marker, file by file against the lock, and return its row; an exit code is no evidence."""
    data = read_marker_bytes(ports, lock, node)
    if sha256_hex(data) != message.get("marker_sha256"):
        raise IntegrityError(
            "K2-INT-004",
            "The marker in the store is not the one that the stager wrote on the node.",
            where=node,
            got=sha256_hex(data),
            expected=str(message.get("marker_sha256")),
        )
    require_markers(ports, lock, [node])
    marker = parse_marker(data, node)
    return {
        "node": node,
        "outcome": "verified",
        "files": len(marker.files),
        "marker_content_sha256": marker.content_digest,
        "bytes_written": int(message.get("bytes_written", 0)),
        "files_kept": int(message.get("files_kept", 0)),
        **_told(message),
    }


def read_marker_bytes(ports: Ports, lock: Lock, node: str) -> bytes:
    """Return the copy of a node's marker; IntegrityError if there is none."""
    key = f"markers/{node}/{lock.digest}.json"
    try:
        return ports.store.get(key)[0]
    except KeyError as error:
        raise IntegrityError(
            "K2-INT-004", "A node has no staging marker for this lock.", where=node, got="none", expected=key
        ) from error


def require_markers(ports: Ports, lock: Lock, nodes: Sequence[str]) -> None:
    """Check that every node's marker covers the lock; IntegrityError names the first that does not (I2)."""
    uids = node_uids(ports, nodes)
    for node in nodes:
        marker = parse_marker(read_marker_bytes(ports, lock, node), node)
        check_marker_against_lock(marker, lock, node)
        if marker.node_uid != uids[node]:
            raise IntegrityError(
                "K2-INT-004",
                "The marker is of an earlier machine of the same name.",
                where=node,
                got=marker.node_uid,
                expected=uids[node],
            )


def parse_marker(data: bytes, node: str) -> Marker:
    """Return the marker of its file's bytes; IntegrityError if they are not one."""
    try:
        return marker_from_data(json.loads(data))
    except ValueError as error:
        raise IntegrityError("K2-INT-004", "A node's marker is not JSON.", where=node, expected="a marker") from error


def _stage_spares(work: _Work, spares: Sequence[str], deadline_s: float) -> list[dict[str, Any]]:
    """Stage the spares and return a row for each: one that fails is said so, and keeps no other from being used."""
    ports, lock = work.ports, work.subject.lock
    holder = NodeHolder(ports, work.subject, "stage spares")
    results: dict[str, JobResult | K2Error] = {}
    try:
        for node in spares:
            try:
                holder.acquire([node], 0.0)
            except K2Error as error:
                results[node] = error
        free = [node for node in spares if node not in results]
        jobs, total = work.jobs(free), lock.total_bytes * len(free)
        done = follow_jobs(ports, "stage spares", jobs, total, deadline_s, stop_at_failure=False, watch=holder.keep)
        results.update(zip(free, done, strict=True))
    except K2Error as error:
        for node in spares:
            results.setdefault(node, error)
    finally:
        holder.release()
    return [_spare_row(ports, lock, node, results[node]) for node in spares]


def _spare_row(ports: Ports, lock: Lock, node: str, result: JobResult | K2Error) -> dict[str, Any]:
    try:
        if isinstance(result, K2Error):
            raise result
        return _barrier(ports, lock, node, result.message)
    except K2Error as error:
        if isinstance(error, IntegrityError):
            # Engines that run there are not touched by this; no further one is sent there.
            _unlabel(ports, lock, [node])
        ports.progress.say(f"stage: spare {node} is not staged ({error}); the release goes on without it")
        return {
            "node": node,
            "outcome": "not staged",
            "files": 0,
            "marker_content_sha256": "",
            "bytes_written": 0,
            "files_kept": 0,
        }


def _unlabel(ports: Ports, lock: Lock, nodes: Sequence[str]) -> None:
    """Take the label from nodes that do not hold the lock (any more), so that no engine is scheduled there."""
    for node in nodes:
        ports.cluster.merge_patch("Node", node, {"metadata": {"labels": {staged_label(lock.digest): None}}})
