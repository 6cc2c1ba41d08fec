"""Abort-first (I4) whatever ends a shift: no candidate is left with users that nobody watches."""

import threading
from dataclasses import replace

import pytest

from tasks.core.errors import ConflictError, GateError, K2Error, RevertedError, UnavailableError
from tasks.core.lease import LEASE, read_lease
from tasks.core.route import HELD, LIVE_ROUTE, REVERTED, SHIFTING, Backend, to_annotations
from tasks.core.spec import TrafficPlan
from tasks.steps.aborting import abort_if_serving, check_load, has_users
from tasks.steps.holder import holding
from tasks.steps.journal import states
from tasks.steps.probing import abort_timeout_s, probe_both, probe_set, probe_timeout_s
from tests.fakes.pipeline import bring_up, promote, shift
from tests.fakes.shifting_world import NEW, OLD, Shifting, edit_weights, holding_of
from tests.fakes.small_world import site

DOWN = UnavailableError("K2-UNA-001", "No.")


@pytest.fixture
def it():
    return Shifting()


def once(it, percent, error):
    """Let the next call of the gateway's statistics raise, once the candidate has this weight."""
    left = [error]
    real = it.world.stats.counts

    def counts(backend):
        if left and it.weights()[1] >= percent:
            raise left.pop()
        return real(backend)

    it.world.stats.counts = counts


# --- whatever ends a shift, users are sent back first


@pytest.mark.parametrize(
    "error",
    [
        ValueError("https://user:hf_secret@hub"),
        KeyError("x"),
        K2Error("K2-UNX-001", "What?"),
        GateError("K2-GAT-001", "No."),
    ],
)
@pytest.mark.parametrize("percent", [10, 50, 100])
def test_any_error_in_the_middle_of_a_shift_sends_everybody_back(it, error, percent):
    once(it, percent, error)
    seen = it.watch_weights()
    with pytest.raises(RevertedError) as caught:
        it.shift()
    assert caught.value.code == "K2-REV-001"
    assert (seen[-2:], it.weights(), it.state.phase) == ([percent, 0], (100, 0), REVERTED)
    assert caught.value.details["proved"] == {it.old.serving: 10}
    assert caught.value.details["history"][-1]["candidate_percent"] == 0
    assert (error.code if isinstance(error, K2Error) else type(error).__name__) in caught.value.got
    assert "hf_secret" not in str(caught.value.as_data())


class Cancelled(BaseException):
    """What a signal raises in whatever is running."""


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Cancelled()])
def test_a_cancelled_shift_sends_everybody_back_and_stays_cancelled(it, error):
    once(it, 50, error)
    with pytest.raises(type(error)):
        it.shift()
    assert it.weights() == (100, 0)
    assert type(error).__name__ in it.state.reason


def test_a_second_cancel_in_the_middle_of_an_abort_is_obeyed(it):
    once(it, 50, KeyboardInterrupt())

    def again(serving):
        if it.weights()[1] == 50 and serving == it.old.serving:
            raise KeyboardInterrupt

    it.world.engine.on_ask = again
    with pytest.raises(KeyboardInterrupt):
        it.shift()


@pytest.mark.parametrize("code", ["K2-CON-001", "K2-CON-002", "K2-CON-003"])
def test_what_somebody_else_owns_is_not_written_by_an_abort(it, code):
    once(it, 50, ConflictError(code, "Theirs."))
    with pytest.raises(ConflictError):
        it.shift()
    assert it.weights() == (50, 50)


def test_an_error_before_any_user_stays_what_it_is(it):
    once(it, 0, ValueError())
    with pytest.raises(K2Error) as caught:
        it.shift()
    assert caught.value.code == "K2-UNX-001"
    assert it.weights() == (100, 0)


def test_an_error_of_a_resumed_shift_sends_back_whom_the_dead_one_left(it):
    it.die_at(50, "first")
    it.world.clock.on_sleep.clear()
    once(it, 50, ValueError())
    with pytest.raises(RevertedError):
        it.shift("second")
    assert it.weights() == (100, 0)


