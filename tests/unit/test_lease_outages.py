"""The traffic lease while the API is away, too slow, or refuses to have it written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tasks.core.errors import After, ConflictError, UnavailableError
from tasks.core.lease import LEASE, read_lease
from tasks.steps.holder import TrafficHolder
from tasks.steps.patience import PatientCluster
from tests.fakes.shifting_world import holding_of
from tests.fakes.small_world import World


class Flaky:
    """A world's cluster that answers a verb with what `fail` raises."""

    def __init__(self, world, fail):
        self._world = world
        self._fail = fail

    def __getattr__(self, name):
        method = getattr(self._world.cluster, name)
        if not callable(method):
            return method if name != "impatient" else self

        def call(*args, **more):
            self._fail(name)
            return method(*args, **more)

        return call


def patient(world, run, fail):
    return replace(world.ports(run), cluster=PatientCluster(Flaky(world, fail), world.clock, world.progress.say))


def lease_of(world):
    return read_lease(world.cluster.objects["Lease", LEASE])


def silence(name):
    raise UnavailableError("K2-UNA-001", "Nobody answers.", where=name, retry=After(1.0))


def test_an_outage_is_no_time_in_which_a_lease_was_seen_unchanged():
    world = World()
    living = holding_of(world, "living")
    began = world.clock.at
    outage = (began + 3.0, began + 63.0)

    def fail(name):
        if outage[0] <= world.clock.at < outage[1]:
            silence(name)

    def renews_soon_after_the_outage(now):
        if not outage[0] <= now < outage[1] + 3.0:
            living.renew()

    world.clock.on_sleep.append(renews_soon_after_the_outage)
    second = TrafficHolder(patient(world, "second", fail))
    with pytest.raises(ConflictError) as caught:
        second.acquire(2 * world.site.lease_duration_s + 5.0)
    assert (caught.value.code, caught.value.got) == ("K2-CON-001", "living")
    assert lease_of(world).holder == "living"


def test_the_time_to_wait_for_a_dead_holder_stands_still_while_the_api_is_away():
    world = World()
    holding_of(world, "dead")
    began = world.clock.at

    def fail(name):
        if world.clock.at < began + 120.0:
            silence(name)

    holder = TrafficHolder(patient(world, "second", fail))
    holder.acquire(2 * world.site.lease_duration_s + 5.0)
    assert lease_of(world).holder == "second"


def test_a_lease_that_a_webhook_keeps_from_being_written_is_not_tried_for_ever():
    world = World()
    holding_of(world, "first").release()
    began = world.clock.at

    def fail(name):
        assert world.clock.at < began + 600
        if name == "replace":
            raise UnavailableError("K2-UNA-004", "The webhook policy does not answer.", retry=After(2.0))

    with pytest.raises(UnavailableError) as caught:
        TrafficHolder(patient(world, "second", fail)).acquire(35.0)
    assert caught.value.code == "K2-UNA-004"


def test_an_api_that_is_slow_for_good_is_not_renewed_at_for_ever():
    world = World()
    holder = holding_of(world, "first")
    began = world.clock.at

    def slow(name):
        assert world.clock.at < began + 600
        if name == "replace":
            world.clock.at += 8.0

    holder._ports = replace(holder._ports, cluster=Flaky(world, slow))
    with pytest.raises(UnavailableError):
        holder.renew()
