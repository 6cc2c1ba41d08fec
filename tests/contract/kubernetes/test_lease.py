"""The traffic lease on both sides: the product's own holder takes, renews, loses and gives it back."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from tasks.core.errors import ConflictError
from tasks.core.lease import LEASE, SURELY_DEAD_S, read_lease
from tasks.core.route import LIVE_ROUTE
from tasks.ports import Cluster
from tasks.steps.context import Ports
from tasks.steps.holder import TrafficHolder
from tests.contract.kubernetes.sides import http_route, there
from tests.fakes.small_world import RecordingProgress, site
from tests.fakes.steady_clock import SteadyClock

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def clock(cluster: Cluster) -> SteadyClock:
    for kind, name in (("Lease", LEASE), ("HTTPRoute", LIVE_ROUTE)):
        cluster.delete(kind, name)
    return SteadyClock()


def holder(cluster: Cluster, clock: SteadyClock, run: str) -> TrafficHolder:
    """Return the holder of a flow run; it needs a cluster and a clock, and no other port."""
    others = cast(Any, None)
    return TrafficHolder(
        Ports(
            site=site(),
            hub=others,
            store=others,
            cluster=cluster,
            engine=others,
            stats=others,
            clock=clock,
            progress=RecordingProgress(),
            templates={},
            rights=(),
            run=run,
            tool="k2-release 0",
        )
    )


def outlive(clock: SteadyClock) -> None:
    """Let the time pass that a holder has promised to renew in."""
    clock.at += site().lease_duration_s + 1


def long_after(clock: SteadyClock) -> None:
    """Let so much time pass that a holder that has not renewed needs no watching to be taken for dead."""
    outlive(clock)
    clock.at += SURELY_DEAD_S


def test_one_holds_at_a_time(cluster: Cluster, clock: SteadyClock) -> None:
    first, second = (holder(cluster, clock, run) for run in ("first", "second"))
    first.acquire(0)
    with pytest.raises(ConflictError) as caught:
        second.acquire(0)
    assert (caught.value.code, caught.value.got) == ("K2-CON-001", "first")
    first.renew()
    held = read_lease(there(cluster, "Lease", LEASE))
    assert (held.holder, held.generation, held.renewed_at) == ("first", 1, clock.now())


def test_a_holder_that_stops_renewing_is_followed_and_fenced_off(cluster: Cluster, clock: SteadyClock) -> None:
    first, second = (holder(cluster, clock, run) for run in ("first", "second"))
    first.acquire(0)
    outlive(clock)
    with pytest.raises(ConflictError):
        second.acquire(0)  # nobody has watched it yet: an outage may have kept it from renewing
    second.acquire(site().lease_duration_s + 5)
    assert (first.generation, second.generation) == (1, 2)
    with pytest.raises(ConflictError) as caught:
        first.renew()
    assert (caught.value.code, caught.value.got) == ("K2-CON-002", "second")
    first.release()  # of what is no longer ours
    second.renew()
    assert read_lease(there(cluster, "Lease", LEASE)).holder == "second"


def test_a_lease_that_was_given_back_can_be_taken_at_once(cluster: Cluster, clock: SteadyClock) -> None:
    first, second = (holder(cluster, clock, run) for run in ("first", "second"))
    first.acquire(0)
    first.release()
    assert read_lease(there(cluster, "Lease", LEASE)).holder == ""
    second.acquire(0)
    assert second.generation == 2


def test_the_same_run_started_again_fences_its_first_process_off(cluster: Cluster, clock: SteadyClock) -> None:
    before, again = holder(cluster, clock, "run"), holder(cluster, clock, "run")
    before.acquire(0)
    again.acquire(0)
    assert again.generation == 2
    with pytest.raises(ConflictError):
        before.renew()


def test_of_many_that_want_an_expired_lease_one_gets_it(cluster: Cluster, clock: SteadyClock) -> None:
    holder(cluster, clock, "dead").acquire(0)
    long_after(clock)
    start = threading.Barrier(6)
    won: list[TrafficHolder] = []
    refused: list[str] = []

    def take(run: str) -> None:
        candidate = holder(cluster, clock, run)
        start.wait(10)
        try:
            candidate.acquire(0)
            won.append(candidate)
        except ConflictError as error:
            refused.append(error.code)

    threads = [threading.Thread(target=take, args=(f"run-{number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(won) == 1
    assert won[0].generation == 2
    assert len(refused) == 5
    assert set(refused) <= {"K2-CON-001", "K2-CON-002"}


def test_a_lease_that_somebody_deleted_starts_above_what_is_on_the_route(cluster: Cluster, clock: SteadyClock) -> None:
    route = http_route(LIVE_ROUTE, 1)
    route["metadata"]["annotations"]["k2-release.io/generation"] = "7"
    cluster.create(route)
    one = holder(cluster, clock, "one")
    one.acquire(0)
    assert one.generation == 8
    cluster.delete("Lease", LEASE)
    with pytest.raises(ConflictError):
        one.renew()
