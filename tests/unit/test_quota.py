"""Quotas: the API server's refusal is read, and what a release needs is counted before anything is made."""

import json
from dataclasses import replace
from decimal import Decimal

import pytest

from tasks.adapters.kube_answers import error_of
from tasks.core.demand import Demand, PodAsk, applies, demand_of
from tasks.core.errors import CapacityError
from tasks.core.quantity import amount, quantity
from tasks.core.quota import check_quotas, read_refusal, refusal_error, shortfalls
from tasks.core.render import render_serving
from tasks.core.worker_jobs import render_pull_jobs
from tests.fakes.kube_messages import EXCEEDED, FAILED_CREATE, UNSTATED
from tests.fakes.pipeline import bring_up
from tests.fakes.small_world import TEMPLATES, World, release

GPU = "requests.nvidia.com/gpu"


@pytest.mark.parametrize(
    ("text", "value", "shown"),
    [
        ("8", 8, "8"),
        ("0", 0, "0"),
        ("500m", Decimal("0.5"), "0.5"),
        ("1k", 1000, "1000"),
        ("1536Gi", 1536 * 2**30, "1536Gi"),
        ("64Mi", 64 * 2**20, "64Mi"),
        ("2Ti", 2 * 2**40, "2Ti"),
        ("1e3", 1000, "1000"),
        ("2E", 2 * 10**18, "2000000000000000000"),
        ("1.5", Decimal("1.5"), "1.5"),
    ],
)
def test_quantities(text, value, shown):
    assert quantity(text) == value
    assert amount(quantity(text)) == shown


@pytest.mark.parametrize("text", ["", "x", "8 GB", "1.2.3", "Gi"])
def test_what_is_no_quantity_is_refused(text):
    with pytest.raises(ValueError, match="is no quantity"):
        quantity(text)


def test_a_refusal_is_read_out_of_any_message_that_holds_it():
    for message in (EXCEEDED, FAILED_CREATE):
        refusal = read_refusal(message)
        assert (refusal.quota, refusal.requested[GPU], refusal.used[GPU], refusal.limited[GPU]) == (
            "gpus", "8", "16", "16"
        )  # fmt: skip
    assert read_refusal(FAILED_CREATE).summary == (
        "Quota gpus allows 16 requests.nvidia.com/gpu, 16 are used, 8 more are needed."
    )
    assert "kubectl edit resourcequota gpus" in read_refusal(FAILED_CREATE).remedy


def test_a_quota_that_wants_more_stated_is_read_too():
    refusal = read_refusal(UNSTATED)
    assert refusal.summary == "Quota cpu wants every container to state requests.cpu for: engine."
    assert "LimitRange" in refusal.remedy


@pytest.mark.parametrize("message", ["", 'pods is forbidden: User "x" cannot create resource "pods"', "quota"])
def test_another_refusal_is_none(message):
    assert read_refusal(message) is None and refusal_error(message, "Job/x") is None


def test_an_answer_over_quota_is_capacity_and_any_other_403_is_not():
    def answer(message):
        body = {"kind": "Status", "reason": "Forbidden", "message": message, "code": 403}
        return error_of(403, json.dumps(body).encode(), "Job/x")

    error = answer(EXCEEDED)
    assert isinstance(error, CapacityError)
    assert (error.code, int(error.exit_code), error.where, error.got) == ("K2-CAP-003", 8, "Job/x", EXCEEDED)
    assert not isinstance(answer('jobs is forbidden: User "x" cannot create resource "jobs"'), CapacityError)


def pod(containers, **spec):
    return {"containers": [{"resources": resources} for resources in containers], **spec}


