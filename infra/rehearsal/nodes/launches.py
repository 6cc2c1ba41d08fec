"""From a container as written in a pod to the process that stands in for it."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from infra.rehearsal.kubeclient import JsonObject, KubeClient
from infra.rehearsal.kubeconnection import Connection
from infra.rehearsal.kuberesources import CONFIG_MAPS, SECRETS
from infra.rehearsal.nodes.commands import TERMINATION_LOG_PATH, PathMap, resolve_argv, resolve_environment
from infra.rehearsal.nodes.containers import Launch
from infra.rehearsal.nodes.ledger import OWNER_VARIABLE, write_atomically
from infra.rehearsal.nodes.machines import Machine
from infra.rehearsal.nodes.volumes import ObjectReader, PodVolumes, VolumeError, field_value
from infra.rehearsal.processes import SITE_ID_VARIABLE

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ConfigError(Exception):
    """A container cannot be started as written; `reason` is what its waiting state says."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class SitePaths:
    """The files of a rehearsal site that the agent works with."""

    site: Path

    @property
    def nodes(self) -> Path:
        """Return the directory that holds one directory a node."""
        return self.site / "nodes"

    @property
    def hosts(self) -> Path:
        """Return the name-to-address file that stands in for the cluster's DNS."""
        return self.nodes / "hosts.json"

    @property
    def inject(self) -> Path:
        """Return the directory of active injections."""
        return self.site / "inject"


@dataclass(frozen=True)
class PodPaths:
    """The directories of one pod on its node."""

    own: Path
    logs: Path

    @classmethod
    def of(cls, pod: JsonObject, machine: Machine) -> PodPaths:
        """Return the directories of a pod."""
        metadata = pod["metadata"]
        name = f"{metadata['namespace']}_{metadata['name']}_{metadata['uid']}"
        return cls(machine.directory / "pods" / metadata["uid"], machine.directory / "logs" / name)

    @property
    def kubeconfig(self) -> Path:
        """Return where the pod's own kubeconfig lies."""
        return self.own / "kubeconfig"

    def work(self, container: str) -> Path:
        """Return a container's working directory."""
        return self.own / "containers" / container / "work"

    def termination_log(self, container: str) -> Path:
        """Return where a container leaves its last words."""
        return self.own / "containers" / container / "termination-log"

    def log(self, container: str, run: int) -> Path:
        """Return the log of one run of a container."""
        return self.logs / container / f"{run}.log"


