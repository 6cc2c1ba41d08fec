"""A Hub with a small checkpoint, a store and nodes on a private network, and every way to bring the weights to them."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

from infra.rehearsal.hub import publish
from tasks.adapters.store import S3Store, StoreCredentials
from tasks.core.lock import Lock, LockedFile, make_lock
from tests.bench.limited.network import Host, Limits, Network
from tests.bench.limited.programs import Programs, Run, Start

ROOT = Path(__file__).resolve().parents[3]
REPO = "moonshotai/Kimi-K2-Instruct"
_END_S = 30.0


class Site:
    """The servers, and what runs on the nodes; closed, its servers have ended as they should."""

    def __init__(self, directory: Path, limits: Limits, shards_bytes: tuple[int, ...]) -> None:
        self._directory = directory
        self._servers: list[subprocess.Popen[str]] = []
        self._exchanges = 0
        self.network = Network(limits)
        self.lock = _published(directory, shards_bytes)
        hub = self._serve("hub", self.network.hub, "outside")
        store = self._serve("store", self.network.store, "inside")
        credentials = StoreCredentials(store["access_key"], store["secret_key"])
        self.store = S3Store(store["endpoint"], store["bucket"], credentials)
        self.store.put(f"locks/{self.lock.digest}.json", self.lock.to_bytes())
        environment = {
            "HF_ENDPOINT": hub["endpoint"],
            "K2_STORE_ENDPOINT": store["endpoint"],
            "K2_STORE_BUCKET": store["bucket"],
            "K2_STORE_ACCESS_KEY": store["access_key"],
            "K2_STORE_SECRET_KEY": store["secret_key"],
        }
        self._programs = Programs(directory / "runs", environment)

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            assert server.stdin is not None
            server.stdin.close()
        for server in self._servers:
            server.wait(_END_S)

    def _serve(self, what: str, host: Host, bridge: str) -> dict[str, str]:
        place, log = self._directory / what, self._directory / f"{what}.log"
        argv = [sys.executable, "-m", "tests.bench.limited.servers", what, str(place), host.addresses[bridge]]
        with log.open("w") as errors:
            server = host.start(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT)
        self._servers.append(server)
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line:
            raise RuntimeError(f"no {what}:\n{log.read_text()[-1500:]}")
        return dict(json.loads(line))

    def outside_bytes(self) -> int:
        """Return what has come from the Hub so far, headers of packets included."""
        argv = ["ip", "-s", "-j", "link", "show", "out-hub"]
        shown = subprocess.run(argv, capture_output=True, check=True, timeout=30)
        return int(json.loads(shown.stdout)[0]["stats64"]["rx"]["bytes"])

    def empty_store(self) -> None:
        """Take every blob out of the store."""
        for item in self.store.list_objects("blobs/"):
            self.store.delete(item.key)

    def empty_nodes(self) -> None:
        """Take everything from the nodes' disks."""
        shutil.rmtree(self._directory / "nodes", ignore_errors=True)

    def from_filled_store(self, nodes: int) -> Run:
        """Bring all of it from the store onto the nodes."""
        return self._programs.run([self._stage(host) for host in self.network.add_nodes(nodes)])

    def through_store(self, nodes: int, pullers: int) -> Run:
        """Fill the store, and stage each file from it as soon as it is there."""
        hosts = self.network.add_nodes(nodes)
        share = ["--lock-digest", self.lock.digest, "--of", str(pullers), "--puller"]
        pulls = [Start("pull", hosts[index % nodes], [*share, str(index)]) for index in range(pullers)]
        return self._programs.run([*pulls, *(self._stage(host, "--source-wait-s", "60") for host in hosts)])

    def each_from_hub(self, nodes: int) -> Run:
        """Bring all of it from the Hub onto each node."""
        hosts = self.network.add_nodes(nodes)
        return self._programs.run([self._exchange(host, [host]) for host in hosts])

    def exchanged(self, nodes: int) -> Run:
        """Bring its share from the Hub onto each node, and the rest from the others."""
        hosts = self.network.add_nodes(nodes)
        self._exchanges += 1
        return self._programs.run([self._exchange(host, hosts) for host in hosts])

    def _stage(self, host: Host, *more: str) -> Start:
        return Start("stage", host, [*self._place(host), *more])

    def _exchange(self, host: Host, party: list[Host]) -> Start:
        names = ",".join(each.name for each in party)
        return Start("exchange", host, [*self._place(host), "--nodes", names, "--run", f"run-{self._exchanges}"])

    def _place(self, host: Host) -> list[str]:
        root = self._directory / "nodes" / host.name
        root.mkdir(parents=True, exist_ok=True)
        node = ["--node", host.name, "--node-uid", f"uid-{host.name}"]
        return ["--lock-digest", self.lock.digest, "--root", str(root), *node]


def _published(directory: Path, shards_bytes: tuple[int, ...]) -> Lock:
    """Publish a checkpoint of random bytes at the Hub and return its lock."""
    source, files = random.Random(1), []
    checkpoint = directory / "checkpoint"
    checkpoint.mkdir()
    for number, size in enumerate(shards_bytes, start=1):
        path, data = f"model-{number}-of-{len(shards_bytes)}.safetensors", source.randbytes(size)
        (checkpoint / path).write_bytes(data)
        files.append(LockedFile(path, size, "shard", hashlib.sha256(data).hexdigest()))
    return make_lock(REPO, publish(directory / "hub", REPO, checkpoint), files)
