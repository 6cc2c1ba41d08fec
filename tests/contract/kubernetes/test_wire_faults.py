"""Single requests on a network that refuses, cuts, holds, drips and garbles, and on a server that puts off."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from infra.rehearsal.apiserver import ControlPlane
from tasks.adapters.cluster import KubeCluster
from tasks.core.errors import After, ConflictError, UnavailableError
from tasks.ports import Object
from tests.contract.kubernetes.faulty_proxy import (
    Fault,
    HttpProxy,
    TcpProxy,
    answered,
    cut_in_body,
    cut_in_headers,
    cut_short,
    done_and_lost,
    dripped,
    held,
    kubeconfig,
    lost,
    passed,
)
from tests.contract.kubernetes.sides import client, config_map, lease, there, version

pytestmark = [pytest.mark.site, pytest.mark.timeout(300)]

TIMEOUT_S = 1.0
SOON_S = TIMEOUT_S + 3.0
"""Far less than one timeout for each try, and enough for a busy machine."""


def through(url: str, plane: ControlPlane, tmp_path: Path, **options: Any) -> KubeCluster:
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(url, plane))
    return client(plane, path, **{"timeout_s": TIMEOUT_S, "tries": 3, **options})


@pytest.fixture
def far(proxy: HttpProxy, plane: ControlPlane, tmp_path: Path) -> KubeCluster:
    """The adapter behind the proxy that knows requests."""
    return through(proxy.url, plane, tmp_path)


@contextmanager
def lasting(at_least_s: float, at_most_s: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert at_least_s <= time.monotonic() - began <= at_most_s


@contextmanager
def unavailable() -> Iterator[None]:
    """What is inside ends in an error that says that trying again may help."""
    with pytest.raises(UnavailableError) as caught:
        yield
    assert caught.value.code == "K2-UNA-001"
    assert isinstance(caught.value.retry, After)


# -- connections


def test_a_refused_connection(wire: TcpProxy, plane: ControlPlane, tmp_path: Path, name: str) -> None:
    far = through(wire.url, plane, tmp_path)
    made = far.apply(config_map(name))
    wire.refuse()
    for call in (lambda: far.get("ConfigMap", name), lambda: far.apply(config_map(name)), lambda: far.create(made)):
        with lasting(0, 10), unavailable():
            call()
    wire.forward()
    assert far.get("ConfigMap", name) == made


def test_connections_that_were_cut_while_idle_are_made_anew(
    wire: TcpProxy, plane: ControlPlane, tmp_path: Path, name: str
) -> None:
    far = through(wire.url, plane, tmp_path, tries=1)
    made, _ = far.create(lease(name, "first"))
    for number in range(3):
        wire.cut()
        time.sleep(0.1)
        made = far.replace(made | {"spec": {"holderIdentity": f"holder-{number}"}})
    assert wire.accepted == 4


def test_a_connection_that_is_cut_in_the_handshake(wire: TcpProxy, plane: ControlPlane, tmp_path: Path) -> None:
    far = through(wire.url, plane, tmp_path)
    wire.cut_after(100)
    with unavailable():
        far.list_objects("ConfigMap")
    assert wire.accepted == 3
    wire.forward()
    assert far.list_objects("ConfigMap")


def test_a_held_connection_ends_by_the_timeout(wire: TcpProxy, plane: ControlPlane, tmp_path: Path, name: str) -> None:
    far = through(wire.url, plane, tmp_path, tries=5)
    far.apply(config_map(name))
    for call in (
        lambda: far.get("ConfigMap", name),
        lambda: far.list_objects("ConfigMap"),
        lambda: far.apply(config_map(name, a="1")),
        lambda: far.merge_patch("ConfigMap", name, {"data": {"a": "1"}}),
        lambda: far.pod_log(name, "main", 1),
    ):
        wire.hold()
        with lasting(TIMEOUT_S * 0.9, SOON_S), unavailable():
            call()
        wire.forward()
    wire.cut()


def test_a_dripped_answer_ends_by_the_timeout(proxy: HttpProxy, plane: ControlPlane, tmp_path: Path, name: str) -> None:
    far = through(proxy.url, plane, tmp_path, tries=5)
    far.apply(config_map(name, a="x" * 200))
    proxy.script(*[dripped(20)] * 5)  # each byte comes long before the timeout, the last one long after it
    with lasting(TIMEOUT_S * 0.9, SOON_S), unavailable():
        far.get("ConfigMap", name)


def test_a_slow_answer_within_the_timeout_is_an_answer(far: KubeCluster, proxy: HttpProxy, name: str) -> None:
    made = far.apply(config_map(name))
    proxy.script(dripped(5000))
    assert far.get("ConfigMap", name) == made
    assert len(proxy.seen) == 1


# -- answers that are none


@pytest.mark.parametrize("fault", [lost, done_and_lost, cut_in_headers, cut_in_body], ids=lambda f: f.__name__)
def test_a_cut_answer_is_asked_for_again(far: KubeCluster, proxy: HttpProxy, name: str, fault: Fault) -> None:
    made = far.apply(config_map(name, {"test": name}, a="1"))
    for read in (lambda: far.get("ConfigMap", name), lambda: far.list_objects("ConfigMap", {"test": name})[0]):
        proxy.script(fault, fault)
        assert read() == made
        assert len(proxy.seen) == 3
        proxy.script(*[fault] * 9)
        with unavailable():
            read()
        assert len(proxy.seen) == 3


GARBAGE = {
    "nothing": answered(200, b""),
    "html": answered(200, b"<html>Log in to the Wi-Fi</html>", {"Content-Type": "text/html"}),
    "half": cut_short,
    "null": answered(200, b"null"),
    "a list": answered(200, b"[]"),
    "no HTTP": lambda exchange: iter([b"\x00\x01\x02\x03" * 100]),
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_is_no_object(far: KubeCluster, proxy: HttpProxy, name: str, garbage: str) -> None:
    far.apply(config_map(name, {"test": name}, a="1"))
    for call in (
        lambda: far.get("ConfigMap", name),
        lambda: far.list_objects("ConfigMap", {"test": name}),
        lambda: far.merge_patch("ConfigMap", name, {"data": {"a": "1"}}),
        lambda: far.create(config_map(name)),
    ):
        proxy.script(*[GARBAGE[garbage]] * 9)
        with unavailable():
            call()


@pytest.mark.parametrize("body", [{}, {"kind": "Status", "status": "Success"}, {"kind": "ConfigMapList", "items": {}}])
def test_what_is_no_list_is_not_an_empty_one(far: KubeCluster, proxy: HttpProxy, body: Object) -> None:
    proxy.script(answered(200, json.dumps(body).encode()))
    with unavailable():
        far.list_objects("Pod")


def test_an_empty_list_is_one(far: KubeCluster, proxy: HttpProxy) -> None:
    for items in ([], None):  # a server written in Go says either
        proxy.script(answered(200, json.dumps({"kind": "PodList", "items": items, "metadata": {}}).encode()))
        assert far.list_objects("Pod") == []


def test_a_list_that_is_cut_between_its_pages_is_whole_or_none(
    far: KubeCluster, proxy: HttpProxy, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.adapters.cluster.PAGE_SIZE", 2)
    for number in range(5):
        far.apply(config_map(f"{name}-{number}", {"test": name}))
    proxy.script(passed, cut_in_body, lost)
    assert len(far.list_objects("ConfigMap", {"test": name})) == 5
    assert len(proxy.seen) == 5
    proxy.script(passed, *[cut_in_body] * 9)
    with unavailable():
        far.list_objects("ConfigMap", {"test": name})


# -- a server that puts off


def throttled(after: str, status: int = 429) -> Fault:
    body = json.dumps({"kind": "Status", "code": status, "message": "too many requests", "reason": "TooManyRequests"})
    return answered(status, body.encode(), {"Retry-After": after})


def test_a_throttled_request_waits_as_long_as_it_was_told(far: KubeCluster, proxy: HttpProxy, name: str) -> None:
    made = far.apply(config_map(name))
    proxy.script(throttled("1"))
    with lasting(1.0, 4.0):
        assert far.get("ConfigMap", name) == made
    assert len(proxy.seen) == 2


def test_every_throttled_write_is_sent_again_as_it_was_not_looked_at(
    proxy: HttpProxy, plane: ControlPlane, tmp_path: Path, name: str
) -> None:
    far = through(proxy.url, plane, tmp_path, timeout_s=10.0)
    again = [throttled("0"), throttled("0")]
    proxy.script(*again)
    made, created = far.create(lease(name, "first"))
    assert created
    proxy.script(*again)
    made = far.replace(made | {"spec": {"holderIdentity": "second"}})
    proxy.script(*again)
    made = far.merge_patch(
        "Lease", name, {"metadata": {"resourceVersion": version(made)}, "spec": {"leaseTransitions": 2}}
    )
    assert made["spec"] == {"holderIdentity": "second", "leaseTransitions": 2}
    assert len(proxy.seen) == 3


def test_a_wait_that_is_asked_for_is_bounded(proxy: HttpProxy, plane: ControlPlane, tmp_path: Path, name: str) -> None:
    far = through(proxy.url, plane, tmp_path, longest_wait_s=0.5, timeout_s=10.0)
    proxy.script(throttled("3600"))
    with lasting(0.5, 5.0):
        assert far.get("ConfigMap", name) is None
    proxy.script(*[throttled("3600")] * 9)
    with lasting(1.0, 6.0), unavailable():
        far.get("ConfigMap", name)
    assert len(proxy.seen) == 3


def test_a_server_without_its_store_is_asked_again(far: KubeCluster, proxy: HttpProxy, name: str) -> None:
    away = answered(503, b'{"message": "etcd is away"}')
    made = far.apply(config_map(name))
    proxy.script(away, answered(503, b"no JSON"))
    assert far.get("ConfigMap", name) == made
    proxy.script(*[away] * 9)
    with pytest.raises(UnavailableError, match="etcd is away"):
        far.get("ConfigMap", name)
    assert len(proxy.seen) == 3


# -- writes of which nobody knows

MAYBE: dict[str, Fault] = {
    "lost before": lost,
    "503": answered(503),
    "500": answered(500),
    "504": answered(504, b"Gateway Timeout"),
    "lost after": done_and_lost,
    "cut in headers": cut_in_headers,
    "cut in body": cut_in_body,
    "garbled": cut_short,
}
DONE = {"lost after", "cut in headers", "cut in body", "garbled"}


@pytest.mark.parametrize("fault", MAYBE)
def test_a_replacement_of_which_nobody_knows_can_be_found_out(
    far: KubeCluster, proxy: HttpProxy, name: str, fault: str
) -> None:
    name = f"{name}-{fault.replace(' ', '-')}"
    before, _ = far.create(lease(name, "first"))
    proxy.script(MAYBE[fault])
    wanted = before | {"spec": {"holderIdentity": "second"}}
    with unavailable():
        far.replace(wanted)
    assert len(proxy.seen) == 1  # never sent twice
    now = there(far, "Lease", name)
    assert (now["spec"]["holderIdentity"], version(now) != version(before)) == (
        ("second", True) if fault in DONE else ("first", False)
    )
    if fault in DONE:
        with pytest.raises(ConflictError) as caught:  # the write itself is why its precondition does not hold any more
            far.replace(wanted)
        assert caught.value.code == "K2-CON-002"
    else:
        assert far.replace(wanted)["spec"] == {"holderIdentity": "second"}


@pytest.mark.parametrize("fault", MAYBE)
def test_a_creation_of_which_nobody_knows_is_found_there(
    far: KubeCluster, proxy: HttpProxy, name: str, fault: str
) -> None:
    name = f"{name}-{fault.replace(' ', '-')}"
    proxy.script(MAYBE[fault])
    with unavailable():
        far.create(lease(name, "first"))
    assert len(proxy.seen) == 1
    obj, created = far.create(lease(name, "first"))
    assert created is (fault not in DONE)
    assert obj["spec"]["holderIdentity"] == "first"


@pytest.mark.parametrize("fault", ["lost before", "lost after", "cut in headers", "cut in body", "503"])
def test_what_may_be_repeated_is_repeated(far: KubeCluster, proxy: HttpProxy, name: str, fault: str) -> None:
    name = f"{name}-{fault.replace(' ', '-')}"
    proxy.script(MAYBE[fault])
    applied = far.apply(config_map(name, a="1"))
    assert len(proxy.seen) == 2
    assert far.get("ConfigMap", name) == applied
    proxy.script(MAYBE[fault])
    far.delete("ConfigMap", name, uid=applied["metadata"]["uid"])
    assert len(proxy.seen) == 2
    assert far.get("ConfigMap", name) is None


def test_a_held_write_may_have_happened(far: KubeCluster, proxy: HttpProxy, name: str) -> None:
    def done_and_held(exchange: Any) -> Iterator[bytes]:
        exchange.forward()
        yield from held(exchange)

    calls: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: far.create(lease(name, "first")), "first"),
        (lambda: far.merge_patch("Lease", name, {"spec": {"holderIdentity": "second"}}), "second"),
    )
    for call, expected in calls:
        proxy.script(done_and_held)
        with lasting(TIMEOUT_S * 0.9, SOON_S), unavailable():
            call()
        assert there(far, "Lease", name)["spec"]["holderIdentity"] == expected
