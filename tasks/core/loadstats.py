"""Figures from load samples. Each name says its phase; each cost says which GPUs it counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.core.samples import LoadSample


@dataclass(frozen=True)
class Figure:
    """One measured value with its unit and what it covers."""

    metric: str
    value: float
    unit: str
    scope: str


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile (share in 0..1) of values, NaN when there are none.

    Nearest rank, so that every reported percentile is a value that was observed.
    """
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def end_to_end_figures(samples: Sequence[LoadSample], gpus: int, usd_per_gpu_hour: float) -> tuple[Figure, ...]:
    """Return the end-to-end figures of one load: rates over its whole span, latencies of its successful requests.

    The span is from the first start to the last end, ramp and tail included, as sglang.benchmark.serving reports it.
    `usd_per_mtok_output_end_to_end` counts all `gpus` of the unit, prefill and decode.
    """
    good = [sample for sample in samples if sample.ok]
    span_s = max((s.started_s + s.latency_s for s in samples), default=0.0) - min(
        (s.started_s for s in samples), default=0.0
    )
    output_tokens = sum(sample.output_tokens for sample in good)
    rate = output_tokens / span_s if span_s > 0 else math.nan
    requests_rate = len(good) / span_s if span_s > 0 else math.nan
    usd = gpus * usd_per_gpu_hour / (rate * 3600) * 1e6 if rate > 0 else math.nan
    scope = f"end to end, {gpus} GPUs (prefill and decode), {len(samples)} requests"
    error_share = (len(samples) - len(good)) / len(samples) if samples else math.nan
    rows = (
        ("e2e_output_tok_per_s", rate, "tok/s"),
        ("e2e_requests_per_s", requests_rate, "requests/s"),
        ("e2e_ttft_p50_s", percentile([s.ttft_s for s in good], 0.5), "s"),
        ("e2e_ttft_p95_s", percentile([s.ttft_s for s in good], 0.95), "s"),
        ("e2e_latency_p95_s", percentile([s.latency_s for s in good], 0.95), "s"),
        ("e2e_error_share", error_share, "share"),
        ("usd_per_mtok_output_end_to_end", usd, "USD/Mtok"),
    )
    return tuple(Figure(metric, value, unit, scope) for metric, value, unit in rows)
