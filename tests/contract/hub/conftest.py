"""Three Hubs with the same files: the fake of other tests, the rehearsal's server, and olah, which is not ours."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.rehearsal.hub import publish
from infra.rehearsal.processes import Supervisor
from tasks.adapters.hub import HfHub
from tasks.ports import Hub
from tests.contract.hub import olah_site
from tests.fakes.memory_hub import MemoryHub

REPO = "moonshotai/Kimi-K2-Instruct"
GATED = "moonshotai/Gated"
SHARD = "model-1-of-2.safetensors"
FILES = {
    SHARD: random.Random(1).randbytes(3_000_000),
    "model-2-of-2.safetensors": b"two",
    "config.json": b'{"architectures": []}',
    "tiktoken.model": b"aGk= 1\n",
    "code/modeling_k2.py": b"pass\n",
    "code/empty.py": b"",
    **{f"extra/{i:02}.txt": b"%d" % i for i in range(30)},
}
TOKEN = "hf_only_for_this_test"


@dataclass(frozen=True)
class HubSite:
    """A running server: where it is, the commit of REPO, and the directory of its faults."""

    url: str
    commit: str
    inject: Path


@dataclass(frozen=True)
class Served:
    """One implementation of the port, and the commit at which it has the files."""

    hub: Hub
    commit: str


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubSite]:
    """The rehearsal's Hub server, with pages of ten entries."""
    directory = tmp_path_factory.mktemp("hub")
    checkpoint = directory / "checkpoint"
    for path, data in FILES.items():
        (checkpoint / path).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / path).write_bytes(data)
    commit = publish(directory / "root", REPO, checkpoint)
    publish(directory / "root", GATED, checkpoint, gated=True)
    inject = directory / "inject"
    inject.mkdir()
    command = [sys.executable, "-m", "infra.rehearsal.hub", "--root", str(directory / "root"), "--host", "127.0.0.1"]
    command += ["--port", "0", "--inject-dir", str(inject), "--token", TOKEN, "--page-size", "10"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1]
    yield HubSite(url, commit, inject)
    process.terminate()
    process.wait(30)


@pytest.fixture(scope="session")
def olah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubSite]:
    """olah, serving a git mirror with no upstream."""
    with Supervisor(tmp_path_factory.mktemp("olah")) as supervisor:
        mirrors = supervisor.site_dir / "mirrors"
        commit = olah_site.mirror(mirrors, REPO, FILES)
        yield HubSite(olah_site.start(supervisor, mirrors), commit, mirrors)


@pytest.fixture(params=["fake", "real", "olah"])
def served(request: pytest.FixtureRequest) -> Served:
    """Each implementation in turn."""
    if request.param == "fake":
        return Served(MemoryHub(REPO, "0123456789abcdef" * 2 + "01234567", FILES), "0123456789abcdef" * 2 + "01234567")
    running: HubSite = request.getfixturevalue({"real": "site", "olah": "olah"}[request.param])
    return Served(HfHub(running.url), running.commit)


@pytest.fixture
def hub(site: HubSite) -> HfHub:
    """The adapter on the rehearsal's server."""
    return HfHub(site.url, stall_s=30.0)
