"""What we rely on of the LeaderWorkerSet manager, tried on the real one with real pods on the node agent's nodes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.rehearsal.apiserver import ApiConnection, ApiError
from infra.rehearsal.binaries import LWS_MANAGER
from infra.rehearsal.lws_manager import ACCOUNT
from infra.rehearsal.lws_manager import NAMESPACE as MANAGER_NAMESPACE
from infra.rehearsal.procfs import identified
from tasks.core.pod_status import lost_node_remedy
from tests.contract.agent_site import (
    NAMESPACE,
    NODES,
    Site,
    agent_site,
    condition,
    container,
    python,
    ready_nodes,
    wait_for,
)

pytestmark = [pytest.mark.site, pytest.mark.timeout(300)]

GROUPS = f"/apis/leaderworkerset.x-k8s.io/v1/namespaces/{NAMESPACE}/leaderworkersets"
SETS = f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets"
PREFIX = "leaderworkerset.sigs.k8s.io"
OUTAGE_S = 5.0
"""Longer than the manager's own patience. A minute is tried in a whole release: --inject apiserver-killed."""
# What a rank is started with in production: the group's address in its arguments, and the file that stands in for DNS.
RANK = (
    "import json, os, sys, time\n"
    "print('argument', sys.argv[1], flush=True)\n"
    "print(*(os.environ[key] for key in ('LWS_LEADER_ADDRESS', 'LWS_GROUP_SIZE', 'LWS_WORKER_INDEX')), flush=True)\n"
    "leader = os.environ['LWS_LEADER_ADDRESS']\n"
    "while leader not in json.load(open(os.environ['K2_REHEARSAL_HOSTS'])): time.sleep(0.1)\n"
    "print('leader found', flush=True)\n"
    "time.sleep(600)\n"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with agent_site(tmp_path_factory.mktemp("site"), groups=True) as started:
        yield started


def group_set(name: str, *, size: int = 2, gpus: int = 8, source: str = RANK, **spec: Any) -> dict[str, Any]:
    main = python(source, args=["$(LWS_LEADER_ADDRESS):5757"], env=[{"name": "OWN", "value": "$(LWS_WORKER_INDEX)"}])
    main["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    first = python("import os; print(os.environ['LWS_WORKER_INDEX'])", "check")
    template = {
        "metadata": {"labels": {"role": name}},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "initContainers": [first],
            "containers": [main],
            "tolerations": [_a_second_of(key) for key in ("not-ready", "unreachable")],
        },
    }
    leader = json.loads(json.dumps(template))
    leader["metadata"]["annotations"] = {"of": "leader"}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "leaderWorkerTemplate": {"size": size, "workerTemplate": template, "leaderTemplate": leader},
            **spec,
        },
    }


def _a_second_of(taint: str) -> dict[str, Any]:
    """Return a toleration: what a lost node does to a group does not depend on how long its pods bear it."""
    key = f"node.kubernetes.io/{taint}"
    return {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}


def available(site: Site, name: str) -> bool:
    return condition(site.get(f"{GROUPS}/{name}"), "Available") == "True"


def started(site: Site, name: str, **more: Any) -> None:
    site.create(GROUPS, group_set(name, **more))
    wait_for(f"{name} available", lambda: available(site, name))


def pods_of(site: Site, name: str) -> dict[str, dict[str, Any]]:
    return {pod["metadata"]["name"]: pod for pod in site.pods(f"{PREFIX}/name={name}")}


