"""A small checkpoint at a real Hub server and in a real store, each reached through a relay that can lie."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

from infra.rehearsal.hub import publish
from infra.rehearsal.objectstore import ObjectStore
from tasks.adapters.hub import HfHub
from tasks.adapters.store import S3Store, StoreCredentials
from tasks.core.lock import Lock, LockedFile, classify, make_lock
from tasks.node import workers
from tests.contract.weights.lying_relay import LyingRelay, lying_relay

REPO = "moonshotai/Kimi-K2-Instruct"
PART_BYTES = 5 * 1024 * 1024  # the least that S3 takes
BIG, FIRST, SECOND = "model-1-of-3.safetensors", "model-2-of-3.safetensors", "model-3-of-3.safetensors"
FILES = {
    BIG: random.Random(1).randbytes(2 * PART_BYTES + 70_001),  # two whole parts and a rest
    FIRST: random.Random(2).randbytes(300_001),
    SECOND: random.Random(3).randbytes(300_001),  # as long as the one before: sizes tell them not apart
    "config.json": b'{"architectures": ["DeepseekV3ForCausalLM"]}\n',
    "tokenization_kimi.py": b"pass\n",
}
STALL_S = 0.5


@dataclass(frozen=True)
class Weights:
    """What every case works on: a lock of small files and one with a shard of several parts, and the relays."""

    lock: Lock
    big_lock: Lock
    hub: LyingRelay
    store: LyingRelay
    keys: StoreCredentials
    bucket: str
    token: str

    def client(self, *, lying: bool = True) -> S3Store:
        """Return a client of the store, through the relay or straight."""
        url = self.store.url if lying else self.store.target
        return S3Store(url, self.bucket, self.keys, stall_s=STALL_S if lying else 30.0, tries=1)

    def hub_client(self, token_file: str = "") -> HfHub:
        """Return a client of the Hub through the relay."""
        return HfHub(self.hub.url, stall_s=STALL_S, token_file=token_file)

    def blob(self, path: str) -> str:
        """Return the key of a file's blob."""
        return f"blobs/{self.big_lock.file(path).sha256}"


def locked(files: dict[str, bytes], commit: str) -> Lock:
    """Return the lock of files."""
    entries = [LockedFile(p, len(d), classify(p), sha256=hashlib.sha256(d).hexdigest()) for p, d in files.items()]
    return make_lock(REPO, commit, entries)


@pytest.fixture(scope="session")
def hub_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The rehearsal's Hub with the files; its URL and the commit."""
    directory = tmp_path_factory.mktemp("weights-hub")
    for path, data in FILES.items():
        (directory / "checkpoint").mkdir(exist_ok=True)
        (directory / "checkpoint" / path).write_bytes(data)
    commit = publish(directory / "root", REPO, directory / "checkpoint")
    command = [sys.executable, "-m", "infra.rehearsal.hub", "--root", str(directory / "root")]
    process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().split()[-1], commit
    process.terminate()
    process.wait(30)


def _weights(seaweedfs: ObjectStore, hub_url: tuple[str, str], bucket: str) -> Iterator[Weights]:
    keys = StoreCredentials(seaweedfs.keys.access_key, seaweedfs.keys.secret_key)
    with lying_relay(hub_url[0]) as hub, lying_relay(seaweedfs.endpoint) as store:
        small = {path: data for path, data in FILES.items() if path != BIG}
        locks = (locked(small, hub_url[1]), locked(FILES, hub_url[1]))
        weights = Weights(*locks, hub, store, keys, bucket, "hf_only_for_these_tests")
        honest = weights.client(lying=False)
        honest.ensure_bucket()
        for lock in locks:
            honest.put(f"locks/{lock.digest}.json", lock.to_bytes())
        yield weights


@pytest.fixture(scope="session")
def filled_once(seaweedfs: ObjectStore, hub_url: tuple[str, str]) -> Iterator[Weights]:
    """A bucket that holds every blob."""
    for weights in _weights(seaweedfs, hub_url, "k2-weights-filled"):
        honest = weights.client(lying=False)
        for file in weights.big_lock.files:
            honest.put(f"blobs/{file.sha256}", FILES[file.path])
            honest.put(f"blobs/{file.sha256}.ok", json.dumps({"size_bytes": file.size_bytes}).encode())
        yield weights


@pytest.fixture
def filled(filled_once: Weights) -> Iterator[Weights]:
    """The same, with relays that are honest when a case begins."""
    yield filled_once
    filled_once.store.be_honest()
    filled_once.hub.be_honest()


@pytest.fixture
def empty(seaweedfs: ObjectStore, hub_url: tuple[str, str], request: pytest.FixtureRequest) -> Iterator[Weights]:
    """A bucket of one case alone that holds the lock only."""
    bucket = "w" + hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:12]
    yield from _weights(seaweedfs, hub_url, bucket)
    # Each bucket holds seven of the server's volumes; there would not be enough for all cases.
    signed = seaweedfs.keys.headers("DELETE", f"{seaweedfs.host}:{seaweedfs.port}", f"/{bucket}")
    requests.delete(f"{seaweedfs.endpoint}/{bucket}", headers=signed, timeout=30).raise_for_status()


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the waits between tries: what is tried again, and how often, stays as it is."""
    monkeypatch.setattr(workers._Linked, "sleep", lambda stop, seconds: stop.check())


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's bytes, read anew."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
