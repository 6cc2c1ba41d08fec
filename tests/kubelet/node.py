"""One real node: a bridge for its pods, containerd with an imported image, and the kubelet, all in one directory."""

from __future__ import annotations

import ipaddress
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra.rehearsal.apiserver import ApiError, ControlPlane
from infra.rehearsal.errors import SiteError
from infra.rehearsal.processes import ProcessSpec, Supervisor, free_ports
from tests.kubelet.packages import ContainerPrograms
from tests.kubelet.putting_back import NAME as NETWORK_NAME

NAME = "node-1"
BRIDGE = "k2kubelet0"
GPUS = 8
POOL = {"k2-release.io/pool": "h200"}


@dataclass(frozen=True)
class Network:
    """The pods' network: its only other member is this machine, at the first address."""

    subnet: ipaddress.IPv4Network

    @property
    def host(self) -> str:
        """This machine's address on it."""
        return str(next(self.subnet.hosts()))


def choose_network() -> Network:
    """Return a network that no route of this machine leads to."""
    routes = json.loads(_run("ip", "-j", "route", "show", "table", "all"))
    taken = [
        ipaddress.ip_network(r["dst"], strict=False) for r in routes if r["dst"][0].isdigit() and ":" not in r["dst"]
    ]
    for number in range(200, 250):
        subnet = ipaddress.IPv4Network(f"10.213.{number}.0/24")
        if not any(isinstance(t, ipaddress.IPv4Network) and t.prefixlen and subnet.overlaps(t) for t in taken):
            return Network(subnet)
    raise SiteError("every network from 10.213.200.0/24 to 10.213.249.0/24 is in use")


def make_bridge(network: Network) -> None:
    """Make the bridge that pods are plugged into. No route leads on from it: pods reach this machine alone."""
    _run("ip", "link", "add", BRIDGE, "type", "bridge")
    _run("ip", "addr", "add", f"{network.host}/{network.subnet.prefixlen}", "dev", BRIDGE)
    _run("ip", "link", "set", BRIDGE, "up")


@dataclass(frozen=True)
class Containerd:
    """A containerd of our own."""

    programs: ContainerPrograms
    directory: Path

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self.directory / "c.sock"

    def start(self, supervisor: Supervisor, network: Network, pause: str) -> None:
        """Start it and wait until it answers."""
        (self.directory / "cni").mkdir(parents=True, exist_ok=True)
        (self.directory / "cni" / "10-k2.conflist").write_text(json.dumps(self._network(network)))
        config = self.directory / "config.toml"
        config.write_text(self._config(pause))
        argv = (str(self.programs.containerd), "--config", str(config))
        supervisor.start(
            ProcessSpec("containerd", argv, address=str(self.socket), ready=lambda: self.ctr("version") != "")
        )

    def _network(self, network: Network) -> dict[str, object]:
        ipam = {
            "type": "host-local",
            "ranges": [[{"subnet": str(network.subnet), "gateway": network.host}]],
            "dataDir": str(self.directory / "ipam"),
        }
        # Not a gateway and no masquerading: neither net.ipv4.ip_forward nor a packet filter is touched.
        bridge = {"type": "bridge", "bridge": BRIDGE, "isGateway": False, "ipMasq": False, "ipam": ipam}
        return {"cniVersion": "0.4.0", "name": NETWORK_NAME, "plugins": [bridge]}

    def _config(self, pause: str) -> str:
        cri = 'plugins."io.containerd.grpc.v1.cri"'
        return f"""version = 2
root = "{self.directory}/root"
state = "{self.directory}/state"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
  address = "{self.socket}"
[{cri}]
  sandbox_image = "{pause}"
  disable_apparmor = true
  # Without CAP_SYS_RESOURCE no process can be protected more than this one is.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [{cri}.cni]
    bin_dir = "{self.programs.cni}"
    conf_dir = "{self.directory}/cni"
  [{cri}.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [{cri}.containerd.runtimes.runc.options]
      BinaryName = "{self.programs.runc}"
      Root = "{self.directory}/runc"
      SystemdCgroup = false
"""

    def ctr(self, *arguments: str) -> str:
        """Run containerd's own client and return what it prints."""
        return _run(str(self.programs.ctr), "--address", str(self.socket), "-n", "k8s.io", *arguments, timeout_s=180)

    def pid(self, container_id: str) -> int:
        """Return the process of a container by the id that the pod's status has."""
        wanted = container_id.removeprefix("containerd://")
        for line in self.ctr("tasks", "ls").splitlines()[1:]:
            task, pid, status = line.split()[:3]
            if task == wanted and status == "RUNNING":
                return int(pid)
        raise SiteError(f"no running task {wanted}")


