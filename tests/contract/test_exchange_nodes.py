"""An exchange as it runs on nodes: real processes on addresses of their own, a real Hub client, real SeaweedFS."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from infra.rehearsal import objectstore
from infra.rehearsal.addresses import SubnetLease
from infra.rehearsal.hub import publish
from tasks.adapters.store import S3Store, StoreCredentials
from tasks.core.lock import Lock, LockedFile, classify, make_lock
from tasks.core.marker import MARKER_FILE
from tasks.core.ownership import deal
from tasks.core.standing import Note, note_from_bytes
from tasks.node.verified_file import PARTIAL_DIR
from tests.contract.slow_relay import relayed

REPO = "moonshotai/Kimi-K2-Instruct"
NODES = ("node-1", "node-2", "node-3", "node-4")
SHARDS, SHARD_BYTES = 12, 1_000_000
SECRET = "a-secret-that-must-not-be-printed"


@dataclass
class Outcome:
    code: int
    message: dict[str, Any]
    text: str


@dataclass
class Site:
    directory: Path
    store: S3Store
    environment: dict[str, str]
    files: dict[str, bytes]
    lock: Lock
    hub_url: str
    subnet: SubnetLease
    runs: int = 0

    def start(self, node: str, run: str, **environment: str) -> Running:
        return Running(self, node, run, environment)

    def all(self, *nodes: str) -> dict[str, Outcome]:
        self.runs += 1
        started = {node: self.start(node, f"run-{self.runs}") for node in nodes or NODES}
        return {node: running.end() for node, running in started.items()}

    def directory_of(self, node: str) -> Path:
        return self.directory / node / self.lock.model_dir

    def assert_staged(self, *nodes: str) -> None:
        for node in nodes or NODES:
            directory = self.directory_of(node)
            found = {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
            assert self.store.get(f"markers/{node}/{self.lock.digest}.json")[0] == found.pop(MARKER_FILE)
            assert found == self.files

    def pulled(self) -> dict[str, int]:
        """Bytes that the Hub has served, by path."""
        stats = requests.get(f"{self.hub_url}/_rehearsal/stats", timeout=30).json()
        prefix = f"{REPO}/{self.lock.revision}/"
        return {
            path.removeprefix(prefix): row["bytes_served"]
            for path, row in stats["by_path"].items()
            if path.startswith(prefix)
        }

    def notes(self) -> list[Note]:
        keys = [item.key for item in self.store.list_objects(f"exchange/{self.lock.digest}/")]
        return [note for key in keys if (note := note_from_bytes(self.store.get(key)[0])) is not None]


class Running:
    """One node of an exchange, as a process."""

    def __init__(self, site: Site, node: str, run: str, environment: dict[str, str]) -> None:
        root = site.directory / node
        root.mkdir(exist_ok=True)
        self.log = site.directory / f"{node}.termination"
        self.log.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tasks.node.exchange", "--lock-digest", site.lock.digest, "--root", str(root)]
        command += ["--node", node, "--node-uid", f"uid-{node}", "--nodes", ",".join(NODES), "--run", run]
        command += ["--lost-s", "10", "--join-s", "60"]
        address = site.subnet.address(9, 1 + NODES.index(node))
        own = {"POD_IP": address, "K2_TERMINATION_LOG": str(self.log)}
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=site.environment | own | environment,
        )

    def end(self) -> Outcome:
        out, err = self.process.communicate(timeout=90)
        message = json.loads(self.log.read_text()) if self.log.exists() else {}
        assert SECRET not in out + err + json.dumps(message)
        return Outcome(self.process.returncode, message, out + err)


@pytest.fixture
def site(seaweedfs: objectstore.ObjectStore, tmp_path: Path) -> Iterator[Site]:
    """A Hub with one revision, an empty bucket that knows the lock, and addresses for four nodes."""
    source = random.Random(5)
    files = {f"model-{n}-of-{SHARDS}.safetensors": source.randbytes(SHARD_BYTES + n) for n in range(1, SHARDS + 1)}
    files["config.json"] = b"{}\n"
    (tmp_path / "checkpoint").mkdir()
    for path, data in files.items():
        (tmp_path / "checkpoint" / path).write_bytes(data)
    commit = publish(tmp_path / "hub", REPO, tmp_path / "checkpoint")
    digests = {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}
    lock = make_lock(REPO, commit, [LockedFile(p, len(d), classify(p), sha256=digests[p]) for p, d in files.items()])
    command = [sys.executable, "-m", "infra.rehearsal.hub", "--root", str(tmp_path / "hub"), "--host", "127.0.0.1"]
    hub = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert hub.stdout is not None
    url = hub.stdout.readline().split()[-1]
    bucket = f"exchange-{os.getpid()}"
    keys = seaweedfs.keys
    store = S3Store(seaweedfs.endpoint, bucket, StoreCredentials(keys.access_key, keys.secret_key))
    store.ensure_bucket()
    store.put(f"locks/{lock.digest}.json", lock.to_bytes())
    environment = {
        **os.environ,
        "K2_STORE_ENDPOINT": seaweedfs.endpoint,
        "K2_STORE_BUCKET": bucket,
        "K2_STORE_ACCESS_KEY": keys.access_key,
        "K2_STORE_SECRET_KEY": keys.secret_key,
        "HF_ENDPOINT": url,
        "HF_TOKEN": SECRET,
    }
    with SubnetLease.acquire() as subnet:
        yield Site(tmp_path, store, environment, files, lock, url, subnet)
    hub.terminate()
    hub.wait(30)
    signed = keys.headers("DELETE", f"{seaweedfs.host}:{seaweedfs.port}", f"/{bucket}")
    requests.delete(f"{seaweedfs.endpoint}/{bucket}", headers=signed, timeout=30).raise_for_status()


def wait_for(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_each_shard_leaves_the_hub_once(site: Site) -> None:
    outcomes = site.all()
    assert {node: outcome.code for node, outcome in outcomes.items()} == dict.fromkeys(NODES, 0), outcomes
    site.assert_staged()
    assert site.pulled() == {path: len(data) for path, data in site.files.items()}
    assert {outcome.message["bytes_written"] for outcome in outcomes.values()} == {site.lock.total_bytes}


def test_an_owner_that_is_killed_in_a_file_is_replaced_and_comes_back(site: Site) -> None:
    owners = deal(site.lock.files, NODES)
    with relayed(site.hub_url, "127.0.0.1", slow_after_bytes=300_000, bytes_per_s=50_000) as slow:
        running = {node: site.start(node, "run-1") for node in NODES if node != "node-2"}
        dying = site.start("node-2", "run-1", HF_ENDPOINT=slow)
        partial = site.directory_of("node-2") / PARTIAL_DIR
        wait_for(lambda: partial.is_dir() and any(temp.stat().st_size > 0 for temp in partial.glob("*")))
        wait_for(lambda: len(site.notes()) == 4)
        tokens = [note.token for note in site.notes()]
        seen = [
            Path(f"/proc/{r.process.pid}/{name}").read_bytes()
            for r in running.values()
            for name in ("cmdline", "environ")
        ]
        dying.process.send_signal(signal.SIGKILL)
        dying.process.wait(30)
    outcomes = {node: one.end() for node, one in running.items()}
    assert {outcome.code for outcome in outcomes.values()} == {0}, outcomes
    site.assert_staged(*running)
    assert not (site.directory_of("node-2") / MARKER_FILE).exists()
    for path, data in site.files.items():
        found = site.directory_of("node-2") / path
        assert not found.exists() or found.read_bytes() == data
    pulled = site.pulled()
    assert {path for path, count in pulled.items() if count > len(site.files[path])} <= {
        file.path for file in site.lock.files if owners[file.sha256] == "node-2"
    }
    for token in tokens:
        assert len(token) > 40
        assert not [text for text in seen if token.encode() in text]
        assert not [outcome for outcome in outcomes.values() if token in outcome.text]
    again = site.all()
    assert {outcome.code for outcome in again.values()} == {0}, again
    site.assert_staged()
    # What the killed one lacks it gets from the others, and nobody else writes a byte.
    assert site.pulled() == pulled
    written = {node: outcome.message["bytes_written"] for node, outcome in again.items()}
    assert written.pop("node-2") > 0
    assert set(written.values()) == {0}
