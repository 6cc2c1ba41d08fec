"""Tasks `shift`, `promote` and `retire`: everything that moves traffic, under the traffic lease."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect import task
from prefect.logging import get_run_logger

from tasks.core.errors import ConflictError, K2Error, RevertedError, UnavailableError
from tasks.order import Order, connect, read_release, subject
from tasks.steps.aborting import abort_if_serving, check_load, has_users, is_another_hand
from tasks.steps.holder import TrafficHolder, holding
from tasks.steps.journal import recorded
from tasks.steps.promotion import approve_step, promote_step, receipt_step, retire_step
from tasks.steps.shifting import shift_step

_SEND_BACK_PATIENCE_S = 60.0
"""How long a step that has failed already waits for an API server, to see whether its candidate has users."""
_CANCELLED_PATIENCE_S = 15.0
"""The same of a flow that is told to end: the orchestrator ends it by force half a minute later."""


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


@contextmanager
def no_unwatched_candidate(order: Order) -> Iterator[None]:
    """Send a candidate's users back when a step of its release fails in here and nothing else watches it.

    This is no task: an orchestrator that does not answer must not stand between a failure and the safe write.

    Raises:
        RevertedError: a step failed while the release's candidate had users; they were sent back first.
    """
    try:
        yield
    except BaseException as error:
        try:
            _send_back(order, error)
        except RevertedError as reverted:
            if not isinstance(error, Exception):
                raise error from None
            raise reverted from None
        except Exception as unsent:
            # Nobody knows whether the candidate has users; what failed first is still what is to be repaired.
            said = unsent if isinstance(unsent, K2Error) else type(unsent).__name__
            get_run_logger().error(f"shift: not looked whether {order.release} has users: {said}")
        raise


def _send_back(order: Order, error: BaseException) -> None:
    if isinstance(error, RevertedError) or is_another_hand(error):
        return
    patience_s = _SEND_BACK_PATIENCE_S if isinstance(error, Exception) else _CANCELLED_PATIENCE_S
    ports, release = connect(order, patience_s=patience_s), read_release(order)
    if not has_users(ports, release):
        return

    def act(holder: TrafficHolder) -> dict[str, Any]:
        try:
            return recorded(ports, release.id, "shift", lambda: abort_if_serving(ports, release, holder, error))
        except UnavailableError:
            # The ledger does not answer: users come first.
            return abort_if_serving(ports, release, holder, error)

    try:
        holding(ports, act)
    except ConflictError as conflict:
        ports.progress.say(f"shift: nothing sent back, somebody else moves traffic: {conflict}")


def check_no_users(order: Order, lock_digest: str) -> None:
    """Check that the load of a gate does not go to a set that users are on; a verdict that still holds needs none."""
    ports = connect(order)
    check_load(ports, subject(order, ports, lock_digest))
