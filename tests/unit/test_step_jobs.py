"""Worker Jobs: created or attached, followed, and their last word taken for what it is."""

import json
from dataclasses import replace

import pytest

from tasks.core.errors import After, IntegrityError, K2Error, NotReadyError, UnavailableError
from tasks.core.worker_jobs import render_pull_jobs, render_stage_job
from tasks.steps.job_obstacles import JobObstacles
from tasks.steps.jobs import follow_jobs, pinned_to, run_jobs
from tasks.steps.patience import PatientCluster
from tests.fakes.kube_messages import FAILED_CREATE
from tests.fakes.small_world import TEMPLATES, World, release


class Jobs:
    """A world whose Jobs end only when the test says so."""

    def __init__(self):
        self.world = World()
        self.world.cluster.controllers.clear()
        self.cluster = self.world.cluster

    def run(self, *names, total=100, deadline_s=60.0, run="run-1"):
        return run_jobs(self.world.ports(run), "stage", [job(name) for name in names], total, deadline_s)

    def follow(self, pinned, deadline_s=7200.0):
        """Follow Jobs, each pinned to a node, whatever becomes of the others."""
        jobs = [job(name, node) for name, node in pinned.items()]
        return follow_jobs(self.world.ports(), "stage", jobs, 100, deadline_s, stop_at_failure=False)

    def ready(self, node, status, reason="KubeletReady"):
        self.cluster.set_status("Node", node, {"conditions": [{"type": "Ready", "status": status, "reason": reason}]})

    def pod(self, name, status, log=None):
        uid = self.cluster.objects["Job", name]["metadata"]["uid"]
        meta = {"name": f"{name}-x", "labels": {"batch.kubernetes.io/controller-uid": uid}}
        self.cluster.delete("Pod", f"{name}-x")
        self.cluster.create(
            {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"containers": [{"name": "stage"}]}}
        )
        self.cluster.set_status("Pod", f"{name}-x", status)
        if log is not None:
            self.cluster.logs[f"{name}-x", "stage"] = log

    def end(self, name, condition="Complete", message='{"ok": 1}'):
        terminated = {"exitCode": 0, **({"message": message} if message is not None else {})}
        self.pod(name, {"phase": "Succeeded", "containerStatuses": [{"state": {"terminated": terminated}}]})
        self.cluster.set_status("Job", name, {"conditions": [{"type": condition, "status": "True"}]})

    def after(self, seconds, act):
        """Do something once, when so much time has passed."""
        at = self.world.clock.at + seconds
        state = {"done": False}

        def react(now):
            if now >= at and not state["done"]:
                state["done"] = True
                act()

        self.world.clock.on_sleep.append(react)


def job(name, node=""):
    made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": {}}
    if node:
        term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
        made["spec"] = {"template": {"spec": {"affinity": {"nodeAffinity": required}}}}
    return made


def test_the_node_of_a_rendered_job_is_known():
    world = World()
    subject = world.subject(release())
    rendered = render_stage_job(subject.lock, world.site, TEMPLATES, "tool", "node-3", "uid")
    assert pinned_to(rendered) == "node-3"
    assert pinned_to(render_pull_jobs(subject.lock, world.site, TEMPLATES, "tool")[0]) == ""


@pytest.mark.parametrize("status", ["False", "Unknown", "gone"])
def test_a_job_on_a_lost_node_ends_with_the_nodes_name_and_keeps_no_other_waiting(status):
    jobs = Jobs()
    lose = (
        (lambda: jobs.cluster.delete("Node", "node-2"))
        if status == "gone"
        else (lambda: jobs.ready("node-2", status, "NodeStatusUnknown"))
    )
    jobs.after(10, lose)
    jobs.after(60, lambda: jobs.end("a"))
    began = jobs.world.clock.at
    good, lost = jobs.follow({"a": "node-1", "b": "node-2"})
    assert good.message == {"ok": 1}
    assert (lost.code, lost.where, lost.exit_code) == ("K2-RDY-002", "node-2", 6)
    assert jobs.world.clock.at - began < 62


