"""What readiness is made of: where a pod stands, and what is known to be wrong."""

from __future__ import annotations

from dataclasses import dataclass

MISSING = "Missing"
PENDING = "Pending"
INIT = "Init"
PULLING = "Pulling image"
STARTING = "Starting"
READY = "Ready"
CRASHED = "CrashLoop"
NODE_LOST = "NodeLost"
TERMINATING = "Terminating"

PATIENCE_S = 30.0
"""How long a state that is normal for a moment is no diagnosis."""


@dataclass(frozen=True)
class PodPhase:
    """Where one pod stands. `rank` is its node rank in the group, -1 for a pod of no group (the router)."""

    pod: str
    uid: str
    role: str
    group: str
    rank: int
    node: str
    phase: str
    detail: str


@dataclass(frozen=True)
class Diagnosis:
    """Something that is wrong. `fatal`: it does not go away by waiting."""

    level: str
    category: str
    summary: str
    detail: str
    resolution: str
    pod: str = ""
    node: str = ""
    rank: int = -1
    fatal: bool = False
