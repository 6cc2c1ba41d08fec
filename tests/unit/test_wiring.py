"""Which cluster is meant: a site that was named wrongly is never replaced by another one."""

from __future__ import annotations

import pytest

from tasks import wiring
from tasks.core.errors import InputError


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """A kept rehearsal site that must not be taken in place of a named one."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("K2_SITE", raising=False)
    path = tmp_path / "k2-release" / "rehearsal" / "site.yaml"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_the_kept_site_is_taken_when_none_is_named(kept):
    assert wiring.site_path("") == str(kept)


def test_the_one_given_goes_before_the_variable(tmp_path, monkeypatch):
    given, variable = tmp_path / "given.yaml", tmp_path / "variable.yaml"
    given.touch()
    variable.touch()
    monkeypatch.setenv("K2_SITE", str(variable))
    assert wiring.site_path(str(given)) == str(given)
    assert wiring.site_path("") == str(variable)


@pytest.mark.parametrize("source", ["--site", "K2_SITE"])
def test_one_that_does_not_exist_is_an_error_and_no_other_is_used(source, monkeypatch):
    if source == "K2_SITE":
        monkeypatch.setenv("K2_SITE", "/nope/site.yaml")
    with pytest.raises(InputError) as caught:
        wiring.site_path("/nope/site.yaml" if source == "--site" else "")
    assert (caught.value.where, caught.value.got) == (source, "/nope/site.yaml")


def test_flows_wait_for_an_api_that_is_away_and_the_command_line_does_not(monkeypatch):
    from tasks.order import Order, connect
    from tasks.steps.patience import PatientCluster
    from tests.fakes.small_world import World, release

    world = World()
    monkeypatch.setattr(wiring, "connect", lambda *given, **more: world.ports())
    monkeypatch.setattr("tasks.order.read_release", lambda order: release())
    assert isinstance(connect(Order("k2-new-1", "/site.yaml", "run-1")).cluster, PatientCluster)
    assert wiring.connect("/site.yaml", "run-1", world.progress).cluster is world.cluster