def uids(pods: dict[str, dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods.values()}


def ended(site: Site, name: str) -> None:
    """Delete a set as the pipeline does, and wait until nothing of it is left."""
    site.delete(f"{GROUPS}/{name}")
    selector = f"?labelSelector={PREFIX}/name={name}"
    kinds = [SETS, f"/api/v1/namespaces/{NAMESPACE}/services", f"/api/v1/namespaces/{NAMESPACE}/pods"]
    kinds.append(f"/apis/apps/v1/namespaces/{NAMESPACE}/controllerrevisions")
    wait_for(f"{name} gone", lambda: not any(site.get(kind + selector)["items"] for kind in kinds))


def test_ranks_get_their_environment_labels_and_names(site: Site) -> None:
    started(site, "prefill", size=3)
    pods = pods_of(site, "prefill")
    assert sorted(pods) == ["prefill-0", "prefill-0-1", "prefill-0-2"]
    assert len({pod["spec"]["nodeName"] for pod in pods.values()}) == 3
    revisions = {pod["metadata"]["labels"][f"{PREFIX}/template-revision-hash"] for pod in pods.values()}
    keys = {pod["metadata"]["labels"][f"{PREFIX}/group-key"] for pod in pods.values()}
    assert len(revisions) == len(keys) == 1
    for rank, name in enumerate(sorted(pods)):
        pod, spec = pods[name], pods[name]["spec"]
        labels, annotations = pod["metadata"]["labels"], pod["metadata"]["annotations"]
        assert (labels[f"{PREFIX}/worker-index"], labels[f"{PREFIX}/group-index"]) == (str(rank), "0")
        assert (labels["role"], annotations[f"{PREFIX}/size"]) == ("prefill", "3")
        assert annotations.get(f"{PREFIX}/leader-name") == (None if rank == 0 else "prefill-0")
        assert (annotations.get("of") == "leader") == (rank == 0)
        assert (spec["hostname"], spec["subdomain"]) == (name, "prefill")
        for part in (*spec["initContainers"], *spec["containers"]):
            # In front of what is declared: only so may arguments and declared values refer to them.
            assert [(entry["name"], entry.get("value")) for entry in part["env"][:3]] == [
                ("LWS_LEADER_ADDRESS", "prefill-0.prefill.k2"),
                ("LWS_GROUP_SIZE", "3"),
                ("LWS_WORKER_INDEX", str(rank)),
            ]
        wait_for("leader found", lambda name=name: "leader found" in site.log(name, "container=main"))
        assert site.log(name, "container=main").splitlines()[:2] == [
            "argument prefill-0.prefill.k2:5757",
            f"prefill-0.prefill.k2 3 {rank}",
        ]
        assert site.log(name, "container=check").strip() == str(rank)
    service = site.get(f"/api/v1/namespaces/{NAMESPACE}/services/prefill")
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert service["spec"]["selector"] == {f"{PREFIX}/name": "prefill"}
    assert service["metadata"]["labels"] == {f"{PREFIX}/name": "prefill"}, "no label of ours: retire does not list it"
    owners = {item["metadata"]["name"]: item["metadata"]["ownerReferences"][0] for item in site.get(SETS)["items"]}
    assert (owners["prefill"]["kind"], owners["prefill-0"]["kind"]) == ("LeaderWorkerSet", "Pod")
    ended(site, "prefill")


def test_the_status_says_what_is_ready(site: Site) -> None:
    created = site.create(GROUPS, group_set("status", gpus=0))
    assert created["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]["maxUnavailable"] == 1, (
        "defaults are filled"
    )
    wait_for("status", lambda: condition(site.get(f"{GROUPS}/status"), "Progressing"))
    wait_for("available", lambda: available(site, "status"))
    obj = site.get(f"{GROUPS}/status")
    status = obj["status"]
    assert [status[key] for key in ("replicas", "readyReplicas", "updatedReplicas", "observedGeneration")] == [1] * 4
    assert status["hpaPodSelector"] == f"{PREFIX}/name=status,{PREFIX}/worker-index=0"
    assert condition(obj, "Progressing") == "False"
    reasons = {entry["type"]: (entry["reason"], entry["message"]) for entry in status["conditions"]}
    assert reasons["Available"] == ("AllGroupsReady", "All replicas are ready")
    ended(site, "status")


def test_each_replica_may_have_a_subdomain_of_its_own(site: Site) -> None:
    policy = {"subdomainPolicy": "UniquePerReplica"}
    started(site, "unique", size=2, gpus=0, replicas=2, networkConfig=policy)
    pods = pods_of(site, "unique")
    assert sorted(pods) == ["unique-0", "unique-0-1", "unique-1", "unique-1-1"]
    for name, pod in pods.items():
        leader = name[: len("unique-0")]
        assert pod["spec"]["subdomain"] == leader
        assert pod["spec"]["containers"][0]["env"][0]["value"] == f"{leader}.{leader}.k2"
        wait_for("leader found", lambda name=name: "leader found" in site.log(name, "container=main"))
    services = site.get(f"/api/v1/namespaces/{NAMESPACE}/services?labelSelector={PREFIX}/name=unique")["items"]
    assert sorted(service["metadata"]["name"] for service in services) == ["unique-0", "unique-1"]
    ended(site, "unique")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_lives_and_dies_together(site: Site, rank: int) -> None:
    name = f"decode{rank}"
    started(site, name)
    before = pods_of(site, name)
    killed = f"{name}-0" + (f"-{rank}" if rank else "")
    processes = site.processes(f"{name}-0") + site.processes(f"{name}-0-1")
    os.kill(next(p["pid"] for p in site.processes(killed)), signal.SIGKILL)

    def renewed() -> bool:
        pods = pods_of(site, name)
        return len(pods) == 2 and not uids(pods) & uids(before) and available(site, name)

    wait_for("the whole group anew", renewed)
    assert not any(identified(process["pid"], process["start_ticks"]) for process in processes)
    assert sorted(pods_of(site, name)) == sorted(before), "the new pods have the names of the old"
    ended(site, name)


def test_a_group_that_does_not_fit_stays_partial_and_whole_groups_are_left_alone(site: Site) -> None:
    started(site, "holder", size=NODES - 1)
    held = pods_of(site, "holder")
    site.create(GROUPS, group_set("partial", size=2))
    wait_for("pods", lambda: len(pods_of(site, "partial")) == 2)

    def pending() -> list[str]:
        pods = pods_of(site, "partial")
        return [name for name, pod in pods.items() if condition(pod, "PodScheduled") == "False"]

    wait_for("one without a node", lambda: len(pending()) == 1 and len(ready(site, "partial")) == 1)
    before = pods_of(site, "partial")
    assert site.get(f"{GROUPS}/partial")["status"].get("readyReplicas", 0) == 0
    assert condition(site.get(f"{GROUPS}/partial"), "Available") != "True"
    ended(site, "holder")
    wait_for("whole", lambda: available(site, "partial"))
    assert uids(pods_of(site, "partial")) == uids(before), "no pod was made anew for having waited"
    assert len(held) == NODES - 1
    ended(site, "partial")


def ready(site: Site, name: str) -> list[str]:
    return [pod for pod, obj in pods_of(site, name).items() if condition(obj, "Ready") == "True"]


def test_a_container_that_ends_before_the_group_is_whole_brings_it_down_too(site: Site) -> None:
    """The reason why `readiness` counts deaths by the leader's uid: a crash loop never shows as one pod's restarts."""
    source = "import os, sys, time; sys.exit(3) if os.environ['LWS_WORKER_INDEX'] == '1' else time.sleep(600)"
    site.create(GROUPS, group_set("crashing", gpus=0, source=source))
    seen: set[str] = set()

    def leaders() -> bool:
        pod = site.pod("crashing-0")
        seen.update([pod["metadata"]["uid"]] if pod else [])
        return len(seen) >= 3

    wait_for("a third leader", leaders)
    ended(site, "crashing")


def refused(site: Site, method: str, path: str, body: dict[str, Any]) -> str:
    with pytest.raises(ApiError) as raised:
        site.plane.admin.request(method, path, body)
    assert raised.value.status in (403, 422), raised.value
    return str(raised.value)


def test_its_webhook_refuses_what_cannot_be(site: Site) -> None:
    rolling = {"rollingUpdateConfiguration": {"maxUnavailable": 0, "maxSurge": 0}}
    stuck = group_set("stuck", rolloutStrategy=rolling)
    assert "vleaderworkerset.kb.io" in (text := refused(site, "POST", GROUPS, stuck)) and "maxUnavailable" in text
    named = refused(site, "POST", GROUPS, group_set("not.a-label"))
    assert "vleaderworkerset.kb.io" in named and "not.a-label" in named
    # A dry run asks the webhooks too: preflight sees what rollout would.
    assert "vleaderworkerset.kb.io" in refused(site, "POST", f"{GROUPS}?dryRun=All", stuck)


def test_a_pod_with_the_label_of_a_group_and_no_size_is_refused(site: Site) -> None:
    pod = {"metadata": {"name": "stray", "labels": {f"{PREFIX}/name": "stray"}}, "spec": {"containers": []}}
    pod["spec"]["containers"] = [container(["true"])]  # type: ignore[index]
    assert "mpod.kb.io" in refused(site, "POST", f"/api/v1/namespaces/{NAMESPACE}/pods", pod)


def test_pods_of_no_group_pass_without_it(site: Site) -> None:
    pod = {"metadata": {"name": "plain"}, "spec": {"containers": [container(["true"])]}}
    made = site.create(f"/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All", pod)
    assert "env" not in made["spec"]["containers"][0]


def test_a_changed_template_makes_the_group_anew_and_another_annotation_does_not(site: Site) -> None:
    """Why a serving set has the digest of its templates in its name, and the release id on the object alone."""
    started(site, "changed", gpus=0)
    before, patch = pods_of(site, "changed"), "application/merge-patch+json"
    body: dict[str, Any] = {"metadata": {"annotations": {"k2-release.io/release": "another"}}}
    site.plane.admin.request("PATCH", f"{GROUPS}/changed", body, content_type=patch)
    obj = group_set("changed", gpus=0, source=RANK + "#\n")
    body = {"spec": {"leaderWorkerTemplate": obj["spec"]["leaderWorkerTemplate"]}}
    assert uids(pods_of(site, "changed")) == uids(before)
    site.plane.admin.request("PATCH", f"{GROUPS}/changed", body, content_type=patch)
    wait_for("anew", lambda: not uids(pods_of(site, "changed")) & uids(before) and available(site, "changed"))
    ended(site, "changed")


def test_zero_replicas_keep_the_object_and_end_the_pods(site: Site) -> None:
    started(site, "zero", gpus=0)
    patch = "application/merge-patch+json"
    site.plane.admin.request("PATCH", f"{GROUPS}/zero", {"spec": {"replicas": 0}}, content_type=patch)
    wait_for("no pods", lambda: not pods_of(site, "zero"))
    site.plane.admin.request("PATCH", f"{GROUPS}/zero", {"spec": {"replicas": 1}}, content_type=patch)
    wait_for("again", lambda: len(ready(site, "zero")) == 2)
    ended(site, "zero")


def test_it_acts_with_the_rights_of_its_own_role_and_no_other(site: Site) -> None:
    token = json.loads((site.directory / "lws" / "kubeconfig").read_text())["users"][0]["user"]["token"]
    manager = ApiConnection(site.plane.url, site.plane.ca_path, token)
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}

    def allowed(verb: str, resource: str, group: str = "") -> bool:
        attributes = {"namespace": NAMESPACE, "verb": verb, "group": group, "resource": resource}
        body = review | {"spec": {"resourceAttributes": attributes}}
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        return bool(manager.request("POST", path, body)["status"]["allowed"])

    assert allowed("create", "statefulsets", "apps") and allowed("delete", "pods")
    assert not allowed("create", "deployments", "apps") and not allowed("delete", "nodes")
    assert not allowed("create", "secrets")
    started(site, "owned", gpus=0)
    made = site.get(f"{SETS}/owned")
    assert {entry["manager"] for entry in made["metadata"]["managedFields"]} >= {"lws"}
    assert (MANAGER_NAMESPACE, ACCOUNT) == ("lws-system", "lws-controller-manager")
    ended(site, "owned")


