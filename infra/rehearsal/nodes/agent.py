"""All nodes of the site in one process: it binds the API server's pods to local processes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import ssl
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import aiohttp

from infra.rehearsal.certificates import Authority
from infra.rehearsal.kubeclient import EventType, JsonObject, KubeClient, WatchEvent
from infra.rehearsal.kuberesources import PODS, SERVICES
from infra.rehearsal.nodes.hosts import HostsFile, PodHost, host_table
from infra.rehearsal.nodes.launches import PodPaths, SitePaths
from infra.rehearsal.nodes.ledger import ProcessLedger, kill_leftovers
from infra.rehearsal.nodes.logs import LogServer, LogSource
from infra.rehearsal.nodes.machines import Machine, MachinePool
from infra.rehearsal.nodes.pod import AgentServices, PodRunner
from infra.rehearsal.nodes.reports import EventRecorder
from infra.rehearsal.nodes.volumes import remove_directory

_INJECT_POLL_S = 0.5
_STOP_GRACE_S = 3.0
_FIRST_POD, _LAST_POD = 2, 250

log = logging.getLogger(__name__)


class AgentError(Exception):
    """The agent cannot start; the message says why."""


class AddressPool:
    """Hands out the pod addresses of one node, round robin: a fresh pod must not get the address of one just gone."""

    def __init__(self, machine: Machine) -> None:
        self._prefix = machine.pod_prefix
        self._used: set[str] = set()
        self._next = _FIRST_POD

    def take(self, wanted: str | None = None) -> str:
        """Return a free address: the wanted one if it is this node's and free, else the next."""
        if wanted and wanted.startswith(self._prefix + ".") and wanted not in self._used:
            self._used.add(wanted)
            return wanted
        for _ in range(_FIRST_POD, _LAST_POD + 1):
            address = f"{self._prefix}.{self._next}"
            self._next = self._next + 1 if self._next < _LAST_POD else _FIRST_POD
            if address not in self._used:
                self._used.add(address)
                return address
        raise AgentError(f"no pod address is free under {self._prefix}")

    def release(self, address: str) -> None:
        """Take an address back."""
        self._used.discard(address)


