"""Step shift while the Kubernetes API is away: waited out, never written blindly, and ended when it must end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tasks.core.errors import After, Never, RevertedError, UnavailableError
from tasks.core.lease import LEASE, read_lease
from tasks.core.route import LIVE_ROUTE
from tasks.steps.holder import holding
from tasks.steps.patience import PatientCluster
from tasks.steps.promotion import promote_step
from tests.fakes.away import AwayCluster
from tests.fakes.pipeline import shift
from tests.fakes.shifting_world import NEW, Shifting


@pytest.fixture
def it():
    return Shifting()


def patient(world, run, away):
    """Return ports whose API is away while `away` says so, as flows have them."""

    ports = world.ports(run)
    return replace(ports, cluster=PatientCluster(AwayCluster(world.cluster, away), world.clock, world.progress.say))


def outage_at(it, percent, seconds, after_s=0.0):
    """Return whether the API is away now: for so long, from a moment after the candidate first has this weight."""
    began = []

    def away():
        if not began and it.weights()[1] >= percent:
            began.append(it.world.clock.at + after_s)
        return bool(began) and began[0] <= it.world.clock.at < began[0] + seconds

    return away


def reverts_what_turns_bad(it, away):
    """Shift with a candidate that becomes bad while nobody can write, and see it reverted."""

    def turn(now):
        if away():
            it.new_set.garbage = True

    it.world.clock.on_sleep.append(turn)
    with pytest.raises(RevertedError) as caught:
        shift(patient(it.world, "run-1", away), it.new)
    assert caught.value.code == "K2-REV-001"


@pytest.mark.parametrize("percent", [10, 50, 100])
def test_an_outage_of_the_api_in_mid_shift_is_waited_out(it, percent):
    seen, before = it.watch_weights(), read_lease(it.world.cluster.get("Lease", LEASE)).generation
    data = shift(patient(it.world, "run-1", outage_at(it, percent, 60)), it.new)
    assert seen == [0, 10, 50, 100]
    assert [row["why"] for row in data["history"]] == ["step"] * 3
    assert any("bakes anew" in line and "Nobody answers." in line for line in it.world.progress.lines)
    assert read_lease(it.world.cluster.get("Lease", LEASE)).generation == before + 1
    assert any("answers again after" in line for line in it.world.progress.lines)


def test_after_an_outage_no_step_is_taken_on_what_was_seen_before_it(it):
    seen, away = it.watch_weights(), outage_at(it, 10, 60)

    reverts_what_turns_bad(it, away)
    assert seen == [0, 10, 0]


def test_a_bake_begins_anew_after_an_outage(it):
    at = {}

    def note(verb, obj):
        if obj["metadata"]["name"] == LIVE_ROUTE:
            at.setdefault(it.weights()[1], it.world.clock.at)

    it.world.cluster.controllers.append(note)
    shift(patient(it.world, "run-1", outage_at(it, 10, 60, after_s=NEW.traffic.bake_s / 2)), it.new)
    assert at[50] - at[10] >= 60 + 1.5 * NEW.traffic.bake_s


def outage_at_write(it, percent, seconds, *, written=False):
    """Return whether the API is away: from the moment that this weight is about to be written, or just was."""
    began = []

    def away():
        return bool(began) and it.world.clock.at < began[0] + seconds

    real = it.world.cluster.replace

    def replace_route(obj):
        backends = obj["spec"]["rules"][0]["backendRefs"] if obj["kind"] == "HTTPRoute" else []
        if not began and any(b["weight"] == percent and b["name"] == it.new.router_service for b in backends):
            began.append(it.world.clock.at)
            if written:
                real(obj)
            raise UnavailableError("K2-UNA-001", "Cut.", where="route", retry=After(1.0))
        return real(obj)

    it.world.cluster.replace = replace_route
    return away


def test_a_step_that_an_outage_met_is_not_taken_after_it_on_what_was_seen_before(it):
    seen, away = it.watch_weights(), outage_at_write(it, 50, 60)

    reverts_what_turns_bad(it, away)
    assert seen == [0, 10, 0]


def test_a_step_that_an_outage_met_is_taken_after_a_new_bake_if_all_is_well(it):
    seen = it.watch_weights()
    shift(patient(it.world, "run-1", outage_at_write(it, 50, 60)), it.new)
    assert seen == [0, 10, 50, 100]


def test_an_api_that_stays_away_ends_the_shift_in_its_patience_and_once(it):
    began = it.world.clock.at
    with pytest.raises(RevertedError) as caught:
        shift(patient(it.world, "run-1", outage_at(it, 10, 1e9)), it.new)
    assert caught.value.code == "K2-REV-002"
    assert it.world.clock.at - began < 720


def test_a_cancelled_shift_does_not_wait_for_an_api_that_is_away(it):
    ports = patient(it.world, "run-1", outage_at(it, 10, 1e9))
    state = {}

    def cancel(now):
        if it.weights()[1] >= 10:
            state.setdefault("at", now)
            if now > state["at"] + 60:
                raise KeyboardInterrupt

    it.world.clock.on_sleep.append(cancel)
    with pytest.raises(KeyboardInterrupt):
        try:
            shift(ports, it.new)
        finally:
            it.world.clock.on_sleep.clear()
    assert it.world.clock.at - state["at"] < 120


def test_a_right_that_is_taken_away_in_mid_shift_ends_it_and_is_no_outage(it):
    real, began = it.world.cluster.replace, it.world.clock.at

    def refuse(obj):
        if obj["kind"] == "Lease" and it.weights()[1] >= 10:
            raise UnavailableError("K2-UNA-001", "Refused.", where="lease", retry=Never())
        return real(obj)

    it.world.cluster.replace = refuse
    with pytest.raises(RevertedError) as caught:
        it.shift()
    assert (caught.value.code, "Refused." in str(caught.value.summary)) == ("K2-REV-002", True)
    assert it.world.clock.at - began < 120


def test_an_api_that_goes_away_again_as_it_comes_back_reverts_nothing(it):
    seen, began = it.watch_weights(), []

    def away():
        if not began and it.weights()[1] >= 10:
            began.append(it.world.clock.at)
        now = it.world.clock.at - began[0] if began else -1.0
        if 60 <= now < 61 and len(began) == 1:
            began.append(it.world.clock.at)  # one call is answered, and the next ones are not
            return False
        return 0 <= now < 90

    shift(patient(it.world, "run-1", away), it.new)
    assert seen == [0, 10, 50, 100]


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("seconds", [8, 60])
def test_an_outage_that_begins_with_the_write_to_safety_leaves_nobody_on_the_bad_candidate(it, seconds, written):
    seen, away = it.watch_weights(), outage_at_write(it, 0, seconds, written=written)
    it.at_weight(50, lambda: setattr(it.new_set, "garbage", True))
    with pytest.raises(RevertedError) as caught:
        shift(patient(it.world, "run-1", away), it.new)
    assert (seen, it.weights()) == ([0, 10, 50, 0], (100, 0))
    assert caught.value.code == "K2-REV-001"
    assert caught.value.details["history"][-1]["candidate_percent"] == 0


def test_after_an_outage_of_the_write_to_safety_it_is_decided_anew_where_that_is(it):
    away = outage_at_write(it, 0, 60)
    it.at_weight(50, lambda: setattr(it.new_set, "garbage", True))

    def turn(now):
        if away():
            it.new_set.garbage, it.old_set.status = False, 503

    it.world.clock.on_sleep.append(turn)
    with pytest.raises(RevertedError) as caught:
        shift(patient(it.world, "run-1", away), it.new)
    assert (caught.value.code, it.weights()) == ("K2-REV-002", (0, 100))


@pytest.mark.parametrize("seconds", [2, 60])
def test_an_outage_that_begins_in_a_promotion_ends_no_release(it, seconds):
    shift(it.world.ports("run-1"), it.new)
    began, real = [], it.world.cluster.get

    def get(kind, name):
        if began and kind == "Lease" and len(began) == 1:
            began.append(it.world.clock.at)  # the route has been read, and the Lease is renewed before it is written
        return real(kind, name)

    def away():
        return len(began) == 2 and it.world.clock.at < began[1] + seconds

    ports = patient(it.world, "run-1", away)

    def act(holder):
        began.append(it.world.clock.at)
        it.world.cluster.get = get
        return promote_step(ports, it.new, holder, "ann")

    real_lease = it.world.cluster.replace

    def replace_lease(obj):
        if away():
            raise UnavailableError("K2-UNA-001", "Nobody answers.", where="lease", retry=After(1.0))
        return real_lease(obj)

    it.world.cluster.replace = replace_lease
    assert holding(ports, act)["live"] == NEW.id
    assert it.state.stable.release == NEW.id
