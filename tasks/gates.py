"""Tasks `warm`, `smoke` and `throughput`. Gates are not retried: a verdict is a verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefect import task

from tasks.order import Order, connect, subject
from tasks.steps.context import Ports, Subject
from tasks.steps.gating import (
    rejudge_smoke_step,
    rejudge_throughput_step,
    reused,
    smoke_step,
    throughput_step,
    warm_step,
)
from tasks.steps.journal import recorded

Step = Callable[[Ports, Subject], dict[str, Any]]


def _gate(order: Order, lock_digest: str, name: str, step: Step) -> dict[str, Any]:
    ports = connect(order)
    what = subject(order, ports, lock_digest)
    return recorded(ports, what.release.id, name, lambda: reused(ports, what, name) or step(ports, what))


@task(name="warm", persist_result=False)
def warm(order: Order, lock_digest: str) -> dict[str, Any]:
    """Send the first requests, so that no user pays for first use."""
    ports = connect(order)
    what = subject(order, ports, lock_digest)
    return recorded(ports, what.release.id, "warm", lambda: warm_step(ports, what))


@task(name="smoke", persist_result=False)
def smoke(order: Order, lock_digest: str) -> dict[str, Any]:
    """Judge graded answers; a verdict already taken on these very pods is used again."""
    return _gate(order, lock_digest, "smoke", smoke_step)


@task(name="throughput", persist_result=False)
def throughput(order: Order, lock_digest: str) -> dict[str, Any]:
    """Judge end-to-end throughput; a verdict already taken on these very pods is used again."""
    return _gate(order, lock_digest, "throughput", throughput_step)


@task(name="gates-again", persist_result=False)
def rejudge(order: Order, lock_digest: str) -> dict[str, Any]:
    """Judge the live release's stored answers and samples by this release's limits: no pod starts, nothing is sent."""
    return {
        "smoke": _gate(order, lock_digest, "smoke", rejudge_smoke_step),
        "throughput": _gate(order, lock_digest, "throughput", rejudge_throughput_step),
    }