def test_a_lost_node_stops_the_step_after_a_short_patience():
    jobs = Jobs()
    jobs.ready("node-2", "Unknown")
    began = jobs.world.clock.at
    with pytest.raises(NotReadyError) as caught:
        run_jobs(jobs.world.ports(), "stage", [job("a", "node-1"), job("b", "node-2")], 100, 7200.0)
    assert caught.value.where == "node-2"
    assert 30 <= jobs.world.clock.at - began < 45


def test_a_node_that_comes_back_in_time_is_not_lost():
    jobs = Jobs()
    for start in (10, 40, 70):
        jobs.after(start, lambda: jobs.ready("node-1", "Unknown"))
        jobs.after(start + 20, lambda: jobs.ready("node-1", "True"))
    jobs.after(100, lambda: jobs.end("a"))
    assert jobs.follow({"a": "node-1"})[0].message == {"ok": 1}


def test_the_time_of_an_outage_is_not_a_nodes_silence():
    """The node is not Ready just before the API goes away for 50 s, and for 20 s after it is back."""
    jobs = Jobs()
    real, away_from = jobs.cluster.list_objects, jobs.world.clock.at + 12
    away_until = away_from + 50

    def list_objects(kind, labels=None, **scope):
        if away_from <= jobs.world.clock.at < away_until:
            raise UnavailableError("K2-UNA-001", "No.", retry=After(1))
        return real(kind, labels, **scope)

    jobs.cluster.list_objects = list_objects
    jobs.after(9, lambda: jobs.ready("node-1", "Unknown"))
    jobs.after(82, lambda: jobs.ready("node-1", "True"))
    jobs.after(90, lambda: jobs.end("a"))
    patient = PatientCluster(jobs.cluster, jobs.world.clock, jobs.world.progress.say)
    ports = replace(jobs.world.ports(), cluster=patient)
    assert follow_jobs(ports, "stage", [job("a", "node-1")], 100, 7200.0, stop_at_failure=False)[0].message == {"ok": 1}
    assert patient.silent_s > 40


def test_an_api_that_does_not_list_nodes_says_nothing_about_them():
    jobs = Jobs()
    real = jobs.cluster.list_objects

    def flaky(kind, labels=None, **scope):
        if kind == "Node":
            raise UnavailableError("K2-UNA-001", "No.")
        return real(kind, labels, **scope)

    jobs.cluster.list_objects = flaky
    jobs.after(100, lambda: jobs.end("a"))
    assert jobs.follow({"a": "node-1"})[0].message == {"ok": 1}


def test_a_job_that_hangs_does_not_take_the_results_of_others():
    jobs = Jobs()
    jobs.after(1, lambda: jobs.end("a"))
    good, late = jobs.follow({"a": "node-1", "b": "node-2"}, deadline_s=100)
    assert good.message == {"ok": 1}
    assert (late.code, late.where) == ("K2-RDY-001", "b")


def test_results_come_in_the_order_asked_for():
    jobs = Jobs()
    jobs.after(1, lambda: jobs.end("b", message='{"n": 2}'))
    jobs.after(2, lambda: jobs.end("a", message='{"n": 1}'))
    assert [r.message["n"] for r in jobs.run("a", "b")] == [1, 2]


def test_no_job_is_no_work():
    assert Jobs().run() == []


def test_a_job_that_runs_is_attached_to_and_one_that_ended_is_run_again():
    jobs = Jobs()
    jobs.cluster.create(job("runs"))
    jobs.cluster.create(job("old"))
    jobs.end("old", message='{"stale": true}')
    uid = jobs.cluster.objects["Job", "runs"]["metadata"]["uid"]
    jobs.after(1, lambda: jobs.end("runs"))
    jobs.after(1, lambda: jobs.end("old", message='{"fresh": true}'))
    results = jobs.run("runs", "old")
    assert results[1].message == {"fresh": True}
    assert jobs.cluster.objects["Job", "runs"]["metadata"]["uid"] == uid


