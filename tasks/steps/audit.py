"""Recomputing what a receipt says: stored documents by their digests, and every byte on every node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.core.errors import IntegrityError, K2Error
from tasks.core.identity import digest_of
from tasks.core.lock import Lock
from tasks.core.marker import check_marker_against_lock
from tasks.core.spec import plain, serving_form
from tasks.core.worker_jobs import render_verify_job
from tasks.steps.context import Ports
from tasks.steps.documents import get_by_digest, get_lock
from tasks.steps.jobs import JobResult, follow_jobs
from tasks.steps.receipts import GATES, check_nodes
from tasks.steps.staging import parse_marker, read_marker_bytes

_VERIFY_DEADLINE_S = 2 * 3600.0


def verify_receipt(ports: Ports, body: Mapping[str, Any]) -> list[dict[str, str]]:
    """Recompute every digest of a receipt and return one row for each that holds.

    Documents: lock, manifests, gate samples, serving and policy digests, each node's marker. Nodes: a verify Job on
    each reads every byte of every file of the lock. A receipt that names fewer nodes or gates than the release has is
    refused: nothing that is not looked at is proved.

    Raises:
        IntegrityError: the first document that does not hold, or the first node and file; every node is looked at, and
            what else was found is said and in `details`.
    """
    check_nodes(body["release"]["id"], body["nodes"], _nodes_of(body["release"]))
    missing = [name for name in GATES if name not in body["gates"]]
    _expect("gates", f"without {', '.join(missing)}" if missing else "all", "all")
    lock = get_lock(ports.store, body["lock"]["digest"])
    rows = [{"what": "lock", "digest": lock.digest}]
    rows += _serving_rows(body)
    get_by_digest(ports.store, "manifests", body["manifests_digest"])
    rows.append({"what": "manifests", "digest": body["manifests_digest"]})
    for name, gate in sorted(body["gates"].items()):
        samples = get_by_digest(ports.store, "samples", gate["samples"])
        rows.append({"what": f"samples of {name}", "digest": gate["samples"]})
        if name == "throughput":
            _expect("samples digest of the verdict", digest_of(plain(samples)), gate["verdict"]["samples_digest"])
    rows += [_marker_row(ports, lock, row) for row in body["nodes"]]
    nodes = [row["node"] for row in body["nodes"]]
    tool_image = body["release"]["images"]["tool"]
    jobs = [render_verify_job(lock, ports.site, ports.templates, tool_image, node) for node in nodes]
    total = lock.total_bytes * len(jobs)
    ended = follow_jobs(ports, "verify", jobs, total, _VERIFY_DEADLINE_S, stop_at_failure=False)
    for node, result in zip(nodes, _all_done(ports, nodes, ended), strict=True):
        _expect(f"{node}: files checked", str(result.message["checked"]), str(len(lock.files)))
        rows.append({"what": f"{node}: {result.message['checked']} files", "digest": lock.digest})
    return rows


def _all_done(ports: Ports, nodes: Sequence[str], ended: Sequence[JobResult | K2Error]) -> list[JobResult]:
    """Return the results if every Job has one; say every error, and raise the gravest: wrong bytes before no answer."""
    errors = [result for result in ended if isinstance(result, K2Error)]
    if errors:
        gravest = next((error for error in errors if isinstance(error, IntegrityError)), errors[0])
        others = [error for error in errors if error is not gravest]
        for node, result in zip(nodes, ended, strict=True):
            if isinstance(result, JobResult):
                ports.progress.say(f"ok: {node}, {result.message['checked']} files")
        for line in [line for error in [gravest, *others] for line in _further(error, error is not gravest)]:
            ports.progress.say(f"also: {line}")
        gravest.details = {**gravest.details, "also": [other.as_data() for other in others]}
        raise gravest
    return [result for result in ended if isinstance(result, JobResult)]


def _further(error: K2Error, with_first: bool) -> list[str]:
    """Return a line for each file that an error names, the first only where it is not shown as the error itself."""
    node = error.details.get("node", "")
    lines = [
        f"{node}: {p['path']}; got: {p['got']}, expected: {p['expected']}" for p in error.details.get("problems", [])
    ]
    if not lines:
        return [str(error)] if with_first else []
    return lines if with_first else lines[1:]


def _nodes_of(release: Mapping[str, Any]) -> int:
    return sum(int(group["nodes"]) for group in release["profile"]["groups"])


def _marker_row(ports: Ports, lock: Lock, row: Mapping[str, Any]) -> dict[str, str]:
    """Check that a node's marker speaks of that node and every file of the lock, and proves what it proved then.

    A repair from the store writes the marker anew, with other times; what it proves stays the same.
    """
    node = row["node"]
    marker = parse_marker(read_marker_bytes(ports, lock, node), node)
    check_marker_against_lock(marker, lock, node)
    if marker.content_digest != row["marker_content_sha256"]:
        raise IntegrityError(
            "K2-INT-003",
            "The node's marker does not prove what the receipt says.",
            where=f"{node}: marker",
            got=marker.content_digest,
            expected=row["marker_content_sha256"],
            hint=f"was {node} replaced by another machine of that name? Its marker names the machine {marker.node_uid}",
        )
    return {"what": f"{node}: marker", "digest": marker.content_digest}


def _serving_rows(body: Mapping[str, Any]) -> list[dict[str, str]]:
    """Recompute the serving and the policy digest from the release as it stands in the receipt."""
    release = body["release"]
    serving = digest_of(serving_form(release, body["lock"]["digest"]))
    _expect("serving digest", serving, body["serving_digest"])
    policy = digest_of({key: release[key] for key in ("gates", "traffic", "retention")})
    _expect("policy digest", policy, body["policy_digest"])
    return [{"what": "serving", "digest": serving}, {"what": "policy", "digest": policy}]


def _expect(what: str, got: str, expected: str) -> None:
    if got != expected:
        raise IntegrityError(
            "K2-INT-003", "A digest of the receipt does not hold.", where=what, got=got, expected=expected
        )