def test_a_pod_counts_as_its_containers_together_or_its_largest_init_container():
    spec = pod(
        [{"limits": {"nvidia.com/gpu": "8", "memory": "2Gi"}}, {"requests": {"memory": "1Gi", "cpu": "500m"}}],
        initContainers=[{"resources": {"requests": {"cpu": "2", "memory": "1Gi"}}}],
    )
    amounts = PodAsk(2, spec).amounts()
    assert {key: amount(value) for key, value in amounts.items()} == {
        "pods": "2",
        GPU: "16",
        "requests.memory": "6Gi",
        "memory": "6Gi",
        "requests.cpu": "4",
        "cpu": "4",
        "limits.nvidia.com/gpu": "16",
        "limits.memory": "4Gi",
    }


def quota(hard, used=None, name="q", **spec):
    return {"metadata": {"name": name}, "spec": {"hard": hard, **spec}, "status": {"hard": hard, "used": used or {}}}


DEMAND = Demand(
    {"count/jobs.batch": Decimal(6)},
    {"pull": [PodAsk(9, pod([{}]))], "rollout": [PodAsk(3, pod([{"limits": {"nvidia.com/gpu": "8"}}]))]},
)


@pytest.mark.parametrize(
    ("hard", "used", "short"),
    [
        ({GPU: "24"}, {}, []),
        ({GPU: "24"}, {GPU: "1"}, [(GPU, 24, 1, 24)]),
        ({GPU: "23"}, {}, [(GPU, 23, 0, 24)]),
        # Steps come one after another: nine pods at most at a time.
        ({"pods": "11"}, {"pods": "2"}, []),
        ({"pods": "10"}, {"pods": "2"}, [("pods", 10, 2, 9)]),
        ({"count/jobs.batch": "6"}, {}, []),
        ({"count/jobs.batch": "5"}, {}, [("count/jobs.batch", 5, 0, 6)]),
        # Used beyond its limit, but nothing of it is needed.
        ({"count/secrets": "1"}, {"count/secrets": "9"}, []),
    ],
)
def test_what_does_not_fit(hard, used, short):
    found = shortfalls([quota(hard, used)], DEMAND)
    assert [(s.resource, s.hard, s.used, s.needed) for s in found] == short


def test_all_limits_that_are_short_are_named():
    quotas = [quota({GPU: "8"}, {GPU: "8"}, "gpus"), quota({"pods": "1", "count/jobs.batch": "5"}, name="small")]
    with pytest.raises(CapacityError) as caught:
        check_quotas(quotas, DEMAND, "k2")
    assert caught.value.as_text() == (
        "error:    K2-CAP-003  The release does not fit under the quotas of the namespace.\n"
        "where:    ResourceQuota gpus: requests.nvidia.com/gpu, ResourceQuota small: count/jobs.batch, "
        "ResourceQuota small: pods\n"
        "got:      8 of 8 requests.nvidia.com/gpu used\n"
        "expected: 24 more to be free\n"
        "next:     Raise it (kubectl -n k2 edit resourcequota gpus), or take down what counts against it "
        "(k2ctl retire RELEASE -y for a set that is not live)."
    )
    assert caught.value.details["shortfalls"][1] == {
        "quota": "small", "resource": "count/jobs.batch", "hard": "5", "used": "0", "needed": "6"
    }  # fmt: skip
    check_quotas([quota({GPU: "24"})], DEMAND, "k2")


@pytest.mark.parametrize(
    ("scope", "spec", "counts"),
    [
        ({}, {}, True),
        ({"scopes": ["NotTerminating"]}, {}, True),
        ({"scopes": ["Terminating"]}, {}, False),
        ({"scopes": ["Terminating"]}, {"activeDeadlineSeconds": 5}, True),
        ({"scopes": ["BestEffort"]}, {}, True),
        ({"scopes": ["NotBestEffort"]}, {}, False),
        ({"scopes": ["PriorityClass"]}, {}, False),
        ({"scopes": ["PriorityClass"]}, {"priorityClassName": "k2-engine"}, True),
        ({"scopes": ["CrossNamespacePodAffinity"]}, {}, False),
    ],
)
def test_a_scoped_quota_counts_only_pods_of_its_scope(scope, spec, counts):
    assert applies(quota({}, **scope), pod([{}], **spec)) is counts


