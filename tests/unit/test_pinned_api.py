"""A cluster is asked who it is before it is asked for anything else, and another one is asked for nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks import wiring
from tasks.adapters.access import ACCESS_REVIEWS
from tasks.adapters.cluster import KubeCluster
from tasks.adapters.kube_api import KubeApi
from tasks.adapters.pinned_api import PinnedApi
from tasks.core.errors import After, InputError, UnavailableError
from tasks.core.permissions import Right
from tasks.progress import TerminalProgress
from tests.contract.odd_server import odd_server, send
from tests.fakes.counted_server import Counted, counted_server, write_kubeconfig
from tests.fakes.site_files import write_site

UID, OTHER = "0b5e8c2e-7a41-4c7e-9d4f-1f2a3b4c5d6e", "aaaaaaaa-7a41-4c7e-9d4f-1f2a3b4c5d6e"
QUESTION = "GET /api/v1/namespaces/kube-system"
OBJECT = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x", "resourceVersion": "1"}}
CALLS: dict[str, Callable[[KubeCluster], Any]] = {
    "get": lambda c: c.get("Node", "x"),
    "list": lambda c: c.list_objects("Pod"),
    "apply": lambda c: c.apply(OBJECT),
    "dry run": lambda c: c.apply(OBJECT, dry_run=True),
    "create": lambda c: c.create(OBJECT),
    "replace": lambda c: c.replace(OBJECT),
    "patch": lambda c: c.merge_patch("ConfigMap", "x", {}),
    "delete": lambda c: c.delete("ConfigMap", "x"),
    "watch": lambda c: c.open_watch("Pod", {}, "k2", "1", 5, 5),
    "log": lambda c: c.pod_log("p", "engine", 5),
}


def pinned(tmp_path: Path, server: Counted) -> KubeCluster:
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", ("ours", server.url))
    return KubeCluster(str(kubeconfig), "ours", "k2", cluster_uid=UID)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("uid", [OTHER, ""])
def test_another_cluster_gets_no_request_but_the_question(tmp_path: Path, call: str, uid: str) -> None:
    with counted_server(uid) as server:
        with pytest.raises(InputError) as caught:
            CALLS[call](pinned(tmp_path, server))
        assert server.requests == [QUESTION]
    error = caught.value
    assert error.code == "K2-INP-009"
    assert UID in error.expected
    assert (uid or "no namespace") in error.got
    assert "context ours" in error.where


def test_the_expected_cluster_is_asked_once(tmp_path: Path) -> None:
    with counted_server(UID) as server:
        cluster = pinned(tmp_path, server)
        for _ in range(2):
            with pytest.raises(UnavailableError):
                cluster.list_objects("Node")
        assert server.requests == [QUESTION, *["GET /api/v1/nodes?limit=500"] * 2]


def test_a_cluster_that_was_another_one_is_asked_again(tmp_path: Path) -> None:
    with counted_server(OTHER) as server:
        cluster = pinned(tmp_path, server)
        for _ in range(2):
            with pytest.raises(InputError):
                cluster.apply(OBJECT)
        assert server.requests == [QUESTION, QUESTION]


def test_a_login_that_is_read_anew_is_asked_again(tmp_path: Path) -> None:
    """The kubeconfig may lead elsewhere by the time that its token is refused."""
    with counted_server(UID) as first, counted_server(OTHER) as second:
        cluster = pinned(tmp_path, first)
        with pytest.raises(UnavailableError):
            cluster.list_objects("Node")
        write_kubeconfig(tmp_path / "kubeconfig", ("ours", second.url))
        first.otherwise = 401
        with pytest.raises(InputError) as caught:
            cluster.list_objects("Node")
        assert caught.value.code == "K2-INP-009"
        assert second.requests == [QUESTION]


def test_who_may_not_ask_may_ask_what_is_missing(tmp_path: Path) -> None:
    """Else the first of all rights would be the only one that is ever named, and its refusal doubted for long."""
    with counted_server(UID) as server:
        server.refusal = 403
        began = time.monotonic()
        with pytest.raises(UnavailableError):
            pinned(tmp_path, server).missing_rights([Right("", "pods", "list", "k2")])
        assert time.monotonic() - began < 5
        assert set(server.requests) - {QUESTION, "GET /readyz"} == {f"POST {ACCESS_REVIEWS}"}


def test_what_is_in_front_of_a_cluster_is_no_other_cluster(tmp_path: Path) -> None:
    with odd_server(lambda handler: send(handler, 404, b"default backend - 404")) as url:
        kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", ("ours", url))
        with pytest.raises(UnavailableError) as caught:
            KubeCluster(str(kubeconfig), "ours", "k2", cluster_uid=UID, tries=1).list_objects("Node")
    assert isinstance(caught.value.retry, After)


def test_what_was_asked_who_it_is_is_what_gets_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread reads a new login, of another cluster, between the two."""
    with counted_server(UID) as first, counted_server(OTHER) as second:
        other = KubeApi(str(write_kubeconfig(tmp_path / "other", ("ours", second.url))), "ours", timeout_s=2.0, tries=1)
        api = PinnedApi(
            str(write_kubeconfig(tmp_path / "kubeconfig", ("ours", first.url))), "ours", UID, timeout_s=2.0, tries=1
        )
        real = api._check_uid

        def check(got: str) -> None:
            real(got)
            api._client = other._client

        monkeypatch.setattr(api, "_check_uid", check)
        with pytest.raises(UnavailableError):
            api.object("GET", "/api/v1/nodes/x", where="Node/x")
        assert first.requests[:2] == [QUESTION, "GET /api/v1/nodes/x"]
        assert not [asked for asked in second.requests if asked != QUESTION]


@pytest.mark.parametrize(("status", "error"), [(403, "forbids it"), (401, "does not know this identity")])
def test_who_may_not_ask_is_told_so_and_sends_nothing_else(tmp_path: Path, status: int, error: str) -> None:
    with counted_server(UID) as server:
        server.refusal = status
        with pytest.raises(UnavailableError, match=error):
            pinned(tmp_path, server).apply(OBJECT)
        assert set(server.requests) == {QUESTION}


@pytest.mark.parametrize(("fields", "kind"), [({}, KubeApi), ({"cluster_uid": UID}, PinnedApi)])
def test_a_site_file_with_a_uid_gets_a_pinned_api(tmp_path: Path, fields: dict[str, str], kind: type[KubeApi]) -> None:
    write_kubeconfig(tmp_path / "kubeconfig", ("ours", "http://127.0.0.1:1"))
    site = wiring.read_site(str(write_site(tmp_path, context="ours", **fields)))
    assert type(wiring.open_cluster(site)._api) is kind
    connected = wiring.connect(str(tmp_path / "site.yaml"), "test", TerminalProgress()).cluster
    assert isinstance(connected, KubeCluster)
    assert type(connected._api) is kind


@pytest.mark.parametrize("uid", ["default", UID.upper(), UID + "0"])
def test_what_is_no_uid_is_refused_in_the_file(tmp_path: Path, uid: str) -> None:
    with pytest.raises(InputError) as caught:
        wiring.read_site(str(write_site(tmp_path, cluster_uid=uid)))
    assert "cluster_uid" in caught.value.where
