"""The Node objects of the site: registration, leases and the heartbeat."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import aiohttp

from infra.rehearsal.kubeclient import EventType, JsonObject, KubeClient, KubeError, PatchKind
from infra.rehearsal.kuberesources import LEASES, NODES
from infra.rehearsal.nodes.ledger import write_atomically

KUBELET_VERSION = "v1.36.3-rehearsal"
POOL_LABEL = "k2-release.io/pool"
LOG_PORT = 10250

_LEASE_NAMESPACE = "kube-node-lease"
_LEASE_DURATION_S = 10
_RENEW_S = 3.3
_STATUS_S = 30.0
_SIMULATED_IMAGE_BYTES = 12_000_000_000

log = logging.getLogger(__name__)


def timestamp(moment: datetime | None = None) -> str:
    """Return a moment (now by default) as Kubernetes writes it, to the second."""
    return (moment or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class MachineSpec:
    """What every node of the site claims to have."""

    gpus: int = 8
    cpu: int = 192
    memory_gib: int = 2048
    ephemeral_storage_gib: int = 3500
    pods: int = 110
    pool: str = "h200"

    def capacity(self) -> dict[str, str]:
        """Return the Node's capacity; a GPU count of 0 makes a node without the resource."""
        capacity = {
            "cpu": str(self.cpu),
            "memory": f"{self.memory_gib}Gi",
            "ephemeral-storage": f"{self.ephemeral_storage_gib}Gi",
            "pods": str(self.pods),
        }
        return capacity | ({"nvidia.com/gpu": str(self.gpus)} if self.gpus else {})


@dataclass
class Machine:
    """One node: its name, its addresses, its directory, and whether it is lost at the moment."""

    name: str
    index: int
    subnet: str
    directory: Path
    spec: MachineSpec
    lost: bool = False
    images: dict[str, str] = field(default_factory=dict)
    ready_since: str = field(default_factory=timestamp)

    @property
    def address(self) -> str:
        """Return the node's InternalIP."""
        return f"{self.subnet}.0.{self.index}"

    @property
    def pod_prefix(self) -> str:
        """Return the first three bytes of the node's pod addresses."""
        return f"{self.subnet}.{self.index + 10}"

    def host_path(self, path: str) -> Path:
        """Return where a path of the node's file system lies on this machine."""
        return self.directory / path.lstrip("/")

    def come_back(self) -> None:
        """Be found again after having been lost."""
        self.lost = False
        self.ready_since = timestamp()

    def load_images(self) -> None:
        """Recall the images that the node has had before."""
        path = self.directory / "images.json"
        if path.exists():
            self.images.update(json.loads(path.read_text()))

    def add_image(self, image: str, image_id: str) -> bool:
        """Note that an image is on the node; True when it was not."""
        if self.images.get(image) == image_id:
            return False
        self.images[image] = image_id
        write_atomically(self.directory / "images.json", json.dumps(self.images, indent=1))
        return True


def node_object(machine: Machine) -> JsonObject:
    """Return the Node to register, status included."""
    labels = {
        "kubernetes.io/hostname": machine.name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        POOL_LABEL: machine.spec.pool,
    }
    return {"metadata": {"name": machine.name, "labels": labels}, "spec": {}, "status": node_status(machine)}


def node_status(machine: Machine) -> JsonObject:
    """Return the status of a healthy node."""
    now = timestamp()
    capacity = machine.spec.capacity()
    pressures = [
        _condition(kind, "False", f"KubeletHasSufficient{kind.removesuffix('Pressure')}", now, machine.ready_since)
        for kind in ("MemoryPressure", "DiskPressure", "PIDPressure")
    ]
    return {
        "capacity": capacity,
        "allocatable": capacity,
        "addresses": [
            {"type": "InternalIP", "address": machine.address},
            {"type": "Hostname", "address": machine.name},
        ],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": LOG_PORT}},
        "conditions": [*pressures, _condition("Ready", "True", "KubeletReady", now, machine.ready_since)],
        "images": [
            {"names": sorted({image_id, image}), "sizeBytes": _SIMULATED_IMAGE_BYTES}
            for image, image_id in sorted(machine.images.items())
        ],
        "nodeInfo": _node_info(machine),
    }


