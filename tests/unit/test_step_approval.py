"""Step approve: it covers what was gated, on the pods that run now, over what was live when it was planned."""

import copy
from dataclasses import replace
from functools import cache

import pytest

from tasks.core.errors import ConflictError, GateError
from tasks.core.ledger import FAILED, FINISHED, STARTED, Record
from tasks.core.route import LIVE_ROUTE
from tasks.core.spec import Limit, Retention
from tasks.steps.approval import approve_step
from tasks.steps.capacity import plan_step
from tasks.steps.documents import get_live
from tasks.steps.journal import append, recorded, states
from tasks.steps.traffic import read_live_route
from tests.fakes.pipeline import bring_up, make_live, promote, retire
from tests.fakes.small_world import Death, Faults, World, release

OLD, NEW = release("k2-old-1"), release("k2-new-1", args={"decode-log-interval": 7})
POLICY = replace(OLD, id="k2-old-2", retention=Retention(10.0))
OTHER = replace(OLD, id="k2-old-3", retention=Retention(20.0))


@cache
def with_old():
    made = World()
    make_live(made.ports("run-old"), OLD)
    return made


@pytest.fixture
def world():
    return copy.deepcopy(with_old())


@pytest.fixture
def gated(world):
    bring_up(world.ports(), NEW)
    return world


def refused(world, what=NEW):
    with pytest.raises(ConflictError) as caught:
        approve_step(world.ports(), what, "ann", "")
    return caught.value


def test_a_gated_release_can_be_approved_and_the_approval_covers_its_lock(gated):
    data = approve_step(gated.ports(), NEW, "ann", "go")
    assert (data["approver"], data["comment"]) == ("ann", "go")
    assert data["lock_digest"] == gated.subject(NEW).lock.digest


def test_a_release_that_nobody_gated_cannot():
    error = refused(World())
    assert (error.code, error.hint) == ("K2-CON-006", f"k2ctl release {NEW.id}")


@pytest.mark.parametrize("event", [STARTED, FAILED])
@pytest.mark.parametrize("step", ["stage", "rollout", "smoke", "throughput", "plan"])
def test_a_step_or_gate_that_was_tried_again_and_did_not_pass_cannot(gated, step, event):
    append(gated.store, Record(NEW.id, step, event, "run", gated.clock.now(), {}))
    error = refused(gated)
    assert (error.code, error.hint, step in error.got) == ("K2-CON-006", f"k2ctl release {NEW.id}", True)


@pytest.mark.parametrize(
    "edited",
    [
        replace(NEW, images=replace(NEW.images, engine="other@sha256:" + "9" * 64)),
        replace(NEW, gates=replace(NEW.gates, limits=())),
        replace(NEW, traffic=replace(NEW.traffic, steps_percent=(100,))),
    ],
)
def test_a_release_that_was_edited_since_it_was_gated_cannot(gated, edited):
    assert "edited" in refused(gated, edited).summary


@pytest.mark.parametrize(
    "edited",
    [
        replace(NEW, traffic=replace(NEW.traffic, steps_percent=(100,))),
        replace(NEW, gates=replace(NEW.gates, smoke_min_correct_share=0.5)),
        replace(NEW, images=replace(NEW.images, engine="other@sha256:" + "9" * 64)),
    ],
)
def test_a_plan_of_the_edited_release_does_not_make_the_gates_of_the_old_one_its_own(gated, edited):
    for number in (7, 8, 9):
        gated.add_node(f"node-{number}")
    ports = gated.ports("run-2")
    recorded(ports, NEW.id, "plan", lambda: plan_step(ports, gated.subject(edited))[1])
    error = refused(gated, edited)
    assert (error.code, error.hint) == ("K2-CON-006", f"k2ctl release {NEW.id}")


@pytest.mark.parametrize("step", ["stage", "rollout"])
def test_a_step_that_ended_under_a_plan_of_another_content_is_not_this_releases(gated, step):
    done = states(gated.store, NEW.id)
    plan = done["plan"].data["plan"]
    for name, data in (
        ("plan", {"plan": {**plan, "serving_digest": "0" * 64}}),
        (step, done[step].data),
        ("plan", {"plan": plan}),
    ):
        append(gated.store, Record(NEW.id, name, FINISHED, "run", gated.clock.now(), data))
    assert step in refused(gated).got


