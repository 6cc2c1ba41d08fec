"""Steps plan and preflight: what is there is read, the chosen nodes are checked, and nothing is changed."""

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tasks.core.errors import CapacityError, InputError, IntegrityError, NotReadyError
from tasks.core.spec import Retention
from tasks.steps.capacity import plan_step, preflight_step, read_nodes
from tasks.steps.documents import put_lock
from tests.fakes.pipeline import bring_up, make_live
from tests.fakes.small_world import READY, World, checkpoint, release

CHOSEN = ("node-1", "node-2", "node-3")


def prepared():
    world = World()
    subject = world.subject(release())
    put_lock(world.store, subject.lock)
    return world, subject


def change_node(world, name, *, spec=None, status=None):
    world.cluster.edit("Node", name, lambda node: node.update(spec=spec or {}))
    if status is not None:
        world.cluster.set_status("Node", name, {"allocatable": {"nvidia.com/gpu": "8"}, **status})


@pytest.mark.parametrize(
    ("spec", "status", "why"),
    [
        ({}, READY, ""),
        ({"unschedulable": True}, READY, "cordoned"),
        ({}, {}, "not Ready (no status)"),
        ({}, {"conditions": [{"type": "Ready", "status": "Unknown", "reason": "Silent"}]}, "not Ready (Silent)"),
        ({}, {"conditions": [{"type": "DiskPressure", "status": "True"}]}, "not Ready (no status)"),
        ({"taints": [{"key": "bad", "effect": "NoSchedule"}]}, READY, "tainted bad"),
        ({"taints": [{"key": "soft", "effect": "PreferNoSchedule"}]}, READY, ""),
        ({"taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]}, READY, ""),
        ({"taints": [{"key": "nvidia.com/gpu", "effect": "NoExecute"}]}, READY, "tainted nvidia.com/gpu"),
    ],
)
def test_whether_a_node_is_usable(spec, status, why):
    world, _ = prepared()
    change_node(world, "node-1", spec=spec, status=status)
    facts = read_nodes(world.ports(), "x")[0]
    assert (facts.usable, facts.why_not) == (not why, why)


def lose_node(world, name, seconds_ago):
    since = datetime.fromtimestamp(world.clock.at - seconds_ago, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    unknown = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "lastTransitionTime": since}
    change_node(world, name, status={"conditions": [unknown]})


def test_nodes_that_an_outage_took_for_lost_are_waited_for():
    world, subject = prepared()
    lose_node(world, "node-1", 3)
    back = world.clock.at + 12
    world.clock.on_sleep.append(lambda now: change_node(world, "node-1", status=READY) if now >= back else None)
    plan, _ = plan_step(world.ports(), subject)
    assert plan.nodes == CHOSEN
    assert sum("node-1 not Ready since a moment ago" in line for line in world.progress.lines) == 1


def test_a_node_that_stays_away_is_given_up_and_one_long_lost_is_not_waited_for():
    world, subject = prepared()
    lose_node(world, "node-1", 3)
    began = world.clock.at
    assert "node-1" not in plan_step(world.ports(), subject)[0].nodes
    assert 26 <= world.clock.at - began <= 33
    began = world.clock.at
    assert "node-1" not in plan_step(world.ports(), subject)[0].nodes
    assert world.clock.at == began


def test_preflight_waits_for_a_chosen_node_as_well():
    world, subject = prepared()
    lose_node(world, "node-2", 1)
    back = world.clock.at + 20
    world.clock.on_sleep.append(lambda now: change_node(world, "node-2", status=READY) if now >= back else None)
    assert [row["node"] for row in preflight_step(world.ports(), subject, CHOSEN)["nodes"]] == list(CHOSEN)


def test_gpus_in_use_are_those_of_pods_that_have_not_ended():
    world = World()
    subject = make_live(world.ports(), release())
    facts = {n.name: n for n in read_nodes(world.ports(), subject.serving)}
    assert [facts[f"node-{n}"].gpus_used for n in range(1, 7)] == [8, 8, 8, 0, 0, 0]
    assert all(facts[name].gpus_used_by_candidate == 8 and facts[name].free(8) for name in CHOSEN)
    others = {n.name: n for n in read_nodes(world.ports(), "another")}
    assert not others["node-1"].free(8)
    assert [str(pod) for pod in others["node-1"].used_by] == [
        f"k2/k2-{subject.serving[:8]}-prefill-0 of {release().id}"
    ]
    assert facts["node-1"].staged == (subject.lock.digest[:12],)
    world.cluster.set_status("Pod", f"k2-{subject.serving[:8]}-prefill-0", {"phase": "Failed"})
    assert read_nodes(world.ports(), subject.serving)[0].gpus_used == 0


def test_gpus_of_other_namespaces_are_in_use_too_and_never_the_candidates_own():
    world, subject = prepared()
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "somebodys",
            "namespace": "research",
            "labels": {"k2-release.io/serving": subject.serving},
        },
        "spec": {
            "nodeName": "node-1",
            "containers": [{"name": "a", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
        },
    }
    world.cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "research"}})
    world.cluster.apply(pod)
    assert "somebodys" not in {p["metadata"]["name"] for p in world.cluster.list_objects("Pod")}
    facts = read_nodes(world.ports(), subject.serving)[0]
    assert (facts.gpus_used, facts.gpus_used_by_candidate, facts.free(8)) == (1, 0, False)
    assert plan_step(world.ports(), subject)[0].nodes == ("node-2", "node-3", "node-4")


