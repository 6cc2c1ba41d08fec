"""Scheduling as a cluster does it, read as the pipeline reads it: full, closed, lost, drained, over quota."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from infra.rehearsal.apiserver import ApiError
from tasks.core.demand import demand_of
from tasks.core.diagnosis import MISSING, NODE_LOST, Diagnosis
from tasks.core.errors import CapacityError
from tasks.core.readiness import Readiness, not_ready_error
from tasks.core.render import render_serving
from tasks.core.scheduling import AFFINITY, CORDON, RESOURCE, TAINT, read_verdict
from tasks.core.worker_jobs import render_probe_job
from tasks.steps.capacity import make_release_plan, preflight_step
from tasks.steps.jobs import run_jobs
from tasks.steps.rollout import _chosen_problem, _View
from tests.contract.agent_site import wait_for
from tests.contract.site.sixteen_nodes import (
    NODES,
    SixteenNodes,
    condition,
    sixteen_nodes,
)

pytestmark = [pytest.mark.site, pytest.mark.timeout(180)]

FOUR = NODES[:4]
GPU = "nvidia.com/gpu"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SixteenNodes]:
    with sixteen_nodes(tmp_path_factory.mktemp("sixteen")) as started:
        yield started


@pytest.fixture
def nodes(cluster: SixteenNodes) -> Iterator[SixteenNodes]:
    """The cluster with nothing of another test in it."""
    try:
        yield cluster
    finally:
        cluster.clear()


def of(state: Readiness, category: str) -> list[Diagnosis]:
    return [diagnosis for diagnosis in state.diagnoses if diagnosis.category == category]


def pending(cluster: SixteenNodes, count: int, role: str = "decode") -> list[dict[str, Any]]:
    """Wait until the scheduler has said of so many pods of a role that it finds no node, and return them."""

    def unplaced() -> list[dict[str, Any]] | None:
        pods = cluster.pods(**{"k2-release.io/role": role}).values()
        found = [pod for pod in pods if condition(pod, "PodScheduled").get("reason") == "Unschedulable"]
        return found if len(found) == count else None

    return wait_for(f"{count} pending", unplaced)


def started(cluster: SixteenNodes, role: str, size: int) -> str:
    """Start a group of which every pod finds a node, and return its name."""
    name = cluster.start_group(role, size)

    def up() -> bool:
        pods = cluster.pods(**{"k2-release.io/role": role}).values()
        return len(pods) == size and all(condition(pod, "Ready").get("status") == "True" for pod in pods)

    wait_for(f"{size} {role} pods ready", up)
    return name


def test_on_sixteen_full_nodes_a_13th_decode_pod_stays_pending_and_is_diagnosed(nodes: SixteenNodes) -> None:
    nodes.place(*NODES)
    started(nodes, "prefill", 4)
    nodes.start_group("decode", 13)
    (pod,) = pending(nodes, 1)
    full = "prefill: 4 Ready; decode: 1 Pending, 12 Ready; router: 1 Missing"
    state = wait_for("12 of 13 up", lambda: ((seen := nodes.look()).summary == full and seen) or None)
    engines = [p for role in ("prefill", "decode") for p in nodes.pods(**{"k2-release.io/role": role}).values()]
    taken = [p["spec"]["nodeName"] for p in engines if p["spec"].get("nodeName")]
    assert sorted(taken) == sorted(NODES)  # one whole node each
    said = condition(pod, "PodScheduled")["message"]
    verdict = read_verdict(said)
    assert verdict is not None
    assert verdict.nodes == 16
    assert {(refusal.nodes, refusal.what) for refusal in verdict.of(RESOURCE)} == {(16, GPU), (16, "memory")}
    assert verdict.preemption == "not eligible due to preemptionPolicy=Never"
    (diagnosis,) = of(state, "capacity")
    assert diagnosis.pod == pod["metadata"]["name"] and diagnosis.rank > 0
    assert diagnosis.detail == said  # the scheduler's own words, and no node is closed
    assert f"16 have too little {GPU} left" in diagnosis.summary and "k2ctl retire" in diagnosis.resolution
    error = not_ready_error(state, "K2-RDY-001", "Not ready after 60 s.")
    assert said in error.as_text() and pod["metadata"]["name"] in error.where
    # Nothing but waiting is lost: the pod takes the place of one that leaves.
    nodes.scale(nodes.group("prefill")["metadata"]["name"] + "-0", 2)
    wait_for("placed", lambda: (nodes.pod(diagnosis.pod) or {})["spec"].get("nodeName"))


def test_pods_that_no_node_has_the_labels_for_name_the_label(nodes: SixteenNodes) -> None:
    nodes.place()
    nodes.start_group("decode", 2)
    pod = pending(nodes, 2)[0]
    verdict = read_verdict(condition(pod, "PodScheduled")["message"])
    assert verdict is not None and [(r.kind, r.nodes) for r in verdict.refusals] == [(AFFINITY, 16)]
    diagnosis = of(nodes.look(), "capacity")[0]
    assert f"placed.k2-release.io/{nodes.subject.serving}=true 16" in diagnosis.detail
    assert "run the release again" in diagnosis.resolution


def test_cordoned_and_tainted_nodes_take_no_pod_keep_their_own_and_are_named(nodes: SixteenNodes) -> None:
    nodes.place(*FOUR)
    before = started(nodes, "prefill", 1)
    kept = (nodes.pod(f"{before}-0") or {})["spec"]["nodeName"]
    cordoned, tainted = [node for node in FOUR if node != kept][:2]
    nodes.cordon(kept)
    nodes.cordon(cordoned)
    nodes.taint(tainted, {"key": "repair", "value": "disk", "effect": "NoSchedule"})
    facts = nodes.node_facts()
    assert (facts[kept], facts[cordoned], facts[tainted]) == ("cordoned", "cordoned", "tainted repair")
    assert sum(why == "" for why in facts.values()) == 13
    nodes.start_group("decode", 2)
    pod = pending(nodes, 1)[0]
    assert condition(nodes.pod(f"{before}-0") or {}, "Ready")["status"] == "True"
    verdict = read_verdict(condition(pod, "PodScheduled")["message"])
    assert verdict is not None
    assert {r.kind: r.nodes for r in verdict.refusals} == {AFFINITY: 12, CORDON: 2, TAINT: 1, RESOURCE: 1}
    (diagnosis,) = of(nodes.look(), "capacity")
    assert f"{cordoned}: cordoned" in diagnosis.detail and f"{tainted}: tainted repair" in diagnosis.detail
    assert f"kubectl uncordon {' '.join(sorted((kept, cordoned)))}" in diagnosis.resolution
    assert f"kubectl taint node {tainted} repair-" in diagnosis.resolution
    with _View.of(nodes.ports, nodes.subject.serving) as view:
        problem = _chosen_problem(nodes.ports, view, [cordoned])
    assert problem is not None and (problem.where, problem.got) == (cordoned, "cordoned")
    assert "closed to pods" in problem.summary
    nodes.cordon(cordoned, on=False)
    wait_for("placed", lambda: (nodes.pod(diagnosis.pod) or {})["spec"].get("nodeName") == cordoned)


def test_the_plan_chooses_no_closed_node_and_the_taint_of_gpu_nodes_closes_none(nodes: SixteenNodes) -> None:
    nodes.taint("node-1", {"key": GPU, "value": "present", "effect": "NoSchedule"})
    nodes.taint("node-3", {"key": "repair", "value": "disk", "effect": "NoExecute"})
    assert (nodes.node_facts()["node-1"], nodes.node_facts()["node-3"]) == ("", "tainted repair")
    with pytest.raises(CapacityError) as caught:
        make_release_plan(nodes.ports, nodes.subject)
    assert (caught.value.got, caught.value.where) == ("15 free of 16", "node-3: tainted repair")
    nodes.taint("node-3")
    nodes.cordon("node-2")
    with pytest.raises(CapacityError) as caught:
        make_release_plan(nodes.ports, nodes.subject)
    assert caught.value.where == "node-2: cordoned"
    nodes.cordon("node-2", on=False)
    assert set(make_release_plan(nodes.ports, nodes.subject).nodes) == set(NODES)
    nodes.place("node-1")
    started(nodes, "decode", 1)  # onto the node with the taint that every GPU node of a vendor's operator may carry


def test_a_noexecute_taint_takes_the_pod_away_and_the_diagnosis_says_so(nodes: SixteenNodes) -> None:
    nodes.place(*FOUR)
    victim = f"{started(nodes, 'decode', 4)}-0-1"
    pod = nodes.pod(victim) or {}
    node = pod["spec"]["nodeName"]
    nodes.taint(node, {"key": "repair", "value": "disk", "effect": "NoExecute"})

    def seen() -> Diagnosis | None:
        return next((d for d in of(nodes.look(), "disruption") if d.pod == victim and d.node == node), None)

    going = wait_for("the status of the going pod", seen)
    assert going.detail == "Taint manager: deleting due to NoExecute taint" and "NoExecute" in going.summary
    wait_for("a successor", lambda: (nodes.pod(victim) or pod)["metadata"]["uid"] != pod["metadata"]["uid"])
    pending(nodes, 1)
    state = nodes.look()
    (gone,) = of(state, "disruption")  # now from the event: the pod's own status went with it
    assert gone.pod == victim and gone.detail == f"Marking for deletion Pod k2/{victim}"
    assert f"{node}: tainted repair" in of(state, "capacity")[0].detail


def test_a_lost_node_is_named_and_is_of_use_again_when_it_is_back(nodes: SixteenNodes) -> None:
    nodes.place(*FOUR)
    victim = f"{started(nodes, 'decode', 3)}-0-1"
    node = (nodes.pod(victim) or {})["spec"]["nodeName"]
    back = nodes.lose(node)
    try:
        wait_for("not Ready", lambda: nodes.node_ready(node) == "Unknown")
        assert nodes.node_facts()[node] == "not Ready (NodeStatusUnknown)"
        state = nodes.look()
        assert [(phase.pod, phase.node) for phase in state.phases if phase.phase == NODE_LOST] == [(victim, node)]
        (lost,) = state.fatal
        assert (lost.category, lost.node, lost.rank) == ("node", node, 1)
        # After the 20 s that pods tolerate it the pod is to go, and cannot: nobody on the node ends it.
        wait_for("deleted", lambda: (nodes.pod(victim) or {})["metadata"].get("deletionTimestamp"))
        assert [diagnosis.node for diagnosis in nodes.look().fatal] == [node]
        old = (nodes.pod(victim) or {})["metadata"]["uid"]
    finally:
        back()
    wait_for("ready", lambda: nodes.node_ready(node) == "True")
    wait_for("of use", lambda: nodes.node_facts()[node] == "")
    wait_for("the old pod gone, a new one up", lambda: _renewed(nodes.pod(victim), old))
    assert nodes.look().fatal == ()


def _renewed(pod: dict[str, Any] | None, old: str) -> bool:
    return bool(pod and pod["metadata"]["uid"] != old and condition(pod, "Ready").get("status") == "True")


def test_a_drain_takes_no_engine_and_one_of_two_parking_pods(nodes: SixteenNodes) -> None:
    nodes.place(*FOUR)
    engine = f"{started(nodes, 'decode', 2)}-0-1"
    node = (nodes.pod(engine) or {})["spec"]["nodeName"]
    nodes.cordon(node)
    # Budgets are counted from pods that are ready: the refusal has to be the budget's, not its ignorance.
    budget = "poddisruptionbudgets"
    wait_for("counted", lambda: _status(nodes, budget, "k2-engines").get("currentHealthy") == 2)
    assert refused(nodes, engine) == "The disruption budget k2-engines needs 2 healthy pods and has 2 currently"
    assert condition(nodes.pod(engine) or {}, "Ready")["status"] == "True"
    wait_for("parking counted", lambda: _status(nodes, budget, "k2-parking").get("disruptionsAllowed") == 1)
    first, second = sorted(nodes.pods(**{"k2-release.io/role": "parking"}))
    nodes.evict(first)
    assert refused(nodes, second) == "The disruption budget k2-parking needs 1 healthy pods and has 1 currently"
    wait_for("two again", lambda: _status(nodes, budget, "k2-parking").get("disruptionsAllowed") == 1)
    assert nodes.pod(first) is None and nodes.pod(second)


def _status(nodes: SixteenNodes, plural: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = nodes.plane.admin.request("GET", nodes.path(plural, name, "policy/v1"))
    return dict(found.get("status", {}))


def refused(nodes: SixteenNodes, pod: str) -> str:
    """Return the budget's words with which an eviction is refused."""
    with pytest.raises(ApiError) as caught:
        nodes.evict(pod)
    assert caught.value.status == 429
    answer = json.loads(str(caught.value).partition("HTTP 429: ")[2])
    return str(answer["details"]["causes"][0]["message"])


