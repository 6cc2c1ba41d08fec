"""Step `stage`: verified bytes onto the nodes' NVMe, then the barrier that reads every node's marker (I2)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.core.errors import IntegrityError, K2Error, NotReadyError
from tasks.core.identity import sha256_hex
from tasks.core.lock import Lock
from tasks.core.marker import Marker, check_marker_against_lock, marker_from_data
from tasks.core.render import staged_label
from tasks.core.units import format_bytes
from tasks.core.worker_jobs import render_stage_job
from tasks.steps.context import Ports, Subject
from tasks.steps.jobs import JobResult, follow_jobs, run_jobs

_STAGE_DEADLINE_S = 2 * 3600.0
# For spares, which nobody waits for: so long at least, or twice what the chosen nodes took.
_SPARE_DEADLINE_S = 600.0


def stage_step(ports: Ports, subject: Subject, nodes: Sequence[str], spares: Sequence[str]) -> dict[str, Any]:
    """Stage the lock on the chosen nodes and on the spares, read all markers, and label the nodes.

    Every chosen node must be right or the step fails. A spare that fails is reported and left without label: it is
    staged so that the next release that only changes arguments moves no byte. One that is not done in its time is left
    to its Job, which goes on; the next release finds what it has done.
    """
    uids = node_uids(ports, [*nodes, *spares])
    jobs = [
        render_stage_job(subject.lock, ports.site, ports.templates, subject.release.images.tool, node, uids[node])
        for node in nodes
    ]
    total = subject.lock.total_bytes * len(jobs)
    began = ports.clock.now()
    try:
        results = run_jobs(ports, "stage", jobs, total, _STAGE_DEADLINE_S)
        rows = [_barrier(ports, subject.lock, node, done.message) for node, done in zip(nodes, results, strict=True)]
    except IntegrityError:
        _unlabel(ports, subject.lock, nodes)
        raise
    deadline_s = max(_SPARE_DEADLINE_S, 2 * (ports.clock.now() - began))
    spare_rows = _stage_spares(ports, subject, spares, uids, deadline_s)
    for row in [*rows, *(r for r in spare_rows if r["outcome"] == "verified")]:
        ports.cluster.merge_patch(
            "Node", row["node"], {"metadata": {"labels": {staged_label(subject.lock.digest): "true"}}}
        )
    _publish(ports, subject.lock, [*rows, *spare_rows])
    written = sum(int(row["bytes_written"]) for row in [*rows, *spare_rows])
    return {
        "outcome": "done" if written else "unchanged",
        "bytes_written": written,
        "nodes": rows,
        "spares": spare_rows,
        "note": f"{len(rows)} nodes verified, {len(spare_rows)} spares, {format_bytes(written)} written",
    }


def _publish(ports: Ports, lock: Lock, rows: Sequence[Mapping[str, Any]]) -> None:
    """Publish what each node has as a table that fits a screen; the ledger keeps the digests in full."""
    shown = [
        {
            **row,
            "bytes_written": format_bytes(row["bytes_written"]),
            "marker_content_sha256": row["marker_content_sha256"][:12],
        }
        for row in rows
    ]
    ports.progress.table("staging", shown, f"Staging of {lock.digest[:12]}")


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


def _stage_spares(
    ports: Ports, subject: Subject, spares: Sequence[str], uids: Mapping[str, str], deadline_s: float
) -> list[dict[str, Any]]:
    """Stage the spares and return a row for each: one that fails is said so, and keeps no other from being used."""
    jobs = [
        render_stage_job(subject.lock, ports.site, ports.templates, subject.release.images.tool, node, uids[node])
        for node in spares
    ]
    total = subject.lock.total_bytes * len(jobs)
    try:
        results = follow_jobs(ports, "stage spares", jobs, total, deadline_s, stop_at_failure=False)
    except K2Error as error:
        results = [error for _ in spares]
    return [_spare_row(ports, subject.lock, node, result) for node, result in zip(spares, results, strict=True)]


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
