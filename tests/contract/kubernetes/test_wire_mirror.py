"""A mirror on connections that are cut, held, dripped, refused or garbled: every silence is noticed by its deadline."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.rehearsal.apiserver import ControlPlane
from tasks.adapters.cluster import KubeCluster
from tasks.adapters.mirror import WatchTimes
from tasks.core.errors import After, Never, UnavailableError
from tasks.ports import Mirror
from tests.contract.kubernetes.faulty_proxy import (
    Exchange,
    Fault,
    HttpProxy,
    TcpProxy,
    answered,
    cut_in_body,
    cut_in_headers,
    dripped,
    kubeconfig,
    lost,
    passed,
)
from tests.contract.kubernetes.sides import client, config_map, eventually, names, service_account_token, shows

pytestmark = [pytest.mark.site, pytest.mark.timeout(300)]

TIMES = WatchTimes(window_s=1.0, grace_s=0.5, limit_s=2.5)


def behind(url: str, plane: ControlPlane, tmp_path: Path, times: WatchTimes = TIMES) -> KubeCluster:
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(url, plane))
    return client(plane, path, timeout_s=1.0, tries=2, watch_times=times)


@pytest.fixture
def far(wire: TcpProxy, plane: ControlPlane, tmp_path: Path) -> KubeCluster:
    """The adapter behind the proxy that knows bytes."""
    return behind(wire.url, plane, tmp_path)


def stays_unavailable(mirror: Mirror) -> None:
    """Wait until a mirror no longer says what nobody confirms."""

    def refused() -> bool:
        try:
            mirror.objects()
        except UnavailableError as error:
            assert error.code == "K2-UNA-001"
            assert isinstance(error.retry, After)
            return True
        return False

    eventually(refused)
    assert mirror.unconfirmed_s() > TIMES.limit_s


def change(server: KubeCluster, name: str) -> None:
    """Delete the object that the mirror knows and make another one."""
    server.delete("ConfigMap", f"{name}-old")
    server.apply(config_map(f"{name}-new", {"test": name}))


def begin(server: KubeCluster, name: str) -> None:
    server.apply(config_map(f"{name}-old", {"test": name}))


def test_a_cut_watch_goes_on_with_what_was_missed(
    server: KubeCluster, far: KubeCluster, wire: TcpProxy, name: str
) -> None:
    begin(server, name)
    with far.mirror("ConfigMap", {"test": name}) as mirror:
        assert shows(mirror, f"{name}-old")
        wire.refuse()
        change(server, name)
        wire.forward()
        eventually(lambda: shows(mirror, f"{name}-new"))


def test_a_held_watch_is_noticed_by_its_own_deadline(
    server: KubeCluster, plane: ControlPlane, wire: TcpProxy, tmp_path: Path, name: str
) -> None:
    times = WatchTimes(window_s=2.0, grace_s=1.0, limit_s=10.0)
    far = behind(wire.url, plane, tmp_path, times)
    begin(server, name)
    with far.mirror("ConfigMap", {"test": name}) as mirror:
        assert shows(mirror, f"{name}-old")
        wire.hold()
        wire.forward()  # only what was open stays held: a new watch would be told everything
        held_at, accepted = time.monotonic(), wire.accepted
        change(server, name)
        assert shows(mirror, f"{name}-old")  # and the held one tells nothing
        eventually(lambda: shows(mirror, f"{name}-new"))
        assert wire.accepted > accepted
        # A held watch never ends: it was given up by its deadline, and not before silence was out of order.
        assert time.monotonic() - held_at >= times.grace_s


def test_while_everything_is_held_nothing_is_said_to_be_so(
    server: KubeCluster, far: KubeCluster, wire: TcpProxy, name: str
) -> None:
    begin(server, name)
    with far.mirror("ConfigMap", {"test": name}) as mirror:
        assert shows(mirror, f"{name}-old")
        wire.hold()
        change(server, name)
        stays_unavailable(mirror)
        wire.forward()
        eventually(lambda: shows(mirror, f"{name}-new"))
        assert mirror.unconfirmed_s() < TIMES.limit_s


def test_while_connections_are_refused_nothing_is_said_to_be_so(
    server: KubeCluster, far: KubeCluster, wire: TcpProxy, name: str
) -> None:
    begin(server, name)
    with far.mirror("ConfigMap", {"test": name}) as mirror:
        assert shows(mirror, f"{name}-old")
        wire.refuse()
        change(server, name)
        stays_unavailable(mirror)
        wire.forward()
        eventually(lambda: shows(mirror, f"{name}-new"))


def test_a_watch_that_drips_is_given_up(server: KubeCluster, far: KubeCluster, wire: TcpProxy, name: str) -> None:
    begin(server, name)
    with far.mirror("ConfigMap", {"test": name}) as mirror:
        assert shows(mirror, f"{name}-old")
        accepted = wire.accepted
        wire.drip(10)  # never silent for as long as a read's timeout, and no event for minutes
        change(server, name)
        stays_unavailable(mirror)
        eventually(lambda: wire.accepted > accepted)
        wire.forward()
        eventually(lambda: shows(mirror, f"{name}-new"))


def test_a_mirror_that_never_could_list_says_so(far: KubeCluster, wire: TcpProxy) -> None:
    wire.refuse()
    began = time.monotonic()
    with far.mirror("ConfigMap") as mirror:
        with pytest.raises(UnavailableError) as caught:
            mirror.objects()
        assert isinstance(caught.value.retry, After)
        assert "did not answer" in caught.value.got
        assert time.monotonic() - began < TIMES.limit_s + 10
        wire.forward()
        eventually(lambda: mirror.unconfirmed_s() < 0.5)
        assert mirror.objects()


def test_a_closed_mirror_leaves_nothing_behind(far: KubeCluster, wire: TcpProxy, name: str) -> None:
    before = set(threading.enumerate())

    def following() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t not in before and t.name == "mirror of ConfigMap"]

    with far.mirror("ConfigMap", {"test": name}) as mirror:
        assert mirror.objects() == []
        assert len(following()) == 1
        wire.hold()  # even a watch that says nothing more ends
    eventually(lambda: not following())


def error_event(code: int, message: str) -> bytes:
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "code": code, "message": message}
    return json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"


WATCH_FAULTS: dict[str, Fault] = {
    "lost": lost,
    "cut in headers": cut_in_headers,
    "cut in body": cut_in_body,
    "dripped": dripped(10),
    "garbage": answered(200, b"<html>\n"),
    "half a line": answered(200, b'{"type": "ADDED", "object": {"kind"'),
    "no event": answered(200, b'{"kind": "ConfigMapList"}\n'),
    "410 answer": answered(410, error_event(410, "too old")),
    "410 event": answered(200, error_event(410, "too old resource version")),
    "500 event": answered(200, error_event(500, "etcd is away")),
    "429": answered(429, b"{}", {"Retry-After": "1"}),
    "500": answered(500),
    "503": answered(503),
    "404": answered(404, b"404 page not found"),
}


@pytest.mark.parametrize("fault", WATCH_FAULTS)
def test_a_watch_that_is_answered_wrongly_is_begun_again(
    server: KubeCluster, plane: ControlPlane, proxy: HttpProxy, tmp_path: Path, name: str, fault: str
) -> None:
    name = f"{name}-{fault.replace(' ', '-')}"[:60]
    begin(server, name)
    far = behind(proxy.url, plane, tmp_path)

    def changed_meanwhile(exchange: Exchange) -> Iterator[bytes]:
        change(server, name)
        yield from WATCH_FAULTS[fault](exchange)

    proxy.script(passed, changed_meanwhile)
    with far.mirror("ConfigMap", {"test": name}) as mirror:
        eventually(lambda: shows(mirror, f"{name}-new"))
        assert names(server.list_objects("ConfigMap", {"test": name})) == [f"{name}-new"]


def test_watches_that_end_at_once_are_not_begun_again_in_a_frenzy(
    plane: ControlPlane, proxy: HttpProxy, tmp_path: Path, name: str
) -> None:
    far = behind(proxy.url, plane, tmp_path)
    proxy.script(passed, *[answered(200, b"")] * 1000)
    with far.mirror("ConfigMap", {"test": name}) as mirror:
        assert mirror.objects() == []
        time.sleep(1.0)
    assert len(proxy.seen) < 20


def test_a_right_that_is_missing_is_said_at_once(
    server: KubeCluster, plane: ControlPlane, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(plane.url, plane, {"token": service_account_token(plane, name)}))
    began = time.monotonic()
    with client(plane, path).mirror("Secret") as mirror, pytest.raises(UnavailableError) as caught:
        mirror.objects()
    assert isinstance(caught.value.retry, Never)
    assert "lacks the right to list secrets" in caught.value.summary
    assert time.monotonic() - began < 20
