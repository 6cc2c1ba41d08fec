"""Keeps one child at the work of a pull: ends it where it stands, starts another, and says in the end what was seen.

The second and third rung of what a pull does about a source that fails: the child's own threads go on where a stream
broke (tasks.node.steady_stream); a child of which a file stands in spite of that is killed, and a fresh one takes up
the uploads that it left, the file that stood last of all; the third time the pull fails. A child that dies (out of
memory: SIGKILL) is replaced by one with half the threads. Standard library only: this process must stay small.
"""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks.core.errors import After, K2Error, UnavailableError, error_from_data
from tasks.node.byte_watch import ByteWatch, Patience, Stall
from tasks.node.program import ProgressLines, Stop, say, stopped
from tasks.node.watched_child import WatchedChild

_LOOK_S = 0.25
_GRACE_S = 1.0
_STOP_GRACE_S = 8.0
_RESTART_S = 1.0
_MOVED_BYTES = 2800

Start = Callable[[int, Sequence[str]], WatchedChild]


@dataclass(frozen=True)
class _Moved:
    """What all children together have done for one file."""

    hub_bytes: int = 0
    seconds: float = 0.0
    streams: int = 0

    def plus(self, line: Mapping[str, Any]) -> _Moved:
        """Return this and what the present child tells of the file."""
        return _Moved(
            self.hub_bytes + line["hub_bytes"],
            round(self.seconds + line["seconds"], 1),
            self.streams + line["streams"],
        )


@dataclass
class Account:
    """What children have told of their files, all together."""

    plan: Mapping[str, int] | None = None
    done: set[str] = field(default_factory=set)
    _before: dict[str, _Moved] = field(default_factory=dict)
    _now: dict[str, _Moved] = field(default_factory=dict)
    _done_bytes: dict[str, int] = field(default_factory=dict)

    def heard(self, line: Mapping[str, Any]) -> None:
        """Take in one line."""
        if "plan" in line and self.plan is None:
            self.plan = dict(line["plan"])
        for file in line.get("files", ()):
            path = file["path"]
            self._now[path] = self._before.get(path, _Moved()).plus(file)
            self._done_bytes[path] = file["offset_bytes"]
            if file["done"]:
                self.done.add(path)

    def child_ended(self) -> None:
        """Keep what the child that is gone has told."""
        self._before |= self._now
        self._done_bytes = {path: count for path, count in self._done_bytes.items() if path in self.done}

    @property
    def hub_bytes(self) -> int:
        """Bytes that came from the Hub, those of tries that failed included."""
        return sum(moved.hub_bytes for moved in self._now.values())

    @property
    def done_bytes(self) -> int:
        """Bytes that are through."""
        return sum(self._done_bytes.values())

    def moved(self) -> dict[str, Any]:
        """Return path, bytes from the Hub, seconds and streams of each file, slowest first, as many as fit."""
        rows = sorted(self._now.items(), key=lambda item: -item[1].seconds)
        listed: list[list[Any]] = []
        room = _MOVED_BYTES
        for path, moved in rows:
            row = [path, moved.hub_bytes, moved.seconds, moved.streams]
            room -= len(json.dumps(row)) + 2
            if room < 0:
                break
            listed.append(row)
        left_out = len(rows) - len(listed)
        return {"moved": listed, **({"moved_left_out": left_out} if left_out else {})}


