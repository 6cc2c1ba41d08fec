"""Verdicts. No data, too little data, NaN or a missing figure is `inconclusive`: it never passes (I8)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.core.identity import digest_of
from tasks.core.loadstats import Figure, end_to_end_figures
from tasks.core.samples import Answer, LoadSample
from tasks.core.spec import GatePolicy, Limit, plain

PASS, FAIL, INCONCLUSIVE = "pass", "fail", "inconclusive"
NO_ERRORS = Limit("e2e_error_share", "<=", 0.0, "share")


@dataclass(frozen=True)
class Verdict:
    """What a gate says, with both sides of every comparison it made.

    `samples_digest` is over the raw samples, which are kept: the same verdict can be computed again from them.
    """

    gate: str
    outcome: str
    got: str
    expected: str
    unit: str
    scope: str
    reason: str
    samples_digest: str
    parts: tuple[Verdict, ...] = ()


@dataclass(frozen=True)
class GradedPrompt:
    """A prompt whose right answer is known; `contains` must stand in the text."""

    prompt: str
    contains: str
    max_tokens: int = 32


# Short prompts with one right answer each. Content is graded because HTTP 200 with garbage is a public failure of this
# very stack (sgl-project/sglang#23020: 94% right answers fell to 50% with every status 200).
SMOKE_PROMPTS: tuple[GradedPrompt, ...] = (
    GradedPrompt("What is 17 + 25? Answer with the number only.", "42"),
    GradedPrompt("What is 9 * 12? Answer with the number only.", "108"),
    GradedPrompt("What is 100 - 58? Answer with the number only.", "42"),
    GradedPrompt("What is the capital of France? Answer with one word.", "Paris"),
    GradedPrompt("What is the capital of Japan? Answer with one word.", "Tokyo"),
    GradedPrompt("Repeat exactly: the shards are verified", "the shards are verified"),
)


def grade(prompt: GradedPrompt, answer: Answer) -> str:
    """Return why an answer is wrong, or an empty string when it is right."""
    if answer.status != 200:
        return f"status {answer.status} {answer.error}".strip()
    if not answer.done:
        return "the stream ended without [DONE]"
    if answer.finish_reason not in ("stop", "length"):
        return f"finish_reason {answer.finish_reason!r}"
    if answer.completion_tokens <= 0:
        return "usage counts no completion token"
    if prompt.contains not in answer.text:
        return f"answered {answer.text[:60]!r}, expected {prompt.contains!r}"
    return ""


def smoke_verdict(
    graded: Sequence[tuple[GradedPrompt, Answer]],
    counters_before: Mapping[str, float],
    counters_after: Mapping[str, float],
    min_correct_share: float,
) -> Verdict:
    """Return the smoke verdict: graded content, and proof that both prefill and decode did the work."""
    samples = plain([(prompt, answer) for prompt, answer in graded])
    digest = digest_of(samples)
    parts = (
        _answers_verdict(graded, min_correct_share, digest),
        *(_moved_verdict(role, counters_before, counters_after, len(graded), digest) for role in ("prefill", "decode")),
    )
    return all_of("smoke", parts, digest)


def _answers_verdict(graded: Sequence[tuple[GradedPrompt, Answer]], min_share: float, digest: str) -> Verdict:
    wrong = [f"{prompt.prompt[:40]!r}: {why}" for prompt, answer in graded if (why := grade(prompt, answer))]
    total = len(graded)
    share = (total - len(wrong)) / total if total else math.nan
    outcome = INCONCLUSIVE if not total else PASS if share >= min_share else FAIL
    reason = "no answers" if not total else "; ".join(wrong[:3]) or "every answer is right"
    return Verdict(
        "answers",
        outcome,
        f"{share:.3f}",
        f">= {min_share:.3f}",
        "share correct",
        f"{total} graded requests",
        reason,
        digest,
    )


def _moved_verdict(
    role: str, before: Mapping[str, float], after: Mapping[str, float], requests: int, digest: str
) -> Verdict:
    key = f"{role}:sglang_num_requests_total"
    if key not in before or key not in after:
        return Verdict(
            f"{role} served",
            INCONCLUSIVE,
            "no counter",
            f">= {requests}",
            "requests",
            role,
            f"the engines expose no {key}",
            digest,
        )
    moved = after[key] - before[key]
    if not math.isfinite(moved):
        return Verdict(
            f"{role} served",
            INCONCLUSIVE,
            str(moved),
            f">= {requests}",
            "requests",
            role,
            "a counter is not a number",
            digest,
        )
    return Verdict(
        f"{role} served",
        PASS if moved >= requests else FAIL,
        f"{moved:.0f}",
        f">= {requests}",
        "requests",
        role,
        "" if moved >= requests else f"requests did not go through {role}",
        digest,
    )


def limit_verdict(limit: Limit, figures: Mapping[str, Figure], digest: str) -> Verdict:
    """Return the verdict of one absolute limit on one figure."""
    figure = figures.get(limit.metric)
    expected = f"{limit.op} {limit.value:g}"
    if figure is None or not math.isfinite(figure.value):
        return Verdict(
            limit.metric, INCONCLUSIVE, "no data", expected, limit.unit, "", "the figure is missing or NaN", digest
        )
    if figure.unit != limit.unit:
        return Verdict(
            limit.metric,
            INCONCLUSIVE,
            f"{figure.value:g} {figure.unit}",
            expected,
            limit.unit,
            figure.scope,
            f"the figure is in {figure.unit}, the limit in {limit.unit}",
            digest,
        )
    holds = figure.value >= limit.value if limit.op == ">=" else figure.value <= limit.value
    return Verdict(
        limit.metric,
        PASS if holds else FAIL,
        f"{figure.value:.4g}",
        expected,
        limit.unit,
        figure.scope,
        "" if holds else "beyond the limit",
        digest,
    )


def baseline_verdict(
    figures: Mapping[str, Figure], baseline: Mapping[str, Any] | None, ratio: float, limits: int, digest: str
) -> Verdict:
    """Return the comparison with the last promoted release at the same workload.

    Without a baseline the verdict passes *and says so*: the absolute limits decide (first release). Where the policy
    has none of those either, nothing decides, and that is no pass.
    """
    metric = "e2e_output_tok_per_s"
    if baseline is None:
        return Verdict(
            "baseline",
            PASS if limits else INCONCLUSIVE,
            "no baseline",
            f">= {ratio:g} of the last promoted release",
            "tok/s",
            "",
            "no baseline: absolute limits decide" if limits else "no baseline and no limit: nothing decides",
            digest,
        )
    figure, before = figures.get(metric), float(baseline.get("figures", {}).get(metric, math.nan))
    if figure is None or not math.isfinite(figure.value) or not math.isfinite(before) or before <= 0:
        return Verdict(
            "baseline", INCONCLUSIVE, "no data", f">= {ratio:g}", "ratio", "", "a side has no figure", digest
        )
    got = figure.value / before
    return Verdict(
        "baseline",
        PASS if got >= ratio else FAIL,
        f"{got:.3f}",
        f">= {ratio:g}",
        "ratio",
        f"{metric} against release {baseline.get('release')}",
        "" if got >= ratio else "slower than before",
        digest,
    )


def throughput_verdict(
    samples: Sequence[LoadSample],
    policy: GatePolicy,
    baseline: Mapping[str, Any] | None,
    gpus: int,
    usd_per_gpu_hour: float,
) -> tuple[Verdict, tuple[Figure, ...]]:
    """Return the end-to-end verdict and its figures; fewer samples than the workload's requests are inconclusive.

    A sample with a number that is none is no sample.
    """
    samples = sound(samples)
    digest = digest_of(plain(samples))
    figures = end_to_end_figures(samples, gpus, usd_per_gpu_hour)
    by_name = {figure.metric: figure for figure in figures}
    enough = len(samples) >= policy.workload.requests
    count = Verdict(
        "samples",
        PASS if enough else INCONCLUSIVE,
        str(len(samples)),
        f">= {policy.workload.requests}",
        "requests",
        "end to end",
        "" if enough else "the load did not send every request",
        digest,
    )
    parts = (
        count,
        *(limit_verdict(limit, by_name, digest) for limit in _limits(policy)),
        baseline_verdict(by_name, baseline, policy.baseline_ratio, len(policy.limits), digest),
    )
    return all_of("throughput", parts, digest), figures


def _limits(policy: GatePolicy) -> tuple[Limit, ...]:
    """Return the policy's limits; one that says nothing of failed requests allows none."""
    silent = all(limit.metric != NO_ERRORS.metric for limit in policy.limits)
    return (*policy.limits, NO_ERRORS) if silent else policy.limits


