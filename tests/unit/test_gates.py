"""Verdicts (I8): content is graded, and no data is inconclusive and never passes."""

import itertools
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.gates import (
    FAIL,
    INCONCLUSIVE,
    PASS,
    SMOKE_PROMPTS,
    Verdict,
    all_of,
    baseline_verdict,
    grade,
    graded_from_data,
    limit_verdict,
    samples_from_data,
    smoke_verdict,
    sound,
    throughput_verdict,
    verdict_from_data,
)
from tasks.core.loadstats import Figure
from tasks.core.samples import Answer, LoadSample
from tasks.core.spec import GatePolicy, Limit, Workload, plain

PROMPT = SMOKE_PROMPTS[0]
RIGHT = Answer(200, "It is 42.", "stop", 10, 3, True, 0.1, 0.2, "abc")
LIMIT = Limit("e2e_output_tok_per_s", ">=", 100.0, "tok/s")
POLICY = GatePolicy(1.0, Workload(64, 16, 10, 2), (LIMIT,), 0.9)
KEYS = ("prefill:sglang_num_requests_total", "decode:sglang_num_requests_total")


def load(count=10, latency=1.0, tokens=1000, ok=True):
    return [LoadSample(0.0, latency / 2, latency, 64, tokens, ok) for _ in range(count)]


def judge(samples, baseline=None, policy=POLICY):
    return throughput_verdict(samples, policy, baseline, 24, 2.3)[0]


def moved(by=2.0):
    return dict.fromkeys(KEYS, 5.0), dict.fromkeys(KEYS, 5.0 + by)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"finish_reason": "length"}, ""),
        ({"text": "blah blah"}, "answered"),
        ({"text": ""}, "answered"),
        ({"status": 500, "error": "boom"}, "status 500 boom"),
        ({"status": 0, "error": "refused"}, "status 0 refused"),
        ({"done": False}, "[DONE]"),
        ({"finish_reason": ""}, "finish_reason"),
        ({"finish_reason": "abort"}, "finish_reason"),
        ({"completion_tokens": 0}, "usage"),
    ],
)
def test_an_answer_is_right_only_with_its_content(changes, why):
    said = grade(PROMPT, replace(RIGHT, **changes))
    assert (said == "") == (why == "")
    assert why in said


def test_prompts_cannot_be_answered_by_their_own_echo_except_where_that_is_asked():
    for prompt in SMOKE_PROMPTS:
        assert prompt.prompt.startswith("Repeat") or prompt.contains not in prompt.prompt


@pytest.mark.parametrize(
    ("graded", "before", "after", "outcome"),
    [
        ([(PROMPT, RIGHT)] * 2, *moved(2), PASS),
        ([(PROMPT, RIGHT)] * 2, *moved(3), PASS),
        ([(PROMPT, RIGHT)] * 2, *moved(1), FAIL),
        ([(PROMPT, RIGHT), (PROMPT, replace(RIGHT, text="blah"))], *moved(2), FAIL),
        ([], *moved(2), INCONCLUSIVE),
        ([(PROMPT, RIGHT)] * 2, {}, {}, INCONCLUSIVE),
        ([(PROMPT, RIGHT)] * 2, moved()[0], {KEYS[0]: 7.0}, INCONCLUSIVE),
        ([(PROMPT, RIGHT)] * 2, {KEYS[0]: 5.0}, moved()[1], INCONCLUSIVE),
        ([(PROMPT, RIGHT)] * 2, moved()[0], dict.fromkeys(KEYS, math.nan), INCONCLUSIVE),
        ([(PROMPT, RIGHT)] * 2, moved()[0], {KEYS[0]: 7.0, KEYS[1]: 5.0}, FAIL),
    ],
)
def test_smoke(graded, before, after, outcome):
    verdict = smoke_verdict(graded, before, after, 1.0)
    assert verdict.outcome == outcome
    assert outcome == PASS or verdict.reason


def test_smoke_allows_the_share_of_wrong_answers_that_the_policy_allows():
    graded = [(PROMPT, RIGHT)] * 9 + [(PROMPT, replace(RIGHT, text="blah"))]
    assert smoke_verdict(graded, *moved(10), 0.9).outcome == PASS
    assert smoke_verdict(graded, *moved(10), 0.91).outcome == FAIL


@pytest.mark.parametrize(
    ("figure", "limit", "outcome"),
    [
        (Figure(LIMIT.metric, 100.0, "tok/s", ""), LIMIT, PASS),
        (Figure(LIMIT.metric, 99.9, "tok/s", ""), LIMIT, FAIL),
        (Figure(LIMIT.metric, 99.9, "tok/s", ""), replace(LIMIT, op="<="), PASS),
        (Figure(LIMIT.metric, 100.1, "tok/s", ""), replace(LIMIT, op="<="), FAIL),
        (Figure(LIMIT.metric, math.nan, "tok/s", ""), LIMIT, INCONCLUSIVE),
        (Figure(LIMIT.metric, math.nan, "tok/s", ""), replace(LIMIT, op="<="), INCONCLUSIVE),
        (Figure(LIMIT.metric, math.inf, "tok/s", ""), LIMIT, INCONCLUSIVE),
        (Figure(LIMIT.metric, -math.inf, "tok/s", ""), replace(LIMIT, op="<="), INCONCLUSIVE),
        (Figure(LIMIT.metric, 1000.0, "tok/s per node", ""), LIMIT, INCONCLUSIVE),
        (Figure("another", 1000.0, "tok/s", ""), LIMIT, INCONCLUSIVE),
        (None, LIMIT, INCONCLUSIVE),
    ],
)
def test_a_limit_compares_like_with_like(figure, limit, outcome):
    figures = {} if figure is None else {figure.metric: figure}
    verdict = limit_verdict(limit, figures, "digest")
    assert verdict.outcome == outcome
    assert (verdict.expected, verdict.unit) == (f"{limit.op} 100", "tok/s")


