"""Steps `approve`, `promote` and `retire`: the candidate becomes the stable set, and the old one goes later."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tasks.core.errors import After, ConflictError, InputError
from tasks.core.identity import canonical_bytes
from tasks.core.ledger import Record, StepState, finished, fold, receipt
from tasks.core.plan import NONE, POLICY
from tasks.core.route import LIVE_ROUTE, PARKING, REVERTED, SHIFTING, STABLE, Backend, RouteState
from tasks.core.spec import Release, plain
from tasks.steps.context import Ports, Subject
from tasks.steps.documents import get_live, get_receipt, put_live, put_receipt
from tasks.steps.gating import workload_digest
from tasks.steps.holder import TrafficHolder
from tasks.steps.journal import records, states
from tasks.steps.placement import place
from tasks.steps.rollout import is_ready, set_pods
from tasks.steps.traffic import read_live_route, write_live_route

_DRAIN_POLL_S = 0.5
_DRAIN_DEADLINE_S = 300.0


GATES = ("smoke", "throughput")


def approve_step(ports: Ports, release: Release, approver: str, comment: str) -> dict[str, Any]:
    """Record the approval and return it with the lock that it covers.

    Raises:
        ConflictError: the gates of this release have not passed, or the release file is another than the one that was
            gated (K2-CON-006): there is nothing to approve.
    """
    done = states(ports.store, release.id)
    plan = done["plan"].data["plan"] if finished(done, "plan") else {}
    change = plan.get("change", "")
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
    lock_digest = plan["lock_digest"]
    _check_unchanged(release, plan)
    return {"approver": approver, "comment": comment, "lock_digest": lock_digest, "note": f"approved by {approver}"}


def _check_unchanged(release: Release, plan: Mapping[str, Any]) -> None:
    """Raise ConflictError if the release as written now is not the one that was planned and gated."""
    now = (release.serving_digest(plan["lock_digest"])[:12], release.policy_digest[:12])
    gated = (plan["serving_digest"][:12], plan["policy_digest"][:12])
    if now != gated:
        raise ConflictError(
            "K2-CON-006",
            "The release was edited since it was gated.",
            where=f"release {release.id}",
            got=f"serving {now[0]}, policy {now[1]}",
            expected=f"serving {gated[0]}, policy {gated[1]}",
            hint=f"k2ctl release {release.id}",
        )


def promote_step(ports: Ports, subject: Subject, holder: TrafficHolder, approver: str) -> dict[str, Any]:
    """Make the candidate stable on the route, move `live`, store the baseline; the old set stays warm at weight 0."""
    release = subject.release
    state, obj = read_live_route(ports)
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
    if live is not None and all(live.get(key) == plain(value) for key, value in wanted.items()):
        return live.get("replaces")
    replaces = None if live is None else live["release"] if live["release"] != release.id else live.get("replaces")
    put_live(ports.store, {**wanted, "replaces": replaces}, etag)
    return str(replaces) if replaces else None


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
    release = subject.release
    events = records(ports.store, release.id)
    done = fold(events)
    plan = _plan_of(events)
    inherited = _inherited(ports, done, plan)
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
        "manifests_digest": _data(done, "rollout", "manifests_digest") or inherited.get("manifests_digest"),
        "nodes": _data(done, "stage", "nodes") or inherited.get("nodes", []),
        "placement": _data(done, "rollout", "placement") or inherited.get("placement", []),
        "gates": inherited.get("gates", {}) | {name: done[name].data for name in GATES if name in done},
        "weights": _weights(events),
        "approver": _data(done, "promote", "approver"),
        "plan": plan,
        "site": ports.site.name,
        "simulated": list(ports.site.simulated),
        "tool": ports.tool,
    }
    body = receipt(plain(release), events, facts)
    key = put_receipt(ports.store, release.id, body)
    ports.progress.document("receipt", f"# Receipt of {release.id}\n\n```json\n{json.dumps(body, indent=1)}\n```")
    return body, key


def _plan_of(events: Sequence[Record]) -> dict[str, Any]:
    """Return the plan that the release carried out: a later one, of a run that found nothing to do, says nothing."""
    plans = [dict(event.data["plan"]) for event in events if event.step == "plan" and "plan" in event.data]
    return next((plan for plan in reversed(plans) if plan["change"] != NONE), plans[-1] if plans else {})


def _weights(events: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the weights over time of every try of the shift, those that were reverted too."""
    tries = [event.data for event in events if event.step == "shift"]
    found = [data.get("history") or data.get("error", {}).get("details", {}).get("history") or [] for data in tries]
    return [row for rows in found for row in rows]