def start_kubelet(
    supervisor: Supervisor, program: Path, plane: ControlPlane, containerd: Containerd, network: Network
) -> None:
    """Start the kubelet with a node's own rights, wait for its node to be Ready, give it GPUs and the pool's label."""
    directory = supervisor.site_dir / "kubelet"
    directory.mkdir()
    client = plane.authority.issue(f"kubelet-{NAME}", f"system:node:{NAME}", organization="system:nodes")
    server = plane.node_certificate(NAME, network.host)
    port, healthz = free_ports(2, network.host, "127.0.0.1")
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "k2", "cluster": {"server": plane.url, "certificate-authority": str(plane.ca_path)}}],
        "users": [
            {"name": NAME, "user": {"client-certificate": str(client.certificate), "client-key": str(client.key)}}
        ],
        "contexts": [{"name": "k2", "context": {"cluster": "k2", "user": NAME}}],
        "current-context": "k2",
    }
    (directory / "kubeconfig").write_text(json.dumps(kubeconfig))
    (directory / "resolv.conf").write_text("")
    settings = _kubelet_settings(plane, containerd, network, directory) | {
        "port": port,
        "healthzPort": healthz,
        "tlsCertFile": str(server.certificate),
        "tlsPrivateKeyFile": str(server.key),
    }
    (directory / "config.yaml").write_text(json.dumps(settings))
    argv = (
        str(program),
        f"--config={directory / 'config.yaml'}",
        f"--kubeconfig={directory / 'kubeconfig'}",
        f"--root-dir={directory / 'root'}",
        f"--cert-dir={directory / 'pki'}",
        f"--hostname-override={NAME}",
        f"--node-ip={network.host}",
    )
    path = f"/api/v1/nodes/{NAME}"

    def ready() -> bool:
        conditions = plane.admin.request("GET", path)["status"].get("conditions", [])
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    supervisor.start(ProcessSpec("kubelet", argv, address=f"https://{network.host}:{port}", ready=ready))
    plane.admin.request("PATCH", path, {"metadata": {"labels": POOL}}, content_type="application/merge-patch+json")
    gpus = {"status": {"capacity": {"nvidia.com/gpu": str(GPUS)}}}
    plane.admin.request("PATCH", path + "/status", gpus, content_type="application/merge-patch+json")


def _kubelet_settings(
    plane: ControlPlane, containerd: Containerd, network: Network, directory: Path
) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": network.host,
        "healthzBindAddress": "127.0.0.1",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(plane.ca_path)},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{containerd.socket}",
        "podLogsDir": str(directory / "logs"),
        "volumePluginDir": str(directory / "plugins"),
        "resolvConf": str(directory / "resolv.conf"),
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "enforceNodeAllocatable": [],
        "localStorageCapacityIsolation": False,
        "makeIPTablesUtilChains": False,
        "oomScoreAdj": 0,
        # A machine whose disk is full for other reasons keeps its pods, and the imported image.
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
        "imageGCHighThresholdPercent": 100,
        # The controller manager of a rehearsal waits 10 s for a sign of life.
        "nodeLeaseDurationSeconds": 8,
        "nodeStatusUpdateFrequency": "2s",
    }


def empty_node(plane: ControlPlane, namespace: str, wait: Callable[[str, Callable[[], bool]], None]) -> None:
    """Delete what runs pods, and wait until the kubelet has ended every pod: only it can take them down in order."""
    for path in (f"/apis/batch/v1/namespaces/{namespace}/jobs", f"/apis/apps/v1/namespaces/{namespace}/deployments"):
        plane.admin.request("DELETE", path + "?propagationPolicy=Background", {})
    pods = f"/api/v1/namespaces/{namespace}/pods"
    try:
        plane.admin.request("DELETE", pods + "?gracePeriodSeconds=1", {})
    except ApiError as error:
        if error.status != 404:
            raise
    wait("the kubelet ends all pods", lambda: not plane.admin.request("GET", pods)["items"])


def _run(*argv: str, timeout_s: float = 30) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise SiteError(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr.strip()[-800:]}")
    return done.stdout