def test_an_engine_preempts_nobody_and_falls_to_higher_priority_alone(nodes: SixteenNodes) -> None:
    low = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "low"}, "value": 10}
    nodes.admin.apply(low)
    nodes.place(*FOUR)
    for number in range(4):
        nodes.admin.create(another(nodes, f"low-{number}", "low"))
    wait_for("low up", lambda: sum(bool(p["spec"].get("nodeName")) for p in nodes.pods(who="low").values()) == 4)
    nodes.start_group("decode", 1)
    (engine,) = pending(nodes, 1)
    said = read_verdict(condition(engine, "PodScheduled")["message"])
    assert said is not None and said.preemption == "not eligible due to preemptionPolicy=Never"
    assert not any(pod["metadata"].get("deletionTimestamp") for pod in nodes.pods(who="low").values())
    nodes.clear()

    group = started(nodes, "decode", 4)
    nodes.admin.create(another(nodes, "low-later", "low"))
    later = wait_for("judged", lambda: condition(nodes.pod("low-later") or {}, "PodScheduled").get("message"))
    assert "No preemption victims found" in later
    assert all(name.startswith((group, "low", "k2-parking")) for name in nodes.pods())
    before = nodes.look()
    assert of(before, "disruption") == []

    nodes.admin.create(another(nodes, "high", "system-cluster-critical"))
    taken = wait_for("a victim", lambda: of(nodes.look(before), "disruption"))[0]
    assert taken.pod.startswith(group) and "a pod of higher priority" in taken.summary
    assert taken.detail == "default-scheduler: preempting to accommodate a higher priority pod"
    wait_for("high up", lambda: (nodes.pod("high") or {})["spec"].get("nodeName"))
    pending(nodes, 1)
    (gone,) = of(nodes.look(), "disruption")  # the event outlives the pod
    assert gone.pod == taken.pod and gone.detail.startswith("Preempted by pod ")


