"""Abort-first (I4): where traffic is safe is decided and written at once, proved afterwards, and said in every case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from tasks.core.errors import After, ConflictError, K2Error, NotReadyError, RevertedError, UnavailableError
from tasks.core.route import HELD, LIVE_ROUTE, REVERTED, Backend, RouteState
from tasks.core.shift import Forward, Hold, Revert, abort
from tasks.core.spec import Release
from tasks.core.units import utc_time
from tasks.steps.context import Ports, Subject
from tasks.steps.gating import reused
from tasks.steps.holder import TrafficHolder, patiently
from tasks.steps.journal import unknown_error
from tasks.steps.probing import probe_both, prove_traffic
from tasks.steps.traffic import NotTakenOverError, move_traffic, read_live_route

# With the probes before it the safe write comes within 15 s; the proof follows, and a kill then loses words alone.
_ABORT_WRITE_S = 6.0
_ABORT_TRIES = 5
"""How often the safe write is tried when outages of the API meet it."""
_OWNED_BY_ANOTHER = ("K2-CON-001", "K2-CON-002", "K2-CON-003")

History = list[dict[str, Any]]
Reading = Callable[[], RouteState]


def row(state: RouteState, at: float, why: str) -> dict[str, Any]:
    """Return one row of the weights over time."""
    return {
        "at": at,
        "candidate_percent": state.candidate_percent,
        "generation": state.generation,
        "phase": state.phase,
        "why": why,
    }


def show_weights(ports: Ports, release: str, history: Sequence[Mapping[str, Any]]) -> None:
    """Publish the weights over time as a table, times as a person reads them."""
    rows = [{**shown, "at": utc_time(shown["at"])} for shown in history]
    ports.progress.table("weights", rows, f"Weights of {release}")


def is_another_hand(error: BaseException) -> bool:
    """Return whether an error says that somebody else owns the route or the lease: nothing may be written then."""
    return isinstance(error, ConflictError) and error.code in _OWNED_BY_ANOTHER


def reason_of(error: BaseException) -> str:
    """Return what ended a step in words that may be kept: of a library's error its class alone (I6)."""
    if isinstance(error, K2Error):
        return str(error)
    return f"{'the step ended with' if isinstance(error, Exception) else 'cancelled:'} {type(error).__name__}"


def cause_of(error: BaseException) -> dict[str, Any]:
    """Return an error as data that may be kept."""
    return (error if isinstance(error, K2Error) else unknown_error("shift", error)).as_data()


def abort_traffic(
    ports: Ports,
    state: RouteState,
    action: Revert | Forward | Hold,
    holder: TrafficHolder,
    history: History,
    cause: Mapping[str, Any] | None = None,
    come_back: Reading | None = None,
) -> NoReturn:
    """Carry out the failure path from what the route says: decide where traffic is safe, write that, prove it, raise.

    Args:
        come_back: returns what the route says once the API answers; None: an outage is not waited for. After one it is
            decided anew where traffic is safe.

    Raises:
        RevertedError: traffic is on the stable set (K2-REV-001), or a person has to look (K2-REV-002).
        ConflictError: the route or the lease belongs to somebody else; nothing was written.
    """
    detected = ports.clock.now()
    for left in reversed(range(_ABORT_TRIES)):
        decided, target = _decided(ports, state, action, holder)
        details: dict[str, Any] = {"history": history, "reason": decided.reason}
        if cause is not None:
            details["cause"] = dict(cause)
        outage = _write(ports, state, target, holder, details)
        found = _after(come_back) if outage and left and come_back else None
        if found is None:
            break
        # What was written, and its answer lost, is ours.
        state = target if found == target else state
    if "not_written" not in details:
        history.append(row(target, ports.clock.now(), decided.reason))
        details["seconds_to_safety"] = round(ports.clock.now() - detected, 3)
    if isinstance(decided, Hold):
        raise _raised("K2-REV-002", f"The shift holds: {decided.reason}.", str(state.weights()), details)
    if "not_written" not in details:
        _prove(ports, target.stable if isinstance(decided, Revert) else target.candidate, details)
    show_weights(ports, state.candidate.release if state.candidate else state.stable.release, history)
    code, summary = _said(decided, details)
    raise _raised(code, summary, decided.reason, details)


def _decided(
    ports: Ports, state: RouteState, action: Revert | Forward | Hold, holder: TrafficHolder
) -> tuple[Revert | Forward | Hold, RouteState]:
    """Return where traffic is safe by probes of this moment, and the route that says so."""
    if isinstance(action, Revert):
        action = abort(action.reason, *probe_both(ports, state.stable, state.candidate))
    target = replace(
        state,
        candidate_percent={Revert: 0, Forward: 100}.get(type(action), state.candidate_percent),
        phase=REVERTED if isinstance(action, Revert) else HELD,
        reason=action.reason,
        since=ports.clock.now(),
        generation=holder.generation,
    )
    return action, target


def _after(come_back: Reading) -> RouteState | None:
    """Return what the route says after an outage, or None if that does not end."""
    try:
        return come_back()
    except UnavailableError:
        return None


def _write(
    ports: Ports, before: RouteState, target: RouteState, holder: TrafficHolder, details: dict[str, Any]
) -> bool:
    """Write the safe state, note in the details what of that is not certain, and return whether the API was away."""
    try:
        move_traffic(ports, before, target, holder, _ABORT_WRITE_S)
    except NotTakenOverError as error:
        details["not_taken_over"] = error.as_data()
    except Exception as error:
        if is_another_hand(error):
            raise
        details["not_written"] = cause_of(error)
        return isinstance(error, UnavailableError) and isinstance(error.retry, After)
    return False


