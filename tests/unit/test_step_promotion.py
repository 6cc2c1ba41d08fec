"""Steps promote and retire: what is live is moved once and recorded, and nothing that is needed is deleted (I10)."""

import copy
import json
from dataclasses import replace
from functools import cache

import pytest

from tasks.core.errors import ConflictError, IntegrityError, RevertedError
from tasks.core.ledger import FAILED, FINISHED, STARTED, Record
from tasks.core.route import LIVE_ROUTE
from tasks.core.spec import Retention
from tasks.steps.documents import get_live, get_receipt
from tasks.steps.holder import holding
from tasks.steps.journal import append, states
from tasks.steps.promotion import promote_step, receipt_step, retire_step
from tasks.steps.traffic import read_live_route
from tests.fakes.pipeline import bring_up, make_live, promote, retire, shift
from tests.fakes.small_world import Death, Faults, World, release

OLD, NEW = release("k2-old-1"), release("k2-new-1", args={"decode-log-interval": 7})
POLICY = replace(OLD, id="k2-old-2", retention=Retention(10.0))


@cache
def with_old():
    made = World()
    make_live(made.ports("run-old"), OLD)
    return made


@cache
def with_both():
    made = copy.deepcopy(with_old())
    both(made)
    made.clock.sleep(1000)
    return made


@pytest.fixture
def world():
    return copy.deepcopy(with_old())


def both(world):
    """Bring the new release to live over the old one."""
    return make_live(world.ports("run-new"), NEW)


def live(world):
    return get_live(world.store)[0]


def sets(world):
    return {
        group["metadata"]["labels"]["k2-release.io/serving"] for group in world.cluster.list_objects("LeaderWorkerSet")
    }


def serving(what, world):
    return world.subject(what).serving


# --- promote


def test_the_candidate_becomes_stable_and_the_old_set_stays_at_weight_0(world):
    subject = both(world)
    assert world.live_weights() == {subject.router_service: 100, world.subject(OLD).router_service: 0}
    state, _ = read_live_route(world.ports())
    assert (state.stable.release, state.previous.release, state.candidate) == (NEW.id, OLD.id, None)
    assert (live(world)["release"], live(world)["replaces"]) == (NEW.id, OLD.id)
    assert sets(world) == {subject.serving, serving(OLD, world)}


@pytest.mark.parametrize("percent", [0, 10, 50])
def test_a_candidate_without_all_traffic_is_not_promoted(world, percent):
    subject = bring_up(world.ports(), NEW)
    faults = Faults(10**9)
    if percent:

        def react(now):
            if world.live_weights().get(subject.router_service) == percent:
                faults.kill()

        world.clock.on_sleep.append(react)
        with pytest.raises(Death):
            shift(world.ports("run-1", faults), subject)
    with pytest.raises(ConflictError) as caught:
        holding(world.ports("run-2"), lambda h: promote_step(world.ports("run-2"), subject, h, "ann"))
    assert caught.value.code == "K2-CON-006"
    assert live(world)["release"] == OLD.id


def test_a_candidate_that_has_all_traffic_only_because_stable_is_dead_is_not_promoted(world):
    subject = bring_up(world.ports(), NEW)

    def react(now):
        if world.live_weights().get(subject.router_service) == 50:
            world.engine.sets[serving(OLD, world)].status = 503
            world.engine.sets[subject.serving].latency_s = 9.0

    world.clock.on_sleep.append(react)
    with pytest.raises(RevertedError):
        shift(world.ports("run-1"), subject)
    assert world.live_weights()[subject.router_service] == 100
    with pytest.raises(ConflictError):
        holding(world.ports("run-2"), lambda h: promote_step(world.ports("run-2"), subject, h, "ann"))


def test_a_record_of_what_is_live_that_moved_meanwhile_is_not_written_over(world):
    subject = bring_up(world.ports(), NEW)
    shift(world.ports("run-1"), subject)
    real = world.store.put

    def put(key, data, **kwargs):
        if key == "live.json" and kwargs.get("if_match"):
            real(key, world.store.objects[key].replace(OLD.id.encode(), b"other-one"))
        return real(key, data, **kwargs)

    world.store.put = put
    with pytest.raises(ConflictError) as caught:
        holding(world.ports("run-2"), lambda h: promote_step(world.ports("run-2"), subject, h, "ann"))
    assert caught.value.code == "K2-CON-004"


