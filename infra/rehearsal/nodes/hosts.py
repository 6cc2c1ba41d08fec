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
            hostname=spec.get("hostname") or "",
            subdomain=spec.get("subdomain") or "",
            labels=metadata.get("labels") or {},
            ip=ip,
            ready=ready,
        )


def host_table(pods: Iterable[PodHost], services: Iterable[JsonObject]) -> dict[str, str]:
    """Return every name that resolves, as a cluster's DNS has it.

    A pod resolves under its host name in its subdomain if a headless Service of the subdomain's name selects it, ready
    or not as that Service says. A Service resolves to its first such pod, since nothing here balances connections.
    """
    known = sorted(pods, key=lambda pod: (pod.namespace, pod.name))
    table: dict[str, str] = {}
    for service in services:
        chosen = [pod for pod in known if _selected(pod, service)]
        if service["spec"].get("clusterIP") == "None":
            for pod in chosen:
                if pod.hostname and pod.subdomain == service["metadata"]["name"]:
                    table |= dict.fromkeys(_domain_names(f"{pod.hostname}.{pod.subdomain}.{pod.namespace}"), pod.ip)
        if chosen:
            name = f"{service['metadata']['name']}.{service['metadata']['namespace']}"
            table |= dict.fromkeys(_domain_names(name), chosen[0].ip)
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


def _selected(pod: PodHost, service: JsonObject) -> bool:
    selector = service["spec"].get("selector") or {}
    return (
        bool(selector)
        and (pod.ready or bool(service["spec"].get("publishNotReadyAddresses")))
        and pod.namespace == service["metadata"]["namespace"]
        and all(pod.labels.get(key) == value for key, value in selector.items())
    )


def _domain_names(short: str) -> tuple[str, str, str]:
    return short, f"{short}.svc", f"{short}.svc.cluster.local"
