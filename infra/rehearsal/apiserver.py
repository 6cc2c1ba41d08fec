"""The rehearsal's real Kubernetes control plane: etcd, kube-apiserver, kube-controller-manager, kube-scheduler.

``python -m infra.rehearsal.apiserver DIR`` starts it alone, prints how to reach it, and stops it on Enter or Ctrl-C.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import secrets
import ssl
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.rehearsal import audit, crds
from infra.rehearsal.binaries import ControlPlaneBinaries, ensure_control_plane
from infra.rehearsal.certificates import Authority, KeyPair, service_account_key, write_private
from infra.rehearsal.errors import SiteError
from infra.rehearsal.processes import Child, ProcessSpec, Supervisor, free_ports

SERVICE_CIDR = "10.96.0.0/16"
ADMIN = "k2-admin"
_IDENTITIES = (
    # user, group, file. The controller manager's default role expects one ServiceAccount for each controller.
    (ADMIN, "system:masters", "admin"),
    ("system:kube-controller-manager", "system:masters", "controller-manager"),
    ("system:kube-scheduler", "system:authenticated", "scheduler"),
    # Their rights are those of manifests/sites/rehearsal.
    (audit.NODE_AGENT, "system:authenticated", "node-agent"),
    (audit.GATEWAY, "system:authenticated", "gateway"),
)
_REQUEST_TIMEOUT_S = 30.0
# What the release's objects need, and no more: each controller costs watches, memory and CPU. The endpoint controllers
# are left out because Kubernetes refuses the pods' loopback addresses in EndpointSlices.
CONTROLLERS = (
    "clusterrole-aggregation-controller",
    "daemonset-controller",
    "deployment-controller",
    "disruption-controller",
    "garbage-collector-controller",
    "job-controller",
    "namespace-controller",
    "node-lifecycle-controller",
    "pod-garbage-collector-controller",
    "replicaset-controller",
    "resourcequota-controller",
    "root-ca-certificate-publisher-controller",
    "serviceaccount-controller",
    "serviceaccount-token-controller",
    "statefulset-controller",
    "taint-eviction-controller",
    "ttl-after-finished-controller",
)


class ApiError(SiteError):
    """The API server refused a request."""

    def __init__(self, method: str, path: str, status: int, text: str) -> None:
        super().__init__(f"{method} {path}: HTTP {status}: {text[:500]}")
        self.status = status


@dataclass(frozen=True)
class ApiConnection:
    """Plain HTTPS requests to the API server with one identity; the site's own needs only, no client library."""

    url: str
    ca_path: Path
    token: str = field(repr=False)

    def request(
        self, method: str, path: str, body: object | None = None, *, content_type: str = "application/json"
    ) -> dict[str, Any]:
        """Send one request and return the parsed answer; ApiError for any status from 400 on."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": content_type, "Accept": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)  # noqa: S310
        context = ssl.create_default_context(cafile=str(self.ca_path))
        try:
            with _opener(context).open(request, timeout=_REQUEST_TIMEOUT_S) as response:
                text = response.read().decode()
        except urllib.error.HTTPError as error:
            raise ApiError(method, path, error.code, error.read().decode(errors="replace")) from error
        answer = json.loads(text) if text.startswith("{") else {"text": text}
        return dict(answer)

    def apply(self, path: str, body: Mapping[str, Any], *, field_manager: str = "k2-rehearsal") -> dict[str, Any]:
        """Server-side apply one object at its path."""
        query = f"{path}?fieldManager={field_manager}&force=true"
        return self.request("PATCH", query, body, content_type="application/apply-patch+yaml")

    def answers(self, path: str) -> bool:
        """Tell whether a GET of the path succeeds now."""
        try:
            self.request("GET", path)
        except (OSError, ApiError):
            return False
        return True


def _opener(context: ssl.SSLContext) -> urllib.request.OpenerDirector:
    # An HTTPS_PROXY of the surroundings must not see loopback traffic.
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))


@dataclass(frozen=True)
class ControlPlane:
    """A running control plane and how to reach it."""

    host: str
    port: int
    url: str
    pki: Path
    ca_path: Path
    kubeconfig: Path
    """The administrator's kubeconfig (mode 0600)."""
    admin: ApiConnection
    version: str
    """As the running API server says it."""
    binaries: ControlPlaneBinaries
    etcd: Child
    apiserver: Child
    controller_manager: Child
    scheduler: Child

    @property
    def processes(self) -> tuple[Child, ...]:
        """The four processes, in the order of their start."""
        return (self.etcd, self.apiserver, self.controller_manager, self.scheduler)

    def versions(self) -> dict[str, str]:
        """Return process name -> version, each asked of the running process."""
        etcd = str(json.loads(_get(f"{self.etcd.spec.address}/version"))["etcdserver"])
        asked = {self.etcd.name: etcd, self.apiserver.name: self.version.removeprefix("v")}
        rest = (self.controller_manager, self.scheduler)
        return asked | {child.name: build_version(_get(f"{child.spec.address}/metrics").decode()) for child in rest}

    def kubeconfig_of(self, user: str) -> Path:
        """Return the kubeconfig (mode 0600) of one of the users that the API server knows by token."""
        return self.pki / f"{next(file for name, _, file in _IDENTITIES if name == user)}.kubeconfig"

    @property
    def authority(self) -> Authority:
        """The CA that signed the API server's certificate; it signs the node agent's, too (see `node_certificate`)."""
        return Authority.load(self.pki)

    def node_certificate(self, name: str, *addresses: str) -> KeyPair:
        """Issue the serving certificate of a kubelet: the API server trusts no other for logs."""
        return self.authority.issue(name, f"system:node:{name}", names=[name], addresses=addresses)


