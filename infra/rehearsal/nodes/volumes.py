"""A pod's volumes as plain directories of its node."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.rehearsal.kubeclient import JsonObject, KubeClient, KubeError
from infra.rehearsal.kuberesources import CONFIG_MAPS, SECRETS, Resource
from infra.rehearsal.nodes.ledger import write_atomically
from infra.rehearsal.nodes.machines import Machine

SERVICE_ACCOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"

_TOKEN_S = 24 * 3600


class VolumeError(Exception):
    """A volume cannot be prepared (yet): a missing ConfigMap, a missing directory, a kind that is not supported."""


class ObjectReader:
    """Reads the ConfigMaps and Secrets that a pod names, fresh each time."""

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self._client = client
        self._namespace = namespace

    async def data(self, resource: Resource, name: str, *, optional: bool) -> dict[str, bytes] | None:
        """Return the decoded data, or None for an optional object that does not exist."""
        try:
            stored = await self._client.get(resource, name, self._namespace)
        except KubeError as error:
            if not error.not_found:
                raise
            if optional:
                return None
            raise VolumeError(f'{resource.kind.lower()} "{name}" not found') from error
        plain = {key: value.encode() for key, value in (stored.get("data") or {}).items()}
        if resource is SECRETS:
            plain = {key: base64.b64decode(value) for key, value in plain.items()}
        binary = {key: base64.b64decode(value) for key, value in (stored.get("binaryData") or {}).items()}
        return plain | binary


@dataclass(frozen=True)
class PodVolumes:
    """Where each volume of a pod lies."""

    places: Mapping[str, Path]

    def mounts(self, container: JsonObject) -> dict[str, str]:
        """Return the container's mount paths with the directories (or files) behind them."""
        mapped: dict[str, str] = {}
        for mount in container.get("volumeMounts") or []:
            place = self.places[mount["name"]]
            if mount.get("subPath"):
                place = place / mount["subPath"]
                if not place.exists():
                    place.mkdir(parents=True)
            mapped[mount["mountPath"]] = str(place)
        return mapped


class VolumeMaker:
    """Makes the directories of one pod's volumes and fills them."""

    def __init__(self, client: KubeClient, pod: JsonObject, machine: Machine, directory: Path) -> None:
        self._client = client
        self._pod = pod
        self._machine = machine
        self._directory = directory
        self._reader = ObjectReader(client, pod["metadata"]["namespace"])

    async def prepare(self) -> PodVolumes:
        """Make every volume; may be called again after a VolumeError, and changes nothing that is there."""
        places: dict[str, Path] = {}
        for volume in self._pod["spec"].get("volumes") or []:
            places[volume["name"]] = await self._prepare(volume)
        return PodVolumes(places)

    async def refresh_tokens(self) -> None:
        """Write new ServiceAccount tokens into the projected volumes."""
        for volume in self._pod["spec"].get("volumes") or []:
            for source in volume.get("projected", {}).get("sources") or []:
                if "serviceAccountToken" in source:
                    await self._token(self._own_place(volume["name"]), source["serviceAccountToken"])

    async def _prepare(self, volume: JsonObject) -> Path:
        if "hostPath" in volume:
            return _host_path(self._machine, volume["hostPath"])
        place = self._own_place(volume["name"])
        place.mkdir(parents=True, exist_ok=True)
        if "configMap" in volume:
            source = volume["configMap"]
            await self._files(place, CONFIG_MAPS, source["name"], source, default_mode=source.get("defaultMode"))
        elif "secret" in volume:
            source = volume["secret"]
            await self._files(place, SECRETS, source["secretName"], source, default_mode=source.get("defaultMode"))
        elif "projected" in volume:
            for source in volume["projected"].get("sources") or []:
                await self._projected(place, source, volume["projected"].get("defaultMode"))
        elif "downwardAPI" in volume:
            self._downward(place, volume["downwardAPI"].get("items") or [])
        elif "emptyDir" not in volume:
            kind = next((key for key in volume if key != "name"), "nothing")
            raise VolumeError(f'volume "{volume["name"]}" is of the kind {kind}, which the node agent does not have')
        return place

    async def _projected(self, place: Path, source: JsonObject, mode: int | None) -> None:
        if "serviceAccountToken" in source:
            await self._token(place, source["serviceAccountToken"])
        elif "configMap" in source:
            part = source["configMap"]
            await self._files(place, CONFIG_MAPS, part["name"], part, default_mode=mode)
        elif "secret" in source:
            await self._files(place, SECRETS, source["secret"]["name"], source["secret"], default_mode=mode)
        elif "downwardAPI" in source:
            self._downward(place, source["downwardAPI"].get("items") or [])
        else:
            raise VolumeError(f"projected source {next(iter(source), 'nothing')} is one the node agent does not have")

    async def _files(
        self, place: Path, resource: Resource, name: str, source: JsonObject, *, default_mode: int | None
    ) -> None:
        optional = bool(source.get("optional"))
        data = await self._reader.data(resource, name, optional=optional)
        if data is None:
            return
        items = source.get("items") or [{"key": key, "path": key} for key in data]
        for item in items:
            if item["key"] not in data:
                if optional:
                    continue
                raise VolumeError(f'{resource.kind.lower()} "{name}" has no key "{item["key"]}"')
            mode = item.get("mode") or default_mode or 0o644
            _write_bytes(_inside(place, item["path"]), data[item["key"]], mode)

    def _downward(self, place: Path, items: list[JsonObject]) -> None:
        for item in items:
            value = field_value(self._pod, item["fieldRef"]["fieldPath"], self._pod.get("status", {}))
            _write_bytes(_inside(place, item["path"]), (value or "").encode(), item.get("mode") or 0o644)

    async def _token(self, place: Path, source: JsonObject) -> None:
        token = await self.service_account_token(source.get("audience"))
        write_atomically(_inside(place, source["path"]), token, 0o600)

    async def service_account_token(self, audience: str | None = None) -> str:
        """Return a token of the pod's ServiceAccount, bound to the pod and valid for a day."""
        metadata = self._pod["metadata"]
        return await self._client.request_token(
            self._pod["spec"].get("serviceAccountName", "default"),
            metadata["namespace"],
            expires_s=_TOKEN_S,
            audiences=[audience] if audience else [],
            pod_name=metadata["name"],
            pod_uid=metadata["uid"],
        )

    def _own_place(self, name: str) -> Path:
        return self._directory / "volumes" / name


