"""The machine with its real node, started once for all tests of the tier, and what is said about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from infra.rehearsal.checkpoint import write_checkpoint
from infra.rehearsal.hub import publish
from tasks import wiring
from tasks.core.spec import Images
from tasks.steps.acceptance import lock_step
from tasks.steps.context import Ports, Subject
from tests.fakes.checkpoints import REPO
from tests.fakes.small_world import IMAGES, RecordingProgress, release
from tests.kubelet import machine as tier
from tests.kubelet.machine import Machine, Outcome

_OUTCOME = pytest.StashKey[Outcome]()
Wait = Callable[[str, Callable[[], Any]], Any]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_OUTCOME] = Outcome()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Say what comes before anything is changed."""
    if session.items and not session.config.option.collectonly:
        session.config.pluginmanager.getplugin("terminalreporter").write_line(tier.ANNOUNCEMENT)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    outcome = config.stash[_OUTCOME]
    if outcome.differences is None:
        return
    terminalreporter.section("put back")
    for line in outcome.lines:
        terminalreporter.line(line)
    for line in outcome.differences or ["nothing differs from before"]:
        terminalreporter.line(f"after: {line}")


@dataclass
class Running:
    """The machine, and its end, which may be asked for by the last test and comes by itself otherwise."""

    machine: Machine
    outcome: Outcome
    stack: ExitStack = field(repr=False)

    def stop(self) -> Outcome:
        self.stack.close()
        return self.outcome


def wait_for(what: str, condition: Callable[[], Any], within_s: float = 90) -> Any:
    """Return what a condition returns as soon as that is true."""
    deadline_s = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{what}: not within {within_s:g} s")
        time.sleep(0.1)
    return found


@pytest.fixture(scope="session")
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    capture, outcome = request.config.pluginmanager.getplugin("capturemanager"), request.config.stash[_OUTCOME]

    def say(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(line, flush=True)

    with ExitStack() as stack:
        yield Running(stack.enter_context(tier.running(say, outcome, wait_for)), outcome, stack)
        outcome.keep_logs = request.session.testsfailed > 0
    assert outcome.differences == []


@pytest.fixture(scope="session")
def machine(running: Running) -> Machine:
    return running.machine


@pytest.fixture
def ports(machine: Machine) -> Ports:
    """The product's own adapters, with the rights of the pipeline and no others."""
    return wiring.connect(str(machine.site_path), "test", RecordingProgress())  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def subjects(machine: Machine) -> tuple[Subject, Subject]:
    """Two releases of two revisions: eight shards of 4 MB each, and the small files of Kimi K2."""
    ports = wiring.connect(str(machine.site_path), "test", RecordingProgress())  # type: ignore[arg-type]
    images = Images(IMAGES.engine, IMAGES.router, machine.image.tool)
    made = []
    for seed in (1, 2):
        checkpoint = write_checkpoint(machine.directory / f"checkpoint-{seed}", seed, shard_scale=64, layers=8)
        revision = publish(machine.directory / "hub", REPO, checkpoint.directory)
        small = release(f"k2-kubelet-{seed}", revision=revision, images=images)
        small = replace(small, profile=replace(small.profile, host_memory_gib=1, shm_gib=1))
        made.append(Subject(small, lock_step(ports, REPO, revision)[0]))
    return made[0], made[1]
