"""A site whose pullers and stagers take time: each sleep of the clock brings one blob, and stagers wait for all."""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Callable, Mapping
from typing import Any

from tasks.core.errors import K2Error
from tasks.core.lock import Lock, lock_from_data
from tasks.ports import Object
from tasks.steps.acceptance import lock_step
from tasks.steps.context import Subject
from tests.fakes.checkpoints import REPO, REVISION
from tests.fakes.small_world import World, release


class Piecemeal(World):
    """A world in which Jobs go on while somebody sleeps. Jobs that nobody waits for go on with `work`.

    `fail` are errors of Jobs by the beginning of their names, each with how many blobs have to be pulled before it.
    """

    def __init__(self, nodes: int = 3) -> None:
        self.running: dict[str, Object] = {}
        self.fail: dict[str, tuple[int, K2Error]] = {}
        self.pulled = 0
        self.held = False
        """Whether pullers stand still; they do until the first stager was started, too."""
        self._fetched: dict[str, int] = {}
        self.on_work: list[Callable[[], None]] = []
        self._one = threading.RLock()
        super().__init__(nodes=nodes)
        self.clock.on_sleep.append(lambda now: self.work())
        self.made: Subject = self.subject(release())
        lock_step(self.ports("setup"), REPO, REVISION)

    @property
    def lock(self) -> Lock:
        return self.made.lock

    def options(self, name: str) -> dict[str, str]:
        """Return the options of a Job that was started."""
        return _options(self.cluster.objects["Job", name])

    def work(self) -> None:
        """Let a little time pass for all Jobs."""
        with self._one:
            for act in self.on_work:
                act()
            for name in [name for name in self.running if ("Job", name) not in self.cluster.objects]:
                del self.running[name]  # deleted: its program was told to stop
            for name, job in list(self.running.items()):
                error = next(
                    (e for start, (n, e) in self.fail.items() if name.startswith(start) and self.pulled >= n), None
                )
                if error is not None:
                    self._end(job, error.as_data())
                elif name.startswith("k2-pull-"):
                    self._pull_one(job)
                elif name.startswith("k2-stage-") and self._complete(_lock_of(self, job)):
                    self._end(job, None)

    def _failure(self, name: str) -> K2Error | None:
        due = (error for start, (after, error) in self.fail.items() if name.startswith(start) and self.pulled >= after)
        return next(due, None)

    def _run_job(self, job: Object) -> None:
        if job["metadata"]["name"].startswith(("k2-pull-", "k2-stage-")):
            self.jobs_run.append(job["metadata"]["name"])
            self.running[job["metadata"]["name"]] = job
        else:
            super()._run_job(job)

    def _pull_one(self, job: Object) -> None:
        options, lock = _options(job), _lock_of(self, job)
        for file in lock.files[int(options["--puller"]) :: int(options["--of"])]:
            key = f"blobs/{file.sha256}"
            if f"{key}.ok" not in self.store.objects:
                if not self.held and any(name.startswith("k2-stage-") for name in self.jobs_run):
                    self._fetched[options["--puller"]] = self._fetched.get(options["--puller"], 0) + file.size_bytes
                    self.store.objects[key], self.store.objects[f"{key}.ok"] = self.hub.files[file.path], b"{}"
                    self.pulled += 1
                return
        self._end(job, None)

    def _program(self, module: str, options: Mapping[str, str]) -> Object:
        if module == "tasks.node.pull":
            return {"bytes_fetched": self._fetched.pop(options["--puller"], 0)}
        return super()._program(module, options)

    def _complete(self, lock: Lock) -> bool:
        return all(f"blobs/{file.sha256}.ok" in self.store.objects for file in lock.files)

    def _end(self, job: Object, error: Object | None) -> None:
        name = job["metadata"]["name"]
        del self.running[name]
        self.broken_jobs = {name: error} if error else {}
        super()._run_job(job)
        self.jobs_run.pop()


def _options(job: Object) -> dict[str, Any]:
    words = shlex.split(shlex.join(job["spec"]["template"]["spec"]["containers"][0]["args"]))
    return dict(zip(*[iter(words)] * 2, strict=True))


def _lock_of(world: World, job: Object) -> Lock:
    return lock_from_data(json.loads(world.store.objects[f"locks/{_options(job)['--lock-digest']}.json"]))