@pytest.mark.parametrize("ended", ["Complete", "Failed"])
def test_an_old_job_that_does_not_go_away_is_waited_for_and_then_named(ended):
    jobs = Jobs()
    jobs.cluster.create(job("a"))
    jobs.end("a", ended)
    jobs.cluster.delete = lambda *args, **kwargs: None
    with pytest.raises(UnavailableError) as caught:
        jobs.run("a")
    assert (caught.value.code, caught.value.where) == ("K2-UNA-003", "Job a")


def test_the_error_of_a_failed_job_is_raised_as_it_is():
    jobs = Jobs()
    error = IntegrityError("K2-INT-001", "Other bytes.", where="model-7", got="a", expected="b")
    jobs.after(1, lambda: jobs.end("a", "Failed", json.dumps(error.as_data())))
    with pytest.raises(IntegrityError) as caught:
        jobs.run("a")
    assert caught.value.as_data() == error.as_data()


@pytest.mark.parametrize("message", [None, "", "Killed", '{"code": "X"}', '{"code": "K2-INT-001"}', "[1]", '{"n": 1}'])
def test_a_failed_job_without_a_usable_last_word_says_where_to_look(message):
    jobs = Jobs()
    jobs.after(1, lambda: jobs.end("a", "Failed", message))
    with pytest.raises(UnavailableError) as caught:
        jobs.run("a")
    assert caught.value.hint == "kubectl logs job/a"


@pytest.mark.parametrize("message", [None, "", "done", "[1, 2]"])
def test_a_complete_job_without_result_is_no_success(message):
    jobs = Jobs()
    jobs.after(1, lambda: jobs.end("a", message=message))
    with pytest.raises(K2Error) as caught:
        jobs.run("a")
    assert caught.value.code == "K2-UNA-003"


def test_a_job_that_is_deleted_or_made_anew_by_somebody_is_not_taken_for_ours():
    for change in ("gone", "anew"):
        jobs = Jobs()

        def act(jobs=jobs, change=change):
            jobs.cluster.delete("Job", "a")
            if change == "anew":
                jobs.cluster.create(job("a"))
                jobs.end("a")

        jobs.after(1, act)
        with pytest.raises(UnavailableError):
            jobs.run("a")


def test_a_job_that_never_ends_is_given_up_at_the_deadline():
    jobs = Jobs()
    with pytest.raises(NotReadyError) as caught:
        jobs.run("a", "b", deadline_s=30)
    assert caught.value.code == "K2-RDY-001"
    assert "a, b" in caught.value.where


def test_progress_is_read_from_the_log_and_never_more_than_everything():
    jobs = Jobs()
    lines = [{"progress": {"done_bytes": n, "total_bytes": 100}} for n in (10, 60)]
    log = "\n".join([json.dumps(lines[0]), "human words", json.dumps(lines[1]), "{broken"])
    jobs.after(0.4, lambda: jobs.pod("a", {"phase": "Pending"}))
    jobs.after(1, lambda: jobs.pod("a", {"phase": "Running"}, log))
    jobs.after(2, lambda: jobs.pod("a", {"phase": "Running"}, json.dumps({"progress": {"done_bytes": 999}})))
    jobs.after(3, lambda: jobs.end("a"))
    jobs.run("a")
    shown = [float(line.split()[1]) for line in jobs.world.progress.lines if line.startswith("stage:")]
    assert shown == sorted(shown)
    assert {0.0, 60.0, 100.0} <= set(shown)


