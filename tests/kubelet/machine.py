"""The whole of the tier on this machine: what is started, in which order, and how the machine is put back."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from infra.rehearsal import apiserver, crds, objectstore
from infra.rehearsal.apiserver import ControlPlane
from infra.rehearsal.binaries import KUBELET, cache_directory, ensure_control_plane, ensure_program
from infra.rehearsal.certificates import write_private
from infra.rehearsal.errors import SiteError
from infra.rehearsal.processes import ProcessSpec, Supervisor, free_ports
from tasks.adapters.cluster import KubeCluster
from tasks.core.render import render_base
from tasks.specs import load_base, load_site
from tests.contract.slow_relay import relayed
from tests.kubelet import host_state, image, node, packages, putting_back

NAMESPACE, BUCKET = "k2", "k2-kubelet"
CONTEXT = "k2-rehearsal"
ANNOUNCEMENT = f"""
A real kubelet on this machine. What this does to it:
  fetches   {", ".join(packages.PACKAGES)} by apt-get download, once,
            into {cache_directory() / "containerd"}; installs nothing ({packages.NO_INSTALL}=1: fail instead)
  builds    the kubelet, and the control plane, from pinned Go modules into {cache_directory()}, once
  changes   until its end: sysctls that the kubelet sets ({", ".join(putting_back.SYSCTLS[2:5])}),
            the bridge {node.BRIDGE}, cgroups kubepods and k8s.io, mounts below its own directory,
            /run/containerd, /var/lib/cni, /var/lib/kubelet
  puts back all of that at its end, or, if it is killed, by a process of its own; then compares with what was before
