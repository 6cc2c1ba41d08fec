"""Which nodes a serving set may run on: a label that the pipeline writes on the chosen ones and takes off again."""

from __future__ import annotations

from collections.abc import Collection

from tasks.core.render import placed_label
from tasks.steps.context import Ports


def place(ports: Ports, serving: str, nodes: Collection[str]) -> None:
    """Label exactly these nodes for a serving set; nodes that are labelled right already are not written."""
    label = placed_label(serving)
    for node in ports.cluster.list_objects("Node"):
        name, labels = node["metadata"]["name"], node["metadata"].get("labels", {})
        wanted = "true" if name in nodes else None
        if labels.get(label) != wanted:
            ports.cluster.merge_patch("Node", name, {"metadata": {"labels": {label: wanted}}})
