"""The injection `apiserver-killed`: three outages, each in the middle of its step, and a missed one is no success."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace

import pytest

from flows.console.injecting import Injector
from flows.console.outages import API_KILLED, Outages
from flows.console.rehearsal import Programme, Rehearsal
from flows.console.rehearsal_result import Outcome
from infra.rehearsal.processes import ProcessSpec, SiteError
from infra.rehearsal.site import RehearsalSite, SiteOptions
from tasks.core.errors import ExitCode, K2Error
from tasks.core.ledger import FINISHED, STARTED, Record
from tasks.steps.journal import append
from tests.fakes.shifting_world import NEW, Shifting


class Site:
    """A site whose API server comes back, stays away until it is told to come back, or fails to start."""

    def __init__(self) -> None:
        self.away: list[float] = []
        self.injected: list[str] = []
        self.lost, self.slowed = threading.Event(), threading.Event()
        self.waits = False
        self.error: Exception | None = None

    def lose_api(self, away_s: float, stop: threading.Event) -> bool:
        self.away.append(away_s)
        self.lost.set()
        if self.error:
            raise self.error
        return not (self.waits and stop.wait(away_s))

    def inject(self, name: str, parameters: object) -> None:
        self.injected.append(name)
        self.slowed.set()


class It:
    def __init__(self) -> None:
        self.shifting = Shifting()
        self.world = self.shifting.world
        self.world.store.objects = {k: v for k, v in self.world.store.objects.items() if not k.startswith("ledger/")}
        self.site = Site()
        self.outages = Outages(self.site, NEW.id, threading.Event(), away_s=60.0)

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


BROKEN = SiteError("kube-apiserver was not ready within 120 s")


def injector(it, *names):
    return Injector(it.site, list(names), it.world.ports, NEW.id)


def in_staging(it):
    it.record("stage", STARTED)
    it.stage_pod()


def test_an_injection_that_fails_is_named_at_the_end_and_the_others_go_on(it):
    in_staging(it)
    it.site.error = BROKEN
    with pytest.raises(K2Error) as caught, injector(it, API_KILLED, "gate-miss"):
        assert it.site.lost.wait(10)
        assert it.site.slowed.wait(10)  # the candidate's groups are there: gate-miss has its moment after the failure
    assert caught.value.exit_code == ExitCode.UNEXPECTED
    assert f"--inject {API_KILLED}" in caught.value.as_text()
    assert str(BROKEN) in caught.value.as_text()
    assert it.site.away == [60.0]  # not tried again


def test_an_injector_without_a_cluster_says_so(it):
    def ports():
        raise OSError("no such kubeconfig")

    watching = Injector(it.site, ["gate-miss"], ports, NEW.id)
    with pytest.raises(K2Error, match="no such kubeconfig"), watching:
        watching._thread.join(10)


def test_a_rehearsal_whose_injection_fails_is_not_said_to_have_missed_its_moment(it, capsys):
    in_staging(it)
    it.site.error = BROKEN

    class Rehearsed(Rehearsal):
        def injecting(self):
            return injector(it, API_KILLED)

        def _run(self, name, release_id, **more):
            assert it.site.lost.wait(10)
            return {"outcome": "live"}

    args = SimpleNamespace(first=False, inject=[API_KILLED])
    rehearsal = Rehearsed(SimpleNamespace(), args, Programme("old", NEW.id))
    with pytest.raises(K2Error, match="not ready within 120 s"):
        rehearsal._release(Outcome(NEW.id))
    assert "did not come" not in capsys.readouterr().err


def test_breaking_a_rehearsal_off_ends_an_outage_at_once_and_stays_what_it_is(it):
    in_staging(it)
    it.site.waits = True
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), injector(it, API_KILLED) as broken_off:
        assert it.site.lost.wait(10)
        raise KeyboardInterrupt
    assert time.monotonic() - began < 20
    assert not broken_off._thread.is_alive()
    assert broken_off.missed == [API_KILLED]


def test_an_interruption_goes_before_a_failed_injection(it):
    in_staging(it)
    it.site.error = BROKEN
    with pytest.raises(KeyboardInterrupt), injector(it, API_KILLED):
        assert it.site.lost.wait(10)
        raise KeyboardInterrupt


def test_an_outage_that_the_end_of_the_release_cut_short_is_no_success(it):
    in_staging(it)
    stopped = threading.Event()
    stopped.set()
    it.site.waits = True
    outages = Outages(it.site, NEW.id, stopped)
    assert not outages.look(it.world.ports())
    assert outages.missed == ["stage"]


def test_the_api_server_is_started_again_as_soon_as_the_outage_is_called_off(tmp_path):
    with RehearsalSite(SiteOptions(tmp_path, nodes=1, seed=1, keep=False), print) as site:
        names = ("etcd", "kube-apiserver")
        for name in names:
            site.supervisor.start(ProcessSpec(name, (sys.executable, "-c", "import time; time.sleep(60)")))
        before = [site.supervisor.child(name).pid for name in names]
        stop = threading.Event()
        assert site.lose_api(0.01, stop)
        stop.set()
        began = time.monotonic()
        assert not site.lose_api(60, stop)
        assert time.monotonic() - began < 30
        assert not set(before) & {site.supervisor.child(name).pid for name in names}
        site.supervisor.check()