def test_a_node_that_shows_no_gpu_is_not_chosen():
    world, subject = prepared()
    world.cluster.set_status("Node", "node-1", {**READY, "allocatable": {}})
    assert plan_step(world.ports(), subject)[0].nodes == ("node-2", "node-3", "node-4")


def test_only_nodes_of_the_pool_count():
    world, _ = prepared()
    world.cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "cpu-1"}, "spec": {}})
    assert "cpu-1" not in {node.name for node in read_nodes(world.ports(), "x")}


def test_the_plan_reads_only():
    world, subject = prepared()
    writes, calls = list(world.cluster.writes), list(world.store.calls)
    plan, data = plan_step(world.ports(), subject)
    assert (plan.change, plan.nodes) == ("first", CHOSEN)
    assert plan.bytes_to_pull == subject.lock.total_bytes
    assert data["plan"]["nodes"] == list(CHOSEN)
    assert json.loads(json.dumps(data)) == data
    assert (world.cluster.writes, world.store.calls) == (writes, calls)


def test_a_live_release_plans_nothing_and_a_new_policy_no_pod():
    world = World()
    what = release()
    subject = make_live(world.ports(), what)
    assert not plan_step(world.ports(), subject)[0].has_changes
    policy = replace(subject, release=replace(what, id="k2-new-2", retention=Retention(1.0)))
    plan = plan_step(world.ports(), policy)[0]
    assert (plan.change, plan.pods_started, plan.nodes) == ("policy", 0, ())


def test_a_plan_over_a_route_that_a_human_hand_changed_still_reads():
    world = World()
    subject = make_live(world.ports(), release())
    world.cluster.edit("HTTPRoute", "k2-live", lambda o: o["spec"]["rules"][0]["backendRefs"][0].update(weight=7))
    assert plan_step(world.ports(), subject)[0].route_stable == subject.serving


def test_a_site_without_a_route_serves_nobody():
    world, subject = prepared()
    world.cluster.delete("HTTPRoute", "k2-live")
    assert plan_step(world.ports(), subject)[0].route_stable == ""


@pytest.mark.parametrize("gone", [(), ("receipt",), ("receipt", "live"), ("receipt", "record"), ("live", "record")])
@pytest.mark.parametrize(
    "change", [{"retention": Retention(1.0)}, {"args": {"decode-log-interval": 7}}], ids=["policy", "serving"]
)
def test_a_promoted_release_is_immutable(change, gone):
    world = World()
    make_live(world.ports(), release())
    if "receipt" in gone:
        del world.store.objects[f"receipts/{release().id}.json"]
    if "live" in gone:
        del world.store.objects["live.json"]
    if "record" in gone:
        for key in [k for k in world.store.objects if k.startswith("ledger/")]:
            del world.store.objects[key]
    kept = dict(world.store.objects)
    with pytest.raises(InputError) as caught:
        plan_step(world.ports(), world.subject(release(**change)))
    assert caught.value.code == "K2-INP-001"
    assert "new id" in caught.value.summary
    assert world.store.objects == kept


def test_a_release_that_was_never_promoted_may_still_be_edited():
    world = World()
    bring_up(world.ports(), release())
    edited = world.subject(release(args={"decode-log-interval": 7}))
    assert plan_step(world.ports(), edited)[0].change == "first"


def test_a_set_that_runs_already_plans_its_own_nodes_again():
    world = World()
    subject = bring_up(world.ports(), release())
    plan = plan_step(world.ports(), subject)[0]
    assert plan.nodes == CHOSEN
    assert plan.bytes_to_stage == 0


