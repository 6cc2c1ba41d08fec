"""Step `approve`: it covers what was gated, on the pods that run now, over what was live when it was planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.core.errors import ConflictError
from tasks.core.ledger import FINISHED, Record, StepState, finished, fold
from tasks.core.plan import NONE, POLICY
from tasks.core.route import LIVE_ROUTE
from tasks.core.spec import Release
from tasks.steps.context import Ports
from tasks.steps.documents import get_live
from tasks.steps.gating import pods_digest
from tasks.steps.journal import records
from tasks.steps.receipts import GATES, is_recorded
from tasks.steps.rollout import set_pods
from tasks.steps.traffic import read_live_route

_BRING_UP = ("stage", "rollout")


def approve_step(ports: Ports, release: Release, approver: str, comment: str) -> dict[str, Any]:
    """Record the approval and return it with the lock that it covers.

    Raises:
        ConflictError: there is nothing to approve: the release was edited since it was planned, or a step or gate that
            it needs has not passed for this very file on the pods that run now (K2-CON-006); or what is live has
            changed since the plan (K2-CON-004).
    """
    events = records(ports.store, release.id)
    done = fold(events)
    plan = done["plan"].data["plan"] if finished(done, "plan") else None
    if plan is None:
        raise _refusal(release, "The release is not gated: it cannot be approved.", "not passed: plan")
    _check_unchanged(release, plan)
    _check_live(ports, release, plan)
    _check_gated(ports, release, plan, events, done)
    return {
        "approver": approver,
        "comment": comment,
        "lock_digest": plan["lock_digest"],
        "note": f"approved by {approver}",
    }


def _refusal(release: Release, summary: str, got: str, expected: str = "every step and gate passed") -> ConflictError:
    return ConflictError(
        "K2-CON-006",
        summary,
        where=f"release {release.id}",
        got=got,
        expected=expected,
        hint=f"k2ctl release {release.id}",
    )


def _check_unchanged(release: Release, plan: Mapping[str, Any]) -> None:
    """Raise ConflictError if the release as written now is not the one that was planned and gated."""
    now = (release.serving_digest(plan["lock_digest"])[:12], release.policy_digest[:12])
    gated = (plan["serving_digest"][:12], plan["policy_digest"][:12])
    if now != gated:
        raise _refusal(
            release,
            "The release was edited since it was gated.",
            f"serving {now[0]}, policy {now[1]}",
            f"serving {gated[0]}, policy {gated[1]}",
        )


def _check_live(ports: Ports, release: Release, plan: Mapping[str, Any]) -> None:
    """Raise ConflictError unless what is live, and what the route serves, is what the plan was made over.

    A promotion that died may have moved either of them to this very release already: then it goes on.
    """
    live, _ = get_live(ports.store)
    state, _ = read_live_route(ports)
    serving = plan["serving_digest"][:12]
    own = (release.id, serving)
    live_now = (live["release"], live["serving_digest"][:12]) if live else ("", "")
    live_then = (plan.get("live_release", "?"), plan.get("live_serving_digest", "?")[:12])
    if live_now not in (own, live_then):
        raise _stale(release, "record of what is live", " ".join(live_now), " ".join(live_then))
    stable, stable_then = state.stable.serving, plan.get("route_stable", "?")
    if plan["change"] in (NONE, POLICY):
        stable_then = serving  # no weight is going to move: users must be on this set already
    if stable != stable_then and (state.stable.release, stable) != own:
        raise _stale(release, f"HTTPRoute {LIVE_ROUTE}", f"stable {stable}", f"stable {stable_then}")
    if plan["change"] == POLICY and live and live["release"] != release.id:
        _check_inheritance(ports, live["release"])


def _stale(release: Release, where: str, got: str, expected: str) -> ConflictError:
    return ConflictError(
        "K2-CON-004",
        "The live release changed since this one was planned.",
        where=where,
        got=got.strip() or "nothing live",
        expected=f"{expected.strip() or 'nothing live'}, as planned",
        hint=f"k2ctl plan {release.id}; decide anew, then k2ctl release {release.id}",
    )


def _check_inheritance(ports: Ports, live: str) -> None:
    """Raise ConflictError if the release whose set a policy takes over has no receipt to take it over from."""
    if not is_recorded(ports.store, live):
        raise ConflictError(
            "K2-CON-006",
            "The live release's promotion is not recorded: its set cannot be taken over.",
            where=f"release {live}",
            got="no record or no receipt",
            expected="both",
            hint=f"k2ctl release {live} --yes (it moves no traffic, and records)",
        )


def _check_gated(
    ports: Ports,
    release: Release,
    plan: Mapping[str, Any],
    events: Sequence[Record],
    done: Mapping[str, StepState],
) -> None:
    """Raise ConflictError unless every step and gate that the change needs passed for this file and these pods."""
    serving, change = plan["serving_digest"], plan["change"]
    if not set_pods(ports, serving[:12]):
        raise _refusal(release, "The release's set is not there (any more).", "no pod", f"pods of {serving[:12]}")
    if change == NONE:
        return
    brought_up = _BRING_UP if change != POLICY else ()
    missing = [step for step in (*brought_up, *GATES) if not finished(done, step)]
    if missing:
        raise _refusal(release, "The release is not gated: it cannot be approved.", f"not passed: {', '.join(missing)}")
    for step in brought_up:
        if _plan_of_end(events, step).get("serving_digest") != serving:
            raise _refusal(release, "A step is of another content of the release.", f"{step} of another plan")
    pods = pods_digest(ports, serving[:12])
    for gate in GATES:
        if done[gate].data.get("policy") != release.policy_digest:
            raise _refusal(release, "A gate has judged by another policy.", f"{gate} under another policy")
        if done[gate].data.get("pods") != pods:
            raise _refusal(
                release,
                "A gate has judged other pods than run now.",
                f"{gate} on pods that were replaced or restarted",
                "the pods that were gated",
            )


def _plan_of_end(events: Sequence[Record], step: str) -> Mapping[str, Any]:
    """Return the plan in force when a step last ended well, or an empty one."""
    plan: Mapping[str, Any] = {}
    found: Mapping[str, Any] = {}
    for event in events:
        if event.event != FINISHED:
            continue
        if event.step == "plan":
            plan = event.data.get("plan", {})
        elif event.step == step:
            found = plan
    return found