@pytest.mark.parametrize(
    ("value", "baseline", "outcome"),
    [
        (90.0, {"release": "r", "figures": {LIMIT.metric: 100.0}}, PASS),
        (89.9, {"release": "r", "figures": {LIMIT.metric: 100.0}}, FAIL),
        (math.nan, {"release": "r", "figures": {LIMIT.metric: 100.0}}, INCONCLUSIVE),
        (90.0, {"release": "r", "figures": {}}, INCONCLUSIVE),
        (90.0, {"release": "r"}, INCONCLUSIVE),
        (90.0, {"release": "r", "figures": {LIMIT.metric: 0.0}}, INCONCLUSIVE),
        (90.0, {"release": "r", "figures": {LIMIT.metric: math.nan}}, INCONCLUSIVE),
        (None, {"release": "r", "figures": {LIMIT.metric: 100.0}}, INCONCLUSIVE),
    ],
)
def test_the_baseline(value, baseline, outcome):
    figures = {} if value is None else {LIMIT.metric: Figure(LIMIT.metric, value, "tok/s", "")}
    assert baseline_verdict(figures, baseline, 0.9, 1, "digest").outcome == outcome


def test_a_first_release_passes_without_baseline_and_says_so():
    verdict = judge(load())
    assert verdict.outcome == PASS
    assert "absolute limits decide" in verdict.reason


def test_without_a_baseline_and_without_a_limit_nothing_decides():
    verdict = judge(load(), policy=replace(POLICY, limits=()))
    assert verdict.outcome == INCONCLUSIVE
    assert "no baseline and no limit" in verdict.reason
    before = {"release": "r", "figures": {LIMIT.metric: 1.0}}
    assert judge(load(), before, replace(POLICY, limits=())).outcome == PASS


@pytest.mark.parametrize(
    ("samples", "outcome"),
    [
        (load(), PASS),
        (load(latency=1000.0), FAIL),
        (load(9), INCONCLUSIVE),
        ([], INCONCLUSIVE),
        (load(ok=False), FAIL),
        ([*load(9), replace(load(1)[0], latency_s=math.nan)], INCONCLUSIVE),
        ([*load(9), replace(load(1)[0], ttft_s=math.inf)], INCONCLUSIVE),
        ([replace(s, started_s=math.nan) for s in load()], INCONCLUSIVE),
        (load(latency=0.0), INCONCLUSIVE),
    ],
)
def test_throughput(samples, outcome):
    assert judge(samples).outcome == outcome


def test_a_policy_without_limits_still_wants_every_sample():
    policy = replace(POLICY, limits=())
    assert judge(load(9), policy=policy).outcome == INCONCLUSIVE
    assert judge([], policy=policy).outcome == INCONCLUSIVE


@given(
    st.lists(
        st.builds(LoadSample, *[st.floats()] * 3, st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=12
    )
)
def test_whatever_comes_back_there_is_a_verdict_and_it_passes_only_on_enough_sound_samples(samples):
    verdict = judge(samples, {"release": "r", "figures": {LIMIT.metric: 1.0}})
    if verdict.outcome == PASS:
        assert len(sound(samples)) >= POLICY.workload.requests


def test_a_policy_that_says_nothing_of_failed_requests_allows_none():
    policy = replace(POLICY, limits=())
    assert judge([*load(99), *load(1, ok=False)], policy=policy).outcome == FAIL
    allowing = replace(POLICY, limits=(Limit("e2e_error_share", "<=", 0.01, "share"),))
    assert judge([*load(99), *load(1, ok=False)], policy=allowing).outcome == PASS


def part(outcome, gate="p"):
    return Verdict(gate, outcome, "", "", "", "", "", "")


@pytest.mark.parametrize(
    "outcomes", [row for n in range(4) for row in itertools.product([PASS, FAIL, INCONCLUSIVE], repeat=n)]
)
def test_of_several_parts_the_worst_decides(outcomes):
    worst = next((o for o in (FAIL, INCONCLUSIVE) if o in outcomes), PASS if outcomes else INCONCLUSIVE)
    assert all_of("g", [part(o) for o in outcomes], "").outcome == worst


def test_an_outcome_that_nobody_knows_is_inconclusive():
    assert all_of("g", [part("maybe")], "").outcome == INCONCLUSIVE


def test_smoke_answers_come_back_from_json_and_give_the_same_verdict():
    graded = [(PROMPT, RIGHT), (PROMPT, replace(RIGHT, text="blah"))]
    again = graded_from_data(json.loads(json.dumps(plain(graded))))
    assert smoke_verdict(again, *moved(2), 0.5) == smoke_verdict(graded, *moved(2), 0.5)


def test_verdict_and_samples_come_back_from_json_and_give_the_same_verdict():
    samples = load()
    verdict = judge(samples)
    assert verdict_from_data(json.loads(json.dumps(plain(verdict)))) == verdict
    assert judge(samples_from_data(json.loads(json.dumps(plain(samples))))) == verdict
