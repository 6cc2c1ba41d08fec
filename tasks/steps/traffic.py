"""Step `shift`: weights by steps with bake, resumed from the route itself, reverted first when something is wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tasks.core.errors import ConflictError, GateError, K2Error, NotReadyError, RevertedError, UnavailableError
from tasks.core.gates import SMOKE_PROMPTS, grade
from tasks.core.lease import check_fence
from tasks.core.render import render_live_route
from tasks.core.route import (
    HELD,
    LIVE_ROUTE,
    PARKING,
    REVERTED,
    SHIFTING,
    STABLE,
    Backend,
    RouteState,
    read_route,
    to_annotations,
)
from tasks.core.shift import (
    Bake,
    Complete,
    Forward,
    Hold,
    Observation,
    Probe,
    Revert,
    SetWeight,
    abort,
    decide,
)
from tasks.ports import BackendCounts
from tasks.steps.context import Ports, Subject
from tasks.steps.holder import TrafficHolder

_ROUTE_LIVE_TIMEOUT_S = 30.0
_PROVE_REQUESTS = 10
_PROBE_TIMEOUT_S = 30.0
_NO_COUNTS = BackendCounts(math.nan, math.nan)


def read_live_route(ports: Ports) -> tuple[RouteState, dict[str, Any]]:
    """Return the live route's state and object; ConflictError if its weights are not ours, InputError if it is gone."""
    obj = ports.cluster.get("HTTPRoute", LIVE_ROUTE)
    if obj is None:
        raise NotReadyError(
            "K2-RDY-002",
            "The site has no live route.",
            where=f"HTTPRoute {LIVE_ROUTE}",
            hint="k2ctl site init --release R --site S",
        )
    return read_route(obj), obj


def write_live_route(ports: Ports, state: RouteState, obj: dict[str, Any], holder: TrafficHolder) -> RouteState:
    """Write a state to the route: fence, Lease, resourceVersion precondition, read-back, live at the gateway (I3, I9).

    Raises:
        ConflictError: fenced off, lease lost, or the route was written by somebody else since it was read.
        UnavailableError: the gateway did not take it over in time.
    """
    check_fence(read_route(obj).generation, holder.generation)
    holder.renew()
    backends = [(b.service, weight, b.serving) for b, weight in state.weights()]
    rendered = render_live_route(
        ports.templates["live-route"], backends, to_annotations(state), ports.site.namespace, ports.site.gateway.name
    )
    rendered["metadata"]["resourceVersion"] = obj["metadata"]["resourceVersion"]
    written = ports.cluster.replace(rendered)
    _wait_live(ports, int(written["metadata"]["generation"]))
    shares = ", ".join(f"{b.release} {weight}%" for b, weight in state.weights())
    ports.progress.say(f"shift: route is live: {shares}")
    return state


def _wait_live(ports: Ports, generation: int) -> None:
    """Wait until the gateway says in the route's status that it serves this generation of it."""
    deadline = ports.clock.now() + _ROUTE_LIVE_TIMEOUT_S
    while ports.clock.now() < deadline:
        obj = ports.cluster.get("HTTPRoute", LIVE_ROUTE)
        if obj is not None and route_is_live(obj, generation):
            return
        ports.clock.sleep(0.1)
    raise UnavailableError(
        "K2-UNA-001",
        "The gateway did not take over the route.",
        where=f"HTTPRoute {LIVE_ROUTE}",
        got="no status for this generation",
        expected=f"observedGeneration {generation}",
    )


def route_is_live(obj: dict[str, Any], generation: int) -> bool:
    """Return whether every parent's conditions hold for at least this generation of the route."""
    parents = obj.get("status", {}).get("parents", [])
    conditions = [c for parent in parents for c in parent.get("conditions", [])]
    return bool(conditions) and all(
        int(c.get("observedGeneration", 0)) >= generation and c["status"] == "True" for c in conditions
    )


def probe_set(ports: Ports, serving: str, count: int, first: int = 0) -> list[Probe]:
    """Send graded requests to one set by its probe route, each prompt in turn, and return how each went."""
    probes = []
    for number in range(first, first + count):
        prompt = SMOKE_PROMPTS[number % len(SMOKE_PROMPTS)]
        try:
            answer = ports.engine.ask(
                prompt.prompt,
                serving=serving,
                max_tokens=prompt.max_tokens,
                stream=number % 2 == 0,
                timeout_s=_PROBE_TIMEOUT_S,
            )
        except UnavailableError as error:
            probes.append(Probe(_PROBE_TIMEOUT_S, str(error)))
            continue
        probes.append(Probe(answer.latency_s, grade(prompt, answer)))
    return probes


