"""The steps of a release in their order, as the flows call them, without an orchestrator: for tests of the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tasks.core.spec import Release
from tasks.steps.acceptance import lock_step
from tasks.steps.capacity import plan_step, preflight_step
from tasks.steps.context import Ports, Subject
from tasks.steps.delivery import deliver
from tasks.steps.documents import get_lock
from tasks.steps.gating import (
    rejudge_smoke_step,
    rejudge_throughput_step,
    reused,
    smoke_step,
    throughput_step,
    warm_step,
)
from tasks.steps.holder import holding
from tasks.steps.journal import recorded
from tasks.steps.promotion import approve_step, promote_step, receipt_step, retire_step
from tasks.steps.rollout import rollout_step
from tasks.steps.shifting import shift_step

Data = dict[str, Any]


def bring_up(ports: Ports, what: Release) -> Subject:
    """Bring a release to gated and return it with its lock."""

    def step(name: str, act: Callable[[], Data]) -> Data:
        return recorded(ports, what.id, name, act)

    digest = step("lock", lambda: lock_step(ports, what.repo, what.revision)[1])["lock_digest"]
    subject = Subject(what, get_lock(ports.store, digest))
    plan = step("plan", lambda: plan_step(ports, subject)[1])["plan"]
    if plan["change"] == "none":
        return subject
    if plan["change"] == "policy":
        step("smoke", lambda: reused(ports, subject, "smoke") or rejudge_smoke_step(ports, subject))
        step("throughput", lambda: reused(ports, subject, "throughput") or rejudge_throughput_step(ports, subject))
        return subject
    step("preflight", lambda: preflight_step(ports, subject, plan["nodes"]))
    deliver(ports, subject, plan["nodes"], plan["spares"])
    step("rollout", lambda: rollout_step(ports, subject, plan["nodes"]))
    step("warm", lambda: warm_step(ports, subject))
    step("smoke", lambda: reused(ports, subject, "smoke") or smoke_step(ports, subject))
    step("throughput", lambda: reused(ports, subject, "throughput") or throughput_step(ports, subject))
    return subject


def promote(ports: Ports, what: Release, approver: str = "ann") -> Data:
    """Let a gated release have traffic and return its receipt."""
    approved = recorded(ports, what.id, "approve", lambda: approve_step(ports, what, approver, ""))
    subject = Subject(what, get_lock(ports.store, approved["lock_digest"]))
    shift(ports, subject)
    holding(ports, lambda h: recorded(ports, what.id, "promote", lambda: promote_step(ports, subject, h, approver)))
    return receipt_step(ports, subject)[0]


def shift(ports: Ports, subject: Subject) -> Data:
    """Shift traffic to a release under the traffic lease."""
    return holding(ports, lambda h: recorded(ports, subject.release.id, "shift", lambda: shift_step(ports, subject, h)))


def retire(ports: Ports, what: Release) -> Data:
    """Retire a release under the traffic lease."""
    return holding(ports, lambda h: recorded(ports, what.id, "retire", lambda: retire_step(ports, what, h)))


def make_live(ports: Ports, what: Release) -> Subject:
    """Bring a release all the way to live."""
    subject = bring_up(ports, what)
    promote(ports, what)
    return subject
