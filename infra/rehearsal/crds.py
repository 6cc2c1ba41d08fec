"""The CustomResourceDefinitions of LeaderWorkerSet and the Gateway API, from their own Go modules.

The versions stand in ``crds/go.mod``. The files are copied into the cache once, so that Go is not needed later.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import yaml

from infra.rehearsal.cache import Report, cache_directory, directory_key, exclusive
from infra.rehearsal.errors import SiteError
from infra.rehearsal.gomodules import copy_files, module_version

MODULE = Path(__file__).parent / "crds"
GATEWAY_API, LEADER_WORKER_SET = "sigs.k8s.io/gateway-api", "sigs.k8s.io/lws"
FILES = {
    GATEWAY_API: tuple(
        f"config/crd/standard/gateway.networking.k8s.io_{kinds}.yaml"
        for kinds in ("gatewayclasses", "gateways", "httproutes", "referencegrants")
    ),
    LEADER_WORKER_SET: ("config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml",),
}
_RESOURCE = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


class Applier(Protocol):
    """What installing needs of a connection to the API server (`infra.rehearsal.apiserver.ApiConnection` has it)."""

    def request(self, method: str, path: str, body: object | None = None) -> dict[str, Any]:
        """Send one request and return the parsed answer."""

    def apply(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Server-side apply one object at its path."""


def versions() -> dict[str, str]:
    """Return module -> version, as pinned."""
    return {module: module_version(module, MODULE / "go.mod") for module in FILES}


def ensure_files(report: Report) -> tuple[Path, ...]:
    """Return the CRD files, copying them out of their Go modules if the cache lacks them."""
    directory = cache_directory() / "crds" / directory_key([MODULE / "go.mod", MODULE / "go.sum"])
    paths = tuple(directory / Path(file).name for files in FILES.values() for file in files)
    if all(path.exists() for path in paths):
        return paths
    with exclusive(directory.with_name(directory.name + ".lock"), report):
        if not all(path.exists() for path in paths):
            report(f"fetching CRDs: {', '.join(f'{module} {version}' for module, version in versions().items())}")
            copy_files(MODULE, [(module, file) for module, files in FILES.items() for file in files], directory)
    return paths


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
