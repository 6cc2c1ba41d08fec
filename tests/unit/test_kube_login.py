"""A login plugin that fails for a moment: nobody goes on as anonymous, and the next call asks it again."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from tasks.adapters.cluster import KubeCluster
from tasks.core.errors import After, UnavailableError

PLUGIN = """
import json, pathlib
token = pathlib.Path({token!r}).read_text()
print(json.dumps({{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
                   "status": {{"token": token}}}}))
"""
ANONYMOUS = 'nodes "a" is forbidden: User "system:anonymous" cannot get resource "nodes" in API group ""'


class Handler(BaseHTTPRequestHandler):
    valid = "one"

    def do_GET(self) -> None:
        token = (self.headers.get("authorization") or "").removeprefix("Bearer ")
        status = 200 if token == self.valid else 401 if token else 403
        body = {200: {"kind": "Node", "metadata": {"name": "a"}}, 401: {"kind": "Status", "message": "Unauthorized"}}
        data = json.dumps(body.get(status, {"kind": "Status", "message": ANONYMOUS})).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join(10)
    server.server_close()


def kubeconfig(directory: Path, url: str, token: Path) -> str:
    command = {"apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never", "command": sys.executable}
    run = {**command, "args": ["-c", PLUGIN.format(token=str(token))]}
    path = directory / "kubeconfig"
    path.write_text(
        yaml.safe_dump(
            {
                "clusters": [{"name": "c", "cluster": {"server": url}}],
                "users": [{"name": "u", "user": {"exec": run}}],
                "contexts": [{"name": "ours", "context": {"cluster": "c", "user": "u"}}],
            }
        )
    )
    return str(path)


def test_a_login_plugin_that_fails_for_a_moment_is_asked_again(tmp_path: Path, url: str) -> None:
    token = tmp_path / "token"
    token.write_text("old")
    cluster = KubeCluster(kubeconfig(tmp_path, url, token), "ours", "k2")
    token.unlink()  # the token has expired, and what gives a new one is away as well
    with pytest.raises(UnavailableError) as caught:
        cluster.get("Node", "a")
    assert isinstance(caught.value.retry, After)
    assert "anonymous" not in caught.value.as_text()
    token.write_text("one")
    found = cluster.get("Node", "a")
    assert found is not None
    assert found["metadata"]["name"] == "a"


@pytest.mark.parametrize("written", ["", "clusters: [{name: c, clus"])
def test_a_kubeconfig_that_is_being_written_at_a_new_login_is_read_again(
    tmp_path: Path, url: str, written: str
) -> None:
    token = tmp_path / "token"
    token.write_text("old")
    path = Path(kubeconfig(tmp_path, url, token))
    whole = path.read_text()
    cluster = KubeCluster(str(path), "ours", "k2")
    path.write_text(written)
    with pytest.raises(UnavailableError) as caught:
        cluster.get("Node", "a")
    assert isinstance(caught.value.retry, After)
    path.write_text(whole)
    token.write_text("one")
    assert cluster.get("Node", "a") is not None