@pytest.mark.parametrize(
    ("operator", "values", "counts"),
    [
        ("In", ["k2-engine"], True),
        ("In", ["other"], False),
        ("NotIn", ["other"], True),
        ("NotIn", ["k2-engine"], False),
        ("Exists", [], True),
        ("DoesNotExist", [], False),
    ],
)
def test_a_quota_by_priority_class(operator, values, counts):
    scope = {"scopeName": "PriorityClass", "operator": operator, "values": values}
    scoped = quota({"pods": "1", "count/jobs.batch": "1"}, scopeSelector={"matchExpressions": [scope]})
    spec = pod([{}], priorityClassName="k2-engine")
    assert applies(scoped, spec) is counts
    needed = Demand({"count/jobs.batch": Decimal(6)}, {"rollout": [PodAsk(3, spec)]}).needed(scoped)
    assert needed.get("pods", 0) == (3 if counts else 0)
    assert "count/jobs.batch" not in needed  # a quota with a scope counts pods alone


def rendered():
    world = World()
    subject = world.subject(release())
    serving = render_serving(subject.release, subject.lock, world.site, TEMPLATES)
    return world, subject, serving, render_pull_jobs(subject.lock, world.site, TEMPLATES, "tool")


def test_a_release_counts_with_what_controllers_make_of_it():
    _, _, serving, pulls = rendered()
    demand = demand_of(serving, {"pull": pulls}, [], [])
    assert demand.objects == {
        "count/leaderworkersets.leaderworkerset.x-k8s.io": 2,
        "count/statefulsets.apps": 3,  # prefill has one node, and so no workers
        "services": 3,
        "count/services": 3,
        "count/deployments.apps": 1,
        "count/replicasets.apps": 1,
        "count/httproutes.gateway.networking.k8s.io": 1,
        "count/jobs.batch": 2,
        "count/pods": 2 + 4,
    }
    assert demand.needed(quota({}))[GPU] == 24
    assert demand.needed(quota({}))["pods"] == 4


def test_what_is_there_is_needed_no_more():
    world = World()
    subject = bring_up(world.ports(), release())
    serving = render_serving(subject.release, subject.lock, world.site, TEMPLATES)
    pulls = [{**job, "status": {}} for job in render_pull_jobs(subject.lock, world.site, TEMPLATES, "tool")]
    kinds = ("LeaderWorkerSet", "Deployment", "Service", "HTTPRoute")
    there = [*pulls, *(obj for kind in kinds for obj in world.cluster.list_objects(kind))]
    pods = world.cluster.list_objects("Pod", {"k2-release.io/serving": subject.serving})
    assert len(pods) == 4
    assert not any(demand_of(serving, {"pull": pulls}, there, pods).needed(quota({})).values())
    lost = [{**pods[0], "status": {"phase": "Failed"}}, *pods[1:]]
    assert demand_of(serving, {}, there, lost).needed(quota({}))["pods"] == 1


def test_an_ended_job_is_replaced_and_needs_a_pod_again():
    _, _, _, pulls = rendered()
    ended = [{**job, "status": {"conditions": [{"type": "Failed", "status": "True"}]}} for job in pulls]
    demand = demand_of([], {"pull": pulls}, ended, [])
    assert demand.needed(quota({}))["pods"] == 2
    assert demand.objects.get("count/jobs.batch", 0) == 0


def test_a_larger_set_needs_more():
    _, subject, _, _ = rendered()
    groups = tuple(replace(group, nodes=group.nodes + 1) for group in subject.release.profile.groups)
    profile = replace(subject.release.profile, groups=groups)
    world = World()
    serving = render_serving(replace(subject.release, profile=profile), subject.lock, world.site, TEMPLATES)
    assert demand_of(serving, {}, [], []).needed(quota({}))[GPU] == 40
