"""Pull and stage at once: two steps, each with its record; what fails first is told, and the other one ends."""

import threading
import time

import pytest

from tasks.core.errors import CapacityError, IntegrityError, K2Error
from tasks.core.ledger import FAILED, FINISHED, STARTED
from tasks.core.render import staged_label
from tasks.steps.delivery import deliver
from tasks.steps.journal import records, states
from tests.fakes.piecemeal import Piecemeal
from tests.fakes.small_world import Death, Faults

CHOSEN, SPARES = ("node-1", "node-2"), ("node-3",)
WRONG = IntegrityError("K2-INT-001", "Other bytes.", where="model-1-of-2.safetensors", got="a", expected="b")
FULL = CapacityError("K2-CAP-002", "Not enough free space on the node's disk.", where="node-2: /models")


@pytest.fixture
def world():
    return Piecemeal()


def act(world, run="run-1", faults=None):
    return deliver(world.ports(run, faults), world.made, CHOSEN, SPARES)


def events(world):
    return [(record.step, record.event) for record in records(world.store, world.made.release.id)]


def labelled(world):
    wanted = {staged_label(world.lock.digest): "true"}
    return [node["metadata"]["name"] for node in world.cluster.list_objects("Node", wanted)]


def jobs(world, start):
    return [name for kind, name in world.cluster.objects if kind == "Job" and name.startswith(start)]


def stage_job(world, node):
    return f"k2-stage-{world.lock.digest[:8]}-{node}"


def held_leases(world):
    leases = world.cluster.list_objects("Lease")
    return {lease["metadata"]["name"] for lease in leases if lease["spec"].get("holderIdentity")}


def test_staging_begins_with_the_pull_and_both_are_recorded(world):
    first_staged = []
    world.on_work.append(lambda: first_staged.append(world.pulled) if jobs(world, "k2-stage-") else None)
    data = act(world)
    assert events(world) == [
        ("pull", STARTED), ("stage", STARTED), ("pull", FINISHED), ("stage", FINISHED)
    ]  # fmt: skip
    assert first_staged[0] < len(world.lock.files)
    assert labelled(world) == ["node-1", "node-2", "node-3"]
    assert [row["outcome"] for row in data["nodes"]] == ["verified", "verified"]
    steps = states(world.store, world.made.release.id)
    assert steps["pull"].data["bytes_fetched"] == world.lock.total_bytes
    assert all(0 < steps[name].seconds < 120 for name in ("pull", "stage"))
    assert float(world.options(stage_job(world, "node-1"))["--source-wait-s"]) == 3600
    assert "--source-wait-s" not in world.options(stage_job(world, "node-3"))  # a spare comes when the store is full
    assert held_leases(world) == set()


def test_where_nothing_is_missing_staging_comes_after_and_waits_for_nothing(world, monkeypatch):
    act(world)
    world.cluster.delete("Job", stage_job(world, "node-1"))
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("a thread for nothing"))
    before = len(events(world))
    act(world)
    assert events(world)[before:] == [("pull", STARTED), ("pull", FINISHED), ("stage", STARTED), ("stage", FINISHED)]
    assert states(world.store, world.made.release.id)["pull"].outcome == "unchanged"
    assert "--source-wait-s" not in world.options(stage_job(world, "node-1"))


def test_a_pull_that_fails_ends_the_stagers_and_is_what_is_told(world):
    world.fail["k2-pull-"] = (2, WRONG)
    with pytest.raises(IntegrityError) as caught:
        act(world)
    assert caught.value.as_data() == WRONG.as_data()
    assert jobs(world, "k2-stage-") == []
    assert labelled(world) == []
    assert held_leases(world) == set()
    steps = states(world.store, world.made.release.id)
    assert steps["pull"].data["error"]["code"] == "K2-INT-001"
    assert steps["stage"].outcome == "failed"
    assert steps["stage"].data["error"]["code"] == "K2-UNA-005"
    assert steps["stage"].data["error"]["got"] == "K2-INT-001 Other bytes."


