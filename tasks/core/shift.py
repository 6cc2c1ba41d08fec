"""The shift: which weight comes next, when to wait, when to go back. Pure: (plan, state, observations, time) -> action.

Abort-first (I4): the first write of a failure sends all traffic to the stable set if that answers graded probes, else
to the healthier set, and if neither does, holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.core.gates import FAIL, INCONCLUSIVE, PASS
from tasks.core.loadstats import percentile
from tasks.core.route import HELD, REVERTED, RouteState
from tasks.core.spec import TrafficPlan


@dataclass(frozen=True)
class SetWeight:
    """Send this percentage to the candidate and bake."""

    percent: int


@dataclass(frozen=True)
class Bake:
    """Wait this long, then look again."""

    seconds: float


@dataclass(frozen=True)
class Revert:
    """Send all traffic back to the stable set."""

    reason: str


@dataclass(frozen=True)
class Forward:
    """Send all traffic to the candidate, because the stable set does not answer and the candidate does."""

    reason: str


@dataclass(frozen=True)
class Hold:
    """Touch nothing and call a person."""

    reason: str


@dataclass(frozen=True)
class Complete:
    """The candidate carries all traffic and has baked: promote it."""


Action = SetWeight | Bake | Revert | Forward | Hold | Complete


@dataclass(frozen=True)
class Probe:
    """One graded request: how long it took, and why it was wrong (empty = right)."""

    latency_s: float
    wrong: str


@dataclass(frozen=True)
class Observation:
    """What was seen of the candidate during the present bake, and of the stable set when it matters.

    `user_requests` and `user_errors` are what the gateway counted for the candidate since the weight was written;
    NaN where the gateway's statistics are missing.
    """

    probes: tuple[Probe, ...]
    user_requests: float
    user_errors: float


@dataclass(frozen=True)
class Health:
    """The verdict on an observation, with its reason."""

    outcome: str
    reason: str


def judge(plan: TrafficPlan, seen: Observation) -> Health:
    """Return whether the candidate's behaviour keeps the plan's limits; too few observations are inconclusive (I8).

    What cannot become good any more with the samples still to come has failed already: users are not kept waiting.
    """
    wrong = [probe.wrong for probe in seen.probes if probe.wrong]
    if len(wrong) > plan.max_error_share * max(len(seen.probes), plan.min_samples):
        return Health(
            FAIL, f"{len(wrong)} of {len(seen.probes)} probes wrong (limit {plan.max_error_share:g}): {wrong[0]}"
        )
    if seen.user_errors > plan.max_error_share * max(seen.user_requests, plan.min_samples):
        return _users_fail(plan, seen)
    limit_s = plan.max_p95_s
    slow = [probe.latency_s for probe in seen.probes if probe.latency_s > limit_s and math.isfinite(probe.latency_s)]
    enough = max(len(seen.probes), plan.min_samples)
    if len(slow) > enough - math.ceil(0.95 * enough):
        return Health(
            FAIL,
            f"{len(slow)} of {len(seen.probes)} graded probes took {min(slow):.2f} s or more, p95 limit {limit_s:g} s",
        )
    if len(seen.probes) < plan.min_samples:
        return Health(INCONCLUSIVE, f"only {len(seen.probes)} probes, {plan.min_samples} are needed")
    latencies = [probe.latency_s for probe in seen.probes]
    if not all(map(math.isfinite, latencies)):
        return Health(INCONCLUSIVE, "a latency is not a number")
    p95 = percentile(latencies, 0.95)
    if not math.isfinite(seen.user_requests) or not math.isfinite(seen.user_errors):
        return Health(INCONCLUSIVE, "the gateway's counts of user requests are missing")
    if seen.user_requests > 0 and seen.user_errors / seen.user_requests > plan.max_error_share:
        return _users_fail(plan, seen)
    return Health(PASS, f"p95 {p95:.2f} s, {len(seen.probes)} probes right, {seen.user_requests:.0f} user requests")


def _users_fail(plan: TrafficPlan, seen: Observation) -> Health:
    return Health(
        FAIL,
        f"{seen.user_errors:.0f} of {seen.user_requests:.0f} user requests failed at the candidate "
        f"(limit {plan.max_error_share:g})",
    )


def next_percent(plan: TrafficPlan, percent: int) -> int | None:
    """Return the next weight above the present one, or None at the end."""
    return next((step for step in plan.steps_percent if step > percent), None)


def decide(plan: TrafficPlan, state: RouteState, seen: Observation, now: float) -> Action:
    """Return what to do next: the same state and observation give the same action, whoever asks and how often."""
    if state.phase in (REVERTED, HELD):
        return Hold(f"the shift is {state.phase}: {state.reason}")
    if state.candidate_percent == 0:
        return SetWeight(plan.steps_percent[0])
    health = judge(plan, seen)
    if health.outcome == FAIL:
        return Revert(health.reason)
    left = state.since + plan.bake_s - now
    if left > 0:
        return Bake(min(left, plan.check_interval_s))
    if health.outcome == INCONCLUSIVE:
        # Once more as long is given for data to arrive, and time for each sample; then a person decides.
        patience_s = max(plan.bake_s, plan.min_samples * (plan.check_interval_s + plan.max_p95_s))
        return Bake(plan.check_interval_s) if -left < patience_s else Hold(health.reason)
    following = next_percent(plan, state.candidate_percent)
    return Complete() if following is None else SetWeight(following)


def abort(reason: str, stable_probes: Sequence[Probe], candidate_probes: Sequence[Probe]) -> Revert | Forward | Hold:
    """Return the first write of a failure path (I4), from graded probes of both sets taken just now."""
    if _answers(stable_probes):
        return Revert(reason)
    if _answers(candidate_probes):
        return Forward(f"{reason}; the stable set does not answer graded probes, the candidate does")
    return Hold(f"{reason}; neither set answers graded probes")


def _answers(probes: Sequence[Probe]) -> bool:
    """Return whether a set answers: some probes, and most of them right."""
    right = sum(not probe.wrong for probe in probes)
    return right > 0 and right * 2 > len(probes)
