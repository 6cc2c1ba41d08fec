"""One Prefect server for all orchestration tests, and a site in memory behind the flows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prefect.testing.utilities import prefect_test_harness

from tasks import wiring
from tasks.ports import Progress
from tasks.steps.context import Ports
from tests.fakes.site_files import write_site
from tests.fakes.small_world import World


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture
def site(prefect_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """The world that every task reaches through `tasks.wiring.connect`; its progress is the real one of a run."""
    path = write_site(tmp_path)
    world = World(releases_dir=str(tmp_path / "releases"))

    def connect(path: str, run: str, progress: Progress, model: str = "", access: object = None) -> Ports:
        return replace(world.ports(run), progress=progress)

    monkeypatch.setattr(wiring, "connect", connect)
    monkeypatch.setenv("K2_SITE", str(path))
    return world
