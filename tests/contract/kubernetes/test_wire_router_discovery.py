"""The real router finds its workers by a watch of pods: what it makes of one that is cut, and what we make of that."""

from __future__ import annotations

import json
import sys
import time
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
from tasks.core.router_view import stale_workers
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
ROUTER = LEASE.address(7, 14)
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


@pytest.fixture
def running(
    plane: apiserver.ControlPlane, server: KubeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SimpleNamespace]:
    """Three engines, pods for two of them, and a router whose way to the API server leads through a proxy."""
    with TcpProxy(plane.url) as proxy:
        config = apiserver.kubeconfig(proxy.url, plane.ca_path, "router", plane.admin.token)
        (tmp_path / "kubeconfig").write_text(json.dumps(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        processes = Processes(tmp_path)
        world = SimpleNamespace(plane=plane, cluster=server, proxy=proxy)
        try:
            model = make_checkpoint(tmp_path / "model")
            for name, address in AT.items():
                processes.start(name, engine_command(model, name.partition("-")[0], address), address)
            for address in AT.values():
                url = f"{engine_url(address)}/health"
                until(lambda url=url: requests.get(url, timeout=30).ok, READY_WITHIN_S, url)
            show(world, "prefill")
            show(world, "decode-old")
            processes.start("router", router_command(), ROUTER)
            world.engine = GatewayEngine(f"http://{ROUTER}:{ROUTER_PORT}", "kimi-k2")
            world.clock, world.progress = SystemClock(), SimpleNamespace(say=print)
            yield world
        finally:
            processes.stop()
            for name in AT:
                server.delete("Pod", f"t-discovery-{name}")


def router_command() -> list[str]:
    selectors = [f"{key}={value}" for key, value in LABELS.items()]
    return [
        sys.executable, "-m", "sglang_router.launch_router", "--host", ROUTER, "--port", str(ROUTER_PORT),
        "--prometheus-host", ROUTER, "--prometheus-port", "29000", "--pd-disaggregation", "--service-discovery",
        "--service-discovery-namespace", NAMESPACE, "--service-discovery-port", str(ENGINE_PORT),
        "--prefill-selector", *selectors, "k2-release.io/role=prefill",
        "--decode-selector", *selectors, "k2-release.io/role=decode",
        "--policy", "round_robin", "--worker-startup-check-interval", "1",
    ]  # fmt: skip


def show(world: SimpleNamespace, name: str) -> None:
    """Make the pod of an engine, Running and Ready."""
    world.cluster.create(pod(name))
    status = {
        "phase": "Running",
        "podIP": AT[name],
        "podIPs": [{"ip": AT[name]}],
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/t-discovery-{name}/status"
    world.plane.admin.request("PATCH", path, {"status": status}, content_type="application/merge-patch+json")


def healthy(world: SimpleNamespace) -> set[str]:
    return {worker["url"] for worker in world.engine.workers(SERVING) if worker["is_healthy"]}


def known(world: SimpleNamespace, *names: str) -> bool:
    try:
        return healthy(world) == {engine_url(AT[name]) for name in names}
    except Exception:
        return False


def test_a_pod_that_went_while_the_watch_was_cut_stays_a_worker_until_it_is_forgotten(running: SimpleNamespace) -> None:
    """sglang-router 0.3.2: the reason for `settle_workers` before smoke."""
    until(lambda: known(running, "prefill", "decode-old"), 60, "the router finds its two engines")
    running.proxy.refuse()
    running.cluster.delete("Pod", "t-discovery-decode-old")
    until(lambda: running.cluster.get("Pod", "t-discovery-decode-old") is None, 30, "the pod is gone")
    show(running, "decode-new")
    running.proxy.forward()
    began = time.monotonic()
    until(lambda: engine_url(AT["decode-new"]) in healthy(running), 120, "the router watches again")
    print(f"the router watched again {time.monotonic() - began:.0f} s after the API server was back")
    pods = running.cluster.list_objects("Pod", {"k2-release.io/serving": SERVING})
    stale = stale_workers(pods, running.engine.workers(SERVING))
    assert [worker["url"] for worker in stale] == [engine_url(AT["decode-old"])], "a ghost, as healthy as the others"
    settle_workers(running, SERVING)
    assert known(running, "prefill", "decode-new")
