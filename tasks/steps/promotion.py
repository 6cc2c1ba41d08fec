"""Step `promote`: the candidate becomes the stable set, and the old one stays warm for its hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tasks.core.errors import ConflictError
from tasks.core.identity import canonical_bytes
from tasks.core.ledger import StepState
from tasks.core.route import LIVE_ROUTE, PARKING, SHIFTING, STABLE, Backend, RouteState
from tasks.core.spec import plain
from tasks.steps.approval import approve_step
from tasks.steps.context import Ports, Subject
from tasks.steps.documents import get_live, put_live
from tasks.steps.gating import workload_digest
from tasks.steps.holder import TrafficHolder
from tasks.steps.journal import states
from tasks.steps.receipts import receipt_step
from tasks.steps.retirement import delete_set, retire_step
from tasks.steps.traffic import move_through_outages, read_live_route

__all__ = ["approve_step", "delete_set", "promote_step", "receipt_step", "retire_step"]


def promote_step(ports: Ports, subject: Subject, holder: TrafficHolder, approver: str) -> dict[str, Any]:
    """Make the candidate stable on the route, move `live`, store the baseline; the old set stays warm at weight 0."""
    release = subject.release
    state, _ = read_live_route(ports)
    found = state
    candidate = Backend(subject.router_service, subject.serving, release.id)
    if state.stable.service != candidate.service:
        if state.candidate != candidate or state.candidate_percent != 100 or state.phase != SHIFTING:
            raise ConflictError(
                "K2-CON-006",
                "The candidate does not carry all traffic yet.",
                where=f"HTTPRoute {LIVE_ROUTE}",
                got=f"{state.phase} at {state.candidate_percent}%",
                expected="shifting at 100%",
            )
        previous = None if state.stable == PARKING else state.stable
        state = RouteState(
            stable=candidate, previous=previous, phase=STABLE, generation=holder.generation, since=ports.clock.now()
        )
        move_through_outages(ports, found, state, holder)
    elif state.stable.release != release.id:
        # The same set under a new policy: a record on the route, no weight moves.
        state = replace(state, stable=candidate, generation=holder.generation)
        move_through_outages(ports, found, state, holder)
    retire_at = state.since + release.retention.hold_s if state.previous else None
    live = _move_live(ports, subject)
    _store_baseline(ports, subject, states(ports.store, release.id))
    return {
        "live": release.id,
        "serving_digest": live["serving_digest"],
        "policy_digest": live["policy_digest"],
        "promotion": live["promotion"],
        "replaces": live["replaces"],
        "previous": state.previous.release if state.previous else None,
        "retire_at": retire_at,
        "approver": approver,
        "note": f"{release.id} is live",
    }


def _move_live(ports: Ports, subject: Subject) -> dict[str, Any]:
    """Move the record of what is live to this release and return it; its number tells this promotion from others."""
    live, etag = get_live(ports.store)
    release, lock = subject.release, subject.lock
    wanted = {
        "release": release.id,
        "serving_digest": release.serving_digest(lock.digest),
        "policy_digest": release.policy_digest,
        "lock_digest": lock.digest,
        "serving_data": release.serving_data(lock.digest),
    }
    if live is not None and all(live.get(key) == plain(value) for key, value in wanted.items()):
        return {"replaces": None, "promotion": None, **live}
    replaces = None if live is None else live["release"] if live["release"] != release.id else live.get("replaces")
    number = int((live or {}).get("promotion") or 0) + 1
    moved = {**wanted, "replaces": replaces, "promotion": number}
    put_live(ports.store, moved, etag)
    return moved


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