@dataclass(frozen=True)
class _Layout:
    """Files and ports of one control plane."""

    host: str
    site_dir: Path
    binaries: ControlPlaneBinaries
    etcd_port: int
    etcd_peer_port: int
    api_port: int
    controller_manager_port: int
    scheduler_port: int

    @property
    def pki(self) -> Path:
        return self.site_dir / "pki"

    @property
    def url(self) -> str:
        return f"https://{self.host}:{self.api_port}"


def start(
    supervisor: Supervisor,
    binaries: ControlPlaneBinaries,
    *,
    host: str = "127.0.0.1",
    kubelet_ca: Path | None = None,
    extra_apiserver_flags: tuple[str, ...] = (),
    definitions: Iterable[Path] = (),
) -> ControlPlane:
    """Start the four programs on the loopback address and wait until ServiceAccounts appear.

    ``kubelet_ca`` is the kubelets'; ours by default. ``definitions`` come before the controllers, which look rarely.
    """
    ports = free_ports(5, host)
    layout = _Layout(host, supervisor.site_dir, binaries, *ports)
    authority = Authority.create(layout.pki, "k2-rehearsal-ca")
    authority.issue("apiserver", "kube-apiserver", names=["localhost", "kubernetes.default.svc"], addresses=[host])
    authority.issue("apiserver-kubelet-client", "kube-apiserver", organization="system:masters")
    service_account_key(layout.pki / "sa.key")
    tokens = _write_identities(layout)
    admin = ApiConnection(layout.url, authority.pair.certificate, tokens[ADMIN])
    # The API server waits for etcd by itself, so both start at once.
    etcd = supervisor.start(_etcd(layout), wait=False)
    ca = kubelet_ca or authority.pair.certificate
    apiserver = supervisor.start(_apiserver(layout, admin, ca, extra_apiserver_flags), wait=False)
    supervisor.wait_ready(etcd)
    supervisor.wait_ready(apiserver)
    crds.install(admin, definitions)
    controller_manager = supervisor.start(_controller_manager(layout, admin), wait=False)
    scheduler = supervisor.start(_scheduler(layout), wait=False)
    supervisor.wait_ready(controller_manager)
    supervisor.wait_ready(scheduler)
    version = str(admin.request("GET", "/version")["gitVersion"])
    return ControlPlane(
        host=host,
        port=layout.api_port,
        url=layout.url,
        pki=layout.pki,
        ca_path=authority.pair.certificate,
        kubeconfig=layout.pki / "admin.kubeconfig",
        admin=admin,
        version=version,
        binaries=binaries,
        etcd=etcd,
        apiserver=apiserver,
        controller_manager=controller_manager,
        scheduler=scheduler,
    )