def inject(directory: Path, node: str) -> Path:
    path = directory / "inject" / "node-lost.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"node": node}))
    return path


def test_a_group_with_a_lost_node_waits_for_it_and_its_set_can_be_deleted_meanwhile(site: Site) -> None:
    """Nobody deletes the pods of a silent node by force: only its return (or a person) ends them."""
    started(site, "lost")
    worker = site.pod("lost-0-1")
    assert worker
    node, process = worker["spec"]["nodeName"], site.processes("lost-0-1")[0]
    injection = inject(site.directory, node)
    wait_for("killed", lambda: not identified(process["pid"], process["start_ticks"]))
    # "Unknown" is the controller manager's word for heartbeats that stopped; the agent would have said "False".
    wait_for("not ready", lambda: condition(site.get(f"/api/v1/nodes/{node}"), "Ready") == "Unknown")
    wait_for("terminating", lambda: "deletionTimestamp" in (site.pod("lost-0-1") or worker)["metadata"])
    wait_for("its leader too", lambda: "deletionTimestamp" in (site.pod("lost-0") or worker)["metadata"])
    assert not available(site, "lost")
    assert (site.pod("lost-0-1") or {})["metadata"]["uid"] == worker["metadata"]["uid"]
    # What the pipeline does with the candidate: the object goes, the pods of the lost node stay.
    site.delete(f"{GROUPS}/lost")
    wait_for("object gone", lambda: not site.plane.admin.answers(f"{GROUPS}/lost"))
    assert site.pod("lost-0-1")
    injection.unlink()
    wait_for("ready again", lambda: node in ready_nodes(site))
    wait_for("pods gone", lambda: not pods_of(site, "lost"))


