"""`k2ctl status`: what is live, what the route does, where a release stands; what cannot be read keeps nothing back."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from flows.console.reports import connect, print_json
from flows.console.submission import say
from tasks.core.errors import ConflictError, ExitCode, K2Error, NotReadyError
from tasks.core.lease import LEASE, read_lease
from tasks.core.ledger import STEPS, StepState
from tasks.core.route import LIVE_ROUTE, read_route
from tasks.core.units import utc_time
from tasks.specs import find_release
from tasks.steps.context import Ports
from tasks.steps.documents import get_live
from tasks.steps.journal import states

_OPEN = "not ended"
_WHO_RUNS = "Who does: the run in Prefect, and the lease above in a shift. Only a dead one is started again."
_LOOK = "kubectl -n k2 get httproute k2-live -o yaml --show-managed-fields; infra/runbooks/lease-held.md"


def status(args: Namespace) -> int:
    """Say what is live, what the route does, and where a release stands; exit as the first part that was not read."""
    ports = connect(args)
    errors: list[K2Error] = []
    data: dict[str, Any] = {
        "version": 1,
        "site": ports.site.name,
        "live": _or_error(errors, lambda: get_live(ports.store)[0]),
        "route": _or_error(errors, lambda: _route_row(ports)),
        "lease": _or_error(errors, lambda: _lease_row(ports)),
    }
    if args.release:
        release_id = find_release(args.release, ports.site.releases_dir).id
        rows = _or_error(errors, lambda: [_step_row(state) for state in _in_order(states(ports.store, release_id))])
        data["steps"] = rows or []
    data["unread"] = [error.as_data() for error in errors]
    if args.json:
        print_json(data)
    else:
        _print(data)
    for error in errors:
        say(error.as_text())
    return errors[0].exit_code if errors else ExitCode.DONE


def _or_error(errors: list[K2Error], read: Callable[[], Any]) -> Any:
    try:
        return read()
    except K2Error as error:
        errors.append(error)
        return None


def _route_row(ports: Ports) -> dict[str, Any]:
    """Return the live route: its state where the weights agree with it, else what was recorded and what is there."""
    obj = ports.cluster.get("HTTPRoute", LIVE_ROUTE)
    if obj is None:
        raise NotReadyError("K2-RDY-002", "The site has no live route.", where=f"HTTPRoute {LIVE_ROUTE}")
    try:
        route = read_route(obj)
    except ConflictError as error:
        return {"phase": "changed by somebody else", "recorded": error.expected, "now": error.got}
    return {
        "phase": route.phase,
        "generation": route.generation,
        "reason": route.reason,
        "weights": {backend.release: weight for backend, weight in route.weights()},
        "services": {backend.release: backend.service for backend, _ in route.weights()},
    }


def _lease_row(ports: Ports) -> dict[str, Any] | None:
    lease = ports.cluster.get("Lease", LEASE)
    if lease is None:
        return None
    held = read_lease(lease)
    return {"holder": held.holder or None, "generation": held.generation, "expired": held.expired(ports.clock.now())}


def _in_order(found: Mapping[str, StepState]) -> list[StepState]:
    """Return the steps in their order, and how the last run ended behind them."""
    return sorted(found.values(), key=lambda state: STEPS.index(state.step) if state.step in STEPS else len(STEPS))


def _step_row(state: StepState) -> dict[str, Any]:
    """Return a step for the report; a failed one says why."""
    row = {
        "name": state.step,
        "outcome": _OPEN if state.outcome == "interrupted" else state.outcome,
        "attempts": state.attempts,
        "seconds": round(state.seconds, 1),
        "began": utc_time(state.began_at) if state.began_at else None,
        "ended": utc_time(state.ended_at) if state.ended_at else None,
    }
    error = state.data.get("error")
    return {**row, "error": error} if error else row


def _print(data: dict[str, Any]) -> None:
    print(f"site     {data['site']}")
    print(f"live     {data['live']['release'] if data['live'] else 'not read' if data['unread'] else 'nothing'}")
    _print_route(data["route"])
    lease = data["lease"]
    if lease and lease["holder"]:
        expired = ", expired" if lease["expired"] else ""
        print(f"lease    held by {lease['holder']}, generation {lease['generation']}{expired}")
    for step in data.get("steps", []):
        tries = f"{step['attempts']} tr{'y' if step['attempts'] == 1 else 'ies'}"
        when = step["ended"] or f"began {step['began']}"
        print(f"step     {step['name']:<12}{step['outcome']:<12}{when:<28}{step['seconds']:>9} s  {tries}")
        if "error" in step:
            print(f"           {step['error']['code']} {step['error']['summary']} {step['error']['got']}")
    if any(step["outcome"] == _OPEN for step in data.get("steps", [])):
        print(f"         {_OPEN}: it runs, or its flow has died; the ledger alone cannot tell. {_WHO_RUNS}")


def _print_route(route: dict[str, Any] | None) -> None:
    if route is None:
        print("route    not read")
    elif "recorded" in route:
        print(f"route    {route['phase']}: recorded {route['recorded']}, now {route['now']}\n         next: {_LOOK}")
    else:
        reason = f": {route['reason']}" if route["reason"] else ""
        print(f"route    {route['phase']}, generation {route['generation']}{reason}")
        for name, weight in route["weights"].items():
            print(f"         {weight:3d}%  {name} ({route['services'][name]})")
