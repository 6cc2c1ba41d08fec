"""Server-side apply, validation and subresources, as only a real API server has them."""

from __future__ import annotations

import pytest

from infra.rehearsal.apiserver import ControlPlane
from tasks.adapters.cluster import KubeCluster
from tasks.adapters.kinds import KINDS
from tasks.core.errors import ConflictError, InputError
from tasks.ports import Object
from tests.contract.kubernetes.sides import NAMESPACE, accepted, client, config_map, http_route, lease, there

pytestmark = [pytest.mark.site, pytest.mark.timeout(300)]


@pytest.fixture
def other(plane: ControlPlane) -> KubeCluster:
    return client(plane, field_manager="somebody")


def managers(obj: Object) -> set[tuple[str, str]]:
    return {(entry["manager"], entry["operation"]) for entry in obj["metadata"]["managedFields"]}


def service(name: str, *ports: tuple[str, int]) -> Object:
    spec = {"clusterIP": "None", "ports": [{"name": port, "port": number} for port, number in ports]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def test_a_field_of_another_manager_is_not_taken(server: KubeCluster, other: KubeCluster, name: str) -> None:
    other.apply(config_map(name, a="theirs"))
    for dry_run in (True, False):
        with pytest.raises(ConflictError) as caught:
            server.apply(config_map(name, a="ours"), dry_run=dry_run)
        assert caught.value.code == "K2-CON-005"
        assert caught.value.where == f"ConfigMap/{name}"
        assert "somebody" in caught.value.summary
        assert ".data.a" in caught.value.summary
    assert there(server, "ConfigMap", name)["data"] == {"a": "theirs"}
    assert server.apply(config_map(name, b="ours"))["data"] == {"a": "theirs", "b": "ours"}


def test_a_field_that_a_hand_has_written_is_not_taken(server: KubeCluster, other: KubeCluster, name: str) -> None:
    server.apply(config_map(name, a="ours"))
    other.merge_patch("ConfigMap", name, {"data": {"a": "by hand"}})
    with pytest.raises(ConflictError) as caught:
        server.apply(config_map(name, a="ours"))
    assert caught.value.code == "K2-CON-005"
    assert "somebody" in caught.value.summary
    assert there(server, "ConfigMap", name)["data"] == {"a": "by hand"}


def test_rules_of_a_route_have_one_owner(server: KubeCluster, other: KubeCluster, name: str) -> None:
    other.apply(http_route(name, 1))
    with pytest.raises(ConflictError) as caught:
        server.apply(http_route(name, 2))
    assert caught.value.code == "K2-CON-005"
    assert ".spec.rules" in caught.value.summary


def test_a_field_that_two_agree_on_stays_while_one_says_it(server: KubeCluster, other: KubeCluster, name: str) -> None:
    server.apply(config_map(name, a="same", b="ours"))
    other.apply(config_map(name, a="same"))
    assert server.apply(config_map(name, b="ours"))["data"] == {"a": "same", "b": "ours"}
    assert other.apply(config_map(name))["data"] == {"b": "ours"}


def test_lists_with_keys_are_merged_by_them(server: KubeCluster, other: KubeCluster, name: str) -> None:
    other.apply(service(name, ("theirs", 1)))
    merged = server.apply(service(name, ("ours", 2)))
    assert {port["name"] for port in merged["spec"]["ports"]} == {"theirs", "ours"}
    without = server.apply(service(name, ("other", 3)))
    assert {port["name"] for port in without["spec"]["ports"]} == {"theirs", "other"}


def test_every_write_is_under_our_name(server: KubeCluster, name: str) -> None:
    assert managers(server.apply(config_map(name))) == {("k2-release", "Apply")}
    made, _ = server.create(lease(name, "first"))
    assert managers(made) == {("k2-release", "Update")}
    assert managers(server.replace(made | {"spec": {"holderIdentity": "second"}})) == {("k2-release", "Update")}
    assert managers(server.merge_patch("Lease", name, {"metadata": {"labels": {"a": "b"}}})) == {
        ("k2-release", "Update")
    }


def test_unknown_fields_and_wrong_values_are_refused_by_name(server: KubeCluster, name: str) -> None:
    unknown = config_map(name, a="1") | {"dataa": {}}
    unknown_deep = http_route(name, 1)
    unknown_deep["spec"]["rules"][0]["backendRefs"][0]["wait"] = 1
    wrong_value = http_route(name, -1)
    wrong_type = http_route(name, 1)
    wrong_type["spec"]["rules"] = "none"
    cases = ((unknown, "dataa"), (unknown_deep, "wait"), (wrong_value, "weight"), (wrong_type, "rules"))
    for obj, word in cases:
        for write in (server.apply, server.create, lambda o: server.apply(o, dry_run=True)):
            with pytest.raises(InputError) as caught:
                write(obj)
            assert caught.value.code == "K2-INP-008"
            assert caught.value.where == f"{obj['kind']}/{name}"
            assert word in caught.value.summary
            assert len(caught.value.summary) <= 400
        assert server.get(obj["kind"], name) is None


def test_unknown_fields_are_refused_in_changes_too(server: KubeCluster, name: str) -> None:
    made = server.apply(http_route(name, 1))
    with pytest.raises(InputError, match="hostnamess"):
        server.merge_patch("HTTPRoute", name, {"spec": {"hostnamess": ["a"]}})
    with pytest.raises(InputError, match="hostnamess"):
        server.replace(made | {"spec": {**made["spec"], "hostnamess": ["a"]}})
    assert server.get("HTTPRoute", name) == made


def test_what_cannot_be_changed_is_refused_by_name(server: KubeCluster, name: str) -> None:
    container = {"name": "main", "image": "registry.example/x:1"}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": {"template": template}}
    made, _ = server.create(job | {"spec": {"template": template, "suspend": True}})
    with pytest.raises(InputError) as caught:
        server.merge_patch("Job", name, {"spec": {"template": {"spec": {"restartPolicy": "OnFailure"}}}})
    assert "spec.template" in caught.value.summary
    assert "immutable" in caught.value.summary  # behind a whole pod template in the server's message
    server.delete("Job", name, uid=made["metadata"]["uid"])


def test_status_and_spec_are_written_apart(server: KubeCluster, plane: ControlPlane, name: str) -> None:
    server.apply(http_route(name, 1))
    path = KINDS["HTTPRoute"].path(NAMESPACE, name)
    both = {"spec": http_route(name, 9)["spec"], "status": accepted(1)}
    plane.admin.request("PATCH", path + "/status", both, content_type="application/merge-patch+json")
    obj = there(server, "HTTPRoute", name)
    assert obj["spec"]["rules"][0]["backendRefs"][0]["weight"] == 1
    assert obj["status"] == accepted(1)
    assert obj["metadata"]["generation"] == 1
    applied = server.apply(http_route(name, 2) | {"status": accepted(9)})
    assert applied["status"] == accepted(1)
    assert applied["metadata"]["generation"] == 2
