"""Who runs where: the groups' nodes and ranks, as the cluster has placed them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.core.render import GROUP_NAME_LABEL, ROLE_LABEL, WORKER_INDEX_LABEL
from tasks.core.spec import ROLES

Object = Mapping[str, Any]


@dataclass(frozen=True)
class Seat:
    """One pod of a group: its node, its node rank (0 = leader) and the global GPU ranks that run on it."""

    role: str
    node_rank: int
    node: str
    pod: str
    first_gpu_rank: int
    last_gpu_rank: int


def placement_of(pods: Iterable[Object], gpus_per_node: int) -> tuple[Seat, ...]:
    """Return where the engine pods are, prefill first, in the order of ranks; pods that are on no node are left out."""
    seats = [_seat(pod, gpus_per_node) for pod in pods if _role(pod) in ROLES and pod["spec"].get("nodeName")]
    return tuple(sorted(seats, key=lambda seat: (ROLES.index(seat.role), seat.node_rank, seat.pod)))


def node_rank(pod: Object) -> int:
    """Return a pod's rank among the nodes of its group; -1 if it belongs to none."""
    text = str(_labels(pod).get(WORKER_INDEX_LABEL, ""))
    return int(text) if text.isdigit() else -1


def group_name(pod: Object) -> str:
    """Return the name of the LeaderWorkerSet that a pod belongs to; empty if to none."""
    return str(_labels(pod).get(GROUP_NAME_LABEL, ""))


def _seat(pod: Object, gpus_per_node: int) -> Seat:
    rank = node_rank(pod)
    first = max(rank, 0) * gpus_per_node
    return Seat(
        _role(pod), rank, str(pod["spec"]["nodeName"]), str(pod["metadata"]["name"]), first, first + gpus_per_node - 1
    )


def _role(pod: Object) -> str:
    return str(_labels(pod).get(ROLE_LABEL, ""))


def _labels(pod: Object) -> Mapping[str, Any]:
    labels: Mapping[str, Any] = pod["metadata"].get("labels") or {}
    return labels
