"""A shift that was cut off, under a real Prefect server: whatever happens next, users are not left on its candidate."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.promote import promote
from flows.release import release as release_flow
from tasks import progress
from tasks.core.errors import RevertedError
from tasks.core.ledger import FAILED, Record
from tasks.order import END
from tasks.steps.documents import get_live
from tasks.steps.journal import append, records
from tests.fakes.pipeline import shift
from tests.fakes.site_files import write_release
from tests.fakes.small_world import Death, Faults, World, release

OLD, NEW = release("k2-old-1"), release("k2-new-1", args={"decode-log-interval": 7})


@pytest.fixture
def cut_off(site: World, tmp_path: Path) -> World:
    """The old release is live, and the process that shifted to the new one was killed at half of the traffic."""
    for what in (OLD, NEW):
        write_release(tmp_path, what)
        release_flow(what.id)
        if what is OLD:
            promote(what.id, "ann")
    subject, faults = site.subject(NEW), Faults(10**9)

    def kill(now: float) -> None:
        if site.live_weights().get(subject.router_service) == 50:
            faults.kill()

    site.clock.on_sleep.append(kill)
    with pytest.raises(Death):
        shift(site.ports("killed", faults), subject)
    site.clock.on_sleep.clear()
    return site


def percent(world: World) -> int:
    return world.live_weights()[world.subject(NEW).router_service]


def test_a_gate_that_fails_in_a_second_run_sends_users_back_and_does_not_say_that_no_user_was_touched(
    cut_off: World,
) -> None:
    serving = cut_off.subject(NEW).serving
    cut_off.engine.sets[serving].garbage = True
    pod = cut_off.cluster.list_objects("Pod", {"k2-release.io/serving": serving})[0]
    pod["status"]["containerStatuses"] = [{"restartCount": 1}]
    cut_off.cluster.set_status("Pod", pod["metadata"]["name"], pod["status"])
    with pytest.raises(RevertedError) as caught:
        release_flow(NEW.id)
    assert (caught.value.code, caught.value.exit_code, percent(cut_off)) == ("K2-REV-001", 10, 0)
    end = [record for record in records(cut_off.store, NEW.id) if record.step == END][-1]
    assert end.data["error"]["exit_code"] == 10


def test_no_load_is_run_on_users_whose_candidate_has_new_pods(cut_off: World, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = cut_off.cluster.list_objects("Pod", {"k2-release.io/serving": cut_off.subject(NEW).serving})[0]
    pod["status"]["containerStatuses"] = [{"restartCount": 1}]
    cut_off.cluster.set_status("Pod", pod["metadata"]["name"], pod["status"])
    loads: list[str] = []
    monkeypatch.setattr(cut_off.engine, "run_load", lambda serving, *rest: loads.append(serving))
    with pytest.raises(RevertedError):
        release_flow(NEW.id)
    assert (loads, percent(cut_off)) == ([], 0)


def test_an_approval_that_is_refused_sends_users_back(cut_off: World) -> None:
    append(cut_off.store, Record(NEW.id, "smoke", FAILED, "run", cut_off.clock.now(), {}))
    with pytest.raises(RevertedError):
        promote(NEW.id, "ann")
    assert percent(cut_off) == 0


def test_a_second_run_goes_on_although_no_artifact_can_be_published(
    cut_off: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**kwargs: object) -> None:
        raise ConnectionError

    monkeypatch.setattr(progress, "create_table_artifact", refuse)
    monkeypatch.setattr(progress, "create_markdown_artifact", refuse)
    assert release_flow(NEW.id)["outcome"] == "gated"
    assert promote(NEW.id, "ann")["outcome"] == "promoted"
    assert get_live(cut_off.store)[0]["release"] == NEW.id  # type: ignore[index]