def test_a_new_policy_moves_no_weight_and_starts_no_pod(world):
    writes = len(world.cluster.writes)
    before, pods = world.live_weights(), world.cluster.list_objects("Pod")
    bring_up(world.ports("run-2"), POLICY)
    promote(world.ports("run-2"), POLICY)
    assert world.live_weights() == before
    assert world.cluster.list_objects("Pod") == pods
    assert {w for w in world.cluster.writes[writes:] if "Lease" not in w} == {f"replace HTTPRoute/{LIVE_ROUTE}"}
    assert live(world)["release"] == POLICY.id
    assert read_live_route(world.ports())[0].stable.release == POLICY.id


def test_a_release_that_is_live_is_promoted_again_without_any_change(world):
    key = f"receipts/{OLD.id}.json"
    before = json.loads(world.store.objects[key])["receipt"]
    route = world.cluster.objects["HTTPRoute", LIVE_ROUTE]
    bring_up(world.ports("run-2"), OLD)
    promote(world.ports("run-2"), OLD)
    assert world.cluster.objects["HTTPRoute", LIVE_ROUTE] == route
    after = json.loads(world.store.objects[key])["receipt"]
    for name in ("plan", "nodes", "gates", "weights", "manifests_digest", "placement"):
        assert after[name] == before[name], name


# --- the receipt


def test_the_receipt_pins_everything(world):
    subject = both(world)
    body = get_receipt(world.store, NEW.id)
    assert body["lock"]["digest"] == subject.lock.digest
    assert [row["node"] for row in body["nodes"]] == ["node-4", "node-5", "node-6"]
    assert all(len(row["marker_content_sha256"]) == 64 for row in body["nodes"])
    assert {name: gate["verdict"]["outcome"] for name, gate in body["gates"].items()} == {
        "smoke": "pass", "throughput": "pass"
    }  # fmt: skip
    assert [row["candidate_percent"] for row in body["weights"]] == [10, 50, 100]
    assert (body["approver"], body["simulated"]) == ("ann", ["everything"])
    assert [step["name"] for step in body["steps"]][-3:] == ["approve", "shift", "promote"]
    assert world.progress.documents["receipt"].startswith(f"# Receipt of {NEW.id}")


def test_the_receipt_has_the_manifests_that_were_applied_and_not_a_newer_rendering(world):
    subject = bring_up(world.ports("run-new"), NEW)
    applied = world.cluster.objects["LeaderWorkerSet", f"k2-{subject.serving[:8]}-decode"]["spec"]
    newer = {name: {**template, "changed": 1} for name, template in world.ports().templates.items()}
    ports = replace(world.ports("run-2"), templates=newer)
    promote(ports, NEW)
    digest = get_receipt(world.store, NEW.id)["manifests_digest"]
    objects = json.loads(world.store.objects[f"manifests/{digest}.json"])
    assert next(o for o in objects if o["metadata"]["name"].endswith("decode"))["spec"] == applied


def test_the_receipt_shows_the_tries_that_were_reverted_too(world):
    subject = bring_up(world.ports(), NEW)
    engine = world.engine.sets[subject.serving]
    world.clock.on_sleep.append(
        lambda now: setattr(engine, "garbage", True) if world.live_weights().get(subject.router_service) == 10 else None
    )
    with pytest.raises(RevertedError):
        promote(world.ports("run-1"), NEW)
    world.clock.on_sleep.clear()
    engine.garbage = False
    body = promote(world.ports("run-2"), NEW)
    assert [row["candidate_percent"] for row in body["weights"]] == [10, 0, 10, 50, 100]


def test_the_receipt_of_a_policy_release_inherits_what_it_did_not_do(world):
    before = get_receipt(world.store, OLD.id)
    bring_up(world.ports("run-2"), POLICY)
    body = promote(world.ports("run-2"), POLICY)
    assert body["gates"]["smoke"]["samples"] == before["gates"]["smoke"]["samples"]
    assert body["gates"]["smoke"]["policy"] == POLICY.policy_digest
    for name in ("nodes", "placement", "manifests_digest"):
        assert body[name] == before[name]
    assert body["policy_digest"] != before["policy_digest"]


