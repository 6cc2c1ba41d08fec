"""What reading through `ports.Cluster` promises."""

from __future__ import annotations

import pytest

from tasks.adapters import cluster as adapter
from tasks.adapters.kinds import KINDS
from tasks.core.errors import InputError
from tasks.ports import Cluster
from tests.contract.kubernetes.sides import config_map, names, namespace, there

pytestmark = pytest.mark.timeout(300)


def test_what_is_missing_is_none(cluster: Cluster, name: str) -> None:
    assert cluster.get("ConfigMap", name) is None
    assert cluster.get("Node", name) is None


def test_every_kind_can_be_read(cluster: Cluster, name: str) -> None:
    for kind in KINDS:
        assert isinstance(cluster.list_objects(kind), list), kind
        assert cluster.get(kind, name) is None, kind


def test_an_unknown_kind_is_refused(cluster: Cluster, name: str) -> None:
    for call in (
        lambda: cluster.get("Gadget", name),
        lambda: cluster.list_objects("Gadget"),
        lambda: cluster.merge_patch("Gadget", name, {}),
        lambda: cluster.delete("Gadget", name),
    ):
        with pytest.raises(InputError) as caught:
            call()
        assert (caught.value.code, caught.value.where.split("/")[0]) == ("K2-INP-008", "Gadget")


def test_what_is_got_is_what_was_written(cluster: Cluster, name: str) -> None:
    made = cluster.apply(config_map(name, {"test": name}, a="1"))
    assert cluster.get("ConfigMap", name) == made
    assert cluster.list_objects("ConfigMap", {"test": name}) == [made]
    assert (made["apiVersion"], made["kind"], made["data"]) == ("v1", "ConfigMap", {"a": "1"})


def test_labels_select_objects_that_have_them_all(cluster: Cluster, name: str) -> None:
    for number in range(4):
        cluster.apply(config_map(f"{name}-{number}", {"test": name, "odd": str(number % 2), "none": ""}))
    cluster.apply(config_map(name))
    assert len(cluster.list_objects("ConfigMap", {"test": name})) == 4
    assert names(cluster.list_objects("ConfigMap", {"test": name, "odd": "1"})) == [f"{name}-1", f"{name}-3"]
    assert len(cluster.list_objects("ConfigMap", {"test": name, "none": ""})) == 4
    assert cluster.list_objects("ConfigMap", {"test": name, "odd": "2"}) == []
    assert cluster.list_objects("ConfigMap", {"test": name, "other": ""}) == []
    assert {name, f"{name}-0"} <= set(names(cluster.list_objects("ConfigMap")))


def test_a_list_has_all_pages_in_order_of_names(cluster: Cluster, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "PAGE_SIZE", 3)
    for number in (5, 2, 0, 7, 1, 6, 3, 4):
        cluster.apply(config_map(f"{name}-{number}", {"test": name}))
    found = cluster.list_objects("ConfigMap", {"test": name})
    assert names(found) == [f"{name}-{number}" for number in range(8)]
    assert {(obj["apiVersion"], obj["kind"]) for obj in found} == {("v1", "ConfigMap")}


def test_a_list_is_of_the_sites_namespace_unless_asked_for_all(cluster: Cluster, name: str) -> None:
    spaces = [f"{name}-b", f"{name}-a"]
    for space in spaces:
        cluster.apply(namespace(space))
        for each in ("x", "w"):
            obj = config_map(each, {"test": name})
            obj["metadata"]["namespace"] = space
            cluster.apply(obj)
    cluster.apply(config_map(name, {"test": name}))
    assert names(cluster.list_objects("ConfigMap", {"test": name})) == [name]
    found = cluster.list_objects("ConfigMap", {"test": name}, everywhere=True)
    places = [(obj["metadata"]["namespace"], obj["metadata"]["name"]) for obj in found]
    assert places == [("k2", name)] + [(space, each) for space in sorted(spaces) for each in ("w", "x")]


def test_objects_of_no_namespace_are_listed_either_way(cluster: Cluster, name: str) -> None:
    cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"test": name}}})
    for everywhere in (False, True):
        assert names(cluster.list_objects("Node", {"test": name}, everywhere=everywhere)) == [name]
    assert "namespace" not in there(cluster, "Node", name)["metadata"]


def test_a_returned_object_is_the_callers_own(cluster: Cluster, name: str) -> None:
    ours = config_map(name, {"test": name}, a="1")
    returned = [
        cluster.apply(ours),
        cluster.create(ours)[0],
        there(cluster, "ConfigMap", name),
        cluster.list_objects("ConfigMap", {"test": name})[0],
        cluster.merge_patch("ConfigMap", name, {"data": {"a": "2"}}),
        cluster.replace(there(cluster, "ConfigMap", name)),
    ]
    before = there(cluster, "ConfigMap", name)
    for obj in [ours, *returned]:
        obj["data"]["a"] = "changed"
        obj["metadata"]["labels"]["test"] = "changed"
    assert cluster.get("ConfigMap", name) == before
