"""Steps `pull` and `stage` as one piece of work: where something has to be pulled, both run at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks.core.ways import STORE, topology_of
from tasks.steps.context import Ports, Subject
from tasks.steps.jobs import unwatched
from tasks.steps.journal import recorded
from tasks.steps.staging import stage_step
from tasks.steps.together import Together
from tasks.steps.weights import pull_step


def deliver(
    ports: Ports, subject: Subject, nodes: Sequence[str], spares: Sequence[str], planned: str = ""
) -> dict[str, Any]:
    """Bring the lock's files into the store and onto the nodes, and return what was recorded of `stage`.

    Each is a step of its own in the ledger. Staging begins when the pull has found what is missing, and takes each file
    as soon as the store holds it verified; where nothing is missing it comes after, and nothing is waited for. In an
    exchange it comes after too: its nodes take from the store what is there. `planned` is the plan's topology.

    Raises:
        K2Error: what failed first. If that was the pull, the stagers are ended at once; if it was staging, the pullers
            are left to their Jobs, because what they bring is needed by the next run all the same.
    """
    both, release = Together(), subject.release.id

    def stage(*, beside_pull: bool) -> dict[str, Any]:
        watch = both.watch("stage")
        return recorded(
            ports,
            release,
            "stage",
            lambda: stage_step(ports, subject, nodes, spares, beside_pull=beside_pull, watch=watch, planned=planned),
        )

    def pull() -> dict[str, Any]:
        begin_staging = lambda: both.begin("stage", lambda: stage(beside_pull=True))  # noqa: E731
        beside = topology_of(ports.site, planned) == STORE
        return pull_step(ports, subject, begin_staging if beside else unwatched, both.watch("pull"), planned=planned)

    both.first("pull", lambda: recorded(ports, release, "pull", pull))
    return dict(both.second()) if both.begun else stage(beside_pull=False)
