"""What `ports.Cluster.mirror` promises."""

from __future__ import annotations

import pytest

from tasks.core.errors import InputError
from tasks.ports import Cluster
from tests.contract.kubernetes.sides import (
    Side,
    accepted,
    config_map,
    eventually,
    http_route,
    names,
    namespace,
    there,
    version,
)

pytestmark = pytest.mark.timeout(300)

WITHIN_S = 20.0


def test_a_mirror_begins_with_what_is_there(cluster: Cluster, name: str) -> None:
    for number in (2, 1):
        cluster.apply(config_map(f"{name}-{number}", {"test": name}, a="1"))
    with cluster.mirror("ConfigMap", {"test": name}) as mirror:
        assert mirror.objects() == cluster.list_objects("ConfigMap", {"test": name})
        assert 0 <= mirror.unconfirmed_s() < WITHIN_S
    with cluster.mirror("ConfigMap", {"test": "nothing"}) as mirror:
        assert mirror.objects() == []


def test_a_mirror_shows_what_another_client_does(side: Side, name: str) -> None:
    with side.cluster.mirror("ConfigMap", {"test": name}) as mirror:
        assert mirror.objects() == []
        made = side.other.apply(config_map(name, {"test": name}, a="1"))
        eventually(lambda: mirror.objects() == [made], WITHIN_S)
        changed = side.other.merge_patch("ConfigMap", name, {"data": {"a": "2"}})
        eventually(lambda: mirror.objects() == [changed], WITHIN_S)
        side.other.delete("ConfigMap", name)
        eventually(lambda: mirror.objects() == [], WITHIN_S)
        again, _ = side.other.create(config_map(name, {"test": name}, a="1"))
        eventually(lambda: mirror.objects() == [again], WITHIN_S)
        assert mirror.unconfirmed_s() < WITHIN_S


def test_a_mirror_shows_status(side: Side, name: str) -> None:
    route = http_route(name, 1)
    route["metadata"]["labels"] = {"test": name}
    side.cluster.apply(route)
    with side.cluster.mirror("HTTPRoute", {"test": name}) as mirror:
        assert "status" not in mirror.objects()[0]
        side.set_status("HTTPRoute", name, accepted(1))
        eventually(lambda: mirror.objects()[0].get("status") == accepted(1), WITHIN_S)
        assert mirror.objects() == [side.cluster.get("HTTPRoute", name)]


def test_an_object_whose_label_changes_leaves_the_selection_and_comes_back(side: Side, name: str) -> None:
    side.cluster.apply(config_map(name, {"test": name, "role": "a"}))
    with side.cluster.mirror("ConfigMap", {"test": name, "role": "a"}) as mirror:
        assert names(mirror.objects()) == [name]
        side.other.merge_patch("ConfigMap", name, {"metadata": {"labels": {"role": "b"}}})
        eventually(lambda: mirror.objects() == [], WITHIN_S)
        back = side.other.merge_patch("ConfigMap", name, {"metadata": {"labels": {"role": "a"}}})
        eventually(lambda: mirror.objects() == [back], WITHIN_S)


def test_an_object_that_is_leaving_is_shown_until_it_is_gone(side: Side, name: str) -> None:
    obj = config_map(name, {"test": name})
    obj["metadata"]["finalizers"] = ["k2-release.io/test"]
    side.cluster.create(obj)
    with side.cluster.mirror("ConfigMap", {"test": name}) as mirror:
        side.other.delete("ConfigMap", name)
        eventually(lambda: "deletionTimestamp" in mirror.objects()[0]["metadata"], WITHIN_S)
        side.other.merge_patch("ConfigMap", name, {"metadata": {"finalizers": None}})
        eventually(lambda: mirror.objects() == [], WITHIN_S)


def test_a_mirror_is_of_the_sites_namespace_unless_asked_for_all(cluster: Cluster, name: str) -> None:
    spaces = [name, f"{name}-b"]  # in the order of a list the second comes first: "-" is before "/"
    for space in spaces:
        cluster.apply(namespace(space))
    with (
        cluster.mirror("ConfigMap", {"test": name}) as ours,
        cluster.mirror("ConfigMap", {"test": name}, everywhere=True) as everybodys,
    ):
        assert ours.objects() == everybodys.objects() == []
        for space in [*spaces, "k2"]:
            obj = config_map("x", {"test": name})
            obj["metadata"]["namespace"] = space
            cluster.apply(obj)
        eventually(lambda: len(everybodys.objects()) == 3, WITHIN_S)
        assert everybodys.objects() == cluster.list_objects("ConfigMap", {"test": name}, everywhere=True)
        eventually(lambda: [obj["metadata"]["namespace"] for obj in ours.objects()] == ["k2"], WITHIN_S)


def test_objects_of_a_mirror_are_the_callers_own(cluster: Cluster, name: str) -> None:
    made = cluster.apply(config_map(name, {"test": name}, a="1"))
    with cluster.mirror("ConfigMap", {"test": name}) as mirror:
        mirror.objects()[0]["data"]["a"] = "changed"
        assert mirror.objects() == [made]


def test_a_mirrored_object_can_be_written_back(side: Side, name: str) -> None:
    side.cluster.apply(config_map(name, {"test": name}, a="1"))
    with side.cluster.mirror("ConfigMap", {"test": name}) as mirror:
        written = side.cluster.replace(mirror.objects()[0] | {"data": {"a": "2"}})
        eventually(lambda: version(mirror.objects()[0]) == version(written), WITHIN_S)
    assert there(side.cluster, "ConfigMap", name)["data"] == {"a": "2"}


def test_two_mirrors_of_one_kind_do_not_mind_each_other(side: Side, name: str) -> None:
    with side.cluster.mirror("ConfigMap", {"test": name}) as first:
        with side.cluster.mirror("ConfigMap", {"test": name}) as second:
            assert first.objects() == second.objects() == []
        made = side.other.apply(config_map(name, {"test": name}))
        eventually(lambda: first.objects() == [made], WITHIN_S)


def test_an_unknown_kind_has_no_mirror(cluster: Cluster) -> None:
    with pytest.raises(InputError) as caught, cluster.mirror("Gadget") as mirror:
        mirror.objects()
    assert caught.value.code == "K2-INP-008"


def test_no_time_is_lost_on_an_api_that_answers(cluster: Cluster, name: str) -> None:
    cluster.apply(config_map(name))
    assert cluster.silent_s == 0
