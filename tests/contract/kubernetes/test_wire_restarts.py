"""An API server that is killed in the middle of a watch, alone and with its etcd, and comes back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.rehearsal.apiserver import ControlPlane
from infra.rehearsal.processes import Supervisor
from tasks.adapters.clock import SystemClock
from tasks.adapters.cluster import KubeCluster
from tasks.adapters.kinds import KINDS
from tasks.adapters.mirror import WatchTimes
from tasks.core.errors import After, UnavailableError
from tasks.steps.patience import PatientCluster
from tests.contract.kubernetes.faulty_proxy import TcpProxy, kubeconfig
from tests.contract.kubernetes.sides import (
    NAMESPACE,
    client,
    config_map,
    eventually,
    lease,
    shows,
    there,
    version,
)

pytestmark = [pytest.mark.site, pytest.mark.timeout(300)]

TIMES = WatchTimes(window_s=1.0, grace_s=0.5, limit_s=2.5)


@pytest.fixture
def far(plane: ControlPlane, wire: TcpProxy, tmp_path: Path) -> KubeCluster:
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(wire.url, plane))
    return client(plane, path, timeout_s=2.0, tries=2, watch_times=TIMES)


def test_a_mirror_whose_version_a_new_server_does_not_know_recovers_with_the_differences(
    plane: ControlPlane, supervisor: Supervisor, server: KubeCluster, far: KubeCluster, wire: TcpProxy, name: str
) -> None:
    for number in range(3):
        server.apply(config_map(f"{name}-{number}", {"test": name}, a="old"))
    known = version(there(server, "ConfigMap", f"{name}-2"))
    with far.mirror("ConfigMap", {"test": name}) as mirror:
        assert shows(mirror, *(f"{name}-{number}" for number in range(3)))
        wire.refuse()  # the mirror is told nothing of what happens now
        server.delete("ConfigMap", f"{name}-0")
        supervisor.restart("kube-apiserver", grace_s=0)
        server.apply(config_map(f"{name}-1", {"test": name}, a="new"))
        server.delete("ConfigMap", f"{name}-2")
        server.apply(config_map(f"{name}-3", {"test": name}))
        query = f"watch=1&timeoutSeconds=1&resourceVersion={known}"
        said = plane.admin.request("GET", f"{KINDS['ConfigMap'].path(NAMESPACE)}?{query}")
        assert (said["type"], said["object"]["code"]) == ("ERROR", 410)
        wire.forward()
        eventually(lambda: shows(mirror, f"{name}-1", f"{name}-3"))
        assert mirror.objects()[0]["data"] == {"a": "new"}


def test_a_watch_and_a_patient_writer_outlive_their_server(
    supervisor: Supervisor, server: KubeCluster, far: KubeCluster, name: str
) -> None:
    server.apply(config_map(f"{name}-0", {"test": name}))
    said: list[str] = []
    patient = PatientCluster(far, SystemClock(), said.append)
    with far.mirror("ConfigMap", {"test": name}) as mirror, ThreadPoolExecutor(1) as pool:
        assert shows(mirror, f"{name}-0")
        spec = supervisor.child("kube-apiserver").spec
        supervisor.stop(spec.name, grace_s=0)
        writing = pool.submit(patient.create, config_map(f"{name}-1", {"test": name}))
        eventually(lambda: said)
        supervisor.start(spec)
        made, created = writing.result(timeout=60)
        assert created
        assert patient.silent_s > 0
        server.delete("ConfigMap", f"{name}-0")
        eventually(lambda: shows(mirror, f"{name}-1"))
        assert mirror.objects() == [made]


def test_the_whole_control_plane_is_killed_and_comes_back(
    supervisor: Supervisor, server: KubeCluster, far: KubeCluster, name: str
) -> None:
    made, _ = server.create(lease(name, "first"))
    server.apply(config_map(name, {"test": name}))
    specs = [supervisor.child(each).spec for each in ("etcd", "kube-apiserver")]
    with far.mirror("ConfigMap", {"test": name}) as mirror:
        assert shows(mirror, name)
        for spec in specs:
            supervisor.stop(spec.name, grace_s=0)
        for call in (lambda: far.get("Lease", name), lambda: far.replace(made), lambda: far.create(lease(name, "x"))):
            with pytest.raises(UnavailableError) as caught:
                call()
            assert isinstance(caught.value.retry, After)
        eventually(lambda: mirror.unconfirmed_s() > TIMES.limit_s)
        with pytest.raises(UnavailableError):
            mirror.objects()
        for child in [supervisor.start(spec, wait=False) for spec in specs]:
            supervisor.wait_ready(child)
        eventually(lambda: shows(mirror, name))
        assert far.get("Lease", name) == made  # nothing that was answered is lost
        taken = far.replace(made | {"spec": {"holderIdentity": "second"}})  # and what was decided before still holds
        assert taken["spec"] == {"holderIdentity": "second"}
        server.delete("ConfigMap", name)
        eventually(lambda: shows(mirror))
