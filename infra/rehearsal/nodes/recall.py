"""What a pod's stored status says of runs before this agent's: carried over, as after a reboot of the node."""

from __future__ import annotations

from collections.abc import Sequence

from infra.rehearsal.kubeclient import JsonObject
from infra.rehearsal.nodes.lifecycle import ContainerLifecycle
from infra.rehearsal.nodes.machines import timestamp
from infra.rehearsal.nodes.status import terminated

_KILLED_CODE = 137


def recall(init: Sequence[ContainerLifecycle], mains: Sequence[ContainerLifecycle], status: JsonObject) -> None:
    """Give containers the restart counts and last states of their stored statuses.

    A container that ran has died with its node: it starts again, or, if its pod's restartPolicy forbids that, has
    ended. Init containers run again whatever they did before.
    """
    kinds = ("initContainerStatuses", "containerStatuses")
    stored = {entry["name"]: entry for kind in kinds for entry in status.get(kind) or []}
    for lifecycle in [*init, *mains]:
        entry = stored.get(lifecycle.state.name)
        if entry is not None and entry.get("containerID"):
            _recall_container(lifecycle, entry, init=lifecycle in init)


def _recall_container(lifecycle: ContainerLifecycle, entry: JsonObject, *, init: bool) -> None:
    state = lifecycle.state
    state.restart_count = entry.get("restartCount", 0)
    state.container_id = entry["containerID"]
    before = entry.get("state") or {}
    ended = before if "terminated" in before else entry.get("lastState") or {}
    if "running" in before:
        ended = terminated(
            exit_code=_KILLED_CODE,
            signal=9,
            started_at=before["running"].get("startedAt") or timestamp(),
            finished_at=timestamp(),
            message="the node stopped while the container ran",
            container_id=state.container_id,
        )
    code = ended["terminated"]["exitCode"] if ended else 0
    if not init and ended and not lifecycle.restarts_after(code):
        state.state = ended
        return
    state.last_state = ended
    if "running" in before or not init:
        state.restart_count += 1
