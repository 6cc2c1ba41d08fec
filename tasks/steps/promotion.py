"""Steps `approve`, `promote` and `retire`: the candidate becomes the stable set, and the old one goes later."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tasks.core.errors import After, ConflictError, InputError
from tasks.core.identity import canonical_bytes
from tasks.core.ledger import StepState, finished, receipt
from tasks.core.plan import NONE, POLICY
from tasks.core.render import render_serving
from tasks.core.route import LIVE_ROUTE, PARKING, STABLE, Backend, RouteState
from tasks.core.spec import Release, plain
from tasks.steps.context import Ports, Subject
from tasks.steps.documents import get_live, get_receipt, put_by_digest, put_live, put_receipt
from tasks.steps.gating import workload_digest
from tasks.steps.journal import records, states
from tasks.steps.traffic import TrafficHolder, read_live_route, write_live_route

_DRAIN_POLL_S = 0.5
_DRAIN_DEADLINE_S = 300.0


GATES = ("smoke", "throughput")


def approve_step(ports: Ports, release: Release, approver: str, comment: str) -> dict[str, Any]:
    """Record the approval and return it with the lock that it covers.

    Raises:
        ConflictError: the gates of this release have not passed (K2-CON-006): there is nothing to approve.
    """
    done = states(ports.store, release.id)
    change = done["plan"].data["plan"]["change"] if finished(done, "plan") else ""
    needed = [*(GATES if change != POLICY else ("throughput",))]
    missing = [step for step in needed if not finished(done, step)]
    if not change or (missing and change != NONE):
        raise ConflictError(
            "K2-CON-006",
            "The release is not gated: it cannot be approved.",
            where=f"release {release.id}",
            got=f"not passed: {', '.join(missing) or 'plan'}",
            expected="every gate passed",
            hint=f"k2ctl release {release.id}",
        )
    lock_digest = done["lock"].data["lock_digest"]
    return {"approver": approver, "comment": comment, "lock_digest": lock_digest, "note": f"approved by {approver}"}


def promote_step(ports: Ports, subject: Subject, holder: TrafficHolder, approver: str) -> dict[str, Any]:
    """Make the candidate stable on the route, move `live`, store the baseline; the old set stays warm at weight 0."""
    release = subject.release
    state, obj = read_live_route(ports)
    candidate = Backend(subject.router_service, subject.serving, release.id)
    if state.stable.service != candidate.service:
        if state.candidate != candidate or state.candidate_percent != 100:
            raise ConflictError(
                "K2-CON-006",
                "The candidate does not carry all traffic yet.",
                where=f"HTTPRoute {LIVE_ROUTE}",
                got=f"{state.candidate_percent}%",
                expected="100%",
            )
        previous = None if state.stable == PARKING else state.stable
        state = RouteState(
            stable=candidate, previous=previous, phase=STABLE, generation=holder.generation, since=ports.clock.now()
        )
        write_live_route(ports, state, obj, holder)
    elif state.stable.release != release.id:
        # The same set under a new policy: a record on the route, no weight moves.
        state = replace(state, stable=candidate, generation=holder.generation)
        write_live_route(ports, state, obj, holder)
    retire_at = state.since + release.retention.hold_s if state.previous else None
    replaces = _move_live(ports, subject)
    _store_baseline(ports, subject, states(ports.store, release.id))
    return {
        "live": release.id,
        "replaces": replaces,
        "previous": state.previous.release if state.previous else None,
        "retire_at": retire_at,
        "approver": approver,
        "note": f"{release.id} is live",
    }


def _move_live(ports: Ports, subject: Subject) -> str | None:
    """Move the record of what is live to this release and return the release that it replaces."""
    live, etag = get_live(ports.store)
    release, lock = subject.release, subject.lock
    wanted = {
        "release": release.id,
        "serving_digest": release.serving_digest(lock.digest),
        "policy_digest": release.policy_digest,
        "lock_digest": lock.digest,
        "serving_data": release.serving_data(lock.digest),
    }
    if live is None or any(live.get(key) != plain(value) for key, value in wanted.items()):
        put_live(ports.store, wanted, etag)
    return live["release"] if live and live["release"] != release.id else None


def _store_baseline(ports: Ports, subject: Subject, done: Mapping[str, StepState]) -> None:
    """Keep this release's figures as the baseline of its workload."""
    gate = done.get("throughput")
    if gate is None or "figures" not in gate.data:
        return
    body = {
        "release": subject.release.id,
        "figures": gate.data["figures"],
        "samples": gate.data["samples"],
        "scope": gate.data["scope"],
    }
    ports.store.put(f"baselines/{workload_digest(subject.release)}.json", canonical_bytes(body))


