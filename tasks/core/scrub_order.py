"""Which nodes are scrubbed at the same time: few, one of each unit, and never all that hold the weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tasks.core.render import ROLE_LABEL, SERVING_LABEL
from tasks.core.spec import ROLES

AT_ONCE = 4
_GROUP_INDEX = "leaderworkerset.sigs.k8s.io/group-index"


def units_of(pods: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the unit whose engines run on each node, by the pods' labels: a serving set's n-th groups are one."""
    found = {}
    for pod in pods:
        labels, node = pod["metadata"].get("labels") or {}, (pod.get("spec") or {}).get("nodeName")
        if node and labels.get(ROLE_LABEL) in ROLES and labels.get(SERVING_LABEL):
            found[str(node)] = f"{labels[SERVING_LABEL]}/{labels.get(_GROUP_INDEX, '0')}"
    return found


def next_batch(waiting: Sequence[str], unit_of: Mapping[str, str], holding: int) -> list[str]:
    """Return the nodes that are scrubbed next, in the order in which they wait.

    Args:
        waiting: nodes that are to be scrubbed.
        unit_of: the unit that each serves; nodes that serve nothing are not in it.
        holding: how many nodes hold the weights.
    """
    limit, batch, units = min(AT_ONCE, max(1, holding - 1)), list[str](), set[str]()
    for node in waiting:
        unit = unit_of.get(node, "")
        if len(batch) < limit and (not unit or unit not in units):
            batch.append(node)
            units.add(unit)
    return batch
