"""Counts of what the client saw. Pure; the report is one JSON document that a reader can poll."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

REPORT_VERSION = 1
_FIRST_FAILURES = 20
_DETAIL_CHARACTERS = 300
_RECENT_S = 10.0
NO_RELEASE = "none"
"""Stands for answers without the release header, such as Envoy's own."""


class Outcome(StrEnum):
    """How a request ended; each has exactly one."""

    OK = "ok"
    FAILED = "failed"
    """Another status than 200, no answer, or a wrong one."""
    CUT = "cut"
    """A stream that began and ended without `data: [DONE]`."""
    PARKED = "parked"
    """503 with Retry-After, where the client was told to expect it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished request. Times are in seconds; `at_s` is its start in Unix time."""

    outcome: Outcome
    at_s: float
    latency_s: float
    stream: bool
    status: int | None = None
    release: str = NO_RELEASE
    ttft_s: float | None = None
    reason: str = ""
    detail: str = ""


class Histogram:
    """Durations in buckets that grow by 2 %: percentiles of any number of them in little memory."""

    _GROWTH = math.log(1.02)

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self._count, self._longest_s = 0, 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self._buckets[math.floor(math.log(max(seconds, 1e-6)) / self._GROWTH)] += 1
        self._count += 1
        self._longest_s = max(self._longest_s, seconds)

    def percentile_s(self, percent: float) -> float | None:
        """Return a duration that `percent` of all do not exceed (within 2 %); None without any."""
        wanted = max(1, math.ceil(self._count * percent / 100))
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return min(math.exp((bucket + 1) * self._GROWTH), self._longest_s)
        return None

    def report_ms(self) -> dict[str, float | None]:
        """Return the usual percentiles in milliseconds."""
        names = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
        values = {name: self.percentile_s(percent) for name, percent in names.items()}
        return {name: None if value is None else round(value * 1000, 1) for name, value in values.items()}


@dataclass(slots=True)
class _Part:
    """The counts of one release, or of all."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    latency: Histogram = field(default_factory=Histogram)
    ttft: Histogram = field(default_factory=Histogram)

    def add(self, sample: Sample) -> None:
        self.outcomes[sample.outcome] += 1
        if sample.outcome is Outcome.OK:
            self.latency.add(sample.latency_s)
            if sample.ttft_s is not None:
                self.ttft.add(sample.ttft_s)

    def report(self) -> dict[str, Any]:
        return {
            **_counts(self.outcomes),
            "latency_ms": self.latency.report_ms(),
            "ttft_ms": self.ttft.report_ms(),
        }


class Tally:
    """All requests so far."""

    def __init__(self) -> None:
        self.all = _Part()
        self._by_release: dict[str, _Part] = {}
        self._statuses: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._streams = 0
        self._failures: list[Sample] = []
        self._recent: deque[tuple[float, Sample]] = deque()

    @property
    def requests(self) -> int:
        """How many requests have ended."""
        return self.all.outcomes.total()

    def add(self, sample: Sample) -> None:
        """Count one finished request."""
        self.all.add(sample)
        self._by_release.setdefault(sample.release, _Part()).add(sample)
        self._statuses[str(sample.status) if sample.status is not None else "none"] += 1
        self._streams += sample.stream
        if sample.reason:
            self._reasons[sample.reason] += 1
        if sample.outcome in (Outcome.FAILED, Outcome.CUT) and len(self._failures) < _FIRST_FAILURES:
            self._failures.append(sample)
        self._recent.append((sample.at_s + sample.latency_s, sample))

    def report(self, now_s: float) -> dict[str, Any]:
        """Return all counts; `recent` covers the requests that ended within the last ten seconds.

        `ok`, `failed`, `cut_streams` and `parked` add up to `requests`; latencies are of the ok ones.
        """
        return {
            "version": REPORT_VERSION,
            **self.all.report(),
            "streams": self._streams,
            "wrong_answers": self._reasons["wrong answer"],
            "statuses": dict(sorted(self._statuses.items())),
            "reasons": dict(self._reasons.most_common()),
            "releases": {name: part.outcomes.total() for name, part in sorted(self._by_release.items())},
            "by_release": {name: part.report() for name, part in sorted(self._by_release.items())},
            "recent": self._recent_counts(now_s),
            "first_failures": [_failure(sample) for sample in self._failures],
        }

    def _recent_counts(self, now_s: float) -> dict[str, Any]:
        while self._recent and self._recent[0][0] < now_s - _RECENT_S:
            self._recent.popleft()
        samples = [sample for _, sample in self._recent]
        counts = _counts(Counter(sample.outcome for sample in samples))
        return {"seconds": _RECENT_S, **counts, "releases": dict(Counter(sample.release for sample in samples))}


def _counts(outcomes: Counter[Outcome]) -> dict[str, int]:
    return {
        "requests": outcomes.total(),
        "ok": outcomes[Outcome.OK],
        "failed": outcomes[Outcome.FAILED],
        "cut_streams": outcomes[Outcome.CUT],
        "parked": outcomes[Outcome.PARKED],
    }


def _failure(sample: Sample) -> dict[str, Any]:
    return {
        "at_s": round(sample.at_s, 3),
        "after_s": round(sample.latency_s, 3),
        "outcome": sample.outcome.value,
        "stream": sample.stream,
        "status": sample.status,
        "release": sample.release,
        "reason": sample.reason,
        "detail": sample.detail[:_DETAIL_CHARACTERS],
    }