def has_service_account_token(pod: JsonObject) -> bool:
    """Tell whether a pod is given its ServiceAccount's token at all."""
    return any(
        "serviceAccountToken" in source
        for volume in pod["spec"].get("volumes") or []
        for source in volume.get("projected", {}).get("sources") or []
    )


def field_value(pod: JsonObject, path: str, status: Mapping[str, Any]) -> str | None:
    """Return what a downward API fieldPath stands for; None when the node agent does not know it."""
    metadata, spec = pod["metadata"], pod["spec"]
    for kind in ("labels", "annotations"):
        if path.startswith(f"metadata.{kind}['") and path.endswith("']"):
            return str((metadata.get(kind) or {}).get(path[len(f"metadata.{kind}['") : -2], ""))
        if path == f"metadata.{kind}":
            return "\n".join(f'{key}="{value}"' for key, value in sorted((metadata.get(kind) or {}).items()))
    values = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.podIP": status.get("podIP", ""),
        "status.podIPs": status.get("podIP", ""),
        "status.hostIP": status.get("hostIP", ""),
        "status.hostIPs": status.get("hostIP", ""),
    }
    return values.get(path)


def remove_directory(directory: Path) -> None:
    """Remove a pod's own directory; host paths lie elsewhere and stay."""
    shutil.rmtree(directory, ignore_errors=True)


def _host_path(machine: Machine, source: JsonObject) -> Path:
    path, kind = machine.host_path(source["path"]), source.get("type") or ""
    if kind in ("", "DirectoryOrCreate"):
        if not path.exists():
            path.mkdir(parents=True)
    elif kind == "FileOrCreate":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    elif kind == "Directory" and not path.is_dir():
        raise VolumeError(f"hostPath type check failed: {source['path']} is not a directory")
    elif kind == "File" and not path.is_file():
        raise VolumeError(f"hostPath type check failed: {source['path']} is not a file")
    return path


def _inside(place: Path, path: str) -> Path:
    target = place / path
    if ".." in Path(path).parts or Path(path).is_absolute():
        raise VolumeError(f"path {path!r} leaves its volume")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _write_bytes(path: Path, content: bytes, mode: int) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    path.chmod(mode)
