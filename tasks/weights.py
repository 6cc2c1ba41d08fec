"""Tasks `lock` and `pull`."""

from __future__ import annotations

from typing import Any

from prefect import task

from tasks.order import Order, connect, read_release, subject
from tasks.retrying import RETRIES, RETRY_DELAY_S, may_retry
from tasks.steps.acceptance import lock_step
from tasks.steps.journal import recorded
from tasks.steps.weights import pull_step


@task(
    name="lock", retries=RETRIES, retry_delay_seconds=RETRY_DELAY_S, retry_condition_fn=may_retry, persist_result=False
)
def lock(order: Order) -> dict[str, Any]:
    """Lock the release's revision, or take the lock that was accepted for it. Twice gives the same digest."""
    ports, release = connect(order), read_release(order)
    return recorded(ports, release.id, "lock", lambda: lock_step(ports, release.repo, release.revision)[1])


@task(
    name="pull", retries=RETRIES, retry_delay_seconds=RETRY_DELAY_S, retry_condition_fn=may_retry, persist_result=False
)
def pull(order: Order, lock_digest: str) -> dict[str, Any]:
    """Bring the lock's files into the store; verified files that are there move no byte."""
    ports = connect(order)
    what = subject(order, ports, lock_digest)
    return recorded(ports, what.release.id, "pull", lambda: pull_step(ports, what))