def another(nodes: SixteenNodes, name: str, priority: str) -> dict[str, Any]:
    """Return somebody else's pod that wants a whole node."""
    pod = nodes.engine_pod(name, priorityClassName=priority)
    pod["metadata"]["labels"] = {"who": priority}
    return pod


def test_pods_over_a_quota_are_missing_with_the_quota_as_the_reason(nodes: SixteenNodes) -> None:
    nodes.place(*FOUR)
    nodes.quota("gpus", **{f"requests.{GPU}": "16"})
    nodes.start_group("decode", 4)
    wait_for("two made", lambda: len(nodes.pods(**{"k2-release.io/role": "decode"})) == 2)
    wait_for("refused", lambda: of(nodes.look(), "quota"))
    state = nodes.look()
    assert sum(phase.phase == MISSING for phase in state.phases if phase.role == "decode") == 2
    (diagnosis,) = of(state, "quota")
    name = nodes.group("decode")["metadata"]["name"]
    assert diagnosis.summary == (
        f"2 pods of {name} cannot be made. Quota gpus allows 16 requests.{GPU}, 16 are used, 8 more are needed."
    )
    assert "exceeded quota: gpus" in diagnosis.detail and "resourcequota gpus" in diagnosis.resolution
    assert state.news == diagnosis.summary
    nodes.quota("gpus", **{f"requests.{GPU}": "64"})
    wait_for("made after all", lambda: len(nodes.pods(**{"k2-release.io/role": "decode"})) == 4)
    assert of(nodes.look(), "quota") == []