def _inherited(ports: Ports, done: Mapping[str, StepState], plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the receipt of the release whose serving set this one took over, if it changed nothing but policy."""
    replaces = _data(done, "promote", "replaces")
    return get_receipt(ports.store, replaces) if replaces and plan.get("change") == POLICY else {}


def _data(done: Mapping[str, StepState], step: str, key: str) -> Any:
    return done[step].data.get(key) if step in done else None


def retire_step(ports: Ports, release: Release, holder: TrafficHolder) -> dict[str, Any]:
    """Take down a set that takes no traffic any more: weight 0, nothing in flight, then router, groups, route.

    That is the set that the live release has replaced, a candidate that was reverted, or one that never had traffic.

    Raises:
        InputError: the release serves or is about to.
        ConflictError: its hold is not over, or requests are still in flight at the deadline.
    """
    state, obj = read_live_route(ports)
    reverted = state.phase == REVERTED and state.candidate_percent == 0
    if release.id in (state.stable.release, state.candidate.release if state.candidate and not reverted else ""):
        raise InputError("K2-INP-007", "The release serves or is about to: it is never retired.", where=release.id)
    left = state
    if state.previous is not None and state.previous.release == release.id:
        _check_hold(ports, state)
        left = replace(left, previous=None)
    if state.candidate is not None and state.candidate.release == release.id:
        left = replace(left, candidate=None, phase=STABLE, reason="")
    serving = _serving_off(ports, release, state, left)
    if left != state:
        # Only a set on the route can have users; of one that is half deleted already nobody could ask.
        _drain(ports, serving)
        write_live_route(ports, replace(left, generation=holder.generation), obj, holder)
    removed = delete_set(ports, serving) if serving else []
    if not removed:
        return {"outcome": "unchanged", "removed": [], "note": f"{release.id} has no set left"}
    return {
        "removed": removed,
        "note": f"{len(removed)} objects of {release.id} removed; its weights stay on the nodes",
    }


def _serving_off(ports: Ports, release: Release, before: RouteState, left: RouteState) -> str:
    """Return the serving label of a release's set if no backend that stays on the route has it, else nothing.

    The plan names a set that is not on the route: its deletion was cut off, or it never had traffic.
    """
    gone = [b.serving for b in (before.previous, before.candidate) if b and b.release == release.id]
    plan = _plan_of(records(ports.store, release.id))
    serving = gone[0] if gone else str(plan.get("serving_digest", ""))[:12]
    stays = {backend.serving for backend in (left.stable, left.candidate, left.previous) if backend}
    return "" if serving in stays else serving


def _check_hold(ports: Ports, state: RouteState) -> None:
    """Raise ConflictError while rollback to the old set must stay instant: the hold that the live release promised."""
    promoted = states(ports.store, state.stable.release).get("promote")
    retire_at = promoted.data.get("retire_at") if promoted else None
    if retire_at is None:
        # Not known is not over (I10): the promotion died before its record.
        raise ConflictError(
            "K2-CON-006",
            "The live release's promotion is not recorded, so nobody knows how long the old set must stay.",
            where=f"release {state.stable.release}",
            got="no record of the step promote",
            expected="a time until which the old set stays",
            hint=f"k2ctl promote {state.stable.release} -y (it moves no traffic, and records)",
        )
    left = float(retire_at) - ports.clock.now()
    if left > 0:
        raise ConflictError(
            "K2-CON-006",
            "The hold of the old set is not over.",
            where=f"release {state.stable.release}",
            got=f"{left:.0f} s left",
            expected="0 s left",
            retry=After(left),
        )


def _drain(ports: Ports, serving: str) -> None:
    """Wait until the set has no request in flight by its engines' own count; no count at all is not zero (I8)."""
    deadline = ports.clock.now() + _DRAIN_DEADLINE_S
    while any(map(is_ready, set_pods(ports, serving) if serving else ())):
        counters = ports.engine.counters(serving)
        running = [value for key, value in counters.items() if key.endswith("sglang_num_running_reqs")]
        if running and sum(running) == 0:
            return
        if ports.clock.now() > deadline:
            raise ConflictError(
                "K2-CON-006",
                "The old set still has requests in flight.",
                where=f"serving {serving}",
                got=f"{sum(running):.0f} running" if running else "no count",
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
    place(ports, serving, ())
    return removed
