"""The file that stands in for the cluster's DNS: names of pods and Services with their addresses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.rehearsal.kubeclient import JsonObject
from infra.rehearsal.nodes.ledger import write_atomically

_DEBOUNCE_S = 0.1


@dataclass(frozen=True)
class PodHost:
    """One pod that has an address."""

    namespace: str
    name: str
    hostname: str
    subdomain: str
    labels: Mapping[str, str]
    ip: str
    ready: bool

    @classmethod
    def of(cls, pod: JsonObject, ip: str, *, ready: bool) -> PodHost:
        """Return the pod as the name service sees it."""
        metadata, spec = pod["metadata"], pod["spec"]
        return cls(
            namespace=metadata["namespace"],
            name=metadata["name"],
            hostname=spec.get("hostname") or metadata["name"],
            subdomain=spec.get("subdomain") or "",
            labels=metadata.get("labels") or {},
            ip=ip,
            ready=ready,
        )


def host_table(pods: Iterable[PodHost], services: Iterable[JsonObject]) -> dict[str, str]:
    """Return every name that resolves.

    A pod resolves under its own name as soon as it has an address (the headless Services of groups publish addresses
    that are not ready); a Service resolves to its first ready pod, since nothing here balances connections.
    """
    known = sorted(pods, key=lambda pod: (pod.namespace, pod.name))
    table: dict[str, str] = {}
    for pod in known:
        table[pod.name] = pod.ip
        if pod.subdomain:
            table |= dict.fromkeys(_domain_names(f"{pod.hostname}.{pod.subdomain}.{pod.namespace}"), pod.ip)
    for service in services:
        metadata = service["metadata"]
        selector = service["spec"].get("selector") or {}
        chosen = next((pod.ip for pod in known if _selected(pod, selector, metadata["namespace"])), None)
        if chosen is not None:
            table |= dict.fromkeys(_domain_names(f"{metadata['name']}.{metadata['namespace']}"), chosen)
    return table


class HostsFile:
    """Keeps the file in step with a table, written at most ten times a second and only when it changed."""

    def __init__(self, path: Path, table: Callable[[], dict[str, str]]) -> None:
        self._path = path
        self._table = table
        self._written: dict[str, str] | None = None
        self._pending: asyncio.TimerHandle | None = None

    def changed(self) -> None:
        """Have the file written soon."""
        if self._pending is None:
            self._pending = asyncio.get_running_loop().call_later(_DEBOUNCE_S, self.flush)

    def flush(self) -> None:
        """Write the file now if its content changed."""
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        table = self._table()
        if table != self._written:
            write_atomically(self._path, json.dumps(table, indent=1, sort_keys=True))
            self._written = table


def _selected(pod: PodHost, selector: Mapping[str, str], namespace: str) -> bool:
    return (
        bool(selector)
        and pod.ready
        and pod.namespace == namespace
        and all(pod.labels.get(key) == value for key, value in selector.items())
    )


def _domain_names(short: str) -> tuple[str, str, str]:
    return short, f"{short}.svc", f"{short}.svc.cluster.local"
