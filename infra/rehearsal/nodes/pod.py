"""One pod on one node: from its binding to its last status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp

from infra.rehearsal.kubeclient import JsonObject, KubeClient, KubeError, PatchKind
from infra.rehearsal.kuberesources import PODS
from infra.rehearsal.nodes.containers import ContainerProcess, Launch
from infra.rehearsal.nodes.launches import ConfigError, LaunchMaker, SitePaths
from infra.rehearsal.nodes.ledger import ProcessLedger, ProcessRecord, start_ticks
from infra.rehearsal.nodes.lifecycle import ContainerLifecycle, RestartRule
from infra.rehearsal.nodes.machines import Machine, timestamp
from infra.rehearsal.nodes.probes import ProbeTarget
from infra.rehearsal.nodes.recall import recall
from infra.rehearsal.nodes.reports import EventRecorder
from infra.rehearsal.nodes.status import ContainerState, PodState, conditions_differ, image_id, pod_status
from infra.rehearsal.nodes.volumes import (
    PodVolumes,
    VolumeError,
    VolumeMaker,
    has_service_account_token,
    remove_directory,
)

_STATUS_DEBOUNCE_S = 0.05
_RETRY_S = 2.0
_TOKEN_REFRESH_S = 18 * 3600
_TERMINAL = ("Succeeded", "Failed")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentServices:
    """What all pods of an agent share."""

    client: KubeClient
    site: SitePaths
    ledger: ProcessLedger
    events: EventRecorder
    probe_session: aiohttp.ClientSession
    hosts_changed: Callable[[], None]
    image_added: Callable[[str], None]


class PodRunner:
    """Runs one pod. It owns the pod's processes and directories, and it alone writes the pod's status."""

    def __init__(self, pod: JsonObject, machine: Machine, address: str, services: AgentServices) -> None:
        self.pod = pod
        self.machine = machine
        self.stopping = asyncio.Event()
        self.state = PodState(host_ip=machine.address, restart_policy=pod["spec"].get("restartPolicy", "Always"))
        self._address = address
        self._services = services
        self._launches = LaunchMaker(services.client, pod, machine, services.site)
        self._volume_maker = VolumeMaker(services.client, pod, machine, self._launches.paths.own)
        self._volumes = PodVolumes({})
        self._dirty = asyncio.Event()
        self._muted = False
        self._written: JsonObject = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._main: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._init, self._mains = self._lifecycles()

    @property
    def uid(self) -> str:
        """Return the pod's uid."""
        return str(self.pod["metadata"]["uid"])

    @property
    def title(self) -> str:
        """Return namespace/name, for messages."""
        return f"{self.pod['metadata']['namespace']}/{self.pod['metadata']['name']}"

    @property
    def ready(self) -> bool:
        """Tell whether every container is ready."""
        return self.state.phase == "Running" and all(container.ready for container in self.state.main)

    def start(self) -> None:
        """Begin to run the pod, or, when it is over or to be deleted already, only see to its end."""
        if self.pod.get("status", {}).get("phase") not in _TERMINAL and not self._deletion_requested():
            self.state.pod_ip = self._address
            self.state.start_time = self.pod.get("status", {}).get("startTime") or timestamp()
            recall(self._init, self._mains, self.pod.get("status", {}))
            self._main = asyncio.create_task(self._guarded())
            self._tasks = [asyncio.create_task(self._write_forever()), asyncio.create_task(self._refresh_tokens())]
            self._services.hosts_changed()
        if self._deletion_requested():
            self._end()

    def update(self, pod: JsonObject) -> None:
        """Take a newer version of the pod; a deletion that was asked for is carried out."""
        if int(pod["metadata"]["resourceVersion"]) < int(self.pod["metadata"]["resourceVersion"]):
            return
        self.pod = pod
        if self._written and conditions_differ(pod, self._written):
            # The controller manager marks the pods of a silent node as not ready; it is for us to take that back.
            self._written = {}
            self.changed()
        elif pod["spec"].get("readinessGates"):
            self.changed()
        if self._deletion_requested():
            self._end()

    async def kill(self) -> None:
        """End everything at once and write nothing more: the pod is gone, or its node is lost."""
        self._muted = True
        self.stopping.set()
        for lifecycle in [*self._init, *self._mains]:
            lifecycle.kill()
        await self._settle()

    async def stop(self, grace_s: float) -> None:
        """End the processes in good order and write nothing more: the agent stops, the pod stays."""
        self._muted = True
        self.stopping.set()
        await asyncio.gather(*(lifecycle.stop(grace_s) for lifecycle in [*self._mains, *self._init]))
        await self._settle()

    def clean(self) -> None:
        """Remove the pod's directories; logs stay for whoever asks what happened."""
        remove_directory(self._launches.paths.own)
        self._services.events.forget(self.uid)

    def log_run(self, container: str, *, previous: bool) -> int | None:
        """Return which run's log is the container's current (or previous) one; None for an unknown container."""
        for state in [*self.state.init, *self.state.main]:
            if state.name == container:
                run = state.restart_count
                if "waiting" in state.state and run and not self._launches.paths.log(container, run).exists():
                    run -= 1
                return run - 1 if previous else run
        return None

    def container_running(self, container: str) -> bool:
        """Tell whether a container's process runs at the moment."""
        return any(state.running for state in [*self.state.init, *self.state.main] if state.name == container)

    # -- what containers need from their pod ------------------------------------------------------------------

    def changed(self) -> None:
        """Have the status written soon."""
        self._dirty.set()
        self._services.hosts_changed()

    async def launch(self, container: JsonObject, run: int) -> Launch:
        """Return what to start for one run of a container."""
        image = container.get("image", "")
        if self.machine.add_image(image, image_id(image)):
            self._services.image_added(self.machine.name)
        try:
            return await self._launches.make(container, self._volumes, self.state.pod_ip, run)
        except (KubeError, aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConfigError("CreateContainerError", str(error) or type(error).__name__) from error

    def target(self, container: JsonObject, launch: Launch) -> ProbeTarget:
        """Return what the container's probes are aimed at."""
        environment = dict(launch.environment)
        return ProbeTarget(
            pod_ip=self.state.pod_ip,
            ports={port["name"]: port["containerPort"] for port in container.get("ports") or [] if "name" in port},
            session=self._services.probe_session,
            command=lambda words: self._launches.command(container, words, self._volumes, environment),
            environment=environment,
            directory=launch.directory,
        )

    def process_started(self, container: str, process: ContainerProcess, launch: Launch) -> None:
        """Enter a process into the ledger."""
        metadata = self.pod["metadata"]
        self._services.ledger.add(
            ProcessRecord(
                node=self.machine.name,
                namespace=metadata["namespace"],
                pod=metadata["name"],
                pod_uid=self.uid,
                container=container,
                pid=process.pid,
                start_ticks=start_ticks(process.pid),
                executable=launch.argv[0],
                argv=tuple(launch.argv),
                log_path=str(launch.log_path),
                started_at=timestamp(),
            )
        )

    def process_ended(self, process: ContainerProcess) -> None:
        """Strike a process out of the ledger."""
        self._services.ledger.remove(process.pid)

    def event(self, reason: str, message: str, *, warning: bool = True) -> None:
        """Record a Kubernetes event about the pod."""
        if not self._muted:
            self._services.events.record(self.pod, self.machine.name, reason, message, warning=warning)

    # -- the life of the pod ----------------------------------------------------------------------------------

    async def _guarded(self) -> None:
        try:
            await self._run()
        except Exception:
            # A fault in one pod must not take the other pods of all nodes with it.
            log.exception("pod %s: the node agent failed", self.title)
            self.state.forced_phase = "Failed"
            self.state.reason, self.state.message = "NodeAgentError", "see the node agent's log"
            self.changed()

    async def _run(self) -> None:
        deadline_s = self.pod["spec"].get("activeDeadlineSeconds")
        expiry = asyncio.get_running_loop().call_later(deadline_s, self._expire) if deadline_s else None
        await self._phases()
        if expiry is not None:
            expiry.cancel()
        self.changed()

    def _expire(self) -> None:
        self.state.forced_phase, self.state.reason = "Failed", "DeadlineExceeded"
        self.state.message = "Pod was active on the node longer than the specified deadline"
        self.stopping.set()
        self._tasks.append(asyncio.create_task(self._stop_containers(self._grace_s())))

    async def _phases(self) -> None:
        over = all(lifecycle.state.exit_code is not None for lifecycle in self._mains)
        if not over and (not await self._mount() or not await self._initialize()):
            return
        self.state.initialized = True
        self.changed()
        waiting = [lifecycle for lifecycle in self._mains if lifecycle.state.exit_code is None]
        for lifecycle in waiting:
            lifecycle.state.wait("ContainerCreating")
        await asyncio.gather(*(lifecycle.run() for lifecycle in waiting))
        if not self.stopping.is_set():
            self.stopping.set()
            await asyncio.gather(*(lifecycle.stop(self._grace_s()) for lifecycle in self._init))

    async def _mount(self) -> bool:
        self.changed()
        while not self.stopping.is_set():
            try:
                self._volumes = await self._volume_maker.prepare()
                await self._write_kubeconfig()
            except (VolumeError, KubeError, aiohttp.ClientError, TimeoutError, OSError) as error:
                reason = str(error) or type(error).__name__
                self.event("FailedMount", f"MountVolume.SetUp failed: {reason}")
                for container in [*self.state.init, *self.state.main]:
                    container.wait("PodInitializing" if self.state.init else "ContainerCreating", reason)
                self.changed()
                await self._pause(_RETRY_S)
                continue
            return True
        return False

    async def _initialize(self) -> bool:
        for lifecycle in self._init:
            if lifecycle.state.sidecar:
                task = asyncio.create_task(_discard(lifecycle.run()))
                self._tasks.append(task)
                await lifecycle.settled.wait()
            elif await lifecycle.run() != 0:
                return False
            if self.stopping.is_set():
                return False
        return True

    def _end(self) -> None:
        if self._ending is None:
            self._ending = asyncio.create_task(self._terminate())

    async def _terminate(self) -> None:
        grace_s = float(self.pod["metadata"].get("deletionGracePeriodSeconds") or 0)
        self.stopping.set()
        self._services.hosts_changed()
        await self._stop_containers(grace_s)
        if self._main is not None:
            await self._main
            if self.state.phase not in _TERMINAL:
                clean = all(container.exit_code == 0 for container in self.state.main)
                self.state.forced_phase = "Succeeded" if clean else "Failed"
            await self._write()
        while not self._muted and not await self._delete():
            await asyncio.sleep(_RETRY_S)

    async def _stop_containers(self, grace_s: float) -> None:
        await asyncio.gather(*(lifecycle.stop(grace_s) for lifecycle in self._mains))
        await asyncio.gather(*(lifecycle.stop(grace_s) for lifecycle in self._init))

    async def _delete(self) -> bool:
        metadata = self.pod["metadata"]
        try:
            await self._services.client.delete(
                PODS, metadata["name"], metadata["namespace"], grace_s=0, uid=metadata["uid"]
            )
        except (KubeError, aiohttp.ClientError, TimeoutError) as error:
            log.warning("pod %s: %s", self.title, error or type(error).__name__)
            return False
        return True

    async def _settle(self) -> None:
        if self._main is not None:
            await asyncio.gather(self._main, return_exceptions=True)
        for task in [*self._tasks, *([self._ending] if self._ending else [])]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._services.hosts_changed()

    # -- status -----------------------------------------------------------------------------------------------

    async def _write_forever(self) -> None:
        while True:
            await self._dirty.wait()
            await asyncio.sleep(_STATUS_DEBOUNCE_S)
            self._dirty.clear()
            if not await self._write():
                self._dirty.set()
                await asyncio.sleep(_RETRY_S)

    async def _write(self) -> bool:
        """Write the status if it differs from the last one; False when it must be tried again."""
        status = pod_status(self.pod, self.state, timestamp())
        if self._muted or status == self._written:
            return True
        metadata = self.pod["metadata"]
        body = {"metadata": {"uid": metadata["uid"]}, "status": status}
        try:
            stored = await self._services.client.patch(
                PODS,
                metadata["name"],
                body,
                metadata["namespace"],
                kind=PatchKind.STRATEGIC,
                subresource="status",
            )
        except KubeError as error:
            if error.not_found or error.conflict:
                return True
            log.warning("status of pod %s: %s", self.title, error)
            return False
        except (aiohttp.ClientError, TimeoutError) as error:
            log.warning("status of pod %s: %s", self.title, error or type(error).__name__)
            return False
        self._written = status
        self.update(stored)
        return True

    async def _refresh_tokens(self) -> None:
        while True:
            await asyncio.sleep(_TOKEN_REFRESH_S)
            try:
                await self._volume_maker.refresh_tokens()
                await self._write_kubeconfig()
            except (KubeError, aiohttp.ClientError, TimeoutError) as error:
                log.warning("tokens of pod %s: %s", self.title, error or type(error).__name__)

    async def _write_kubeconfig(self) -> None:
        if has_service_account_token(self.pod):
            self._launches.write_kubeconfig(await self._volume_maker.service_account_token())

    # -- construction -----------------------------------------------------------------------------------------

    def _lifecycles(self) -> tuple[list[ContainerLifecycle], list[ContainerLifecycle]]:
        made: tuple[list[ContainerLifecycle], list[ContainerLifecycle]] = ([], [])
        for init, containers in ((True, self.pod["spec"].get("initContainers") or []), (False, self._main_specs())):
            for container in containers:
                sidecar = init and container.get("restartPolicy") == "Always"
                state = ContainerState(container["name"], container.get("image", ""), sidecar=sidecar)
                rule = RestartRule.of(self.state.restart_policy, init=init, sidecar=sidecar)
                probed = not init or sidecar
                (self.state.init if init else self.state.main).append(state)
                made[0 if init else 1].append(ContainerLifecycle(container, state, rule, self, probed=probed))
        return made

    def _main_specs(self) -> list[JsonObject]:
        return list(self.pod["spec"]["containers"])

    def _deletion_requested(self) -> bool:
        return "deletionTimestamp" in self.pod["metadata"]

    def _grace_s(self) -> float:
        grace = self.pod["spec"].get("terminationGracePeriodSeconds")
        return 30.0 if grace is None else float(grace)

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self.stopping.wait(), seconds)
        except TimeoutError:
            return


async def _discard(run: Awaitable[object]) -> None:
    await run