def test_a_death_before_the_receipt_of_a_policy_release_loses_nothing(world):
    subject = bring_up(world.ports("run-2"), POLICY)
    expected = promote(world.ports("run-2"), POLICY)
    for at in range(1, 40):
        again = copy.deepcopy(with_old())
        bring_up(again.ports("run-2"), POLICY)
        try:
            promote(again.ports("run-2", Faults(at)), POLICY)
        except Death:
            again.clock.sleep(60)
            promote(again.ports("run-3"), POLICY)
        body = get_receipt(again.store, POLICY.id)
        for name in ("nodes", "placement", "manifests_digest", "gates"):
            assert body[name] == expected[name], f"{name} after a death at call {at}"
    assert receipt_step(world.ports("run-9"), subject)[0] == expected


def test_the_baseline_is_the_one_of_the_promoted_release(world):
    both(world)
    baselines = [json.loads(v) for k, v in world.store.objects.items() if k.startswith("baselines/")]
    assert [b["release"] for b in baselines] == [NEW.id]


# --- retire


@pytest.mark.parametrize("what", [OLD, NEW])
def test_a_release_that_serves_or_is_about_to_is_never_retired(world, what):
    subject = bring_up(world.ports("run-new"), NEW)
    faults = Faults(10**9)
    world.clock.on_sleep.append(
        lambda now: faults.kill() if world.live_weights().get(subject.router_service) == 50 else None
    )
    with pytest.raises(Death):
        shift(world.ports("run-1", faults), subject)
    world.clock.sleep(1000)
    with pytest.raises(ConflictError) as caught:
        retire(world.ports("run-2"), what)
    assert (caught.value.code, "promote" in caught.value.hint) == ("K2-CON-006", True)
    assert sets(world) == {serving(OLD, world), subject.serving}


def test_the_old_set_stays_until_its_hold_is_over(world):
    subject = both(world)
    with pytest.raises(ConflictError) as caught:
        retire(world.ports("run-2"), OLD)
    assert caught.value.code == "K2-CON-006"
    assert caught.value.retry.seconds == pytest.approx(NEW.retention.hold_s, abs=5)
    assert len(sets(world)) == 2
    world.clock.sleep(NEW.retention.hold_s + 1)
    data = retire(world.ports("run-3"), OLD)
    assert len(data["removed"]) == 5
    assert sets(world) == {subject.serving}
    assert world.live_weights() == {subject.router_service: 100}
    assert read_live_route(world.ports())[0].previous is None
    assert [key for key in world.store.objects if key.startswith("markers/node-1/")]


def test_retired_twice_is_retired_once(world):
    both(world)
    world.clock.sleep(1000)
    retire(world.ports("run-2"), OLD)
    writes = [w for w in world.cluster.writes if "Lease" not in w]
    assert retire(world.ports("run-3"), OLD)["outcome"] == "unchanged"
    assert [w for w in world.cluster.writes if "Lease" not in w] == writes


@pytest.mark.parametrize("event", [None, STARTED, FAILED])
def test_a_hold_that_is_not_known_is_not_over(world, event):
    both(world)
    key = next(
        k
        for k, v in world.store.objects.items()
        if k.startswith(f"ledger/{NEW.id}/") and b'"event":"finished"' in v and b'"step":"promote"' in v
    )
    del world.store.objects[key]
    if event == FAILED:
        append(world.store, Record(NEW.id, "promote", FAILED, "run", world.clock.now(), {"error": {}}))
    world.clock.sleep(10**6)
    with pytest.raises(ConflictError):
        retire(world.ports("run-2"), OLD)
    assert len(sets(world)) == 2
    promote(world.ports("run-3"), NEW)
    assert retire(world.ports("run-4"), OLD)["removed"]


def test_requests_in_flight_are_waited_for(world):
    both(world)
    world.clock.sleep(1000)
    old = world.engine.sets[serving(OLD, world)]
    old.running = 3.0
    began = world.clock.at
    world.clock.on_sleep.append(lambda now: setattr(old, "running", 0.0) if now - began > 30 else None)
    assert retire(world.ports("run-2"), OLD)["removed"]
    assert world.clock.at - began > 30


@pytest.mark.parametrize("how", [{"running": 1.0}, {"counts": False}])
def test_a_set_that_has_requests_or_does_not_say_is_not_deleted(world, how):
    both(world)
    world.clock.sleep(1000)
    vars(world.engine.sets[serving(OLD, world)]).update(how)
    with pytest.raises(ConflictError):
        retire(world.ports("run-2"), OLD)
    assert len(sets(world)) == 2


