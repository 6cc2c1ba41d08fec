"""Step shift: abort-first (I4), and a death at any call that changes nothing (I5)."""

import json
from dataclasses import replace

import pytest

from tasks.core.errors import ConflictError, GateError, NotReadyError, RevertedError, UnavailableError
from tasks.core.route import HELD, LIVE_ROUTE, REVERTED, SHIFTING, Backend
from tasks.core.units import utc_time
from tasks.ports import BackendCounts
from tasks.steps.journal import states
from tasks.steps.probing import probe_set, prove_traffic
from tasks.steps.traffic import read_live_route, route_is_live, write_live_route
from tests.fakes.pipeline import bring_up, promote, shift
from tests.fakes.shifting_world import NEW, OLD, Shifting, edit_weights, holding_of
from tests.fakes.small_world import Death, Faults, World


@pytest.fixture
def it():
    return Shifting()


def test_weights_go_by_the_plan_with_a_bake_after_each(it):
    seen = it.watch_weights()
    began = it.world.clock.at
    data = it.shift()
    assert seen == [0, 10, 50, 100]
    assert [row["candidate_percent"] for row in data["history"]] == [10, 50, 100]
    assert it.world.clock.at - began >= 3 * NEW.traffic.bake_s
    assert it.state.candidate_percent == 100
    shown = it.world.progress.tables["weights"]
    assert shown == [{**row, "at": utc_time(row["at"])} for row in data["history"]]


def test_done_twice_is_done_once(it):
    promoted = promote(it.world.ports("run-1"), NEW)
    writes = [write for write in it.world.cluster.writes if LIVE_ROUTE in write]
    data = it.shift("run-2")
    assert (data["outcome"], data["history"]) == ("unchanged", [])
    assert [write for write in it.world.cluster.writes if LIVE_ROUTE in write] == writes
    assert promoted["weights"]


def test_the_route_stays_on_the_sites_own_gateway(it):
    it.shift()
    route = it.world.cluster.objects["HTTPRoute", LIVE_ROUTE]
    assert [ref["name"] for ref in route["spec"]["parentRefs"]] == ["front-door"]


@pytest.mark.parametrize("failure", [{"garbage": True}, {"status": 500}, {"latency_s": 9.0}])
def test_a_failed_check_sends_everybody_back_first_and_proves_it(it, failure):
    seen = it.watch_weights()
    it.at_weight(50, lambda: vars(it.new_set).update(failure))
    with pytest.raises(RevertedError) as caught:
        it.shift()
    assert caught.value.code == "K2-REV-001"
    assert seen == [0, 10, 50, 0]
    assert it.weights() == (100, 0)
    assert it.state.phase == REVERTED
    details = caught.value.details
    assert details["proved"] == {it.old.serving: 10}
    assert details["seconds_to_safety"] < 60
    assert [row["candidate_percent"] for row in details["history"]] == [10, 50, 0]


def test_errors_of_users_revert_although_every_probe_is_right(it):
    service = it.new.router_service
    it.at_weight(10, lambda: it.world.stats.by_backend.update({service: BackendCounts(100.0, 50.0)}))
    with pytest.raises(RevertedError) as caught:
        it.shift()
    assert "50 of 100 user requests failed" in caught.value.got


def test_errors_of_before_the_shift_do_not_count(it):
    it.world.stats.by_backend[it.new.router_service] = BackendCounts(100.0, 100.0)
    it.shift()
    assert it.weights() == (0, 100)


def test_statistics_that_are_missing_hold_the_shift_and_do_not_pass(it):
    it.world.stats.down = UnavailableError("K2-UNA-001", "No.")
    with pytest.raises(RevertedError) as caught:
        it.shift()
    assert caught.value.code == "K2-REV-002"
    assert it.weights() == (90, 10)


def test_statistics_that_are_missing_for_a_while_or_start_anew_count_from_there(it):
    service = it.new.router_service
    it.world.stats.by_backend[service] = BackendCounts(1e6, 1e5)
    down = UnavailableError("K2-UNA-001", "No.")
    it.at_weight(10, lambda: setattr(it.world.stats, "down", down))
    it.at_weight(10, lambda: it.world.clock.on_sleep.append(lambda now: setattr(it.world.stats, "down", None)))
    it.at_weight(50, lambda: it.world.stats.by_backend.update({service: BackendCounts(3.0, 0.0)}))
    it.shift()
    assert it.weights() == (0, 100)


def test_the_first_write_after_a_failed_check_is_the_one_to_safety(it):
    failed_at = []
    it.at_weight(50, lambda: (setattr(it.new_set, "garbage", True), failed_at.append(len(it.world.cluster.writes))))
    with pytest.raises(RevertedError):
        it.shift()
    after = [w for w in it.world.cluster.writes[failed_at[0] :] if "Lease" not in w]
    assert after[0] == f"replace HTTPRoute/{LIVE_ROUTE}"
    assert it.weights() == (100, 0)


