"""What stands around the steps of a flow: no failure of any of them leaves users on an unwatched candidate."""

from dataclasses import replace

import pytest

from tasks import traffic, wiring
from tasks.core.errors import ConflictError, GateError, RevertedError, UnavailableError
from tasks.order import Order
from tasks.steps.journal import records
from tests.fakes.shifting_world import NEW, Shifting, holding_of


@pytest.fixture
def it(monkeypatch):
    it = Shifting()
    monkeypatch.setattr(wiring, "connect", lambda path, run, progress, model="", access=None: it.world.ports(run))
    monkeypatch.setattr(traffic, "read_release", lambda order: NEW)
    monkeypatch.setattr("tasks.order.read_release", lambda order: NEW)
    return it


ORDER = Order(NEW.id, "site.yaml", "run-2")
FAILED = GateError("K2-GAT-001", "Gate smoke: fail.")


def step(error):
    with traffic.no_unwatched_candidate(ORDER):
        raise error


def cut_off(it, percent=50):
    it.die_at(percent, "first")
    it.world.clock.on_sleep.clear()


def test_a_step_that_fails_while_the_candidate_has_users_sends_them_back(it):
    cut_off(it)
    with pytest.raises(RevertedError) as caught:
        step(FAILED)
    assert (caught.value.code, caught.value.exit_code) == ("K2-REV-001", 10)
    assert "Gate smoke" in caught.value.got
    assert it.weights() == (100, 0)
    last = records(it.world.store, NEW.id)[-1]
    assert (last.step, last.event, last.data["error"]["code"]) == ("shift", "failed", "K2-REV-001")


@pytest.mark.parametrize("error", [FAILED, ValueError(), KeyboardInterrupt()])
def test_a_step_that_fails_before_any_user_stays_what_it_is_and_is_not_recorded(it, error):
    before = len(records(it.world.store, NEW.id))
    with pytest.raises(type(error)):
        step(error)
    assert len(records(it.world.store, NEW.id)) == before
    assert it.weights() == (100, 0)


def test_a_cancelled_flow_sends_users_back_and_stays_cancelled(it):
    cut_off(it)
    with pytest.raises(KeyboardInterrupt):
        step(KeyboardInterrupt())
    assert it.weights() == (100, 0)


def test_a_ledger_that_does_not_answer_does_not_keep_users_there(it):
    cut_off(it)

    def down(*args, **kwargs):
        raise UnavailableError("K2-UNA-001", "No.")

    it.world.store.put = down
    with pytest.raises(RevertedError):
        step(FAILED)
    assert it.weights() == (100, 0)


def test_a_holder_that_is_alive_watches_and_is_left_alone(it):
    cut_off(it)
    holder = holding_of(it.world, "alive", force=True)
    it.world.clock.on_sleep.append(lambda now: holder.renew())
    with pytest.raises(GateError):
        step(FAILED)
    assert it.weights() == (50, 50)


@pytest.mark.parametrize("error", [ConflictError("K2-CON-003", "A hand."), RevertedError("K2-REV-002", "Holds.")])
def test_what_somebody_else_owns_or_was_decided_already_is_not_touched(it, error):
    cut_off(it)
    with pytest.raises(type(error)):
        step(error)
    assert it.weights() == (50, 50)


def test_a_load_on_users_is_refused_and_sends_them_back(it):
    cut_off(it)
    pod = it.world.cluster.list_objects("Pod", {"k2-release.io/serving": it.new.serving})[0]
    it.world.cluster.delete("Pod", pod["metadata"]["name"])
    with pytest.raises(RevertedError), traffic.no_unwatched_candidate(ORDER):
        traffic.check_no_users(ORDER, it.new.lock.digest)
    assert it.weights() == (100, 0)


def test_a_release_that_was_edited_meanwhile_is_the_same_release(it, monkeypatch):
    cut_off(it)
    edited = replace(NEW, images=replace(NEW.images, engine="other@sha256:" + "9" * 64))
    monkeypatch.setattr(traffic, "read_release", lambda order: edited)
    with pytest.raises(RevertedError):
        step(FAILED)
    assert it.weights() == (100, 0)


@pytest.mark.parametrize("error", [FAILED, KeyboardInterrupt()])
def test_an_api_that_is_away_does_not_hide_what_failed_first(it, monkeypatch, error):
    cut_off(it)

    def away(order, patience_s):
        assert patience_s == (60.0 if isinstance(error, Exception) else 15.0)
        raise UnavailableError("K2-UNA-001", "The Kubernetes API has not answered for 60 s.")

    said = []
    monkeypatch.setattr(traffic, "connect", away)
    monkeypatch.setattr(traffic, "get_run_logger", lambda: Logger(said))
    with pytest.raises(type(error)) as caught:
        step(error)
    assert caught.value is error
    assert said == [
        f"shift: not looked whether {NEW.id} has users: K2-UNA-001 The Kubernetes API has not answered for 60 s."
    ]


class Logger:
    def __init__(self, said):
        self._said = said

    def error(self, text):
        self._said.append(text)


@pytest.mark.parametrize("unforeseen", [UnavailableError("K2-UNA-001", "No."), KeyError("hf_secret")])
def test_looking_for_users_does_not_hide_why_the_step_failed(it, monkeypatch, unforeseen):
    cut_off(it)
    said = []

    def broken(ports, release):
        raise unforeseen

    monkeypatch.setattr(traffic, "has_users", broken)
    monkeypatch.setattr(traffic, "get_run_logger", lambda: Logger(said))
    with pytest.raises(GateError):
        step(FAILED)
    assert NEW.id in said[0]
    assert "hf_secret" not in said[0]
