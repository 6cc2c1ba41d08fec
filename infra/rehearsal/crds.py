"""The CustomResourceDefinitions of LeaderWorkerSet and the Gateway API, from their own Go modules.

The versions stand in ``crds/go.mod`` and ``lws/go.mod``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import yaml

from infra.rehearsal.binaries import LEADER_WORKER_SET, LWS_MODULE
from infra.rehearsal.cache import Report
from infra.rehearsal.errors import SiteError
from infra.rehearsal.gomodules import ModuleFiles

GATEWAY_FILES = ModuleFiles(
    "crds",
    Path(__file__).parent / "crds",
    tuple(
        ("sigs.k8s.io/gateway-api", f"config/crd/standard/gateway.networking.k8s.io_{kinds}.yaml")
        for kinds in ("gatewayclasses", "gateways", "httproutes", "referencegrants")
    ),
)
# From the module of the manager itself: what it serves and what the API server knows are one version.
GROUP_FILES = ModuleFiles(
    "lws-crds",
    LWS_MODULE,
    tuple(
        (LEADER_WORKER_SET, f"config/crd/bases/{kinds}.yaml")
        for kinds in ("leaderworkerset.x-k8s.io_leaderworkersets", "disaggregatedset.x-k8s.io_disaggregatedsets")
    ),
)
_RESOURCE = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


class Applier(Protocol):
    """What installing needs of a connection to the API server (`infra.rehearsal.apiserver.ApiConnection` has it)."""

    def request(self, method: str, path: str, body: object | None = None) -> dict[str, Any]:
        """Send one request and return the parsed answer."""

    def apply(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Server-side apply one object at its path."""


def ensure_files(report: Report) -> tuple[Path, ...]:
    """Return the CRD files, copying them out of their Go modules if the cache lacks them."""
    return (*GATEWAY_FILES.ensure(report), *GROUP_FILES.ensure(report))


def install(connection: Applier, files: Iterable[Path], *, timeout_s: float = 60.0) -> tuple[str, ...]:
    """Apply the definitions and wait until the API server serves them; return their names."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        names = tuple(pool.map(lambda file: _apply(connection, file), files))
    _wait_established(connection, names, timeout_s)
    return names


def _apply(connection: Applier, file: Path) -> str:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 345 kB of HTTPRoute schema: ten times faster
    definition = yaml.load(file.read_text(), Loader=loader)  # noqa: S506 (a safe loader)
    definition.pop("status", None)
    name = str(definition["metadata"]["name"])
    connection.apply(f"{_RESOURCE}/{name}", definition)
    return name


def _wait_established(connection: Applier, names: Iterable[str], timeout_s: float) -> None:
    deadline_s, waiting = time.monotonic() + timeout_s, list(names)
    while waiting:
        waiting = [name for name in waiting if not _established(connection.request("GET", f"{_RESOURCE}/{name}"))]
        if waiting and time.monotonic() > deadline_s:
            raise SiteError(f"not Established within {timeout_s:.0f} s: {', '.join(waiting)}")
        if waiting:
            time.sleep(0.1)


def _established(definition: Mapping[str, Any]) -> bool:
    conditions = definition.get("status", {}).get("conditions") or []  # null until the server has looked at it
    return any(condition["type"] == "Established" and condition["status"] == "True" for condition in conditions)