def kubeconfig(url: str, ca_path: Path, user: str, token: str) -> dict[str, Any]:
    """Return a kubeconfig (JSON is YAML) with the CA inside, so that it can be moved."""
    authority = base64.b64encode(ca_path.read_bytes()).decode()
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "k2-rehearsal", "cluster": {"server": url, "certificate-authority-data": authority}}],
        "users": [{"name": user, "user": {"token": token}}],
        "contexts": [{"name": "k2-rehearsal", "context": {"cluster": "k2-rehearsal", "user": user, "namespace": "k2"}}],
        "current-context": "k2-rehearsal",
    }


def _write_identities(layout: _Layout) -> dict[str, str]:
    """Write one token and one kubeconfig (mode 0600) for each identity; return user -> token."""
    tokens = {user: secrets.token_hex(24) for user, _, _ in _IDENTITIES}
    rows = "".join(f'{tokens[user]},{user},{user},"{group}"\n' for user, group, _ in _IDENTITIES)
    write_private(layout.pki / "tokens.csv", rows.encode())
    for user, _, file_name in _IDENTITIES:
        content = kubeconfig(layout.url, layout.pki / "ca.crt", user, tokens[user])
        write_private(layout.pki / f"{file_name}.kubeconfig", json.dumps(content, indent=1).encode())
    return tokens


def _etcd(layout: _Layout) -> ProcessSpec:
    client = f"http://{layout.host}:{layout.etcd_port}"
    peer = f"http://{layout.host}:{layout.etcd_peer_port}"
    argv = (
        str(layout.binaries.etcd),
        "--name=k2",
        f"--data-dir={layout.site_dir / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=k2={peer}",
        "--unsafe-no-fsync",  # survives kill -9 of the process, not a power cut: enough for a rehearsal, and fast
        "--log-level=warn",
    )
    return ProcessSpec("etcd", argv, address=client, ready=_http_ok(f"{client}/health"), ready_within_s=60)


def _apiserver(layout: _Layout, admin: ApiConnection, kubelet_ca: Path, extra: tuple[str, ...]) -> ProcessSpec:
    pki = layout.pki
    argv = (
        str(layout.binaries.kube_apiserver),
        f"--etcd-servers=http://{layout.host}:{layout.etcd_port}",
        f"--bind-address={layout.host}",
        f"--secure-port={layout.api_port}",
        f"--advertise-address={layout.host}",
        "--endpoint-reconciler-type=none",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--token-auth-file={pki / 'tokens.csv'}",
        f"--service-account-key-file={pki / 'sa.key'}",
        f"--service-account-signing-key-file={pki / 'sa.key'}",
        f"--service-account-issuer={layout.url}",
        f"--service-cluster-ip-range={SERVICE_CIDR}",
        "--authorization-mode=RBAC",
        *audit.apiserver_flags(layout.site_dir),
        "--allow-privileged=true",
        "--kubelet-preferred-address-types=InternalIP",
        f"--kubelet-certificate-authority={kubelet_ca}",
        f"--kubelet-client-certificate={pki / 'apiserver-kubelet-client.crt'}",
        f"--kubelet-client-key={pki / 'apiserver-kubelet-client.key'}",
        # A lost node must be seen within the minutes of a rehearsal, not within five.
        "--default-not-ready-toleration-seconds=20",
        "--default-unreachable-toleration-seconds=20",
        # No background work that one machine does not need.
        "--profiling=false",
        "--enable-priority-and-fairness=false",
        "--etcd-count-metric-poll-period=0",
        "--etcd-compaction-interval=0",
        "--shutdown-delay-duration=0",
        *extra,
    )
    return ProcessSpec(
        "kube-apiserver", argv, address=layout.url, ready=lambda: admin.answers("/readyz"), ready_within_s=120
    )


