"""The rights check: before anything else in preflight, completed where a plan is refused, shown by `site check`."""

import pytest

from tasks.core.errors import RightsError, UnavailableError
from tasks.core.permissions import Right
from tasks.steps.capacity import plan_step, preflight_step
from tasks.steps.documents import put_lock
from tasks.steps.rights import check_rights
from tests.fakes.memory_cluster import IDENTITY
from tests.fakes.small_world import World, release

CHOSEN = ("node-1", "node-2", "node-3")
LIST_NODES = Right("", "nodes", "list")
DELETE_JOBS = Right("batch", "jobs", "delete", "k2")


@pytest.fixture
def prepared():
    world = World()
    subject = world.subject(release())
    put_lock(world.store, subject.lock)
    return world, subject


def missing_of(error):
    return {Right(*missing.values()) for missing in error.details["missing"]}


def test_all_rights_there(prepared):
    world, subject = prepared
    assert check_rights(world.ports()) == f"all {len(world.ports().rights)} rights there"
    assert preflight_step(world.ports(), subject, CHOSEN)["rights"] == len(world.ports().rights) > 20


def test_each_right_of_the_pipeline_is_asked_for(prepared):
    world, _ = prepared
    for right in world.ports().rights:
        world.cluster.removed_rights = {right}
        with pytest.raises(RightsError) as caught:
            check_rights(world.ports())
        assert missing_of(caught.value) == {right}
        assert caught.value.summary == f"{IDENTITY} lacks the right to {right}."


def test_preflight_looks_at_the_rights_before_anything_else(prepared):
    world, _ = prepared
    broken = world.subject(release(args={"no-such-option": 1}))
    put_lock(world.store, broken.lock)
    world.cluster.removed_rights = {DELETE_JOBS, LIST_NODES}
    jobs, writes = list(world.jobs_run), list(world.cluster.writes)
    with pytest.raises(RightsError) as caught:
        preflight_step(world.ports(), broken, CHOSEN)
    assert missing_of(caught.value) == {DELETE_JOBS, LIST_NODES}
    assert (world.jobs_run, world.cluster.writes) == (jobs, writes)


def test_a_plan_that_is_refused_names_all_that_is_missing(prepared):
    world, subject = prepared
    world.cluster.removed_rights = {DELETE_JOBS, LIST_NODES}
    with pytest.raises(RightsError) as caught:
        plan_step(world.ports(), subject)
    assert missing_of(caught.value) == {DELETE_JOBS, LIST_NODES}


def test_a_plan_needs_only_what_it_reads(prepared):
    world, subject = prepared
    world.cluster.removed_rights = {DELETE_JOBS}
    assert plan_step(world.ports(), subject)[0].nodes == CHOSEN


def test_a_server_that_does_not_say_who_we_are_still_gives_the_finding(prepared, monkeypatch):
    world, _ = prepared
    world.cluster.removed_rights = {LIST_NODES}

    def unknown():
        raise UnavailableError("K2-UNA-001", "The API server does not know this question.")

    monkeypatch.setattr(world.cluster, "identity", unknown)
    with pytest.raises(RightsError, match="the user of context none lacks the right to list nodes"):
        check_rights(world.ports())


@pytest.mark.parametrize("namespace", ["", "k2"])
def test_an_account_that_nobody_bound_is_not_given_rules_but_bindings(prepared, namespace):
    world, _ = prepared
    world.cluster.removed_rights = {right for right in world.ports().rights if right.namespace == namespace}
    with pytest.raises(RightsError) as caught:
        check_rights(world.ports())
    assert caught.value.hint.endswith("runs: k2ctl site init --release RELEASE --kubeconfig admin.kubeconfig")