def shift_step(ports: Ports, subject: Subject, holder: TrafficHolder) -> dict[str, Any]:
    """Move all traffic to the candidate by the plan's steps, from whatever the route says now, and return its history.

    Raises:
        RevertedError: a check failed; traffic is back on the stable set (K2-REV-001) or holds (K2-REV-002).
        GateError: the candidate does not answer graded probes now, before any user was touched (K2-GAT-001).
        ConflictError: the lease or the route belongs to somebody else.
    """
    plan = subject.release.traffic
    candidate = Backend(subject.router_service, subject.serving, subject.release.id)
    state, _ = read_live_route(ports)
    if state.stable.service == candidate.service:
        return {"outcome": "unchanged", "history": [], "note": "the route sends everything to this set already"}
    state = _adopt(state, candidate)
    history: list[dict[str, Any]] = []
    if state.candidate_percent > 0:
        state = _claim(ports, state, holder)
        history.append(_row(state, ports.clock.now(), "resumed"))
    else:
        _check_candidate(ports, candidate)
    probes: list[Probe] = []
    base = _counts(ports, candidate)
    while True:
        seen, base = _observation(ports, probes, base, candidate)
        action = decide(plan, state, seen, ports.clock.now())
        if isinstance(action, Complete):
            return {"history": history, "note": f"{candidate.release} carries all traffic"}
        if isinstance(action, Bake):
            # Never so long that the Lease runs out between two renewals.
            ports.clock.sleep(min(action.seconds, plan.check_interval_s, ports.site.lease_duration_s / 3))
            probes.extend(probe_set(ports, candidate.serving, 2, len(probes)))
            holder.renew()
            _check_still_ours(ports, state)
            continue
        if isinstance(action, SetWeight):
            state = write_live_route(
                ports,
                state.moved(action.percent, ports.clock.now(), holder.generation),
                read_live_route(ports)[1],
                holder,
            )
            history.append(_row(state, ports.clock.now(), "step"))
            ports.progress.table("weights", history, f"Weights of {candidate.release}")
            probes, base = [], _counts(ports, candidate)
            continue
        _abort(ports, state, action, holder, history)


def _adopt(state: RouteState, candidate: Backend) -> RouteState:
    """Return the state to go on from: an unfinished shift of this candidate is resumed, anything else starts at 0.

    A candidate that was given all traffic because stable did not answer (held) goes on from there: a first step of a
    few percent would send everybody else back to the dead set.
    """
    if state.candidate == candidate and state.phase in (SHIFTING, HELD):
        return state
    if state.candidate is not None and state.candidate_percent > 0 and state.candidate != candidate:
        raise ConflictError(
            "K2-CON-001",
            "Another release is in the middle of its shift.",
            where=f"HTTPRoute {LIVE_ROUTE}",
            got=state.candidate.release,
            expected="no candidate with traffic",
            hint=f"k2ctl release {state.candidate.release} --yes (to finish it)",
        )
    return replace(state, candidate=candidate, candidate_percent=0, phase=STABLE, reason="")


def _claim(ports: Ports, state: RouteState, holder: TrafficHolder) -> RouteState:
    """Write a resumed shift's weights again under this holder's generation, and start its bake anew.

    The write fences off whoever began the shift and may only be asleep; the bake because nobody watched meanwhile.
    """
    moved = state.moved(state.candidate_percent, ports.clock.now(), holder.generation)
    return write_live_route(ports, moved, read_live_route(ports)[1], holder)


def _check_candidate(ports: Ports, candidate: Backend) -> None:
    """Raise GateError if the candidate does not answer right now: its gates may have passed long ago."""
    probes = probe_set(ports, candidate.serving, 3)
    wrong = next((probe.wrong for probe in probes if probe.wrong), "")
    if wrong:
        raise GateError(
            "K2-GAT-001",
            "The candidate does not answer graded probes; no traffic was moved.",
            where=candidate.service,
            got=wrong,
            expected="right answers",
            hint=f"k2ctl release {candidate.release} (it gates anew what has changed)",
        )


