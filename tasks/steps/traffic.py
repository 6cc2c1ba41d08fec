"""The live route: read with its state, written under the fence, live at the gateway before anything else happens."""

from __future__ import annotations

import contextlib
from typing import Any

from tasks.core.errors import After, ConflictError, NotReadyError, UnavailableError
from tasks.core.lease import check_fence
from tasks.core.render import render_live_route
from tasks.core.route import LIVE_ROUTE, RouteState, read_route, to_annotations
from tasks.steps.context import Ports
from tasks.steps.holder import TrafficHolder, patiently
from tasks.steps.patience import Deadline

ROUTE_LIVE_TIMEOUT_S = 30.0
_WRITE_TRIES = 4
_WRITE_AGAIN_S = 0.3
_MOST_OUTAGES = 5


class NotTakenOverError(UnavailableError):
    """The route is written, and the gateway does not say that it serves it: nobody knows where users go."""


def read_live_route(ports: Ports) -> tuple[RouteState, dict[str, Any]]:
    """Return the live route's state and object; ConflictError if its weights are not ours, InputError if it is gone."""
    obj = ports.cluster.get("HTTPRoute", LIVE_ROUTE)
    if obj is None:
        raise NotReadyError(
            "K2-RDY-002",
            "The site has no live route.",
            where=f"HTTPRoute {LIVE_ROUTE}",
            hint="k2ctl site init --release R --site S",
        )
    return read_route(obj), obj


def write_live_route(
    ports: Ports,
    state: RouteState,
    obj: dict[str, Any],
    holder: TrafficHolder,
    within_s: float = ROUTE_LIVE_TIMEOUT_S,
) -> RouteState:
    """Write a state to the route: fence, Lease, resourceVersion precondition, read-back, live at the gateway (I3, I9).

    Raises:
        ConflictError: fenced off, lease lost, or the route was written by somebody else since it was read.
        NotTakenOverError: it is written, and the gateway did not take it over in time.
    """
    check_fence(read_route(obj).generation, holder.generation)
    holder.renew()
    backends = [(b.service, weight, b.serving) for b, weight in state.weights()]
    rendered = render_live_route(
        ports.templates["live-route"], backends, to_annotations(state), ports.site.namespace, ports.site.gateway.name
    )
    rendered["metadata"]["resourceVersion"] = obj["metadata"]["resourceVersion"]
    written = ports.cluster.replace(rendered)
    _wait_live(ports, int(written["metadata"]["generation"]), holder, within_s)
    shares = ", ".join(f"{b.release} {weight}%" for b, weight in state.weights())
    ports.progress.say(f"shift: route is live: {shares}")
    return state


def move_traffic(
    ports: Ports,
    before: RouteState,
    target: RouteState,
    holder: TrafficHolder,
    within_s: float = ROUTE_LIVE_TIMEOUT_S,
) -> RouteState:
    """Write `target` over exactly `before`, through a short outage of the API.

    The gateway writes the route's status, so that a refused precondition alone is nobody's hand: the route is read
    again, and goes on only if it still says what was decided on. A write whose answer was lost is found there too.

    Raises:
        ConflictError: the route does not say `before` any more, or the lease is lost.
        NotTakenOverError: it is written, and the gateway did not take it over in time.
        UnavailableError: the API does not answer.
    """
    deadline = ports.clock.now() + min(holder.patience_s, within_s)
    for attempt in range(1, _WRITE_TRIES + 1):
        now, obj = patiently(ports, lambda: read_live_route(ports), max(0.0, deadline - ports.clock.now()))
        if now == target:
            _wait_live(ports, int(obj["metadata"]["generation"]), holder, within_s)
            return target
        check_state(now, before)
        try:
            return write_live_route(ports, target, obj, holder, within_s)
        except NotTakenOverError:
            raise
        except UnavailableError:
            if attempt == _WRITE_TRIES or ports.clock.now() > deadline:
                raise
        except ConflictError as error:
            if attempt == _WRITE_TRIES or error.code != "K2-CON-002":
                raise
        ports.clock.sleep(_WRITE_AGAIN_S)
    raise AssertionError("unreachable")


def move_through_outages(ports: Ports, before: RouteState, target: RouteState, holder: TrafficHolder) -> RouteState:
    """Do as `move_traffic` does, waiting for an API that is away: for what stays right however long that takes.

    Raises:
        ConflictError, NotTakenOverError: as there.
        UnavailableError: the API is away for longer than a flow waits, or goes away again and again.
    """
    for left in reversed(range(_MOST_OUTAGES)):
        try:
            return move_traffic(ports, before, target, holder)
        except NotTakenOverError:
            raise
        except UnavailableError as error:
            if not left or not isinstance(error.retry, After):
                raise
        read_live_route(ports)  # comes back when the API does, or gives up
    raise AssertionError("unreachable")


def check_state(now: RouteState, expected: RouteState) -> None:
    """Raise ConflictError if the route no longer is what was written last (I3: a human hand is never written over)."""
    if now != expected:
        raise ConflictError(
            "K2-CON-003",
            "The live route was changed by somebody else during the shift.",
            where=f"HTTPRoute {LIVE_ROUTE}",
            got=str(now.weights()),
            expected=str(expected.weights()),
        )


def _wait_live(ports: Ports, generation: int, holder: TrafficHolder, within_s: float) -> None:
    """Wait until the gateway says in the route's status that it serves this generation of it; the Lease is kept.

    The gateway hears of the route from the API as well: time without one is not its time.
    """
    deadline = Deadline(ports, within_s)
    while not deadline.passed:
        with contextlib.suppress(UnavailableError):
            obj = ports.cluster.get("HTTPRoute", LIVE_ROUTE)
            if obj is not None and route_is_live(obj, generation):
                return
        holder.keep(deadline.left_s)
        ports.clock.sleep(0.1)
    raise NotTakenOverError(
        "K2-UNA-001",
        "The gateway did not take over the route.",
        where=f"HTTPRoute {LIVE_ROUTE}",
        got="no status for this generation",
        expected=f"observedGeneration {generation}",
    )


def route_is_live(obj: dict[str, Any], generation: int) -> bool:
    """Return whether every parent's conditions hold for at least this generation of the route."""
    parents = obj.get("status", {}).get("parents", [])
    conditions = [c for parent in parents for c in parent.get("conditions", [])]
    return bool(conditions) and all(
        int(c.get("observedGeneration", 0)) >= generation and c["status"] == "True" for c in conditions
    )
