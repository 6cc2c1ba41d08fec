"""One real control plane for all cases of this directory, and both sides of the port."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.rehearsal import apiserver, crds
from infra.rehearsal.binaries import ensure_control_plane
from infra.rehearsal.processes import Supervisor
from tasks.adapters.cluster import KubeCluster
from tasks.ports import Cluster
from tests.contract.kubernetes.faulty_proxy import HttpProxy, TcpProxy
from tests.contract.kubernetes.sides import NAMESPACE, Side, client, eventually, fake_side, namespace, real_side


@pytest.fixture(scope="session")
def supervisor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    """What starts, kills and restarts the programs of the control plane."""
    with Supervisor(tmp_path_factory.mktemp("plane")) as supervisor:
        yield supervisor


@pytest.fixture(scope="session")
def plane(supervisor: Supervisor) -> apiserver.ControlPlane:
    """A real control plane with the site's custom resources and namespace."""
    # Without a cache of Secrets their lists and watches know what etcd knows, and no more: see the compaction cases.
    flags = ("--watch-cache-sizes=secrets#0",)
    programs, definitions = ensure_control_plane(print), crds.ensure_files(print)
    started = apiserver.start(supervisor, programs, extra_apiserver_flags=flags, definitions=definitions)
    started.admin.request("POST", "/api/v1/namespaces", namespace(NAMESPACE))
    # Without it every pod is refused.
    eventually(lambda: started.admin.answers(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default"), 60)
    return started


@pytest.fixture(scope="session")
def real(plane: apiserver.ControlPlane) -> Iterator[Side]:
    """The real side, shared by all cases: each uses names of its own."""
    with real_side(plane) as side:
        yield side


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.site)])
def side(request: pytest.FixtureRequest) -> Side:
    """Each side in turn."""
    if request.param == "fake":
        return fake_side()
    side: Side = request.getfixturevalue("real")
    return side


@pytest.fixture
def cluster(side: Side) -> Cluster:
    """The port of each side in turn."""
    return side.cluster


@pytest.fixture
def server(plane: apiserver.ControlPlane) -> KubeCluster:
    """The adapter on the real API server, for wire cases."""
    return client(plane)


@pytest.fixture
def wire(plane: apiserver.ControlPlane) -> Iterator[TcpProxy]:
    """A proxy before the API server that knows bytes and connections."""
    with TcpProxy(plane.url) as wire:
        yield wire


@pytest.fixture
def proxy(plane: apiserver.ControlPlane) -> Iterator[HttpProxy]:
    """A proxy before the API server that knows requests."""
    with HttpProxy(plane) as proxy:
        yield proxy


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name that no other case uses."""
    return "t-" + request.node.name.removeprefix("test_").split("[")[0].replace("_", "-")[:50].strip("-")
