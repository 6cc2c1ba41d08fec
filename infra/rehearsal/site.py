"""The embedded site: starts every server of a rehearsal, says what is real, and stops what it started."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from infra.rehearsal import accounts, apiserver, audit, crds, inventory, lws_manager, objectstore, orchestrator, users
from infra.rehearsal.addresses import SubnetLease, free_ports
from infra.rehearsal.apiserver import ControlPlane
from infra.rehearsal.binaries import ControlPlaneBinaries, ensure_control_plane, executable_facts
from infra.rehearsal.certificates import write_private
from infra.rehearsal.checkpoint import write_checkpoint
from infra.rehearsal.hub import publish
from infra.rehearsal.processes import ProcessSpec, Supervisor

REPO = "moonshotai/Kimi-K2-Instruct"
BUCKET = "k2-release"
NAMESPACE = audit.NAMESPACE
NVME_PATH = "/mnt/nvme/k2"
SITE_FILE = "site.yaml"
Report = Callable[[str], None]

SIMULATED = (
    "GPUs, NVLink and RDMA: nodes only claim 8 nvidia.com/gpu; nothing is computed on them",
    "SGLang: a simulator parses the real argv and keeps a prefill/decode/KV model of published figures",
    "kubelet and container images: a node agent runs each container as a local process; no image is pulled",
    "mounts: the node agent rewrites a volume's mount path to the node's own directory",
    "Gateway controller: a small controller writes HTTPRoutes into Envoy's own route files",
    "the Hub: a server of ours that speaks its protocol to the real client",
    "the checkpoint: real names, config and file layout of Kimi K2, tensors scaled down",
)


@dataclass(frozen=True)
class SiteOptions:
    """What kind of site: where it lives, nodes of 8 GPUs, seed of the two revisions, kept or not, ways of weights."""

    directory: Path
    nodes: int
    seed: int
    keep: bool
    topology: str = "auto"


@dataclass(frozen=True)
class SitePrograms:
    """The compiled programs that a site is started from."""

    control_plane: ControlPlaneBinaries
    lws_manager: lws_manager.ManagerPrograms


class RehearsalSite:
    """One embedded site. `start` returns when everything answers; leaving the context stops it unless it is kept."""

    def __init__(self, options: SiteOptions, report: Report) -> None:
        self.options = options
        self.directory = options.directory.resolve()
        self.report = report
        self.subnet = SubnetLease.acquire()
        self.supervisor = Supervisor(self.directory, keep=options.keep, hold_fds=[self.subnet.fileno()])
        self.revisions: dict[str, str] = {}
        self.gateway_url = ""
        self.site_path = self.directory / SITE_FILE
        self.inject_dir = self.directory / "inject"
        self._control_plane: ControlPlane | None = None
        self._prefect: orchestrator.Orchestrator | None = None
        self._versions: dict[str, str] = {}
        self._deploy_cpu_s = 0.0

    def __enter__(self) -> RehearsalSite:
        self.supervisor.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.supervisor.__exit__(*exc)
        self.subnet.release()

    @property
    def control_plane(self) -> ControlPlane:
        """The control plane; only after `start`."""
        assert self._control_plane is not None
        return self._control_plane

    @property
    def prefect(self) -> orchestrator.Orchestrator:
        """The Prefect server; only after `start`."""
        assert self._prefect is not None
        return self._prefect

    def start(self, programs: SitePrograms) -> None:
        """Start every server; independent ones at the same time."""
        for name in ("inject", "releases", "secrets"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(3) as pool:
            prefect = pool.submit(self._timed, "Prefect server", self._start_prefect)
            weights = pool.submit(self._timed, "Hub with two revisions", self._start_hub)
            store = pool.submit(self._timed, "SeaweedFS", self._start_store)
            self._timed("Kubernetes control plane", lambda: self._start_control_plane(programs.control_plane))
            _results(weights, store)
            groups = pool.submit(
                self._timed, "LeaderWorkerSet manager", lambda: self._start_group_manager(programs.lws_manager)
            )
            self._timed("nodes and gateway", self._start_cluster_parts)
            _results(groups, prefect)
        self._write_site_file()

    def start_worker(self) -> None:
        """Register the deployments and start the process worker, with this site as the flows' own."""
        env = {"K2_SITE": str(self.site_path), "K2_WORK_POOL": orchestrator.POOL, "K2_WORKDIR": str(self.directory)}
        worker = orchestrator.start_worker(self.supervisor, self.prefect, cwd=self.directory, env=env, wait=False)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.prefect.deploy(
            Path(str(resources.files("infra") / "prefect" / "prefect.yaml")), cwd=self.directory, env=env
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self._deploy_cpu_s += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        self.supervisor.wait_ready(worker)
        self._versions[worker.name] = inventory.installed_version(worker.pid, "_pydantic_core", "prefect")

    def start_client(self, rate_per_s: float) -> Path:
        """Start the client that sends user traffic the whole time; return the path of its report."""
        return users.start_client(self.supervisor, self.gateway_url, self.directory / "client.json", rate_per_s)

    def stop_client(self) -> dict[str, Any]:
        """Let the client finish what is in flight, stop it, and return its counts."""
        return users.stop_client(self.supervisor, self.directory / "client.json")

    def inject(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Switch an injection on; components look at the directory."""
        path = self.inject_dir / f"{name}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(parameters))
        part.replace(path)

    def lift(self, name: str) -> None:
        """Switch an injection off."""
        (self.inject_dir / f"{name}.json").unlink(missing_ok=True)

    def lose_api(self, away_s: float, stop: threading.Event) -> bool:
        """Kill etcd and the API server at once (SIGKILL), leave both away for a while, and start them as they were.

        Returns:
            Whether they were away for all of `away_s`; not if `stop` was set before.
        """
        specs = [self.supervisor.child(name).spec for name in ("kube-apiserver", "etcd")]
        for spec in specs:
            self.supervisor.stop(spec.name, grace_s=0)
        stopped = stop.wait(away_s)
        started = [self.supervisor.start(spec, wait=False) for spec in reversed(specs)]
        for child in started:
            self.supervisor.wait_ready(child)
        return not stopped

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of every process of the site so far, this one included."""
        return self.supervisor.cpu_seconds() + time.process_time() + self._deploy_cpu_s

    def hub_stats(self) -> dict[str, Any]:
        """Return what the Hub has served so far."""
        with urllib.request.urlopen(f"{self.hub_url}/_rehearsal/stats", timeout=10) as answer:  # noqa: S310 (own server)
            return dict(json.loads(answer.read()))

    def parked_answer(self) -> dict[str, Any] | None:
        """Return what a user gets who is answered by nobody but the parking backend; None if somebody serves."""
        return users.parked_answer(self.gateway_url)

    def _timed(self, what: str, act: Callable[[], None]) -> None:
        began = time.monotonic()
        act()
        self.report(f"  up: {what} ({time.monotonic() - began:.1f} s)")

    def _start_prefect(self) -> None:
        self._prefect = orchestrator.start_server(self.supervisor, report=self.report)
        self._versions["prefect-server"] = self._prefect.version

    def _start_hub(self) -> None:
        hub_root = self.directory / "hub"
        for number, name in enumerate(("old", "new")):
            made = write_checkpoint(self.directory / "checkpoints" / name, self.options.seed * 1000 + number)
            self.revisions[name] = publish(hub_root, REPO, made.directory, refs=("main",))
        port = free_ports(1)[0]
        self.hub_url = f"http://127.0.0.1:{port}"
        argv = (
            sys.executable,
            "-m",
            "infra.rehearsal.hub",
            "--root",
            str(hub_root),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--inject-dir",
            str(self.inject_dir),
        )
        self.supervisor.start(
            ProcessSpec("hub", argv, address=self.hub_url, ready=_answers(self.hub_url + "/_rehearsal/version"))
        )

    def _start_store(self) -> None:
        store = objectstore.start(self.supervisor)
        self._store_endpoint = store.endpoint
        keys = {"access_key": store.keys.access_key, "secret_key": store.keys.secret_key}
        write_private(self.directory / "secrets" / "store.json", json.dumps(keys).encode())
        self._store_keys = keys
        store.ensure_bucket(BUCKET)
        self._versions["object-store"] = store.version

    def _start_control_plane(self, binaries: ControlPlaneBinaries) -> None:
        plane = apiserver.start(self.supervisor, binaries, definitions=crds.ensure_files(self.report))
        self._control_plane = plane
        self._versions.update(plane.versions())

    def _start_group_manager(self, programs: lws_manager.ManagerPrograms) -> None:
        manager = lws_manager.start(self.supervisor, self.control_plane, programs)
        self._versions[manager.name] = executable_facts(inventory.executable_of(manager.pid)).version

    def _start_cluster_parts(self) -> None:
        plane = self.control_plane
        accounts.install(plane)
        net = str(self.subnet.network.network_address).split(".")[1]
        agent = (
            sys.executable,
            "-m",
            "infra.rehearsal.nodes",
            "--kubeconfig",
            str(plane.kubeconfig_of(audit.NODE_AGENT)),
            "--site",
            str(self.directory),
            "--subnet",
            f"127.{net}",
            "--nodes",
            str(self.options.nodes),
        )
        self.supervisor.start(
            ProcessSpec("node-agent", agent, address=f"127.{net}.0.0/16", ready=self._nodes_ready, grace_s=30.0)
        )
        listen, admin = free_ports(2)
        self.gateway_url, self.stats_url = f"http://127.0.0.1:{listen}", f"http://127.0.0.1:{admin}"
        gateway = (
            sys.executable,
            "-m",
            "infra.rehearsal.gateway",
            "--kubeconfig",
            str(plane.kubeconfig_of(audit.GATEWAY)),
            "--site",
            str(self.directory),
            "--listen",
            f"127.0.0.1:{listen}",
            "--admin",
            f"127.0.0.1:{admin}",
        )
        self.supervisor.start(
            ProcessSpec(
                "gateway", gateway, address=self.gateway_url, ready=_answers(self.stats_url + "/ready"), grace_s=15.0
            )
        )
        self._create_secret("k2-store", self._store_keys)
        self._apply_site_objects()

    def _nodes_ready(self) -> bool:
        nodes = self.control_plane.admin.request("GET", "/api/v1/nodes")["items"]
        ready = [
            n
            for n in nodes
            for c in n["status"].get("conditions", [])
            if c["type"] == "Ready" and c["status"] == "True"
        ]
        return len(ready) == self.options.nodes

    def _create_secret(self, name: str, values: Mapping[str, str]) -> None:
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "type": "Opaque",
            "stringData": dict(values),
        }
        self.control_plane.admin.apply(f"/api/v1/namespaces/{NAMESPACE}/secrets/{name}", secret)

    def _apply_site_objects(self) -> None:
        text = (resources.files("manifests") / "sites" / "rehearsal" / "gateway-class.yaml").read_text()
        self.control_plane.admin.apply("/apis/gateway.networking.k8s.io/v1/gatewayclasses/k2", yaml.safe_load(text))

    def use_pipeline_account(self) -> None:
        """Give the flows the pipeline's own ServiceAccount, whose rights are those of manifests/base, and no other."""
        path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/k2-pipeline/token"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 86400}}
        token = self.control_plane.admin.request("POST", path, body)["status"]["token"]
        config = apiserver.kubeconfig(self.control_plane.url, self.control_plane.ca_path, "k2-pipeline", token)
        write_private(self.directory / "pki" / "pipeline.kubeconfig", json.dumps(config).encode())
        self._write_site_file("pki/pipeline.kubeconfig")

    def _write_site_file(self, kubeconfig: str = "pki/admin.kubeconfig") -> None:
        site = {
            "version": 1,
            "name": "rehearsal",
            "kubeconfig": kubeconfig,
            "context": "k2-rehearsal",
            "namespace": NAMESPACE,
            "store": {"endpoint": self._store_endpoint, "bucket": BUCKET, "credentials_file": "secrets/store.json"},
            "hub": {"endpoint": self.hub_url},
            "gateway": {"url": self.gateway_url, "stats_url": self.stats_url},
            "prefect_api_url": self.prefect.api_url,
            "node_selector": {"k2-release.io/pool": "h200"},
            "nvme_path": NVME_PATH,
            "staging": {"topology": self.options.topology},
            "usd_per_gpu_hour": 2.3,
            "pullers": 2,
            "lease_duration_s": 10,
            "releases_dir": "releases",
            "simulated": list(SIMULATED),
            "cluster_uid": self._cluster_uid(),
            "rehearsal": True,
            "real": [f"{name} {version}" for name, version in sorted(self._versions.items())],
        }
        part = self.site_path.with_suffix(".part")
        part.write_text(yaml.safe_dump(site, sort_keys=False))
        part.replace(self.site_path)

    def _cluster_uid(self) -> str:
        namespace = self.control_plane.admin.request("GET", "/api/v1/namespaces/kube-system")
        return str(namespace["metadata"]["uid"])

    def real_parts(self) -> list[dict[str, Any]]:
        """Return every real server with pid, executable and its sha256, version as the process says it, and address."""
        rows = [
            inventory.describe(child.name, child.pid, self._versions[child.name], child.spec.address)
            for child in self.supervisor.children
            if child.name in self._versions
        ]
        return [*rows, inventory.envoy_row(self.directory, self.stats_url), *inventory.router_rows(self.directory)]


def _results(*futures: Future[None]) -> None:
    for future in futures:
        future.result()


def _answers(url: str) -> Callable[[], bool]:
    def check() -> bool:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 (a loopback address of our own)
            return int(answer.status) == 200

    return check


def prepare(report: Report) -> SitePrograms:
    """Return the compiled programs, built now if this machine has none: the one-time part of a set-up."""
    return SitePrograms(ensure_control_plane(report), lws_manager.prepare(report))


def remove(directory: Path) -> None:
    """Delete a site's directory; only one that has a site's state file."""
    if (directory / "state.json").exists():
        for base, _, _ in os.walk(directory):
            Path(base).chmod(0o700)  # staged weights are closed for writing, for their owner too
        shutil.rmtree(directory, ignore_errors=True)