def test_a_job_that_a_quota_refuses_says_so_while_it_waits_and_when_it_gives_up():
    jobs = Jobs()

    def refuse():
        about = {"kind": "Job", "name": "a", "uid": jobs.cluster.objects["Job", "a"]["metadata"]["uid"]}
        event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e"}, "involvedObject": about}
        jobs.cluster.create({**event, "reason": "FailedCreate", "message": FAILED_CREATE})

    jobs.after(1, refuse)
    with pytest.raises(NotReadyError) as caught:
        jobs.run("a", deadline_s=60.0)
    assert "1 Jobs are not done after" in caught.value.summary and "Quota gpus allows 16" in caught.value.summary
    assert caught.value.got == FAILED_CREATE and "resourcequota gpus" in caught.value.hint
    said = [line for line in jobs.world.progress.lines if "Job a waits." in line]
    assert len(said) == 1 and "Quota gpus allows 16" in said[0]


def test_a_job_whose_node_is_closed_says_so_and_a_passing_obstacle_is_not_mentioned():
    jobs = Jobs()
    jobs.cluster.edit("Node", "node-2", lambda node: node.update(spec={"unschedulable": True}))
    message = (
        "0/6 nodes are available: 1 node(s) were unschedulable, 5 node(s) didn't match Pod's node affinity/selector."
    )
    unplaced = {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "message": message}]}
    jobs.after(1, lambda: jobs.pod("a", unplaced))
    jobs.after(3, lambda: jobs.pod("b", unplaced))
    jobs.after(8, lambda: jobs.end("b"))
    jobs.after(20, lambda: jobs.end("a"))
    jobs.run("a", "b")
    said = [line for line in jobs.world.progress.lines if "waits." in line]
    assert len(said) == 1 and "Job a waits. The scheduler finds no node for a pod. Of 6 nodes 1 are cordoned" in said[0]
    assert "kubectl uncordon node-2" in said[0]


def test_events_that_cannot_be_read_keep_no_job_from_ending():
    jobs = Jobs()
    real = jobs.cluster.list_objects

    def blind(kind, *args, **kwargs):
        if kind == "Event":
            raise UnavailableError("K2-UNA-001", "No.")
        return real(kind, *args, **kwargs)

    jobs.cluster.list_objects = blind
    jobs.after(20, lambda: jobs.end("a"))
    assert [result.name for result in jobs.run("a")] == ["a"]


def test_what_only_explains_is_not_waited_for():
    jobs = Jobs()
    ports, real = jobs.world.ports(), jobs.cluster.list_objects

    def blind(kind, *args, **kwargs):
        if kind in ("Event", "Node"):
            raise UnavailableError("K2-UNA-001", "No.", retry=After(1.0))
        return real(kind, *args, **kwargs)

    jobs.cluster.list_objects = blind
    patient = PatientCluster(jobs.cluster, jobs.world.clock, jobs.world.progress.say)
    obstacles = JobObstacles(replace(ports, cluster=patient), "stage")
    jobs.world.clock.sleep(6.0)
    with patient.mirror("Pod") as pods:
        obstacles.look({"a": "uid"}, pods)
    assert patient.silent_s == 0 and jobs.world.clock.slept == [6.0] and obstacles.first is None


def test_a_job_that_ends_between_the_listing_and_the_attaching_is_replaced_and_not_waited_for():
    jobs = Jobs()
    jobs.cluster.create(job("a"))
    real = jobs.cluster.create

    def create(obj):
        jobs.cluster.create = real
        jobs.end("a", message='{"old": 1}')
        return real(obj)

    jobs.cluster.create = create
    jobs.after(5, lambda: jobs.end("a", message='{"new": 1}'))
    assert jobs.run("a")[0].message == {"new": 1}


def test_a_job_that_is_asked_for_twice_ends_for_both():
    jobs = Jobs()
    jobs.after(5, lambda: jobs.end("a"))
    both = follow_jobs(jobs.world.ports(), "stage", [job("a"), job("a")], 100, 7200.0, stop_at_failure=False)
    assert [result.message for result in both] == [{"ok": 1}] * 2