def test_an_api_that_is_gone_for_good_is_said_with_what_the_candidate_may_have(it):
    real = it.world.cluster.get

    def gone(kind, name):
        if it.weights()[1] == 50 and kind in ("Lease", "HTTPRoute"):
            raise DOWN
        return real(kind, name)

    it.at_weight(50, lambda: setattr(it.world.cluster, "get", gone))
    with pytest.raises(RevertedError) as caught:
        it.shift()
    assert (caught.value.code, caught.value.exit_code) == ("K2-REV-002", 10)
    assert "50%" in caught.value.summary
    assert [row["candidate_percent"] for row in caught.value.details["history"]] == [10, 50]


# --- short outages


@pytest.mark.parametrize("verb", ["get", "replace"])
def test_an_api_that_is_away_for_a_few_seconds_stops_nothing(it, verb):
    real = getattr(it.world.cluster, verb)
    until = []

    def flaky(*args):
        if until and it.world.clock.at < until[0]:
            raise DOWN
        return real(*args)

    it.at_weight(10, lambda: until.append(it.world.clock.at + 4.0))
    setattr(it.world.cluster, verb, flaky)
    it.shift()
    assert it.weights() == (0, 100)


def test_a_write_whose_answer_was_lost_is_found_on_the_route(it):
    real, lost = it.world.cluster.replace, []

    def replace_and_lose(obj):
        done = real(obj)
        if obj["kind"] == "HTTPRoute" and not lost:
            lost.append(1)
            raise DOWN
        return done

    it.world.cluster.replace = replace_and_lose
    seen = it.watch_weights()
    assert [row["candidate_percent"] for row in it.shift()["history"]] == [10, 50, 100]
    assert seen == [0, 10, 50, 100]


def test_a_status_that_the_gateway_writes_in_between_is_nobodys_hand(it):
    real, raced = it.world.cluster.replace, []

    def race(obj):
        if obj["kind"] == "HTTPRoute" and it.weights()[1] == 10 and not raced:
            raced.append(1)
            it.world.cluster.set_status(
                "HTTPRoute", LIVE_ROUTE, it.world.cluster.objects["HTTPRoute", LIVE_ROUTE]["status"]
            )
        return real(obj)

    it.world.cluster.replace = race
    it.shift()
    assert raced
    assert it.weights() == (0, 100)


def test_a_hand_between_reading_and_writing_is_a_hand(it):
    real = it.world.cluster.replace

    def race(obj):
        if obj["kind"] == "HTTPRoute" and it.weights()[1] == 10:
            edit_weights(it.world, 30, 70)
        return real(obj)

    it.world.cluster.replace = race
    with pytest.raises(ConflictError):
        it.shift()
    assert it.weights() == (30, 70)


# --- probes


def test_an_answer_of_another_set_is_a_wrong_answer(it):
    it.new_set.served_by = it.old.serving
    probes = probe_set(it.world.ports(), it.new.serving, 2)
    assert all(f"answered by {it.old.serving}" in probe.wrong for probe in probes)
    it.new_set.served_by = ""
    assert not any(probe.wrong for probe in probe_set(it.world.ports(), it.new.serving, 2))


def test_a_candidate_whose_probe_route_is_gone_gets_no_more_users(it):
    it.at_weight(10, lambda: setattr(it.new_set, "served_by", it.old.serving))
    with pytest.raises(RevertedError) as caught:
        it.shift()
    assert "answered by" in caught.value.got
    assert it.weights() == (100, 0)


@pytest.mark.parametrize(
    ("p95_s", "lease_s", "longest_s"),
    [(1.0, 10.0, 2.0), (5.0, 15.0, 5.5), (30.0, 30.0, 15.0), (60.0, 300.0, 30.0), (0.1, 30.0, 2.0)],
)
def test_how_long_a_probe_may_take(p95_s, lease_s, longest_s):
    plan = TrafficPlan((100,), 1.0, 1.0, 1, 0.0, p95_s)
    assert probe_timeout_s(plan, site(lease_duration_s=lease_s)) == pytest.approx(longest_s)


