"""What deleting through `ports.Cluster` promises."""

from __future__ import annotations

import pytest

from tasks.ports import Cluster, Object
from tests.contract.kubernetes.sides import config_map, eventually, names, there, version

pytestmark = pytest.mark.timeout(300)

FINALIZER = "k2-release.io/test"


def kept(name: str) -> Object:
    """Return an object that somebody wants to see to before it goes."""
    obj = config_map(name, {"test": name}, a="1")
    obj["metadata"]["finalizers"] = [FINALIZER]
    return obj


def owned(name: str, owner: Object) -> Object:
    obj = config_map(name)
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": owner["metadata"]["name"]}
    obj["metadata"]["ownerReferences"] = [{**reference, "uid": owner["metadata"]["uid"]}]
    return obj


def test_deleting_is_repeatable(cluster: Cluster, name: str) -> None:
    cluster.apply(config_map(name))
    for _ in range(2):
        cluster.delete("ConfigMap", name)
        assert cluster.get("ConfigMap", name) is None
        assert name not in names(cluster.list_objects("ConfigMap"))


def test_deleting_can_mean_one_object(cluster: Cluster, name: str) -> None:
    first = cluster.apply(config_map(name))
    cluster.delete("ConfigMap", name, uid=first["metadata"]["uid"])
    assert cluster.get("ConfigMap", name) is None
    second = cluster.apply(config_map(name))
    cluster.delete("ConfigMap", name, uid=first["metadata"]["uid"])
    assert cluster.get("ConfigMap", name) == second


def test_what_is_applied_after_a_deletion_is_all_there_is(cluster: Cluster, name: str) -> None:
    cluster.apply(config_map(name, a="1"))
    cluster.delete("ConfigMap", name)
    assert cluster.apply(config_map(name, b="2"))["data"] == {"b": "2"}


def test_an_object_with_a_finalizer_stays_until_it_is_let_go(cluster: Cluster, name: str) -> None:
    made, _ = cluster.create(kept(name))
    cluster.delete("ConfigMap", name)
    leaving = there(cluster, "ConfigMap", name)
    assert leaving["metadata"]["deletionTimestamp"]
    assert version(leaving) != version(made)
    assert cluster.list_objects("ConfigMap", {"test": name}) == [leaving]
    cluster.delete("ConfigMap", name, uid=made["metadata"]["uid"])  # again: nothing more to be done
    assert cluster.get("ConfigMap", name) == leaving
    assert cluster.create(config_map(name)) == (leaving, False)
    changed = cluster.replace(leaving | {"data": {"a": "2"}})
    assert changed["metadata"]["deletionTimestamp"] == leaving["metadata"]["deletionTimestamp"]
    cluster.merge_patch("ConfigMap", name, {"metadata": {"finalizers": None}})
    assert cluster.get("ConfigMap", name) is None
    assert cluster.create(config_map(name))[1]


def test_what_an_object_owns_goes_with_it(cluster: Cluster, name: str) -> None:
    owner = cluster.apply(config_map(name))
    child = cluster.apply(owned(f"{name}-child", owner))
    cluster.apply(owned(f"{name}-grandchild", child))
    cluster.apply(config_map(f"{name}-stranger"))
    cluster.delete("ConfigMap", name)
    assert cluster.get("ConfigMap", name) is None  # at once; the rest in the background
    eventually(lambda: not {f"{name}-child", f"{name}-grandchild"} & set(names(cluster.list_objects("ConfigMap"))))
    assert cluster.get("ConfigMap", f"{name}-stranger") is not None


def test_an_owned_object_with_a_finalizer_is_leaving_until_it_is_let_go(cluster: Cluster, name: str) -> None:
    owner = cluster.apply(config_map(name))
    child = owned(f"{name}-child", owner)
    child["metadata"]["finalizers"] = [FINALIZER]
    cluster.apply(child)
    cluster.delete("ConfigMap", name)
    eventually(lambda: "deletionTimestamp" in there(cluster, "ConfigMap", f"{name}-child")["metadata"])
    cluster.merge_patch("ConfigMap", f"{name}-child", {"metadata": {"finalizers": None}})
    assert cluster.get("ConfigMap", f"{name}-child") is None
