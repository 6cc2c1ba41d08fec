"""Task `stage`."""

from __future__ import annotations

from typing import Any

from prefect import task

from tasks.order import Order, connect, subject
from tasks.retrying import RETRIES, RETRY_DELAY_S, may_retry
from tasks.steps.journal import recorded
from tasks.steps.staging import stage_step


@task(
    name="stage", retries=RETRIES, retry_delay_seconds=RETRY_DELAY_S, retry_condition_fn=may_retry, persist_result=False
)
def stage(order: Order, plan: dict[str, Any]) -> dict[str, Any]:
    """Stage the weights on the plan's nodes and read every marker. Twice moves no byte the second time."""
    ports = connect(order)
    what = subject(order, ports, plan["lock_digest"])
    return recorded(ports, what.release.id, "stage", lambda: stage_step(ports, what, plan["nodes"], plan["spares"]))
