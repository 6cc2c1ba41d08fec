"""Step rollout: no group before every marker is right (I2); ready means the router's word too; failures are named."""

import contextlib
import itertools
import json
from dataclasses import replace

import pytest

from tasks.core.errors import After, IntegrityError, NotReadyError, UnavailableError
from tasks.steps.documents import get_by_digest, put_lock
from tasks.steps.patience import PatientCluster
from tasks.steps.recent_events import RecentEvents
from tasks.steps.rollout import _logs, rollout_step
from tasks.steps.staging import stage_step
from tests.fakes.away import AwayCluster
from tests.fakes.kube_messages import FAILED_CREATE
from tests.fakes.small_world import World, release

CHOSEN = ("node-1", "node-2", "node-3")


@pytest.fixture
def staged():
    world = World()
    subject = world.subject(release())
    put_lock(world.store, subject.lock)
    stage_step(world.ports(), subject, CHOSEN, ())
    return world, subject


def groups(world):
    return world.cluster.list_objects("LeaderWorkerSet")


def test_the_set_comes_up_and_says_where_each_rank_runs(staged):
    world, subject = staged
    data = rollout_step(world.ports(), subject, CHOSEN)
    assert [(s["role"], s["node_rank"], s["node"]) for s in data["placement"]] == [
        ("prefill", 0, "node-1"), ("decode", 0, "node-2"), ("decode", 1, "node-3")
    ]  # fmt: skip
    assert [s["first_gpu_rank"] for s in data["placement"]] == [0, 0, 8]
    applied = get_by_digest(world.store, "manifests", data["manifests_digest"])
    assert [obj["kind"] for obj in applied][:2] == ["LeaderWorkerSet", "LeaderWorkerSet"]


def test_applied_again_it_changes_nothing(staged):
    world, subject = staged
    first = rollout_step(world.ports(), subject, CHOSEN)
    writes = list(world.cluster.writes)
    assert rollout_step(world.ports(), subject, CHOSEN) == first
    assert world.cluster.writes == writes


@pytest.mark.parametrize("node", CHOSEN)
@pytest.mark.parametrize("damage", ["gone", "other digest"])
def test_no_group_is_created_before_every_marker_is_right(staged, node, damage):
    world, subject = staged
    key = f"markers/{node}/{subject.lock.digest}.json"
    if damage == "gone":
        del world.store.objects[key]
    else:
        data = json.loads(world.store.objects[key])
        data["files"][0]["sha256"] = "0" * 64
        world.store.objects[key] = json.dumps(data).encode()
    with pytest.raises(IntegrityError) as caught:
        rollout_step(world.ports(), subject, CHOSEN)
    assert node in caught.value.where
    assert groups(world) == []
    assert world.cluster.list_objects("Deployment", {"k2-release.io/serving": subject.serving}) == []


def test_every_engine_pod_checks_the_marker_itself_and_wants_a_staged_node(staged):
    world, subject = staged
    rollout_step(world.ports(), subject, CHOSEN)
    label = f"staged.k2-release.io/{subject.lock.digest[:12]}"
    for group in groups(world):
        template = group["spec"]["leaderWorkerTemplate"]
        for pod in (template["leaderTemplate"]["spec"], template["workerTemplate"]["spec"]):
            checks = [c for c in pod["initContainers"] if c["command"][-1] == "tasks.node.marker_check"]
            assert [c["args"][c["args"].index("--lock-digest") + 1] for c in checks] == [subject.lock.digest]
            terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            for term in terms["nodeSelectorTerms"]:
                assert {"key": label, "operator": "In", "values": ["true"]} in term["matchExpressions"]


def break_pod(world, name, status):
    def react(verb, obj):
        if verb == "create" and obj["metadata"]["name"].endswith(name):
            world.clock.on_sleep.append(
                lambda now: (
                    world.cluster.set_status("Pod", obj["metadata"]["name"], status)
                    if ("Pod", obj["metadata"]["name"]) in world.cluster.objects
                    else None
                )
            )

    world.cluster.controllers.append(react)
    world.engine.workers = lambda serving: []


def test_a_set_that_does_not_become_ready_is_given_up_with_its_phases(staged):
    world, subject = staged
    break_pod(world, "decode-0-1", {"phase": "Running", "podIP": "127.0.9.9", "conditions": []})
    with pytest.raises(NotReadyError) as caught:
        rollout_step(world.ports(), subject, CHOSEN)
    assert caught.value.code == "K2-RDY-001"
    assert "Not ready after" in caught.value.summary
    assert any("$" in line and "gives up in" in line and "kubectl" in line for line in world.progress.lines)


def test_a_router_that_does_not_see_its_engines_is_not_ready(staged):
    world, subject = staged
    world.engine.workers = lambda serving: []
    with pytest.raises(NotReadyError):
        rollout_step(world.ports(), subject, CHOSEN)


