"""Who may move traffic: one holder at a time (I3), fenced on the route, and its lease given back by it alone."""

from dataclasses import replace

import pytest

from tasks.core.errors import ConflictError
from tasks.core.lease import LEASE, read_lease
from tasks.core.route import LIVE_ROUTE
from tasks.steps.holder import TrafficHolder, holding
from tasks.steps.shifting import shift_step
from tasks.steps.traffic import read_live_route, write_live_route
from tests.fakes.shifting_world import NEW, Shifting, holding_of
from tests.fakes.small_world import World


@pytest.fixture
def it():
    return Shifting()


def test_the_lease_is_taken_renewed_and_given_back(it):
    renewed = []
    it.at_weight(100, lambda: renewed.append(read_lease(it.world.cluster.objects["Lease", LEASE])))
    it.shift("run-7")
    assert renewed[0].holder == "run-7"
    assert it.world.clock.at - renewed[0].renewed_at < it.world.site.lease_duration_s
    assert read_lease(it.world.cluster.objects["Lease", LEASE]).holder == ""


def test_the_lease_is_renewed_more_often_than_it_lasts_whatever_the_plan_says():
    it = Shifting()
    slow = replace(NEW, id="k2-new-2", traffic=replace(NEW.traffic, bake_s=200.0, check_interval_s=60.0))
    subject = replace(it.new, release=slow)
    age = []

    def note(now):
        age.append(now - read_lease(it.world.cluster.objects["Lease", LEASE]).renewed_at)

    ports = it.world.ports("run-1")

    def act(holder):
        it.world.clock.on_sleep.append(note)
        return shift_step(ports, subject, holder)

    holding(ports, act)
    assert max(age) < it.world.site.lease_duration_s


def test_a_holder_that_renews_keeps_others_out(it):
    holder = holding_of(it.world, "first")
    it.world.clock.on_sleep.append(lambda now: holder.renew())
    with pytest.raises(ConflictError) as caught:
        it.shift("second")
    assert (caught.value.code, caught.value.got) == ("K2-CON-001", "first")
    assert it.weights() == (100, 0)


def test_a_holder_that_died_is_waited_for_as_long_as_it_promised(it):
    holding_of(it.world, "first")
    it.shift("second")
    assert it.weights() == (0, 100)


def test_an_older_holder_is_fenced_off(it):
    ports = it.world.ports("first")
    first = holding_of(it.world, "first")
    state, obj = read_live_route(ports)
    it.world.clock.sleep(it.world.site.lease_duration_s + 1)
    holding_of(it.world, "second")
    with pytest.raises(ConflictError) as caught:
        write_live_route(ports, state.moved(0, 0.0, first.generation), obj, first)
    assert caught.value.code == "K2-CON-002"


def test_an_older_holder_is_fenced_off_by_the_route_alone(it):
    """Even a holder whose lease check is stuck in the past: the route carries the newer generation."""
    ports = it.world.ports("first")
    first = holding_of(it.world, "first")
    it.world.clock.sleep(it.world.site.lease_duration_s + 1)
    second = holding_of(it.world, "second")
    state, obj = read_live_route(ports)
    write_live_route(it.world.ports("second"), replace(state, generation=second.generation), obj, second)
    first.renew = lambda: None
    state, obj = read_live_route(ports)
    with pytest.raises(ConflictError) as caught:
        write_live_route(ports, replace(state, generation=first.generation), obj, first)
    assert caught.value.code == "K2-CON-002"


def test_a_write_that_was_decided_on_an_older_route_is_refused_by_its_resource_version(it):
    ports = it.world.ports("first")
    holder = holding_of(it.world, "first")
    state, obj = read_live_route(ports)
    it.world.cluster.edit("HTTPRoute", LIVE_ROUTE, lambda o: o["metadata"]["labels"].update(touched="yes"))
    with pytest.raises(ConflictError) as caught:
        write_live_route(ports, replace(state, generation=holder.generation), obj, holder)
    assert caught.value.code == "K2-CON-002"


def test_a_sleeper_whose_write_is_on_its_way_is_fenced_off_by_the_one_who_resumes(it):
    """The old process has checked everything and sleeps before its write; the new one resumes and bakes."""
    it.die_at(50, "sleeper")
    stale = it.world.cluster.get("HTTPRoute", LIVE_ROUTE)
    it.world.clock.sleep(it.world.site.lease_duration_s + 1)
    tried = []

    def wake():
        with pytest.raises(ConflictError):
            it.world.cluster.replace(stale)
        tried.append(True)

    def in_the_first_bake(now):
        if not tried and read_lease(it.world.cluster.objects["Lease", LEASE]).holder == "resumer":
            wake()

    it.world.clock.on_sleep.append(in_the_first_bake)
    it.shift("resumer")
    assert tried
    assert it.weights() == (0, 100)


def test_the_same_run_started_again_fences_off_its_own_dead_process(it):
    first = holding_of(it.world, "run-1")
    second = holding_of(it.world, "run-1")
    assert second.generation == first.generation + 1
    with pytest.raises(ConflictError):
        first.renew()
    second.renew()


def test_a_lease_that_somebody_deleted_does_not_lock_everybody_out(it):
    it.world.cluster.delete("Lease", LEASE)
    before = it.state.generation
    it.shift()
    assert it.weights() == (0, 100)
    assert it.state.generation > before


def test_a_lease_that_is_deleted_under_its_holder_stops_it(it):
    it.at_weight(10, lambda: it.world.cluster.delete("Lease", LEASE))
    with pytest.raises(ConflictError) as caught:
        it.shift()
    assert caught.value.code == "K2-CON-002"
    assert it.weights() == (90, 10)


def test_two_that_create_the_lease_at_once_do_not_both_have_it():
    world = World()
    real = world.cluster.create

    def create(obj):
        if obj["kind"] == "Lease":
            real({**obj, "spec": {**obj["spec"], "holderIdentity": "faster"}})
        return real(obj)

    world.cluster.create = create
    holder = TrafficHolder(world.ports("slower"))
    with pytest.raises(ConflictError):
        holder.acquire(1.0)


def test_the_dead_process_of_a_run_does_not_give_back_the_lease_of_its_successor(it):
    first = holding_of(it.world, "run-1")
    second = holding_of(it.world, "run-1")
    first.release()
    second.renew()
    second.release()
    assert read_lease(it.world.cluster.objects["Lease", LEASE]).holder == ""
