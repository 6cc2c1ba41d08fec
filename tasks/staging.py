"""Task `deliver`: the steps `pull` and `stage`."""

from __future__ import annotations

from typing import Any

from prefect import task

from tasks.core.ways import planned_topology
from tasks.order import Order, connect, subject
from tasks.retrying import RETRIES, RETRY_DELAY_S, may_retry
from tasks.steps.delivery import deliver as deliver_weights


@task(
    name="deliver",
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAY_S,
    retry_condition_fn=may_retry,
    persist_result=False,
)
def deliver(order: Order, plan: dict[str, Any]) -> dict[str, Any]:
    """Pull the weights and stage them on the plan's nodes, both at once; twice moves no byte the second time."""
    ports = connect(order)
    what = subject(order, ports, plan["lock_digest"])
    return deliver_weights(ports, what, plan["nodes"], plan["spares"], planned_topology(plan))