def sound(samples: Sequence[LoadSample]) -> list[LoadSample]:
    """Return the samples whose numbers are numbers."""
    return [s for s in samples if all(map(math.isfinite, (s.started_s, s.ttft_s, s.latency_s)))]


def all_of(gate: str, parts: Sequence[Verdict], digest: str) -> Verdict:
    """Return the verdict of several: fail before inconclusive before pass; no part at all is inconclusive."""
    outcomes = {part.outcome for part in parts}
    outcome = FAIL if FAIL in outcomes else PASS if outcomes == {PASS} else INCONCLUSIVE
    deciding = [part for part in parts if part.outcome == outcome] if outcome != PASS else []
    reason = "; ".join(
        f"{p.gate}: got {p.got}, expected {p.expected} {p.unit}" + (f" ({p.reason})" if p.reason else "")
        for p in deciding
    ) or ("no part" if not parts else notes(parts))
    return Verdict(
        gate,
        outcome,
        f"{sum(p.outcome == PASS for p in parts)} of {len(parts)} parts pass",
        "all parts pass",
        "parts",
        "",
        reason,
        digest,
        tuple(parts),
    )


def notes(parts: Sequence[Verdict]) -> str:
    """Return what passing parts still have to say, such as that there was no baseline."""
    return "; ".join(part.reason for part in parts if part.reason and part.gate == "baseline")


def verdict_from_data(data: Mapping[str, Any]) -> Verdict:
    """Return the verdict that `plain` made into data."""
    return Verdict(**{**data, "parts": tuple(verdict_from_data(part) for part in data.get("parts", ()))})


def graded_from_data(rows: Sequence[Sequence[Mapping[str, Any]]]) -> list[tuple[GradedPrompt, Answer]]:
    """Return stored smoke answers with their prompts; raise TypeError or KeyError if they are no such rows."""
    return [(GradedPrompt(**prompt), Answer(**answer)) for prompt, answer in rows]


def samples_from_data(rows: Sequence[Mapping[str, Any]]) -> list[LoadSample]:
    """Return stored load samples; raise TypeError or KeyError if they are no such rows."""
    return [LoadSample(**row) for row in rows]