def _prove(ports: Ports, safe: Backend | None, details: dict[str, Any]) -> None:
    try:
        details["proved"] = prove_traffic(ports, safe) if safe else {}
    except Exception as error:
        details["not_proved"] = cause_of(error)


def _said(action: Revert | Forward, details: Mapping[str, Any]) -> tuple[str, str]:
    """Return the code and the sentence that are true of how an abort went."""
    if "not_written" in details:
        return "K2-REV-002", f"The safe route could not be written: {action.reason}."
    doubt = (
        ", but the gateway has not taken that over"
        if "not_taken_over" in details
        else ", but observed requests do not prove it"
        if "not_proved" in details
        else ""
    )
    if isinstance(action, Forward):
        return (
            "K2-REV-002",
            f"Traffic was sent to the candidate because the stable set does not answer{doubt}: {action.reason}.",
        )
    return "K2-REV-002" if doubt else "K2-REV-001", f"The shift was reverted{doubt}: {action.reason}."


def _raised(code: str, summary: str, got: str, details: dict[str, Any]) -> RevertedError:
    expected = "the checks of the traffic plan" if code == "K2-REV-001" else "a person's decision"
    return RevertedError(code, summary, where=f"HTTPRoute {LIVE_ROUTE}", got=got, expected=expected, details=details)


def abort_after(
    ports: Ports,
    candidate: Backend,
    tried_percent: int,
    holder: TrafficHolder,
    history: History,
    error: BaseException,
    come_back: Reading | None = None,
) -> None:
    """Leave no candidate with traffic behind that nobody watches: abort first if it has any, else do nothing.

    Args:
        tried_percent: the last weight that was written, or may have been: what counts if the route cannot be read.
        come_back: returns what the route says once the API answers; None: an outage is not waited for.

    Raises:
        RevertedError: it had traffic; the cause is named in the reason.
        ConflictError: the route or the lease belongs to somebody else; nothing was written.
    """
    read = come_back or (lambda: read_live_route(ports)[0])
    try:
        state = patiently(ports, read, min(holder.patience_s, _ABORT_WRITE_S))
    except UnavailableError as unread:
        if tried_percent == 0:
            return
        details = {"history": history, "cause": cause_of(error), "not_written": unread.as_data()}
        reason = reason_of(error)
        summary = f"The candidate may have {tried_percent}% of traffic, and the route cannot be read: {reason}."
        raise _raised("K2-REV-002", summary, reason, details) from None
    if state.candidate == candidate and state.candidate_percent > 0:
        ports.progress.say(f"shift: {reason_of(error)}: aborting first")
        abort_traffic(ports, state, Revert(reason_of(error)), holder, history, cause_of(error), come_back)


def has_users(ports: Ports, release: Release) -> bool:
    """Return whether a release is the candidate of the live route and carries users' traffic.

    Raises:
        UnavailableError: nobody knows, the API does not answer.
    """
    try:
        state, _ = patiently(ports, lambda: read_live_route(ports), ports.site.lease_duration_s / 2)
    except (ConflictError, NotReadyError):
        return False  # a human hand, or no route: nothing of ours to send back
    return state.candidate is not None and state.candidate.release == release.id and state.candidate_percent > 0


def abort_if_serving(ports: Ports, release: Release, holder: TrafficHolder, error: BaseException) -> dict[str, Any]:
    """Send a candidate's users back because another step of its release has failed; nothing if it has none.

    Raises:
        RevertedError: it had traffic. One that is held is left where it is: that is a person's to decide.
    """
    state, _ = patiently(ports, lambda: read_live_route(ports), holder.patience_s)
    if state.candidate is None or state.candidate.release != release.id or state.candidate_percent == 0:
        return {"outcome": "unchanged", "note": f"{release.id} has no traffic to send back"}
    if state.phase == HELD:
        details = {"history": [], "reason": state.reason, "cause": cause_of(error)}
        raise _raised(
            "K2-REV-002",
            f"The shift is held with users on the candidate, and {reason_of(error)}.",
            str(state.weights()),
            details,
        )
    come_back = (lambda: read_live_route(ports)[0]) if isinstance(error, Exception) else None
    abort_traffic(ports, state, Revert(reason_of(error)), holder, [], cause_of(error), come_back)


def _is_stable(ports: Ports, subject: Subject) -> bool:
    """Return whether the set is the stable one: its promotion died after the route was written."""
    try:
        state, _ = patiently(ports, lambda: read_live_route(ports), ports.site.lease_duration_s / 2)
    except (ConflictError, NotReadyError):
        return False
    return state.stable.serving == subject.serving


def check_load(ports: Ports, subject: Subject) -> None:
    """Check that a load gate does not have to load a set that users are on.

    Raises:
        ConflictError: it would (K2-CON-006): there is no earlier verdict that holds for the pods as they are.
    """
    users = has_users(ports, subject.release) or _is_stable(ports, subject)
    if not users or reused(ports, subject, "throughput") is not None:
        return
    raise ConflictError(
        "K2-CON-006",
        "The candidate carries users, so no load is run on it, and no earlier verdict holds for its pods.",
        where=f"release {subject.release.id}",
        got="no verdict for these pods under this policy",
        expected="a throughput verdict taken before users",
    )