def test_a_router_that_cannot_be_asked_is_not_ready(staged):
    world, subject = staged

    def down(serving):
        raise UnavailableError("K2-UNA-001", "No.")

    world.engine.workers = down
    with pytest.raises(NotReadyError):
        rollout_step(world.ports(), subject, CHOSEN)


def test_a_static_fault_ends_the_wait_at_once(staged):
    world, subject = staged
    error = IntegrityError("K2-INT-002", "Other bytes.", where="node-3: model-1")
    ended = {"terminated": {"exitCode": 5, "message": json.dumps(error.as_data())}}
    status = {"phase": "Pending", "initContainerStatuses": [{"name": "marker-check", "state": ended}]}
    break_pod(world, "decode-0-1", status)
    with pytest.raises(NotReadyError) as caught:
        rollout_step(world.ports(), subject, CHOSEN)
    assert "Other bytes." in caught.value.summary
    assert "node-3: model-1" in caught.value.got
    assert sum(world.clock.slept) < 5


def refuse_pods(world, serving):
    """Have a quota refuse a pod of decode: the StatefulSet's controller says so in an event, and nowhere else."""
    name = f"k2-{serving[:8]}-decode-0"
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "e1", "creationTimestamp": "2026-11-30T11:00:00Z"},
        "reason": "FailedCreate",
        "message": FAILED_CREATE,
        "involvedObject": {"kind": "StatefulSet", "name": name},
    }
    world.cluster.create(event)
    world.clock.on_sleep.append(lambda now: world.cluster.delete("Pod", f"{name}-1"))
    world.engine.workers = lambda serving: []


def test_a_pod_that_a_quota_refuses_is_said_while_it_waits_and_when_it_gives_up(staged):
    world, subject = staged
    refuse_pods(world, subject.serving)
    with pytest.raises(NotReadyError) as caught:
        rollout_step(world.ports(), subject, CHOSEN)
    assert "Quota gpus allows 16 requests.nvidia.com/gpu, 16 are used, 8 more are needed." in caught.value.summary
    assert caught.value.got == FAILED_CREATE and "resourcequota gpus" in caught.value.hint
    assert any("decode: 1 Missing" in line and "Quota gpus allows 16" in line for line in world.progress.lines)


def test_events_that_cannot_be_read_end_no_rollout(staged):
    world, subject = staged
    refuse_pods(world, subject.serving)
    real = world.cluster.list_objects

    def blind(kind, *args, **kwargs):
        if kind == "Event":
            raise UnavailableError("K2-UNA-001", "No.")
        return real(kind, *args, **kwargs)

    world.cluster.list_objects = blind
    with pytest.raises(NotReadyError) as caught:
        rollout_step(world.ports(), subject, CHOSEN)
    assert caught.value.code == "K2-RDY-001" and "Not ready after" in caught.value.summary


def count_event_reads(world, fail=False):
    """Return the times at which events were listed, a list that grows."""
    real, read = world.cluster.list_objects, []

    def counted(kind, *args, **kwargs):
        if kind == "Event":
            read.append(world.clock.now())
            if fail:
                raise UnavailableError("K2-UNA-001", "No.", retry=After(1.0))
        return real(kind, *args, **kwargs)

    world.cluster.list_objects = counted
    return read


@pytest.mark.parametrize("fail", [False, True])
def test_events_are_read_every_few_seconds_at_most_and_what_they_said_is_kept(staged, fail):
    world, subject = staged
    refuse_pods(world, subject.serving)
    read = count_event_reads(world, fail)
    with pytest.raises(NotReadyError) as caught:
        rollout_step(world.ports(), subject, CHOSEN)
    assert len(read) > 10 and min(b - a for a, b in itertools.pairwise(read)) >= 5.0
    assert ("Quota gpus" in caught.value.summary) is not fail


def test_events_that_are_read_once_explain_though_they_cannot_be_read_again(staged):
    world, subject = staged
    refuse_pods(world, subject.serving)
    events = RecentEvents(world.ports())
    before = events.objects()
    assert [event["reason"] for event in before] == ["FailedCreate"]
    read = count_event_reads(world, fail=True)
    world.clock.sleep(6.0)
    assert events.objects() == before and len(read) == 1


def test_events_that_cannot_be_read_cost_no_waiting(staged):
    """The patience of flows is for what they need; nothing needs an explanation."""
    world, subject = staged
    refuse_pods(world, subject.serving)
    read = count_event_reads(world, fail=True)
    ports = world.ports()
    patient = PatientCluster(world.cluster, world.clock, world.progress.say)
    with pytest.raises(NotReadyError):
        rollout_step(replace(ports, cluster=patient), subject, CHOSEN)
    assert read and patient.silent_s == 0
    assert not any("no answer" in line for line in world.progress.lines)
    assert max(world.clock.slept) < 1.0