def test_stable_that_does_not_answer_gets_nobody_back(it):
    def both():
        it.old_set.status, it.new_set.latency_s = 503, 9.0

    it.at_weight(50, both)
    with pytest.raises(RevertedError) as caught:
        it.shift()
    assert it.weights() == (0, 100)
    assert it.state.phase == HELD
    assert "stable set does not answer" in caught.value.got
    assert caught.value.details["proved"] == {it.new.serving: 10}


def test_a_held_candidate_is_taken_up_again_from_all_traffic_and_never_from_a_few_percent(it):
    def both():
        it.old_set.status, it.new_set.latency_s = 503, 9.0

    it.at_weight(50, both)
    with pytest.raises(RevertedError):
        it.shift()
    it.new_set.latency_s = 0.05
    seen = it.watch_weights()
    it.shift("run-2")
    assert seen == [100]
    assert it.weights() == (0, 100)


def test_when_neither_set_answers_nothing_is_touched_and_a_person_is_called(it):
    def both():
        it.old_set.status = it.new_set.status = 503

    it.at_weight(50, both)
    seen = it.watch_weights()
    with pytest.raises(RevertedError) as caught:
        it.shift()
    assert caught.value.code == "K2-REV-002"
    assert seen == [0, 10, 50]
    assert caught.value.exit_code == 10


def test_a_proof_that_fails_is_said_and_is_still_a_revert(it):
    it.at_weight(50, lambda: setattr(it.new_set, "garbage", True))
    it.world.engine._by_weight = lambda: it.new.serving
    with pytest.raises(RevertedError) as caught:
        it.shift()
    assert caught.value.code == "K2-REV-002"
    assert caught.value.details["not_proved"]["code"] == "K2-CON-003"
    assert it.weights() == (100, 0)


def test_a_candidate_that_is_dead_at_the_start_gets_no_user(it):
    it.new_set.status = 503
    seen = it.watch_weights()
    with pytest.raises(GateError) as caught:
        it.shift()
    assert seen == [0]
    assert caught.value.exit_code == 4


def test_a_first_release_reverts_to_the_parking_backend():
    world = World()
    subject = bring_up(world.ports(), NEW)
    served = world.engine.sets[subject.serving]
    world.clock.on_sleep.append(
        lambda now: setattr(served, "garbage", True) if world.live_weights().get(subject.router_service) == 50 else None
    )
    with pytest.raises(RevertedError) as caught:
        shift(world.ports("run-2"), subject)
    assert world.live_weights() == {"k2-parking": 100, subject.router_service: 0}
    assert caught.value.details["proved"] == {"parking": 10}


def test_a_reverted_candidate_may_try_again_from_the_start(it):
    it.at_weight(50, lambda: setattr(it.new_set, "garbage", True))
    with pytest.raises(RevertedError):
        it.shift()
    it.new_set.garbage = False
    it.world.clock.on_sleep.clear()
    seen = it.watch_weights()
    it.shift("run-2")
    assert seen == [0, 10, 50, 100]


# --- I3: one mover at a time


@pytest.mark.parametrize("weights", [(100, 0), (0, 100), (50, 50)])
def test_a_weight_that_a_human_hand_wrote_is_never_written_over(it, weights):
    it.at_weight(10, lambda: edit_weights(it.world, *weights))
    with pytest.raises(ConflictError) as caught:
        it.shift()
    assert caught.value.code == "K2-CON-003"
    assert it.weights() == weights


def test_a_human_hand_is_not_written_over_by_an_abort_either(it):
    def hand_and_failure():
        it.new_set.garbage = True
        edit_weights(it.world, 30, 70)

    it.at_weight(10, hand_and_failure)
    with pytest.raises(ConflictError):
        it.shift()
    assert it.weights() == (30, 70)


def test_a_state_that_somebody_else_wrote_whole_stops_the_shift(it):
    def takeover():
        other = holding_of(it.world, "person", force=True)
        state, obj = read_live_route(it.world.ports("person"))
        parked = replace(state, candidate_percent=0, phase=REVERTED, generation=other.generation)
        write_live_route(it.world.ports("person"), parked, obj, other)

    it.at_weight(10, takeover)
    with pytest.raises(ConflictError) as caught:
        it.shift()
    assert caught.value.code in ("K2-CON-002", "K2-CON-003")
    assert it.weights() == (100, 0)


def test_another_release_in_the_middle_of_its_shift_is_not_pushed_aside(it):
    it.die_at(10, "first")
    third = bring_up(it.world.ports("run-3"), replace(NEW, id="k2-third-1"))
    with pytest.raises(ConflictError) as caught:
        shift(it.world.ports("run-3"), third)
    assert (caught.value.code, caught.value.got) == ("K2-CON-001", NEW.id)