def test_a_set_whose_pods_are_gone_has_nothing_in_flight(world):
    both(world)
    world.clock.sleep(1000)
    world.engine.sets[serving(OLD, world)].counts = False
    for pod in world.cluster.list_objects("Pod", {"k2-release.io/serving": serving(OLD, world)}):
        world.cluster.set_status("Pod", pod["metadata"]["name"], {"phase": "Failed"})
    assert retire(world.ports("run-2"), OLD)["removed"]


def test_a_release_whose_pods_a_newer_policy_serves_with_is_not_retired(world):
    bring_up(world.ports("run-2"), POLICY)
    promote(world.ports("run-2"), POLICY)
    world.clock.sleep(1000)
    assert retire(world.ports("run-3"), OLD)["outcome"] == "unchanged"
    assert sets(world) == {serving(OLD, world)}


def test_a_candidate_that_was_reverted_gives_its_nodes_back(world):
    subject = bring_up(world.ports("run-new"), NEW)
    engine = world.engine.sets[subject.serving]
    world.clock.on_sleep.append(
        lambda now: setattr(engine, "garbage", True) if world.live_weights().get(subject.router_service) == 10 else None
    )
    with pytest.raises(RevertedError):
        shift(world.ports("run-1"), subject)
    assert retire(world.ports("run-2"), NEW)["removed"]
    assert sets(world) == {serving(OLD, world)}
    assert world.live_weights() == {world.subject(OLD).router_service: 100}


def test_a_candidate_that_never_had_traffic_gives_its_nodes_back(world):
    bring_up(world.ports("run-new"), NEW)
    assert retire(world.ports("run-2"), NEW)["removed"]
    assert sets(world) == {serving(OLD, world)}


def test_a_death_anywhere_in_a_retirement_leaves_no_set_behind():
    made = copy.deepcopy(with_both())
    faults = Faults(10**9)
    retire(made.ports("run-2", faults), OLD)
    expected = sorted(made.cluster.objects), made.live_weights()
    for at in range(1, faults.calls + 1):
        again = copy.deepcopy(with_both())
        with pytest.raises(Death):
            retire(again.ports("run-2", Faults(at)), OLD)
        again.clock.sleep(60)
        retire(again.ports("run-3"), OLD)
        assert (sorted(again.cluster.objects), again.live_weights()) == expected, f"after a death at call {at}"


def test_deletion_names_the_very_object_it_has_seen(world):
    both(world)
    world.clock.sleep(1000)
    uids, real = [], world.cluster.delete
    world.cluster.delete = lambda kind, name, *, uid="": (uids.append(uid), real(kind, name, uid=uid))[1]
    retire(world.ports("run-2"), OLD)
    assert len([uid for uid in uids if uid]) >= 5


def test_retire_step_needs_no_lock_of_the_release(world):
    both(world)
    world.clock.sleep(1000)
    gone = replace(OLD, repo="not/there")
    assert holding(world.ports("r"), lambda h: retire_step(world.ports("r"), gone, h))["removed"]


# --- what stands of a receipt


def test_a_later_promotion_takes_nothing_back_of_the_first_receipt(world):
    before = world.store.objects[f"receipts/{OLD.id}.json"]
    body = promote(world.ports("run-2"), OLD, "bob")
    assert world.store.objects[f"receipts/{OLD.id}.json"] == before
    assert body["approver"] == "ann"


@pytest.mark.parametrize("nodes", [[], slice(0, 2), "twice"])
def test_a_receipt_that_does_not_name_every_node_is_not_written(world, nodes):
    subject = bring_up(world.ports("run-new"), NEW)
    done = states(world.store, NEW.id)["stage"].data
    rows = done["nodes"]
    wrong = [] if nodes == [] else [rows[0], rows[0], rows[1]] if nodes == "twice" else rows[nodes]
    append(world.store, Record(NEW.id, "stage", FINISHED, "run", 1.0, {**done, "nodes": wrong}))
    with pytest.raises(IntegrityError) as caught:
        receipt_step(world.ports(), subject)
    assert caught.value.code == "K2-INT-003"
    assert f"receipts/{NEW.id}.json" not in world.store.objects
