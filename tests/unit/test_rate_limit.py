"""The limit that all threads of a program share, by a clock of the test's and by the real one."""

from __future__ import annotations

import threading
import time

import pytest

from tasks.core.errors import UnavailableError
from tasks.node.program import Stop
from tasks.node.rate_limit import BURST_S, RateLimit


class Time:
    """A clock that a sleep sets forward."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_what_is_taken_at_once_is_a_burst_and_the_rest_is_waited_for() -> None:
    clock = Time()
    limit = RateLimit(1000, clock.sleep, clock.now)
    for _ in range(100):
        limit.take(100)
    assert clock.now_s - 1000 == pytest.approx(10_000 / 1000)


def test_what_nobody_took_is_lost_but_for_a_burst() -> None:
    clock = Time()
    limit = RateLimit(1000, clock.sleep, clock.now)
    clock.now_s += 3600
    before = clock.now_s
    limit.take(int(1000 * BURST_S))
    assert clock.now_s == before
    limit.take(500)
    assert clock.now_s - before == pytest.approx(0.5)


def test_a_block_larger_than_a_second_passes_and_is_paid_for() -> None:
    clock = Time()
    limit = RateLimit(1000, clock.sleep, clock.now)
    limit.take(5000)
    limit.take(1000)
    assert clock.now_s - 1000 == pytest.approx(6)


def test_all_threads_share_it() -> None:
    """Real time: eight threads get together what one gets alone."""
    limit = RateLimit(10_000_000)

    def take() -> None:
        for _ in range(10):
            limit.take(50_000)

    threads = [threading.Thread(target=take) for _ in range(8)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began > 0.4 - BURST_S


def test_a_program_that_is_told_to_stop_does_not_wait() -> None:
    stop = Stop()
    limit = RateLimit(1, stop.sleep)
    stop.set()
    with pytest.raises(UnavailableError):
        limit.take(3600)


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_no_limit_is_none_and_not_zero(rate: float) -> None:
    with pytest.raises(ValueError, match="more than zero"):
        RateLimit(rate)