@pytest.mark.parametrize("gate", ["smoke", "throughput"])
@pytest.mark.parametrize("changed", [{"policy": "0" * 64}, {"pods": "0" * 64}])
def test_each_gate_is_of_this_policy_and_of_these_pods(gated, gate, changed):
    data = {**states(gated.store, NEW.id)[gate].data, **changed}
    append(gated.store, Record(NEW.id, gate, FINISHED, "run", gated.clock.now(), data))
    error = refused(gated)
    assert (error.code, error.got.split()[0]) == ("K2-CON-006", gate)


def test_pods_that_started_again_since_they_were_gated_cannot(gated):
    pod = f"k2-{gated.subject(NEW).serving[:8]}-decode-0"
    status = gated.cluster.objects["Pod", pod]["status"]
    gated.cluster.set_status("Pod", pod, {**status, "containerStatuses": [{"restartCount": 1}]})
    assert refused(gated).code == "K2-CON-006"
    bring_up(gated.ports("run-2"), NEW)
    assert approve_step(gated.ports(), NEW, "ann", "")


def test_a_set_that_was_retired_since_cannot(gated):
    retire(gated.ports("run-2"), NEW)
    error = refused(gated)
    assert (error.code, error.hint, error.got) == ("K2-CON-006", f"k2ctl release {NEW.id}", "no pod")


def test_a_policy_that_does_not_hold_for_the_stored_samples_cannot(world):
    strict = replace(POLICY, gates=replace(OLD.gates, limits=(Limit("e2e_output_tok_per_s", ">=", 1e6, "tok/s"),)))
    with pytest.raises(GateError):
        bring_up(world.ports("run-2"), strict)
    assert refused(world, strict).code == "K2-CON-006"


@pytest.mark.parametrize("gate", ["smoke", "throughput"])
def test_a_policy_needs_both_gates(world, gate):
    bring_up(world.ports("run-2"), POLICY)
    append(world.store, Record(POLICY.id, gate, FAILED, "run", 1.0, {}))
    assert gate in refused(world, POLICY).got


# --- what is live


@pytest.mark.parametrize("what", [NEW, POLICY])
def test_a_plan_over_what_is_no_longer_live_is_stale(world, what):
    bring_up(world.ports("run-1"), what)
    bring_up(world.ports("run-2"), OTHER)
    promote(world.ports("run-2"), OTHER)
    error = refused(world, what)
    assert error.code == "K2-CON-004"
    assert what.id in error.hint
    bring_up(world.ports("run-3"), what)
    assert approve_step(world.ports(), what, "ann", "")


def test_a_policy_of_a_set_that_has_no_users_any_more_is_stale(world):
    bring_up(world.ports("run-1"), POLICY)
    make_live(world.ports("run-2"), NEW)
    assert refused(world, POLICY).code == "K2-CON-004"


def test_a_route_that_serves_another_set_than_was_planned_over_is_stale(world):
    bring_up(world.ports("run-1"), POLICY)
    bring_up(world.ports("run-2"), NEW)
    cut_promotion(world, "live.json")
    assert get_live(world.store)[0]["release"] == OLD.id
    assert read_live_route(world.ports())[0].stable.release == NEW.id
    assert refused(world, POLICY).where == f"HTTPRoute {LIVE_ROUTE}"
    assert approve_step(world.ports(), NEW, "ann", "")


def cut_promotion(world, before, what=NEW):
    """Promote a gated release and die at the first write to the store whose key has `before` in it."""
    real = world.store.put

    def put(key, data, **conditions):
        text = data.decode(errors="replace")
        if before in key or (before == "record" and '"event":"finished"' in text and '"step":"promote"' in text):
            raise Death
        return real(key, data, **conditions)

    world.store.put = put
    with pytest.raises(Death):
        promote(world.ports("run-cut"), what)
    world.store.put = real
    world.clock.sleep(100)


