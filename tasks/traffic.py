"""Tasks `shift`, `promote` and `retire`: everything that moves traffic, under the traffic lease."""

from __future__ import annotations

from typing import Any

from prefect import task

from tasks.order import Order, connect, read_release, subject
from tasks.steps.holder import TrafficHolder, holding
from tasks.steps.journal import recorded
from tasks.steps.promotion import approve_step, promote_step, receipt_step, retire_step
from tasks.steps.traffic import shift_step


@task(name="approve", persist_result=False)
def approve(order: Order, approver: str, comment: str) -> dict[str, Any]:
    """Record who lets this release have traffic; refuses one whose gates have not passed."""
    ports, release = connect(order), read_release(order)
    return recorded(ports, release.id, "approve", lambda: approve_step(ports, release, approver, comment))


@task(name="shift", persist_result=False)
def shift(order: Order, lock_digest: str) -> dict[str, Any]:
    """Shift traffic from whatever the route says now; a failed check reverts first and then fails the task."""
    ports = connect(order)
    what = subject(order, ports, lock_digest)

    def act(holder: TrafficHolder) -> dict[str, Any]:
        return recorded(ports, what.release.id, "shift", lambda: shift_step(ports, what, holder))

    return holding(ports, act)


@task(name="promote", persist_result=False)
def promote(order: Order, lock_digest: str, approver: str) -> dict[str, Any]:
    """Make the release live, store its baseline and write its receipt."""
    ports = connect(order)
    what = subject(order, ports, lock_digest)

    def act(holder: TrafficHolder) -> dict[str, Any]:
        return recorded(ports, what.release.id, "promote", lambda: promote_step(ports, what, holder, approver))

    done = holding(ports, act)
    _, key = receipt_step(ports, what)
    return {**done, "receipt": key}


@task(name="retire", persist_result=False)
def retire(order: Order) -> dict[str, Any]:
    """Take down a set that has been replaced, once its hold is over and nothing is in flight."""
    ports, release = connect(order), read_release(order)

    def act(holder: TrafficHolder) -> dict[str, Any]:
        return recorded(ports, release.id, "retire", lambda: retire_step(ports, release, holder))

    return holding(ports, act)