def receipt_step(ports: Ports, subject: Subject) -> tuple[dict[str, Any], str]:
    """Write the receipt of a release from its ledger and return it with its store key; written again it is replaced."""
    manifests = render_serving(subject.release, subject.lock, ports.site, ports.templates)
    release = subject.release
    done = states(ports.store, release.id)
    inherited = _inherited(ports, done)
    facts = {
        "lock": {
            "digest": subject.lock.digest,
            "repo": subject.lock.repo,
            "revision": subject.lock.revision,
            "files": len(subject.lock.files),
            "total_bytes": subject.lock.total_bytes,
        },
        "serving_digest": release.serving_digest(subject.lock.digest),
        "policy_digest": release.policy_digest,
        "images": plain(release.images),
        "manifests_digest": put_by_digest(ports.store, "manifests", list(manifests)),
        "nodes": _data(done, "stage", "nodes") or inherited.get("nodes", []),
        "placement": _data(done, "rollout", "placement") or inherited.get("placement", []),
        "gates": inherited.get("gates", {}) | {name: done[name].data for name in GATES if name in done},
        "weights": _data(done, "shift", "history") or [],
        "approver": _data(done, "promote", "approver"),
        "plan": _data(done, "plan", "plan"),
        "site": ports.site.name,
        "simulated": list(ports.site.simulated),
        "tool": ports.tool,
    }
    body = receipt(plain(release), records(ports.store, release.id), facts)
    key = put_receipt(ports.store, release.id, body)
    ports.progress.document("receipt", f"# Receipt of {release.id}\n\n```json\n{json.dumps(body, indent=1)}\n```")
    return body, key


def _inherited(ports: Ports, done: Mapping[str, StepState]) -> dict[str, Any]:
    """Return the receipt of the release whose serving set this one took over, if it changed nothing but policy."""
    replaces, plan_data = _data(done, "promote", "replaces"), _data(done, "plan", "plan") or {}
    return get_receipt(ports.store, replaces) if replaces and plan_data.get("change") == POLICY else {}


def _data(done: Mapping[str, StepState], step: str, key: str) -> Any:
    return done[step].data.get(key) if step in done else None


def retire_step(ports: Ports, release: Release, holder: TrafficHolder) -> dict[str, Any]:
    """Take down the set that the live release has replaced: weight 0, nothing in flight, then router, groups, route.

    Raises:
        InputError: the release serves or is about to.
        ConflictError: its hold is not over, or requests are still in flight at the deadline.
    """
    state, obj = read_live_route(ports)
    if release.id in (state.stable.release, state.candidate.release if state.candidate else ""):
        raise InputError("K2-INP-007", "The release serves or is about to: it is never retired.", where=release.id)
    old = state.previous
    if old is None or old.release != release.id:
        return {"outcome": "unchanged", "note": f"{release.id} has no set left on the route"}
    _check_hold(ports, state)
    _drain(ports, old)
    write_live_route(ports, replace(state, previous=None, generation=holder.generation), obj, holder)
    removed = delete_set(ports, old.serving)
    return {
        "removed": removed,
        "note": f"{len(removed)} objects of {release.id} removed; its weights stay on the nodes",
    }


def _check_hold(ports: Ports, state: RouteState) -> None:
    """Raise ConflictError while rollback to the old set must stay instant: the hold that the live release promised."""
    promoted = states(ports.store, state.stable.release).get("promote")
    retire_at = float(promoted.data.get("retire_at") or 0.0) if promoted else 0.0
    left = retire_at - ports.clock.now()
    if left > 0:
        raise ConflictError(
            "K2-CON-006",
            "The hold of the old set is not over.",
            where=f"release {state.stable.release}",
            got=f"{left:.0f} s left",
            expected="0 s left",
            retry=After(left),
        )


def _drain(ports: Ports, backend: Backend) -> None:
    """Wait until the set has no request in flight by its engines' own count."""
    deadline = ports.clock.now() + _DRAIN_DEADLINE_S
    while True:
        counters = ports.engine.counters(backend.serving)
        running = sum(value for key, value in counters.items() if key.endswith("sglang_num_running_reqs"))
        if running == 0:
            return
        if ports.clock.now() > deadline:
            raise ConflictError(
                "K2-CON-006",
                "The old set still has requests in flight.",
                where=backend.service,
                got=f"{running:.0f} running",
                expected="0",
            )
        ports.clock.sleep(_DRAIN_POLL_S)


def delete_set(ports: Ports, serving: str) -> list[str]:
    """Delete the objects of one set, router first, and return their names; weights and images stay (I10)."""
    removed = []
    for kind in ("HTTPRoute", "Deployment", "Service", "LeaderWorkerSet"):
        for obj in ports.cluster.list_objects(kind, {"k2-release.io/serving": serving}):
            ports.cluster.delete(kind, obj["metadata"]["name"], uid=obj["metadata"]["uid"])
            removed.append(f"{kind}/{obj['metadata']['name']}")
    return removed
