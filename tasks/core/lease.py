"""The traffic lease: at most one release moves traffic, and an older holder is fenced off (I3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tasks.core.errors import After, ConflictError

LEASE = "k2-traffic"


@dataclass(frozen=True)
class LeaseState:
    """Who holds the lease. `generation` grows with every change of holder and is written on the route."""

    holder: str
    generation: int
    renewed_at: float
    duration_s: float

    def expired(self, now: float) -> bool:
        """Return whether the holder has stopped renewing for longer than it promised."""
        return not self.holder or now > self.renewed_at + self.duration_s


def read_lease(obj: Mapping[str, Any]) -> LeaseState:
    """Return the state of a Lease object."""
    spec = obj.get("spec", {})
    return LeaseState(
        holder=spec.get("holderIdentity") or "",
        generation=int(spec.get("leaseTransitions") or 0),
        renewed_at=parse_micro_time(spec.get("renewTime")),
        duration_s=float(spec.get("leaseDurationSeconds") or 0),
    )


SURELY_DEAD_S = 900.0
"""How long after its end a Lease needs no watching: longer than a flow waits for an API server that is away."""


def take(state: LeaseState, holder: str, now: float, duration_s: float, unchanged_s: float = math.inf) -> LeaseState:
    """Return the lease as this holder takes or renews it.

    Another's Lease must have run out *and* have been seen unchanged for its whole duration (`unchanged_s`): after an
    outage of the API every holder is late, and the living one renews within moments.

    Raises:
        ConflictError: somebody else holds it and still renews; carries when to try again.
    """
    if state.holder == holder:
        return LeaseState(holder, state.generation, now, duration_s)
    unwatched = bool(state.holder) and unchanged_s < state.duration_s and not _surely_dead(state, now)
    if unwatched or not state.expired(now):
        left = max(state.renewed_at + state.duration_s - now, state.duration_s - unchanged_s if unwatched else 0.0)
        raise ConflictError(
            "K2-CON-001",
            "Another holder moves traffic.",
            where=f"Lease {LEASE}",
            got=state.holder,
            expected=holder,
            retry=After(max(0.2, left + 0.1)),
        )
    return LeaseState(holder, state.generation + 1, now, duration_s)


def _surely_dead(state: LeaseState, now: float) -> bool:
    return now > state.renewed_at + state.duration_s + SURELY_DEAD_S


def released(state: LeaseState) -> LeaseState:
    """Return the lease given back: no holder, the generation kept so that it never goes down."""
    return LeaseState("", state.generation, state.renewed_at, state.duration_s)


def lease_spec(state: LeaseState) -> dict[str, Any]:
    """Return the spec of the Lease object for a state."""
    spec: dict[str, Any] = {
        "leaseDurationSeconds": max(1, math.ceil(state.duration_s)),
        "leaseTransitions": state.generation,
        "renewTime": micro_time(state.renewed_at),
    }
    if state.holder:
        spec["holderIdentity"] = state.holder
    return spec


def micro_time(at: float) -> str:
    """Return seconds since the epoch as Kubernetes' MicroTime."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_micro_time(text: str | None) -> float:
    """Return a MicroTime as seconds since the epoch; 0 for none."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else 0.0


def check_fence(route_generation: int, mine: int) -> None:
    """Raise ConflictError if the route was written by a newer holder than me."""
    if route_generation > mine:
        raise ConflictError(
            "K2-CON-002",
            "A newer holder has written the route.",
            where="HTTPRoute k2-live",
            got=f"generation {route_generation}",
            expected=f"at most {mine}",
        )