def _observation(
    ports: Ports, probes: Sequence[Probe], base: BackendCounts, candidate: Backend
) -> tuple[Observation, BackendCounts]:
    """Return what was seen since `base`, and the base to go on with; counts that are missing are NaN, never 0 (I8)."""
    now = _counts(ports, candidate)
    if not base.requests <= now.requests or not base.errors <= now.errors:
        # No base yet, or the gateway has started anew: counted from here on.
        base = base if math.isnan(now.requests) else now
    return Observation(tuple(probes), now.requests - base.requests, now.errors - base.errors), base


def _counts(ports: Ports, backend: Backend) -> BackendCounts:
    try:
        return ports.stats.counts(backend.service)
    except UnavailableError:
        return _NO_COUNTS


def _check_still_ours(ports: Ports, state: RouteState) -> None:
    """Raise ConflictError if the route no longer is what was written last (I3: a human hand is never written over)."""
    now, _ = read_live_route(ports)
    if now != state:
        raise ConflictError(
            "K2-CON-003",
            "The live route was changed by somebody else during the shift.",
            where=f"HTTPRoute {LIVE_ROUTE}",
            got=str(now.weights()),
            expected=str(state.weights()),
        )


def _abort(
    ports: Ports,
    state: RouteState,
    action: Revert | Forward | Hold,
    holder: TrafficHolder,
    history: list[dict[str, Any]],
) -> None:
    """Carry out the failure path: decide where traffic is safe, write that first, prove it, then raise.

    Raises:
        RevertedError: always.
    """
    detected = ports.clock.now()
    if isinstance(action, Revert):
        stable = [Probe(0.0, "")] if state.stable == PARKING else probe_set(ports, state.stable.serving, 3)
        candidate = probe_set(ports, state.candidate.serving, 3) if _fails(stable) and state.candidate else []
        action = abort(action.reason, stable, candidate)
    details: dict[str, Any] = {"history": history, "reason": action.reason}
    if isinstance(action, Hold):
        raise RevertedError(
            "K2-REV-002",
            f"The shift holds: {action.reason}.",
            where=f"HTTPRoute {LIVE_ROUTE}",
            got=str(state.weights()),
            expected="a person's decision",
            details=details,
        )
    percent = 0 if isinstance(action, Revert) else 100
    phase = REVERTED if isinstance(action, Revert) else HELD
    target = replace(
        state,
        candidate_percent=percent,
        phase=phase,
        reason=action.reason,
        since=ports.clock.now(),
        generation=holder.generation,
    )
    target = write_live_route(ports, target, read_live_route(ports)[1], holder)
    history.append(_row(target, ports.clock.now(), action.reason))
    ports.progress.table("weights", history, "Weights")
    safe = target.stable if percent == 0 else target.candidate
    details["seconds_to_safety"] = round(ports.clock.now() - detected, 3)
    try:
        details["proved"] = prove_traffic(ports, safe) if safe else {}
    except K2Error as error:
        details["not_proved"] = error.as_data()
    proved = "proved" in details
    raise RevertedError(
        "K2-REV-001" if proved else "K2-REV-002",
        f"The shift was reverted{'' if proved else ', but observed requests do not prove it'}: {action.reason}.",
        where=f"HTTPRoute {LIVE_ROUTE}",
        got=action.reason,
        expected="the checks of the traffic plan",
        details=details,
    )


def _fails(probes: Sequence[Probe]) -> bool:
    return sum(not probe.wrong for probe in probes) * 2 <= len(probes)


def prove_traffic(ports: Ports, backend: Backend) -> dict[str, Any]:
    """Send requests the way users go and return who served them; ConflictError if any other set did.

    The route was read back before; this is the proof by observation (I4).
    """
    served: dict[str, int] = {}
    for _ in range(_PROVE_REQUESTS):
        answer = ports.engine.ask(
            SMOKE_PROMPTS[0].prompt, serving="", max_tokens=8, stream=False, timeout_s=_PROBE_TIMEOUT_S
        )
        by = answer.served_by or f"status {answer.status}"
        served[by] = served.get(by, 0) + 1
    expected = backend.serving if backend != PARKING else "parking"
    if set(served) != {expected}:
        raise ConflictError(
            "K2-CON-003",
            "Observed requests do not go where the route says.",
            where=LIVE_ROUTE,
            got=str(served),
            expected=expected,
        )
    return served


def _row(state: RouteState, at: float, why: str) -> dict[str, Any]:
    return {
        "at": at,
        "candidate_percent": state.candidate_percent,
        "generation": state.generation,
        "phase": state.phase,
        "why": why,
    }
