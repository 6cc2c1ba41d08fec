"""The shift as a state machine: tables for each decision, properties for every path through it."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.core.gates import FAIL, INCONCLUSIVE, PASS
from tasks.core.route import HELD, PARKING, REVERTED, SHIFTING, Backend, RouteState
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
    judge,
    next_percent,
)
from tasks.core.spec import TrafficPlan

PLAN = TrafficPlan((1, 10, 50, 100), 10.0, 1.0, 4, 0.1, 5.0)
CANDIDATE = Backend("k2-b-router", "b", "new")
START = RouteState(PARKING, CANDIDATE)
RIGHT, WRONG, SLOW = Probe(0.1, ""), Probe(0.1, "answered 'blah'"), Probe(9.0, "")
GOOD = Observation((RIGHT,) * 10, 100, 0)
GREAT = Observation((RIGHT,) * 20, 50, 0)
BAD = Observation((WRONG,) * 10, 100, 0)
NOTHING = Observation((), 0, 0)


def at(percent, since=0.0, phase=SHIFTING):
    return replace(START, candidate_percent=percent, since=since, phase=phase)


def seen(*probes, requests=0.0, errors=0.0):
    return Observation(probes, requests, errors)


@pytest.mark.parametrize(
    ("observation", "outcome"),
    [
        (seen(*[RIGHT] * 4), PASS),
        (seen(*[RIGHT] * 3), INCONCLUSIVE),
        (seen(), INCONCLUSIVE),
        (seen(*[RIGHT] * 10, WRONG), PASS),  # 1 of 11 is within 0.1
        (seen(*[RIGHT] * 8, WRONG), FAIL),
        (seen(*[WRONG] * 4), FAIL),
        (seen(WRONG), FAIL),  # 3 more right ones would still be 1 of 4
        (seen(*[SLOW] * 4), FAIL),
        (seen(SLOW), FAIL),  # p95 of 4 is the slowest
        (seen(*[RIGHT] * 19, SLOW), PASS),
        (seen(*[RIGHT] * 18, SLOW, SLOW), FAIL),
        (seen(*[RIGHT] * 3, Probe(math.nan, "")), INCONCLUSIVE),
        (seen(*[RIGHT] * 99, Probe(math.nan, "")), INCONCLUSIVE),
        (seen(*[RIGHT] * 99, Probe(math.inf, "")), INCONCLUSIVE),
        (seen(*[RIGHT] * 4, requests=100, errors=10), PASS),
        (seen(*[RIGHT] * 4, requests=100, errors=11), FAIL),
        (seen(requests=100, errors=11), FAIL),  # users fail: no waiting for probes
        (seen(requests=1, errors=1), FAIL),
        (seen(*[RIGHT] * 4, requests=math.nan, errors=math.nan), INCONCLUSIVE),
        (seen(*[RIGHT] * 4, requests=0, errors=0), PASS),
    ],
)
def test_judge(observation, outcome):
    health = judge(PLAN, observation)
    assert health.outcome == outcome
    assert health.reason


@pytest.mark.parametrize(
    ("percent", "following"), [(0, 1), (1, 10), (5, 10), (10, 50), (50, 100), (100, None), (99, 100)]
)
def test_next_percent(percent, following):
    assert next_percent(PLAN, percent) == following


@pytest.mark.parametrize(
    ("state", "observation", "now", "action"),
    [
        (at(0), NOTHING, 0.0, SetWeight(1)),
        (at(1), NOTHING, 0.0, Bake(1.0)),
        (at(1), GOOD, 9.5, Bake(0.5)),
        (at(1), GOOD, 10.0, SetWeight(10)),
        (at(50), GOOD, 10.0, SetWeight(100)),
        (at(100), GOOD, 9.0, Bake(1.0)),
        (at(100), GOOD, 10.0, Complete()),
        (at(1), NOTHING, 10.0, Bake(1.0)),
        (at(1), NOTHING, 33.9, Bake(1.0)),
        (at(1), NOTHING, 34.0, Hold),
        (at(100), NOTHING, 34.0, Hold),
        (at(1), BAD, 0.0, Revert),
        (at(100), BAD, 50.0, Revert),
        (at(1, phase=REVERTED), GOOD, 10.0, Hold),
        (at(100, phase=HELD), GOOD, 10.0, Hold),
        (at(0, phase=REVERTED), GOOD, 10.0, Hold),
    ],
)
def test_decide(state, observation, now, action):
    got = decide(PLAN, state, observation, now)
    assert isinstance(got, action) if isinstance(action, type) else got == action


def test_a_plan_without_bake_still_waits_for_its_samples():
    plan = replace(PLAN, bake_s=0.0)
    assert decide(plan, at(1), NOTHING, 0.0) == Bake(1.0)
    assert decide(plan, at(1), GOOD, 0.0) == SetWeight(10)
    assert isinstance(decide(plan, at(1), NOTHING, 24.0), Hold)


@pytest.mark.parametrize(
    ("stable", "candidate", "action"),
    [
        ([RIGHT] * 3, [RIGHT] * 3, Revert),
        ([RIGHT] * 3, [], Revert),
        ([RIGHT, RIGHT, WRONG], [RIGHT] * 3, Revert),
        ([WRONG] * 3, [RIGHT] * 3, Forward),
        ([], [RIGHT] * 3, Forward),
        ([RIGHT, WRONG], [RIGHT] * 3, Forward),
        ([WRONG] * 3, [WRONG] * 3, Hold),
        ([WRONG] * 3, [], Hold),
        ([], [], Hold),
    ],
)
def test_abort_goes_to_the_set_that_answers(stable, candidate, action):
    assert isinstance(abort("why", stable, candidate), action)
    assert abort("why", stable, candidate).reason.startswith("why")


PLANS = st.builds(
    TrafficPlan,
    st.lists(st.integers(1, 99), max_size=4).map(lambda s: (*sorted(set(s)), 100)),
    st.floats(0, 60),
    st.floats(0.5, 10),
    st.integers(1, 20),
    st.floats(0, 0.5),
    st.floats(0.1, 10),
)
PROBES = st.lists(st.sampled_from([RIGHT, WRONG, SLOW, Probe(math.nan, "")]), max_size=30).map(tuple)
OBSERVATIONS = st.builds(Observation, PROBES, st.sampled_from([0.0, 50.0, math.nan]), st.sampled_from([0.0, 1.0, 40.0]))


def walk(plan, observe, forget=(), steps=400):
    """Follow the decisions from 0 on and return (weights written with their times, last action)."""
    state, now, written = START, 0.0, []
    action = None
    for number in range(steps):
        if number in forget:
            # The process died; the next one claims the route, which starts the bake anew.
            state = replace(state, since=now) if state.candidate_percent else state
        action = decide(plan, state, observe(number), now)
        if isinstance(action, SetWeight):
            state = state.moved(action.percent, now, 1)
            written.append((action.percent, now))
        elif isinstance(action, Bake):
            assert 0 < action.seconds <= max(plan.bake_s, plan.check_interval_s)
            now += max(action.seconds, 0.01)
        else:
            break
    return written, action


@given(PLANS, st.lists(OBSERVATIONS, min_size=1, max_size=8))
def test_weights_come_from_the_plan_in_its_order_with_a_bake_between(plan, observations):
    written, _ = walk(plan, lambda n: observations[n % len(observations)])
    percents = [percent for percent, _ in written]
    assert percents == list(plan.steps_percent[: len(percents)])
    for (_, before), (_, after) in pairwise(written):
        assert after - before >= plan.bake_s - 1e-6


@given(PLANS, st.integers(1, 100), OBSERVATIONS, st.floats(0, 200))
def test_nothing_but_a_pass_leads_to_more_traffic_or_to_the_end(plan, percent, observation, now):
    action = decide(plan, at(percent), observation, now)
    health = judge(plan, observation)
    if isinstance(action, (SetWeight, Complete)):
        assert health.outcome == PASS
        assert now >= plan.bake_s
    if health.outcome == FAIL:
        assert isinstance(action, Revert)


@given(PLANS, st.integers(0, 60))
def test_a_failure_is_followed_by_no_increase(plan, when):
    written, action = walk(plan, lambda n: BAD if n >= when else GREAT)
    assert isinstance(action, Revert) or (isinstance(action, Complete) and when > 0)
    again, _ = walk(plan, lambda n: GREAT)
    assert written == again[: len(written)]


@settings(max_examples=50)
@given(PLANS, st.sets(st.integers(0, 40), max_size=5))
def test_a_resumed_shift_ends_as_an_undisturbed_one(plan, deaths):
    undisturbed, end = walk(plan, lambda n: GREAT, steps=4000)
    resumed, same_end = walk(plan, lambda n: GREAT, forget=deaths, steps=4000)
    assert end == same_end == Complete()
    assert [percent for percent, _ in resumed] == [percent for percent, _ in undisturbed]


@given(PLANS, st.integers(0, 100), OBSERVATIONS, st.floats(0, 200))
def test_the_same_question_has_the_same_answer(plan, percent, observation, now):
    assert decide(plan, at(percent), observation, now) == decide(plan, at(percent), observation, now)


@given(PROBES, PROBES)
def test_an_abort_never_chooses_a_set_that_gave_no_right_answer(stable, candidate):
    action = abort("why", stable, candidate)
    if isinstance(action, Revert):
        assert any(not p.wrong for p in stable)
    if isinstance(action, Forward):
        assert any(not p.wrong for p in candidate)
        assert sum(not p.wrong for p in stable) * 2 <= len(stable)
