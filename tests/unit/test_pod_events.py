"""Events explain pods that are not there: a quota, an admission that refuses, a preemption, a taint."""

import pytest

from tasks.core.diagnosis import MISSING, PENDING, READY, PodPhase
from tasks.core.job_obstacles import UID_LABEL, obstacle_of
from tasks.core.pod_events import event_diagnoses, event_time, taken_away
from tests.fakes.kube_messages import FAILED_CREATE

GROUP = "k2-ab12cd34-decode"
MADE = "2026-11-30T11:00:00Z"


def missing(rank, group=GROUP):
    return PodPhase("", "", "decode", group, rank, "", MISSING, "not created yet")


def there(name, phase, uid="new"):
    return PodPhase(name, uid, "decode", GROUP, 1, "", phase, "")


def event(reason, kind, name, message="", at="2026-11-30T11:05:00Z", uid="old"):
    return {
        "metadata": {"name": f"{name}.1", "creationTimestamp": at},
        "reason": reason,
        "message": message,
        "involvedObject": {"kind": kind, "name": name, "uid": uid},
        "lastTimestamp": at,
    }


def said(events, phases, since=MADE):
    return list(event_diagnoses(events, phases, since))


@pytest.mark.parametrize("maker", [GROUP, f"{GROUP}-0"])
def test_a_missing_pod_is_explained_by_the_quota_that_refused_it(maker):
    (diagnosis,) = said([event("FailedCreate", "StatefulSet", maker, FAILED_CREATE)], [missing(2), missing(3)])
    assert diagnosis.category == "quota" and diagnosis.rank == 2 and not diagnosis.fatal
    assert diagnosis.summary.startswith(f"2 pods of {GROUP} cannot be made. Quota gpus allows 16")
    assert diagnosis.detail == FAILED_CREATE
    assert "kubectl edit resourcequota gpus" in diagnosis.resolution and "by itself" in diagnosis.resolution


def test_the_newest_refusal_counts():
    old = event("FailedCreate", "StatefulSet", GROUP, FAILED_CREATE, at="2026-11-30T11:01:00Z")
    new = event("FailedCreate", "StatefulSet", GROUP, "denied the request: no", at="2026-11-30T11:02:00Z")
    (diagnosis,) = said([new, old], [missing(0)])
    assert (diagnosis.category, diagnosis.detail) == ("admission", "denied the request: no")
    assert GROUP in diagnosis.resolution


@pytest.mark.parametrize(
    ("events", "phases"),
    [
        ([event("FailedCreate", "StatefulSet", GROUP, FAILED_CREATE)], [there(f"{GROUP}-0", READY)]),
        ([event("FailedCreate", "StatefulSet", "k2-ffffffff-decode", FAILED_CREATE)], [missing(0)]),
        ([event("FailedCreate", "StatefulSet", f"{GROUP}er", FAILED_CREATE)], [missing(0)]),
        ([event("FailedCreate", "Job", GROUP, FAILED_CREATE)], [missing(0)]),
        ([event("FailedMount", "StatefulSet", GROUP, FAILED_CREATE)], [missing(0)]),
        ([event("FailedCreate", "StatefulSet", GROUP, FAILED_CREATE, at="2026-11-30T10:59:59Z")], [missing(0)]),
    ],
    ids=["nothing is missing", "another set", "a longer name", "a Job", "another reason", "before this set was made"],
)
def test_what_is_not_about_a_missing_pod_of_ours_is_no_diagnosis(events, phases):
    assert said(events, phases) == []


def test_a_router_that_cannot_be_made_is_explained_by_its_replica_set():
    router = PodPhase("", "", "router", "k2-ab12cd34-router", -1, "", MISSING, "")
    (diagnosis,) = said([event("FailedCreate", "ReplicaSet", "k2-ab12cd34-router-5f", FAILED_CREATE)], [router])
    assert diagnosis.summary.startswith("1 pod of k2-ab12cd34-router cannot be made.")


