"""The right to write weights to a node: one lock at a time, its runs share it, and whoever is waited for is named."""

import threading
from dataclasses import replace

import pytest

from tasks.core.errors import CapacityError, ConflictError, UnavailableError
from tasks.core.lease import read_lease
from tasks.core.worker_jobs import render_stage_job
from tasks.steps.node_holder import DURATION_S, NodeHolder, node_lease_name
from tasks.steps.staging import stage_step
from tests.fakes.piecemeal import Piecemeal
from tests.fakes.small_world import release

NODES = ("node-1", "node-2")
OTHER = "f" * 64


@pytest.fixture
def world():
    made = Piecemeal()
    for file in made.lock.files:  # nothing is to be pulled
        made.store.objects[f"blobs/{file.sha256}"] = made.hub.files[file.path]
        made.store.objects[f"blobs/{file.sha256}.ok"] = b"{}"
    return made


def other(world):
    """A release of another lock."""
    subject = replace(world.made, release=release("k2-other-1"), lock=replace(world.lock, revision="f" * 40))
    world.store.objects[f"locks/{subject.lock.digest}.json"] = subject.lock.to_bytes()
    return subject


def lease(world, node="node-1"):
    obj = world.cluster.objects.get(("Lease", node_lease_name(node)))
    return read_lease(obj) if obj else None


def holder(world, subject=None, run="run-1"):
    return NodeHolder(world.ports(run), subject or world.made)


def test_the_leases_are_held_in_the_locks_name_renewed_and_given_back(world):
    ages, jobs_end_after = [], world.clock.at + 300

    def note(now):
        held = lease(world)
        if held and held.holder:
            ages.append(now - held.renewed_at)
            assert held.holder == world.lock.digest

    world.clock.on_sleep.append(note)
    complete = world._complete
    world._complete = lambda lock: world.clock.at >= jobs_end_after and complete(lock)
    stage_step(world.ports(), world.made, NODES, ())
    assert len(ages) > 100
    assert max(ages) < DURATION_S
    assert [lease(world, node).holder for node in NODES] == ["", ""]
    obj = world.cluster.objects["Lease", node_lease_name("node-1")]
    assert obj["metadata"]["annotations"]["k2-release.io/release"] == world.made.release.id


@pytest.mark.parametrize("error", [CapacityError("K2-CAP-002", "Full."), UnavailableError("K2-UNA-001", "No.")])
def test_a_step_that_fails_gives_them_back(world, error):
    world.fail["k2-stage-"] = (0, error)
    with pytest.raises(type(error)):
        stage_step(world.ports(), world.made, NODES, ())
    assert [lease(world, node).holder for node in NODES] == ["", ""]


def test_another_lock_waits_until_the_first_has_ended_and_says_for_whom(world):
    first = holder(world)
    first.acquire(NODES, 0.0)
    freed_at = world.clock.at + 100

    def work(now):
        if now < freed_at:
            first.keep()
        elif first._held:
            first.release()

    world.clock.on_sleep.append(work)
    stage_step(world.ports("run-2"), other(world), NODES, ())
    assert world.clock.at >= freed_at
    told = [line for line in world.progress.lines if "is being staged with" in line]
    assert f"node-1 is being staged with lock {world.lock.digest[:12]} of release {world.made.release.id}" in told[0]
    assert 2 <= len(told) <= 6