class LaunchMaker:
    """Makes the launches of one pod's containers."""

    def __init__(self, client: KubeClient, pod: JsonObject, machine: Machine, site: SitePaths) -> None:
        self._connection = client.connection
        self._pod = pod
        self._machine = machine
        self._site = site
        self._reader = ObjectReader(client, pod["metadata"]["namespace"])
        self.paths = PodPaths.of(pod, machine)

    async def make(self, container: JsonObject, volumes: PodVolumes, pod_ip: str, run: int) -> Launch:
        """Return the launch of one run; raises ConfigError for what cannot be started as written."""
        name = container["name"]
        mounts = volumes.mounts(container)
        message_path = container.get("terminationMessagePath") or TERMINATION_LOG_PATH
        termination_log = self.paths.termination_log(name)
        termination_log.parent.mkdir(parents=True, exist_ok=True)
        termination_log.write_bytes(b"")
        path_map = PathMap(mounts | {message_path: str(termination_log), TERMINATION_LOG_PATH: str(termination_log)})
        declared = resolve_environment([entry async for entry in self._declared(container, pod_ip)])
        base = self._base(name, mounts, pod_ip)
        command = container.get("command") or []
        if not command:
            raise ConfigError("CreateContainerError", "no command is given, and the rehearsal has no images to ask")
        argv = resolve_argv(command, container.get("args") or [], base | declared, path_map, python=sys.executable)
        written = {key: path_map.rewrite(value) for key, value in declared.items()}
        return Launch(argv, base | written, self._directory(container, path_map), self.paths.log(name, run))

    def command(self, container: JsonObject, command: list[str], volumes: PodVolumes, env: dict[str, str]) -> list[str]:
        """Return the argument vector of a probe or hook that runs inside a container."""
        return resolve_argv(command, [], env, PathMap(volumes.mounts(container)), python=sys.executable)

    def write_kubeconfig(self, token: str) -> None:
        """Write the kubeconfig of the pod's own ServiceAccount, readable by its owner only."""
        write_atomically(self.paths.kubeconfig, kubeconfig_text(self._connection, token, self._namespace), 0o600)

    @property
    def _namespace(self) -> str:
        return str(self._pod["metadata"]["namespace"])

    def _directory(self, container: JsonObject, path_map: PathMap) -> Path:
        wanted = container.get("workingDir")
        if wanted and path_map.rewrite(wanted) != wanted:
            return Path(path_map.rewrite(wanted))
        return self.paths.work(container["name"])

    def _base(self, name: str, mounts: dict[str, str], pod_ip: str) -> dict[str, str]:
        work = self.paths.work(name)
        temporary = Path(mounts.get("/tmp", work.parent / "tmp"))
        temporary.mkdir(parents=True, exist_ok=True)
        metadata = self._pod["metadata"]
        host, _, port = self._connection.server.split("//", 1)[1].partition(":")
        base = {
            "PATH": f"{Path(sys.executable).parent}:{_SYSTEM_PATH}",
            "HOME": str(work),
            "TMPDIR": str(temporary),
            "LANG": "C.UTF-8",
            "HOSTNAME": self._pod["spec"].get("hostname") or metadata["name"],
            # Logs must be readable while a program runs; images of Python programs set this too.
            "PYTHONUNBUFFERED": "1",
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT": port or "443",
            "POD_NAME": metadata["name"],
            "POD_NAMESPACE": metadata["namespace"],
            "POD_IP": pod_ip,
            "NODE_NAME": self._machine.name,
            "K2_REHEARSAL_HOSTS": str(self._site.hosts),
            "K2_REHEARSAL_INJECT": str(self._site.inject),
            "K2_TERMINATION_LOG": str(self.paths.termination_log(name)),
            OWNER_VARIABLE: str(self._site.nodes),
        }
        if SITE_ID_VARIABLE in os.environ:
            # Lets the site find what a container left behind, should the agent be killed.
            base[SITE_ID_VARIABLE] = os.environ[SITE_ID_VARIABLE]
        if self.paths.kubeconfig.exists():
            base["KUBECONFIG"] = str(self.paths.kubeconfig)
        return base

    async def _declared(self, container: JsonObject, pod_ip: str) -> AsyncIterator[tuple[str, str | None]]:
        for source in container.get("envFrom") or []:
            resource = CONFIG_MAPS if "configMapRef" in source else SECRETS
            reference = source.get("configMapRef") or source.get("secretRef") or {}
            data = await self._data(resource_name=reference["name"], secret=resource is SECRETS, reference=reference)
            for key, value in sorted((data or {}).items()):
                # What comes from an object is taken literally: no $(NAME) is expanded in it.
                yield source.get("prefix", "") + key, value.decode(errors="replace").replace("$", "$$")
        for entry in container.get("env") or []:
            yield entry["name"], await self._value(entry, pod_ip)

    async def _value(self, entry: JsonObject, pod_ip: str) -> str | None:
        source = entry.get("valueFrom")
        if not source:
            return str(entry.get("value") or "")
        if "fieldRef" in source:
            status = {"podIP": pod_ip, "hostIP": self._machine.address}
            value = field_value(self._pod, source["fieldRef"]["fieldPath"], status)
        elif "configMapKeyRef" in source or "secretKeyRef" in source:
            value = await self._key(source)
            if value is None:
                return None
        else:
            value = None
        if value is None:
            raise ConfigError("CreateContainerConfigError", f"env {entry['name']}: {source} is not supported here")
        return value.replace("$", "$$")

    async def _key(self, source: JsonObject) -> str | None:
        secret = "secretKeyRef" in source
        reference = source["secretKeyRef" if secret else "configMapKeyRef"]
        data = await self._data(resource_name=reference["name"], secret=secret, reference=reference)
        if data is not None and reference["key"] in data:
            return data[reference["key"]].decode(errors="replace")
        if reference.get("optional"):
            return None
        kind = "Secret" if secret else "ConfigMap"
        message = f"couldn't find key {reference['key']} in {kind} {self._namespace}/{reference['name']}"
        raise ConfigError("CreateContainerConfigError", message)

    async def _data(self, *, resource_name: str, secret: bool, reference: JsonObject) -> dict[str, bytes] | None:
        resource = SECRETS if secret else CONFIG_MAPS
        try:
            return await self._reader.data(resource, resource_name, optional=bool(reference.get("optional")))
        except VolumeError as error:
            raise ConfigError("CreateContainerConfigError", str(error)) from error


def kubeconfig_text(connection: Connection, token: str, namespace: str) -> str:
    """Return a kubeconfig for a token, with the CA inside so that it stands alone."""
    cluster: JsonObject = {"server": connection.server}
    if connection.ca_pem:
        encoded = base64.b64encode(connection.ca_pem.encode()).decode()
        cluster["certificate-authority-data"] = encoded
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "rehearsal", "cluster": cluster}],
            "users": [{"name": "pod", "user": {"token": token}}],
            "contexts": [{"name": "pod", "context": {"cluster": "rehearsal", "user": "pod", "namespace": namespace}}],
            "current-context": "pod",
        }
    )
