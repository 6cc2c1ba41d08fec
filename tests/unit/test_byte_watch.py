"""When a process that moves files counts as standing."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.node.byte_watch import ByteWatch, Patience, Stall

PATIENCE = Patience(window_s=90.0, min_bytes_per_s=10_000, silent_s=120.0)
SIZE = 17_000_000_000


def told(path: str, moved_bytes: int, **more: Any) -> dict[str, Any]:
    file = {"path": path, "moved_bytes": moved_bytes, "offset_bytes": moved_bytes, "size_bytes": SIZE}
    return {"files": [{**file, "quiet_s": 0.0, "done": False, "last_error": "", **more}]}


def run(lines: dict[float, Any], until: float, patience: Patience = PATIENCE) -> tuple[float, Stall] | None:
    """Return when the first stall was seen, and which, looking twice a second; something is told each time."""
    watch, now = ByteWatch(patience, 0.0), 0.0
    while now <= until:
        watch.heard(lines.get(now, {}), now)
        if (stall := watch.stall(now)) is not None:
            return now, stall
        now += 0.5
    return None


def test_a_file_that_moves_is_let_alone() -> None:
    assert run({float(t): told("a", t * 20_000) for t in range(1000)}, 1000.0) is None


def test_a_file_that_stands_is_seen_after_the_window() -> None:
    lines = {float(t): told("a", 7_000_000, last_error="K2-UNA-001 ReadTimeout") for t in range(10, 1000)}
    seen = run(lines, 1000.0)
    assert seen == (100.0, Stall("a", 7_000_000, SIZE, 0, 90.0, "K2-UNA-001 ReadTimeout"))
    assert str(seen[1]) == ("a: byte 7000000 of 17000000000; 0 moved in 90.0 s; before that: K2-UNA-001 ReadTimeout")


def test_one_that_stands_among_others_that_move_is_seen() -> None:
    def both(t: int) -> dict[str, Any]:
        return {"files": told("fast", t * 10**8)["files"] + told("stands", min(t, 200) * 20_000)["files"]}

    seen = run({float(t): both(t) for t in range(1000)}, 1000.0)
    assert seen is not None
    assert seen[1].path == "stands"
    # The rate falls below the least some time before the window holds nothing but silence.
    assert 200.0 < seen[0] <= 290.0


@pytest.mark.parametrize(("bytes_per_s", "stands"), [(9_900, True), (11_000, False)])
def test_a_drip_is_a_stand(bytes_per_s: int, stands: bool) -> None:
    seen = run({float(t): told("a", t * bytes_per_s) for t in range(400)}, 400.0)
    assert (seen is not None) == stands


def test_a_wait_that_was_told_is_none() -> None:
    lines = {float(t): told("a", 1000, quiet_s=600.0 - t) for t in range(600)}
    lines |= {float(t): told("a", 1000) for t in range(600, 1200)}
    seen = run(lines, 1200.0)
    assert seen is not None
    assert seen[0] == 690.0  # a window after the wait, not within it


def test_a_process_that_is_frozen_in_a_wait_is_seen_after_it() -> None:
    watch = ByteWatch(PATIENCE, 0.0)
    watch.heard(told("a", 1000, quiet_s=30.0), 0.0)
    seen = [now for now in range(300) if watch.stall(float(now))]
    assert seen[0] == 120  # the silence, here earlier than the wait and a window


def test_a_file_that_is_done_is_forgotten() -> None:
    assert run({0.0: told("a", 10), 5.0: told("a", 10, done=True)}, 500.0) is None


def test_a_file_that_begins_anew_in_another_try_is_a_moving_one() -> None:
    lines = {float(t): told("a", t * 20_000, offset_bytes=(t % 50) * 20_000) for t in range(500)}
    assert run(lines, 500.0) is None


def test_a_process_that_says_nothing_at_all_is_seen() -> None:
    watch = ByteWatch(PATIENCE, 0.0)
    seen = [now for now in range(200) if watch.stall(float(now))]
    assert seen[0] == 120
    assert str(watch.stall(199.0)) == "nothing was heard for 199.0 s"


def test_time_in_which_nobody_looked_is_no_silence() -> None:
    """A machine that was frozen for an hour: what is watched had no chance to move either."""
    watch = ByteWatch(PATIENCE, 0.0)
    for now in range(60):
        watch.heard(told("a", 10**9), float(now))
        assert watch.stall(float(now)) is None
    assert watch.stall(3600.0) is None
    watch.heard(told("a", 10**9), 3600.5)
    assert watch.stall(3600.5) is None
    assert watch.stall(3604.0) is None
    later = [now for now in range(3605, 3900) if watch.heard(told("a", 10**9), float(now)) or watch.stall(float(now))]
    assert later[0] == 3690
