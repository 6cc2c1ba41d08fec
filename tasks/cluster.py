"""Tasks `plan`, `preflight` and `rollout`."""

from __future__ import annotations

from typing import Any

from prefect import task

from tasks.order import Order, connect, subject
from tasks.retrying import RETRIES, RETRY_DELAY_S, may_retry
from tasks.steps.capacity import plan_step, preflight_step
from tasks.steps.journal import recorded
from tasks.steps.rollout import rollout_step


@task(
    name="plan", retries=RETRIES, retry_delay_seconds=RETRY_DELAY_S, retry_condition_fn=may_retry, persist_result=False
)
def plan(order: Order, lock_digest: str) -> dict[str, Any]:
    """Say what would change: nodes, bytes, pods, dollars. Reads only."""
    ports = connect(order)
    what = subject(order, ports, lock_digest)
    return recorded(ports, what.release.id, "plan", lambda: plan_step(ports, what)[1])


@task(
    name="preflight",
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAY_S,
    retry_condition_fn=may_retry,
    persist_result=False,
)
def preflight(order: Order, plan: dict[str, Any]) -> dict[str, Any]:
    """Check arguments, nodes, GPUs, disk and objects. Stores nothing but probe Jobs."""
    ports = connect(order)
    what = subject(order, ports, plan["lock_digest"])
    return recorded(ports, what.release.id, "preflight", lambda: preflight_step(ports, what, plan["nodes"]))


@task(name="rollout", retries=0, persist_result=False)
def rollout(order: Order, plan: dict[str, Any]) -> dict[str, Any]:
    """Apply the groups, the router and its routes, and wait through named phases until all are ready."""
    ports = connect(order)
    what = subject(order, ports, plan["lock_digest"])
    return recorded(ports, what.release.id, "rollout", lambda: rollout_step(ports, what, plan["nodes"]))
