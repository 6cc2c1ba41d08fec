"""The real router finds its workers by a watch of pods: what becomes of one that was cut, and what we do about it."""

from __future__ import annotations

import copy
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from infra.rehearsal import apiserver
from tasks.adapters.clock import SystemClock
from tasks.adapters.cluster import KubeCluster
from tasks.adapters.engine import GatewayEngine
from tasks.core.errors import After, UnavailableError
from tasks.core.render import serving_names
from tasks.specs import load_templates
from tasks.steps.router_workers import settle_workers
from tests.contract.engine_pair import (
    ENGINE_PORT,
    LEASE,
    READY_WITHIN_S,
    ROUTER_PORT,
    Processes,
    engine_command,
    engine_url,
    make_checkpoint,
    until,
)
from tests.contract.kubernetes.faulty_proxy import TcpProxy
from tests.contract.kubernetes.sides import NAMESPACE

pytestmark = [pytest.mark.site, pytest.mark.timeout(300)]

SERVING = "d15c0fe70000"
AT = {"prefill": LEASE.address(7, 11), "decode-old": LEASE.address(7, 12), "decode-new": LEASE.address(7, 13)}
ROUTERS = (LEASE.address(7, 14), LEASE.address(7, 15))
DEPLOYMENT = serving_names(SERVING).router
LABELS = {"k2-release.io/serving": SERVING, "leaderworkerset.sigs.k8s.io/worker-index": "0"}


def pod(name: str) -> dict[str, Any]:
    role = name.partition("-")[0]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"t-discovery-{name}",
            "labels": LABELS | {"k2-release.io/role": role},
            "annotations": {"sglang.ai/bootstrap-port": "8998"},
        },
        # Nobody schedules them: the engines are processes of this test.
        "spec": {"schedulerName": "nobody", "containers": [{"name": "engine", "image": "registry.example/x:1"}]},
    }


class Routers:
    """The node of the routers' pods, and the way to them: runs what the real deployment controller wants to run."""

    def __init__(self, world: SimpleNamespace, processes: Processes) -> None:
        self._world = world
        self._processes = processes
        self._addresses = iter(ROUTERS)
        self.at: dict[str, str] = {}
        """Name of a router's pod -> its address, in the order of their starts."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Routers:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def workers(self, serving: str) -> list[dict[str, Any]]:
        """Ask the newest router, as `ports.Engine` does."""
        if not self.at:
            raise UnavailableError("K2-UNA-001", "No router yet.", retry=After(1.0))
        return GatewayEngine(f"http://{list(self.at.values())[-1]}:{ROUTER_PORT}", "kimi-k2").workers(serving)

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            pods = self._world.cluster.list_objects("Pod", {"k2-release.io/role": "router"})
            names = {pod["metadata"]["name"] for pod in pods}
            for name in names - set(self.at):
                address = self.at[name] = next(self._addresses)
                self._processes.start(name, router_command(address), address)
                ready(self._world, name, address)
            for name in set(self.at) - names:
                del self.at[name]
                self._processes.processes[name].kill()


@pytest.fixture
def running(
    plane: apiserver.ControlPlane, server: KubeCluster, wire: TcpProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SimpleNamespace]:
    """Three engines, pods for two of them, and a router whose way to the API server leads through a proxy."""
    config = apiserver.kubeconfig(wire.url, plane.ca_path, "router", plane.admin.token)
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    processes = Processes(tmp_path)
    said: list[str] = []
    progress = SimpleNamespace(say=said.append)
    world = SimpleNamespace(plane=plane, cluster=server, said=said, progress=progress, clock=SystemClock())
    world.site = SimpleNamespace(namespace=NAMESPACE)
    try:
        model = make_checkpoint(tmp_path / "model")
        for name, address in AT.items():
            processes.start(name, engine_command(model, name.partition("-")[0], address), address)
        for address in AT.values():
            url = f"{engine_url(address)}/health"
            until(lambda url=url: requests.get(url, timeout=30).ok, READY_WITHIN_S, url)
        show(world, "prefill")
        show(world, "decode-old")
        with Routers(world, processes) as world.engine:
            server.apply(deployment())
            yield world
    finally:
        server.delete("Deployment", DEPLOYMENT)
        processes.stop()
        for name in AT:
            server.delete("Pod", f"t-discovery-{name}")


def deployment() -> dict[str, Any]:
    """Return the router's Deployment as each release has it, for nodes that the scheduler does not know."""
    made = copy.deepcopy(load_templates("sglang")["router"])
    made["metadata"]["name"] = DEPLOYMENT
    template = made["spec"]["template"]
    for labels in (made["spec"]["selector"]["matchLabels"], template["metadata"]["labels"]):
        labels["k2-release.io/serving"] = SERVING
    template["spec"] |= {"schedulerName": "nobody", "serviceAccountName": "default"}
    return made


def router_command(address: str) -> list[str]:
    selectors = [f"{key}={value}" for key, value in LABELS.items()]
    return [
        sys.executable, "-m", "sglang_router.launch_router", "--host", address, "--port", str(ROUTER_PORT),
        "--prometheus-host", address, "--prometheus-port", "29000", "--pd-disaggregation", "--service-discovery",
        "--service-discovery-namespace", NAMESPACE, "--service-discovery-port", str(ENGINE_PORT),
        "--prefill-selector", *selectors, "k2-release.io/role=prefill",
        "--decode-selector", *selectors, "k2-release.io/role=decode",
        "--policy", "round_robin", "--worker-startup-check-interval", "1",
    ]  # fmt: skip


def show(world: SimpleNamespace, name: str) -> None:
    """Make the pod of an engine, Running and Ready."""
    world.cluster.create(pod(name))
    ready(world, f"t-discovery-{name}", AT[name])


def ready(world: SimpleNamespace, name: str, address: str) -> None:
    status = {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/status"
    world.plane.admin.request("PATCH", path, {"status": status}, content_type="application/merge-patch+json")


def known(world: SimpleNamespace, *names: str) -> bool:
    try:
        seen = {worker["url"] for worker in world.engine.workers(SERVING) if worker["is_healthy"]}
    except UnavailableError:
        return False
    return seen == {engine_url(AT[name]) for name in names}


def test_a_router_that_kept_a_pod_that_went_while_its_watch_was_cut_is_made_anew(
    running: SimpleNamespace, wire: TcpProxy
) -> None:
    """sglang-router 0.3.2: the reason for `settle_workers` before smoke.

    Seen: it watches again 62 s after the API server is back, and knows the pod that went even then.
    """
    until(lambda: known(running, "prefill", "decode-old"), 60, "the router finds its two engines")
    (first,) = running.engine.at
    wire.refuse()
    running.cluster.delete("Pod", "t-discovery-decode-old")
    until(lambda: running.cluster.get("Pod", "t-discovery-decode-old") is None, 30, "the pod is gone")
    show(running, "decode-new")
    wire.forward()
    assert known(running, "prefill", "decode-old"), "a ghost, as healthy as the others"
    settle_workers(running, SERVING)
    assert known(running, "prefill", "decode-new")
    (second,) = running.engine.at
    assert second != first
    assert [line for line in running.said if "is restarted" in line and AT["decode-old"] in line]
    generation = running.cluster.get("Deployment", DEPLOYMENT)["metadata"]["generation"]
    again = running.cluster.apply(deployment())
    assert again["metadata"]["generation"] == generation, "and applying the set again restarts nothing"
