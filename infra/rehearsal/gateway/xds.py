"""The files Envoy reads its clusters, endpoints and routes from, with versions that only grow."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from infra.rehearsal.gateway.translate import EnvoyResource, endpoint_file

_VERSION_DIGITS = 12


class ResourceFile:
    """One file that Envoy watches. It is replaced by rename, so Envoy never reads a half."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version = ""
        self._resources: list[EnvoyResource] | None = None
        self._read()

    def _read(self) -> None:
        try:
            document = json.loads(self.path.read_text())
            self.version, self._resources = str(document["version_info"]), document["resources"]
        except (FileNotFoundError, ValueError, KeyError):
            self.version, self._resources = "", None

    def snapshot(self) -> tuple[list[EnvoyResource], str]:
        """Return what `replace` takes to bring the file back to what it is now."""
        return self.resources, self.version

    @property
    def resources(self) -> list[EnvoyResource]:
        """What the file has; empty when it is not there."""
        return list(self._resources or ())

    def holds(self, resources: Sequence[EnvoyResource]) -> bool:
        """Say whether the file has exactly these resources."""
        return self._resources == list(resources)

    def replace(self, resources: Sequence[EnvoyResource], version: str) -> None:
        """Put new resources into the file, at once."""
        # The name starts with a dot and is not one that Envoy was told: only the rename counts.
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        temporary.write_text(json.dumps({"version_info": version, "resources": list(resources)}))
        temporary.replace(self.path)
        self.version, self._resources = version, list(resources)


class XdsFiles:
    """All files of one Envoy. Versions go on from what an earlier run left, also across kinds of resources."""

    def __init__(self, directory: Path) -> None:
        self.cds_dir, self.eds_dir, self.rds_dir = (directory / kind for kind in ("cds", "eds", "rds"))
        for path in (self.cds_dir, self.eds_dir, self.rds_dir):
            path.mkdir(parents=True, exist_ok=True)
        self.clusters = ResourceFile(self.cds_dir / "clusters.json")
        self.routes = ResourceFile(self.rds_dir / "routes.json")
        self._endpoints = {path: ResourceFile(path) for path in sorted(self.eds_dir.glob("*.json"))}
        files = [self.clusters, self.routes, *self._endpoints.values()]
        self._last = max((int(file.version) for file in files if file.version.isdigit()), default=0)

    def write_clusters(self, clusters: Sequence[EnvoyResource]) -> str:
        """Make these the clusters; return the version they have. Their endpoint files must be there already."""
        return self._write(self.clusters, clusters)

    def write_routes(self, routes: EnvoyResource) -> str:
        """Make this the route configuration; return the version it has."""
        return self._write(self.routes, [routes])

    def write_endpoints(self, cluster: str, endpoints: EnvoyResource) -> str:
        """Make these the endpoints of a cluster; return the version they have."""
        path = Path(endpoint_file(self.eds_dir, cluster))
        file = self._endpoints.setdefault(path, ResourceFile(path))
        return self._write(file, [endpoints])

    def keep_endpoints_of(self, clusters: Iterable[str]) -> None:
        """Remove the endpoint files of all other clusters."""
        kept = {Path(endpoint_file(self.eds_dir, name)) for name in clusters}
        for path in set(self._endpoints) - kept:
            path.unlink(missing_ok=True)
            del self._endpoints[path]

    def _write(self, file: ResourceFile, resources: Sequence[EnvoyResource]) -> str:
        if not file.holds(resources):
            self._last += 1
            file.replace(resources, f"{self._last:0{_VERSION_DIGITS}d}")
        return file.version
