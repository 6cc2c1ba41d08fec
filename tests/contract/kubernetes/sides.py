"""The two sides of the Kubernetes port: the fake and a real API server, each with the hands of its other clients.

A case takes a `Side` and cannot tell which it has.
"""

from __future__ import annotations

import base64
import json
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import yaml

from infra.rehearsal.apiserver import ControlPlane
from tasks.adapters.cluster import KubeCluster
from tasks.adapters.kinds import KINDS
from tasks.core.errors import UnavailableError
from tasks.ports import Cluster, Mirror, Object
from tests.fakes.memory_cluster import MemoryCluster

NAMESPACE = "k2"
LOG_NODE = "t-node"
"""The node whose kubelet gives logs on the real side."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class Side:
    """One side of the port.

    Attributes:
        cluster: what is tested.
        other: the same cluster as somebody else sees it who writes under another name.
        set_status: writes an object's status as its controller does (kind, name, status).
        say: has a container say something in its log (pod, container, text).
    """

    cluster: Cluster
    other: Cluster
    set_status: Callable[[str, str, Object], None]
    say: Callable[[str, str, str], None]


def fake_side() -> Side:
    """Return the fake with nothing in it."""
    cluster = MemoryCluster()

    def say(pod: str, container: str, text: str) -> None:
        cluster.logs[pod, container] = text

    return Side(cluster, cluster, cluster.set_status, say)


@contextmanager
def real_side(plane: ControlPlane) -> Iterator[Side]:
    """Open the real side, with a kubelet that gives logs."""
    with kubelet(plane, LOG_NODE, "127.0.0.9") as logs:

        def set_status(kind: str, name: str, status: Object) -> None:
            path = KINDS[kind].path(NAMESPACE, name) + "/status"
            plane.admin.request("PATCH", path, {"status": status}, content_type="application/merge-patch+json")

        def say(pod: str, container: str, text: str) -> None:
            logs[pod, container] = text

        yield Side(client(plane), client(plane, field_manager="somebody"), set_status, say)


def client(plane: ControlPlane, kubeconfig: Path | None = None, **options: Any) -> KubeCluster:
    """Return the adapter on a control plane, as its administrator unless told otherwise."""
    kubeconfig = kubeconfig or plane.kubeconfig
    context = str(yaml.safe_load(kubeconfig.read_text())["current-context"])
    return KubeCluster(str(kubeconfig), context, NAMESPACE, **options)


def service_account_token(plane: ControlPlane, name: str) -> str:
    """Return a token of a new ServiceAccount: an identity that is known and may do nothing."""
    path = KINDS["ServiceAccount"].path(NAMESPACE, name)
    plane.admin.apply(path, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}})
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 600}}
    return str(plane.admin.request("POST", path + "/token", request)["status"]["token"])


def compact(plane: ControlPlane) -> None:
    """Have etcd forget all revisions before the current one."""
    revision = _etcd(plane, "kv/range", {"key": base64.b64encode(b"/").decode()})["header"]["revision"]
    _etcd(plane, "kv/compaction", {"revision": revision, "physical": True})


def _etcd(plane: ControlPlane, call: str, body: Object) -> Object:
    request = urllib.request.Request(f"{plane.etcd.spec.address}/v3/{call}", json.dumps(body).encode())
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
        return dict(json.loads(answer.read()))


@contextmanager
def kubelet(plane: ControlPlane, node: str, address: str) -> Iterator[dict[tuple[str, str], str]]:
    """Serve container logs as a node's kubelet does; yields what containers have said, to be filled."""
    pair = plane.node_certificate(node, address)
    logs: dict[tuple[str, str], str] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            _, _, _, pod, container = asked.path.split("/")
            tail = int(parse_qs(asked.query)["tailLines"][0])
            text = logs.get((pod, container))
            self.send_response(200 if text is not None else 404)
            self.end_headers()
            self.wfile.write("".join((text or "").splitlines(keepends=True)[-tail:]).encode("latin-1"))

        def log_message(self, format: str, *args: object) -> None:
            pass

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    server = ThreadingHTTPServer((address, 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    status = {
        "addresses": [{"type": "InternalIP", "address": address}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": server.server_port}},
    }
    path = KINDS["Node"].path("", node)
    plane.admin.apply(path, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
    plane.admin.request("PATCH", path + "/status", {"status": status}, content_type="application/merge-patch+json")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield logs
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def eventually(check: Callable[[], Value], within_s: float = 20.0) -> Value:
    """Return the first true answer of a check; an AssertionError with its last one when there is none in time."""
    deadline = time.monotonic() + within_s
    while True:
        answer = check()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"still {answer!r} after {within_s:g} s"
        time.sleep(0.05)


def config_map(name: str, labels: dict[str, str] | None = None, **data: str) -> Object:
    """Return an object without a controller, and without a generation."""
    metadata = {"name": name, **({"labels": labels} if labels else {})}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def http_route(name: str, weight: int) -> Object:
    """Return an object with a generation and a status of its own: the kind that traffic moves by."""
    backend = {"name": "k2-parking", "port": 8080, "weight": weight}
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": name, "annotations": {"k2-release.io/generation": "1"}},
        "spec": {"parentRefs": [{"name": "k2-gateway"}], "rules": [{"backendRefs": [backend]}]},
    }


def accepted(generation: int) -> Object:
    """Return the status of an HTTPRoute that its gateway has taken."""
    condition = {
        "type": "Accepted",
        "status": "True",
        "reason": "Accepted",
        "message": "",
        "lastTransitionTime": "2026-11-30T00:00:00Z",
        "observedGeneration": generation,
    }
    gateway = {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "k2-gateway"}
    return {"parents": [{"parentRef": gateway, "controllerName": "example.com/gateway", "conditions": [condition]}]}


def lease(name: str, holder: str) -> Object:
    """Return an object that several want to have."""
    spec = {"holderIdentity": holder, "leaseTransitions": 1}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": spec}


def namespace(name: str) -> Object:
    """Return a namespace."""
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def pod(name: str, node: str = "") -> Object:
    """Return a pod of one container `main`, on a node if one is named."""
    spec = {"containers": [{"name": "main", "image": "registry.example/x:1"}], **({"nodeName": node} if node else {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def version(obj: Object) -> str:
    """Return an object's resourceVersion."""
    return str(obj["metadata"]["resourceVersion"])


def names(objects: list[Object]) -> list[str]:
    """Return the names of objects, in their order."""
    return [obj["metadata"]["name"] for obj in objects]


def shows(mirror: Mirror, *expected: str) -> bool:
    """Tell whether a mirror shows these objects now; what nobody confirms shows none."""
    try:
        return names(mirror.objects()) == list(expected)
    except UnavailableError:
        return False


def there(cluster: Cluster, kind: str, name: str) -> Object:
    """Return an object that must be there."""
    obj = cluster.get(kind, name)
    assert obj is not None, f"there is no {kind} {name}"
    return obj
