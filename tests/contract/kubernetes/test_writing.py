"""What writing through `ports.Cluster` promises."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise

import pytest

from tasks.core.errors import ConflictError, InputError
from tasks.ports import Cluster, Object
from tests.contract.kubernetes.sides import (
    NAMESPACE,
    Side,
    accepted,
    config_map,
    http_route,
    lease,
    namespace,
    there,
    version,
)

pytestmark = pytest.mark.timeout(300)


def test_apply_makes_an_object_with_an_identity_in_the_sites_namespace(cluster: Cluster, name: str) -> None:
    made = cluster.apply(config_map(name, a="1"))
    assert made["metadata"]["namespace"] == NAMESPACE
    assert made["metadata"]["uid"]
    assert int(version(made)) > 0


def test_applying_twice_changes_nothing(cluster: Cluster, name: str) -> None:
    for obj in (config_map(name, a="1"), http_route(name, 1)):
        first, second = cluster.apply(obj), cluster.apply(obj)
        assert version(first) == version(second)
        assert first == second == cluster.get(obj["kind"], name)


def test_apply_takes_away_what_we_no_longer_say(cluster: Cluster, name: str) -> None:
    cluster.apply(config_map(name, {"x": "1", "y": "1"}, a="1", b="1"))
    applied = cluster.apply(config_map(name, {"y": "1"}, b="2", c="3"))
    assert applied["data"] == {"b": "2", "c": "3"}
    assert applied["metadata"]["labels"] == {"y": "1"}
    assert cluster.get("ConfigMap", name) == applied


def test_apply_leaves_alone_what_others_have_written(side: Side, name: str) -> None:
    side.cluster.apply(config_map(name, a="1"))
    side.other.merge_patch("ConfigMap", name, {"data": {"b": "theirs"}, "metadata": {"labels": {"their": "label"}}})
    assert side.cluster.apply(config_map(name, c="3"))["data"] == {"b": "theirs", "c": "3"}
    assert there(side.cluster, "ConfigMap", name)["metadata"]["labels"] == {"their": "label"}


def test_apply_replaces_rules_of_a_route_as_one(cluster: Cluster, name: str) -> None:
    cluster.apply(http_route(name, 1))
    two = http_route(name, 2)
    two["spec"]["rules"].append(two["spec"]["rules"][0])
    assert [r["backendRefs"][0]["weight"] for r in cluster.apply(two)["spec"]["rules"]] == [2, 2]
    assert [r["backendRefs"][0]["weight"] for r in cluster.apply(http_route(name, 3))["spec"]["rules"]] == [3]


def test_a_dry_run_stores_nothing(cluster: Cluster, name: str) -> None:
    assert cluster.apply(config_map(name, a="1"), dry_run=True)["metadata"]["uid"]
    assert cluster.get("ConfigMap", name) is None
    made = cluster.apply(config_map(name, a="1"))
    would_be = cluster.apply(config_map(name, b="2"), dry_run=True)
    assert would_be["data"] == {"b": "2"}
    assert would_be["metadata"]["uid"] == made["metadata"]["uid"]
    assert cluster.get("ConfigMap", name) == made
    assert cluster.apply(config_map(name, a="1")) == made


def test_create_returns_what_is_there(cluster: Cluster, name: str) -> None:
    made, created = cluster.create(lease(name, "first"))
    again, created_again = cluster.create(lease(name, "second"))
    assert (created, created_again) == (True, False)
    assert again == made
    assert cluster.get("Lease", name) == made


def test_of_many_creators_one_wins(cluster: Cluster, name: str) -> None:
    won: list[str] = []
    seen: set[str] = set()
    start = threading.Barrier(6)

    def create(holder: str) -> None:
        start.wait(10)
        obj, created = cluster.create(lease(name, holder))
        seen.add(obj["spec"]["holderIdentity"])
        if created:
            won.append(holder)

    threads = [threading.Thread(target=create, args=(f"holder-{number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(won) == 1
    assert seen == set(won)


def test_an_object_made_again_is_another_one(cluster: Cluster, name: str) -> None:
    first, _ = cluster.create(config_map(name, a="1"))
    cluster.delete("ConfigMap", name)
    second, created = cluster.create(config_map(name, a="1"))
    assert created
    assert first["metadata"]["uid"] != second["metadata"]["uid"]
    assert int(version(second)) > int(version(first))


def test_a_stale_replacement_is_refused(cluster: Cluster, name: str) -> None:
    cluster.apply(http_route(name, 1))
    ours, theirs = there(cluster, "HTTPRoute", name), there(cluster, "HTTPRoute", name)
    theirs["spec"] = http_route(name, 2)["spec"]
    newer = cluster.replace(theirs)
    ours["spec"] = http_route(name, 3)["spec"]
    for _ in range(2):
        with pytest.raises(ConflictError) as caught:
            cluster.replace(ours)
        assert caught.value.code == "K2-CON-002"
    assert cluster.get("HTTPRoute", name) == newer
    assert newer["spec"]["rules"][0]["backendRefs"][0]["weight"] == 2


def test_a_replacement_for_an_object_made_anew_is_refused(cluster: Cluster, name: str) -> None:
    old, _ = cluster.create(lease(name, "first"))
    cluster.delete("Lease", name)
    new, _ = cluster.create(lease(name, "second"))
    with pytest.raises(ConflictError) as caught:
        cluster.replace(old)
    assert caught.value.code == "K2-CON-002"
    assert cluster.get("Lease", name) == new


def test_a_replacement_needs_a_version_and_something_to_replace(cluster: Cluster, name: str) -> None:
    made = cluster.apply(http_route(name, 1))
    with pytest.raises(InputError) as caught:
        cluster.replace(http_route(name, 2))
    assert caught.value.code == "K2-INP-008"
    assert cluster.get("HTTPRoute", name) == made
    cluster.delete("HTTPRoute", name)
    with pytest.raises(KeyError):
        cluster.replace(made)


def test_a_replacement_is_the_whole_object(cluster: Cluster, name: str) -> None:
    made = cluster.apply(config_map(name, {"x": "1"}, a="1", b="1"))
    whole = config_map(name, c="1")
    whole["metadata"]["resourceVersion"] = version(made)
    replaced = cluster.replace(whole)
    assert replaced["data"] == {"c": "1"}
    assert "labels" not in replaced["metadata"]
    assert replaced["metadata"]["uid"] == made["metadata"]["uid"]
    assert cluster.replace(replaced) == replaced  # unchanged: it keeps its version


def test_a_merge_patch_changes_what_it_says(cluster: Cluster, name: str) -> None:
    cluster.apply(config_map(name, {"x": "1", "y": "1"}, a="1", b="1"))
    patch = {"metadata": {"labels": {"x": None, "z": "1"}}, "data": {"a": None, "c": "1"}}
    patched = cluster.merge_patch("ConfigMap", name, patch)
    assert patched["data"] == {"b": "1", "c": "1"}
    assert patched["metadata"]["labels"] == {"y": "1", "z": "1"}
    assert cluster.merge_patch("ConfigMap", name, patch) == patched  # unchanged: it keeps its version
    assert cluster.get("ConfigMap", name) == patched


def test_taking_away_a_label_that_is_not_there_changes_nothing(cluster: Cluster, name: str) -> None:
    made = cluster.apply(config_map(name, a="1"))
    assert cluster.merge_patch("ConfigMap", name, {"metadata": {"labels": {"x": None}}}) == made


def test_a_merge_patch_has_a_precondition_if_it_wants_one(cluster: Cluster, name: str) -> None:
    made, _ = cluster.create(lease(name, "first"))
    precondition = {"resourceVersion": version(made)}
    taken = cluster.merge_patch("Lease", name, {"metadata": precondition, "spec": {"holderIdentity": "second"}})
    assert taken["spec"] == {"holderIdentity": "second", "leaseTransitions": 1}
    with pytest.raises(ConflictError) as caught:
        cluster.merge_patch("Lease", name, {"metadata": precondition, "spec": {"holderIdentity": "third"}})
    assert caught.value.code == "K2-CON-002"
    assert cluster.get("Lease", name) == taken
    assert cluster.merge_patch("Lease", name, {"spec": {"holderIdentity": "fourth"}})["spec"]["leaseTransitions"] == 1


def test_a_merge_patch_of_nothing(cluster: Cluster, name: str) -> None:
    with pytest.raises(KeyError):
        cluster.merge_patch("Lease", name, {"spec": {"holderIdentity": "x"}})
    assert cluster.get("Lease", name) is None


def test_what_has_no_place_is_refused(cluster: Cluster, name: str) -> None:
    nowhere = config_map(name)
    nowhere["metadata"]["namespace"] = "t-no-such-namespace"
    unknown = {"apiVersion": "v1", "kind": "Gadget", "metadata": {"name": name}}
    other_version = config_map(name) | {"apiVersion": "v2"}
    writes: tuple[Callable[[Object], object], ...] = (
        cluster.apply,
        lambda obj: cluster.apply(obj, dry_run=True),
        cluster.create,
    )
    for obj in (nowhere, unknown, other_version, config_map(""), config_map("Not_A_Name")):
        for write in writes:
            with pytest.raises(InputError) as caught:
                write(obj)
            assert caught.value.code == "K2-INP-008"
            assert caught.value.where.split("/")[0] == obj["kind"]


def test_an_object_goes_to_the_namespace_that_it_names(cluster: Cluster, name: str) -> None:
    cluster.apply(namespace(name))
    obj = config_map(name, a="theirs")
    obj["metadata"]["namespace"] = name
    made = cluster.apply(obj)
    assert made["metadata"]["namespace"] == name
    assert cluster.get("ConfigMap", name) is None  # the site's namespace has none
    ours, created = cluster.create(config_map(name, a="ours"))
    assert (created, ours["metadata"]["namespace"]) == (True, NAMESPACE)
    changed = cluster.replace(made | {"data": {"a": "changed"}})
    assert (changed["metadata"]["uid"], changed["metadata"]["namespace"]) == (made["metadata"]["uid"], name)
    assert there(cluster, "ConfigMap", name)["data"] == {"a": "ours"}


def test_only_a_change_of_content_moves_the_generation(side: Side, name: str) -> None:
    cluster = side.cluster
    made = cluster.apply(http_route(name, 1))
    assert made["metadata"]["generation"] == 1
    annotated = cluster.merge_patch("HTTPRoute", name, {"metadata": {"annotations": {"a": "b"}, "labels": {"c": "d"}}})
    side.set_status("HTTPRoute", name, accepted(1))
    observed = there(cluster, "HTTPRoute", name)
    shifted = cluster.replace(observed | {"spec": http_route(name, 2)["spec"]})
    unchanged = cluster.replace(shifted)
    patched = cluster.merge_patch("HTTPRoute", name, {"spec": {"hostnames": ["example.com"]}})
    history = [made, annotated, observed, shifted, unchanged, patched]
    assert [obj["metadata"]["generation"] for obj in history] == [1, 1, 1, 2, 2, 3]
    moved = [version(before) != version(after) for before, after in pairwise(history)]
    assert moved == [True, True, True, False, True]
    versions = [int(version(obj)) for obj in history]
    assert versions == sorted(versions)


def test_status_is_its_controllers(side: Side, name: str) -> None:
    cluster = side.cluster
    made, _ = cluster.create(http_route(name, 1) | {"status": accepted(7)})
    assert "status" not in made
    side.set_status("HTTPRoute", name, accepted(1))
    said = there(cluster, "HTTPRoute", name)
    assert said["status"] == accepted(1)
    cluster.replace({key: value for key, value in said.items() if key != "status"})
    assert there(cluster, "HTTPRoute", name)["status"] == accepted(1)
    cluster.replace(there(cluster, "HTTPRoute", name) | {"status": accepted(8)})
    cluster.merge_patch("HTTPRoute", name, {"status": accepted(9)})
    cluster.merge_patch("HTTPRoute", name, {"status": None})
    assert cluster.get("HTTPRoute", name) == said


def test_a_version_from_before_a_status_write_is_stale(side: Side, name: str) -> None:
    made = side.cluster.apply(http_route(name, 1))
    side.set_status("HTTPRoute", name, accepted(1))
    with pytest.raises(ConflictError) as caught:
        side.cluster.replace(made | {"spec": http_route(name, 2)["spec"]})
    assert caught.value.code == "K2-CON-002"