"""
Say = Callable[[str], None]


@dataclass
class Machine:
    """A cluster of one real node on this machine."""

    directory: Path
    supervisor: Supervisor
    plane: ControlPlane
    containerd: node.Containerd
    network: node.Network
    image: image.BuiltImage
    store: objectstore.ObjectStore
    site_path: Path
    inject: Path
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def nvme(self) -> Path:
        """What the pods see as /models; made by the kubelet, as the manifests say."""
        return self.directory / "nvme" / "k2"


@dataclass
class Outcome:
    """How the machine was found and left: for the last test and for the summary."""

    lines: list[str] = field(default_factory=list)
    differences: list[str] | None = None
    """What is not as it was; None until it has been looked at."""
    keep_logs: bool = False


def refuse_what_cannot_work() -> None:
    """Raise SiteError where the tier would fail in the middle, or touch a kubelet that is not ours."""
    if os.geteuid() != 0:
        raise SiteError("test-kubelet needs root: a kubelet mounts, makes cgroups and network interfaces")
    for program in ("ip", "apt-get", "dpkg-deb", "umount"):
        if shutil.which(program) is None:
            raise SiteError(f"test-kubelet needs the program {program}")
    there = [path for path in host_state.cgroup_directories() if path.name in ("kubepods", "kubepods.slice")]
    if there:
        raise SiteError(f"a kubelet runs on this machine already ({there[0]}): it would be disturbed")


@contextmanager
def one_at_a_time() -> Iterator[Path]:
    """Hold the machine for this run, and yield where the record of it is kept; first put back what a dead run left."""
    directory = cache_directory() / "test-kubelet"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        deadline_s = time.monotonic() + 60
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline_s:
                raise SiteError(f"another test-kubelet runs on this machine: it holds {directory / 'lock'}")
            time.sleep(0.5)
        yield directory / "before.json"


@contextmanager
def running(say: Say, outcome: Outcome, wait: Callable[[str, Callable[[], bool]], None]) -> Iterator[Machine]:
    """Start everything, yield it, and put the machine back whatever happens."""
    refuse_what_cannot_work()
    binaries, kubelet = ensure_control_plane(say), ensure_program(KUBELET, say)
    programs = packages.ensure_programs(say)
    with one_at_a_time() as record_path, ExitStack() as stack:
        if record_path.exists():
            left = putting_back.read_record(record_path)
            say("an earlier run was killed: " + "; ".join(putting_back.put_back(left) or ["nothing was left of it"]))
            putting_back.finish(record_path, left)
        directory = Path(tempfile.mkdtemp(prefix=f"{putting_back.NAME}-"))
        directory.chmod(0o755)
        supervisor = Supervisor(directory)
        record = putting_back.Record(host_state.read(), str(directory), node.BRIDGE, supervisor.site_id)
        record.write(record_path)
        watcher = putting_back.start_watcher(record_path)
        stack.callback(_end, watcher, record_path, record, supervisor, say, outcome)
        say(f"before: {host_state.counts(record.before)} recorded in {record_path}")
        network = node.choose_network()
        node.make_bridge(network)
        began = time.monotonic()
        built = image.build(directory)
        say(
            f"image: {built.size_bytes / 1e6:.0f} MB in {len(built.layers)} layers "
            f"({', '.join(f'{layer.what} {layer.size_bytes / 1e6:.1f}' for layer in built.layers)}), "
            f"built in {time.monotonic() - began:.1f} s"
        )
        containerd = node.Containerd(programs, directory / "containerd")
        containerd.start(supervisor, network, built.pause)
        containerd.ctr("images", "import", str(built.archive))
        built.archive.unlink()
        plane = apiserver.start(
            supervisor,
            binaries,
            extra_apiserver_flags=("--authorization-mode=Node", "--enable-admission-plugins=NodeRestriction"),
            definitions=crds.ensure_files(say),
        )
        began = time.monotonic()
        node.start_kubelet(supervisor, kubelet, plane, containerd, network)
        say(f"kubelet: node {node.NAME} Ready {time.monotonic() - began:.1f} s after its start")
        store = objectstore.start(supervisor, host=network.host)
        store.ensure_bucket(BUCKET)
        hub = stack.enter_context(relayed(_start_hub(supervisor), network.host))
        machine = Machine(
            directory,
            supervisor,
            plane,
            containerd,
            network,
            built,
            store,
            directory / "site.yaml",
            directory / "inject",
            {**plane.versions(), "object-store": store.version, "containers": programs.versions},
        )
        _write_site(machine, hub)
        _apply_base(machine)
        stack.callback(_empty, machine, say, wait)
        yield machine


def _empty(machine: Machine, say: Say, wait: Callable[[str, Callable[[], bool]], None]) -> None:
    """Let the kubelet end all pods; where it does not, they are killed with what is left."""
    try:
        node.empty_node(machine.plane, NAMESPACE, wait)
    except Exception as error:
        say(f"pods were not ended in order: {error}")


def _end(
    watcher: Any, record_path: Path, record: putting_back.Record, supervisor: Supervisor, say: Say, outcome: Outcome
) -> None:
    """Stop everything, put the machine back, and look whether it is as it was."""
    try:
        supervisor.stop_all()
    finally:
        done = putting_back.put_back(record)
        if outcome.keep_logs or sys.exc_info()[0] is not None:
            kept = Path(tempfile.mkdtemp(prefix=f"{putting_back.NAME}-logs-"))
            shutil.copytree(Path(record.directory, "logs"), kept, dirs_exist_ok=True)
            done.append(f"logs are kept in {kept}")
        putting_back.finish(record_path, record)
        watcher.stdin.close()
        watcher.wait(30)
        outcome.lines = done
        outcome.differences = host_state.differences(record.before, host_state.read())
        if Path(record.directory).exists():
            outcome.differences.append(f"file {record.directory}: none -> there")


def _start_hub(supervisor: Supervisor) -> str:
    """Start a Hub server on loopback; what is published below its root later is served, too."""
    root, inject = supervisor.site_dir / "hub", supervisor.site_dir / "inject"
    root.mkdir()
    inject.mkdir()
    port = free_ports(1)[0]
    url = f"http://127.0.0.1:{port}"
    argv = (sys.executable, "-m", "infra.rehearsal.hub", "--root", str(root), "--host", "127.0.0.1")
    more = ("--port", str(port), "--inject-dir", str(inject))
    log = supervisor.site_dir / "logs" / "hub.log"
    spec = ProcessSpec("hub", argv + more, address=url, ready=lambda: "listening" in log.read_text())
    supervisor.start(spec)
    return url


def _write_site(machine: Machine, hub: str) -> None:
    """Write the site file and what it names, as for any cluster; the flows' identity is the pipeline's own."""
    keys = {"access_key": machine.store.keys.access_key, "secret_key": machine.store.keys.secret_key}
    write_private(machine.directory / "store.json", json.dumps(keys).encode())
    site = {
        "version": 1,
        "name": "kubelet",
        "kubeconfig": "pipeline.kubeconfig",
        "context": CONTEXT,
        "namespace": NAMESPACE,
        "store": {"endpoint": machine.store.endpoint, "bucket": BUCKET, "credentials_file": "store.json"},
        "hub": {"endpoint": hub},
        # There is no gateway: nothing of this tier looks at users' traffic.
        "gateway": {"url": "http://127.0.0.1:1", "stats_url": "http://127.0.0.1:1"},
        "node_selector": node.POOL,
        "nvme_path": str(machine.nvme),
        "usd_per_gpu_hour": 1,
        "pullers": 2,
        "releases_dir": "releases",
        "simulated": ["GPUs: the node only claims them"],
    }
    machine.site_path.write_text(yaml.safe_dump(site))


def _apply_base(machine: Machine) -> None:
    """Apply manifests/base as an administrator does, with the Secret that pods read; take the pipeline's token."""
    admin = KubeCluster(str(machine.plane.kubeconfig), CONTEXT, NAMESPACE)
    for obj in render_base(load_base(), load_site(machine.site_path), machine.image.tool):
        admin.apply(obj)
    keys = {"access_key": machine.store.keys.access_key, "secret_key": machine.store.keys.secret_key}
    path = f"/api/v1/namespaces/{NAMESPACE}"
    metadata = {"name": "k2-store", "namespace": NAMESPACE}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": keys}
    machine.plane.admin.apply(f"{path}/secrets/k2-store", secret)
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 86400}}
    answer = machine.plane.admin.request("POST", f"{path}/serviceaccounts/k2-pipeline/token", body)
    config = apiserver.kubeconfig(machine.plane.url, machine.plane.ca_path, "k2-pipeline", answer["status"]["token"])
    write_private(machine.directory / "pipeline.kubeconfig", json.dumps(config).encode())
