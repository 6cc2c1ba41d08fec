"""What the contract suites share: the table of ports, and one real object store for all that need one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.rehearsal import objectstore
from infra.rehearsal.processes import Supervisor
from tests.contract.port_table import PortTable


def pytest_configure(config: pytest.Config) -> None:
    """Have the cases of this directory counted by port."""
    config.pluginmanager.register(PortTable(Path(__file__).parent, config.rootpath), "port-table")


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[objectstore.ObjectStore]:
    """A real S3 server."""
    with Supervisor(tmp_path_factory.mktemp("seaweedfs")) as supervisor:
        yield objectstore.start(supervisor)
