"""Recomputing what a receipt says: stored documents by their digests, and every byte on every node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.core.errors import IntegrityError
from tasks.core.identity import digest_of
from tasks.core.render import render_verify_job
from tasks.core.spec import plain, serving_form
from tasks.steps.context import Ports
from tasks.steps.documents import get_by_digest, get_lock
from tasks.steps.jobs import run_jobs

_VERIFY_DEADLINE_S = 2 * 3600.0


def verify_receipt(ports: Ports, body: Mapping[str, Any]) -> list[dict[str, str]]:
    """Recompute every digest of a receipt and return one row for each that holds.

    Documents: lock, manifests, gate samples, serving and policy digests. Nodes: a verify Job on each reads every byte
    of every file of the lock.

    Raises:
        IntegrityError: the first that does not hold: document or node and file, got and expected.
    """
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
    nodes = [row["node"] for row in body["nodes"]]
    tool_image = body["release"]["images"]["tool"]
    jobs = [render_verify_job(lock, ports.site, ports.templates, tool_image, node) for node in nodes]
    for node, result in zip(
        nodes, run_jobs(ports, "verify", jobs, lock.total_bytes * len(jobs), _VERIFY_DEADLINE_S), strict=True
    ):
        _expect(f"{node}: files checked", str(result.message["checked"]), str(len(lock.files)))
        rows.append({"what": f"{node}: {result.message['checked']} files", "digest": lock.digest})
    return rows


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