def test_a_quota_that_wants_more_stated_than_the_engines_state_is_named(nodes: SixteenNodes) -> None:
    nodes.place(*FOUR)
    nodes.quota("cpu", **{"requests.cpu": "1000"})
    nodes.apply_group("decode", 2)
    (diagnosis,) = wait_for("refused", lambda: of(nodes.look(), "quota"))
    assert diagnosis.summary.endswith("Quota cpu wants every container to state requests.cpu for: engine.")
    assert "LimitRange" in diagnosis.resolution


def test_what_a_release_needs_is_counted_as_the_api_server_counts_it(nodes: SixteenNodes) -> None:
    nodes.place(*FOUR)
    resources = (f"requests.{GPU}", "pods", "requests.memory", "limits.memory", "memory")
    counts = ("count/pods", "count/statefulsets.apps")
    nodes.quota("all", **dict.fromkeys((*resources, *counts), "1000Ti"))
    before = nodes.used("all")
    group = nodes.group("decode")
    group["spec"]["leaderWorkerTemplate"]["size"] = 4
    needed = demand_of([group], {}, [], []).needed(nodes.admin.get("ResourceQuota", "all") or {})
    started(nodes, "decode", 4)
    grown = {name: value - before[name] for name, value in nodes.used("all").items()}
    assert grown == {name: needed[name] for name in (*resources, *counts)}
    # What is there is needed no more.
    there = [group, *nodes.admin.list_objects("LeaderWorkerSet")]
    nodes.number()
    left = demand_of([group], {}, there, nodes.admin.list_objects("Pod"))
    assert not any(left.needed(nodes.admin.get("ResourceQuota", "all") or {}).values())