def test_the_lease_is_kept_while_the_candidate_hangs(it):
    age = []
    real = it.world.engine.ask

    def ask(*args, **kwargs):
        answer = real(*args, **kwargs)
        age.append(it.world.clock.at - read_lease(it.world.cluster.objects["Lease", LEASE]).renewed_at)
        return answer

    patient = replace(NEW.traffic, max_error_share=1.0, max_p95_s=20.0)
    subject = replace(it.new, release=replace(NEW, traffic=patient))
    it.at_weight(10, lambda: setattr(it.new_set, "hangs", True))
    it.world.engine.ask = ask
    shift(it.world.ports(), subject)
    assert it.world.site.lease_duration_s / 3 < max(age) < it.world.site.lease_duration_s


def test_an_abort_asks_both_sets_at_once_and_not_longer_than_a_third_of_the_lease(it):
    barrier, timeouts = threading.Barrier(6, timeout=10), []
    real = it.world.engine.ask

    def ask(*args, **kwargs):
        barrier.wait()
        timeouts.append(kwargs["timeout_s"])
        return real(*args, **kwargs)

    it.world.engine.ask = ask
    old, new = (Backend(s.router_service, s.serving, s.release.id) for s in (it.old, it.new))
    stable, candidate = probe_both(it.world.ports(), old, new)
    assert not any(probe.wrong for probe in stable + candidate)
    assert max(timeouts) <= it.world.site.lease_duration_s / 3
    assert abort_timeout_s(site(lease_duration_s=600.0)) < 10


# --- a gateway that does not take the route over


def test_a_step_that_the_gateway_does_not_take_over_is_taken_back(it):
    controllers = list(it.world.cluster.controllers)

    def gateway(verb, obj):
        if obj["kind"] == "HTTPRoute" and it.weights()[1] == 50:
            return
        for control in controllers:
            control(verb, obj)

    it.world.cluster.controllers[:] = [gateway]
    with pytest.raises(RevertedError) as caught:
        it.shift()
    assert caught.value.code == "K2-REV-001"
    assert "did not take over" in caught.value.got
    assert it.weights() == (100, 0)


def test_a_gateway_that_does_not_take_the_revert_over_either_is_said(it):
    it.at_weight(10, lambda: (it.world.cluster.controllers.clear(), setattr(it.new_set, "garbage", True)))
    with pytest.raises(RevertedError) as caught:
        it.shift()
    assert (caught.value.code, caught.value.exit_code) == ("K2-REV-002", 10)
    assert "gateway has not taken that over" in caught.value.summary
    assert [row["candidate_percent"] for row in caught.value.details["history"]] == [10, 0]
    assert caught.value.details["not_taken_over"]["code"] == "K2-UNA-001"
    assert it.weights() == (100, 0)


def test_the_lease_is_kept_while_the_gateway_is_waited_for(it):
    age = []
    it.world.cluster.controllers.clear()
    it.world.clock.on_sleep.append(
        lambda now: age.append(now - read_lease(it.world.cluster.objects["Lease", LEASE]).renewed_at)
    )
    with pytest.raises(RevertedError):
        it.shift()
    assert max(age) < it.world.site.lease_duration_s / 2


# --- hold and forward


def neither_answers(it, percent=50):
    it.at_weight(percent, lambda: [setattr(one, "status", 503) for one in (it.old_set, it.new_set)])
    with pytest.raises(RevertedError) as caught:
        it.shift()
    return caught.value


def test_a_hold_is_written_on_the_route_with_the_weights_as_they_are(it):
    error = neither_answers(it)
    assert error.code == "K2-REV-002"
    assert (it.weights(), it.state.phase) == ((50, 50), HELD)
    assert it.state.reason == error.details["reason"]


def test_a_held_shift_is_not_taken_up_by_automation(it):
    neither_answers(it)
    it.old_set.status = it.new_set.status = 200
    before = it.state
    with pytest.raises(ConflictError) as caught:
        it.shift("run-2")
    assert caught.value.code == "K2-CON-006"
    assert "person must decide" in caught.value.summary
    assert it.state == before


def test_a_person_who_sets_the_phase_lets_a_held_shift_go_on(it):
    neither_answers(it)
    it.old_set.status = it.new_set.status = 200
    going = replace(it.state, phase=SHIFTING)
    it.world.cluster.edit("HTTPRoute", LIVE_ROUTE, lambda o: o["metadata"]["annotations"].update(to_annotations(going)))
    it.world.clock.on_sleep.clear()
    it.shift("run-2")
    assert it.weights() == (0, 100)


