"""What the live route says: who serves, who is the candidate, at which weights, written by which holder.

The route itself carries this as annotations, so that resume and revert need the Kubernetes API alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tasks.core.errors import ConflictError, InputError

PREFIX = "k2-release.io/"
STATE_VERSION = 1
PARKING_SERVICE = "k2-parking"
LIVE_ROUTE = "k2-live"
RELEASE_HEADER = "x-k2-release"

STABLE, SHIFTING, REVERTED, HELD = "stable", "shifting", "reverted", "held"


@dataclass(frozen=True)
class Backend:
    """One set that can take traffic: the Service of its router, its serving digest (12 hex) and its release.

    Release `parking` is the backend that answers 503 + Retry-After on purpose.
    """

    service: str
    serving: str
    release: str


PARKING = Backend(PARKING_SERVICE, "parking", "parking")


@dataclass(frozen=True)
class RouteState:
    """The live route. `candidate_percent` of traffic goes to `candidate`, the rest to `stable`.

    `previous` is the set that rollback goes to, kept at weight 0 until it is retired. `since` is when the weights were
    last written (seconds since the epoch), `generation` the fencing number of the writer.
    """

    stable: Backend
    candidate: Backend | None = None
    previous: Backend | None = None
    candidate_percent: int = 0
    phase: str = STABLE
    generation: int = 0
    since: float = 0.0
    reason: str = ""

    def weights(self) -> list[tuple[Backend, int]]:
        """Return every backend of the route with its weight; they sum to 100."""
        rows = [(self.stable, 100 - self.candidate_percent)]
        if self.candidate is not None:
            rows.append((self.candidate, self.candidate_percent))
        if self.previous is not None and self.previous.service not in {b.service for b, _ in rows}:
            rows.append((self.previous, 0))
        return rows

    def moved(self, percent: int, now: float, generation: int) -> RouteState:
        """Return the state with the candidate at another weight."""
        return replace(self, candidate_percent=percent, since=now, generation=generation, phase=SHIFTING, reason="")


def to_annotations(state: RouteState) -> dict[str, str]:
    """Return the annotations that carry a state."""
    data = {
        "version": STATE_VERSION,
        "stable": vars(state.stable),
        "candidate": vars(state.candidate) if state.candidate else None,
        "previous": vars(state.previous) if state.previous else None,
        "candidate_percent": state.candidate_percent,
        "phase": state.phase,
        "generation": state.generation,
        "since": state.since,
        "reason": state.reason,
    }
    return {PREFIX + "state": json.dumps(data, sort_keys=True), PREFIX + "generation": str(state.generation)}


def read_route(obj: Mapping[str, Any]) -> RouteState:
    """Return the state of a live route object.

    Raises:
        InputError: a newer tool wrote it, or it is not ours (no state annotation).
        ConflictError: the weights in the rules are not those that were written last: a human hand (I3).
    """
    annotations = obj["metadata"].get("annotations", {})
    text = annotations.get(PREFIX + "state")
    if not text:
        raise InputError(
            "K2-INP-001",
            "The live route carries no state of ours.",
            where=f"HTTPRoute {LIVE_ROUTE}",
            got="no annotation",
            expected=PREFIX + "state",
        )
    data = json.loads(text)
    if int(data["version"]) > STATE_VERSION:
        raise InputError(
            "K2-INP-006",
            "The live route was written by a newer version of this tool.",
            where=f"HTTPRoute {LIVE_ROUTE}",
            got=str(data["version"]),
            expected=f"<= {STATE_VERSION}",
        )
    state = RouteState(
        stable=Backend(**data["stable"]),
        candidate=_backend(data["candidate"]),
        previous=_backend(data["previous"]),
        candidate_percent=int(data["candidate_percent"]),
        phase=data["phase"],
        generation=int(data["generation"]),
        since=float(data["since"]),
        reason=data["reason"],
    )
    check_weights(obj, state)
    return state


def _backend(data: Mapping[str, str] | None) -> Backend | None:
    return Backend(**data) if data else None


def actual_weights(obj: Mapping[str, Any]) -> list[dict[str, int]]:
    """Return the weights of each rule of a route as {service: weight}, zero weights left out."""
    return [
        {ref["name"]: weight for ref in rule.get("backendRefs", []) if (weight := int(ref.get("weight", 1)))}
        for rule in obj["spec"].get("rules", [])
    ]


def check_weights(obj: Mapping[str, Any], state: RouteState) -> None:
    """Raise ConflictError if some rule's weights are not the ones that the state says were written."""
    expected = {backend.service: weight for backend, weight in state.weights() if weight}
    for weights in actual_weights(obj):
        if weights != expected:
            raise ConflictError(
                "K2-CON-003",
                "The live route's weights were changed by somebody else.",
                where=f"HTTPRoute {LIVE_ROUTE}",
                got=json.dumps(weights, sort_keys=True),
                expected=json.dumps(expected, sort_keys=True),
                details={"got": weights, "expected": expected},
            )