def test_a_group_is_whole_again_when_its_lost_node_is_back(site: Site) -> None:
    started(site, "back")
    before = pods_of(site, "back")
    node = before["back-0-1"]["spec"]["nodeName"]
    injection = inject(site.directory, node)
    wait_for("terminating", lambda: "deletionTimestamp" in (site.pod("back-0-1") or before["back-0-1"])["metadata"])
    injection.unlink()
    wait_for("whole again", lambda: available(site, "back") and not uids(pods_of(site, "back")) & uids(before))
    ended(site, "back")


def test_a_group_leaves_a_lost_node_that_a_person_gives_up(site: Site) -> None:
    """The remedy that the diagnosis of a lost node names."""
    started(site, "given")
    before = pods_of(site, "given")
    node = before["given-0-1"]["spec"]["nodeName"]
    injection = inject(site.directory, node)
    wait_for("terminating", lambda: "deletionTimestamp" in (site.pod("given-0-1") or before["given-0-1"])["metadata"])
    patch, path = "application/merge-patch+json", f"/api/v1/nodes/{node}"
    assert "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute" in lost_node_remedy(node)
    given_up = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
    taints = [*site.get(path)["spec"].get("taints", []), given_up]
    site.plane.admin.request("PATCH", path, {"spec": {"taints": taints}}, content_type=patch)
    wait_for("whole again", lambda: available(site, "given") and not uids(pods_of(site, "given")) & uids(before))
    assert node not in {pod["spec"]["nodeName"] for pod in pods_of(site, "given").values()}
    injection.unlink()
    wait_for("ready again", lambda: node in ready_nodes(site))
    left = [taint for taint in site.get(path)["spec"].get("taints", []) if taint["key"] != given_up["key"]]
    site.plane.admin.request("PATCH", path, {"spec": {"taints": left}}, content_type=patch)
    ended(site, "given")


def test_it_outlives_an_api_server_that_dies(site: Site) -> None:
    started(site, "before", gpus=0)
    pods, manager = pods_of(site, "before"), site.supervisor.child(LWS_MANAGER)
    specs = [site.supervisor.child(name).spec for name in ("etcd", "kube-apiserver")]
    for spec in specs:
        site.supervisor.stop(spec.name, grace_s=0)
    time.sleep(OUTAGE_S)  # the length of the outage is what is tried
    for spec in specs:
        site.supervisor.start(spec)
    site.create(GROUPS, group_set("after", gpus=0))
    wait_for("the group made after the outage", lambda: available(site, "after"))
    assert manager.alive()
    assert uids(pods_of(site, "before")) == uids(pods), "and nothing was made anew for it"
    ended(site, "before")
    ended(site, "after")
