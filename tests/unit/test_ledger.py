"""The ledger's fold: what it says of a step after any interruption."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.errors import InputError
from tasks.core.ledger import (
    FAILED,
    FINISHED,
    STARTED,
    STEPS,
    Record,
    finished,
    fold,
    ledger_number,
    receipt,
    record_from_data,
)
from tasks.core.spec import plain

EVENTS = st.lists(st.tuples(st.sampled_from(STEPS[:3]), st.sampled_from([STARTED, FINISHED, FAILED])), max_size=20)


def record(step="pull", event=STARTED, at=0.0, **data):
    return Record("r", step, event, "run", at, data)


def records(events):
    return [record(step, event, float(number), nr=number) for number, (step, event) in enumerate(events)]


@pytest.mark.parametrize(
    ("events", "outcome", "attempts", "seconds", "ended_well"),
    [
        ([record()], "interrupted", 1, 0.0, False),
        ([record(), record(event=FINISHED, at=5)], "done", 1, 5.0, True),
        ([record(), record(event=FINISHED, at=5, outcome="unchanged")], "unchanged", 1, 5.0, True),
        ([record(), record(event=FAILED, at=5)], "failed", 1, 5.0, False),
        ([record(), record(at=7), record(event=FINISHED, at=9)], "done", 2, 2.0, True),
        ([record(), record(event=FINISHED, at=5), record(at=7)], "interrupted", 2, 0.0, False),
        ([record(event=FINISHED, at=5)], "done", 1, 0.0, True),
    ],
)
def test_fold(events, outcome, attempts, seconds, ended_well):
    state = fold(events)["pull"]
    assert (state.outcome, state.attempts, state.seconds) == (outcome, attempts, seconds)
    assert finished(fold(events), "pull") is ended_well


def test_a_step_that_never_began_is_not_finished():
    assert not finished({}, "pull")


def test_an_interrupted_step_keeps_what_was_known_before_it():
    state = fold([record(), record(event=FINISHED, bytes=7), record()])["pull"]
    assert (state.outcome, state.data) == ("interrupted", {"bytes": 7})


@given(EVENTS)
def test_the_last_event_of_a_step_decides_and_attempts_are_starts(events):
    states = fold(records(events))
    for step in {step for step, _ in events}:
        mine = [event for of, event in events if of == step]
        expected = {STARTED: "interrupted", FINISHED: "done", FAILED: "failed"}[mine[-1]]
        assert states[step].outcome == expected
        assert states[step].seconds >= 0
        if mine[0] == STARTED:
            assert states[step].attempts == mine.count(STARTED)


@given(st.integers(0, 2 * len(STEPS)), st.integers(0, 2 * len(STEPS)))
def test_whenever_a_run_is_cut_off_the_next_one_is_what_the_ledger_tells(first_cut, second_cut):
    run = [(step, event) for step in STEPS for event in (STARTED, FINISHED)]
    cut = fold(records(run[:first_cut]))
    assert {step for step in STEPS if finished(cut, step)} == set(STEPS[: first_cut // 2])
    interrupted = [state.step for state in cut.values() if state.outcome == "interrupted"]
    assert interrupted == list(STEPS[first_cut // 2 :][: first_cut % 2])
    whole = fold(records([*run[:first_cut], *run[:second_cut], *run]))
    assert all(finished(whole, step) for step in STEPS)
    assert all(s.seconds == 1.0 and s.data["nr"] >= first_cut + second_cut for s in whole.values())


def test_a_record_comes_back_from_json():
    one = record(event=FINISHED, at=1.5, bytes=7)
    assert record_from_data(json.loads(json.dumps(plain(one)))) == one


def test_a_record_of_a_newer_tool_is_refused():
    with pytest.raises(InputError) as caught:
        record_from_data({**plain(record()), "version": 2})
    assert caught.value.code == "K2-INP-006"


def test_keys_sort_in_the_order_of_writing():
    keys = [record(step).key(number) for number, step in enumerate([*STEPS, "end"] * 10)]
    assert keys == sorted(keys)
    assert keys[0] == "ledger/r/00000.json"


@pytest.mark.parametrize("key", ["ledger/r-1/00012.json", "ledger/r-1/00012-pull-started.json"])
def test_the_number_of_a_key_in_the_form_of_today_and_of_before(key):
    assert ledger_number(key) == 12


def test_the_receipt_lists_steps_in_the_order_of_the_flow():
    body = receipt({"id": "r"}, [record("pull"), record("lock"), record("end", FINISHED)], {"site": "s"})
    assert [step["name"] for step in body["steps"]] == ["lock", "pull"]
    assert (body["version"], body["site"]) == (1, "s")


def test_the_receipt_has_what_the_plan_predicted_beside_what_a_step_took():
    plan = {"transfers": {"predicted_s": {"pull": 1.5}}}
    events = [record("pull"), record("pull", FINISHED, 5.0), record("lock"), record("lock", FINISHED, 1.0)]
    steps = {step["name"]: step for step in receipt({"id": "r"}, events, {"plan": plan})["steps"]}
    assert (steps["pull"]["predicted_s"], steps["pull"]["seconds"]) == (1.5, 5.0)
    assert "predicted_s" not in steps["lock"]
    # a plan of a tool before this one, and none at all
    for facts in ({"plan": {}}, {"plan": None}, {}):
        assert "predicted_s" not in receipt({"id": "r"}, events, facts)["steps"][1]