def test_what_a_quota_refuses_the_pipeline_itself_is_capacity_and_not_a_right_that_is_missing(
    nodes: SixteenNodes,
) -> None:
    nodes.quota("jobs", **{"count/jobs.batch": "0"})
    nodes.quota("deployments", **{"count/deployments.apps": "0"})
    job = render_probe_job(nodes.subject.lock, nodes.ports.site, nodes.ports.templates, "tool", "node-1")
    objects = render_serving(nodes.subject.release, nodes.subject.lock, nodes.ports.site, nodes.ports.templates)
    router = next(obj for obj in objects if obj["kind"] == "Deployment")
    cluster = nodes.ports.cluster
    for write, obj, says in (
        (cluster.create, job, "Quota jobs allows 0 count/jobs.batch, 0 are used, 1 more are needed."),
        (
            lambda obj: cluster.apply(obj, dry_run=True),
            router,
            # The parking backend's is there.
            "Quota deployments allows 0 count/deployments.apps, 1 are used, 1 more are needed.",
        ),
    ):
        with pytest.raises(CapacityError) as caught:
            write(obj)
        where = f"{obj['kind']}/{obj['metadata']['name']}"
        assert (caught.value.code, caught.value.exit_code, caught.value.where) == ("K2-CAP-003", 8, where)
        assert caught.value.summary == says
    with pytest.raises(CapacityError):
        run_jobs(nodes.ports, "preflight", [job], 0, 30.0)


def test_preflight_says_that_the_set_does_not_fit_before_anything_is_made(nodes: SixteenNodes) -> None:
    nodes.quota("gpus", **{f"requests.{GPU}": "120", "pods": "400"})
    nodes.quota("small", **{"count/jobs.batch": "40", "requests.memory": "24Ti"})
    assert _made(nodes) == []
    with pytest.raises(CapacityError) as caught:
        preflight_step(nodes.ports, nodes.subject, NODES)
    error = caught.value
    assert error.code == "K2-CAP-003"
    assert error.where == f"ResourceQuota gpus: requests.{GPU}, ResourceQuota small: requests.memory"
    assert (error.got, error.expected) == (f"0 of 120 requests.{GPU} used", "128 more to be free")
    short = error.details["shortfalls"]
    assert [(s["quota"], s["hard"], s["needed"]) for s in short] == [
        ("gpus", "120", "128"),
        ("small", "24Ti", "25166336Mi"),
    ]
    assert _made(nodes) == []


def _made(nodes: SixteenNodes) -> list[str]:
    kinds = ("Job", "LeaderWorkerSet", "Service", "HTTPRoute")
    names = [obj["metadata"]["name"] for kind in kinds for obj in nodes.admin.list_objects(kind)]
    return [name for name in names if name != "k2-parking"]