def test_two_locks_that_come_at_once_never_have_jobs_on_a_node_at_the_same_time(world):
    """Each alone has room on the node's disk; both would find the same free bytes."""
    locks_at_work, ended = [], []
    world.on_work.append(lambda: locks_at_work.append({world.options(name)["--lock-digest"] for name in world.running}))
    both = {world.lock.digest, other(world).lock.digest}
    complete = world._complete

    def when_the_other_has_come(lock):
        waits = any("is being staged with" in line for line in world.progress.lines)
        at_work = {world.options(name)["--lock-digest"] for name in world.running}
        return (waits or at_work == both) and complete(lock)

    world._complete = when_the_other_has_come
    start = threading.Barrier(2)

    def stage(run, subject):
        start.wait(20)
        stage_step(world.ports(run), subject, NODES, ())
        ended.append(subject.lock.digest)

    runs = [("run-1", world.made), ("run-2", other(world))]
    threads = [threading.Thread(target=stage, args=run) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(ended) == both
    assert max(map(len, locks_at_work)) == 1
    assert set().union(*locks_at_work) == both


def test_a_flow_that_died_leaves_its_job_at_work_and_that_is_waited_for(world):
    second, held_until = other(world), world.clock.at + 500
    complete = world._complete
    world._complete = lambda lock: (lock == second.lock or world.clock.at >= held_until) and complete(lock)
    dead = world.ports("dead")
    dead.cluster.create(render_stage_job(world.lock, world.site, dead.templates, "tool", "node-1", "uid"))
    stage_step(world.ports("run-2"), second, ["node-1"], ())
    assert world.clock.at >= held_until
    told = [line for line in world.progress.lines if "is being staged with" in line]
    assert f"Job k2-stage-{world.lock.digest[:8]}-node-1 of lock {world.lock.digest[:12]}" in told[0]


def test_a_job_that_nobody_follows_any_more_is_named_with_the_command_that_ends_it(world):
    made = render_stage_job(world.lock, world.site, world.ports().templates, "tool", "node-1", "uid")
    world.cluster.create(made)
    world._complete = lambda lock: False
    with pytest.raises(ConflictError) as caught:
        NodeHolder(world.ports("run-2"), other(world)).acquire(["node-1"], 10.0)
    assert caught.value.hint.endswith(f"kubectl -n k2 delete Job {made['metadata']['name']}")


def test_a_lease_that_nobody_renews_is_taken_over_when_it_was_seen_so_for_its_whole_time(world):
    holder(world).acquire(["node-1"], 0.0)
    began = world.clock.at
    holder(world, other(world)).acquire(["node-1"], 3600.0)
    assert DURATION_S <= world.clock.at - began < DURATION_S + 5
    assert lease(world).generation == 2


def test_a_holder_that_lives_is_named_when_the_wait_is_over(world):
    first = holder(world)
    first.acquire(NODES, 0.0)
    world.clock.on_sleep.append(lambda now: first.keep())
    with pytest.raises(ConflictError) as caught:
        stage_step(world.ports("run-2"), other(world), NODES, ())
    error = caught.value
    assert (error.code, error.exit_code, error.where) == ("K2-CON-008", 7, "node-1")
    assert world.lock.digest[:12] in error.got
    assert world.made.release.id in error.got
    assert lease(world, "node-2").holder == world.lock.digest


def test_two_runs_of_one_lock_share_a_node_and_the_first_that_ends_takes_nothing_from_the_second(world):
    first, second = holder(world), holder(world, run="run-2")
    first.acquire(NODES, 0.0)
    second.acquire(NODES, 0.0)
    first.release()
    assert lease(world).holder == ""
    world.clock.sleep(DURATION_S / 2)
    second.keep()
    assert lease(world).holder == world.lock.digest
    second.release()
    assert lease(world).holder == ""


def test_a_lease_that_was_taken_over_is_said_and_ends_nothing(world):
    first = holder(world)
    first.acquire(NODES, 0.0)
    world.clock.sleep(DURATION_S + 1)  # this process slept
    holder(world, other(world)).acquire(["node-1"], 60.0)
    world.clock.sleep(DURATION_S)
    first.keep()
    assert [line for line in world.progress.lines if "the lease of node-1 went to" in line]
    first.release()
    assert lease(world, "node-1").holder == other(world).lock.digest
    assert lease(world, "node-2").holder == ""


def test_a_spare_that_is_busy_is_not_waited_for(world):
    first = holder(world)
    first.acquire(["node-2"], 0.0)
    world.clock.on_sleep.append(lambda now: first.keep())
    began = world.clock.at
    data = stage_step(world.ports("run-2"), other(world), ["node-1"], ["node-2", "node-3"])
    assert [row["outcome"] for row in data["spares"]] == ["not staged", "verified"]
    assert world.clock.at - began < 20
    assert [line for line in world.progress.lines if "K2-CON-008" in line]


def test_a_lease_that_somebody_deletes_while_it_is_held_is_made_again(world):
    first = holder(world)
    first.acquire(NODES, 0.0)
    world.cluster.delete("Lease", node_lease_name("node-1"))
    world.clock.sleep(DURATION_S / 2)
    first.keep()
    assert lease(world).holder == world.lock.digest
    world.cluster.delete("Lease", node_lease_name("node-1"))
    first.release()
    assert lease(world) is None


def test_a_write_that_another_run_of_the_lock_was_faster_with_is_no_conflict(world, monkeypatch):
    first = holder(world)
    first.acquire(["node-1"], 0.0)
    second = holder(world, run="run-2")
    real = world.cluster.replace

    def faster(obj):
        monkeypatch.setattr(world.cluster, "replace", real)
        world.clock.sleep(DURATION_S / 2)
        first.keep()
        return real(obj)

    monkeypatch.setattr(world.cluster, "replace", faster)
    second.acquire(["node-1"], 0.0)
    assert lease(world).holder == world.lock.digest


def test_the_time_in_which_the_api_was_away_does_not_count(world):
    holder(world).acquire(["node-1"], 0.0)
    silent = {"s": 0.0}

    class Away:
        """The cluster, which did not answer for ten minutes in between."""

        def __getattr__(self, name):
            return silent["s"] if name == "silent_s" else getattr(world.cluster, name)

    ports = replace(world.ports("run-2"), cluster=Away())
    second = NodeHolder(ports, other(world))
    with pytest.raises(ConflictError):
        second.acquire(["node-1"], 0.0)
    world.clock.sleep(600)
    silent["s"] = 600.0
    with pytest.raises(ConflictError):
        second.acquire(["node-1"], 0.0)
    world.clock.sleep(DURATION_S + 1)
    second.acquire(["node-1"], 0.0)


def test_the_wait_for_a_node_ends_when_the_pull_fails(world):
    first = holder(world)
    first.acquire(NODES, 0.0)
    world.clock.on_sleep.append(lambda now: first.keep())

    def watch():
        raise UnavailableError("K2-UNA-005", "The pull failed.")

    with pytest.raises(UnavailableError):
        stage_step(world.ports("run-2"), other(world), NODES, (), watch=watch)


@pytest.mark.parametrize("node", ["node-1", "gpu-17.example.com", "n" * 240])
def test_every_node_has_a_lease_of_its_own_name(node):
    assert node_lease_name(node).endswith(node)
    assert len(node_lease_name(node)) <= 253
