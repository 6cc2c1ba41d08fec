"""What `ports.Cluster` promises, on a real kube-apiserver with the real CRDs."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.rehearsal import apiserver, crds
from infra.rehearsal.binaries import ensure_control_plane
from infra.rehearsal.processes import Supervisor
from tasks.adapters import cluster as adapter
from tasks.adapters.cluster import KubeCluster
from tasks.adapters.kinds import KINDS
from tasks.core.errors import After, ConflictError, InputError, K2Error, Never, UnavailableError

pytestmark = [pytest.mark.site, pytest.mark.timeout(300)]

NAMESPACE = "k2"


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[apiserver.ControlPlane]:
    with Supervisor(tmp_path_factory.mktemp("plane")) as supervisor:
        started = apiserver.start(supervisor, ensure_control_plane(print))
        crds.install(started.admin, crds.ensure_files(print))
        started.admin.request("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        yield started


def context_of(kubeconfig: Path) -> str:
    return str(yaml.safe_load(kubeconfig.read_text())["current-context"])


@pytest.fixture(scope="module")
def cluster(plane: apiserver.ControlPlane) -> KubeCluster:
    return KubeCluster(str(plane.kubeconfig), context_of(plane.kubeconfig), NAMESPACE)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return "t-" + request.node.name.removeprefix("test_").split("[")[0].replace("_", "-")[:50].strip("-")


def config_map(name: str, **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def http_route(name: str, weight: int) -> dict[str, Any]:
    backend = {"name": "k2-parking", "port": 8080, "weight": weight}
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": name, "annotations": {"k2-release.io/generation": "1"}},
        "spec": {"parentRefs": [{"name": "k2-gateway"}], "rules": [{"backendRefs": [backend]}]},
    }


def lease(name: str, holder: str) -> dict[str, Any]:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name},
        "spec": {"holderIdentity": holder, "leaseTransitions": 1},
    }


def version(obj: dict[str, Any]) -> str:
    return str(obj["metadata"]["resourceVersion"])


def test_applying_twice_changes_nothing(cluster: KubeCluster, name: str) -> None:
    first = cluster.apply(config_map(name, a="1"))
    second = cluster.apply(config_map(name, a="1"))
    assert version(first) == version(second)
    assert first["metadata"]["managedFields"][0]["manager"] == "k2-release"
    assert cluster.apply(config_map(name, b="2"))["data"] == {"b": "2"}  # what we no longer say is gone
    assert cluster.get("ConfigMap", name)["data"] == {"b": "2"}  # type: ignore[index]


def test_a_dry_run_is_checked_by_the_server_and_not_stored(cluster: KubeCluster, name: str) -> None:
    assert cluster.apply(config_map(name, a="1"), dry_run=True)["metadata"]["uid"]
    assert cluster.get("ConfigMap", name) is None
    with pytest.raises(InputError) as caught:
        cluster.apply(config_map("Not_A_Name"), dry_run=True)
    assert caught.value.code == "K2-INP-008"


def test_unknown_fields_and_wrong_values_are_refused_by_name(cluster: KubeCluster, name: str) -> None:
    wrong = config_map(name, a="1") | {"dataa": {}}
    bad_route = http_route(name, 1)
    bad_route["spec"]["rules"][0]["backendRefs"][0]["weight"] = -1
    for obj, word in ((wrong, "dataa"), (bad_route, "weight")):
        for write in (cluster.apply, cluster.create):
            with pytest.raises(InputError) as caught:
                write(obj)
            assert caught.value.code == "K2-INP-008"
            assert caught.value.where == f"{obj['kind']}/{name}"
            assert word in caught.value.summary
            assert len(caught.value.summary) <= 400


def test_a_field_of_another_manager_is_not_taken(
    cluster: KubeCluster, plane: apiserver.ControlPlane, name: str
) -> None:
    other = KubeCluster(str(plane.kubeconfig), context_of(plane.kubeconfig), NAMESPACE, field_manager="somebody")
    other.apply(config_map(name, a="theirs"))
    with pytest.raises(ConflictError) as caught:
        cluster.apply(config_map(name, a="ours"))
    assert caught.value.code == "K2-CON-005"
    assert "somebody" in caught.value.summary
    assert cluster.get("ConfigMap", name)["data"] == {"a": "theirs"}  # type: ignore[index]
    assert cluster.apply(config_map(name, b="ours"))["data"] == {"a": "theirs", "b": "ours"}


def test_create_returns_what_is_there(cluster: KubeCluster, name: str) -> None:
    made, created = cluster.create(lease(name, "first"))
    again, created_again = cluster.create(lease(name, "second"))
    assert (created, created_again) == (True, False)
    assert again["spec"]["holderIdentity"] == "first"
    assert version(made) == version(again)


def test_of_many_creators_one_wins(cluster: KubeCluster, name: str) -> None:
    won: list[bool] = []
    threads = [
        threading.Thread(target=lambda i=i: won.append(cluster.create(lease(name, f"holder-{i}"))[1])) for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 5 + [True]


def test_a_stale_replacement_is_refused(cluster: KubeCluster, name: str) -> None:
    route = cluster.apply(http_route(name, 1))
    newer = cluster.replace(http_route(name, 2) | {"metadata": {"name": name, "resourceVersion": version(route)}})
    with pytest.raises(ConflictError) as caught:
        cluster.replace(http_route(name, 3) | {"metadata": {"name": name, "resourceVersion": version(route)}})
    assert caught.value.code == "K2-CON-002"
    there = cluster.get("HTTPRoute", name)
    assert there is not None
    assert version(there) == version(newer)
    assert there["spec"]["rules"][0]["backendRefs"][0]["weight"] == 2
    with pytest.raises(InputError):
        cluster.replace(http_route(name, 3))
    with pytest.raises(KeyError):
        cluster.replace(config_map(name) | {"metadata": {"name": name, "resourceVersion": "1"}})


def test_a_merge_patch_has_a_precondition_if_it_wants_one(cluster: KubeCluster, name: str) -> None:
    made, _ = cluster.create(lease(name, "first"))
    taken = cluster.merge_patch(
        "Lease", name, {"metadata": {"resourceVersion": version(made)}, "spec": {"holderIdentity": "second"}}
    )
    assert taken["spec"] == {"holderIdentity": "second", "leaseTransitions": 1}
    with pytest.raises(ConflictError) as caught:
        cluster.merge_patch(
            "Lease", name, {"metadata": {"resourceVersion": version(made)}, "spec": {"holderIdentity": "third"}}
        )
    assert caught.value.code == "K2-CON-002"
    patched = cluster.merge_patch("Lease", name, {"metadata": {"labels": {"a": "b"}}})
    assert patched["metadata"]["managedFields"][-1]["manager"] == "k2-release"
    with pytest.raises(KeyError):
        cluster.merge_patch("Lease", "t-nothing", {})


def test_deleting_is_repeatable_and_can_mean_one_object(cluster: KubeCluster, name: str) -> None:
    made = cluster.apply(config_map(name))
    cluster.delete("ConfigMap", name, uid="00000000-0000-0000-0000-000000000000")
    assert cluster.get("ConfigMap", name) is not None
    cluster.delete("ConfigMap", name, uid=made["metadata"]["uid"])
    assert cluster.get("ConfigMap", name) is None
    cluster.delete("ConfigMap", name)


def test_lists_have_all_pages_and_kinds(cluster: KubeCluster, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "PAGE_SIZE", 3)
    for i in range(8):
        obj = config_map(f"{name}-{i}", n=str(i))
        obj["metadata"]["labels"] = {"test": name, "odd": str(i % 2)}
        cluster.apply(obj)
    found = cluster.list_objects("ConfigMap", {"test": name})
    assert [obj["metadata"]["name"] for obj in found] == [f"{name}-{i}" for i in range(8)]
    assert {(obj["apiVersion"], obj["kind"]) for obj in found} == {("v1", "ConfigMap")}
    assert len(cluster.list_objects("ConfigMap", {"test": name, "odd": "1"})) == 4
    assert cluster.list_objects("ConfigMap", {"test": "nothing"}) == []


def test_a_list_is_of_the_sites_namespace_unless_asked_for_all(cluster: KubeCluster, name: str) -> None:
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    for namespace in ("", name):
        obj = config_map(name, n="1")
        obj["metadata"]["labels"] = {"test": name}
        if namespace:
            obj["metadata"]["namespace"] = namespace
        cluster.apply(obj)
    assert len(cluster.list_objects("ConfigMap", {"test": name})) == 1
    found = cluster.list_objects("ConfigMap", {"test": name}, everywhere=True)
    assert name in {obj["metadata"]["namespace"] for obj in found}
    assert len(found) == 2


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_is_where_the_table_says(cluster: KubeCluster, kind: str) -> None:
    assert isinstance(cluster.list_objects(kind), list)
    assert cluster.get(kind, "t-nothing") is None


def test_an_object_goes_to_the_namespace_that_it_names(cluster: KubeCluster, name: str) -> None:
    obj = config_map(name)
    obj["metadata"]["namespace"] = "default"
    assert cluster.apply(obj)["metadata"]["namespace"] == "default"
    assert cluster.get("ConfigMap", name) is None
    assert cluster.apply(config_map(name))["metadata"]["namespace"] == NAMESPACE


def test_what_has_no_place_is_refused(cluster: KubeCluster, name: str) -> None:
    nowhere = config_map(name)
    nowhere["metadata"]["namespace"] = "t-no-such-namespace"
    unknown = {"apiVersion": "v1", "kind": "Gadget", "metadata": {"name": name}}
    other_version = config_map(name) | {"apiVersion": "v2"}
    for obj in (nowhere, unknown, other_version, config_map("")):
        for write in (cluster.apply, cluster.create):
            with pytest.raises(InputError) as caught:
                write(obj)
            assert caught.value.code == "K2-INP-008"


def write_kubeconfig(path: Path, url: str, ca: Path, token: str) -> Path:
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": url, "certificate-authority": str(ca)}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
    path.write_text(yaml.safe_dump(content))
    return path


def test_an_identity_without_the_right_is_told_which(
    cluster: KubeCluster, plane: apiserver.ControlPlane, name: str, tmp_path: Path
) -> None:
    cluster.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}})
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 600}}
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{name}/token"
    token = plane.admin.request("POST", path, request)["status"]["token"]
    weak = KubeCluster(str(write_kubeconfig(tmp_path / "kc", plane.url, plane.ca_path, token)), "c", NAMESPACE)
    with pytest.raises(UnavailableError) as caught:
        weak.list_objects("Secret")
    error = caught.value
    assert isinstance(error.retry, Never)
    assert "cannot list resource" in error.summary
    assert token not in error.as_text() + repr(weak)
    nobody = KubeCluster(str(write_kubeconfig(tmp_path / "kc2", plane.url, plane.ca_path, "wrong")), "c", NAMESPACE)
    with pytest.raises(UnavailableError):
        nobody.get("Pod", "x")


def test_a_context_that_is_not_there_is_never_guessed(plane: apiserver.ControlPlane, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        KubeCluster(str(plane.kubeconfig), "production", NAMESPACE)
    assert (caught.value.got, caught.value.where) == ("production", str(plane.kubeconfig))
    (tmp_path / "broken").write_text("{")
    for path in (tmp_path / "nothing", tmp_path / "broken"):
        with pytest.raises(InputError):
            KubeCluster(str(path), "c", NAMESPACE)


@contextmanager
def kubelet(plane: apiserver.ControlPlane, address: str) -> Iterator[int]:
    """Serve container logs as a kubelet does."""
    pair = plane.node_certificate("t-node", address)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"asked for {self.path}\n".encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((address, 0), Handler)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_logs_come_through_the_api(cluster: KubeCluster, plane: apiserver.ControlPlane, name: str) -> None:
    address = "127.0.0.9"
    with kubelet(plane, address) as port:
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "t-node"}}
        node["status"] = {
            "addresses": [{"type": "InternalIP", "address": address}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        }
        cluster.create(node)
        spec = {"nodeName": "t-node", "containers": [{"name": "main", "image": "registry.example/x:1"}]}
        deadline = time.monotonic() + 60
        while cluster.get("ServiceAccount", "default") is None and time.monotonic() < deadline:
            time.sleep(0.1)
        cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
        text = cluster.pod_log(name, "main", 20)
        assert text == f"asked for /containerLogs/{NAMESPACE}/{name}/main?tailLines=20\n"
    for pod, container in ((name, "other"), ("t-nothing", "main")):
        with pytest.raises(KeyError):
            cluster.pod_log(pod, container, 20)
    with pytest.raises(UnavailableError):
        cluster.pod_log(name, "main", 20)  # the node no longer answers


class Answers:
    """A server that gives prepared answers, one a request."""

    def __init__(self, *answers: tuple[int, bytes, dict[str, str]]) -> None:
        self.left = list(answers)
        self.asked: list[str] = []

    @contextmanager
    def serve(self, tmp_path: Path) -> Iterator[KubeCluster]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.asked.append(self.command)
                if not outer.left:
                    self.close_connection = True
                    self.connection.close()
                    return
                status, body, headers = outer.left.pop(0)
                self.send_response(status)
                for key, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PATCH = do_PUT = answer

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        config = write_kubeconfig(tmp_path / "kc", f"http://127.0.0.1:{server.server_port}", tmp_path / "ca", "t")
        text = config.read_text().replace(f"certificate-authority: {tmp_path / 'ca'}", "insecure-skip-tls-verify: true")
        config.write_text(text)
        yield KubeCluster(str(config), "c", NAMESPACE, timeout_s=30.0, tries=3)
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_server_that_puts_off_is_asked_again(tmp_path: Path) -> None:
    answers = Answers((429, b"{}", {"Retry-After": "1"}), (503, b"no JSON", {}), (200, b'{"kind": "Pod"}', {}))
    with answers.serve(tmp_path) as cluster:
        before = time.monotonic()
        assert cluster.get("Pod", "x") == {"kind": "Pod"}
        assert time.monotonic() - before >= 1.0
    assert len(answers.asked) == 3


def test_a_server_that_puts_off_for_good(tmp_path: Path) -> None:
    answers = Answers(*[(503, b'{"message": "etcd is away"}', {})] * 5)
    with answers.serve(tmp_path) as cluster, pytest.raises(UnavailableError, match="etcd is away") as caught:
        cluster.get("Pod", "x")
    assert isinstance(caught.value.retry, After)
    assert len(answers.asked) == 3


@pytest.mark.parametrize("answer", [None, (503, b"{}", {}), (500, b"{}", {})])
def test_a_write_that_may_have_happened_is_not_sent_twice(
    tmp_path: Path, answer: tuple[int, bytes, dict[str, str]] | None
) -> None:
    answers = Answers(*([answer] if answer else []))
    with answers.serve(tmp_path) as cluster:
        for write in (
            lambda: cluster.merge_patch("Lease", "x", {}),
            lambda: cluster.replace(config_map("x") | {"metadata": {"name": "x", "resourceVersion": "1"}}),
            lambda: cluster.create(config_map("x")),
        ):
            answers.asked.clear()
            answers.left = [answer] if answer else []
            with pytest.raises(K2Error) as caught:
                write()
            assert isinstance(caught.value, UnavailableError)
            assert len(answers.asked) == 1
