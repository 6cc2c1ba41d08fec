"""A rehearsal site for scenario tests: real servers, started by `k2ctl rehearse` itself and stopped at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks import wiring
from tasks.adapters.cluster import KubeCluster
from tasks.progress import TerminalProgress
from tasks.steps.context import Ports

K2CTL = str(Path(sys.executable).parent / "k2ctl")


@dataclass
class Run:
    """How one command ended."""

    code: int
    out: str
    err: str

    def data(self) -> dict[str, Any]:
        """The JSON document that standard output is."""
        return dict(json.loads(self.out))


@dataclass
class Site:
    """A kept site and the commands that are run against it."""

    directory: Path
    env: dict[str, str] = field(default_factory=dict)

    def k2ctl(self, *args: str, timeout_s: float = 300) -> Run:
        """Run k2ctl and wait for it."""
        done = subprocess.run([K2CTL, *args], env=self.env, capture_output=True, text=True, timeout=timeout_s)
        return Run(done.returncode, done.stdout, done.stderr)

    def start(self, *args: str) -> subprocess.Popen[str]:
        """Start k2ctl without waiting."""
        return subprocess.Popen([K2CTL, *args], env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def ports(self) -> Ports:
        """Ports of the site, for looking at it: as administrator, or it would count as what the pipeline does."""
        ports = wiring.connect(str(self.directory / "site.yaml"), "test", TerminalProgress())
        admin = KubeCluster(str(self.directory / "pki" / "admin.kubeconfig"), ports.site.context, ports.site.namespace)
        return replace(ports, cluster=admin)

    def release(self, base: str, release_id: str, **changes: Any) -> str:
        """Write a release that differs from another one in some fields and return its id."""
        folder = self.directory / "releases"
        data = yaml.safe_load((folder / f"{base}.yaml").read_text()) | {"id": release_id} | changes
        (folder / f"{release_id}.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
        return release_id

    def gates(self, base: str) -> dict[str, Any]:
        """The gates of a release file."""
        return dict(yaml.safe_load((self.directory / "releases" / f"{base}.yaml").read_text())["gates"])

    def client(self) -> dict[str, Any]:
        """The user client's counts so far."""
        return dict(json.loads((self.directory / "client.json").read_text()))

    def hub_bytes(self) -> int:
        """Bytes of model files that the Hub has served."""
        import urllib.request

        endpoint = yaml.safe_load((self.directory / "site.yaml").read_text())["hub"]["endpoint"]
        with urllib.request.urlopen(f"{endpoint}/_rehearsal/stats", timeout=10) as answer:
            return int(json.load(answer)["bytes_served"])

    def flow_pids(self) -> list[int]:
        """Processes that run a flow of this site: descendants of its Prefect worker."""
        state = json.loads((self.directory / "state.json").read_text())
        worker = next(p["pid"] for p in state["processes"] if p["name"] == "prefect-worker")
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                except OSError:
                    continue
        found, frontier = [], [worker]
        while frontier:
            children = [pid for pid, parent in parents.items() if parent in frontier]
            found += children
            frontier = children
        return found

    def kill_flow(self) -> int:
        """SIGKILL the processes of the running flow and return how many there were."""
        pids = self.flow_pids()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return len(pids)


def wait_for(what: str, condition: Any, timeout_s: float = 120, every_s: float = 0.1) -> None:
    """Wait until a condition holds; fail with its name otherwise."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(every_s)
    pytest.fail(f"{what}: not within {timeout_s} s")


def rehearse(directory: Path, *args: str, timeout_s: float = 420) -> tuple[Site, Run]:
    """Run `k2ctl rehearse` with a state directory of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"XDG_STATE_HOME": str(directory / "state")}
    env.pop("K2_SITE", None)
    site = Site(directory / "site", env)
    return site, site.k2ctl("rehearse", "--dir", str(site.directory), *args, timeout_s=timeout_s)


@pytest.fixture(scope="module")
def promoted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, dict[str, Any]]]:
    """A site after a whole rehearsal, kept up, with the rehearsal's JSON document."""
    site, run = rehearse(tmp_path_factory.mktemp("promoted"), "--keep", "--json")
    try:
        assert run.code == 0, run.err[-3000:]
        yield site, run.data()
    finally:
        assert site.k2ctl("rehearse", "--stop", "--json").data()["outcome"] in ("stopped", "none-kept")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site on which the older release is live, with users, and nothing else has happened."""
    site, run = rehearse(tmp_path_factory.mktemp("live"), "--site-only", "--json")
    try:
        assert run.code == 0, run.err[-3000:]
        yield site
    finally:
        site.k2ctl("rehearse", "--stop")
