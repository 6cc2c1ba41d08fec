"""Step `retire`: a set that takes no traffic any more is taken down, and nothing that is needed with it (I10)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tasks.core.errors import After, ConflictError
from tasks.core.route import REVERTED, STABLE, RouteState
from tasks.core.spec import Release
from tasks.steps.context import Ports
from tasks.steps.holder import TrafficHolder
from tasks.steps.journal import records
from tasks.steps.placement import place
from tasks.steps.receipts import carried_out_plan, recorded_promotion
from tasks.steps.rollout import is_ready, set_pods
from tasks.steps.traffic import move_through_outages, read_live_route

_DRAIN_POLL_S = 0.5
_DRAIN_DEADLINE_S = 300.0


def retire_step(ports: Ports, release: Release, holder: TrafficHolder) -> dict[str, Any]:
    """Take down a set that takes no traffic any more: weight 0, nothing in flight, then router, groups, route.

    That is the set that the live release has replaced, a candidate that was reverted, or one that never had traffic.

    Raises:
        ConflictError: the release serves or is about to, its hold is not over, or requests are still in flight at the
            deadline.
    """
    state, _ = read_live_route(ports)
    _check_idle(state, release.id)
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
        move_through_outages(ports, state, replace(left, generation=holder.generation), holder)
    removed = delete_set(ports, serving) if serving else []
    if not removed:
        return {"outcome": "unchanged", "removed": [], "note": f"{release.id} has no set left"}
    return {
        "removed": removed,
        "note": f"{len(removed)} objects of {release.id} removed; its weights stay on the nodes",
    }


def _check_idle(state: RouteState, release: str) -> None:
    """Raise ConflictError if a release is the route's stable one, or a candidate that was not reverted."""
    reverted = state.phase == REVERTED and state.candidate_percent == 0
    shifting = state.candidate is not None and state.candidate.release == release and not reverted
    if release != state.stable.release and not shifting:
        return
    raise ConflictError(
        "K2-CON-006",
        "The release serves or is about to: it is never retired.",
        where=f"release {release}",
        got=f"candidate at {state.candidate_percent}%" if shifting else "stable on the live route",
        expected="a release without traffic",
        hint=f"finish its shift first: k2ctl promote {release} -y"
        if shifting
        else "promote another release over it first; after that one's hold this one can be retired",
    )


def _serving_off(ports: Ports, release: Release, before: RouteState, left: RouteState) -> str:
    """Return the serving label of a release's set if no backend that stays on the route has it, else nothing.

    The plan names a set that is not on the route: its deletion was cut off, or it never had traffic.
    """
    gone = [b.serving for b in (before.previous, before.candidate) if b and b.release == release.id]
    plan = carried_out_plan(release.id, records(ports.store, release.id))
    serving = gone[0] if gone else str(plan.get("serving_digest", ""))[:12]
    stays = {backend.serving for backend in (left.stable, left.candidate, left.previous) if backend}
    return "" if serving in stays else serving


def _check_hold(ports: Ports, state: RouteState) -> None:
    """Raise ConflictError while rollback to the old set must stay instant: the hold that the live release promised."""
    promoted = recorded_promotion(ports.store, state.stable.release)
    known = promoted is not None and state.previous and promoted.data.get("previous") == state.previous.release
    retire_at = promoted.data.get("retire_at") if promoted and known else None
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
