"""What a LeaderWorkerSet means, and that the controller neither fights nor forgets."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from infra.rehearsal.groups import GroupController
from infra.rehearsal.groupsets import (
    REVISION_LABEL,
    SIZE_ANNOTATION,
    GroupSet,
    breakage,
    group_pod,
    headless_service,
    outdated_groups,
    set_status,
)
from infra.rehearsal.kubeclient import KubeError

NOW = "2026-11-30T00:00:00Z"


def group_set(**changes: Any) -> GroupSet:
    container = {
        "name": "engine",
        "image": "x",
        "command": ["python"],
        "env": [{"name": "ADDRESS", "value": "$(LWS_LEADER_ADDRESS):5757"}, {"name": "LWS_GROUP_SIZE", "value": "99"}],
    }
    template = {
        "size": 2,
        "workerTemplate": {
            "metadata": {"labels": {"role": "decode"}, "annotations": {"sglang.ai/bootstrap-port": "8998"}},
            "spec": {"containers": [container], "initContainers": [{"name": "check", "image": "x"}]},
        },
    }
    spec = {"replicas": 2, "leaderWorkerTemplate": template} | changes
    metadata = {"name": "k2-ab-decode", "namespace": "k2", "uid": "u1", "generation": 3}
    return GroupSet({"metadata": metadata, "spec": spec})


def with_template(base: GroupSet, **changes: Any) -> GroupSet:
    raw = copy.deepcopy(base.raw)
    raw["spec"]["leaderWorkerTemplate"] |= changes
    return GroupSet(raw)


def running(base: GroupSet, group: int, worker: int, *, ready: bool = True, **status: Any) -> dict[str, Any]:
    pod = group_pod(base, group, worker)
    pod["metadata"] |= {"uid": f"{group}-{worker}", "resourceVersion": "1"}
    pod["spec"]["nodeName"] = f"node-{group}-{worker}"
    pod["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": str(ready)}]} | status
    return pod


def whole(base: GroupSet, group: int = 0) -> dict[int, dict[str, Any]]:
    return {worker: running(base, group, worker) for worker in range(base.size)}


def test_pods_carry_what_the_real_manager_gives_them():
    leader, worker = group_pod(group_set(), 1, 0), group_pod(group_set(), 1, 1)
    prefix = "leaderworkerset.sigs.k8s.io/"
    assert worker["metadata"]["name"] == "k2-ab-decode-1-1"
    labels, annotations = worker["metadata"]["labels"], worker["metadata"]["annotations"]
    assert labels["role"] == "decode" and annotations["sglang.ai/bootstrap-port"] == "8998"
    assert (labels[prefix + "name"], labels[prefix + "group-index"], labels[prefix + "worker-index"]) == (
        "k2-ab-decode",
        "1",
        "1",
    )
    # sha1 of namespace/leader, as genGroupUniqueKey in LWS v0.9.0 pkg/webhooks/pod_webhook.go makes it.
    assert labels[prefix + "group-key"] == leader["metadata"]["labels"][prefix + "group-key"]
    assert len(labels[prefix + "group-key"]) == 40
    assert annotations[SIZE_ANNOTATION] == "2" and annotations[prefix + "leader-name"] == "k2-ab-decode-1"
    assert prefix + "leader-name" not in leader["metadata"]["annotations"]
    assert (worker["spec"]["hostname"], worker["spec"]["subdomain"]) == ("k2-ab-decode-1-1", "k2-ab-decode")
    owner = worker["metadata"]["ownerReferences"][0]
    assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == ("u1", True, True)


def test_the_group_environment_comes_first_and_wins():
    pod = group_pod(group_set(), 0, 1)
    environment = [(entry["name"], entry["value"]) for entry in pod["spec"]["containers"][0]["env"]]
    assert environment == [
        ("LWS_LEADER_ADDRESS", "k2-ab-decode-0.k2-ab-decode.k2"),
        ("LWS_GROUP_SIZE", "2"),
        ("LWS_WORKER_INDEX", "1"),
        ("ADDRESS", "$(LWS_LEADER_ADDRESS):5757"),
    ]
    assert pod["spec"]["initContainers"][0]["env"][0]["name"] == "LWS_LEADER_ADDRESS"


def test_a_leader_template_is_used_for_the_leader_only():
    template = {"metadata": {"labels": {"role": "leader"}}, "spec": {"containers": [{"name": "l", "image": "y"}]}}
    chosen = with_template(group_set(), leaderTemplate=template)
    assert group_pod(chosen, 0, 0)["spec"]["containers"][0]["name"] == "l"
    assert group_pod(chosen, 0, 1)["spec"]["containers"][0]["name"] == "engine"
    assert "env" not in template["spec"]["containers"][0]  # the set itself is not written to


def test_unique_subdomains_have_a_service_of_their_own():
    chosen = group_set(networkConfig={"subdomainPolicy": "UniquePerReplica"})
    assert group_pod(chosen, 1, 1)["spec"]["subdomain"] == "k2-ab-decode-1"
    service = headless_service(chosen, 1)
    assert service["metadata"]["name"] == "k2-ab-decode-1" and service["spec"]["publishNotReadyAddresses"]


def test_the_revision_depends_on_the_template_alone():
    base = group_set()
    assert group_set(replicas=5).revision == base.revision
    assert with_template(base, size=3).revision != base.revision


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda pod: pod["metadata"].update(deletionTimestamp=NOW), "being deleted"),
        (lambda pod: pod["status"].update(phase="Failed"), "Failed"),
        (lambda pod: pod["status"].update(containerStatuses=[{"restartCount": 1}]), "restarted"),
        (lambda pod: pod["status"].update(initContainerStatuses=[{"restartCount": 1}]), "restarted"),
        (lambda pod: pod["spec"].update(nodeName="lost"), "lost node"),
    ],
)
def test_one_broken_pod_breaks_its_group(change, reason):
    base = group_set()
    pods = whole(base)
    assert breakage(base, pods, ["lost"], was_whole=True) is None
    change(pods[1])
    assert reason in breakage(base, pods, ["lost"], was_whole=True)
    assert breakage(with_template(base, restartPolicy="None"), pods, ["lost"], was_whole=True) is None


def test_a_vanished_pod_breaks_a_group_that_was_whole_but_not_one_that_is_being_made():
    base = group_set()
    leader = {0: running(base, 0, 0)}
    assert breakage(base, leader, [], was_whole=True) == "a pod is gone"
    assert breakage(base, leader, [], was_whole=False) is None


def test_status_counts_groups_and_names_the_condition():
    base = group_set()
    status = set_status(base, {0: whole(base, 0), 1: whole(base, 1)}, NOW)
    assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == (2, 2, 2)
    assert [(c["type"], c["status"], c["observedGeneration"]) for c in status["conditions"]] == [
        ("Available", "True", 3)
    ]
    pods = whole(base, 1) | {1: running(base, 1, 1, ready=False)}
    status = set_status(base, {0: whole(base, 0), 1: pods}, NOW)
    assert (status["readyReplicas"], status["conditions"][0]["type"]) == (1, "Progressing")


def test_conditions_exclude_each_other_and_keep_their_time():
    base = group_set()
    base.raw["status"] = {
        "conditions": [{"type": "Available", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]
    }
    status = set_status(base, {0: whole(base, 0), 1: whole(base, 1)}, NOW)
    assert status["conditions"][0]["lastTransitionTime"] == "2026-01-01T00:00:00Z"
    status = set_status(base, {0: whole(base, 0)}, NOW)
    assert [(c["type"], c["status"]) for c in status["conditions"]] == [("Available", "False"), ("Progressing", "True")]
    assert status["conditions"][0]["lastTransitionTime"] == NOW


def test_a_changed_template_renews_one_ready_group_at_a_time_from_the_last():
    old = group_set()
    new = with_template(old, size=2, restartPolicy="RecreateGroupOnPodRestart", x=1)
    groups = {0: whole(old, 0), 1: whole(old, 1)}
    assert outdated_groups(new, groups) == [1]
    assert outdated_groups(new, {0: whole(old, 0), 1: {}}) == []  # group 1 is on its way
    assert outdated_groups(new, {0: whole(old, 0), 1: whole(new, 1)}) == [0]
    assert set_status(new, groups, NOW)["conditions"][0]["type"] == "Progressing"
    assert groups[0][0]["metadata"]["labels"][REVISION_LABEL] != new.revision


class FakeApi:
    """Holds pods as an API server would: names are unique, deletion takes effect when told."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.deleted: list[tuple[str, int | None]] = []
        self.status: dict[str, Any] = {}

    async def create(self, resource: Any, body: dict[str, Any]) -> dict[str, Any]:
        if resource.plural != "pods":
            return body
        name = body["metadata"]["name"]
        if name in self.pods:
            raise KubeError(409, "AlreadyExists", name)
        self.pods[name] = body | {"metadata": body["metadata"] | {"uid": f"uid-{name}", "resourceVersion": "1"}}
        return self.pods[name]

    async def delete(self, _resource: Any, name: str, _namespace: str, *, grace_s: int | None, uid: str) -> bool:
        assert self.pods[name]["metadata"]["uid"] == uid
        self.deleted.append((name, grace_s))
        self.pods[name]["metadata"]["deletionTimestamp"] = NOW
        return True

    async def patch(self, _resource: Any, _name: str, body: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        self.status = body["status"]
        return body


def look(controller: GroupController, api: FakeApi, base: GroupSet) -> None:
    """Let the controller see the API's state and reconcile once."""
    key = (base.namespace, base.name)
    controller._world.sets[key] = base.raw
    controller._world.pods[key] = {pod["metadata"]["uid"]: pod for pod in api.pods.values()}
    asyncio.run(controller._reconcile(key))


def make_controller() -> tuple[GroupController, FakeApi]:
    api = FakeApi()
    return GroupController(api), api  # type: ignore[arg-type]


def test_the_controller_makes_groups_once_and_ends_those_beyond_the_replicas():
    controller, api = make_controller()
    look(controller, api, group_set())
    assert sorted(api.pods) == ["k2-ab-decode-0", "k2-ab-decode-0-1", "k2-ab-decode-1", "k2-ab-decode-1-1"]
    look(controller, api, group_set())
    assert api.deleted == []
    look(controller, api, group_set(replicas=0))
    assert sorted(name for name, _ in api.deleted) == sorted(api.pods)


def test_the_controller_remakes_a_broken_group_only_when_all_of_it_is_gone():
    controller, api = make_controller()
    base = group_set(replicas=1)
    look(controller, api, base)
    look(controller, api, base)
    del api.pods["k2-ab-decode-0-1"]
    look(controller, api, base)
    assert api.deleted == [("k2-ab-decode-0", None)] and list(api.pods) == ["k2-ab-decode-0"]
    look(controller, api, base)
    assert list(api.pods) == ["k2-ab-decode-0"]  # the leader still terminates
    api.pods.clear()
    look(controller, api, base)
    assert api.pods == {}  # backing off
    for memory in controller._memory.values():
        memory.not_before = 0.0
    look(controller, api, base)
    assert sorted(api.pods) == ["k2-ab-decode-0", "k2-ab-decode-0-1"]


def test_pods_of_a_lost_node_are_deleted_by_force():
    controller, api = make_controller()
    base = group_set(replicas=1)
    look(controller, api, base)
    api.pods["k2-ab-decode-0-1"]["spec"]["nodeName"] = "node-3"
    controller._world.unreachable_since["node-3"] = -100.0
    look(controller, api, base)
    assert sorted(api.deleted, key=str) == [("k2-ab-decode-0", None), ("k2-ab-decode-0-1", 0)]


def test_workers_wait_for_a_ready_leader_when_the_set_says_so():
    controller, api = make_controller()
    base = group_set(replicas=1, startupPolicy="LeaderReady")
    look(controller, api, base)
    assert list(api.pods) == ["k2-ab-decode-0"]
    api.pods["k2-ab-decode-0"]["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    look(controller, api, base)
    assert "k2-ab-decode-0-1" in api.pods


def test_a_set_that_is_being_deleted_is_left_to_the_garbage_collector():
    controller, api = make_controller()
    base = group_set()
    base.raw["metadata"]["deletionTimestamp"] = NOW
    look(controller, api, base)
    assert api.pods == {}
