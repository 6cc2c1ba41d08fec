"""The Leases of nodes on both sides: of locks that come at once one gets a node, and its runs share it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tasks.core.errors import ConflictError
from tasks.core.lease import read_lease
from tasks.ports import Cluster
from tasks.steps.context import Subject
from tasks.steps.node_holder import DURATION_S, NodeHolder, node_lease_name
from tests.contract.kubernetes.sides import there
from tests.fakes.small_world import RecordingProgress, site
from tests.fakes.steady_clock import SteadyClock

pytestmark = pytest.mark.timeout(300)
NODE = "gpu-17.example.com"


@pytest.fixture
def clock(cluster: Cluster) -> SteadyClock:
    cluster.delete("Lease", node_lease_name(NODE))
    return SteadyClock()


def holder(cluster: Cluster, clock: SteadyClock, lock_digest: str) -> NodeHolder:
    ports = SimpleNamespace(site=site(), cluster=cluster, clock=clock, progress=RecordingProgress())
    subject = SimpleNamespace(
        lock=SimpleNamespace(digest=lock_digest), release=SimpleNamespace(id=f"k2-{lock_digest[0]}-1")
    )
    return NodeHolder(cast(Any, ports), cast(Subject, subject))


def digest(number: int) -> str:
    return f"{number:x}" * 64


def test_of_many_locks_that_come_at_once_one_gets_the_node(cluster: Cluster, clock: SteadyClock) -> None:
    start, won, refused = threading.Barrier(6), list[NodeHolder](), list[ConflictError]()

    def take(number: int) -> None:
        candidate = holder(cluster, clock, digest(number))
        start.wait(10)
        try:
            candidate.acquire([NODE], 0.0)
            won.append(candidate)
        except ConflictError as error:
            refused.append(error)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    held = read_lease(there(cluster, "Lease", node_lease_name(NODE)))
    assert (len(won), len(refused)) == (1, 5)
    assert held.holder in {digest(number) for number in range(6)}
    assert {(error.code, error.where) for error in refused} == {("K2-CON-008", NODE)}
    won[0].release()
    assert read_lease(there(cluster, "Lease", node_lease_name(NODE))).holder == ""


def test_runs_of_one_lock_that_come_at_once_all_get_the_node(cluster: Cluster, clock: SteadyClock) -> None:
    start, won = threading.Barrier(4), list[NodeHolder]()

    def take() -> None:
        candidate = holder(cluster, clock, digest(1))
        start.wait(10)
        candidate.acquire([NODE], 0.0)
        won.append(candidate)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(won) == 4


def test_a_lock_that_is_not_renewed_is_followed(cluster: Cluster, clock: SteadyClock) -> None:
    holder(cluster, clock, digest(1)).acquire([NODE], 0.0)
    second = holder(cluster, clock, digest(2))
    with pytest.raises(ConflictError):
        second.acquire([NODE], 0.0)
    clock.at += DURATION_S + 1
    second.acquire([NODE], 0.0)
    held = there(cluster, "Lease", node_lease_name(NODE))
    assert (read_lease(held).holder, read_lease(held).generation) == (digest(2), 2)
    assert held["metadata"]["annotations"]["k2-release.io/release"] == "k2-2-1"
