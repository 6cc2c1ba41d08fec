"""Counts what SGLang counts and writes it in Prometheus' text form, under SGLang's own names."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

TTFT_BUCKETS = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
ITL_BUCKETS = (
    0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040, 0.060, 0.080, 0.100,
    0.200, 0.400, 0.600, 0.800, 1, 2, 4, 6, 8,
)  # fmt: skip
E2E_BUCKETS = (*TTFT_BUCKETS, 600, 1200, 1800, 2400)
QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 100, 300)

_COUNTERS = {
    "num_requests_total": "Number of requests processed.",
    "num_aborted_requests_total": "Number of requests aborted.",
    "prompt_tokens_total": "Number of prefill tokens processed.",
    "generation_tokens_total": "Number of generation tokens processed.",
    "cached_tokens_total": "Number of cached prompt tokens.",
    "num_bootstrap_failed_reqs_total": "The number of bootstrap failed requests.",
    "num_transfer_failed_reqs_total": "The number of transfer failed requests.",
    "num_prefill_retries_total": "Total number of prefill retries.",
}
_HISTOGRAMS: dict[str, Sequence[float]] = {
    "time_to_first_token_seconds": TTFT_BUCKETS,
    "inter_token_latency_seconds": ITL_BUCKETS,
    "request_time_per_output_token_seconds": ITL_BUCKETS,
    "e2e_request_latency_seconds": E2E_BUCKETS,
    "queue_time_seconds": QUEUE_BUCKETS,
}


class Histogram:
    """Counts of observations by bucket."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts one value, or the same value several times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def lines(self, name: str, labels: str) -> list[str]:
        """Answers the samples in text form."""
        result, running = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            running += count
            result.append(f'{name}_bucket{{{labels},le="{bound}"}} {running}')
        result.append(f"{name}_sum{{{labels}}} {self._sum:.6f}")
        result.append(f"{name}_count{{{labels}}} {running}")
        return result


class Metrics:
    """All counters and histograms of one engine; gauges are given when the text is asked for."""

    def __init__(self, model_name: str, mode: str) -> None:
        escaped = model_name.replace("\\", "\\\\").replace('"', '\\"')
        engine_type = "unified" if mode == "null" else mode
        self._labels = f'model_name="{escaped}",engine_type="{engine_type}",tp_rank="0",pp_rank="0"'
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._histograms = {name: Histogram(bounds) for name, bounds in _HISTOGRAMS.items()}

    def add(self, counter: str, amount: int = 1) -> None:
        """Raises a counter."""
        self._counters[counter] += amount

    def count(self, counter: str) -> int:
        """Answers a counter's value."""
        return self._counters[counter]

    def observe(self, histogram: str, value: float, times: int = 1) -> None:
        """Counts an observation."""
        self._histograms[histogram].observe(value, times)

    def text(self, gauges: Mapping[str, float]) -> str:
        """Answers everything in Prometheus' text form."""
        lines: list[str] = []
        for name, value in gauges.items():
            lines += [f"# TYPE sglang:{name} gauge", f"sglang:{name}{{{self._labels}}} {value:g}"]
        for name, count in self._counters.items():
            lines += [
                f"# HELP sglang:{name} {_COUNTERS[name]}",
                f"# TYPE sglang:{name} counter",
                f"sglang:{name}{{{self._labels}}} {count}",
            ]
        for name, histogram in self._histograms.items():
            lines.append(f"# TYPE sglang:{name} histogram")
            lines += histogram.lines(f"sglang:{name}", self._labels)
        return "\n".join(lines) + "\n"
