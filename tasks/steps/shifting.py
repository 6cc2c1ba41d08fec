"""Step `shift`: weights by steps with bake, resumed from the route itself, reverted first when something is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tasks.core.errors import After, ConflictError, GateError, RevertedError, UnavailableError
from tasks.core.route import HELD, LIVE_ROUTE, SHIFTING, STABLE, Backend, RouteState
from tasks.core.shift import Bake, Complete, Observation, Probe, SetWeight, decide
from tasks.core.spec import TrafficPlan
from tasks.ports import BackendCounts
from tasks.steps.aborting import History, abort_after, abort_traffic, is_another_hand, row, show_weights
from tasks.steps.context import Ports, Subject
from tasks.steps.holder import TrafficHolder, patiently
from tasks.steps.journal import states
from tasks.steps.probing import probe_set, probe_timeout_s
from tasks.steps.traffic import NotTakenOverError, check_state, move_traffic, read_live_route

Outcome = TypeVar("Outcome")

_NO_COUNTS = BackendCounts(math.nan, math.nan)
_MOST_OUTAGES = 5
"""After so many outages without a step a shift ends: something else is wrong than an API that was restarted."""


def shift_step(ports: Ports, subject: Subject, holder: TrafficHolder) -> dict[str, Any]:
    """Move all traffic to the candidate by the plan's steps, from whatever the route says now, and return its history.

    However it ends but by a kill, no candidate is left with traffic that nobody watches.

    Raises:
        RevertedError: a check or a call failed; traffic is back on the stable set (K2-REV-001) or a person has to look
            (K2-REV-002).
        GateError: the candidate does not answer graded probes now, before any user was touched (K2-GAT-001).
        ConflictError: the lease or the route belongs to somebody else, the shift is held (K2-CON-006), or the release
            was planned over another live one (K2-CON-004).
    """
    candidate = Backend(subject.router_service, subject.serving, subject.release.id)
    found, _ = read_live_route(ports)
    if found.stable.service == candidate.service:
        _check_alone(found)
        return {"outcome": "unchanged", "history": [], "note": "the route sends everything to this set already"}
    # What is decided from what was just seen is written at once or not at all; an API that is away is waited for apart.
    quick = replace(ports, cluster=ports.cluster.impatient)
    shift = _Shift(quick, ports, subject.release.traffic, candidate, holder, found, _adopt(found, candidate))
    shift.tried_percent = shift.state.candidate_percent
    try:
        _check_order(ports, subject, found)
        return shift.run()
    except BaseException as error:
        if isinstance(error, RevertedError) or is_another_hand(error):
            raise
        try:
            # Nothing can be written before the API is back; a cancelled flow does not wait for it.
            come_back = shift.come_back if isinstance(error, Exception) else None
            abort_after(quick, candidate, shift.tried_percent, holder, shift.history, error, come_back)
        except RevertedError as reverted:
            if not isinstance(error, Exception):
                raise error from None
            # What a library says may hold a secret: it is not shown as the cause either (I6).
            raise reverted from None
        raise


def _check_alone(state: RouteState) -> None:
    """Raise ConflictError if the stable set does not carry everybody: an unfinished shift has users elsewhere."""
    other = state.candidate
    if other is None or state.candidate_percent == 0:
        return
    raise ConflictError(
        "K2-CON-006",
        f"{state.stable.release} is the stable release, but {other.release} has a part of the users.",
        where=f"HTTPRoute {LIVE_ROUTE}",
        got=f"{state.candidate_percent}% on {other.release}",
        expected=f"100% on {state.stable.release}",
        hint=f"k2ctl promote {other.release} -y finishes it; infra/runbooks/shift-reverted.md sends everybody back",
    )


def _adopt(state: RouteState, candidate: Backend) -> RouteState:
    """Return the state to go on from: an unfinished shift of this candidate is resumed, anything else starts at 0.

    A candidate that was given all traffic because stable did not answer (held) goes on from there: a first step of a
    few percent would send everybody else back to the dead set. One that is held with less waits for a person.
    """
    if state.candidate == candidate and state.phase == HELD and state.candidate_percent < 100:
        raise ConflictError(
            "K2-CON-006",
            "The shift is held: a person must decide, automation does not move on.",
            where=f"HTTPRoute {LIVE_ROUTE}",
            got=f"held at {state.candidate_percent}%: {state.reason}",
            expected="a decision: send everybody back, or set the phase to shifting",
            hint="infra/runbooks/shift-reverted.md; k2ctl status shows both sets",
        )
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


def _check_order(ports: Ports, subject: Subject, state: RouteState) -> None:
    """Raise ConflictError if this release was planned to move no traffic: then another set was live than is now."""
    planned = states(ports.store, subject.release.id).get("plan")
    plan = planned.data.get("plan", {}) if planned else {}
    if not plan.get("shifts_traffic", True):
        raise ConflictError(
            "K2-CON-004",
            "The release was planned to move no traffic, and the set that it was planned over is not live any more.",
            where=f"HTTPRoute {LIVE_ROUTE}",
            got=f"{state.stable.release} (serving {state.stable.serving})",
            expected=f"serving {subject.serving}",
            hint=f"k2ctl release {subject.release.id} (it plans and gates anew)",
        )


@dataclass
class _Shift:
    """One try of a shift. `on_route` is what the route says, `state` is what it is decided from.

    `tried_percent` is the last weight that was written, or may have been, and `tried` that state. `ports` do not wait
    for an API that is away, `patient` ones do.
    """

    ports: Ports
    patient: Ports
    plan: TrafficPlan
    candidate: Backend
    holder: TrafficHolder
    on_route: RouteState
    state: RouteState
    tried_percent: int = 0
    history: History = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    base: BackendCounts = _NO_COUNTS
    tried: RouteState | None = None
    outages: int = 0
    away: bool = False
    met: str = ""

    def run(self) -> dict[str, Any]:
        """Go on from the state to all traffic and return the history; raise whatever ends it otherwise."""
        while not self._through_outages(self._begin):
            pass
        while (ended := self._through_outages(self._go_on)) is None:
            pass
        return ended

    def come_back(self) -> RouteState:
        """Return what the route says, as soon as the API answers."""
        return read_live_route(self.patient)[0]

    def _begin(self) -> bool:
        if self.state.candidate_percent > 0:
            # Claimed: the write fences off whoever began the shift and may only be asleep. The bake starts anew,
            # because nobody watched meanwhile.
            self._set_weight(self.state.candidate_percent, "resumed")
        else:
            self._check_candidate()
        self.base = self._counts()
        return True

    def _go_on(self) -> dict[str, Any] | None:
        """Do the next thing; return the history when all is done."""
        action = decide(self.plan, self.state, self._observe(), self.ports.clock.now())
        if isinstance(action, Complete):
            return {"history": self.history, "note": f"{self.candidate.release} carries all traffic"}
        if isinstance(action, Bake):
            self._bake(action.seconds)
        elif isinstance(action, SetWeight):
            self._set_weight(action.percent, "step")
            show_weights(self.ports, self.candidate.release, self.history)
            self.probes, self.base = [], self._counts()
        else:
            self.come_back()  # nothing can be written before
            abort_traffic(self.ports, self.on_route, action, self.holder, self.history, come_back=self.come_back)
        return None

    def _through_outages(self, act: Callable[[], Outcome]) -> Outcome | None:
        """Do something; if the API goes away over it, return None, and wait for it before the next thing is done.

        Then what the route says is taken, and the candidate bakes anew: a step that was decided before an outage is not
        taken after it.

        Raises:
            UnavailableError: the gateway did not take over a route, or the API is away for longer than a flow waits.
            ConflictError: the Lease or the route is somebody else's now.
        """
        try:
            if self.away:
                self._take_up()
                self.away = False
                self.ports.progress.say(
                    f"shift: the candidate bakes anew from what the route says now, after: {self.met}"
                )
            return act()
        except NotTakenOverError:
            raise
        except UnavailableError as error:
            self.outages += 1
            if not isinstance(error.retry, After) or self.outages > _MOST_OUTAGES:
                raise
            self.met = error.summary
        self.away = True  # also where it went away again while it came back
        return None

    def _take_up(self) -> None:
        """Wait for the API, take what the route says, and renew the Lease if it is still ours."""
        found = self.come_back()
        if self.tried is not None and found == self.tried and found != self.on_route:
            self.on_route = found  # written, and the answer was lost
            self.history.append(row(found, self.ports.clock.now(), "step"))
        check_state(found, self.on_route)
        patiently(self.ports, self.holder.renew, self.holder.patience_s)
        move_traffic(self.ports, self.on_route, self.on_route, self.holder)  # nothing to write: live at the gateway?
        # What was seen before counts against the candidate and not for it.
        self.probes = [probe for probe in self.probes if probe.wrong]
        if self.on_route.candidate == self.candidate and self.on_route.candidate_percent > 0:
            self.state = replace(self.on_route, since=self.ports.clock.now())

    def _set_weight(self, percent: int, why: str) -> None:
        self.tried_percent = percent
        target = self.tried = self.state.moved(percent, self.ports.clock.now(), self.holder.generation)
        self.state = self.on_route = move_traffic(self.ports, self.on_route, target, self.holder)
        self.history.append(row(self.state, self.ports.clock.now(), why))
        self.outages = 0

    def _bake(self, seconds: float) -> None:
        """Wait and probe, never so long that the Lease runs out between two renewals; check that the route is ours."""
        ports, lease_s = self.ports, self.ports.site.lease_duration_s
        ports.clock.sleep(min(seconds, self.plan.check_interval_s, lease_s / 3))
        self._probe(2)
        patiently(ports, self.holder.renew, self.holder.patience_s)
        check_state(patiently(ports, lambda: read_live_route(ports), self.holder.patience_s)[0], self.on_route)

    def _probe(self, count: int) -> None:
        for _ in range(count):
            self.holder.keep()
            self.probes += probe_set(
                self.ports, self.candidate.serving, 1, len(self.probes), probe_timeout_s(self.plan, self.ports.site)
            )

    def _check_candidate(self) -> None:
        """Raise GateError if the candidate does not answer right now: its gates may have passed long ago."""
        self._probe(3)
        wrong = next((probe.wrong for probe in self.probes if probe.wrong), "")
        self.probes = []
        if wrong:
            raise GateError(
                "K2-GAT-001",
                "The candidate does not answer graded probes; no traffic was moved.",
                where=self.candidate.service,
                got=wrong,
                expected="right answers",
                hint=f"k2ctl release {self.candidate.release} (it gates anew what has changed)",
            )

    def _observe(self) -> Observation:
        """Return what was seen since the base; counts that are missing are NaN, never 0 (I8)."""
        now, base = self._counts(), self.base
        if not base.requests <= now.requests or not base.errors <= now.errors:
            # No base yet, or the gateway has started anew: counted from here on.
            self.base = base = base if math.isnan(now.requests) else now
        return Observation(tuple(self.probes), now.requests - base.requests, now.errors - base.errors)

    def _counts(self) -> BackendCounts:
        """Return the gateway's counts; while they cannot be read they are missing, and the next look tries again."""
        try:
            return self.ports.stats.counts(self.candidate.service)
        except UnavailableError:
            return _NO_COUNTS
