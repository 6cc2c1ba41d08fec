"""The injection `apiserver-killed`: three outages, each in the middle of its step, and a missed one is no success."""

from __future__ import annotations

import pytest

from flows.console.outages import Outages
from tasks.core.ledger import FINISHED, STARTED, Record
from tasks.steps.journal import append
from tests.fakes.shifting_world import NEW, Shifting


class Site:
    def __init__(self) -> None:
        self.away: list[float] = []

    def lose_api(self, away_s: float) -> None:
        self.away.append(away_s)


class It:
    def __init__(self) -> None:
        self.shifting = Shifting()
        self.world = self.shifting.world
        self.world.store.objects = {k: v for k, v in self.world.store.objects.items() if not k.startswith("ledger/")}
        self.site = Site()
        self.outages = Outages(self.site, NEW.id, away_s=60.0)

    def record(self, step: str, event: str) -> None:
        append(self.world.store, Record(NEW.id, step, event, "run-1", self.world.clock.at))

    def look(self) -> bool:
        return self.outages.look(self.world.ports())

    def stage_pod(self) -> None:
        labels = {"k2-release.io/role": "stage"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "stage-x", "labels": labels}, "spec": {}}
        self.world.cluster.create(pod)
        self.world.cluster.set_status("Pod", "stage-x", {"phase": "Running"})


@pytest.fixture
def it(capsys):
    return It()


def test_each_outage_comes_in_the_middle_of_its_step(it):
    assert not it.look()
    it.record("stage", STARTED)
    assert not it.look()
    assert it.site.away == []  # no stage Job runs yet
    it.stage_pod()
    assert not it.look()
    assert it.site.away == [60.0]
    it.record("stage", FINISHED)
    it.record("rollout", STARTED)
    assert not it.look()
    assert len(it.site.away) == 2
    it.record("rollout", FINISHED)
    it.record("shift", STARTED)
    assert not it.look()
    assert len(it.site.away) == 2  # nobody is on the candidate yet
    it.shifting.die_at(10, "run-1")
    assert it.look()
    assert it.site.away == [60.0] * 3
    assert it.look()
    assert it.outages.missed == []


def test_a_step_that_was_too_fast_is_said_and_is_no_success(it, capsys):
    it.record("stage", STARTED)
    it.record("stage", FINISHED)
    assert not it.look()
    assert "stage ended" in capsys.readouterr().err
    it.record("rollout", STARTED)
    it.look()
    it.shifting.die_at(10, "run-1")
    for _ in range(3):
        it.record("shift", STARTED)
        assert not it.look()
    assert len(it.site.away) == 2
    assert it.outages.missed == ["stage"]