def test_preflight_passes_and_changes_nothing_but_probe_jobs():
    world, subject = prepared()
    before = set(world.cluster.objects)
    data = preflight_step(world.ports(), subject, CHOSEN)
    assert [row["node"] for row in data["nodes"]] == list(CHOSEN)
    assert data["objects_checked"] == 5
    new = {kind for kind, _ in set(world.cluster.objects) - before}
    assert new <= {"Job", "Pod"}
    assert all(name.startswith("k2-probe-") for name in world.jobs_run)


@pytest.mark.parametrize(
    ("spec", "status", "problem"),
    [
        ({"unschedulable": True}, READY, "cordoned"),
        ({}, {"conditions": [{"type": "Ready", "status": "False"}]}, "not Ready"),
        ({}, {**READY, "allocatable": {"nvidia.com/gpu": "7"}}, "7 of 8 GPUs"),
        ({}, {**READY, "allocatable": {}}, "0 of 8 GPUs"),
    ],
)
def test_a_bad_node_is_named_before_anything_moves(spec, status, problem):
    world, subject = prepared()
    change_node(world, "node-2", spec=spec, status=status)
    with pytest.raises(NotReadyError) as caught:
        preflight_step(world.ports(), subject, CHOSEN)
    assert (caught.value.code, caught.value.where) == ("K2-RDY-004", "node-2")
    assert problem in caught.value.got
    assert world.jobs_run == []


def test_arguments_that_cannot_work_stop_before_anything_moves():
    world, _ = prepared()
    subject = world.subject(release(args={"enable-deepep-moe": True}))
    with pytest.raises(InputError) as caught:
        preflight_step(world.ports(), subject, CHOSEN)
    assert caught.value.code == "K2-INP-005"
    assert world.jobs_run == []


def test_a_full_disk_is_the_nodes_own_word():
    world, subject = prepared()
    error = CapacityError("K2-CAP-002", "Not enough free space.", where="node-2: /models")
    world.broken_jobs[f"k2-probe-{subject.lock.digest[:8]}-node-2"] = error.as_data()
    with pytest.raises(CapacityError) as caught:
        preflight_step(world.ports(), subject, CHOSEN)
    assert caught.value.where == "node-2: /models"


def test_an_object_that_the_api_refuses_stops_before_anything_is_stored():
    world, subject = prepared()
    real = world.cluster.apply

    def strict(obj, *, dry_run=False):
        if obj["kind"] == "Service":
            raise InputError("K2-INP-008", "No.", where="Service")
        return real(obj, dry_run=dry_run)

    world.cluster.apply = strict
    with pytest.raises(InputError):
        preflight_step(world.ports(), subject, CHOSEN)
    assert not world.cluster.list_objects("LeaderWorkerSet")


def limit(world, **hard):
    status = {"used": dict.fromkeys(hard, "0")}
    obj = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpus"}, "spec": {"hard": hard}}
    world.cluster.apply(obj)
    world.cluster.set_status("ResourceQuota", "gpus", status)


@pytest.mark.parametrize(
    ("resource", "needed"),
    # Probe Jobs on 3 nodes, 2 pullers beside staging on these 3, staging on 3 spares; then 3 engines and a router.
    [("requests.nvidia.com/gpu", 24), ("count/jobs.batch", 3 + 2 + 6), ("pods", 2 + 3), ("count/pods", 11 + 4)],
)
def test_a_set_that_no_quota_has_room_for_stops_before_anything_is_made(resource, needed):
    world, subject = prepared()
    limit(world, **{resource: str(needed - 1)})
    writes = list(world.cluster.writes)
    with pytest.raises(CapacityError) as caught:
        preflight_step(world.ports(), subject, CHOSEN)
    assert (caught.value.code, caught.value.where) == ("K2-CAP-003", f"ResourceQuota gpus: {resource}")
    assert caught.value.expected == f"{needed} more to be free"
    assert world.cluster.writes == writes and world.jobs_run == []
    limit(world, **{resource: str(needed)})
    assert "room under 1 quotas" in preflight_step(world.ports(), subject, CHOSEN)["note"]


def test_a_set_that_runs_already_fits_again():
    world = World()
    subject = bring_up(world.ports(), release())
    limit(world, **{"requests.nvidia.com/gpu": "0", "count/jobs.batch": "0"})
    preflight_step(world.ports(), subject, CHOSEN)


def test_a_config_that_is_not_the_locked_one_is_refused():
    world, subject = prepared()
    world.hub.served["config.json"] = checkpoint()["config.json"] + b" "
    with pytest.raises(IntegrityError) as caught:
        preflight_step(world.ports(), subject, CHOSEN)
    assert caught.value.code == "K2-INT-001"