def test_a_node_that_fails_ends_the_step_and_leaves_the_pullers_to_their_work(world):
    world.fail[stage_job(world, "node-2")] = (1, FULL)
    world.on_work.append(lambda: setattr(world, "held", world.pulled >= 1))
    with pytest.raises(CapacityError) as caught:
        act(world)
    assert caught.value.as_data() == FULL.as_data()
    steps = states(world.store, world.made.release.id)
    assert steps["pull"].data["error"]["code"] == "K2-UNA-005"
    assert [line for line in world.progress.lines if "delete jobs -l k2-release.io/role=pull" in line]
    assert any(name.startswith("k2-pull-") for name in world.running)
    world.fail.clear()
    world.on_work.clear()
    world.held = False
    act(world, "run-2")
    assert world.pulled == len(world.lock.files)  # each once, in both runs together
    assert labelled(world) == ["node-1", "node-2", "node-3"]


def test_the_first_of_two_failures_is_told(world):
    world.fail["k2-pull-"] = (2, WRONG)
    world.fail[stage_job(world, "node-1")] = (2, FULL)
    with pytest.raises(K2Error) as caught:
        act(world)
    first = next(record for record in records(world.store, world.made.release.id) if record.event == FAILED)
    told = caught.value.code
    assert told in (WRONG.code, FULL.code)
    # Both fail in the same moment: whichever was seen first is told, and never that a step was ended by the other.
    assert first.data["error"]["code"] in (told, WRONG.code, FULL.code)


def test_a_flow_that_is_told_to_end_leaves_its_jobs_at_work_and_the_next_run_attaches(world):
    def interrupt():
        world.held = world.pulled >= 2
        if world.pulled >= 2 and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    world.on_work.append(interrupt)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        act(world)
    assert time.monotonic() - began < 5
    assert set(world.running) >= {stage_job(world, "node-1"), stage_job(world, "node-2")}
    steps = states(world.store, world.made.release.id)
    assert (steps["pull"].outcome, steps["stage"].outcome) == ("failed", "failed")
    assert "told to end" in steps["stage"].data["error"]["summary"]
    world.on_work.clear()
    world.held = False
    act(world, "run-2")
    assert world.pulled == len(world.lock.files)
    assert labelled(world) == ["node-1", "node-2", "node-3"]


def test_a_flow_that_is_told_to_end_while_only_staging_is_left(world, monkeypatch):
    waiting = threading.Event()
    real = threading.Thread.join

    def join(thread, timeout=None):
        if thread.name == "stage" and not waiting.is_set():
            waiting.set()
            raise KeyboardInterrupt
        real(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", join)
    monkeypatch.setattr(world, "_complete", lambda lock: waiting.is_set() and False)
    # Hours of the world's clock must not pass in the one thread while the other gets no CPU.
    world.clock.on_sleep.append(lambda now: time.sleep(0.001))
    with pytest.raises(KeyboardInterrupt):
        act(world)
    steps = states(world.store, world.made.release.id)
    assert (steps["pull"].outcome, steps["stage"].outcome) == ("done", "failed")
    assert jobs(world, "k2-stage-")


def end_state(world):
    kept = {key: value for key, value in world.store.objects.items() if not key.startswith("ledger/")}
    return labelled(world), kept, held_leases(world)


def test_a_death_at_any_call_and_a_second_run_give_the_same_end():
    undisturbed, faults = Piecemeal(), Faults(10**9)
    act(undisturbed, faults=faults)
    assert faults.calls > 60
    # How many calls there are depends on how the two threads take turns: the last moments may come after the end.
    moments, deaths = range(1, faults.calls, 7), 0
    for at in moments:
        world = Piecemeal()
        try:
            act(world, faults=Faults(at))
        except Death:
            deaths += 1
        act(world, "run-2")
        assert end_state(world) == end_state(undisturbed), f"after a death at call {at}"
    assert deaths > len(moments) // 2


def test_pullers_that_died_with_their_flow_are_started_again_beside_stagers_that_wait(world):
    world.held = True
    faults = Faults(10**9)
    world.on_work.append(lambda: faults.kill() if len(jobs(world, "k2-stage-")) == 2 else None)
    with pytest.raises(Death):
        act(world, faults=faults)
    world.on_work.clear()
    for name in [name for name in world.running if name.startswith("k2-pull-")]:
        del world.running[name]
        world.cluster.delete("Job", name)
    world.held = False
    started = len(world.jobs_run)
    act(world, "run-2")
    assert set(world.jobs_run[started:]) >= set(jobs(world, "k2-pull-"))
    assert world.pulled == len(world.lock.files)
    assert labelled(world) == ["node-1", "node-2", "node-3"]