def test_a_forward_is_not_said_to_be_a_revert(it):
    it.at_weight(50, lambda: (setattr(it.old_set, "status", 503), setattr(it.new_set, "latency_s", 9.0)))
    with pytest.raises(RevertedError) as caught:
        it.shift()
    assert caught.value.code == "K2-REV-002"
    assert caught.value.summary.startswith("Traffic was sent to the candidate because the stable set does not answer")
    assert "reverted" not in caught.value.summary
    assert caught.value.details["proved"] == {it.new.serving: 10}


# --- another step fails while the candidate has users


def test_a_failed_step_sends_the_users_of_its_release_back(it):
    it.die_at(50, "first")
    it.world.clock.on_sleep.clear()
    ports = it.world.ports("second")
    assert has_users(ports, NEW)
    assert not has_users(ports, OLD)
    with pytest.raises(RevertedError) as caught:
        holding(ports, lambda h: abort_if_serving(ports, NEW, h, GateError("K2-GAT-001", "Gate smoke: fail.")))
    assert (caught.value.code, caught.value.exit_code) == ("K2-REV-001", 10)
    assert "Gate smoke" in caught.value.got
    assert it.weights() == (100, 0)
    assert not has_users(ports, NEW)


def test_a_failed_step_of_a_release_without_users_writes_nothing(it):
    ports = it.world.ports("second")
    writes = len(it.world.cluster.writes)
    done = holding(ports, lambda h: abort_if_serving(ports, NEW, h, ValueError()))
    assert done["outcome"] == "unchanged"
    assert not [w for w in it.world.cluster.writes[writes:] if LIVE_ROUTE in w]


def test_a_failed_step_of_a_held_release_touches_nothing_and_says_that_users_are_there(it):
    neither_answers(it)
    before, ports = it.state, it.world.ports("second")
    with pytest.raises(RevertedError) as caught:
        holding(ports, lambda h: abort_if_serving(ports, NEW, h, GateError("K2-GAT-001", "No.")))
    assert caught.value.code == "K2-REV-002"
    assert it.state == before


def test_no_load_is_run_on_a_set_with_users_unless_its_verdict_still_holds(it):
    ports = it.world.ports("second")
    check_load(ports, it.new)
    it.die_at(50, "first")
    check_load(ports, it.new)
    pod = ports.cluster.list_objects("Pod", {"k2-release.io/serving": it.new.serving})[0]
    it.world.cluster.delete("Pod", pod["metadata"]["name"])
    with pytest.raises(ConflictError) as caught:
        check_load(ports, it.new)
    assert caught.value.code == "K2-CON-006"


# --- a stale order


def test_a_release_that_was_planned_to_move_no_traffic_moves_none(it):
    """Planned as a new policy of the live set; meanwhile another release went live, and this set is the old one."""
    policy = replace(OLD, id="k2-old-2", traffic=replace(OLD.traffic, bake_s=1.0))
    subject = bring_up(it.world.ports("run-p"), policy)
    assert states(it.world.store, policy.id)["plan"].data["plan"]["shifts_traffic"] is False
    promote(it.world.ports("run-new"), NEW)
    before = it.state
    with pytest.raises(ConflictError) as caught:
        shift(it.world.ports("run-p2"), subject)
    assert caught.value.code == "K2-CON-004"
    assert it.state == before


# --- the holder


def test_a_lease_that_cannot_be_read_for_a_moment_is_taken(it):
    real, left = it.world.cluster.get, [DOWN, DOWN]

    def flaky(kind, name):
        if kind == "Lease" and left:
            raise left.pop()
        return real(kind, name)

    it.world.cluster.get = flaky
    assert holding_of(it.world, "run-1").generation > 0


def test_keeping_the_lease_renews_it_when_a_sixth_of_its_time_is_over(it):
    holder = holding_of(it.world, "run-1")
    writes = len(it.world.cluster.writes)
    holder.keep()
    assert len(it.world.cluster.writes) == writes
    it.world.clock.sleep(it.world.site.lease_duration_s / 6)
    holder.keep()
    assert len(it.world.cluster.writes) == writes + 1