def test_logs_that_hang_do_not_spend_the_deadline_of_a_rollout():
    """In an outage without answers each read of a log costs its whole timeout, and none of them counts as silence."""
    world, asked = World(), []

    def hang(pod, container, tail_lines):
        asked.append(pod)
        world.clock.sleep(20.0 if len(asked) > 2 else 0.0)
        raise UnavailableError("K2-UNA-001", "No answer.", retry=After(1))

    world.cluster.pod_log = hang
    labels = {"k2-release.io/role": "decode"}
    pods = [{"metadata": {"name": f"d-{n}", "labels": labels}, "status": {"phase": "Running"}} for n in range(12)]
    assert _logs(world.ports(), pods) == {}
    assert asked == ["d-0", "d-1", "d-2"]


def test_a_node_that_is_lost_during_the_rollout_is_named_within_half_a_minute(staged):
    world, subject = staged
    world.engine.workers = lambda serving: []
    lost = {"conditions": [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]}
    world.clock.on_sleep.append(lambda now: world.cluster.set_status("Node", "node-3", lost))
    with pytest.raises(NotReadyError) as caught:
        rollout_step(world.ports(), subject, CHOSEN)
    assert "node-3" in caught.value.where
    assert 30 <= sum(world.clock.slept) < 35


def test_a_node_that_is_silent_for_a_moment_ends_no_rollout(staged):
    """After an outage of the API every node is NotReady until its kubelet has renewed its lease."""
    world, subject = staged
    real, began = world.engine.workers, world.clock.at
    world.engine.workers = lambda serving: real(serving) if world.clock.at > began + 40 else []
    silent = {"conditions": [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]}
    well = dict(world.cluster.objects["Node", "node-3"]["status"])

    def flap(now):
        status = silent if began + 5 < now < began + 25 else well
        world.cluster.set_status("Node", "node-3", status)

    world.clock.on_sleep.append(flap)
    rollout_step(world.ports(), subject, CHOSEN)


def test_a_chosen_node_that_is_cordoned_meanwhile_is_named(staged):
    world, subject = staged
    world.engine.workers = lambda serving: []
    world.clock.on_sleep.append(
        lambda now: world.cluster.edit("Node", "node-3", lambda node: node.update(spec={"unschedulable": True}))
    )
    with pytest.raises(NotReadyError) as caught:
        rollout_step(world.ports(), subject, CHOSEN)
    assert (caught.value.code, caught.value.where, caught.value.got) == ("K2-RDY-002", "node-3", "cordoned")
    assert caught.value.summary == "Node node-3 was closed to pods during the rollout."


def test_what_a_mirror_of_before_an_outage_says_of_a_node_ends_no_rollout(staged):
    """A mirror shows what it knows for a while longer than the API answers."""
    world, subject = staged
    real, began = world.engine.workers, world.clock.at
    world.engine.workers = lambda serving: real(serving) if world.clock.at > began + 80 else []
    silent = {"conditions": [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]}
    well = dict(world.cluster.objects["Node", "node-3"]["status"])
    nodes_of_then = []

    def away():
        return began + 6 < world.clock.at < began + 46

    class Away(AwayCluster):
        @contextlib.contextmanager
        def mirror(self, kind, labels=None, *, everywhere=False):
            yield Stale(kind, labels)

    class Stale:
        def __init__(self, kind, labels):
            self.kind, self.labels = kind, labels

        def objects(self):
            if self.kind == "Node" and away():
                return nodes_of_then
            return world.cluster.list_objects(self.kind, self.labels)

        def unconfirmed_s(self):
            return 0.0

    def flap(now):
        world.cluster.set_status("Node", "node-3", silent if began + 5 < now < began + 20 else well)
        if now <= began + 6:
            nodes_of_then[:] = world.cluster.list_objects("Node", world.site.node_selector)

    world.clock.on_sleep.append(flap)
    ports = replace(world.ports(), cluster=PatientCluster(Away(world.cluster, away), world.clock, world.progress.say))
    rollout_step(ports, subject, CHOSEN)


def test_a_nodes_fault_that_an_engines_log_names_ends_the_rollout_though_the_node_is_ready(staged):
    world, subject = staged
    world.engine.workers = lambda serving: []

    def fault(now):
        for name in [name for kind, name in world.cluster.objects if kind == "Pod" and name.endswith("decode-0")]:
            world.cluster.set_status("Pod", name, {"phase": "Running"})
            world.cluster.logs[name, "engine"] = "RuntimeError: CUDA error: system not yet initialized"

    world.clock.on_sleep.append(fault)
    with pytest.raises(NotReadyError, match="NVLink fabric") as caught:
        rollout_step(world.ports(), subject, CHOSEN)
    assert caught.value.where.startswith("node-2")
    assert sum(world.clock.slept) < 60
