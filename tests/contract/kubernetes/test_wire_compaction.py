"""Lists and watches that go on from a state that etcd has forgotten (410 Gone).

On Secrets: the API server of these tests has no cache of them, so that what etcd says is what the client is told.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.rehearsal.apiserver import ControlPlane
from tasks.adapters.cluster import KubeCluster
from tasks.adapters.kinds import KINDS
from tasks.adapters.mirror import WatchTimes
from tasks.core.errors import UnavailableError
from tasks.ports import Object
from tests.contract.kubernetes.faulty_proxy import HttpProxy, TcpProxy, after, answered, kubeconfig, passed
from tests.contract.kubernetes.sides import NAMESPACE, client, compact, eventually, names, shows, there, version

pytestmark = [pytest.mark.site, pytest.mark.timeout(300)]


@pytest.fixture
def far(plane: ControlPlane, proxy: HttpProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KubeCluster:
    monkeypatch.setattr("tasks.adapters.cluster.PAGE_SIZE", 2)
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(proxy.url, plane))
    return client(plane, path)


def secret(name: str, label: str) -> Object:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "labels": {"test": label}}}


def test_a_list_across_a_compaction_is_read_anew(
    server: KubeCluster, far: KubeCluster, proxy: HttpProxy, plane: ControlPlane, name: str
) -> None:
    for number in range(5):
        server.apply(secret(f"{name}-{number}", name))

    def change_and_forget() -> None:
        server.delete("Secret", f"{name}-0")  # was on the page that has been read
        server.delete("Secret", f"{name}-4")
        server.apply(secret(f"{name}-9", name))
        compact(plane)

    proxy.script(passed, after(change_and_forget))
    found = far.list_objects("Secret", {"test": name})
    assert proxy.statuses == [200, 410, 200, 200]
    assert names(found) == [f"{name}-{number}" for number in (1, 2, 3, 9)]


def test_a_list_whose_pages_are_of_one_state(
    server: KubeCluster, far: KubeCluster, proxy: HttpProxy, name: str
) -> None:
    for number in range(4):
        server.apply(secret(f"{name}-{number}", name))
    proxy.script(passed, after(lambda: server.delete("Secret", f"{name}-3")))
    found = far.list_objects("Secret", {"test": name})
    assert names(found) == [f"{name}-{number}" for number in range(4)]  # as it was at the first page
    assert len(far.list_objects("Secret", {"test": name})) == 3


def test_a_list_that_expires_again_and_again_is_none(far: KubeCluster, proxy: HttpProxy, name: str) -> None:
    for number in range(5):
        far.apply(secret(f"{name}-{number}", name))
    proxy.script(*[passed, answered(410)] * 9)
    with pytest.raises(UnavailableError) as caught:
        far.list_objects("Secret", {"test": name})
    assert caught.value.code == "K2-UNA-001"
    assert len(proxy.seen) == 6


def test_a_mirror_whose_version_is_compacted_recovers_with_the_differences(
    server: KubeCluster, plane: ControlPlane, tmp_path: Path, name: str
) -> None:
    for number in range(3):
        server.apply(secret(f"{name}-{number}", name))
    known = version(there(server, "Secret", f"{name}-2"))
    path = tmp_path / "kubeconfig"
    with TcpProxy(plane.url) as wire:
        path.write_text(kubeconfig(wire.url, plane))
        far = client(plane, path, timeout_s=2.0, tries=2, watch_times=WatchTimes(1.0, 0.5, 2.5))
        with far.mirror("Secret", {"test": name}) as mirror:
            assert shows(mirror, *(f"{name}-{number}" for number in range(3)))
            wire.refuse()  # the mirror is told nothing of what happens now
            server.delete("Secret", f"{name}-0")
            changed = server.merge_patch("Secret", f"{name}-1", {"metadata": {"labels": {"new": "yes"}}})
            server.delete("Secret", f"{name}-2")
            server.apply(secret(f"{name}-3", name))
            compact(plane)
            query = f"watch=1&timeoutSeconds=1&resourceVersion={known}"
            said = plane.admin.request("GET", f"{KINDS['Secret'].path(NAMESPACE)}?{query}")
            assert (said["type"], said["object"]["code"]) == ("ERROR", 410)
            wire.forward()
            eventually(lambda: shows(mirror, f"{name}-1", f"{name}-3"))
            assert mirror.objects()[0] == changed