@pytest.mark.parametrize("before", ["live.json", "baselines", "record", "receipts"])
@pytest.mark.parametrize("planned_again", [False, True])
@pytest.mark.parametrize("what", [NEW, POLICY])
def test_a_promotion_that_died_is_finished_by_the_next_one_whether_planned_again_or_not(
    world, before, planned_again, what
):
    undisturbed = copy.deepcopy(world)
    make_live(undisturbed.ports("run-1"), what)
    bring_up(world.ports("run-1"), what)
    cut_promotion(world, before, what)
    if planned_again:
        bring_up(world.ports("run-2"), what)
    body = promote(world.ports("run-2"), what)
    expected = promote(undisturbed.ports("run-2"), what)
    for name in ("nodes", "placement", "manifests_digest", "serving_digest", "policy_digest", "weights", "approver"):
        assert body[name] == expected[name], name
    assert body["plan"] | {"change": ""} == expected["plan"] | {"change": ""} or before == "live.json"
    ports = world.ports("run-3")
    assert plan_step(ports, world.subject(what))[0].change == "none"
    assert states(world.store, what.id)["promote"].outcome == "done"
    assert [key for key in world.store.objects if key.startswith("baselines/")]


@pytest.mark.parametrize("before", ["baselines", "record", "receipts"])
def test_a_plan_after_a_promotion_that_died_says_that_its_record_is_missing(gated, before):
    cut_promotion(gated, before)
    plan = plan_step(gated.ports(), gated.subject(NEW))[0]
    assert (plan.change, plan.pods_started, plan.shifts_traffic) == ("policy", 0, False)
    assert "promote again" in plan.warnings[0]


def test_a_policy_over_a_live_release_without_record_waits_for_it(gated):
    cut_promotion(gated, "receipts")
    over = replace(NEW, id="k2-new-2", retention=Retention(10.0))
    bring_up(gated.ports("run-2"), over)
    error = refused(gated, over)
    assert (error.code, NEW.id in error.hint) == ("K2-CON-006", True)
    promote(gated.ports("run-3"), NEW)
    assert approve_step(gated.ports(), over, "ann", "")


def test_a_promotion_back_that_died_is_not_taken_for_the_first_one(world):
    make_live(world.ports("run-1"), NEW)
    bring_up(world.ports("run-2"), OLD)
    cut_promotion(world, "record", OLD)
    assert plan_step(world.ports(), world.subject(OLD))[0].change == "policy"
    world.clock.sleep(10**6)
    with pytest.raises(ConflictError):
        retire(world.ports("run-3"), NEW)
    promote(world.ports("run-4"), OLD)
    assert plan_step(world.ports(), world.subject(OLD))[0].change == "none"
    assert retire(world.ports("run-5"), NEW)["removed"]


def test_a_shift_that_was_killed_in_the_middle_is_approved_again(gated):
    service, faults = gated.subject(NEW).router_service, Faults(10**9)
    gated.clock.on_sleep.append(lambda now: faults.kill() if gated.live_weights().get(service) == 50 else None)
    with pytest.raises(Death):
        promote(gated.ports("run-1", faults), NEW)
    gated.clock.on_sleep.clear()
    gated.clock.sleep(100)
    promote(gated.ports("run-2"), NEW)
    assert get_live(gated.store)[0]["release"] == NEW.id


# --- a parked site


def park(world):
    """Give the route back to the parking backend, as the set-up of a site does."""
    from tasks.steps.site_setup import set_up_site
    from tests.fakes.small_world import BASE, IMAGES

    world.cluster.delete("HTTPRoute", LIVE_ROUTE)
    set_up_site(world.ports("setup"), BASE, IMAGES.tool)
    assert world.live_weights() == {"k2-parking": 100}


def test_a_live_release_that_nobody_is_sent_to_is_brought_back_by_itself(world):
    park(world)
    subject = world.subject(OLD)
    plan = plan_step(world.ports(), subject)[0]
    assert (plan.change, plan.shifts_traffic) == ("first", True)
    assert "not to the live release" in plan.warnings[0]
    pods = world.cluster.list_objects("Pod", {"k2-release.io/serving": subject.serving})
    before = world.store.objects[f"receipts/{OLD.id}.json"]
    make_live(world.ports("run-2"), OLD)
    assert world.live_weights() == {subject.router_service: 100}
    assert world.cluster.list_objects("Pod", {"k2-release.io/serving": subject.serving}) == pods
    assert world.store.objects[f"receipts/{OLD.id}.json"] == before
    assert plan_step(world.ports(), subject)[0].change == "none"


@pytest.mark.parametrize("what", [OLD, POLICY])
def test_a_plan_that_moves_nothing_is_stale_once_the_site_was_parked(world, what):
    bring_up(world.ports("run-2"), what)
    park(world)
    assert refused(world, what).code == "K2-CON-004"
