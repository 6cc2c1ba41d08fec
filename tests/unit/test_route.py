"""The live route: its state comes back from its annotations, and a foreign weight is noticed."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.errors import ConflictError, InputError
from tasks.core.render import render_live_route
from tasks.core.route import PARKING, PREFIX, Backend, RouteState, read_route, to_annotations
from tests.fakes.small_world import TEMPLATES

A, B, C = (Backend(f"k2-{x * 8}-router", x * 12, f"release-{x}") for x in "abc")
BACKENDS = st.sampled_from([A, B, C, PARKING])
STATES = st.builds(
    RouteState,
    BACKENDS,
    st.none() | BACKENDS,
    st.none() | BACKENDS,
    st.just(0),
    st.sampled_from(["stable", "shifting", "reverted", "held"]),
    st.integers(0, 10**6),
    st.floats(0, 2e9),
    st.text(max_size=20),
).filter(lambda s: s.candidate != s.stable)


def route(state):
    backends = [(b.service, weight, b.serving) for b, weight in state.weights()]
    return render_live_route(TEMPLATES["live-route"], backends, to_annotations(state), "k2")


@given(STATES, st.integers(0, 100))
def test_a_state_comes_back_from_the_route(state, percent):
    if state.candidate is not None:
        state = state.moved(percent, state.since, state.generation)
    assert read_route(route(state)) == state


@given(STATES, st.integers(0, 100))
def test_weights_sum_to_a_hundred_and_name_each_backend_once(state, percent):
    state = state.moved(percent, 1.0, 1) if state.candidate else state
    weights = state.weights()
    assert sum(weight for _, weight in weights) == 100
    assert len({backend.service for backend, _ in weights}) == len(weights)


def changed(**weights):
    obj = route(RouteState(A, B, C, 10, "shifting"))
    for rule in obj["spec"]["rules"]:
        for ref in rule["backendRefs"]:
            ref["weight"] = weights.get(ref["name"][3], ref["weight"])
    return obj


@pytest.mark.parametrize("weights", [{"a": 0, "b": 100}, {"b": 11}, {"c": 1}, {"a": 0, "b": 0}])
def test_weights_that_nobody_of_us_wrote_are_a_human_hand(weights):
    with pytest.raises(ConflictError) as caught:
        read_route(changed(**weights))
    assert caught.value.code == "K2-CON-003"


def test_a_change_in_one_rule_alone_is_noticed():
    obj = changed()
    obj["spec"]["rules"][1]["backendRefs"][0]["weight"] = 1
    with pytest.raises(ConflictError):
        read_route(obj)


def test_a_backend_that_was_added_or_taken_away_is_noticed():
    obj = changed()
    more, fewer = copy.deepcopy(obj), copy.deepcopy(obj)
    for rule in more["spec"]["rules"]:
        rule["backendRefs"].append({"name": "other"})  # no weight means 1
    for rule in fewer["spec"]["rules"]:
        rule["backendRefs"].pop(1)
    for each in (more, fewer):
        with pytest.raises(ConflictError):
            read_route(each)


def test_a_route_without_our_state_or_of_a_newer_tool_is_refused():
    for text, code in (("", "K2-INP-001"), ('{"version": 2}', "K2-INP-006")):
        obj = changed()
        obj["metadata"]["annotations"][PREFIX + "state"] = text
        with pytest.raises(InputError) as caught:
            read_route(obj)
        assert caught.value.code == code


def test_the_generation_stands_on_the_route_by_itself():
    assert to_annotations(RouteState(A, generation=7))[PREFIX + "generation"] == "7"