class Supervision:
    """Runs children one after another until one has done the work.

    Args:
        start: starts a child with so many threads, which leaves the named files for last.
        threads: how many the first one gets.
        patience: when a child counts as standing.
        stop: set by signals.
        processes: so many are tried one after another on a file that stands, or while nothing gets done.
        now: a clock that is not set.
    """

    def __init__(
        self,
        start: Start,
        threads: int,
        patience: Patience,
        stop: Stop,
        *,
        processes: int = 3,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._threads = threads
        self._patience = patience
        self._stop = stop
        self._most = processes
        self._now = now
        self._began = now()
        self._children = 0
        self._stalls: Counter[str] = Counter()
        self._deaths = 0
        self._account = Account()
        self._progress: ProgressLines | None = None

    def run(self) -> dict[str, Any]:
        """Return the result of the work.

        Raises:
            K2Error: what the child said; or UnavailableError when children stand or die again and again.
        """
        try:
            while True:
                ended = self._one_child()
                if isinstance(ended, dict):
                    return self._result(ended)
                wait_s = _RESTART_S * 2.0 ** (self._children - 1)
                say(f"starting again in {wait_s:g} s")
                self._stop.sleep(min(wait_s, self._patience.window_s))
        except K2Error as error:
            error.details = {**error.details, **self._figures()}
            raise
        finally:
            if self._progress is not None:
                self._progress.finish()

    def _one_child(self) -> dict[str, Any] | None:
        """Follow a child to its end; return its outcome, or None if another one is to be started."""
        done_before = len(self._account.done)
        self._children += 1
        child = self._start(self._threads, [path for path, _ in self._stalls.most_common()])
        try:
            ended = self._follow(child)
        finally:
            # Also where something went wrong here: no child is left behind.
            status = child.end(_STOP_GRACE_S if self._stop.is_set() else _GRACE_S)
            self._account.child_ended()
        if isinstance(ended, dict):
            return ended
        if len(self._account.done) > done_before:
            self._deaths = 0
        if isinstance(ended, Stall) and ended.path:
            self._stood(ended)
        else:
            self._died(status, ended)
        return None

    def _follow(self, child: WatchedChild) -> dict[str, Any] | Stall | None:
        """Return a child's outcome, what is seen of it if it stands, or None if it is dead."""
        watch = ByteWatch(self._patience, self._now())
        while True:
            for line in child.lines(_LOOK_S):
                watch.heard(line, self._now())
                self._account.heard(line)
                if "error" in line:
                    raise stopped() if self._stop.is_set() else error_from_data(line["error"])
                if "outcome" in line:
                    return dict(line["outcome"])
            self._show()
            self._stop.check()
            if child.silent:
                return None
            if stall := watch.stall(self._now()):
                return stall

    def _stood(self, stall: Stall) -> None:
        self._stalls[stall.path] += 1
        say(f"killed the transfers: {stall}")
        if self._stalls[stall.path] < self._most:
            return
        raise UnavailableError(
            "K2-UNA-001",
            f"A transfer stood still under {self._most} processes one after another.",
            where=stall.path,
            got=f"{stall.moved_bytes} bytes moved in {stall.within_s:.0f} s, at byte {stall.offset_bytes} of "
            f"{stall.size_bytes}" + (f"; last error: {stall.last_error}" if stall.last_error else ""),
            expected=f"at least {self._patience.min_bytes_per_s} bytes/s",
            hint="Look at the Hub and the store, and at the way to them; run the same command again, it resumes.",
            retry=After(60.0),
        )

    def _died(self, status: int, stall: Stall | None) -> None:
        self._deaths += 1
        how = f"killed, as {stall}" if stall else _death(status)
        say(f"the transfers died: {how}")
        if self._deaths >= self._most:
            raise UnavailableError(
                "K2-UNA-001",
                f"The process that transfers died {self._most} times and finished nothing meanwhile.",
                got=how,
                expected="a process that ends by itself",
                hint="If it was killed for memory, give the Job more, or fewer threads. Run the same command again.",
                retry=After(60.0),
            )
        if stall is None and status == -signal.SIGKILL:
            self._threads = max(1, self._threads // 2)

    def _show(self) -> None:
        plan = self._account.plan
        if plan is None:
            return
        if self._progress is None:
            self._progress = ProgressLines(plan["missing_bytes"], plan["missing"])
        self._progress.show(self._account.done_bytes, len(self._account.done))

    def _result(self, outcome: Mapping[str, Any]) -> dict[str, Any]:
        plan = self._account.plan or {"files": 0, "missing": 0, "missing_bytes": 0}
        self._show()
        if self._progress is not None:
            # Another puller may have brought some meanwhile.
            self._progress.show(plan["missing_bytes"], plan["missing"])
        present = plan["files"] - plan["missing"]
        return {"files": plan["files"], "files_present": present, **outcome, **self._figures()}

    def _figures(self) -> dict[str, Any]:
        return {
            "bytes_fetched": self._account.hub_bytes,
            "seconds": round(self._now() - self._began, 1),
            "processes": self._children,
            **self._account.moved(),
        }


def _death(status: int) -> str:
    if status == -signal.SIGKILL:
        return "killed by SIGKILL from outside (out of memory?)"
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
