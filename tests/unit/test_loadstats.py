"""Figures of a load: the published arithmetic, and NaN where there is nothing to count."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.loadstats import end_to_end_figures, percentile
from tasks.core.samples import LoadSample

FINITE = st.floats(0, 1e6)


def sample(started=0.0, latency=1.0, tokens=10, ok=True):
    return LoadSample(started, latency / 2, latency, 5, tokens, ok)


def figures(samples, gpus=8, usd=2.3):
    return {figure.metric: figure for figure in end_to_end_figures(samples, gpus, usd)}


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([3, 1, 2], 0.5, 2), ([1, 2, 3, 4], 0.5, 2), ([5], 0.95, 5), (range(1, 101), 0.95, 95), ([1, 2], 0.0, 1),
        ([1, 2], 1.0, 2),
    ],
)  # fmt: skip
def test_nearest_rank(values, share, expected):
    assert percentile(list(values), share) == expected


@given(st.lists(FINITE, min_size=1), st.floats(0, 1))
def test_a_percentile_was_observed_and_enough_values_are_at_most_it(values, share):
    value = percentile(values, share)
    assert value in values
    assert sum(v <= value for v in values) >= share * len(values) - 1e-9


def test_rates_are_over_the_whole_span_and_cost_counts_all_gpus():
    found = figures([sample(0.0, 1.0, 100), sample(1.0, 1.0, 100)], gpus=128, usd=2.3)
    assert found["e2e_output_tok_per_s"].value == 100.0
    assert found["e2e_requests_per_s"].value == 1.0
    assert found["usd_per_mtok_output_end_to_end"].value == pytest.approx(128 * 2.3 / 360000 * 1e6)
    assert "128 GPUs (prefill and decode)" in found["e2e_output_tok_per_s"].scope


def test_the_published_layout_costs_what_the_published_figures_say():
    # 224,000 input tok/s at 2000 in and 100 out = 11,200 output tok/s over 128 GPUs.
    samples = [sample(0.0, 1.0, 11_200)]
    assert figures(samples, 128)["usd_per_mtok_output_end_to_end"].value == pytest.approx(7.30, abs=0.01)


def test_failed_requests_count_as_errors_and_carry_no_tokens():
    found = figures([sample(), sample(ok=False, latency=9.0, tokens=1000)])
    assert found["e2e_error_share"].value == 0.5
    assert found["e2e_output_tok_per_s"].value == pytest.approx(10 / 9)
    assert found["e2e_latency_p95_s"].value == 1.0


def test_one_error_in_a_hundred_is_exactly_a_hundredth():
    assert figures([*[sample()] * 99, sample(ok=False)])["e2e_error_share"].value == 0.01


@pytest.mark.parametrize("samples", [[], [sample(ok=False)], [sample(latency=0.0)]])
def test_nothing_to_count_is_not_a_number(samples):
    assert math.isnan(figures(samples)["usd_per_mtok_output_end_to_end"].value)
    if not samples:
        assert all(math.isnan(figure.value) for figure in figures(samples).values())


@given(st.lists(st.builds(sample, FINITE, st.floats(0.001, 100), st.integers(0, 1000), st.booleans()), min_size=1))
def test_figures_never_contradict_each_other(samples):
    found = figures(samples)
    assert 0 <= found["e2e_error_share"].value <= 1
    good = [s for s in samples if s.ok]
    if good:
        assert found["e2e_ttft_p50_s"].value <= found["e2e_ttft_p95_s"].value <= found["e2e_latency_p95_s"].value
