"""Runs one job a file on a few threads; the first failure or a signal stops them all, and is the one that is told."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from tasks.core.errors import After, K2Error
from tasks.node.program import Stop, StoppedError, say, stopped, write_termination_message
from tasks.ports import UploadGoneError

Job = TypeVar("Job")
Outcome = TypeVar("Outcome")
_GRACE_S = 3.0
_MOST_BACKOFF_S = 60.0
_MOST_JITTER_S = 5.0


def run_all(
    jobs: Sequence[Job], work: Callable[[Job, Stop], Outcome], threads: int, stop: Stop, abandon: Callable[[], None]
) -> list[Outcome]:
    """Return the outcome of each job, in the order of the jobs.

    Args:
        jobs: what to do.
        work: does one; it looks at the flag it is given often, and leaves nothing half done when it is set.
        threads: how many at once.
        stop: set by signals.
        abandon: removes what threads have half done that do not look at the flag in time (a read that hangs): the
            program then ends at once, as Python cannot end a thread.
    """
    if not jobs:
        return []
    failed = _Linked(stop)

    def guarded(job: Job) -> Outcome:
        failed.check()
        return work(job, failed)

    with ThreadPoolExecutor(max_workers=min(threads, len(jobs))) as pool:
        futures = [pool.submit(guarded, job) for job in jobs]
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=_GRACE_S / 10, return_when=FIRST_COMPLETED)
            if stop.is_set() or any(future.exception() for future in done):
                failed.set()
            if stop.is_set():
                _end_within_grace(pending, abandon)
        _raise_first(futures, stop)
        return [future.result() for future in futures]


class _Linked(Stop):
    """A flag of its own that is also set when the outer one is."""

    def __init__(self, outer: Stop) -> None:
        super().__init__()
        self._outer = outer

    def is_set(self) -> bool:
        return super().is_set() or self._outer.is_set()

    def sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.check()
            super().sleep(min(0.2, left))


def _raise_first(futures: Sequence[Future[Outcome]], stop: Stop) -> None:
    """Raise the failure that made the others stop: not the 'stopped' that it caused in them."""
    errors = [error for future in futures if (error := future.exception())]
    causes = [error for error in errors if not isinstance(error, StoppedError)]
    if stop.is_set():
        raise stopped()
    for error in causes or errors:
        raise error


def _end_within_grace(pending: set[Future[Outcome]], abandon: Callable[[], None]) -> None:
    """Wait for threads that were told to stop; end the program without them if they hang in a read."""
    _, hanging = wait(pending, timeout=_GRACE_S)
    if not hanging:
        return
    abandon()
    error = stopped()
    say(error.as_text())
    write_termination_message(error.as_data())
    sys.stdout.flush()
    os._exit(int(error.exit_code))


def backoff_s(asked_s: float, failures: int) -> float:
    """Return how long to wait after so many failures in a row: what was asked for, twice as long each time, and a bit.

    Never less than was asked for. The bit differs, so that those who failed together do not come back together.
    """
    wait_s = min(asked_s * 2.0 ** min(failures - 1, 16), max(asked_s, _MOST_BACKOFF_S))
    return wait_s + random.uniform(0.0, min(wait_s / 4, _MOST_JITTER_S))  # noqa: S311 - no secret


def attempt(
    work: Callable[[], Outcome],
    stop: Stop,
    *,
    integrity_tries: int,
    tries: int,
    told: Callable[[str], None] = say,
    sleep: Callable[[float], None] | None = None,
) -> Outcome:
    """Return what `work` returns, trying again where the error itself says that this may help.

    Bytes that do not match are asked for `integrity_tries` times in all: once is an accident on the way, twice is the
    source. An UnavailableError is tried `tries` times in all, each after a longer wait, the first as long as it says.
    An upload that is gone is no failure of the request: whoever began it has to begin anew.
    """
    mismatches = failures = 0
    while True:
        stop.check()
        try:
            return work()
        except (StoppedError, UploadGoneError):
            raise
        except K2Error as error:
            mismatch = error.code == "K2-INT-001"
            mismatches += mismatch
            failures += not mismatch
            retry = error.retry
            may = mismatches < integrity_tries if mismatch else isinstance(retry, After) and failures < tries
            if not may:
                raise
            wait_s = backoff_s(retry.seconds, max(1, failures)) if isinstance(retry, After) else 0.0
            told(f"trying again{f' in {wait_s:.1f} s' if wait_s else ''}: {error}")
            (sleep or stop.sleep)(wait_s)