class NodeAgent:
    """Registers the machines, runs their pods, serves their logs, and obeys the injections of lost nodes."""

    def __init__(
        self,
        client: KubeClient,
        site: SitePaths,
        machines: Sequence[Machine],
        *,
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        self._client = client
        self._site = site
        self._machines = {machine.name: machine for machine in machines}
        self._pool = MachinePool(client, machines)
        self._addresses = {machine.name: AddressPool(machine) for machine in machines}
        self._certificate = certificate
        self._ledger = ProcessLedger(site.nodes)
        self._hosts = HostsFile(site.hosts, self._host_table)
        self._pods: dict[str, JsonObject] = {}
        self._services_by_uid: dict[str, JsonObject] = {}
        self._runners: dict[str, PodRunner] = {}
        self._burials: set[asyncio.Task[None]] = set()
        self._shared: AgentServices | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Run until told to stop; then end every process and return."""
        self._site.nodes.mkdir(parents=True, exist_ok=True)
        with _only_agent(self._site.nodes):
            killed = kill_leftovers(self._site.nodes)
            if killed:
                log.info("killed %d processes that an earlier agent had left", len(killed))
            for machine in self._machines.values():
                machine.directory.mkdir(parents=True, exist_ok=True)
                machine.load_images()
            self._ledger.flush()
            self._hosts.flush()
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=128, force_close=True)) as probes:
                await self._serve(probes, stop)

    async def _serve(self, probes: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        self._shared = AgentServices(
            client=self._client,
            site=self._site,
            ledger=self._ledger,
            events=EventRecorder(self._client),
            probe_session=probes,
            hosts_changed=self._hosts.changed,
            image_added=self._pool.report,
        )
        logs = LogServer([*self._machines.values()], self, self._tls())
        await logs.start()
        self._apply_injections()
        duties = [self._pool.run, self._watch_pods, self._watch_services, self._watch_injections]
        tasks = [asyncio.ensure_future(duty()) for duty in duties]
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in [stopped, *tasks]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await logs.stop()
            await asyncio.gather(*(runner.stop(_STOP_GRACE_S) for runner in self._runners.values()), *self._burials)
            self._ledger.flush()
        for result in results:
            if isinstance(result, Exception):
                raise result

    # -- pods ---------------------------------------------------------------------------------------------------

    async def _watch_pods(self) -> None:
        async for event in self._client.watch(PODS, field_selector="spec.nodeName!="):
            self._take(event)

    def _take(self, event: WatchEvent) -> None:
        pod = event.object
        if event.type is EventType.SYNCED:
            self._sweep()
            return
        if pod["spec"].get("nodeName") not in self._machines:
            return
        uid = pod["metadata"]["uid"]
        if event.type is EventType.DELETED:
            self._pods.pop(uid, None)
            if uid in self._runners:
                self._bury(uid)
            else:
                remove_directory(PodPaths.of(pod, self._machines[pod["spec"]["nodeName"]]).own)
            return
        self._pods[uid] = pod
        if self._machines[pod["spec"]["nodeName"]].lost:
            return
        runner = self._runners.get(uid)
        if runner is None:
            self._start(pod)
        else:
            runner.update(pod)

    def _sweep(self) -> None:
        """Remove the directories of pods that went away while no agent looked."""
        for machine in self._machines.values():
            for directory in (machine.directory / "pods").glob("*"):
                if directory.name not in self._pods:
                    remove_directory(directory)

    def _start(self, pod: JsonObject) -> None:
        if self._shared is None:
            raise RuntimeError("the agent is not running")
        machine = self._machines[pod["spec"]["nodeName"]]
        if pod["spec"].get("hostNetwork"):
            address = machine.address
        elif pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            address = ""
        else:
            address = self._addresses[machine.name].take(pod.get("status", {}).get("podIP"))
        runner = PodRunner(pod, machine, address, self._shared)
        self._runners[runner.uid] = runner
        runner.start()

    def _bury(self, uid: str, *, clean: bool = True) -> None:
        """End a pod's processes at once and forget it; its address is free again afterwards."""
        runner = self._runners.pop(uid, None)
        if runner is None:
            return
        task = asyncio.create_task(self._kill(runner, clean=clean))
        self._burials.add(task)
        task.add_done_callback(self._burials.discard)

    async def _kill(self, runner: PodRunner, *, clean: bool) -> None:
        await runner.kill()
        self._addresses[runner.machine.name].release(runner.state.pod_ip)
        if clean:
            await asyncio.to_thread(runner.clean)
        self._hosts.changed()

    # -- names --------------------------------------------------------------------------------------------------

    async def _watch_services(self) -> None:
        async for event in self._client.watch(SERVICES):
            if event.type is EventType.DELETED:
                self._services_by_uid.pop(event.object["metadata"]["uid"], None)
            elif event.type is not EventType.SYNCED:
                self._services_by_uid[event.object["metadata"]["uid"]] = event.object
            self._hosts.changed()

    def _host_table(self) -> dict[str, str]:
        pods = [
            PodHost.of(runner.pod, runner.state.pod_ip, ready=runner.ready and not runner.stopping.is_set())
            for runner in self._runners.values()
            if runner.state.pod_ip and runner.state.phase in ("Pending", "Running")
        ]
        return host_table(pods, self._services_by_uid.values())

    # -- logs ---------------------------------------------------------------------------------------------------

    def find_log(self, namespace: str, pod: str, container: str, *, previous: bool) -> LogSource | None:
        """Return a container's log; None when there is no such container or run."""
        for runner in self._runners.values():
            metadata = runner.pod["metadata"]
            if metadata["namespace"] == namespace and metadata["name"] == pod:
                run = runner.log_run(container, previous=previous)
                if run is None or run < 0:
                    return None
                path = PodPaths.of(runner.pod, runner.machine).log(container, run)
                running = partial(runner.container_running, container)
                return LogSource(path, _never if previous else running)
        return None

    def pods_of(self, node: str) -> list[JsonObject]:
        """Return the pods bound to a node."""
        return [runner.pod for runner in self._runners.values() if runner.machine.name == node]

    def _tls(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*(self._certificate or self._own_certificate()))
        return context

    def _own_certificate(self) -> tuple[Path, Path]:
        """Issue one certificate for all nodes: by the site's CA, which its API server trusts, else by a new one."""
        site_pki, own_pki = self._site.site / "pki", self._site.nodes / "pki"
        own = not (site_pki / "ca.key").exists()
        authority = Authority.create(own_pki, "k2-rehearsal-nodes") if own else Authority.load(site_pki)
        machines = self._machines.values()
        names, addresses = [machine.name for machine in machines], [machine.address for machine in machines]
        pair = authority.issue("nodes", "system:node:rehearsal", names=names, addresses=addresses)
        return pair.certificate, pair.key

    # -- injections ---------------------------------------------------------------------------------------------

    async def _watch_injections(self) -> None:
        while True:
            await asyncio.sleep(_INJECT_POLL_S)
            self._apply_injections()

    def _apply_injections(self) -> None:
        lost = lost_nodes(self._site.inject)
        for machine in self._machines.values():
            if machine.lost and machine.name not in lost:
                self._find(machine)
            elif not machine.lost and machine.name in lost:
                self._lose(machine)

    def _lose(self, machine: Machine) -> None:
        log.warning("%s is lost: its heartbeats stop and its processes are killed", machine.name)
        machine.lost = True
        for runner in [runner for runner in self._runners.values() if runner.machine is machine]:
            self._bury(runner.uid, clean=False)

    def _find(self, machine: Machine) -> None:
        log.info("%s is back", machine.name)
        machine.come_back()
        self._pool.report(machine.name)
        for pod in [pod for pod in self._pods.values() if pod["spec"]["nodeName"] == machine.name]:
            self._start(pod)


def lost_nodes(inject: Path) -> set[str]:
    """Return the nodes that `node-lost.json` (or a file `node-lost-<anything>.json`) names."""
    lost: set[str] = set()
    for path in inject.glob("node-lost*.json") if inject.is_dir() else ():
        try:
            parameters = json.loads(path.read_text())
        except (OSError, ValueError):
            # Written or removed at this moment; the next look will tell.
            continue
        lost |= {parameters["node"]} if "node" in parameters else set(parameters.get("nodes") or [])
    return lost


def _never() -> bool:
    return False


@contextlib.contextmanager
def _only_agent(nodes: Path) -> Iterator[None]:
    descriptor = os.open(nodes / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise AgentError(f"another node agent runs for {nodes}") from error
    try:
        yield
    finally:
        os.close(descriptor)
