"""What the supervisor of a pull does about children that stand, die, fail or are told to stop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tasks.core.errors import After, InputError, IntegrityError, UnavailableError
from tasks.node import supervision
from tasks.node.byte_watch import Patience
from tasks.node.program import _MESSAGE_LIMIT_BYTES, Stop, StoppedError
from tasks.node.supervision import Account, Supervision

PLAN = {"plan": {"files": 5, "missing": 2, "missing_bytes": 300}}
DONE = {"outcome": {"source": "http://hub", "verified_anew": 0, "orphans": {"uploads": 0, "bytes": 0}}}
A, B = "a.safetensors", "b.safetensors"


def told(path: str, moved: int, *, hub: int = 0, done: bool = False, streams: int = 1, error: str = "") -> Any:
    file = {"path": path, "size_bytes": 200, "offset_bytes": moved, "moved_bytes": moved, "hub_bytes": hub or moved}
    return {"files": [{**file, "streams": streams, "seconds": 2.0, "quiet_s": 0.0, "done": done, "last_error": error}]}


class Child:
    """Tells its lines one a second, then says nothing, stands or dies."""

    def __init__(self, world: World, lines: Sequence[Any], status: int | None) -> None:
        self._world, self._lines, self._status = world, list(lines), status
        self.silent = False
        self.ended: list[float] = []

    def lines(self, timeout_s: float) -> list[Any]:
        self._world.now += 1.0
        if self._lines:
            line = self._lines.pop(0)
            if callable(line):
                line = line()
            return [line]
        self.silent = self._status is not None
        return [] if self.silent else [{}]

    def end(self, grace_s: float) -> int:
        self.ended.append(grace_s)
        return -15 if self._status is None else self._status


class World:
    """A clock, and the children that will be started; the last one is started for good."""

    def __init__(self, *children: tuple[Sequence[Any], int | None]) -> None:
        self.now = 0.0
        self.stop = Stop()
        self.started: list[tuple[int, list[str]]] = []
        self.children: list[Child] = []
        self._plans = list(children)

    def start(self, threads: int, last: Sequence[str]) -> Any:
        self.started.append((threads, list(last)))
        lines, status = self._plans[min(len(self.started), len(self._plans)) - 1]
        self.children.append(Child(self, lines, status))
        return self.children[-1]

    def run(self, threads: int = 4) -> dict[str, Any]:
        patience = Patience(window_s=9.0, min_bytes_per_s=10, silent_s=30.0)
        return Supervision(self.start, threads, patience, self.stop, now=lambda: self.now).run()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_RESTART_S", 0.0)


def test_one_child_that_does_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    world = World(([PLAN, told(A, 100), told(A, 200, done=True), told(B, 100, done=True), DONE], 0))
    result = world.run()
    assert result == {
        "files": 5,
        "files_present": 3,
        **DONE["outcome"],
        "bytes_fetched": 300,
        "seconds": 5.0,
        "processes": 1,
        "moved": [[A, 200, 2.0, 1], [B, 100, 2.0, 1]],
    }
    last = json.loads(capsys.readouterr().out.splitlines()[-1])["progress"]
    assert (last["done_bytes"], last["total_bytes"], last["files_done"], last["files_total"]) == (300, 300, 2, 2)
    assert world.children[0].ended


def test_one_that_stands_is_replaced_and_its_file_comes_last(capsys: pytest.CaptureFixture[str]) -> None:
    world = World(
        ([PLAN, told(A, 100, hub=90, error="K2-UNA-001 ReadTimeout")], None),
        ([PLAN, told(A, 200, hub=200, streams=3, done=True), told(B, 100, done=True), DONE], 0),
    )
    result = world.run()
    assert world.started == [(4, []), (4, [A])]
    assert (result["processes"], result["bytes_fetched"]) == (2, 390)
    assert [A, 290, 4.0, 4] in result["moved"]
    said = capsys.readouterr().err
    assert "a.safetensors: byte 100 of 200; 0 moved in 9.0 s; before that: K2-UNA-001 ReadTimeout" in said


def test_a_file_that_stands_three_times_ends_it_with_what_was_seen() -> None:
    world = World(([PLAN, told(B, 100, done=True), told(A, 100, error="K2-UNA-001 ReadTimeout")], None))
    with pytest.raises(UnavailableError) as caught:
        world.run()
    error = caught.value
    assert len(world.started) == 3
    assert all(child.ended for child in world.children)
    assert (error.code, error.exit_code, error.where) == ("K2-UNA-001", 11, A)
    assert error.got == "0 bytes moved in 9 s, at byte 100 of 200; last error: K2-UNA-001 ReadTimeout"
    assert error.expected == "at least 10 bytes/s"
    assert isinstance(error.retry, After)
    assert error.details["processes"] == 3
    assert [A, 300, 6.0, 3] in error.details["moved"]


def test_one_that_is_killed_for_memory_is_replaced_by_a_smaller_one(capsys: pytest.CaptureFixture[str]) -> None:
    world = World(([PLAN, told(A, 100)], -9), ([PLAN], -9), ([PLAN, told(A, 200, done=True), DONE], 0))
    assert world.run()["processes"] == 3
    assert [threads for threads, _ in world.started] == [4, 2, 1]
    assert "killed by SIGKILL from outside (out of memory?)" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "how"), [(-9, "SIGKILL"), (-11, "SIGSEGV"), (0, "exit code 0"), (1, "exit code 1")])
def test_deaths_without_anything_finished_end_it(status: int, how: str) -> None:
    world = World(([PLAN, told(A, 100)], status))
    with pytest.raises(UnavailableError, match="died 3 times") as caught:
        world.run()
    assert len(world.started) == 3
    assert how in caught.value.got


def test_one_that_finishes_something_before_it_dies_may_die_again() -> None:
    deaths = [([PLAN, told(f"{n}", 10, done=True)], -11) for n in range(8)]
    world = World(*deaths, ([PLAN, DONE], 0))
    assert world.run()["processes"] == 9


def test_one_that_says_nothing_is_replaced() -> None:
    class Mute(Child):
        def lines(self, timeout_s: float) -> list[Any]:
            return super().lines(timeout_s) and []

    world = World(([], None))
    start = world.start
    world.start = lambda threads, last: start(threads, last) and Mute(world, [], None)  # type: ignore[method-assign]
    with pytest.raises(UnavailableError) as caught:
        world.run()
    assert "nothing was heard for 30.0 s" in caught.value.got
    assert world.now < 120


@pytest.mark.parametrize(
    "error",
    [
        IntegrityError("K2-INT-001", "other bytes", where=A, details={"path": A}),
        InputError("K2-INP-002", "no such repository"),
        UnavailableError("K2-UNA-001", "the Hub is away", retry=After(7.0)),
    ],
)
def test_what_a_child_says_is_what_the_pull_says(error: Any) -> None:
    world = World(([PLAN, told(A, 100), {"error": error.as_data()}], 0))
    with pytest.raises(type(error)) as caught:
        world.run()
    assert len(world.started) == 1
    data = caught.value.as_data()
    assert {key: value for key, value in data.items() if key != "details"} == {
        key: value for key, value in error.as_data().items() if key != "details"
    }
    assert data["details"].items() >= {**error.details, "bytes_fetched": 100, "processes": 1}.items()


@pytest.mark.parametrize("says", [[], [{"error": UnavailableError("K2-UNA-001", "late").as_data()}]])
def test_a_stop_ends_the_child_and_says_so(says: list[Any]) -> None:
    def stop() -> Any:
        world.stop.set()
        return says[0] if says else {}

    world = World(([PLAN, told(A, 100), stop], None))
    with pytest.raises(StoppedError):
        world.run()
    assert len(world.children[0].ended) == 1
    assert world.children[0].ended[0] < 20  # the Job's own grace period


def test_a_mistake_here_leaves_no_child_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(([PLAN, {"files": [{"path": A}]}], None))
    with pytest.raises(KeyError):
        world.run()
    assert len(world.children[0].ended) == 1


@pytest.mark.parametrize("files", [0, 3, 80, 2000])
def test_the_result_fits_a_termination_message(files: int) -> None:
    account = Account()
    for n in range(files):
        path = f"model-{n:05}-of-{files:06}.safetensors"
        account.heard(told(path, 17_000_000_000, done=True))
    moved = account.moved()
    result = {"puller": 0, "of": 4, "files": files, "files_present": 0, **DONE["outcome"], **moved}
    assert len(json.dumps(result)) <= _MESSAGE_LIMIT_BYTES - 600
    assert len(moved["moved"]) + moved.get("moved_left_out", 0) == files
    assert len(moved["moved"]) >= min(files, 16)
