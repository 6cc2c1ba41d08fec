"""A site in memory whose nodes have real disks: its Jobs run the real programs on directories of the test."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.core.lock import Lock
from tasks.node.collect import Collector, publish, read_order
from tasks.node.program import Stop
from tasks.node.repair import Place
from tasks.node.scrub import Pace, Scrubber
from tasks.node.sources import StoreSource
from tasks.node.stage import Node, Stager
from tasks.node.stored_lock import read_lock
from tasks.ports import Object
from tests.fakes.small_world import World


@contextmanager
def quick_disks() -> Iterator[Path]:
    """Yield a directory for the nodes' disks, in memory where that can be: it is fsync that takes long."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None, prefix="k2-disks-") as path:
        yield Path(path)


class DiskWorld(World):
    """A world in memory, with a directory for each node's weights."""

    def __init__(self, disks: Path, nodes: int = 6, **site_changes: Any) -> None:
        self.disks = disks
        self.before_job: dict[str, Any] = {}
        """By the beginning of a Job's name: called with its options before its program runs."""
        super().__init__(nodes, **site_changes)

    def root(self, node: str) -> Path:
        """Return a node's directory for weights."""
        path = self.disks / node
        path.mkdir(parents=True, exist_ok=True)
        return path

    def directory(self, node: str, lock: Lock) -> Path:
        """Return where a node keeps the files of a lock."""
        return self.root(node) / lock.model_dir

    def labels(self, node: str) -> set[str]:
        """Return the first digits of the locks that a node's labels name."""
        found = self.cluster.objects["Node", node]["metadata"].get("labels") or {}
        return {key.partition("/")[2] for key in found if key.startswith("staged.k2-release.io/")}

    def programs(self) -> list[tuple[str, Mapping[str, str]]]:
        """Return the Jobs that are there: each with its program's options."""
        jobs = self.cluster.list_objects("Job")
        return [(job["metadata"]["name"], _options(job)) for job in jobs]

    def _run_job(self, job: Object) -> None:
        for start, act in self.before_job.items():
            if job["metadata"]["name"].startswith(start):
                act(_options(job))
        super()._run_job(job)

    def _program(self, module: str, options: Mapping[str, str]) -> Object:
        if module not in ("tasks.node.stage", "tasks.node.scrub", "tasks.node.collect"):
            return super()._program(module, options)
        node, stop = options["--node"], Stop()
        root = self.root(node)
        if module == "tasks.node.collect":
            collector, order = Collector(root, node, stop), options.get("--order", "")
            done = collector.carry_out(read_order(self.store, order)) if order else None
            return publish(self.store, collector.list(), order, done, stop)
        lock, source = read_lock(self.store, options["--lock-digest"]), StoreSource(self.store)
        if module == "tasks.node.stage":
            if "--source-wait-s" in options:
                list(self._pull(lock, 0, 1))  # it would wait for the pull that runs beside it
            stager = Stager(source, self.store, root, lock, Node(node, options["--node-uid"]), 0, stop)
            return dict(stager.stage(threads=1, lock_wait_s=1.0))
        place = Place(root, lock, node, options["--node-uid"])
        return Scrubber(place, [source], self.store, Pace(lock_wait_s=1.0), stop).scrub()


def _options(job: Object) -> dict[str, str]:
    args = job["spec"]["template"]["spec"]["containers"][0]["args"]
    return dict(zip(*[iter(shlex.split(shlex.join(args)))] * 2, strict=True))
