"""Which way weights come onto the nodes of a site, and what has to come from the Hub for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.core.lock import Lock
from tasks.core.spec import Site

STORE, EXCHANGE, HUB, AUTO = "store", "exchange", "hub", "auto"


def topology_of(site: Site, planned: str = "") -> str:
    """Return how weights come onto the site's nodes: as its file says, else as planned, else through the store."""
    said = site.staging.topology
    return said if said != AUTO else planned or STORE


def planned_topology(plan: Mapping[str, Any]) -> str:
    """Return the topology that a plan, as it is recorded, has picked; empty if it picked none."""
    return str((plan.get("transfers") or {}).get("topology", ""))


def pulls_into_store(site: Site, planned: str = "") -> bool:
    """Say whether the weights have to be in the store before nodes can be staged."""
    topology = topology_of(site, planned)
    return topology == STORE or (topology == EXCHANGE and site.staging.exchange_origin == STORE)


def bytes_to_pull(
    lock: Lock, site: Site, blobs_present: Mapping[str, bool], lacking: int, holding: int, planned: str = ""
) -> int:
    """Return what has to come from the Hub.

    Args:
        lock: the files.
        site: whose topology counts.
        blobs_present: sha256 -> whether the store holds it, verified.
        lacking: nodes that are to be staged and lack the weights.
        holding: nodes among them that hold the weights: in an exchange they give them to the others.
        planned: the topology that a plan has picked.
    """
    if pulls_into_store(site, planned):
        missing = {file.sha256: file.size_bytes for file in lock.files if not blobs_present.get(file.sha256, False)}
        return sum(missing.values())
    each = sum({file.sha256: file.size_bytes for file in lock.files}.values())
    if topology_of(site, planned) == HUB:
        return each * lacking
    return each if lacking and not holding else 0
