"""Setting a site up: twice is once, and a live route is never touched."""

import pytest

from tasks.core.errors import NotReadyError
from tasks.core.route import LIVE_ROUTE
from tasks.steps.site_setup import set_up_site
from tests.fakes.pipeline import make_live
from tests.fakes.small_world import BASE, IMAGES, World, release


def set_up(world):
    set_up_site(world.ports("setup"), BASE, IMAGES.tool)


def test_a_new_site_sends_everything_to_the_parking_backend_through_its_own_gateway():
    world = World()
    assert world.live_weights() == {"k2-parking": 100}
    assert ("Gateway", "front-door") in world.cluster.objects
    route = world.cluster.objects["HTTPRoute", LIVE_ROUTE]
    assert route["spec"]["parentRefs"][0]["name"] == "front-door"


def test_twice_is_once():
    world = World()
    writes = list(world.cluster.writes)
    set_up(world)
    assert world.cluster.writes == writes


def test_a_route_with_traffic_is_never_touched():
    world = World()
    subject = make_live(world.ports(), release())
    route = world.cluster.objects["HTTPRoute", LIVE_ROUTE]
    set_up(world)
    assert world.cluster.objects["HTTPRoute", LIVE_ROUTE] == route
    assert world.live_weights() == {subject.router_service: 100}


def test_a_parking_backend_that_does_not_come_up_is_said():
    world = World()
    world.cluster.set_status("Deployment", "k2-parking", {"readyReplicas": 0})
    with pytest.raises(NotReadyError) as caught:
        set_up(world)
    assert caught.value.where == "k2-parking"