@pytest.mark.parametrize(
    ("conditions", "live"),
    [
        ([], False),
        ([("True", 3)], True),
        ([("True", 2)], False),
        ([("False", 3)], False),
        ([("True", 3), ("False", 3)], False),
        ([("True", 3), ("True", 2)], False),
        ([("True", 4)], True),
    ],
)
def test_when_the_route_is_live(conditions, live):
    rows = [{"status": status, "observedGeneration": at} for status, at in conditions]
    assert route_is_live({"status": {"parents": [{"conditions": rows}]}}, 3) is live
    assert not route_is_live({}, 1)


def test_a_site_without_route_says_how_to_make_one():
    world = World()
    world.cluster.delete("HTTPRoute", LIVE_ROUTE)
    with pytest.raises(NotReadyError) as caught:
        read_live_route(world.ports())
    assert "site init" in caught.value.hint


def test_a_set_that_cannot_be_asked_at_all_is_a_wrong_answer(it):
    def down(*args, **kwargs):
        raise UnavailableError("K2-UNA-001", "Refused.")

    it.world.engine.ask = down
    assert all(probe.wrong for probe in probe_set(it.world.ports(), it.old.serving, 3))


def test_the_proof_counts_who_served(it):
    backend = Backend(it.old.router_service, it.old.serving, OLD.id)
    assert prove_traffic(it.world.ports(), backend) == {it.old.serving: 10}
    with pytest.raises(ConflictError):
        prove_traffic(it.world.ports(), replace(backend, serving="another"))


# --- I5: a death at any call of a port


def end_state(it):
    """Return everything that must not depend on deaths: route, live, baseline, receipt, objects."""
    state = replace(it.state, generation=0, since=0.0)
    store = {
        key: value
        for key, value in it.world.store.objects.items()
        if key.split("/")[0] in ("live.json", "baselines", "samples", "manifests", "locks")
    }
    body = json.loads(it.world.store.objects[f"receipts/{NEW.id}.json"])["receipt"]
    body = {k: v for k, v in body.items() if k not in ("steps", "weights")}
    percents = {step: states(it.world.store, NEW.id)[step].outcome for step in ("shift", "promote")}
    return state, store, body, sorted(it.world.cluster.objects), set(percents) == {"shift", "promote"}


def undisturbed():
    it = Shifting()
    faults = Faults(10**9)
    promote(it.world.ports("run-1", faults), NEW)
    return end_state(it), faults.calls


def test_a_death_at_any_call_and_a_second_run_give_the_same_end():
    expected, calls = undisturbed()
    assert calls > 150
    for at in range(1, calls + 1):
        it = Shifting()
        with pytest.raises(Death):
            promote(it.world.ports("run-1", Faults(at)), NEW)
        percent = it.weights()[1]
        assert percent in (0, *NEW.traffic.steps_percent)
        # The next run comes when the lease has long run out: minutes later, or at once.
        it.world.clock.sleep((at % 3) * 200.0)
        seen = it.watch_weights()
        promote(it.world.ports("run-2"), NEW)
        assert end_state(it) == expected, f"after a death at call {at} (weight {percent})"
        assert seen == sorted(seen), f"after a death at call {at}"
        assert it.state.phase != SHIFTING


def test_deaths_one_after_another_give_the_same_end():
    expected, _ = undisturbed()
    it = Shifting()
    for number in range(60):
        try:
            promote(it.world.ports(f"run-{number}", Faults(40 * number + 1)), NEW)
            break
        except Death:
            it.world.clock.sleep(20.0)
    else:
        pytest.fail("never done")
    assert end_state(it) == expected


def test_a_death_anywhere_in_an_abort_leaves_users_on_a_set_that_answers():
    def failing():
        it = Shifting()
        it.at_weight(50, lambda: setattr(it.new_set, "garbage", True))
        return it

    it, faults = failing(), Faults(10**9)
    with pytest.raises(RevertedError):
        it.shift("run-1", faults)
    for at in range(60, faults.calls + 1, 2):
        it = failing()
        with pytest.raises(Death):
            it.shift("run-1", Faults(at))
        it.new_set.garbage = True
        it.world.clock.sleep(60.0)
        with pytest.raises((RevertedError, GateError)):
            it.shift("run-2")
        assert it.weights() == (100, 0)


def test_promoting_the_stable_release_does_not_hide_that_another_has_users(it):
    it.die_at(10, "run-dead")
    before = it.weights()
    with pytest.raises(ConflictError) as caught:
        shift(it.world.ports("run-other"), it.old)
    assert caught.value.code == "K2-CON-006"
    assert NEW.id in caught.value.hint
    assert it.weights() == before
