"""Task `lock`."""

from __future__ import annotations

from typing import Any

from prefect import task

from tasks.order import Order, connect, read_release
from tasks.retrying import RETRIES, RETRY_DELAY_S, may_retry
from tasks.steps.acceptance import lock_step
from tasks.steps.journal import recorded


@task(
    name="lock", retries=RETRIES, retry_delay_seconds=RETRY_DELAY_S, retry_condition_fn=may_retry, persist_result=False
)
def lock(order: Order) -> dict[str, Any]:
    """Lock the release's revision, or take the lock that was accepted for it. Twice gives the same digest."""
    ports, release = connect(order), read_release(order)
    return recorded(ports, release.id, "lock", lambda: lock_step(ports, release.repo, release.revision)[1])