@pytest.mark.parametrize(
    ("reason", "message", "word"),
    [
        ("Preempted", "Preempted by pod 75480c28 on node node-3", "a pod of higher priority"),
        ("TaintManagerEviction", f"Marking for deletion Pod k2/{GROUP}-0-1", "NoExecute taint"),
    ],
)
@pytest.mark.parametrize("phase", [there(f"{GROUP}-0-1", PENDING), missing(1)])
def test_a_pod_that_was_taken_away_is_named_after_its_status_is_gone(reason, message, word, phase):
    (diagnosis,) = said([event(reason, "Pod", f"{GROUP}-0-1", message)], [phase])
    assert (diagnosis.category, diagnosis.pod, diagnosis.detail) == ("disruption", f"{GROUP}-0-1", message)
    assert word in diagnosis.summary


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        (f"{GROUP}-0-1", there(f"{GROUP}-0-1", READY)),
        (f"{GROUP}-0-1", there(f"{GROUP}-0-1", PENDING, uid="old")),
        ("k2-parking-1", there(f"{GROUP}-0-1", PENDING)),
        ("k2-ffffffff-decode-0", missing(0)),
    ],
    ids=["its successor is ready", "it is still there", "not of the set", "of another set"],
)
def test_losses_that_are_over_or_not_ours_are_no_news(name, phase):
    assert said([event("Preempted", "Pod", name, "x")], [phase]) == []


def going(reason, deleted=True, status="True", phase="Running"):
    conditions = [{"type": "DisruptionTarget", "status": status, "reason": reason, "message": "said"}]
    meta = {"name": "p", **({"deletionTimestamp": MADE} if deleted else {})}
    return {"metadata": meta, "spec": {"nodeName": "node-3"}, "status": {"conditions": conditions, "phase": phase}}


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("PreemptionByScheduler", "higher priority"),
        ("DeletionByTaintManager", "NoExecute"),
        ("EvictionByEvictionAPI", "kubectl drain"),
        ("DeletionByPodGC", "no longer in the cluster"),
        ("TerminationByKubelet", "ran short"),
        ("SomethingNew", "reason SomethingNew"),
    ],
)
def test_a_pod_that_is_being_taken_away_says_by_whom(reason, word):
    diagnosis = taken_away(going(reason), 2)
    assert word in diagnosis.summary and diagnosis.detail == "said" and diagnosis.resolution
    assert (diagnosis.pod, diagnosis.node, diagnosis.rank) == ("p", "node-3", 2)


def test_a_pod_that_was_only_considered_is_not_taken_away():
    assert taken_away(going("PreemptionByScheduler", deleted=False), 0) is None
    assert taken_away(going("PreemptionByScheduler", status="False"), 0) is None
    assert taken_away(going("TerminationByKubelet", deleted=False, phase="Failed"), 0) is not None


def test_an_events_time_is_where_its_writer_put_it():
    scheduler = {"metadata": {}, "lastTimestamp": None, "eventTime": "2026-11-30T11:03:00.013355Z"}
    assert event_time(scheduler) == "2026-11-30T11:03:00"
    again = {**scheduler, "series": {"count": 2, "lastObservedTime": "2026-11-30T11:04:00.5Z"}}
    assert event_time(again) == "2026-11-30T11:04:00"
    assert event_time({"metadata": {"creationTimestamp": MADE}}) == MADE[:-1]


def job_pod(message="", node=""):
    conditions = [{"type": "PodScheduled", "status": "False", "message": message}] if message else []
    spec = {"nodeName": node} if node else {}
    meta = {"name": "j-x", "labels": {UID_LABEL: "job-1"}}
    return {"metadata": meta, "spec": spec, "status": {"conditions": conditions}}


def test_a_job_that_no_node_takes_says_why():
    cordoned = {"metadata": {"name": "node-1"}, "spec": {"unschedulable": True}, "status": {}}
    message = "0/1 nodes are available: 1 node(s) were unschedulable."
    obstacle = obstacle_of("job-1", [job_pod(message)], [cordoned], [])
    assert "node-1: cordoned" in obstacle.detail and "kubectl uncordon node-1" in obstacle.remedy


def test_a_job_whose_pod_is_refused_says_by_what():
    refused = event("FailedCreate", "Job", "j", FAILED_CREATE, uid="job-1")
    obstacle = obstacle_of("job-1", [], [], [refused])
    assert obstacle.summary.startswith("Its pod cannot be made. Quota gpus allows 16")
    assert "LimitRange" not in obstacle.remedy and "gpus" in obstacle.remedy
    other = event("FailedCreate", "Job", "j", "denied the request", uid="job-1", at="2026-11-30T11:06:00Z")
    assert obstacle_of("job-1", [], [], [refused, other]).detail == "denied the request"


def test_a_job_that_runs_or_of_which_nothing_is_known_has_no_obstacle():
    refused = event("FailedCreate", "Job", "j", FAILED_CREATE, uid="job-1")
    assert obstacle_of("job-1", [job_pod(node="node-1")], [], [refused]) is None
    assert obstacle_of("job-2", [], [], [refused]) is None
