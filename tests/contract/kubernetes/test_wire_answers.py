"""What the API server's error answers mean at the port."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from infra.rehearsal.apiserver import ControlPlane
from tasks.adapters.cluster import KubeCluster
from tasks.adapters.kinds import KINDS, Kind
from tasks.core.errors import After, InputError, UnavailableError
from tests.contract.kubernetes.sides import LOG_NODE, NAMESPACE, Side, client, config_map, kubelet, pod

pytestmark = [pytest.mark.site, pytest.mark.timeout(300)]


def test_a_kind_that_the_server_does_not_have(server: KubeCluster, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cast(dict[str, Kind], KINDS), "Widget", Kind("example.com/v1", "widgets"))
    widget = {"apiVersion": "example.com/v1", "kind": "Widget", "metadata": {"name": name}}
    for call in (
        lambda: server.list_objects("Widget"),
        lambda: server.apply(widget),
        lambda: server.create(widget),
    ):
        with pytest.raises(InputError) as caught:
            call()
        assert caught.value.code == "K2-INP-008"
        assert caught.value.where.startswith("Widget")
    assert server.get("Widget", name) is None
    server.delete("Widget", name)


def test_what_is_too_large_is_refused(server: KubeCluster, name: str) -> None:
    for size_bytes, word in ((1_200_000, "Too long"), (4_000_000, "too large")):
        with pytest.raises(InputError) as caught:
            server.create(config_map(name, a="x" * size_bytes))
        assert caught.value.code == "K2-INP-008"
        assert word in caught.value.summary
        assert len(caught.value.summary) <= 400


def test_a_log_of_a_node_that_does_not_answer(server: KubeCluster, plane: ControlPlane, name: str) -> None:
    node = f"{name}-node"
    with kubelet(plane, node, "127.0.0.10") as logs:
        server.create(pod(name, node))
        logs[name, "main"] = "one\n"
        assert server.pod_log(name, "main", 5) == "one\n"
    impatient = client(plane, tries=2)
    with pytest.raises(UnavailableError) as caught:
        impatient.pod_log(name, "main", 5)
    assert isinstance(caught.value.retry, After)
    server.delete("Node", node)
    server.delete("Pod", name)


def test_a_log_that_is_not_text(server: KubeCluster, real: Side, name: str) -> None:
    server.create(pod(name, LOG_NODE))
    real.say(name, "main", b"\xff\x00 fine\n".decode("latin-1"))
    assert server.pod_log(name, "main", 5).endswith(" fine\n")


def test_a_context_that_is_not_there_is_never_guessed(plane: ControlPlane, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        KubeCluster(str(plane.kubeconfig), "production", NAMESPACE)
    assert (caught.value.got, caught.value.where) == ("production", str(plane.kubeconfig))
    (tmp_path / "broken").write_text("{")
    for path in (tmp_path / "nothing", tmp_path / "broken"):
        with pytest.raises(InputError):
            KubeCluster(str(path), "c", NAMESPACE)
