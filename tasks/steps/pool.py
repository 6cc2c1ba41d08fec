"""The nodes of the site's pool, and those of them that a command names."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.core.errors import InputError
from tasks.ports import Object
from tasks.steps.context import Ports

_SHOWN = 5


def pool_nodes(ports: Ports, named: Sequence[str] = ()) -> dict[str, Object]:
    """Return the nodes of the pool by name: those that are named, all if none is; InputError for one that is none."""
    nodes = {
        str(node["metadata"]["name"]): node for node in ports.cluster.list_objects("Node", ports.site.node_selector)
    }
    unknown = sorted(set(named) - nodes.keys())
    if unknown:
        raise InputError(
            "K2-INP-001",
            "There is no such node in the site's pool.",
            where="--node",
            got=", ".join(unknown),
            expected=f"one of {len(nodes)}, such as {', '.join(sorted(nodes)[:_SHOWN])}",
        )
    return {name: node for name, node in nodes.items() if not named or name in named}