class MachinePool:
    """Keeps the site's Node objects and leases alive; a lost machine falls silent until it is found again."""

    def __init__(self, client: KubeClient, machines: Iterable[Machine]) -> None:
        self._client = client
        self.machines = {machine.name: machine for machine in machines}
        self._status_wanted = {name: asyncio.Event() for name in self.machines}

    def report(self, name: str) -> None:
        """Have a node's status written soon."""
        self._status_wanted[name].set()

    async def run(self) -> None:
        """Register the nodes and keep them alive until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            for machine in self.machines.values():
                group.create_task(self._renew_forever(machine))
                group.create_task(self._report_forever(machine))

    async def _renew_forever(self, machine: Machine) -> None:
        # Spread over the interval: 32 renewals in one burst would stall the event loop and the API server.
        pause_s = _RENEW_S * machine.index / (len(self.machines) + 1)
        while True:
            if not machine.lost:
                await _tolerate(f"lease of {machine.name}", self._renew(machine))
            await asyncio.sleep(pause_s)
            pause_s = _RENEW_S

    async def _renew(self, machine: Machine) -> None:
        renewed = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {
            "holderIdentity": machine.name,
            "leaseDurationSeconds": _LEASE_DURATION_S,
            "renewTime": renewed,
        }
        try:
            await self._client.patch(LEASES, machine.name, {"spec": spec}, _LEASE_NAMESPACE)
        except KubeError as error:
            if not error.not_found:
                raise
            lease = {"metadata": {"name": machine.name, "namespace": _LEASE_NAMESPACE}, "spec": spec}
            await self._client.create(LEASES, lease)

    async def _report_forever(self, machine: Machine) -> None:
        wanted = self._status_wanted[machine.name]
        registered = False
        while True:
            if not machine.lost:
                registered = await _tolerate(f"status of {machine.name}", self._report(machine, register=True))
            try:
                await asyncio.wait_for(wanted.wait(), _STATUS_S if registered else 1.0)
            except TimeoutError:
                continue
            # Several reasons to report at once (new images, say) make one report.
            await asyncio.sleep(0.2)
            wanted.clear()

    async def _report(self, machine: Machine, *, register: bool) -> None:
        body = {"status": node_status(machine)}
        try:
            await self._client.patch(NODES, machine.name, body, kind=PatchKind.STRATEGIC, subresource="status")
        except KubeError as error:
            if not (error.not_found and register):
                raise
            await self._client.create(NODES, node_object(machine))
            log.info("registered %s at %s", machine.name, machine.address)

    async def _watch(self) -> None:
        """Report at once when a living node is held to be dead, or was deleted; restore the labels that are ours."""
        async for event in self._client.watch(NODES):
            if event.type is EventType.SYNCED:
                continue
            machine = self.machines.get(event.object["metadata"]["name"])
            if machine is None or machine.lost:
                continue
            if event.type is EventType.DELETED or _ready_status(event.object) != "True":
                machine.ready_since = timestamp()
                self.report(machine.name)
            elif POOL_LABEL not in (event.object["metadata"].get("labels") or {}):
                labels = node_object(machine)["metadata"]["labels"]
                body = {"metadata": {"labels": labels}}
                await _tolerate(f"labels of {machine.name}", self._client.patch(NODES, machine.name, body))


def _ready_status(node: JsonObject) -> str:
    conditions = node.get("status", {}).get("conditions") or []
    return next((condition["status"] for condition in conditions if condition["type"] == "Ready"), "Unknown")


async def _tolerate(what: str, action: Awaitable[object]) -> bool:
    """Await an API call that will be made again anyway; tell whether it succeeded."""
    try:
        await action
    except (KubeError, aiohttp.ClientError, TimeoutError) as error:
        log.warning("%s: %s", what, error or type(error).__name__)
        return False
    return True


def _condition(kind: str, status: str, reason: str, now: str, since: str) -> JsonObject:
    message = "the node agent of the rehearsal site is posting ready status" if kind == "Ready" else ""
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastHeartbeatTime": now,
        "lastTransitionTime": since,
    }


def _node_info(machine: Machine) -> JsonObject:
    return {
        "kubeletVersion": KUBELET_VERSION,
        "kubeProxyVersion": "",
        "containerRuntimeVersion": "process://1",
        "osImage": "local processes",
        "operatingSystem": "linux",
        "architecture": "amd64",
        "kernelVersion": platform.release(),
        "machineID": machine.name,
        "systemUUID": machine.name,
        "bootID": f"{machine.name}-{os.getpid()}",
    }
