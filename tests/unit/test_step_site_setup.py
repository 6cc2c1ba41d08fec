"""Setting a site up: twice is once, and a live route is never touched."""

import pytest

from tasks.core.errors import ConflictError, NotReadyError
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


def test_rules_that_another_hand_has_changed_are_ours_again():
    """What the error of a missing right asks an administrator for is no reason to refuse the next set-up."""
    world = World()
    ours = world.cluster.get("Role", "k2-pipeline")["rules"]
    added = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    world.cluster.edit("Role", "k2-pipeline", lambda role: role.update(rules=[*ours[1:], added]))
    conflicts(world, "Role")
    set_up(world)
    assert world.cluster.get("Role", "k2-pipeline")["rules"] == ours
    assert any("Role k2-pipeline" in line and "another hand" in line for line in world.progress.lines)


def test_a_role_of_our_name_that_is_not_ours_stays_as_it_is():
    world = World()
    world.cluster.edit("ClusterRole", "k2-pipeline", lambda role: role.update(rules=[]))
    world.cluster.edit("ClusterRole", "k2-pipeline", lambda role: role["metadata"].update(labels={"of": "another"}))
    conflicts(world, "ClusterRole")
    with pytest.raises(ConflictError):
        set_up(world)
    assert world.cluster.get("ClusterRole", "k2-pipeline")["rules"] == []


def test_another_object_that_another_hand_has_changed_stays_as_it_is():
    world = World()
    world.cluster.edit("Deployment", "k2-parking", lambda deployment: deployment["spec"].update(replicas=5))
    conflicts(world, "Deployment")
    with pytest.raises(ConflictError):
        set_up(world)
    assert world.cluster.get("Deployment", "k2-parking")["spec"]["replicas"] == 5


def conflicts(world, kind):
    """Have an apply refused, as server-side apply does it, while the object has another value than the applied one."""
    real = world.cluster.apply

    def apply(obj, *, dry_run=False):
        there = world.cluster.get(obj["kind"], obj["metadata"]["name"])
        same = there is not None and all(there.get(key) == obj[key] for key in ("rules", "spec") if key in obj)
        if obj["kind"] == kind and not same:
            raise ConflictError("K2-CON-005", "Apply failed with 1 conflict.")
        return real(obj, dry_run=dry_run)

    world.cluster.apply = apply