def _controller_manager(layout: _Layout, admin: ApiConnection) -> ProcessSpec:
    argv = (
        str(layout.binaries.kube_controller_manager),
        f"--kubeconfig={layout.pki / 'controller-manager.kubeconfig'}",
        f"--service-account-private-key-file={layout.pki / 'sa.key'}",
        f"--root-ca-file={layout.pki / 'ca.crt'}",
        f"--bind-address={layout.host}",
        f"--secure-port={layout.controller_manager_port}",
        "--authorization-always-allow-paths=/healthz,/livez,/readyz,/metrics",  # the version is asked there
        f"--controllers={','.join(CONTROLLERS)}",
        "--leader-elect=false",
        "--node-monitor-period=2s",
        "--node-monitor-grace-period=10s",
        "--kube-api-qps=100",
        "--kube-api-burst=200",
        "--profiling=false",
    )
    address = f"https://{layout.host}:{layout.controller_manager_port}"
    # Its work is the proof: without the default ServiceAccount every pod is refused.
    ready = "/api/v1/namespaces/default/serviceaccounts/default"
    return ProcessSpec("kube-controller-manager", argv, address=address, ready=lambda: admin.answers(ready))


def _scheduler(layout: _Layout) -> ProcessSpec:
    argv = (
        str(layout.binaries.kube_scheduler),
        f"--kubeconfig={layout.pki / 'scheduler.kubeconfig'}",
        f"--bind-address={layout.host}",
        f"--secure-port={layout.scheduler_port}",
        "--authorization-always-allow-paths=/healthz,/livez,/readyz,/metrics",  # the version is asked there
        "--leader-elect=false",
        "--kube-api-qps=100",
        "--kube-api-burst=200",
        "--profiling=false",
    )
    address = f"https://{layout.host}:{layout.scheduler_port}"
    return ProcessSpec("kube-scheduler", argv, address=address, ready=_http_ok(f"{address}/readyz"))


def _http_ok(url: str) -> Callable[[], bool]:
    """Return a check for HTTP 200 of our own child."""

    def check() -> bool:
        _get(url)
        return True

    return check


def _get(url: str) -> bytes:
    """Return what our own child answers; it made its certificate itself, so there is nothing to verify."""
    with _opener(ssl._create_unverified_context()).open(url, timeout=5) as response:  # noqa: S323
        return bytes(response.read())


def build_version(metrics: str) -> str:
    """Return the version that a Kubernetes program states in its metrics (kubernetes_build_info), without the v.

    Raises:
        SiteError: the metrics state none.
    """
    found = re.search(r'^kubernetes_build_info\{[^}]*git_version="v([^"]+)"', metrics, re.MULTILINE)
    if found is None:
        raise SiteError("the metrics of a Kubernetes program hold no kubernetes_build_info with git_version")
    return found[1]


def main() -> int:
    """Start a control plane alone, say how to reach it, stop it on Enter or Ctrl-C."""
    site_dir = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="k2-control-plane-"))
    binaries = ensure_control_plane(lambda line: print(line, file=sys.stderr, flush=True))
    with Supervisor(site_dir) as supervisor:
        started_s = time.monotonic()
        plane = start(supervisor, binaries)
        print(f"Kubernetes {plane.version} at {plane.url} after {time.monotonic() - started_s:.1f} s")
        print(plane.versions())
        print(f"export KUBECONFIG={plane.kubeconfig}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            sys.stdin.readline()
        print(f"stopping ({supervisor.cpu_seconds():.1f} CPU seconds so far)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
