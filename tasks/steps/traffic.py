"""Step `shift`: weights by steps with bake, resumed from the route itself, reverted first when something is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tasks.core.errors import ConflictError, NotReadyError, RevertedError, UnavailableError
from tasks.core.gates import SMOKE_PROMPTS, grade
from tasks.core.lease import LEASE, LeaseState, check_fence, lease_spec, read_lease, released, take
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

Outcome = TypeVar("Outcome")

_ROUTE_LIVE_TIMEOUT_S = 30.0
_PROVE_REQUESTS = 40
_PROBE_TIMEOUT_S = 30.0


class TrafficHolder:
    """The right to move traffic: the Lease taken in our name, renewed before each write, and the fence on the route."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._holder = ports.run
        self._state: LeaseState | None = None

    @property
    def generation(self) -> int:
        """The fencing number of this holder; 0 before the lease was taken."""
        return self._state.generation if self._state else 0

    def acquire(self, wait_s: float) -> None:
        """Take the Lease, waiting at most this long for a holder that has stopped renewing to run out.

        Raises:
            ConflictError: a live holder keeps it (K2-CON-001).
        """
        clock = self._ports.clock
        deadline = clock.now() + wait_s
        while True:
            try:
                self._take()
                return
            except ConflictError as error:
                pause = getattr(error.retry, "seconds", 0.5)
                if clock.now() + pause > deadline:
                    raise
                self._ports.progress.say(
                    f"shift: waiting {pause:.1f} s for the traffic lease of {error.got or 'a writer'}"
                )
                clock.sleep(min(pause, 2.0))

    def renew(self) -> None:
        """Renew the Lease; ConflictError if somebody has taken it over."""
        self._take(renew=True)

    def release(self) -> None:
        """Give the Lease back, so that the next release need not wait; a lost race changes nothing."""
        obj = self._ports.cluster.get("Lease", LEASE)
        if obj is not None and read_lease(obj).holder == self._holder:
            obj["spec"] = lease_spec(released(read_lease(obj)))
            self._ports.cluster.replace(obj)

    def _take(self, *, renew: bool = False) -> None:
        site, now = self._ports.site, self._ports.clock.now()
        obj = self._ports.cluster.get("Lease", LEASE)
        before = read_lease(obj) if obj else LeaseState("", 0, 0.0, site.lease_duration_s)
        if renew and before.holder != self._holder:
            raise ConflictError(
                "K2-CON-002",
                "The traffic lease was taken over.",
                where=f"Lease {LEASE}",
                got=before.holder or "nobody",
                expected=self._holder,
            )
        after = take(before, self._holder, now, site.lease_duration_s)
        if obj is None:
            lease = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": LEASE, "namespace": site.namespace},
                "spec": lease_spec(after),
            }
            _, created = self._ports.cluster.create(lease)
            if not created:
                raise ConflictError("K2-CON-001", "Another holder was faster.", where=f"Lease {LEASE}")
        else:
            obj["spec"] = lease_spec(after)
            self._ports.cluster.replace(obj)
        self._state = after


def holding(ports: Ports, act: Callable[[TrafficHolder], Outcome]) -> Outcome:
    """Do something as the one that moves traffic, and give the Lease back afterwards, however it ends.

    Raises:
        ConflictError: another holder keeps the Lease longer than its own duration plus a little (K2-CON-001).
    """
    holder = TrafficHolder(ports)
    holder.acquire(ports.site.lease_duration_s + 5.0)
    try:
        return act(holder)
    finally:
        with contextlib.suppress(ConflictError, UnavailableError):
            holder.release()


def read_live_route(ports: Ports) -> tuple[RouteState, dict[str, Any]]:
    """Return the live route's state and object; ConflictError if its weights are not ours, InputError if it is gone."""
    obj = ports.cluster.get("HTTPRoute", LIVE_ROUTE)
    if obj is None:
        raise NotReadyError(
            "K2-RDY-002",
            "The site has no live route.",
            where=f"HTTPRoute {LIVE_ROUTE}",
            hint="k2ctl site init --site S",
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
    rendered = render_live_route(ports.templates["live-route"], backends, to_annotations(state), ports.site.namespace)
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


def probe_set(ports: Ports, serving: str, count: int) -> list[Probe]:
    """Send graded requests to one set by its probe route and return how each went."""
    probes = []
    for number in range(count):
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
        ConflictError: the lease or the route belongs to somebody else.
    """
    plan = subject.release.traffic
    candidate = Backend(subject.router_service, subject.serving, subject.release.id)
    state, _ = read_live_route(ports)
    if state.stable.service == candidate.service:
        return {"outcome": "unchanged", "history": [], "note": "the route sends everything to this set already"}
    state = _adopt(state, candidate)
    history: list[dict[str, Any]] = []
    probes: list[Probe] = []
    base = _counts(ports, candidate)
    while True:
        seen = _observation(ports, probes, base, candidate)
        action = decide(plan, state, seen, ports.clock.now())
        if isinstance(action, Complete):
            return {"history": history, "note": f"{candidate.release} carries all traffic"}
        if isinstance(action, Bake):
            ports.clock.sleep(min(action.seconds, plan.check_interval_s))
            probes.extend(probe_set(ports, candidate.serving, 2))
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
    """Return the state to go on from: an unfinished shift of this candidate is resumed, anything else starts at 0."""
    if state.candidate == candidate and state.phase == SHIFTING:
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


def _observation(ports: Ports, probes: Sequence[Probe], base: BackendCounts, candidate: Backend) -> Observation:
    now = _counts(ports, candidate)
    return Observation(tuple(probes), now.requests - base.requests, now.errors - base.errors)


def _counts(ports: Ports, backend: Backend) -> BackendCounts:
    try:
        return ports.stats.counts(backend.service)
    except UnavailableError:
        return BackendCounts(0.0, 0.0)


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
    details["proved"] = prove_traffic(ports, safe) if safe else {}
    raise RevertedError(
        "K2-REV-001",
        f"The shift was reverted: {action.reason}.",
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
    for _ in range(_PROVE_REQUESTS // 4):
        answer = ports.engine.ask(
            SMOKE_PROMPTS[0].prompt, serving="", max_tokens=8, stream=False, timeout_s=_PROBE_TIMEOUT_S
        )
        served[answer.served_by or f"status {answer.status}"] = served.get(answer.served_by, 0) + 1
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
