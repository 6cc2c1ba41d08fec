"""What is wrong with a container: how it died, or why it cannot be made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tasks.core.diagnosis import PATIENCE_S, Diagnosis
from tasks.core.engine_log import find_cause, last_line
from tasks.core.pod_status import container_statuses, termination_data
from tasks.core.topology import node_rank

Object = Mapping[str, Any]

IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
SAME_DEATH_LIMIT = 2
_NEVER_IMAGE_REASONS = ("InvalidImageName", "ErrImageNeverPull")
_CONFIG_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_EXIT_INTEGRITY = 5


def death(pod: Object, dead: tuple[str, Object, int], log: str) -> Diagnosis:
    """Return what is known of a container's death: its own message, then its log, then its exit code."""
    container, terminated, restarts = dead
    name, node, rank = str(pod["metadata"]["name"]), str(pod["spec"].get("nodeName") or ""), node_rank(pod)
    code = int(terminated.get("exitCode", 1))
    repeated = restarts >= SAME_DEATH_LIMIT
    said = termination_data(str(terminated.get("message", "")))
    if said is not None or (container == "marker-check" and code == _EXIT_INTEGRITY):
        said = said or {}
        detail = (
            ", ".join(f"{key} {said[key]}" for key in ("where", "got", "expected") if said.get(key))
            or f"{container} exited {code}"
        )
        return Diagnosis(
            "error",
            "integrity" if code == _EXIT_INTEGRITY else "program",
            str(said.get("summary", "The weights on the node are not the ones that were verified.")),
            detail,
            str(said.get("next", "Run the release again: the stager verifies and repairs what is there.")),
            name,
            node,
            rank,
            fatal=code == _EXIT_INTEGRITY or repeated,
        )
    cause = find_cause(log)
    if cause is not None:
        known = cause.signature
        return Diagnosis(
            "error", known.category, known.summary, cause.line, known.resolution, name, node, rank,
            fatal=known.fatal or repeated,
        )  # fmt: skip
    out_of_memory = terminated.get("reason") == "OOMKilled"
    return Diagnosis(
        "error",
        "memory" if out_of_memory else "arguments" if code == 2 else "crash",
        "The host memory of a container was not enough." if out_of_memory else f"Container {container} ended.",
        f"exit code {code} ({terminated.get('reason', 'Error')}), restarts {restarts}" + last_line(log),
        "Raise host_memory_gib of the profile." if out_of_memory else f"kubectl logs {name} -c {container} --previous",
        name,
        node,
        rank,
        fatal=out_of_memory or code == 2 or repeated,
    )


def stuck(status: Object, name: str, node: str, rank: int, elapsed_s: float) -> Iterator[Diagnosis]:
    """Yield what keeps containers from being made: images and configuration that are not there."""
    for container in container_statuses(status):
        waiting = container.get("state", {}).get("waiting", {})
        reason = waiting.get("reason", "")
        if reason in IMAGE_REASONS and (reason in _NEVER_IMAGE_REASONS or elapsed_s > PATIENCE_S):
            yield Diagnosis(
                "error",
                "image",
                f"The image of {container['name']} does not arrive.",
                f"{reason}: {waiting.get('message', '')}",
                "Check the digest, the registry's credentials and the mirror.",
                name,
                node,
                rank,
                fatal=reason in _NEVER_IMAGE_REASONS,
            )
        elif reason in _CONFIG_REASONS and elapsed_s > PATIENCE_S:
            yield Diagnosis(
                "error",
                "configuration",
                f"Container {container['name']} cannot be made.",
                f"{reason}: {waiting.get('message', '')}",
                "Create what is missing (Secret, ConfigMap, directory) and run the release again.",
                name,
                node,
                rank,
            )
